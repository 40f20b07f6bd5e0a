//! `capture.json`: what a restore compares with the live container before anything starts.

use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::scope::MappingScope;
use crate::format::descriptor::is_id;
use crate::format::document;

/// The only format of `capture.json`.
pub const FORMAT: u32 = 1;
/// Larger is not one of ours.
pub(crate) const MAX_BYTES: u64 = 4 << 20;

/// Facts of one capture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaptureFacts {
    /// [`FORMAT`].
    pub format: u32,
    /// Identifier of the capture.
    pub capture_id: String,
    /// Seconds since 1970.
    pub created_unix: u64,
    /// `uname -m` of the node.
    pub architecture: String,
    /// Page size in bytes.
    pub page_size: u64,
    /// `uname -r` of the node; information only, never compared.
    pub kernel: String,
    /// Versions of the tools that made the dump; information only.
    pub tools: Tools,
    /// What the process was started with; a restore is only tried for the same arguments.
    pub process: ProcessFacts,
    /// Bind mounts that the container had (destinations), which CRIU needs again.
    pub binds: Vec<String>,
    /// CRIU images in the capsule.
    pub images: Vec<ImageFacts>,
    /// Scope that was asked for.
    pub scope: MappingScope,
    /// What was found in a process that narrowed the scope, or nothing.
    pub scope_narrowed: Vec<String>,
    /// What happens to established TCP connections at a restore: true when they are kept.
    pub keep_tcp: bool,
    /// Processes with mapped memory.
    pub workers: Vec<WorkerFacts>,
    /// Where the container saw the checkpoint that its payloads come from; empty when it did not, and in what earlier
    /// versions wrote.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checkpoint: Vec<CheckpointFacts>,
}

/// A file or directory of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointFacts {
    /// Absolute path in the container.
    pub path: String,
    /// The name that the recovery manifest has for the file; absent for a directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// Versions of tools.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tools {
    /// ColdSnap.
    pub coldsnap: String,
    /// CRIU, empty when it could not be asked.
    pub criu: String,
    /// The OCI runtime, empty when it could not be asked.
    pub runtime: String,
}

/// The container's process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessFacts {
    /// Its arguments.
    pub args: Vec<String>,
    /// Whether it had a terminal.
    pub terminal: bool,
}

/// One file of the dump.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageFacts {
    /// File name in the images directory.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
}

/// One worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerFacts {
    /// Worker id, also the name of its hydration directory.
    pub id: String,
    /// Pid in the container's pid namespace.
    pub pid: u32,
}

/// `capture.json` is unusable.
#[derive(Debug, thiserror::Error)]
pub enum FactsError {
    /// It is not readable or too large.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// It is not what this version writes.
    #[error("{path} is malformed: {reason}")]
    Malformed {
        /// The file.
        path: String,
        /// What was found.
        reason: String,
    },
}

impl CaptureFacts {
    /// Parses the bytes of `capture.json`; `path` is for messages.
    ///
    /// # Errors
    /// When a field is missing, unknown, of another type, or the format is another one.
    pub fn parse(path: &str, bytes: &[u8]) -> Result<Self, FactsError> {
        let malformed = |reason: String| FactsError::Malformed { path: path.to_owned(), reason };
        let facts: Self = document::parse("capture.json", bytes)
            .map_err(|e| malformed(format!("{}: {}", e.field, e.problem)))?;
        if facts.format != FORMAT {
            return Err(malformed(format!("format {} is not {FORMAT}", facts.format)));
        }
        for image in &facts.images {
            if image.name.contains('/') || image.name.starts_with('.') {
                return Err(malformed(format!("{:?} is not an image name", image.name)));
            }
        }
        // It becomes part of a path.
        if let Some(worker) = facts.workers.iter().find(|worker| !is_id(&worker.id)) {
            return Err(malformed(format!("workers: {:?} is not an id", worker.id)));
        }
        Ok(facts)
    }

    /// Reads a `capture.json`.
    ///
    /// # Errors
    /// As [`CaptureFacts::parse`], or an I/O error.
    pub fn read(path: &Path) -> Result<Self, FactsError> {
        let name = path.display().to_string();
        let io = |source| FactsError::Io { path: name.clone(), source };
        let size = fs::metadata(path).map_err(io)?.len();
        if size > MAX_BYTES {
            return Err(FactsError::Malformed { path: name, reason: format!("{size} bytes is too large") });
        }
        Self::parse(&name, &fs::read(path).map_err(io)?)
    }

    /// The JSON text: indent 2, sorted keys, newline at the end.
    ///
    /// # Errors
    /// Never for values of this type; serde_json's signature.
    pub fn to_json(&self) -> Result<Vec<u8>, serde_json::Error> {
        // Through a Value, whose maps are sorted.
        let mut bytes = serde_json::to_vec_pretty(&serde_json::to_value(self)?)?;
        bytes.push(b'\n');
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse(value: &Value) -> Result<CaptureFacts, FactsError> {
        CaptureFacts::parse("capture.json", value.to_string().as_bytes())
    }

    #[test]
    fn every_broken_rule_is_named() {
        let sample: Value = serde_json::from_str(include_str!("../../tests/samples/capture.json")).unwrap();
        parse(&sample).unwrap();
        for (pointer, wrong, named) in [
            ("/format", json!(2), "format 2"),
            ("/page_size", json!("x"), "page_size: "),
            ("/images/0/bytes", json!(-1), "images[0].bytes: "),
            ("/images/0/name", json!("../x"), "not an image name"),
            ("/images/0/name", json!(".x"), "not an image name"),
            ("/workers/0/id", json!("../../etc"), "workers: \"../../etc\" is not an id"),
            ("/workers/0/id", json!("/etc"), "is not an id"),
            ("/scope", json!("some"), "scope: "),
            ("/tools", json!({}), "missing field"),
            ("/process/surprise", json!(1), "unknown field `surprise`"),
        ] {
            let mut changed = sample.clone();
            match changed.pointer_mut(pointer) {
                Some(place) => *place = wrong,
                None => changed["process"]["surprise"] = wrong,
            }
            let text = parse(&changed).unwrap_err().to_string();
            assert!(text.contains("capture.json") && text.contains(named), "{pointer}: {text}");
        }
    }
}
