//! Writing a canonical stream to a file while it is hashed: one thread copies into aligned buffers and hashes,
//! another writes them past the page cache.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;

use crate::digest::{Digest, Sha256};
use crate::format::pack;

/// One write; long enough for the device, four of them small enough for every node.
const BUFFER_BYTES: usize = 4 << 20;
const BUFFERS: usize = 4;
/// Bytes that are copied and then hashed while they are in the second-level cache.
const PIECE_BYTES: usize = 256 << 10;
/// What O_DIRECT asks of addresses, offsets and lengths.
pub(super) const ALIGNMENT: usize = 4096;

/// Reserves the file's blocks, so that a full disk is an error before anything is written. File systems that
/// cannot do it are served without.
pub(super) fn preallocate(file: &File, bytes: u64) -> io::Result<()> {
    match rustix::io::retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        result => Ok(result?),
    }
}

/// Asks that writes go past the page cache, where the file system can do it.
pub(super) fn set_direct(file: &File, direct: bool) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    let wanted = if direct { flags | OFlags::DIRECT } else { flags - OFlags::DIRECT };
    match rustix::fs::fcntl_setfl(file, wanted) {
        Err(Errno::INVAL) if direct => Ok(()),
        result => Ok(result?),
    }
}

/// Hashes a stream without writing it.
pub(super) fn hash_stream<'a>(
    stream: impl Iterator<Item = &'a [u8]>,
    progress: &mut dyn FnMut(u64),
) -> Digest {
    let mut sha256 = Sha256::default();
    for chunk in stream {
        for piece in chunk.chunks(PIECE_BYTES) {
            sha256.update(piece);
            progress(piece.len() as u64);
        }
    }
    sha256.finish()
}

/// Writes a stream, whose length is a multiple of 4096, from offset 0, and returns its digest.
/// `progress` is called with the number of bytes hashed since the last call.
pub(super) fn write_stream<'a>(
    file: &File,
    stream: impl Iterator<Item = &'a [u8]>,
    progress: &mut dyn FnMut(u64),
) -> io::Result<Digest> {
    std::thread::scope(|scope| {
        let (full, to_write) = sync_channel::<AlignedBuffer>(BUFFERS);
        let (written, empty) = sync_channel::<AlignedBuffer>(BUFFERS);
        for _ in 0..BUFFERS {
            // The channel has room for all of them.
            let _ = written.send(AlignedBuffer::new());
        }
        let writer = scope.spawn(move || write_buffers(file, &to_write, &written));
        let digest = fill_buffers(stream, &empty, &full, progress);
        drop(full);
        let result = writer.join().unwrap_or_else(|_| Err(io::Error::other("the writing thread panicked")));
        result.map(|()| digest)
    })
}

/// Copies `bytes` bytes, a multiple of 4096, from a file's current offset to offset 0 of another, and returns their
/// digest. `progress` is called with the number of bytes hashed since the last call.
pub(super) fn copy(
    mut source: &File,
    file: &File,
    bytes: u64,
    progress: &mut dyn FnMut(u64),
) -> io::Result<Digest> {
    let mut buffer = AlignedBuffer::new();
    let mut chunk = vec![0; PIECE_BYTES];
    let mut sha256 = Sha256::default();
    let (mut read, mut written) = (0, 0);
    while read < bytes {
        let wanted = usize::try_from(bytes - read).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
        match source.read(&mut chunk[..wanted]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                let mut rest = &chunk[..n];
                sha256.update(rest);
                read += n as u64;
                progress(n as u64);
                while !rest.is_empty() {
                    rest = &rest[buffer.append(rest)..];
                    if buffer.is_full() || read == bytes && rest.is_empty() {
                        write_at(file, buffer.filled(), written)?;
                        written += buffer.filled().len() as u64;
                        buffer.clear();
                    }
                }
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(sha256.finish())
}

/// Writes past the page cache, or through it where the file system has other rules of alignment.
pub(super) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    match file.write_all_at(bytes, offset) {
        // Accepted when it was set, refused when it is used.
        Err(e) if Errno::from_io_error(&e) == Some(Errno::INVAL) => {
            set_direct(file, false)?;
            file.write_all_at(bytes, offset)
        }
        result => result,
    }
}

/// Ends early when the writer is gone; its result says why.
fn fill_buffers<'a>(
    stream: impl Iterator<Item = &'a [u8]>,
    empty: &Receiver<AlignedBuffer>,
    full: &SyncSender<AlignedBuffer>,
    progress: &mut dyn FnMut(u64),
) -> Digest {
    let mut sha256 = Sha256::default();
    let mut current: Option<AlignedBuffer> = None;
    'stream: for mut chunk in stream {
        while !chunk.is_empty() {
            let mut buffer = match current.take() {
                Some(buffer) => buffer,
                None => match empty.recv() {
                    Ok(buffer) => buffer,
                    Err(_) => break 'stream,
                },
            };
            let taken = buffer.append(&chunk[..chunk.len().min(PIECE_BYTES)]);
            sha256.update(buffer.last(taken));
            progress(taken as u64);
            chunk = &chunk[taken..];
            if !buffer.is_full() {
                current = Some(buffer);
            } else if full.send(buffer).is_err() {
                break 'stream;
            }
        }
    }
    if let Some(buffer) = current {
        // If the writer is gone its result says why.
        let _ = full.send(buffer);
    }
    sha256.finish()
}

