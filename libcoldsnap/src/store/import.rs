//! Import: a pack that is a file already becomes a payload of the store.
//!
//! Nothing is believed about the file. It is copied and hashed in one pass; or, when it may be taken away and is on the
//! store's file system, hashed where it is and renamed. It is never linked: whoever can still write the other name
//! could change what containers map.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::publish::{Staged, is_replaceable};
use super::remove::remove;
use super::verify::{self, wait_out_tick};
use super::{AdmitError, AdmittedPayload, NodeStore, StagedPayload, Staging, StoreError};
use crate::digest::Digest;
use crate::durable;
use crate::format::pack;
use crate::format::validation::FileIdentity;

/// One read of a copy.
const CHUNK_BYTES: usize = 1 << 20;

/// How a payload came into the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// It was here and verified.
    Present,
    /// It was at its path, and is verified now.
    Adopted,
    /// The file was copied.
    Copied,
    /// The file was renamed.
    Moved,
}

impl Arrival {
    /// The name in output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Present => "present",
            Self::Adopted => "adopted",
            Self::Copied => "copied",
            Self::Moved => "moved",
        }
    }
}

/// What [`NodeStore::import`] brought.
#[derive(Debug)]
pub struct Imported {
    /// The payload.
    pub payload: AdmittedPayload,
    /// How it came.
    pub arrival: Arrival,
}

/// A file to import, open.
struct Source<'a> {
    path: &'a Path,
    file: File,
    identity: FileIdentity,
    links: u64,
}

