//! The artifact descriptor: one valid descriptor per driver, and one change per rule that must be refused.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use coldsnap::digest::Digest;
use coldsnap::format::artifact::{Artifact, ArtifactError, Binding, Object};
use serde_json::{Value, json};

fn payload(worker: &str) -> Value {
    serde_json::to_value(Object::payload(worker, Digest::of(b"pack"), 8192)).unwrap()
}

fn host() -> Value {
    let digest = Digest::of(b"x").to_string();
    json!({
        "format": 9, "kind": "coldsnap-snapshot-artifact", "state": "committed",
        "capture_id": "cap-1", "request_sha256": digest,
        "snapshot_driver": {
            "id": "host", "abi": 1, "capture_boundary": "initialized-process-state",
            "minimum_nvidia_driver_major": null,
            "base_requirements": {"format": 1, "features": [{"id": "mapped-restore-v1"}]},
        },
        "requires": {"format": 1, "features": [{"id": "mapped-restore-v1"}, {"id": "other"}]},
        "launch": {
            "engine": "llama.cpp", "model": {"id": "google/gemma-3-270m", "revision": "r1"},
            "units": [{"id": "main", "args": ["llama-server"]}],
            "execution": {
                "workers": [{"id": "w0", "unit": "main", "pid": 1}, {"id": "w1", "unit": "main"}],
                "groups": [], "services": [{"id": "http", "unit": "main"}], "adapter": {},
            },
        },
        "compatibility": {"policy": "placement-independent-v1", "units": [{
            "unit": "main", "architecture": "x86_64", "kernel": "6.18.0", "nvidia_driver_captured": null,
            "nvidia_driver_min": null, "cuda_userspace": null, "devices": [],
        }]},
        "capsule": {
            "images": [{"unit": "main", "reference": "demo.local/c:1", "digest": null,
                "root": "opt/coldsnap/capsule", "snapshot_driver": {"id": "host", "abi": 1}}],
            "objects": [
                {"role": "residual", "owner": "worker/w0", "path": "hydration/w0/weights.blob", "bytes": 5, "sha256": digest},
                {"role": "criu-images", "owner": "unit/main", "path": "images", "bytes": 0, "sha256": digest},
            ],
        },
        "runtime": {"bindings": [Binding::new("unit/main", "mounts", "v1", json!({"a": 1}))]},
        "weights": {
            "model_payloads": {"repository": "", "revision": "", "objects": [payload("w0"), payload("w1")]},
            "native": {"snapshot_driver": "host"},
            "recovery": {"source": "gguf", "model_id": "google/gemma-3-270m", "revision": "r1",
                "snapshot_driver": "host", "load_path": "none", "replay_plan": []},
        },
        "acceptance": {"accepted": true, "expected": {"answer": "4"}},
    })
}

fn cuda(id: &str, boundary: &str, major: u32) -> Value {
    let mut v = host();
    v["snapshot_driver"]["id"] = json!(id);
    v["snapshot_driver"]["abi"] = json!("name-of-abi");
    v["snapshot_driver"]["capture_boundary"] = json!(boundary);
    v["snapshot_driver"]["minimum_nvidia_driver_major"] = json!(major);
    let unit = &mut v["compatibility"]["units"][0];
    unit["nvidia_driver_captured"] = json!("610.10");
    unit["nvidia_driver_min"] = json!("580.1");
    unit["cuda_userspace"] = json!("13.0");
    unit["devices"] = json!([{"uuid": "GPU-1"}]);
    let image = &mut v["capsule"]["images"][0];
    image["digest"] = json!(Digest::of(b"image"));
    image["snapshot_driver"] = json!({"id": id, "abi": "name-of-abi"});
    v["weights"]["native"]["snapshot_driver"] = json!(id);
    v["weights"]["recovery"]["snapshot_driver"] = json!("n580");
    v["runtime"]["bindings"][0]["digest"] = json!(Digest::of(b"theirs"));
    v
}

fn parse(value: &Value) -> Result<Artifact, ArtifactError> {
    Artifact::parse(value.to_string().as_bytes())
}

