//! Overlays: a restored container is captured again, and later starts of the image on this node, and only there, use the result.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use coldsnap_integration::ctr::{COLDSNAP, Launch};
use coldsnap_integration::node::Node;
use coldsnap_integration::process::wait_for;
use coldsnap_integration::{coldsnap, guest, memory};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::restore::{CAPSULE, capsule_container, make_capsule, start};
use crate::story;

const MODEL: &str = "/tmp/block.safetensors";
const MACHINE_ID: &str = "/etc/machine-id";
/// A file that only the recaptured container has.
const FILE: &str = "/etc/local";

fn annotated<'a>(launch: Launch<'a>, annotation: &str) -> Launch<'a> {
    launch.flags(["--annotation".to_owned(), annotation.to_owned()])
}

/// Makes the capsule with a model payload, restores it as `r1`, changes memory and a file there, and captures it again. The
/// guest in the portable capsule was asked once, that in the overlay four times.
fn make_overlay(node: &Node) -> Result<Value> {
    fs::write(MACHINE_ID, "00112233445566778899aabbccddeeff\n")?;
    guest::write_model(MODEL.as_ref(), 64)?;
    make_capsule(node, "block", &["--model", MODEL])?;
    let control = start(node, &capsule_container("r1"))?;
    ensure!(guest::check(&control)? == 2, "r1 was started cold");
    guest::ask(&control, "write")?;
    ensure!(guest::check(&control)? == 4);
    node.ctr().exec("r1", &["/bin/sh", "-c", "echo here > /etc/local"])?;
    let created = coldsnap::run(["overlay", "create", "r1"])?;
    ensure!(created["left_running"] == true && created["new_payload_bytes"] == 0, "{created}");
    ensure!(guest::check(&control)? == 5, "the captured container does not go on");
    node.ctr().remove("r1")?;
    Ok(created)
}

fn text<'a>(value: &'a Value, field: &str) -> Result<&'a str> {
    value[field].as_str().with_context(|| format!("no {field} in {value}"))
}

fn remove_overlay(created: &Value) -> Result<()> {
    coldsnap::run(["overlay", "rm", text(created, "overlay")?]).map(drop)
}

fn has_file(node: &Node, id: &str) -> Result<bool> {
    Ok(node.ctr().output(node.ctr().exec_arguments(id, &["/usr/bin/cat", FILE]))?.status.success())
}

/// Waits until the log of containerd, which has the shims' lines, says this `count` times.
fn logged(node: &Node, words: &[&str]) -> Result<()> {
    let path = node.logs().join("containerd.log");
    wait_for(&format!("{words:?} in the log"), Duration::from_secs(5), || {
        let log = fs::read_to_string(&path)?;
        Ok(log.lines().any(|line| words.iter().all(|word| line.contains(word))).then_some(()))
    })
}

fn packs() -> Result<usize> {
    let names = fs::read_dir("/var/lib/coldsnap/model-payloads/sha256")?;
    let names = names.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let names: Vec<String> = names.collect::<std::io::Result<_>>()?;
    Ok(names.iter().filter(|name| name.ends_with(".pack") && !name.starts_with('.')).count())
}

