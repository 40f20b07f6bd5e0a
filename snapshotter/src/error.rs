//! Why an operation failed, in the classes that containerd's clients tell apart.

use std::fmt::Display;
use std::io;
use std::path::Path;

/// A failed operation. The class decides the gRPC code; the text says what was being done, to what, what
/// was found and what helps.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The key or name is taken.
    #[error("{0}")]
    AlreadyExists(String),
    /// There is no such snapshot.
    #[error("{0}")]
    NotFound(String),
    /// The snapshot is not in the state that the operation needs.
    #[error("{0}")]
    FailedPrecondition(String),
    /// The request can never be served as it is.
    #[error("{0}")]
    InvalidArgument(String),
    /// The request asks for something that this snapshotter does not do yet.
    #[error("{0}")]
    Unimplemented(String),
    /// The metadata database failed.
    #[error("cannot {doing} the snapshot metadata: {source}")]
    Metadata {
        /// The act, an infinitive.
        doing: &'static str,
        /// What the database reported.
        source: Box<redb::Error>,
    },
    /// The metadata hold something that this program did not write.
    #[error("the snapshot metadata are damaged: {0}")]
    Damaged(String),
    /// The node store of payloads failed.
    #[error("the payload store: {0}")]
    Store(String),
    /// The node's configuration cannot be used.
    #[error(transparent)]
    Config(#[from] coldsnap::config::ConfigError),
    /// The file system failed.
    #[error("cannot {doing}: {source}")]
    Io {
        /// The act and its object, an infinitive.
        doing: String,
        /// What the system reported.
        source: io::Error,
    },
}

impl Error {
    /// There is no snapshot of this name.
    pub fn no_snapshot(name: &str) -> Self {
        Self::NotFound(format!("snapshot {name:?} does not exist"))
    }

    /// The database failed while `doing`.
    pub fn metadata(doing: &'static str, source: impl Into<redb::Error>) -> Self {
        Self::Metadata { doing, source: Box::new(source.into()) }
    }

    /// Turns an error of the file system into one that names the act and the path.
    pub fn io<E: Into<io::Error>>(act: impl Display, path: &Path) -> impl FnOnce(E) -> Self {
        let doing = format!("{act} {}", path.display());
        move |source| Self::Io { doing, source: source.into() }
    }
}
