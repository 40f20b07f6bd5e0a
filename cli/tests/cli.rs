//! The real binary: results, exit statuses, and errors as JSON.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use coldsnap::digest::Digest;
use coldsnap::store::NodeStore;
use serde_json::{Value, json};
use tempfile::TempDir;

const VECTOR: &str = include_str!("../../libcoldsnap/tests/vectors/native-manifest.json");

fn coldsnap(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_coldsnap")).args(args).env_remove("COLDSNAP_STORE").output().unwrap()
}

fn stdout_json(output: &Output) -> Value {
    let text = std::str::from_utf8(&output.stdout).unwrap();
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:?} {output:?}"))
}

#[track_caller]
fn succeeds(args: &[&str]) -> Value {
    let output = coldsnap(&[args, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let plain = coldsnap(args);
    assert_eq!(plain.status.code(), Some(0), "{plain:?}");
    assert!(!plain.stdout.is_empty() && serde_json::from_slice::<Value>(&plain.stdout).is_err());
    stdout_json(&output)
}

/// Fails with status 1 and this kind, with and without `--json`.
#[track_caller]
fn fails(args: &[&str], kind: &str) -> String {
    let output = coldsnap(&[args, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = stdout_json(&output)["error"].clone();
    assert_eq!(error["kind"], kind, "{error}");
    let message = error["message"].as_str().unwrap().to_owned();
    let plain = coldsnap(args);
    assert_eq!(plain.status.code(), Some(1));
    assert!(plain.stdout.is_empty(), "{plain:?}");
    assert_eq!(String::from_utf8(plain.stderr).unwrap(), format!("error: {message} [{kind}]\n"));
    message
}

fn store() -> (TempDir, NodeStore, Digest) {
    let dir = tempfile::tempdir().unwrap();
    let store = NodeStore::open(dir.path()).unwrap().with_reserve(0);
    let pack = store.publish_pack(&[vec![&[7; 5000][..]]], &mut |_| ()).unwrap();
    (dir, store, *pack.payload.digest())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn verify_uses_and_writes_the_record() {
    let (_dir, store, digest) = store();
    let (path, sha256) = (store.payload_path(&digest), digest.to_string());
    let args = ["verify", text(&path), "--sha256", &sha256, "--bytes", "8192"];
    let report = succeeds(&args);
    assert_eq!(report["evidence"], "cached-full-sha256");
    assert_eq!((&report["bytes_hashed"], &report["bytes"]), (&json!(0), &json!(8192)));
    assert_eq!(report["record"], "reused");
    assert!(report["seconds"].as_f64().is_some());

    let record = format!("{}.coldsnap-validation.json", path.display());
    fs::remove_file(&record).unwrap();
    let output = coldsnap(&[&args[..], &["--json"]].concat());
    let report = stdout_json(&output);
    assert_eq!(report["evidence"], "full-sha256-this-operation");
    assert_eq!((&report["bytes_hashed"], &report["record"]), (&json!(8192), &json!("written")));
    assert!(Path::new(&record).exists());
}

#[test]
fn verify_takes_a_digest_and_several_payloads() {
    let (_dir, store, digest) = store();
    let second = *store.publish_pack(&[vec![&[8; 100][..]]], &mut |_| ()).unwrap().payload.digest();
    let (root, name, path) = (text(store.root()), digest.to_string(), store.payload_path(&second));
    let report = succeeds(&["--store", root, "verify", &name]);
    assert_eq!((&report["digest"], &report["record"]), (&json!(digest), &json!("reused")));

    let report = succeeds(&["--store", root, "verify", &name, text(&path)]);
    let digests: Vec<_> =
        report["payloads"].as_array().unwrap().iter().map(|p| p["digest"].clone()).collect();
    assert_eq!(digests, [json!(digest), json!(second)]);

    let other = Digest::of(b"other").to_string();
    let output = coldsnap(&["--json", "--store", root, "verify", &other, &name]);
    assert_eq!(output.status.code(), Some(1));
    let report = stdout_json(&output);
    assert_eq!(report["payloads"][0]["digest"], json!(other));
    assert_eq!(report["payloads"][0]["error"]["kind"], "PayloadMissing");
    assert_eq!(report["payloads"][1]["evidence"], "cached-full-sha256");

    let output = coldsnap(&["--store", root, "verify", &other, &name, "--bytes", "4096"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    fails(&["--store", root, "verify", "no-payload"], "PathDigestMismatch");
}

#[test]
fn concurrent_processes_verify_once() {
    let (_dir, store, _) = store();
    let data = vec![3; 16 << 20];
    let payload = store.publish_pack(&[vec![&data]], &mut |_| ()).unwrap().payload;
    fs::remove_file(format!("{}.coldsnap-validation.json", payload.path().display())).unwrap();
    let processes: Vec<_> = (0..8)
        .map(|_| {
            Command::new(env!("CARGO_BIN_EXE_coldsnap"))
                .args(["--json", "verify", text(payload.path())])
                .stdout(std::process::Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let hashed: u64 = processes
        .into_iter()
        .map(|process| stdout_json(&process.wait_with_output().unwrap())["bytes_hashed"].as_u64().unwrap())
        .sum();
    assert_eq!(hashed, payload.bytes());
}

#[test]
fn verify_takes_a_relative_path() {
    let (_dir, store, digest) = store();
    let sha256 = digest.to_string();
    for (directory, pack) in
        [("", digest.payload_path()), ("model-payloads/sha256", format!("{}.pack", digest.hex()).into())]
    {
        let output = Command::new(env!("CARGO_BIN_EXE_coldsnap"))
            .current_dir(store.root().join(directory))
            .args(["verify", text(&pack), "--sha256", &sha256])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
    }
}

#[test]
fn verify_refuses() {
    let (dir, store, digest) = store();
    let (path, sha256) = (store.payload_path(&digest), digest.to_string());
    fails(&["verify", text(&path), "--sha256", &sha256, "--bytes", "4096"], "SizeChanged");
    let other = Digest::of(b"other");
    fails(&["verify", text(&path), "--sha256", &other.to_string()], "PathDigestMismatch");
    let absent = store.payload_path(&other);
    fails(&["verify", text(&absent), "--sha256", &other.to_string()], "PayloadMissing");
    let elsewhere = dir.path().join("model-weights.pack");
    fs::copy(&path, &elsewhere).unwrap();
    fails(&["verify", text(&elsewhere), "--sha256", &sha256], "PathDigestMismatch");

    let mut bytes = fs::read(&path).unwrap();
    bytes[0] ^= 1;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    fs::write(&path, &bytes).unwrap();
    fails(&["verify", text(&path), "--sha256", &sha256], "DigestMismatch");

    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
    fails(&["verify", text(&path), "--sha256", &sha256], "NotRegularFile");
}

#[test]
fn wrong_usage_is_status_2() {
    let (_dir, store, digest) = store();
    let path = store.payload_path(&digest);
    let upper = format!("sha256:{}", digest.hex().to_uppercase());
    for args in [
        &[][..],
        &["frobnicate"],
        &["verify"],
        &["verify", text(&path), "--sha256", &upper],
        &["verify", text(&path), "--sha256", &digest.hex()],
        &["verify", text(&path), "--sha256", &digest.to_string(), "--bytes", "-1"],
        &["check"],
        &["payload"],
    ] {
        for extra in [&[][..], &["--json"]] {
            assert_eq!(coldsnap(&[args, extra].concat()).status.code(), Some(2), "{args:?}");
        }
    }
    assert_eq!(coldsnap(&["--help"]).status.code(), Some(0));
    assert_eq!(coldsnap(&["--version"]).status.code(), Some(0));
}

#[test]
fn payload_ls_shows_state_and_leases() {
    let (_dir, store, digest) = store();
    let payload = store.admit(&digest, None, &mut |_| ()).unwrap();
    store.lease(&payload, "someone").unwrap();
    let other = store.publish_pack(&[vec![&[1; 10][..]]], &mut |_| ()).unwrap();
    fs::set_permissions(other.payload.path(), fs::Permissions::from_mode(0o400)).unwrap();
    let listing = succeeds(&["payload", "ls", "--store", text(store.root())]);
    let rows = listing["payloads"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    let row = |wanted: &Digest| rows.iter().find(|row| row["digest"] == wanted.to_string()).unwrap();
    assert_eq!((&row(&digest)["state"], &row(&digest)["leases"]), (&json!("verified"), &json!(1)));
    let other = row(other.payload.digest());
    assert_eq!((&other["state"], &other["leases"]), (&json!("unverified"), &json!(0)));
    assert!(other["reason"].as_str().unwrap().contains("ctime"));

    let output = Command::new(env!("CARGO_BIN_EXE_coldsnap"))
        .args(["payload", "ls", "--json"])
        .env("COLDSNAP_STORE", store.root())
        .output()
        .unwrap();
    assert_eq!(stdout_json(&output), listing);
    let none = succeeds(&["--store", "/nonexistent/store", "payload", "ls"]);
    assert_eq!(none["payloads"], json!([]));
}

/// The vector's manifest with a change, and its pack.
fn manifest(dir: &Path, change: impl FnOnce(&mut Value)) -> (PathBuf, PathBuf) {
    let mut value: Value = serde_json::from_str(VECTOR).unwrap();
    change(&mut value);
    let path = dir.join("native-manifest.json");
    fs::write(&path, value.to_string()).unwrap();
    let mut pack = vec![7; 128];
    pack.resize(4096, 0);
    pack.extend((0..4097).map(|i| u8::try_from(i % 251).unwrap()));
    pack.resize(12288, 0);
    let pack_path = dir.join("model-weights.pack");
    fs::write(&pack_path, pack).unwrap();
    (path, pack_path)
}

#[test]
fn check_accepts_the_vector() {
    let dir = tempfile::tempdir().unwrap();
    let (path, pack) = manifest(dir.path(), |_| ());
    let report = succeeds(&["check", text(&path), "--pack", text(&pack)]);
    assert_eq!(report["kind"], "vllm-live-process-cumem");
    assert_eq!((&report["what"], &report["files"][0]["extents"]), (&json!("native-manifest"), &json!(2)));
    assert_eq!((&report["model_extents"], &report["residual_extents"]), (&json!(2), &json!(2)));
    assert_eq!(report["not_compared"], json!(["the residual: it is not here"]));
}

#[test]
fn check_names_the_kind_and_the_range() {
    let dir = tempfile::tempdir().unwrap();
    for (pointer, wrong, kind, says) in [
        ("/model_weight_extents/1/size", json!(4000), "Gap", "[0x7f0000000fa0, 0x7f0000001001)"),
        ("/model_weight_extents/1/size", json!(5000), "Overlap", "model_weight_extents[1]"),
        ("/residual_extents/1/size", json!(9000), "OutsideAllocation", "residual_extents[1]"),
        ("/residual_bytes", json!(1), "SizeChanged", "residual_bytes"),
        ("/model_weight_extents/1/offset", json!(0), "Malformed", "model_weight_extents[1].offset"),
        ("/pid", json!("x"), "Malformed", "pid"),
        ("/format", json!(4), "Malformed", "format"),
    ] {
        let (path, _) = manifest(dir.path(), |v| *v.pointer_mut(pointer).unwrap() = wrong);
        let message = fails(&["check", text(&path)], kind);
        assert!(message.contains(says) && message.contains("native-manifest.json"), "{message}");
    }
    let (path, _) = manifest(dir.path(), |_| ());
    fs::write(&path, fs::read_to_string(&path).unwrap() + "x").unwrap();
    fails(&["check", text(&path)], "Malformed");
    fails(&["check", "/nonexistent.json"], "Io");
}

#[test]
fn check_compares_files() {
    let dir = tempfile::tempdir().unwrap();
    let (path, pack) = manifest(dir.path(), |_| ());
    let check = |pack: &Path, kind: &str| fails(&["check", text(&path), "--pack", text(pack)], kind);
    let named = dir.path().join(format!("{}.pack", "0".repeat(64)));
    fs::copy(&pack, &named).unwrap();
    check(&named, "PathDigestMismatch");
    let mut bytes = fs::read(&pack).unwrap();
    bytes[4096] ^= 1;
    fs::write(&pack, &bytes).unwrap();
    assert!(check(&pack, "IdentityChanged").contains("model_weight_extents[1]"));
    fs::write(&pack, &bytes[..8192]).unwrap();
    check(&pack, "SizeChanged");
    fails(&["check", text(&path), "--residual", text(&pack)], "SizeChanged");
}

#[test]
fn check_and_inspect_find_out_what_it_is() {
    let samples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../libcoldsnap/tests/samples");
    for (name, what, field, value) in [
        ("artifact-n610.json", "artifact", "driver", json!("n610")),
        ("artifact-n580.json", "artifact", "workers", json!(2)),
        ("artifact-host.json", "artifact", "published", json!(null)),
        ("overlay-host.json", "overlay", "hosts", json!(["n1"])),
        ("native-manifest-contiguous.json", "native-manifest", "residual_layout", json!("contiguous")),
        ("recovery-manifest.json", "recovery-manifest", "recoverable_extents", json!(2)),
        ("capture.json", "capture-facts", "workers", json!(["w0"])),
    ] {
        let path = samples.join(name);
        for command in ["check", "inspect"] {
            let report = succeeds(&[command, text(&path)]);
            assert_eq!((&report["what"], &report[field]), (&json!(what), &value), "{command} {name}");
        }
    }
    let (_dir, store, digest) = store();
    let pack = store.payload_path(&digest);
    let record = PathBuf::from(format!("{}.coldsnap-validation.json", pack.display()));
    for (path, what) in [(&pack, "pack"), (&record, "validation-record")] {
        assert_eq!(succeeds(&["check", text(path)])["what"], what);
        assert_eq!(succeeds(&["inspect", text(path)])["bytes"], 8192);
    }
    fails(&["check", text(store.root())], "Unrecognized");
    let lease = samples.join("lease.json");
    for command in ["check", "inspect"] {
        assert!(fails(&[command, text(&lease)], "Unrecognized").contains("expected an artifact descriptor"));
    }
}

#[test]
fn overlays_are_listed_explained_and_not_found() {
    let (dir, _, _) = store();
    let here = |args: &[&'static str]| -> Vec<String> {
        args.iter()
            .map(|&a| a.to_owned())
            .chain(["--store".to_owned(), text(dir.path()).to_owned()])
            .collect()
    };
    fn words(args: &[String]) -> Vec<&str> {
        args.iter().map(String::as_str).collect()
    }
    assert_eq!(succeeds(&words(&here(&["overlay", "ls"])))["overlays"], json!([]));
    fails(&words(&here(&["overlay", "rm", "cap-1"])), "OverlayNotFound");
    // A descriptor as a file needs no containerd.
    let artifact = concat!(env!("CARGO_MANIFEST_DIR"), "/../libcoldsnap/tests/samples/artifact-host.json");
    let explained = succeeds(&words(&here(&["overlay", "explain", artifact])));
    assert_eq!((&explained["chosen"], &explained["overlays"]), (&Value::Null, &json!([])));
    let other = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    fails(&words(&here(&["overlay", "explain", other])), "Malformed");
    fails(&words(&here(&["rm", "image:1", "--address", "/nonexistent/socket"])), "Containerd");
}
