//! The answer to `-info`: who we are and what the OCI runtime can do.

use std::process::{Command, Stdio};

use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};

use crate::error::TaskError;
use crate::options::Options;
use crate::runc::DEFAULT_BINARY;

/// The name under which containerd registers the OCI features document (major version 1 of the specification).
const FEATURES_TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

/// Describes this runtime with the OCI runtime that `options` name.
///
/// # Errors
/// The options cannot be used, or the runtime's binary cannot be run. A runtime without the `features` command is
/// described without features.
pub fn runtime_info(runtime_id: &str, options: Option<&Any>) -> Result<RuntimeInfo, TaskError> {
    let decoded = Options::decode(options)?;
    let binary = if decoded.binary_name.is_empty() { DEFAULT_BINARY } else { &decoded.binary_name };
    let output = Command::new(binary)
        .arg("features")
        .stdin(Stdio::null())
        .output()
        .map_err(TaskError::io(format!("run {binary} features")))?;
    let is_document =
        serde_json::from_slice::<serde_json::Value>(&output.stdout).is_ok_and(|value| value.is_object());
    let features = (output.status.success() && is_document).then(|| Any {
        type_url: FEATURES_TYPE.to_owned(),
        value: output.stdout,
        ..Default::default()
    });
    Ok(RuntimeInfo {
        name: runtime_id.to_owned(),
        version: Some(RuntimeVersion { version: env!("CARGO_PKG_VERSION").to_owned(), ..Default::default() })
            .into(),
        options: options.cloned().into(),
        features: features.into(),
        ..Default::default()
    })
}
