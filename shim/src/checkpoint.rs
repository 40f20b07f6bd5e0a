//! Checkpoint: CRIU images of a running or paused container.

use containerd_shim_protos::api::CheckpointTaskRequest;

use crate::container::Container;
use crate::error::TaskError;

/// Writes CRIU images of the container.
///
/// # Errors
/// Always, for now.
pub async fn checkpoint(_container: &Container, _request: &CheckpointTaskRequest) -> Result<(), TaskError> {
    Err(TaskError::Unimplemented("checkpoint".to_owned()))
}
