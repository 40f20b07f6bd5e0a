//! `coldsnap publish`: a capsule image in a registry, pushed by containerd, and a descriptor that names it by digest.
//!
//! The order is what keeps the published side whole: payloads, blobs of the image, its manifest, and when the
//! registry has shown that manifest, the descriptor. Whatever fails, what is already there is complete in itself,
//! and a second run goes on from it.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use coldsnap::capsule;
use coldsnap::digest::Digest;
use coldsnap::format::artifact::Artifact;
use coldsnap::registry::{Access, Registry, Repository};
use serde::Serialize;

use super::capture::image::{BaseImage, ImageBlob};
use super::inspect::capsule_files;
use super::registry::{self, PayloadRow, RegistryArgs};
use crate::containerd::{Containerd, PushListener};
use crate::node::Node;
use crate::output::{CliError, Output, Progress};

/// Push a capsule image to a registry and write a descriptor that names it by digest.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Capsule image in containerd.
    image: String,
    /// Where it goes: HOST[:PORT]/NAME:TAG.
    reference: String,
    /// New file for the descriptor.
    #[arg(long, short, value_name = "FILE", required_unless_present = "dry_run")]
    output: Option<PathBuf>,
    /// Push the payloads to the same repository first.
    #[arg(long)]
    with_payloads: bool,
    #[command(flatten)]
    registry: RegistryArgs,
    /// Only say what would be pushed.
    #[arg(long)]
    dry_run: bool,
    /// containerd's socket.
    #[arg(long, value_name = "SOCKET", default_value = "/run/containerd/containerd.sock")]
    address: PathBuf,
    /// containerd namespace.
    #[arg(long, short, env = "CONTAINERD_NAMESPACE", default_value = "default")]
    namespace: String,
}

#[derive(Serialize)]
struct Report {
    image: String,
    /// With the tag.
    reference: String,
    /// With the digest.
    pinned: String,
    digest: Digest,
    dry_run: bool,
    /// Whether the registry had the manifest under this tag before.
    present: bool,
    /// Bytes of blobs that the registry did not have.
    pushed_bytes: u64,
    blobs: Vec<BlobRow>,
    /// Only with `--with-payloads`.
    payloads: Option<Vec<PayloadRow>>,
    /// The file that was written.
    descriptor: Option<PathBuf>,
}

#[derive(Serialize)]
struct BlobRow {
    #[serde(flatten)]
    blob: ImageBlob,
    /// Whether the repository had it before.
    present: bool,
}

/// A capsule image in containerd.
struct CapsuleImage {
    artifact: Artifact,
    manifest: Digest,
    blobs: Vec<ImageBlob>,
}

/// Runs the command.
///
/// # Errors
/// No capsule, an unusable argument, a payload that is not admitted, or what containerd or the registry answer.
pub fn run(args: Args, node: &Node, output: &Output) -> Result<(), CliError> {
    let (repository, tag) = split(&args.reference)?;
    let access = args.registry.access();
    if let Some(path) = &args.output
        && path.symlink_metadata().is_ok()
    {
        let message = format!("{} exists; a descriptor is never overwritten", path.display());
        return Err(CliError::new("AlreadyExists", message));
    }
    let runtime = tokio::runtime::Runtime::new().map_err(|e| CliError::new("Io", e))?;
    let (containerd, capsule) = runtime.block_on(read(&args))?;
    let published = published(&capsule, &repository)?;

    let payloads: BTreeMap<Digest, Option<u64>> = capsule
        .artifact
        .payloads()
        .into_iter()
        .map(|payload| (payload.digest, Some(payload.bytes)))
        .collect();
    let admitted = match args.with_payloads {
        true => registry::admit(&node.store(), &payloads, output)?,
        false => Vec::new(),
    };
    let registry = Registry::connect(&repository, &access)?;
    let present = match registry.manifest(&tag)? {
        None => false,
        Some(found) if found == capsule.manifest => true,
        Some(found) => {
            let message = format!(
                "{} is another image ({found}): choose a tag that is free, so that nobody's capsule is replaced",
                args.reference
            );
            return Err(CliError::new("TagExists", message));
        }
    };
    let mut blobs = Vec::new();
    for blob in &capsule.blobs {
        let present = registry.has_blob(&blob.digest)?;
        blobs.push(BlobRow { blob: blob.clone(), present });
    }
    let rows = registry::push(&registry, &admitted, args.dry_run, output)?;
    if !args.dry_run {
        let missing = blobs.iter().filter(|row| !row.present).map(|row| row.blob.bytes).sum();
        let mut listener = Listener::new(access, output.progress("pushing", missing));
        let pushed =
            containerd.push_image(&args.image, &args.reference, listener.access.plain_http, &mut listener);
        runtime.block_on(pushed).map_err(|e| CliError::new("Containerd", e))?;
        let found = registry.manifest(&tag)?;
        if found != Some(capsule.manifest) {
            let found = found.map_or_else(|| "nothing".to_owned(), |found| found.to_string());
            let message = format!("{} is {found} after the push of {}", args.reference, capsule.manifest);
            return Err(CliError::new("RegistryRefused", message));
        }
        if let Some(path) = &args.output {
            published
                .write_new(path)
                .map_err(|e| CliError::new(e.kind(), format!("cannot write the descriptor: {e}")))?;
        }
    }
    let report = Report {
        image: args.image,
        reference: args.reference,
        pinned: format!("{repository}@{}", capsule.manifest),
        digest: capsule.manifest,
        dry_run: args.dry_run,
        present,
        pushed_bytes: blobs.iter().filter(|row| !row.present).map(|row| row.blob.bytes).sum(),
        blobs,
        payloads: args.with_payloads.then_some(rows),
        descriptor: args.output.filter(|_| !args.dry_run),
    };
    output.result(&report, || text(&report))
}

