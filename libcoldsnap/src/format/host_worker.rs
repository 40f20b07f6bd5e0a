//! Builds the native manifest of a worker that the `host` driver captured.

use std::collections::BTreeMap;
use std::time::Duration;

use super::native_manifest::{
    BlobStat, Checksum, Entry, FORMAT, ManifestKind, ModelExtent, NativeManifest, NativeWeightSource,
    ResidualExtent, VerifyMode,
};
use super::residual::ResidualLayout;
use crate::capsule;
use crate::extent::{CoveredLayout, LayoutError};

/// The facts of one captured worker of the `host` driver, from which [`NativeManifest::host`] makes a manifest.
#[derive(Debug, Clone)]
pub struct HostWorker {
    /// Worker id within the launch unit.
    pub worker_id: String,
    /// Capture id.
    pub capture_id: String,
    /// Name of the host of the capture.
    pub host: String,
    /// Process id in the container.
    pub pid: u32,
    /// Rank of the worker.
    pub rank: u32,
    /// Time of the capture, nanoseconds since the epoch.
    pub created_unix_ns: u64,
    /// Page size of the process.
    pub page_size: u64,
    /// Its allocations.
    pub entries: Vec<Entry>,
    /// Its model extents, in any order, with their offsets in the pack.
    pub model_weight_extents: Vec<ModelExtent>,
    /// Identity of the pack; default (all zero) when there are no model extents.
    pub model_blob_stat: BlobStat,
    /// Its other bytes.
    pub residual_extents: Vec<ResidualExtent>,
    /// How they lie in the blob.
    pub residual_layout: ResidualLayout,
    /// Identity of the residual blob.
    pub residual_blob_stat: BlobStat,
    /// Whether the pack was in the store already.
    pub blob_reused: bool,
    /// Seconds that writing took.
    pub write_seconds: f64,
    /// Seconds that hashing took.
    pub verification_seconds: f64,
    /// Seconds of each phase.
    pub phase_seconds: BTreeMap<String, f64>,
}

impl HostWorker {
    fn identity(&self) -> String {
        let Self { worker_id, host, rank, pid, .. } = self;
        format!("worker-id-{worker_id}-host-{host}-rank-{rank}-pid-{pid}")
    }
}

impl NativeManifest {
    /// Makes the manifest of a worker of the `host` driver, with all sums, and proves it.
    ///
    /// # Errors
    /// As [`Self::layout`].
    pub fn host(worker: HostWorker) -> Result<(Self, CoveredLayout), LayoutError> {
        let identity = worker.identity();
        let mut extents = worker.model_weight_extents;
        extents.sort_by_key(|e| e.offset);
        let total = |sizes: &mut dyn Iterator<Item = u64>| sizes.fold(0, u64::saturating_add);
        let manifest = Self {
            format: FORMAT,
            kind: ManifestKind::HostProcess,
            identity,
            generation: format!("{}-{}", worker.pid, worker.created_unix_ns),
            pid: worker.pid,
            rank: worker.rank,
            host: worker.host,
            worker_id: worker.worker_id,
            capture_id: worker.capture_id,
            created_unix: Duration::from_nanos(worker.created_unix_ns).as_secs_f64(),
            weight_source: NativeWeightSource::SplitNative,
            blob: capsule::PACK_NAME.to_owned(),
            blob_bytes: worker.model_blob_stat.bytes,
            blob_stat: worker.model_blob_stat,
            model_blob: capsule::PACK_NAME.to_owned(),
            model_blob_bytes: worker.model_blob_stat.bytes,
            model_blob_stat: worker.model_blob_stat,
            residual_blob: capsule::RESIDUAL_NAME.to_owned(),
            residual_blob_bytes: worker.residual_blob_stat.bytes,
            residual_blob_stat: worker.residual_blob_stat,
            residual_layout: worker.residual_layout,
            allocation_bytes: total(&mut worker.entries.iter().map(|e| e.size)),
            model_weight_bytes: total(&mut extents.iter().map(|e| e.size)),
            residual_bytes: total(&mut worker.residual_extents.iter().map(|e| e.size)),
            model_weight_extents: extents,
            model_execution_state: None,
            residual_extents: worker.residual_extents,
            direct_io: true,
            write_io_mode: "padded-direct".to_owned(),
            residual_capture_backend: None,
            blob_reused: worker.blob_reused,
            verify_mode: VerifyMode::Preverified,
            checksum: Checksum::Crc32,
            preverified: true,
            portable_model_payload: true,
            portable_residual_blob: true,
            verification_seconds: worker.verification_seconds,
            write_seconds: worker.write_seconds,
            phase_seconds: worker.phase_seconds,
            entries: worker.entries,
            page_size: Some(worker.page_size),
        };
        let layout = manifest.layout()?;
        Ok((manifest, layout))
    }
}
