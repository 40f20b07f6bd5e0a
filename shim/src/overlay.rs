//! Overlays of this node: a capsule that was captured again here takes the place of the image's own, when everything that
//! it is bound to is as it was. Whatever stands against it is logged, and the image's capsule is used.
//!
//! The overlay's layers are lower layers of the container's root. A root with them is only for the restore that they are
//! for: before anything else, the root is mounted anew without them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::sync::Arc;

use coldsnap::capsule;
use coldsnap::config::MaterializeMode;
use coldsnap::node::{self, ToolVersions};
use coldsnap::overlay::mount::with_layers;
use coldsnap::overlay::{Choice, Chosen, InUse, Portable, choose};
use coldsnap::restore::RestoreMode;
use containerd_shim_protos::types::mount::Mount;
use log::{info, warn};
use serde_json::Value;
use thiserror::Error;

use crate::container::Container;
use crate::error::TaskError;
use crate::mount::{MountError, mount_all, unmount_below};
use crate::reaper::Reaper;
use crate::restore::{Plan, decide_overlay, store};
use crate::runc::{contents, memory_file};

/// runc's own default.
const CRIU: &str = "criu";

/// What the annotation `coldsnap.io/overlay` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OverlayMode {
    /// Use the newest that fits.
    #[default]
    Auto,
    /// Use none.
    Never,
}

/// The annotation has another value.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("annotation {} is {found:?}: expected auto or never", capsule::OVERLAY_ANNOTATION)]
pub struct OverlayModeError {
    found: String,
}

impl FromStr for OverlayMode {
    type Err = OverlayModeError;

    fn from_str(text: &str) -> Result<Self, OverlayModeError> {
        match text {
            "auto" => Ok(Self::Auto),
            "never" => Ok(Self::Never),
            other => Err(OverlayModeError { found: other.to_owned() }),
        }
    }
}

/// A container's root filesystem, and what a restore in it was asked for.
#[derive(Clone, Debug)]
pub struct Root {
    /// Where the shim mounted it.
    pub mounted: PathBuf,
    /// Where the spec says that it is.
    pub path: PathBuf,
    /// The mounts that make it.
    pub mounts: Vec<Mount>,
    /// The container's spec.
    pub spec: Value,
    /// What the annotation asks for.
    pub mode: RestoreMode,
    /// What the annotation says about materialization.
    pub materialize: Option<MaterializeMode>,
}

/// An overlay whose layers are in a container's root. Nobody can remove it meanwhile.
#[derive(Debug)]
pub struct UsedOverlay {
    /// Its id.
    pub id: String,
    root: Root,
    _hold: InUse,
}

impl UsedOverlay {
    /// Makes the root as it is without the overlay.
    ///
    /// # Errors
    /// The kernel refuses.
    pub async fn take_away(self) -> Result<Root, TaskError> {
        mount_anew(&self.root, self.root.mounts.clone()).await?;
        Ok(self.root)
    }
}

/// Looks for an overlay of the capsule in `root`, and decides about a restore from it. `None`: the root is as it was, and
/// its own capsule counts.
///
/// # Errors
/// The root could not be mounted again.
pub async fn decide(container: &Container, root: &Root) -> Result<Option<Plan>, TaskError> {
    if !coldsnap::overlay::any(&store()) {
        return Ok(None);
    }
    let id = &container.id;
    let chosen = match find(container, root).await {
        Err(reason) => {
            warn!("container {id}: no overlay is used: {reason}");
            return Ok(None);
        }
        Ok(choice) => {
            for passed in &choice.passed_over {
                warn!("container {id}: overlay {} is not used: {}", passed.id, passed.reasons.join("; "));
            }
            choice.chosen
        }
    };
    let Some(Chosen { overlay, hold }) = chosen else { return Ok(None) };
    let layered = match layered(&root.mounts, &overlay.layers()) {
        Ok(mounts) => mounts,
        Err(reason) => {
            warn!("container {id}: overlay {} is not used: {reason}", overlay.id());
            return Ok(None);
        }
    };
    let used = UsedOverlay { id: overlay.id().to_owned(), root: root.clone(), _hold: hold };
    let reason = match mount_anew(root, layered).await {
        Err(error) => error.to_string(),
        Ok(()) => {
            let decided = root.clone();
            let decision = tokio::task::spawn_blocking(move || {
                decide_overlay(&decided.path, &decided.spec, decided.mode)
            });
            match decision.await.map_err(|error| TaskError::Other(format!("the decision died: {error}")))? {
                Ok(plan) => {
                    info!("container {id}: overlay {} takes the place of the image's capsule", used.id);
                    return Ok(Some(Plan { overlay: Some(used), ..plan }));
                }
                Err(reason) => reason,
            }
        }
    };
    warn!("container {id}: overlay {} is not used: {reason}", used.id);
    used.take_away().await?;
    Ok(None)
}

