//! Read-only mappings of whole regular files.
//!
//! A checkpoint, a dump or a payload is as large as the model: reading it into memory would double what a
//! capture needs, a mapping uses the page cache that is usually warm.
//!
//! The price of a mapping: if somebody truncates the file while it is mapped, an access beyond the
//! new end raises SIGBUS. Checkpoints are immutable by convention (blobs of a snapshot, files named
//! by revision), and the mapping lives only in the process of the capture command: the server that
//! is captured and the shim never hold one. [`MappedFile::changed`] tells a rewrite in place from
//! an untouched file, so that no manifest is written about bytes that are gone.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::mm::{MapFlags, ProtFlags};

// Offsets in files and lengths of mappings are used as slice indices throughout.
const _: () = assert!(usize::BITS == 64, "file offsets must fit a slice index");

/// A regular file mapped read-only from its first to its last byte.
pub struct MappedFile {
    path: PathBuf,
    file: File,
    identity: Identity,
    start: NonNull<u8>,
    len: usize,
}

/// What tells one content of a file from another without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    bytes: i64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// Why a file was not mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// A system call failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was being done: "open", "stat" or "map".
        action: &'static str,
        /// The file as it was named.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The path leads to a directory, device, pipe or socket.
    #[error("{} is not a regular file", path.display())]
    NotRegular {
        /// The file as it was named.
        path: PathBuf,
    },
}

impl From<MapError> for io::Error {
    fn from(error: MapError) -> Self {
        match error {
            MapError::Io { source, .. } => source,
            other @ MapError::NotRegular { .. } => Self::new(io::ErrorKind::InvalidInput, other.to_string()),
        }
    }
}

impl MappedFile {
    /// Maps the file at `path`; symbolic links are followed.
    ///
    /// # Errors
    /// When the file cannot be opened or mapped, or is no regular file. An empty file maps to an
    /// empty slice.
    pub fn open(path: &Path) -> Result<Self, MapError> {
        let io = |action| {
            let path = path.to_owned();
            move |errno: rustix::io::Errno| MapError::Io { action, path, source: errno.into() }
        };
        // O_NONBLOCK: opening a pipe that somebody put there must not wait for a writer.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = File::from(rustix::fs::open(path, flags, Mode::empty()).map_err(io("open"))?);
        let stat = rustix::fs::fstat(&file).map_err(io("stat"))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(MapError::NotRegular { path: path.to_owned() });
        }
        let len = usize::try_from(stat.st_size).unwrap_or(0);
        let start = if len == 0 {
            NonNull::dangling()
        } else {
            // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory that
            // Rust knows; `len` is not zero.
            let address = unsafe {
                rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::PRIVATE, &file, 0)
            }
            .map_err(io("map"))?;
            NonNull::new(address.cast()).ok_or(rustix::io::Errno::NOMEM).map_err(io("map"))?
        };
        Ok(Self { path: path.to_owned(), file, identity: Identity::of(&stat), start, len })
    }

    /// The path the file was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file was written, truncated or otherwise touched since it was mapped.
    ///
    /// # Errors
    /// When the file cannot be asked.
    pub fn changed(&self) -> Result<bool, MapError> {
        let stat = rustix::fs::fstat(&self.file).map_err(|errno| MapError::Io {
            action: "stat",
            path: self.path.clone(),
            source: errno.into(),
        })?;
        Ok(Identity::of(&stat) != self.identity)
    }
}

impl Identity {
    fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            bytes: stat.st_size,
            modified: (stat.st_mtime, stat.st_mtime_nsec.try_into().unwrap_or(i64::MAX)),
            changed: (stat.st_ctime, stat.st_ctime_nsec.try_into().unwrap_or(i64::MAX)),
        }
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` is the beginning of a readable mapping of `len` bytes that lives until
        // drop, or dangling with `len` 0. Nobody writes through this mapping; that nobody writes
        // to the file meanwhile is the caller's contract, see the module documentation.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        if self.len != 0 {
            // SAFETY: the mapping was made by `open` with this length, and no slice of it outlives
            // `self`.
            let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
            if let Err(error) = unmapped {
                tracing::warn!(path = %self.path.display(), %error, "cannot unmap a file");
            }
        }
    }
}

// SAFETY: the mapping is read-only and belongs to this value alone; it may be used and released by
// any thread.
unsafe impl Send for MappedFile {}
// SAFETY: as above, shared access only reads.
unsafe impl Sync for MappedFile {}

impl fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedFile").field("path", &self.path).field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn maps_and_notices_a_rewrite() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, b"content").unwrap();
        let mapped = MappedFile::open(&path).unwrap();
        assert_eq!(&*mapped, b"content");
        assert!(!mapped.changed().unwrap());
        std::fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"more").unwrap();
        assert!(mapped.changed().unwrap());
    }

    #[test]
    fn an_empty_file_is_an_empty_slice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, b"").unwrap();
        assert!(MappedFile::open(&path).unwrap().is_empty());
    }

    #[test]
    fn refuses_what_is_no_regular_file() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(MappedFile::open(dir.path()), Err(MapError::NotRegular { .. })));
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert!(matches!(MappedFile::open(&pipe), Err(MapError::NotRegular { .. })));
        let missing = dir.path().join("missing");
        assert!(matches!(MappedFile::open(&missing), Err(MapError::Io { action: "open", .. })));
    }
}
