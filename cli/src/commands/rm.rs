//! `coldsnap rm`: everything of a capsule on this node, except payloads.

use std::collections::BTreeMap;
use std::path::Path;

use coldsnap::capsule;
use coldsnap::digest::Digest;
use coldsnap::format::descriptor::is_id;
use coldsnap::overlay::{self, OverlayError, Portable};
use coldsnap::store::NodeStore;
use containerd_client::services::v1::Image;
use serde::Serialize;

use super::capture::image::BaseImage;
use super::overlay::{Client, portable_of_image};
use crate::containerd::{Containerd, ContainerdError};
use crate::node::Node;
use crate::output::{CliError, Output};

/// Remove a capsule from this node: its image, its overlays and their leases. Payloads stay, because others may use them;
/// what nobody leases can be evicted.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A capsule image in containerd, a file `artifact.json`, or the id of a capture. A file or an id means every image of
    /// that capsule.
    #[arg(value_name = "IMAGE|FILE|CAPTURE")]
    capsule: String,
    /// Also when containers of the image exist. They and the overlays that they use stay.
    #[arg(long)]
    force: bool,
    /// Say what would be removed, and remove nothing.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    client: Client,
}

#[derive(Debug, Default, Serialize)]
struct Report {
    dry_run: bool,
    portable_descriptor: String,
    /// Names of images that are removed.
    images: Vec<String>,
    /// Other names of the same capsule, which stay; then its overlays stay too.
    images_kept: Vec<String>,
    /// Ids of overlays that are removed with their leases.
    overlays: Vec<String>,
    /// Ids of overlays that stay, and why.
    overlays_kept: BTreeMap<String, String>,
    /// Containers of the removed images, which stay (with `--force`).
    containers: Vec<String>,
    /// The payloads of the capsule; all of them stay.
    payloads: Vec<PayloadRow>,
}

#[derive(Debug, Serialize)]
struct PayloadRow {
    digest: Digest,
    bytes: u64,
    /// Whether this node has it.
    here: bool,
    /// Owners of leases that are left.
    leased_by: Vec<String>,
}

/// Runs the command.
///
/// # Errors
/// There is no such capsule, a container uses it, or a removal failed: the message says of what, the rest is done by the
/// same command again.
pub fn run(args: Args, node: &Node, output: &Output) -> Result<(), CliError> {
    let runtime = tokio::runtime::Runtime::new().map_err(|e| CliError::new("Io", e))?;
    let report = runtime.block_on(remove(&args, &node.store()))?;
    output.result(&report, || report.text())
}

/// A capsule and the names that it has.
struct Target {
    portable: Portable,
    /// To be removed.
    images: Vec<String>,
    /// Further names of it.
    others: Vec<String>,
}

async fn remove(args: &Args, store: &NodeStore) -> Result<Report, CliError> {
    let containerd = args.client.connect().await.map_err(refused)?;
    let Target { portable, images, others } = resolve(&containerd, &args.capsule).await?;
    let containers = containerd.containers().await.map_err(refused)?;
    let containers: Vec<String> =
        containers.into_iter().filter(|c| images.contains(&c.image)).map(|c| c.id).collect();
    if !containers.is_empty() && !args.force {
        let message = format!(
            "{} is used by containers: {}; remove them first, or --force",
            args.capsule,
            containers.join(", ")
        );
        return Err(CliError::new("InUse", message));
    }
    let mut report = Report {
        dry_run: args.dry_run,
        portable_descriptor: portable.digest.to_string(),
        images_kept: others,
        containers,
        ..Report::default()
    };
    // First: a capsule without overlays is complete, overlays without a capsule are waste.
    for found in overlay::of(store, &portable.digest)? {
        let kept = if !report.images_kept.is_empty() {
            Some("the capsule has other images".to_owned())
        } else if args.dry_run {
            let used = found.overlay.as_ref().map_or(Ok(false), |o| o.is_in_use())?;
            used.then(|| OverlayError::InUse(found.id.clone()).to_string())
        } else {
            match overlay::remove(store, &portable.digest, &found.id) {
                Ok(()) => None,
                Err(error @ OverlayError::InUse(_)) => Some(error.to_string()),
                Err(error) => return Err(error.into()),
            }
        };
        match kept {
            Some(reason) => drop(report.overlays_kept.insert(found.id, reason)),
            None => report.overlays.push(found.id),
        }
    }
    for image in images {
        if !args.dry_run {
            containerd.remove_image(&image).await.map_err(refused)?;
        }
        report.images.push(image);
    }
    report.payloads = payloads(store, &portable, &report)?;
    Ok(report)
}

