//! A capsule whose payload can be rebuilt, and its checkpoint: every file made by hand, so that nothing of what is
//! tested is used to make it.

#![allow(clippy::unwrap_used, dead_code, reason = "helpers of tests, each used by some of them")]

use std::fs;
use std::path::{Path, PathBuf};

use coldsnap::digest::Digest;
use serde_json::{Value, json};

pub const WORKER: &str = "w0";
const PAGE: usize = 4096;

/// Bytes without structure, the same in each run.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    });
    words.flat_map(u64::to_le_bytes).take(len).collect()
}

/// CRC-32 (IEEE), bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    };
    !bytes.iter().fold(!0, step)
}

/// A safetensors file with two tensors, and where their bytes begin.
fn safetensors(first: &[u8], second: &[u8]) -> (Vec<u8>, u64) {
    let end = first.len() + second.len();
    let mut header = json!({
        "a": {"dtype": "U8", "shape": [first.len()], "data_offsets": [0, first.len()]},
        "b": {"dtype": "U8", "shape": [second.len()], "data_offsets": [first.len(), end]},
    })
    .to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let start = 8 + header.len() as u64;
    ([&(header.len() as u64).to_le_bytes(), header.as_bytes(), first, second].concat(), start)
}

/// A GGUF file of version 3 with one tensor of bytes, and where they begin.
fn gguf(tensor: &[u8]) -> (Vec<u8>, u64) {
    let mut file = b"GGUF".to_vec();
    file.extend(3_u32.to_le_bytes());
    file.extend(1_u64.to_le_bytes());
    file.extend(0_u64.to_le_bytes());
    file.extend(1_u64.to_le_bytes());
    file.extend(b"t");
    file.extend(1_u32.to_le_bytes());
    file.extend((tensor.len() as u64).to_le_bytes());
    file.extend(24_u32.to_le_bytes());
    file.extend(0_u64.to_le_bytes());
    file.resize(file.len().next_multiple_of(32), 0);
    let start = file.len() as u64;
    file.extend(tensor);
    (file, start)
}

struct Extent {
    id: Digest,
    bytes: Vec<u8>,
    pieces: Value,
}

/// The capsule and what its payload must be.
pub struct Recoverable {
    pub dir: PathBuf,
    pub pack: Vec<u8>,
    pub digest: Digest,
}

impl Recoverable {
    /// Three extents below `dir`: two tensors of one safetensors file with zeros between them, `large` bytes of a
    /// GGUF file, and a piece in the middle of zeros.
    pub fn make(dir: &Path, large: usize) -> Self {
        let (a, b, t) = (noise(1, 70_000), noise(2, 30_001), noise(3, large));
        let (file, start) = safetensors(&a, &b);
        let (second, second_start) = gguf(&t);
        fs::create_dir_all(dir.join("checkpoint")).unwrap();
        fs::write(dir.join("checkpoint/model.safetensors"), file).unwrap();
        fs::write(dir.join("checkpoint/model.gguf"), second).unwrap();
        let zeros = |count: usize| vec![0; count];
        let piece = |file: &str, file_offset: u64, length: usize, extent_offset: usize| json!({"file": file, "file_offset": file_offset, "length": length, "extent_offset": extent_offset});
        let extents = vec![
            Extent {
                id: Digest::of(b"joined"),
                bytes: [&a[..], &zeros(1000), &b, &zeros(PAGE)].concat(),
                // Out of order: nothing promises one.
                pieces: json!([
                    piece("model.safetensors", start + 70_000, 30_001, 71_000),
                    piece("model.safetensors", start, 70_000, 0),
                ]),
            },
            Extent {
                id: Digest::of(b"large"),
                bytes: t.clone(),
                pieces: json!([piece("model.gguf", second_start, large, 0)]),
            },
            Extent {
                id: Digest::of(b"middle"),
                bytes: [&zeros(100)[..], &a[500..1500], &zeros(50)].concat(),
                pieces: json!([piece("model.safetensors", start + 500, 1000, 100)]),
            },
        ];
        let made = Self::write(dir, extents);
        made.edit("artifact.json", |_| {});
        made
    }