#[test]
fn every_driver_round_trips() {
    for value in [
        host(),
        cuda("n580", "pre-cuda-process-template", 580),
        cuda("n610", "initialized-cuda-process-state", 615),
    ] {
        let artifact = parse(&value).unwrap();
        let bytes = artifact.to_bytes().unwrap();
        assert_eq!(serde_json::from_slice::<Value>(&bytes).unwrap(), value);
        assert_eq!(Artifact::parse(&bytes).unwrap(), artifact);
        let payloads = artifact.payloads();
        assert_eq!(payloads.len(), 2);
        assert_eq!((payloads[1].worker.as_str(), payloads[1].bytes), ("w1", 8192));
        assert_eq!(payloads[1].digest, Digest::of(b"pack"));
    }
}

#[test]
fn a_host_capture_without_model_bytes_needs_no_weights() {
    let mut value = host();
    value["weights"] = json!({});
    value["launch"].as_object_mut().unwrap().remove("model");
    assert!(parse(&value).unwrap().payloads().is_empty());

    let mut value = cuda("n610", "initialized-cuda-process-state", 610);
    value["weights"] = json!({});
    assert!(parse(&value).unwrap_err().to_string().contains("weights.recovery"));
}

#[test]
fn a_host_worker_may_own_no_model_bytes_but_a_cuda_worker_not() {
    let one = json!([payload("w0")]);
    let mut value = host();
    value["weights"]["model_payloads"]["objects"] = one.clone();
    assert_eq!(parse(&value).unwrap().payloads().len(), 1);
    let mut value = cuda("n610", "initialized-cuda-process-state", 610);
    value["weights"]["model_payloads"]["objects"] = one;
    assert!(parse(&value).unwrap_err().to_string().contains("\"w1\" has 0 payload objects"));
}

#[test]
fn published_pair() {
    let mut value = host();
    value["weights"]["model_payloads"]["repository"] = json!("org/name");
    value["weights"]["model_payloads"]["revision"] = json!("0123456789abcdef0123456789abcdef01234567");
    parse(&value).unwrap();
    for (repository, revision) in [
        (json!("org/name"), json!("")),
        (json!(null), json!("0".repeat(40))),
        (json!("org/name"), json!("main")),
    ] {
        value["weights"]["model_payloads"]["repository"] = repository;
        value["weights"]["model_payloads"]["revision"] = revision;
        assert_eq!(parse(&value).unwrap_err().kind(), "Malformed");
    }
    value["weights"]["model_payloads"].as_object_mut().unwrap().remove("repository");
    value["weights"]["model_payloads"]["revision"] = json!(null);
    parse(&value).unwrap();
}

