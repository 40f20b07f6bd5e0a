//! Publication of packs: canonical bytes, reuse, and nothing left behind by errors and kills.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, SystemTime};

use coldsnap::digest::Digest;
use coldsnap::store::{DEFAULT_RESERVE, Evidence, NodeStore, StoreError};
use common::{flip_byte, names, publish, record_path, store};

fn bytes_of(seed: u8, size: usize) -> Vec<u8> {
    let mut x = 88_172_645_463_325_252 + u64::from(seed);
    (0..size)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x.to_le_bytes()[0]
        })
        .collect()
}

#[test]
fn a_pack_is_canonical_read_only_and_verified() {
    let (_dir, store) = store();
    let (a, b) = (bytes_of(1, 4097), bytes_of(2, 9 << 20));
    // Chunks of one extent are one after the other.
    let extents = vec![vec![&a[..100], &a[100..]], vec![&b[..1], &b[1..5 << 20], &b[5 << 20..]]];
    let mut processed = 0;
    let pack = store.publish_pack(&extents, &mut |n| processed += n).unwrap();
    assert!(!pack.reused);
    assert_eq!(pack.payload.evidence(), Evidence::FullSha256ThisOperation);
    assert_eq!(processed, pack.layout.model_weight_bytes() + pack.layout.bytes());
    let file = fs::read(pack.payload.path()).unwrap();
    assert_eq!(Digest::of(&file), *pack.payload.digest());
    assert_eq!(file.len() as u64, pack.layout.bytes());
    for (extent, bytes) in pack.layout.in_source_order().iter().zip([&a, &b]) {
        let start = usize::try_from(extent.offset).unwrap();
        assert!(file[start..start + bytes.len()] == bytes[..]);
        let end = (start + bytes.len()).next_multiple_of(4096);
        assert!(file[start + bytes.len()..end].iter().all(|b| *b == 0));
        assert_eq!(extent.sum.sha256, Digest::of(bytes));
    }
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!(mode(pack.payload.path()), 0o444);
    assert_eq!(mode(&record_path(&store, pack.payload.digest())), 0o600);
    assert_eq!(names(&store).len(), 2);
}

#[test]
fn the_second_capture_of_a_model_writes_nothing() {
    let (_dir, store) = store();
    let (a, b) = (bytes_of(1, 5000), bytes_of(2, 70_000));
    let first = publish(&store, &[&a, &b]);
    let inode = fs::metadata(first.payload.path()).unwrap().ino();
    let second = publish(&store, &[&b, &a]);
    assert!(second.reused && !first.reused);
    assert_eq!(second.payload.digest(), first.payload.digest());
    assert_eq!(second.payload.evidence(), Evidence::CachedFullSha256);
    assert_eq!(fs::metadata(second.payload.path()).unwrap().ino(), inode);
    assert_eq!(second.layout.extents()[0].sum, first.layout.extents()[0].sum);
    assert_eq!(names(&store).len(), 2);
    // Same size, other content.
    let third = publish(&store, &[&a, &bytes_of(3, 70_000)]);
    assert!(!third.reused);
    assert_eq!(store.list().unwrap().len(), 2);
}

#[test]
fn a_damaged_pack_is_replaced() {
    let (_dir, store) = store();
    let a = bytes_of(1, 50_000);
    let first = publish(&store, &[&a]);
    flip_byte(first.payload.path());
    let second = publish(&store, &[&a]);
    assert!(!second.reused);
    assert_eq!(Digest::of(&fs::read(second.payload.path()).unwrap()), *first.payload.digest());
    assert!(publish(&store, &[&a]).reused);
}

#[test]
fn no_extents_and_empty_extents_are_errors() {
    let (_dir, store) = store();
    assert!(matches!(store.publish_pack(&[], &mut |_| ()), Err(StoreError::Layout(_))));
    assert!(matches!(store.publish_pack(&[vec![b"a"], vec![]], &mut |_| ()), Err(StoreError::Layout(_))));
    assert!(names(&store).is_empty());
}

#[test]
fn too_little_space_is_found_before_anything_is_written() {
    let (_dir, store) = store();
    let store = store.with_reserve(u64::MAX / 2);
    match store.publish_pack(&[vec![&bytes_of(1, 5000)]], &mut |_| ()) {
        Err(StoreError::InsufficientSpace { needed: 8192, reserve, .. }) => assert_eq!(reserve, u64::MAX / 2),
        other => panic!("{other:?}"),
    }
    assert!(names(&store).is_empty());
    assert_eq!(DEFAULT_RESERVE, 1 << 30);
}

