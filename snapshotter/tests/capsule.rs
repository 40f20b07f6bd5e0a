//! Payload binds: who gets them, where they go, and how leases follow. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

mod common;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use coldsnap::capsule::{ARTIFACT_PATH, CAPSULE_DIR};
use coldsnap::digest::Digest;
use coldsnap_snapshotter::proto::Mount;
use common::capsule::write_capsule;
use common::{Node, PACK_BYTES, mount, pack};
use rustix::fs::{XattrFlags, setxattr};

const TARGET_W0: &str = "opt/coldsnap/capsule/hydration/w0/model-weights.pack";
const TARGET_W1: &str = "opt/coldsnap/capsule/hydration/w1/model-weights.pack";

/// A node with a base layer and, on it, a capsule layer `capsule` whose worker w0 needs `content`.
fn node_with_capsule(content: &str) -> (Node, Digest) {
    let mut node = Node::start();
    let digest = node.put_payload(content);
    node.layer("base", "", |root| fs::write(root.join("server"), "program").unwrap());
    node.layer("capsule", "base", |root| write_capsule(root, &[("w0", digest, PACK_BYTES)]));
    (node, digest)
}

fn bind(node: &Node, digest: Digest, target: &str) -> Mount {
    Mount {
        r#type: "bind".to_owned(),
        source: node.store().payload_path(&digest).display().to_string(),
        target: target.to_owned(),
        options: vec!["bind".to_owned(), "ro".to_owned()],
    }
}

