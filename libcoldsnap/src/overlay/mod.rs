//! Target-local residual overlays: a capsule that was captured again on this node, used instead of the portable one on
//! this node only.
//!
//! ```text
//! <store>/overlays/<64hex of the portable descriptor>/<capture id>/overlay.json   what it is bound to
//! <store>/overlays/<64hex of the portable descriptor>/<capture id>/capsule/       overlayfs layer: the local capsule
//! <store>/overlays/<64hex of the portable descriptor>/<capture id>/changes/       overlayfs layer: changed files
//! ```
//!
//! A container that uses one has `capsule` and `changes` as the uppermost lower layers of its root, and its shim holds a
//! shared lock on the overlay's directory. An overlay appears whole by a rename and disappears by one. It holds a lease
//! on each payload and never payload bytes.

mod choose;
mod error;
mod explain;
pub mod mount;
mod stage;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags};

use crate::capsule;
use crate::digest::Digest;
use crate::durable;
use crate::format::artifact::Artifact;
use crate::format::descriptor::is_id;
use crate::format::overlay::{Overlay, portable_digest};
use crate::restore::root;
use crate::store::NodeStore;

pub use choose::{Choice, Chosen, PassedOver, choose};
pub use error::OverlayError;
pub use explain::{Binding, explain};
pub use stage::{NewOverlay, Published, publish};

const DIRECTORY: &str = "overlays";
const DOCUMENT: &str = "overlay.json";
const CAPSULE: &str = "capsule";
const CHANGES: &str = "changes";
/// Begins the owner of every lease that an overlay holds; its id follows.
const OWNER_PREFIX: &str = "overlay/";
/// Ends the name of an overlay that is being removed; such names begin with a dot.
const REMOVED: &str = ".removed";
/// Nobody but the owner may write.
const OTHERS_WRITE: u32 = 0o022;

/// The portable capsule that a container or an image holds.
#[derive(Debug, Clone)]
pub struct Portable {
    /// Its descriptor.
    pub artifact: Artifact,
    /// By which overlays name it.
    pub digest: Digest,
}

impl Portable {
    /// Parses a descriptor.
    ///
    /// # Errors
    /// It is no artifact descriptor.
    pub fn parse(artifact: &[u8]) -> Result<Self, OverlayError> {
        Ok(Self { artifact: Artifact::parse(artifact)?, digest: portable_digest(artifact)? })
    }

    /// The capsule below the root filesystem or layer `root`; `None` when there is none.
    ///
    /// # Errors
    /// It cannot be read or is malformed.
    pub fn below(root: &Path) -> Result<Option<Self>, OverlayError> {
        let bytes = root::read_optional(root, capsule::ARTIFACT_PATH)
            .map_err(|refusal| OverlayError::Unreadable(refusal.to_string()))?;
        bytes.map(|bytes| Self::parse(&bytes)).transpose()
    }

    /// The capsule that is seen through overlayfs layers, the uppermost first.
    ///
    /// # Errors
    /// There is none, it cannot be read, or it is malformed.
    pub fn in_layers(layers: &[PathBuf]) -> Result<Self, OverlayError> {
        for layer in layers {
            if let Some(found) = Self::below(layer)? {
                return Ok(found);
            }
        }
        Err(OverlayError::NoCapsule)
    }
}

/// An overlay on this node that is well formed and that nobody else could have written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalOverlay {
    /// What it is bound to.
    pub document: Overlay,
    directory: PathBuf,
}

/// What lies at the place of an overlay.
#[derive(Debug)]
pub struct Found {
    /// The overlay's id: that of the capture.
    pub id: String,
    /// The portable descriptor whose overlays lie there.
    pub portable: Digest,
    /// The overlay, or why it is never used.
    pub overlay: Result<LocalOverlay, OverlayError>,
}

/// Keeps an overlay from being removed as long as it lives.
#[derive(Debug)]
pub struct InUse {
    _directory: File,
}

impl LocalOverlay {
    /// Its id: that of the capture.
    pub fn id(&self) -> &str {
        &self.document.capture_id
    }

    /// Its directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Its layers for an overlay mount, the uppermost first.
    pub fn layers(&self) -> [PathBuf; 2] {
        [self.directory.join(CAPSULE), self.changes()]
    }

    /// The layer with the files that the recaptured container had changed, without the capsule.
    pub fn changes(&self) -> PathBuf {
        self.directory.join(CHANGES)
    }

    /// Whether a container uses it at the moment.
    ///
    /// # Errors
    /// Its directory cannot be opened.
    pub fn is_in_use(&self) -> Result<bool, OverlayError> {
        let directory = open_directory(&self.directory).map_err(OverlayError::io("open", &self.directory))?;
        Ok(try_exclusive(directory).map_err(OverlayError::io("lock", &self.directory))?.is_none())
    }

