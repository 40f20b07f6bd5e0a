//! Several processes of one container that each own model memory.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use coldsnap_integration::ctr::COLDSNAP;
use coldsnap_integration::node::Node;
use coldsnap_integration::{guest, memory};
use serde_json::Value;

use crate::restore::{capsule_container, make_capsule, start};
use crate::story;

/// MiB of the guests' model.
const MIB: u64 = 64;

/// The payload objects of the capsule that container `id` was restored from.
fn objects(node: &Node, id: &str) -> Result<Vec<Value>> {
    let pid = node.ctr().task(id)?.pid;
    let path = format!("/proc/{pid}/root/opt/coldsnap/capsule/artifact.json");
    let artifact: Value = serde_json::from_slice(&fs::read(path)?)?;
    artifact["weights"]["model_payloads"]["objects"].as_array().cloned().context("no payload objects")
}

fn packs() -> Result<Vec<u64>> {
    let mut sizes = Vec::new();
    for entry in fs::read_dir("/var/lib/coldsnap/model-payloads/sha256")? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".pack") && !name.starts_with('.') {
            sizes.push(entry.metadata()?.len());
        }
    }
    Ok(sizes)
}

#[test]
#[ignore = "needs the test node: make test"]
fn data_parallel_workers_share_one_object() {
    story("data_parallel_workers_share_one_object", COLDSNAP, |node| {
        let model = Path::new("/tmp/block.safetensors");
        guest::write_model(model, 64)?;
        let captured = make_capsule(node, "data-parallel", &["--model", "/tmp/block.safetensors"])?;
        ensure!(captured["new_payload_bytes"] == MIB << 20, "not stored once: {captured}");
        ensure!(packs()? == [MIB << 20], "{:?}", packs()?);
        let control = start(node, &capsule_container("r1"))?;
        ensure!(guest::check(&control)? == 2, "r1 was started cold");
        let objects = objects(node, "r1")?;
        ensure!(objects.len() == 2 && objects[0]["path"] == objects[1]["path"], "{objects:?}");
        ensure!(objects[0]["owner"] != objects[1]["owner"], "{objects:?}");

        let used = memory::of(&node.ctr().pids("r1")?)?;
        ensure!(used.anonymous_kb < 12 << 10, "model memory of its own: {used:?}");
        ensure!(used.proportional_kb < (MIB + 24) << 10, "both workers share one copy: {used:?}");
        // What one worker writes is its own.
        guest::ask(&control, "write")?;
        guest::check(&control)?;
        let anonymous = memory::of(&node.ctr().pids("r1")?)?.anonymous_kb;
        ensure!((16 << 10..32 << 10).contains(&anonymous), "a quarter of one was written, {anonymous} KiB");
        ensure!(guest::check(&start(node, &capsule_container("r2"))?)? == 2, "r2 was started cold");
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn tensor_parallel_workers_have_one_object_each() {
    story("tensor_parallel_workers_have_one_object_each", COLDSNAP, |node| {
        guest::write_model(Path::new("/tmp/block.safetensors"), 64)?;
        guest::write_shards(Path::new("/tmp/shards"), 64)?;
        // Halves of one tensor, and a file for each worker.
        for model in ["/tmp/block.safetensors", "/tmp/shards"] {
            let captured = make_capsule(node, "tensor-parallel", &["--model", model])?;
            ensure!(captured["payload_bytes"] == MIB << 20, "{model}: {captured}");
            ensure!(captured["model_bytes_matched_ratio"] == 1.0, "{model}: {captured}");
            // The bytes are the same whatever file they come from.
            ensure!(packs()? == [MIB << 19; 2], "{model}: {:?}", packs()?);
            let control = start(node, &capsule_container("r1"))?;
            ensure!(guest::check(&control)? == 2, "{model}: r1 was started cold");
            let objects = objects(node, "r1")?;
            ensure!(objects.len() == 2 && objects[0]["path"] != objects[1]["path"], "{objects:?}");
            let anonymous = memory::of(&node.ctr().pids("r1")?)?.anonymous_kb;
            ensure!(anonymous < 12 << 10, "{model}: {anonymous} KiB of model memory of its own");
            node.ctr().remove("r1")?;
        }
        Ok(())
    });
}
