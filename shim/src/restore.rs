//! Restore or cold start: the decision at Create, as the shim sees it.
//!
//! The decision about capsules belongs to the library; here are the shapes it is used through, and the one plan that
//! needs no decision: plain CRIU images that the create request names.

use std::fmt::Debug;
use std::path::{Path, PathBuf};

use coldsnap::restore as library;
use coldsnap::store::NodeStore;
use log::info;
use serde_json::Value;
use thiserror::Error;

pub use coldsnap::restore::RestoreMode;

use crate::criu::TCP_CLOSE;

/// Environment variable of containerd (shims inherit it) that names another node store.
const STORE_VARIABLE: &str = "COLDSNAP_STORE";

/// The container that is about to be started.
#[derive(Debug)]
pub struct LiveContainer<'a> {
    /// Its mounted root filesystem.
    pub rootfs: &'a Path,
    /// Its OCI configuration, payload binds included.
    pub spec: &'a Value,
}

/// What happens at Start.
#[derive(Debug)]
pub enum Decision {
    /// An ordinary start. A reason is given when there was something to restore.
    Cold(Option<String>),
    /// A restore.
    Restore(Box<dyn RestorePlan>),
}

/// A restore was required and is not possible.
#[derive(Debug, Error)]
#[error("restore refused: {0}")]
pub struct RestoreRefused(pub String);

/// Everything the shim needs to know for a restore that was decided.
pub trait RestorePlan: Debug + Send + Sync {
    /// Directory of the CRIU images.
    fn images_dir(&self) -> &Path;
    /// Directory of the parent images of an incremental checkpoint.
    fn parent_dir(&self) -> Option<&Path>;
    /// Content of the container's CRIU configuration file.
    fn criu_config(&self) -> String;
    /// Which capture is restored; for logs.
    fn capture_id(&self) -> &str;
    /// Begins to read the memory files; reading ends with the value.
    fn start_read_ahead(&self) -> Box<dyn Send + Sync>;
}

/// Decides for a container whose request names no images. In mode `Auto` a capsule that cannot be restored here is a
/// cold start with a reason.
///
/// # Errors
/// `mode` is `Require` and there is nothing to restore, or it cannot be restored.
pub fn decide(live: &LiveContainer<'_>, mode: RestoreMode) -> Result<Decision, RestoreRefused> {
    let store =
        NodeStore::at(std::env::var_os(STORE_VARIABLE).unwrap_or_else(|| NodeStore::DEFAULT_ROOT.into()));
    let live = library::LiveContainer { rootfs: live.rootfs, spec: live.spec, store: &store };
    match library::decide(&live, mode) {
        Ok(library::Decision::Restore(plan)) => Ok(Decision::Restore(plan)),
        Ok(library::Decision::Cold(reason)) => {
            info!("cold start: {reason}");
            Ok(Decision::Cold(None))
        }
        Err(refused) if mode == RestoreMode::Auto => Ok(Decision::Cold(Some(refused.to_string()))),
        Err(refused) => Err(RestoreRefused(refused.to_string())),
    }
}

impl RestorePlan for library::RestorePlan {
    fn images_dir(&self) -> &Path {
        self.images_dir()
    }

    fn parent_dir(&self) -> Option<&Path> {
        None
    }

    fn criu_config(&self) -> String {
        self.criu_config()
    }

    fn capture_id(&self) -> &str {
        self.capture_id()
    }

    fn start_read_ahead(&self) -> Box<dyn Send + Sync> {
        Box::new(self.start_read_ahead())
    }
}

/// The plain CRIU images of `CreateTaskRequest.checkpoint`, which clients unpack from a checkpoint image.
#[derive(Debug)]
pub struct CheckpointImages {
    images: PathBuf,
    parent: Option<PathBuf>,
    id: String,
}

impl CheckpointImages {
    /// Images in directory `images`, and those they build on.
    ///
    /// # Errors
    /// The directory holds no CRIU inventory.
    pub fn new(images: &str, parent: &str) -> Result<Self, RestoreRefused> {
        let images = PathBuf::from(images);
        if let Err(error) = images.join("inventory.img").metadata() {
            return Err(RestoreRefused(format!(
                "{} holds no CRIU images (inventory.img: {error})",
                images.display()
            )));
        }
        let parent = (!parent.is_empty()).then(|| PathBuf::from(parent));
        Ok(Self { id: images.display().to_string(), images, parent })
    }
}

impl RestorePlan for CheckpointImages {
    fn images_dir(&self) -> &Path {
        &self.images
    }

    fn parent_dir(&self) -> Option<&Path> {
        self.parent.as_deref()
    }

    fn criu_config(&self) -> String {
        // Clients of the others have gone; CRIU refuses images with connections without this.
        format!("{TCP_CLOSE}\n")
    }

    fn capture_id(&self) -> &str {
        &self.id
    }

    fn start_read_ahead(&self) -> Box<dyn Send + Sync> {
        // CRIU reads the pages itself, once and in order.
        Box::new(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_capsule_auto_is_cold_and_require_is_refused() {
        let rootfs = tempfile::tempdir().unwrap();
        let live = LiveContainer { rootfs: rootfs.path(), spec: &Value::Null };
        assert!(matches!(decide(&live, RestoreMode::Auto), Ok(Decision::Cold(None))));
        assert!(decide(&live, RestoreMode::Require).is_err());
    }

    #[test]
    fn a_directory_without_images_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_str().unwrap();
        assert!(CheckpointImages::new(path, "").is_err());
        std::fs::write(directory.path().join("inventory.img"), b"x").unwrap();
        assert_eq!(CheckpointImages::new(path, "").unwrap().images_dir(), directory.path());
    }
}
