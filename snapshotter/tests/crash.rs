//! The service killed at its durable steps, stopped, started twice, and with damaged state. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

mod common;

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;

use common::capsule::write_capsule;
use common::{Node, PACK_BYTES, command, mount};
use tonic::Code;

fn entries(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn kill_9_keeps_every_snapshot() {
    let mut node = Node::start();
    node.layer("base", "", |root| fs::write(root.join("file"), "content").unwrap());
    let active = node.prepare("active", "base").unwrap();
    node.view("view", "base").unwrap();
    let target = node.new_directory();
    mount::with(&active, &target, |root| fs::write(root.join("written"), "x").unwrap());
    let before = node.list(&[]).unwrap();
    for _ in 0..3 {
        node.kill();
        node.restart();
        assert_eq!(node.list(&[]).unwrap(), before);
        assert_eq!(node.mounts("active").unwrap(), active);
    }
    mount::with(&active, &target, |root| assert_eq!(fs::read(root.join("written")).unwrap(), b"x"));
    node.remove_all_and_check();
}

/// After a death in the middle of Prepare the key is either new or usable, and nothing else is left.
#[test]
#[cfg(debug_assertions)]
fn killed_while_preparing() {
    for (fault, recorded) in [("make.temporary", false), ("make.renamed", false), ("create.recorded", true)] {
        let mut node = Node::start();
        let digest = node.put_payload("model");
        node.layer("base", "", |_| {});
        node.layer("capsule", "base", |root| write_capsule(root, &[("w0", digest, PACK_BYTES)]));
        node.stop();
        node.restart_with_fault(Some(fault));
        node.prepare("key", "capsule").unwrap_err();
        node.expect_killed();
        assert_eq!(node.leases(), ["snapshot/key"], "{fault}: leased before it is recorded");
        node.restart();
        let directories = entries(&node.root().join("snapshots"));
        if recorded {
            assert_eq!(node.mounts("key").unwrap().len(), 2, "{fault}");
            assert_eq!(node.leases(), ["snapshot/key"]);
        } else {
            assert_eq!(node.stat("key").unwrap_err().code(), Code::NotFound, "{fault}");
            assert_eq!(directories.len(), 2, "{fault}: {directories:?}");
            assert!(node.leases().is_empty(), "{fault}");
            assert_eq!(node.prepare("key", "capsule").unwrap().len(), 2);
        }
        assert!(!node.root().join("quarantine").exists());
        node.remove_all_and_check();
    }
}

#[test]
#[cfg(debug_assertions)]
fn killed_while_committing() {
    for (fault, recorded) in [("commit.synced", false), ("commit.recorded", true)] {
        let mut node = Node::start();
        let digest = node.put_payload("model");
        node.layer("base", "", |_| {});
        node.layer("capsule", "base", |root| write_capsule(root, &[("w0", digest, PACK_BYTES)]));
        let mounts = node.prepare("key", "capsule").unwrap();
        let target = node.new_directory();
        mount::with(&mounts, &target, |root| fs::write(root.join("file"), "content").unwrap());
        node.stop();
        node.restart_with_fault(Some(fault));
        node.commit("name", "key").unwrap_err();
        node.expect_killed();
        node.restart();
        if recorded {
            assert_eq!(node.stat("key").unwrap_err().code(), Code::NotFound);
            assert!(node.leases().is_empty());
        } else {
            assert_eq!(node.stat("name").unwrap_err().code(), Code::NotFound);
            assert_eq!(node.leases(), ["snapshot/key"]);
            node.commit("name", "key").unwrap();
        }
        let mounts = node.view("view", "name").unwrap();
        mount::with(&mounts, &target, |root| assert_eq!(fs::read(root.join("file")).unwrap(), b"content"));
        node.remove_all_and_check();
    }
}

#[test]
#[cfg(debug_assertions)]
fn killed_while_removing_and_cleaning() {
    let mut node = Node::start();
    let digest = node.put_payload("model");
    node.layer("base", "", |_| {});
    node.layer("capsule", "base", |root| write_capsule(root, &[("w0", digest, PACK_BYTES)]));
    let mounts = node.prepare("key", "capsule").unwrap();
    let target = node.new_directory();
    mount::with(&mounts, &target, |root| fs::write(root.join("file"), "content").unwrap());
    node.stop();
    node.restart_with_fault(Some("remove.recorded"));
    node.remove("key").unwrap_err();
    node.expect_killed();
    assert_eq!(node.leases(), ["snapshot/key"]);
    assert_eq!(entries(&node.root().join("snapshots")).len(), 3);
    node.restart();
    assert_eq!(node.stat("key").unwrap_err().code(), Code::NotFound);
    assert!(node.leases().is_empty());
    node.cleanup().unwrap();
    assert_eq!(entries(&node.root().join("snapshots")).len(), 2);
    assert!(!node.root().join("quarantine").exists(), "a removed snapshot is no stranger");

    // Also when it dies between deleting directories and noting that they are gone.
    node.prepare("second", "capsule").unwrap();
    node.stop();
    node.restart_with_fault(Some("cleanup.deleted"));
    node.remove("second").unwrap();
    node.cleanup().unwrap_err();
    node.expect_killed();
    assert_eq!(entries(&node.root().join("snapshots")).len(), 2);
    node.restart();
    node.remove_all_and_check();
}

#[test]
fn a_graceful_stop_deletes_nothing_but_its_socket() {
    let mut node = Node::start();
    node.layer("base", "", |_| {});
    node.prepare("active", "base").unwrap();
    let before = node.list(&[]).unwrap();
    let socket = node.directory.path().join("run/snapshotter.sock");
    assert!(socket.exists());
    assert!(node.stop().success(), "{}", node.log());
    assert!(!socket.exists());
    assert_eq!(entries(&node.root().join("snapshots")).len(), 2);
    node.restart();
    assert_eq!(node.list(&[]).unwrap(), before);
}

#[test]
fn a_stuck_client_does_not_keep_the_service_from_stopping() {
    let mut node = Node::start();
    node.prepare("active", "").unwrap();
    assert!(node.stop_with_stuck_client().success());
    node.restart();
    node.stat("active").unwrap();
}

#[test]
fn a_second_process_is_refused_and_a_stale_socket_is_not() {
    let mut node = Node::start();
    node.prepare("active", "").unwrap();
    let socket = node.directory.path().join("run/snapshotter.sock");
    let output = command(node.directory.path()).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("another snapshotter serves this root"));
    let output = command(node.directory.path()).arg("--root").arg(node.new_directory()).output().unwrap();
    assert!(!output.status.success());
    node.stat("active").unwrap();

    node.kill();
    assert!(socket.exists() && UnixStream::connect(&socket).is_err());
    node.restart();
    node.stat("active").unwrap();
}