#[test]
fn every_broken_rule_names_its_field() {
    let long = "a".repeat(129);
    for (pointer, wrong, field) in [
        ("/format", json!(8), "format"),
        ("/kind", json!("other"), "kind"),
        ("/state", json!("draft"), "state"),
        ("/capture_id", json!("../x"), "capture_id"),
        ("/capture_id", json!(long), "capture_id"),
        ("/capture_id", json!(""), "capture_id"),
        ("/request_sha256", json!("sha256:ABC"), "request_sha256"),
        ("/snapshot_driver/id", json!("n700"), "snapshot_driver.id"),
        (
            "/snapshot_driver/capture_boundary",
            json!("pre-cuda-process-template"),
            "snapshot_driver.capture_boundary",
        ),
        (
            "/snapshot_driver/minimum_nvidia_driver_major",
            json!(580),
            "snapshot_driver.minimum_nvidia_driver_major",
        ),
        ("/snapshot_driver/base_requirements/features/0/id", json!("unmet"), "requires.features"),
        ("/requires/format", json!(2), "requires.format"),
        ("/requires/features/1/id", json!("mapped-restore-v1"), "requires.features[1].id"),
        ("/launch/units", json!([]), "launch.units"),
        ("/launch/execution/workers/1/id", json!("w0"), "launch.execution.workers[1].id"),
        ("/launch/execution/workers/1/unit", json!("none"), "launch.execution.workers[1].unit"),
        ("/compatibility/policy", json!("any"), "compatibility.policy"),
        ("/compatibility/units/0/unit", json!("none"), "compatibility.units[0].unit"),
        ("/compatibility/units", json!([]), "compatibility.units"),
        ("/compatibility/units/0/nvidia_driver_min", json!("580"), "compatibility.units[0]"),
        ("/capsule/images/0/root", json!("/opt"), "capsule.images[0].root"),
        ("/capsule/images/0/snapshot_driver/abi", json!(2), "capsule.images[0].snapshot_driver"),
        ("/capsule/objects/0/owner", json!("worker/none"), "capsule.objects[0].owner"),
        ("/capsule/objects/0/owner", json!("w0"), "capsule.objects[0].owner"),
        ("/capsule/objects/0/path", json!("../weights.blob"), "capsule.objects[0].path"),
        ("/capsule/objects/0/path", json!("images"), "capsule.objects[1]"),
        ("/runtime/bindings/0/digest", json!(Digest::of(b"other")), "runtime.bindings[0].digest"),
        ("/weights/recovery/snapshot_driver", json!("n610"), "weights.recovery.snapshot_driver"),
        ("/weights/model_payloads/objects", json!([]), "weights.model_payloads.objects"),
        ("/weights/model_payloads/objects/0/role", json!("model"), "weights.model_payloads.objects[1]"),
        ("/weights/model_payloads/objects/1/bytes", json!(4096), "weights.model_payloads.objects[1]"),
        (
            "/weights/model_payloads/objects/1/owner",
            json!("unit/main"),
            "weights.model_payloads.objects[1].owner",
        ),
        ("/acceptance/accepted", json!(false), "acceptance.accepted"),
    ] {
        let mut value = host();
        *value.pointer_mut(pointer).unwrap() = wrong;
        let error = parse(&value).unwrap_err().to_string();
        assert!(error.starts_with(&format!("artifact.json: {field}: ")), "{pointer}: {error}");
    }
}

#[test]
fn samples_of_every_driver_are_read_and_written_alike() {
    for (sample, workers, payloads) in [
        (&include_bytes!("samples/artifact-host.json")[..], 1, 1),
        // Data-parallel replicas share one object, tensor-parallel shards have their own.
        (include_bytes!("samples/artifact-n580.json"), 2, 1),
        (include_bytes!("samples/artifact-n610.json"), 2, 2),
    ] {
        let artifact = Artifact::parse(sample).unwrap();
        assert_eq!(String::from_utf8(artifact.to_bytes().unwrap()), String::from_utf8(sample.to_vec()));
        let needed = artifact.payloads();
        assert_eq!(needed.len(), workers);
        let distinct: std::collections::BTreeSet<_> = needed.iter().map(|p| p.digest).collect();
        assert_eq!(distinct.len(), payloads);
    }
}

