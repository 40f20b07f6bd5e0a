//! The visible state of a materialization: one JSON file per worker in the store, which survives a crash.
//!
//! ```text
//! <store>/materializations/<64hex of artifact.json>/<worker>.json     state, 0600
//! <store>/materializations/<64hex>/.<worker>.lock                     held by whoever works on it, 0600
//! <store>/materializations/<64hex>/.request.json, .log                of a process in the background
//! <store>/materializations/<64hex>/opt/coldsnap/capsule/...           the capsule's documents
//! ```
//!
//! The lock tells whether somebody still works on it: the kernel releases it when the process dies, so that a state
//! `writing` that nobody holds was left by a crash, and the next run takes over.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::capsule::CapsuleDocuments;
use crate::digest::Digest;
use crate::durable;
use crate::format::artifact::PayloadRequirement;
use crate::format::document;
use crate::format::{DocumentError, FormatError};
use crate::store::lock::{open_private, try_flock};
use crate::store::{NodeStore, now_ns};

/// How errors name the document.
pub const DOCUMENT: &str = "materialization";
/// The only value of `format`.
pub const FORMAT: u32 = 1;
/// The only value of `kind`.
pub const KIND: &str = "coldsnap-materialization";
/// Directory in the store.
const DIRECTORY: &str = "materializations";
/// Progress is written at most so often: each write is synced.
const EVERY: Duration = Duration::from_secs(1);
/// How often waiting work looks whether the lock is free.
const LOOK: Duration = Duration::from_millis(50);
/// How often a lock is tried until somebody is taken to work under it.
const LOOKS: u32 = 3;

/// Where a materialization is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Wanted; nobody has begun.
    Scheduled,
    /// Bytes are read from the checkpoint and written.
    Writing,
    /// All bytes are here, or an earlier attempt's are looked at.
    Verifying,
    /// The payload is in the store.
    Ready,
    /// It did not work out.
    Failed,
    /// The result, or the payload that is in the store, has other bytes than the committed ones.
    Corrupt,
}

impl State {
    /// How it is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scheduled => "scheduled",
            Self::Writing => "writing",
            Self::Verifying => "verifying",
            Self::Ready => "ready",
            Self::Failed => "failed",
            Self::Corrupt => "corrupt",
        }
    }
}

/// Who wanted it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Trigger {
    /// A person or manager: `coldsnap materialize`.
    Command,
    /// A cold start in mode async.
    Async,
    /// A start in mode required.
    Required,
}

/// The process that works on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Writer {
    /// Its pid, as it sees itself.
    pub pid: u32,
    /// When it was started, in the kernel's clock ticks since boot: tells it from a later process with its pid.
    pub start_ticks: u64,
}

/// Why it failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reason {
    /// Stable name of the kind of error.
    pub kind: String,
    /// For people.
    pub message: String,
}

/// The document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Materialization {
    /// [`FORMAT`].
    pub format: u32,
    /// [`KIND`].
    pub kind: String,
    /// Digest of the capsule's `artifact.json`.
    pub artifact: Digest,
    /// Id of the capture.
    pub capture_id: String,
    /// The worker.
    pub worker: String,
    /// Its payload.
    pub payload: Digest,
    /// The payload's size.
    pub bytes: u64,
    /// Bytes of it that are here.
    pub bytes_done: u64,
    /// Where it is.
    pub state: State,
    /// Why; in the states failed and corrupt, and only there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
    /// Who wanted it last.
    pub trigger: Trigger,
    /// Who works on it; in the states writing and verifying, and only there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writer: Option<Writer>,
    /// First wanted, nanoseconds since the epoch.
    pub created_unix_ns: u64,
    /// Last written, nanoseconds since the epoch.
    pub updated_unix_ns: u64,
}

impl Materialization {
    fn new(capsule: &CapsuleDocuments, payload: &PayloadRequirement, trigger: Trigger) -> Self {
        Self {
            format: FORMAT,
            kind: KIND.to_owned(),
            artifact: capsule.digest,
            capture_id: capsule.artifact.capture_id.clone(),
            worker: payload.worker.clone(),
            payload: payload.digest,
            bytes: payload.bytes,
            bytes_done: 0,
            state: State::Scheduled,
            reason: None,
            trigger,
            writer: None,
            created_unix_ns: now_ns(),
            updated_unix_ns: 0,
        }
    }

