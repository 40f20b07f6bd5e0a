//! A payload from the pinned checkpoint: the committed bytes or nothing, and a state that tells which.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
#[path = "common/recoverable.rs"]
mod recoverable;

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;

use coldsnap::digest::Digest;
use coldsnap::recover::capsule::CapsuleDocuments;
use coldsnap::recover::checkpoint::FromCheckpoint;
use coldsnap::recover::files::{Place, Places};
use coldsnap::recover::record::{self, Found, Materialization, State, Trigger};
use coldsnap::recover::run::{Job, MaterializeError, materialize};
use coldsnap::recover::{RecoverError, background};
use coldsnap::source::{DirectorySource, Event, FetchError, Limits, RecoverySource, Source, Wanted, bring};
use coldsnap::store::{NodeStore, Staging};
use common::names;
use recoverable::{Recoverable, WORKER, flip, noise};
use serde_json::{Value, json};

/// More than the ring holds, and no whole number of buffers.
const LARGE: usize = (20 << 20) + 4097;

struct Case {
    _dir: tempfile::TempDir,
    made: Recoverable,
    store: NodeStore,
}

fn case(large: usize) -> Case {
    let dir = tempfile::tempdir().unwrap();
    let made = Recoverable::make(dir.path(), large);
    let store = NodeStore::open(dir.path().join("store")).unwrap().with_reserve(0);
    Case { _dir: dir, made, store }
}

impl Case {
    fn capsule(&self) -> Arc<CapsuleDocuments> {
        Arc::new(CapsuleDocuments::read(&self.made.root()).unwrap())
    }

    fn files(&self) -> Arc<Places> {
        Arc::new(Places(vec![Place::named(&self.made.checkpoint(), None)]))
    }

    fn source(&self) -> FromCheckpoint {
        FromCheckpoint::new(self.capsule(), WORKER, self.files())
    }

    fn wanted(&self) -> Wanted {
        Wanted { digest: self.made.digest, bytes: self.made.pack.len() as u64 }
    }

    fn fetched(&self, from: u64) -> Result<Vec<u8>, FetchError> {
        let mut bytes = Vec::new();
        self.source().fetch(&self.wanted(), from, &mut |chunk| {
            bytes.extend_from_slice(chunk);
            Ok(())
        })?;
        Ok(bytes)
    }

