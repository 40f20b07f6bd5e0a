//! From a dump to a capsule to the decision about a restore, and everything that must stand against one.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test that fails panics")]

mod dump;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use coldsnap::capsule;
use coldsnap::capture::checkpoint::Checkpoint;
use coldsnap::capture::facts::{ProcessFacts, Tools};
use coldsnap::capture::progress::Silent;
use coldsnap::capture::run::{CaptureReport, CaptureRequest, capture};
use coldsnap::capture::scope::MappingScope;
use coldsnap::capture::source::model_source;
use coldsnap::check::{CheckError, Checked, Options, check};
use coldsnap::criu::image::{self, Magic};
use coldsnap::criu::proto::MmEntry;
use coldsnap::criu::runs::PAGE_SIZE;
use coldsnap::criu::vma_status::ANON_PRIVATE;
use coldsnap::restore::{ColdReason, Decision, LiveContainer, Refusal, RestoreMode, decide};
use coldsnap::store::NodeStore;
use dump::{area, present, write_image, write_process};
use serde_json::{Value, json};

const START: u64 = 0x7000_0000;
/// Pages of the process: so many hold the tensor, so many other bytes, the rest nothing.
const MODEL_PAGES: usize = 32;
const OTHER_PAGES: usize = 20;
const PAGE: usize = PAGE_SIZE as usize;
const WORKER: &str = "w1";

/// Bytes without structure, the same in each run.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    let words = std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    });
    words.flat_map(u64::to_le_bytes).take(len).collect()
}

fn safetensors(tensor: &[u8]) -> Vec<u8> {
    let header =
        json!({"layer.weight": {"dtype": "U8", "shape": [tensor.len()], "data_offsets": [0, tensor.len()]}});
    let mut header = header.to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), tensor].concat()
}

struct Made {
    dir: tempfile::TempDir,
    report: CaptureReport,
}