/// `HOST[:PORT]/NAME:TAG`
fn split(reference: &str) -> Result<(Repository, String), CliError> {
    let wrong = || CliError::new("Malformed", format!("{reference:?} is not HOST[:PORT]/NAME:TAG"));
    let (repository, tag) = reference.rsplit_once(':').ok_or_else(wrong)?;
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    if tag.is_empty() || tag.len() > 128 || tag.starts_with(['.', '-']) || !tag.chars().all(allowed) {
        return Err(wrong());
    }
    Ok((repository.parse()?, tag.to_owned()))
}

async fn read(args: &Args) -> Result<(Containerd, CapsuleImage), CliError> {
    let failed = |e| CliError::new("Containerd", e);
    let not_a_capsule =
        |reason: String| CliError::new("NotACapsule", format!("image {}: {reason}", args.image));
    let containerd = Containerd::connect(&args.address, &args.namespace).await.map_err(failed)?;
    let image = BaseImage::read(&containerd, &args.image).await.map_err(failed)?;
    let files = capsule_files(&containerd, &image).await.map_err(failed)?;
    let descriptor = files.documents.get(capsule::ARTIFACT_PATH);
    let descriptor = descriptor.ok_or_else(|| not_a_capsule("it has no capsule layer".into()))?;
    let artifact = Artifact::parse(descriptor).map_err(|e| not_a_capsule(e.to_string()))?;
    // Other platforms of an index are not this capsule's.
    let manifest = image.single_manifest().ok_or_else(|| not_a_capsule("it is an index of images".into()))?;
    let blobs = image.blobs().map_err(failed)?;
    Ok((containerd, CapsuleImage { artifact, manifest, blobs }))
}

/// The descriptor with the published image in it.
fn published(capsule: &CapsuleImage, repository: &Repository) -> Result<Artifact, CliError> {
    let mut artifact = capsule.artifact.clone();
    let [image] = artifact.capsule.images.as_mut_slice() else {
        let count = artifact.capsule.images.len();
        let message =
            format!("the capsule is one of {count} images of its artifact; only single ones are published");
        return Err(CliError::new("Unsupported", message));
    };
    image.reference = format!("{repository}@{}", capsule.manifest);
    image.digest = Some(capsule.manifest);
    Ok(artifact)
}

/// What containerd asks during the push.
struct Listener {
    access: Access,
    progress: Progress,
    sent: HashMap<String, u64>,
}

impl Listener {
    fn new(access: Access, progress: Progress) -> Self {
        Self { access, progress, sent: HashMap::new() }
    }
}

impl PushListener for Listener {
    fn progress(&mut self, name: &str, sent: u64, _of: u64) {
        let before = self.sent.entry(name.to_owned()).or_default();
        self.progress.advance(sent.saturating_sub(*before));
        *before = sent.max(*before);
    }

    fn credentials(&mut self, host: &str) -> Option<(String, String)> {
        match self.access.credentials(host) {
            Ok(found) => found.map(|found| (found.username, found.secret)),
            Err(error) => {
                tracing::warn!(%error, "containerd pushes without credentials");
                None
            }
        }
    }
}

fn text(report: &Report) -> String {
    let mut lines: Vec<String> =
        report.payloads.iter().flatten().map(|row| row.text(report.dry_run)).collect();
    lines.extend(report.blobs.iter().map(|row| {
        let did = match (row.present, report.dry_run) {
            (true, _) => "is there",
            (false, true) => "would be pushed",
            (false, false) => "pushed",
        };
        format!("{:<7}  {}  {did}, {} bytes", row.blob.kind, row.blob.digest, row.blob.bytes)
    }));
    lines.push(match (report.present, report.dry_run) {
        (true, _) => format!("{} is there as {}", report.image, report.pinned),
        (false, true) => format!("{} would be {}", report.image, report.pinned),
        (false, false) => format!("{} is {}", report.image, report.pinned),
    });
    lines.extend(report.descriptor.iter().map(|path| format!("descriptor {}", path.display())));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_has_a_host_a_name_and_a_tag() {
        let (repository, tag) = split("127.0.0.1:5000/a/b:1.0").unwrap();
        assert_eq!((repository.to_string().as_str(), tag.as_str()), ("127.0.0.1:5000/a/b", "1.0"));
        for text in [
            "h.example/a",
            "h.example:5000/a",
            "a:1",
            "h.example/a:",
            "h.example/a:.x",
            "h.example/a@sha256:ab",
        ] {
            assert!(split(text).is_err(), "{text}");
        }
    }
}
