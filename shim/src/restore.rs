//! Restore or cold start: the decision at Create, as the shim sees it.
//!
//! The decision about capsules belongs to the library; here are the shapes it is used through, and the one plan that
//! needs no decision: plain CRIU images that the create request names.

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use coldsnap::capsule;
use serde_json::Value;
use thiserror::Error;

use crate::criu::TCP_CLOSE;

/// What annotation `coldsnap.io/restore` asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RestoreMode {
    /// Restore where it is possible, start cold otherwise.
    #[default]
    Auto,
    /// Restore or fail.
    Require,
    /// Start cold.
    Never,
}

impl FromStr for RestoreMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "require" => Ok(Self::Require),
            "never" => Ok(Self::Never),
            _ => Err(format!(
                "annotation {} is {text:?}; auto, require or never is expected",
                capsule::RESTORE_ANNOTATION
            )),
        }
    }
}

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

/// Decides for a container whose request names no images.
///
/// # Errors
/// `mode` is `Require` and there is nothing to restore, or it cannot be restored.
pub fn decide(live: &LiveContainer<'_>, mode: RestoreMode) -> Result<Decision, RestoreRefused> {
    if mode == RestoreMode::Never {
        return Ok(Decision::Cold(None));
    }
    let is_capsule = live.rootfs.join(capsule::ARTIFACT_PATH).symlink_metadata().is_ok();
    let reason = match is_capsule {
        true => "this shim was built without the part of the library that restores capsules".to_owned(),
        false => format!("the root filesystem holds no capsule (no /{})", capsule::ARTIFACT_PATH),
    };
    match mode {
        RestoreMode::Require => Err(RestoreRefused(reason)),
        _ => Ok(Decision::Cold(is_capsule.then_some(reason))),
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
    fn the_annotation_has_three_values() {
        assert_eq!("require".parse(), Ok(RestoreMode::Require));
        assert!("Require".parse::<RestoreMode>().unwrap_err().contains("coldsnap.io/restore"));
    }

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
