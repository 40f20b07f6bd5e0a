use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::digest::Digest;
use crate::source::Sink;
use crate::store::Evidence;

/// 3 MiB and a page.
fn payload() -> (Vec<u8>, Wanted) {
    let bytes: Vec<u8> =
        (0..(3 << 20) + 4096).map(|n: u32| n.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    let wanted = Wanted { digest: Digest::of(&bytes), bytes: bytes.len() as u64 };
    (bytes, wanted)
}

fn store() -> (tempfile::TempDir, NodeStore) {
    let dir = tempfile::tempdir().unwrap();
    let store = NodeStore::open(dir.path().join("store")).unwrap().with_reserve(0);
    (dir, store)
}

/// What a source does when it is asked once.
enum Act {
    /// Delivers from the wanted offset to the end.
    Deliver,
    /// Delivers the bytes up to this one and breaks off.
    BreakAt(usize),
    /// Delivers other bytes to the end.
    Lie,
    /// Delivers other bytes up to this one and breaks off.
    LieUntil(usize),
    /// Delivers one byte too many.
    TooMany,
    Fail(FetchError),
}

/// Does one act after the other, then repeats the last.
struct Scripted {
    name: &'static str,
    bytes: Vec<u8>,
    acts: Mutex<Vec<Act>>,
    asked: &'static Mutex<Vec<(&'static str, u64)>>,
    /// Called between chunks.
    between: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for Scripted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl Source for Scripted {
    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn fetch(&self, _: &Wanted, from: u64, sink: &mut Sink<'_>) -> Result<(), FetchError> {
        self.asked.lock().unwrap().push((self.name, from));
        let from = usize::try_from(from).unwrap();
        let act = self.acts.lock().unwrap().pop().unwrap_or(Act::Deliver);
        let wrong: Vec<u8> = self.bytes.iter().map(|byte| byte ^ 1).collect();
        let mut send = |bytes: &[u8]| {
            for chunk in bytes.chunks(100_000) {
                sink(chunk)?;
                (self.between)();
            }
            Ok(())
        };
        match act {
            Act::Deliver => send(&self.bytes[from..]),
            Act::BreakAt(end) => {
                send(&self.bytes[from..end.max(from)])?;
                Err(FetchError::Unavailable("it broke".to_owned()))
            }
            Act::Lie => send(&wrong[from..]),
            Act::LieUntil(end) => {
                send(&wrong[from..end.max(from)])?;
                Err(FetchError::Unavailable("it broke".to_owned()))
            }
            Act::TooMany => {
                send(&self.bytes[from..])?;
                send(&[0])
            }
            Act::Fail(error) => Err(error),
        }
    }
}

struct Story {
    store: NodeStore,
    wanted: Wanted,
    bytes: Vec<u8>,
    asked: &'static Mutex<Vec<(&'static str, u64)>>,
    cancelled: &'static AtomicBool,
    _dir: tempfile::TempDir,
}

impl Story {
    fn new() -> Self {
        let (dir, store) = store();
        let (bytes, wanted) = payload();
        let asked = Box::leak(Box::default());
        let cancelled = Box::leak(Box::default());
        Self { store, wanted, bytes, asked, cancelled, _dir: dir }
    }

    fn source(&self, name: &'static str, acts: Vec<Act>) -> Box<dyn Source> {
        self.source_with(name, acts, || ())
    }

    fn source_with(
        &self,
        name: &'static str,
        mut acts: Vec<Act>,
        between: impl Fn() + Send + Sync + 'static,
    ) -> Box<dyn Source> {
        acts.reverse();
        let bytes = self.bytes.clone();
        Box::new(Scripted {
            name,
            bytes,
            acts: Mutex::new(acts),
            asked: self.asked,
            between: Box::new(between),
        })
    }

    fn bring(&self, sources: &[Box<dyn Source>]) -> Result<Brought, BringError> {
        let cancelled = || self.cancelled.load(Ordering::SeqCst);
        bring(&self.store, sources, &self.wanted, &Limits::default(), &cancelled, &mut |_| ())
    }

    fn asked(&self) -> Vec<(&'static str, u64)> {
        self.asked.lock().unwrap().clone()
    }

    fn is_here(&self, brought: &Brought) {
        assert_eq!(std::fs::read(brought.payload.path()).unwrap(), self.bytes);
    }
}

fn unavailable() -> Act {
    Act::Fail(FetchError::Unavailable("down".to_owned()))
}

