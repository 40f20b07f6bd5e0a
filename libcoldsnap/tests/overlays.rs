//! Overlays of a node: published whole, chosen when and only when every binding holds, removed with their leases.
//!
//! Needs root, as the program does: for ownership and for overlayfs attributes.

#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use coldsnap::capsule;
use coldsnap::digest::Digest;
use coldsnap::format::overlay::{HostIdentity, Target, Versions};
use coldsnap::node::NodeError;
use coldsnap::overlay::{
    self, LocalOverlay, NewOverlay, OverlayError, Portable, Published, choose, explain, publish,
};
use coldsnap::store::NodeStore;
use serde_json::{Value, json};

struct Node {
    dir: tempfile::TempDir,
    payload: Digest,
}

impl Node {
    /// A store with one payload.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = NodeStore::open(dir.path().join("store")).unwrap().with_reserve(0);
        let published = store.publish_pack(&[vec![&[7; 4096][..]]], &mut |_| {}).unwrap();
        Self { payload: *published.payload.digest(), dir }
    }

    fn store(&self) -> NodeStore {
        NodeStore::at(self.dir.path().join("store")).with_reserve(0)
    }

    /// The text of a descriptor with this payload and one CRIU image.
    fn artifact(&self, capture_id: &str, image: &[u8], payload: Digest) -> Vec<u8> {
        let mut artifact: Value =
            serde_json::from_slice(include_bytes!("samples/artifact-host.json")).unwrap();
        artifact["capture_id"] = json!(capture_id);
        artifact["capsule"]["objects"] = json!([{
            "role": "criu-image", "owner": "unit/main", "path": "images/core-1.img",
            "bytes": image.len(), "sha256": Digest::of(image).to_string(),
        }]);
        artifact["weights"]["model_payloads"]["objects"] = json!([{
            "role": "model-weight-payload", "owner": "worker/w0", "bytes": 4096,
            "path": payload.payload_path(), "sha256": payload.to_string(),
        }]);
        serde_json::to_vec(&artifact).unwrap()
    }

    fn portable(&self) -> Portable {
        Portable::parse(&self.artifact("cap-1", b"portable", self.payload)).unwrap()
    }

    fn stage(&self, artifact: &[u8]) -> NewOverlay {
        let captures = self.dir.path().join("store/captures");
        fs::create_dir_all(&captures).unwrap();
        let new = NewOverlay::begin(
            tempfile::tempdir_in(captures).unwrap().keep().join("overlay"),
            self.dir.path(),
        );
        let new = new.unwrap();
        let capsule = new.capsule().join(capsule::CAPSULE_DIR);
        fs::create_dir_all(capsule.join("images")).unwrap();
        fs::write(capsule.join("artifact.json"), artifact).unwrap();
        fs::write(capsule.join("images/core-1.img"), b"local").unwrap();
        fs::set_permissions(capsule.join("images"), fs::Permissions::from_mode(0o700)).unwrap();
        fs::write(new.changes().join("changed"), b"x").unwrap();
        new
    }

    fn publish(&self, id: &str, created: u64) -> LocalOverlay {
        let artifact = self.artifact(id, b"local", self.payload);
        match publish(&self.store(), self.stage(&artifact), &self.portable(), target(), created).unwrap() {
            Published::Stored(overlay) => overlay,
            Published::Redundant => panic!("redundant"),
        }
    }

    fn chosen(&self, here: impl FnOnce() -> Result<Target, NodeError>) -> (Option<String>, String) {
        let choice = choose(&self.store(), &self.portable(), here).unwrap();
        let reasons: Vec<String> =
            choice.passed_over.into_iter().map(|p| format!("{}: {}", p.id, p.reasons.join("; "))).collect();
        (choice.chosen.map(|c| c.overlay.id().to_owned()), reasons.join("\n"))
    }

    fn leases(&self) -> Vec<String> {
        self.store().leases().unwrap().into_iter().map(|lease| lease.owner).collect()
    }
}

