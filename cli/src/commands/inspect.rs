//! `coldsnap inspect`: what a capsule is and what a restore of it needs.

use std::fs::File;
use std::io::{self, BufReader, Seek, Write};
use std::path::{Path, PathBuf};

use coldsnap::capsule;
use coldsnap::capture::layer::{read_layer, read_tree};
use coldsnap::inspect::{CapsuleFiles, Inspection, inspect};
use coldsnap::store::NodeStore;

use super::capture::image::BaseImage;
use crate::containerd::{Containerd, ContainerdError};
use crate::output::{CliError, Output};

/// Describe a capsule: snapshot driver, workers, payloads and whether they are here, sizes, and what a restore needs
/// from the host and from the container's spec.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A capsule image in containerd, or a directory: a root filesystem or layer with a capsule in it, or the
    /// capsule's own directory.
    #[arg(value_name = "IMAGE|DIRECTORY")]
    capsule: String,
    /// containerd's socket.
    #[arg(long, value_name = "SOCKET", default_value = "/run/containerd/containerd.sock")]
    address: PathBuf,
    /// containerd namespace.
    #[arg(long, short, env = "CONTAINERD_NAMESPACE", default_value = "default")]
    namespace: String,
}

/// Runs the command.
///
/// # Errors
/// When there is no such capsule or it is malformed.
pub fn run(args: Args, store: &Path, output: &Output) -> Result<(), CliError> {
    let path = Path::new(&args.capsule);
    let files = if path.is_dir() {
        directory(path).map_err(|e| CliError::new("Io", format!("cannot read {}: {e}", path.display())))?
    } else {
        let runtime = tokio::runtime::Runtime::new().map_err(|e| CliError::new("Io", e))?;
        runtime.block_on(image(&args)).map_err(|e| CliError::new("Containerd", e))?
    };
    let found = inspect(&files, &NodeStore::at(store))
        .map_err(|e| CliError::new("NotACapsule", format!("{}: {e}", args.capsule)))?;
    output.result(&found, || text(&found))
}

/// The capsule in a directory, or the directory that is the capsule.
fn directory(path: &Path) -> io::Result<CapsuleFiles> {
    if path.join(capsule::ARTIFACT_PATH).exists() {
        return read_tree(path);
    }
    let absolute = path.canonicalize()?;
    let depth = Path::new(capsule::CAPSULE_DIR).components().count();
    match absolute.ancestors().nth(depth) {
        Some(root) if absolute == root.join(capsule::CAPSULE_DIR) => read_tree(root),
        _ => Ok(CapsuleFiles::default()),
    }
}

async fn image(args: &Args) -> Result<CapsuleFiles, ContainerdError> {
    let containerd = Containerd::connect(&args.address, &args.namespace).await?;
    let image = BaseImage::read(&containerd, &args.capsule).await?;
    capsule_files(&containerd, &image).await
}

/// The capsule in an image's capsule layer; nothing when it has none.
///
/// # Errors
/// When containerd does not deliver the layer, or it is no layer.
pub async fn capsule_files(
    containerd: &Containerd,
    image: &BaseImage,
) -> Result<CapsuleFiles, ContainerdError> {
    let Some(layer) = image.capsule_layer() else { return Ok(CapsuleFiles::default()) };
    let local = |source| ContainerdError::Io { path: format!("layer {layer}"), source };
    let mut file = tempfile().map_err(local)?;
    containerd.read_blob(&layer, |part| file.write_all(part)).await?;
    file.rewind().map_err(local)?;
    read_layer(BufReader::new(file)).map_err(local)
}

/// An unnamed file; a layer is too large for memory.
fn tempfile() -> io::Result<File> {
    use rustix::fs::{Mode, OFlags, open};
    Ok(File::from(open(
        std::env::temp_dir(),
        OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC,
        Mode::RUSR | Mode::WUSR,
    )?))
}

fn text(found: &Inspection) -> String {
    let mut lines = vec![
        format!("capture     {} of {}", found.capture_id, found.engine),
        format!("driver      {:?}", found.driver).to_lowercase(),
        format!("model       {}", found.model.as_deref().unwrap_or("none")),
        format!(
            "images      {} bytes of CRIU images, {} bytes of residual",
            found.images_bytes, found.residual_bytes
        ),
        format!("scope       {}", found.scope),
    ];
    lines.extend(found.scope_narrowed.iter().map(|what| format!("            narrowed: {what}")));
    for worker in &found.workers {
        lines.push(match &worker.payload {
            Some(payload) => format!(
                "worker {}   payload {payload}, {} bytes, {}; residual {} bytes",
                worker.id,
                worker.payload_bytes,
                if worker.payload_here { "on this node" } else { "NOT on this node" },
                worker.residual_bytes,
            ),
            None => format!("worker {}   no payload; residual {} bytes", worker.id, worker.residual_bytes),
        });
    }
    let needs = &found.needs_host;
    lines.push(format!(
        "needs host  {}, pages of {} bytes, CRIU {} or newer",
        needs.architecture, needs.page_size, needs.criu
    ));
    lines.push(format!("needs spec  args {:?}", found.needs_spec.args));
    lines.extend(found.needs_spec.binds.iter().map(|b| format!("            bind mount at {b}")));
    if found.needs_spec.terminal {
        lines.push("            a terminal".to_owned());
    }
    lines.push(format!(
        "restorable  {}",
        if found.restorable_here { "here" } else { "not here: a payload is missing" }
    ));
    lines.join("\n")
}
