//! One capsule with several processes that each own model memory.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test that fails panics")]

mod dump;

use std::fs;
use std::path::Path;

use coldsnap::capsule;
use coldsnap::capture::checkpoint::Checkpoint;
use coldsnap::capture::facts::{ProcessFacts, Tools};
use coldsnap::capture::progress::Silent;
use coldsnap::capture::run::{CaptureReport, CaptureRequest, capture};
use coldsnap::capture::scope::MappingScope;
use coldsnap::capture::source::model_source;
use coldsnap::criu::runs::PAGE_SIZE;
use coldsnap::criu::vma_status::ANON_PRIVATE;
use coldsnap::digest::Digest;
use coldsnap::format::artifact::Artifact;
use coldsnap::restore::{Decision, LiveContainer, RestoreMode, decide};
use coldsnap::store::NodeStore;
use dump::{Process, area, present, write_processes};
use serde_json::{Value, json};

const PAGE: usize = PAGE_SIZE as usize;
const MODEL_PAGES: usize = 32;
const OWN_PAGES: usize = 20;

/// Bytes without structure, the same in each run.
fn noise(seed: u64, pages: usize) -> Vec<u8> {
    let mut state = seed;
    let words = std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    });
    words.flat_map(u64::to_le_bytes).take(pages * PAGE).collect()
}

fn safetensors(tensor: &[u8]) -> Vec<u8> {
    let header = json!({"w": {"dtype": "U8", "shape": [tensor.len()], "data_offsets": [0, tensor.len()]}});
    let mut header = header.to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), tensor].concat()
}

/// A capture of one process without model memory and one worker per element of `workers`, which holds these bytes of
/// the model at an address of its own, then bytes of its own.
struct Made {
    dir: tempfile::TempDir,
    report: CaptureReport,
}

impl Made {
    fn capture(model: &[u8], workers: &[&[u8]]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (dump, root) = (dir.path().join("dump"), dir.path().join("root"));
        fs::create_dir_all(&dump).unwrap();
        fs::create_dir_all(&root).unwrap();
        let pages: Vec<Vec<u8>> = workers
            .iter()
            .zip(7..)
            .map(|(part, seed)| [part, &noise(seed, OWN_PAGES)[..]].concat())
            .collect();
        let start = |rank: usize| 0x7000_0000 + (rank as u64 * 0x1234) * PAGE_SIZE;
        let pagemaps: Vec<_> = pages
            .iter()
            .enumerate()
            .map(|(rank, pages)| [present(start(rank), (pages.len() / PAGE) as u64)])
            .collect();
        let idle = [present(0x1000_0000, 1)];
        let mut processes = vec![Process {
            pid: 1,
            vmas: vec![area(0x1000_0000, 0x1000_0000 + PAGE_SIZE, ANON_PRIVATE)],
            pagemap: &idle,
            pages: &[1; PAGE],
        }];
        processes.extend(pages.iter().zip(&pagemaps).enumerate().map(|(rank, (pages, pagemap))| Process {
            pid: 10 + rank as u32,
            vmas: vec![area(start(rank), start(rank) + pages.len() as u64 + PAGE_SIZE, ANON_PRIVATE)],
            pagemap,
            pages,
        }));
        write_processes(&dump, processes);
        let path = dir.path().join("model.safetensors");
        fs::write(&path, safetensors(model)).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let request = CaptureRequest {
            capture_id: "cap-test".into(),
            created_unix_ns: 1_800_000_000_000_000_000,
            host: "node".into(),
            dump_dir: &dump,
            container_root: dir.path(),
            layer_root: &root,
            store: &store(dir.path()),
            checkpoint: Some(&checkpoint),
            checkpoint_seen: Vec::new(),
            model_source: Some(model_source(&path, &checkpoint)),
            scope: MappingScope::All,
            keep_tcp: false,
            process: ProcessFacts { args: vec!["server".into()], terminal: false },
            binds: Vec::new(),
            tools: Tools::default(),
            image_reference: "demo.local/x:1".into(),
        };
        let report = capture(&request, &mut Silent).unwrap();
        Self { dir, report }
    }

    fn artifact(&self) -> Artifact {
        Artifact::parse(&fs::read(self.dir.path().join("root").join(capsule::ARTIFACT_PATH)).unwrap())
            .unwrap()
    }

