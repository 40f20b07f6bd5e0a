//! `coldsnap inspect`: what a capsule is and what a restore of it needs, or what any other document or pack is.

use std::fs::File;
use std::io::{self, BufReader, Seek, Write};
use std::path::{Path, PathBuf};

use coldsnap::capsule;
use coldsnap::capture::layer::{read_layer, read_tree};
use coldsnap::check::{Document, Summary};
use coldsnap::inspect::{CapsuleFiles, Inspection, inspect};

use serde::Serialize;

use super::capture::image::BaseImage;
use super::check::summary_lines;
use crate::containerd::{Containerd, ContainerdError};
use crate::node::Node;
use crate::output::{CliError, Output};

/// Describe a capsule: snapshot driver, workers, payloads and whether they are here, sizes, and what a restore needs
/// from the host and from the container's spec. Describes single documents and packs too; checks no file's bytes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A capsule image in containerd, or a directory: a root filesystem or layer with a capsule in it, the capsule's
    /// own directory, or that of a worker. Or a file: a document of any kind, or a pack.
    #[arg(value_name = "IMAGE|PATH")]
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
pub fn run(args: Args, node: &Node, output: &Output) -> Result<(), CliError> {
    let path = Path::new(&args.capsule);
    if let Some((path, summary)) = single(path)? {
        let report = Described { path, summary };
        return output.result(&report, || {
            let mut lines = vec![report.path.display().to_string()];
            lines.extend(summary_lines(&report.summary));
            lines.join("\n")
        });
    }
    let files = if path.is_dir() {
        directory(path).map_err(|e| CliError::new("Io", format!("cannot read {}: {e}", path.display())))?
    } else {
        let runtime = tokio::runtime::Runtime::new().map_err(|e| CliError::new("Io", e))?;
        let files = async {
            let containerd = Containerd::connect(&args.address, &args.namespace).await?;
            image(&containerd, &args.capsule).await
        };
        runtime.block_on(files).map_err(|e| CliError::new("Containerd", e))?
    };
    let found = inspect(&files, &node.store())
        .map_err(|e| CliError::new("NotACapsule", format!("{}: {e}", args.capsule)))?;
    output.result(&found, || text(&found))
}

#[derive(Serialize)]
struct Described {
    path: PathBuf,
    #[serde(flatten)]
    summary: Summary,
}

/// A document or pack, also the manifest of a worker's directory; `None` for everything else.
fn single(path: &Path) -> Result<Option<(PathBuf, Summary)>, CliError> {
    let path =
        match [capsule::NATIVE_MANIFEST_NAME, capsule::RECOVERY_MANIFEST_NAME].map(|name| path.join(name)) {
            [native, _] if native.is_file() => native,
            [_, recovery] if recovery.is_file() => recovery,
            _ if path.is_file() => path.to_owned(),
            _ => return Ok(None),
        };
    let summary = match Document::read(&path)? {
        Some(document) => document.summary(),
        None => Summary::pack(&path)?,
    };
    Ok(Some((path, summary)))
}

/// The capsule in a directory, or the directory that is the capsule.
///
/// # Errors
/// When a file cannot be read.
pub fn directory(path: &Path) -> io::Result<CapsuleFiles> {
    capsule_root(path)?.map_or_else(|| Ok(CapsuleFiles::default()), |root| read_tree(&root))
}

/// The root filesystem or layer tree whose capsule a directory holds or is; none when it is neither.
///
/// # Errors
/// When the directory cannot be found.
pub fn capsule_root(path: &Path) -> io::Result<Option<PathBuf>> {
    if path.join(capsule::ARTIFACT_PATH).exists() {
        return Ok(Some(path.to_owned()));
    }
    let absolute = path.canonicalize()?;
    let depth = Path::new(capsule::CAPSULE_DIR).components().count();
    let root = absolute.ancestors().nth(depth).filter(|root| absolute == root.join(capsule::CAPSULE_DIR));
    Ok(root.map(Path::to_owned))
}

/// The capsule of an image; nothing when it has none.
///
/// # Errors
/// There is no such image, or its layer cannot be read.
pub async fn image(containerd: &Containerd, name: &str) -> Result<CapsuleFiles, ContainerdError> {
    let image = BaseImage::read(containerd, name).await?;
    capsule_files(containerd, &image).await
}

/// The capsule in an image's capsule layer; nothing when it has none.
///
/// # Errors
/// When containerd does not deliver the layer, or it is no layer.
pub async fn capsule_files(
    containerd: &Containerd,
    image: &BaseImage,
) -> Result<CapsuleFiles, ContainerdError> {
    match capsule_layer(containerd, image).await? {
        None => Ok(CapsuleFiles::default()),
        Some(file) => read_layer(BufReader::new(file))
            .map_err(|source| ContainerdError::Io { path: "the capsule layer".to_owned(), source }),
    }
}

/// The compressed capsule layer of an image in an unnamed file; none when the image has none.
///
/// # Errors
/// When containerd does not deliver it.
pub async fn capsule_layer(
    containerd: &Containerd,
    image: &BaseImage,
) -> Result<Option<File>, ContainerdError> {
    let Some(layer) = image.capsule_layer() else { return Ok(None) };
    let local = |source| ContainerdError::Io { path: format!("layer {layer}"), source };
    let mut file = tempfile().map_err(local)?;
    containerd.read_blob(&layer, |part| file.write_all(part)).await?;
    file.rewind().map_err(local)?;
    Ok(Some(file))
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
