//! Durable file writes: temporary name, write, fsync, rename, fsync of the directory.
//!
//! Every file of ours that must survive a crash is written here, and nowhere else.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Replaces `path` with `bytes` and file mode `mode` (permission bits), so that a reader, also after a
/// power loss, sees the old content or the new one and never a mixture.
///
/// # Errors
/// Any error of the file system; the temporary file is removed then, and `path` is as it was.
pub fn write_file(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let (temporary, mut file) = create_temporary(path, mode)?;
    let result = (|| {
        file.write_all(bytes)?;
        // The umask may have removed bits.
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        commit(&file, &temporary, path)
    })();
    if result.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    result
}

/// Writes a file that must not exist yet, as durably as [`write_file`]. It appears complete or not at all.
///
/// # Errors
/// `AlreadyExists` when there is something at `path`, else any error of the file system; the temporary file
/// is removed in every case.
pub fn write_new_file(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let (temporary, mut file) = create_temporary(path, mode)?;
    let result = (|| {
        file.write_all(bytes)?;
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.sync_all()?;
        // Unlike a rename, a link never replaces.
        fs::hard_link(&temporary, path)
    })();
    let removed = fs::remove_file(&temporary);
    result.and(removed)?;
    sync_directory(parent(path))
}

/// Makes a fully written temporary `file` durable under its final name `path`.
/// Both names must be in one directory.
///
/// # Errors
/// Any error of fsync, rename or fsync of the directory.
pub fn commit(file: &File, temporary: &Path, path: &Path) -> io::Result<()> {
    file.sync_all()?;
    fs::rename(temporary, path)?;
    sync_directory(parent(path))
}

/// Fsyncs a directory, so that names created, renamed or removed in it survive a power loss.
///
/// # Errors
/// Any error of open or fsync.
pub fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// The directory of `path`; `.` for a bare name.
pub fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    }
}

fn create_temporary(path: &Path, mode: u32) -> io::Result<(PathBuf, File)> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path has no file name"))?;
    let mut temporary = OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{}-{}.tmp", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed)));
    let temporary = parent(path).join(temporary);
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary)?;
    Ok((temporary, file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_content_and_mode_and_leaves_no_temporary() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        write_file(&path, b"one", 0o600).unwrap();
        write_file(&path, b"two", 0o644).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o644);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_new_file_replaces_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("artifact.json");
        write_new_file(&path, b"one", 0o644).unwrap();
        let error = write_new_file(&path, b"two", 0o644).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_failed_write_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("target");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("child"), b"x").unwrap();
        assert!(write_file(&path, b"two", 0o600).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