    fn materialize(
        &self,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<coldsnap::source::Brought, MaterializeError> {
        let job = Job {
            capsule: self.capsule(),
            worker: WORKER.to_owned(),
            trigger: Trigger::Command,
            files: self.files(),
        };
        materialize(&self.store, &job, &Limits::default(), cancelled, &mut |_| {})
    }

    fn state(&self) -> Found {
        record::find(&self.store, &self.capsule().digest, WORKER).unwrap().unwrap()
    }

    /// Fails with this error, publishes nothing, and says so.
    #[track_caller]
    fn refused(&self, kind: &str, said: &[&str], state: State) {
        let error = self.materialize(&|| false).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        for part in said {
            assert!(error.to_string().contains(part), "expected {part:?}: {error}");
        }
        let found = self.state();
        assert_eq!((found.document.state, found.alive), (state, false));
        let reason = found.document.reason.unwrap();
        assert_eq!((reason.kind.as_str(), reason.message), (kind, error.to_string()));
        assert!(!self.store.payload_path(&self.made.digest).exists(), "something was published");
    }
}

#[test]
fn a_payload_is_rebuilt_from_safetensors_and_gguf() {
    let case = case(LARGE);
    assert!(case.fetched(0).unwrap() == case.made.pack, "another pack");
    let brought = case.materialize(&|| false).unwrap();
    assert_eq!((brought.fetched, brought.resumed), (case.made.pack.len() as u64, 0));
    assert!(fs::read(brought.payload.path()).unwrap() == case.made.pack);
    assert_eq!(names(&case.store).len(), 2, "the pack and its record");
    let found = case.state();
    assert_eq!((found.document.state, found.alive), (State::Ready, false));
    assert_eq!(found.document.bytes_done, case.made.pack.len() as u64);
    // It is here: nothing is read again, not even the checkpoint is needed.
    fs::remove_dir_all(case.made.checkpoint()).unwrap();
    assert_eq!(case.materialize(&|| false).unwrap().fetched, 0);
}

#[test]
fn it_resumes_at_any_offset() {
    let case = case(3 << 20);
    let pack = &case.made.pack;
    let end = pack.len();
    let starts =
        [0, 1, 99, 100, 4095, 4096, 4097, 70_000, 1 << 20, (1 << 20) + 1, end / 2, end - 4096, end - 1, end];
    for from in starts {
        let bytes = case.fetched(from as u64).unwrap();
        assert!(bytes == pack[from..], "from {from}: {} bytes", bytes.len());
    }
}

#[test]
fn every_extent_boundary_is_an_offset_to_resume_at() {
    let case = case(9000);
    for from in 0..case.made.pack.len() {
        if from % 4096 < 3 || from % 4096 > 4093 || from % 611 == 0 {
            assert!(case.fetched(from as u64).unwrap() == case.made.pack[from..], "from {from}");
        }
    }
}

#[test]
fn a_changed_checkpoint_publishes_nothing_and_names_the_extent() {
    for (file, said, at) in [
        ("model.safetensors", "model.safetensors at offset", 50_000),
        ("model.gguf", "model.gguf at offset", 2 << 20),
    ] {
        let case = case(3 << 20);
        flip(&case.made.checkpoint().join(file), at);
        case.refused(
            "CheckpointChanged",
            &["not the captured one", said, "sha256", "bytes)"],
            State::Corrupt,
        );
        assert!(names(&case.store).is_empty(), "wrong bytes are kept");
        flip(&case.made.checkpoint().join(file), at);
        case.materialize(&|| false).unwrap();
        assert_eq!(case.state().document.state, State::Ready);
        assert!(case.state().document.reason.is_none());
    }
}

#[test]
fn the_headers_tell_a_damaged_checkpoint_from_another_one() {
    let case = case(9000);
    let metadata = {
        // As documented: names and sizes of the files, name and place of every tensor.
        let size = |name: &str| fs::metadata(case.made.checkpoint().join(name)).unwrap().len();
        let (gguf, safetensors) = (size("model.gguf"), size("model.safetensors"));
        let text = format!(
            r#"{{"files":[["model.gguf",{gguf}],["model.safetensors",{safetensors}]],"tensors":[["t",0,{},9000],["a",1,{},70000],["b",1,{},30001]]}}"#,
            gguf - 9000,
            safetensors - 100_001,
            safetensors - 30_001,
        );
        Digest::of(text.as_bytes())
    };
    case.made
        .edit("hydration/w0/manifest.json", |m| m["model_source"]["metadata_sha256"] = json!(metadata.hex()));
    flip(&case.made.checkpoint().join("model.gguf"), 5000);
    case.refused("CheckpointChanged", &["its bytes were changed"], State::Corrupt);
    case.made
        .edit("hydration/w0/manifest.json", |m| m["model_source"]["metadata_sha256"] = json!("1".repeat(64)));
    case.refused(
        "CheckpointChanged",
        &["its tensors are not those of the captured checkpoint"],
        State::Corrupt,
    );
}

#[test]
fn a_missing_file_is_named_with_where_it_was_looked_for() {
    let case = case(9000);
    fs::remove_file(case.made.checkpoint().join("model.gguf")).unwrap();
    let place = case.made.checkpoint().display().to_string();
    case.refused("CheckpointMissing", &["model.gguf", &place], State::Failed);
    // Before anything is written.
    assert!(names(&case.store).is_empty());
}

#[test]
fn a_short_file_is_named_before_anything_is_written() {
    let case = case(9000);
    let path = case.made.checkpoint().join("model.safetensors");
    let file = fs::File::options().write(true).open(&path).unwrap();
    let length = file.metadata().unwrap().len();
    file.set_len(length - 1).unwrap();
    case.refused(
        "CheckpointChanged",
        &["model.safetensors", &format!("{} bytes", length - 1), &length.to_string()],
        State::Corrupt,
    );
    assert!(names(&case.store).is_empty());
}

#[test]
fn an_extent_without_a_recovery_source_is_named() {
    let case = case(9000);
    case.made.edit("hydration/w0/manifest.json", |manifest| {
        manifest["recovery_sources"]
            .as_array_mut()
            .unwrap()
            .retain(|source| source["semantic_id"] != json!(Digest::of(b"large").hex()));
    });
    let id = Digest::of(b"large").hex();
    case.refused("NotRecoverable", &[&id, "9000 bytes", "no recovery source"], State::Failed);
}

#[test]
fn hostile_manifests_are_refused() {
    type Change = fn(&mut Value);
    let cases: [(&str, Change); 8] = [
        ("its end in the file overflows", |piece| piece["file_offset"] = json!(u64::MAX)),
        ("not inside the extent", |piece| piece["extent_offset"] = json!(u64::MAX)),
        ("not inside the extent", |piece| piece["length"] = json!(u64::MAX)),
        ("not inside the extent", |piece| piece["length"] = json!(0)),
        ("not a clean relative path", |piece| piece["file"] = json!("../model.gguf")),
        ("not a clean relative path", |piece| piece["file"] = json!("/etc/hostname")),
        ("not a clean relative path", |piece| piece["file"] = json!("a/../../x")),
        ("unknown field", |piece| piece["path"] = json!("x")),
    ];
    for (said, change) in cases {
        let case = case(9000);
        case.made.edit_pieces(b"large", |pieces| change(&mut pieces[0]));
        case.refused("Malformed", &[said], State::Failed);
    }
    let case = case(9000);
    let huge = (1_u64 << 40, "CheckpointChanged");
    case.made.edit_pieces(b"large", |pieces| pieces[0]["file_offset"] = json!(huge.0));
    case.refused(huge.1, &["model.gguf"], State::Corrupt);
}

#[test]
fn a_link_out_of_the_checkpoint_is_not_followed() {
    let case = case(9000);
    let file = case.made.checkpoint().join("model.gguf");
    let outside = case.made.dir.join("outside.gguf");
    fs::rename(&file, &outside).unwrap();
    for target in [outside.as_path(), Path::new("../outside.gguf")] {
        symlink(target, &file).unwrap();
        case.refused("CheckpointRefused", &["model.gguf", "leads out"], State::Failed);
        fs::remove_file(&file).unwrap();
    }
    // Inside it is.
    fs::create_dir(case.made.checkpoint().join("blobs")).unwrap();
    fs::rename(&outside, case.made.checkpoint().join("blobs/x")).unwrap();
    symlink("blobs/x", &file).unwrap();
    case.materialize(&|| false).unwrap();
}

#[test]
fn a_manifest_of_another_capsule_is_refused() {
    let case = case(9000);
    let path = case.made.path("hydration/w0/manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    // The descriptor lists what the manifest was.
    fs::write(&path, text.replace("\"model_id\": \"m\"", "\"model_id\": \"n\"")).unwrap();
    case.refused("IdentityChanged", &["manifest.json"], State::Failed);
    case.made.edit("hydration/w0/manifest.json", |m| m["worker_id"] = json!("w1"));
    case.refused("IdentityChanged", &["worker_id"], State::Failed);
    fs::remove_file(&path).unwrap();
    case.refused("NotACapsule", &["manifest.json", "not there"], State::Failed);
}

#[test]
fn a_wrong_payload_in_the_store_is_replaced_or_called_corrupt() {
    let case = case(9000);
    let path = case.store.payload_path(&case.made.digest);
    fs::write(&path, noise(9, case.made.pack.len())).unwrap();
    fs::rename(case.made.checkpoint(), case.made.dir.join("away")).unwrap();
    let error = case.materialize(&|| false).unwrap_err();
    assert_eq!((error.kind(), case.state().document.state), ("CheckpointMissing", State::Corrupt));
    fs::rename(case.made.dir.join("away"), case.made.checkpoint()).unwrap();
    case.materialize(&|| false).unwrap();
    assert!(fs::read(&path).unwrap() == case.made.pack);
    assert_eq!(case.state().document.state, State::Ready);
}

#[test]
fn what_was_left_by_a_cancelled_attempt_is_used() {
    let case = case(LARGE);
    let asked = Cell::new(0);
    let cancelled = || {
        asked.set(asked.get() + 1);
        asked.get() > 12
    };
    let error = case.materialize(&cancelled).unwrap_err();
    assert_eq!(error.kind(), "Cancelled");
    assert_eq!(case.state().document.state, State::Failed);
    let again = case.materialize(&|| false).unwrap();
    assert!(again.resumed > 0, "nothing was left");
    assert_eq!(again.resumed + again.fetched, case.made.pack.len() as u64);
    assert!(fs::read(again.payload.path()).unwrap() == case.made.pack);
}

#[test]
fn another_payload_than_the_capsules_is_not_delivered() {
    let case = case(9000);
    let wanted = Wanted { digest: Digest::of(b"x"), bytes: 4096 };
    let error = case.source().fetch(&wanted, 0, &mut |_| Ok(())).unwrap_err();
    assert!(matches!(error, FetchError::Checkpoint(e) if matches!(*e, RecoverError::OtherPayload { .. })));
}

#[test]
fn a_sink_that_fails_ends_the_reader() {
    let case = case(LARGE);
    let mut chunks = 0;
    let result = case.source().fetch(&case.wanted(), 0, &mut |_| {
        chunks += 1;
        if chunks > 2 { Err(FetchError::Cancelled) } else { Ok(()) }
    });
    assert!(matches!(result, Err(FetchError::Cancelled)));
    assert_eq!(chunks, 3);
}

#[test]
fn the_states_are_written_while_it_works() {
    let case = case(LARGE);
    let seen = std::cell::RefCell::new(Vec::new());
    let job = Job {
        capsule: case.capsule(),
        worker: WORKER.to_owned(),
        trigger: Trigger::Required,
        files: case.files(),
    };
    materialize(&case.store, &job, &Limits::default(), &|| false, &mut |event| {
        if matches!(event, Event::Asking { .. }) || matches!(event, Event::Bytes { here, of } if here == of) {
            let found = case.state();
            assert!(found.alive);
            assert_eq!(found.document.writer.as_ref().unwrap().pid, std::process::id());
            assert_eq!(found.document.trigger, Trigger::Required);
            seen.borrow_mut().push(found.document.state);
        }
    })
    .unwrap();
    assert_eq!(*seen.borrow(), [State::Writing, State::Verifying]);
    assert_eq!(case.state().document.state, State::Ready);
}

#[test]
fn one_works_and_the_other_finds_it_done() {
    let case = case(LARGE);
    let capsule = case.capsule();
    let payload = capsule.payload(WORKER).unwrap();
    let held =
        record::Record::begin(&case.store, &capsule, &payload, Trigger::Async, &|| false).unwrap().unwrap();
    assert!(case.state().alive);
    // Somebody works on it: nothing is scheduled, and what is cancelled does not wait.
    let scheduled =
        background::schedule(&case.store, &capsule, std::slice::from_ref(&payload), Trigger::Async, &[])
            .unwrap();
    assert_eq!(scheduled, None);
    assert_eq!(case.materialize(&|| true).unwrap_err().kind(), "Cancelled");
    assert_eq!(case.state().document.state, State::Writing);
    drop(held);
    assert!(!case.state().alive, "a writer that is gone is not alive");
    let both = std::thread::scope(|scope| {
        let one = scope.spawn(|| case.materialize(&|| false).unwrap().fetched);
        let two = scope.spawn(|| case.materialize(&|| false).unwrap().fetched);
        one.join().unwrap() + two.join().unwrap()
    });
    assert_eq!(both, case.made.pack.len() as u64, "rebuilt twice");
}

#[test]
fn what_is_scheduled_has_everything_that_a_later_process_needs() {
    let case = case(9000);
    let capsule = case.capsule();
    let payload = capsule.payload(WORKER).unwrap();
    let places = [Place::named(&case.made.checkpoint(), None)];
    let directory =
        background::schedule(&case.store, &capsule, &[payload], Trigger::Async, &places).unwrap().unwrap();
    let found = case.state();
    assert_eq!((found.document.state, found.alive, found.document.writer), (State::Scheduled, false, None));
    // The container and its capsule are gone.
    fs::remove_dir_all(case.made.root()).unwrap();
    let capsule = Arc::new(CapsuleDocuments::read(&directory).unwrap());
    let request = background::Request::read(&directory).unwrap();
    assert_eq!((request.workers.as_slice(), request.trigger), (&[WORKER.to_owned()][..], Trigger::Async));
    let job = Job {
        capsule,
        worker: WORKER.to_owned(),
        trigger: request.trigger,
        files: Arc::new(Places(request.places)),
    };
    materialize(&case.store, &job, &Limits::default(), &|| false, &mut |_| {}).unwrap();
}

#[test]
fn the_state_file_is_strict_and_stable() {
    let golden = json!({
        "format": 1, "kind": "coldsnap-materialization", "artifact": format!("sha256:{}", "1".repeat(64)),
        "capture_id": "cap-1", "worker": "w0", "payload": format!("sha256:{}", "2".repeat(64)), "bytes": 8192,
        "bytes_done": 4096, "state": "writing", "trigger": "async", "writer": {"pid": 7, "start_ticks": 9},
        "created_unix_ns": 1, "updated_unix_ns": 2,
    });
    let parse = |value: &Value| Materialization::parse(value.to_string().as_bytes());
    let read = parse(&golden).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), golden);
    assert_eq!(read.state.name(), "writing");
    for (field, value) in [
        ("format", json!(2)),
        ("kind", json!("x")),
        ("state", json!("done")),
        ("state", json!("ready")),
        ("state", json!("failed")),
        ("reason", json!({"kind": "k", "message": "m"})),
        ("bytes_done", json!(8193)),
        ("more", json!(1)),
        ("writer", json!({"pid": -1, "start_ticks": 0})),
    ] {
        let mut changed = golden.clone();
        changed[field] = value;
        parse(&changed).unwrap_err();
    }
    for field in golden.as_object().unwrap().keys() {
        let mut changed = golden.clone();
        changed.as_object_mut().unwrap().remove(field);
        parse(&changed).unwrap_err();
    }
    let mut failed = golden;
    failed.as_object_mut().unwrap().remove("writer");
    failed["state"] = json!("corrupt");
    failed["reason"] = json!({"kind": "k", "message": "m"});
    parse(&failed).unwrap();
}