    /// Parses the document and checks its rules.
    ///
    /// # Errors
    /// Names the field.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let read: Self = document::parse(DOCUMENT, bytes)?;
        let working = matches!(read.state, State::Writing | State::Verifying);
        let failed = matches!(read.state, State::Failed | State::Corrupt);
        for (wrong, field, problem) in [
            (read.format != FORMAT, "format", "not supported"),
            (read.kind != KIND, "kind", "it is not coldsnap-materialization"),
            (read.reason.is_some() != failed, "reason", "present if and only if failed or corrupt"),
            (read.writer.is_some() != working, "writer", "present if and only if writing or verifying"),
            (read.bytes_done > read.bytes, "bytes_done", "more than bytes"),
        ] {
            if wrong {
                return Err(FormatError::new(DOCUMENT, field, problem));
            }
        }
        Ok(read)
    }
}

/// The directory of a capsule's materializations.
pub fn directory(store: &NodeStore, artifact: &Digest) -> PathBuf {
    store.root().join(DIRECTORY).join(artifact.hex())
}

/// The state file of one worker.
pub fn path(store: &NodeStore, artifact: &Digest, worker: &str) -> PathBuf {
    directory(store, artifact).join(format!("{worker}.json"))
}

/// A state that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The document.
    pub document: Materialization,
    /// Whether somebody works on it now. Writing or verifying without this was left by a crash.
    pub alive: bool,
}

/// Everything in the store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    /// By artifact and worker.
    pub found: Vec<Found>,
    /// Files that cannot be understood, with the reason.
    pub problems: Vec<(PathBuf, String)>,
}

