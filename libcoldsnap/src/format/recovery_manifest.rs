//! `manifest.json`: what recovery from the pinned checkpoint needs to know about one worker.
//!
//! It has the residual view of the native manifest and the model extents without their place in a pack.
//! `recovery_sources` (ours) says which bytes of an extent stand verbatim in which checkpoint file, so that a
//! pack can be rebuilt without an engine. An extent without an entry there cannot be rebuilt that way. Within
//! an entry of kind `coldsnap-host-process`, bytes of the extent that no piece covers are zero (they are the
//! alignment padding between tensors that a loader leaves untouched); in other kinds the pieces must cover
//! the extent.

use std::collections::HashMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::descriptor::is_clean_relative;
use super::document::{self, DocumentError, FormatError};
use super::hex_fields::plain_hex;
use super::json::Json;
use super::manifest::{self, BlobStat, Checksum, Entry, FORMAT, ManifestKind, ResidualExtent};
use super::native_manifest::NativeManifest;
use super::residual::ResidualLayout;
use crate::digest::Digest;
use crate::extent::{CoveredLayout, LayoutError};

/// How errors name the document.
pub const DOCUMENT: &str = "manifest.json";

/// The only value of `weight_source` here. It says "the checkpoint"; a GGUF checkpoint has it too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RecoveryWeightSource {
    /// Model bytes in the checkpoint's files.
    #[serde(rename = "safetensors")]
    Safetensors,
}

/// The pinned checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSource {
    /// Hugging Face model id, or another name of the checkpoint.
    pub model_id: String,
    /// The pinned revision.
    pub revision: String,
    /// SHA-256 (plain hex) of the checkpoint's metadata.
    #[serde(with = "plain_hex")]
    pub metadata_sha256: Digest,
}

/// A range of model-owned bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryExtent {
    /// First address.
    pub ptr: u64,
    /// Size in bytes.
    pub size: u64,
    /// First address of the allocation that holds it.
    pub allocation_ptr: u64,
    /// What it is.
    #[serde(with = "plain_hex")]
    pub semantic_id: Digest,
}

/// Where the bytes of one extent stand in the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecoverySource {
    /// The extent.
    #[serde(with = "plain_hex")]
    pub semantic_id: Digest,
    /// Disjoint pieces of it.
    pub pieces: Vec<RecoveryPiece>,
}

/// Bytes that are equal in a checkpoint file and in an extent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecoveryPiece {
    /// File of the checkpoint, a relative path within it.
    pub file: String,
    /// Tensor that the bytes belong to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor: Option<String>,
    /// Offset in the file.
    pub file_offset: u64,
    /// Number of bytes, not zero.
    pub length: u64,
    /// Offset in the extent.
    pub extent_offset: u64,
}

/// A whole recovery manifest. Fields that another implementation added are ignored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "as in the native manifest")]
pub struct RecoveryManifest {
    pub format: u32,
    pub kind: ManifestKind,
    pub identity: String,
    pub generation: String,
    pub pid: u32,
    pub rank: u32,
    pub host: String,
    pub worker_id: String,
    pub capture_id: String,
    pub created_unix: f64,
    pub weight_source: RecoveryWeightSource,
    /// Absent only in kind `coldsnap-host-process` when there are no model extents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_source: Option<ModelSource>,
    pub residual_blob: String,
    pub residual_blob_bytes: u64,
    pub residual_blob_stat: BlobStat,
    #[serde(default, skip_serializing_if = "ResidualLayout::is_contiguous")]
    pub residual_layout: ResidualLayout,
    pub allocation_bytes: u64,
    pub model_weight_bytes: u64,
    pub residual_bytes: u64,
    pub model_weight_extents: Vec<RecoveryExtent>,
    #[serde(default)]
    pub model_execution_state: Option<Json>,
    pub residual_extents: Vec<ResidualExtent>,
    pub checksum: Checksum,
    pub entries: Vec<Entry>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_size: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recovery_sources: Vec<RecoverySource>,
}