#[test]
fn every_rule_of_the_cuda_drivers_names_its_field() {
    let n580: Value = serde_json::from_slice(include_bytes!("samples/artifact-n580.json")).unwrap();
    let n610: Value = serde_json::from_slice(include_bytes!("samples/artifact-n610.json")).unwrap();
    let object = n580["weights"]["model_payloads"]["objects"][0].clone();
    for (sample, pointer, wrong, field, kind) in [
        (
            &n580,
            "/snapshot_driver/minimum_nvidia_driver_major",
            json!(579),
            "snapshot_driver.minimum_nvidia_driver_major",
            "Malformed",
        ),
        (
            &n610,
            "/snapshot_driver/minimum_nvidia_driver_major",
            json!(609),
            "snapshot_driver.minimum_nvidia_driver_major",
            "Malformed",
        ),
        (
            &n610,
            "/snapshot_driver/minimum_nvidia_driver_major",
            json!(null),
            "snapshot_driver.minimum_nvidia_driver_major",
            "Malformed",
        ),
        (
            &n580,
            "/snapshot_driver/capture_boundary",
            json!("initialized-cuda-process-state"),
            "snapshot_driver.capture_boundary",
            "Malformed",
        ),
        (
            &n610,
            "/snapshot_driver/capture_boundary",
            json!("initialized-process-state"),
            "snapshot_driver.capture_boundary",
            "Malformed",
        ),
        (&n580, "/snapshot_driver/abi", json!(1.5), "snapshot_driver.abi", "Malformed"),
        (
            &n580,
            "/snapshot_driver/base_requirements/format",
            json!(2),
            "snapshot_driver.base_requirements.format",
            "Malformed",
        ),
        (
            &n580,
            "/snapshot_driver/base_requirements/features/0/id",
            json!("a/b"),
            "snapshot_driver.base_requirements.features[0].id",
            "Malformed",
        ),
        (&n580, "/requires/features/0/id", json!("another"), "requires.features", "Malformed"),
        (&n580, "/launch/units/1/id", json!("replica-0"), "launch.units[1].id", "Malformed"),
        (&n580, "/launch/execution/groups/0/id", json!(".x"), "launch.execution.groups[0].id", "Malformed"),
        (
            &n580,
            "/launch/execution/services/0/unit",
            json!("replica-9"),
            "launch.execution.services[0].unit",
            "Malformed",
        ),
        (
            &n580,
            "/compatibility/units/1/unit",
            json!("replica-0"),
            "compatibility.units[1].unit",
            "Malformed",
        ),
        (&n580, "/compatibility/units/0/cuda_userspace", json!(null), "compatibility.units[0]", "Malformed"),
        (
            &n610,
            "/compatibility/units/1/nvidia_driver_captured",
            json!(null),
            "compatibility.units[1]",
            "Malformed",
        ),
        (&n610, "/capsule/images/0/digest", json!(null), "capsule.images[0].digest", "Malformed"),
        (&n610, "/capsule/images/1/unit", json!("replica-0"), "capsule.images[1].unit", "Malformed"),
        (&n610, "/capsule/images/0/root", json!("a/../b"), "capsule.images[0].root", "Malformed"),
        (
            &n610,
            "/capsule/images/1/snapshot_driver/id",
            json!("n580"),
            "capsule.images[1].snapshot_driver",
            "Malformed",
        ),
        (&n610, "/capsule/objects/0/role", json!("with space"), "capsule.objects[0].role", "Malformed"),
        (&n610, "/capsule/objects/4/owner", json!("group/none"), "capsule.objects[4].owner", "Malformed"),
        (&n610, "/capsule/objects/0/owner", json!("service/none"), "capsule.objects[0].owner", "Malformed"),
        (&n610, "/runtime/bindings/0/owner", json!("worker/none"), "runtime.bindings[0].owner", "Malformed"),
        (&n610, "/runtime/bindings/0/kind", json!(""), "runtime.bindings[0].kind", "Malformed"),
        (&n610, "/weights/model_payloads/revision", json!(""), "weights.model_payloads", "Malformed"),
        (&n610, "/weights/model_payloads/repository", json!(""), "weights.model_payloads", "Malformed"),
        (
            &n610,
            "/weights/model_payloads/revision",
            json!("9B1F0C2D3E4F5061728394A5B6C7D8E9F0011223"),
            "weights.model_payloads.revision",
            "Malformed",
        ),
        (
            &n610,
            "/weights/model_payloads/objects/0/bytes",
            json!(0),
            "weights.model_payloads.objects[0].bytes",
            "Malformed",
        ),
        (
            &n610,
            "/weights/model_payloads/objects/0/bytes",
            json!(12287),
            "weights.model_payloads.objects[0].bytes",
            "Malformed",
        ),
        (
            &n610,
            "/weights/model_payloads/objects/0/path",
            json!("model-weights.pack"),
            "weights.model_payloads.objects[0].path",
            "PathDigestMismatch",
        ),
        (
            &n580,
            "/weights/model_payloads/objects/1/bytes",
            json!(16384),
            "weights.model_payloads.objects[1]",
            "SizeChanged",
        ),
        (
            &n580,
            "/weights/model_payloads/objects",
            json!([object]),
            "weights.model_payloads.objects",
            "Malformed",
        ),
        (&n580, "/weights/model_payloads", json!(null), "weights.native", "Malformed"),
        (&n580, "/weights/recovery", json!(null), "weights.recovery", "Malformed"),
        (&n580, "/launch/model", json!(null), "launch.model", "Malformed"),
    ] {
        let mut value = sample.clone();
        *value.pointer_mut(pointer).unwrap() = wrong;
        let error = parse(&value).unwrap_err();
        assert_eq!((error.field(), error.kind()), (Some(field), kind), "{pointer}: {error}");
    }
}