fn target() -> Target {
    Target {
        hosts: vec![HostIdentity { machine_id_sha256: Digest::of(b"this"), hostname: "a".into() }],
        accelerators: Vec::new(),
        versions: Versions {
            kernel: "6.18.0".into(),
            criu: "4.2.1".into(),
            runc: "1.3.6".into(),
            nvidia_driver: None,
            cuda: None,
        },
        cpu_features: ["avx", "avx2"].map(str::to_owned).to_vec(),
    }
}

#[test]
fn an_overlay_is_stored_whole_with_its_bindings_and_a_lease() {
    let node = Node::new();
    assert!(!overlay::any(&node.store()));
    let overlay = node.publish("cap-2", 5);
    assert!(overlay::any(&node.store()));
    assert_eq!(overlay.document.portable_descriptor, node.portable().digest);
    let expected = node.store().root().join("overlays").join(node.portable().digest.hex()).join("cap-2");
    assert_eq!(overlay.directory(), expected);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&expected), 0o700);
    let [capsule_layer, changes] = overlay.layers();
    // What a container sees of its root is as it was.
    assert_eq!([mode(&capsule_layer), mode(&changes)], [mode(node.dir.path()); 2]);
    let capsule = capsule_layer.join(capsule::CAPSULE_DIR);
    assert_eq!([mode(&capsule.join("images")), mode(&capsule.join("images/core-1.img"))], [0o755, 0o644]);
    let mut value = [0; 8];
    assert_eq!(rustix::fs::getxattr(&capsule, "trusted.overlay.opaque", &mut value).unwrap(), 1);
    assert_eq!(fs::read(changes.join("changed")).unwrap(), b"x");
    assert_eq!(node.leases(), ["overlay/cap-2"]);
    // Payloads are named, never copied.
    assert_eq!(overlay::find(&node.store(), "cap-2").unwrap(), overlay);
}

#[test]
fn an_overlay_with_other_payload_objects_is_refused_and_leaves_nothing() {
    let node = Node::new();
    let other = node.store().publish_pack(&[vec![&[8; 4096][..]]], &mut |_| {}).unwrap();
    let artifact = node.artifact("cap-2", b"local", *other.payload.digest());
    let error = publish(&node.store(), node.stage(&artifact), &node.portable(), target(), 5).unwrap_err();
    assert_eq!(error.kind(), "IdentityChanged", "{error}");
    assert!(error.to_string().contains("payloads"), "{error}");
    assert!(overlay::list(&node.store()).unwrap().is_empty());
    assert_eq!(node.leases(), [""; 0]);
}

#[test]
fn an_overlay_equal_to_the_portable_capsule_is_discarded() {
    let node = Node::new();
    let artifact = node.artifact("cap-2", b"portable", node.payload);
    let published = publish(&node.store(), node.stage(&artifact), &node.portable(), target(), 5).unwrap();
    assert!(matches!(published, Published::Redundant));
    assert!(!overlay::any(&node.store()));
    assert_eq!(node.leases(), [""; 0]);
}

#[test]
fn the_newest_overlay_whose_every_binding_holds_is_chosen() {
    let node = Node::new();
    // Without any overlay nobody asks what this machine is.
    assert_eq!(node.chosen(|| panic!("asked")), (None, String::new()));
    node.publish("cap-3", 30);
    node.publish("cap-2", 20);
    assert_eq!(node.chosen(|| Ok(target())), (Some("cap-3".to_owned()), String::new()));
    overlay::remove(&node.store(), &node.portable().digest, "cap-3").unwrap();
    assert_eq!(node.chosen(|| Ok(target())).0.as_deref(), Some("cap-2"));
}

