//! What a check of the store finds, how bad it is, and what a repair does about it.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::thread;

use coldsnap::digest::Digest;
use coldsnap::store::{Finding, FsckOptions, FsckReport, NodeStore, Severity, Staging};
use common::{flip_byte, names, publish, record_path, store, store_with_payload};

fn fsck(store: &NodeStore) -> FsckReport {
    store.fsck(FsckOptions::default(), &mut |_| ()).unwrap()
}

fn full(store: &NodeStore) -> FsckReport {
    store.fsck(FsckOptions { full: true, repair: false }, &mut |_| ()).unwrap()
}

fn repair(store: &NodeStore, full: bool) -> FsckReport {
    store.fsck(FsckOptions { full, repair: true }, &mut |_| ()).unwrap()
}

fn kinds(report: &FsckReport) -> Vec<&str> {
    report.findings.iter().map(|found| found.kind).collect()
}

/// The only finding.
#[track_caller]
fn only(report: &FsckReport) -> &Finding {
    assert_eq!(report.findings.len(), 1, "{report:#?}");
    &report.findings[0]
}

fn lease(store: &NodeStore, digest: &Digest, owner: &str) -> PathBuf {
    let payload = store.admit(digest, None, &mut |_| ()).unwrap();
    store.lease(&payload, owner).unwrap();
    let found = fs::read_dir(store.root().join("leases")).unwrap().next().unwrap();
    found.unwrap().path()
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn a_store_that_is_used_as_it_should_be_has_no_findings() {
    let (_dir, store, digest) = store_with_payload();
    publish(&store, &[&[1; 10]]);
    lease(&store, &digest, "a");
    store.pin(&digest, None).unwrap();
    let report = fsck(&store);
    assert_eq!(report.findings, []);
    assert!(report.is_consistent());
    assert_eq!((report.payloads, report.bytes, report.leases, report.pins), (2, 12288 + 4096, 1, 1));
    assert_eq!(report.bytes_hashed, 0);
    store.release("a").unwrap();
    store.unpin(&digest).unwrap();
    store.remove(&digest, false).unwrap();
    assert_eq!(fsck(&store).findings, []);
}

#[test]
fn a_full_check_hashes_everything_whatever_the_records_say() {
    let (_dir, store, digest) = store_with_payload();
    let mut hashed = 0;
    let options = FsckOptions { full: true, repair: false };
    let report = store.fsck(options, &mut |n| hashed += n).unwrap();
    assert_eq!((report.bytes_hashed, hashed, report.findings.len()), (12288, 12288, 0));
    // Damage that no stat shows: only the content tells.
    flip_byte(&store.payload_path(&digest));
    let identity = fs::metadata(store.payload_path(&digest)).unwrap();
    let mut record: serde_json::Value =
        serde_json::from_slice(&fs::read(record_path(&store, &digest)).unwrap()).unwrap();
    let ctime = identity.ctime() * 1_000_000_000 + identity.ctime_nsec();
    record["diagnostic_identity"]["ctime_ns"] = ctime.into();
    fs::write(record_path(&store, &digest), record.to_string()).unwrap();
    assert_eq!(fsck(&store).findings, []);
    let report = full(&store);
    assert_eq!((only(&report).kind, only(&report).severity), ("DigestMismatch", Severity::Error));
    assert!(!report.is_consistent());
}

#[test]
fn a_damaged_pack_is_an_error_and_a_repair_moves_it_aside() {
    let (_dir, store, digest) = store_with_payload();
    let path = store.payload_path(&digest);
    flip_byte(&path);
    let damaged = fs::read(&path).unwrap();
    assert_eq!(only(&fsck(&store)).kind, "Unverified", "not read, not known");
    let report = repair(&store, true);
    assert!(report.is_consistent() && only(&report).repaired, "{report:#?}");
    assert!(names(&store).is_empty());
    let aside: Vec<_> = fs::read_dir(store.root().join("damaged")).unwrap().collect();
    assert_eq!(aside.len(), 1);
    assert_eq!(fs::read(aside[0].as_ref().unwrap().path()).unwrap(), damaged);
    assert_eq!(only(&fsck(&store)).severity, Severity::Note);

    let (_dir, store, digest) = store_with_payload();
    chmod(&store.payload_path(&digest), 0o644);
    fs::OpenOptions::new().append(true).open(store.payload_path(&digest)).unwrap().set_len(5000).unwrap();
    let report = fsck(&store);
    assert!(kinds(&report).contains(&"SizeChanged") && !report.is_consistent());
}

#[test]
fn a_damaged_pack_that_is_leased_is_still_reported_after_it_was_moved() {
    let (_dir, store, digest) = store_with_payload();
    lease(&store, &digest, "snapshot/x");
    flip_byte(&store.payload_path(&digest));
    let report = repair(&store, true);
    assert_eq!(kinds(&report).len(), 2);
    assert!(kinds(&report).contains(&"LeasedMissing") && !report.is_consistent());
}

#[test]
fn a_lease_of_a_payload_that_is_missing_is_an_error_that_says_what_to_do() {
    let (_dir, store, digest) = store_with_payload();
    lease(&store, &digest, "snapshot/default/1/web");
    fs::remove_file(store.payload_path(&digest)).unwrap();
    fs::remove_file(record_path(&store, &digest)).unwrap();
    let report = repair(&store, false);
    let found = report.findings.iter().find(|found| found.kind == "LeasedMissing").unwrap();
    assert_eq!(found.severity, Severity::Error);
    assert!(found.message.contains("snapshot/default/1/web") && !report.is_consistent());
    assert!(found.remedy.contains("payload release snapshot/default/1/web"), "{found:?}");
    assert_eq!(store.leases().unwrap().len(), 1, "a repair does not guess who is dead");
    store.release("snapshot/default/1/web").unwrap();
    assert!(fsck(&store).is_consistent());
}

#[test]
fn a_pin_of_a_payload_that_is_missing_is_an_error() {
    let (_dir, store, digest) = store_with_payload();
    store.pin(&digest, None).unwrap();
    fs::remove_file(store.payload_path(&digest)).unwrap();
    let report = fsck(&store);
    assert_eq!(kinds(&report), ["Leftover", "PinnedMissing"]);
    assert!(!report.is_consistent());
}

#[test]
fn leases_and_pins_that_say_nothing_are_errors() {
    let (_dir, store, digest) = store_with_payload();
    let path = lease(&store, &digest, "a");
    let renamed = path.with_file_name(format!("{}.{}.lease.json", digest.hex(), "0".repeat(32)));
    fs::rename(&path, &renamed).unwrap();
    let report = fsck(&store);
    assert!(
        only(&report).kind == "Malformed" && only(&report).message.contains("nobody gives this one back")
    );
    fs::write(&renamed, "{").unwrap();
    assert!(only(&fsck(&store)).remedy.contains("counts as a lease"));
    fs::remove_file(&renamed).unwrap();
    store.pin(&digest, None).unwrap();
    fs::write(store.root().join(format!("pins/{}.pin.json", digest.hex())), "[]").unwrap();
    let report = fsck(&store);
    assert!(only(&report).remedy.contains("counts as a pin") && !report.is_consistent());
}

#[test]
fn links_and_directories_in_place_of_a_pack_are_errors() {
    let (dir, store, digest) = store_with_payload();
    let path = store.payload_path(&digest);
    let elsewhere = dir.path().join("elsewhere");
    fs::rename(&path, &elsewhere).unwrap();
    symlink(&elsewhere, &path).unwrap();
    let report = repair(&store, true);
    assert!(kinds(&report).contains(&"NotRegularFile") && !report.is_consistent());
    assert!(path.is_symlink(), "a repair leaves it for a person");
}

#[test]
fn wrong_modes_are_warnings_that_a_repair_sets_right() {
    let (_dir, store, digest) = store_with_payload();
    let pack = store.payload_path(&digest);
    let lock = pack.with_file_name(format!(".{}.pack.lock", digest.hex()));
    let leases = store.root().join("leases");
    lease(&store, &digest, "a");
    for (path, wrong, right, kind) in [(&pack, 0o644, 0o444, "PackMode"), (&lock, 0o666, 0o600, "LockMode")] {
        chmod(path, wrong);
        let report = fsck(&store);
        assert!(report.is_consistent() && kinds(&report).contains(&kind), "{report:#?}");
        assert_eq!(mode(path), wrong);
        repair(&store, true);
        assert_eq!(mode(path), right);
        assert_eq!(fsck(&store).findings, []);
    }
    for (path, wrong) in [(pack.parent().unwrap(), 0o777), (&leases, 0o755)] {
        let right = mode(path);
        chmod(path, wrong);
        assert_eq!(only(&fsck(&store)).kind, "DirectoryMode");
        chmod(path, right);
    }
}

#[test]
fn a_payload_that_was_never_verified_is_no_defect() {
    let (_dir, store, digest) = store_with_payload();
    let record = record_path(&store, &digest);
    fs::remove_file(&record).unwrap();
    let report = fsck(&store);
    assert_eq!((only(&report).kind, only(&report).severity), ("Unverified", Severity::Note));
    assert_eq!(full(&store).findings, []);
    assert!(record.exists(), "what was hashed is recorded");
}

#[test]
fn garbage_is_a_warning_and_a_repair_removes_it() {
    let (_dir, store, digest) = store_with_payload();
    let directory = store.root().join("model-payloads/sha256");
    let absent = Digest::of(b"absent");
    lease(&store, &digest, "a");
    let garbage = [
        record_path(&store, &absent),
        store.root().join(format!("usage/{}.last-used", absent.hex())),
        directory.join(".unnamed.pack.1-2.materializing"),
        directory.join(format!(".{}.pack.coldsnap-validation.json.9-0.tmp", digest.hex())),
        store.root().join(format!("leases/.{}.{}.lease.json.9-0.tmp", digest.hex(), "0".repeat(32))),
        store.root().join(format!("pins/.{}.pin.json.9-0.tmp", digest.hex())),
    ];
    fs::create_dir(store.root().join("pins")).unwrap();
    chmod(&store.root().join("pins"), 0o700);
    for path in &garbage {
        fs::write(path, "x").unwrap();
    }
    let report = fsck(&store);
    assert_eq!(report.findings.len(), garbage.len(), "{report:#?}");
    assert!(report.findings.iter().all(|found| found.severity == Severity::Warning && !found.repaired));
    assert!(report.is_consistent() && garbage.iter().all(|path| path.exists()));
    assert!(repair(&store, false).findings.iter().all(|found| found.repaired));
    assert!(!garbage.iter().any(|path| path.exists()));
    assert_eq!(fsck(&store).findings, []);
}

#[test]
fn what_others_put_into_the_store_is_reported_and_left_alone() {
    let (_dir, store, digest) = store_with_payload();
    lease(&store, &digest, "a");
    let strays = [
        "model-payloads/sha256/incoming".to_owned(),
        format!("model-payloads/sha256/{}.pack", digest.hex().to_uppercase()),
        format!("model-payloads/sha256/.{}.pack.lock.tmp.orig", digest.hex()),
        "leases/notes".to_owned(),
        "usage/notes".to_owned(),
    ];
    for stray in &strays {
        fs::write(store.root().join(stray), "x").unwrap();
    }
    let report = repair(&store, true);
    assert_eq!(kinds(&report), ["Stray"; 5]);
    assert!(report.is_consistent() && strays.iter().all(|stray| store.root().join(stray).exists()));
}

#[test]
fn living_writers_and_what_can_be_resumed_are_notes_and_stay() {
    let (_dir, store, _) = store_with_payload();
    let page = [5; 8192];
    let digest = Digest::of(&page);
    let Staging::Needed(mut staged) = store.stage(&digest, 8192, &mut |_| ()).unwrap() else {
        panic!("it is not here")
    };
    staged.append(&page[..4096]).unwrap();
    assert_eq!(only(&repair(&store, true)).kind, "BeingWritten");
    drop(staged);
    let report = repair(&store, true);
    assert_eq!((only(&report).kind, only(&report).severity), ("Interrupted", Severity::Note));
    assert!(report.is_consistent());
    assert_eq!(store.sweep().unwrap(), 0);
    assert_eq!(store.sweep_interrupted().unwrap(), 1);
    assert_eq!(fsck(&store).findings, []);
}

#[test]
fn a_payload_whose_lock_is_held_is_left_out() {
    let (_dir, store, digest) = store_with_payload();
    fs::remove_file(record_path(&store, &digest)).unwrap();
    let report = thread::scope(|scope| {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let verifier = store.clone();
        scope.spawn(move || {
            verifier
                .admit(&digest, None, &mut |_| {
                    sender.send(()).unwrap();
                    wait.recv().unwrap();
                })
                .unwrap();
        });
        receiver.recv().unwrap();
        let report = full(&store);
        done.send(()).unwrap();
        report
    });
    assert_eq!((only(&report).kind, report.bytes_hashed), ("InUse", 0));
}

#[test]
fn where_no_store_is_there_is_nothing_to_check() {
    let (dir, _store) = store();
    let absent = NodeStore::at(dir.path().join("absent"));
    assert_eq!(absent.fsck(FsckOptions::default(), &mut |_| ()).unwrap_err().kind(), "Io");
    assert!(!absent.root().exists());
}
