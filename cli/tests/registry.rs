//! `payload push` and `publish` where no registry is needed to know the answer. What they do with one is in the stories of the test node.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};

use coldsnap::digest::Digest;
use coldsnap::store::NodeStore;
use serde_json::Value;
use tempfile::TempDir;

/// A store with one payload.
fn store() -> (TempDir, Digest) {
    let dir = tempfile::tempdir().unwrap();
    let store = NodeStore::open(dir.path()).unwrap().with_reserve(0);
    let pack = store.publish_pack(&[vec![&[7; 5000][..]]], &mut |_| ()).unwrap();
    (dir, *pack.payload.digest())
}

fn coldsnap(store: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coldsnap"));
    command.arg("--json").arg("--store").arg(store).args(args).env_remove("COLDSNAP_CONFIG").output().unwrap()
}

#[track_caller]
fn fails(store: &Path, args: &[&str], kind: &str) -> String {
    let output = coldsnap(store, args);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["error"]["kind"], kind, "{value}");
    value["error"]["message"].as_str().unwrap().to_owned()
}

/// A loopback port at which nobody listens.
fn nobody() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

#[test]
fn a_push_that_cannot_be_says_why() {
    let (dir, digest) = store();
    let push = |what: &str, to: &str, further: &[&str], kind| {
        let args = [&["payload", "push", what, "--to", to, "--plain-http"], further].concat();
        fails(dir.path(), &args, kind)
    };
    let digest = digest.to_string();
    let repository = format!("{}/models", nobody());
    assert!(push(&digest, "models", &[], "Malformed").contains("HOST[:PORT]/NAME"));
    assert!(push(&digest, &repository, &[], "RegistryUnavailable").contains("refused"));
    let absent = format!("sha256:{}", "0".repeat(64));
    push(&absent, &repository, &[], "PayloadMissing");
    push("sha256:abc", &repository, &[], "Malformed");

    let file = dir.path().join("config.json");
    fs::write(&file, r#"{"auths": {"other.example": {"auth": "dXNlcjpzZWNyZXQ="}}}"#).unwrap();
    let file = file.to_str().unwrap();
    let message = push(&digest, &repository, &["--credentials", file], "Credentials");
    assert!(message.contains(file) && !message.contains("secret"), "{message}");
    let message = push(&digest, "registry.example/models", &["--credentials", file], "Credentials");
    assert!(message.contains("in the clear"), "{message}");
}

#[test]
fn a_publication_needs_a_tag_and_a_new_file() {
    let (dir, _) = store();
    let existing = dir.path().join("published.json");
    fs::write(&existing, "{}").unwrap();
    let existing = existing.to_str().unwrap();
    let reference = format!("{}/capsules:1", nobody());
    fails(dir.path(), &["publish", "image", "registry.example/capsules", "-o", "/x"], "Malformed");
    fails(dir.path(), &["publish", "image", &reference, "-o", existing], "AlreadyExists");
    let nobody = "/does/not/exist.sock";
    fails(dir.path(), &["publish", "image", &reference, "--dry-run", "--address", nobody], "Containerd");
    assert_eq!(fs::read(existing).unwrap(), b"{}");
    let output = coldsnap(dir.path(), &["publish", "image", &reference]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}
