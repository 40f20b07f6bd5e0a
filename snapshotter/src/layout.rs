//! Where snapshots lie on disk, and the durable steps that make and remove them.
//!
//! ```text
//! <root>/metadata.redb
//! <root>/snapshots/<id>/fs        the layer: upper directory of an active snapshot, lower directory afterwards
//! <root>/snapshots/<id>/work      overlay's work directory; not in views
//! <root>/snapshots/new-<id>       being made; means nothing after a crash
//! <root>/quarantine/<id>          found at start and unknown to the metadata; never deleted by this program
//! ```

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use coldsnap::durable;

use crate::error::Error;
use crate::fault;
use crate::record::Kind;

/// The directories below one root.
#[derive(Debug)]
pub struct Layout {
    root: PathBuf,
    snapshots: PathBuf,
}

/// What the directory of snapshots holds.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Directories of snapshots.
    pub ids: Vec<u64>,
    /// Directories that were being made.
    pub temporaries: Vec<PathBuf>,
    /// Anything else.
    pub unknown: Vec<PathBuf>,
}

impl Layout {
    /// Creates the directories below `root` that are missing.
    ///
    /// # Errors
    /// When the path cannot stand in overlay mount options, or when the file system refuses.
    pub fn create(root: &Path) -> Result<Self, Error> {
        let usable = |text: &str| !text.contains([':', ',', '\\', '"']);
        if !root.is_absolute() || !root.to_str().is_some_and(usable) {
            return Err(Error::InvalidArgument(format!(
                "the root {} cannot stand in mount options: it must be absolute, UTF-8, and without : , \\ or \"",
                root.display()
            )));
        }
        let layout = Self { root: root.to_owned(), snapshots: root.join("snapshots") };
        fs::create_dir_all(durable::parent(root)).map_err(Error::io("create the directory of", root))?;
        for directory in [root, &layout.snapshots] {
            match DirBuilder::new().mode(0o700).create(directory) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                result => result.map_err(Error::io("create directory", directory))?,
            }
            durable::sync_directory(durable::parent(directory))
                .map_err(Error::io("fsync the directory of", directory))?;
        }
        Ok(layout)
    }

    /// The database file.
    pub fn metadata(&self) -> PathBuf {
        self.root.join("metadata.redb")
    }

    /// The directory of all snapshots.
    pub fn snapshots(&self) -> &Path {
        &self.snapshots
    }

    /// `snapshots/<id>`.
    pub fn directory(&self, id: u64) -> PathBuf {
        self.snapshots.join(id.to_string())
    }

    /// `snapshots/<id>/fs`.
    pub fn fs(&self, id: u64) -> PathBuf {
        self.directory(id).join("fs")
    }

    /// `snapshots/<id>/work`.
    pub fn work(&self, id: u64) -> PathBuf {
        self.directory(id).join("work")
    }

    /// Makes the directories of a new snapshot, durably. `parent` gives the owner of `fs`; its mode is 0755
    /// as in containerd's overlayfs snapshotter, because containers that run as another user must enter it.
    ///
    /// # Errors
    /// Those of the file system; nothing is left then.
    pub fn make(&self, id: u64, kind: Kind, parent: Option<u64>) -> Result<(), Error> {
        let temporary = self.snapshots.join(format!("new-{id}"));
        let result = self.make_in(&temporary, id, kind, parent);
        if result.is_err() {
            let _ = fs::remove_dir_all(&temporary);
            let _ = fs::remove_dir_all(self.directory(id));
        }
        result
    }

    fn make_in(&self, temporary: &Path, id: u64, kind: Kind, parent: Option<u64>) -> Result<(), Error> {
        let make = |path: &Path, mode: u32| {
            DirBuilder::new().mode(mode).create(path).map_err(Error::io("create directory", path))?;
            // The umask may have removed bits.
            fs::set_permissions(path, Permissions::from_mode(mode)).map_err(Error::io("chmod", path))
        };
        make(temporary, 0o700)?;
        let upper = temporary.join("fs");
        make(&upper, 0o755)?;
        if kind == Kind::Active {
            make(&temporary.join("work"), 0o711)?;
        }
        if let Some(parent) = parent {
            let below = self.fs(parent);
            let owner =
                fs::symlink_metadata(&below).map_err(Error::io("stat the parent's directory", &below))?;
            std::os::unix::fs::lchown(&upper, Some(owner.uid()), Some(owner.gid()))
                .map_err(Error::io("chown", &upper))?;
        }
        fault::point("make.temporary");
        let directory = self.directory(id);
        fs::rename(temporary, &directory).map_err(Error::io("rename to", &directory))?;
        // One fsync for all of it: the file systems that carry overlays write what was created inside before the
        // name appears or together with it, and each further call costs a flush of the disk.
        durable::sync_directory(&self.snapshots).map_err(Error::io("fsync", &self.snapshots))?;
        fault::point("make.renamed");
        Ok(())
    }

    /// Writes everything that the layer holds to disk.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn sync(&self, id: u64) -> Result<(), Error> {
        let path = self.fs(id);
        let directory = File::open(&path).map_err(Error::io("open", &path))?;
        // One call for the file system instead of one per file: a layer has thousands of files, and
        // whatever else is dirty has to be written sooner or later anyhow.
        rustix::fs::syncfs(&directory).map_err(Error::io("write to disk", &path))
    }

    /// Deletes the directory of a snapshot and everything in it; that there is none is not an error.
    ///
    /// # Errors
    /// Those of the file system; a part may be left.
    pub fn delete(&self, id: u64) -> Result<(), Error> {
        delete_tree(&self.directory(id))
    }

    /// What lies in the directory of snapshots.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn scan(&self) -> Result<Found, Error> {
        let mut found = Found::default();
        let reading = || Error::io("read directory", &self.snapshots);
        for entry in fs::read_dir(&self.snapshots).map_err(reading())? {
            let entry = entry.map_err(reading())?;
            let name = entry.file_name();
            let name = name.to_str().unwrap_or_default();
            match name.parse() {
                Ok(id) if name == u64::to_string(&id) => found.ids.push(id),
                _ if name.starts_with("new-") => found.temporaries.push(entry.path()),
                _ => found.unknown.push(entry.path()),
            }
        }
        Ok(found)
    }

    /// Deletes a directory of a snapshot that was never recorded: one without any content.
    /// Answers false, and deletes nothing, when there is content.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn delete_if_empty(&self, id: u64) -> Result<bool, Error> {
        for part in [self.fs(id), self.work(id), self.directory(id)] {
            match fs::remove_dir(&part) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => return Ok(false),
                Err(e) => return Err(Error::io("remove directory", &part)(e)),
            }
        }
        Ok(true)
    }

    /// Sets a directory of a snapshot aside, where nothing deletes it. Answers where it is.
    ///
    /// # Errors
    /// Those of the file system, also when that id was set aside before.
    pub fn quarantine(&self, id: u64) -> Result<PathBuf, Error> {
        let directory = self.root.join("quarantine");
        match DirBuilder::new().mode(0o700).create(&directory) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            result => result.map_err(Error::io("create directory", &directory))?,
        }
        let target = directory.join(id.to_string());
        fs::rename(self.directory(id), &target).map_err(Error::io("set aside to", &target))?;
        for changed in [&directory, &self.snapshots, &self.root] {
            durable::sync_directory(changed).map_err(Error::io("fsync", changed))?;
        }
        Ok(target)
    }

    /// Ids that were set aside.
    pub fn quarantined(&self) -> Vec<u64> {
        let entries = fs::read_dir(self.root.join("quarantine")).into_iter().flatten().flatten();
        entries.filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
    }
}