    /// Keeps it in place; `None` when it is gone.
    fn hold(&self) -> io::Result<Option<InUse>> {
        let directory = open_directory(&self.directory)?;
        rustix::io::retry_on_intr(|| rustix::fs::flock(&directory, FlockOperation::LockShared))?;
        // It may have been removed before it was locked.
        let (held, here) = (directory.metadata()?, fs::symlink_metadata(&self.directory));
        let same = here.is_ok_and(|here| (here.dev(), here.ino()) == (held.dev(), held.ino()));
        Ok(same.then_some(InUse { _directory: directory }))
    }

    fn load(directory: PathBuf, id: &str, portable: &Digest) -> Result<Self, OverlayError> {
        trusted_directory(&directory)?;
        let path = directory.join(DOCUMENT);
        trusted(&path)?;
        let document = Overlay::read(&path)?;
        let malformed = |problem: String| OverlayError::Malformed { path: directory.clone(), problem };
        if document.capture_id != id {
            return Err(malformed(format!("{DOCUMENT} is of capture {}", document.capture_id)));
        }
        if document.portable_descriptor != *portable {
            return Err(malformed(format!("{DOCUMENT} is bound to {}", document.portable_descriptor)));
        }
        match Portable::below(&directory.join(CAPSULE))? {
            Some(local) if local.artifact.capture_id == id => {}
            Some(local) => {
                return Err(malformed(format!("its capsule is of capture {}", local.artifact.capture_id)));
            }
            None => return Err(malformed("it holds no capsule".to_owned())),
        }
        if !directory.join(CHANGES).is_dir() {
            return Err(malformed(format!("it has no directory {CHANGES}")));
        }
        Ok(Self { document, directory })
    }
}

/// Whether there is any overlay on this node. Cheap: for starts that need no more.
pub fn any(store: &NodeStore) -> bool {
    fs::read_dir(root_directory(store)).is_ok_and(|mut entries| entries.next().is_some())
}

/// All overlays of this node, by portable descriptor, the newest first.
///
/// # Errors
/// A directory cannot be read.
pub fn list(store: &NodeStore) -> Result<Vec<Found>, OverlayError> {
    let mut found = Vec::new();
    for name in names_in(&root_directory(store))? {
        if let Ok(portable) = Digest::from_hex(&name) {
            found.extend(of(store, &portable)?);
        }
    }
    Ok(found)
}

/// The overlays of one portable descriptor, the newest first, then those that are unusable.
///
/// # Errors
/// A directory cannot be read.
pub fn of(store: &NodeStore, portable: &Digest) -> Result<Vec<Found>, OverlayError> {
    let directory = portable_directory(store, portable);
    let root = trusted_directory(&root_directory(store)).and_then(|()| trusted_directory(&directory));
    if let Err(OverlayError::Io { source, .. }) = &root
        && source.kind() == io::ErrorKind::NotFound
    {
        return Ok(Vec::new());
    }
    root?;
    let ids = names_in(&directory)?.into_iter().filter(|name| is_id(name));
    let mut found: Vec<Found> = ids
        .map(|id| Found {
            overlay: LocalOverlay::load(directory.join(&id), &id, portable),
            portable: *portable,
            id,
        })
        .collect();
    let age = |f: &Found| f.overlay.as_ref().map_or(0, |o| o.document.created_unix_ns);
    found.sort_by(|a, b| age(b).cmp(&age(a)).then_with(|| b.id.cmp(&a.id)));
    Ok(found)
}

/// The overlay with this id.
///
/// # Errors
/// There is none, or it is unusable.
pub fn find(store: &NodeStore, id: &str) -> Result<LocalOverlay, OverlayError> {
    let found = list(store)?.into_iter().find(|found| found.id == id);
    found.map_or_else(|| Err(OverlayError::NotFound(id.to_owned())), |found| found.overlay)
}

/// The overlay of `portable` that a container was restored from, whose root is `root`; `None` when it is the portable
/// capsule.
///
/// # Errors
/// The container's capsule cannot be read, or is neither the portable one nor that of an overlay of this node.
pub fn used_by(
    store: &NodeStore,
    portable: &Portable,
    root: &Path,
) -> Result<Option<LocalOverlay>, OverlayError> {
    // A container may remove its own capsule; it needs it no more.
    let Some(live) = Portable::below(root)? else { return Ok(None) };
    if live.digest == portable.digest {
        return Ok(None);
    }
    let id = &live.artifact.capture_id;
    let found = of(store, &portable.digest)?.into_iter().find(|found| found.id == *id);
    found.map_or_else(|| Err(OverlayError::NotFound(id.clone())), |found| found.overlay).map(Some)
}

