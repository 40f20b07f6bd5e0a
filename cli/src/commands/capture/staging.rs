//! The staging directory of a capture, and what an interrupted capture left.
//!
//! `captures/<id>/` in the node store holds the dump and the capsule layer while they are made. A lock tells
//! whether the command that made it still lives; a note tells which container it froze.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use coldsnap::durable;
use coldsnap::store::NodeStore;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

const LOCK: &str = "lock";
const FROZEN: &str = "frozen.json";

/// A container that a capture froze.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen {
    /// containerd namespace.
    pub namespace: String,
    /// Container id.
    pub container: String,
}

/// A staging directory; removed when dropped.
#[derive(Debug)]
pub struct Staging {
    root: PathBuf,
    _lock: File,
}

impl Staging {
    /// Makes `captures/<id>`.
    ///
    /// # Errors
    /// Any I/O error.
    pub fn create(store: &NodeStore, id: &str) -> io::Result<Self> {
        let root = captures(store).join(id);
        fs::create_dir_all(&root)?;
        let lock = File::create(root.join(LOCK))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        for dir in ["dump", "work", "layer"] {
            fs::create_dir(root.join(dir))?;
        }
        Ok(Self { root, _lock: lock })
    }

    /// Where CRIU writes its images.
    pub fn dump(&self) -> PathBuf {
        self.root.join("dump")
    }

    /// Where CRIU writes its log.
    pub fn work(&self) -> PathBuf {
        self.root.join("work")
    }

    /// The capsule layer's tree.
    pub fn layer(&self) -> PathBuf {
        self.root.join("layer")
    }

    /// The capsule layer as a file.
    pub fn layer_file(&self) -> PathBuf {
        self.root.join("layer.tar.zst")
    }

    /// Where an overlay of this node is made; nothing is there yet.
    pub fn overlay(&self) -> PathBuf {
        self.root.join("overlay")
    }

    /// The work directory of an overlay mount in which an overlay is made; nothing is there yet.
    pub fn overlay_work(&self) -> PathBuf {
        self.root.join("overlay-work")
    }

    /// Notes that a container is about to be frozen, so that a later run can thaw it if this one is killed.
    ///
    /// # Errors
    /// Any I/O error.
    pub fn note_frozen(&self, frozen: &Frozen) -> io::Result<()> {
        durable::write_file(&self.root.join(FROZEN), &serde_json::to_vec(frozen)?, 0o600)
    }

    /// The container runs again.
    ///
    /// # Errors
    /// Any I/O error.
    pub fn note_thawed(&self) -> io::Result<()> {
        fs::remove_file(self.root.join(FROZEN))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // What cannot be removed now is removed by the next capture.
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// Removes what interrupted captures left; the containers that they had frozen.
///
/// # Errors
/// Any I/O error.
pub fn sweep(store: &NodeStore) -> io::Result<Vec<Frozen>> {
    let mut frozen = Vec::new();
    let entries = match fs::read_dir(captures(store)) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(frozen),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let root = entry?.path();
        if is_alive(&root) {
            continue;
        }
        if let Ok(note) = fs::read(root.join(FROZEN)) {
            frozen.extend(serde_json::from_slice::<Frozen>(&note).ok());
        }
        fs::remove_dir_all(&root)?;
    }
    Ok(frozen)
}

/// Whether the capture with this id is running, as far as its directory tells.
pub fn exists(store: &NodeStore, id: &str) -> bool {
    captures(store).join(id).exists()
}

/// Whether the command that made the directory still holds its lock.
fn is_alive(root: &Path) -> bool {
    let Ok(lock) = File::open(root.join(LOCK)) else { return false };
    flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err()
}

fn captures(store: &NodeStore) -> PathBuf {
    store.root().join("captures")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_capture_is_swept_a_living_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let store = NodeStore::open(dir.path()).unwrap();
        let living = Staging::create(&store, "living").unwrap();
        let dead = captures(&store).join("dead");
        fs::create_dir_all(dead.join("dump")).unwrap();
        fs::write(dead.join(LOCK), b"").unwrap();
        let note = Frozen { namespace: "default".into(), container: "c1".into() };
        fs::write(dead.join(FROZEN), serde_json::to_vec(&note).unwrap()).unwrap();
        assert_eq!(sweep(&store).unwrap(), [note]);
        assert!(!dead.exists() && living.dump().exists());
        drop(living);
        assert!(!captures(&store).join("living").exists());
    }
}
