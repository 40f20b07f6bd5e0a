//! What is stored about a snapshot. These are plain values: nothing here touches a disk.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use coldsnap::digest::Digest;
use serde::{Deserialize, Serialize};

/// What may be done with a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Read-only, may be mounted, has no children.
    View,
    /// Writable, may be mounted, has no children.
    #[default]
    Active,
    /// Frozen: a layer; may be a parent and is never mounted itself.
    Committed,
}

impl Kind {
    /// The name that filters use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::View => "view",
            Self::Active => "active",
            Self::Committed => "committed",
        }
    }
}

/// A point in time since 1970-01-01 UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Time {
    /// Whole seconds.
    pub seconds: i64,
    /// Nanoseconds of the second, below 1,000,000,000.
    pub nanos: i32,
}

impl Time {
    /// The system's clock; 1970 when it is set before that.
    pub fn now() -> Self {
        let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            seconds: i64::try_from(elapsed.as_secs()).unwrap_or(i64::MAX),
            nanos: i32::try_from(elapsed.subsec_nanos()).unwrap_or_default(),
        }
    }
}

/// What containerd knows of a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// Key of an active snapshot or view, name of a committed one.
    pub name: String,
    /// Name of the committed snapshot below.
    pub parent: Option<String>,
    /// What may be done with it.
    pub kind: Kind,
    /// Labels; none has an empty value.
    pub labels: BTreeMap<String, String>,
    /// When it was prepared; for a committed snapshot, when it was committed.
    pub created: Time,
    /// When its labels changed last.
    pub updated: Time,
}

/// Space that one snapshot takes, without its ancestors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Bytes on disk: allocated blocks, hard links counted once.
    pub size: u64,
    /// Inodes.
    pub inodes: u64,
}

/// A model payload that belongs to one worker of a capsule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Payload {
    /// Worker id; also the name of its directory in the capsule.
    pub worker: String,
    /// Digest of the whole pack.
    pub digest: Digest,
    /// Size of the pack in bytes, padding included.
    pub bytes: u64,
}

/// What a layer has to do with a capsule, found when it was committed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "lowercase")]
pub enum Layer {
    /// Nothing: a capsule below shows through.
    #[default]
    Plain,
    /// It is the capsule layer and needs these payloads.
    Capsule {
        /// One per worker.
        payloads: Vec<Payload>,
    },
    /// It is a capsule layer that cannot be understood.
    Broken {
        /// What is wrong with it.
        reason: String,
    },
    /// It removes or changes the capsule directory, so that a capsule below no longer holds.
    Hidden {
        /// What it does.
        reason: String,
    },
}

/// Everything that is stored about a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Names its directory; never used twice.
    pub id: u64,
    /// What containerd knows of it.
    pub info: Info,
    /// Space of a committed snapshot; zero for others, which are measured when asked.
    pub usage: Usage,
    /// What a committed snapshot has to do with a capsule.
    pub layer: Layer,
    /// Payloads that the mounts of an active snapshot or view bring along, decided when it was prepared.
    pub binds: Vec<Payload>,
}
