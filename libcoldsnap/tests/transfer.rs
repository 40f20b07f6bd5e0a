//! Import into the store and export out of it.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use coldsnap::digest::Digest;
use coldsnap::store::{Arrival, Imported, NodeStore, Staging, StoreError};
use common::{flip_byte, names, store, store_with_payload};

fn content() -> Vec<u8> {
    (0..(9 << 20) + 4096).map(|n: u32| n.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect()
}

/// A file with a pack in it, and its digest.
fn pack(path: PathBuf) -> (PathBuf, Digest) {
    let bytes = content();
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, &bytes).unwrap();
    (path, Digest::of(&bytes))
}

fn import(
    store: &NodeStore,
    path: &Path,
    expected: Option<Digest>,
    take: bool,
) -> Result<Imported, StoreError> {
    store.import(path, expected, take, &mut |_| ())
}

#[track_caller]
fn is_here(store: &NodeStore, digest: &Digest) {
    let payload = store.admit(digest, None, &mut |_| ()).unwrap();
    assert_eq!(payload.bytes_hashed(), 0, "the record was written");
    assert_eq!(Digest::of(&fs::read(payload.path()).unwrap()), *digest);
    assert_eq!(fs::metadata(payload.path()).unwrap().mode() & 0o7777, 0o444);
    assert_eq!(names(store).len(), 2, "{:?}", names(store));
}

#[test]
fn a_file_is_copied_and_hashed_once_whether_its_digest_is_known_or_not() {
    for known in [true, false] {
        let (dir, store) = store();
        let (path, digest) = pack(dir.path().join("weights"));
        let mut hashed = 0;
        let expected = known.then_some(digest);
        let imported = store.import(&path, expected, false, &mut |n| hashed += n).unwrap();
        assert_eq!((imported.arrival, *imported.payload.digest()), (Arrival::Copied, digest));
        assert_eq!(hashed, content().len() as u64);
        is_here(&store, &digest);
        assert_eq!(Digest::of(&fs::read(&path).unwrap()), digest, "the file stays");
        assert_eq!(import(&store, &path, expected, false).unwrap().arrival, Arrival::Present);
        is_here(&store, &digest);
    }
}

#[test]
fn the_name_of_a_pack_says_its_digest() {
    let (dir, store) = store();
    let other = Digest::of(b"other");
    let (path, digest) = pack(dir.path().join(format!("share/{}.pack", other.hex())));
    match import(&store, &path, None, false) {
        Err(StoreError::WrongContent { expected, found, .. }) => {
            assert_eq!((expected, found), (other, digest))
        }
        unexpected => panic!("{unexpected:?}"),
    }
    assert!(names(&store).is_empty());
    // What is given counts more than a name.
    assert_eq!(import(&store, &path, Some(digest), false).unwrap().arrival, Arrival::Copied);
    is_here(&store, &digest);
}

#[test]
fn a_file_with_other_content_than_expected_is_not_taken() {
    for take in [true, false] {
        let (dir, store) = store();
        let (path, _) = pack(dir.path().join("weights"));
        let error = import(&store, &path, Some(Digest::of(b"other")), take).unwrap_err();
        assert_eq!(error.kind(), "DigestMismatch");
        assert!(error.to_string().contains("weights"), "{error}");
        assert!(names(&store).is_empty() && path.exists());
    }
}

#[test]
fn a_moved_file_keeps_its_inode_and_is_gone() {
    for known in [true, false] {
        let (dir, store) = store();
        let (path, digest) = pack(dir.path().join("weights"));
        let inode = fs::metadata(&path).unwrap().ino();
        let mut hashed = 0;
        let imported = store.import(&path, known.then_some(digest), true, &mut |n| hashed += n).unwrap();
        assert_eq!(imported.arrival, Arrival::Moved);
        assert_eq!((imported.payload.blob_stat().inode, hashed), (inode, content().len() as u64));
        assert!(!path.exists());
        is_here(&store, &digest);
        // A second copy of a payload that is here goes too, but only if it is one.
        let (path, _) = pack(dir.path().join("weights"));
        assert_eq!(import(&store, &path, None, true).unwrap().arrival, Arrival::Present);
        assert!(!path.exists());
        let (path, _) = pack(dir.path().join("weights"));
        flip_byte(&path);
        assert_eq!(import(&store, &path, Some(digest), true).unwrap_err().kind(), "DigestMismatch");
        assert!(path.exists());
        is_here(&store, &digest);
    }
}

