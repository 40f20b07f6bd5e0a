//! `coldsnap payload push`: payloads as blobs of a registry.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use coldsnap::digest::Digest;
use coldsnap::format::artifact::Artifact;
use coldsnap::registry::{Registry, Repository};
use coldsnap::store::NodeStore;
use serde::Serialize;

use crate::commands::registry::{self, PayloadRow, RegistryArgs};
use crate::output::{CliError, Output};

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Payloads by digest (sha256:...), or artifact descriptors: all payloads of each.
    #[arg(required = true, value_name = "DIGEST|ARTIFACT")]
    what: Vec<String>,
    /// Repository: HOST[:PORT]/NAME.
    #[arg(long, value_name = "REPOSITORY")]
    to: String,
    #[command(flatten)]
    registry: RegistryArgs,
    /// Only say what would be pushed.
    #[arg(long)]
    dry_run: bool,
}

#[derive(Serialize)]
struct Report {
    repository: String,
    dry_run: bool,
    payloads: Vec<PayloadRow>,
}

/// Runs the command.
///
/// # Errors
/// An unusable argument, a payload that is not admitted, or what the registry answers.
pub fn run(args: &Args, store: &NodeStore, output: &Output) -> Result<(), CliError> {
    let repository: Repository = args.to.parse()?;
    let wanted = wanted(&args.what)?;
    let payloads = registry::admit(store, &wanted, output)?;
    let registry = Registry::connect(&repository, &args.registry.access())?;
    let payloads = registry::push(&registry, &payloads, args.dry_run, output)?;
    let report = Report { repository: repository.to_string(), dry_run: args.dry_run, payloads };
    output.result(&report, || {
        let rows = report.payloads.iter().map(|row| row.text(args.dry_run));
        rows.chain([format!("in {}", report.repository)]).collect::<Vec<_>>().join("\n")
    })
}

/// The distinct payloads, with their committed sizes where a descriptor tells them.
fn wanted(what: &[String]) -> Result<BTreeMap<Digest, Option<u64>>, CliError> {
    let mut wanted = BTreeMap::new();
    for text in what {
        if let Ok(digest) = text.parse::<Digest>() {
            wanted.entry(digest).or_insert(None);
            continue;
        }
        if text.starts_with("sha256:") {
            return Err(CliError::new("Malformed", format!("{text:?} is not a digest")));
        }
        let bytes = fs::read(Path::new(text))
            .map_err(|e| CliError::new("Io", format!("cannot read the descriptor {text}: {e}")))?;
        let artifact =
            Artifact::parse(&bytes).map_err(|e| CliError::new(e.kind(), format!("{text}: {e}")))?;
        let payloads = artifact.payloads();
        if payloads.is_empty() {
            return Err(CliError::new("Malformed", format!("{text}: the artifact has no payloads")));
        }
        wanted.extend(payloads.into_iter().map(|payload| (payload.digest, Some(payload.bytes))));
    }
    Ok(wanted)
}