impl RecoveryManifest {
    /// Parses one manifest; the rules among the fields are checked by [`Self::layout`].
    ///
    /// # Errors
    /// Names the field that is missing, of the wrong type or malformed, or the trailing data.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        manifest::parse(DOCUMENT, bytes, |manifest: &Self| manifest.format)
    }

    /// Reads and parses a file.
    ///
    /// # Errors
    /// As [`Self::parse`], and what the file system answers.
    pub fn read(path: &Path) -> Result<Self, DocumentError> {
        document::read(path, DOCUMENT, Self::parse)
    }

    /// The text of the file: indent 2, sorted keys, newline at the end.
    ///
    /// # Errors
    /// When `created_unix` is not finite.
    pub fn to_bytes(&self) -> Result<Vec<u8>, FormatError> {
        if !self.created_unix.is_finite() {
            return Err(FormatError::new(DOCUMENT, "created_unix", "the number is not finite"));
        }
        document::to_bytes(DOCUMENT, self)
    }

    /// Writes the file durably.
    ///
    /// # Errors
    /// As [`Self::to_bytes`], and what the file system answers.
    pub fn write(&self, path: &Path) -> Result<(), DocumentError> {
        document::write(path, self.to_bytes())
    }

    /// The recovery manifest that belongs to a native manifest.
    ///
    /// # Errors
    /// As [`Self::layout`].
    pub fn from_native(
        native: &NativeManifest,
        model_source: Option<ModelSource>,
        recovery_sources: Vec<RecoverySource>,
    ) -> Result<Self, LayoutError> {
        let native = native.clone();
        let extents = native.model_weight_extents.into_iter().map(|e| RecoveryExtent {
            ptr: e.ptr,
            size: e.size,
            allocation_ptr: e.allocation_ptr,
            semantic_id: e.semantic_id,
        });
        let manifest = Self {
            format: FORMAT,
            kind: native.kind,
            identity: native.identity,
            generation: native.generation,
            pid: native.pid,
            rank: native.rank,
            host: native.host,
            worker_id: native.worker_id,
            capture_id: native.capture_id,
            created_unix: native.created_unix,
            weight_source: RecoveryWeightSource::Safetensors,
            model_source,
            residual_blob: native.residual_blob,
            residual_blob_bytes: native.residual_blob_bytes,
            residual_blob_stat: native.residual_blob_stat,
            residual_layout: native.residual_layout,
            allocation_bytes: native.allocation_bytes,
            model_weight_bytes: native.model_weight_bytes,
            residual_bytes: native.residual_bytes,
            model_weight_extents: extents.collect(),
            model_execution_state: native.model_execution_state,
            residual_extents: native.residual_extents,
            checksum: native.checksum,
            entries: native.entries,
            page_size: native.page_size,
            recovery_sources,
        };
        manifest.layout()?;
        Ok(manifest)
    }

    /// Checks every rule of the manifest and returns the proof of coverage.
    ///
    /// # Errors
    /// The first violation: coverage, sums, residual layout, then model source, rules of the kind, recovery sources.
    pub fn layout(&self) -> Result<CoveredLayout, LayoutError> {
        let model = self.model_weight_extents.iter().map(|e| (e.ptr, e.size, e.allocation_ptr));
        let layout = manifest::prove_coverage(&self.entries, model, &self.residual_extents)?;
        let model_bytes = self.model_weight_extents.iter().map(|e| e.size).sum();
        LayoutError::same_size("model_weight_bytes", model_bytes, self.model_weight_bytes)?;
        let residual = &self.residual_extents;
        manifest::check_sums(&self.entries, self.allocation_bytes, residual, self.residual_bytes)?;
        manifest::check_residual(residual, self.residual_layout, self.residual_blob_bytes)?;
        LayoutError::same_size(
            "residual_blob_stat.bytes",
            self.residual_blob_bytes,
            self.residual_blob_stat.bytes,
        )?;
        let needs_source = self.kind != ManifestKind::HostProcess || !self.model_weight_extents.is_empty();
        if needs_source && self.model_source.is_none() {
            return Err(LayoutError::malformed("model_source", "missing field"));
        }
        let residual = manifest::residual_placements(residual);
        manifest::check_placements(self.kind, self.page_size, residual)?;
        if self.kind == ManifestKind::HostProcess {
            manifest::unique_ids(self.model_weight_extents.iter().map(|e| e.semantic_id))?;
        }
        self.check_sources()?;
        Ok(layout)
    }

    /// Checks that both manifests describe the same worker, allocations, extents and residual bytes.
    ///
    /// # Errors
    /// `IdentityChanged` or `SizeChanged` naming the first field that differs.
    pub fn check_against(&self, native: &NativeManifest) -> Result<(), LayoutError> {
        for (what, expected, found) in [
            ("worker_id", &native.worker_id, &self.worker_id),
            ("capture_id", &native.capture_id, &self.capture_id),
            ("identity", &native.identity, &self.identity),
        ] {
            if expected != found {
                return Err(changed(what, expected, found));
            }
        }
        for (what, expected, found) in [
            ("kind", show(&native.kind), show(&self.kind)),
            ("residual_layout", show(&native.residual_layout), show(&self.residual_layout)),
            ("page_size", show(&native.page_size), show(&self.page_size)),
        ] {
            if expected != found {
                return Err(changed(what, &expected, &found));
            }
        }
        let sizes = [
            ("allocation_bytes", native.allocation_bytes, self.allocation_bytes),
            ("model_weight_bytes", native.model_weight_bytes, self.model_weight_bytes),
            ("residual_bytes", native.residual_bytes, self.residual_bytes),
            ("residual_blob_bytes", native.residual_blob_bytes, self.residual_blob_bytes),
        ];
        sizes.into_iter().try_for_each(|(what, e, f)| LayoutError::same_size(what, e, f))?;
        let mut expected: Vec<_> =
            native.model_weight_extents.iter().map(|e| (e.ptr, e.size, e.semantic_id)).collect();
        let mut found: Vec<_> =
            self.model_weight_extents.iter().map(|e| (e.ptr, e.size, e.semantic_id)).collect();
        expected.sort();
        found.sort();
        if let Some((e, f)) = first_difference(&expected, &found) {
            return Err(changed("model_weight_extents", &e, &f));
        }
        if let Some((e, f)) = first_difference(&native.residual_extents, &self.residual_extents) {
            return Err(changed("residual_extents", &e, &f));
        }
        if let Some((e, f)) = first_difference(&native.entries, &self.entries) {
            return Err(changed("entries", &e, &f));
        }
        Ok(())
    }

    fn check_sources(&self) -> Result<(), LayoutError> {
        let sizes: HashMap<Digest, u64> =
            self.model_weight_extents.iter().map(|e| (e.semantic_id, e.size)).collect();
        let mut seen = std::collections::HashSet::new();
        for (n, source) in self.recovery_sources.iter().enumerate() {
            let id = || format!("recovery_sources[{n}].semantic_id");
            let size = *sizes.get(&source.semantic_id).ok_or_else(|| {
                LayoutError::malformed(id(), format!("no model extent has {}", source.semantic_id.hex()))
            })?;
            if !seen.insert(source.semantic_id) {
                return Err(LayoutError::malformed(id(), "listed twice"));
            }
            self.check_pieces(n, &source.pieces, size)?;
        }
        Ok(())
    }

    fn check_pieces(&self, source: usize, pieces: &[RecoveryPiece], size: u64) -> Result<(), LayoutError> {
        let bad = |n: usize, problem: String| {
            Err(LayoutError::malformed(format!("recovery_sources[{source}].pieces[{n}]"), problem))
        };
        let mut order: Vec<usize> = (0..pieces.len()).collect();
        order.sort_by_key(|&n| (pieces[n].extent_offset, pieces[n].length));
        let mut end = 0;
        let mut gap = None;
        for n in order {
            let piece = &pieces[n];
            if !is_clean_relative(&piece.file) {
                return bad(n, format!("{:?} is not a clean relative path", piece.file));
            }
            let next = piece.extent_offset.checked_add(piece.length).filter(|next| *next <= size);
            let Some(next) = next.filter(|_| piece.length > 0) else {
                let (offset, length) = (piece.extent_offset, piece.length);
                return bad(
                    n,
                    format!("{length} bytes at {offset} are not inside the extent of {size} bytes"),
                );
            };
            if piece.file_offset.checked_add(piece.length).is_none() {
                return bad(n, "its end in the file overflows 64 bits".to_owned());
            }
            if piece.extent_offset < end {
                return bad(n, format!("it overlaps the piece that ends at {end} in the extent"));
            }
            if piece.extent_offset > end {
                gap = gap.or(Some(end));
            }
            end = next;
        }
        let gap = gap.or((end < size).then_some(end));
        if let Some(at) = gap.filter(|_| self.kind != ManifestKind::HostProcess) {
            let what = format!("recovery_sources[{source}].pieces");
            return Err(LayoutError::malformed(what, format!("no piece covers offset {at} of the extent")));
        }
        Ok(())
    }
}

