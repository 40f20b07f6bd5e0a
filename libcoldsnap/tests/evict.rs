//! What leaves the store, what stays, and in which order.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::thread;

use coldsnap::digest::Digest;
use coldsnap::store::{
    AdmitError, DEFAULT_RESERVE, Evicted, Eviction, NodeStore, StoreError, Usage, Watermark, Watermarks,
};
use common::{publish, record_path, store};
use tempfile::TempDir;

const PACK: u64 = 4096;

/// A store with `n` payloads of one page each, verified in this order.
fn store_with(n: u8) -> (TempDir, NodeStore, Vec<Digest>) {
    let (dir, store) = store();
    let digests = (0..n).map(|n| *publish(&store, &[&[n + 1; 100]]).payload.digest()).collect();
    (dir, store, digests)
}

fn lease(store: &NodeStore, digest: &Digest, owner: &str) {
    let payload = store.admit(digest, None, &mut |_| ()).unwrap();
    store.lease(&payload, owner).unwrap();
}

fn bytes(high: u64, low: u64) -> Watermarks {
    Watermarks::new(Watermark::Bytes(high), Watermark::Bytes(low)).unwrap()
}

fn evict(store: &NodeStore, high: u64, low: u64) -> Evicted {
    store.evict(&Eviction::Watermarks(bytes(high, low)), false).unwrap()
}

fn gone(evicted: &Evicted) -> Vec<Digest> {
    evicted.payloads.iter().map(|(digest, _)| *digest).collect()
}

/// Everything in the store but directories, locks and what the names of `kept` begin with.
fn files_about(store: &NodeStore, digest: &Digest) -> Vec<String> {
    let mut found = Vec::new();
    for directory in ["model-payloads/sha256", "leases", "pins", "usage"] {
        let Ok(entries) = fs::read_dir(store.root().join(directory)) else { continue };
        found.extend(entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()));
    }
    found.retain(|name| name.contains(&digest.hex()) && !name.ends_with(".lock"));
    found
}

#[test]
fn nothing_is_evicted_up_to_the_high_watermark() {
    let (_dir, store, digests) = store_with(4);
    assert_eq!(evict(&store, 4 * PACK, 0), Evicted::default());
    assert_eq!(store.list().unwrap().len(), digests.len());
}

#[test]
fn above_the_high_watermark_the_store_comes_down_to_the_low_one() {
    let (_dir, store, digests) = store_with(5);
    let evicted = evict(&store, 5 * PACK - 1, 2 * PACK);
    assert_eq!((evicted.bytes, evicted.missing), (3 * PACK, 0));
    assert_eq!(gone(&evicted), digests[..3], "of those never leased, the first verified go first");
    assert_eq!(store.usage().unwrap().payload_bytes, 2 * PACK);
    for digest in &digests[..3] {
        assert!(files_about(&store, digest).is_empty());
        assert!(matches!(store.admit(digest, None, &mut |_| ()), Err(AdmitError::NotFound { .. })));
    }
}

#[test]
fn the_least_recently_leased_goes_first() {
    let (_dir, store, digests) = store_with(4);
    for n in [2, 0, 3, 1] {
        lease(&store, &digests[n], &format!("owner {n}"));
    }
    // Given back in another order: also that is use.
    for n in [1, 2, 3, 0] {
        store.release(&format!("owner {n}")).unwrap();
    }
    let evicted = evict(&store, 0x3000, 0);
    assert_eq!(gone(&evicted), [1, 2, 3, 0].map(|n| digests[n]));

    let (_dir, store, digests) = store_with(3);
    lease(&store, &digests[0], "a");
    lease(&store, &digests[0], "b");
    store.release("a").unwrap();
    store.release("b").unwrap();
    assert_eq!(gone(&evict(&store, 2 * PACK, 2 * PACK - 1)), digests[1..], "never leased before leased");
}

#[test]
fn a_leased_payload_is_never_evicted() {
    let (_dir, store, digests) = store_with(3);
    lease(&store, &digests[0], "snapshot/a");
    let evicted = evict(&store, 1, 0);
    assert_eq!(gone(&evicted), digests[1..]);
    assert_eq!(evicted.missing, PACK);
    assert!(gone(&store.evict(&Eviction::AllUnused, false).unwrap()).is_empty());
    store.admit(&digests[0], None, &mut |_| ()).unwrap();
    store.release("snapshot/a").unwrap();
    assert_eq!(gone(&evict(&store, 1, 0)), digests[..1]);
}

