//! Why a payload cannot be rebuilt from a checkpoint.

use std::io;

use crate::digest::Digest;
use crate::extent::LayoutError;
use crate::format::FormatError;

/// See the module's description. Names of files are those that the recovery manifest records.
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    /// A file of the capsule is not there or cannot be read.
    #[error("cannot read the capsule's {path}: {problem}")]
    Capsule {
        /// The file, below the capsule's root.
        path: String,
        /// What was found.
        problem: String,
    },
    /// A document of the capsule is malformed.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The documents of the capsule contradict each other or themselves.
    #[error("the manifests of worker {worker}: {source}")]
    Layout {
        /// The worker.
        worker: String,
        /// The broken rule.
        source: LayoutError,
    },
    /// The artifact has no payload of this worker.
    #[error("the artifact has no model payload of worker {worker}")]
    NoPayload {
        /// The worker.
        worker: String,
    },
    /// The manifest does not say where an extent's bytes come from.
    #[error(
        "the recovery manifest of worker {worker} has no recovery source for extent {extent} ({bytes} bytes at offset \
         {offset} of the pack): this payload cannot be rebuilt from a checkpoint, import or fetch it"
    )]
    NoSource {
        /// The worker.
        worker: String,
        /// Semantic id of the extent.
        extent: String,
        /// Size of the extent.
        bytes: u64,
        /// Its offset in the pack.
        offset: u64,
    },
    /// A piece lies outside of its extent, or overlaps another one, or bytes are missing.
    #[error("the recovery source of extent {extent}: {problem}")]
    BadPiece {
        /// Semantic id of the extent.
        extent: String,
        /// What is wrong.
        problem: String,
    },
    /// No place has the file.
    #[error("the checkpoint file {file} is not there; looked in {looked}")]
    MissingFile {
        /// The file.
        file: String,
        /// Where.
        looked: String,
    },
    /// No place is known to look in.
    #[error("nobody says where the checkpoint is: {help}")]
    NoPlace {
        /// What helps.
        help: &'static str,
    },
    /// A symbolic link on the way leads out of the place.
    #[error(
        "the checkpoint file {file} is a link that leads out of {place}: name the directory that it leads to"
    )]
    LeadsOut {
        /// The file.
        file: String,
        /// The place.
        place: String,
    },
    /// The file is a directory, device, pipe or socket.
    #[error("the checkpoint file {file} in {place} is not a regular file")]
    NotRegular {
        /// The file.
        file: String,
        /// The place.
        place: String,
    },
    /// The file ends before its last piece.
    #[error(
        "the checkpoint file {file} ({place}) has {found} bytes, the capture read {needed}: it is another one"
    )]
    ShortFile {
        /// The file.
        file: String,
        /// Where it was opened.
        place: String,
        /// Bytes that it must have at least.
        needed: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// The checkpoint has other bytes than the captured one.
    #[error("the checkpoint is not the captured one: {0}")]
    OtherBytes(Box<OtherBytes>),
    /// The file system refused.
    #[error("cannot {action} the checkpoint file {file}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        file: String,
        /// What the system answered.
        source: io::Error,
    },
    /// A source was asked for another payload than it can rebuild.
    #[error("this checkpoint rebuilds {rebuilds}, not {wanted}")]
    OtherPayload {
        /// What it rebuilds.
        rebuilds: Digest,
        /// What was asked for.
        wanted: Digest,
    },
}

/// An extent whose bytes in the checkpoint are not those of the pack.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "extent {} at offset {offset} of the pack, {bytes} bytes from {pieces}, has sha256 {}, expected {}{hint}",
    extent.hex(), found.hex(), expected.hex()
)]
pub struct OtherBytes {
    /// Semantic id of the extent.
    pub extent: Digest,
    /// Its offset in the pack.
    pub offset: u64,
    /// Its size.
    pub bytes: u64,
    /// Files and offsets that it was read from.
    pub pieces: String,
    /// Digest that the manifest says.
    pub expected: Digest,
    /// Digest of what was read.
    pub found: Digest,
    /// What the checkpoint's headers tell.
    pub hint: &'static str,
}

impl RecoverError {
    /// The stable name of the kind of error.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Capsule { .. } => "NotACapsule",
            Self::Format(_) | Self::BadPiece { .. } => "Malformed",
            Self::Layout { source, .. } => source.kind(),
            Self::NoPayload { .. } | Self::NoSource { .. } | Self::OtherPayload { .. } => "NotRecoverable",
            Self::MissingFile { .. } | Self::NoPlace { .. } => "CheckpointMissing",
            Self::LeadsOut { .. } | Self::NotRegular { .. } => "CheckpointRefused",
            Self::ShortFile { .. } | Self::OtherBytes(_) => "CheckpointChanged",
            Self::Io { .. } => "Io",
        }
    }

    /// Whether it says that bytes are not the committed ones.
    pub const fn is_other_content(&self) -> bool {
        matches!(self, Self::ShortFile { .. } | Self::OtherBytes(_))
    }
}