/// The choice among the overlays of the capsule in `root`; no choice when there is no capsule or no overlay.
async fn find(container: &Container, root: &Root) -> Result<Choice, String> {
    let path = root.path.clone();
    let portable = tokio::task::spawn_blocking(move || {
        let portable = Portable::below(&path).map_err(|error| error.to_string())?;
        let Some(portable) = portable else { return Ok(None) };
        let overlays =
            coldsnap::overlay::of(&store(), &portable.digest).map_err(|error| error.to_string())?;
        Ok::<_, String>((!overlays.is_empty()).then_some(portable))
    });
    let portable = portable.await.map_err(|error| error.to_string())??;
    let Some(portable) = portable else { return Ok(Choice::default()) };
    let reaper = &container.host.reaper;
    let (criu, runc) =
        tokio::join!(version(reaper, Path::new(CRIU)), version(reaper, container.runc.binary()));
    let tools = ToolVersions { criu, runc };
    let choice = tokio::task::spawn_blocking(move || {
        choose(&store(), &portable, || node::target(&tools)).map_err(|error| error.to_string())
    });
    choice.await.map_err(|error| error.to_string())?
}

/// The mounts with these layers in the one that is the root.
fn layered(mounts: &[Mount], layers: &[PathBuf]) -> Result<Vec<Mount>, String> {
    let mut mounts = mounts.to_vec();
    let root = mounts.first_mut().filter(|mount| mount.target.is_empty());
    let Some(root) = root else { return Err("the shim does not mount the root filesystem".to_owned()) };
    if root.type_ != "overlay" {
        return Err(format!("the root filesystem is a mount of type {:?}, not overlay", root.type_));
    }
    if root.options.iter().any(|option| option == "userxattr") {
        return Err("the root filesystem is an overlay with userxattr".to_owned());
    }
    root.options = with_layers(&root.options, layers)?;
    Ok(mounts)
}

/// Replaces what is mounted at the root.
async fn mount_anew(root: &Root, mounts: Vec<Mount>) -> Result<(), TaskError> {
    let mounted = root.mounted.clone();
    let done = tokio::task::spawn_blocking(move || -> Result<(), MountError> {
        unmount_below(&mounted)?;
        mount_all(&mounts, &mounted)
    });
    Ok(done.await.map_err(|error| TaskError::Other(format!("mounting died: {error}")))??)
}

/// The version of a program; `None` when it does not tell.
async fn version(reaper: &Arc<Reaper>, program: &Path) -> Option<String> {
    let output = memory_file("version").ok()?;
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null()).stdout(output.try_clone().ok()?).stderr(Stdio::null());
    let exit = reaper.spawn(&mut command).ok()?.exit.await.ok()?;
    let printed = contents(output).ok()?;
    (exit.status == 0).then(|| node::version_in(&String::from_utf8_lossy(&printed))).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(kind: &str, options: &[&str]) -> Mount {
        Mount {
            type_: kind.to_owned(),
            options: options.iter().map(|&option| option.to_owned()).collect(),
            ..Default::default()
        }
    }

    #[test]
    fn only_an_overlay_root_takes_layers() {
        let layers = [PathBuf::from("/o/capsule"), PathBuf::from("/o/changes")];
        let data = Mount { target: "data".to_owned(), ..mount("bind", &["rbind"]) };
        let made =
            layered(&[mount("overlay", &["lowerdir=/b:/a", "upperdir=/u"]), data.clone()], &layers).unwrap();
        assert_eq!(made[0].options, ["lowerdir=/o/capsule:/o/changes:/b:/a", "upperdir=/u"]);
        assert_eq!(made[1], data);
        for (mounts, reason) in [
            (vec![mount("bind", &["rbind"])], "bind"),
            (vec![mount("overlay", &["lowerdir=/a", "userxattr"])], "userxattr"),
            (vec![data], "does not mount"),
            (vec![], "does not mount"),
        ] {
            let found = layered(&mounts, &layers).unwrap_err();
            assert!(found.contains(reason), "{found}");
        }
    }

    #[test]
    fn the_annotation_has_two_values() {
        assert_eq!("auto".parse(), Ok(OverlayMode::Auto));
        assert_eq!("never".parse(), Ok(OverlayMode::Never));
        assert!("always".parse::<OverlayMode>().is_err());
    }
}
