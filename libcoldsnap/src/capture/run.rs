//! A capture from a finished dump to a finished capsule directory.
//!
//! Order: read the dump, plan every process, write payloads and residuals, rewrite the images, prove them,
//! describe the result. Nothing outside the staging directory changes except the node store, and a payload
//! appears there only whole and verified.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::checkpoint::{Checkpoint, CheckpointError};
use super::content_match::{ContentMatcher, MatchError, MatchOptions, MatchedRun};
use super::descriptor;
use super::earlier::{Earlier, EarlierError};
use super::facts::{
    self, CaptureFacts, CheckpointFacts, FactsError, ImageFacts, ProcessFacts, Tools, WorkerFacts,
};
use super::progress::Progress;
use super::scope::{MappingScope, zero_assuming};
use super::worker::{FileIds, PlannedWorker, WrittenWorker};
use crate::capsule;
use crate::criu::image::{self, ImageError, Magic};
use crate::criu::process::{DumpError, ImageSet, root_mount};
use crate::criu::proto::{FileEntry, MntEntry};
use crate::criu::prove::{self, Unproven};
use crate::criu::remap::{self, RemapError};
use crate::criu::runs::PAGE_SIZE;
use crate::criu::vma_status::FILE_PRIVATE;
use crate::digest::Digest;
use crate::extent::LayoutError;
use crate::format::DocumentError;
use crate::format::recovery_manifest::ModelSource;
use crate::mapped_file::{MapError, MappedFile};
use crate::store::{AdmitError, NodeStore, StoreError};

/// PROT_EXEC of `VmaEntry.prot`.
const PROT_EXEC: u32 = 4;
/// File mode of a residual in the capsule layer, of a payload in the store.
const RESIDUAL_MODE: u32 = 0o100_644;
const PACK_MODE: u32 = 0o100_444;

/// What a capture works on.
#[derive(Debug)]
pub struct CaptureRequest<'a> {
    /// Identifier of the capture.
    pub capture_id: String,
    /// When it began, nanoseconds since 1970.
    pub created_unix_ns: u64,
    /// Name of this host.
    pub host: String,
    /// Directory of the CRIU images.
    pub dump_dir: &'a Path,
    /// The container's root as its processes see it (`/proc/<pid>/root`).
    pub container_root: &'a Path,
    /// Where the capsule layer's tree is made; paths below it are paths in the container.
    pub layer_root: &'a Path,
    /// The node store.
    pub store: &'a NodeStore,
    /// The checkpoint files that tell what is model-owned, if any.
    pub checkpoint: Option<&'a Checkpoint>,
    /// Where the checkpoint comes from.
    pub model_source: Option<ModelSource>,
    /// Where the container sees the checkpoint.
    pub checkpoint_seen: Vec<CheckpointFacts>,
    /// How much memory is mapped.
    pub scope: MappingScope,
    /// Whether established TCP connections are kept at a restore.
    pub keep_tcp: bool,
    /// The captured process.
    pub process: ProcessFacts,
    /// Destinations of the container's bind mounts, without those of an earlier capsule's payloads.
    pub binds: Vec<String>,
    /// Versions of the tools that made the dump.
    pub tools: Tools,
    /// Reference that the capsule image will have.
    pub image_reference: String,
}

/// What a capture made.
#[derive(Debug, Clone, Serialize)]
pub struct CaptureReport {
    /// Identifier of the capture.
    pub capture_id: String,
    /// Digest of `artifact.json`.
    pub artifact: Digest,
    /// One per process with mapped memory.
    pub workers: Vec<WorkerReport>,
    /// Size of the dump's pages in bytes.
    pub dumped_bytes: u64,
    /// Size of the pages that are left in the images, bytes.
    pub pages_image_bytes: u64,
    /// Size of all residuals, bytes.
    pub residual_bytes: u64,
    /// Size of all distinct payloads, bytes.
    pub payload_bytes: u64,
    /// Of these, what the store did not have.
    pub new_payload_bytes: u64,
    /// Whether the store had every payload already.
    pub payload_reused: bool,
    /// Tensor bytes of the checkpoint that were found in memory, as a share of all; absent without a checkpoint
    /// and when every worker maps its payload since its restore.
    pub model_bytes_matched_ratio: Option<f64>,
    /// Bytes that the proof of the rewritten images compared.
    pub proven_bytes: u64,
    /// What narrowed the mapping scope.
    pub scope_narrowed: Vec<String>,
}

