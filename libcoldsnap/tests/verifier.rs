//! The verifier: what is served from the record, what is hashed again, what is refused.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::fs::{self, File, FileTimes};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::thread;

use coldsnap::digest::Digest;
use coldsnap::store::{AdmitError, AdmittedPayload, Evidence, NodeStore, PayloadState, RecordKept};
use common::{flip_byte, publish, record_path, store, store_with_payload};
use serde_json::{Value, json};

const BYTES: u64 = 12288;

fn admit(store: &NodeStore, digest: &Digest) -> Result<AdmittedPayload, AdmitError> {
    store.admit(digest, Some(BYTES), &mut |_| ())
}

#[track_caller]
fn assert_cached(store: &NodeStore, digest: &Digest) {
    let payload = admit(store, digest).unwrap();
    assert_eq!(payload.evidence(), Evidence::CachedFullSha256);
    assert_eq!((payload.bytes(), payload.bytes_hashed()), (BYTES, 0));
    assert_eq!(payload.record(), &RecordKept::Reused);
}

/// The record is not used, the content is hashed, the record is replaced and used from then on.
#[track_caller]
fn assert_hashed_once(store: &NodeStore, digest: &Digest) {
    let payload = admit(store, digest).unwrap();
    assert_eq!(payload.evidence(), Evidence::FullSha256ThisOperation);
    assert_eq!((payload.bytes(), payload.bytes_hashed()), (BYTES, BYTES));
    assert_eq!(payload.record(), &RecordKept::Written);
    let record = record_path(store, digest);
    let metadata = fs::symlink_metadata(&record).unwrap();
    assert!(metadata.is_file());
    assert_eq!(metadata.mode() & 0o7777, 0o600);
    assert_cached(store, digest);
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn change_record(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut record: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut record);
    fs::write(path, record.to_string()).unwrap();
}

#[test]
fn a_published_payload_is_served_from_its_record() {
    let (_dir, store, digest) = store_with_payload();
    assert_cached(&store, &digest);
    assert_eq!(store.admit(&digest, None, &mut |_| ()).unwrap().bytes(), BYTES);
    let record: Value = serde_json::from_slice(&fs::read(record_path(&store, &digest)).unwrap()).unwrap();
    assert_eq!(record["kind"], "coldsnap-payload-validation");
    assert_eq!(record["provider"], "sha256-cache-v1");
    assert_eq!(record["blob"], format!("{}.pack", digest.hex()));
    assert_eq!(record["expected"], json!({"bytes": BYTES, "sha256": digest}));
    let metadata = fs::metadata(store.payload_path(&digest)).unwrap();
    assert_eq!(record["content_identity"]["inode"], metadata.ino());
    assert_eq!(record["diagnostic_identity"]["mode"], 0o444);
}

#[test]
fn a_payload_without_a_record_is_hashed_once() {
    let (_dir, store, digest) = store_with_payload();
    fs::remove_file(record_path(&store, &digest)).unwrap();
    let mut seen = 0;
    store.admit(&digest, None, &mut |n| seen += n).unwrap();
    assert_eq!(seen, BYTES);
    assert_cached(&store, &digest);
}

