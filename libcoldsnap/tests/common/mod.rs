//! What the tests of the store share.

#![allow(clippy::unwrap_used, dead_code, reason = "helpers of tests, each used by some of them")]

use std::fs::{self, File, FileTimes};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use coldsnap::digest::Digest;
use coldsnap::store::{NodeStore, PublishedPack};
use tempfile::TempDir;

pub fn store() -> (TempDir, NodeStore) {
    let dir = tempfile::tempdir().unwrap();
    let store = NodeStore::open(dir.path().join("store")).unwrap().with_reserve(0);
    (dir, store)
}

pub fn publish(store: &NodeStore, extents: &[&[u8]]) -> PublishedPack {
    let extents: Vec<Vec<&[u8]>> = extents.iter().map(|extent| vec![*extent]).collect();
    store.publish_pack(&extents, &mut |_| ()).unwrap()
}

/// A store that holds one verified payload of 12 KiB.
pub fn store_with_payload() -> (TempDir, NodeStore, Digest) {
    let (dir, store) = store();
    let digest = *publish(&store, &[&[7; 5000], &[1; 4096]]).payload.digest();
    (dir, store, digest)
}

pub fn record_path(store: &NodeStore, digest: &Digest) -> PathBuf {
    PathBuf::from(format!("{}.coldsnap-validation.json", store.payload_path(digest).display()))
}

/// Changes one byte and puts mode and mtime back.
pub fn flip_byte(path: &Path) {
    let before = fs::metadata(path).unwrap();
    let mut bytes = fs::read(path).unwrap();
    bytes[100] ^= 1;
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
    let file = File::options().write(true).open(path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).unwrap();
    file.set_times(FileTimes::new().set_modified(before.modified().unwrap())).unwrap();
    fs::set_permissions(path, before.permissions()).unwrap();
    let after = fs::metadata(path).unwrap();
    assert_eq!(
        (after.mtime(), after.mtime_nsec(), after.ino()),
        (before.mtime(), before.mtime_nsec(), before.ino())
    );
}

/// All names in the payload directory but the locks.
pub fn names(store: &NodeStore) -> Vec<String> {
    let directory = store.root().join("model-payloads/sha256");
    let mut names: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.ends_with(".lock"))
        .collect();
    names.sort();
    names
}