impl Made {
    fn rootfs(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    fn store(&self) -> NodeStore {
        store(self.dir.path())
    }

    fn payload(&self) -> PathBuf {
        self.store().payload_path(&self.report.workers[0].payload.unwrap())
    }

    fn spec(&self) -> Value {
        let destination = format!("/{}", capsule::worker_dir(WORKER).join(capsule::PACK_NAME).display());
        json!({
            "process": {"args": ["server", "-m"], "terminal": false},
            "mounts": [
                {"destination": "/models", "type": "bind", "source": "/srv/models"},
                {"destination": destination, "type": "bind", "source": self.payload()},
            ],
        })
    }

    fn decide(&self, spec: &Value, mode: RestoreMode) -> Result<Decision, Vec<Refusal>> {
        let (rootfs, store) = (self.rootfs(), self.store());
        decide(&LiveContainer { rootfs: &rootfs, spec, store: &store }, mode)
            .map_err(|refused| refused.refusals)
    }

    /// What stands against a restore, in the text that people see.
    fn refused(&self, spec: &Value) -> String {
        match self.decide(spec, RestoreMode::Require) {
            Err(refusals) => refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
            Ok(decision) => panic!("not refused: {decision:?}"),
        }
    }

    fn edit_json(&self, path: &str, edit: impl FnOnce(&mut Value)) {
        let path = self.rootfs().join(path);
        let mut value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        edit(&mut value);
        fs::write(&path, serde_json::to_vec(&value).unwrap()).unwrap();
    }

    fn edit_manifest(&self, edit: impl FnOnce(&mut Value)) {
        let path = capsule::worker_dir(WORKER).join(capsule::NATIVE_MANIFEST_NAME);
        self.edit_json(path.to_str().unwrap(), edit);
    }
}

fn store(dir: &Path) -> NodeStore {
    NodeStore::open(dir.join("store")).unwrap().with_reserve(0)
}

/// A dump of a process whose memory holds the tensor at `shift` pages, then other bytes.
fn write_dump(dir: &Path, tensor: &[u8], shift: u64) {
    write_dump_with(dir, tensor, shift, 7);
}

fn write_dump_with(dir: &Path, tensor: &[u8], shift: u64, other: u64) {
    let start = START + shift * PAGE_SIZE;
    let pages = [tensor, &noise(other, OTHER_PAGES * PAGE)].concat();
    let count = (MODEL_PAGES + OTHER_PAGES) as u64;
    let vmas = vec![area(start, start + (count + 12) * PAGE_SIZE, ANON_PRIVATE)];
    write_process(dir, vmas, &[present(start, count)], &pages);
}

fn capture_into(dir: &Path, dump: &Path, root: &Path, checkpoint: Option<&Path>) -> CaptureReport {
    let opened = checkpoint.map(|path| Checkpoint::open(path).unwrap());
    let request = CaptureRequest {
        capture_id: "cap-test".into(),
        created_unix_ns: 1_800_000_000_000_000_000,
        host: "node".into(),
        dump_dir: dump,
        container_root: dir,
        layer_root: root,
        store: &store(dir),
        checkpoint: opened.as_ref(),
        model_source: checkpoint.zip(opened.as_ref()).map(|(path, c)| model_source(path, c)),
        scope: MappingScope::All,
        keep_tcp: false,
        process: ProcessFacts { args: vec!["server".into(), "-m".into()], terminal: false },
        binds: vec!["/models".into()],
        tools: Tools::default(),
        image_reference: "demo.local/x:1".into(),
    };
    capture(&request, &mut Silent).unwrap()
}

fn make() -> Made {
    let dir = tempfile::tempdir().unwrap();
    let tensor = noise(3, MODEL_PAGES * PAGE);
    let (dump, root) = (dir.path().join("dump"), dir.path().join("root"));
    fs::create_dir_all(&dump).unwrap();
    fs::create_dir_all(&root).unwrap();
    write_dump(&dump, &tensor, 0);
    let checkpoint = dir.path().join("model.safetensors");
    fs::write(&checkpoint, safetensors(&tensor)).unwrap();
    let report = capture_into(dir.path(), &dump, &root, Some(&checkpoint));
    Made { dir, report }
}

#[test]
fn a_capsule_is_restored_and_its_parts_are_where_they_belong() {
    let made = make();
    let report = &made.report;
    assert_eq!(report.payload_bytes, (MODEL_PAGES * PAGE) as u64);
    assert_eq!(report.residual_bytes, (OTHER_PAGES * PAGE) as u64);
    assert_eq!(report.pages_image_bytes, 0);
    assert_eq!(report.model_bytes_matched_ratio, Some(1.0));
    assert_eq!(fs::read(made.payload()).unwrap(), noise(3, MODEL_PAGES * PAGE));
    let blob = made.rootfs().join(capsule::worker_dir(WORKER)).join(capsule::RESIDUAL_NAME);
    assert_eq!(fs::read(blob).unwrap(), noise(7, OTHER_PAGES * PAGE));
    let decision = made.decide(&made.spec(), RestoreMode::Require).unwrap();
    let Decision::Restore(plan) = decision else { panic!("{decision:?}") };
    assert_eq!(plan.capture_id(), "cap-test");
    assert_eq!(plan.payloads().len(), 1);
}

#[test]
fn another_address_gives_the_same_payload_and_nothing_new_in_the_store() {
    let made = make();
    let (dump, root) = (made.dir.path().join("dump2"), made.dir.path().join("root2"));
    fs::create_dir_all(&dump).unwrap();
    fs::create_dir_all(&root).unwrap();
    write_dump(&dump, &noise(3, MODEL_PAGES * PAGE), 77);
    let again = capture_into(made.dir.path(), &dump, &root, Some(&made.dir.path().join("model.safetensors")));
    assert_eq!(again.workers[0].payload, made.report.workers[0].payload);
    assert_eq!(again.new_payload_bytes, 0);
    assert!(again.payload_reused);
    assert_eq!(made.store().list().unwrap().len(), 1);
    // Nothing else is exchangeable: manifests and images of the two captures differ.
    for name in ["hydration/w1/native-manifest.json", "images/mm-1.img"] {
        let read = |root: &Path| fs::read(root.join(capsule::CAPSULE_DIR).join(name)).unwrap();
        assert_ne!(read(&made.rootfs()), read(&root), "{name}");
    }
}

/// Two captures of one model: the payload is one object, everything else differs although sizes are equal.
fn make_two() -> (Made, PathBuf) {
    let made = make();
    let (dump, root) = (made.dir.path().join("dump2"), made.dir.path().join("root2"));
    fs::create_dir_all(&dump).unwrap();
    fs::create_dir_all(&root).unwrap();
    write_dump_with(&dump, &noise(3, MODEL_PAGES * PAGE), 77, 8);
    let again = capture_into(made.dir.path(), &dump, &root, Some(&made.dir.path().join("model.safetensors")));
    assert_eq!(again.workers[0].payload, made.report.workers[0].payload);
    (made, root)
}

#[test]
fn nothing_is_interchanged_because_a_payload_matches() {
    // Address map, residual map, process images, facts, and the whole description of another capture.
    for name in [
        "hydration/w1/native-manifest.json",
        "hydration/w1/manifest.json",
        "images/mm-1.img",
        "artifact.json",
    ] {
        let (made, other) = make_two();
        let spec = made.spec();
        assert!(matches!(made.decide(&spec, RestoreMode::Require), Ok(Decision::Restore(_))));
        let capsule = made.rootfs().join(capsule::CAPSULE_DIR);
        fs::copy(other.join(capsule::CAPSULE_DIR).join(name), capsule.join(name)).unwrap();
        let text = made.refused(&spec);
        assert!(text.contains("is not the one that its descriptor pins"), "{name}: {text}");
        let error = check_capsule(&made).unwrap_err();
        assert!(matches!(error.kind(), "IdentityChanged" | "SizeChanged"), "{name}: {error}");
    }
}

#[test]
fn a_residual_of_another_capture_is_not_this_one_although_size_and_payload_are_equal() {
    let (made, other) = make_two();
    let name = "hydration/w1/weights.blob";
    let (here, there) = (made.rootfs().join(capsule::CAPSULE_DIR), other.join(capsule::CAPSULE_DIR));
    assert_eq!(fs::metadata(here.join(name)).unwrap().len(), fs::metadata(there.join(name)).unwrap().len());
    fs::copy(there.join(name), here.join(name)).unwrap();
    assert_eq!(check_capsule(&made).unwrap_err().kind(), "IdentityChanged");
}

#[test]
fn only_equal_path_size_and_digest_make_two_payloads_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let (a, b) = (noise(1, 5000), noise(2, 6000));
    let publish = |extents: &[&[u8]]| {
        let extents: Vec<Vec<&[u8]>> = extents.iter().map(|extent| vec![*extent]).collect();
        let published = store.publish_pack(&extents, &mut |_| ()).unwrap();
        (*published.payload.digest(), published.payload.bytes())
    };
    let both = publish(&[&a, &b]);
    assert_eq!(publish(&[&b, &a]), both, "order of capture does not matter");
    // The same tensors in other extents are other bytes.
    let joined = [&a[..], &b].concat();
    let others = [publish(&[&joined]), publish(&[&a, &b, &a]), publish(&[&a])];
    for other in others {
        assert_ne!(other.0, both.0);
        assert_ne!(other.0.payload_path(), both.0.payload_path());
    }
    assert_eq!(store.list().unwrap().len(), 4);
}

