//! `coldsnap materialize`: the real binary, also killed.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../libcoldsnap/tests/common/recoverable.rs"]
mod recoverable;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use coldsnap::digest::Digest;
use recoverable::{Recoverable, flip};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(60);

struct Case {
    dir: tempfile::TempDir,
    made: Recoverable,
}

fn case(large: usize) -> Case {
    let dir = tempfile::tempdir().unwrap();
    let made = Recoverable::make(dir.path(), large);
    let case = Case { dir, made };
    case.configure("");
    case
}

impl Case {
    fn store(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    fn configure(&self, more: &str) {
        fs::write(self.dir.path().join("config.toml"), format!("[store]\nreserve = 0\n{more}")).unwrap();
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_coldsnap"));
        command.arg("--json").arg("--store").arg(self.store()).args(args);
        command.env_remove("COLDSNAP_STORE").env("COLDSNAP_CONFIG", self.dir.path().join("config.toml"));
        command
    }

    fn run(&self, args: &[&str]) -> (Option<i32>, Value) {
        let Output { status, stdout, stderr } = self.command(args).output().unwrap();
        let text = String::from_utf8(stdout).unwrap();
        let value = serde_json::from_str(&text)
            .unwrap_or_else(|e| panic!("{e}: {text:?} {}", String::from_utf8_lossy(&stderr)));
        (status.code(), value)
    }

    #[track_caller]
    fn succeeds(&self, args: &[&str]) -> Value {
        let (code, value) = self.run(args);
        assert_eq!(code, Some(0), "{value}");
        value
    }

    #[track_caller]
    fn fails(&self, args: &[&str], kind: &str) -> String {
        let (code, value) = self.run(args);
        assert_eq!((code, &value["error"]["kind"]), (Some(1), &json!(kind)), "{value}");
        value["error"]["message"].as_str().unwrap().to_owned()
    }

    fn materialize(&self) -> Vec<String> {
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        vec![
            "materialize".into(),
            text(self.made.root()),
            "--checkpoint".into(),
            text(self.made.checkpoint()),
        ]
    }

    fn status(&self) -> Value {
        let status = self.succeeds(&["materialize", "--status"]);
        assert_eq!(status["problems"], json!([]));
        status["materializations"][0].clone()
    }

    fn payload(&self) -> PathBuf {
        self.store().join(self.made.digest.payload_path())
    }

    /// The part of the payload that is on the disk so far.
    fn staged(&self) -> u64 {
        let entries = fs::read_dir(self.store().join("model-payloads/sha256"));
        let staged = entries
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().ends_with(".materializing"));
        staged.map(|entry| entry.metadata().map_or(0, |m| m.len())).sum()
    }
}

