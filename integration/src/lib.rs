//! What the demo and the end-to-end tests share: a disposable containerd node, `ctr`, images built on the spot, a client inside a
//! container's network namespace, and the check that nothing is left behind.
//!
//! Everything here expects to run inside the test node (`integration/node/node.sh run ...`) as root. Errors are `anyhow`: this crate is
//! a test bench, its errors are read by people.

pub mod coldsnap;
pub mod ctr;
pub mod guest;
pub mod http;
pub mod image;
pub mod leftovers;
pub mod llama;
pub mod memory;
pub mod netns;
pub mod node;
pub mod pattern;
pub mod process;
pub mod registry;
