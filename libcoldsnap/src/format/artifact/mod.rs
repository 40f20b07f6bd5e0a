//! `artifact.json`: the artifact descriptor, format 9. It says what a capsule is, what it needs, and which
//! payloads belong to it.
//!
//! [`Artifact::parse`] is strict about every field that the format specifies, unknown fields included, and checks
//! the reference rules (`rules.rs`). What the format leaves to engines and managers (`launch.units` beyond the id,
//! `execution` entries beyond id and unit, `adapter`, `replay_plan`, `devices`, binding payloads, `expected`) is
//! kept as it is.
//!
//! For the `host` driver some facts may be absent: a process on no accelerator has no driver version (null), a
//! capture without a checkpoint has no `launch.model` and no `weights.recovery`, a capture without model bytes has
//! neither `weights.native` nor `weights.model_payloads`, and a descriptor that lies inside the image that it
//! describes cannot name that image's digest (null).

mod rules;

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::descriptor::Rules;
use super::document;
use super::hex_fields::nullable;
use crate::digest::Digest;

pub use super::descriptor::{DescriptorError as ArtifactError, Object, PAYLOAD_ROLE};

/// How errors name the document.
pub const DOCUMENT: &str = "artifact.json";
/// The only value of `format`.
pub const FORMAT: u32 = 9;
/// The only value of `kind`.
pub const KIND: &str = "coldsnap-snapshot-artifact";
/// The only value of `state`.
pub const STATE: &str = "committed";
/// The only value of `compatibility.policy`.
pub const COMPATIBILITY_POLICY: &str = "placement-independent-v1";

/// Readers refuse a larger descriptor before they parse it: an untrusted one must not cost much memory.
pub const MAX_BYTES: u64 = 4 << 20;

/// The whole descriptor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Artifact {
    /// [`FORMAT`].
    pub format: u32,
    /// [`KIND`].
    pub kind: String,
    /// [`STATE`].
    pub state: String,
    /// Id of the capture.
    pub capture_id: String,
    /// Digest of the canonical JSON of the capture request.
    pub request_sha256: Digest,
    /// How the process was captured.
    pub snapshot_driver: SnapshotDriver,
    /// What a reader must be able to do.
    pub requires: Requirements,
    /// What was launched.
    pub launch: Launch,
    /// Where it can be restored.
    pub compatibility: Compatibility,
    /// The capsule's images and files.
    pub capsule: Capsule,
    /// Facts that runtimes bind to owners.
    pub runtime: Runtime,
    /// Where the model's bytes come from.
    pub weights: Weights,
    /// That the capture was accepted, and by which evidence.
    pub acceptance: Acceptance,
}

/// The process-capture method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriverId {
    /// No accelerator.
    Host,
    /// Process template captured before CUDA exists.
    N580,
    /// Initialised CUDA process.
    N610,
}

impl DriverId {
    /// The point of a process's life at which this driver captures it.
    pub const fn capture_boundary(self) -> &'static str {
        match self {
            Self::Host => "initialized-process-state",
            Self::N580 => "pre-cuda-process-template",
            Self::N610 => "initialized-cuda-process-state",
        }
    }

    /// The lowest NVIDIA driver major version; none for a driver that needs no GPU.
    pub const fn minimum_nvidia_driver_major(self) -> Option<u32> {
        match self {
            Self::Host => None,
            Self::N580 => Some(580),
            Self::N610 => Some(610),
        }
    }
}

/// Version of a driver's images; other implementations write a number or a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Abi {
    /// A number.
    Number(u64),
    /// A name.
    Name(String),
}

/// `snapshot_driver`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotDriver {
    /// Which.
    pub id: DriverId,
    /// Version of its images.
    pub abi: Abi,
    /// [`DriverId::capture_boundary`].
    pub capture_boundary: String,
    /// At least [`DriverId::minimum_nvidia_driver_major`]; null for `host`.
    #[serde(with = "nullable")]
    pub minimum_nvidia_driver_major: Option<u32>,
    /// What every reader of this driver's artifacts must be able to do.
    pub base_requirements: Requirements,
}

