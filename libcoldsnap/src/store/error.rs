//! What can go wrong with the store, and with the admission of one payload.

use std::io;
use std::path::{Path, PathBuf};

use crate::digest::Digest;
use crate::extent::LayoutError;
use crate::format::FormatError;

/// Why a payload was not admitted.
#[derive(Debug, thiserror::Error)]
pub enum AdmitError {
    /// It is not here.
    #[error("the model payload {digest} is not in the store: {} does not exist; stage it first", path.display())]
    NotFound {
        /// The payload.
        digest: Digest,
        /// Where it would be.
        path: PathBuf,
    },
    /// Something else than a file is at its path.
    #[error("cannot use {} as a model payload: it is {found}, expected a regular file reached without links", path.display())]
    NotRegular {
        /// The payload's path.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },
    /// Another size than committed.
    #[error("the model payload {} has {found} bytes, expected {expected}; it is damaged, remove it and stage it again", path.display())]
    SizeMismatch {
        /// The payload's path.
        path: PathBuf,
        /// Committed size.
        expected: u64,
        /// Size of the file.
        found: u64,
    },
    /// Other bytes than committed.
    #[error("the model payload {} contains {found}, expected {expected}; it is damaged, remove it and stage it again", path.display())]
    DigestMismatch {
        /// The payload's path.
        path: PathBuf,
        /// Committed digest.
        expected: Digest,
        /// Digest of the content.
        found: Digest,
    },
    /// Somebody wrote, replaced or removed it during the verification.
    #[error("the model payload {} changed while it was verified: {what}", path.display())]
    Changed {
        /// The payload's path.
        path: PathBuf,
        /// What changed.
        what: String,
    },
    /// The file system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
}

impl AdmitError {
    /// The stable name of the kind of error.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "PayloadMissing",
            Self::NotRegular { .. } => "NotRegularFile",
            Self::SizeMismatch { .. } => "SizeChanged",
            Self::DigestMismatch { .. } => "DigestMismatch",
            Self::Changed { .. } => "IdentityChanged",
            Self::Io { .. } => "Io",
        }
    }

    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}

/// Why an operation on the store failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A payload was not admitted.
    #[error(transparent)]
    Admit(#[from] AdmitError),
    /// The extents make no pack.
    #[error("cannot lay out the model payload: {0}")]
    Layout(#[from] LayoutError),
    /// Writing would fill the file system.
    #[error(
        "not enough space in {}: the model payload needs {needed} bytes and {reserve} must stay free, {available} are free; \
         remove payloads that nobody needs with coldsnap payload gc or rm",
        path.display()
    )]
    InsufficientSpace {
        /// Directory on the file system.
        path: PathBuf,
        /// Size of the payload.
        needed: u64,
        /// Bytes that must stay free.
        reserve: u64,
        /// Bytes that are free.
        available: u64,
    },
    /// The leased payload is not the file at its path any more.
    #[error("cannot lease {digest}: it was removed or replaced since it was admitted; admit it again")]
    PayloadGone {
        /// The payload.
        digest: Digest,
    },
    /// A lease needs an owner.
    #[error("cannot lease {digest} for an owner without a name")]
    NoOwner {
        /// The payload.
        digest: Digest,
    },
    /// A lease file that cannot be understood keeps its payload leased.
    #[error("cannot use the lease file {}: {source}; remove it when its owner is gone", path.display())]
    BadLease {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: FormatError,
    },
    /// A pin file that cannot be understood keeps its payload pinned.
    #[error("cannot use the pin file {}: {source}; remove it, and pin the payload again if it must stay", path.display())]
    BadPin {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: FormatError,
    },
    /// A file that cannot be a pack.
    #[error("cannot import {}: {found}, but a pack is a regular file of a multiple of 4096 bytes", path.display())]
    NotAPack {
        /// The file.
        path: PathBuf,
        /// What it is.
        found: String,
    },
    /// A file with other bytes than expected.
    #[error("cannot import {}: it contains {found}, expected {expected}; nothing was taken into the store", path.display())]
    WrongContent {
        /// The file.
        path: PathBuf,
        /// Digest that was given, or that the file's name says.
        expected: Digest,
        /// Digest of the content.
        found: Digest,
    },
    /// Something else is where a payload should be exported to.
    #[error("cannot export to {}: {what}; remove it or choose another name", path.display())]
    DestinationExists {
        /// What is in the way.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// Somebody needs the payload.
    #[error(
        "cannot remove {digest}: it is leased by {}; remove what uses it, or give the leases of an owner that is gone back \
         with coldsnap payload release OWNER",
        owners.join(", ")
    )]
    Leased {
        /// The payload.
        digest: Digest,
        /// Who has a lease; the file's path where its content says nothing.
        owners: Vec<String>,
    },
    /// The payload is to stay.
    #[error("cannot remove {digest}: it is pinned{}; unpin it first", reason.as_ref().map(|r| format!(" ({r})")).unwrap_or_default())]
    Pinned {
        /// The payload.
        digest: Digest,
        /// Why, if somebody said.
        reason: Option<String>,
    },
    /// The file system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
}

impl StoreError {
    /// The stable name of the kind of error.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Admit(error) => error.kind(),
            Self::Layout(error) => error.kind(),
            Self::InsufficientSpace { .. } => "InsufficientSpace",
            Self::PayloadGone { .. } => "PayloadMissing",
            Self::NoOwner { .. } | Self::BadLease { .. } | Self::BadPin { .. } => "Malformed",
            Self::NotAPack { .. } => "NotAPack",
            Self::WrongContent { .. } => "DigestMismatch",
            Self::DestinationExists { .. } => "DestinationExists",
            Self::Leased { .. } => "Leased",
            Self::Pinned { .. } => "Pinned",
            Self::Io { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "InsufficientSpace",
                _ => "Io",
            },
        }
    }

    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}
