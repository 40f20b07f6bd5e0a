//! `native-manifest.json`, format 3: allocations of one worker, and where every byte of them comes from.
//!
//! Two kinds: `vllm-live-process-cumem`, and ours `coldsnap-host-process`, which adds `page_size` to the manifest
//! and `placement` to every extent. A worker of our kind may own no model bytes: then `model_weight_extents`
//! is empty, `model_blob_bytes` is 0 and `model_blob_stat` is all zero.
//!
//! Parsing checks the shape of every field. [`NativeManifest::layout`] checks the rules among them.

use std::collections::{BTreeMap, HashSet};
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::document::{self, DocumentError, FormatError};
use super::hex_fields::{crc_hex, nullable, plain_hex};
use super::json::Json;
use super::pack::{ExtentSum, PackLayout};
use super::residual::ResidualLayout;
use crate::digest::Digest;
use crate::extent::{CoveredLayout, LayoutError};

/// How errors name the document.
pub const DOCUMENT: &str = "native-manifest.json";
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

/// The only value of `weight_source` here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NativeWeightSource {
    /// Model bytes in the pack, all others in the residual blob.
    #[serde(rename = "split-native")]
    SplitNative,
}

/// The only value of `checksum`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Checksum {
    /// CRC-32 (IEEE).
    #[serde(rename = "crc32")]
    Crc32,
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
        let manifest: Self = document::parse(DOCUMENT, bytes)?;
        if manifest.format != FORMAT {
            let problem = format!("{} is not supported, expected {FORMAT}", manifest.format);
            return Err(FormatError::new(DOCUMENT, "format", problem));
        }
        Ok(manifest)
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
        let layout = prove_coverage(
            &self.entries,
            self.model_weight_extents.iter().map(|e| (e.ptr, e.size, e.allocation_ptr)),
            &self.residual_extents,
        )?;
        self.check_kind()?;
        let model_bytes = self.model_weight_extents.iter().map(|e| e.size).sum();
        LayoutError::same_size("model_weight_bytes", model_bytes, self.model_weight_bytes)?;
        check_sums(&self.entries, self.allocation_bytes, &self.residual_extents, self.residual_bytes)?;
        let pack = self.pack_layout()?;
        LayoutError::same_size("model_blob_bytes", pack.bytes(), self.model_blob_bytes)?;
        check_residual(&self.residual_extents, self.residual_layout, self.residual_blob_bytes)?;
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
        let residual = self.residual_extents.iter().enumerate();
        let residual =
            residual.map(|(n, e)| (format!("residual_extents[{n}]"), e.placement, e.ptr, e.offset));
        match self.kind {
            ManifestKind::VllmCumem => {
                if self.model_weight_extents.is_empty() {
                    return Err(LayoutError::malformed("model_weight_extents", "empty"));
                }
            }
            ManifestKind::HostProcess => {
                let page_size = check_page_size(self.page_size)?;
                unique_ids(self.model_weight_extents.iter().map(|e| e.semantic_id))?;
                for (what, placement, ptr, offset) in model.chain(residual) {
                    check_placement(what, placement, ptr, offset, page_size)?;
                }
            }
        }
        Ok(())
    }
}