#[test]
fn sources_are_tried_in_their_order_and_one_that_fails_for_good_is_asked_once() {
    let story = Story::new();
    let sources = [
        story.source("a", vec![Act::Fail(FetchError::NotFound(String::new()))]),
        story.source("b", vec![Act::Fail(FetchError::Denied("no".to_owned()))]),
        story.source("c", vec![Act::Fail(FetchError::Refused("odd".to_owned()))]),
        story.source("d", vec![]),
        story.source("e", vec![]),
    ];
    let brought = story.bring(&sources).unwrap();
    story.is_here(&brought);
    assert_eq!(story.asked(), [("a", 0), ("b", 0), ("c", 0), ("d", 0)]);
    assert_eq!(brought.source.as_deref(), Some("d"));
    assert_eq!((brought.fetched, brought.resumed), (story.wanted.bytes, 0));
    assert_eq!(brought.payload.evidence(), Evidence::FullSha256ThisOperation);

    let again = story.bring(&sources).unwrap();
    assert_eq!((again.source, again.fetched, story.asked().len()), (None, 0, 4), "it is here");
}

#[test]
fn a_source_that_breaks_off_is_asked_again_from_where_it_stopped() {
    let story = Story::new();
    let acts = vec![Act::BreakAt(1_000_000), Act::BreakAt(1_500_000), Act::Deliver];
    let brought = story.bring(&[story.source("a", acts), story.source("b", vec![])]).unwrap();
    story.is_here(&brought);
    assert_eq!(story.asked(), [("a", 0), ("a", 1_000_000), ("a", 1_500_000)]);
    assert_eq!(brought.fetched, story.wanted.bytes, "nothing came twice");
}

#[test]
fn the_next_source_goes_on_where_one_without_progress_was_given_up() {
    let story = Story::new();
    let acts = vec![Act::BreakAt(1_000_000), unavailable(), unavailable(), unavailable(), unavailable()];
    let brought = story.bring(&[story.source("a", acts), story.source("b", vec![])]).unwrap();
    story.is_here(&brought);
    let asked = story.asked();
    assert_eq!(asked.first(), Some(&("a", 0)));
    assert_eq!(asked.last(), Some(&("b", 1_000_000)));
    assert_eq!(asked.len(), 1 + ATTEMPTS as usize);
    assert_eq!(brought.fetched, story.wanted.bytes);
}

#[test]
fn a_lying_source_is_refused_and_the_next_one_is_tried() {
    let story = Story::new();
    let sources = [story.source("a", vec![Act::Lie]), story.source("b", vec![])];
    let brought = story.bring(&sources).unwrap();
    story.is_here(&brought);
    assert_eq!(story.asked(), [("a", 0), ("b", 0)]);
    assert_eq!(brought.source.as_deref(), Some("b"));

    let story = Story::new();
    let error = story.bring(&[story.source("a", vec![Act::Lie])]).unwrap_err();
    assert_eq!(error.kind(), "PayloadUnavailable");
    assert!(error.to_string().contains("a: the model payload"), "{error}");
    assert!(!story.store.payload_path(&story.wanted.digest).exists());
}

#[test]
fn a_source_is_not_blamed_for_what_another_delivered() {
    let story = Story::new();
    let lies = vec![Act::LieUntil(1_000_000), unavailable(), unavailable(), unavailable(), unavailable()];
    let sources = [story.source("a", lies), story.source("b", vec![])];
    let brought = story.bring(&sources).unwrap();
    story.is_here(&brought);
    assert_eq!(story.asked()[ATTEMPTS as usize..], [("a", 1_000_000), ("b", 1_000_000), ("b", 0)][1..]);
}

#[test]
fn a_source_that_lies_and_breaks_off_each_time_is_given_up() {
    let story = Story::new();
    let acts = (0..40).flat_map(|_| [Act::LieUntil(2_000_000), Act::Lie]).collect();
    let error = story.bring(&[story.source("a", acts)]).unwrap_err();
    assert_eq!(error.kind(), "PayloadUnavailable");
    assert_eq!(story.asked(), [("a", 0), ("a", 2_000_000)]);
}

#[test]
fn more_bytes_than_the_payload_has_are_refused() {
    let story = Story::new();
    let sources = [story.source("a", vec![Act::TooMany]), story.source("b", vec![])];
    let brought = story.bring(&sources).unwrap();
    story.is_here(&brought);
    assert_eq!(brought.source.as_deref(), Some("b"));
}

