//! The real binary against a hub on this machine: `payload stage`, `publish-native`, `config`.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "../../libcoldsnap/tests/hub/mod.rs"]
mod hub;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use coldsnap::digest::Digest;
use coldsnap::store::NodeStore;
use hub::artifact::artifact;
use hub::{Fault, Hub};
use serde_json::{Value, json};
use tempfile::TempDir;

const TOKEN: &str = "hf_TopSecretTokenOfThisTest";
const REPOSITORY: &str = "owner/name";

struct Story {
    hub: Hub,
    dir: TempDir,
    bytes: Vec<u8>,
    digest: Digest,
    commit: String,
    /// The payload is published in it.
    descriptor: PathBuf,
}

impl Story {
    fn new() -> Self {
        Self::with_payload_of(4 << 20)
    }

    fn with_payload_of(bytes: u32) -> Self {
        let hub = Hub::start();
        let dir = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..bytes).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
        let digest = Digest::of(&bytes);
        let commit = hub.put(REPOSITORY, &digest.hex(), &bytes);
        let mut artifact = artifact(&[(digest, bytes.len() as u64), (digest, bytes.len() as u64)]);
        let payloads = artifact.weights.model_payloads.as_mut().unwrap();
        (payloads.repository, payloads.revision) = (REPOSITORY.to_owned(), commit.clone());
        let descriptor = dir.path().join("artifact.json");
        artifact.write_new(&descriptor).unwrap();
        let story = Self { hub, dir, bytes, digest, commit, descriptor };
        story.configure("");
        story
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn store(&self) -> PathBuf {
        self.path("store")
    }

    fn configure(&self, more: &str) {
        let text = format!(
            "{more}\n[store]\nroot = {:?}\nreserve = 0\n[huggingface]\nendpoint = {:?}\n",
            self.store(),
            self.hub.endpoint()
        );
        fs::write(self.path("config.toml"), text).unwrap();
    }