fn check_capsule(made: &Made) -> Result<Checked, CheckError> {
    let options = Options { store: Some(&made.store()), ..Options::default() };
    check(&made.rootfs(), &options, &mut |_, _, _| ())
}

#[test]
fn a_whole_capsule_is_checked() {
    let made = make();
    let checked = check_capsule(&made).unwrap();
    assert!(checked.not_compared.is_empty(), "{:?}", checked.not_compared);
    // Descriptor, facts and both manifests; every object, the residual's extents and the payload in the store.
    assert_eq!(checked.documents.len(), 4);
    assert!(checked.files.iter().any(|file| file.path == made.payload() && file.report.whole_digest));

    let capsule = made.rootfs().join(capsule::CAPSULE_DIR);
    fs::write(capsule.join("images/extra.img"), b"x").unwrap();
    assert!(check_capsule(&made).unwrap_err().to_string().contains("images/extra.img is not listed"));
    fs::remove_file(capsule.join("images/extra.img")).unwrap();
    let pages = capsule.join("images/pages-1.img");
    fs::remove_file(&pages).unwrap();
    assert_eq!(check_capsule(&made).unwrap_err().kind(), "Io");
    std::os::unix::fs::symlink("/dev/null", &pages).unwrap();
    assert_eq!(check_capsule(&made).unwrap_err().kind(), "Io", "a link is not followed");
    fs::remove_file(&pages).unwrap();
    fs::write(&pages, b"").unwrap();
    check_capsule(&made).unwrap();

    let payload = made.payload();
    fs::set_permissions(&payload, fs::Permissions::from_mode(0o644)).unwrap();
    let mut bytes = fs::read(&payload).unwrap();
    bytes[77] ^= 1;
    fs::write(&payload, bytes).unwrap();
    assert_eq!(check_capsule(&made).unwrap_err().kind(), "IdentityChanged");
    fs::remove_file(&payload).unwrap();
    assert_eq!(check_capsule(&made).unwrap().not_compared.len(), 1);
}

