//! Removal of one payload: by name, or because room is needed. The only code that unlinks a payload.
//!
//! The pack goes first. What a crash leaves then (a record, a pin, the time of its last use) names a payload that is
//! not here: nothing is admitted by it, the next payload at that path has another identity, and a new removal or
//! `coldsnap payload fsck --repair` takes it away.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::lock::DigestLock;
use super::{AdmitError, NodeStore, StoreError, lease, pin, record_path};
use crate::digest::Digest;
use crate::durable;

impl NodeStore {
    /// Removes a payload with its record, and says how many bytes it had. Waits while it is verified or staged.
    /// With `pinned`, a pin goes with it. Nothing removes a leased payload: a container maps its file, and could
    /// never be started again.
    ///
    /// # Errors
    /// When it is not here, leased, or pinned without `pinned`, or when the file system refuses.
    pub fn remove(&self, digest: &Digest, pinned: bool) -> Result<u64, StoreError> {
        // Before a lock is made for something that never was here.
        self.size_of(digest)?;
        let path = self.payload_path(digest);
        let lock = self.lock(digest).map_err(StoreError::io("lock the payload", &path))?;
        let bytes = self.size_of(digest)?;
        let owners = self.lease_owners(digest)?;
        if !owners.is_empty() {
            return Err(StoreError::Leased { digest: *digest, owners });
        }
        if !pinned && self.is_pinned(digest)? {
            let reason = pin::read(&self.pin_path(digest), digest).ok().flatten().and_then(|pin| pin.reason);
            return Err(StoreError::Pinned { digest: *digest, reason });
        }
        self.remove_files(digest, &lock)?;
        Ok(bytes)
    }

    /// Size of what is at a payload's path.
    fn size_of(&self, digest: &Digest) -> Result<u64, StoreError> {
        let path = self.payload_path(digest);
        match fs::symlink_metadata(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                Err(AdmitError::NotFound { digest: *digest, path }.into())
            }
            result => result.map(|metadata| metadata.size()).map_err(StoreError::io("inspect", &path)),
        }
    }

    /// Who has a lease on a payload.
    pub(super) fn lease_owners(&self, digest: &Digest) -> Result<Vec<String>, StoreError> {
        let files = self.lease_files()?.into_iter().filter(|(leased, _)| leased == digest);
        let owners = files.filter_map(|(_, path)| match lease::read(&path, digest) {
            Ok(lease) => lease.map(|lease| lease.owner),
            // It counts all the same.
            Err(_) => Some(path.display().to_string()),
        });
        Ok(owners.collect())
    }

    /// Removes a payload that is neither leased nor to be kept.
    pub(super) fn remove_files(&self, digest: &Digest, _lock: &DigestLock) -> Result<(), StoreError> {
        let pack = self.payload_path(digest);
        remove(&pack)?;
        self.remove_leftovers(digest)?;
        let directory = self.payload_directory();
        durable::sync_directory(&directory).map_err(StoreError::io("sync", &directory))
    }

    /// Removes what is kept about a payload that is not here any more.
    pub(super) fn remove_leftovers(&self, digest: &Digest) -> Result<(), StoreError> {
        remove(&record_path(&self.payload_path(digest)))?;
        remove(&self.usage_path(digest))?;
        remove(&self.pin_path(digest))
    }
}

/// Removes a file that may be gone already.
pub(super) fn remove(path: &Path) -> Result<(), StoreError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(StoreError::io("remove", path)(e)),
        _ => Ok(()),
    }
}
