//! Payloads from a hub: a real HTTP server on this machine, with everything that a server can do wrong.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(feature = "sources")]

mod common;
mod hub;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use coldsnap::config::{Config, SourceConfig};
use coldsnap::digest::Digest;
use coldsnap::format::artifact::Artifact;
use coldsnap::hub::{Place, Token};
use coldsnap::recover::capsule::CapsuleDocuments;
use coldsnap::source::{
    BringError, Brought, DirectorySource, HubSource, Limits, Source, Wanted, bring, sources_for,
};
use coldsnap::store::NodeStore;
use common::{names, store};
use hub::{Fault, Hub, Seen};
use tempfile::TempDir;

const REPOSITORY: &str = "owner/name";

struct Story {
    hub: Hub,
    store: NodeStore,
    dir: TempDir,
    bytes: Vec<u8>,
    wanted: Wanted,
    commit: String,
}

impl Story {
    fn new() -> Self {
        let (dir, store) = store();
        let hub = Hub::start();
        let bytes: Vec<u8> =
            (0..(3 << 20) + 4096).map(|n: u32| n.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
        let digest = Digest::of(&bytes);
        let commit = hub.put(REPOSITORY, &digest.hex(), &bytes);
        let wanted = Wanted { digest, bytes: bytes.len() as u64 };
        Self { hub, store, dir, bytes, wanted, commit }
    }

    fn source_at(&self, commit: &str, token: Option<Token>) -> Box<dyn Source> {
        let place =
            Place::new(self.hub.endpoint().parse().unwrap(), REPOSITORY.parse().unwrap(), commit).unwrap();
        Box::new(HubSource::new(place, token).unwrap())
    }

    fn source(&self) -> Box<dyn Source> {
        self.source_at(&self.commit, None)
    }

    fn token(&self, text: &str) -> Token {
        let path = self.dir.path().join("token");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        Token::read(&path).unwrap()
    }

    /// A share with this content at the payload's path.
    fn share(&self, bytes: &[u8]) -> Box<dyn Source> {
        let share = self.dir.path().join("share");
        let path = share.join(self.wanted.digest.payload_path());
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
        Box::new(DirectorySource::new(share))
    }

    fn bring(&self, sources: &[Box<dyn Source>]) -> Result<Brought, BringError> {
        bring(&self.store, sources, &self.wanted, &Limits::default(), &|| false, &mut |_| ())
    }

    #[track_caller]
    fn brings(&self, sources: &[Box<dyn Source>]) -> Brought {
        let brought = self.bring(sources).unwrap();
        assert_eq!(fs::read(brought.payload.path()).unwrap(), self.bytes);
        brought
    }

    /// Refused with these words, nothing admitted, and no object fetched.
    #[track_caller]
    fn refuses(&self, expected: &str) {
        let error = self.bring(&[self.source()]).unwrap_err();
        assert_eq!(error.kind(), "PayloadUnavailable");
        let text = error.to_string();
        assert!(text.contains(expected) && !text.contains("Signature"), "{text}");
        assert!(!self.store.payload_path(&self.wanted.digest).exists());
    }

    fn downloads(&self) -> Vec<Seen> {
        self.hub.take_seen().into_iter().filter(|seen| seen.server == "cdn").collect()
    }
}

fn sent(seen: &[Seen]) -> usize {
    seen.iter().map(|seen| seen.sent).sum()
}

#[test]
fn a_payload_comes_from_a_hub_repository_at_a_pinned_commit() {
    let story = Story::new();
    // The branch goes on, the pin does not.
    story.hub.put_at(REPOSITORY, "other", &"c".repeat(64), b"x");
    let brought = story.brings(&[story.source()]);
    assert_eq!((brought.fetched, brought.resumed), (story.wanted.bytes, 0));
    let seen = story.hub.take_seen();
    let path = format!(
        "/owner/name/resolve/{}/model-payloads/sha256/{}.pack",
        story.commit,
        story.wanted.digest.hex()
    );
    assert_eq!((seen[0].server, seen[0].path.as_str(), seen[0].status), ("hub", path.as_str(), 302));
    assert_eq!((seen[1].server, seen[1].status, seen.len()), ("cdn", 200, 2));
    assert_eq!(names(&story.store).len(), 2, "pack and record");
}

#[test]
fn an_interrupted_download_resumes_and_fetches_nothing_twice() {
    let story = Story::new();
    story.hub.fault(Fault::CutDownload(1_000_000), 1);
    story.hub.fault(Fault::CutDownload(2_000_000), 1);
    let brought = story.brings(&[story.source()]);
    let seen = story.downloads();
    assert_eq!(seen.len(), 3);
    assert_eq!(sent(&seen), story.bytes.len(), "counted by the server");
    assert_eq!(brought.fetched, story.wanted.bytes);
    assert_eq!(seen[1].range.as_deref(), Some("bytes=1000000-"));
    assert_eq!(seen[1].if_range.as_deref(), Some(&*format!("\"md5-{}\"", &story.wanted.digest.hex()[..16])));
    assert_eq!(seen[2].range.as_deref(), Some("bytes=2000000-"));
}

#[test]
fn another_call_goes_on_where_an_interrupted_one_stopped() {
    let story = Story::new();
    story.hub.fault(Fault::CutDownload(1_000_000), 1);
    let refused = std::cell::Cell::new(false);
    // Nobody waits any more after the connection broke.
    let cancelled = || refused.get();
    let error =
        bring(&story.store, &[story.source()], &story.wanted, &Limits::default(), &cancelled, &mut |event| {
            refused.set(refused.get() || matches!(event, coldsnap::source::Event::Failed { .. }));
        })
        .unwrap_err();
    assert_eq!(error.kind(), "Cancelled");
    story.hub.take_seen();
    let brought = story.brings(&[story.source()]);
    assert_eq!(brought.resumed, 1_000_000 / 4096 * 4096);
    assert_eq!(brought.resumed + brought.fetched, story.wanted.bytes);
    let seen = story.downloads();
    assert_eq!((sent(&seen) as u64, seen.len()), (brought.fetched, 1));
}

#[test]
fn a_server_that_delivers_wrong_bytes_is_refused_and_the_next_source_is_tried() {
    let story = Story::new();
    story.hub.fault(Fault::WrongBytes, 2);
    story.refuses("contains sha256:");
    let brought = story.brings(&[story.source(), story.share(&story.bytes)]);
    assert!(brought.source.unwrap().starts_with("directory "));
}

#[test]
fn a_share_with_wrong_bytes_is_refused_and_the_hub_is_asked() {
    let story = Story::new();
    let mut wrong = story.bytes.clone();
    wrong[12345] ^= 1;
    let brought = story.brings(&[story.share(&wrong), story.source()]);
    assert!(brought.source.unwrap().starts_with("huggingface "));
}

#[test]
fn what_the_hub_says_about_the_object_is_compared_before_it_is_fetched() {
    for (fault, expected) in [
        (Fault::WrongCommit, "instead of the pinned"),
        (Fault::WrongObject, "another object"),
        (Fault::WrongSize, "bytes at the payload's path"),
        (Fault::Redirect("ftp://elsewhere/x".to_owned()), "redirects to"),
        (Fault::Redirect("//elsewhere/x".to_owned()), "redirects to"),
    ] {
        let story = Story::new();
        story.hub.fault(fault.clone(), 1);
        story.refuses(expected);
        assert!(story.downloads().is_empty(), "{fault:?}");
    }
}

#[test]
fn redirects_are_limited() {
    let story = Story::new();
    let again =
        format!("/{REPOSITORY}/resolve/{}/{}", story.commit, story.wanted.digest.payload_path().display());
    story.hub.fault(Fault::Redirect(again), 100);
    story.refuses("redirects");
    assert_eq!(story.hub.take_seen().len(), 6);
}

#[test]
fn a_server_without_ranges_is_asked_from_the_beginning() {
    for fault in [Fault::NoRange, Fault::OtherEtag] {
        let story = Story::new();
        story.hub.fault(Fault::CutDownload(1_000_000), 1);
        let ranged = fault == Fault::NoRange;
        if ranged {
            story.hub.fault(fault, 1);
        } else {
            // The first answer has the tag that the next ones lack.
            story.hub.fault(Fault::OtherEtag, 1);
        }
        let brought = story.brings(&[story.source()]);
        assert_eq!(brought.resumed, 0);
        let seen = story.downloads();
        assert_eq!(seen.last().unwrap().range, None);
    }
}

#[test]
fn a_range_that_was_not_asked_for_is_refused() {
    let story = Story::new();
    story.hub.fault(Fault::CutDownload(1_000_000), 1);
    story.hub.fault(Fault::WrongRange, 1);
    story.refuses("wanted was byte 1000000");
}

#[test]
fn each_status_means_what_it_says() {
    for (status, after, tries, expected) in [
        (401, None, 1, "access denied"),
        (403, None, 1, "access denied"),
        (404, None, 1, "does not have the payload"),
        (416, None, 1, "416"),
        (418, None, 1, "418"),
        (429, Some(3600), 1, "3600 s"),
        (503, Some(3600), 1, "3600 s"),
        (500, None, 4, "500"),
    ] {
        let story = Story::new();
        story.hub.fault(Fault::Status("resolve", status, after), 10);
        story.refuses(expected);
        assert_eq!(story.hub.take_seen().len(), tries, "{status}");
    }
    let story = Story::new();
    story.hub.fault(Fault::Status("resolve", 429, Some(1)), 1);
    let started = std::time::Instant::now();
    story.brings(&[story.source()]);
    assert!(started.elapsed() >= std::time::Duration::from_secs(1), "it asked to wait");
}

#[test]
fn a_file_that_is_not_there_is_asked_for_once() {
    let story = Story::new();
    let elsewhere = story.hub.put_at("owner/other", "x", &"c".repeat(64), b"x");
    let error = story.bring(&[story.source_at(&elsewhere, None)]).unwrap_err().to_string();
    assert!(error.contains("RevisionNotFound"), "{error}");
}

#[test]
fn the_token_goes_to_the_hub_and_not_to_the_content_network() {
    let story = Story::new();
    story.hub.require_token("hf_secret");
    story.refuses("access denied");
    story.hub.take_seen();
    let source = story.source_at(&story.commit, Some(story.token("hf_secret")));
    assert!(!format!("{source:?} {}", source.name()).contains("hf_secret"));
    story.brings(&[source]);
    for seen in story.hub.take_seen() {
        let expected = (seen.server == "hub").then_some("Bearer hf_secret");
        assert_eq!(seen.authorization.as_deref(), expected, "{}", seen.path);
    }
}

#[test]
fn a_wrong_token_is_not_shown() {
    let story = Story::new();
    story.hub.require_token("hf_secret");
    let error = story.bring(&[story.source_at(&story.commit, Some(story.token("hf_wrong")))]).unwrap_err();
    assert!(!format!("{error} {error:?}").contains("hf_wrong"));
}

#[test]
fn concurrent_stagers_fetch_once() {
    let story = Story::new();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| story.bring(&[story.source()]).unwrap());
        }
    });
    assert_eq!(sent(&story.downloads()), story.bytes.len());
}

