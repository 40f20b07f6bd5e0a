//! Pins: one small file per payload that says that it stays, whoever uses it or not.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{NodeStore, StoreError, verify};
use crate::digest::Digest;
use crate::durable;
use crate::format::FormatError;
use crate::format::document;

const DOCUMENT: &str = "pin.json";
const SUFFIX: &str = ".pin.json";

/// A payload that stays.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pin {
    /// The payload.
    pub digest: Digest,
    /// Why, in the words of whoever pinned it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Since when, nanoseconds since the epoch.
    pub created_unix_ns: u64,
}

impl NodeStore {
    /// Pins a payload of the store and says whether it was not pinned before. A pin that exists stays as it is.
    ///
    /// # Errors
    /// When the payload is not here, or the file cannot be written.
    pub fn pin(&self, digest: &Digest, reason: Option<&str>) -> Result<bool, StoreError> {
        let directory = self.pin_directory();
        // Before a lock is made for something that never was here.
        self.open_payload(digest, None)?;
        // Whoever removes a payload holds the lock while it looks for a pin.
        let lock =
            self.lock(digest).map_err(StoreError::io("lock the payload", &self.payload_path(digest)))?;
        self.open_payload(digest, None)?;
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)
            .map_err(StoreError::io("create the directory", &directory))?;
        let path = self.pin_path(digest);
        let pin =
            Pin { digest: *digest, reason: reason.map(str::to_owned), created_unix_ns: verify::now_ns() };
        let bytes = document::to_bytes(DOCUMENT, &pin)
            .map_err(|source| StoreError::BadPin { path: path.clone(), source })?;
        let written = durable::write_new_file(&path, &bytes, 0o600);
        drop(lock);
        match written {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            result => result.map(|()| true).map_err(StoreError::io("write the pin", &path)),
        }
    }

    /// Removes the pin of a payload and says whether there was one.
    ///
    /// # Errors
    /// When the file cannot be removed.
    pub fn unpin(&self, digest: &Digest) -> Result<bool, StoreError> {
        let path = self.pin_path(digest);
        match fs::remove_file(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            result => result.map_err(StoreError::io("remove the pin", &path))?,
        }
        let directory = self.pin_directory();
        durable::sync_directory(&directory).map_err(StoreError::io("sync", &directory))?;
        Ok(true)
    }

    /// All pins in digest order.
    ///
    /// # Errors
    /// When a pin cannot be read or understood.
    pub fn pins(&self) -> Result<Vec<Pin>, StoreError> {
        let mut pins = Vec::new();
        for (digest, path) in self.pin_files()? {
            pins.extend(read(&path, &digest)?);
        }
        pins.sort_by_key(|pin| pin.digest);
        Ok(pins)
    }

    /// Whether something has the name of a payload's pin, whatever its content.
    pub(super) fn is_pinned(&self, digest: &Digest) -> Result<bool, StoreError> {
        let path = self.pin_path(digest);
        match fs::symlink_metadata(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            result => result.map(|_| true).map_err(StoreError::io("inspect", &path)),
        }
    }

    /// The pin files with the payload that each one's name names, whatever its content.
    pub(super) fn pin_files(&self) -> Result<Vec<(Digest, PathBuf)>, StoreError> {
        let directory = self.pin_directory();
        let names = self.names_in(&directory)?;
        let pin = |name: &std::ffi::OsString| {
            let digest = Digest::from_hex(name.to_str()?.strip_suffix(SUFFIX)?).ok()?;
            Some((digest, directory.join(name)))
        };
        Ok(names.iter().filter_map(pin).collect())
    }

    pub(super) fn pin_directory(&self) -> PathBuf {
        self.root.join("pins")
    }

    pub(super) fn pin_path(&self, digest: &Digest) -> PathBuf {
        self.pin_directory().join(format!("{}{SUFFIX}", digest.hex()))
    }
}

/// The pin in a file; None when it is gone.
pub(super) fn read(path: &Path, digest: &Digest) -> Result<Option<Pin>, StoreError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(StoreError::io("read the pin", path)(e)),
    };
    let bad = |source| StoreError::BadPin { path: path.to_owned(), source };
    let pin: Pin = document::parse(DOCUMENT, &bytes).map_err(bad)?;
    if pin.digest != *digest {
        return Err(bad(FormatError::new(DOCUMENT, "digest", "it is not the digest in the file's name")));
    }
    Ok(Some(pin))
}
