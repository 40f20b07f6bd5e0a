//! `<pack>.coldsnap-validation.json`: the record that a payload was hashed in full, and which file it was.
//!
//! The record saves the next hashing, and proves nothing else: it is used only beside the payload it names, only
//! for the file that it identifies, and only by [`crate::store`], which checks how the record's own file is kept.
//! A hit also needs the ctime, which catches an in-place rewrite with a restored mtime; another ctime (chmod,
//! chown) costs one full verification and is no error. Unknown fields are ignored.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

use super::document::{self, FormatError};
use super::manifest::nanoseconds;
use crate::digest::Digest;

/// How errors name the document.
pub const DOCUMENT: &str = "coldsnap-validation.json";
/// Appended to a payload's file name.
pub const SUFFIX: &str = ".coldsnap-validation.json";
/// The only value of `format`.
pub const FORMAT: u32 = 1;
/// The only value of `kind`.
pub const KIND: &str = "coldsnap-payload-validation";
/// The only value of `provider`.
pub const PROVIDER: &str = "sha256-cache-v1";
/// A larger record is not one.
pub const MAX_BYTES: u64 = 1 << 20;

/// The record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValidationRecord {
    /// [`FORMAT`].
    pub format: u32,
    /// [`KIND`].
    pub kind: String,
    /// [`PROVIDER`].
    pub provider: String,
    /// File name of the payload.
    pub blob: String,
    /// What the payload was verified to be.
    pub expected: Expected,
    /// Which file that was.
    pub content_identity: ContentIdentity,
    /// What else was seen of it.
    pub diagnostic_identity: DiagnosticIdentity,
    /// How it was verified.
    pub content_evidence: String,
    /// When, nanoseconds since the epoch.
    pub validated_unix_ns: u64,
}

/// Size and digest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// Size in bytes.
    pub bytes: u64,
    /// Digest of the whole file.
    pub sha256: Digest,
}

/// The file. Every field must match for a hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContentIdentity {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Size in bytes.
    pub size: u64,
    /// Modification time, nanoseconds since the epoch.
    pub mtime_ns: i64,
}

/// Of these only the ctime decides, and only whether the content is hashed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiagnosticIdentity {
    /// Status change time, nanoseconds since the epoch.
    pub ctime_ns: i64,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Permission bits.
    pub mode: u32,
}

/// Both identities of an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileIdentity {
    /// Which file.
    pub content: ContentIdentity,
    /// What else.
    pub diagnostic: DiagnosticIdentity,
}

impl FileIdentity {
    /// The identity of a file.
    pub fn of(metadata: &Metadata) -> Self {
        Self {
            content: ContentIdentity {
                device: metadata.dev(),
                inode: metadata.ino(),
                size: metadata.size(),
                mtime_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
            },
            diagnostic: DiagnosticIdentity {
                ctime_ns: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
                uid: metadata.uid(),
                gid: metadata.gid(),
                mode: metadata.mode() & 0o7777,
            },
        }
    }
}

impl ValidationRecord {
    /// A record that the file `blob`, seen as `identity`, has this digest.
    pub fn new(blob: &str, sha256: Digest, identity: &FileIdentity, evidence: &str, now_ns: u64) -> Self {
        Self {
            format: FORMAT,
            kind: KIND.to_owned(),
            provider: PROVIDER.to_owned(),
            blob: blob.to_owned(),
            expected: Expected { bytes: identity.content.size, sha256 },
            content_identity: identity.content,
            diagnostic_identity: identity.diagnostic,
            content_evidence: evidence.to_owned(),
            validated_unix_ns: now_ns,
        }
    }

    /// Parses one record.
    ///
    /// # Errors
    /// Names the field that is missing or wrong, or the trailing data.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let record: Self = document::parse(DOCUMENT, bytes)?;
        if record.format != FORMAT {
            return Err(FormatError::new(DOCUMENT, "format", format!("{} is not supported", record.format)));
        }
        if record.kind != KIND {
            return Err(FormatError::new(DOCUMENT, "kind", format!("{:?}, expected {KIND:?}", record.kind)));
        }
        Ok(record)
    }

    /// The text of the file: indent 2, sorted keys, newline at the end.
    ///
    /// # Errors
    /// None in practice.
    pub fn to_bytes(&self) -> Result<Vec<u8>, FormatError> {
        document::to_bytes(DOCUMENT, self)
    }

    /// Whether the record is about the file `blob` with this digest and identity. On a miss, what differs.
    ///
    /// # Errors
    /// The name of the first field that differs.
    pub fn matches(&self, blob: &str, sha256: Digest, identity: &FileIdentity) -> Result<(), &'static str> {
        let rules = [
            ("provider", self.provider == PROVIDER),
            ("blob", self.blob == blob),
            ("expected", self.expected == Expected { bytes: identity.content.size, sha256 }),
            ("content_identity", self.content_identity == identity.content),
            (
                "diagnostic_identity.ctime_ns",
                self.diagnostic_identity.ctime_ns == identity.diagnostic.ctime_ns,
            ),
        ];
        rules.into_iter().find(|(_, holds)| !holds).map_or(Ok(()), |(field, _)| Err(field))
    }
}
