//! A capsule whose payload is missing: what the modes of materialization do at a start.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use containerd_shim_protos::api::CreateTaskRequest;
use containerd_shim_protos::ttrpc::{self, Code, context};
use serde_json::{Value, json};

use crate::harness::{Shim, write_script};
use crate::recoverable::{Recoverable, flip};
use crate::{code, start};

const MATERIALIZE: &str = "coldsnap.io/materialize";
const RESTORE: &str = "coldsnap.io/restore";

/// A container of a capsule image whose payload is not in the store; the checkpoint is mounted at `/models`.
struct Story {
    shim: Shim,
    made: Recoverable,
}

async fn story(annotations: Value, prepare: impl FnOnce(&Path, &Recoverable)) -> Story {
    let mut made = None;
    let shim = Shim::start_prepared("exec sleep 1000", |directory| {
        let sample = Recoverable::make(directory, 300_000);
        let models = sample.checkpoint();
        let spec = json!({
            "root": {"path": "rootfs"}, "linux": {"namespaces": [{"type": "pid"}]}, "annotations": annotations,
            "process": {"args": []},
            "mounts": [{"destination": "/models", "type": "bind", "source": models, "options": ["rbind", "ro"]}],
        });
        fs::write(directory.join("bundle/config.json"), spec.to_string()).unwrap();
        sample.edit("capture.json", |facts| facts["checkpoint"] = json!([{"path": "/models"}]));
        fs::write(directory.join("config.toml"), "[store]\nreserve = 0").unwrap();
        prepare(&models, &sample);
        copy(&sample.root().join("opt"), &directory.join("bundle/rootfs/opt"));
        made = Some(sample);
    })
    .await;
    Story { shim, made: made.unwrap() }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to.join(entry.file_name())),
            false => drop(fs::copy(entry.path(), to.join(entry.file_name())).unwrap()),
        }
    }
}

impl Story {
    async fn create(&self) -> ttrpc::Result<u32> {
        let request = self.shim.create_request();
        self.shim.task.create(context::Context::default(), &request).await.map(|created| created.pid)
    }

    fn payload(&self) -> PathBuf {
        self.shim.path("store").join(self.made.digest.payload_path())
    }

    fn leases(&self) -> usize {
        fs::read_dir(self.shim.path("store/leases")).map_or(0, |entries| entries.count())
    }

    fn state(&self) -> Option<Value> {
        let found = fs::read_dir(self.shim.path("store/materializations")).ok()?.next()?.unwrap().path();
        Some(serde_json::from_slice(&fs::read(found.join("w0.json")).ok()?).unwrap())
    }

    fn spec(&self) -> Value {
        serde_json::from_slice(&fs::read(self.shim.path("bundle/config.json")).unwrap()).unwrap()
    }

    async fn end(self) {
        let _ = self.shim.kill("", 9).await;
        let _ = self.shim.exit_status("").await;
        self.shim.delete("").await.unwrap();
        assert_eq!(self.leases(), 0, "a lease is left");
        self.shim.shut_down().await;
    }
}

fn message(error: ttrpc::Result<u32>) -> String {
    match error.unwrap_err() {
        ttrpc::Error::RpcStatus(status) => status.message().to_owned(),
        other => panic!("no status: {other}"),
    }
}

#[tokio::test]
async fn required_rebuilds_before_the_restore_and_binds_what_it_made() {
    let story = story(json!({MATERIALIZE: "required", RESTORE: "require"}), |_, _| {}).await;
    assert_eq!(story.create().await.unwrap(), 0, "a restore has no pid at create");
    assert!(fs::read(story.payload()).unwrap() == story.made.pack);
    let mounts = story.spec()["mounts"].clone();
    let bind = mounts.as_array().unwrap().iter().find(|m| m["source"] == story.payload().to_str().unwrap());
    assert_eq!(
        *bind.unwrap(),
        json!({
            "destination": "/opt/coldsnap/capsule/hydration/w0/model-weights.pack", "type": "bind",
            "source": story.payload(), "options": ["bind", "ro", "nosuid", "nodev"],
        })
    );
    assert_eq!(story.leases(), 1);
    let state = story.state().unwrap();
    assert_eq!((&state["state"], &state["trigger"]), (&json!("ready"), &json!("required")));
    let started = story.shim.task.start(context::Context::default(), &start("")).await.unwrap();
    assert!(started.pid > 0);
    story.end().await;
}

#[tokio::test]
async fn what_came_after_the_container_was_prepared_is_bound_too() {
    let story = story(json!({MATERIALIZE: "required", RESTORE: "require"}), |_, sample| {
        let payload = sample.dir.join("store").join(sample.digest.payload_path());
        fs::create_dir_all(payload.parent().unwrap()).unwrap();
        fs::write(payload, &sample.pack).unwrap();
        // Not even the checkpoint is needed.
        sample.edit("capture.json", |facts| facts["checkpoint"] = json!([]));
    })
    .await;
    assert_eq!(story.create().await.unwrap(), 0);
    assert_eq!(story.leases(), 1);
    story.end().await;
}