#[test]
fn a_source_without_ranges_begins_again() {
    let story = Story::new();
    let no_range = Act::Fail(FetchError::NoRange { from: 1_000_000 });
    let brought =
        story.bring(&[story.source("a", vec![Act::BreakAt(1_000_000), no_range, Act::Deliver])]).unwrap();
    story.is_here(&brought);
    assert_eq!(story.asked(), [("a", 0), ("a", 1_000_000), ("a", 0)]);
    assert_eq!(brought.resumed, 0);
}

#[test]
fn a_source_without_ranges_that_always_breaks_off_is_given_up() {
    let story = Story::new();
    let acts =
        (0..100).flat_map(|_| [Act::BreakAt(2_000_000), Act::Fail(FetchError::NoRange { from: 2_000_000 })]);
    let error = story.bring(&[story.source("a", acts.collect())]).unwrap_err();
    assert_eq!(error.kind(), "PayloadUnavailable");
    assert!(story.asked().len() <= 2 * ATTEMPTS as usize, "{:?}", story.asked());
}

#[test]
fn a_source_that_asks_to_wait_too_long_is_given_up() {
    let story = Story::new();
    let busy =
        |seconds| Act::Fail(FetchError::Busy { after: Duration::from_secs(seconds), what: "429".to_owned() });
    let sources = [story.source("a", vec![busy(0), busy(3600)]), story.source("b", vec![])];
    let brought = story.bring(&sources).unwrap();
    assert_eq!(story.asked(), [("a", 0), ("a", 0), ("b", 0)]);
    assert_eq!(brought.source.as_deref(), Some("b"));
}

#[test]
fn what_a_cancelled_call_left_is_not_fetched_again() {
    let story = Story::new();
    let cancelled = story.cancelled;
    let source = story.source_with("a", vec![], || cancelled.store(true, Ordering::SeqCst));
    let error = story.bring(&[source]).unwrap_err();
    assert_eq!(error.kind(), "Cancelled");
    cancelled.store(false, Ordering::SeqCst);
    let brought = story.bring(&[story.source("b", vec![])]).unwrap();
    story.is_here(&brought);
    assert_eq!(brought.resumed, 100_000 / 4096 * 4096);
    assert_eq!(brought.fetched + brought.resumed, story.wanted.bytes);
    assert_eq!(story.asked(), [("a", 0), ("b", brought.resumed)]);
}

#[test]
fn everything_that_an_interrupted_call_left_needs_no_source() {
    let story = Story::new();
    let leave = |bytes: &[u8]| {
        let Staging::Needed(mut staged) =
            story.store.stage(&story.wanted.digest, story.wanted.bytes, &mut |_| ()).unwrap()
        else {
            panic!("it is not here")
        };
        staged.append(bytes).unwrap();
    };
    // Wrong bytes in the right number are fetched again.
    leave(&vec![9; story.bytes.len()]);
    assert!(matches!(story.bring(&[]), Err(BringError::NoSources { .. })));
    leave(&story.bytes);
    let brought = story.bring(&[]).unwrap();
    story.is_here(&brought);
    assert_eq!((brought.source, brought.fetched, brought.resumed), (None, 0, story.wanted.bytes));
}

#[test]
fn concurrent_stagers_fetch_once() {
    let story = Story::new();
    let fetched: u64 = std::thread::scope(|scope| {
        let stagers: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| story.bring(&[story.source("a", vec![])]).unwrap().fetched))
            .collect();
        stagers.into_iter().map(|stager| stager.join().unwrap()).sum()
    });
    assert_eq!(fetched, story.wanted.bytes);
    assert_eq!(story.asked(), [("a", 0)]);
}

#[test]
fn the_bandwidth_limit_bounds_the_time_from_below() {
    let story = Story::new();
    let limits = Limits { bandwidth: Some(story.wanted.bytes * 4) };
    let started = std::time::Instant::now();
    bring(&story.store, &[story.source("a", vec![])], &story.wanted, &limits, &|| false, &mut |_| ())
        .unwrap();
    assert!(started.elapsed() >= Duration::from_millis(240), "a quarter of a second at this rate");
}

#[test]
fn a_store_that_cannot_take_it_ends_the_call() {
    let story = Story::new();
    let source = story.source(
        "a",
        vec![Act::Fail(FetchError::Store(StoreError::PayloadGone { digest: story.wanted.digest }))],
    );
    let error = story.bring(&[source, story.source("b", vec![])]).unwrap_err();
    assert!(matches!(error, BringError::Store(_)), "{error}");
    assert_eq!(story.asked(), [("a", 0)]);
}
