//! What native and recovery manifests share: format, kinds, allocations, the residual view, and their rules.

use std::collections::HashSet;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::document::{self, FormatError};
use super::hex_fields::crc_hex;
use super::residual::ResidualLayout;
use crate::digest::Digest;
use crate::extent::{CoveredLayout, LayoutError};

/// The only value of `format`.
pub const FORMAT: u32 = 3;

/// Which kind of process a manifest describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ManifestKind {
    /// A vLLM worker whose allocations come from its CuMem allocator.
    #[serde(rename = "vllm-live-process-cumem")]
    VllmCumem,
    /// Any process captured by the `host` driver.
    #[serde(rename = "coldsnap-host-process")]
    HostProcess,
}

/// The only value of `checksum`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Checksum {
    /// CRC-32 (IEEE).
    #[serde(rename = "crc32")]
    Crc32,
}

/// How a restore provides an extent's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// The kernel maps the page-aligned interior from the file; address and offset agree modulo the page size.
    Mapped,
    /// Hydration reads it into memory.
    Copied,
}

/// Identity of a file when the manifest was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct BlobStat {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Modification time, nanoseconds since the epoch.
    pub mtime_ns: i64,
    /// Status change time, nanoseconds since the epoch.
    pub ctime_ns: i64,
}

impl BlobStat {
    /// The identity of a file.
    pub fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.size(),
            mtime_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
            ctime_ns: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Whether device, inode, size and modification time are equal. (chmod and chown change only the ctime.)
    pub fn same_content(&self, other: &Self) -> bool {
        Self { ctime_ns: 0, ..*self } == Self { ctime_ns: 0, ..*other }
    }
}

pub(crate) fn nanoseconds(seconds: i64, nanoseconds: i64) -> i64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}

/// One allocation of the worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// First address.
    pub ptr: u64,
    /// Size in bytes.
    pub size: u64,
    /// What it is for; model extents lie only in allocations tagged [`WEIGHTS`].
    pub tag: String,
}

/// Tag of allocations that are preserved.
pub const WEIGHTS: &str = "weights";

/// A range of bytes in the residual blob.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidualExtent {
    /// First address.
    pub ptr: u64,
    /// Size in bytes.
    pub size: u64,
    /// First address of the allocation that holds it.
    pub allocation_ptr: u64,
    /// Offset in the residual blob.
    pub offset: u64,
    /// CRC-32 of the bytes.
    #[serde(with = "crc_hex")]
    pub crc32: u32,
    /// Only in kind [`ManifestKind::HostProcess`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
}

/// Coverage, and that model extents lie in allocations tagged `weights`.
pub(super) fn prove_coverage(
    entries: &[Entry],
    model: impl Iterator<Item = (u64, u64, u64)>,
    residual: &[ResidualExtent],
) -> Result<CoveredLayout, LayoutError> {
    let allocations: Vec<_> = entries.iter().map(|e| (e.ptr, e.size)).collect();
    let model: Vec<_> = model.collect();
    let residual: Vec<_> = residual.iter().map(|e| (e.ptr, e.size, e.allocation_ptr)).collect();
    let layout = CoveredLayout::prove(&allocations, &model, &residual)?;
    let preserved: HashSet<u64> = entries.iter().filter(|e| e.tag == WEIGHTS).map(|e| e.ptr).collect();
    if let Some(n) = model.iter().position(|(_, _, allocation)| !preserved.contains(allocation)) {
        let what = format!("model_weight_extents[{n}].allocation_ptr");
        let problem = format!("the allocation at {:#x} is not tagged {WEIGHTS:?}", model[n].2);
        return Err(LayoutError::malformed(what, problem));
    }
    Ok(layout)
}

/// `allocation_bytes` and `residual_bytes`. Coverage has shown that the sums do not overflow.
pub(super) fn check_sums(
    entries: &[Entry],
    allocation_bytes: u64,
    residual: &[ResidualExtent],
    residual_bytes: u64,
) -> Result<(), LayoutError> {
    LayoutError::same_size("allocation_bytes", entries.iter().map(|e| e.size).sum(), allocation_bytes)?;
    LayoutError::same_size("residual_bytes", residual.iter().map(|e| e.size).sum(), residual_bytes)
}

pub(super) fn check_residual(
    residual: &[ResidualExtent],
    layout: ResidualLayout,
    blob_bytes: u64,
) -> Result<(), LayoutError> {
    let pieces: Vec<_> = residual.iter().map(|e| (e.offset, e.size)).collect();
    layout.check(&pieces, blob_bytes)
}

/// A recovery finds an extent's sources by its id, so that in our kind ids are unique.
pub(super) fn unique_ids(ids: impl Iterator<Item = Digest>) -> Result<(), LayoutError> {
    let mut seen = HashSet::new();
    for (n, id) in ids.enumerate() {
        if !seen.insert(id) {
            let what = format!("model_weight_extents[{n}].semantic_id");
            return Err(LayoutError::malformed(what, format!("{} is listed before", id.hex())));
        }
    }
    Ok(())
}

/// What only the host kind has: a page size, and a placement of every extent, given as
/// `(name, placement, ptr, offset)`.
pub(super) fn check_placements(
    kind: ManifestKind,
    page_size: Option<u64>,
    extents: impl Iterator<Item = (String, Option<Placement>, u64, u64)>,
) -> Result<(), LayoutError> {
    const ONLY: &str = "only manifests of kind coldsnap-host-process have it";
    if kind != ManifestKind::HostProcess {
        if page_size.is_some() {
            return Err(LayoutError::malformed("page_size", ONLY));
        }
        return match { extents }.find(|(_, placement, ..)| placement.is_some()) {
            Some((what, ..)) => Err(LayoutError::malformed(what + ".placement", ONLY)),
            None => Ok(()),
        };
    }
    let page_size = match page_size {
        Some(size) if size.is_power_of_two() && size >= 4096 => size,
        Some(size) => return Err(LayoutError::malformed("page_size", format!("{size} is no page size"))),
        None => return Err(LayoutError::malformed("page_size", "missing field")),
    };
    for (what, placement, ptr, offset) in extents {
        match placement {
            None => return Err(LayoutError::malformed(what + ".placement", "missing field")),
            Some(Placement::Mapped) if ptr % page_size != offset % page_size => {
                let problem = format!(
                    "it is mapped, but its address {ptr:#x} and its offset {offset} differ modulo the page size {page_size}"
                );
                return Err(LayoutError::malformed(what + ".placement", problem));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Residual extents as [`check_placements`] takes them.
pub(super) fn residual_placements(
    extents: &[ResidualExtent],
) -> impl Iterator<Item = (String, Option<Placement>, u64, u64)> {
    extents.iter().enumerate().map(|(n, e)| (format!("residual_extents[{n}]"), e.placement, e.ptr, e.offset))
}

/// Parses a manifest whose format number `format` reads.
pub(super) fn parse<T: DeserializeOwned>(
    document: &'static str,
    bytes: &[u8],
    format: impl Fn(&T) -> u32,
) -> Result<T, FormatError> {
    let manifest = document::parse(document, bytes)?;
    match format(&manifest) {
        FORMAT => Ok(manifest),
        other => {
            let problem = format!("{other} is not supported, expected {FORMAT}");
            Err(FormatError::new(document, "format", problem))
        }
    }
}
