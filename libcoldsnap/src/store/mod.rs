//! The node store: model payloads by digest, the records that they were verified, and the leases on them.
//!
//! ```text
//! <root>/model-payloads/sha256/<64hex>.pack                             0444
//! <root>/model-payloads/sha256/<64hex>.pack.coldsnap-validation.json    0600
//! <root>/model-payloads/sha256/.<64hex>.pack.lock                       0600, flock, never unlinked
//! <root>/model-payloads/sha256/.<64hex>.pack.<pid>-<tid>.materializing  a payload that is being brought
//! <root>/model-payloads/sha256/.unnamed.pack.<pid>-<tid>.materializing  a pack whose digest is not known yet
//! <root>/leases/<64hex>.<owner hash>.lease.json                         0600
//! <root>/pins/<64hex>.pin.json                                          0600
//! <root>/usage/<64hex>.last-used                                        0600, empty
//! <root>/damaged/                                                       packs that a repair moved aside
//! ```
//!
//! All exclusion is by flock, so that shim, snapshotter and CLI agree without talking to each other, and a killed
//! process leaves no lock behind. A path here is always derived from a digest. Every temporary name that belongs
//! to a digest is written and removed under that digest's lock; an unnamed staging file is locked itself.

mod admit_all;
mod ahead;
mod error;
mod evict;
mod export;
mod fsck;
mod import;
mod lease;
pub(crate) mod lock;
mod pack_writer;
mod pin;
mod publish;
mod remove;
mod stage;
mod sweep;
mod usage;
mod verify;
mod watermark;

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::digest::Digest;
use crate::format::validation::{self, FileIdentity, ValidationRecord};

pub use admit_all::Admission;
pub use error::{AdmitError, StoreError};
pub use evict::{Evicted, Eviction, EvictionFailure};
pub use export::Exported;
pub use fsck::{Finding, FsckOptions, FsckReport, Severity};
pub use import::{Arrival, Imported};
pub use lease::Lease;
pub use pin::Pin;
pub use publish::PublishedPack;
pub use stage::{StagedPayload, Staging};
pub(crate) use verify::now_ns;
pub use verify::{AdmittedPayload, Evidence, RecordKept};
pub use watermark::{Usage, Watermark, WatermarkError, Watermarks};

/// Free bytes that a write must leave by default.
pub const DEFAULT_RESERVE: u64 = 1 << 30;

/// A store on this node. Cheap to make and to clone; holds no open file.
#[derive(Debug, Clone)]
pub struct NodeStore {
    root: PathBuf,
    reserve: u64,
    watermarks: Option<Watermarks>,
}

/// What [`NodeStore::list`] finds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PayloadInfo {
    /// The payload.
    pub digest: Digest,
    /// Its file.
    pub path: PathBuf,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Whether it can be admitted without hashing.
    pub state: PayloadState,
    /// Number of leases.
    pub leases: usize,
    /// Whether it is pinned.
    pub pinned: bool,
    /// When it was last leased, or a lease given back; of a payload that never was, when it was verified or written.
    /// Nanoseconds since the epoch.
    pub last_used_unix_ns: u64,
}

/// Whether a payload can be admitted without hashing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PayloadState {
    /// Its record matches.
    Verified,
    /// The next admission hashes it; why.
    Unverified(String),
    /// No admission will accept it; why.
    Unusable(String),
}

impl NodeStore {
    /// Where a node's store is when nothing else is configured.
    pub const DEFAULT_ROOT: &'static str = "/var/lib/coldsnap";