    /// The container as the snapshotter and the shim make it: one bind per worker.
    fn decide(&self, edit: impl FnOnce(&mut Vec<Value>)) -> Result<Decision, String> {
        let (store, rootfs) = (store(self.dir.path()), self.dir.path().join("root"));
        let bind = |worker: &str, payload: &Digest| {
            let destination = format!("/{}", capsule::worker_dir(worker).join(capsule::PACK_NAME).display());
            json!({"destination": destination, "type": "bind", "source": store.payload_path(payload)})
        };
        let payloads = self.artifact().payloads();
        let mut mounts: Vec<Value> = payloads.iter().map(|p| bind(&p.worker, &p.digest)).collect();
        edit(&mut mounts);
        let spec = json!({"process": {"args": ["server"]}, "mounts": mounts});
        decide(&LiveContainer { rootfs: &rootfs, spec: &spec, store: &store }, RestoreMode::Require)
            .map_err(|refused| refused.to_string())
    }
}

fn store(dir: &Path) -> NodeStore {
    NodeStore::open(dir.join("store")).unwrap().with_reserve(0)
}

#[test]
fn equal_payloads_of_two_data_parallel_workers_become_one_object_referenced_twice() {
    let model = noise(3, MODEL_PAGES);
    let made = Made::capture(&model, &[&model, &model]);
    let objects = made.artifact().weights.model_payloads.unwrap().objects;
    assert_eq!(objects.iter().map(|o| o.owner.as_str()).collect::<Vec<_>>(), ["worker/w10", "worker/w11"]);
    assert_eq!(objects[0].path, objects[1].path);
    assert_eq!(objects[0].path, Digest::of(&model).payload_path().display().to_string());
    assert_eq!(store(made.dir.path()).list().unwrap().len(), 1);
    assert_eq!(made.report.payload_bytes, model.len() as u64);
    assert_eq!(made.report.new_payload_bytes, model.len() as u64);
    assert_eq!(made.report.model_bytes_matched_ratio, Some(1.0));
    // The rest is each worker's own.
    let residual = |worker: &str| {
        fs::read(made.dir.path().join("root").join(capsule::worker_dir(worker)).join(capsule::RESIDUAL_NAME))
            .unwrap()
    };
    assert_eq!(residual("w10"), noise(7, OWN_PAGES));
    assert_eq!(residual("w11"), noise(8, OWN_PAGES));
}

#[test]
fn tensor_parallel_shards_get_one_object_each() {
    let model = noise(3, MODEL_PAGES);
    let (first, second) = model.split_at(model.len() / 2);
    let made = Made::capture(&model, &[first, second]);
    let objects = made.artifact().weights.model_payloads.unwrap().objects;
    let paths: Vec<&str> = objects.iter().map(|o| o.path.as_str()).collect();
    let expected = [first, second].map(|shard| Digest::of(shard).payload_path().display().to_string());
    assert_eq!(paths, expected);
    assert_eq!(store(made.dir.path()).list().unwrap().len(), 2);
    assert_eq!(made.report.payload_bytes, model.len() as u64);
    // The shards together are the model.
    assert_eq!(made.report.model_bytes_matched_ratio, Some(1.0));
}

#[test]
fn a_restore_needs_the_bind_of_every_worker() {
    let model = noise(3, MODEL_PAGES);
    let (first, second) = model.split_at(model.len() / 2);
    for workers in [[&model[..], &model], [first, second]] {
        let made = Made::capture(&model, &workers);
        let decided = made.decide(|_| ()).unwrap();
        let Decision::Restore(plan) = decided else { panic!("{decided:?}") };
        assert_eq!(plan.payloads().len(), 2);
        let refused = made.decide(|mounts| drop(mounts.pop())).unwrap_err();
        assert!(refused.contains("w11") && !refused.contains("w10"), "{refused}");
    }
    // The shard of one worker at the place of the other.
    let refused = Made::capture(&model, &[first, second])
        .decide(|mounts| {
            let source = mounts[0]["source"].take();
            mounts[0]["source"] = mounts[1]["source"].clone();
            mounts[1]["source"] = source;
        })
        .unwrap_err();
    assert!(refused.contains("w10") && refused.contains("w11"), "{refused}");
}
