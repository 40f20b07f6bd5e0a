//! The artifact descriptor that a command is about: in an image, a directory or a file.

use std::fs;
use std::path::{Path, PathBuf};

use coldsnap::capsule;
use coldsnap::format::artifact::{Artifact, DOCUMENT};
use coldsnap::inspect::CapsuleFiles;

use crate::commands::capture::image::BaseImage;
use crate::commands::inspect::{capsule_files, directory};
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
    /// The descriptor of `text`: a file, a directory with a capsule or that is one, else a capsule image.
    ///
    /// # Errors
    /// When there is none, or it breaks its format.
    pub fn artifact(&self, text: &str) -> Result<Artifact, CliError> {
        let path = Path::new(text);
        let unreadable = |e| CliError::new("Io", format!("cannot read {text}: {e}"));
        let document = if path.is_file() {
            fs::read(path).map_err(unreadable)?
        } else {
            let files = if path.is_dir() {
                directory(path).map_err(unreadable)?
            } else {
                let runtime = tokio::runtime::Runtime::new().map_err(|e| CliError::new("Io", e))?;
                runtime.block_on(self.image(text)).map_err(|e| CliError::new("Containerd", e))?
            };
            let document = files.documents.get(capsule::ARTIFACT_PATH);
            let what = || CliError::new("NotACapsule", format!("{text}: there is no capsule's {DOCUMENT}"));
            document.cloned().ok_or_else(what)?
        };
        Artifact::parse(&document).map_err(|e| CliError::new(e.kind(), format!("{text}: {e}")))
    }

    async fn image(&self, name: &str) -> Result<CapsuleFiles, ContainerdError> {
        let containerd = Containerd::connect(&self.address, &self.namespace).await?;
        let image = BaseImage::read(&containerd, name).await?;
        capsule_files(&containerd, &image).await
    }
}