fn show(value: &impl std::fmt::Debug) -> String {
    format!("{value:?}")
}

fn first_difference<T: PartialEq + std::fmt::Debug>(expected: &[T], found: &[T]) -> Option<(String, String)> {
    let show = |item: Option<&T>| item.map_or_else(|| "nothing".to_owned(), show);
    (0..expected.len().max(found.len()))
        .map(|n| (expected.get(n), found.get(n)))
        .find(|(e, f)| e != f)
        .map(|(e, f)| (show(e), show(f)))
}

fn changed(what: &str, expected: &str, found: &str) -> LayoutError {
    let what = format!("{what} of the recovery manifest");
    LayoutError::IdentityChanged { what, expected: expected.to_owned(), found: found.to_owned() }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn native(host: bool) -> NativeManifest {
        let mut v: Value =
            serde_json::from_str(include_str!("../../tests/vectors/native-manifest.json")).unwrap();
        if host {
            v["kind"] = json!("coldsnap-host-process");
            v["page_size"] = json!(4096);
            for list in ["model_weight_extents", "residual_extents"] {
                for extent in v[list].as_array_mut().unwrap() {
                    extent["placement"] = json!("copied");
                }
            }
        }
        NativeManifest::parse(v.to_string().as_bytes()).unwrap()
    }

    fn source() -> Option<ModelSource> {
        let metadata_sha256 = Digest::of(b"metadata");
        Some(ModelSource { model_id: "m/n".into(), revision: "0".repeat(40), metadata_sha256 })
    }

    fn piece(extent_offset: u64, length: u64) -> RecoveryPiece {
        RecoveryPiece {
            file: "model.safetensors".into(),
            tensor: Some("t".into()),
            file_offset: extent_offset.wrapping_add(80),
            length,
            extent_offset,
        }
    }

    fn with_pieces(host: bool, pieces: Vec<RecoveryPiece>) -> Result<RecoveryManifest, LayoutError> {
        let native = native(host);
        let semantic_id = native.model_weight_extents[1].semantic_id;
        RecoveryManifest::from_native(&native, source(), vec![RecoverySource { semantic_id, pieces }])
    }

    #[test]
    fn round_trip_and_agreement() {
        let native = native(true);
        let recovery = with_pieces(true, vec![piece(4000, 97), piece(0, 4000)]).unwrap();
        let read = RecoveryManifest::parse(&recovery.to_bytes().unwrap()).unwrap();
        assert_eq!(read, recovery);
        read.layout().unwrap();
        read.check_against(&native).unwrap();

        let mut other = recovery.clone();
        other.capture_id = "another".into();
        assert_eq!(other.check_against(&native).unwrap_err().kind(), "IdentityChanged");
        let mut other = recovery.clone();
        other.model_weight_extents[0].semantic_id = Digest::of(b"x");
        assert_eq!(other.check_against(&native).unwrap_err().kind(), "IdentityChanged");
        let mut other = recovery.clone();
        other.residual_extents[0].crc32 ^= 1;
        assert_eq!(other.check_against(&native).unwrap_err().kind(), "IdentityChanged");
        let mut other = recovery;
        other.residual_blob_bytes += 4096;
        assert_eq!(other.check_against(&native).unwrap_err().kind(), "SizeChanged");
    }

    #[test]
    fn uncovered_bytes_are_zero_in_the_host_kind_only() {
        let holes = vec![piece(16, 100), piece(200, 1000)];
        with_pieces(true, holes.clone()).unwrap();
        let error = with_pieces(false, holes).unwrap_err();
        assert!(error.to_string().contains("no piece covers offset 0"), "{error}");
        let error = with_pieces(false, vec![piece(0, 4096)]).unwrap_err();
        assert!(error.to_string().contains("no piece covers offset 4096"), "{error}");
        with_pieces(false, vec![piece(0, 4097)]).unwrap();
    }

    #[test]
    fn bad_pieces_are_named() {
        for pieces in [
            vec![piece(0, 4097), piece(4096, 1)],
            vec![piece(0, 10), piece(0, 4098)],
            vec![piece(0, 10), piece(10, 0)],
            vec![piece(0, 10), piece(u64::MAX, 2)],
            vec![piece(0, 10), RecoveryPiece { file_offset: u64::MAX, ..piece(10, 2) }],
            vec![piece(0, 10), RecoveryPiece { file: "../x".into(), ..piece(10, 2) }],
        ] {
            let error = with_pieces(true, pieces).unwrap_err();
            assert!(error.to_string().contains("recovery_sources[0].pieces[1]"), "{error}");
        }
    }

    #[test]
    fn sources_name_known_extents_once() {
        let native = native(true);
        let known = native.model_weight_extents[0].semantic_id;
        let source_of = |semantic_id| RecoverySource { semantic_id, pieces: vec![] };
        let list = vec![source_of(Digest::of(b"unknown"))];
        assert!(RecoveryManifest::from_native(&native, source(), list).is_err());
        let list = vec![source_of(known), source_of(known)];
        assert!(RecoveryManifest::from_native(&native, source(), list).is_err());
        assert!(RecoveryManifest::from_native(&native, None, vec![]).is_err());
    }
}
