//! `coldsnap check`: a native manifest, and the files it describes.

use std::path::PathBuf;
use std::time::Instant;

use coldsnap::check::{FileReport, check_pack, check_residual, pack_work};
use coldsnap::format::native_manifest::{ManifestKind, NativeManifest};
use serde::Serialize;

use crate::output::{CliError, Output};

/// Check a native manifest: coverage, order, offsets, sums; with files also every extent's digest and checksum.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The native-manifest.json.
    #[arg(value_name = "MANIFEST")]
    manifest: PathBuf,
    /// The pack to compare with it.
    #[arg(long, value_name = "FILE")]
    pack: Option<PathBuf>,
    /// The residual blob to compare with it.
    #[arg(long, value_name = "FILE")]
    residual: Option<PathBuf>,
}

#[derive(Serialize)]
struct Report {
    manifest: String,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pack: Option<FileResult>,
    #[serde(skip_serializing_if = "Option::is_none")]
    residual: Option<FileResult>,
    seconds: f64,
}

#[derive(Serialize)]
struct FileResult {
    path: String,
    bytes: u64,
    extents: usize,
    whole_digest: bool,
}

/// Runs the command.
///
/// # Errors
/// The first rule that does not hold, by its kind.
pub fn run(args: Args, output: &Output) -> Result<(), CliError> {
    let started = Instant::now();
    let manifest = NativeManifest::read(&args.manifest)?;
    let layout = manifest
        .layout()
        .map_err(|e| CliError::new(e.kind(), format!("{}: {e}", args.manifest.display())))?;
    let pack = args.pack.map(|path| {
        let mut progress = output.progress("checking the pack", pack_work(&manifest, &path));
        check_pack(&manifest, &path, &mut |n| progress.advance(n)).map(|report| file_result(path, report))
    });
    let residual = args.residual.map(|path| {
        let mut progress = output.progress("checking the residual", manifest.residual_bytes);
        check_residual(&manifest, &path, &mut |n| progress.advance(n)).map(|report| file_result(path, report))
    });
    let report = Report {
        pack: pack.transpose()?,
        residual: residual.transpose()?,
        manifest: args.manifest.display().to_string(),
        kind: manifest.kind,
        allocations: layout.allocations().len(),
        allocation_bytes: manifest.allocation_bytes,
        model_extents: manifest.model_weight_extents.len(),
        model_weight_bytes: manifest.model_weight_bytes,
        model_blob_bytes: manifest.model_blob_bytes,
        residual_extents: manifest.residual_extents.len(),
        residual_bytes: manifest.residual_bytes,
        worker_id: manifest.worker_id,
        capture_id: manifest.capture_id,
        seconds: started.elapsed().as_secs_f64(),
    };
    output.result(&report, || text(&report))
}

fn file_result(path: PathBuf, report: FileReport) -> FileResult {
    let FileReport { bytes, extents, whole_digest } = report;
    FileResult { path: path.display().to_string(), bytes, extents, whole_digest }
}

fn text(report: &Report) -> String {
    let mut lines = vec![
        format!(
            "{}: every rule holds (worker {}, capture {})",
            report.manifest, report.worker_id, report.capture_id
        ),
        format!("{} bytes in {} allocations:", report.allocation_bytes, report.allocations),
        format!("  model     {} bytes in {} extents", report.model_weight_bytes, report.model_extents),
        format!("  residual  {} bytes in {} extents", report.residual_bytes, report.residual_extents),
    ];
    for file in report.pack.iter().chain(&report.residual) {
        let whole = if file.whole_digest { ", and the digest in its name" } else { "" };
        lines.push(format!("{}: {} bytes, {} extents match{whole}", file.path, file.bytes, file.extents));
    }
    lines.join("\n")
}
