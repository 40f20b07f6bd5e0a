//! Leases: one small file per (payload, owner) that keeps a payload from being removed.
//!
//! An owner is any text that names who needs the payload for longer than one call: a snapshot, a container.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{AdmittedPayload, NodeStore, StoreError, verify};
use crate::digest::Digest;
use crate::durable;
use crate::format::FormatError;
use crate::format::document;

const DOCUMENT: &str = "lease.json";
const SUFFIX: &str = ".lease.json";

/// A payload that somebody needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lease {
    /// The payload.
    pub digest: Digest,
    /// Who needs it.
    pub owner: String,
    /// Since when, nanoseconds since the epoch.
    pub created_unix_ns: u64,
}

impl Lease {
    /// Parses the lease in a file that is named after `digest`.
    ///
    /// # Errors
    /// Names the field that is missing, unknown or wrong, or the trailing data.
    pub fn parse(bytes: &[u8], digest: &Digest) -> Result<Self, FormatError> {
        let lease: Self = document::parse(DOCUMENT, bytes)?;
        if lease.digest != *digest {
            return Err(FormatError::new(DOCUMENT, "digest", "it is not the digest in the file's name"));
        }
        Ok(lease)
    }
}

impl NodeStore {
    /// Leases an admitted payload for `owner`; a lease that exists stays as it is.
    ///
    /// # Errors
    /// When the owner has no name, when the payload was removed or replaced since it was admitted, or when the
    /// file cannot be written.
    pub fn lease(&self, payload: &AdmittedPayload, owner: &str) -> Result<(), StoreError> {
        let digest = *payload.digest();
        if owner.is_empty() {
            return Err(StoreError::NoOwner { digest });
        }
        let directory = self.lease_directory();
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)
            .map_err(StoreError::io("create the directory", &directory))?;
        // Whoever removes a payload holds the lock while it looks for leases.
        let _lock = self.lock(&digest).map_err(StoreError::io("lock the payload", payload.path()))?;
        let leased = payload.identity().content;
        let here = fs::symlink_metadata(payload.path())
            .is_ok_and(|m| (m.dev(), m.ino()) == (leased.device, leased.inode));
        if !here {
            return Err(StoreError::PayloadGone { digest });
        }
        let path = directory.join(file_name(&digest, owner));
        if !path.exists() {
            let lease = Lease { digest, owner: owner.to_owned(), created_unix_ns: verify::now_ns() };
            let bytes = document::to_bytes(DOCUMENT, &lease)
                .map_err(|source| StoreError::BadLease { path: path.clone(), source })?;
            durable::write_file(&path, &bytes, 0o600).map_err(StoreError::io("write the lease", &path))?;
        }
        self.mark_leased(&digest);
        Ok(())
    }

    /// Removes all leases of `owner` and says how many there were.
    ///
    /// # Errors
    /// When the directory cannot be read or a file not removed.
    pub fn release(&self, owner: &str) -> Result<usize, StoreError> {
        let suffix = format!(".{}{SUFFIX}", owner_hash(owner));
        let mut removed = 0;
        for (digest, path) in self.lease_files()? {
            if !path.to_string_lossy().ends_with(&suffix) {
                continue;
            }
            // Before the lease goes: from then on the payload may be evicted.
            self.mark_released(&digest);
            match fs::remove_file(&path) {
                Ok(()) => removed += 1,
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(StoreError::io("remove the lease", &path)(e)),
            }
        }
        if removed > 0 {
            let directory = self.lease_directory();
            durable::sync_directory(&directory).map_err(StoreError::io("sync", &directory))?;
        }
        Ok(removed)
    }

    /// All leases, by payload and owner.
    ///
    /// # Errors
    /// When a lease cannot be read or understood.
    pub fn leases(&self) -> Result<Vec<Lease>, StoreError> {
        let mut leases = Vec::new();
        for (digest, path) in self.lease_files()? {
            leases.extend(read(&path, &digest)?);
        }
        leases.sort_by(|a, b| (a.digest, &a.owner).cmp(&(b.digest, &b.owner)));
        Ok(leases)
    }

    /// The lease files with the payload that each one's name names, whatever its content.
    pub(super) fn lease_files(&self) -> Result<Vec<(Digest, PathBuf)>, StoreError> {
        let directory = self.lease_directory();
        let names = self.names_in(&directory)?;
        Ok(names
            .into_iter()
            .filter_map(|name| {
                let text = name.to_str()?;
                let (hex, _) = text.strip_suffix(SUFFIX)?.split_once('.')?;
                Some((Digest::from_hex(hex).ok()?, directory.join(&name)))
            })
            .collect())
    }
}

/// The lease in a file; None when it was given back meanwhile.
pub(super) fn read(path: &Path, digest: &Digest) -> Result<Option<Lease>, StoreError> {
    match fs::read(path) {
        Ok(bytes) => {
            let bad = |source| StoreError::BadLease { path: path.to_owned(), source };
            Lease::parse(&bytes, digest).map(Some).map_err(bad)
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(StoreError::io("read the lease", path)(e)),
    }
}

/// `<64hex>.<owner hash>.lease.json`
pub(super) fn file_name(digest: &Digest, owner: &str) -> String {
    format!("{}.{}{SUFFIX}", digest.hex(), owner_hash(owner))
}

/// An owner may hold any character; its name in a file name is a hash.
fn owner_hash(owner: &str) -> String {
    let mut hex = Digest::of(owner.as_bytes()).hex();
    hex.truncate(32);
    hex
}
