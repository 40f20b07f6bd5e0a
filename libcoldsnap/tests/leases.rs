//! Leases keep a payload; listing shows them.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;

use coldsnap::store::{NodeStore, PayloadState, StoreError};
use common::{publish, store, store_with_payload};

#[test]
fn one_lease_per_payload_and_owner() {
    let (_dir, store, digest) = store_with_payload();
    let payload = store.admit(&digest, None, &mut |_| ()).unwrap();
    let other = publish(&store, &[&[1; 10]]).payload;
    for owner in ["k8s.io/12/../a b", "k8s.io/12/../a b", "second"] {
        store.lease(&payload, owner).unwrap();
    }
    store.lease(&other, "second").unwrap();
    let leases = store.leases().unwrap();
    assert_eq!(leases.len(), 3);
    assert!(leases.iter().any(|l| l.owner == "k8s.io/12/../a b" && l.digest == digest));
    let counts: Vec<_> = store.list().unwrap().into_iter().map(|p| (p.digest == digest, p.leases)).collect();
    assert!(counts.contains(&(true, 2)) && counts.contains(&(false, 1)));

    assert_eq!(store.release("second").unwrap(), 2);
    assert_eq!(store.release("second").unwrap(), 0);
    assert_eq!(store.leases().unwrap().len(), 1);
    assert_eq!(store.release("k8s.io/12/../a b").unwrap(), 1);
    assert_eq!(fs::read_dir(store.root().join("leases")).unwrap().count(), 0);
}

#[test]
fn lease_files_are_private_and_survive_reopening() {
    let (_dir, store, digest) = store_with_payload();
    let payload = store.admit(&digest, None, &mut |_| ()).unwrap();
    store.lease(&payload, "owner").unwrap();
    let file = fs::read_dir(store.root().join("leases")).unwrap().next().unwrap().unwrap();
    assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o600);
    assert_eq!(NodeStore::open(store.root()).unwrap().leases().unwrap()[0].owner, "owner");
}

#[test]
fn a_removed_or_replaced_payload_cannot_be_leased() {
    let (_dir, store, digest) = store_with_payload();
    let payload = store.admit(&digest, None, &mut |_| ()).unwrap();
    let copy = payload.path().with_extension("copy");
    fs::copy(payload.path(), &copy).unwrap();
    fs::rename(&copy, payload.path()).unwrap();
    assert!(matches!(store.lease(&payload, "owner"), Err(StoreError::PayloadGone { .. })));
    fs::remove_file(payload.path()).unwrap();
    assert!(matches!(store.lease(&payload, "owner"), Err(StoreError::PayloadGone { .. })));
    assert!(matches!(store.lease(&payload, ""), Err(StoreError::NoOwner { .. })));
    assert!(store.leases().unwrap().is_empty());
}

#[test]
fn a_broken_lease_is_an_error_and_still_counts() {
    let (_dir, store, digest) = store_with_payload();
    let payload = store.admit(&digest, None, &mut |_| ()).unwrap();
    store.lease(&payload, "owner").unwrap();
    let file = fs::read_dir(store.root().join("leases")).unwrap().next().unwrap().unwrap();
    fs::write(file.path(), "{}").unwrap();
    assert!(matches!(store.leases(), Err(StoreError::BadLease { .. })));
    assert_eq!(store.list().unwrap()[0].leases, 1);
    assert_eq!(store.release("owner").unwrap(), 1);
}

#[test]
fn an_empty_store_lists_nothing() {
    let (dir, store) = store();
    assert!(store.list().unwrap().is_empty() && store.leases().unwrap().is_empty());
    assert!(NodeStore::at(dir.path().join("absent")).list().unwrap().is_empty());
    assert_eq!(store.release("nobody").unwrap(), 0);
    assert_eq!(store.sweep().unwrap(), 0);
}

#[test]
fn canonical_paths_are_recognised() {
    let (_dir, store, digest) = store_with_payload();
    let path = store.payload_path(&digest);
    let (found, found_digest) = NodeStore::of_payload_path(&path).unwrap();
    assert_eq!((found.root(), found_digest), (store.root(), digest));
    let (found, _) = NodeStore::of_payload_path(&digest.payload_path()).unwrap();
    assert_eq!(found.payload_path(&digest), std::path::Path::new(".").join(digest.payload_path()));
    let text = path.display().to_string();
    for bad in [
        text.replace(&digest.hex(), &digest.hex().to_uppercase()),
        text.replace(".pack", ".bin"),
        text.replace("sha256/", "sha512/"),
        text.replace("model-payloads", "payloads"),
        format!("{}.pack", digest.hex()),
        format!("sha256/{}.pack", digest.hex()),
    ] {
        assert!(NodeStore::of_payload_path(bad.as_ref()).is_none(), "{bad}");
    }
    assert_eq!(store.list().unwrap()[0].state, PayloadState::Verified);
}