impl ModelExtent {
    /// Size and checksums.
    pub const fn sum(&self) -> ExtentSum {
        ExtentSum { size: self.size, sha256: self.sha256, crc32: self.crc32 }
    }
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

fn check_page_size(page_size: Option<u64>) -> Result<u64, LayoutError> {
    match page_size {
        Some(size) if size.is_power_of_two() && size >= 4096 => Ok(size),
        Some(size) => Err(LayoutError::malformed("page_size", format!("{size} is no page size"))),
        None => Err(LayoutError::malformed("page_size", "missing field")),
    }
}

fn check_placement(
    what: String,
    placement: Option<Placement>,
    ptr: u64,
    offset: u64,
    page_size: u64,
) -> Result<(), LayoutError> {
    match placement {
        None => Err(LayoutError::malformed(what + ".placement", "missing field")),
        Some(Placement::Mapped) if ptr % page_size != offset % page_size => {
            let problem = format!(
                "it is mapped, but its address {ptr:#x} and its offset {offset} differ modulo the page size {page_size}"
            );
            Err(LayoutError::malformed(what + ".placement", problem))
        }
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const VECTOR: &[u8] = include_bytes!("../../tests/vectors/native-manifest.json");

    fn value() -> Value {
        serde_json::from_slice(VECTOR).unwrap()
    }

    fn parse(value: &Value) -> Result<NativeManifest, FormatError> {
        NativeManifest::parse(value.to_string().as_bytes())
    }

    fn refused(change: impl FnOnce(&mut Value)) -> LayoutError {
        let mut value = value();
        change(&mut value);
        parse(&value).unwrap().layout().unwrap_err()
    }

    #[test]
    fn vector_is_read_proved_and_written_alike() {
        let manifest = NativeManifest::parse(VECTOR).unwrap();
        let layout = manifest.layout().unwrap();
        assert_eq!(layout.pieces().len(), 4);
        assert_eq!(manifest.pack_layout().unwrap().bytes(), 12288);
        let mut expected = VECTOR.to_vec();
        if expected.last() != Some(&b'\n') {
            expected.push(b'\n');
        }
        assert_eq!(String::from_utf8(manifest.to_bytes().unwrap()), String::from_utf8(expected));
    }

    #[test]
    fn every_field_is_required_except_the_optional_ones() {
        let optional = ["residual_layout", "residual_capture_backend"];
        for field in value().as_object().unwrap().keys() {
            let mut changed = value();
            changed.as_object_mut().unwrap().remove(field);
            let result = parse(&changed);
            if optional.contains(&field.as_str()) {
                result.unwrap();
            } else {
                assert!(result.unwrap_err().to_string().contains(field), "{field}");
            }
        }
    }

    #[test]
    fn wrong_types_are_named() {
        for (pointer, wrong, field) in [
            ("/model_weight_extents/1/crc32", json!("27D94E23"), "model_weight_extents[1].crc32"),
            ("/model_weight_extents/0/sha256", json!("sha256:00"), "model_weight_extents[0].sha256"),
            ("/entries/0/ptr", json!(-1), "entries[0].ptr"),
            ("/entries/0/size", json!(1.5), "entries[0].size"),
            ("/kind", json!("sglang-worker"), "kind"),
            ("/format", json!(2), "format"),
            ("/residual_layout", json!("shared-padded-v2"), "residual_layout"),
            ("/residual_layout", Value::Null, "residual_layout"),
            ("/verify_mode", json!("none"), "verify_mode"),
            ("/weight_source", json!("safetensors"), "weight_source"),
            ("/checksum", json!("md5"), "checksum"),
        ] {
            let mut changed = value();
            *changed.pointer_mut(pointer).unwrap() = wrong;
            assert_eq!(parse(&changed).unwrap_err().field, field);
        }
        let mut trailing = VECTOR.to_vec();
        trailing.extend_from_slice(b"{}");
        assert!(NativeManifest::parse(&trailing).unwrap_err().problem.contains("data after"));
    }

    #[test]
    fn fields_of_others_are_tolerated_and_execution_state_is_kept() {
        let mut changed = value();
        changed["added_by_another"] = json!([1]);
        changed["model_execution_state"] = json!({"b": 1, "a": [null]});
        let manifest = parse(&changed).unwrap();
        let written: Value = serde_json::from_slice(&manifest.to_bytes().unwrap()).unwrap();
        assert_eq!(written["model_execution_state"], json!({"b": 1, "a": [null]}));
    }

    #[test]
    fn broken_rules_have_their_kind() {
        for (pointer, wrong, kind) in [
            ("/model_weight_extents/1/size", json!(4096), "Gap"),
            ("/model_weight_extents/1/size", json!(4098), "Overlap"),
            ("/residual_extents/1/size", json!(8065), "OutsideAllocation"),
            ("/residual_extents/1/allocation_ptr", json!(4096), "OutsideAllocation"),
            ("/entries/0/size", json!(20480), "Gap"),
            ("/model_weight_bytes", json!(4224), "SizeChanged"),
            ("/residual_bytes", json!(12160), "SizeChanged"),
            ("/allocation_bytes", json!(16385), "SizeChanged"),
            ("/model_blob_bytes", json!(8192), "SizeChanged"),
            ("/residual_blob_bytes", json!(8192), "SizeChanged"),
            ("/residual_blob_stat/bytes", json!(8192), "SizeChanged"),
            ("/model_weight_extents/1/offset", json!(8192), "Malformed"),
            ("/residual_extents/1/offset", json!(4097), "Malformed"),
            ("/entries/0/tag", json!("kv_cache"), "Malformed"),
        ] {
            let error = refused(|v| *v.pointer_mut(pointer).unwrap() = wrong);
            assert_eq!(error.kind(), kind, "{pointer}: {error}");
        }
        let error = refused(|v| v["model_weight_extents"].as_array_mut().unwrap().swap(0, 1));
        assert_eq!(error.kind(), "Malformed");
        let contiguous = refused(|v| {
            v.as_object_mut().unwrap().remove("residual_layout");
        });
        assert!(contiguous.to_string().contains("residual_extents[1].offset"), "{contiguous}");
    }

    #[test]
    fn host_kind_needs_placement_and_page_size() {
        let host = |change: &dyn Fn(&mut Value)| {
            let mut v = value();
            v["kind"] = json!("coldsnap-host-process");
            v["page_size"] = json!(4096);
            for list in ["model_weight_extents", "residual_extents"] {
                for extent in v[list].as_array_mut().unwrap() {
                    extent["placement"] = json!("copied");
                }
            }
            change(&mut v);
            parse(&v).unwrap().layout()
        };
        host(&|_| ()).unwrap();
        host(&|v| v["model_weight_extents"][0]["placement"] = json!("mapped")).unwrap();
        // Its address is 0x...1ff1, its offset 0.
        let error = host(&|v| v["residual_extents"][0]["placement"] = json!("mapped")).unwrap_err();
        assert!(error.to_string().contains("residual_extents[0].placement"), "{error}");
        assert!(host(&|v| v["page_size"] = json!(5000)).is_err());
        assert!(host(&|v| v["page_size"] = Value::Null).is_err());
        let error = host(&|v| {
            v["residual_extents"][1].as_object_mut().unwrap().remove("placement");
        });
        assert!(error.unwrap_err().to_string().contains("residual_extents[1].placement"));
        let error = host(&|v| {
            v["model_weight_extents"][1]["semantic_id"] = v["model_weight_extents"][0]["semantic_id"].clone();
        });
        assert!(error.unwrap_err().to_string().contains("model_weight_extents[1].semantic_id"));
    }

    #[test]
    fn a_worker_without_model_bytes_is_legal_only_in_the_host_kind() {
        let without = |kind: &str| {
            let mut v = value();
            v["kind"] = json!(kind);
            v["page_size"] = json!(4096);
            v["model_weight_extents"] = json!([]);
            let base = v["entries"][0]["ptr"].clone();
            v["residual_extents"] = json!([{"ptr": base, "size": 16384, "allocation_ptr": base, "offset": 0,
                "crc32": "00000000", "placement": "copied"}]);
            v["residual_layout"] = json!("shared-padded-v1");
            for (field, number) in [
                ("model_weight_bytes", 0),
                ("model_blob_bytes", 0),
                ("blob_bytes", 0),
                ("residual_bytes", 16384),
                ("residual_blob_bytes", 16384),
            ] {
                v[field] = json!(number);
            }
            v["residual_blob_stat"]["bytes"] = json!(16384);
            for stat in ["blob_stat", "model_blob_stat"] {
                v[stat] = json!({"device": 0, "inode": 0, "bytes": 0, "mtime_ns": 0, "ctime_ns": 0});
            }
            parse(&v).unwrap().layout()
        };
        without("coldsnap-host-process").unwrap();
        assert_eq!(without("vllm-live-process-cumem").unwrap_err().kind(), "Malformed");
    }
}
