//! Removal of temporaries whose writer is gone.
//!
//! A temporary that belongs to a digest is written under the digest's lock: if the lock is free, its writer
//! is gone. An unnamed staging file is locked itself as long as its writer lives. What an interrupted stager left of a
//! payload stays a day, because the next stager goes on from there.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::Duration;

use super::lock::try_flock;
use super::{NodeStore, StoreError};
use crate::digest::Digest;

/// Start of the name of a pack whose digest is not known yet.
pub(super) const UNNAMED: &str = ".unnamed.pack.";
/// End of the name of a pack that is being written.
pub(super) const STAGING: &str = ".materializing";
/// End of the name of a temporary of `durable`.
const TEMPORARY: &str = ".tmp";

/// How long the beginning of a payload is kept for the next stager.
const RESUMABLE: Duration = Duration::from_secs(24 * 60 * 60);

impl NodeStore {
    /// Removes the temporaries of dead writers and says how many there were. Those of living writers stay, and the
    /// beginnings of payloads that were written less than a day ago.
    ///
    /// # Errors
    /// When a directory cannot be read or a file not removed.
    pub fn sweep(&self) -> Result<usize, StoreError> {
        let mut removed = 0;
        for directory in [self.payload_directory(), self.lease_directory()] {
            for name in self.names_in(&directory)? {
                let path = directory.join(&name);
                let Some(name) = name.to_str() else { continue };
                if self.remove_if_stale(name, &path).map_err(StoreError::io("inspect", &path))? {
                    removed += 1;
                }
            }
        }
        Ok(removed)
    }

    /// Removes the file if it is a temporary without a living writer.
    fn remove_if_stale(&self, name: &str, path: &Path) -> io::Result<bool> {
        let temporary = name.starts_with('.') && (name.ends_with(STAGING) || name.ends_with(TEMPORARY));
        if !temporary {
            return Ok(false);
        }
        if name.starts_with(UNNAMED) {
            let file = match File::open(path) {
                Ok(file) => file,
                Err(e) => return not_found_is_false(e),
            };
            return if try_flock(&file)? { remove(path) } else { Ok(false) };
        }
        let Some(digest) = name.get(1..65).and_then(|hex| Digest::from_hex(hex).ok()) else {
            return Ok(false);
        };
        match self.try_lock(&digest)? {
            Some(_lock) if name.ends_with(STAGING) && is_resumable(path) => Ok(false),
            Some(_lock) => remove(path),
            None => Ok(false),
        }
    }
}

fn is_resumable(path: &Path) -> bool {
    let age = fs::symlink_metadata(path).and_then(|m| m.modified()).ok().and_then(|t| t.elapsed().ok());
    age.is_some_and(|age| age < RESUMABLE)
}

fn remove(path: &Path) -> io::Result<bool> {
    fs::remove_file(path).map(|()| true).or_else(not_found_is_false)
}

fn not_found_is_false(error: io::Error) -> io::Result<bool> {
    if error.kind() == io::ErrorKind::NotFound { Ok(false) } else { Err(error) }
}