#[test]
fn a_lease_that_cannot_be_read_keeps_its_payload_too() {
    let (_dir, store, digests) = store_with(1);
    lease(&store, &digests[0], "a");
    let file = fs::read_dir(store.root().join("leases")).unwrap().next().unwrap().unwrap().path();
    fs::write(&file, "not a lease").unwrap();
    assert!(evict(&store, 1, 0).payloads.is_empty());
    match store.remove(&digests[0], true) {
        Err(StoreError::Leased { owners, .. }) => assert_eq!(owners, [file.display().to_string()]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_pinned_payload_is_never_evicted() {
    let (_dir, store, digests) = store_with(3);
    assert!(store.pin(&digests[1], Some("the only copy")).unwrap());
    assert_eq!(gone(&evict(&store, 1, 0)), [digests[0], digests[2]]);
    assert!(gone(&store.evict(&Eviction::AllUnused, false).unwrap()).is_empty());
    assert!(store.unpin(&digests[1]).unwrap());
    assert_eq!(gone(&store.evict(&Eviction::AllUnused, false).unwrap()), [digests[1]]);
}

#[test]
fn a_payload_that_is_being_used_is_not_evicted() {
    let (_dir, store, digests) = store_with(1);
    let evicted = thread::scope(|scope| {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let (digest, verifier) = (digests[0], store.clone());
        fs::remove_file(record_path(&store, &digest)).unwrap();
        scope.spawn(move || {
            verifier
                .admit(&digest, None, &mut |_| {
                    sender.send(()).unwrap();
                    wait.recv().unwrap();
                })
                .unwrap();
        });
        receiver.recv().unwrap();
        let evicted = evict(&store, 1, 0);
        done.send(()).unwrap();
        evicted
    });
    assert_eq!((evicted.payloads.len(), evicted.missing), (0, PACK));
}

#[test]
fn a_dry_run_says_what_would_go_and_removes_nothing() {
    let (_dir, store, digests) = store_with(3);
    let eviction = Eviction::Watermarks(bytes(PACK, PACK - 1));
    let would = store.evict(&eviction, true).unwrap();
    assert_eq!(store.list().unwrap().len(), 3);
    assert_eq!(store.evict(&eviction, false).unwrap(), would);
    assert_eq!(gone(&would), digests);
}

#[test]
fn a_payload_that_cannot_be_removed_does_not_keep_the_others() {
    let (_dir, store, digests) = store_with(2);
    // Something that unlink refuses at the record's path.
    fs::remove_file(record_path(&store, &digests[0])).unwrap();
    fs::create_dir(record_path(&store, &digests[0])).unwrap();
    let evicted = store.evict(&Eviction::AllUnused, false).unwrap();
    assert_eq!(gone(&evicted), [digests[1]]);
    assert_eq!(evicted.failures.len(), 1);
    assert!(evicted.failures[0].reason.contains("coldsnap-validation.json"), "{evicted:?}");
}

#[test]
fn room_is_made_only_by_a_store_with_watermarks() {
    let (_dir, store, digests) = store_with(3);
    let payload_bytes = 3 * PACK;
    store.make_room(PACK).unwrap();
    assert_eq!(store.list().unwrap().len(), 3);
    let store = store.with_watermarks(Some(bytes(payload_bytes, 2 * PACK)));
    store.make_room(0).unwrap();
    assert_eq!(store.list().unwrap().len(), 3);
    // With the page that is to come the store would be above the high watermark.
    store.make_room(PACK).unwrap();
    let left: Vec<_> = store.list().unwrap().iter().map(|p| p.digest).collect();
    assert_eq!(left, [digests[2]]);
}

#[test]
fn a_publication_and_a_staging_make_room() {
    let (_dir, store, digests) = store_with(3);
    let store = store.with_watermarks(Some(bytes(3 * PACK, 2 * PACK)));
    publish(&store, &[&[9; 100]]);
    let left = store.list().unwrap();
    assert!(left.len() == 2 && left.iter().any(|p| p.digest == digests[2]), "{left:?}");
    let page = [8; 4096];
    for _ in 0..2 {
        if let coldsnap::store::Staging::Needed(mut staged) =
            store.stage(&Digest::of(&page), PACK, &mut |_| ()).unwrap()
        {
            staged.append(&page).unwrap();
            staged.commit().unwrap();
        }
    }
    assert_eq!(store.list().unwrap().len(), 3);
}

#[test]
fn when_eviction_would_not_help_nothing_is_evicted() {
    let (_dir, store, _) = store_with(2);
    let store = store.with_reserve(u64::MAX / 2).with_watermarks(Some(bytes(u64::MAX, 1)));
    match store.make_room(PACK) {
        Err(StoreError::InsufficientSpace { needed: PACK, reserve, .. }) => assert_eq!(reserve, u64::MAX / 2),
        other => panic!("{other:?}"),
    }
    assert_eq!(store.list().unwrap().len(), 2);
    assert_ne!(DEFAULT_RESERVE, 0);
}

#[test]
fn the_reserve_is_kept_by_evicting_as_little_as_needed() {
    // A file system that nobody else writes to meanwhile.
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let store = NodeStore::open(dir.path()).unwrap().with_reserve(0);
    let size = 16 << 20;
    let packs: Vec<_> = (1..4).map(|n| *publish(&store, &[&vec![n; size]]).payload.digest()).collect();
    let Usage { filesystem_bytes, filesystem_used, .. } = store.usage().unwrap();
    let available = filesystem_bytes - filesystem_used;
    // Half a pack too little.
    let reserve = available + (size as u64) / 2;
    let store = store.with_reserve(reserve).with_watermarks(Some(bytes(u64::MAX, 0)));
    store.make_room(0).unwrap();
    let left: Vec<_> = store.list().unwrap().iter().map(|p| p.digest).collect();
    assert!(left.len() == 2 && !left.contains(&packs[0]), "{left:?}");
}

#[test]
fn removal_refuses_leased_and_pinned_payloads_and_says_who_holds_them() {
    let (_dir, store, digests) = store_with(2);
    let digest = digests[0];
    lease(&store, &digest, "snapshot/default/1/web");
    store.pin(&digest, Some("demo")).unwrap();
    let error = store.remove(&digest, true).unwrap_err();
    assert_eq!(error.kind(), "Leased");
    assert!(error.to_string().contains("snapshot/default/1/web"), "{error}");
    store.release("snapshot/default/1/web").unwrap();
    let error = store.remove(&digest, false).unwrap_err();
    assert_eq!(error.kind(), "Pinned");
    assert!(error.to_string().contains("demo"), "{error}");
    assert_eq!(store.remove(&digest, true).unwrap(), PACK);
    assert!(files_about(&store, &digest).is_empty());
    assert_eq!(store.remove(&digest, true).unwrap_err().kind(), "PayloadMissing");
    assert_eq!(store.remove(&digests[1], false).unwrap(), PACK);
    let absent = Digest::of(b"absent");
    assert_eq!(store.remove(&absent, false).unwrap_err().kind(), "PayloadMissing");
    let lock = store.root().join(format!("model-payloads/sha256/.{}.pack.lock", absent.hex()));
    assert!(!lock.exists(), "no lock is left for what never was here");
}

#[test]
fn a_payload_that_comes_again_is_new() {
    let (_dir, store, digests) = store_with(1);
    lease(&store, &digests[0], "a");
    store.release("a").unwrap();
    store.remove(&digests[0], false).unwrap();
    let again = publish(&store, &[&[1; 100]]);
    assert!(!again.reused && *again.payload.digest() == digests[0]);
    assert_eq!(files_about(&store, &digests[0]).len(), 2, "pack and record");
}

#[test]
fn a_pin_is_one_private_file_and_setting_it_again_changes_nothing() {
    let (_dir, store, digests) = store_with(2);
    assert!(store.pin(&digests[0], Some("first")).unwrap());
    assert!(!store.pin(&digests[0], Some("second")).unwrap());
    assert!(store.pin(&digests[1], None).unwrap());
    let pins = store.pins().unwrap();
    assert_eq!(pins.len(), 2);
    let pin = pins.iter().find(|pin| pin.digest == digests[0]).unwrap();
    assert_eq!(pin.reason.as_deref(), Some("first"));
    let directory = store.root().join("pins");
    assert_eq!(fs::metadata(&directory).unwrap().mode() & 0o7777, 0o700);
    for entry in fs::read_dir(&directory).unwrap() {
        assert_eq!(entry.unwrap().metadata().unwrap().mode() & 0o7777, 0o600);
    }
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 2);
    assert!(store.list().unwrap().iter().all(|payload| payload.pinned));
    assert!(store.unpin(&digests[0]).unwrap() && !store.unpin(&digests[0]).unwrap());
    assert_eq!(store.list().unwrap().iter().filter(|payload| payload.pinned).count(), 1);
}

#[test]
fn what_is_not_here_cannot_be_pinned() {
    let (_dir, store, digests) = store_with(1);
    let error = store.pin(&Digest::of(b"absent"), None).unwrap_err();
    assert_eq!(error.kind(), "PayloadMissing");
    assert!(store.pins().unwrap().is_empty());
    fs::create_dir_all(store.root().join("pins")).unwrap();
    fs::write(store.root().join(format!("pins/{}.pin.json", digests[0].hex())), "{}").unwrap();
    assert_eq!(store.pins().unwrap_err().kind(), "Malformed");
    assert!(store.list().unwrap()[0].pinned, "a pin that cannot be read still counts");
}

/// Leases against evictions of the same payload: whoever got a lease has the file at its path until it is given back.
#[test]
fn a_lease_that_was_given_is_kept_against_a_concurrent_eviction() {
    let (_dir, store) = store();
    let page = [3; 100];
    let (mut kept, mut lost, mut evicted) = (0, 0, 0);
    for round in 0..60 {
        let payload = publish(&store, &[&page]).payload;
        let (leased, gone) = thread::scope(|scope| {
            let evictor = scope.spawn(|| store.evict(&Eviction::AllUnused, false).unwrap());
            let leased = store.lease(&payload, &format!("round {round}"));
            (leased, evictor.join().unwrap())
        });
        match leased {
            Ok(()) => {
                let inode = fs::metadata(payload.path()).map(|m| m.ino()).ok();
                assert_eq!(inode, Some(payload.blob_stat().inode), "round {round}");
                kept += 1;
            }
            Err(StoreError::PayloadGone { .. }) => lost += 1,
            Err(error) => panic!("{error}"),
        }
        evicted += gone.payloads.len();
        store.release(&format!("round {round}")).unwrap();
    }
    assert_eq!((kept + lost, evicted), (60, lost));
}
