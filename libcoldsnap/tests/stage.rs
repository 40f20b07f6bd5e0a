//! Staging of a payload whose digest is known.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use coldsnap::digest::Digest;
use coldsnap::store::{AdmitError, Evidence, NodeStore, StagedPayload, Staging, StoreError};
use common::{flip_byte, names, store, store_with_payload};

/// 10 MiB and a page: more than two write buffers, the last one short.
fn payload() -> (Vec<u8>, Digest) {
    let bytes: Vec<u8> =
        (0..(10 << 20) + 4096).map(|n: u32| n.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    let digest = Digest::of(&bytes);
    (bytes, digest)
}

fn needed(store: &NodeStore, digest: &Digest, bytes: usize) -> Box<StagedPayload> {
    match store.stage(digest, bytes as u64, &mut |_| ()).unwrap() {
        Staging::Needed(staged) => staged,
        Staging::Present(_) => panic!("it is here already"),
    }
}

fn stagings(store: &NodeStore) -> Vec<PathBuf> {
    let directory = store.root().join("model-payloads/sha256");
    names(store).into_iter().filter(|n| n.ends_with(".materializing")).map(|n| directory.join(n)).collect()
}

#[test]
fn what_is_staged_is_admitted_under_its_digest() {
    let (_dir, store) = store();
    let (bytes, digest) = payload();
    let mut staged = needed(&store, &digest, bytes.len());
    for chunk in bytes.chunks(777_777) {
        staged.append(chunk).unwrap();
    }
    let admitted = staged.commit().unwrap();
    assert_eq!(admitted.evidence(), Evidence::FullSha256ThisOperation);
    assert_eq!(fs::read(admitted.path()).unwrap(), bytes);
    assert_eq!(fs::metadata(admitted.path()).unwrap().permissions().mode() & 0o7777, 0o444);
    assert_eq!(names(&store).len(), 2, "the pack and its record");
    let Staging::Present(again) = store.stage(&digest, bytes.len() as u64, &mut |_| ()).unwrap() else {
        panic!("it is here")
    };
    assert_eq!(again.evidence(), Evidence::CachedFullSha256);
}

#[test]
fn other_bytes_are_never_admitted_and_leave_nothing() {
    let (_dir, store) = store();
    let (mut bytes, digest) = payload();
    bytes[5_000_000] ^= 1;
    let mut staged = needed(&store, &digest, bytes.len());
    staged.append(&bytes).unwrap();
    let error = staged.commit().unwrap_err();
    assert!(matches!(error, StoreError::Admit(AdmitError::DigestMismatch { .. })), "{error}");
    assert_eq!(names(&store), [""; 0]);
}

#[test]
fn more_and_fewer_bytes_are_refused() {
    let (_dir, store) = store();
    let (bytes, digest) = payload();
    let mut staged = needed(&store, &digest, bytes.len());
    staged.append(&bytes).unwrap();
    assert_eq!(staged.append(&[0]).unwrap_err().kind(), "SizeChanged");
    staged.restart().unwrap();
    staged.append(&bytes[..8192]).unwrap();
    drop(staged);
    assert_eq!(needed(&store, &digest, bytes.len()).commit().unwrap_err().kind(), "SizeChanged");
    assert!(!store.payload_path(&digest).exists());
}

#[test]
fn the_next_stager_goes_on_where_the_interrupted_one_stopped() {
    let (_dir, store) = store();
    let (bytes, digest) = payload();
    let mut staged = needed(&store, &digest, bytes.len());
    staged.append(&bytes[..5_000_000]).unwrap();
    drop(staged);
    // Shorter leftovers of other processes, one of them longer than the payload.
    let directory = store.root().join("model-payloads/sha256");
    for (pid, len) in [(1, 4096), (2, bytes.len() + 1)] {
        fs::write(directory.join(format!(".{}.pack.{pid}-{pid}.materializing", digest.hex())), vec![0; len])
            .unwrap();
    }
    assert!(store.admit(&digest, None, &mut |_| ()).is_err(), "a partial payload is never eligible");
    assert_eq!(store.sweep().unwrap(), 0, "it is worth something for a day");

    let mut hashed = 0;
    let Staging::Needed(mut staged) = store.stage(&digest, bytes.len() as u64, &mut |n| hashed += n).unwrap()
    else {
        panic!("it is partial")
    };
    assert_eq!(staged.resumed(), 5_000_000 / 4096 * 4096);
    assert_eq!((staged.written(), hashed), (staged.resumed(), staged.resumed()));
    assert_eq!(stagings(&store).len(), 1, "the others were removed");
    let from = usize::try_from(staged.written()).unwrap();
    staged.append(&bytes[from..]).unwrap();
    assert_eq!(fs::read(staged.commit().unwrap().path()).unwrap(), bytes);
}

#[test]
fn a_wrong_beginning_can_be_given_up() {
    let (_dir, store) = store();
    let (bytes, digest) = payload();
    let mut staged = needed(&store, &digest, bytes.len());
    staged.append(&vec![9; 6_000_000]).unwrap();
    staged.restart().unwrap();
    assert_eq!(staged.written(), 0);
    staged.append(&bytes).unwrap();
    assert_eq!(fs::read(staged.commit().unwrap().path()).unwrap(), bytes);
}

#[test]
fn a_damaged_payload_is_replaced() {
    let (_dir, store, digest) = store_with_payload();
    let good = fs::read(store.payload_path(&digest)).unwrap();
    flip_byte(&store.payload_path(&digest));
    let mut staged = needed(&store, &digest, good.len());
    staged.append(&good).unwrap();
    staged.commit().unwrap();
    assert_eq!(fs::read(store.payload_path(&digest)).unwrap(), good);
}

#[test]
fn stagers_of_one_digest_converge_on_one_object() {
    let (_dir, store) = store();
    let (bytes, digest) = payload();
    let written: usize = std::thread::scope(|scope| {
        let stagers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| match store.stage(&digest, bytes.len() as u64, &mut |_| ()).unwrap() {
                    Staging::Present(payload) => usize::from(payload.digest() != &digest),
                    Staging::Needed(mut staged) => {
                        staged.append(&bytes).unwrap();
                        staged.commit().unwrap();
                        1
                    }
                })
            })
            .collect();
        stagers.into_iter().map(|stager| stager.join().unwrap()).sum()
    });
    assert_eq!(written, 1);
    assert!(store.try_stage(&digest, bytes.len() as u64, &mut |_| ()).unwrap().is_some());
}

#[test]
fn too_little_space_is_an_error_before_anything_is_written() {
    let (_dir, store) = store();
    let (bytes, digest) = payload();
    let store = store.with_reserve(u64::MAX / 2);
    let error = store.stage(&digest, bytes.len() as u64, &mut |_| ()).unwrap_err();
    assert_eq!(error.kind(), "InsufficientSpace");
    assert_eq!(names(&store), [""; 0]);
}

#[test]
fn nobody_waits_who_does_not_want_to() {
    let (_dir, store) = store();
    let (bytes, digest) = payload();
    let staged = needed(&store, &digest, bytes.len());
    assert!(store.try_stage(&digest, bytes.len() as u64, &mut |_| ()).unwrap().is_none());
    drop(staged);
    assert!(stagings(&store).is_empty(), "an empty staging file is not kept");
}
