//! A directory or mounted share that is laid out as a store: `<path>/model-payloads/sha256/<64hex>.pack`.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::{FetchError, Sink, Source, Wanted};

/// Shares answer few large reads faster than many small ones.
const READ_BYTES: usize = 4 << 20;

/// See the module.
#[derive(Debug)]
pub struct DirectorySource {
    path: PathBuf,
}

impl DirectorySource {
    /// The source at `path`; nothing is looked up yet, because a share may be mounted later.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Opens the payload. The directory itself may be a link, what is in it may not.
    fn open(&self, wanted: &Wanted) -> Result<File, FetchError> {
        let file = wanted.digest.payload_path();
        let shown = self.path.join(&file);
        let failed = |errno: Errno| match errno {
            Errno::NOENT => FetchError::NotFound(String::new()),
            Errno::ACCESS | Errno::PERM => FetchError::Denied(format!("{}: {errno}", shown.display())),
            Errno::LOOP => FetchError::Refused(format!("{} is reached through a link", shown.display())),
            errno => FetchError::Unavailable(format!("cannot open {}: {errno}", shown.display())),
        };
        let directory: OwnedFd =
            rustix::fs::open(&self.path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
                // A share that is not mounted.
                .map_err(|errno| match errno {
                    Errno::NOENT => {
                        FetchError::Unavailable(format!("{} does not exist", self.path.display()))
                    }
                    errno => failed(errno),
                })?;
        // Not blocking, so that a fifo in its place is refused instead of waited for.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let file = rustix::fs::openat2(directory, file, flags, Mode::empty(), within).map_err(failed)?;
        let file = File::from(file);
        let metadata = file.metadata().map_err(|e| unreadable(&shown.display(), &e))?;
        if !metadata.is_file() {
            return Err(FetchError::Refused(format!("{} is no regular file", shown.display())));
        }
        if metadata.len() != wanted.bytes {
            let what = format!("{} has {} bytes, expected {}", shown.display(), metadata.len(), wanted.bytes);
            return Err(FetchError::Refused(what));
        }
        Ok(file)
    }
}

fn unreadable(what: &dyn std::fmt::Display, error: &io::Error) -> FetchError {
    FetchError::Unavailable(format!("cannot read {what}: {error}"))
}

impl Source for DirectorySource {
    fn name(&self) -> String {
        format!("directory {}", self.path.display())
    }

    fn fetch(&self, wanted: &Wanted, from: u64, sink: &mut Sink<'_>) -> Result<(), FetchError> {
        let file = self.open(wanted)?;
        // Advice: without it the reads are only slower.
        let _ = rustix::fs::fadvise(&file, from, None, rustix::fs::Advice::Sequential);
        let mut buffer = vec![0; READ_BYTES];
        let mut at = from;
        loop {
            match file.read_at(&mut buffer, at) {
                Ok(0) => return Ok(()),
                Ok(n) => {
                    sink(&buffer[..n])?;
                    at += n as u64;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(unreadable(&self.path.display(), &e)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::digest::Digest;

    #[test]
    fn only_a_regular_file_of_the_right_size_below_the_directory_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..9000_u32).map(|n| n.to_le_bytes()[0]).collect();
        let wanted = Wanted { digest: Digest::of(&bytes), bytes: 9000 };
        let share = dir.path().join("share");
        let source = DirectorySource::new(&share);
        let fetch = |from| {
            let mut got = Vec::new();
            source
                .fetch(&wanted, from, &mut |chunk| {
                    got.extend_from_slice(chunk);
                    Ok(())
                })
                .map(|()| got)
        };
        assert!(matches!(fetch(0), Err(FetchError::Unavailable(_))), "not mounted");
        let path = share.join(wanted.digest.payload_path());
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        assert!(matches!(fetch(0), Err(FetchError::NotFound(_))));
        fs::write(&path, &bytes).unwrap();
        assert_eq!(fetch(0).unwrap(), bytes);
        assert_eq!(fetch(5000).unwrap(), bytes[5000..]);
        fs::write(&path, &bytes[1..]).unwrap();
        assert!(matches!(fetch(0), Err(FetchError::Refused(_))), "another size");

        fs::remove_file(&path).unwrap();
        let elsewhere = dir.path().join("secret");
        fs::write(&elsewhere, &bytes).unwrap();
        symlink(&elsewhere, &path).unwrap();
        assert!(matches!(fetch(0), Err(FetchError::Refused(_))), "a link");
        fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert!(matches!(fetch(0), Err(FetchError::Refused(_))), "a fifo");

        // The directory itself may be a link, as mount points often are.
        let linked = dir.path().join("linked");
        symlink(&share, &linked).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, &bytes).unwrap();
        DirectorySource::new(linked).fetch(&wanted, 0, &mut |_| Ok(())).unwrap();
    }
}
