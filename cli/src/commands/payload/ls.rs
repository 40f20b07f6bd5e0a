//! `coldsnap payload ls`.

use coldsnap::digest::Digest;
use coldsnap::store::{NodeStore, PayloadInfo, PayloadState, StoreError};
use serde::Serialize;

use super::time;
use crate::output::{CliError, Output};

/// The payloads of a store.
#[derive(Debug, Serialize)]
pub struct Listing {
    store: String,
    payloads: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    digest: Digest,
    path: String,
    bytes: u64,
    /// `verified`, `unverified` (the next use hashes it) or `unusable`
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    leases: usize,
    pinned: bool,
    /// last lease taken or given back, else when it came
    last_used_unix_ns: u64,
}

/// Runs the command.
///
/// # Errors
/// When the store cannot be read.
pub fn run(store: &NodeStore, output: &Output) -> Result<(), CliError> {
    let listing = Listing::of(store)?;
    output.result(&listing, || listing.text())
}

impl From<PayloadInfo> for Row {
    fn from(info: PayloadInfo) -> Self {
        let (state, reason) = match info.state {
            PayloadState::Verified => ("verified", None),
            PayloadState::Unverified(reason) => ("unverified", Some(reason)),
            PayloadState::Unusable(reason) => ("unusable", Some(reason)),
        };
        let path = info.path.display().to_string();
        let PayloadInfo { digest, bytes, leases, pinned, last_used_unix_ns, .. } = info;
        Self { digest, path, bytes, state, reason, leases, pinned, last_used_unix_ns }
    }
}

impl Listing {
    /// Looks at the store; hashes nothing.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn of(store: &NodeStore) -> Result<Self, StoreError> {
        let payloads = store.list()?.into_iter().map(Row::from).collect();
        Ok(Self { store: store.root().display().to_string(), payloads })
    }

    fn text(&self) -> String {
        if self.payloads.is_empty() {
            return format!("no payloads in {}", self.store);
        }
        let header = format!(
            "{:<71}  {:>14}  {:>6}  {:<6}  {:<20}  STATE",
            "DIGEST", "BYTES", "LEASES", "PINNED", "LAST USED"
        );
        let rows = self.payloads.iter().map(|row| {
            let reason = row.reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
            format!(
                "{:<71}  {:>14}  {:>6}  {:<6}  {:<20}  {}{reason}",
                row.digest.to_string(),
                row.bytes,
                row.leases,
                if row.pinned { "yes" } else { "no" },
                time(row.last_used_unix_ns),
                row.state
            )
        });
        std::iter::once(header).chain(rows).collect::<Vec<_>>().join("\n")
    }
}
