//! The check of one payload and of what is kept about it, under its lock.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use super::super::lock::DigestLock;
use super::super::{AdmitError, StoreError, blob_name, lease, pin, record_path, remove, verify};
use super::{Check, DAMAGED, Named, Severity};
use crate::digest::Digest;
use crate::durable;
use crate::format::pack;
use crate::format::validation::FileIdentity;

const PACK_MODE: u32 = 0o444;

impl Check<'_> {
    pub(super) fn payload(&mut self, digest: &Digest, named: &Named) -> Result<(), StoreError> {
        let path = self.store.payload_path(digest);
        let lock = self.store.try_lock(digest).map_err(StoreError::io("lock the payload", &path))?;
        let Some(lock) = lock else {
            let message = "being staged, verified or removed: not checked";
            self.found(Severity::Note, "InUse", &path, message, "", false);
            return Ok(());
        };
        let here = match fs::symlink_metadata(&path) {
            Ok(metadata) => self.pack(digest, &path, &metadata, &lock)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => false,
            Err(e) => return Err(StoreError::io("inspect", &path)(e)),
        };
        for lease in &named.leases {
            self.lease(digest, lease, here);
        }
        if let Some(pin) = &named.pin {
            self.pin(digest, pin, here);
        }
        if !here {
            self.leftovers(named);
        }
        Ok(())
    }

    /// Checks the file; whether the payload is here afterwards.
    fn pack(
        &mut self,
        digest: &Digest,
        path: &Path,
        metadata: &fs::Metadata,
        lock: &DigestLock,
    ) -> Result<bool, StoreError> {
        if !metadata.is_file() {
            let message = "not a regular file";
            self.found(Severity::Error, "NotRegularFile", path, message, "remove it", false);
            return Ok(false);
        }
        let bytes = metadata.size();
        if bytes == 0 || !bytes.is_multiple_of(pack::ALIGNMENT) {
            let message = format!("{bytes} bytes: a pack has a multiple of {}", pack::ALIGNMENT);
            return self.damaged(digest, path, "SizeChanged", &message, lock);
        }
        let mode = metadata.mode() & 0o7777;
        if mode != PACK_MODE {
            let message = format!("mode {mode:04o}, expected {PACK_MODE:04o}");
            let repaired = self.options.repair && set_mode(path, PACK_MODE).is_ok();
            let remedy = "coldsnap payload import PATH, or --repair";
            self.found(Severity::Warning, "PackMode", path, &message, remedy, repaired);
        }
        if self.options.full {
            if !self.content(digest, path, lock)? {
                return Ok(false);
            }
        } else {
            self.record(digest, path);
        }
        self.report.payloads += 1;
        self.report.bytes += bytes;
        Ok(true)
    }

    /// Hashes the whole file and replaces the record; whether the payload is here afterwards.
    fn content(&mut self, digest: &Digest, path: &Path, lock: &DigestLock) -> Result<bool, StoreError> {
        let hashed = &mut self.report.bytes_hashed;
        let progress = &mut *self.progress;
        let mut count = |n| {
            *hashed += n;
            progress(n);
        };
        match self.store.admit_by_content(digest, None, &mut count, lock) {
            Ok(_) => Ok(true),
            Err(AdmitError::DigestMismatch { found, .. }) => {
                let message = format!("the content is {found}");
                self.damaged(digest, path, "DigestMismatch", &message, lock)
            }
            Err(error) => {
                let message = format!("the content cannot be verified: {error}");
                let remedy = "look at the system's log for errors of the disk; then check again";
                self.found(Severity::Error, error.kind(), path, &message, remedy, false);
                Ok(true)
            }
        }
    }

    fn record(&mut self, digest: &Digest, path: &Path) {
        let Ok(metadata) = fs::symlink_metadata(path) else { return };
        let problem = match verify::read_record(&record_path(path)) {
            Ok(record) => match record.matches(&blob_name(digest), *digest, &FileIdentity::of(&metadata)) {
                Ok(()) => return,
                Err(field) => format!("the record's {field} differs"),
            },
            Err(problem) => problem,
        };
        let message = format!("not verified: {problem}");
        self.found(Severity::Note, "Unverified", path, &message, "the next use hashes it, or --full", false);
    }

    /// Reports a pack that no admission accepts; a repair moves it aside. Whether it is still here.
    fn damaged(
        &mut self,
        digest: &Digest,
        path: &Path,
        kind: &'static str,
        message: &str,
        _lock: &DigestLock,
    ) -> Result<bool, StoreError> {
        if self.options.repair {
            let directory = self.store.root().join(DAMAGED);
            fs::create_dir_all(&directory).map_err(StoreError::io("create the directory", &directory))?;
            let aside = directory.join(format!("{}.{}", blob_name(digest), verify::now_ns()));
            let moved = fs::rename(path, &aside)
                .and_then(|()| durable::sync_directory(durable::parent(path)))
                .and_then(|()| durable::sync_directory(&directory));
            moved.map_err(StoreError::io("move aside", path))?;
            remove::remove(&record_path(path))?;
            remove::remove(&self.store.usage_path(digest))?;
        }
        let remedy = "stage or import it again, which replaces it; --repair moves it aside";
        self.found(Severity::Error, kind, path, message, remedy, self.options.repair);
        Ok(!self.options.repair)
    }

    fn lease(&mut self, digest: &Digest, path: &Path, here: bool) {
        let owner = match lease::read(path, digest) {
            // Given back meanwhile.
            Ok(None) => return,
            Ok(Some(lease)) => lease.owner,
            Err(error) => {
                let remedy = "it counts as a lease; remove it when its owner is gone";
                return self.found(Severity::Error, error.kind(), path, &error.to_string(), remedy, false);
            }
        };
        let name = lease::file_name(digest, &owner);
        if !path.ends_with(&name) {
            let message = format!("the lease of {owner} is called {name}: nobody gives this one back");
            let remedy = "it counts as a lease; rename it, or remove it when its owner is gone";
            self.found(Severity::Error, "Malformed", path, &message, remedy, false);
        }
        if !here {
            let message = format!("{owner} has a lease on {digest}, which is not here");
            let remedy = format!(
                "stage or import the payload again; if the owner is gone: coldsnap payload release {owner}"
            );
            self.found(Severity::Error, "LeasedMissing", path, &message, &remedy, false);
        }
    }

    fn pin(&mut self, digest: &Digest, path: &Path, here: bool) {
        match pin::read(path, digest) {
            Ok(None) => return,
            Ok(Some(_)) => {}
            Err(error) => {
                let remedy = "it counts as a pin; remove it, and pin the payload again if it must stay";
                self.found(Severity::Error, error.kind(), path, &error.to_string(), remedy, false);
            }
        }
        if !here {
            let message = format!("{digest} is pinned and not here");
            let remedy = format!("stage or import it again, or coldsnap payload unpin {digest}");
            self.found(Severity::Error, "PinnedMissing", path, &message, &remedy, false);
        }
    }

    fn leftovers(&mut self, named: &Named) {
        for path in &named.leftovers {
            // A payload that was moved aside has taken its record along.
            if fs::symlink_metadata(path).is_err() {
                continue;
            }
            let repaired = self.options.repair && remove::remove(path).is_ok();
            let message = "left of a payload that was removed";
            self.found(Severity::Warning, "Leftover", path, message, "--repair", repaired);
        }
    }
}

/// Sets the mode of a file, not of what a link points at.
pub(super) fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file: File = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    file.set_permissions(fs::Permissions::from_mode(mode))
}
