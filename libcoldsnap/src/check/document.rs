//! Which kind of document a JSON file is, its rules, and its main figures.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{CheckError, FileIdentity, layout_error, malformed, unrecognized, validation};
use crate::capsule;
use crate::capture::facts::CaptureFacts;
use crate::digest::Digest;
use crate::format::artifact::{self, Artifact, DriverId};
use crate::format::native_manifest::{ManifestKind, NativeManifest};
use crate::format::overlay::{self, Overlay};
use crate::format::recovery_manifest::RecoveryManifest;
use crate::format::validation::ValidationRecord;
use crate::format::{DocumentError, MAX_DOCUMENT_BYTES};

/// A parsed document of any kind.
#[derive(Debug)]
pub enum Document {
    /// An artifact descriptor.
    Artifact(Box<Artifact>),
    /// A target-local overlay.
    Overlay(Box<Overlay>),
    /// A native manifest.
    NativeManifest(Box<NativeManifest>),
    /// A recovery manifest.
    RecoveryManifest(Box<RecoveryManifest>),
    /// A validation record.
    ValidationRecord(Box<ValidationRecord>),
    /// `capture.json`
    CaptureFacts(Box<CaptureFacts>),
}

/// What something is, and its main figures; all sizes in bytes.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
#[expect(missing_docs, reason = "named as in the documents")]
pub enum Summary {
    Artifact {
        capture_id: String,
        driver: DriverId,
        engine: String,
        model: Option<String>,
        units: usize,
        workers: usize,
        capsule_objects: usize,
        payloads: Vec<Digest>,
        /// Repository and commit, when published.
        published: Option<String>,
    },
    Overlay {
        capture_id: String,
        driver: DriverId,
        portable_descriptor: Digest,
        hosts: Vec<String>,
        accelerators: usize,
        payloads: Vec<Digest>,
        capsule_objects: usize,
    },
    NativeManifest {
        kind: ManifestKind,
        worker_id: String,
        capture_id: String,
        allocations: usize,
        allocation_bytes: u64,
        model_extents: usize,
        model_weight_bytes: u64,
        model_blob_bytes: u64,
        residual_extents: usize,
        residual_bytes: u64,
        residual_layout: &'static str,
        has_model_execution_state: bool,
    },
    RecoveryManifest {
        kind: ManifestKind,
        worker_id: String,
        capture_id: String,
        model: Option<String>,
        allocations: usize,
        allocation_bytes: u64,
        model_extents: usize,
        model_weight_bytes: u64,
        /// Model extents that can be rebuilt from the checkpoint's files.
        recoverable_extents: usize,
        residual_bytes: u64,
    },
    ValidationRecord {
        blob: String,
        digest: Digest,
        bytes: u64,
        content_evidence: String,
        validated_unix_ns: u64,
    },
    CaptureFacts {
        capture_id: String,
        created_unix: u64,
        architecture: String,
        images: usize,
        workers: Vec<String>,
        scope: String,
    },
    Pack {
        digest: Option<Digest>,
        bytes: u64,
    },
    Capsule {
        capture_id: String,
        driver: DriverId,
        workers: Vec<String>,
        objects: usize,
        object_bytes: u64,
        payloads: Vec<Digest>,
    },
}

impl Summary {
    /// Of a file that is no document: a pack by its name.
    ///
    /// # Errors
    /// `Io`, and `Unrecognized` for another name.
    pub fn pack(path: &Path) -> Result<Self, CheckError> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let digest = name.strip_suffix(".pack").and_then(|hex| Digest::from_hex(hex).ok());
        if digest.is_none() && name != capsule::PACK_NAME {
            return Err(unrecognized(path, "neither a JSON document nor a pack"));
        }
        let metadata = path.metadata().map_err(|source| CheckError::Io { path: path.to_owned(), source })?;
        Ok(Self::Pack { digest, bytes: metadata.len() })
    }
}

/// What tells the kinds apart.
#[derive(Deserialize)]
struct Marks {
    kind: Option<Value>,
    weight_source: Option<Value>,
    tools: Option<Value>,
    images: Option<Value>,
}

