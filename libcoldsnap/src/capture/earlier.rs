//! What an earlier capsule left in a restored process that is captured again: mappings of its payload, which
//! stay, and mappings of its residual, whose bytes move into the new one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::capsule::{self, HYDRATION_DIR, PACK_NAME, RESIDUAL_NAME};
use crate::criu::process::{ImageSet, ProcessImages};
use crate::criu::vma_status::FILE_PRIVATE;
use crate::digest::Digest;
use crate::format::artifact::Artifact;
use crate::format::native_manifest::{ModelExtent, NativeManifest};
use crate::mapped_file::MappedFile;

/// A file of an earlier capsule that the dump names.
#[derive(Debug)]
struct EarlierFile {
    worker: String,
    bytes: MappedFile,
}

/// Files of an earlier capsule that the dump names, by the id of their file entry.
#[derive(Debug, Default)]
pub struct Earlier {
    packs: BTreeMap<u32, EarlierFile>,
    residuals: BTreeMap<u32, EarlierFile>,
    payloads: BTreeMap<String, (Digest, Vec<ModelExtent>)>,
}

/// The payload that a process maps since its restore.
#[derive(Debug)]
pub struct KeptPayload<'a> {
    /// Id of its file entry.
    pub file: u32,
    /// Digest of the payload.
    pub digest: Digest,
    /// Its extents, as the earlier capture recorded them.
    pub extents: &'a [ModelExtent],
}

/// An earlier capsule's file is named by the dump but unusable.
#[derive(Debug, thiserror::Error)]
#[error("the container was restored from a capsule, but its {} cannot be used: {reason}", path.display())]
pub struct EarlierError {
    path: PathBuf,
    reason: String,
}

impl Earlier {
    /// Finds the earlier capsule's files that `images` names. `root` is the container's root as its processes
    /// see it (`/proc/<pid>/root`), so that the payload's bind is in place.
    ///
    /// # Errors
    /// When a file that is named cannot be read or parsed.
    pub fn find(images: &ImageSet, root: &Path) -> Result<Self, EarlierError> {
        let mut earlier = Self::default();
        for file in &images.files {
            let Some(inside) = file.reg.name().strip_prefix('/').and_then(|n| n.strip_prefix(HYDRATION_DIR))
            else {
                continue;
            };
            let mut parts = inside.trim_start_matches('/').split('/');
            let (Some(worker), Some(name), None) = (parts.next(), parts.next(), parts.next()) else {
                continue;
            };
            let path = root.join(capsule::worker_dir(worker)).join(name);
            let found = || -> Result<EarlierFile, EarlierError> {
                let bytes = MappedFile::open(&path).map_err(|e| unusable(&path, e))?;
                Ok(EarlierFile { worker: worker.to_owned(), bytes })
            };
            match name {
                PACK_NAME => earlier.packs.insert(file.id(), found()?),
                RESIDUAL_NAME => earlier.residuals.insert(file.id(), found()?),
                _ => None,
            };
        }
        if !earlier.packs.is_empty() {
            earlier.read_manifests(root)?;
        }
        Ok(earlier)
    }

    fn read_manifests(&mut self, root: &Path) -> Result<(), EarlierError> {
        let path = root.join(capsule::ARTIFACT_PATH);
        let bytes = std::fs::read(&path).map_err(|e| unusable(&path, e))?;
        let artifact = Artifact::parse(&bytes).map_err(|e| unusable(&path, e))?;
        for payload in artifact.payloads() {
            let path = root.join(capsule::worker_dir(&payload.worker)).join(capsule::NATIVE_MANIFEST_NAME);
            let manifest = NativeManifest::read(&path).map_err(|e| unusable(&path, e))?;
            self.payloads.insert(payload.worker, (payload.digest, manifest.model_weight_extents));
        }
        Ok(())
    }

    /// The payload of an earlier capsule that `process` still maps as a whole, or `None`. A payload that is
    /// mapped in part is treated like a residual: its bytes become ordinary memory again.
    pub fn kept<'a>(&'a self, process: &ProcessImages) -> Option<KeptPayload<'a>> {
        let mut mapped: Vec<(u64, u64, u64, u32)> = process
            .mm
            .vmas
            .iter()
            .filter(|v| v.status() & FILE_PRIVATE != 0)
            .filter_map(|v| {
                let file = u32::try_from(v.shmid()).ok().filter(|id| self.packs.contains_key(id))?;
                Some((v.start(), v.end(), v.pgoff(), file))
            })
            .collect();
        mapped.sort_unstable();
        let file = mapped.first()?.3;
        if mapped.iter().any(|m| m.3 != file) {
            return None;
        }
        let worker = &self.packs[&file].worker;
        let (digest, extents) = self.payloads.get(worker)?;
        let whole = extents.iter().all(|extent| {
            let mut at = extent.ptr;
            let end = extent.ptr.saturating_add(extent.size);
            for (start, stop, offset, _) in &mapped {
                if *start <= at && at < *stop && offset + (at - start) == extent.offset + (at - extent.ptr) {
                    at = *stop;
                }
            }
            at >= end
        });
        whole.then_some(KeptPayload { file, digest: *digest, extents })
    }

    /// Worker id that a residual or payload mapped by `process` belongs to.
    pub fn worker_of(&self, process: &ProcessImages) -> Option<&str> {
        let ids = process.mm.vmas.iter().filter_map(|v| u32::try_from(v.shmid()).ok());
        let mut files = ids.filter_map(|id| self.packs.get(&id).or_else(|| self.residuals.get(&id)));
        files.next().map(|f| f.worker.as_str())
    }

    /// Bytes of every file of the earlier capsule, by id.
    pub fn bytes(&self) -> BTreeMap<u32, &[u8]> {
        self.packs.iter().chain(&self.residuals).map(|(id, f)| (*id, &f.bytes[..])).collect()
    }

    /// Ids and sizes of the files whose private mappings become anonymous memory again.
    pub fn dissolved(&self, kept: Option<&KeptPayload<'_>>) -> BTreeMap<u32, u64> {
        self.bytes()
            .into_iter()
            .filter(|(id, _)| kept.is_none_or(|k| k.file != *id))
            .map(|(id, bytes)| (id, bytes.len() as u64))
            .collect()
    }
}

fn unusable(path: &Path, reason: impl ToString) -> EarlierError {
    EarlierError { path: path.to_owned(), reason: reason.to_string() }
}
