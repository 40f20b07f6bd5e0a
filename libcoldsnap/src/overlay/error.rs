//! What can go wrong with the overlays of a node.

use std::io;
use std::path::{Path, PathBuf};

use crate::digest::Digest;
use crate::format::FormatError;
use crate::format::descriptor::DescriptorError;
use crate::store::{AdmitError, StoreError};

/// An act on the overlays of this node failed.
#[derive(Debug, thiserror::Error)]
pub enum OverlayError {
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
    /// A descriptor breaks its rules, or two do not belong together.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// The portable descriptor is no JSON.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Somebody else than the user of this program could have written it.
    #[error("{} {problem}: an overlay is only used when nobody but root can change it", path.display())]
    Unsafe {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The directory is not what its name says.
    #[error("{} is no overlay: {problem}", path.display())]
    Malformed {
        /// The overlay's directory.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The container has no capsule.
    #[error("the image holds no capsule (no /{})", crate::capsule::ARTIFACT_PATH)]
    NoCapsule,
    /// A capsule file is not readable.
    #[error("the capsule cannot be read: {0}")]
    Unreadable(String),
    /// There is none with this id.
    #[error("there is no overlay {0} on this node")]
    NotFound(String),
    /// A container was restored from it and lives.
    #[error("overlay {0} is in use by a container: remove the container first")]
    InUse(String),
    /// The payload that it names is not usable.
    #[error("the payload {digest} of the overlay: {source}")]
    Payload {
        /// The payload.
        digest: Digest,
        /// Why.
        source: AdmitError,
    },
    /// A lease could not be taken or given back.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl OverlayError {
    /// The stable name of the kind of error.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Io { .. } => "Io",
            Self::Descriptor(source) => source.kind(),
            Self::Format(_) | Self::Malformed { .. } => "Malformed",
            Self::Unsafe { .. } => "UnsafePermissions",
            Self::NoCapsule | Self::Unreadable(_) => "NotACapsule",
            Self::NotFound(_) => "OverlayNotFound",
            Self::InUse(_) => "OverlayInUse",
            Self::Payload { source, .. } => source.kind(),
            Self::Store(source) => source.kind(),
        }
    }

    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}