impl Document {
    /// Reads a document of any kind; `None` when the file is no JSON object or has a pack's name.
    ///
    /// # Errors
    /// `Io`, `Unrecognized` for JSON of another kind, and what is wrong with a document of a known one.
    pub fn read(path: &Path) -> Result<Option<Self>, CheckError> {
        let io = |source| CheckError::Io { path: path.to_owned(), source };
        // A model's first bytes may be anything.
        if path.extension().is_some_and(|extension| extension == "pack") {
            return Ok(None);
        }
        let mut file = File::open(path).map_err(io)?;
        let mut start = [0; 64];
        let read = file.read(&mut start).map_err(io)?;
        let object = start[..read].iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
        if !object {
            return Ok(None);
        }
        let mut bytes = start[..read].to_vec();
        file.take(MAX_DOCUMENT_BYTES).read_to_end(&mut bytes).map_err(io)?;
        if bytes.len() as u64 > MAX_DOCUMENT_BYTES {
            return Err(unrecognized(path, format!("more than {MAX_DOCUMENT_BYTES} bytes of JSON")));
        }
        Self::parse(path, &bytes).map(Some)
    }

    /// Parses a document of any kind; `path` is for messages.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, CheckError> {
        let format = |source| CheckError::from(DocumentError::Format { path: path.to_owned(), source });
        let descriptor = |source| CheckError::Descriptor { path: path.to_owned(), source };
        let marks: Marks = serde_json::from_slice(bytes).map_err(|e| malformed(path, "document", ".", e))?;
        match marks.kind.as_ref().and_then(Value::as_str) {
            Some(artifact::KIND) => {
                Artifact::parse(bytes).map(|a| Self::Artifact(Box::new(a))).map_err(descriptor)
            }
            Some(overlay::KIND) => {
                Overlay::parse(bytes).map(|o| Self::Overlay(Box::new(o))).map_err(descriptor)
            }
            Some(validation::KIND) => {
                ValidationRecord::parse(bytes).map(|r| Self::ValidationRecord(Box::new(r))).map_err(format)
            }
            // Both manifests have the same kinds.
            Some(_) if marks.weight_source == Some("safetensors".into()) => {
                RecoveryManifest::parse(bytes).map(|m| Self::RecoveryManifest(Box::new(m))).map_err(format)
            }
            Some(_) if marks.weight_source.is_some() => {
                NativeManifest::parse(bytes).map(|m| Self::NativeManifest(Box::new(m))).map_err(format)
            }
            Some(kind) => Err(unrecognized(path, format!("JSON of the unknown kind {kind:?}"))),
            None if marks.tools.is_some() && marks.images.is_some() => {
                let facts = CaptureFacts::parse(&path.display().to_string(), bytes)?;
                Ok(Self::CaptureFacts(Box::new(facts)))
            }
            None => Err(unrecognized(path, "JSON without a kind")),
        }
    }

    /// Checks the rules that parsing does not.
    pub(super) fn check(&self, path: &Path) -> Result<(), CheckError> {
        let proof = match self {
            Self::NativeManifest(manifest) => manifest.layout(),
            Self::RecoveryManifest(manifest) => manifest.layout(),
            _ => return Ok(()),
        };
        proof.map(drop).map_err(|source| layout_error(path, source))
    }

    /// What it is, and its main figures.
    pub fn summary(&self) -> Summary {
        match self {
            Self::Artifact(a) => Summary::Artifact {
                capture_id: a.capture_id.clone(),
                driver: a.snapshot_driver.id,
                engine: a.launch.engine.clone(),
                model: a.launch.model.as_ref().map(|m| format!("{}@{}", m.id, m.revision)),
                units: a.launch.units.len(),
                workers: a.launch.execution.workers.len(),
                capsule_objects: a.capsule.objects.len(),
                payloads: distinct(a.payloads().into_iter().map(|p| p.digest)),
                published: a
                    .weights
                    .model_payloads
                    .as_ref()
                    .filter(|p| !p.repository.is_empty())
                    .map(|p| format!("{}@{}", p.repository, p.revision)),
            },
            Self::Overlay(o) => Summary::Overlay {
                capture_id: o.capture_id.clone(),
                driver: o.snapshot_driver.id,
                portable_descriptor: o.portable_descriptor,
                hosts: o.target.hosts.iter().map(|h| h.hostname.clone()).collect(),
                accelerators: o.target.accelerators.len(),
                payloads: distinct(o.payloads.iter().map(|p| p.sha256)),
                capsule_objects: o.capsule_objects.len(),
            },
            Self::NativeManifest(m) => Summary::NativeManifest {
                kind: m.kind,
                worker_id: m.worker_id.clone(),
                capture_id: m.capture_id.clone(),
                allocations: m.entries.len(),
                allocation_bytes: m.allocation_bytes,
                model_extents: m.model_weight_extents.len(),
                model_weight_bytes: m.model_weight_bytes,
                model_blob_bytes: m.model_blob_bytes,
                residual_extents: m.residual_extents.len(),
                residual_bytes: m.residual_bytes,
                residual_layout: m.residual_layout.name(),
                has_model_execution_state: m.model_execution_state.is_some(),
            },
            Self::RecoveryManifest(m) => Summary::RecoveryManifest {
                kind: m.kind,
                worker_id: m.worker_id.clone(),
                capture_id: m.capture_id.clone(),
                model: m.model_source.as_ref().map(|s| format!("{}@{}", s.model_id, s.revision)),
                allocations: m.entries.len(),
                allocation_bytes: m.allocation_bytes,
                model_extents: m.model_weight_extents.len(),
                model_weight_bytes: m.model_weight_bytes,
                recoverable_extents: m.recovery_sources.len(),
                residual_bytes: m.residual_bytes,
            },
            Self::ValidationRecord(r) => Summary::ValidationRecord {
                blob: r.blob.clone(),
                digest: r.expected.sha256,
                bytes: r.expected.bytes,
                content_evidence: r.content_evidence.clone(),
                validated_unix_ns: r.validated_unix_ns,
            },
            Self::CaptureFacts(f) => Summary::CaptureFacts {
                capture_id: f.capture_id.clone(),
                created_unix: f.created_unix,
                architecture: f.architecture.clone(),
                images: f.images.len(),
                workers: f.workers.iter().map(|w| w.id.clone()).collect(),
                scope: f.scope.to_string(),
            },
        }
    }
}

