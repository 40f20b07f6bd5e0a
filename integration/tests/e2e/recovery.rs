//! A payload that is not on the node is rebuilt from the checkpoint that the container mounts: before the restore, or beside the cold start.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use coldsnap_integration::ctr::{COLDSNAP, Launch};
use coldsnap_integration::node::Node;
use coldsnap_integration::process::wait_for;
use coldsnap_integration::{coldsnap, guest, llama};
use serde_json::{Value, json};

use crate::restore::{CAPSULE, start};
use crate::{container, story};

const MODELS: &str = "/var/lib/coldsnap/models";
const PAYLOADS: &str = "/var/lib/coldsnap/model-payloads/sha256";
const LLAMA_CAPSULE: &str = "demo.local/llama-capsule:1";

fn model() -> PathBuf {
    Path::new(MODELS).join("block.safetensors")
}

/// A capsule of a guest that has its model's directory mounted, and the payload taken away; the payload's path.
fn capsule_without_payload(node: &Node) -> Result<PathBuf> {
    fs::create_dir_all(MODELS)?;
    guest::write_model(&model(), 64)?;
    let origin = container(COLDSNAP, "origin", &["/usr/bin/guest", "block"]);
    let control = start(node, &origin.read_only_bind(Path::new(MODELS), "/models"))?;
    ensure!(guest::check(&control)? == 1);
    let model = model();
    let captured = coldsnap::capture("origin", CAPSULE, &["--model", model.to_str().context("its path")?])?;
    node.ctr().remove("origin")?;
    take_away(&captured)
}

/// Removes the payload of the one worker, as an administrator who needs the space would.
fn take_away(captured: &Value) -> Result<PathBuf> {
    let digest =
        captured["workers"][0]["payload"].as_str().with_context(|| format!("no payload: {captured}"))?;
    let hex = digest.strip_prefix("sha256:").context("not a SHA-256")?;
    let pack = Path::new(PAYLOADS).join(format!("{hex}.pack"));
    fs::remove_file(&pack)?;
    fs::remove_file(Path::new(PAYLOADS).join(format!("{hex}.pack.coldsnap-validation.json")))?;
    Ok(pack)
}

fn wanting<'a>(id: &'a str, materialize: &str) -> Launch<'a> {
    with(Launch::new(COLDSNAP, CAPSULE, id).flags(["--null-io"]), materialize)
        .read_only_bind(Path::new(MODELS), "/models")
}

fn with<'a>(launch: Launch<'a>, materialize: &str) -> Launch<'a> {
    launch.flags(["--annotation".to_owned(), format!("coldsnap.io/materialize={materialize}")])
}

fn status() -> Result<Value> {
    let status = coldsnap::run(["materialize", "--status"])?;
    Ok(status["materializations"].get(0).cloned().unwrap_or_default())
}

fn wait_for_state(state: &str) -> Result<Value> {
    wait_for(&format!("the state {state}"), Duration::from_secs(60), || {
        let row = status()?;
        Ok((row["state"] == state).then_some(row))
    })
}