#[test]
fn a_flipped_byte_with_a_restored_mtime_is_found_and_the_record_stays() {
    let (_dir, store, digest) = store_with_payload();
    let record = record_path(&store, &digest);
    let before = fs::read(&record).unwrap();
    flip_byte(&store.payload_path(&digest));
    match admit(&store, &digest) {
        Err(AdmitError::DigestMismatch { expected, found, .. }) => {
            assert_eq!(expected, digest);
            assert_ne!(found, digest);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(fs::read(&record).unwrap(), before);
    assert!(matches!(store.list().unwrap()[0].state, PayloadState::Unverified(_)));
}

#[test]
fn chmod_and_chown_cost_at_most_one_verification_and_never_invalidate() {
    let (_dir, store, digest) = store_with_payload();
    let path = store.payload_path(&digest);
    for mode in [0o400, 0o644, 0o444] {
        set_mode(&path, mode);
        assert_hashed_once(&store, &digest);
    }
    // To whom it belongs already: also that changes the ctime, and everybody may do it.
    let metadata = fs::metadata(&path).unwrap();
    chown(&path, Some(metadata.uid()), Some(metadata.gid())).unwrap();
    assert_hashed_once(&store, &digest);
    if rustix::process::geteuid().is_root() {
        chown(&path, Some(4711), Some(4712)).unwrap();
        assert_hashed_once(&store, &digest);
    }
}

#[test]
fn chmod_chown_and_rename_of_the_root_cost_nothing() {
    let (dir, store, digest) = store_with_payload();
    set_mode(store.root(), 0o700);
    assert_cached(&store, &digest);
    let metadata = fs::metadata(store.root()).unwrap();
    chown(store.root(), Some(metadata.uid()), Some(metadata.gid())).unwrap();
    if rustix::process::geteuid().is_root() {
        chown(store.root(), Some(4711), Some(4712)).unwrap();
    }
    assert_cached(&store, &digest);
    let root = dir.path().join("moved");
    fs::rename(store.root(), &root).unwrap();
    assert_cached(&NodeStore::open(&root).unwrap(), &digest);
}

#[test]
fn another_mtime_is_not_served_from_the_record() {
    let (_dir, store, digest) = store_with_payload();
    let path = store.payload_path(&digest);
    set_mode(&path, 0o644);
    File::options().write(true).open(&path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    assert_hashed_once(&store, &digest);
}

#[test]
fn another_inode_is_not_served_from_the_record() {
    let (_dir, store, digest) = store_with_payload();
    let path = store.payload_path(&digest);
    let times = FileTimes::new().set_modified(fs::metadata(&path).unwrap().modified().unwrap());
    let copy = path.with_extension("copy");
    fs::copy(&path, &copy).unwrap();
    // Equal in everything but the inode.
    set_mode(&copy, 0o644);
    File::options().write(true).open(&copy).unwrap().set_times(times).unwrap();
    set_mode(&copy, 0o444);
    fs::rename(&copy, &path).unwrap();
    assert_hashed_once(&store, &digest);
}

#[test]
fn another_size_is_not_served_from_the_record() {
    let (_dir, store, digest) = store_with_payload();
    let path = store.payload_path(&digest);
    let times = FileTimes::new().set_modified(fs::metadata(&path).unwrap().modified().unwrap());
    set_mode(&path, 0o644);
    let file = File::options().append(true).open(&path).unwrap();
    (&file).write_all(&[0; 4096]).unwrap();
    file.set_times(times).unwrap();
    assert!(matches!(admit(&store, &digest), Err(AdmitError::SizeMismatch { found: 16384, .. })));
    assert!(matches!(store.admit(&digest, None, &mut |_| ()), Err(AdmitError::DigestMismatch { .. })));
}

#[test]
fn a_second_use_reads_no_payload_byte() {
    let (_dir, store) = store();
    let digest = *publish(&store, &[&vec![3; 8 << 20]]).payload.digest();
    let before = bytes_read();
    store.admit(&digest, None, &mut |_| panic!("hashed")).unwrap();
    let read = bytes_read() - before;
    // The record, and this file of the kernel.
    assert!(read < 8192, "{read} bytes were read");
    fs::remove_file(record_path(&store, &digest)).unwrap();
    store.admit(&digest, None, &mut |_| ()).unwrap();
    assert!(bytes_read() - before > 8 << 20, "the counter counts");
}

/// Bytes that this thread has read from files.
fn bytes_read() -> u64 {
    let counters = fs::read_to_string("/proc/thread-self/io").unwrap();
    counters.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

#[test]
fn a_root_that_is_a_link_is_fine() {
    let (dir, store, digest) = store_with_payload();
    let link = dir.path().join("link");
    symlink(store.root(), &link).unwrap();
    assert_cached(&NodeStore::open(&link).unwrap(), &digest);
}

#[test]
fn records_that_are_not_kept_as_they_must_be_are_not_used() {
    let (dir, store, digest) = store_with_payload();
    let record = record_path(&store, &digest);
    for mode in [0o640, 0o604, 0o610, 0o644] {
        set_mode(&record, mode);
        assert_hashed_once(&store, &digest);
    }

    let mut file = File::options().append(true).open(&record).unwrap();
    file.write_all(b"{}").unwrap();
    assert_hashed_once(&store, &digest);

    File::options().append(true).open(&record).unwrap().write_all(&vec![b' '; 1 << 20]).unwrap();
    assert_hashed_once(&store, &digest);

    let elsewhere = dir.path().join("record");
    fs::rename(&record, &elsewhere).unwrap();
    symlink(&elsewhere, &record).unwrap();
    assert_hashed_once(&store, &digest);

    fs::write(&record, "").unwrap();
    assert_hashed_once(&store, &digest);
}

#[test]
fn records_that_say_something_else_are_not_used() {
    let (_dir, store, digest) = store_with_payload();
    let record = record_path(&store, &digest);
    for (pointer, wrong) in [
        ("/format", json!(2)),
        ("/kind", json!("other")),
        ("/provider", json!("sha256-cache-v2")),
        ("/blob", json!("other.pack")),
        ("/expected/bytes", json!(BYTES + 1)),
        ("/expected/sha256", json!(Digest::of(b"other"))),
        ("/expected/sha256", json!(digest.to_string().to_uppercase())),
        ("/content_identity/device", json!(1)),
        ("/content_identity/inode", json!(1)),
        ("/content_identity/size", json!(1)),
        ("/content_identity/mtime_ns", json!(1)),
        ("/diagnostic_identity/ctime_ns", json!(1)),
    ] {
        change_record(&record, |v| *v.pointer_mut(pointer).unwrap() = wrong);
        assert_hashed_once(&store, &digest);
    }
    // Only diagnostic, or added by another implementation.
    change_record(&record, |v| {
        v["diagnostic_identity"]["uid"] = json!(4711);
        v["diagnostic_identity"]["mode"] = json!(0o644);
        v["content_evidence"] = json!("said by another");
        v["added"] = json!({"x": 1});
    });
    assert_cached(&store, &digest);
}

#[test]
fn the_record_of_another_payload_is_not_used() {
    let (_dir, store, digest) = store_with_payload();
    let other = *publish(&store, &[&[9; 9000]]).payload.digest();
    fs::copy(record_path(&store, &other), record_path(&store, &digest)).unwrap();
    assert_hashed_once(&store, &digest);
    assert_cached(&store, &other);
}

#[test]
fn what_is_no_regular_file_is_refused() {
    let (dir, store, digest) = store_with_payload();
    let path = store.payload_path(&digest);
    let elsewhere = dir.path().join("pack");
    fs::rename(&path, &elsewhere).unwrap();
    assert!(matches!(admit(&store, &digest), Err(AdmitError::NotFound { .. })));
    symlink(&elsewhere, &path).unwrap();
    assert!(matches!(admit(&store, &digest), Err(AdmitError::NotRegular { .. })));
    assert!(matches!(store.list().unwrap()[0].state, PayloadState::Unusable(_)));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(admit(&store, &digest), Err(AdmitError::NotRegular { .. })));
    fs::remove_dir(&path).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o644.into(), 0).unwrap();
    assert!(matches!(admit(&store, &digest), Err(AdmitError::NotRegular { .. })));
}

#[test]
fn a_directory_that_is_a_link_is_refused() {
    let (dir, store, digest) = store_with_payload();
    let directory = store.root().join("model-payloads");
    let elsewhere = dir.path().join("elsewhere");
    fs::rename(&directory, &elsewhere).unwrap();
    symlink(&elsewhere, &directory).unwrap();
    assert!(matches!(admit(&store, &digest), Err(AdmitError::NotRegular { .. })));
}

#[test]
fn another_size_is_refused_without_hashing() {
    let (_dir, store, digest) = store_with_payload();
    let mut hashed = 0;
    let error = store.admit(&digest, Some(BYTES + 4096), &mut |n| hashed += n).unwrap_err();
    assert_eq!(error.kind(), "SizeChanged");
    let path = store.payload_path(&digest);
    set_mode(&path, 0o644);
    File::options().write(true).open(&path).unwrap().set_len(8192).unwrap();
    assert!(matches!(
        store.admit(&digest, Some(BYTES), &mut |n| hashed += n),
        Err(AdmitError::SizeMismatch { expected: BYTES, found: 8192, .. })
    ));
    assert_eq!(hashed, 0);
    assert!(matches!(store.admit(&digest, None, &mut |_| ()), Err(AdmitError::DigestMismatch { .. })));
}

#[test]
fn a_change_during_the_verification_is_an_error_unless_it_is_only_chmod() {
    let (_dir, store, digest) = store_with_payload();
    let path = store.payload_path(&digest);
    fs::remove_file(record_path(&store, &digest)).unwrap();
    let mut once = true;
    let payload = store
        .admit(&digest, None, &mut |_| {
            if std::mem::take(&mut once) {
                set_mode(&path, 0o640);
            }
        })
        .unwrap();
    assert_eq!(payload.bytes_hashed(), 2 * BYTES);

    fs::remove_file(record_path(&store, &digest)).unwrap();
    let error = store
        .admit(&digest, None, &mut |_| {
            let copy = path.with_extension("copy");
            fs::copy(&path, &copy).unwrap();
            fs::rename(&copy, &path).unwrap();
        })
        .unwrap_err();
    assert_eq!(error.kind(), "IdentityChanged");
    let error = store.admit(&digest, None, &mut |_| fs::remove_file(&path).unwrap_or(())).unwrap_err();
    assert_eq!(error.kind(), "IdentityChanged");
    assert!(!record_path(&store, &digest).exists());
}

#[test]
fn concurrent_admissions_hash_once() {
    let (_dir, store) = store();
    let data = vec![3; 8 << 20];
    let digest = *publish(&store, &[&data]).payload.digest();
    fs::remove_file(record_path(&store, &digest)).unwrap();
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let store = store.clone();
            thread::spawn(move || store.admit(&digest, None, &mut |_| ()).unwrap().bytes_hashed())
        })
        .collect();
    let hashed: u64 = threads.into_iter().map(|t| t.join().unwrap()).sum();
    assert_eq!(hashed, 8 << 20);
}

#[test]
fn the_open_file_is_the_verified_one() {
    let (_dir, store, digest) = store_with_payload();
    let payload = admit(&store, &digest).unwrap();
    fs::remove_file(payload.path()).unwrap();
    let mut content = Vec::new();
    std::io::Read::read_to_end(&mut payload.file(), &mut content).unwrap();
    assert_eq!(Digest::of(&content), digest);
    assert_eq!(payload.blob_stat().inode, payload.file().metadata().unwrap().ino());
}