/// One worker of a capture.
#[derive(Debug, Clone, Serialize)]
pub struct WorkerReport {
    /// Worker id.
    pub id: String,
    /// Pid in the container.
    pub pid: u32,
    /// Its payload.
    pub payload: Option<Digest>,
    /// Size of the payload in bytes.
    pub payload_bytes: u64,
    /// Number of model extents.
    pub model_extents: usize,
    /// Size of the residual in bytes.
    pub residual_bytes: u64,
    /// Memory areas after the rewrite.
    pub areas: usize,
}

/// Why a capture failed. The dump and the container are as they were.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CaptureError {
    #[error(transparent)]
    Dump(#[from] DumpError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Remap(#[from] RemapError),
    #[error(transparent)]
    Unproven(#[from] Unproven),
    #[error("cannot tell which memory is the model's: {0}")]
    Match(#[from] MatchError),
    #[error(transparent)]
    Map(#[from] MapError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Earlier(#[from] EarlierError),
    #[error(transparent)]
    Facts(#[from] FactsError),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error(transparent)]
    Descriptor(#[from] descriptor::DescriptorError),
    #[error("cannot write the payload into the node store: {0}")]
    Store(#[from] StoreError),
    #[error("the payload that the container maps is not admitted: {0}")]
    Admit(#[from] AdmitError),
    /// A file of the capture could not be written or read.
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    /// A bug of the planner, found before anything is used.
    #[error("process {pid}: the dump does not have all bytes of {start:#x}-{end:#x}")]
    NotPresent { pid: u32, start: u64, end: u64 },
    /// The mount table has no root.
    #[error("the dump's mount table has no root mount")]
    NoRoot,
}

impl CaptureError {
    pub(super) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }
}

/// Turns a dump into a capsule directory below `request.layer_root`.
///
/// # Errors
/// See [`CaptureError`]; the caller removes the staging directory.
pub fn capture(
    request: &CaptureRequest<'_>,
    progress: &mut dyn Progress,
) -> Result<CaptureReport, CaptureError> {
    let dump = ImageSet::read(request.dump_dir)?;
    let earlier = Earlier::find(&dump, request.container_root)?;
    let dumped_bytes = dump.processes.iter().map(|p| p.pages.len() as u64).sum();
    progress.begin("find the model in memory", dumped_bytes);
    let (scope, scope_narrowed) = effective_scope(&dump, request);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let options = MatchOptions { threads, ..MatchOptions::default() };
    let matcher = request.checkpoint.map(|c| ContentMatcher::new(c, options)).transpose()?;
    let mut planned = Vec::new();
    for process in &dump.processes {
        planned.push(PlannedWorker::plan(process, &earlier, matcher.as_ref(), &[], scope)?);
        progress.advance(process.pages.len() as u64);
    }
    // Of all processes together: shards of one model lie in several.
    let mut matched: Vec<MatchedRun> = planned.iter().flat_map(|w| w.matched.iter().copied()).collect();
    for worker in planned.iter_mut().filter(|w| w.matched.is_empty() && w.kept.is_none()) {
        if matched.is_empty() {
            break;
        }
        *worker = PlannedWorker::plan(worker.process, &earlier, matcher.as_ref(), &matched, scope)?;
        matched.extend(&worker.matched);
    }
    if let Some(checkpoint) = request.checkpoint {
        // Else the recovery manifest would point at bytes that are no longer there.
        checkpoint.ensure_unchanged()?;
    }

    let images_dir = request.layer_root.join(capsule::IMAGES_DIR);
    fs::create_dir_all(&images_dir).map_err(|e| CaptureError::io("create", &images_dir, e))?;
    let mut tables = Tables::new(&dump)?;
    let mut written = Vec::new();
    for (worker, rank) in planned.iter().filter(|w| w.is_worker()).zip(0..) {
        let ids = tables.ids(&worker.id);
        let done = worker.write(request, &earlier, ids, rank, progress)?;
        tables.declare(worker, &done, ids);
        written.push((worker, done));
    }

    progress.begin("rewrite the images", dumped_bytes);
    let residuals = earlier.bytes();
    let mut rewritten = BTreeMap::new();
    for worker in &planned {
        let mappings =
            written.iter().find(|(w, _)| w.process.pid == worker.process.pid).map(|(_, done)| &done.mappings);
        let mappings = mappings.map_or(&[][..], Vec::as_slice);
        let result =
            remap::rewrite_process(worker.process, &worker.memory, mappings, &residuals, &images_dir)?;
        rewritten.insert(worker.process.pid, result);
        progress.advance(worker.process.pages.len() as u64);
    }
    tables.write(&images_dir)?;
    copy_rest(&dump, &images_dir)?;
    let proven_bytes = prove_all(request, &dump, &images_dir, &earlier, &written, &tables, progress)?;

    let workers: Vec<WorkerReport> = written
        .iter()
        .map(|(worker, done)| WorkerReport {
            id: worker.id.clone(),
            pid: worker.process.pid,
            payload: done.payload.as_ref().map(|p| *p.digest()),
            payload_bytes: done.payload.as_ref().map_or(0, |p| p.bytes()),
            model_extents: done.model_extents,
            residual_bytes: done.residual_bytes,
            areas: rewritten.get(&worker.process.pid).map_or(0, |r| r.areas),
        })
        .collect();
    write_facts(request, &images_dir, &workers, scope, &scope_narrowed)?;
    let payloads: Vec<_> =
        written.iter().filter_map(|(w, done)| Some((w.id.clone(), done.payload.as_ref()?))).collect();
    let ids: Vec<String> = workers.iter().map(|w| w.id.clone()).collect();
    let model_source = written.iter().find_map(|(_, done)| done.model_source.as_ref());
    let artifact = descriptor::write(request, &ids, &payloads, model_source)?;

    let mut distinct: BTreeMap<Digest, (u64, bool)> = BTreeMap::new();
    for (_, done) in &written {
        if let Some(payload) = &done.payload {
            let entry = distinct.entry(*payload.digest()).or_insert((payload.bytes(), done.payload_reused));
            entry.1 &= done.payload_reused;
        }
    }
    let all_kept = planned.iter().any(|w| w.kept.is_some()) && matched.is_empty();
    let ratio =
        matcher.filter(|m| !all_kept && m.checkpoint().tensor_bytes() > 0).map(|m| m.matched_ratio(&matched));
    Ok(CaptureReport {
        capture_id: request.capture_id.clone(),
        artifact,
        dumped_bytes,
        pages_image_bytes: rewritten.values().map(|r| r.pages_bytes).sum(),
        residual_bytes: workers.iter().map(|w| w.residual_bytes).sum(),
        payload_bytes: distinct.values().map(|(bytes, _)| bytes).sum(),
        new_payload_bytes: distinct.values().filter(|(_, reused)| !reused).map(|(bytes, _)| bytes).sum(),
        payload_reused: !distinct.is_empty() && distinct.values().all(|(_, reused)| *reused),
        model_bytes_matched_ratio: ratio,
        proven_bytes,
        scope_narrowed,
        workers,
    })
}

/// The scope that is safe for the allocators that the processes use, and what narrowed it.
fn effective_scope(dump: &ImageSet, request: &CaptureRequest<'_>) -> (MappingScope, Vec<String>) {
    if request.scope != MappingScope::Large {
        return (request.scope, Vec::new());
    }
    let mut executables: BTreeMap<u64, &str> = BTreeMap::new();
    for process in &dump.processes {
        for vma in
            process.mm.vmas.iter().filter(|v| v.prot() & PROT_EXEC != 0 && v.status() & FILE_PRIVATE != 0)
        {
            let file = dump.files.iter().find(|f| u64::from(f.id()) == vma.shmid());
            if let Some(file) = file {
                executables.insert(vma.shmid(), file.reg.name());
            }
        }
    }
    let mut found = Vec::new();
    for name in executables.values() {
        let path = request.container_root.join(name.trim_start_matches('/'));
        match MappedFile::open(&path) {
            Ok(bytes) => found.extend(zero_assuming(&path, &bytes).map(|what| format!("{name}: {what}"))),
            // What cannot be looked at may be anything.
            Err(error) => found.push(format!("{name}: not readable ({error})")),
        }
    }
    let scope = if found.is_empty() { MappingScope::Large } else { MappingScope::Model };
    (scope, found)
}

/// `files.img` and the mount table of the new images.
struct Tables {
    files: Vec<FileEntry>,
    mounts_name: String,
    mounts: Vec<MntEntry>,
    root: u32,
    next_file: u32,
}

impl Tables {
    fn new(dump: &ImageSet) -> Result<Self, CaptureError> {
        let root = root_mount(&dump.mounts).ok_or(CaptureError::NoRoot)?.mnt_id();
        Ok(Self {
            files: dump.files.clone(),
            mounts_name: dump.mounts_name.clone(),
            mounts: dump.mounts.clone(),
            root,
            next_file: dump.files.iter().map(FileEntry::id).max().unwrap_or(0) + 1,
        })
    }

    /// File ids of a worker: those of an earlier capsule where there are some, else fresh ones.
    fn ids(&mut self, worker: &str) -> FileIds {
        let mut id = |name: &str| {
            let path = container_path(worker, name);
            let known = self.files.iter().find(|f| f.reg.name() == path).map(FileEntry::id);
            known.unwrap_or_else(|| {
                self.next_file += 1;
                self.next_file - 1
            })
        };
        FileIds { pack: id(capsule::PACK_NAME), residual: id(capsule::RESIDUAL_NAME) }
    }

    fn declare(&mut self, worker: &PlannedWorker<'_>, done: &WrittenWorker, ids: FileIds) {
        let mut declare = |id: u32, name: &str, mount: u32, size: u64, mode: u32| {
            let path = container_path(&worker.id, name);
            self.files.retain(|f| f.id() != id);
            let mount = i32::try_from(mount).unwrap_or(-1);
            self.files.push(remap::regular_file(id, &path, mount, size, mode));
        };
        if done.residual_bytes > 0 {
            declare(ids.residual, capsule::RESIDUAL_NAME, self.root, done.residual_bytes, RESIDUAL_MODE);
        }
        if let Some(payload) = &done.payload {
            let destination = container_path(&worker.id, capsule::PACK_NAME);
            let known = self.mounts.iter().find(|m| m.mountpoint() == destination).map(MntEntry::mnt_id);
            let mount = known.unwrap_or_else(|| {
                let id = self.mounts.iter().map(MntEntry::mnt_id).max().unwrap_or(0) + 1;
                // CRIU lists children before their parents; the root comes last.
                self.mounts.insert(0, remap::external_bind(id, self.root, &destination));
                id
            });
            declare(ids.pack, capsule::PACK_NAME, mount, payload.bytes(), PACK_MODE);
        }
    }

    fn write(&self, dir: &Path) -> Result<(), ImageError> {
        let mut image = image::Builder::new("files.img", Magic::Files);
        self.files.iter().try_for_each(|file| image.push(file))?;
        image::write(&dir.join("files.img"), image)?;
        let mut image = image::Builder::new(&self.mounts_name, Magic::Mounts);
        self.mounts.iter().try_for_each(|mount| image.push(mount))?;
        image::write(&dir.join(&self.mounts_name), image)
    }
}

fn container_path(worker: &str, name: &str) -> String {
    format!("/{}/{worker}/{name}", capsule::HYDRATION_DIR)
}

/// Every image that was not rewritten, unchanged.
fn copy_rest(dump: &ImageSet, out: &Path) -> Result<(), CaptureError> {
    for name in dump.names().map_err(|e| CaptureError::io("list", &dump.dir, e))? {
        let (from, to) = (dump.dir.join(&name), out.join(&name));
        let wanted = name.ends_with(".img") || name == "descriptors.json";
        if wanted && !to.exists() {
            fs::hard_link(&from, &to)
                .or_else(|_| fs::copy(&from, &to).map(drop))
                .map_err(|e| CaptureError::io("copy", &from, e))?;
        }
    }
    Ok(())
}

fn prove_all(
    request: &CaptureRequest<'_>,
    dump: &ImageSet,
    images_dir: &Path,
    earlier: &Earlier,
    written: &[(&PlannedWorker<'_>, WrittenWorker)],
    tables: &Tables,
    progress: &mut dyn Progress,
) -> Result<u64, CaptureError> {
    let after = ImageSet::read(images_dir)?;
    let mut files = Vec::new();
    for (worker, done) in written {
        let mut add = |name: &str, path: &Path| -> Result<(), CaptureError> {
            let inside = container_path(&worker.id, name);
            let id = tables.files.iter().find(|f| f.reg.name() == inside).map(FileEntry::id);
            if let Some(id) = id {
                files.push((id, MappedFile::open(path)?));
            }
            Ok(())
        };
        let dir = request.layer_root.join(capsule::worker_dir(&worker.id));
        add(capsule::RESIDUAL_NAME, &dir.join(capsule::RESIDUAL_NAME))?;
        if let Some(payload) = &done.payload {
            add(capsule::PACK_NAME, payload.path())?;
        }
    }
    let after_files = files.iter().map(|(id, bytes)| (*id, &bytes[..])).collect();
    let before_files = earlier.bytes();
    progress.begin("prove the images", dump.processes.iter().map(|p| p.pages.len() as u64).sum());
    let mut proven = 0;
    for before in &dump.processes {
        let Some(now) = after.processes.iter().find(|p| p.pid == before.pid) else {
            return Err(DumpError::Missing {
                dir: images_dir.to_owned(),
                name: format!("mm-{}.img", before.pid),
            }
            .into());
        };
        proven += prove::prove(before, &before_files, now, &after_files)?.bytes;
        progress.advance(before.pages.len() as u64);
    }
    Ok(proven)
}

fn write_facts(
    request: &CaptureRequest<'_>,
    images_dir: &Path,
    workers: &[WorkerReport],
    scope: MappingScope,
    narrowed: &[String],
) -> Result<(), CaptureError> {
    let mut images = Vec::new();
    let names = fs::read_dir(images_dir).map_err(|e| CaptureError::io("list", images_dir, e))?;
    for entry in names {
        let entry = entry.map_err(|e| CaptureError::io("list", images_dir, e))?;
        let metadata = entry.metadata().map_err(|e| CaptureError::io("describe", &entry.path(), e))?;
        images.push(ImageFacts {
            name: entry.file_name().to_string_lossy().into_owned(),
            bytes: metadata.len(),
        });
    }
    images.sort_by(|a, b| a.name.cmp(&b.name));
    let system = rustix::system::uname();
    let facts = CaptureFacts {
        format: facts::FORMAT,
        capture_id: request.capture_id.clone(),
        created_unix: request.created_unix_ns / 1_000_000_000,
        architecture: system.machine().to_string_lossy().into_owned(),
        page_size: PAGE_SIZE,
        kernel: system.release().to_string_lossy().into_owned(),
        tools: request.tools.clone(),
        process: request.process.clone(),
        binds: request.binds.clone(),
        images,
        scope,
        scope_narrowed: narrowed.to_vec(),
        keep_tcp: request.keep_tcp,
        workers: workers.iter().map(|w| WorkerFacts { id: w.id.clone(), pid: w.pid }).collect(),
        checkpoint: checkpoint_seen(request),
    };
    let path = request.layer_root.join(capsule::CAPTURE_PATH);
    let json = facts.to_json().map_err(|e| CaptureError::io("write", &path, io::Error::other(e)))?;
    fs::write(&path, json).map_err(|e| CaptureError::io("write", &path, e))
}

/// A payload that is kept from an earlier capsule keeps its checkpoint.
fn checkpoint_seen(request: &CaptureRequest<'_>) -> Vec<CheckpointFacts> {
    if !request.checkpoint_seen.is_empty() {
        return request.checkpoint_seen.clone();
    }
    let earlier = crate::recover::capsule::facts(request.container_root);
    earlier.map(|facts| facts.checkpoint).unwrap_or_default()
}