#[test]
fn a_state_file_that_cannot_be_read_is_listed_and_replaced() {
    let case = case(9000);
    let digest = case.capsule().digest;
    let path = record::path(&case.store, &digest, WORKER);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, "{").unwrap();
    let listing = record::list(&case.store, None).unwrap();
    assert!(listing.found.is_empty());
    assert_eq!(listing.problems.len(), 1);
    case.materialize(&|| false).unwrap();
    let listing = record::list(&case.store, Some(&digest)).unwrap();
    assert_eq!((listing.found.len(), listing.problems.len()), (1, 0));
    assert!(record::list(&case.store, Some(&Digest::of(b"x"))).unwrap().found.is_empty());
}

#[test]
fn a_stager_finds_what_the_recovery_made() {
    let case = case(9000);
    case.materialize(&|| false).unwrap();
    let staging = case.store.stage(&case.made.digest, case.made.pack.len() as u64, &mut |_| ()).unwrap();
    assert!(matches!(staging, Staging::Present(_)));
}

#[test]
fn recovery_is_a_source_after_those_that_do_not_have_the_payload() {
    let case = case(9000);
    let empty = tempfile::tempdir().unwrap();
    let bring = |capsule: Option<Arc<CapsuleDocuments>>| {
        let sources: Vec<Box<dyn Source>> = vec![
            Box::new(DirectorySource::new(empty.path())),
            Box::new(RecoverySource::new(capsule, vec![case.made.checkpoint()])),
        ];
        bring(&case.store, &sources, &case.wanted(), &Limits::default(), &|| false, &mut |_| ())
    };
    let error = bring(None).unwrap_err();
    assert_eq!(error.kind(), "PayloadUnavailable");
    assert!(error.to_string().contains("name the capsule"), "{error}");
    let brought = bring(Some(case.capsule())).unwrap();
    assert!(brought.source.unwrap().starts_with("checkpoint "));
    assert_eq!(std::fs::read(brought.payload.path()).unwrap(), case.made.pack);
}

#[test]
fn recovery_as_a_source_rejects_sglang_with_the_reason() {
    let case = case(9000);
    let mut capsule = CapsuleDocuments::read(&case.made.root()).unwrap();
    capsule.artifact.launch.engine = "sglang".to_owned();
    let source = RecoverySource::new(Some(Arc::new(capsule)), vec![case.made.checkpoint()]);
    let error = source.fetch(&case.wanted(), 0, &mut |_| Ok(())).unwrap_err();
    assert!(matches!(&error, FetchError::Refused(why) if why.to_lowercase().contains("sglang")), "{error}");
}