/// A list of features with a format number (always 1).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Requirements {
    /// 1.
    pub format: u32,
    /// The features, unique.
    pub features: Vec<Feature>,
}

/// Something that a reader must support.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Feature {
    /// Its id.
    pub id: String,
}

/// `launch`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Launch {
    /// The inference engine, e.g. `llama.cpp`.
    pub engine: String,
    /// The model; absent only for `host` without a known checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<Model>,
    /// The containers.
    pub units: Vec<Unit>,
    /// Their parts.
    pub execution: Execution,
}

/// `launch.model`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Model id, e.g. that of Hugging Face.
    pub id: String,
    /// Pinned revision.
    pub revision: String,
    /// Where from, when not Hugging Face.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// A launch unit: one container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Unit {
    /// Its id.
    pub id: String,
    /// What else the launcher recorded.
    #[serde(flatten)]
    pub facts: BTreeMap<String, Value>,
}

/// `launch.execution`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Execution {
    /// Process slots that own model memory.
    pub workers: Vec<Part>,
    /// Groups of workers.
    pub groups: Vec<Part>,
    /// Everything else that runs.
    pub services: Vec<Part>,
    /// Facts for the engine's adapter.
    pub adapter: BTreeMap<String, Value>,
}

/// A worker, group or service.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Its id.
    pub id: String,
    /// The unit it is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// What else the launcher recorded.
    #[serde(flatten)]
    pub facts: BTreeMap<String, Value>,
}

/// `compatibility`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compatibility {
    /// [`COMPATIBILITY_POLICY`].
    pub policy: String,
    /// One entry per unit.
    pub units: Vec<UnitCompatibility>,
}

/// The host on which a unit was captured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnitCompatibility {
    /// The unit's id.
    pub unit: String,
    /// Machine architecture as `uname -m` prints it.
    pub architecture: String,
    /// Kernel release.
    pub kernel: String,
    /// NVIDIA driver version at the capture; null for `host`.
    #[serde(with = "nullable")]
    pub nvidia_driver_captured: Option<String>,
    /// Lowest NVIDIA driver version; null for `host`.
    #[serde(with = "nullable")]
    pub nvidia_driver_min: Option<String>,
    /// CUDA version in the container; null for `host`.
    #[serde(with = "nullable")]
    pub cuda_userspace: Option<String>,
    /// Accelerators, empty for `host`.
    pub devices: Vec<Value>,
}

/// `capsule`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capsule {
    /// One image per unit.
    pub images: Vec<CapsuleImage>,
    /// Files of the capsule that the descriptor pins.
    pub objects: Vec<Object>,
}

/// The OCI image of a unit's capsule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CapsuleImage {
    /// The unit's id.
    pub unit: String,
    /// Image reference.
    pub reference: String,
    /// Digest of the image; null only for `host`, in a descriptor that lies inside the image.
    #[serde(with = "nullable")]
    pub digest: Option<Digest>,
    /// The capsule's directory in the image, relative to its root.
    pub root: String,
    /// Equal to the artifact's.
    pub snapshot_driver: DriverRef,
}

/// Names a snapshot driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriverRef {
    /// Which.
    pub id: DriverId,
    /// Version of its images.
    pub abi: Abi,
}

/// `runtime`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Runtime {
    /// Bindings.
    pub bindings: Vec<Binding>,
}

/// A fact that a runtime needs about an owner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Binding {
    /// `unit/<id>`, `worker/<id>`, ...
    pub owner: String,
    /// Kind of fact.
    pub kind: String,
    /// Schema of the payload.
    pub schema: String,
    /// Digest of the canonical JSON of `payload`.
    pub digest: Digest,
    /// The fact.
    pub payload: Value,
}

/// `weights`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Weights {
    /// The payload objects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_payloads: Option<ModelPayloads>,
    /// Present when the model's bytes can come from the payloads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub native: Option<Native>,
    /// How to get the bytes from the checkpoint; absent only for `host` without model payloads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery: Option<Recovery>,
}

