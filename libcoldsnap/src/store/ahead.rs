//! A file that is read by a thread of its own while the caller hashes what came before: the time to copy it out of the
//! page cache hides behind the hashing.

use std::fs::File;
use std::io::{self, Read};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use super::verify::READ_BYTES;
use crate::digest::{Digest, Sha256};

/// Buffers on their way: together they fit the second-level caches of two cores.
const BUFFERS: usize = 4;
/// For less a thread costs more than it saves.
pub(super) const WORTHWHILE: u64 = 16 << 20;

/// The digest of a file from its current offset, on two cores. `progress` is called with the number of bytes hashed
/// since the last call.
///
/// # Errors
/// What the file system answers.
pub(super) fn hash(file: &File, progress: &mut dyn FnMut(u64)) -> io::Result<Digest> {
    thread::scope(|scope| {
        let (filled, arriving) = sync_channel::<io::Result<Vec<u8>>>(BUFFERS);
        let (emptied, returning) = sync_channel::<Vec<u8>>(BUFFERS);
        for _ in 0..BUFFERS {
            // The channel has room for all of them.
            let _ = emptied.send(vec![0; READ_BYTES]);
        }
        scope.spawn(move || read(file, &filled, &returning));
        let mut sha256 = Sha256::default();
        for buffer in arriving {
            let mut buffer = buffer?;
            sha256.update(&buffer);
            progress(buffer.len() as u64);
            buffer.resize(READ_BYTES, 0);
            // The reader ends first.
            let _ = emptied.send(buffer);
        }
        Ok(sha256.finish())
    })
}

/// Ends at the end of the file, at an error, and when nobody takes anything any more.
fn read(mut file: &File, filled: &SyncSender<io::Result<Vec<u8>>>, returning: &Receiver<Vec<u8>>) {
    for mut buffer in returning {
        let read = loop {
            match file.read(&mut buffer) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                result => break result,
            }
        };
        let (part, last) = match read {
            Ok(0) => return,
            Ok(bytes) => {
                buffer.truncate(bytes);
                (Ok(buffer), false)
            }
            Err(error) => (Err(error), true),
        };
        if filled.send(part).is_err() || last {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn every_byte_is_hashed_once_whatever_the_length() {
        for len in [0, 1, READ_BYTES - 1, READ_BYTES, READ_BYTES + 1, 9 * READ_BYTES + 77] {
            let bytes: Vec<u8> = (0..len).map(|n| u8::try_from(n % 251).unwrap()).collect();
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(&bytes).unwrap();
            let mut hashed = 0;
            let digest = hash(&file.reopen().unwrap(), &mut |n| hashed += n).unwrap();
            assert_eq!((digest, hashed), (Digest::of(&bytes), len as u64), "{len} bytes");
        }
    }

    #[test]
    fn a_read_error_ends_it() {
        let directory = tempfile::tempdir().unwrap();
        let error = hash(&File::open(directory.path()).unwrap(), &mut |_| ()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
    }
}