#[test]
#[ignore = "needs the test node: make test"]
fn recovery_required_rebuilds_before_the_restore() {
    story("recovery_required_rebuilds_before_the_restore", COLDSNAP, |node| {
        let pack = capsule_without_payload(node)?;
        ensure!(guest::check(&start(node, &wanting("r1", "required"))?)? == 2, "it was started cold");
        ensure!(pack.exists());
        let row = status()?;
        ensure!(row["state"] == "ready" && row["trigger"] == "required", "{row}");
        // The container has a lease of its own, and the next one is as any other.
        let listed = coldsnap::run(["payload", "leases"])?;
        let owners: Vec<_> = listed["leases"].as_array().into_iter().flatten().map(|l| &l["owner"]).collect();
        ensure!(owners == ["container/default/r1"], "{listed}");
        ensure!(guest::check(&start(node, &wanting("r2", "off"))?)? == 2, "the second was started cold");
        // The story ends with the check that no lease is left.
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn recovery_async_serves_cold_and_the_next_start_restores() {
    story("recovery_async_serves_cold_and_the_next_start_restores", COLDSNAP, |node| {
        let pack = capsule_without_payload(node)?;
        // The default for this driver: no annotation.
        let launch = |id| {
            Launch::new(COLDSNAP, CAPSULE, id)
                .flags(["--null-io"])
                .read_only_bind(Path::new(MODELS), "/models")
        };
        let cold = start(node, &launch("r1"))?;
        ensure!(guest::check(&cold)? == 1, "it did not start cold");
        let row = wait_for_state("ready")?;
        ensure!(row["trigger"] == "async" && row["payload_here"] == true && row["alive"] == false, "{row}");
        ensure!(pack.exists());
        ensure!(guest::check(&cold)? == 2, "the service was disturbed");
        ensure!(guest::check(&start(node, &launch("r2"))?)? == 2, "the next start did not restore");
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn recovery_from_a_changed_checkpoint_publishes_nothing() {
    story("recovery_from_a_changed_checkpoint_publishes_nothing", COLDSNAP, |node| {
        let pack = capsule_without_payload(node)?;
        let file = fs::File::options().read(true).write(true).open(model())?;
        let mut byte = [0];
        file.read_exact_at(&mut byte, 30 << 20)?;
        file.write_all_at(&[byte[0] ^ 1], 30 << 20)?;
        ensure!(guest::check(&start(node, &wanting("r1", "required"))?)? == 1, "auto did not start cold");
        ensure!(!pack.exists(), "something was published");
        let row = status()?;
        ensure!(row["state"] == "corrupt" && row["reason"]["kind"] == "CheckpointChanged", "{row}");
        let required = wanting("r2", "required").flags(["--annotation", "coldsnap.io/restore=require"]);
        let out = node.ctr().output(required.arguments(true))?;
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        ensure!(!out.status.success() && said.contains("block.safetensors"), "{said}");
        let _ = node.ctr().output(["containers", "rm", "r2"])?;
        ensure!(guest::check(&start(node, &wanting("r3", "async"))?)? == 1);
        let row = wait_for_state("corrupt")?;
        ensure!(row["trigger"] == "async" || row["alive"] == true, "{row}");
        ensure!(!pack.exists(), "something was published");
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn recovery_off_starts_cold_and_the_command_rebuilds() {
    story("recovery_off_starts_cold_and_the_command_rebuilds", COLDSNAP, |node| {
        let pack = capsule_without_payload(node)?;
        ensure!(guest::check(&start(node, &wanting("r1", "off"))?)? == 1, "it did not start cold");
        ensure!(status()? == Value::Null && !pack.exists());
        let rebuilt = coldsnap::run(["materialize", CAPSULE, "--checkpoint", MODELS])?;
        ensure!(rebuilt["workers"][0]["rebuilt_bytes"] == json!(pack.metadata()?.len()), "{rebuilt}");
        ensure!(guest::check(&start(node, &wanting("r2", "off"))?)? == 2, "it did not restore");
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn recovery_of_a_real_server_gives_the_same_answer() {
    story("recovery_of_a_real_server_gives_the_same_answer", COLDSNAP, |node| {
        let archive = Path::new("/tmp/llama.tar");
        llama::write_image(archive)?;
        node.ctr().import(archive, COLDSNAP.snapshotter)?;
        let log = node.logs().join("server.log");
        node.ctr().start(&llama::launch(COLDSNAP, llama::IMAGE, "origin", &log)?)?;
        let answer = llama::ask(node.ctr().init_pid("origin")?, llama::ANSWER_TOKENS)?.text;
        let model = coldsnap_integration::node::model();
        let captured =
            coldsnap::capture("origin", LLAMA_CAPSULE, &["--model", model.to_str().context("its path")?])?;
        node.ctr().remove("origin")?;
        let pack = take_away(&captured)?;
        let launch = with(llama::launch(COLDSNAP, LLAMA_CAPSULE, "r1", &log)?, "required");
        node.ctr().start(&launch.flags(["--annotation", "coldsnap.io/restore=require"]))?;
        ensure!(pack.exists());
        let again = llama::ask(node.ctr().init_pid("r1")?, llama::ANSWER_TOKENS)?.text;
        ensure!(again == answer, "{again:?} instead of {answer:?}");
        Ok(())
    });
}