/// Deletes a tree; that there is none is not an error.
///
/// # Errors
/// Those of the file system; a part may be left.
pub fn delete_tree(path: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result.map_err(Error::io("delete", path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_have_upstream_modes() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::create(&dir.path().join("root")).unwrap();
        let mode = |path: PathBuf| fs::metadata(path).unwrap().mode() & 0o7777;
        layout.make(1, Kind::Active, None).unwrap();
        assert_eq!(mode(layout.fs(1)), 0o755);
        assert_eq!(mode(layout.work(1)), 0o711);
        assert_eq!(mode(layout.directory(1)), 0o700);
        std::os::unix::fs::chown(layout.fs(1), Some(12), Some(34)).unwrap();
        layout.make(2, Kind::View, Some(1)).unwrap();
        assert!(!layout.work(2).exists());
        let owner = fs::metadata(layout.fs(2)).unwrap();
        assert_eq!((owner.uid(), owner.gid()), (12, 34));
    }

    #[test]
    fn a_failed_make_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::create(dir.path()).unwrap();
        assert!(layout.make(2, Kind::Active, Some(1)).is_err());
        assert_eq!(layout.scan().unwrap(), Found::default());
    }

    #[test]
    fn scan_tells_snapshots_from_the_rest() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::create(dir.path()).unwrap();
        layout.make(10, Kind::Active, None).unwrap();
        for name in ["new-11", "007", "x"] {
            fs::create_dir(layout.snapshots().join(name)).unwrap();
        }
        let mut found = layout.scan().unwrap();
        found.unknown.sort();
        assert_eq!(found.ids, [10]);
        assert_eq!(found.temporaries, [layout.snapshots().join("new-11")]);
        assert_eq!(found.unknown, [layout.snapshots().join("007"), layout.snapshots().join("x")]);
    }

    #[test]
    fn only_empty_directories_are_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::create(dir.path()).unwrap();
        layout.make(1, Kind::Active, None).unwrap();
        layout.make(2, Kind::Active, None).unwrap();
        fs::write(layout.fs(2).join("file"), "x").unwrap();
        assert!(layout.delete_if_empty(1).unwrap());
        assert!(!layout.delete_if_empty(2).unwrap());
        let aside = layout.quarantine(2).unwrap();
        assert_eq!(fs::read(aside.join("fs/file")).unwrap(), b"x");
        assert_eq!(layout.quarantined(), [2]);
        assert_eq!(layout.scan().unwrap(), Found::default());
    }

    #[test]
    fn roots_that_break_mount_options_are_refused() {
        for root in ["relative", "/tmp/a:b", "/tmp/a,b", "/tmp/a\\b"] {
            assert!(Layout::create(Path::new(root)).is_err(), "{root}");
        }
    }
}
