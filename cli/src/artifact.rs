//! The capsule that a command is about: in an image, a directory or a file.

use std::fs;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use coldsnap::capture::layer::read_layer_with;
use coldsnap::format::MAX_DOCUMENT_BYTES;
use coldsnap::format::artifact::{Artifact, DOCUMENT};
use coldsnap::recover::RecoverError;
use coldsnap::recover::capsule::{CapsuleDocuments, is_document};

use crate::commands::capture::image::BaseImage;
use crate::commands::inspect::{capsule_layer, capsule_root};
use crate::containerd::{Containerd, ContainerdError};
use crate::output::CliError;

/// Where images are looked up.
#[derive(Debug, clap::Args)]
pub struct Images {
    /// containerd's socket.
    #[arg(long, value_name = "SOCKET", default_value = "/run/containerd/containerd.sock")]
    address: PathBuf,
    /// containerd namespace.
    #[arg(long, short, env = "CONTAINERD_NAMESPACE", default_value = "default")]
    namespace: String,
}

impl Images {
    /// The descriptor of `text`; see [`Self::capsule`].
    ///
    /// # Errors
    /// When there is none, or it breaks its format.
    pub fn artifact(&self, text: &str) -> Result<Artifact, CliError> {
        Ok(self.capsule(text)?.artifact)
    }

    /// Descriptor and manifests of `text`: a directory with a capsule or that is one, an `artifact.json` in one or
    /// alone, else a capsule image.
    ///
    /// # Errors
    /// When there is no descriptor, or it breaks its format.
    pub fn capsule(&self, text: &str) -> Result<CapsuleDocuments, CliError> {
        let path = Path::new(text);
        let unreadable = |e| CliError::new("Io", format!("cannot read {text}: {e}"));
        let wrong = |e: RecoverError| CliError::new(e.kind(), format!("{text}: {e}"));
        let none = || CliError::new("NotACapsule", format!("{text}: there is no capsule's {DOCUMENT}"));
        if path.is_dir() {
            let root = capsule_root(path).map_err(unreadable)?.ok_or_else(none)?;
            return CapsuleDocuments::read(&root).map_err(wrong);
        }
        if path.is_file() {
            // Another file's name says that it is not the one of the capsule around it.
            if path.file_name().is_some_and(|name| name == DOCUMENT)
                && let Some(root) = capsule_root(coldsnap::durable::parent(path)).map_err(unreadable)?
            {
                return CapsuleDocuments::read(&root).map_err(wrong);
            }
            return CapsuleDocuments::of_descriptor(fs::read(path).map_err(unreadable)?).map_err(wrong);
        }
        let runtime = tokio::runtime::Runtime::new().map_err(|e| CliError::new("Io", e))?;
        let layer: Result<_, ContainerdError> = runtime.block_on(async {
            let containerd = Containerd::connect(&self.address, &self.namespace).await?;
            capsule_layer(&containerd, &BaseImage::read(&containerd, text).await?).await
        });
        let layer = layer.map_err(|e| CliError::new("Containerd", e))?.ok_or_else(none)?;
        let files = read_layer_with(BufReader::new(layer), is_document, MAX_DOCUMENT_BYTES);
        CapsuleDocuments::from_layer(files.map_err(unreadable)?).map_err(wrong)
    }
}