#[test]
fn ids_are_never_used_twice() {
    let mut node = Node::start();
    let path = |mounts: Vec<coldsnap_snapshotter::proto::Mount>| mounts[0].source.clone();
    let first = path(node.prepare("a", "").unwrap());
    node.remove("a").unwrap();
    node.cleanup().unwrap();
    node.kill();
    node.restart();
    assert_ne!(path(node.prepare("a", "").unwrap()), first);
}

#[test]
fn directories_without_metadata_are_set_aside() {
    let mut node = Node::start();
    node.layer("base", "", |root| fs::write(root.join("file"), "precious").unwrap());
    node.prepare("empty", "base").unwrap();
    let id = entries(&node.root().join("snapshots"))[0].clone();
    node.kill();
    fs::remove_file(node.root().join("metadata.redb")).unwrap();
    fs::create_dir(node.root().join("snapshots/new-77")).unwrap();
    fs::create_dir(node.root().join("snapshots/foreign")).unwrap();
    node.restart();
    assert!(node.names(&[]).is_empty());
    assert_eq!(entries(&node.root().join("snapshots")), ["foreign"]);
    let aside = node.root().join("quarantine").join(&id).join("fs/file");
    assert_eq!(fs::read(aside).unwrap(), b"precious");
    assert!(node.log().contains("set aside"));
    // A new snapshot does not get an id that was set aside.
    let mounts = node.prepare("new", "").unwrap();
    assert!(!mounts[0].source.ends_with(&format!("/{id}/fs")), "{mounts:?}");
    node.kill();
    node.restart();
    assert_eq!(entries(&node.root().join("quarantine")), [id]);
}

