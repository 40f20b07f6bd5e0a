//! Filling the page cache while everything else of a restore goes on.
//!
//! With read(2) in large pieces rather than readahead(2): it leaves large folios behind, which the process later
//! maps 40 times faster.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const PIECE: usize = 1 << 20;

/// A running read-ahead; dropping it stops it.
#[derive(Debug)]
pub struct ReadAhead {
    stop: Arc<AtomicBool>,
}

impl ReadAhead {
    /// Reads `files` in this order in a thread of its own. Files that are in the page cache already are skipped;
    /// errors end the file they concern, the restore will meet them itself.
    pub(super) fn start(files: Vec<PathBuf>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("read-ahead".into());
        // Without a thread there is no read-ahead, which only costs time.
        let _ = thread.spawn(move || {
            let mut buffer = vec![0; PIECE];
            for file in files {
                if read(&file, &mut buffer, &told).is_none() {
                    return;
                }
            }
        });
        Self { stop }
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// `None` when it was told to stop.
fn read(path: &Path, buffer: &mut [u8], stop: &AtomicBool) -> Option<()> {
    let Ok(mut file) = File::open(path) else { return Some(()) };
    if file.metadata().is_ok_and(|m| is_cached(&file, m.len())) {
        return Some(());
    }
    loop {
        if stop.load(Ordering::Relaxed) {
            return None;
        }
        match file.read(buffer) {
            Ok(0) | Err(_) => return Some(()),
            Ok(_) => {}
        }
    }
}

#[repr(C)]
#[derive(Default)]
struct CachestatRange {
    off: u64,
    len: u64,
}

#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Whether at least 99 % of the file are in the page cache; false where the kernel (before 6.5) cannot tell.
fn is_cached(file: &File, len: u64) -> bool {
    const SYS_CACHESTAT: libc::c_long = 451;
    let range = CachestatRange { off: 0, len };
    let mut stat = Cachestat::default();
    // SAFETY: both structs have the kernel's layout (uapi/linux/mman.h) and live across the call; the descriptor
    // is open; the kernel writes only into `stat`.
    let answer =
        unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut stat, 0) };
    let pages = len.div_ceil(rustix::param::page_size() as u64);
    answer == 0 && stat.cached.saturating_mul(100) >= pages.saturating_mul(99)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_just_written_is_cached_and_reading_stops_when_told() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![1; 3 * PIECE]).unwrap();
        assert!(is_cached(file.as_file(), 3 * PIECE as u64));
        let mut buffer = vec![0; PIECE];
        assert_eq!(read(file.path(), &mut buffer, &AtomicBool::new(false)), Some(()));
        assert_eq!(read(Path::new("/none"), &mut buffer, &AtomicBool::new(true)), Some(()));
    }
}
