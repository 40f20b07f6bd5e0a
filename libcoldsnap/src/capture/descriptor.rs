//! The artifact descriptor of a capture by the `host` driver.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::run::CaptureRequest;
use crate::capsule;
use crate::digest::Digest;
use crate::format::artifact::{
    Abi, Acceptance, Artifact, ArtifactError, COMPATIBILITY_POLICY, Capsule, CapsuleImage, Compatibility,
    DriverId, DriverRef, Execution, FORMAT, Feature, KIND, Launch, Model, ModelPayloads, Native, Object,
    Part, Recovery, Requirements, Runtime, STATE, SnapshotDriver, Unit, UnitCompatibility, Weights,
};
use crate::format::canonical_json;
use crate::format::recovery_manifest::ModelSource;
use crate::mapped_file::MappedFile;
use crate::store::AdmittedPayload;

/// Id of the one launch unit of a capsule.
const UNIT: &str = "main";
/// Version of the `host` driver's capsule: rewritten CRIU images with mapped placement.
const ABI: u64 = 1;
/// What a reader must be able to do to restore a capsule of the `host` driver.
const FEATURE: &str = "mapped-placement-v1";

/// The descriptor could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DescriptorError {
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    #[error("cannot describe {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// Writes `artifact.json` for the finished capsule directory; its digest. `workers` are all workers,
/// `payloads` those that own model bytes.
pub(super) fn write(
    request: &CaptureRequest<'_>,
    workers: &[String],
    payloads: &[(String, &AdmittedPayload)],
    model_source: Option<&ModelSource>,
) -> Result<Digest, DescriptorError> {
    let root = request.layer_root.join(capsule::CAPSULE_DIR);
    let mut objects = Vec::new();
    describe(&root, Path::new(""), &mut objects)?;
    let driver = DriverRef { id: DriverId::Host, abi: Abi::Number(ABI) };
    let features = Requirements { format: 1, features: vec![Feature { id: FEATURE.to_owned() }] };
    let system = rustix::system::uname();
    let model = model_source.filter(|_| !payloads.is_empty());
    let artifact = Artifact {
        format: FORMAT,
        kind: KIND.to_owned(),
        state: STATE.to_owned(),
        capture_id: request.capture_id.clone(),
        request_sha256: canonical_json::digest(&json!({
            "args": request.process.args,
            "binds": request.binds,
            "scope": request.scope.to_string(),
        })),
        snapshot_driver: SnapshotDriver {
            id: DriverId::Host,
            abi: Abi::Number(ABI),
            capture_boundary: DriverId::Host.capture_boundary().to_owned(),
            minimum_nvidia_driver_major: None,
            base_requirements: features.clone(),
        },
        requires: features,
        launch: Launch {
            engine: engine(&request.process.args),
            model: model.map(|m| Model {
                id: m.model_id.clone(),
                revision: m.revision.clone(),
                source: None,
            }),
            units: vec![Unit { id: UNIT.to_owned(), facts: BTreeMap::new() }],
            execution: Execution {
                workers: workers
                    .iter()
                    .map(|id| Part { id: id.clone(), unit: Some(UNIT.to_owned()), facts: BTreeMap::new() })
                    .collect(),
                groups: Vec::new(),
                services: Vec::new(),
                adapter: BTreeMap::new(),
            },
        },
        compatibility: Compatibility {
            policy: COMPATIBILITY_POLICY.to_owned(),
            units: vec![UnitCompatibility {
                unit: UNIT.to_owned(),
                architecture: system.machine().to_string_lossy().into_owned(),
                kernel: system.release().to_string_lossy().into_owned(),
                nvidia_driver_captured: None,
                nvidia_driver_min: None,
                cuda_userspace: None,
                devices: Vec::new(),
            }],
        },
        capsule: Capsule {
            images: vec![CapsuleImage {
                unit: UNIT.to_owned(),
                reference: request.image_reference.clone(),
                digest: None,
                root: capsule::CAPSULE_DIR.to_owned(),
                snapshot_driver: driver,
            }],
            objects,
        },
        runtime: Runtime { bindings: Vec::new() },
        weights: weights(payloads, model),
        acceptance: Acceptance {
            accepted: true,
            expected: json!({"evidence": "images-proven-page-by-page"}),
        },
    };
    let path = request.layer_root.join(capsule::ARTIFACT_PATH);
    artifact.write_new(&path)?;
    let bytes = fs::read(&path).map_err(|source| DescriptorError::Io { path, source })?;
    Ok(Digest::of(&bytes))
}

fn weights(payloads: &[(String, &AdmittedPayload)], model: Option<&ModelSource>) -> Weights {
    let objects: Vec<Object> = payloads
        .iter()
        .map(|(worker, payload)| Object::payload(worker, *payload.digest(), payload.bytes()))
        .collect();
    Weights {
        native: (!objects.is_empty()).then_some(Native { snapshot_driver: DriverId::Host }),
        recovery: model.map(|model| Recovery {
            source: "checkpoint-files".to_owned(),
            model_id: model.model_id.clone(),
            revision: model.revision.clone(),
            snapshot_driver: DriverId::Host,
            load_path: "cold-start".to_owned(),
            replay_plan: Vec::new(),
        }),
        model_payloads: (!objects.is_empty()).then_some(ModelPayloads {
            repository: String::new(),
            revision: String::new(),
            objects,
        }),
    }
}

/// The engine's name: that of the program.
fn engine(args: &[String]) -> String {
    let program = args.first().map(Path::new).and_then(Path::file_name);
    program.map_or_else(|| "unknown".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Every file of the capsule with its digest, in path order. The payload's placeholder is not content.
fn describe(root: &Path, relative: &Path, objects: &mut Vec<Object>) -> Result<(), DescriptorError> {
    let dir = root.join(relative);
    let error = |path: &Path, source| DescriptorError::Io { path: path.to_owned(), source };
    let mut names: Vec<PathBuf> = fs::read_dir(&dir)
        .and_then(|entries| entries.map(|entry| Ok(relative.join(entry?.file_name()))).collect())
        .map_err(|e| error(&dir, e))?;
    names.sort();
    for name in names {
        let path = root.join(&name);
        if path.is_dir() {
            describe(root, &name, objects)?;
            continue;
        }
        if name.file_name().is_some_and(|n| n == capsule::PACK_NAME) {
            continue;
        }
        let bytes = MappedFile::open(&path).map_err(|e| error(&path, e.into()))?;
        objects.push(Object {
            role: role(&name).to_owned(),
            owner: owner(&name),
            path: name.to_string_lossy().into_owned(),
            bytes: bytes.len() as u64,
            sha256: Digest::of(&bytes),
        });
    }
    Ok(())
}

fn role(name: &Path) -> &'static str {
    let file = name.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    match file {
        capsule::RESIDUAL_NAME => "residual",
        capsule::NATIVE_MANIFEST_NAME => "native-manifest",
        capsule::RECOVERY_MANIFEST_NAME => "recovery-manifest",
        "capture.json" => "capture-facts",
        _ => "criu-image",
    }
}

fn owner(name: &Path) -> String {
    let mut parts = name.iter().map(|part| part.to_string_lossy());
    match (parts.next().as_deref(), parts.next()) {
        (Some("hydration"), Some(worker)) => format!("worker/{worker}"),
        _ => format!("unit/{UNIT}"),
    }
}
