//! `coldsnap payload stage`: brings payloads from the sources into the store.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use coldsnap::config::{Bytes, SourceConfig};
use coldsnap::digest::Digest;
use coldsnap::recover::capsule::CapsuleDocuments;
use coldsnap::source::{Brought, Event, Limits, Source, Wanted, bring, open_source, sources_for};
use serde::Serialize;

use crate::artifact::Images;
use crate::interrupt;
use crate::node::Node;
use crate::output::{CliError, Output, Progress};

/// Bring the payloads that an artifact needs into the store, from the first source that delivers them. What an
/// interrupted run left is continued; every byte is hashed while it comes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A capsule image in containerd, an artifact.json, a directory with a capsule, or a payload's digest.
    #[arg(value_name = "IMAGE|ARTIFACT|DIGEST")]
    what: String,
    /// Size of the payload; needed with a digest, because nothing else says it.
    #[arg(long, value_name = "N")]
    bytes: Option<u64>,
    /// Use these sources, in this order, instead of the configured ones and of the artifact's own publication:
    /// DIRECTORY, directory:DIRECTORY, huggingface:OWNER/NAME@COMMIT, oci:HOST/NAME or checkpoint:PATH.
    #[arg(long = "source", value_name = "SOURCE", value_parser = parse_source)]
    sources: Vec<SourceConfig>,
    /// Bytes per second, e.g. 100MB; instead of the configured limit.
    #[arg(long, value_name = "RATE")]
    bandwidth_limit: Option<Bytes>,
    #[command(flatten)]
    images: Images,
}

#[derive(Serialize)]
struct Report {
    payloads: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    digest: Digest,
    bytes: u64,
    /// The source that delivered its last byte; null when it was here.
    source: Option<String>,
    /// Bytes that sources delivered.
    fetched: u64,
    /// Bytes that an interrupted run had left.
    resumed: u64,
    evidence: &'static str,
}

/// Runs the command.
///
/// # Errors
/// No source delivered a payload, the store cannot take it, or the artifact cannot be read.
pub fn run(args: &Args, node: &Node, output: &Output) -> Result<(), CliError> {
    let (wanted, capsule) = wanted(args)?;
    let sources: Vec<Box<dyn Source>> = if args.sources.is_empty() {
        sources_for(&node.config, capsule.as_ref())?
    } else {
        let open = |source| open_source(&node.config, source, capsule.as_ref());
        args.sources.iter().map(open).collect::<Result<_, _>>()?
    };
    let limit = args.bandwidth_limit.or(node.config.staging.bandwidth_limit);
    let limits = Limits { bandwidth: limit.map(|Bytes(bytes)| bytes) };
    let store = node.open_store()?;
    let interrupted = interrupt::flag()?;
    let mut payloads = Vec::new();
    for wanted in &wanted {
        let mut progress = output.progress("staging", wanted.bytes);
        let cancelled = || interrupted.load(Ordering::Relaxed);
        let brought =
            bring(&store, &sources, wanted, &limits, &cancelled, &mut |event| show(&event, &mut progress))?;
        payloads.push(Row::from(brought));
    }
    let report = Report { payloads };
    output.result(&report, || report.text())
}

/// The payloads, each once, and the capsule that says so.
fn wanted(args: &Args) -> Result<(Vec<Wanted>, Option<Arc<CapsuleDocuments>>), CliError> {
    if args.what.starts_with("sha256:") {
        let digest: Digest = args.what.parse().map_err(|e| CliError::new("Malformed", e))?;
        let what = "a digest does not say the payload's size: give it with --bytes";
        let bytes = args.bytes.ok_or_else(|| CliError::new("Malformed", what))?;
        return Ok((vec![Wanted { digest, bytes }], None));
    }
    let capsule = args.images.capsule(&args.what)?;
    let payloads: BTreeMap<Digest, u64> =
        capsule.artifact.payloads().into_iter().map(|payload| (payload.digest, payload.bytes)).collect();
    let wanted = payloads.into_iter().map(|(digest, bytes)| Wanted { digest, bytes }).collect();
    Ok((wanted, Some(Arc::new(capsule))))
}

fn show(event: &Event<'_>, progress: &mut Progress) {
    match event {
        Event::Bytes { here, .. } => progress.reach(*here),
        Event::Waiting => tracing::info!("another process brings the same payload: waiting for it"),
        Event::Asking { source, from } => tracing::info!(source, from, "asking a source"),
        Event::Failed { source, error } => tracing::warn!(source, %error, "a source did not deliver"),
    }
}

fn parse_source(text: &str) -> Result<SourceConfig, String> {
    let source = match text.split_once(':') {
        _ if text.starts_with('/') => SourceConfig::Directory { path: PathBuf::from(text) },
        Some(("directory", path)) => SourceConfig::Directory { path: PathBuf::from(path) },
        Some(("huggingface", place)) => {
            let (repository, revision) =
                place.split_once('@').ok_or("expected huggingface:OWNER/NAME@COMMIT")?;
            let (repository, revision) = (repository.to_owned(), revision.to_owned());
            SourceConfig::HuggingFace { repository, revision, endpoint: None, token_file: None }
        }
        Some(("oci", repository)) => {
            SourceConfig::Oci { repository: repository.to_owned(), plain_http: false, credentials_file: None }
        }
        Some(("checkpoint", path)) => SourceConfig::Checkpoint { paths: vec![PathBuf::from(path)] },
        _ => return Err("expected DIRECTORY, directory:, huggingface:, oci: or checkpoint:".to_owned()),
    };
    source.check("source").map(|()| source)
}

impl From<Brought> for Row {
    fn from(brought: Brought) -> Self {
        let Brought { payload, source, fetched, resumed } = brought;
        let (digest, bytes, evidence) = (*payload.digest(), payload.bytes(), payload.evidence().name());
        Self { digest, bytes, source, fetched, resumed, evidence }
    }
}

impl Report {
    fn text(&self) -> String {
        if self.payloads.is_empty() {
            return "the artifact needs no payload".to_owned();
        }
        let rows = self.payloads.iter().map(|row| match &row.source {
            Some(source) => format!(
                "{}  {} bytes, {} from {source}, {} resumed",
                row.digest, row.bytes, row.fetched, row.resumed
            ),
            None => format!("{}  {} bytes, on this node", row.digest, row.bytes),
        });
        rows.collect::<Vec<_>>().join("\n")
    }
}