fn payloads(store: &NodeStore, portable: &Portable, report: &Report) -> Result<Vec<PayloadRow>, CliError> {
    let leases = store.leases()?;
    let released: Vec<String> = report.overlays.iter().map(|id| overlay::owner(id)).collect();
    let mut rows: BTreeMap<Digest, PayloadRow> = BTreeMap::new();
    for payload in portable.artifact.payloads() {
        let leased = leases.iter().filter(|lease| lease.digest == payload.digest);
        let leased_by = leased.map(|lease| lease.owner.clone()).filter(|owner| !released.contains(owner));
        rows.entry(payload.digest).or_insert_with(|| PayloadRow {
            digest: payload.digest,
            bytes: payload.bytes,
            here: store.payload_path(&payload.digest).exists(),
            leased_by: leased_by.collect(),
        });
    }
    Ok(rows.into_values().collect())
}

async fn resolve(containerd: &Containerd, capsule: &str) -> Result<Target, CliError> {
    let all = containerd.images().await.map_err(refused)?;
    let path = Path::new(capsule);
    if all.iter().any(|image| image.name == capsule) {
        let portable = portable_of_image(containerd, capsule).await?;
        let artifact = label(containerd, &all, capsule, capsule::IMAGE_LABEL).await;
        let same = match artifact {
            Some(artifact) => named(containerd, &all, capsule::IMAGE_LABEL, &artifact).await,
            None => Vec::new(),
        };
        let others = same.into_iter().filter(|name| name != capsule).collect();
        return Ok(Target { portable, images: vec![capsule.to_owned()], others });
    }
    if path.is_file() {
        let bytes = std::fs::read(path)
            .map_err(|e| CliError::new("Io", format!("cannot read {}: {e}", path.display())))?;
        let portable = Portable::parse(&bytes)?;
        let artifact = Digest::of(&bytes).to_string();
        let images = named(containerd, &all, capsule::IMAGE_LABEL, &artifact).await;
        return Ok(Target { portable, images, others: Vec::new() });
    }
    let images = match is_id(capsule) {
        true => named(containerd, &all, capsule::CAPTURE_LABEL, capsule).await,
        false => Vec::new(),
    };
    let Some(first) = images.first() else {
        let message =
            format!("{capsule} is neither an image nor a file nor a capture that an image here is of");
        return Err(CliError::new("NotFound", message));
    };
    Ok(Target { portable: portable_of_image(containerd, first).await?, images, others: Vec::new() })
}

/// Names of the images with this label or manifest annotation.
async fn named(containerd: &Containerd, all: &[Image], key: &str, value: &str) -> Vec<String> {
    let mut names = Vec::new();
    for image in all {
        if label(containerd, all, &image.name, key).await.as_deref() == Some(value) {
            names.push(image.name.clone());
        }
    }
    names
}

/// A label of an image. One that was pulled has it as an annotation of its manifest only; an image that cannot be read has
/// none.
async fn label(containerd: &Containerd, all: &[Image], name: &str, key: &str) -> Option<String> {
    let image = all.iter().find(|image| image.name == name)?;
    if let Some(value) = image.labels.get(key) {
        return Some(value.clone());
    }
    let image = BaseImage::read(containerd, name).await.ok()?;
    image.annotation(key).map(str::to_owned)
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn refused(error: ContainerdError) -> CliError {
    CliError::new("Containerd", error)
}

impl Report {
    fn text(&self) -> String {
        let verb = if self.dry_run { "would remove" } else { "removed" };
        let mut lines = Vec::new();
        lines.extend(self.overlays.iter().map(|id| format!("{verb} overlay {id} and its leases")));
        lines.extend(self.images.iter().map(|name| format!("{verb} image {name}")));
        lines.extend(
            self.images_kept
                .iter()
                .map(|name| format!("kept image {name}: another name of the same capsule")),
        );
        lines.extend(self.overlays_kept.iter().map(|(id, why)| format!("kept overlay {id}: {why}")));
        lines.extend(self.containers.iter().map(|id| format!("kept container {id}")));
        lines.extend(self.payloads.iter().map(|payload| {
            let PayloadRow { digest, bytes, here, leased_by } = payload;
            match (here, leased_by.is_empty()) {
                (false, _) => format!("payload {digest} is not on this node"),
                (true, true) => format!("kept payload {digest}, {bytes} bytes: nobody leases it"),
                (true, false) => {
                    format!("kept payload {digest}, {bytes} bytes: leased by {}", leased_by.join(", "))
                }
            }
        }));
        if lines.is_empty() { "nothing to remove".to_owned() } else { lines.join("\n") }
    }
}