impl NodeStore {
    /// Makes the file `path` a payload of the store. `expected` is its digest where that is known; else a file name
    /// `<64hex>.pack` says it; else it is computed. With `take` the file is gone afterwards, and is not copied when
    /// it is on the store's file system. A file at its own path in the store is verified where it is, and gets
    /// mode 0444. `progress` is called with the number of bytes hashed since the last call.
    ///
    /// # Errors
    /// When the file is no pack, has another digest (the store is as it was then, and the file too), there is
    /// no room, or the file system refuses.
    pub fn import(
        &self,
        path: &Path,
        expected: Option<Digest>,
        take: bool,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Imported, StoreError> {
        let named =
            path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".pack"));
        let named = named.and_then(|hex| Digest::from_hex(hex).ok());
        if let Some(digest) = named
            && self.is_at_home(path)
        {
            return self.import_in_place(path, digest, expected, progress);
        }
        let source = Source::open(path, take)?;
        let expected = expected.or(named);
        if take && self.can_rename(&source)? {
            return self.import_by_rename(&source, expected, progress);
        }
        let imported = match expected {
            Some(digest) => self.import_expected(&source, digest, take, progress)?,
            None => self.import_unknown(&source, progress)?,
        };
        if take {
            source.remove()?;
        }
        Ok(imported)
    }

    /// The packs in a directory that a payload can be imported from: a store or anything else with
    /// `model-payloads/sha256/` in it, or files `<64hex>.pack`. In the order of their names.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn packs_in(directory: &Path) -> Result<Vec<PathBuf>, StoreError> {
        let layout = directory.join("model-payloads/sha256");
        let directory = if layout.is_dir() { layout.as_path() } else { directory };
        let list = || -> io::Result<Vec<PathBuf>> {
            fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect()
        };
        let mut paths = list().map_err(StoreError::io("list", directory))?;
        paths.retain(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.and_then(|name| name.strip_suffix(".pack")).is_some_and(|hex| Digest::from_hex(hex).is_ok())
        });
        paths.sort();
        Ok(paths)
    }

    /// Whether a path is in the store's payload directory, by whatever name the directory is reached.
    fn is_at_home(&self, path: &Path) -> bool {
        let identity = |path: &Path| fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
        let home = identity(&self.payload_directory());
        home.is_some() && home == identity(durable::parent(path))
    }

    fn import_in_place(
        &self,
        path: &Path,
        digest: Digest,
        expected: Option<Digest>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Imported, StoreError> {
        if let Some(expected) = expected.filter(|expected| *expected != digest) {
            return Err(StoreError::WrongContent { path: path.to_owned(), expected, found: digest });
        }
        let lock = self.lock(&digest).map_err(StoreError::io("lock the payload", path))?;
        let (file, identity) = self.open_payload(&digest, None)?;
        require_pack_size(path, identity.content.size)?;
        if identity.diagnostic.mode != 0o444 {
            file.set_permissions(Permissions::from_mode(0o444))
                .map_err(StoreError::io("set the mode of", path))?;
        }
        let payload = self.admit_locked(&digest, None, progress, &lock)?;
        let arrival = if payload.bytes_hashed() == 0 { Arrival::Present } else { Arrival::Adopted };
        Ok(Imported { payload, arrival })
    }

    /// Whether a rename can bring the file, and nobody else has a name of it.
    fn can_rename(&self, source: &Source<'_>) -> Result<bool, StoreError> {
        let directory = self.payload_directory();
        let metadata = fs::metadata(&directory).map_err(StoreError::io("inspect", &directory))?;
        Ok(metadata.dev() == source.identity.content.device && source.links == 1)
    }

    fn import_by_rename(
        &self,
        source: &Source<'_>,
        expected: Option<Digest>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Imported, StoreError> {
        let fail = |action| StoreError::io(action, source.path);
        let bytes = source.identity.content.size;
        let digest = source.hash(expected, progress)?;
        let path = self.payload_path(&digest);
        let lock = self.lock(&digest).map_err(StoreError::io("lock the payload", &path))?;
        match self.admit_locked(&digest, Some(bytes), &mut |_| (), &lock) {
            Ok(payload) => {
                source.remove()?;
                return Ok(Imported { payload, arrival: Arrival::Present });
            }
            Err(error) if is_replaceable(&error) => {}
            Err(error) => return Err(error.into()),
        }
        source.file.set_permissions(Permissions::from_mode(0o444)).map_err(fail("set the mode of"))?;
        durable::commit(&source.file, source.path, &path).map_err(fail("rename"))?;
        let (file, identity) = self.open_payload(&digest, Some(bytes))?;
        // What was hashed had this identity; the ctime is that of the rename.
        if identity.content != source.identity.content {
            let what = "it was written or replaced while it was imported".to_owned();
            return Err(AdmitError::Changed { path, what }.into());
        }
        wait_out_tick(&identity);
        Ok(Imported { payload: self.verified(digest, file, identity, bytes), arrival: Arrival::Moved })
    }

    fn import_expected(
        &self,
        source: &Source<'_>,
        digest: Digest,
        take: bool,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Imported, StoreError> {
        let mut staged = match self.stage(&digest, source.identity.content.size, progress)? {
            Staging::Present(payload) => {
                if take {
                    // It goes only if it is what is here.
                    source.hash(Some(digest), progress)?;
                }
                return Ok(Imported { payload, arrival: Arrival::Present });
            }
            Staging::Needed(staged) => staged,
        };
        let resumed = staged.resumed() > 0;
        source.copy_to(&mut staged, progress)?;
        let payload = match staged.commit() {
            // The beginning may have been another file's.
            Err(StoreError::Admit(AdmitError::DigestMismatch { .. })) if resumed => {
                return self.import_expected(source, digest, take, progress);
            }
            Err(StoreError::Admit(AdmitError::DigestMismatch { expected, found, .. })) => {
                return Err(StoreError::WrongContent { path: source.path.to_owned(), expected, found });
            }
            result => result?,
        };
        Ok(Imported { payload, arrival: Arrival::Copied })
    }

    fn import_unknown(
        &self,
        source: &Source<'_>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Imported, StoreError> {
        let mut staged = Staged::create(self, source.identity.content.size)?;
        staged.copy(&source.file, progress)?;
        let (payload, present) = self.adopt(staged)?;
        Ok(Imported { payload, arrival: if present { Arrival::Present } else { Arrival::Copied } })
    }
}

impl<'a> Source<'a> {
    /// A link is followed only when the file stays where it is.
    fn open(path: &'a Path, take: bool) -> Result<Self, StoreError> {
        let not_a_pack = |found: String| StoreError::NotAPack { path: path.to_owned(), found };
        if take && fs::symlink_metadata(path).is_ok_and(|m| m.is_symlink()) {
            return Err(not_a_pack("it is a symbolic link, which cannot be moved".to_owned()));
        }
        // NONBLOCK: a FIFO must not hang us.
        let flags = if take { OFlags::NONBLOCK | OFlags::NOFOLLOW } else { OFlags::NONBLOCK };
        let open = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path);
        let file = open.map_err(StoreError::io("open", path))?;
        let metadata = file.metadata().map_err(StoreError::io("inspect", path))?;
        if !metadata.is_file() {
            return Err(not_a_pack("it is a directory or special file".to_owned()));
        }
        require_pack_size(path, metadata.size())?;
        Ok(Self { path, file, identity: FileIdentity::of(&metadata), links: metadata.nlink() })
    }

    /// The digest of the file, which must be the expected one.
    fn hash(&self, expected: Option<Digest>, progress: &mut dyn FnMut(u64)) -> Result<Digest, StoreError> {
        wait_out_tick(&self.identity);
        let found = verify::hash(&self.file, progress).map_err(StoreError::io("read", self.path))?;
        match expected.filter(|expected| *expected != found) {
            Some(expected) => Err(StoreError::WrongContent { path: self.path.to_owned(), expected, found }),
            None => Ok(found),
        }
    }

    fn copy_to(&self, staged: &mut StagedPayload, progress: &mut dyn FnMut(u64)) -> Result<(), StoreError> {
        let mut buffer = vec![0; CHUNK_BYTES];
        while staged.written() < staged.bytes() {
            let left = staged.bytes() - staged.written();
            let wanted = usize::try_from(left).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            match self.file.read_at(&mut buffer[..wanted], staged.written()) {
                Ok(0) => {
                    let source = io::ErrorKind::UnexpectedEof.into();
                    return Err(StoreError::io("read", self.path)(source));
                }
                Ok(n) => {
                    staged.append(&buffer[..n])?;
                    progress(n as u64);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(StoreError::io("read", self.path)(e)),
            }
        }
        Ok(())
    }

    /// Removes the file that was imported, unless its name has another one meanwhile.
    fn remove(&self) -> Result<(), StoreError> {
        let metadata = fs::symlink_metadata(self.path).map_err(StoreError::io("inspect", self.path))?;
        if FileIdentity::of(&metadata).content != self.identity.content {
            let path = self.path.to_owned();
            let what = "it was imported, and has changed since: not removed".to_owned();
            return Err(AdmitError::Changed { path, what }.into());
        }
        remove(self.path)
    }
}

fn require_pack_size(path: &Path, bytes: u64) -> Result<(), StoreError> {
    if bytes > 0 && bytes.is_multiple_of(pack::ALIGNMENT) {
        return Ok(());
    }
    Err(StoreError::NotAPack { path: path.to_owned(), found: format!("it has {bytes} bytes") })
}
