//! A descriptor of the `host` driver whose workers need given payloads.

use coldsnap::digest::Digest;
use coldsnap::format::artifact::{Artifact, Object};
use serde_json::json;

/// One worker per payload: digest and size in bytes.
pub fn artifact(payloads: &[(Digest, u64)]) -> Artifact {
    let digest = Digest::of(b"x").to_string();
    let names: Vec<String> = (0..payloads.len()).map(|n| format!("w{n}")).collect();
    let workers: Vec<_> = names.iter().map(|name| json!({"id": name, "unit": "main"})).collect();
    let objects: Vec<_> = names
        .iter()
        .zip(payloads)
        .map(|(name, (digest, bytes))| Object::payload(name, *digest, *bytes))
        .collect();
    let features = json!({"format": 1, "features": [{"id": "mapped-restore-v1"}]});
    let value = json!({
        "format": 9, "kind": "coldsnap-snapshot-artifact", "state": "committed",
        "capture_id": "cap-1", "request_sha256": digest,
        "snapshot_driver": {
            "id": "host", "abi": 1, "capture_boundary": "initialized-process-state",
            "minimum_nvidia_driver_major": null, "base_requirements": features,
        },
        "requires": features,
        "launch": {
            "engine": "llama.cpp", "model": {"id": "google/gemma-3-270m", "revision": "r1"},
            "units": [{"id": "main"}],
            "execution": {"workers": workers, "groups": [], "services": [], "adapter": {}},
        },
        "compatibility": {"policy": "placement-independent-v1", "units": [{
            "unit": "main", "architecture": "x86_64", "kernel": "6.18.0", "nvidia_driver_captured": null,
            "nvidia_driver_min": null, "cuda_userspace": null, "devices": [],
        }]},
        "capsule": {
            "images": [{"unit": "main", "reference": "demo.local/c:1", "digest": null,
                "root": "opt/coldsnap/capsule", "snapshot_driver": {"id": "host", "abi": 1}}],
            "objects": [],
        },
        "runtime": {"bindings": []},
        "weights": {
            "model_payloads": {"repository": "", "revision": "", "objects": objects},
            "native": {"snapshot_driver": "host"},
            "recovery": {"source": "gguf", "model_id": "google/gemma-3-270m", "revision": "r1",
                "snapshot_driver": "host", "load_path": "none", "replay_plan": []},
        },
        "acceptance": {"accepted": true, "expected": {}},
    });
    Artifact::parse(value.to_string().as_bytes()).unwrap()
}
