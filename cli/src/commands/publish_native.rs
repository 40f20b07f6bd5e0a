//! `coldsnap publish-native`: publishes an artifact's payloads in a repository of the Hugging Face hub.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use coldsnap::config::Bytes;
use coldsnap::format::artifact::Artifact;
use coldsnap::hub::{Endpoint, Repository, Token};
use coldsnap::publish::{self, Action, Options, Published, Target, publish};

use crate::artifact::Images;
use crate::interrupt;
use crate::node::Node;
use crate::output::{CliError, Output};

/// Publish the payloads of an artifact in a repository of the Hugging Face hub, and write a new descriptor that names
/// the repository and the commit. Every pack is hashed again here; what the repository or its storage has is not
/// uploaded; the descriptor is written last.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A capsule image in containerd, an artifact.json, or a directory with a capsule.
    #[arg(value_name = "IMAGE|ARTIFACT")]
    artifact: String,
    /// The repository.
    #[arg(long, value_name = "OWNER/NAME")]
    repo: Repository,
    /// Its branch.
    #[arg(long, value_name = "NAME", default_value = "main")]
    branch: String,
    /// Create the repository when it does not exist.
    #[arg(long)]
    create: bool,
    /// Create it private.
    #[arg(long, requires = "create")]
    private: bool,
    /// Address of the hub; else the configured one, HF_ENDPOINT, or the public one.
    #[arg(long, value_name = "URL")]
    endpoint: Option<String>,
    /// File with the access token, mode 0600; else the configured one, HF_TOKEN, or the file HF_TOKEN_PATH.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// The new descriptor; never overwritten. Default: <artifact>.published.json beside a file, else
    /// <capture id>.published.json here.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Verify and compare, and print what would be done; change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Bytes per second, e.g. 100MB.
    #[arg(long, value_name = "RATE")]
    bandwidth_limit: Option<Bytes>,
    #[command(flatten)]
    images: Images,
}

/// Runs the command.
///
/// # Errors
/// When a payload is not here or damaged, or the hub does not take it. Then no descriptor is written.
pub fn run(args: &Args, node: &Node, output: &Output) -> Result<(), CliError> {
    let artifact = args.images.artifact(&args.artifact)?;
    let configured = &node.config.huggingface;
    let endpoint = Endpoint::find(args.endpoint.as_deref().or(configured.endpoint.as_deref()))?;
    let token = Token::find(args.token_file.as_deref().or(configured.token_file.as_deref()))?;
    let target = Target { endpoint, repository: args.repo.clone(), branch: args.branch.clone() };
    let options = Options {
        dry_run: args.dry_run,
        create: args.create,
        private: args.private,
        bandwidth: args.bandwidth_limit.map(|Bytes(bytes)| bytes),
    };
    let descriptor = args.output.clone().unwrap_or_else(|| default_output(&args.artifact, &artifact));
    let bytes = distinct_bytes(&artifact);
    let mut verifying = output.progress("verifying", bytes);
    let mut sending = output.progress("uploading", bytes);
    let interrupted = interrupt::flag()?;
    let published = publish(
        &artifact,
        &node.store(),
        &target,
        token,
        &options,
        &descriptor,
        &|| interrupted.load(Ordering::Relaxed),
        &mut |progress| match progress {
            publish::Progress::Verified(_, n) => verifying.advance(n),
            publish::Progress::Sent(_, n) => sending.advance(n),
        },
    )?;
    drop((verifying, sending));
    output.result(&published, || text(&published))
}

fn distinct_bytes(artifact: &Artifact) -> u64 {
    let payloads = artifact.payloads().into_iter().map(|payload| (payload.digest, payload.bytes));
    payloads.collect::<std::collections::BTreeMap<_, _>>().values().sum()
}

fn default_output(given: &str, artifact: &Artifact) -> PathBuf {
    let path = Path::new(given);
    match path.file_stem().filter(|_| path.is_file()) {
        Some(stem) => path.with_file_name(format!("{}.published.json", stem.to_string_lossy())),
        None => PathBuf::from(format!("{}.published.json", artifact.capture_id)),
    }
}

fn text(published: &Published) -> String {
    let mut lines = Vec::new();
    let dry = published.output.is_none();
    for payload in &published.payloads {
        let action = match (payload.action, dry) {
            (Action::Present, _) => "the branch has it",
            (Action::Commit, true) => "the hub stores it, would be committed",
            (Action::Commit, false) => "the hub stored it, committed",
            (Action::Upload, true) => "would be uploaded, unless the hub's storage has it",
            (Action::Upload, false) => "uploaded",
        };
        lines.push(format!("{}  {} bytes: {action}", payload.path, payload.bytes));
    }
    let place = format!("{} ({})", published.repository, published.branch);
    lines.push(match (&published.revision, &published.output) {
        (Some(revision), Some(output)) => {
            format!("published in {place} at {revision}\ndescriptor: {}", output.display())
        }
        (Some(revision), None) => format!("dry run: {place} has everything at {revision}"),
        (None, _) if published.created => format!("dry run: {place} would be created"),
        (None, _) => format!("dry run: {place} would get a new commit"),
    });
    lines.join("\n")
}
