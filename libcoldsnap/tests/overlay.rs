//! The target-local overlay: one valid document per driver family, one change per rule that must be refused, and the
//! bindings that decide whether it is used.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use coldsnap::format::artifact::Artifact;
use coldsnap::format::overlay::{Overlay, portable_digest};
use serde_json::{Value, json};

const HOST: &[u8] = include_bytes!("samples/overlay-host.json");
const N610: &[u8] = include_bytes!("samples/overlay-n610.json");

fn value(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

fn parse(value: &Value) -> Result<Overlay, coldsnap::format::descriptor::DescriptorError> {
    Overlay::parse(value.to_string().as_bytes())
}

#[test]
fn samples_are_read_and_written_alike() {
    for sample in [HOST, N610] {
        let overlay = Overlay::parse(sample).unwrap();
        assert_eq!(String::from_utf8(overlay.to_bytes().unwrap()), String::from_utf8(sample.to_vec()));
    }
}

#[test]
fn every_broken_rule_names_its_field() {
    let other_path = format!("model-payloads/sha256/{}.pack", "0".repeat(64));
    for (sample, pointer, wrong, field, kind) in [
        (HOST, "/format", json!(2), "format", "Malformed"),
        (HOST, "/kind", json!("coldsnap-snapshot-artifact"), "kind", "Malformed"),
        (HOST, "/state", json!("draft"), "state", "Malformed"),
        (HOST, "/capture_id", json!("a/b"), "capture_id", "Malformed"),
        (HOST, "/created_unix_ns", json!(-1), "created_unix_ns", "Malformed"),
        (HOST, "/portable_descriptor", json!("0".repeat(64)), "portable_descriptor", "Malformed"),
        (HOST, "/snapshot_driver/id", json!("n700"), "snapshot_driver.id", "Malformed"),
        (HOST, "/target/hosts", json!([]), "target.hosts", "Malformed"),
        (
            HOST,
            "/target/hosts/0/machine_id_sha256",
            json!("x"),
            "target.hosts[0].machine_id_sha256",
            "Malformed",
        ),
        (
            HOST,
            "/target/accelerators",
            json!([{"host": 0, "uuid": "GPU-1", "model": "m", "memory_bytes": 1}]),
            "target.accelerators",
            "Malformed",
        ),
        (N610, "/target/accelerators", json!([]), "target.accelerators", "Malformed"),
        (N610, "/target/accelerators/1/host", json!(1), "target.accelerators[1].host", "Malformed"),
        (
            N610,
            "/target/accelerators/1/uuid",
            json!("GPU-8a3c1f6e-0000-4000-8000-000000000001"),
            "target.accelerators[1].uuid",
            "Malformed",
        ),
        (HOST, "/target/versions/kernel", json!(""), "target.versions.kernel", "Malformed"),
        (HOST, "/target/versions/criu", json!(""), "target.versions.criu", "Malformed"),
        (HOST, "/target/versions/runc", json!(4), "target.versions.runc", "Malformed"),
        (
            HOST,
            "/target/versions/nvidia_driver",
            json!("610.1"),
            "target.versions.nvidia_driver",
            "Malformed",
        ),
        (N610, "/target/versions/nvidia_driver", Value::Null, "target.versions.nvidia_driver", "Malformed"),
        (N610, "/target/versions/cuda", json!(""), "target.versions.cuda", "Malformed"),
        (HOST, "/target/cpu_features", json!(["avx2", "avx"]), "target.cpu_features[1]", "Malformed"),
        (HOST, "/target/cpu_features", json!(["avx", "avx"]), "target.cpu_features[1]", "Malformed"),
        (HOST, "/target/cpu_features/0", json!("a b"), "target.cpu_features[0]", "Malformed"),
        (N610, "/payloads", json!([]), "payloads", "Malformed"),
        (HOST, "/payloads/0/role", json!("residual"), "payloads[0].role", "Malformed"),
        (HOST, "/payloads/0/owner", json!("unit/main"), "payloads[0].owner", "Malformed"),
        (HOST, "/payloads/0/owner", json!("w0"), "payloads[0].owner", "Malformed"),
        (HOST, "/payloads/0/bytes", json!(12287), "payloads[0].bytes", "Malformed"),
        (HOST, "/payloads/0/path", json!(other_path), "payloads[0].path", "PathDigestMismatch"),
        (HOST, "/capsule_objects", json!([]), "capsule_objects", "Malformed"),
        (HOST, "/capsule_objects/0/path", json!("../x"), "capsule_objects[0].path", "Malformed"),
        (HOST, "/capsule_objects/0/role", json!(""), "capsule_objects[0].role", "Malformed"),
    ] {
        let mut value = value(sample);
        match value.pointer_mut(pointer) {
            Some(place) => *place = wrong,
            None => value["target"]["versions"]["nvidia_driver"] = wrong,
        }
        let error = parse(&value).unwrap_err();
        assert_eq!((error.field(), error.kind()), (Some(field), kind), "{pointer}: {error}");
        assert!(error.to_string().starts_with("overlay.json: "), "{error}");
    }
}

#[test]
fn unknown_missing_and_trailing_are_errors() {
    for object in [
        "",
        "/snapshot_driver",
        "/target",
        "/target/hosts/0",
        "/target/accelerators/0",
        "/target/versions",
        "/payloads/0",
        "/capsule_objects/0",
    ] {
        let mut unknown = value(N610);
        unknown.pointer_mut(object).unwrap()["surprise"] = json!(1);
        let error = parse(&unknown).unwrap_err().to_string();
        assert!(error.contains("unknown field `surprise`"), "{object}: {error}");
        let fields: Vec<String> =
            value(N610).pointer(object).unwrap().as_object().unwrap().keys().cloned().collect();
        for field in fields {
            let mut missing = value(N610);
            missing.pointer_mut(object).unwrap().as_object_mut().unwrap().remove(&field);
            let error = parse(&missing).unwrap_err().to_string();
            assert!(error.contains(&field), "{object}/{field}: {error}");
        }
    }
    let text = value(HOST).to_string() + "null";
    assert!(Overlay::parse(text.as_bytes()).unwrap_err().to_string().contains("data after"));
}

#[test]
fn a_host_overlay_may_have_no_payload() {
    let mut value = value(HOST);
    value["payloads"] = json!([]);
    parse(&value).unwrap();
}

#[test]
fn every_binding_that_does_not_hold_is_named() {
    let overlay = Overlay::parse(N610).unwrap();
    assert_eq!(overlay.mismatches(&overlay.target), []);
    for (pointer, other, field) in [
        ("/hosts/0/machine_id_sha256", json!(format!("sha256:{}", "0".repeat(64))), "target.hosts"),
        ("/accelerators/1/uuid", json!("GPU-other"), "target.accelerators"),
        ("/accelerators/0/memory_bytes", json!(1), "target.accelerators"),
        ("/versions/kernel", json!("6.18.1"), "target.versions.kernel"),
        ("/versions/criu", json!("4.3"), "target.versions.criu"),
        ("/versions/runc", json!("1.4.0"), "target.versions.runc"),
        ("/versions/nvidia_driver", json!("610.11"), "target.versions.nvidia_driver"),
        ("/versions/cuda", json!("13.1"), "target.versions.cuda"),
        ("/cpu_features", json!(["avx", "avx2"]), "target.cpu_features"),
    ] {
        let mut here = serde_json::to_value(&overlay.target).unwrap();
        *here.pointer_mut(pointer).unwrap() = other;
        let here = serde_json::from_value(here).unwrap();
        let mismatches = overlay.mismatches(&here);
        let fields: Vec<_> = mismatches.iter().map(|m| m.field.as_str()).collect();
        assert_eq!(fields, [field], "{mismatches:?}");
    }
    let mut renamed = overlay.target.clone();
    renamed.hosts[0].hostname = "another".to_owned();
    assert_eq!(overlay.mismatches(&renamed), [], "a host name binds nothing");
}

#[test]
fn an_overlay_belongs_to_one_portable_descriptor_and_shares_its_payloads() {
    let bytes = include_bytes!("samples/artifact-host.json");
    let (portable, digest) = (Artifact::parse(bytes).unwrap(), portable_digest(bytes).unwrap());
    let compact = value(bytes).to_string();
    assert_eq!(portable_digest(compact.as_bytes()).unwrap(), digest, "the text's layout does not matter");

    let good = value(HOST);
    let overlay = parse(&good).unwrap();
    overlay.check_against(&portable, &digest).unwrap();
    assert!(!overlay.is_redundant(&portable));
    let mut same = overlay.clone();
    same.capsule_objects = portable.capsule.objects.clone();
    same.capsule_objects.reverse();
    assert!(same.is_redundant(&portable));

    for (pointer, other, field) in [
        ("/portable_descriptor", json!(format!("sha256:{}", "1".repeat(64))), "portable_descriptor"),
        ("/snapshot_driver/abi", json!(2), "snapshot_driver"),
        ("/payloads/0/bytes", json!(16384), "payloads"),
        ("/payloads/0/owner", json!("worker/w9"), "payloads"),
        ("/payloads", json!([]), "payloads"),
        ("/capsule_objects/0/owner", json!("worker/w9"), "capsule_objects[0].owner"),
    ] {
        let mut changed = good.clone();
        *changed.pointer_mut(pointer).unwrap() = other;
        let error = parse(&changed).unwrap().check_against(&portable, &digest).unwrap_err();
        assert_eq!(error.field(), Some(field), "{pointer}: {error}");
    }
}