/// `weights.model_payloads`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelPayloads {
    /// Repository that publishes them; empty when not published. (Null and absence are read as empty.)
    #[serde(default, deserialize_with = "null_is_empty")]
    pub repository: String,
    /// Pinned commit, 40 hex digits; empty when not published.
    #[serde(default, deserialize_with = "null_is_empty")]
    pub revision: String,
    /// One object per worker that owns model bytes.
    pub objects: Vec<Object>,
}

/// `weights.native`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Native {
    /// Which driver's images it belongs to.
    pub snapshot_driver: DriverId,
}

/// `weights.recovery`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recovery {
    /// Kind of source, e.g. `safetensors`.
    pub source: String,
    /// Model id.
    pub model_id: String,
    /// Pinned revision.
    pub revision: String,
    /// Which driver's images it belongs to.
    pub snapshot_driver: DriverId,
    /// How the engine loads.
    pub load_path: String,
    /// Steps for the engine's adapter.
    pub replay_plan: Vec<Value>,
}

/// `acceptance`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Acceptance {
    /// True.
    pub accepted: bool,
    /// What a restored unit is expected to answer.
    pub expected: Value,
}

/// A payload that one worker needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PayloadRequirement {
    /// Id of the worker.
    pub worker: String,
    /// The payload.
    pub digest: Digest,
    /// Its size.
    pub bytes: u64,
}

impl Artifact {
    /// Parses a descriptor and checks all reference rules.
    ///
    /// # Errors
    /// Names the field and what is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Self, ArtifactError> {
        document::limit(DOCUMENT, bytes, MAX_BYTES)?;
        let artifact: Self = document::parse_exact(DOCUMENT, bytes)?;
        artifact.check()?;
        Ok(artifact)
    }

    /// Checks the reference rules of a descriptor that was built here.
    ///
    /// # Errors
    /// The first violation.
    pub fn check(&self) -> Result<(), ArtifactError> {
        rules::check(self)
    }

    /// The text of the file: indent 2, sorted keys, newline at the end.
    ///
    /// # Errors
    /// A violated rule.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ArtifactError> {
        self.check()?;
        Ok(document::to_bytes(DOCUMENT, self)?)
    }

    /// Writes the descriptor durably to a new file; a descriptor is never overwritten.
    ///
    /// # Errors
    /// A violated rule, an existing file (`AlreadyExists`), or what the file system answers.
    pub fn write_new(&self, path: &Path) -> Result<(), ArtifactError> {
        let bytes = self.to_bytes()?;
        super::descriptor::write_new(path, &bytes)
    }

    /// Id and abi of the snapshot driver.
    pub fn driver_ref(&self) -> DriverRef {
        DriverRef { id: self.snapshot_driver.id, abi: self.snapshot_driver.abi.clone() }
    }

    /// That an owner of another document exists here.
    pub(super) fn check_owner(&self, of: Rules, field: String, owner: &str) -> Result<(), ArtifactError> {
        rules::Ids::collect(self)?.owner(of, field, owner)
    }

    /// The payloads that the workers need, in the order of the descriptor.
    pub fn payloads(&self) -> Vec<PayloadRequirement> {
        let objects = self.weights.model_payloads.iter().flat_map(|payloads| &payloads.objects);
        objects
            .filter_map(|object| {
                let worker = object.owner.strip_prefix("worker/")?.to_owned();
                Some(PayloadRequirement { worker, digest: object.sha256, bytes: object.bytes })
            })
            .collect()
    }
}

impl Binding {
    /// A binding with the digest of its payload.
    pub fn new(owner: &str, kind: &str, schema: &str, payload: Value) -> Self {
        let digest = super::canonical_json::digest(&payload);
        Self { owner: owner.to_owned(), kind: kind.to_owned(), schema: schema.to_owned(), digest, payload }
    }
}

fn null_is_empty<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.unwrap_or_default())
}
