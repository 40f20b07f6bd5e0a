//! A read-only memory mapping of a whole file.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The bytes of a file, mapped; an empty file gives an empty slice.
///
/// Only for files that nobody truncates while they are mapped (our own staging files, payloads in the
/// node store which are never modified, checkpoint files during a capture): touching a page beyond a new
/// end of the file raises SIGBUS.
#[derive(Debug)]
pub struct MappedFile {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is read-only and private to this value; sharing a reference shares plain bytes.
unsafe impl Send for MappedFile {}
// SAFETY: as above.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// Any error of open, stat or mmap.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::of(&File::open(path)?)
    }

    /// Maps an open file.
    ///
    /// # Errors
    /// Any error of stat or mmap.
    pub fn of(file: &File) -> io::Result<Self> {
        let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        if len == 0 {
            return Ok(Self { address: NonNull::dangling(), len });
        }
        // SAFETY: a new mapping at an address that the kernel chooses; nothing else refers to it.
        let address = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, 0) }?;
        let address = NonNull::new(address.cast()).ok_or_else(|| io::Error::other("mmap answered null"))?;
        Ok(Self { address, len })
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: address and len describe a live mapping (or len is 0 and the pointer is dangling but aligned).
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.len) }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the mapping was made in `of` with this address and length and is unmapped once.
            let _ = unsafe { munmap(self.address.as_ptr().cast(), self.len) };
        }
    }
}
