//! ColdSnap's library: formats, node store, capture and mapped restore.
//!
//! The modules follow the data. Parsing is apart from I/O; a value that proves something
//! (`AdmittedPayload`, `CoveredLayout`) can only be made by the code that checked it.

pub mod capsule;
pub mod capture;
pub mod check;
pub mod config;
pub mod criu;
pub mod digest;
pub mod durable;
pub mod extent;
pub mod format;
pub mod hub;
pub mod inspect;
pub mod mapped_file;
pub mod node;
pub mod overlay;
#[cfg(feature = "sources")]
pub mod publish;
pub mod recover;
pub mod restore;
pub mod source;
pub mod store;
