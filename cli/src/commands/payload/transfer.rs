//! `coldsnap payload import` and `export`: packs between the store and files.

use std::fs;
use std::path::{Path, PathBuf};

use coldsnap::digest::Digest;
use coldsnap::store::{Exported, NodeStore, RecordKept};
use serde::Serialize;

use crate::output::{CliError, Output, Progress, USAGE};

/// Take packs into the store: files, directories of `<64hex>.pack` files, or other stores and shares with
/// `model-payloads/sha256/` in them. Every byte is verified. A file that lies at its place in the store already is
/// verified there.
#[derive(Debug, clap::Args)]
pub struct ImportArgs {
    /// Files and directories.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// The digest that the file must have; else a name <64hex>.pack says it, and any other file is taken as it is.
    #[arg(long, value_name = "DIGEST")]
    sha256: Option<Digest>,
    /// Remove each file once it is in the store; on the store's file system nothing is copied then.
    #[arg(long = "move")]
    take: bool,
}

/// Write verified copies of payloads: below a directory as model-payloads/sha256/<64hex>.pack, or to one file.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["digests", "all"]))]
#[command(group = clap::ArgGroup::new("where").required(true).args(["to", "file"]))]
pub struct ExportArgs {
    /// The payloads.
    #[arg(value_name = "DIGEST")]
    digests: Vec<Digest>,
    /// All payloads of the store.
    #[arg(long)]
    all: bool,
    /// Directory to write them below.
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
    /// File to write one payload to.
    #[arg(long, value_name = "FILE", conflicts_with = "all")]
    file: Option<PathBuf>,
}

#[derive(Serialize)]
struct ImportReport {
    imported: Vec<ImportedFile>,
    failed: Vec<FailedFile>,
}

#[derive(Serialize)]
struct ImportedFile {
    path: String,
    digest: Digest,
    bytes: u64,
    /// `copied`, `moved`, `adopted` or `present`
    arrival: &'static str,
    /// why the record could not be written
    #[serde(skip_serializing_if = "Option::is_none")]
    record_problem: Option<String>,
}

#[derive(Serialize)]
struct FailedFile {
    path: String,
    error: ErrorText,
}

#[derive(Serialize)]
struct ErrorText {
    kind: String,
    message: String,
}

#[derive(Serialize)]
struct ExportReport {
    exported: Vec<ExportedFile>,
}

#[derive(Serialize)]
struct ExportedFile {
    digest: Digest,
    path: String,
    bytes: u64,
    present: bool,
}

/// Runs `import`.
///
/// # Errors
/// When a file cannot be imported. With several, the others are imported all the same.
pub fn import(args: &ImportArgs, store: &NodeStore, output: &Output) -> Result<(), CliError> {
    let mut files = Vec::new();
    for path in &args.paths {
        if path.is_dir() {
            let packs = NodeStore::packs_in(path)?;
            if packs.is_empty() {
                return Err(CliError::new(
                    "NotAPack",
                    format!("there is no <64hex>.pack in {}", path.display()),
                ));
            }
            files.extend(packs);
        } else {
            files.push(path.clone());
        }
    }
    if args.sha256.is_some() && files.len() > 1 {
        return Err(CliError::new(
            USAGE,
            format!("--sha256 is about one file, and there are {}", files.len()),
        ));
    }
    let total = files.iter().map(|path| fs::metadata(path).map_or(0, |m| m.len())).sum();
    let mut progress = output.progress("importing", total);
    let mut report = ImportReport { imported: Vec::new(), failed: Vec::new() };
    for path in &files {
        match import_file(path, args, store, &mut progress) {
            Ok(imported) => report.imported.push(imported),
            Err(error) if files.len() == 1 => return Err(error),
            Err(error) => {
                let error = ErrorText { kind: error.kind().to_owned(), message: error.to_string() };
                report.failed.push(FailedFile { path: path.display().to_string(), error });
            }
        }
    }
    drop(progress);
    output.result(&report, || report.text())?;
    match report.failed.len() {
        0 => Ok(()),
        n => Err(CliError::in_result("Import", format!("{n} of {} files were not imported", files.len()))),
    }
}

fn import_file(
    path: &Path,
    args: &ImportArgs,
    store: &NodeStore,
    progress: &mut Progress,
) -> Result<ImportedFile, CliError> {
    let imported = store.import(path, args.sha256, args.take, &mut |bytes| progress.advance(bytes))?;
    let record_problem = match imported.payload.record() {
        RecordKept::NotWritten(problem) => Some(problem.clone()),
        _ => None,
    };
    Ok(ImportedFile {
        path: path.display().to_string(),
        digest: *imported.payload.digest(),
        bytes: imported.payload.bytes(),
        arrival: imported.arrival.name(),
        record_problem,
    })
}

impl ImportReport {
    fn text(&self) -> String {
        let imported = self
            .imported
            .iter()
            .map(|file| format!("{}  {:>14}  {:<7}  {}", file.digest, file.bytes, file.arrival, file.path));
        let failed = self
            .failed
            .iter()
            .map(|file| format!("{}: not imported: {} [{}]", file.path, file.error.message, file.error.kind));
        imported.chain(failed).collect::<Vec<_>>().join("\n")
    }
}

/// Runs `export`.
///
/// # Errors
/// When a payload is not here or damaged, or something else is in its place. Those before it are written then.
pub fn export(args: &ExportArgs, store: &NodeStore, output: &Output) -> Result<(), CliError> {
    let listed = store.list()?;
    let digests: Vec<Digest> =
        if args.all { listed.iter().map(|payload| payload.digest).collect() } else { args.digests.clone() };
    if args.file.is_some() && digests.len() > 1 {
        return Err(CliError::new(
            USAGE,
            format!("--file takes one payload, and there are {}", digests.len()),
        ));
    }
    let total = listed.iter().filter(|p| digests.contains(&p.digest)).map(|p| p.bytes).sum();
    let mut progress = output.progress("exporting", total);
    let mut exported = Vec::new();
    for digest in &digests {
        let path = match (&args.file, &args.to) {
            (Some(file), _) => file.clone(),
            (None, Some(directory)) => directory.join(digest.payload_path()),
            // The command line has one of them.
            (None, None) => digest.payload_path(),
        };
        exported.push(store.export(digest, &path, &mut |bytes| progress.advance(bytes))?.into());
    }
    drop(progress);
    let report = ExportReport { exported };
    output.result(&report, || report.text())
}

impl From<Exported> for ExportedFile {
    fn from(Exported { digest, path, bytes, present }: Exported) -> Self {
        Self { digest, path: path.display().to_string(), bytes, present }
    }
}

impl ExportReport {
    fn text(&self) -> String {
        if self.exported.is_empty() {
            return "no payloads to export".to_owned();
        }
        let line = |file: &ExportedFile| {
            let how = if file.present { "present" } else { "written" };
            format!("{}  {:>14}  {how}  {}", file.digest, file.bytes, file.path)
        };
        self.exported.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}
