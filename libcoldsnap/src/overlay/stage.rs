//! From a finished capture of a restored container to an overlay of this node.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use rustix::fs::XattrFlags;

use super::{
    CAPSULE, CHANGES, DOCUMENT, LocalOverlay, OverlayError, Portable, owner, portable_directory,
    root_directory, trusted_directory,
};
use crate::capsule;
use crate::digest::Digest;
use crate::durable;
use crate::format::overlay::{FORMAT, KIND, Overlay, STATE, Target};
use crate::store::NodeStore;

/// Marks a directory of an overlayfs layer that hides what lower layers have there.
const OPAQUE: &str = "trusted.overlay.opaque";
/// How often the rename is tried: a sweep may remove the directory that was just made because it is empty.
const RENAMES: u32 = 3;

/// An overlay that is being made: a directory on the store's file system that nobody else knows.
#[derive(Debug)]
pub struct NewOverlay {
    directory: PathBuf,
}

/// What became of a new overlay.
#[derive(Debug)]
pub enum Published {
    /// It is on this node.
    Stored(LocalOverlay),
    /// Its capsule equals the portable one; nothing was stored.
    Redundant,
}

impl NewOverlay {
    /// Begins one in `directory`, which must not exist. `root` is the root of the container that was captured: the layers'
    /// roots get its mode and owner, as the uppermost layer decides about both.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn begin(directory: PathBuf, root: &Path) -> Result<Self, OverlayError> {
        let like = fs::metadata(root).map_err(OverlayError::io("look at", root))?;
        make_directory(&directory)?;
        let new = Self { directory };
        for layer in [new.capsule(), new.changes()] {
            make_directory(&layer)?;
            chown(&layer, Some(like.uid()), Some(like.gid())).map_err(OverlayError::io("chown", &layer))?;
            set_mode(&layer, like.mode() & 0o7777)?;
        }
        Ok(new)
    }

    /// The layer that gets the capsule's tree (`opt/coldsnap/capsule` below it).
    pub fn capsule(&self) -> PathBuf {
        self.directory.join(CAPSULE)
    }

    /// The layer that gets the changed files.
    pub fn changes(&self) -> PathBuf {
        self.directory.join(CHANGES)
    }
}

/// Compares the finished capsule with the portable one and stores it, durably, with a lease on each payload.
///
/// # Errors
/// The capsule has other payload objects than the portable one, a payload is not admitted, or the file system refuses.
/// Nothing is stored then.
pub fn publish(
    store: &NodeStore,
    new: NewOverlay,
    portable: &Portable,
    target: Target,
    created_unix_ns: u64,
) -> Result<Published, OverlayError> {
    let local = Portable::below(&new.capsule())?.ok_or(OverlayError::NoCapsule)?;
    let artifact = local.artifact;
    let document = Overlay {
        format: FORMAT,
        kind: KIND.to_owned(),
        state: STATE.to_owned(),
        capture_id: artifact.capture_id.clone(),
        created_unix_ns,
        portable_descriptor: portable.digest,
        snapshot_driver: artifact.driver_ref(),
        target,
        payloads: artifact.weights.model_payloads.map(|payloads| payloads.objects).unwrap_or_default(),
        capsule_objects: artifact.capsule.objects,
    };
    document.check_against(&portable.artifact, &portable.digest)?;
    let same_replay = artifact.weights.recovery.map(|r| r.replay_plan)
        == portable.artifact.weights.recovery.as_ref().map(|r| r.replay_plan.clone());
    if document.is_redundant(&portable.artifact) && same_replay {
        return Ok(Published::Redundant);
    }
    normalise(&new.capsule())?;
    let opaque = new.capsule().join(capsule::CAPSULE_DIR);
    rustix::fs::setxattr(&opaque, OPAQUE, b"y", XattrFlags::empty())
        .map_err(|errno| OverlayError::io("mark as opaque", &opaque)(errno.into()))?;
    document.write_new(&new.directory.join(DOCUMENT))?;

    let id = document.capture_id.clone();
    let owner = owner(&id);
    let stored = lease_all(store, &document, &owner).and_then(|()| {
        // Whole trees: one call instead of an fsync of every file and directory.
        let open = fs::File::open(&new.directory).map_err(OverlayError::io("open", &new.directory))?;
        rustix::fs::syncfs(&open)
            .map_err(|errno| OverlayError::io("sync the file system of", &new.directory)(errno.into()))?;
        move_into_place(store, &new.directory, &portable.digest, &id)
    });
    match stored {
        Ok(directory) => Ok(Published::Stored(LocalOverlay { document, directory })),
        Err(error) => {
            // A lease without an overlay is released by the next sweep, if not now.
            let _ = store.release(&owner);
            Err(error)
        }
    }
}

fn lease_all(store: &NodeStore, document: &Overlay, owner: &str) -> Result<(), OverlayError> {
    for object in &document.payloads {
        let payload = store
            .admit(&object.sha256, Some(object.bytes), &mut |_| {})
            .map_err(|source| OverlayError::Payload { digest: object.sha256, source })?;
        store.lease(&payload, owner)?;
    }
    Ok(())
}

fn move_into_place(
    store: &NodeStore,
    from: &Path,
    portable: &Digest,
    id: &str,
) -> Result<PathBuf, OverlayError> {
    let root = root_directory(store);
    let directory = portable_directory(store, portable);
    let to = directory.join(id);
    let mut tried = 0;
    loop {
        for path in [&root, &directory] {
            match make_directory(path) {
                Err(OverlayError::Io { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => {}
                made => made?,
            }
            trusted_directory(path)?;
        }
        tried += 1;
        match fs::rename(from, &to) {
            Ok(()) => break,
            Err(error) if error.kind() == io::ErrorKind::NotFound && tried < RENAMES => {}
            Err(error) => return Err(OverlayError::io("move the finished overlay to", &to)(error)),
        }
    }
    for path in [&directory, &root, &store.root().to_owned()] {
        durable::sync_directory(path).map_err(OverlayError::io("sync", path))?;
    }
    Ok(to)
}

/// Owner and modes as in a capsule layer of an image, whatever the umask was.
fn normalise(layer: &Path) -> Result<(), OverlayError> {
    fn below(directory: &Path) -> io::Result<()> {
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            let is_directory = fs::symlink_metadata(&path)?.is_dir();
            chown(&path, Some(0), Some(0))?;
            let mode = if is_directory { 0o755 } else { 0o644 };
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
            if is_directory {
                below(&path)?;
            }
        }
        Ok(())
    }
    below(layer).map_err(OverlayError::io("set owner and modes in", layer))
}

fn make_directory(path: &Path) -> Result<(), OverlayError> {
    fs::DirBuilder::new().mode(0o700).create(path).map_err(OverlayError::io("make the directory", path))
}

fn set_mode(path: &Path, mode: u32) -> Result<(), OverlayError> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(OverlayError::io("set the mode of", path))
}
