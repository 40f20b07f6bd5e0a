//! ColdSnap's snapshotter: overlay snapshots for containerd that bring the model payloads of a capsule along.
//!
//! [`metadata`] says what there is and [`layout`] where it lies; [`layer`] finds out at Commit what a layer has
//! to do with a capsule, and [`mounts`] writes the answer to containerd.

pub mod error;
pub mod fault;
pub mod filter;
pub mod key;
pub mod layer;
pub mod layout;
pub mod metadata;
pub mod mounts;
pub mod overlay;
pub mod payloads;
pub mod proto;
pub mod record;
pub mod usage;

#[cfg(test)]
#[path = "../tests/common/capsule.rs"]
#[allow(clippy::unwrap_used, reason = "helper of tests")]
mod testing;