#[test]
fn what_would_not_survive_is_refused() {
    let twice = host().to_string().replacen("\"adapter\":{}", "\"adapter\":{\"a\":1,\"a\":2}", 1);
    let error = Artifact::parse(twice.as_bytes()).unwrap_err().to_string();
    assert!(error.contains("the key \"a\" is there twice"), "{error}");
    let padded = host().to_string() + &" ".repeat(4 << 20);
    assert!(Artifact::parse(padded.as_bytes()).unwrap_err().to_string().contains("more than 4194304"));
    let large = host().to_string().replacen("\"pid\":1,", "\"pid\":18446744073709551616,", 1);
    let error = Artifact::parse(large.as_bytes()).unwrap_err();
    assert_eq!(error.field(), Some("launch.execution.workers[0].pid"), "{error}");
}

#[test]
fn payload_paths_follow_from_digests() {
    let mut value = host();
    let other = Digest::of(b"other");
    value["weights"]["model_payloads"]["objects"][0]["path"] = json!(other.payload_path());
    assert_eq!(parse(&value).unwrap_err().kind(), "PathDigestMismatch");
    let mut value = host();
    value["weights"]["model_payloads"]["objects"][1]["bytes"] = json!(12288);
    assert_eq!(parse(&value).unwrap_err().kind(), "SizeChanged");
    let mut value = host();
    value["weights"]["model_payloads"]["objects"][1]["sha256"] = json!(other);
    assert_eq!(parse(&value).unwrap_err().kind(), "IdentityChanged");
    let mut value = host();
    value["weights"]["model_payloads"]["objects"][1]["owner"] = json!("worker/w0");
    assert_eq!(parse(&value).unwrap_err().kind(), "Malformed");
}

#[test]
fn unknown_missing_and_trailing_are_errors() {
    for object in [
        "",
        "/snapshot_driver",
        "/requires",
        "/launch",
        "/launch/execution",
        "/launch/model",
        "/compatibility/units/0",
        "/capsule",
        "/capsule/images/0",
        "/capsule/objects/0",
        "/weights",
        "/weights/model_payloads",
        "/weights/native",
        "/weights/recovery",
        "/runtime/bindings/0",
        "/acceptance",
    ] {
        let mut value = host();
        value.pointer_mut(object).unwrap()["surprise"] = json!(1);
        let error = parse(&value).unwrap_err().to_string();
        assert!(error.contains("unknown field `surprise`"), "{object}: {error}");
    }
    for (object, field) in [
        ("", "weights"),
        ("/snapshot_driver", "minimum_nvidia_driver_major"),
        ("/compatibility/units/0", "cuda_userspace"),
        ("/capsule/images/0", "digest"),
        ("/acceptance", "expected"),
    ] {
        let mut value = host();
        value.pointer_mut(object).unwrap().as_object_mut().unwrap().remove(field);
        let error = parse(&value).unwrap_err().to_string();
        assert!(error.contains(&format!("missing field `{field}`")), "{object}: {error}");
    }
    let text = host().to_string() + "{}";
    assert!(Artifact::parse(text.as_bytes()).unwrap_err().to_string().contains("data after"));
}

#[test]
fn a_descriptor_is_never_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("artifact.json");
    let artifact = parse(&host()).unwrap();
    artifact.write_new(&path).unwrap();
    assert_eq!(Artifact::parse(&std::fs::read(&path).unwrap()).unwrap(), artifact);
    let mut other = artifact;
    other.capture_id = "cap-2".to_owned();
    assert!(other.write_new(&path).is_err());
    assert!(std::fs::read_to_string(&path).unwrap().contains("cap-1"));
    other.state = "draft".to_owned();
    assert!(other.write_new(&dir.path().join("new.json")).is_err());
}