#[test]
fn concurrent_captures_of_one_model_converge() {
    let (_dir, store) = store();
    let data = bytes_of(1, 5 << 20);
    let packs: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| publish(&store, &[&data]))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(packs.iter().filter(|p| !p.reused).count(), 1);
    let inode = packs[0].payload.blob_stat().inode;
    assert!(packs.iter().all(|p| p.payload.blob_stat().inode == inode));
    assert_eq!(names(&store).len(), 2);
}

#[test]
fn a_sweep_leaves_living_writers_alone() {
    let (_dir, store) = store();
    let data = bytes_of(1, 5 << 20);
    let mut swept = Vec::new();
    let mut staged = 0;
    store
        .publish_pack(&[vec![&data]], &mut |_| {
            swept.push(store.sweep().unwrap());
            staged += usize::from(names(&store).iter().any(|n| n.ends_with(".materializing")));
        })
        .unwrap();
    assert!(staged > 0, "no sweep met the staging file");
    assert!(swept.iter().all(|n| *n == 0));
}

#[test]
fn a_sweep_removes_what_other_implementations_and_dead_writers_left() {
    let (_dir, store) = store();
    let digest = *publish(&store, &[&bytes_of(1, 5000)]).payload.digest();
    let directory = store.root().join("model-payloads/sha256");
    let hex = digest.hex();
    let stale = [
        format!(".{hex}.pack.1-2.materializing"),
        format!(".{hex}.pack.coldsnap-validation.json.99-0.tmp"),
        ".unnamed.pack.1-2.materializing".to_owned(),
    ];
    let kept = [".hidden.tmp".to_owned(), "notes.tmp".to_owned(), ".x.materializing".to_owned()];
    for name in stale.iter().chain(&kept) {
        fs::write(directory.join(name), "x").unwrap();
    }
    // The beginning of a payload is worth something for a day.
    assert_eq!(store.sweep().unwrap(), 2);
    let left =
        File::options().write(true).open(directory.join(format!(".{hex}.pack.1-2.materializing"))).unwrap();
    left.set_modified(SystemTime::now() - Duration::from_secs(25 * 60 * 60)).unwrap();
    assert_eq!(store.sweep().unwrap(), 1);
    let left = names(&store);
    assert!(kept.iter().all(|name| left.contains(name)) && !stale.iter().any(|name| left.contains(name)));
    assert_eq!(left.len(), 5);
    store.admit(&digest, None, &mut |_| ()).unwrap();
}

/// Runs the named test of this program again, as a child that finds the store's root in its environment.
fn run_child(test: &str, store: &NodeStore) -> Output {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, store.root())
        .output()
        .unwrap()
}

const CHILD: &str = "COLDSNAP_TEST_CHILD_STORE";

fn in_child() -> Option<NodeStore> {
    env::var_os(CHILD).map(|root| NodeStore::open(root).unwrap().with_reserve(0))
}

#[test]
fn a_killed_writer_leaves_nothing_that_counts() {
    let data = bytes_of(1, 24 << 20);
    if let Some(store) = in_child() {
        store
            .publish_pack(&[vec![&data]], &mut |_| {
                let writing = names(&store).iter().any(|n| n.ends_with(".materializing"));
                if writing {
                    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
                        .unwrap();
                }
            })
            .unwrap();
        return;
    }
    let (_dir, store) = store();
    let output = run_child("a_killed_writer_leaves_nothing_that_counts", &store);
    assert_eq!(output.status.signal(), Some(9), "{output:?}");
    assert!(store.list().unwrap().is_empty());
    let left = names(&store);
    assert!(left.len() == 1 && left[0].starts_with('.') && left[0].ends_with(".materializing"), "{left:?}");
    // The next writer cleans up.
    publish(&store, &[&data]);
    assert_eq!(names(&store).len(), 2);
    assert_eq!(store.sweep().unwrap(), 0);
}

#[test]
fn a_failed_write_leaves_nothing() {
    let data = bytes_of(1, 24 << 20);
    if let Some(store) = in_child() {
        // A file size limit fails like a full disk does, without a disk.
        // SAFETY: changes the disposition of one signal to a constant, before any other thread cares.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        let limit = rustix::process::Rlimit { current: Some(10 << 20), maximum: Some(10 << 20) };
        rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
        let error = store.publish_pack(&[vec![&data]], &mut |_| ()).unwrap_err();
        println!("failed with {} {error}", error.kind());
        return;
    }
    let (_dir, store) = store();
    let output = run_child("a_failed_write_leaves_nothing", &store);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("failed with Io cannot"), "{output:?}");
    assert!(text.contains("File too large"), "{text}");
    assert!(names(&store).is_empty());
}
