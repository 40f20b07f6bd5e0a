//! `coldsnap check`: anything that the format knows, with the files that it describes.

use std::path::{Path, PathBuf};
use std::time::Instant;

use coldsnap::check::{Checked, Options, check};
use serde::Serialize;
use serde_json::Value;

use crate::node::Node;
use crate::output::{CliError, Output};

/// Check a document, pack, worker directory or capsule: every rule of its format, and the digests and checksums of the
/// files that lie beside it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// An artifact descriptor, overlay, native or recovery manifest, validation record, capture.json, pack, worker
    /// directory or capsule; its kind is found out.
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// The pack to compare with a native manifest, instead of the one beside it.
    #[arg(long, value_name = "FILE")]
    pack: Option<PathBuf>,
    /// The residual blob to compare with a native manifest, instead of the one beside it.
    #[arg(long, value_name = "FILE")]
    residual: Option<PathBuf>,
}

#[derive(Serialize)]
struct Report<'a> {
    path: &'a Path,
    #[serde(flatten)]
    checked: Checked,
    seconds: f64,
}

/// Runs the command.
///
/// # Errors
/// The first rule that does not hold, by its kind.
pub fn run(args: Args, node: &Node, output: &Output) -> Result<(), CliError> {
    let started = Instant::now();
    let store = node.store();
    let options =
        Options { pack: args.pack.as_deref(), residual: args.residual.as_deref(), store: Some(&store) };
    let mut bar = None;
    let mut what = "";
    let checked = check(&args.path, &options, &mut |now, total, bytes| {
        if what != now || bar.is_none() {
            what = now;
            bar = Some(output.progress(now, total));
        }
        if let Some(bar) = &mut bar {
            bar.advance(bytes);
        }
    });
    drop(bar);
    let report = Report { path: &args.path, checked: checked?, seconds: started.elapsed().as_secs_f64() };
    output.result(&report, || text(&report))
}

fn text(report: &Report<'_>) -> String {
    let mut lines = vec![format!("{}: every rule holds", report.path.display())];
    lines.extend(summary_lines(&report.checked.summary));
    for document in report.checked.documents.iter().filter(|path| *path != report.path) {
        lines.push(format!("agrees with {}", document.display()));
    }
    for file in &report.checked.files {
        let extents = if file.report.extents > 0 {
            format!(", {} extents", file.report.extents)
        } else {
            String::new()
        };
        let whole = if file.report.whole_digest { ", the digest" } else { "" };
        lines.push(format!("{}: {} bytes match{extents}{whole}", file.path.display(), file.report.bytes));
    }
    lines.extend(report.checked.not_compared.iter().map(|what| format!("not compared: {what}")));
    lines.join("\n")
}

/// The main figures of a document, one a line.
pub fn summary_lines(summary: &impl Serialize) -> Vec<String> {
    let Ok(Value::Object(fields)) = serde_json::to_value(summary) else { return Vec::new() };
    let show = |value: &Value| match value {
        Value::Null => "none".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(items) if items.is_empty() => "none".to_owned(),
        Value::Array(items) => items
            .iter()
            .map(|i| i.as_str().map_or_else(|| i.to_string(), str::to_owned))
            .collect::<Vec<_>>()
            .join(" "),
        other => other.to_string(),
    };
    fields.iter().map(|(name, value)| format!("  {:<26} {}", name.replace('_', " "), show(value))).collect()
}