#[test]
fn without_a_checkpoint_everything_is_residual() {
    let dir = tempfile::tempdir().unwrap();
    let (dump, root) = (dir.path().join("dump"), dir.path().join("root"));
    fs::create_dir_all(&dump).unwrap();
    fs::create_dir_all(&root).unwrap();
    write_dump(&dump, &noise(3, MODEL_PAGES * PAGE), 0);
    let report = capture_into(dir.path(), &dump, &root, None);
    assert_eq!(report.payload_bytes, 0);
    assert_eq!(report.residual_bytes, ((MODEL_PAGES + OTHER_PAGES) * PAGE) as u64);
    let made = Made { dir, report };
    let spec = json!({"process": {"args": ["server", "-m"]}, "mounts": [{"destination": "/models"}]});
    assert!(matches!(made.decide(&spec, RestoreMode::Require), Ok(Decision::Restore(_))));
}

#[test]
fn a_cold_start_needs_no_reason_but_require_does() {
    let made = make();
    let spec = made.spec();
    assert!(matches!(made.decide(&spec, RestoreMode::Never), Ok(Decision::Cold(ColdReason::NotWanted))));
    let mut other = spec.clone();
    other["process"]["args"] = json!(["bash"]);
    assert!(matches!(
        made.decide(&other, RestoreMode::Auto),
        Ok(Decision::Cold(ColdReason::OtherCommand { .. }))
    ));
    assert!(made.refused(&other).contains("bash"));
    fs::remove_file(made.rootfs().join(capsule::ARTIFACT_PATH)).unwrap();
    assert!(matches!(made.decide(&spec, RestoreMode::Auto), Ok(Decision::Cold(ColdReason::NoCapsule))));
    assert!(made.refused(&spec).contains("no capsule"));
}

#[test]
fn everything_that_differs_is_named_at_once() {
    let made = make();
    made.edit_json(capsule::CAPTURE_PATH, |facts| {
        facts["architecture"] = json!("riscv64");
        facts["page_size"] = json!(65536);
        facts["binds"] = json!(["/models", "/data"]);
    });
    let mut spec = made.spec();
    spec["process"]["terminal"] = json!(true);
    fs::remove_file(made.rootfs().join(capsule::IMAGES_DIR).join("pstree.img")).unwrap();
    let text = made.refused(&spec);
    for word in ["riscv64", "65536", "/data", "terminal", "pstree.img"] {
        assert!(text.contains(word), "{word} is not in: {text}");
    }
}

#[test]
fn a_payload_that_is_missing_damaged_or_elsewhere_is_refused() {
    let made = make();
    let pack = made.payload();
    let mut elsewhere = made.spec();
    let copy = made.dir.path().join("copy.pack");
    fs::copy(&pack, &copy).unwrap();
    elsewhere["mounts"][1]["source"] = json!(copy);
    assert!(made.refused(&elsewhere).contains("snapshotter"));
    let mut unbound = made.spec();
    unbound["mounts"].as_array_mut().unwrap().pop();
    assert!(made.refused(&unbound).contains("nothing"));

    let spec = made.spec();
    let modified = fs::metadata(&pack).unwrap().modified().unwrap();
    fs::set_permissions(&pack, fs::Permissions::from_mode(0o644)).unwrap();
    let file = fs::OpenOptions::new().read(true).write(true).open(&pack).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 4321).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 4321).unwrap();
    file.set_modified(modified).unwrap();
    assert!(made.refused(&spec).contains("damaged"), "a flipped byte, although the time is as it was");

    fs::remove_file(&pack).unwrap();
    assert!(made.refused(&spec).contains("is not on this node"));
}

#[test]
fn manifest_and_images_must_say_the_same() {
    type Edit = fn(&mut Value);
    let cases: [(&str, &str, Edit); 6] = [
        ("a gap", "gap", |m| {
            let size = m["entries"][0]["size"].as_u64().unwrap();
            m["entries"][0]["size"] = json!(size + PAGE_SIZE);
            m["allocation_bytes"] = json!(size + PAGE_SIZE);
        }),
        ("an overlap", "overlap", |m| {
            let ptr = m["residual_extents"][0]["ptr"].as_u64().unwrap();
            m["residual_extents"][0]["ptr"] = json!(ptr - PAGE_SIZE);
        }),
        ("an extent outside", "outside", |m| {
            let ptr = m["residual_extents"][0]["ptr"].as_u64().unwrap();
            m["residual_extents"][0]["ptr"] = json!(ptr + (1 << 30));
        }),
        ("another residual size", "bytes", |m| m["residual_blob_bytes"] = json!(4096)),
        ("another payload size", "bytes", |m| m["model_blob_bytes"] = json!(4096)),
        ("a missing field", "entries", |m| {
            m.as_object_mut().unwrap().remove("entries");
        }),
    ];
    for (what, word, edit) in cases {
        let made = make();
        made.edit_manifest(edit);
        let text = made.refused(&made.spec()).to_lowercase();
        assert!(text.contains(word), "{what}: {word} is not in: {text}");
    }
}

