//! Removal of temporaries whose writer is gone.
//!
//! A temporary that belongs to a digest is written under the digest's lock: if the lock is free, its writer
//! is gone. An unnamed staging file is locked itself as long as its writer lives. What an interrupted stager left of a
//! payload stays a day, because the next stager goes on from there.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::Path;
use std::time::Duration;

use super::lock::{DigestLock, try_flock};
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
        self.sweep_if(|state| state == Temporary::Stale)
    }

    /// [`Self::sweep`] that also removes the beginnings of payloads with which a staging could go on.
    ///
    /// # Errors
    /// As [`Self::sweep`].
    pub fn sweep_interrupted(&self) -> Result<usize, StoreError> {
        self.sweep_if(|state| matches!(state, Temporary::Stale | Temporary::Resumable))
    }

    fn sweep_if(&self, unwanted: impl Fn(Temporary) -> bool) -> Result<usize, StoreError> {
        let mut removed = 0;
        for directory in [self.payload_directory(), self.lease_directory(), self.pin_directory()] {
            for name in self.names_in(&directory)? {
                let path = directory.join(&name);
                let Some(name) = name.to_str() else { continue };
                if self.remove_if(name, &path, &unwanted).map_err(StoreError::io("inspect", &path))? {
                    removed += 1;
                }
            }
        }
        Ok(removed)
    }

    /// Removes the file if it is a temporary without a living writer that nobody goes on with.
    pub(super) fn remove_if_stale(&self, name: &str, path: &Path) -> io::Result<bool> {
        self.remove_if(name, path, |state| state == Temporary::Stale)
    }

    fn remove_if(&self, name: &str, path: &Path, unwanted: impl Fn(Temporary) -> bool) -> io::Result<bool> {
        let (state, _locked) = self.inspect(name, path)?;
        if unwanted(state) { remove(path) } else { Ok(false) }
    }

    /// What a file of the store is to a sweep.
    pub(super) fn temporary(&self, name: &str, path: &Path) -> io::Result<Temporary> {
        self.inspect(name, path).map(|(state, _)| state)
    }

    /// With the lock that keeps it so.
    fn inspect(&self, name: &str, path: &Path) -> io::Result<(Temporary, Locked)> {
        let named = name.starts_with('.') && (name.ends_with(STAGING) || name.ends_with(TEMPORARY));
        if !named {
            return Ok((Temporary::No, Locked::Nothing));
        }
        if name.starts_with(UNNAMED) {
            // NFS grants an exclusive lock only to a file that is open for writing.
            return match OpenOptions::new().read(true).write(true).open(path) {
                Ok(file) if try_flock(&file)? => Ok((Temporary::Stale, Locked::Staging(file))),
                Ok(_) => Ok((Temporary::Written, Locked::Nothing)),
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok((Temporary::Gone, Locked::Nothing)),
                Err(e) => Err(e),
            };
        }
        let Some(digest) = name.get(1..65).and_then(|hex| Digest::from_hex(hex).ok()) else {
            return Ok((Temporary::No, Locked::Nothing));
        };
        let Some(lock) = self.try_lock(&digest)? else { return Ok((Temporary::Written, Locked::Nothing)) };
        let state = match fs::symlink_metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Temporary::Gone,
            Ok(metadata) if name.ends_with(STAGING) && is_resumable(&metadata) => Temporary::Resumable,
            _ => Temporary::Stale,
        };
        Ok((state, Locked::Digest(lock)))
    }
}

/// What a file of the store is to a sweep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Temporary {
    /// No temporary.
    No,
    /// It was one, and is not here any more.
    Gone,
    /// Its writer lives.
    Written,
    /// Left by a stager, and young enough that the next one goes on with it.
    Resumable,
    /// Garbage.
    Stale,
}

/// Held while a temporary is removed.
#[expect(dead_code, reason = "held, never read")]
enum Locked {
    Nothing,
    Staging(File),
    Digest(DigestLock),
}

fn is_resumable(metadata: &fs::Metadata) -> bool {
    let age = metadata.modified().ok().and_then(|time| time.elapsed().ok());
    age.is_some_and(|age| age < RESUMABLE)
}

fn remove(path: &Path) -> io::Result<bool> {
    fs::remove_file(path).map(|()| true).or_else(not_found_is_false)
}

fn not_found_is_false(error: io::Error) -> io::Result<bool> {
    if error.kind() == io::ErrorKind::NotFound { Ok(false) } else { Err(error) }
}
