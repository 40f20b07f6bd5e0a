//! `native-manifest.json`, format 3: allocations of one worker, and where every byte of them comes from.
//!
//! Two kinds: `vllm-live-process-cumem`, and ours `coldsnap-host-process`, which adds `page_size` to the manifest
//! and `placement` to every extent. A worker of our kind may own no model bytes: then `model_weight_extents`
//! is empty, `model_blob_bytes` is 0 and `model_blob_stat` is all zero.
//!
//! Parsing checks the shape of every field. [`NativeManifest::layout`] checks the rules among them.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::document::{self, DocumentError, FormatError};
use super::hex_fields::{crc_hex, nullable, plain_hex};
use super::json::Json;
use super::manifest;
use super::pack::{ExtentSum, PackLayout};
use super::residual::ResidualLayout;
use crate::digest::Digest;
use crate::extent::{CoveredLayout, LayoutError};

pub use super::manifest::{
    BlobStat, Checksum, Entry, FORMAT, ManifestKind, Placement, ResidualExtent, WEIGHTS,
};

/// How errors name the document.
pub const DOCUMENT: &str = "native-manifest.json";
/// The only value of `weight_source` here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NativeWeightSource {
    /// Model bytes in the pack, all others in the residual blob.
    #[serde(rename = "split-native")]
    SplitNative,
}

/// When a hydration compares checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VerifyMode {
    /// While it reads.
    Inline,
    /// Never: the files were verified before.
    Preverified,
}

/// A range of model-owned bytes, in the pack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelExtent {
    /// First address.
    pub ptr: u64,
    /// Size in bytes.
    pub size: u64,
    /// First address of the allocation that holds it.
    pub allocation_ptr: u64,
    /// What it is, see [`super::semantic_id`].
    #[serde(with = "plain_hex")]
    pub semantic_id: Digest,
    /// SHA-256 of the bytes.
    #[serde(with = "plain_hex")]
    pub sha256: Digest,
    /// Offset in the pack.
    pub offset: u64,
    /// CRC-32 of the bytes.
    #[serde(with = "crc_hex")]
    pub crc32: u32,
    /// Only in kind [`ManifestKind::HostProcess`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
}

/// A whole native manifest. Fields that another implementation added are ignored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(
    missing_docs,
    reason = "named and specified by the format; described where the name does not say it"
)]
pub struct NativeManifest {
    pub format: u32,
    pub kind: ManifestKind,
    /// `worker-id-<worker>-host-<host>-rank-<rank>-pid-<pid>`
    pub identity: String,
    /// `<pid>-<unix nanoseconds>`
    pub generation: String,
    pub pid: u32,
    pub rank: u32,
    pub host: String,
    pub worker_id: String,
    pub capture_id: String,
    /// Seconds since the epoch.
    pub created_unix: f64,
    pub weight_source: NativeWeightSource,
    /// Informative file name; a payload's path is always derived from its digest.
    pub blob: String,
    pub blob_bytes: u64,
    pub blob_stat: BlobStat,
    pub model_blob: String,
    /// Size of the pack, with padding.
    pub model_blob_bytes: u64,
    pub model_blob_stat: BlobStat,
    pub residual_blob: String,
    pub residual_blob_bytes: u64,
    pub residual_blob_stat: BlobStat,
    #[serde(default, skip_serializing_if = "ResidualLayout::is_contiguous")]
    pub residual_layout: ResidualLayout,
    /// Sum of the sizes of `entries`.
    pub allocation_bytes: u64,
    /// Sum of the sizes of `model_weight_extents`.
    pub model_weight_bytes: u64,
    /// Sum of the sizes of `residual_extents`.
    pub residual_bytes: u64,
    /// In pack order.
    pub model_weight_extents: Vec<ModelExtent>,
    /// Opaque to us; kept as it is.
    #[serde(with = "nullable")]
    pub model_execution_state: Option<Json>,
    pub residual_extents: Vec<ResidualExtent>,
    pub direct_io: bool,
    pub write_io_mode: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residual_capture_backend: Option<String>,
    pub blob_reused: bool,
    pub verify_mode: VerifyMode,
    pub checksum: Checksum,
    pub preverified: bool,
    /// Whether the pack may lie in another file than the one that `model_blob_stat` names.
    pub portable_model_payload: bool,
    /// The same for the residual blob.
    pub portable_residual_blob: bool,
    pub verification_seconds: f64,
    pub write_seconds: f64,
    pub phase_seconds: BTreeMap<String, f64>,
    pub entries: Vec<Entry>,
    /// Page size of the captured process; only in kind [`ManifestKind::HostProcess`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_size: Option<u64>,
}

