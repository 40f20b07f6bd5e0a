//! The files of artifact format 9. Parsing and rules only: what touches the file system is in
//! [`crate::store`] and [`crate::check`], except for the plain reading and durable writing of one document.
//!
//! Rules of reading: a wrong type, a missing field and trailing data are errors that name the document and
//! the field. Unknown fields are errors in artifact descriptors and tolerated in manifests and validation
//! records, because other implementations add facts of their own to those.

pub mod artifact;
pub mod canonical_json;
pub mod descriptor;
pub(crate) mod document;
mod hex_fields;
mod host_worker;
pub mod json;
mod manifest;
pub mod native_manifest;
pub mod overlay;
pub mod pack;
pub mod recovery_manifest;
pub mod residual;
pub mod semantic_id;
pub mod validation;

pub use document::{DocumentError, FormatError, MAX_DOCUMENT_BYTES};
pub use host_worker::HostWorker;
