//! Export: a copy of a payload outside of the store, verified while it is read.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::lock::try_flock;
use super::publish::create_locked;
use super::{AdmitError, NodeStore, StoreError, pack_writer, verify};
use crate::digest::Digest;
use crate::durable;

/// End of the name of a copy that is being written.
const EXPORTING: &str = ".exporting";

/// What [`NodeStore::export`] wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// The payload.
    pub digest: Digest,
    /// The copy.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Whether the very payload was there already; then nothing was written.
    pub present: bool,
}

impl NodeStore {
    /// Writes a copy of a payload to the file `path`, creating its directory. The copy appears complete and read-only,
    /// or not at all. A file that is there stays; it is no error when it is the payload. `progress` is called with the
    /// number of bytes hashed since the last call.
    ///
    /// # Errors
    /// When the payload is not here or damaged, when something else is at `path`, or what the file system answers.
    pub fn export(
        &self,
        digest: &Digest,
        path: &Path,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Exported, StoreError> {
        let (source, identity) = self.open_payload(digest, None)?;
        let bytes = identity.content.size;
        let exported = |present| Exported { digest: *digest, path: path.to_owned(), bytes, present };
        if is_payload(path, digest, bytes, progress)? {
            return Ok(exported(true));
        }
        let directory = durable::parent(path);
        fs::create_dir_all(directory).map_err(StoreError::io("create the directory", directory))?;
        let temporary = temporary(path)?;
        let file = create_locked(&temporary).map_err(StoreError::io("create", &temporary))?;
        let result = self.copy_to(digest, &source, bytes, &file, &temporary, progress).and_then(|()| {
            file.set_permissions(Permissions::from_mode(0o444))
                .and_then(|()| durable::commit(&file, &temporary, path))
                .map_err(StoreError::io("rename", &temporary))
        });
        if result.is_err() {
            // The first error says what is wrong.
            let _ = fs::remove_file(&temporary);
        }
        result.map(|()| exported(false))
    }

    fn copy_to(
        &self,
        digest: &Digest,
        source: &File,
        bytes: u64,
        file: &File,
        path: &Path,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), StoreError> {
        let fail = |action| StoreError::io(action, path);
        pack_writer::preallocate(file, bytes).map_err(fail("reserve space for"))?;
        pack_writer::set_direct(file, true).map_err(fail("prepare"))?;
        let found = pack_writer::copy(source, file, bytes, progress).map_err(fail("copy to"))?;
        if found != *digest {
            let path = self.payload_path(digest);
            return Err(AdmitError::DigestMismatch { path, expected: *digest, found }.into());
        }
        Ok(())
    }
}

/// Whether a payload is at a path already.
fn is_payload(
    path: &Path,
    digest: &Digest,
    bytes: u64,
    progress: &mut dyn FnMut(u64),
) -> Result<bool, StoreError> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(StoreError::io("inspect", path)(e)),
    };
    let exists = |what: String| StoreError::DestinationExists { path: path.to_owned(), what };
    if !metadata.is_file() {
        return Err(exists("it exists and is not a regular file".to_owned()));
    }
    if metadata.size() != bytes {
        return Err(exists(format!(
            "a file with {} bytes is there, the payload has {bytes}",
            metadata.size()
        )));
    }
    let file = File::open(path).map_err(StoreError::io("open", path))?;
    let found = verify::hash(&file, progress).map_err(StoreError::io("read", path))?;
    if found == *digest { Ok(true) } else { Err(exists(format!("a file with the content {found} is there"))) }
}

/// A temporary name beside `path`, after the removal of those whose writer is gone.
fn temporary(path: &Path) -> Result<PathBuf, StoreError> {
    let name = path.file_name().ok_or_else(|| {
        StoreError::io("write to", path)(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the path has no file name",
        ))
    })?;
    let directory = durable::parent(path);
    let prefix = format!(".{}.", name.to_string_lossy());
    let listed = fs::read_dir(directory).map_err(StoreError::io("list", directory))?;
    for entry in listed.flatten() {
        let found = entry.file_name();
        let stale = found.to_str().is_some_and(|name| name.starts_with(&prefix) && name.ends_with(EXPORTING));
        if !stale {
            continue;
        }
        // NFS grants an exclusive lock only to a file that is open for writing.
        let opened = OpenOptions::new().read(true).write(true).open(entry.path());
        if opened.is_ok_and(|file| try_flock(&file).unwrap_or(false)) {
            // Somebody else may have removed it.
            let _ = fs::remove_file(entry.path());
        }
    }
    let tid = rustix::thread::gettid().as_raw_nonzero();
    Ok(directory.join(format!("{prefix}{}-{tid}{EXPORTING}", std::process::id())))
}
