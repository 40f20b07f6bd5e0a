//! Model payloads of the node store, as the snapshotter uses them: what a capsule requires, admitted by the
//! library's verifier and leased for as long as a snapshot may mount it.

use std::path::{Path, PathBuf};

use coldsnap::format::artifact::Artifact;
use coldsnap::store::NodeStore;

use crate::error::Error;
use crate::record::Payload;

/// Begins the owner of every lease that the snapshotter takes; the key of the snapshot follows.
const OWNER_PREFIX: &str = "snapshot/";

/// The node store, whose leases with this prefix belong to the one snapshotter of the node.
#[derive(Debug)]
pub struct Payloads {
    store: NodeStore,
}

/// The payloads that the capsule with this artifact descriptor requires, one per worker.
///
/// # Errors
/// Why the descriptor is refused, for people.
pub fn requirements(artifact: &[u8]) -> Result<Vec<Payload>, String> {
    let artifact = Artifact::parse(artifact).map_err(|e| e.to_string())?;
    let requirements = artifact.payloads().into_iter();
    Ok(requirements.map(|r| Payload { worker: r.worker, digest: r.digest, bytes: r.bytes }).collect())
}

impl Payloads {
    /// Opens the store below `root`, creating its directories.
    ///
    /// # Errors
    /// Those of the store.
    pub fn open(root: &Path) -> Result<Self, Error> {
        let store = NodeStore::open(root).map_err(|e| Error::Store(e.to_string()))?;
        Ok(Self { store })
    }

    /// Verifies each payload and leases it for the snapshot called `key`. Answers those that may be mounted
    /// and where they lie; the others are logged with the reason. A verification that the store has a record
    /// of costs no read, so that this may be repeated; a first one reads the whole payload.
    pub fn acquire(&self, key: &str, payloads: &[Payload]) -> Vec<(Payload, PathBuf)> {
        let admitted = payloads.iter().filter_map(|payload| match self.acquire_one(key, payload) {
            Ok(path) => Some((payload.clone(), path)),
            Err(reason) => {
                tracing::warn!(
                    key,
                    worker = payload.worker,
                    digest = %payload.digest,
                    reason,
                    "the mounts of this snapshot lack a model payload: it cannot be restored from"
                );
                None
            }
        });
        admitted.collect()
    }

    fn acquire_one(&self, key: &str, payload: &Payload) -> Result<PathBuf, String> {
        let admitted = self
            .store
            .admit(&payload.digest, Some(payload.bytes), &mut |_| {})
            .map_err(|error| error.to_string())?;
        if admitted.bytes_hashed() > 0 {
            tracing::info!(key, digest = %payload.digest, bytes = payload.bytes, "verified a model payload");
        }
        self.store.lease(&admitted, &owner(key)).map_err(|error| error.to_string())?;
        Ok(admitted.path().to_owned())
    }

    /// Gives back every lease of the snapshot called `key`. A failure is logged: the lease then lasts until
    /// the next start, when leases without a snapshot are given back.
    pub fn release(&self, key: &str) {
        if let Err(error) = self.store.release(&owner(key)) {
            tracing::warn!(key, %error, "cannot release the payload leases of a snapshot");
        }
    }

    /// Gives back the leases of snapshots that `exists` does not know. Answers how many snapshots that were.
    ///
    /// # Errors
    /// Those of the store.
    pub fn release_strays(&self, exists: impl Fn(&str) -> bool) -> Result<usize, Error> {
        let leases = self.store.leases().map_err(|e| Error::Store(e.to_string()))?;
        let mut strays: Vec<_> = leases
            .iter()
            .filter_map(|lease| lease.owner.strip_prefix(OWNER_PREFIX))
            .filter(|key| !exists(key))
            .collect();
        strays.sort_unstable();
        strays.dedup();
        for key in &strays {
            self.release(key);
        }
        Ok(strays.len())
    }
}

fn owner(key: &str) -> String {
    format!("{OWNER_PREFIX}{key}")
}