#[test]
fn every_single_binding_stands_against_the_overlay_and_is_named() {
    type Edit = fn(&mut Target);
    let node = Node::new();
    let overlay = node.publish("cap-2", 5);
    let edits: [(&str, Edit); 6] = [
        ("target.hosts", |t| t.hosts[0].machine_id_sha256 = Digest::of(b"other")),
        ("target.versions.kernel", |t| t.versions.kernel = "6.18.1".into()),
        ("target.versions.criu", |t| t.versions.criu = "4.3".into()),
        ("target.versions.runc", |t| t.versions.runc = "1.4.0".into()),
        ("target.cpu_features", |t| t.cpu_features = vec!["avx".into(), "avx512f".into()]),
        ("target.hosts", |t| t.hosts.push(t.hosts[0].clone())),
    ];
    for (field, edit) in edits {
        let mut here = target();
        edit(&mut here);
        let (chosen, reasons) = node.chosen(|| Ok(here.clone()));
        assert_eq!(chosen, None, "{field}");
        assert!(reasons.starts_with("cap-2: ") && reasons.contains(field), "{field} is not in: {reasons}");
        // The explanation says the same.
        let unequal: Vec<&str> = explain(&overlay, &node.portable(), Some(&here))
            .iter()
            .filter(|b| !b.equal)
            .map(|b| b.field)
            .collect();
        assert_eq!(unequal, [field]);
    }
    assert!(explain(&overlay, &node.portable(), Some(&target())).iter().all(|b| b.equal));
    // All at once, and only what differs of a long list.
    let mut here = target();
    for (_, edit) in edits {
        edit(&mut here);
    }
    let (_, reasons) = node.chosen(|| Ok(here));
    for word in ["hosts", "6.18.1", "4.3", "1.4.0", "missing avx2, is new avx512f"] {
        assert!(reasons.contains(word), "{word} is not in: {reasons}");
    }
    // A machine that cannot be described fits nothing.
    let (chosen, reasons) = node.chosen(|| Err(NodeError::Version("criu")));
    assert!(chosen.is_none() && reasons.contains("criu"), "{reasons}");
    // The name of the host is not a binding.
    let mut renamed = target();
    renamed.hosts[0].hostname = "b".into();
    assert_eq!(node.chosen(|| Ok(renamed)).0.as_deref(), Some("cap-2"));
}

#[test]
fn overlays_of_another_portable_descriptor_are_not_even_looked_at() {
    let node = Node::new();
    node.publish("cap-2", 5);
    let other = Portable::parse(&node.artifact("cap-1", b"portable, once more", node.payload)).unwrap();
    let choice = choose(&node.store(), &other, || panic!("asked")).unwrap();
    assert!(choice.chosen.is_none() && choice.passed_over.is_empty());
    // Moved there by hand, it says itself what it is bound to.
    let overlays = node.store().root().join("overlays");
    fs::rename(overlays.join(node.portable().digest.hex()), overlays.join(other.digest.hex())).unwrap();
    let choice = choose(&node.store(), &other, || Ok(target())).unwrap();
    assert!(choice.chosen.is_none());
    assert!(choice.passed_over[0].reasons[0].contains("bound to"), "{choice:?}");
}

#[test]
fn what_another_user_could_have_written_is_never_used() {
    type Edit = fn(&Path);
    let mode = |path: &Path, mode: u32| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let node = Node::new();
    let directory = node.publish("cap-2", 5).directory().to_owned();
    let edits: [(&str, Edit, Edit); 4] = [
        (
            "mode",
            |d| fs::set_permissions(d, fs::Permissions::from_mode(0o720)).unwrap(),
            |d| {
                fs::set_permissions(d, fs::Permissions::from_mode(0o700)).unwrap();
            },
        ),
        ("user 65534", |d| chown(d, Some(65534), None).unwrap(), |d| chown(d, Some(0), None).unwrap()),
        (
            "user 65534",
            |d| chown(d.join("overlay.json"), Some(65534), None).unwrap(),
            |d| chown(d.join("overlay.json"), Some(0), None).unwrap(),
        ),
        (
            "symbolic link",
            |d| {
                fs::rename(d.join("overlay.json"), d.join("x")).unwrap();
                symlink("x", d.join("overlay.json")).unwrap();
            },
            |d| fs::rename(d.join("x"), d.join("overlay.json")).unwrap(),
        ),
    ];
    for (word, edit, undo) in edits {
        edit(&directory);
        let (chosen, reasons) = node.chosen(|| Ok(target()));
        assert!(chosen.is_none() && reasons.contains(word), "{word} is not in: {reasons}");
        undo(&directory);
        assert!(node.chosen(|| Ok(target())).0.is_some());
    }
    for parent in directory.ancestors().skip(1).take(2) {
        mode(parent, 0o777);
        assert!(matches!(
            choose(&node.store(), &node.portable(), || Ok(target())),
            Err(OverlayError::Unsafe { .. })
        ));
        mode(parent, 0o700);
    }
}

