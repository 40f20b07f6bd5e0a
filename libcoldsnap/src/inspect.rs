//! What a capsule is and what a restore of it needs, for people and programs.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::capsule;
use crate::capture::facts::{CaptureFacts, FactsError};
use crate::digest::Digest;
use crate::format::artifact::{Artifact, ArtifactError, DriverId};
use crate::store::NodeStore;

/// A capsule's documents and the sizes of its files. Paths are relative to the container's root.
#[derive(Debug, Clone, Default)]
pub struct CapsuleFiles {
    /// Content of `artifact.json` and `capture.json`.
    pub documents: BTreeMap<String, Vec<u8>>,
    /// Size of every file in bytes.
    pub sizes: BTreeMap<String, u64>,
}

/// A capsule, described.
#[derive(Debug, Clone, Serialize)]
pub struct Inspection {
    /// Identifier of the capture.
    pub capture_id: String,
    /// When it was captured, seconds since 1970.
    pub created_unix: u64,
    /// The process-capture method.
    pub driver: DriverId,
    /// The program.
    pub engine: String,
    /// The checkpoint that the payloads come from.
    pub model: Option<String>,
    /// Workers with their payloads.
    pub workers: Vec<WorkerInspection>,
    /// Size of the CRIU images in bytes.
    pub images_bytes: u64,
    /// Size of all residuals in bytes.
    pub residual_bytes: u64,
    /// Whether every payload is on this node.
    pub restorable_here: bool,
    /// What a restore needs from the node.
    pub needs_host: HostNeeds,
    /// What a restore needs from the container's spec.
    pub needs_spec: SpecNeeds,
    /// Which memory is mapped, and what narrowed it.
    pub scope: String,
    /// Why the scope is narrower than asked for.
    pub scope_narrowed: Vec<String>,
}

/// One worker.
#[derive(Debug, Clone, Serialize)]
pub struct WorkerInspection {
    /// Worker id.
    pub id: String,
    /// Pid in the container.
    pub pid: u32,
    /// Its payload.
    pub payload: Option<Digest>,
    /// Size of the payload in bytes.
    pub payload_bytes: u64,
    /// Whether the payload is in this node's store (not verified here).
    pub payload_here: bool,
    /// Size of the residual in bytes.
    pub residual_bytes: u64,
}

/// What a restore needs from the node.
#[derive(Debug, Clone, Serialize)]
pub struct HostNeeds {
    /// Machine architecture.
    pub architecture: String,
    /// Page size in bytes.
    pub page_size: u64,
    /// CRIU that made the dump; the same or a newer one restores it.
    pub criu: String,
    /// Kernel of the capture; information only.
    pub captured_kernel: String,
}

/// What a restore needs from the container's spec.
#[derive(Debug, Clone, Serialize)]
pub struct SpecNeeds {
    /// Process arguments.
    pub args: Vec<String>,
    /// Whether the process has a terminal.
    pub terminal: bool,
    /// Destinations that must be bind mounts.
    pub binds: Vec<String>,
}

/// A capsule cannot be described.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum InspectError {
    #[error("this is no capsule: it has no /{0}")]
    Missing(&'static str),
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    #[error(transparent)]
    Facts(#[from] FactsError),
}

/// Describes a capsule; looks for its payloads in `store`.
///
/// # Errors
/// When a document is missing or malformed.
pub fn inspect(files: &CapsuleFiles, store: &NodeStore) -> Result<Inspection, InspectError> {
    let document = |path: &'static str| files.documents.get(path).ok_or(InspectError::Missing(path));
    let artifact = Artifact::parse(document(capsule::ARTIFACT_PATH)?)?;
    let facts = CaptureFacts::parse(capsule::CAPTURE_PATH, document(capsule::CAPTURE_PATH)?)?;
    let payloads = artifact.payloads();
    let residual = |worker: &str| {
        let path = capsule::worker_dir(worker).join(capsule::RESIDUAL_NAME);
        files.sizes.get(&*path.to_string_lossy()).copied().unwrap_or_default()
    };
    let workers: Vec<WorkerInspection> = facts
        .workers
        .iter()
        .map(|worker| {
            let payload = payloads.iter().find(|p| p.worker == worker.id);
            WorkerInspection {
                id: worker.id.clone(),
                pid: worker.pid,
                payload: payload.map(|p| p.digest),
                payload_bytes: payload.map_or(0, |p| p.bytes),
                payload_here: payload.is_some_and(|p| {
                    let metadata = std::fs::symlink_metadata(store.payload_path(&p.digest));
                    metadata.is_ok_and(|m| m.is_file() && m.len() == p.bytes)
                }),
                residual_bytes: residual(&worker.id),
            }
        })
        .collect();
    let images = files.sizes.iter().filter(|(path, _)| path.starts_with(capsule::IMAGES_DIR));
    Ok(Inspection {
        capture_id: facts.capture_id,
        created_unix: facts.created_unix,
        driver: artifact.snapshot_driver.id,
        engine: artifact.launch.engine,
        model: artifact.launch.model.map(|m| format!("{}@{}", m.id, m.revision)),
        images_bytes: images.map(|(_, bytes)| bytes).sum(),
        residual_bytes: workers.iter().map(|w| w.residual_bytes).sum(),
        restorable_here: workers.iter().all(|w| w.payload.is_none() || w.payload_here),
        needs_host: HostNeeds {
            architecture: facts.architecture,
            page_size: facts.page_size,
            criu: facts.tools.criu,
            captured_kernel: facts.kernel,
        },
        needs_spec: SpecNeeds {
            args: facts.process.args,
            terminal: facts.process.terminal,
            binds: facts.binds,
        },
        scope: facts.scope.to_string(),
        scope_narrowed: facts.scope_narrowed,
        workers,
    })
}
