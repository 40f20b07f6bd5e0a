//! `coldsnap overlay`: capsules that were captured again on this node and are used on this node only.

mod create;
mod explain;
mod ls;

use std::path::{Path, PathBuf};

use clap::Subcommand;
use coldsnap::capsule;
use coldsnap::overlay::{self, OverlayError, Portable};
use coldsnap::store::NodeStore;
use serde::Serialize;

use super::inspect;
use crate::containerd::{Containerd, ContainerdError};
use crate::node::Node;
use crate::output::{CliError, Output};

/// Capsules that were captured again on this node after a restore: later starts of the same image use the newest one
/// whose every binding (host, kernel, CRIU, runc, CPU features, payloads) still holds, else the image's own capsule.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Create(create::Args),
    /// List the overlays of this node.
    Ls,
    Explain(explain::Args),
    Rm(RmArgs),
}

/// Remove overlays and their leases; payloads stay.
#[derive(Debug, clap::Args)]
struct RmArgs {
    /// Ids, as `ls` prints them.
    #[arg(required = true, value_name = "ID")]
    ids: Vec<String>,
}

/// How to reach containerd.
#[derive(Debug, clap::Args)]
pub struct Client {
    /// containerd's socket.
    #[arg(long, value_name = "SOCKET", default_value = "/run/containerd/containerd.sock")]
    pub address: PathBuf,
    /// containerd namespace.
    #[arg(long, short, env = "CONTAINERD_NAMESPACE", default_value = "default")]
    pub namespace: String,
}

impl Client {
    /// Connects.
    ///
    /// # Errors
    /// When nobody answers.
    pub async fn connect(&self) -> Result<Containerd, ContainerdError> {
        Containerd::connect(&self.address, &self.namespace).await
    }
}

/// Runs the command.
///
/// # Errors
/// See [`OverlayError`] and the commands.
pub fn run(args: Args, node: &Node, output: &Output) -> Result<(), CliError> {
    match args.command {
        Command::Create(args) => create::run(args, node, output),
        Command::Ls => ls::run(&node.store(), output),
        Command::Explain(args) => explain::run(&args, &node.store(), output),
        Command::Rm(args) => remove(&args, &node.store(), output),
    }
}

#[derive(Serialize)]
struct Removed {
    removed: Vec<String>,
}

fn remove(args: &RmArgs, store: &NodeStore, output: &Output) -> Result<(), CliError> {
    let found = overlay::list(store)?;
    let mut removed = Vec::new();
    for id in &args.ids {
        let here = found.iter().find(|f| f.id == *id);
        let here = here.ok_or_else(|| OverlayError::NotFound(id.clone()))?;
        overlay::remove(store, &here.portable, id)?;
        removed.push(id.clone());
    }
    output.result(&Removed { removed }, || format!("removed {}", args.ids.join(", ")))
}

/// The portable capsule of an image in containerd.
///
/// # Errors
/// There is no such image, or it holds no capsule.
pub async fn portable_of_image(containerd: &Containerd, name: &str) -> Result<Portable, CliError> {
    let files = inspect::image(containerd, name).await.map_err(|e| CliError::new("Containerd", e))?;
    let artifact = files.documents.get(capsule::ARTIFACT_PATH);
    let artifact =
        artifact.ok_or_else(|| CliError::new("NotACapsule", format!("{name} holds no capsule")))?;
    Ok(Portable::parse(artifact)?)
}

/// The portable capsule that a file `artifact.json` describes.
///
/// # Errors
/// It cannot be read or is none.
pub fn portable_of_file(path: &Path) -> Result<Portable, CliError> {
    let bytes = std::fs::read(path)
        .map_err(|e| CliError::new("Io", format!("cannot read {}: {e}", path.display())))?;
    Ok(Portable::parse(&bytes)?)
}
