//! Resource usage of a container, from its cgroups.

use containerd_shim_protos::protobuf::well_known_types::any::Any;

use crate::container::Container;
use crate::error::TaskError;

/// The metrics of the container's cgroups.
///
/// # Errors
/// Always, for now.
pub fn collect(_container: &Container) -> Result<Any, TaskError> {
    Err(TaskError::Unimplemented("stats".to_owned()))
}