#[test]
fn a_missing_directory_is_reported_and_the_snapshot_can_be_removed() {
    let mut node = Node::start();
    node.layer("base", "", |_| {});
    let id = entries(&node.root().join("snapshots"))[0].clone();
    node.kill();
    fs::remove_dir_all(node.root().join("snapshots").join(id)).unwrap();
    node.restart();
    assert!(node.log().contains("a directory of this snapshot is missing"));
    assert_eq!(node.names(&[]), ["base"]);
    let error = node.prepare("active", "base").unwrap_err();
    assert_eq!(error.code(), Code::Internal);
    assert_eq!(node.names(&[]), ["base"]);
    node.remove_all_and_check();
}

#[test]
fn damaged_metadata_stop_the_start_and_lose_nothing() {
    let mut node = Node::start();
    node.layer("base", "", |_| {});
    node.stop();
    let metadata = node.root().join("metadata.redb");
    let good = fs::read(&metadata).unwrap();
    let mut bad = good.clone();
    bad[4096..].iter_mut().for_each(|byte| *byte ^= 0x5a);
    fs::write(&metadata, &bad).unwrap();
    let output = command(node.directory.path()).output().unwrap();
    assert!(!output.status.success());
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("damaged") && message.contains("Restore the file"), "{message}");
    assert_eq!(entries(&node.root().join("snapshots")).len(), 1);
    fs::write(&metadata, good).unwrap();
    node.restart();
    assert_eq!(node.names(&[]), ["base"]);
}

/// A database that failed to write refuses everything until it is opened again; the service does that by itself.
#[test]
fn a_full_disk_is_an_error_and_not_the_end() {
    let mut node = Node::start_on(|root| mount::small_file_system(16 << 20, root));
    node.layer("base", "", |_| {});
    let ballast = node.root().join("ballast");
    let mut file = fs::File::create(&ballast).unwrap();
    let mut prepared = Vec::new();
    // Until it is the database that cannot write.
    for n in 0.. {
        while file.write_all(&[1; 4096]).is_ok() {}
        let key = format!("key-{n}");
        match node.prepare(&key, "base") {
            Ok(_) => prepared.push(key),
            Err(error) => {
                assert_eq!(error.code(), Code::Internal);
                assert!(error.message().contains("No space left"), "{error}");
                if error.message().contains("metadata") {
                    break;
                }
            }
        }
        assert!(n < 10_000, "the disk does not fill");
    }
    node.stat("base").unwrap();

    fs::remove_file(&ballast).unwrap();
    node.prepare("after", "base").unwrap();
    prepared.extend(["after".to_owned(), "base".to_owned()]);
    prepared.sort();
    assert_eq!(node.names(&[]), prepared);
    assert_eq!(entries(&node.root().join("snapshots")).len(), prepared.len());
    node.kill();
    node.restart();
    assert_eq!(node.names(&[]), prepared);
    node.remove_all_and_check();
}

#[test]
fn many_at_once() {
    let mut node = Node::start();
    let digest = node.put_payload("model");
    node.layer("base", "", |_| {});
    node.layer("capsule", "base", |root| write_capsule(root, &[("w0", digest, PACK_BYTES)]));
    node.in_parallel(64, "capsule");
    assert_eq!(node.names(&["kind==active"]).len(), 64);
    assert_eq!(node.leases().len(), 64);
    node.remove_all_and_check();
}
