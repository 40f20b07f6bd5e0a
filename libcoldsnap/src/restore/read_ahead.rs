//! Filling the page cache while everything else of a restore goes on.
//!
//! With read(2) in large pieces rather than readahead(2): it leaves large folios behind, which the process later
//! maps 40 times faster.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Bytes of one read; the largest folios that the page cache makes of it.
const PIECE: u64 = 1 << 20;
/// Reads in flight: a disk needs several to give its full rate.
const READERS: usize = 4;

/// A running read-ahead; dropping it stops it.
#[derive(Debug)]
pub struct ReadAhead {
    stop: Arc<AtomicBool>,
}

impl ReadAhead {
    /// Reads `files` in this order, in threads of its own. Files that are in the page cache already are skipped;
    /// errors end the piece they concern, the restore will meet them itself.
    pub(super) fn start(files: Vec<PathBuf>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let work =
            Arc::new(Work { pieces: pieces(&files), next: AtomicUsize::new(0), stop: Arc::clone(&stop) });
        for _ in 0..READERS.min(work.pieces.len()) {
            let work = Arc::clone(&work);
            let thread = std::thread::Builder::new().name("read-ahead".into());
            // Without a thread there is no read-ahead, which only costs time.
            let _ = thread.spawn(move || work.run());
        }
        Self { stop }
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

struct Work {
    pieces: Vec<(Arc<File>, u64)>,
    next: AtomicUsize,
    stop: Arc<AtomicBool>,
}

impl Work {
    /// Reads one piece after the other until none is left or it is told to stop.
    fn run(&self) -> usize {
        let mut buffer = vec![0; usize::try_from(PIECE).unwrap_or_default()];
        let mut done = 0;
        while !self.stop.load(Ordering::Relaxed) {
            let Some((file, offset)) = self.pieces.get(self.next.fetch_add(1, Ordering::Relaxed)) else {
                break;
            };
            let _ = file.read_at(&mut buffer, *offset);
            done += 1;
        }
        done
    }
}

/// The pieces of all files that are not in the page cache, in order.
fn pieces(files: &[PathBuf]) -> Vec<(Arc<File>, u64)> {
    let mut pieces = Vec::new();
    for path in files {
        let Ok(file) = File::open(path) else { continue };
        let Ok(len) = file.metadata().map(|m| m.len()) else { continue };
        if is_cached(&file, len) {
            continue;
        }
        let file = Arc::new(file);
        pieces.extend((0..len.div_ceil(PIECE)).map(|n| (Arc::clone(&file), n * PIECE)));
    }
    pieces
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

    fn work(files: &[PathBuf], stop: bool) -> Work {
        let stop = Arc::new(AtomicBool::new(stop));
        Work { pieces: pieces(files), next: AtomicUsize::new(0), stop }
    }

    #[test]
    fn what_is_cached_or_gone_is_skipped() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![1; 3 << 20]).unwrap();
        assert!(is_cached(file.as_file(), 3 << 20));
        assert!(pieces(&[file.path().to_owned(), PathBuf::from("/none")]).is_empty());
    }

    #[test]
    fn each_piece_is_read_once_and_none_after_a_stop() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // A hole is not in the page cache.
        file.as_file().set_len((5 << 20) + 1).unwrap();
        let files = [file.path().to_owned()];
        assert_eq!(work(&files, true).run(), 0);
        let all = work(&files, false);
        let done: usize = std::thread::scope(|scope| {
            let readers: Vec<_> = (0..3).map(|_| scope.spawn(|| all.run())).collect();
            readers.into_iter().map(|reader| reader.join().unwrap()).sum()
        });
        assert_eq!(done, 6);
        assert!(is_cached(file.as_file(), (5 << 20) + 1));
    }
}
