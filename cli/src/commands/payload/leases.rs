//! `coldsnap payload leases` and `release`: for administrators. Whoever takes leases gives them back itself.

use coldsnap::store::{Lease, NodeStore};
use serde::Serialize;

use super::time;
use crate::output::{CliError, Output};

/// Give back all leases of an owner that is gone. The payloads of an owner that lives may be evicted then, and its
/// next start does not find them.
#[derive(Debug, clap::Args)]
pub struct ReleaseArgs {
    /// The owner, as `payload leases` shows it.
    owner: String,
}

#[derive(Serialize)]
struct Listing {
    leases: Vec<Lease>,
}

#[derive(Serialize)]
struct Released {
    owner: String,
    released: usize,
}

/// Runs `leases`.
///
/// # Errors
/// When a lease cannot be read.
pub fn list(store: &NodeStore, output: &Output) -> Result<(), CliError> {
    let listing = Listing { leases: store.leases()? };
    output.result(&listing, || {
        if listing.leases.is_empty() {
            return format!("no leases in {}", store.root().display());
        }
        let header = format!("{:<71}  {:<20}  OWNER", "DIGEST", "SINCE");
        let line = |lease: &Lease| {
            format!("{:<71}  {:<20}  {}", lease.digest.to_string(), time(lease.created_unix_ns), lease.owner)
        };
        std::iter::once(header).chain(listing.leases.iter().map(line)).collect::<Vec<_>>().join("\n")
    })
}

/// Runs `release`.
///
/// # Errors
/// When a lease cannot be removed.
pub fn release(args: &ReleaseArgs, store: &NodeStore, output: &Output) -> Result<(), CliError> {
    let released = Released { owner: args.owner.clone(), released: store.release(&args.owner)? };
    output.result(&released, || format!("{} leases of {} given back", released.released, released.owner))
}