impl NativeManifest {
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
    /// When a number of seconds is not finite.
    pub fn to_bytes(&self) -> Result<Vec<u8>, FormatError> {
        let scalars = [
            ("created_unix", self.created_unix),
            ("verification_seconds", self.verification_seconds),
            ("write_seconds", self.write_seconds),
        ];
        let phases = self.phase_seconds.iter().map(|(name, seconds)| (name.as_str(), *seconds));
        if let Some((field, _)) = scalars.into_iter().chain(phases).find(|(_, number)| !number.is_finite()) {
            return Err(FormatError::new(DOCUMENT, field, "the number is not finite"));
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

    /// Checks every rule of the manifest and returns the proof of coverage.
    ///
    /// # Errors
    /// The first violation, in this order: coverage, rules of the kind, sums, pack order and offsets, residual
    /// layout, sizes of the blobs.
    pub fn layout(&self) -> Result<CoveredLayout, LayoutError> {
        let layout = manifest::prove_coverage(
            &self.entries,
            self.model_weight_extents.iter().map(|e| (e.ptr, e.size, e.allocation_ptr)),
            &self.residual_extents,
        )?;
        self.check_kind()?;
        let model_bytes = self.model_weight_extents.iter().map(|e| e.size).sum();
        LayoutError::same_size("model_weight_bytes", model_bytes, self.model_weight_bytes)?;
        manifest::check_sums(
            &self.entries,
            self.allocation_bytes,
            &self.residual_extents,
            self.residual_bytes,
        )?;
        let pack = self.pack_layout()?;
        LayoutError::same_size("model_blob_bytes", pack.bytes(), self.model_blob_bytes)?;
        manifest::check_residual(&self.residual_extents, self.residual_layout, self.residual_blob_bytes)?;
        for (field, stat, bytes) in [
            ("blob_stat.bytes", &self.blob_stat, self.blob_bytes),
            ("model_blob_stat.bytes", &self.model_blob_stat, self.model_blob_bytes),
            ("residual_blob_stat.bytes", &self.residual_blob_stat, self.residual_blob_bytes),
        ] {
            LayoutError::same_size(field, bytes, stat.bytes)?;
        }
        Ok(layout)
    }

    /// The layout of the pack that this manifest expects. `source_index` is the position in
    /// `model_weight_extents`; a worker without model bytes has a layout without extents.
    ///
    /// # Errors
    /// `Malformed` when the extents are not in pack order or not at the cumulative offsets.
    pub fn pack_layout(&self) -> Result<PackLayout, LayoutError> {
        let listed: Vec<_> = self.model_weight_extents.iter().map(|e| (e.offset, e.sum())).collect();
        PackLayout::from_listed(&listed)
    }

    fn check_kind(&self) -> Result<(), LayoutError> {
        let model = self.model_weight_extents.iter().enumerate();
        let model = model.map(|(n, e)| (format!("model_weight_extents[{n}]"), e.placement, e.ptr, e.offset));
        let extents = model.chain(manifest::residual_placements(&self.residual_extents));
        manifest::check_placements(self.kind, self.page_size, extents)?;
        match self.kind {
            ManifestKind::VllmCumem if self.model_weight_extents.is_empty() => {
                Err(LayoutError::malformed("model_weight_extents", "empty"))
            }
            ManifestKind::VllmCumem => Ok(()),
            ManifestKind::HostProcess => {
                manifest::unique_ids(self.model_weight_extents.iter().map(|e| e.semantic_id))
            }
        }
    }
}

impl ModelExtent {
    /// Size and checksums.
    pub const fn sum(&self) -> ExtentSum {
        ExtentSum { size: self.size, sha256: self.sha256, crc32: self.crc32 }
    }
}

#[cfg(test)]
mod tests;
