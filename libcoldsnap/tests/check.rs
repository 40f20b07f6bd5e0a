//! `check` finds out what something is, compares the files beside it, and names the first rule that does not hold.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use coldsnap::check::{CheckError, Checked, Options, Summary, check};
use serde_json::{Value, json};
use tempfile::TempDir;

const SAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/samples");
const VECTOR: &[u8] = include_bytes!("vectors/native-manifest.json");
const RECOVERY: &[u8] = include_bytes!("samples/recovery-manifest.json");
/// The digest of the vector "two-unaligned".
const PACK: &str = "1cbd77415e304d02077cdfe19462be4061f6b5a3d844cc31f18322d3c008882b";

fn run(path: &Path) -> Result<Checked, CheckError> {
    check(path, &Options::default(), &mut |_, _, _| ())
}

fn what(checked: &Checked) -> String {
    serde_json::to_value(&checked.summary).unwrap()["what"].as_str().unwrap().to_owned()
}

#[test]
fn every_kind_is_found_out() {
    for (name, expected) in [
        ("artifact-host.json", "artifact"),
        ("artifact-n580.json", "artifact"),
        ("artifact-n610.json", "artifact"),
        ("overlay-host.json", "overlay"),
        ("overlay-n610.json", "overlay"),
        ("native-manifest-contiguous.json", "native-manifest"),
        ("../vectors/native-manifest.json", "native-manifest"),
        ("recovery-manifest.json", "recovery-manifest"),
        ("capture.json", "capture-facts"),
    ] {
        let checked = run(&Path::new(SAMPLES).join(name)).unwrap();
        assert_eq!(what(&checked), expected, "{name}");
        assert_eq!(checked.files.len(), 0);
    }
}

#[test]
fn what_the_format_does_not_know_is_unrecognized() {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in [
        ("a.json", &b"{\"kind\":\"another\"}"[..]),
        ("b.json", b"{\"format\":9}"),
        ("lease.json", include_bytes!("samples/lease.json")),
        ("c.json", b"[1]"),
        ("d.bin", b"\0\x01"),
        ("empty", b""),
    ] {
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        assert_eq!(run(&path).unwrap_err().kind(), "Unrecognized", "{name}");
    }
    assert_eq!(run(dir.path()).unwrap_err().kind(), "Unrecognized");
    assert_eq!(run(&dir.path().join("none")).unwrap_err().kind(), "Io");
    let broken = dir.path().join("broken.json");
    fs::write(&broken, b"{\"kind\":").unwrap();
    assert_eq!(run(&broken).unwrap_err().kind(), "Malformed");
}

/// The bytes that the vector's manifest describes: pack and residual with the right checksums.
struct Worker {
    dir: TempDir,
}

impl Worker {
    fn new(shared: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let pieces = [vec![1u8; 4095], vec![2u8; 8064]];
        let mut manifest: Value = serde_json::from_slice(VECTOR).unwrap();
        let mut recovery: Value = serde_json::from_slice(RECOVERY).unwrap();
        if !shared {
            for m in [&mut manifest, &mut recovery] {
                m.as_object_mut().unwrap().remove("residual_layout");
                m["residual_extents"][1]["offset"] = json!(4095);
                m["residual_blob_bytes"] = json!(12159);
                m["residual_blob_stat"]["bytes"] = json!(12159);
            }
        }
        let mut blob = Vec::new();
        for (n, piece) in pieces.iter().enumerate() {
            for m in [&mut manifest, &mut recovery] {
                m["residual_extents"][n]["crc32"] = json!(format!("{:08x}", crc32fast::hash(piece)));
            }
            blob.extend(piece);
            if shared {
                blob.resize(blob.len().next_multiple_of(4096), 0);
            }
        }
        let mut pack = vec![7; 128];
        pack.resize(4096, 0);
        pack.extend((0..4097u32).map(|i| u8::try_from(i % 251).unwrap()));
        pack.resize(12288, 0);
        let worker = Self { dir };
        worker.write("native-manifest.json", manifest.to_string().as_bytes());
        worker.write("manifest.json", recovery.to_string().as_bytes());
        worker.write("weights.blob", &blob);
        worker.write("model-weights.pack", &pack);
        worker
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).unwrap();
    }

    fn flip(&self, name: &str, at: usize) {
        let mut bytes = fs::read(self.path(name)).unwrap();
        bytes[at] ^= 1;
        self.write(name, &bytes);
    }
}