fn write_buffers(
    file: &File,
    to_write: &Receiver<AlignedBuffer>,
    written: &SyncSender<AlignedBuffer>,
) -> io::Result<()> {
    let mut offset = 0;
    for mut buffer in to_write {
        write_at(file, buffer.filled(), offset)?;
        offset += buffer.filled().len() as u64;
        buffer.clear();
        // The other side may have ended.
        let _ = written.send(buffer);
    }
    Ok(())
}

/// A buffer at a multiple of 4096.
#[derive(Debug)]
pub(super) struct AlignedBuffer {
    storage: Vec<u8>,
    start: usize,
    filled: usize,
}

impl AlignedBuffer {
    pub(super) fn new() -> Self {
        let storage = vec![0; BUFFER_BYTES + ALIGNMENT];
        // The heap block does not move with the Vec.
        let start = storage.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { storage, start, filled: 0 }
    }

    /// Takes as many bytes as fit and says how many.
    pub(super) fn append(&mut self, bytes: &[u8]) -> usize {
        let taken = bytes.len().min(BUFFER_BYTES - self.filled);
        let at = self.start + self.filled;
        self.storage[at..at + taken].copy_from_slice(&bytes[..taken]);
        self.filled += taken;
        taken
    }

    pub(super) fn last(&self, bytes: usize) -> &[u8] {
        let end = self.start + self.filled;
        &self.storage[end - bytes..end]
    }

    pub(super) fn filled(&self) -> &[u8] {
        &self.storage[self.start..self.start + self.filled]
    }

    pub(super) fn is_full(&self) -> bool {
        self.filled == BUFFER_BYTES
    }

    pub(super) fn clear(&mut self) {
        self.filled = 0;
    }
}

const _: () = assert!(ALIGNMENT as u64 == pack::ALIGNMENT && BUFFER_BYTES.is_multiple_of(ALIGNMENT));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_what_it_hashes_across_buffer_ends() {
        let data: Vec<u8> =
            (0..3 * BUFFER_BYTES + 2 * ALIGNMENT).map(|n| u8::try_from(n % 241).unwrap()).collect();
        for direct in [true, false] {
            let mut file = tempfile::tempfile_in(".").unwrap();
            set_direct(&file, direct).unwrap();
            let mut seen = 0;
            let chunks = data.chunks(1_000_003);
            let digest = write_stream(&file, chunks.clone(), &mut |n| seen += n).unwrap();
            assert_eq!(digest, Digest::of(&data));
            assert_eq!(digest, hash_stream(chunks, &mut |_| ()));
            assert_eq!(seen, data.len() as u64);
            set_direct(&file, false).unwrap();
            let mut back = Vec::new();
            file.read_to_end(&mut back).unwrap();
            assert_eq!(Digest::of(&back), digest);
        }
    }

    #[test]
    fn a_write_error_ends_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("read-only");
        std::fs::write(&path, b"").unwrap();
        let file = File::open(&path).unwrap();
        let data = vec![1; 10 * BUFFER_BYTES];
        let error = write_stream(&file, data.chunks(BUFFER_BYTES), &mut |_| ()).unwrap_err();
        assert_eq!(Errno::from_io_error(&error), Some(Errno::BADF));
    }
}
