//! Restore or cold start, decided at Create: what the shim needs to know, from the library's decision about capsules
//! or from a create request that names plain CRIU images.

use std::path::{Path, PathBuf};

use coldsnap::config::Config;
use coldsnap::criu::config::{EstablishedTcp, restore_config};
use coldsnap::restore::{Decision, LiveContainer, ReadAhead, RestoreMode, RestorePlan, RestoreRefused};
use coldsnap::store::NodeStore;
use log::{info, warn};
use serde_json::Value;
use thiserror::Error;

use crate::overlay::UsedOverlay;

/// Environment variable of containerd (shims inherit it) that names another node store.
const STORE_VARIABLE: &str = "COLDSNAP_STORE";

/// A restore that Create decided and Start carries out.
#[derive(Debug)]
pub struct Plan {
    /// Directory of the CRIU images.
    pub images: PathBuf,
    /// Directory of the parent images of an incremental checkpoint.
    pub parent: Option<PathBuf>,
    /// Content of the container's CRIU configuration file.
    pub criu_config: String,
    /// Which capture is restored; for logs.
    pub capture_id: String,
    /// A failure becomes a cold start.
    pub may_start_cold: bool,
    /// Reads the memory files as long as it lives.
    pub read_ahead: Option<ReadAhead>,
    /// The overlay of this node that is restored; `None` for the image's own capsule.
    pub overlay: Option<UsedOverlay>,
}

/// Why a container that could be wanted as a restore is not restored.
#[derive(Debug, Error)]
pub enum NoRestore {
    /// A restore is required and not possible.
    #[error("restore refused: {0}")]
    Refused(String),
    /// It starts cold although it holds a capsule.
    #[error("{0}")]
    Fallback(String),
}

impl NoRestore {
    /// What `reason` means in this mode.
    pub fn new(reason: &impl std::fmt::Display, mode: RestoreMode) -> Self {
        match mode {
            RestoreMode::Auto => Self::Fallback(reason.to_string()),
            _ => Self::Refused(reason.to_string()),
        }
    }
}

/// Decides for a container whose request names no images: a plan, or `None` for an ordinary cold start.
///
/// # Errors
/// The container holds a capsule that cannot be restored here, or holds none and `mode` is `Require`.
pub fn decide(
    store: &NodeStore,
    rootfs: &Path,
    spec: &Value,
    mode: RestoreMode,
) -> Result<Option<Plan>, RestoreRefused> {
    match coldsnap::restore::decide(&LiveContainer { rootfs, spec, store }, mode)? {
        Decision::Restore(plan) => Ok(Some(Plan::new(&plan, mode))),
        Decision::Cold(reason) => {
            info!("cold start: {reason}");
            Ok(None)
        }
    }
}

/// The same for a root filesystem with the layers of an overlay: a plan, or why the overlay cannot be restored. The
/// decision about the image's own capsule is still open then.
///
/// # Errors
/// Everything that stands against it.
pub fn decide_overlay(rootfs: &Path, spec: &Value, mode: RestoreMode) -> Result<Plan, String> {
    let live = LiveContainer { rootfs, spec, store: &store() };
    match coldsnap::restore::decide(&live, RestoreMode::Require) {
        Ok(Decision::Restore(plan)) => Ok(Plan::new(&plan, mode)),
        Ok(Decision::Cold(reason)) => Err(reason.to_string()),
        Err(refused) => Err(refused.to_string()),
    }
}

/// The node store: the one that the environment names, else the configured one.
pub fn store() -> NodeStore {
    let config = Config::of_node().unwrap_or_else(|error| {
        warn!("{error}; using the defaults");
        Config::default()
    });
    match std::env::var_os(STORE_VARIABLE) {
        Some(root) => config.store.at(Path::new(&root)),
        None => config.node_store(),
    }
}

impl Plan {
    fn new(plan: &RestorePlan, mode: RestoreMode) -> Self {
        Self {
            images: plan.images_dir().to_owned(),
            parent: None,
            criu_config: plan.criu_config(),
            capture_id: plan.capture_id().to_owned(),
            may_start_cold: mode == RestoreMode::Auto,
            read_ahead: Some(plan.start_read_ahead()),
            overlay: None,
        }
    }
}

/// A plan for the plain CRIU images in directory `images` (`CreateTaskRequest.checkpoint`), which clients unpack from
/// a checkpoint image, and for those in `parent` that they build on.
///
/// # Errors
/// The directory holds no CRIU inventory.
pub fn from_checkpoint(images: &str, parent: &str) -> Result<Plan, NoRestore> {
    let path = PathBuf::from(images);
    if let Err(error) = path.join("inventory.img").metadata() {
        return Err(NoRestore::Refused(format!("{images} holds no CRIU images (inventory.img: {error})")));
    }
    Ok(Plan {
        images: path,
        parent: (!parent.is_empty()).then(|| parent.into()),
        // The other ends of connections have gone.
        criu_config: restore_config(EstablishedTcp::Close),
        capture_id: images.to_owned(),
        may_start_cold: false,
        // CRIU reads the pages itself, once and in order.
        read_ahead: None,
        overlay: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decided(rootfs: &Path, mode: RestoreMode) -> Result<Option<Plan>, NoRestore> {
        let store = NodeStore::at(rootfs.join("store"));
        decide(&store, rootfs, &Value::Null, mode).map_err(|refused| NoRestore::new(&refused, mode))
    }

    #[test]
    fn without_a_capsule_auto_is_cold_and_require_is_refused() {
        let rootfs = tempfile::tempdir().unwrap();
        assert!(decided(rootfs.path(), RestoreMode::Auto).unwrap().is_none());
        assert!(decided(rootfs.path(), RestoreMode::Never).unwrap().is_none());
        let required = decided(rootfs.path(), RestoreMode::Require);
        assert!(matches!(required, Err(NoRestore::Refused(_))));
    }

    #[test]
    fn a_damaged_capsule_is_a_reason_to_start_cold_or_to_fail() {
        let rootfs = tempfile::tempdir().unwrap();
        let artifact = rootfs.path().join(coldsnap::capsule::ARTIFACT_PATH);
        std::fs::create_dir_all(artifact.parent().unwrap()).unwrap();
        std::fs::write(artifact, b"{}").unwrap();
        assert!(matches!(decided(rootfs.path(), RestoreMode::Auto), Err(NoRestore::Fallback(_))));
        assert!(matches!(decided(rootfs.path(), RestoreMode::Require), Err(NoRestore::Refused(_))));
    }

    #[test]
    fn a_directory_without_images_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_str().unwrap();
        assert!(matches!(from_checkpoint(path, ""), Err(NoRestore::Refused(_))));
        std::fs::write(directory.path().join("inventory.img"), b"x").unwrap();
        let plan = from_checkpoint(path, "/parent").unwrap();
        assert_eq!(
            (plan.images.as_path(), plan.parent.as_deref()),
            (directory.path(), Some(Path::new("/parent")))
        );
        assert!(!plan.may_start_cold);
    }
}