/// In order, each once.
pub(super) fn distinct(digests: impl Iterator<Item = Digest>) -> Vec<Digest> {
    let mut seen = Vec::new();
    digests.for_each(|digest| {
        if !seen.contains(&digest) {
            seen.push(digest);
        }
    });
    seen
}

/// Checks how a record's own file is kept, and says whether it would be a hit for the payload beside it.
pub(super) fn record_state(path: &Path, record: &ValidationRecord) -> Result<String, CheckError> {
    let io = |source| CheckError::Io { path: path.to_owned(), source };
    let bad = |problem: String| malformed(path, validation::DOCUMENT, ".", problem);
    let metadata = path.symlink_metadata().map_err(io)?;
    let mode = metadata.permissions().mode() & 0o777;
    if !metadata.is_file() {
        return Err(bad("it is used only as a regular file, not through a link".to_owned()));
    }
    if metadata.len() > validation::MAX_BYTES {
        return Err(bad(format!("larger than {} bytes", validation::MAX_BYTES)));
    }
    if mode & 0o077 != 0 {
        return Err(bad(format!(
            "mode {mode:04o}: it is used only without permissions for group and others"
        )));
    }
    let named = format!("{}{}", record.blob, validation::SUFFIX);
    if path.file_name().and_then(|name| name.to_str()) != Some(&named) {
        return Err(malformed(
            path,
            validation::DOCUMENT,
            "blob",
            format!("a record of it is named {named}"),
        ));
    }
    let blob: PathBuf = path.with_file_name(&record.blob);
    Ok(match blob.symlink_metadata() {
        Err(e) => format!("the payload beside it: {e}"),
        Ok(found) => match record.matches(&record.blob, record.expected.sha256, &FileIdentity::of(&found)) {
            Ok(()) => "the payload's bytes: the record matches the file beside it".to_owned(),
            Err(field) => format!("the payload's bytes: the next admission hashes it, {field} differs"),
        },
    })
}