#[test]
fn images_that_map_other_bytes_than_the_manifest_lists_are_refused() {
    type Edit = fn(&mut MmEntry);
    let cases: [(&str, Edit); 3] = [
        ("another offset", |mm| {
            let vma = mm.vmas.iter_mut().find(|v| v.shmid() != 0).unwrap();
            vma.set_pgoff(vma.pgoff() + PAGE_SIZE);
        }),
        ("another address", |mm| {
            let vma = mm.vmas.iter_mut().find(|v| v.shmid() != 0).unwrap();
            vma.set_start(vma.start() + PAGE_SIZE);
        }),
        ("a mapping less", |mm| {
            let at = mm.vmas.iter().position(|v| v.shmid() != 0).unwrap();
            mm.vmas.remove(at);
        }),
    ];
    for (what, edit) in cases {
        let made = make();
        let images = made.rootfs().join(capsule::IMAGES_DIR);
        let mut mm: MmEntry = image::read_one(&images.join("mm-1.img"), Magic::Mm).unwrap();
        edit(&mut mm);
        write_image(&images, "mm-1.img", Magic::Mm, &[&mm]);
        let size = fs::metadata(images.join("mm-1.img")).unwrap().len();
        made.edit_json(capsule::CAPTURE_PATH, |facts| {
            for image in facts["images"].as_array_mut().unwrap() {
                if image["name"] == "mm-1.img" {
                    image["bytes"] = json!(size);
                }
            }
        });
        let text = made.refused(&made.spec());
        assert!(text.contains("CRIU images map"), "{what}: {text}");
    }
}

#[test]
fn two_copies_of_a_tensor_are_one_extent_and_ordinary_memory() {
    let dir = tempfile::tempdir().unwrap();
    let tensor = noise(3, MODEL_PAGES * PAGE);
    let (dump, root) = (dir.path().join("dump"), dir.path().join("root"));
    fs::create_dir_all(&dump).unwrap();
    fs::create_dir_all(&root).unwrap();
    let other = noise(9, 16 * PAGE);
    let pages = [&tensor[..], &other, &tensor].concat();
    let count = (2 * MODEL_PAGES + 16) as u64;
    write_process(
        &dump,
        vec![area(START, START + count * PAGE_SIZE, ANON_PRIVATE)],
        &[present(START, count)],
        &pages,
    );
    let checkpoint = dir.path().join("model.safetensors");
    fs::write(&checkpoint, safetensors(&tensor)).unwrap();
    let report = capture_into(dir.path(), &dump, &root, Some(&checkpoint));
    assert_eq!(report.workers[0].model_extents, 1);
    assert_eq!(report.residual_bytes, ((MODEL_PAGES + 16) * PAGE) as u64);
}

#[test]
fn recovery_sources_lead_to_the_payload_s_bytes() {
    let made = make();
    let path = made.rootfs().join(capsule::worker_dir(WORKER)).join(capsule::RECOVERY_MANIFEST_NAME);
    let manifest: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let native = made.rootfs().join(capsule::worker_dir(WORKER)).join(capsule::NATIVE_MANIFEST_NAME);
    let native: Value = serde_json::from_slice(&fs::read(native).unwrap()).unwrap();
    let payload = fs::read(made.payload()).unwrap();
    // Rebuilt by hand from the checkpoint, as recovery will do.
    let mut rebuilt = vec![0; payload.len()];
    let offsets: BTreeMap<&str, u64> = native["model_weight_extents"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| (e["semantic_id"].as_str().unwrap(), e["offset"].as_u64().unwrap()))
        .collect();
    for source in manifest["recovery_sources"].as_array().unwrap() {
        let base = offsets[source["semantic_id"].as_str().unwrap()];
        for piece in source["pieces"].as_array().unwrap() {
            let number = |field: &str| usize::try_from(piece[field].as_u64().unwrap()).unwrap();
            let file = fs::read(made.dir.path().join(piece["file"].as_str().unwrap())).unwrap();
            let at = usize::try_from(base).unwrap() + number("extent_offset");
            let from = number("file_offset");
            rebuilt[at..at + number("length")].copy_from_slice(&file[from..from + number("length")]);
        }
    }
    assert!(rebuilt == payload);
}
