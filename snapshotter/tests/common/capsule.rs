//! Capsule layers as a capture writes them, as far as the snapshotter looks at them.

use std::fs;
use std::path::Path;

use coldsnap::capsule;
use coldsnap::digest::Digest;
use coldsnap::format::artifact::Object;
use serde_json::json;

/// Writes a capsule into the layer at `fs` whose workers need these payloads: worker, digest, bytes.
pub fn write_capsule(fs: &Path, payloads: &[(&str, Digest, u64)]) {
    fs::create_dir_all(fs.join(capsule::CAPSULE_DIR)).unwrap();
    fs::write(fs.join(capsule::ARTIFACT_PATH), artifact(payloads)).unwrap();
    for (worker, ..) in payloads {
        let directory = fs.join(capsule::worker_dir(worker));
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join(capsule::PACK_NAME), "").unwrap();
    }
}

fn artifact(payloads: &[(&str, Digest, u64)]) -> String {
    let digest = Digest::of(b"x");
    let objects: Vec<_> =
        payloads.iter().map(|(w, digest, bytes)| Object::payload(w, *digest, *bytes)).collect();
    let workers: Vec<_> = payloads.iter().map(|(worker, ..)| json!({"id": worker, "unit": "main"})).collect();
    json!({
        "format": 9, "kind": "coldsnap-snapshot-artifact", "state": "committed",
        "capture_id": "cap-1", "request_sha256": digest,
        "snapshot_driver": {
            "id": "host", "abi": 1, "capture_boundary": "initialized-process-state",
            "minimum_nvidia_driver_major": null, "base_requirements": {"format": 1, "features": []},
        },
        "requires": {"format": 1, "features": []},
        "launch": {
            "engine": "test", "model": {"id": "m", "revision": "r"}, "units": [{"id": "main"}],
            "execution": {"workers": workers, "groups": [], "services": [], "adapter": {}},
        },
        "compatibility": {"policy": "placement-independent-v1", "units": [{
            "unit": "main", "architecture": "x86_64", "kernel": "6", "nvidia_driver_captured": null,
            "nvidia_driver_min": null, "cuda_userspace": null, "devices": [],
        }]},
        "capsule": {
            "images": [{"unit": "main", "reference": "test.local/c:1", "digest": null,
                "root": "opt/coldsnap/capsule", "snapshot_driver": {"id": "host", "abi": 1}}],
            "objects": [],
        },
        "runtime": {"bindings": []},
        "weights": {
            "model_payloads": {"repository": "", "revision": "", "objects": objects},
            "native": {"snapshot_driver": "host"},
            "recovery": {"source": "gguf", "model_id": "m", "revision": "r", "snapshot_driver": "host",
                "load_path": "none", "replay_plan": []},
        },
        "acceptance": {"accepted": true, "expected": null},
    })
    .to_string()
}
