//! Recovery: a payload rebuilt from the pinned checkpoint, without an engine.
//!
//! `capsule` reads the documents of a capsule, `plan` says which bytes of which checkpoint file stand where in the
//! pack, `files` opens those files, `checkpoint` delivers the pack's bytes as a [`crate::source::Source`]. Nothing
//! here is trusted: the store hashes what arrives, and only the committed size and digest make it a payload.
//!
//! `mode` says when that happens by itself, `record` is its visible state, `run` does it, `background` starts a
//! process that does it, and `locate` finds the checkpoint of a container that is about to start.

pub mod background;
pub mod capsule;
pub mod checkpoint;
mod error;
pub mod files;
pub mod locate;
pub mod mode;
pub mod plan;
pub mod record;
pub mod run;

pub use error::{OtherBytes, RecoverError};
