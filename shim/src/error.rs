//! What a task operation can answer instead of success, and the one place that maps it to a status code.

use containerd_shim_protos::ttrpc::{self, Code};
use thiserror::Error;

use crate::mount::MountError;
use crate::runc::RuncError;
use crate::spec::SpecError;
use crate::stdio::StdioError;

/// Why a task operation failed.
#[derive(Debug, Error)]
pub enum TaskError {
    /// No such container or process, or it has ended.
    #[error("{0}")]
    NotFound(String),
    /// The id is taken.
    #[error("{0} exists already")]
    AlreadyExists(String),
    /// The container is in a state that does not allow the operation.
    #[error("{0}")]
    FailedPrecondition(String),
    /// The request holds something that cannot be used.
    #[error("{0}")]
    InvalidArgument(String),
    /// This shim cannot do it.
    #[error("{0} is not implemented by this shim")]
    Unimplemented(String),
    /// The OCI runtime failed.
    #[error(transparent)]
    Runc(#[from] RuncError),
    /// The root filesystem could not be mounted or unmounted.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The bundle's `config.json` could not be used.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The process's standard streams could not be set up.
    #[error(transparent)]
    Stdio(#[from] StdioError),
    /// A file operation failed.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was being done, and to what.
        what: String,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

impl TaskError {
    /// For `map_err`: `what` names the act and its object.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        |source| Self::Io { what, source }
    }

    fn code(&self) -> Code {
        match self {
            Self::NotFound(_) => Code::NOT_FOUND,
            Self::AlreadyExists(_) => Code::ALREADY_EXISTS,
            Self::FailedPrecondition(_) => Code::FAILED_PRECONDITION,
            Self::InvalidArgument(_) | Self::Stdio(StdioError::UnknownScheme { .. }) => {
                Code::INVALID_ARGUMENT
            }
            Self::Unimplemented(_) | Self::Stdio(StdioError::Unimplemented { .. }) => Code::UNIMPLEMENTED,
            _ => Code::UNKNOWN,
        }
    }
}

impl From<TaskError> for ttrpc::Error {
    fn from(error: TaskError) -> Self {
        ttrpc::error::get_rpc_status(error.code(), error)
    }
}