#[test]
fn a_server_that_is_not_there_is_unavailable() {
    let story = Story::new();
    let source = story.source();
    let Story { hub, store, wanted, .. } = story;
    drop(hub);
    let error = bring(&store, &[source], &wanted, &Limits::default(), &|| false, &mut |_| ()).unwrap_err();
    assert_eq!(error.kind(), "PayloadUnavailable");
}

#[test]
fn the_configured_sources_come_first_and_the_artifacts_publication_last() {
    let hub = Hub::start();
    let mut config = Config::default();
    config.huggingface.endpoint = Some(hub.endpoint());
    config.sources = vec![
        SourceConfig::HuggingFace {
            repository: "a/b".to_owned(),
            revision: "1".repeat(40),
            endpoint: Some("https://mirror.example".to_owned()),
            token_file: None,
        },
        SourceConfig::Directory { path: "/mnt/share".into() },
    ];
    let mut artifact = hub::artifact::artifact(&[(Digest::of(b"pack"), 4096)]);
    let name = |sources: Vec<Box<dyn Source>>| sources.iter().map(|s| s.name()).collect::<Vec<_>>();
    let configured = [
        format!("huggingface https://mirror.example/a/b@{}", "1".repeat(40)),
        "directory /mnt/share".to_owned(),
    ];
    assert_eq!(name(sources_for(&config, Some(&of(&artifact))).unwrap()), configured, "it is not published");
    let published = artifact.weights.model_payloads.as_mut().unwrap();
    (published.repository, published.revision) = ("c/d".to_owned(), "2".repeat(40));
    let all = name(sources_for(&config, Some(&of(&artifact))).unwrap());
    assert_eq!(all[..2], configured);
    assert_eq!(all[2..], [format!("huggingface {}/c/d@{}", hub.endpoint(), "2".repeat(40))]);
    assert_eq!(name(sources_for(&config, None).unwrap()), configured);

    let published = artifact.weights.model_payloads.as_mut().unwrap();
    published.repository = "registry.example/somewhere/else".to_owned();
    assert_eq!(name(sources_for(&config, Some(&of(&artifact))).unwrap()), configured, "published elsewhere");

    config.huggingface.token_file = Some("/does/not/exist".into());
    assert_eq!(sources_for(&config, None).unwrap_err().kind(), "Source");
}

/// What a descriptor alone says of a capsule.
fn of(artifact: &Artifact) -> Arc<CapsuleDocuments> {
    Arc::new(CapsuleDocuments::of_descriptor(artifact.to_bytes().unwrap()).unwrap())
}