    fn write(dir: &Path, mut extents: Vec<Extent>) -> Self {
        // The pack's order.
        extents.sort_by_key(|e| (Digest::of(&e.bytes), e.bytes.len()));
        let mut pack = Vec::new();
        let (mut native, mut recovery, mut entries, mut sources) = (vec![], vec![], vec![], vec![]);
        for (n, extent) in extents.iter().enumerate() {
            let (ptr, size) = ((n as u64 + 1) << 32, extent.bytes.len());
            entries.push(json!({"ptr": ptr, "size": size, "tag": "weights"}));
            recovery.push(
                json!({"ptr": ptr, "size": size, "allocation_ptr": ptr, "semantic_id": extent.id.hex()}),
            );
            native.push(json!({
                "ptr": ptr, "size": size, "allocation_ptr": ptr, "semantic_id": extent.id.hex(),
                "sha256": Digest::of(&extent.bytes).hex(), "offset": pack.len(),
                "crc32": format!("{:08x}", crc32(&extent.bytes)), "placement": "copied",
            }));
            sources.push(json!({"semantic_id": extent.id.hex(), "pieces": extent.pieces}));
            pack.extend(&extent.bytes);
            pack.resize(pack.len().next_multiple_of(PAGE), 0);
        }
        let total: usize = extents.iter().map(|e| e.bytes.len()).sum();
        let stat =
            |bytes: usize| json!({"device": 0, "inode": 0, "bytes": bytes, "mtime_ns": 0, "ctime_ns": 0});
        let mut common = json!({
            "format": 3, "kind": "coldsnap-host-process", "page_size": PAGE,
            "identity": "worker-id-w0-host-n-rank-0-pid-7", "generation": "7-1", "pid": 7, "rank": 0,
            "host": "n", "worker_id": WORKER, "capture_id": "cap-1767225600000-514", "created_unix": 1.5,
            "residual_blob": "weights.blob", "residual_blob_bytes": 0, "residual_blob_stat": stat(0),
            "allocation_bytes": total, "model_weight_bytes": total, "residual_bytes": 0,
            "model_execution_state": null, "residual_extents": [], "checksum": "crc32", "entries": entries,
        });
        let mut manifest = common.clone();
        for (field, value) in [
            ("weight_source", json!("safetensors")),
            (
                "model_source",
                json!({"model_id": "m", "revision": "local", "metadata_sha256": "0".repeat(64)}),
            ),
            ("model_weight_extents", json!(recovery)),
            ("recovery_sources", json!(sources)),
        ] {
            manifest[field] = value;
        }
        for (field, value) in [
            ("weight_source", json!("split-native")),
            ("blob", json!("model-weights.pack")),
            ("blob_bytes", json!(pack.len())),
            ("blob_stat", stat(pack.len())),
            ("model_blob", json!("model-weights.pack")),
            ("model_blob_bytes", json!(pack.len())),
            ("model_blob_stat", stat(pack.len())),
            ("model_weight_extents", json!(native)),
            ("direct_io", json!(true)),
            ("write_io_mode", json!("padded-direct")),
            ("blob_reused", json!(false)),
            ("verify_mode", json!("preverified")),
            ("preverified", json!(true)),
            ("portable_model_payload", json!(true)),
            ("portable_residual_blob", json!(true)),
            ("verification_seconds", json!(0.0)),
            ("write_seconds", json!(0.0)),
            ("phase_seconds", json!({})),
        ] {
            common[field] = value;
        }
        let made = Self { dir: dir.to_owned(), digest: Digest::of(&pack), pack };
        fs::create_dir_all(made.path("hydration/w0")).unwrap();
        made.save("hydration/w0/native-manifest.json", &common);
        made.save("hydration/w0/manifest.json", &manifest);
        let facts = json!({
            "format": 1, "capture_id": "cap-1767225600000-514", "created_unix": 1,
            "architecture": rustix::system::uname().machine().to_str().unwrap(),
            "page_size": rustix::param::page_size(), "kernel": "k",
            "tools": {"coldsnap": "0", "criu": "4", "runtime": "1"},
            "process": {"args": [], "terminal": false}, "binds": [], "images": [], "scope": "large",
            "scope_narrowed": [], "keep_tcp": false, "workers": [],
        });
        made.save("capture.json", &facts);
        let mut artifact: Value =
            serde_json::from_str(include_str!("../samples/artifact-host.json")).unwrap();
        let payload = &mut artifact["weights"]["model_payloads"]["objects"][0];
        payload["bytes"] = json!(made.pack.len());
        payload["sha256"] = json!(made.digest.to_string());
        payload["path"] = json!(made.digest.payload_path());
        made.save("artifact.json", &artifact);
        made
    }

    /// The tree with the capsule in it.
    pub fn root(&self) -> PathBuf {
        self.dir.join("root")
    }

    pub fn checkpoint(&self) -> PathBuf {
        self.dir.join("checkpoint")
    }

    /// A file of the capsule.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root().join("opt/coldsnap/capsule").join(name)
    }

    fn save(&self, name: &str, value: &Value) {
        fs::write(self.path(name), serde_json::to_vec_pretty(value).unwrap()).unwrap();
    }

    /// Changes a document of the capsule; the artifact then lists what the manifests are.
    pub fn edit(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let read =
            |name: &str| -> Value { serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap() };
        let mut value = read(name);
        change(&mut value);
        self.save(name, &value);
        let mut artifact = read("artifact.json");
        let objects = artifact["capsule"]["objects"].as_array_mut().unwrap();
        // The sample's residual is not part of this capsule.
        objects.retain(|object| self.path(object["path"].as_str().unwrap()).exists());
        for object in objects {
            let bytes = fs::read(self.path(object["path"].as_str().unwrap())).unwrap();
            object["bytes"] = json!(bytes.len());
            object["sha256"] = json!(Digest::of(&bytes).to_string());
        }
        self.save("artifact.json", &artifact);
    }

    /// Changes a piece of the recovery source of the extent with this id.
    pub fn edit_pieces(&self, id: &[u8], change: impl FnOnce(&mut Vec<Value>)) {
        let id = json!(Digest::of(id).hex());
        self.edit("hydration/w0/manifest.json", |manifest| {
            let sources = manifest["recovery_sources"].as_array_mut().unwrap();
            let source = sources.iter_mut().find(|source| source["semantic_id"] == id).unwrap();
            change(source["pieces"].as_array_mut().unwrap());
        });
    }
}

/// Flips one bit of a file.
pub fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}
