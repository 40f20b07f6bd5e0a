//! Where a payload can come from, and how it is brought from there into the store.
//!
//! A source delivers a payload's bytes in order from any offset. It is not trusted: the store hashes what arrives, and
//! only the committed size and digest make it a payload. [`bring`] tries the sources in the configured order; one that
//! fails in the middle is asked again, from where it stopped, before the next one is.

mod bring;
#[cfg(feature = "sources")]
mod configured;
mod directory;
#[cfg(feature = "sources")]
mod hub;
#[cfg(feature = "sources")]
mod oci;
pub(crate) mod pace;
mod recovery;

use std::fmt;
use std::time::Duration;

use crate::digest::Digest;
use crate::recover::RecoverError;
use crate::store::{AdmittedPayload, StoreError};

pub use bring::bring;
#[cfg(feature = "sources")]
pub use configured::{SourceError, open_source, sources_for};
pub use directory::DirectorySource;
#[cfg(feature = "sources")]
pub use hub::HubSource;
#[cfg(feature = "sources")]
pub(crate) use hub::unquoted;
#[cfg(feature = "sources")]
pub use oci::OciSource;
pub use recovery::RecoverySource;

/// A place that may have payloads.
pub trait Source: fmt::Debug + Send + Sync {
    /// Names it in messages: kind and place, without secrets.
    fn name(&self) -> String;

    /// Delivers the payload's bytes in order, from offset `from` to its end, to `sink`.
    ///
    /// # Errors
    /// What stands against it, or the error of `sink` as it is.
    fn fetch(&self, wanted: &Wanted, from: u64, sink: &mut Sink<'_>) -> Result<(), FetchError>;
}

/// A payload that is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// The payload.
    pub digest: Digest,
    /// Its committed size in bytes.
    pub bytes: u64,
}

/// Takes the bytes that a source delivers.
pub type Sink<'a> = dyn FnMut(&[u8]) -> Result<(), FetchError> + 'a;

/// Why a source did not deliver.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// It does not have the payload.
    #[error("it does not have the payload{}", detail(.0))]
    NotFound(String),
    /// It refuses us.
    #[error("access denied: {0}")]
    Denied(String),
    /// It cannot be reached, or broke off; later it may work.
    #[error("{0}")]
    Unavailable(String),
    /// It asks to be left alone for a while.
    #[error("{what}; it asks to wait {} s", after.as_secs())]
    Busy {
        /// How long.
        after: Duration,
        /// What it said.
        what: String,
    },
    /// It cannot begin at the wanted offset.
    #[error("it cannot continue at byte {from}")]
    NoRange {
        /// The offset.
        from: u64,
    },
    /// It answers what cannot be right, or is not configured for this payload.
    #[error("{0}")]
    Refused(String),
    /// It cannot be rebuilt from the checkpoint.
    #[error(transparent)]
    Checkpoint(Box<RecoverError>),
    /// The store cannot take the bytes.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Nobody wants the payload any more.
    #[error("cancelled")]
    Cancelled,
}

impl From<RecoverError> for FetchError {
    fn from(error: RecoverError) -> Self {
        Self::Checkpoint(Box::new(error))
    }
}

fn detail(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {text}") }
}

/// How a payload is brought.
#[derive(Debug, Clone, Copy, Default)]
pub struct Limits {
    /// Bytes per second over all sources of one call; none for no limit.
    pub bandwidth: Option<u64>,
}

/// What happens while a payload is brought.
#[derive(Debug, Clone, Copy)]
pub enum Event<'a> {
    /// Somebody else brings or verifies the same payload.
    Waiting,
    /// So many bytes are here, of the wanted ones.
    Bytes {
        /// Bytes that are here.
        here: u64,
        /// All bytes.
        of: u64,
    },
    /// This source is asked, beginning at this offset.
    Asking {
        /// [`Source::name`].
        source: &'a str,
        /// First byte that is missing.
        from: u64,
    },
    /// This source failed.
    Failed {
        /// [`Source::name`].
        source: &'a str,
        /// Why.
        error: &'a FetchError,
    },
}

/// A payload that is here now.
#[derive(Debug)]
pub struct Brought {
    /// The payload.
    pub payload: AdmittedPayload,
    /// The source that delivered its last byte; none when it was here already.
    pub source: Option<String>,
    /// Bytes that the sources delivered in this call.
    pub fetched: u64,
    /// Bytes that an interrupted call had left.
    pub resumed: u64,
}

/// Why a payload could not be brought.
#[derive(Debug, thiserror::Error)]
pub enum BringError {
    /// No source is configured.
    #[error(
        "the model payload {digest} is not in the store and no source is configured: import it with `coldsnap payload \
         import`, or name sources in the configuration"
    )]
    NoSources {
        /// The payload.
        digest: Digest,
    },
    /// No source delivered it.
    #[error("no source delivered the model payload {digest}: {}", join(.failures))]
    Failed {
        /// The payload.
        digest: Digest,
        /// Each source with what it said, in order.
        failures: Vec<(String, FetchError)>,
    },
    /// Nobody wants it any more. What is here stays for the next call.
    #[error("bringing the model payload {digest} was cancelled")]
    Cancelled {
        /// The payload.
        digest: Digest,
    },
    /// The store cannot take it.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl BringError {
    /// The stable name of the kind of error.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NoSources { .. } | Self::Failed { .. } => "PayloadUnavailable",
            Self::Cancelled { .. } => "Cancelled",
            Self::Store(error) => error.kind(),
        }
    }
}

fn join(failures: &[(String, FetchError)]) -> String {
    let each = failures.iter().map(|(source, error)| format!("{source}: {error}"));
    each.collect::<Vec<_>>().join("; ")
}
