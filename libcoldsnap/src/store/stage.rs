//! Staging: a payload with a known digest arrives as a stream of bytes, from wherever it can be had.
//!
//! The bytes go to a temporary name under the digest's lock and are hashed as they come; only the committed size
//! and digest give them the payload's name. What an interrupted stager has written stays, not eligible for anything,
//! until the next holder of the lock goes on from there or removes it.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::lock::{DigestLock, open_private};
use super::pack_writer::{self, ALIGNMENT, AlignedBuffer};
use super::publish::is_replaceable;
use super::remove::remove;
use super::sweep::STAGING;
use super::verify::{READ_BYTES, wait_out_tick};
use super::{AdmitError, AdmittedPayload, NodeStore, StoreError, blob_name};
use crate::digest::{Digest, Sha256};
use crate::durable;

/// What is on the disk after a power loss is at most this much shorter than what was written.
const SYNC_BYTES: u64 = 256 << 20;

/// The answer of [`NodeStore::stage`].
#[derive(Debug)]
pub enum Staging {
    /// It is here and verified; nothing needs to be brought.
    Present(AdmittedPayload),
    /// It is wanted. Others who want it wait until this is committed or dropped.
    Needed(Box<StagedPayload>),
}

/// A payload that is being brought. Dropped before its commit it keeps what was written for the next stager.
#[derive(Debug)]
pub struct StagedPayload {
    store: NodeStore,
    digest: Digest,
    bytes: u64,
    path: PathBuf,
    file: File,
    buffer: AlignedBuffer,
    sha256: Sha256,
    /// Bytes hashed; those after `flushed` are in the buffer.
    written: u64,
    flushed: u64,
    synced: u64,
    resumed: u64,
    lock: DigestLock,
}