    /// Opens the store at `root`, creating its directories.
    ///
    /// # Errors
    /// When a directory cannot be created.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let store = Self::at(root);
        let directory = store.payload_directory();
        fs::create_dir_all(&directory).map_err(StoreError::io("create the directory", &directory))?;
        Ok(store)
    }

    /// The store at `root` as it is; creates nothing.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), reserve: DEFAULT_RESERVE, watermarks: None }
    }

    /// The same store with another number of free bytes that a write must leave.
    #[must_use]
    pub fn with_reserve(self, reserve: u64) -> Self {
        Self { reserve, ..self }
    }

    /// The same store with watermarks: whoever writes a payload makes room for it. Without them nothing is removed
    /// that nobody asked to remove.
    #[must_use]
    pub fn with_watermarks(self, watermarks: Option<Watermarks>) -> Self {
        Self { watermarks, ..self }
    }

    /// The store's directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The only path that the payload with this digest can have here.
    pub fn payload_path(&self, digest: &Digest) -> PathBuf {
        self.root.join(digest.payload_path())
    }

    /// The store and the digest that `path` is the canonical path of: `<root>/model-payloads/sha256/<64hex>.pack`.
    /// Nothing is looked up and no link is followed. None when the path has another form.
    pub fn of_payload_path(path: &Path) -> Option<(Self, Digest)> {
        let name = path.file_name()?.to_str()?;
        let digest = Digest::from_hex(name.strip_suffix(".pack")?).ok()?;
        // Three components up from the file is the root.
        let root = path.ancestors().nth(3)?;
        let root = if root.as_os_str().is_empty() { Path::new(".") } else { root };
        (root.join(digest.payload_path()) == path || digest.payload_path() == path)
            .then(|| (Self::at(root), digest))
    }

    /// All payloads in digest order. Does no hashing and takes no lock.
    ///
    /// # Errors
    /// When a directory of the store cannot be read.
    pub fn list(&self) -> Result<Vec<PayloadInfo>, StoreError> {
        let mut leases = HashMap::<Digest, usize>::new();
        for (digest, _) in self.lease_files()? {
            *leases.entry(digest).or_default() += 1;
        }
        let pinned: HashSet<Digest> = self.pin_files()?.into_iter().map(|(digest, _)| digest).collect();
        let mut found = Vec::new();
        for name in self.names_in(&self.payload_directory())? {
            let hex = name.to_str().and_then(|name| name.strip_suffix(".pack"));
            let Some(digest) = hex.and_then(|hex| Digest::from_hex(hex).ok()) else { continue };
            let path = self.payload_path(&digest);
            // It may be evicted meanwhile.
            let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
            let record = verify::read_record(&record_path(&path));
            found.push(PayloadInfo {
                digest,
                bytes: metadata.size(),
                leases: leases.get(&digest).copied().unwrap_or(0),
                pinned: pinned.contains(&digest),
                last_used_unix_ns: self.last_leased(&digest).unwrap_or_else(|| arrived(&metadata, &record)),
                state: payload_state(&digest, &metadata, record),
                path,
            });
        }
        found.sort_by_key(|info| info.digest);
        Ok(found)
    }

    fn payload_directory(&self) -> PathBuf {
        self.root.join("model-payloads/sha256")
    }

    fn lease_directory(&self) -> PathBuf {
        self.root.join("leases")
    }

    /// File names in a directory; none when there is no such directory.
    fn names_in(&self, directory: &Path) -> Result<Vec<OsString>, StoreError> {
        let list = || -> io::Result<Vec<OsString>> {
            fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name())).collect()
        };
        match list() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            result => result.map_err(StoreError::io("list", directory)),
        }
    }
}

/// File name of a payload.
fn blob_name(digest: &Digest) -> String {
    format!("{}.pack", digest.hex())
}

/// `<pack>.coldsnap-validation.json`
fn record_path(payload: &Path) -> PathBuf {
    let mut path = payload.as_os_str().to_owned();
    path.push(validation::SUFFIX);
    path.into()
}

fn payload_state(
    digest: &Digest,
    metadata: &fs::Metadata,
    record: Result<ValidationRecord, String>,
) -> PayloadState {
    if !metadata.is_file() {
        return PayloadState::Unusable("not a regular file".to_owned());
    }
    match record {
        Ok(record) => match record.matches(&blob_name(digest), *digest, &FileIdentity::of(metadata)) {
            Ok(()) => PayloadState::Verified,
            Err(field) => PayloadState::Unverified(format!("the record's {field} differs")),
        },
        Err(problem) => PayloadState::Unverified(problem),
    }
}

/// When a payload came: the time of its verification, or of its last change.
fn arrived(metadata: &fs::Metadata, record: &Result<ValidationRecord, String>) -> u64 {
    match record {
        Ok(record) => record.validated_unix_ns,
        Err(_) => u64::try_from(FileIdentity::of(metadata).content.mtime_ns).unwrap_or(0),
    }
}
