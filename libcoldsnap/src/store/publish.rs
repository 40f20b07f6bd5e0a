//! Publication of a pack from memory: two passes, because the order of the extents depends on all digests.
//!
//! Pass 1 sums every extent. If the store holds a pack of the planned size, the planned stream is hashed first: a
//! second capture of a model finds its payload and writes nothing. Otherwise pass 2 writes a staging file past the
//! page cache, hashes what it writes, and renames it to the digest's path.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use rustix::fs::FlockOperation;

use super::lock::{DigestLock, flock};
use super::sweep::{STAGING, UNNAMED};
use super::{AdmitError, AdmittedPayload, NodeStore, StoreError, pack_writer};
use crate::digest::{Digest, lanes};
use crate::format::pack::{self, ExtentSum, ExtentSummer, PackLayout};

/// Bytes that are summed twice (SHA-256, CRC-32) while they are in the second-level cache.
const PIECE_BYTES: usize = 256 << 10;

/// A payload in the store, and where its extents are.
#[derive(Debug)]
pub struct PublishedPack {
    /// The payload.
    pub payload: AdmittedPayload,
    /// Its layout; `source_index` is the position in the list that was published.
    pub layout: PackLayout,
    /// Whether the store held it already.
    pub reused: bool,
}

impl NodeStore {
    /// Hashes the extents, orders them canonically, and writes the pack or reuses the one that is there.
    ///
    /// `extents` are in source order (allocation pointer, pointer), each given as chunks of memory that must not
    /// change meanwhile. `progress` is called with the number of bytes processed since the last call: once the
    /// sum of the extents for pass 1, and the size of the pack for each pass after it (one, or two when a pack
    /// of the same size but other content is there).
    ///
    /// # Errors
    /// No extents, an empty one, too little space (before anything is written), or what the file system answers.
    /// Nothing is left behind then.
    pub fn publish_pack(
        &self,
        extents: &[Vec<&[u8]>],
        progress: &mut dyn FnMut(u64),
    ) -> Result<PublishedPack, StoreError> {
        self.sweep()?;
        let layout = PackLayout::plan(&sum_extents(extents, progress))?;
        let stream = || pack::canonical_stream(&layout, extents);
        if self.holds_pack_of(layout.bytes())? {
            let digest = pack_writer::hash_stream(stream(), progress);
            match self.admit(&digest, Some(layout.bytes()), &mut |_| ()) {
                Ok(payload) => return Ok(PublishedPack { payload, layout, reused: true }),
                Err(error) if is_replaceable(&error) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let mut staged = Staged::create(self, layout.bytes())?;
        staged.write(stream(), progress)?;
        let (payload, reused) = self.adopt(staged)?;
        Ok(PublishedPack { payload, layout, reused })
    }

    fn holds_pack_of(&self, bytes: u64) -> Result<bool, StoreError> {
        let directory = self.payload_directory();
        Ok(self.names_in(&directory)?.into_iter().any(|name| {
            name.to_str().is_some_and(|name| !name.starts_with('.') && name.ends_with(".pack"))
                && fs::symlink_metadata(directory.join(name)).is_ok_and(|m| m.is_file() && m.size() == bytes)
        }))
    }

    /// Gives a written staging file its name, unless the payload is there already.
    pub(super) fn adopt(&self, staged: Staged) -> Result<(AdmittedPayload, bool), StoreError> {
        let Staged { digest: Some(digest), bytes, .. } = staged else {
            let source = io::Error::other("the staging file was not written");
            return Err(StoreError::io("adopt", &staged.path)(source));
        };
        let path = self.payload_path(&digest);
        let lock = self.lock(&digest).map_err(StoreError::io("lock the payload", &path))?;
        match self.admit_locked(&digest, Some(bytes), &mut |_| (), &lock) {
            Ok(payload) => return Ok((payload, true)),
            Err(error) if is_replaceable(&error) => {}
            Err(error) => return Err(error.into()),
        }
        Ok((staged.commit(self, &digest, &lock)?, false))
    }
}

/// Whether writing the payload again cures the error: it is not there, or what is there is not it.
pub(super) const fn is_replaceable(error: &AdmitError) -> bool {
    matches!(
        error,
        AdmitError::NotFound { .. } | AdmitError::SizeMismatch { .. } | AdmitError::DigestMismatch { .. }
    )
}

/// A pack that is being written. Removed when dropped before its commit.
#[derive(Debug)]
pub(super) struct Staged {
    path: PathBuf,
    file: File,
    bytes: u64,
    digest: Option<Digest>,
    committed: bool,
}

impl Staged {
    pub(super) fn create(store: &NodeStore, bytes: u64) -> Result<Self, StoreError> {
        let directory = store.payload_directory();
        store.make_room(bytes)?;
        let tid = rustix::thread::gettid().as_raw_nonzero();
        let path = directory.join(format!("{UNNAMED}{}-{tid}{STAGING}", std::process::id()));
        let file = create_locked(&path).map_err(StoreError::io("create", &path))?;
        let staged = Self { path, file, bytes, digest: None, committed: false };
        let fail = |action| StoreError::io(action, &staged.path);
        pack_writer::preallocate(&staged.file, bytes).map_err(fail("reserve space for"))?;
        pack_writer::set_direct(&staged.file, true).map_err(fail("prepare"))?;
        Ok(staged)
    }

    fn write<'a>(
        &mut self,
        stream: impl Iterator<Item = &'a [u8]>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), StoreError> {
        let fail = |action| StoreError::io(action, &self.path);
        let digest = pack_writer::write_stream(&self.file, stream, progress).map_err(fail("write"))?;
        let written = self.file.metadata().map_err(fail("inspect"))?.size();
        if written != self.bytes {
            let source = io::Error::other(format!("{written} bytes were written, expected {}", self.bytes));
            return Err(StoreError::io("write", &self.path)(source));
        }
        rustix::fs::fdatasync(&self.file).map_err(|e| fail("sync")(e.into()))?;
        self.digest = Some(digest);
        Ok(())
    }

    /// Writes what is in another file, and returns its digest.
    pub(super) fn copy(
        &mut self,
        source: &File,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Digest, StoreError> {
        let fail = |action| StoreError::io(action, &self.path);
        let digest = pack_writer::copy(source, &self.file, self.bytes, progress).map_err(fail("copy to"))?;
        rustix::fs::fdatasync(&self.file).map_err(|e| fail("sync")(e.into()))?;
        self.digest = Some(digest);
        Ok(digest)
    }

    fn commit(
        mut self,
        store: &NodeStore,
        digest: &Digest,
        lock: &DigestLock,
    ) -> Result<AdmittedPayload, StoreError> {
        let payload = store.give_name(digest, self.bytes, &self.file, &self.path, lock)?;
        self.committed = true;
        Ok(payload)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.committed
            && let Err(error) = fs::remove_file(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove a staging file");
        }
    }
}

/// Creates a file and locks it, so that a sweep knows that its writer lives.
pub(super) fn create_locked(path: &Path) -> io::Result<File> {
    loop {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        flock(&file, FlockOperation::LockExclusive)?;
        // A sweep may have found it before it was locked.
        if file.metadata()?.nlink() > 0 {
            return Ok(file);
        }
    }
}

/// Sums all extents on all cores, the largest first, two at a time on each core.
fn sum_extents(extents: &[Vec<&[u8]>], progress: &mut dyn FnMut(u64)) -> Vec<ExtentSum> {
    let mut order: Vec<usize> = (0..extents.len()).collect();
    order.sort_by_key(|&n| std::cmp::Reverse(extents[n].iter().map(|chunk| chunk.len()).sum::<usize>()));
    let next = AtomicUsize::new(0);
    let threads = thread::available_parallelism().map_or(1, usize::from).min(extents.len());
    let mut sums = vec![ExtentSum { size: 0, sha256: Digest::of(b""), crc32: 0 }; extents.len()];
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        for _ in 0..threads {
            let (sender, order, next) = (sender.clone(), &order, &next);
            scope.spawn(move || {
                // The receiver outlives the threads.
                lanes::sum_all::<_, _, ExtentSummer>(
                    || {
                        let n = *order.get(next.fetch_add(1, Ordering::Relaxed))?;
                        Some((n, Pieces::of(&extents[n])))
                    },
                    |n, sum| {
                        let _ = sender.send(Event::Sum(n, sum));
                    },
                    |bytes| {
                        let _ = sender.send(Event::Bytes(bytes));
                    },
                );
            });
        }
        drop(sender);
        for event in receiver {
            match event {
                Event::Bytes(bytes) => progress(bytes),
                Event::Sum(n, Ok(sum)) => sums[n] = sum,
                // Memory has no errors.
                Event::Sum(_, Err(_)) => {}
            }
        }
    });
    sums
}

enum Event {
    Bytes(u64),
    Sum(usize, io::Result<ExtentSum>),
}

/// The chunks of an extent as a stream of pieces.
struct Pieces<'a> {
    chunks: std::slice::Iter<'a, &'a [u8]>,
    chunk: &'a [u8],
}

impl<'a> Pieces<'a> {
    fn of(chunks: &'a [&'a [u8]]) -> Self {
        Self { chunks: chunks.iter(), chunk: &[] }
    }
}

impl io::BufRead for Pieces<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        while self.chunk.is_empty() {
            match self.chunks.next() {
                Some(chunk) => self.chunk = chunk,
                None => break,
            }
        }
        Ok(&self.chunk[..self.chunk.len().min(PIECE_BYTES)])
    }

    fn consume(&mut self, taken: usize) {
        self.chunk = &self.chunk[taken..];
    }
}

impl io::Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let taken = io::Read::read(&mut io::BufRead::fill_buf(self)?, buffer)?;
        io::BufRead::consume(self, taken);
        Ok(taken)
    }
}
