//! The commands that look: `doctor` at the node, `inspect` at a capsule, `verify` and `payload ls` at the store.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use coldsnap_integration::ctr::COLDSNAP;
use coldsnap_integration::node::program;
use coldsnap_integration::{coldsnap, guest, process};
use serde_json::Value;

use crate::restore::{CAPSULE, make_capsule};
use crate::story;

const MODEL: &str = "/tmp/inspected.safetensors";

#[test]
#[ignore = "needs the test node: make test"]
fn doctor_finds_a_healthy_node_and_what_is_missing() {
    story("doctor", COLDSNAP, |_| {
        let shims = program("coldsnap").parent().context("the binaries' directory")?.to_owned();
        let path = format!("{}:{}", shims.display(), std::env::var("PATH")?);
        let healthy = process::run(coldsnap::command(["doctor"]).env("PATH", &path))?;
        let healthy: Vec<Value> = serde_json::from_str(&healthy)?;
        ensure!(healthy.iter().all(|check| check["status"] != "failed"), "{healthy:?}");
        for name in ["kernel", "criu", "runc", "containerd", "snapshotter", "shim", "/run", "node store"] {
            ensure!(healthy.iter().any(|check| check["name"] == name), "{name} was not looked at");
        }
        // Without the shim in the PATH and with nobody at the socket it says so, in one value, and fails.
        let ill = process::output(
            coldsnap::command(["doctor", "--address", "/run/nobody.sock"]).env("PATH", "/usr/sbin:/usr/bin"),
        )?;
        ensure!(ill.status.code() == Some(1));
        let ill: Vec<Value> = serde_json::from_slice(&ill.stdout)?;
        for name in ["containerd", "shim"] {
            let check = ill.iter().find(|check| check["name"] == name).context("not looked at")?;
            ensure!(check["status"] == "failed" && check["help"] != "", "{check}");
        }
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn a_capsule_is_inspected_and_its_payload_verified() {
    story("inspect", COLDSNAP, |node| {
        guest::write_model(MODEL.as_ref(), 64)?;
        let captured = make_capsule(node, "block", &["--model", MODEL])?;
        let digest = captured["workers"][0]["payload"].as_str().context("no payload")?.to_owned();

        let seen = coldsnap::run(["inspect", CAPSULE])?;
        ensure!(seen["driver"] == "host" && seen["capture_id"] == captured["capture_id"], "{seen}");
        ensure!(
            seen["workers"][0]["payload"] == digest.as_str() && seen["restorable_here"] == true,
            "{seen}"
        );
        ensure!(seen["needs_spec"]["args"][1] == "block", "{seen}");

        let listed = coldsnap::run(["payload", "ls"])?;
        ensure!(listed.to_string().contains(&digest), "{listed}");
        let pack =
            format!("/var/lib/coldsnap/model-payloads/sha256/{}.pack", digest.trim_start_matches("sha256:"));
        let verified = coldsnap::run(["verify", &pack, "--sha256", &digest])?;
        ensure!(verified["evidence"] == "cached-full-sha256" && verified["bytes_hashed"] == 0, "{verified}");

        let kept = Path::new("/var/lib/coldsnap/kept.pack");
        fs::rename(&pack, kept)?;
        ensure!(coldsnap::run(["inspect", CAPSULE])?["restorable_here"] == false);
        fs::rename(kept, &pack)?;
        ensure!(coldsnap::fails(["inspect", guest::IMAGE])?.kind == "NotACapsule");
        Ok(())
    });
}
