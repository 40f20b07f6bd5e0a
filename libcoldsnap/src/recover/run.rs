//! One materialization: the worker's payload from the checkpoint into the store, and its state.

use std::sync::Arc;

use super::RecoverError;
use super::capsule::CapsuleDocuments;
use super::checkpoint::FromCheckpoint;
use super::files::CheckpointFiles;
use super::record::{Reason, Record, State, Trigger};
use crate::format::DocumentError;
use crate::source::{self, BringError, Brought, Event, FetchError, Limits, Source, Wanted};
use crate::store::{AdmitError, NodeStore, StoreError};

/// What is to be done.
#[derive(Debug, Clone)]
pub struct Job {
    /// The capsule.
    pub capsule: Arc<CapsuleDocuments>,
    /// The worker whose payload is wanted.
    pub worker: String,
    /// Who wants it.
    pub trigger: Trigger,
    /// The checkpoint.
    pub files: Arc<dyn CheckpointFiles>,
}

/// Why a payload was not rebuilt. Nothing was published.
#[derive(Debug, thiserror::Error)]
pub enum MaterializeError {
    /// The checkpoint or the capsule does not give it.
    #[error(transparent)]
    Recover(#[from] RecoverError),
    /// The store cannot take it, or the result is another payload.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The state cannot be written.
    #[error(transparent)]
    Record(#[from] DocumentError),
    /// Bringing it failed otherwise.
    #[error("{0}")]
    Other(String),
    /// Nobody wants it any more. What is here stays for the next attempt.
    #[error("cancelled")]
    Cancelled,
}

impl MaterializeError {
    /// The stable name of the kind of error.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Recover(error) => error.kind(),
            Self::Store(error) => error.kind(),
            Self::Record(error) => error.kind(),
            Self::Other(_) => "PayloadUnavailable",
            Self::Cancelled => "Cancelled",
        }
    }

    /// What the state file says about it.
    pub fn reason(&self) -> Reason {
        Reason { kind: self.kind().to_owned(), message: self.to_string() }
    }

    fn is_other_content(&self) -> bool {
        match self {
            Self::Recover(error) => error.is_other_content(),
            Self::Store(StoreError::Admit(AdmitError::DigestMismatch { .. })) => true,
            _ => false,
        }
    }
}

impl From<BringError> for MaterializeError {
    fn from(error: BringError) -> Self {
        match error {
            BringError::Store(error) => error.into(),
            BringError::Cancelled { .. } => Self::Cancelled,
            BringError::Failed { mut failures, .. } if failures.len() == 1 => match failures.remove(0).1 {
                FetchError::Checkpoint(error) => (*error).into(),
                FetchError::Store(error) => error.into(),
                other => Self::Other(other.to_string()),
            },
            other => Self::Other(other.to_string()),
        }
    }
}

/// Rebuilds the payload unless it is in the store, waiting for whoever works on it already. What an interrupted
/// attempt left is used. `cancelled` is asked often; `report` is told what happens.
///
/// # Errors
/// See [`MaterializeError`]; the state file has the reason.
pub fn materialize(
    store: &NodeStore,
    job: &Job,
    limits: &Limits,
    cancelled: &dyn Fn() -> bool,
    report: &mut dyn FnMut(Event<'_>),
) -> Result<Brought, MaterializeError> {
    let payload = job.capsule.payload(&job.worker)?;
    let record = Record::begin(store, &job.capsule, &payload, job.trigger, cancelled)?;
    let mut record = record.ok_or(MaterializeError::Cancelled)?;
    let wanted = Wanted { digest: payload.digest, bytes: payload.bytes };
    let checkpoint: Box<dyn Source> =
        Box::new(FromCheckpoint::new(Arc::clone(&job.capsule), &job.worker, Arc::clone(&job.files)));
    let mut asked = false;
    let brought = source::bring(store, &[checkpoint], &wanted, limits, cancelled, &mut |event| {
        match event {
            Event::Asking { from, .. } => {
                asked = true;
                record.progress(State::Writing, from);
            }
            Event::Bytes { here, of } if asked && here < of => record.progress(State::Writing, here),
            Event::Bytes { here, .. } => record.progress(State::Verifying, here),
            Event::Waiting | Event::Failed { .. } => {}
        }
        report(event);
    });
    let error = match brought.map_err(MaterializeError::from) {
        Ok(brought) => {
            record.end(State::Ready, None);
            return Ok(brought);
        }
        Err(error) => error,
    };
    // What could not be rebuilt may be there, and wrong: that was not replaced.
    let wrong_in_store = || {
        let admitted = store.admit(&payload.digest, Some(payload.bytes), &mut |_| {});
        matches!(admitted, Err(AdmitError::DigestMismatch { .. } | AdmitError::SizeMismatch { .. }))
    };
    let corrupt = match error {
        MaterializeError::Recover(_) => error.is_other_content() || wrong_in_store(),
        _ => error.is_other_content(),
    };
    record.end(if corrupt { State::Corrupt } else { State::Failed }, Some(error.reason()));
    Err(error)
}
