//! `coldsnap capabilities`: what this build can do, for programs that drive it.

use coldsnap::capture::scope::MappingScope;
use serde::Serialize;

use crate::output::{CliError, Output};

/// What this build can do.
#[derive(Debug, Serialize)]
pub struct Capabilities {
    /// Version of ColdSnap.
    pub version: &'static str,
    /// Artifact descriptor format.
    pub artifact_format: u32,
    /// Native manifest format.
    pub native_manifest_format: u32,
    /// Snapshot drivers that capture and restore.
    pub snapshot_drivers: Vec<&'static str>,
    /// Snapshot drivers whose documents are read, but which neither capture nor restore yet.
    pub snapshot_drivers_read_only: Vec<&'static str>,
    /// Placements of extents.
    pub placements: Vec<&'static str>,
    /// Mapping scopes.
    pub mapping_scopes: Vec<String>,
    /// Checkpoint files that content match reads.
    pub checkpoint_formats: Vec<&'static str>,
    /// Machine architectures.
    pub architectures: Vec<&'static str>,
    /// containerd runtime name.
    pub runtime: &'static str,
    /// containerd task API.
    pub task_api: &'static str,
}

/// Runs the command.
///
/// # Errors
/// When stdout cannot be written.
pub fn run(output: &Output) -> Result<(), CliError> {
    let value = capabilities();
    output.result(&value, || {
        format!(
            "coldsnap {}\nsnapshot drivers: {} (documents only: {})\nplacements: {}\nmapping scopes: {}\n\
             checkpoint formats: {}\narchitectures: {}\nruntime: {} (task API {})",
            value.version,
            value.snapshot_drivers.join(", "),
            value.snapshot_drivers_read_only.join(", "),
            value.placements.join(", "),
            value.mapping_scopes.join(", "),
            value.checkpoint_formats.join(", "),
            value.architectures.join(", "),
            value.runtime,
            value.task_api,
        )
    })
}

fn capabilities() -> Capabilities {
    Capabilities {
        version: env!("CARGO_PKG_VERSION"),
        artifact_format: coldsnap::format::artifact::FORMAT,
        native_manifest_format: coldsnap::format::native_manifest::FORMAT,
        snapshot_drivers: vec!["host"],
        snapshot_drivers_read_only: vec!["n580", "n610"],
        placements: vec!["mapped"],
        mapping_scopes: [MappingScope::Model, MappingScope::Large, MappingScope::All]
            .iter()
            .map(ToString::to_string)
            .collect(),
        checkpoint_formats: vec!["safetensors", "gguf", "huggingface-snapshot"],
        architectures: vec!["x86_64"],
        runtime: "io.containerd.coldsnap.v1",
        task_api: "v3",
    }
}
