//! `coldsnap payload push`: payloads as blobs of a registry.

use std::collections::BTreeMap;

use coldsnap::digest::Digest;
use coldsnap::registry::{Registry, Repository};
use coldsnap::store::NodeStore;
use serde::Serialize;

use crate::artifact::Images;
use crate::commands::registry::{self, PayloadRow, RegistryArgs};
use crate::output::{CliError, Output};

/// Push payloads to a repository of an OCI registry, each as a raw blob with a manifest that keeps it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Payloads by digest, or all of a capsule image in containerd, an artifact.json or a directory with a capsule.
    #[arg(required = true, value_name = "IMAGE|ARTIFACT|DIGEST")]
    what: Vec<String>,
    /// Repository: HOST[:PORT]/NAME.
    #[arg(long, value_name = "REPOSITORY")]
    to: String,
    #[command(flatten)]
    registry: RegistryArgs,
    /// Only say what would be pushed.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    images: Images,
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
    let wanted = wanted(args)?;
    let payloads = registry::admit(store, &wanted, output)?;
    let registry = Registry::connect(&repository, &args.registry.access())?;
    let payloads = registry::push(&registry, &payloads, args.dry_run, output)?;
    let report = Report { repository: repository.to_string(), dry_run: args.dry_run, payloads };
    output.result(&report, || {
        let rows = report.payloads.iter().map(|row| row.text(args.dry_run));
        rows.chain([format!("in {}", report.repository)]).collect::<Vec<_>>().join("\n")
    })
}

/// The distinct payloads, with their committed sizes where an artifact tells them.
fn wanted(args: &Args) -> Result<BTreeMap<Digest, Option<u64>>, CliError> {
    let mut wanted = BTreeMap::new();
    for text in &args.what {
        if text.starts_with("sha256:") {
            let digest = text.parse().map_err(|e| CliError::new("Malformed", e))?;
            wanted.entry(digest).or_insert(None);
            continue;
        }
        let payloads = args.images.artifact(text)?.payloads();
        if payloads.is_empty() {
            return Err(CliError::new("Malformed", format!("{text}: the artifact has no payloads")));
        }
        wanted.extend(payloads.into_iter().map(|payload| (payload.digest, Some(payload.bytes))));
    }
    Ok(wanted)
}