/// The state of one worker; none when it was never wanted.
///
/// # Errors
/// The file cannot be read or understood.
pub fn find(store: &NodeStore, artifact: &Digest, worker: &str) -> Result<Option<Found>, DocumentError> {
    let path = path(store, artifact, worker);
    match document::read(&path, DOCUMENT, Materialization::parse) {
        Ok(document) => Ok(Some(Found { document, alive: is_held(&lock_path(store, artifact, worker)) })),
        Err(DocumentError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The states of all materializations, or those of one artifact.
///
/// # Errors
/// A directory cannot be listed.
pub fn list(store: &NodeStore, artifact: Option<&Digest>) -> Result<Listing, DocumentError> {
    let mut listing = Listing::default();
    let root = store.root().join(DIRECTORY);
    let artifacts = match artifact {
        Some(digest) => vec![*digest],
        None => names(&root)?.iter().filter_map(|name| Digest::from_hex(name).ok()).collect(),
    };
    for artifact in artifacts {
        for name in names(&directory(store, &artifact))? {
            let Some(worker) = name.strip_suffix(".json").filter(|worker| !worker.starts_with('.')) else {
                continue;
            };
            match find(store, &artifact, worker) {
                Ok(Some(found)) if found.document.artifact == artifact && found.document.worker == worker => {
                    listing.found.push(found);
                }
                Ok(Some(_)) => {
                    let problem = "it names another artifact or worker than its path".to_owned();
                    listing.problems.push((path(store, &artifact, worker), problem));
                }
                Ok(None) => {}
                Err(error) => listing.problems.push((path(store, &artifact, worker), error.to_string())),
            }
        }
    }
    Ok(listing)
}

/// Sorted names in a directory; none when there is no such directory.
fn names(directory: &Path) -> Result<Vec<String>, DocumentError> {
    let list = || -> io::Result<Vec<String>> {
        let names =
            fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect()
    };
    match list() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(io_error("read", directory)(e)),
        Ok(mut names) => {
            names.sort();
            Ok(names)
        }
    }
}

/// Notes that a payload is wanted (no reason), or that it cannot be had, unless somebody works on it; false then.
///
/// # Errors
/// What the file system answers.
pub fn note(
    store: &NodeStore,
    capsule: &CapsuleDocuments,
    payload: &PayloadRequirement,
    trigger: Trigger,
    failure: Option<&Reason>,
) -> Result<bool, DocumentError> {
    make_directory(store, &capsule.digest)?;
    for _ in 0..LOOKS {
        if let Some(mut record) = Record::try_begin(store, capsule, payload, trigger)? {
            record.document.state = if failure.is_some() { State::Failed } else { State::Scheduled };
            record.document.reason = failure.cloned();
            record.document.writer = None;
            record.write()?;
            return Ok(true);
        }
        // Whoever asks for the state holds the lock for a moment too.
        std::thread::sleep(LOOK);
    }
    Ok(false)
}

/// Exclusive work on one worker's payload, and its state.
#[derive(Debug)]
pub struct Record {
    path: PathBuf,
    document: Materialization,
    written: Instant,
    _lock: File,
}

impl Record {
    /// Waits until nobody else works on it, then notes that this process does. None when `cancelled`.
    ///
    /// # Errors
    /// What the file system answers.
    pub fn begin(
        store: &NodeStore,
        capsule: &CapsuleDocuments,
        payload: &PayloadRequirement,
        trigger: Trigger,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Self>, DocumentError> {
        make_directory(store, &capsule.digest)?;
        while !cancelled() {
            if let Some(mut record) = Self::try_begin(store, capsule, payload, trigger)? {
                record.write()?;
                return Ok(Some(record));
            }
            std::thread::sleep(LOOK);
        }
        Ok(None)
    }

    fn try_begin(
        store: &NodeStore,
        capsule: &CapsuleDocuments,
        payload: &PayloadRequirement,
        trigger: Trigger,
    ) -> Result<Option<Self>, DocumentError> {
        let lock_path = lock_path(store, &capsule.digest, &payload.worker);
        let lock = open_private(&lock_path).map_err(io_error("write", &lock_path))?;
        if !try_flock(&lock).map_err(io_error("write", &lock_path))? {
            return Ok(None);
        }
        let mut document = Materialization::new(capsule, payload, trigger);
        // A state that cannot be read is replaced.
        if let Ok(Some(earlier)) = find(store, &capsule.digest, &payload.worker) {
            document.created_unix_ns = earlier.document.created_unix_ns;
        }
        document.state = State::Writing;
        document.writer = Some(Writer { pid: std::process::id(), start_ticks: start_ticks() });
        let path = path(store, &capsule.digest, &payload.worker);
        Ok(Some(Self { path, document, written: Instant::now(), _lock: lock }))
    }

    /// Notes how far it is; writes that when the state changes, else once in a while.
    pub fn progress(&mut self, state: State, bytes_done: u64) {
        let changed = self.document.state != state;
        self.document.state = state;
        self.document.bytes_done = bytes_done.min(self.document.bytes);
        if changed || self.written.elapsed() >= EVERY {
            self.write_or_warn();
        }
    }

    /// Notes how it ended.
    pub fn end(mut self, state: State, reason: Option<Reason>) {
        self.document.state = state;
        self.document.reason = reason;
        self.document.writer = None;
        if state == State::Ready {
            self.document.bytes_done = self.document.bytes;
        }
        self.write_or_warn();
    }

    /// The state is for people: that it cannot be written is no reason to stop the work.
    fn write_or_warn(&mut self) {
        if let Err(error) = self.write() {
            tracing::warn!(%error, "the state of a materialization is not up to date");
        }
    }

    fn write(&mut self) -> Result<(), DocumentError> {
        self.document.updated_unix_ns = now_ns();
        self.written = Instant::now();
        let bytes = document::to_bytes(DOCUMENT, &self.document)
            .map_err(|source| DocumentError::Format { path: self.path.clone(), source })?;
        durable::write_file(&self.path, &bytes, 0o600).map_err(io_error("write", &self.path))
    }
}

fn make_directory(store: &NodeStore, artifact: &Digest) -> Result<(), DocumentError> {
    let directory = directory(store, artifact);
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
    made.map_err(io_error("write", &directory))
}

fn lock_path(store: &NodeStore, artifact: &Digest, worker: &str) -> PathBuf {
    directory(store, artifact).join(format!(".{worker}.lock"))
}

fn is_held(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK)
}

pub(super) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DocumentError {
    let path = path.to_owned();
    move |source| DocumentError::Io { action, path, source }
}

/// Field 22 of `/proc/self/stat`; 0 when it cannot be read.
fn start_ticks() -> u64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The second field, the name, may hold blanks and parentheses.
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    after_name.split_whitespace().nth(19).and_then(|field| field.parse().ok()).unwrap_or_default()
}