/// Removes an overlay, usable or not, and its leases. Payloads stay.
///
/// # Errors
/// There is none with this id, a container uses it, or the file system refuses. What could not be removed after the
/// overlay disappeared is removed by the next [`sweep`].
pub fn remove(store: &NodeStore, portable: &Digest, id: &str) -> Result<(), OverlayError> {
    let directory = portable_directory(store, portable);
    let path = directory.join(id);
    let not_found = || OverlayError::NotFound(id.to_owned());
    if !is_id(id) {
        return Err(not_found());
    }
    let open = match open_directory(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(not_found()),
        open => open.map_err(OverlayError::io("open", &path))?,
    };
    let lock = try_exclusive(open).map_err(OverlayError::io("lock", &path))?;
    let Some(lock) = lock else { return Err(OverlayError::InUse(id.to_owned())) };
    let gone = directory.join(format!(".{id}{REMOVED}"));
    fs::rename(&path, &gone).map_err(OverlayError::io("remove", &path))?;
    durable::sync_directory(&directory).map_err(OverlayError::io("sync", &directory))?;
    drop(lock);
    store.release(&owner(id))?;
    fs::remove_dir_all(&gone).map_err(OverlayError::io("remove", &gone))?;
    // Other overlays of the same capsule keep it.
    let _ = fs::remove_dir(&directory);
    Ok(())
}

/// Removes what interrupted commands left: half removed overlays and leases of overlays that do not exist. `staged` says
/// whether an overlay with this id is being made.
///
/// # Errors
/// The file system refuses.
pub fn sweep(store: &NodeStore, staged: impl Fn(&str) -> bool) -> Result<(), OverlayError> {
    for name in names_in(&root_directory(store))? {
        let directory = root_directory(store).join(name);
        for name in names_in(&directory)?.iter().filter(|name| name.ends_with(REMOVED)) {
            let path = directory.join(name);
            match fs::remove_dir_all(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(OverlayError::io("remove", &path)(error));
                }
                _ => {}
            }
        }
        let _ = fs::remove_dir(&directory);
    }
    let known: Vec<String> = list(store)?.into_iter().map(|found| found.id).collect();
    let leases = store.leases()?;
    let owners = leases.iter().filter_map(|lease| lease.owner.strip_prefix(OWNER_PREFIX));
    for id in owners.filter(|id| !known.iter().any(|k| k == id) && !staged(id)) {
        store.release(&owner(id))?;
    }
    Ok(())
}

/// Owner of an overlay's leases.
pub fn owner(id: &str) -> String {
    format!("{OWNER_PREFIX}{id}")
}

fn root_directory(store: &NodeStore) -> PathBuf {
    store.root().join(DIRECTORY)
}

fn portable_directory(store: &NodeStore, portable: &Digest) -> PathBuf {
    root_directory(store).join(portable.hex())
}

fn open_directory(path: &Path) -> io::Result<File> {
    let flags = (OFlags::DIRECTORY | OFlags::NOFOLLOW).bits().cast_signed();
    fs::OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// The same descriptor, locked, when nobody else has a lock on it.
fn try_exclusive(directory: File) -> io::Result<Option<File>> {
    match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(directory)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn names_in(directory: &Path) -> Result<Vec<String>, OverlayError> {
    let list = || -> io::Result<Vec<String>> {
        fs::read_dir(directory)?.map(|e| Ok(e?.file_name().to_string_lossy().into_owned())).collect()
    };
    let mut names = match list() {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Vec::new()
        }
        names => names.map_err(OverlayError::io("list", directory))?,
    };
    names.sort_unstable();
    Ok(names)
}

/// Refuses what another user owns or may change.
fn trusted(path: &Path) -> Result<fs::Metadata, OverlayError> {
    let metadata = fs::symlink_metadata(path).map_err(OverlayError::io("look at", path))?;
    let me = rustix::process::geteuid().as_raw();
    let problem = if metadata.is_symlink() {
        Some("is a symbolic link".to_owned())
    } else if metadata.uid() != me {
        Some(format!("belongs to user {}, not to {me}", metadata.uid()))
    } else if metadata.mode() & OTHERS_WRITE != 0 {
        Some(format!("has mode {:o}", metadata.mode() & 0o7777))
    } else {
        None
    };
    match problem {
        None => Ok(metadata),
        Some(problem) => Err(OverlayError::Unsafe { path: path.to_owned(), problem }),
    }
}

fn trusted_directory(path: &Path) -> Result<(), OverlayError> {
    if trusted(path)?.is_dir() {
        return Ok(());
    }
    Err(OverlayError::Unsafe { path: path.to_owned(), problem: "is no directory".to_owned() })
}
