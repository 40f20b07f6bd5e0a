//! The lock of one digest: whoever verifies, adopts, leases or removes a payload holds it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags};

use super::{NodeStore, blob_name};
use crate::digest::Digest;

/// Held until dropped; the kernel releases it when the process dies.
#[derive(Debug)]
pub(super) struct DigestLock {
    _file: File,
}

impl NodeStore {
    fn lock_path(&self, digest: &Digest) -> PathBuf {
        self.payload_directory().join(format!(".{}.lock", blob_name(digest)))
    }

    /// Waits for the lock of a digest.
    pub(super) fn lock(&self, digest: &Digest) -> io::Result<DigestLock> {
        let file = self.open_lock(digest)?;
        flock(&file, FlockOperation::LockExclusive)?;
        Ok(DigestLock { _file: file })
    }

    /// The lock, if nobody has it.
    pub(super) fn try_lock(&self, digest: &Digest) -> io::Result<Option<DigestLock>> {
        let file = self.open_lock(digest)?;
        Ok(try_flock(&file)?.then_some(DigestLock { _file: file }))
    }

    fn open_lock(&self, digest: &Digest) -> io::Result<File> {
        open_private(&self.lock_path(digest))
    }
}

/// Opens a file as it is for reading and writing, creating it with mode 0600; a link is not followed.
pub(crate) fn open_private(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
        .open(path)
}

/// Waits for an exclusive lock on an open file.
pub(super) fn flock(file: &File, operation: FlockOperation) -> io::Result<()> {
    Ok(rustix::io::retry_on_intr(|| rustix::fs::flock(file, operation))?)
}

/// Whether an exclusive lock on an open file could be had at once.
pub(crate) fn try_flock(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
        result => result.map(|()| true),
    }
}
