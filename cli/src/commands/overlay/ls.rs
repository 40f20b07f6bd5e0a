//! `coldsnap overlay ls`

use std::path::Path;

use coldsnap::overlay::{self, Found};
use coldsnap::store::NodeStore;
use serde::Serialize;

use crate::output::{CliError, Output};

#[derive(Serialize)]
struct Listing {
    store: String,
    overlays: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    id: String,
    portable_descriptor: String,
    /// `ok`, `in use` or `unusable`.
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// Nanoseconds since 1970; null when unusable.
    created_unix_ns: Option<u64>,
    /// Bytes of all its files; the payloads are not among them.
    bytes: u64,
    /// Digests of its payloads.
    payloads: Vec<String>,
}

pub fn run(store: &NodeStore, output: &Output) -> Result<(), CliError> {
    let overlays = overlay::list(store)?.into_iter().map(row).collect();
    let listing = Listing { store: store.root().display().to_string(), overlays };
    output.result(&listing, || listing.text())
}

fn row(found: Found) -> Row {
    let (id, portable_descriptor) = (found.id, found.portable.to_string());
    match found.overlay {
        Ok(overlay) => Row {
            id,
            portable_descriptor,
            state: if overlay.is_in_use().unwrap_or(false) { "in use" } else { "ok" },
            reason: None,
            created_unix_ns: Some(overlay.document.created_unix_ns),
            bytes: bytes_below(overlay.directory()),
            payloads: overlay.document.payloads.iter().map(|p| p.sha256.to_string()).collect(),
        },
        Err(error) => Row {
            id,
            portable_descriptor,
            state: "unusable",
            reason: Some(error.to_string()),
            created_unix_ns: None,
            bytes: 0,
            payloads: Vec::new(),
        },
    }
}

/// Files that cannot be looked at count nothing.
fn bytes_below(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let size = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => bytes_below(&entry.path()),
        Ok(metadata) if metadata.is_file() => metadata.len(),
        _ => 0,
    };
    entries.map(size).sum()
}

impl Listing {
    fn text(&self) -> String {
        let mut lines = vec![format!("{:<24} {:<71} {:>14}  STATE", "ID", "PORTABLE DESCRIPTOR", "BYTES")];
        lines.extend(self.overlays.iter().map(|row| {
            let reason = row.reason.as_ref().map(|r| format!(" ({r})")).unwrap_or_default();
            format!("{:<24} {:<71} {:>14}  {}{reason}", row.id, row.portable_descriptor, row.bytes, row.state)
        }));
        lines.join("\n")
    }
}