impl NodeStore {
    /// Admits a payload that is here, else prepares to write it, taking over what an interrupted stager left.
    /// Waits while another process stages or verifies the same payload. A payload of another size or with other
    /// content at its path is replaced at the commit. `progress` is called with the bytes hashed since the last
    /// call, be it of the payload that is here or of what was left.
    ///
    /// # Errors
    /// Too little space for what is missing, something else than a file at its path, or what the file system answers.
    pub fn stage(
        &self,
        digest: &Digest,
        bytes: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Staging, StoreError> {
        let path = self.payload_path(digest);
        let lock = self.lock(digest).map_err(StoreError::io("lock the payload", &path))?;
        self.stage_locked(digest, bytes, progress, lock)
    }

    /// [`Self::stage`] without waiting: None while another process has the payload's lock.
    ///
    /// # Errors
    /// As [`Self::stage`].
    pub fn try_stage(
        &self,
        digest: &Digest,
        bytes: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Option<Staging>, StoreError> {
        let path = self.payload_path(digest);
        let lock = self.try_lock(digest).map_err(StoreError::io("lock the payload", &path))?;
        lock.map(|lock| self.stage_locked(digest, bytes, progress, lock)).transpose()
    }

    fn stage_locked(
        &self,
        digest: &Digest,
        bytes: u64,
        progress: &mut dyn FnMut(u64),
        lock: DigestLock,
    ) -> Result<Staging, StoreError> {
        match self.admit_locked(digest, Some(bytes), progress, &lock) {
            Ok(payload) => {
                for left in self.stale_stagings(digest)? {
                    remove(&left)?;
                }
                return Ok(Staging::Present(payload));
            }
            Err(error) if is_replaceable(&error) => {}
            Err(error) => return Err(error.into()),
        }
        let mut staged = self.take_over(digest, bytes, lock)?;
        staged.hash_left(progress)?;
        self.make_room(bytes - staged.written)?;
        staged.reserve_blocks()?;
        Ok(Staging::Needed(Box::new(staged)))
    }

    /// Opens this process's staging file: the longest that was left, under our name, or an empty one.
    fn take_over(&self, digest: &Digest, bytes: u64, lock: DigestLock) -> Result<StagedPayload, StoreError> {
        let tid = rustix::thread::gettid().as_raw_nonzero();
        let name = format!(".{}.{}-{tid}{STAGING}", blob_name(digest), std::process::id());
        let path = self.payload_directory().join(name);
        let mut left: Vec<(u64, PathBuf)> = Vec::new();
        for found in self.stale_stagings(digest)? {
            match fs::symlink_metadata(&found) {
                Ok(m) if m.is_file() && m.nlink() == 1 && m.size() <= bytes => left.push((m.size(), found)),
                _ => remove(&found)?,
            }
        }
        left.sort();
        if let Some((_, longest)) = left.pop()
            && longest != path
        {
            fs::rename(&longest, &path).map_err(StoreError::io("take over", &longest))?;
        }
        for (_, shorter) in left {
            remove(&shorter)?;
        }
        let file = open_private(&path).map_err(StoreError::io("create", &path))?;
        Ok(StagedPayload {
            store: self.clone(),
            digest: *digest,
            bytes,
            path,
            file,
            buffer: AlignedBuffer::new(),
            sha256: Sha256::default(),
            written: 0,
            flushed: 0,
            synced: 0,
            resumed: 0,
            lock,
        })
    }

    /// Staging files of a digest. Their writers are gone: the caller holds the lock.
    fn stale_stagings(&self, digest: &Digest) -> Result<Vec<PathBuf>, StoreError> {
        let directory = self.payload_directory();
        let prefix = format!(".{}.", blob_name(digest));
        let names = self.names_in(&directory)?.into_iter();
        let stale = names.filter(|name| {
            name.to_str().is_some_and(|name| name.starts_with(&prefix) && name.ends_with(STAGING))
        });
        Ok(stale.map(|name| directory.join(name)).collect())
    }

    /// Gives a fully written and hashed file the payload's name and admits it.
    pub(super) fn give_name(
        &self,
        digest: &Digest,
        bytes: u64,
        file: &File,
        staging: &Path,
        _lock: &DigestLock,
    ) -> Result<AdmittedPayload, StoreError> {
        let fail = |action| StoreError::io(action, staging);
        file.set_permissions(fs::Permissions::from_mode(0o444)).map_err(fail("set the mode of"))?;
        let path = self.payload_path(digest);
        durable::commit(file, staging, &path).map_err(fail("rename"))?;
        // Rename changes the ctime, so the identity is that of the file under its final name.
        let (opened, identity) = self.open_payload(digest, Some(bytes))?;
        let written = file.metadata().map_err(StoreError::io("inspect", &path))?;
        if (written.dev(), written.ino()) != (identity.content.device, identity.content.inode) {
            let what = "another file took its name while it was adopted".to_owned();
            return Err(AdmitError::Changed { path, what }.into());
        }
        wait_out_tick(&identity);
        Ok(self.verified(*digest, opened, identity, bytes))
    }
}

impl StagedPayload {
    /// The payload.
    pub const fn digest(&self) -> &Digest {
        &self.digest
    }

    /// Its committed size.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that are here already: the next byte wanted is the one at this offset.
    pub const fn written(&self) -> u64 {
        self.written
    }

    /// Of those, the bytes that an interrupted stager had left.
    pub const fn resumed(&self) -> u64 {
        self.resumed
    }

    /// Appends the next bytes of the payload.
    ///
    /// # Errors
    /// More bytes than the payload has, or what the file system answers.
    pub fn append(&mut self, mut chunk: &[u8]) -> Result<(), StoreError> {
        let found = self.written + chunk.len() as u64;
        if found > self.bytes {
            let path = self.store.payload_path(&self.digest);
            return Err(AdmitError::SizeMismatch { path, expected: self.bytes, found }.into());
        }
        while !chunk.is_empty() {
            let taken = self.buffer.append(&chunk[..chunk.len().min(READ_BYTES)]);
            self.sha256.update(self.buffer.last(taken));
            self.written += taken as u64;
            chunk = &chunk[taken..];
            if self.buffer.is_full() {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Forgets what was written: the source turned out to be wrong, or cannot go on in the middle.
    ///
    /// # Errors
    /// What the file system answers.
    pub fn restart(&mut self) -> Result<(), StoreError> {
        self.file.set_len(0).map_err(StoreError::io("empty", &self.path))?;
        self.buffer.clear();
        self.sha256 = Sha256::default();
        (self.written, self.flushed, self.synced, self.resumed) = (0, 0, 0, 0);
        self.reserve_blocks()
    }

    /// Makes the bytes the payload.
    ///
    /// # Errors
    /// Fewer bytes than the payload has (what is here stays for the next stager), another digest (nothing stays),
    /// or what the file system answers. The store holds what it held before then.
    pub fn commit(mut self: Box<Self>) -> Result<AdmittedPayload, StoreError> {
        let path = self.store.payload_path(&self.digest);
        if self.written != self.bytes {
            return Err(AdmitError::SizeMismatch { path, expected: self.bytes, found: self.written }.into());
        }
        let found = self.sha256.clone().finish();
        if found != self.digest {
            self.buffer.clear();
            self.flushed = self.written;
            remove(&self.path)?;
            return Err(AdmitError::DigestMismatch { path, expected: self.digest, found }.into());
        }
        self.flush()?;
        self.store.give_name(&self.digest, self.bytes, &self.file, &self.path, &self.lock)
    }

    /// Reads what was left up to the last whole block, so that the digest covers it.
    fn hash_left(&mut self, progress: &mut dyn FnMut(u64)) -> Result<(), StoreError> {
        let left = self.file.metadata().map_err(StoreError::io("inspect", &self.path))?.size();
        let usable = left - left % ALIGNMENT as u64;
        self.file.set_len(usable).map_err(StoreError::io("shorten", &self.path))?;
        let mut buffer = vec![0; READ_BYTES];
        let mut reader = (&self.file).take(usable);
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => {
                    self.sha256.update(&buffer[..n]);
                    self.written += n as u64;
                    progress(n as u64);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(StoreError::io("read", &self.path)(e)),
            }
        }
        (self.flushed, self.synced, self.resumed) = (self.written, self.written, self.written);
        pack_writer::set_direct(&self.file, true).map_err(StoreError::io("prepare", &self.path))
    }

    /// A full disk is an error before anything is written. The file's length stays what was written, because it
    /// tells the next stager where to go on.
    fn reserve_blocks(&self) -> Result<(), StoreError> {
        let missing = self.bytes - self.written;
        if missing == 0 {
            return Ok(());
        }
        let reserve = || rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, self.written, missing);
        match rustix::io::retry_on_intr(reserve) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(errno) => Err(StoreError::io("reserve space for", &self.path)(errno.into())),
        }
    }

    fn flush(&mut self) -> Result<(), StoreError> {
        let fail = |action| StoreError::io(action, &self.path);
        let bytes = self.buffer.filled();
        if bytes.is_empty() {
            return Ok(());
        }
        if !bytes.len().is_multiple_of(ALIGNMENT) {
            pack_writer::set_direct(&self.file, false).map_err(fail("prepare"))?;
        }
        pack_writer::write_at(&self.file, bytes, self.flushed).map_err(fail("write"))?;
        self.flushed += bytes.len() as u64;
        self.buffer.clear();
        if self.flushed - self.synced >= SYNC_BYTES {
            rustix::fs::fdatasync(&self.file).map_err(|e| fail("sync")(e.into()))?;
            self.synced = self.flushed;
        }
        Ok(())
    }
}

impl Drop for StagedPayload {
    fn drop(&mut self) {
        // Also what is still in the buffer is worth keeping; after a commit there is nothing.
        if let Err(error) = self.flush() {
            tracing::warn!(path = %self.path.display(), %error, "cannot keep the end of an interrupted staging");
        }
        if self.written == 0
            && let Err(error) = remove(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove an empty staging file");
        }
    }
}