fn words(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

#[track_caller]
fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < until, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_capsule_is_named_by_its_tree_its_directory_or_its_artifact() {
    let case = case(9000);
    let artifact = Digest::of(&fs::read(case.made.path("artifact.json")).unwrap());
    let checkpoint = case.made.checkpoint();
    let bytes = case.made.pack.len();
    for (n, capsule) in
        [case.made.root(), case.made.path(""), case.made.path("artifact.json")].iter().enumerate()
    {
        let args = ["materialize", capsule.to_str().unwrap(), "--checkpoint", checkpoint.to_str().unwrap()];
        let report = case.succeeds(&args);
        assert_eq!(report["artifact"], artifact.to_string());
        let worker = &report["workers"][0];
        assert_eq!((&worker["worker"], &worker["bytes"]), (&json!("w0"), &json!(bytes)));
        assert_eq!(worker["payload"], case.made.digest.to_string());
        assert_eq!(worker["rebuilt_bytes"], if n == 0 { bytes } else { 0 });
        assert_eq!(worker["resumed_bytes"], 0);
    }
    assert!(fs::read(case.payload()).unwrap() == case.made.pack);
}

#[test]
fn the_status_is_one_row_per_worker() {
    let case = case(9000);
    assert_eq!(case.succeeds(&["materialize", "--status"]), json!({"materializations": [], "problems": []}));
    case.succeeds(&words(&case.materialize()));
    let mut row = case.status();
    for time in ["created_unix_ns", "updated_unix_ns"] {
        assert!(row[time].as_u64().unwrap() > 1_700_000_000_000_000_000);
        row.as_object_mut().unwrap().remove(time);
    }
    let artifact = Digest::of(&fs::read(case.made.path("artifact.json")).unwrap());
    assert_eq!(
        row,
        json!({
            "format": 1, "kind": "coldsnap-materialization", "artifact": artifact.to_string(),
            "capture_id": "cap-1767225600000-514", "worker": "w0", "payload": case.made.digest.to_string(),
            "bytes": case.made.pack.len(), "bytes_done": case.made.pack.len(), "state": "ready",
            "trigger": "command", "alive": false, "payload_here": true,
        })
    );
    let root = case.made.root();
    let of_capsule = case.succeeds(&["materialize", "--status", root.to_str().unwrap()]);
    assert_eq!(of_capsule["materializations"].as_array().unwrap().len(), 1);
    fs::remove_file(case.payload()).unwrap();
    assert_eq!(case.status()["payload_here"], false);
    let file = case.store().join("materializations").join(artifact.hex()).join("w0.json");
    fs::write(&file, "[]").unwrap();
    let status = case.succeeds(&["materialize", "--status"]);
    assert_eq!(status["materializations"], json!([]));
    assert_eq!(status["problems"][0]["path"], file.to_str().unwrap());
}

#[test]
fn a_killed_materialization_is_resumed() {
    let case = case(24 << 20);
    case.configure("[staging]\nbandwidth_limit = \"8MB\"");
    let mut child = case.command(&words(&case.materialize())).spawn().unwrap();
    wait_for("a part of the payload", || case.staged() >= 4 << 20);
    let row = case.status();
    assert_eq!((&row["state"], &row["alive"]), (&json!("writing"), &json!(true)), "{row}");
    assert_eq!(row["writer"]["pid"], child.id());
    child.kill().unwrap();
    child.wait().unwrap();
    let row = case.status();
    assert_eq!((&row["state"], &row["alive"]), (&json!("writing"), &json!(false)), "{row}");
    assert!(!case.payload().exists());
    case.configure("");
    let report = case.succeeds(&words(&case.materialize()));
    let worker = &report["workers"][0];
    assert!(worker["resumed_bytes"].as_u64().unwrap() >= 4 << 20, "{worker}");
    assert_eq!(case.status()["state"], "ready");
    assert!(fs::read(case.payload()).unwrap() == case.made.pack);
}

#[test]
fn in_the_background_it_is_scheduled_and_becomes_ready() {
    let case = case(9000);
    let report = case.succeeds(&[&words(&case.materialize())[..], &["--background"]].concat());
    assert!(report["pid"].as_u64().is_some());
    wait_for("the payload", || case.status()["state"] == "ready");
    let row = case.status();
    assert_eq!((&row["trigger"], &row["payload_here"]), (&json!("command"), &json!(true)));
    assert!(fs::read(case.payload()).unwrap() == case.made.pack);
}

#[test]
fn in_the_background_a_changed_checkpoint_is_corrupt() {
    let case = case(9000);
    flip(&case.made.checkpoint().join("model.gguf"), 5000);
    case.succeeds(&[&words(&case.materialize())[..], &["--background"]].concat());
    wait_for("the end", || case.status()["state"] == "corrupt");
    let row = case.status();
    assert_eq!(row["reason"]["kind"], "CheckpointChanged");
    assert!(row["reason"]["message"].as_str().unwrap().contains("model.gguf"), "{row}");
    assert!(!case.payload().exists());
}

#[test]
fn failures_have_kinds_and_are_recorded() {
    let case = case(9000);
    flip(&case.made.checkpoint().join("model.gguf"), 5000);
    let message = case.fails(&words(&case.materialize()), "CheckpointChanged");
    assert!(message.contains("worker w0") && message.contains("model.gguf"), "{message}");
    assert_eq!(case.status()["state"], "corrupt");
    let root = case.made.root();
    let root = root.to_str().unwrap();
    let message = case.fails(&["materialize", root], "CheckpointMissing");
    assert!(message.contains("--checkpoint") && message.contains("materialize.checkpoints"), "{message}");
    let message = case.fails(&["materialize", root, "--checkpoint", root], "CheckpointMissing");
    assert!(message.contains(root), "{message}");
    assert_eq!(case.status()["state"], "failed");
    case.fails(&["materialize", root, "--worker", "w7"], "NotRecoverable");
    case.fails(&["materialize", case.dir.path().to_str().unwrap()], "NotACapsule");
    let usage = case.command(&["materialize"]).output().unwrap();
    assert_eq!(usage.status.code(), Some(2));
}

#[test]
fn the_configuration_names_checkpoints() {
    let case = case(9000);
    let cache = case.dir.path().join("hub/models--m/snapshots");
    fs::create_dir_all(&cache).unwrap();
    fs::rename(case.made.checkpoint(), cache.join("local")).unwrap();
    let hub = case.dir.path().join("hub");
    case.configure(&format!("[materialize]\ncheckpoints = [\"/nowhere\", \"{}\"]", hub.display()));
    case.succeeds(&["materialize", case.made.root().to_str().unwrap()]);
    assert!(case.payload().exists());
    case.configure("[materialize]\nmodes = \"off\"");
    case.fails(&["materialize", "--status"], "Malformed");
}

#[test]
fn an_sglang_artifact_is_rejected_with_the_reason() {
    let case = case(9000);
    case.made.edit("artifact.json", |artifact| artifact["launch"]["engine"] = json!("sglang"));
    for more in [&[][..], &["--background"]] {
        let message = case.fails(&[&words(&case.materialize())[..], more].concat(), "MaterializeRejected");
        assert!(message.contains("SGLang") && message.contains("canonical"), "{message}");
    }
    assert!(!Path::new(&case.payload()).exists());
}