#[tokio::test]
async fn a_failure_of_required_fails_the_restore_with_its_reason() {
    let story = story(json!({MATERIALIZE: "required", RESTORE: "require"}), |models, _| {
        flip(&models.join("model.gguf"), 200_000);
    })
    .await;
    let error = story.create().await;
    let said = message(error);
    for part in ["not rebuilt", "not the captured one", "model.gguf"] {
        assert!(said.contains(part), "expected {part:?}: {said}");
    }
    assert!(!story.payload().exists());
    assert_eq!((story.state().unwrap()["state"].clone(), story.leases()), (json!("corrupt"), 0));
    story.shim.shut_down().await;
}

#[tokio::test]
async fn a_failure_of_required_in_auto_is_a_cold_start_with_the_reason() {
    let mut story = story(json!({MATERIALIZE: "required"}), |models, _| {
        fs::remove_file(models.join("model.gguf")).unwrap();
    })
    .await;
    assert!(story.create().await.unwrap() > 0, "it did not start cold");
    assert_eq!(story.state().unwrap()["reason"]["kind"], "CheckpointMissing");
    assert_eq!(story.shim.topics(2).await, ["/coldsnap/restore-fallback", "/tasks/create"]);
    story.end().await;
}

#[tokio::test]
async fn off_leaves_everything_as_it_is() {
    let story = story(json!({MATERIALIZE: "off"}), |_, _| {}).await;
    assert!(story.create().await.unwrap() > 0, "it did not start cold");
    assert!(story.state().is_none() && !story.payload().exists());
    story.end().await;
}

#[tokio::test]
async fn async_serves_cold_and_leaves_the_work_to_a_process_in_the_background() {
    // The engine's default, without any annotation.
    let story = story(json!({}), |_, sample| {
        let asked = sample.dir.join("asked");
        let script = format!("#!/bin/sh\necho \"$@\" >{0}.partial\nmv {0}.partial {0}\n", asked.display());
        write_script(&sample.dir.join("bin/coldsnap"), &script);
    })
    .await;
    assert!(story.create().await.unwrap() > 0, "it did not start cold");
    let asked = story.shim.path("asked");
    let until = Instant::now() + Duration::from_secs(20);
    while !asked.exists() {
        assert!(Instant::now() < until, "the command was not started");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let store = story.shim.path("store");
    let directory = fs::read_dir(store.join("materializations")).unwrap().next().unwrap().unwrap().path();
    assert_eq!(
        fs::read_to_string(&asked).unwrap().trim_end(),
        format!("--store {} materialize --request {}", store.display(), directory.display())
    );
    let request: Value = serde_json::from_slice(&fs::read(directory.join(".request.json")).unwrap()).unwrap();
    assert_eq!(
        request,
        json!({
            "kind": "coldsnap-materialization-request", "workers": ["w0"], "trigger": "async",
            "places": [{"root": story.made.checkpoint(), "path": ""}],
        })
    );
    let state = story.state().unwrap();
    assert_eq!((&state["state"], &state["trigger"]), (&json!("scheduled"), &json!("async")));
    // What the process needs of the capsule is in the store: the container may go.
    for name in ["artifact.json", "hydration/w0/native-manifest.json", "hydration/w0/manifest.json"] {
        let kept = fs::read(directory.join("opt/coldsnap/capsule").join(name)).unwrap();
        assert!(kept == fs::read(story.made.path(name)).unwrap(), "{name}");
    }
    story.end().await;
}

#[tokio::test]
async fn async_without_the_command_or_a_checkpoint_is_recorded_and_serves() {
    let without_command = story(json!({MATERIALIZE: "async"}), |_, _| {}).await;
    assert!(without_command.create().await.unwrap() > 0, "it did not start cold");
    let state = without_command.state().unwrap();
    assert_eq!(state["state"], "failed");
    assert!(state["reason"]["message"].as_str().unwrap().contains("beside the shim"), "{state}");
    without_command.end().await;

    let without_checkpoint = story(json!({}), |_, sample| {
        sample.edit("capture.json", |facts| drop(facts.as_object_mut().unwrap().remove("checkpoint")));
    })
    .await;
    assert!(without_checkpoint.create().await.unwrap() > 0, "it did not start cold");
    assert_eq!(without_checkpoint.state().unwrap()["reason"]["kind"], "CheckpointMissing");
    without_checkpoint.end().await;
}

#[tokio::test]
async fn a_refused_container_has_nothing_rebuilt_beside_it() {
    let story = story(json!({MATERIALIZE: "async", RESTORE: "require"}), |_, _| {}).await;
    assert!(message(story.create().await).contains("is not on this node"));
    assert!(story.state().is_none());
    story.shim.shut_down().await;
}

#[tokio::test]
async fn an_sglang_artifact_rejects_both_with_the_reason() {
    for mode in ["async", "required"] {
        let story = story(json!({MATERIALIZE: mode, RESTORE: "require"}), |_, sample| {
            sample.edit("artifact.json", |artifact| artifact["launch"]["engine"] = json!("sglang"));
        })
        .await;
        let said = message(story.create().await);
        assert!(said.contains("SGLang") && said.contains("canonical"), "{said}");
        assert!(story.state().is_none() && !story.payload().exists());
        story.shim.shut_down().await;
    }
}

#[tokio::test]
async fn another_mode_is_an_error_of_the_request() {
    let story = story(json!({MATERIALIZE: "sometimes"}), |_, _| {}).await;
    let request: CreateTaskRequest = story.shim.create_request();
    let created = story.shim.task.create(context::Context::default(), &request).await;
    assert_eq!(code(created), Code::INVALID_ARGUMENT);
    story.shim.shut_down().await;
}