#[test]
fn a_container_reads_the_payload_and_cannot_write_it() {
    let (mut node, digest) = node_with_capsule("model bytes");
    let mounts = node.prepare("default/9/r1", "capsule").unwrap();
    assert_eq!(mounts.len(), 2);
    assert_eq!(mounts[0].r#type, "overlay");
    assert_eq!(mounts[1], bind(&node, digest, TARGET_W0));
    let target = node.new_directory();
    mount::with(&mounts, &target, |root| {
        assert_eq!(fs::read(root.join(TARGET_W0)).unwrap(), pack("model bytes"));
        assert_eq!(fs::read(root.join("server")).unwrap(), b"program");
        let error = fs::write(root.join(TARGET_W0), "x").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
        fs::write(root.join("written"), "by the container").unwrap();
    });
    // The bind needs no write to the container's own layer.
    let upper = mounts[0].options.iter().find_map(|o| o.strip_prefix("upperdir=")).unwrap();
    let written: Vec<_> = fs::read_dir(upper).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(written, ["written"]);
    node.remove_all_and_check();
    assert!(node.store().payload_path(&digest).exists(), "the payload outlives its leases");
}

#[test]
fn mounts_of_actives_and_views_agree_and_are_stable() {
    let (mut node, digest) = node_with_capsule("model bytes");
    let payload = [bind(&node, digest, TARGET_W0)];
    let active = node.prepare("active", "capsule").unwrap();
    let view = node.view("view", "capsule").unwrap();
    assert_eq!(active[1..], payload);
    assert_eq!(view[1..], payload);
    assert_eq!(node.mounts("active").unwrap(), active);
    assert_eq!(node.mounts("view").unwrap(), view);

    // What was decided stays decided: a child of the chain, a restart, a plain layer on top.
    node.kill();
    node.restart();
    assert_eq!(node.mounts("active").unwrap(), active);
    node.layer("derived", "capsule", |root| fs::write(root.join("more"), "").unwrap());
    assert_eq!(node.prepare("derived-active", "derived").unwrap()[1..], payload);
    assert_eq!(node.view("derived-view", "derived").unwrap()[1..], payload);
    assert_eq!(node.view("base-view", "base").unwrap().len(), 1, "below the capsule there is no payload");
    node.remove_all_and_check();
}

#[test]
fn unpacking_gets_no_payload() {
    let (mut node, _) = node_with_capsule("model bytes");
    let by_label = [("containerd.io/snapshot.ref", "sha256:ab")];
    assert_eq!(node.prepare_labelled("default/3/x", "capsule", &by_label).unwrap().len(), 1);
    assert_eq!(node.prepare("default/4/extract-12-aB_9 sha256:cd", "capsule").unwrap().len(), 1);
    assert_eq!(node.mounts("default/3/x").unwrap().len(), 1);
    assert!(node.leases().is_empty());
    // A container may have a name that looks alike.
    assert_eq!(node.prepare("default/5/extract-12", "capsule").unwrap().len(), 2);
    node.remove_all_and_check();
}

/// The client library computes the layer of a committed snapshot from two views; the payload must be in both
/// or in neither.
#[test]
fn a_comparison_of_layers_sees_the_payload_on_both_sides_or_on_none() {
    let (mut node, _) = node_with_capsule("model bytes");
    node.layer("derived", "capsule", |_| {});
    for (layer, below, payloads) in [("capsule", "base", 0), ("derived", "capsule", 1)] {
        let lower = node.view(&format!("default/7/{below}-parent-view-1-abcd"), below).unwrap();
        let upper = node.view(&format!("default/8/{layer}-view-1-abcd"), layer).unwrap();
        assert_eq!((lower.len(), upper.len()), (1 + payloads, 1 + payloads), "{layer}");
        node.remove(&format!("default/7/{below}-parent-view-1-abcd")).unwrap();
    }
    node.remove_all_and_check();
}

#[test]
fn leases_last_as_long_as_the_snapshot() {
    let (mut node, _) = node_with_capsule("model bytes");
    node.prepare("default/9/r1", "capsule").unwrap();
    node.view("default/10/v", "capsule").unwrap();
    assert_eq!(node.leases(), ["snapshot/default/10/v", "snapshot/default/9/r1"]);
    node.mounts("default/9/r1").unwrap();
    assert_eq!(node.leases().len(), 2);
    // A refused second Prepare takes nothing away from the first.
    node.prepare("default/9/r1", "capsule").unwrap_err();
    assert_eq!(node.leases().len(), 2);
    node.remove("default/10/v").unwrap();
    assert_eq!(node.leases(), ["snapshot/default/9/r1"]);
    node.commit("committed", "default/9/r1").unwrap();
    assert!(node.leases().is_empty());
    node.remove_all_and_check();
}

#[test]
fn a_missing_payload_leaves_its_bind_out() {
    let mut node = Node::start();
    let here = node.put_payload("here");
    let missing = Digest::of(&pack("missing"));
    node.layer("base", "", |_| {});
    node.layer("capsule", "base", |root| {
        write_capsule(root, &[("w0", missing, PACK_BYTES), ("w1", here, PACK_BYTES)])
    });
    let mounts = node.prepare("r1", "capsule").unwrap();
    assert_eq!(mounts[1..], [bind(&node, here, TARGET_W1)]);
    assert!(node.log().contains("lack a model payload") && node.log().contains(&missing.hex()));
    // It stays out of this snapshot, also when it comes; a new one gets it.
    assert_eq!(node.put_payload("missing"), missing);
    assert_eq!(node.mounts("r1").unwrap(), mounts);
    let wanted = [bind(&node, missing, TARGET_W0), bind(&node, here, TARGET_W1)];
    assert_eq!(node.prepare("r2", "capsule").unwrap()[1..], wanted);
    node.remove_all_and_check();
}

#[test]
fn a_damaged_payload_is_refused() {
    let (mut node, digest) = node_with_capsule("model bytes");
    assert_eq!(node.prepare("r1", "capsule").unwrap().len(), 2);
    let path = node.store().payload_path(&digest);
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    fs::write(&path, pack("model Bytes")).unwrap();
    assert_eq!(node.prepare("r2", "capsule").unwrap().len(), 1);
    assert_eq!(node.mounts("r1").unwrap().len(), 1, "not even where it was right before");
    fs::write(&path, [pack("model bytes"), pack("more")].concat()).unwrap();
    assert_eq!(node.view("v", "capsule").unwrap().len(), 1);
    assert!(node.log().contains("damaged"));
    fs::write(&path, pack("model bytes")).unwrap();
    assert_eq!(node.mounts("r1").unwrap().len(), 2);
    node.remove_all_and_check();
}

#[test]
fn a_payload_behind_a_link_is_refused() {
    let (mut node, digest) = node_with_capsule("model bytes");
    let path = node.store().payload_path(&digest);
    let elsewhere = node.directory.path().join("elsewhere");
    fs::rename(&path, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
    assert_eq!(node.prepare("r1", "capsule").unwrap().len(), 1);
    node.remove_all_and_check();
}

#[test]
fn workers_may_share_a_payload() {
    let mut node = Node::start();
    let digest = node.put_payload("model");
    node.layer("base", "", |_| {});
    node.layer("capsule", "base", |root| {
        write_capsule(root, &[("w0", digest, PACK_BYTES), ("w1", digest, PACK_BYTES)])
    });
    let mounts = node.prepare("r1", "capsule").unwrap();
    assert_eq!(mounts[1..], [bind(&node, digest, TARGET_W0), bind(&node, digest, TARGET_W1)]);
    assert_eq!(node.leases(), ["snapshot/r1"]);
    node.remove_all_and_check();
}

#[test]
fn only_the_top_capsule_counts() {
    let (mut node, _) = node_with_capsule("old model");
    let new = node.put_payload("new model");
    node.layer("written", "capsule", |root| fs::write(root.join("state"), "").unwrap());
    // As the unpacker applies a capsule layer that replaces the directory below.
    let key = "extract-7-abcd sha256:second";
    let mounts = node.prepare(key, "written").unwrap();
    let upper = mounts[0].options.iter().find_map(|o| o.strip_prefix("upperdir=")).unwrap();
    write_capsule(Path::new(upper), &[("w1", new, PACK_BYTES)]);
    setxattr(Path::new(upper).join(CAPSULE_DIR), "trusted.overlay.opaque", b"y", XattrFlags::empty())
        .unwrap();
    node.commit("second", key).unwrap();
    let mounts = node.prepare("r1", "second").unwrap();
    assert_eq!(mounts[1..], [bind(&node, new, TARGET_W1)]);
    let target = node.new_directory();
    mount::with(&mounts, &target, |root| {
        assert_eq!(fs::read(root.join(TARGET_W1)).unwrap(), pack("new model"));
        assert!(!root.join(TARGET_W0).exists());
    });
    node.remove_all_and_check();
}

#[test]
fn a_removed_capsule_is_gone() {
    let (mut node, _) = node_with_capsule("model bytes");
    node.layer("without", "capsule", |root| fs::remove_dir_all(root.join("opt/coldsnap")).unwrap());
    assert_eq!(node.prepare("r1", "without").unwrap().len(), 1);
    node.layer("placeholder", "capsule", |root| fs::remove_file(root.join(TARGET_W0)).unwrap());
    let mounts = node.prepare("r2", "placeholder").unwrap();
    assert_eq!(mounts.len(), 1, "a bind without a file to stand on would keep the container from starting");
    node.remove_all_and_check();
}

#[test]
fn a_broken_capsule_is_an_image_without_payloads() {
    let mut node = Node::start();
    node.layer("base", "", |_| {});
    node.layer("capsule", "base", |root| {
        fs::create_dir_all(root.join(CAPSULE_DIR)).unwrap();
        fs::write(root.join(ARTIFACT_PATH), r#"{"format": 9}"#).unwrap();
    });
    assert_eq!(node.prepare("r1", "capsule").unwrap().len(), 1);
    assert!(node.log().contains("cannot be restored from"), "{}", node.log());
    node.remove_all_and_check();
}

#[test]
fn a_view_of_a_single_layer_keeps_payload_mounts_out_of_the_layer() {
    let mut node = Node::start();
    let digest = node.put_payload("model");
    node.layer("capsule", "", |root| write_capsule(root, &[("w0", digest, PACK_BYTES)]));
    let mounts = node.view("view", "capsule").unwrap();
    assert_eq!(mounts[1..], [bind(&node, digest, TARGET_W0)]);
    let target = node.new_directory();
    mount::with(&mounts, &target, |root| {
        assert_eq!(fs::read(root.join(TARGET_W0)).unwrap(), pack("model"));
        let error = fs::write(root.join("file"), "x").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
        assert!(mount::below(&node.root()).is_empty(), "{:?}", mount::below(&node.root()));
    });
    node.remove_all_and_check();
}
