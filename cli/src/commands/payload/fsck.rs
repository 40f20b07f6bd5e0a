//! `coldsnap payload fsck`.

use coldsnap::store::{Finding, FsckOptions, FsckReport, NodeStore};
use serde::Serialize;

use crate::output::{CliError, Output};

/// Check the store: names, modes, sizes, records, leases, pins, temporaries. Fails when it is inconsistent.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Hash every payload, whatever its record says.
    #[arg(long)]
    full: bool,
    /// Remove what is garbage, move damaged packs to <store>/damaged, set the modes of files right.
    #[arg(long)]
    repair: bool,
}

#[derive(Serialize)]
struct Report {
    store: String,
    consistent: bool,
    payloads: usize,
    bytes: u64,
    bytes_hashed: u64,
    leases: usize,
    pins: usize,
    findings: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    /// `error`, `warning` or `note`
    severity: &'static str,
    kind: &'static str,
    path: String,
    message: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    remedy: String,
    repaired: bool,
}

/// Runs the command.
///
/// # Errors
/// When the store cannot be read, or is inconsistent.
pub fn run(args: &Args, store: &NodeStore, output: &Output) -> Result<(), CliError> {
    let total = if args.full { store.list()?.iter().map(|payload| payload.bytes).sum() } else { 0 };
    let mut progress = output.progress("checking", total);
    let options = FsckOptions { full: args.full, repair: args.repair };
    let found = store.fsck(options, &mut |bytes| progress.advance(bytes))?;
    drop(progress);
    let report = Report::new(store, found);
    output.result(&report, || report.text())?;
    if report.consistent {
        return Ok(());
    }
    let errors = report.findings.iter().filter(|row| row.severity == "error" && !row.repaired).count();
    Err(CliError::in_result("Inconsistent", format!("the store {} has {errors} errors", report.store)))
}

impl Report {
    fn new(store: &NodeStore, found: FsckReport) -> Self {
        let consistent = found.is_consistent();
        let FsckReport { payloads, bytes, bytes_hashed, leases, pins, findings } = found;
        let store = store.root().display().to_string();
        let findings = findings.into_iter().map(Row::from).collect();
        Self { store, consistent, payloads, bytes, bytes_hashed, leases, pins, findings }
    }

    fn text(&self) -> String {
        let mut lines = Vec::new();
        for row in &self.findings {
            let repaired = if row.repaired { " (repaired)" } else { "" };
            lines.push(format!("{}: {}: {}{repaired}", row.severity, row.path, row.message));
            if !row.remedy.is_empty() && !row.repaired {
                lines.push(format!("    {}", row.remedy));
            }
        }
        let state = if self.consistent { "consistent" } else { "inconsistent" };
        lines.push(format!(
            "{}: {state}, {} payloads with {} bytes, {} leases, {} pins, {} bytes hashed",
            self.store, self.payloads, self.bytes, self.leases, self.pins, self.bytes_hashed
        ));
        lines.join("\n")
    }
}

impl From<Finding> for Row {
    fn from(Finding { severity, kind, path, message, remedy, repaired }: Finding) -> Self {
        Self { severity: severity.name(), kind, path: path.display().to_string(), message, remedy, repaired }
    }
}
