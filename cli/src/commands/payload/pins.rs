//! `coldsnap payload pin` and `unpin`.

use coldsnap::digest::Digest;
use coldsnap::store::NodeStore;
use serde::Serialize;

use crate::output::{CliError, Output};

/// Keep payloads: nothing but `unpin` and `rm --force` lets them go.
#[derive(Debug, clap::Args)]
pub struct PinArgs {
    /// The payloads.
    #[arg(required = true, value_name = "DIGEST")]
    digests: Vec<Digest>,
    /// Why they stay, for whoever finds the pin.
    #[arg(long)]
    reason: Option<String>,
}

/// Let eviction have payloads again.
#[derive(Debug, clap::Args)]
pub struct UnpinArgs {
    /// The payloads.
    #[arg(required = true, value_name = "DIGEST")]
    digests: Vec<Digest>,
}

#[derive(Serialize)]
struct Changes {
    payloads: Vec<Change>,
}

#[derive(Serialize)]
struct Change {
    digest: Digest,
    pinned: bool,
    /// Whether it was otherwise before.
    changed: bool,
}

/// Runs `pin`.
///
/// # Errors
/// When a payload is not in the store, or the pin cannot be written. Those before it are pinned then.
pub fn pin(args: &PinArgs, store: &NodeStore, output: &Output) -> Result<(), CliError> {
    let reason = args.reason.as_deref();
    report(&args.digests, true, output, |digest| Ok(store.pin(digest, reason)?))
}

/// Runs `unpin`.
///
/// # Errors
/// When a pin cannot be removed.
pub fn unpin(args: &UnpinArgs, store: &NodeStore, output: &Output) -> Result<(), CliError> {
    report(&args.digests, false, output, |digest| Ok(store.unpin(digest)?))
}

fn report(
    digests: &[Digest],
    pinned: bool,
    output: &Output,
    mut change: impl FnMut(&Digest) -> Result<bool, CliError>,
) -> Result<(), CliError> {
    let mut payloads = Vec::new();
    for digest in digests {
        payloads.push(Change { digest: *digest, pinned, changed: change(digest)? });
    }
    let changes = Changes { payloads };
    output.result(&changes, || {
        let line = |change: &Change| {
            let before = if change.changed { "" } else { "already " };
            let state = if change.pinned { "pinned" } else { "not pinned" };
            format!("{} {before}{state}", change.digest)
        };
        changes.payloads.iter().map(line).collect::<Vec<_>>().join("\n")
    })
}
