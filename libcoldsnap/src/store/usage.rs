//! When a payload was last used: the modification time of an empty file beside nothing else, because the payload's own
//! times are part of its identity.
//!
//! It decides only what is evicted first. It is set when a lease is taken or given back, not synced, and a failure to
//! set it is logged: a payload that seems older than it is, is staged again at worst.

use std::fs::{self, File, FileTimes, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::OFlags;

use super::NodeStore;
use crate::digest::Digest;

/// End of the file's name; the payload's hex stands before it.
pub(super) const SUFFIX: &str = ".last-used";

impl NodeStore {
    pub(super) fn usage_directory(&self) -> PathBuf {
        self.root.join("usage")
    }

    pub(super) fn usage_path(&self, digest: &Digest) -> PathBuf {
        self.usage_directory().join(format!("{}{SUFFIX}", digest.hex()))
    }

    /// Notes that a payload is leased now. The caller holds the lock.
    pub(super) fn mark_leased(&self, digest: &Digest) {
        let mark = || {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(self.usage_directory())?;
            let file = self.open_usage(digest, true)?;
            file.set_times(now())
        };
        if let Err(error) = mark() {
            tracing::warn!(payload = %digest, %error, "cannot note that a payload was used");
        }
    }

    /// Notes that a lease is about to be given back. Whoever took it made the file.
    pub(super) fn mark_released(&self, digest: &Digest) {
        match self.open_usage(digest, false).and_then(|file| file.set_times(now())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(payload = %digest, %error, "cannot note that a payload was used");
            }
            _ => {}
        }
    }

    /// When a payload was last leased, or the lease given back, in nanoseconds since the epoch; None if never.
    pub(super) fn last_leased(&self, digest: &Digest) -> Option<u64> {
        let modified = fs::symlink_metadata(self.usage_path(digest)).and_then(|m| m.modified()).ok()?;
        let since = modified.duration_since(UNIX_EPOCH).unwrap_or_default();
        Some(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
    }

    fn open_usage(&self, digest: &Digest, create: bool) -> io::Result<File> {
        OpenOptions::new()
            .write(true)
            .create(create)
            .truncate(false)
            .mode(0o600)
            .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed())
            .open(self.usage_path(digest))
    }
}

fn now() -> FileTimes {
    FileTimes::new().set_modified(SystemTime::now())
}