#[test]
fn a_damaged_overlay_is_passed_over_and_can_be_removed() {
    let node = Node::new();
    let directory = node.publish("cap-2", 5).directory().to_owned();
    let artifact = directory.join("capsule").join(capsule::ARTIFACT_PATH);
    // The capsule of another capture.
    fs::write(&artifact, node.artifact("cap-9", b"local", node.payload)).unwrap();
    assert!(node.chosen(|| Ok(target())).1.contains("cap-9"));
    fs::remove_file(&artifact).unwrap();
    assert!(node.chosen(|| Ok(target())).1.contains("holds no capsule"));
    fs::write(directory.join("overlay.json"), b"{}").unwrap();
    assert!(node.chosen(|| Ok(target())).1.contains("overlay.json"));
    overlay::remove(&node.store(), &node.portable().digest, "cap-2").unwrap();
    assert!(!overlay::any(&node.store()));
    assert_eq!(node.leases(), [""; 0]);
    assert!(node.store().payload_path(&node.payload).exists(), "the payload stays");
}

#[test]
fn an_overlay_in_use_is_not_removed() {
    let node = Node::new();
    let overlay = node.publish("cap-2", 5);
    let used = choose(&node.store(), &node.portable(), || Ok(target())).unwrap().chosen.unwrap();
    assert!(overlay.is_in_use().unwrap());
    let digest = node.portable().digest;
    assert!(matches!(overlay::remove(&node.store(), &digest, "cap-2"), Err(OverlayError::InUse(_))));
    // Several containers use one.
    assert!(node.chosen(|| Ok(target())).0.is_some());
    assert_eq!(node.leases(), ["overlay/cap-2"]);
    drop(used);
    overlay::remove(&node.store(), &digest, "cap-2").unwrap();
    assert!(matches!(overlay::remove(&node.store(), &digest, "cap-2"), Err(OverlayError::NotFound(_))));
    for odd in ["..", "", "a/b"] {
        assert!(matches!(overlay::remove(&node.store(), &digest, odd), Err(OverlayError::NotFound(_))));
    }
}

#[test]
fn a_sweep_removes_what_interrupted_commands_left_and_nothing_else() {
    let node = Node::new();
    let directory = node.publish("cap-2", 5).directory().to_owned();
    // Killed between the lease and the rename, and in the middle of a removal.
    let admitted = node.store().admit(&node.payload, None, &mut |_| {}).unwrap();
    for owner in ["overlay/cap-7", "overlay/cap-8", "snapshot/x"] {
        node.store().lease(&admitted, owner).unwrap();
    }
    let half = directory.with_file_name(".cap-6.removed");
    fs::create_dir(&half).unwrap();
    overlay::sweep(&node.store(), |id| id == "cap-8").unwrap();
    assert!(!half.exists() && directory.exists());
    let mut leases = node.leases();
    leases.sort();
    assert_eq!(leases, ["overlay/cap-2", "overlay/cap-8", "snapshot/x"]);
}

#[test]
fn the_overlay_that_a_container_runs_from_is_found_by_its_capsule() {
    let node = Node::new();
    let overlay = node.publish("cap-2", 5);
    let root = |artifact: Option<Vec<u8>>| -> PathBuf {
        let root = tempfile::tempdir_in(node.dir.path()).unwrap().keep();
        if let Some(artifact) = artifact {
            let path = root.join(capsule::ARTIFACT_PATH);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, artifact).unwrap();
        }
        root
    };
    let used = |artifact| overlay::used_by(&node.store(), &node.portable(), &root(artifact));
    let artifact = |id, image: &[u8]| Some(node.artifact(id, image, node.payload));
    assert_eq!(used(artifact("cap-1", b"portable")).unwrap(), None);
    assert_eq!(used(artifact("cap-2", b"local")).unwrap(), Some(overlay));
    assert_eq!(used(None).unwrap(), None);
    assert!(matches!(used(artifact("cap-5", b"local")), Err(OverlayError::NotFound(_))));
}
