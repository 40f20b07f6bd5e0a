//! What to read for each byte of a pack: the native manifest's order joined with the recovery manifest's sources.

use std::collections::HashMap;

use super::RecoverError;
use crate::digest::Digest;
use crate::extent::LayoutError;
use crate::format::artifact::PayloadRequirement;
use crate::format::native_manifest::{ManifestKind, NativeManifest};
use crate::format::pack::{ExtentSum, padding};
use crate::format::recovery_manifest::{RecoveryManifest, RecoveryPiece};

/// A pack that can be rebuilt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RebuildPlan {
    /// The payload's digest.
    pub digest: Digest,
    /// Its size in bytes.
    pub bytes: u64,
    /// In pack order.
    pub extents: Vec<RebuildExtent>,
    /// Files that are read, in the order in which the manifest names them first.
    pub files: Vec<NeededFile>,
    /// SHA-256 of the metadata of the whole checkpoint that the capture read.
    pub metadata_sha256: Option<Digest>,
}

/// One extent of the pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RebuildExtent {
    /// What it is.
    pub semantic_id: Digest,
    /// Offset in the pack.
    pub offset: u64,
    /// Size and checksums.
    pub sum: ExtentSum,
    /// By offset in the extent, disjoint; what lies between them is zero.
    pub pieces: Vec<RebuildPiece>,
}

impl RebuildExtent {
    /// Offset in the pack after the extent and its padding.
    pub const fn end(&self) -> u64 {
        self.offset + self.sum.size + padding(self.sum.size)
    }
}

/// Bytes of a file that are bytes of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RebuildPiece {
    /// Index into [`RebuildPlan::files`].
    pub file: usize,
    /// Offset in the file.
    pub file_offset: u64,
    /// Number of bytes, not zero.
    pub length: u64,
    /// Offset in the extent.
    pub extent_offset: u64,
}

/// A file of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NeededFile {
    /// Its name in the checkpoint.
    pub name: String,
    /// Bytes that it must have at least.
    pub bytes: u64,
}

impl RebuildPlan {
    /// Plans the payload of one worker.
    ///
    /// # Errors
    /// A broken rule of a manifest, manifests that do not belong together or to the payload, an extent without a
    /// source.
    pub fn new(
        payload: &PayloadRequirement,
        native: &NativeManifest,
        recovery: &RecoveryManifest,
    ) -> Result<Self, RecoverError> {
        let worker = payload.worker.clone();
        let layout = |source| RecoverError::Layout { worker: worker.clone(), source };
        native.layout().map_err(layout)?;
        recovery.layout().map_err(layout)?;
        recovery.check_against(native).map_err(layout)?;
        let pack = native.pack_layout().map_err(layout)?;
        LayoutError::same_size("the pack of the manifest", payload.bytes, pack.bytes()).map_err(layout)?;
        let sources: HashMap<Digest, &[RecoveryPiece]> =
            recovery.recovery_sources.iter().map(|s| (s.semantic_id, s.pieces.as_slice())).collect();
        let mut files = Files::default();
        let mut extents = Vec::with_capacity(pack.extents().len());
        for placed in pack.extents() {
            let semantic_id = native.model_weight_extents[placed.source_index].semantic_id;
            let pieces = sources.get(&semantic_id).ok_or_else(|| RecoverError::NoSource {
                worker: worker.clone(),
                extent: semantic_id.hex(),
                bytes: placed.sum.size,
                offset: placed.offset,
            })?;
            let gaps = native.kind == ManifestKind::HostProcess;
            let pieces = in_order(&semantic_id, pieces, placed.sum.size, gaps, &mut files)?;
            extents.push(RebuildExtent { semantic_id, offset: placed.offset, sum: placed.sum, pieces });
        }
        Ok(Self {
            digest: payload.digest,
            bytes: payload.bytes,
            extents,
            files: files.list,
            metadata_sha256: recovery.model_source.as_ref().map(|source| source.metadata_sha256),
        })
    }
}

#[derive(Default)]
struct Files {
    list: Vec<NeededFile>,
    index: HashMap<String, usize>,
}

impl Files {
    fn need(&mut self, name: &str, bytes: u64) -> usize {
        let index = *self.index.entry(name.to_owned()).or_insert(self.list.len());
        if index == self.list.len() {
            self.list.push(NeededFile { name: name.to_owned(), bytes });
        }
        self.list[index].bytes = self.list[index].bytes.max(bytes);
        index
    }
}

/// The manifest's own rules are checked again for each extent: in kinds other than `host` two extents may have one id
/// and different sizes.
fn in_order(
    extent: &Digest,
    pieces: &[RecoveryPiece],
    size: u64,
    gaps: bool,
    files: &mut Files,
) -> Result<Vec<RebuildPiece>, RecoverError> {
    let bad = |problem: String| RecoverError::BadPiece { extent: extent.hex(), problem };
    let mut ordered: Vec<&RecoveryPiece> = pieces.iter().collect();
    ordered.sort_by_key(|piece| piece.extent_offset);
    let mut planned = Vec::with_capacity(pieces.len());
    let mut end = 0;
    for piece in ordered {
        let RecoveryPiece { file, file_offset, length, extent_offset, .. } = piece;
        let next = extent_offset.checked_add(*length).filter(|next| *next <= size && *length > 0);
        let file_end = file_offset.checked_add(*length);
        let (Some(next), Some(file_end)) = (next, file_end) else {
            return Err(bad(format!("{length} bytes at {extent_offset} are not inside its {size} bytes")));
        };
        if *extent_offset < end || (*extent_offset > end && !gaps) {
            return Err(bad(format!("a piece begins at {extent_offset}, the one before ends at {end}")));
        }
        planned.push(RebuildPiece {
            file: files.need(file, file_end),
            file_offset: *file_offset,
            length: *length,
            extent_offset: *extent_offset,
        });
        end = next;
    }
    if end < size && !gaps {
        return Err(bad(format!("no piece covers offset {end} of its {size} bytes")));
    }
    Ok(planned)
}
