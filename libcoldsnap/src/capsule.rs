//! Names inside a capsule: the one place that says where things lie in the capsule layer.

use std::path::PathBuf;

/// The capsule's directory, relative to the container's root (no leading slash).
pub const CAPSULE_DIR: &str = "opt/coldsnap/capsule";
/// The artifact descriptor, relative to the container's root. Its presence makes a layer a capsule layer.
pub const ARTIFACT_PATH: &str = "opt/coldsnap/capsule/artifact.json";
/// Facts of the capture that a restore compares with the live container, relative to the container's root.
pub const CAPTURE_PATH: &str = "opt/coldsnap/capsule/capture.json";
/// Directory of the CRIU images, relative to the container's root.
pub const IMAGES_DIR: &str = "opt/coldsnap/capsule/images";
/// One directory per worker below this one, relative to the container's root.
pub const HYDRATION_DIR: &str = "opt/coldsnap/capsule/hydration";
/// The model payload; in the capsule layer an empty placeholder that a read-only bind covers.
pub const PACK_NAME: &str = "model-weights.pack";
/// The residual bytes of a worker.
pub const RESIDUAL_NAME: &str = "weights.blob";
/// The native manifest of a worker.
pub const NATIVE_MANIFEST_NAME: &str = "native-manifest.json";
/// The recovery manifest of a worker.
pub const RECOVERY_MANIFEST_NAME: &str = "manifest.json";
/// Image label that holds the artifact descriptor's digest; also set on the capsule's image config.
pub const IMAGE_LABEL: &str = "coldsnap.io/artifact";
/// Image label that holds the capture's id.
pub const CAPTURE_LABEL: &str = "coldsnap.io/capture";
/// Spec annotation: `auto`, `require` or `never`.
pub const RESTORE_ANNOTATION: &str = "coldsnap.io/restore";
/// Spec annotation: `off`, `async` or `required`.
pub const MATERIALIZE_ANNOTATION: &str = "coldsnap.io/materialize";
/// Spec annotation: `auto` or `never`.
pub const OVERLAY_ANNOTATION: &str = "coldsnap.io/overlay";

/// `opt/coldsnap/capsule/hydration/<worker>`, relative to the container's root.
pub fn worker_dir(worker: &str) -> PathBuf {
    PathBuf::from(HYDRATION_DIR).join(worker)
}

/// Where a container has the payload of a worker: an absolute path in it.
pub fn payload_destination(worker: &str) -> String {
    format!("/{HYDRATION_DIR}/{worker}/{PACK_NAME}")
}
