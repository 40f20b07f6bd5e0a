//! Every byte exactly once: the images' file mappings must be the manifest's extents, no more and no less.
//!
//! The manifest proves that its extents cover the allocations; this check ties them to what CRIU will map, so
//! that neither a manifest nor an image can be exchanged alone.

use std::path::Path;

use super::root;
use crate::capsule;
use crate::capture::facts::WorkerFacts;
use crate::criu::areas;
use crate::criu::image::{self, ImageError, Magic};
use crate::criu::proto::{FileEntry, MmEntry};
use crate::criu::vma_status::FILE_PRIVATE;
use crate::extent::{CoveredLayout, LayoutError};
use crate::format::native_manifest::NativeManifest;
use crate::store::AdmittedPayload;

/// Manifest, images and files of a worker do not belong together.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum LayoutMismatch {
    #[error("{path} cannot be read: {reason}")]
    Unreadable { path: String, reason: String },
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("native manifest: {0}")]
    Layout(#[from] LayoutError),
    #[error("native manifest: {0}")]
    Manifest(String),
    #[error("{file} has {found} bytes, the native manifest says {expected}")]
    Size { file: &'static str, expected: u64, found: u64 },
    #[error(
        "the CRIU images map {file} at {start:#x}-{end:#x}, offset {offset:#x}, which is no extent of the manifest"
    )]
    Unlisted { file: &'static str, start: u64, end: u64, offset: u64 },
    #[error("the CRIU images map only {mapped} of the {listed} bytes that the manifest lists for {file}")]
    Unmapped { file: &'static str, mapped: u64, listed: u64 },
}

struct Listed {
    start: u64,
    end: u64,
    offset: u64,
}

/// Checks one worker of the capsule below `rootfs`.
pub fn check(
    rootfs: &Path,
    worker: &WorkerFacts,
    payload: Option<&AdmittedPayload>,
) -> Result<CoveredLayout, LayoutMismatch> {
    let dir = capsule::worker_dir(&worker.id).to_string_lossy().into_owned();
    let read = |path: &str| {
        root::read(rootfs, path)
            .map_err(|e| LayoutMismatch::Unreadable { path: path.to_owned(), reason: e.to_string() })
    };
    let manifest = read(&format!("{dir}/{}", capsule::NATIVE_MANIFEST_NAME))?;
    let manifest = NativeManifest::parse(&manifest).map_err(|e| LayoutMismatch::Manifest(e.to_string()))?;
    let layout = manifest.layout()?;

    let residual = format!("{dir}/{}", capsule::RESIDUAL_NAME);
    let found = root::size(rootfs, &residual)
        .map_err(|e| LayoutMismatch::Unreadable { path: residual, reason: e.to_string() })?;
    same_size(capsule::RESIDUAL_NAME, manifest.residual_blob_bytes, found)?;
    // A worker without a payload must not list model bytes.
    same_size(capsule::PACK_NAME, manifest.model_blob_bytes, payload.map_or(0, AdmittedPayload::bytes))?;

    let files = read(&format!("{}/files.img", capsule::IMAGES_DIR))?;
    let mm_name = format!("mm-{}.img", worker.pid);
    let mm = read(&format!("{}/{mm_name}", capsule::IMAGES_DIR))?;
    compare_images(&manifest, &dir, &files, (&mm_name, &mm))?;
    Ok(layout)
}

/// Compares the images with the manifest, whose own rules hold. `dir` is the worker's directory in the container, without
/// a leading slash; `files` is `files.img`, `mm` name and content of the process's memory image.
///
/// # Errors
/// A malformed image, or the first mapping that is no extent.
pub fn compare_images(
    manifest: &NativeManifest,
    dir: &str,
    files: &[u8],
    (mm_name, mm): (&str, &[u8]),
) -> Result<(), LayoutMismatch> {
    let files: Vec<FileEntry> = entries(files, "files.img", Magic::Files)?;
    let mm: Vec<MmEntry> = entries(mm, mm_name, Magic::Mm)?;
    let [mm] = mm.as_slice() else {
        let reason = format!("{} entries, expected 1", mm.len());
        return Err(ImageError::Malformed { name: mm_name.to_owned(), reason }.into());
    };
    areas::check(mm_name, mm)?;
    let model = manifest.model_weight_extents.iter().map(|e| (e.ptr, e.size, e.offset));
    let residual = manifest.residual_extents.iter().map(|e| (e.ptr, e.size, e.offset));
    check_file(mm, &files, dir, capsule::PACK_NAME, model)?;
    check_file(mm, &files, dir, capsule::RESIDUAL_NAME, residual)
}

fn same_size(file: &'static str, expected: u64, found: u64) -> Result<(), LayoutMismatch> {
    if expected == found { Ok(()) } else { Err(LayoutMismatch::Size { file, expected, found }) }
}

fn entries<M: protobuf::Message>(bytes: &[u8], name: &str, magic: Magic) -> Result<Vec<M>, ImageError> {
    image::split(name, magic, bytes)?.into_iter().map(|entry| image::parse(name, entry)).collect()
}

/// The private mappings of one file must be exactly the listed extents.
fn check_file(
    mm: &MmEntry,
    files: &[FileEntry],
    dir: &str,
    file: &'static str,
    extents: impl Iterator<Item = (u64, u64, u64)>,
) -> Result<(), LayoutMismatch> {
    let path = format!("/{dir}/{file}");
    let ids: Vec<u64> = files.iter().filter(|f| f.reg.name() == path).map(|f| u64::from(f.id())).collect();
    let mut listed: Vec<Listed> = extents
        .map(|(ptr, size, offset)| Listed { start: ptr, end: ptr.saturating_add(size), offset })
        .collect();
    listed.sort_unstable_by_key(|l| l.start);
    let mut mapped = 0;
    let areas = mm.vmas.iter().filter(|v| ids.contains(&v.shmid()));
    for vma in areas.filter(|v| v.status() & FILE_PRIVATE != 0) {
        // An area may span extents that lie side by side in memory and in the file.
        let mut at = vma.start();
        while at < vma.end() {
            let extent = listed.get(listed.partition_point(|l| l.end <= at)).filter(|l| l.start <= at);
            let fits = extent.filter(|l| vma.pgoff() + (at - vma.start()) == l.offset + (at - l.start));
            let Some(extent) = fits else {
                let (start, end, offset) = (vma.start(), vma.end(), vma.pgoff());
                return Err(LayoutMismatch::Unlisted { file, start, end, offset });
            };
            at = extent.end.min(vma.end());
        }
        mapped += vma.end() - vma.start();
    }
    let total: u64 = listed.iter().map(|l| l.end - l.start).sum();
    // Areas of one process are disjoint, so equal sums mean that every extent is mapped as a whole.
    if mapped == total { Ok(()) } else { Err(LayoutMismatch::Unmapped { file, mapped, listed: total }) }
}