#[test]
fn a_file_with_another_name_is_copied_not_shared() {
    let (dir, store) = store();
    let (path, digest) = pack(dir.path().join("weights"));
    let other = dir.path().join("other name");
    fs::hard_link(&path, &other).unwrap();
    assert_eq!(import(&store, &path, None, true).unwrap().arrival, Arrival::Copied);
    assert!(!path.exists() && other.exists());
    fs::write(&other, "changed").unwrap();
    is_here(&store, &digest);
}

#[test]
fn a_file_of_another_file_system_is_copied_and_then_removed() {
    let shm = Path::new("/dev/shm");
    let (_dir, store) = store();
    let device = |path: &Path| fs::metadata(path).unwrap().dev();
    assert_ne!(device(shm), device(store.root()), "this test needs two file systems");
    let elsewhere = tempfile::tempdir_in(shm).unwrap();
    let (path, digest) = pack(elsewhere.path().join("weights"));
    assert_eq!(import(&store, &path, None, true).unwrap().arrival, Arrival::Copied);
    assert!(!path.exists());
    is_here(&store, &digest);
}

#[test]
fn a_file_at_its_place_in_the_store_is_adopted() {
    let (dir, store) = store();
    let (path, digest) = pack(dir.path().join("weights"));
    let home = store.payload_path(&digest);
    fs::rename(&path, &home).unwrap();
    fs::set_permissions(&home, fs::Permissions::from_mode(0o640)).unwrap();
    let inode = fs::metadata(&home).unwrap().ino();
    // Also by another name of the directory.
    let link = dir.path().join("link");
    symlink(store.root(), &link).unwrap();
    let imported = import(&store, &link.join(digest.payload_path()), None, true).unwrap();
    assert_eq!((imported.arrival, imported.payload.blob_stat().inode), (Arrival::Adopted, inode));
    is_here(&store, &digest);
    assert_eq!(import(&store, &home, None, false).unwrap().arrival, Arrival::Present);
    assert_eq!(import(&store, &home, Some(Digest::of(b"")), false).unwrap_err().kind(), "DigestMismatch");
    flip_byte(&home);
    assert_eq!(import(&store, &home, None, false).unwrap_err().kind(), "DigestMismatch");
}

#[test]
fn a_link_is_followed_but_not_moved() {
    let (dir, store) = store();
    let (path, digest) = pack(dir.path().join("weights"));
    let link = dir.path().join("link");
    symlink(&path, &link).unwrap();
    assert_eq!(import(&store, &link, None, true).unwrap_err().kind(), "NotAPack");
    assert_eq!(import(&store, &link, None, false).unwrap().arrival, Arrival::Copied);
    is_here(&store, &digest);
}

#[test]
fn what_cannot_be_a_pack_is_refused_before_it_is_read() {
    let (dir, store) = store();
    let path = dir.path().join("x");
    for size in [0, 1, 4095, 4097] {
        fs::write(&path, vec![1; size]).unwrap();
        let error = import(&store, &path, None, false).unwrap_err();
        assert_eq!(error.kind(), "NotAPack");
        assert!(error.to_string().contains(&format!("{size} bytes")), "{error}");
    }
    fs::remove_file(&path).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap();
    assert_eq!(import(&store, &path, None, false).unwrap_err().kind(), "NotAPack");
    assert_eq!(import(&store, dir.path(), None, false).unwrap_err().kind(), "NotAPack");
    assert_eq!(import(&store, &dir.path().join("absent"), None, false).unwrap_err().kind(), "Io");
    assert!(names(&store).is_empty());
}