#[test]
fn a_worker_of_another_implementation_is_checked_with_the_files_beside_it_in_both_residual_layouts() {
    for shared in [true, false] {
        for name in ["", "native-manifest.json"] {
            let worker = Worker::new(shared);
            let checked = run(&worker.path(name)).unwrap();
            assert_eq!(checked.documents.len(), 2);
            let extents: Vec<_> = checked.files.iter().map(|file| file.report.extents).collect();
            assert_eq!(extents, [2, 2]);
            assert!(checked.not_compared.is_empty());
        }
        for (name, at, kind) in [
            ("model-weights.pack", 5000, "IdentityChanged"),
            ("model-weights.pack", 200, "Malformed"),
            ("weights.blob", 100, "IdentityChanged"),
            ("weights.blob", 12158, "IdentityChanged"),
        ] {
            let worker = Worker::new(shared);
            let at = if shared && at == 12158 { 12159 } else { at };
            worker.flip(name, at);
            assert_eq!(run(worker.dir.path()).unwrap_err().kind(), kind, "{name} {at}");
        }
    }
}

#[test]
fn a_recovery_manifest_is_compared_with_the_native_one_beside_it() {
    let worker = Worker::new(true);
    let path = worker.path("manifest.json");
    assert_eq!(run(&path).unwrap().documents.len(), 2);
    let mut recovery: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    recovery["capture_id"] = json!("cap-other");
    worker.write("manifest.json", recovery.to_string().as_bytes());
    for name in ["manifest.json", "native-manifest.json", ""] {
        let error = run(&worker.path(name)).unwrap_err();
        assert_eq!(error.kind(), "IdentityChanged", "{error}");
    }
}

#[test]
fn a_pack_is_checked_beside_its_manifest_or_by_its_name() {
    let worker = Worker::new(true);
    let checked = run(&worker.path("model-weights.pack")).unwrap();
    assert_eq!((what(&checked).as_str(), checked.files[0].report.extents), ("pack", 2));
    let other = tempfile::tempdir().unwrap();
    let named = other.path().join(format!("{PACK}.pack"));
    fs::copy(worker.path("model-weights.pack"), &named).unwrap();
    let checked = run(&named).unwrap();
    assert!(matches!(checked.summary, Summary::Pack { bytes: 12288, digest: Some(_) }));
    assert!(checked.files[0].report.whole_digest && checked.not_compared.len() == 1);
    let wrong = other.path().join(format!("{}.pack", "0".repeat(64)));
    fs::rename(&named, &wrong).unwrap();
    assert_eq!(run(&wrong).unwrap_err().kind(), "PathDigestMismatch");
    fs::write(&wrong, [1; 100]).unwrap();
    assert_eq!(run(&wrong).unwrap_err().kind(), "Malformed");
    // A pack whose first bytes look like JSON is a pack.
    let content = [&b"{\"kind\":1}"[..], &[b' '; 4086]].concat();
    let braces = other.path().join(format!("{}.pack", coldsnap::digest::Digest::of(&content).hex()));
    fs::write(&braces, &content).unwrap();
    assert_eq!(what(&run(&braces).unwrap()), "pack");
    let alone = other.path().join("model-weights.pack");
    fs::copy(worker.path("model-weights.pack"), &alone).unwrap();
    assert_eq!(run(&alone).unwrap_err().kind(), "Unrecognized");
}

#[test]
fn an_empty_place_of_a_payload_is_not_compared() {
    let worker = Worker::new(true);
    worker.write("model-weights.pack", b"");
    let checked = run(worker.dir.path()).unwrap();
    assert_eq!((checked.files.len(), checked.not_compared.len()), (1, 1));
}

#[test]
fn a_validation_record_is_checked_as_it_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(format!("{PACK}.pack.coldsnap-validation.json"));
    let mode = |bits| fs::set_permissions(&path, fs::Permissions::from_mode(bits)).unwrap();
    fs::write(&path, include_bytes!("samples/validation-record.json")).unwrap();
    mode(0o640);
    assert!(run(&path).unwrap_err().to_string().contains("0640"));
    mode(0o600);
    let checked = run(&path).unwrap();
    assert_eq!(what(&checked), "validation-record");
    assert_eq!(checked.not_compared.len(), 1, "the payload is not here");
    fs::write(dir.path().join(format!("{PACK}.pack")), [0; 12288]).unwrap();
    let state = &run(&path).unwrap().not_compared[0];
    assert!(state.contains("content_identity differs"), "{state}");
    let renamed = dir.path().join("other.pack.coldsnap-validation.json");
    fs::rename(&path, &renamed).unwrap();
    assert!(run(&renamed).unwrap_err().to_string().contains("blob"));
    let link = dir.path().join(format!("{PACK}.pack.coldsnap-validation.json"));
    std::os::unix::fs::symlink(&renamed, &link).unwrap();
    assert!(run(&link).unwrap_err().to_string().contains("link"));
}