#[test]
#[ignore = "needs the test node: make test"]
fn a_later_start_uses_the_overlay() {
    story("a_later_start_uses_the_overlay", COLDSNAP, |node| {
        let created = make_overlay(node)?;
        let id = text(&created, "overlay")?;
        for container in ["r2", "r3"] {
            let control = start(node, &capsule_container(container))?;
            ensure!(guest::check(&control)? == 5, "{container} is not from the overlay");
            ensure!(has_file(node, container)?, "{container} misses the changed file");
        }
        logged(node, &["r2", id, "takes the place"])?;
        // Combined with the native payload: nothing of it is copied, not in the store and not in memory.
        ensure!(packs()? == 1);
        let anonymous = memory::of(&node.ctr().pids("r2")?)?.anonymous_kb;
        // Every fourth page was written: runs too short to be mapped.
        ensure!((16 << 10..24 << 10).contains(&anonymous), "{anonymous} KiB of its own");
        let listed = coldsnap::run(["overlay", "ls"])?;
        ensure!(listed["overlays"][0]["id"] == id && listed["overlays"][0]["state"] == "in use", "{listed}");
        let failure = coldsnap::fails(["overlay", "rm", id])?;
        ensure!(failure.kind == "OverlayInUse", "{failure:?}");
        node.ctr().remove_all()?;
        // The snapshots' leases end with containerd's collection of the snapshots.
        wait_for("only the overlay's lease to be left", Duration::from_secs(5), || {
            Ok((fs::read_dir("/var/lib/coldsnap/leases")?.count() == 1).then_some(()))
        })?;
        coldsnap::run(["overlay", "rm", id])?;
        ensure!(
            guest::check(&start(node, &capsule_container("r4"))?)? == 2,
            "the portable capsule is used again"
        );
        ensure!(packs()? == 1, "the payload stays");
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn a_start_that_wants_no_overlay_gets_none() {
    story("a_start_that_wants_no_overlay_gets_none", COLDSNAP, |node| {
        let created = make_overlay(node)?;
        let never = annotated(capsule_container("never"), "coldsnap.io/overlay=never");
        ensure!(guest::check(&start(node, &never)?)? == 2, "the portable capsule");
        ensure!(!has_file(node, "never")?);
        let out = node
            .ctr()
            .output(annotated(capsule_container("odd"), "coldsnap.io/overlay=sometimes").arguments(true))?;
        ensure!(
            !out.status.success() && String::from_utf8_lossy(&out.stderr).contains("sometimes"),
            "{out:?}"
        );
        let _ = node.ctr().output(["containers", "rm", "odd"])?;
        // A cold start never has the overlay's files.
        let cold = annotated(capsule_container("cold"), "coldsnap.io/restore=never");
        ensure!(guest::check(&start(node, &cold)?)? == 1);
        ensure!(!has_file(node, "cold")?);
        let other = capsule_container("other").command(["/usr/bin/guest", "threads"]);
        ensure!(guest::check(&start(node, &other)?)? == 1);
        ensure!(!has_file(node, "other")?);
        let required = annotated(capsule_container("required"), "coldsnap.io/restore=require");
        ensure!(guest::check(&start(node, &required)?)? == 5, "a required restore may be that of an overlay");
        node.ctr().remove_all()?;
        remove_overlay(&created)
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn a_changed_binding_means_the_portable_capsule() {
    story("a_changed_binding_means_the_portable_capsule", COLDSNAP, |node| {
        let created = make_overlay(node)?;
        let id = text(&created, "overlay")?;
        let document = PathBuf::from(text(&created, "directory")?).join("overlay.json");
        let original = fs::read(&document)?;
        let explained = coldsnap::run(["overlay", "explain", CAPSULE])?;
        ensure!(explained["chosen"] == id, "{explained}");
        // As if it had been captured with another CRIU on another kernel.
        let mut edited: Value = serde_json::from_slice(&original)?;
        edited["target"]["versions"]["criu"] = json!("3.99");
        edited["target"]["versions"]["kernel"] = json!("5.4.0-elsewhere");
        fs::write(&document, serde_json::to_vec(&edited)?)?;
        ensure!(guest::check(&start(node, &capsule_container("r2"))?)? == 2, "the overlay was used");
        ensure!(!has_file(node, "r2")?);
        logged(node, &["r2", id, "target.versions.criu was 3.99", "5.4.0-elsewhere"])?;
        let explained = coldsnap::run(["overlay", "explain", CAPSULE])?;
        ensure!(explained["chosen"].is_null(), "{explained}");
        let bindings = explained["overlays"][0]["bindings"].as_array().context("bindings")?;
        let unequal: Vec<&Value> =
            bindings.iter().filter(|b| b["equal"] == false).map(|b| &b["field"]).collect();
        ensure!(unequal == ["target.versions.kernel", "target.versions.criu"], "{unequal:?}");
        fs::write(&document, &original)?;
        ensure!(guest::check(&start(node, &capsule_container("r3"))?)? == 5);
        // Another machine with the same store.
        fs::write(MACHINE_ID, "ffeeddccbbaa99887766554433221100\n")?;
        ensure!(guest::check(&start(node, &capsule_container("r4"))?)? == 2, "the overlay was used");
        logged(node, &["r4", id, "target.hosts"])?;
        fs::remove_file(MACHINE_ID)?;
        ensure!(guest::check(&start(node, &capsule_container("r5"))?)? == 2, "the overlay was used");
        logged(node, &["r5", id, MACHINE_ID])?;
        node.ctr().remove_all()?;
        remove_overlay(&created)
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn an_overlay_that_fails_gives_way_to_the_portable_capsule() {
    story("an_overlay_that_fails_gives_way_to_the_portable_capsule", COLDSNAP, |node| {
        let created = make_overlay(node)?;
        let id = text(&created, "overlay")?;
        let directory = PathBuf::from(text(&created, "directory")?);
        let capsule = directory.join("capsule/opt/coldsnap/capsule");
        let images = capsule.join("images");
        // As the documents say that they are, so that only CRIU notices, at the start.
        let documents = [directory.join("overlay.json"), capsule.join("artifact.json")];
        let mut kept = Vec::new();
        for path in &documents {
            kept.push((path.clone(), fs::read(path)?));
        }
        for entry in fs::read_dir(&images)? {
            let path = entry?.path();
            if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("core-")) {
                let bytes = fs::read(&path)?;
                let mut broken = bytes.clone();
                broken[8..].fill(0xff);
                let (before, after) =
                    (hex::encode(Sha256::digest(&bytes)), hex::encode(Sha256::digest(&broken)));
                for document in &documents {
                    let text = fs::read_to_string(document)?;
                    ensure!(text.contains(&before), "{} does not name {before}", document.display());
                    fs::write(document, text.replace(&before, &after))?;
                }
                fs::write(&path, broken)?;
                kept.push((path, bytes));
            }
        }
        ensure!(kept.len() > documents.len(), "no CRIU image in the overlay");
        let control = start(node, &annotated(capsule_container("r2"), "coldsnap.io/restore=require"))?;
        ensure!(guest::check(&control)? == 2, "not from the portable capsule");
        ensure!(!has_file(node, "r2")?);
        logged(node, &["r2", id, "could not be restored", "CRIU says"])?;
        for (path, bytes) in kept {
            fs::write(path, bytes)?;
        }
        // What a check at the creation finds.
        fs::remove_file(images.join("pstree.img"))?;
        ensure!(guest::check(&start(node, &capsule_container("r3"))?)? == 2);
        logged(node, &["r3", id, "pstree.img"])?;
        node.ctr().remove_all()?;
        remove_overlay(&created)
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn a_container_of_an_overlay_is_captured_as_a_whole() {
    story("a_container_of_an_overlay_is_captured_as_a_whole", COLDSNAP, |node| {
        let first = make_overlay(node)?;
        let control = start(node, &capsule_container("r2"))?;
        ensure!(guest::check(&control)? == 5);
        node.ctr().exec("r2", &["/bin/sh", "-c", "echo more > /etc/more"])?;
        let second = coldsnap::run(["overlay", "create", "r2"])?;
        ensure!(guest::check(&control)? == 6);
        // The newest one is used, and has what both changed.
        let control = start(node, &capsule_container("r3"))?;
        ensure!(guest::check(&control)? == 6, "not from the second overlay");
        ensure!(node.ctr().exec("r3", &["/usr/bin/cat", FILE, "/etc/more"])? == "here\nmore");
        // A capsule of it is portable: it needs no overlay.
        let image = "demo.local/guest-capsule:2";
        let captured = coldsnap::capture("r3", image, &[])?;
        ensure!(captured["new_payload_bytes"] == 0, "{captured}");
        node.ctr().remove_all()?;
        remove_overlay(&first)?;
        remove_overlay(&second)?;
        let control = start(node, &Launch::new(COLDSNAP, image, "r4").flags(["--null-io"]))?;
        ensure!(guest::check(&control)? == 7);
        ensure!(node.ctr().exec("r4", &["/usr/bin/cat", FILE, "/etc/more"])? == "here\nmore");
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn rm_removes_capsule_overlays_and_leases_and_no_payload() {
    story("rm_removes_capsule_overlays_and_leases_and_no_payload", COLDSNAP, |node| {
        let created = make_overlay(node)?;
        let id = text(&created, "overlay")?.to_owned();
        // A second capsule of the same model.
        let control = start(node, &annotated(capsule_container("r2"), "coldsnap.io/overlay=never"))?;
        guest::check(&control)?;
        let other = "demo.local/guest-capsule:other";
        coldsnap::capture("r2", other, &["--leave-running"])?;

        let failure = coldsnap::fails(["rm", CAPSULE])?;
        ensure!(failure.kind == "InUse" && failure.message.contains("r2"), "{failure:?}");
        node.ctr().remove("r2")?;
        let images = || node.ctr().run(["images", "list", "--quiet"]);
        let planned = coldsnap::run(["rm", "--dry-run", CAPSULE])?;
        ensure!(planned["overlays"] == json!([id]) && planned["images"] == json!([CAPSULE]), "{planned}");
        ensure!(images()?.contains(CAPSULE) && Path::new(text(&created, "directory")?).exists());

        let removed = coldsnap::run(["rm", CAPSULE])?;
        ensure!(removed["overlays"] == json!([id]) && removed["images"] == json!([CAPSULE]), "{removed}");
        ensure!(!images()?.lines().any(|line| line == CAPSULE), "{}", images()?);
        ensure!(!Path::new(text(&created, "directory")?).exists());
        ensure!(fs::read_dir("/var/lib/coldsnap/leases")?.count() == 0, "a lease is left");
        ensure!(packs()? == 1, "the payload that another capsule uses is gone");
        ensure!(removed["payloads"][0]["here"] == true, "{removed}");
        let failure = coldsnap::fails(["rm", CAPSULE])?;
        ensure!(failure.kind == "NotFound", "{failure:?}");

        let control = start(node, &Launch::new(COLDSNAP, other, "r3").flags(["--null-io"]))?;
        ensure!(guest::check(&control)? == 3, "the other capsule does not come back");
        node.ctr().remove("r3")?;
        // By the capture's id.
        let inspected = coldsnap::run(["inspect", other])?;
        let removed = coldsnap::run(["rm", text(&inspected, "capture_id")?])?;
        ensure!(removed["images"] == json!([other]), "{removed}");
        ensure!(packs()? == 1);
        Ok(())
    });
}