#[test]
fn the_beginning_that_an_interrupted_staging_left_is_used_or_thrown_away() {
    for right in [true, false] {
        let (dir, store) = store();
        let (path, digest) = pack(dir.path().join("weights"));
        let mut bytes = content();
        bytes[10] ^= u8::from(!right);
        match store.stage(&digest, bytes.len() as u64, &mut |_| ()).unwrap() {
            Staging::Needed(mut staged) => staged.append(&bytes[..5 << 20]).unwrap(),
            Staging::Present(_) => panic!("it is not here"),
        }
        assert_eq!(import(&store, &path, Some(digest), false).unwrap().arrival, Arrival::Copied);
        is_here(&store, &digest);
    }
}

#[test]
fn packs_of_another_store_are_found() {
    let (dir, store, digest) = store_with_payload();
    let path = store.payload_path(&digest);
    assert_eq!(NodeStore::packs_in(store.root()).unwrap(), [path.clone()]);
    assert_eq!(NodeStore::packs_in(path.parent().unwrap()).unwrap(), [path]);
    assert!(NodeStore::packs_in(dir.path()).unwrap().is_empty());
    assert_eq!(NodeStore::packs_in(&dir.path().join("absent")).unwrap_err().kind(), "Io");
}

#[test]
fn an_exported_payload_is_complete_read_only_and_can_be_imported() {
    let (dir, store, digest) = store_with_payload();
    let share = dir.path().join("share");
    let path = share.join(digest.payload_path());
    let mut hashed = 0;
    let exported = store.export(&digest, &path, &mut |n| hashed += n).unwrap();
    assert_eq!((exported.bytes, exported.present, hashed), (12288, false, 12288));
    assert_eq!(Digest::of(&fs::read(&path).unwrap()), digest);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o444);
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    let again = store.export(&digest, &path, &mut |_| ()).unwrap();
    assert!(again.present);

    let other = NodeStore::open(dir.path().join("other")).unwrap().with_reserve(0);
    for pack in NodeStore::packs_in(&share).unwrap() {
        assert_eq!(import(&other, &pack, None, false).unwrap().arrival, Arrival::Copied);
    }
    is_here(&other, &digest);
}

#[test]
fn an_export_replaces_nothing() {
    let (dir, store, digest) = store_with_payload();
    let path = dir.path().join("copy");
    for size in [1, 12288] {
        fs::write(&path, vec![1; size]).unwrap();
        let error = store.export(&digest, &path, &mut |_| ()).unwrap_err();
        assert_eq!(error.kind(), "DestinationExists");
        assert_eq!(fs::read(&path).unwrap(), vec![1; size]);
    }
    let error = store.export(&digest, dir.path(), &mut |_| ()).unwrap_err();
    assert_eq!(error.kind(), "DestinationExists");
}

#[test]
fn a_damaged_payload_is_not_exported() {
    let (dir, store, digest) = store_with_payload();
    flip_byte(&store.payload_path(&digest));
    let error = store.export(&digest, &dir.path().join("share/copy"), &mut |_| ()).unwrap_err();
    assert_eq!(error.kind(), "DigestMismatch");
    assert_eq!(fs::read_dir(dir.path().join("share")).unwrap().count(), 0);
    let error = store.export(&Digest::of(b""), &dir.path().join("copy"), &mut |_| ()).unwrap_err();
    assert_eq!(error.kind(), "PayloadMissing");
}

#[test]
fn what_a_killed_export_left_is_removed_by_the_next_one() {
    let (dir, store, digest) = store_with_payload();
    let share = dir.path().join("share");
    fs::create_dir(&share).unwrap();
    fs::write(share.join(".copy.1-2.exporting"), "x").unwrap();
    fs::write(share.join(".other.1-2.exporting"), "x").unwrap();
    store.export(&digest, &share.join("copy"), &mut |_| ()).unwrap();
    let mut left: Vec<_> = fs::read_dir(&share).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, [".other.1-2.exporting", "copy"]);
}
