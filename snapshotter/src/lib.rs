//! ColdSnap's snapshotter: overlay snapshots for containerd that bring the model payloads of a capsule along.
//!
//! containerd calls the service in `proto/` over a Unix socket. [`service`] translates it to
//! [`snapshotter::Snapshotter`], which is ordinary blocking code over [`metadata`] (what there is) and
//! [`layout`] (where it lies). [`layer`] finds out at Commit what a layer has to do with a capsule,
//! [`payloads`] admits and leases what a container of that capsule needs, [`mounts`] writes the answer.

pub mod error;
pub mod fault;
pub mod filter;
pub mod key;
pub mod keylock;
pub mod layer;
pub mod layout;
pub mod metadata;
pub mod mounts;
pub mod notify;
pub mod overlay;
pub mod payloads;
pub mod proto;
pub mod record;
pub mod recovery;
pub mod service;
pub mod snapshotter;
pub mod socket;
pub mod usage;

#[cfg(test)]
#[path = "../tests/common/capsule.rs"]
#[allow(clippy::unwrap_used, reason = "helper of tests")]
mod testing;