    fn token_file(&self) -> PathBuf {
        let path = self.path("token");
        fs::write(&path, TOKEN).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_coldsnap"));
        command.args(args).arg("--json").env_clear();
        command.env("COLDSNAP_CONFIG", self.path("config.toml"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    #[track_caller]
    fn succeeds(&self, args: &[&str]) -> Value {
        succeeded(&self.command(args).output().unwrap())
    }

    #[track_caller]
    fn fails(&self, args: &[&str], kind: &str) -> String {
        failed(&self.command(args).output().unwrap(), kind)
    }

    /// A running `payload stage`, slow enough to be interrupted, with part of the payload on the disk.
    fn interruptible(&self) -> Child {
        let mut command = self.command(&["payload", "stage", text(&self.descriptor)]);
        let child = command.args(["--bandwidth-limit", "4MiB"]).spawn().unwrap();
        let directory = self.store().join("model-payloads/sha256");
        let until = Instant::now() + Duration::from_secs(60);
        while Instant::now() < until {
            let partial = fs::read_dir(&directory).into_iter().flatten().flatten().any(|entry| {
                let partial = entry.file_name().to_string_lossy().ends_with(".materializing");
                partial && entry.metadata().is_ok_and(|metadata| metadata.len() > 0)
            });
            if partial {
                return child;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("nothing is staged");
    }

    /// The payload is here and right.
    #[track_caller]
    fn is_here(&self) {
        let path = NodeStore::at(self.store()).payload_path(&self.digest);
        assert!(fs::read(path).unwrap() == self.bytes);
    }

    fn downloaded(&self) -> usize {
        self.hub.take_seen().iter().filter(|seen| seen.server == "cdn").map(|seen| seen.sent).sum()
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[track_caller]
fn json_of(output: &Output) -> Value {
    let text = std::str::from_utf8(&output.stdout).unwrap();
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {output:?}"))
}

#[track_caller]
fn succeeded(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    json_of(output)
}

#[track_caller]
fn failed(output: &Output, kind: &str) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = json_of(output)["error"].clone();
    assert_eq!(error["kind"], kind, "{error}");
    error["message"].as_str().unwrap().to_owned()
}

#[test]
fn an_artifacts_payloads_are_staged_from_its_own_publication() {
    let story = Story::new();
    let staged = story.succeeds(&["payload", "stage", text(&story.descriptor)]);
    let source = format!("huggingface {}/{REPOSITORY}@{}", story.hub.endpoint(), story.commit);
    let bytes = story.bytes.len();
    assert_eq!(
        staged,
        json!({"payloads": [{
            "digest": story.digest.to_string(), "bytes": bytes, "source": source,
            "fetched": bytes, "resumed": 0, "evidence": "full-sha256-this-operation",
        }]}),
        "each payload once"
    );
    story.is_here();
    let again = story.succeeds(&["payload", "stage", text(&story.descriptor)]);
    let row = &again["payloads"][0];
    assert_eq!((&row["source"], &row["fetched"]), (&Value::Null, &json!(0)));
    assert_eq!(row["evidence"], "cached-full-sha256");
    assert_eq!(story.downloaded(), bytes);
}

#[test]
fn the_configured_sources_are_tried_in_order() {
    let story = Story::new();
    let share = story.path("share");
    let sources = format!(
        "sources = [{{kind = \"directory\", path = {:?}}}, {{kind = \"huggingface\", repository = {REPOSITORY:?}, \
         revision = {:?}}}]",
        share, story.commit
    );
    story.configure(&sources);
    let (digest, bytes) = (story.digest.to_string(), story.bytes.len().to_string());
    let stage = ["payload", "stage", &digest, "--bytes", &bytes];
    // What lies at the payload's path of the share is wrong.
    let path = share.join(story.digest.payload_path());
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, vec![7; story.bytes.len()]).unwrap();
    let staged = story.succeeds(&stage);
    assert!(staged["payloads"][0]["source"].as_str().unwrap().starts_with("huggingface "));
    story.is_here();

    fs::write(&path, &story.bytes).unwrap();
    let elsewhere = story.path("elsewhere");
    let staged = story.succeeds(&[&stage[..], &["--store", text(&elsewhere)]].concat());
    assert!(staged["payloads"][0]["source"].as_str().unwrap().starts_with("directory "));
    assert!(elsewhere.join(story.digest.payload_path()).exists(), "--store replaces the configured one");

    let third = story.path("third");
    let hub = format!("huggingface:{REPOSITORY}@{}", story.commit);
    let staged = story.succeeds(&[&stage[..], &["--store", text(&third), "--source", &hub]].concat());
    assert!(
        staged["payloads"][0]["source"].as_str().unwrap().starts_with("huggingface "),
        "only this source"
    );
}

#[test]
fn what_an_interrupted_stage_left_is_continued() {
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::KILL] {
        // Written in blocks of 4 MiB: after the first one there are three seconds left.
        let story = Story::with_payload_of(16 << 20);
        let child = story.interruptible();
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        if signal == rustix::process::Signal::INT {
            failed(&output, "Cancelled");
        }
        assert!(!NodeStore::at(story.store()).payload_path(&story.digest).exists());
        story.hub.take_seen();
        let staged = story.succeeds(&["payload", "stage", text(&story.descriptor)]);
        let row = &staged["payloads"][0];
        let (fetched, resumed) = (row["fetched"].as_u64().unwrap(), row["resumed"].as_u64().unwrap());
        assert!(resumed > 0, "{row}");
        assert_eq!(fetched + resumed, story.bytes.len() as u64, "{row}");
        assert_eq!(story.downloaded() as u64, fetched, "what was here is not fetched again");
        story.is_here();
    }
}

#[test]
fn processes_that_stage_one_payload_fetch_it_once() {
    let story = Story::new();
    let args = ["payload", "stage", text(&story.descriptor)];
    let children: Vec<Child> = (0..3).map(|_| story.command(&args).spawn().unwrap()).collect();
    for child in children {
        succeeded(&child.wait_with_output().unwrap());
    }
    assert_eq!(story.downloaded(), story.bytes.len());
    story.is_here();
}

#[test]
fn the_bandwidth_limit_bounds_the_time_from_below() {
    let story = Story::new();
    story.configure("staging.bandwidth_limit = \"8MiB\"");
    let started = Instant::now();
    story.succeeds(&["payload", "stage", text(&story.descriptor)]);
    assert!(started.elapsed() >= Duration::from_millis(400), "half a second at this rate");
}

#[test]
fn the_token_is_in_no_output_and_no_log() {
    let story = Story::new();
    story.hub.require_token(TOKEN);
    let descriptor = text(&story.descriptor).to_owned();
    let stage = ["payload", "stage", &descriptor];
    let (published, token_file) = (story.path("new.json"), story.token_file());
    let publish = ["publish-native", &descriptor, "--repo", "owner/new", "--create", "-o", text(&published)];
    let mut outputs = Vec::new();
    let mut run = |args: &[&str], variable: Option<(&str, &str)>, works: bool| {
        let mut command = story.command(args);
        command.env("COLDSNAP_LOG", "trace,ureq=trace,ureq_proto=trace").envs(variable);
        let output = command.output().unwrap();
        assert_eq!(output.status.success(), works, "{output:?}");
        outputs.push((format!("{args:?}"), output));
    };
    run(&stage, None, false);
    run(&stage, Some(("HF_TOKEN", "hf_wrong_but_secret_too")), false);
    run(&stage, Some(("HF_TOKEN_PATH", "/does/not/exist")), false);
    run(&stage, Some(("HF_TOKEN", TOKEN)), true);
    let other = story.path("other");
    run(&[&stage[..], &["--store", text(&other)]].concat(), Some(("HF_TOKEN_PATH", text(&token_file))), true);
    run(&publish, Some(("HF_TOKEN", "hf_wrong_but_secret_too")), false);
    run(&[&publish[..], &["--token-file", text(&token_file)]].concat(), None, true);
    run(&["config"], Some(("HF_TOKEN", TOKEN)), true);
    // A file that others can read is refused, without showing what is in it.
    fs::set_permissions(&token_file, fs::Permissions::from_mode(0o644)).unwrap();
    run(&[&publish[..], &["--token-file", text(&token_file)]].concat(), None, false);
    for (args, output) in outputs {
        for text in [output.stdout, output.stderr] {
            let text = String::from_utf8(text).unwrap();
            for secret in [TOKEN, "hf_wrong", "Signature="] {
                assert!(!text.contains(secret), "{args}: {secret} in {text}");
            }
        }
    }
    let logged = story.hub.take_seen();
    assert!(logged.iter().filter(|seen| seen.server == "cdn").all(|seen| seen.authorization.is_none()));
    assert!(!fs::read_to_string(published).unwrap().contains(TOKEN));
}

#[test]
fn a_payload_that_no_source_has_is_an_error_that_names_each() {
    let story = Story::new();
    story.hub.fault(Fault::Status("resolve", 403, None), 9);
    let message = story.fails(&["payload", "stage", text(&story.descriptor)], "PayloadUnavailable");
    assert!(message.contains("huggingface http") && message.contains("403"), "{message}");
    let digest = Digest::of(b"nothing").to_string();
    let message = story.fails(&["payload", "stage", &digest, "--bytes", "4096"], "PayloadUnavailable");
    assert!(message.contains("no source is configured"), "{message}");
    story.fails(&["payload", "stage", &digest], "Malformed");
    story.fails(&["payload", "stage", text(&story.path("config.toml"))], "Malformed");
    story.fails(&["payload", "stage", text(story.dir.path())], "NotACapsule");
    let output = story.command(&["payload", "stage", &digest, "--source", "ftp://x"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn what_was_published_is_staged_on_another_node() {
    let story = Story::new();
    story.succeeds(&["payload", "stage", text(&story.descriptor)]);
    let publish = ["publish-native", text(&story.descriptor), "--repo", "owner/new"];
    story.fails(&publish, "Hub");
    let dry = story.succeeds(&[&publish[..], &["--create", "--dry-run"]].concat());
    assert_eq!(
        (&dry["created"], &dry["committed"], &dry["output"]),
        (&json!(true), &json!(true), &Value::Null)
    );
    assert_eq!(story.hub.head("owner/new"), None, "a dry run uploads nothing");

    story.hub.fault(Fault::Status("/commit/", 403, None), 1);
    story.fails(&[&publish[..], &["--create"]].concat(), "Hub");
    let output = story.path("artifact.published.json");
    assert!(!output.exists(), "a failure in the middle leaves no descriptor");

    let published = story.succeeds(&[&publish[..], &["--create", "--private"]].concat());
    let revision = story.hub.head("owner/new").unwrap();
    assert_eq!(published["revision"], revision.as_str());
    assert_eq!(published["output"], text(&output));
    let path = story.digest.payload_path().display().to_string();
    let row = json!({
        "digest": story.digest.to_string(), "path": path, "bytes": story.bytes.len(), "action": "commit",
    });
    assert_eq!(published["payloads"], json!([row]), "the hub's storage had it");
    story.fails(&publish, "AlreadyExists");

    let other = story.path("other");
    let staged = story.succeeds(&["payload", "stage", text(&output), "--store", text(&other)]);
    assert!(staged["payloads"][0]["source"].as_str().unwrap().contains("owner/new"));
}

#[test]
fn the_configuration_is_printed_and_checked() {
    let story = Story::new();
    let found = story.succeeds(&["config"]);
    assert_eq!(found["exists"], true);
    assert_eq!(found["config"]["store"]["root"], text(&story.store()));
    assert_eq!(found["config"]["huggingface"]["endpoint"], story.hub.endpoint());
    let found = story.succeeds(&["config", "--store", "/elsewhere"]);
    assert_eq!(found["config"]["store"]["root"], "/elsewhere");

    let bad = story.path("bad.toml");
    fs::write(&bad, "[huggingface]\ntoken = \"hf_x\"\n").unwrap();
    let message = story.fails(&["config", text(&bad)], "Malformed");
    assert!(message.contains("bad.toml") && message.contains("token"), "{message}");
    story.fails(&["config", "/does/not/exist.toml"], "Io");
    story.fails(&["payload", "ls", "--config", "/does/not/exist.toml"], "Io");
    let mut plain = story.command(&["config"]);
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/coldsnap/config.toml");
    succeeded(&plain.arg(example).output().unwrap());
}
