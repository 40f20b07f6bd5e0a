//! Publication in a repository of a hub: a real HTTP server on this machine that speaks the hub's LFS protocol.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(feature = "sources")]

mod common;
mod hub;

use std::cell::Cell;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use coldsnap::config::Config;
use coldsnap::digest::Digest;
use coldsnap::format::artifact::Artifact;
use coldsnap::publish::{Action, Options, Progress, PublishError, Published, Target, publish};
use coldsnap::recover::capsule::CapsuleDocuments;
use coldsnap::source::{Limits, Wanted, bring, sources_for};
use coldsnap::store::NodeStore;
use common::{flip_byte, store};
use hub::artifact::artifact;
use hub::{Fault, Hub};
use tempfile::TempDir;

const REPOSITORY: &str = "owner/name";

struct Story {
    hub: Hub,
    store: NodeStore,
    dir: TempDir,
    digests: [Digest; 2],
    artifact: Artifact,
}

impl Story {
    /// Two payloads for three workers: two data-parallel ones share the first.
    fn new() -> Self {
        let (dir, store) = store();
        let hub = Hub::start();
        hub.create(REPOSITORY);
        let [a, b] = [vec![1_u8; 1 << 20], vec![2_u8; 300_000]].map(|bytes| {
            let pack = common::publish(&store, &[&bytes]);
            (*pack.payload.digest(), pack.payload.bytes())
        });
        let artifact = artifact(&[a, a, b]);
        Self { hub, store, dir, digests: [a.0, b.0], artifact }
    }

    fn output(&self) -> PathBuf {
        self.dir.path().join("published.json")
    }

    fn publish(&self, options: Options) -> Result<Published, PublishError> {
        self.publish_while(options, &|| false, &mut |_| ())
    }

    fn publish_while(
        &self,
        options: Options,
        cancelled: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Published, PublishError> {
        let target = Target {
            endpoint: self.hub.endpoint().parse().unwrap(),
            repository: REPOSITORY.parse().unwrap(),
            branch: "main".to_owned(),
        };
        let Self { artifact, store, .. } = self;
        publish(artifact, store, &target, None, &options, &self.output(), cancelled, progress)
    }

    #[track_caller]
    fn publishes(&self) -> Published {
        let published = self.publish(Options::default()).unwrap();
        self.is_published(&published);
        published
    }

    /// The repository has every payload at the commit that the descriptor names.
    #[track_caller]
    fn is_published(&self, published: &Published) {
        let revision = published.revision.clone().unwrap();
        let descriptor = Artifact::parse(&fs::read(self.output()).unwrap()).unwrap();
        let payloads = descriptor.weights.model_payloads.as_ref().unwrap();
        assert_eq!((payloads.repository.as_str(), &payloads.revision), (REPOSITORY, &revision));
        assert_eq!(descriptor.payloads(), self.artifact.payloads(), "nothing else changed");
        assert_eq!(self.hub.head(REPOSITORY).unwrap(), revision);
        for digest in &self.digests {
            let bytes = fs::read(self.store.payload_path(digest)).unwrap();
            let path = format!("model-payloads/sha256/{}.pack", digest.hex());
            assert_eq!(self.hub.files(REPOSITORY)[&path], (digest.hex(), bytes.len()));
            assert!(self.hub.state().objects[&digest.hex()] == bytes);
        }
    }

    /// Neither a descriptor nor a commit.
    #[track_caller]
    fn nothing_is_published(&self, error: &PublishError, kind: &str) {
        assert_eq!(error.kind(), kind, "{error}");
        assert!(!self.output().exists(), "a dangling descriptor");
        assert_eq!(self.hub.files(REPOSITORY).len(), 1, ".gitattributes only");
    }

    /// Bytes that were uploaded since the last call.
    fn uploaded(&self) -> usize {
        let seen = self.hub.take_seen().into_iter();
        seen.filter(|seen| seen.method == "PUT" && seen.status == 200).map(|seen| seen.received).sum()
    }

    fn bytes(&self, n: usize) -> usize {
        fs::metadata(self.store.payload_path(&self.digests[n])).unwrap().len().try_into().unwrap()
    }
}

#[test]
fn each_distinct_path_is_uploaded_once_and_the_descriptor_names_the_commit() {
    let story = Story::new();
    let published = story.publishes();
    assert_eq!(story.uploaded(), story.bytes(0) + story.bytes(1));
    assert_eq!(published.payloads.len(), 2);
    assert!(published.payloads.iter().all(|payload| payload.action == Action::Upload));
    assert!(published.committed && !published.created);
    assert_eq!(story.hub.files(REPOSITORY).len(), 3, "model-payloads/sha256/<64hex>.pack, nothing else");
}

#[test]
fn what_was_published_can_be_staged() {
    let story = Story::new();
    story.hub.upload_in_parts_of(400_000);
    story.publishes();
    let descriptor = Artifact::parse(&fs::read(story.output()).unwrap()).unwrap();
    let mut config = Config::default();
    config.huggingface.endpoint = Some(story.hub.endpoint());
    let sources = sources_for(&config, Some(&of(&descriptor))).unwrap();
    let elsewhere = NodeStore::open(story.dir.path().join("elsewhere")).unwrap().with_reserve(0);
    for payload in descriptor.payloads() {
        let wanted = Wanted { digest: payload.digest, bytes: payload.bytes };
        let here = bring(&elsewhere, &sources, &wanted, &Limits::default(), &|| false, &mut |_| ()).unwrap();
        assert_eq!(
            fs::read(here.payload.path()).unwrap(),
            fs::read(story.store.payload_path(&payload.digest)).unwrap()
        );
    }
}

#[test]
fn large_objects_are_uploaded_in_parts_and_a_lost_part_alone_is_sent_again() {
    let story = Story::new();
    story.hub.upload_in_parts_of(400_000);
    story.hub.fault(Fault::LoseUpload("/2"), 1);
    story.publishes();
    let seen = story.hub.take_seen();
    let parts: Vec<usize> =
        seen.iter().filter(|seen| seen.path.starts_with("/parts/")).map(|seen| seen.received).collect();
    assert_eq!(parts, [400_000, 400_000, 400_000, story.bytes(0) - 800_000]);
    assert!(seen.iter().any(|seen| seen.path == format!("/upload/{}", story.digests[1].hex())));
}

#[test]
fn a_dry_run_changes_nothing() {
    let story = Story::new();
    let before = story.hub.head(REPOSITORY);
    let published = story.publish(Options { dry_run: true, ..Options::default() }).unwrap();
    assert_eq!((published.revision, published.output), (None, None));
    assert!(published.committed && published.payloads.iter().all(|p| p.action == Action::Upload));
    let asked = story.hub.take_seen().into_iter();
    assert!(asked.clone().all(|seen| seen.method == "GET" || seen.path.contains("/paths-info/")));
    assert_eq!((story.hub.head(REPOSITORY), story.output().exists()), (before, false));

    story.publishes();
    fs::remove_file(story.output()).unwrap();
    let again = story.publish(Options { dry_run: true, ..Options::default() }).unwrap();
    assert_eq!(again.revision, story.hub.head(REPOSITORY));
    assert!(!again.committed && again.payloads.iter().all(|p| p.action == Action::Present));
}

#[test]
fn every_pack_is_verified_again_before_anything_is_uploaded() {
    let story = Story::new();
    // A record that says verified does not count: the byte changes behind its back.
    let path = story.store.payload_path(&story.digests[1]);
    flip_byte(&path);
    let error = story.publish(Options::default()).unwrap_err();
    story.nothing_is_published(&error, "DigestMismatch");
    assert!(story.hub.take_seen().iter().all(|seen| seen.method == "GET"));

    let story = Story::new();
    let hashed = Cell::new(0);
    story
        .publish_while(Options::default(), &|| false, &mut |progress| {
            if let Progress::Verified(_, n) = progress {
                hashed.set(hashed.get() + n);
            }
        })
        .unwrap();
    assert_eq!(hashed.get(), (story.bytes(0) + story.bytes(1)) as u64, "with good records");

    let story = Story::new();
    fs::remove_file(story.store.payload_path(&story.digests[0])).unwrap();
    let error = story.publish(Options::default()).unwrap_err();
    story.nothing_is_published(&error, "PayloadMissing");
}

#[test]
fn a_failure_in_the_middle_leaves_no_descriptor_and_the_next_run_uploads_only_the_rest() {
    for (fault, times) in [
        (Fault::Status("preupload", 403, None), 1),
        (Fault::Status("objects/batch", 403, None), 1),
        (Fault::LoseUpload("/upload/"), 4),
        (Fault::Status("objects/verify", 422, None), 1),
        (Fault::Status("/commit/", 403, None), 1),
    ] {
        let story = Story::new();
        story.hub.fault(fault.clone(), times);
        let error = story.publish(Options::default()).unwrap_err();
        story.nothing_is_published(&error, "Hub");
        let before = story.uploaded();
        story.publishes();
        assert_eq!(before + story.uploaded(), story.bytes(0) + story.bytes(1), "{fault:?}");
    }
}

#[test]
fn an_interrupted_publication_goes_on() {
    let story = Story::new();
    // Ends after the first payload.
    let sent = Cell::new(0);
    let first = story.bytes(0).min(story.bytes(1)) as u64;
    let cancelled = || sent.get() >= first;
    let error = story
        .publish_while(Options::default(), &cancelled, &mut |progress| {
            if let Progress::Sent(_, n) = progress {
                sent.set(sent.get() + n);
            }
        })
        .unwrap_err();
    story.nothing_is_published(&error, "Cancelled");
    let published = story.publishes();
    assert!(published.payloads.iter().any(|payload| payload.action == Action::Upload));
}

#[test]
fn a_failure_after_the_commit_leaves_no_descriptor_and_the_next_run_uploads_nothing() {
    for fault in [Fault::WrongObject, Fault::WrongCommit, Fault::WrongSize] {
        let story = Story::new();
        story.hub.fault(fault.clone(), 1);
        let error = story.publish(Options::default()).unwrap_err();
        assert_eq!(error.kind(), "Unconfirmed", "{error}");
        assert!(!story.output().exists());
        story.hub.take_seen();
        let published = story.publishes();
        assert_eq!((story.uploaded(), published.committed), (0, false));
        assert!(published.payloads.iter().all(|payload| payload.action == Action::Present));
    }
}

#[test]
fn objects_that_the_hub_stores_already_are_only_committed() {
    let story = Story::new();
    let bytes = fs::read(story.store.payload_path(&story.digests[0])).unwrap();
    story.hub.state().objects.insert(story.digests[0].hex(), bytes);
    let published = story.publishes();
    assert_eq!(story.uploaded(), story.bytes(1));
    let action = |digest| published.payloads.iter().find(|p| p.digest == digest).unwrap().action;
    assert_eq!((action(story.digests[0]), action(story.digests[1])), (Action::Commit, Action::Upload));
}

#[test]
fn a_commit_of_somebody_else_is_not_lost() {
    let story = Story::new();
    story.hub.fault(Fault::Overtaken, 1);
    story.publishes();
    assert!(story.hub.files(REPOSITORY).contains_key("README.md"));
}

#[test]
fn nothing_is_overwritten() {
    let story = Story::new();
    fs::write(story.output(), "mine").unwrap();
    let error = story.publish(Options::default()).unwrap_err();
    assert_eq!(error.kind(), "AlreadyExists");
    assert_eq!(fs::read(story.output()).unwrap(), b"mine");
    assert!(story.hub.take_seen().is_empty());

    let story = Story::new();
    let path = format!("model-payloads/sha256/{}.pack", story.digests[0].hex());
    let head = story.hub.put_at(REPOSITORY, &path, &"a".repeat(64), b"other");
    let error = story.publish(Options::default()).unwrap_err();
    assert!(matches!(error, PublishError::Occupied { .. }), "{error}");
    assert_eq!(story.hub.head(REPOSITORY), Some(head));
    assert!(!story.output().exists());
}

#[test]
fn a_repository_is_created_only_when_asked() {
    let mut story = Story::new();
    story.hub = Hub::start();
    let error = story.publish(Options::default()).unwrap_err();
    assert!(matches!(error, PublishError::NoRepository { .. }), "{error}");
    assert!(error.to_string().contains("--create"));
    let dry = story.publish(Options { dry_run: true, create: true, ..Options::default() }).unwrap();
    assert!(dry.created && story.hub.head(REPOSITORY).is_none());
    let published = story.publish(Options { create: true, private: true, ..Options::default() }).unwrap();
    assert!(published.created && story.hub.is_private(REPOSITORY));
    story.is_published(&published);
}

#[test]
fn a_file_that_the_hub_would_not_pin_by_digest_is_refused() {
    let story = Story::new();
    story.hub.fault(Fault::Regular, 1);
    let error = story.publish(Options::default()).unwrap_err();
    assert!(error.to_string().contains(".gitattributes"), "{error}");
    story.nothing_is_published(&error, "Hub");
}

#[test]
fn an_artifact_without_payloads_has_nothing_to_publish() {
    let mut story = Story::new();
    story.artifact.weights = serde_json::from_str("{}").unwrap();
    let error = story.publish(Options::default()).unwrap_err();
    story.nothing_is_published(&error, "NoPayloads");
}

/// What a descriptor alone says of a capsule.
fn of(artifact: &Artifact) -> Arc<CapsuleDocuments> {
    Arc::new(CapsuleDocuments::of_descriptor(artifact.to_bytes().unwrap()).unwrap())
}
