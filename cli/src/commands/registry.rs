//! What the commands that push to a registry have in common.

use std::collections::BTreeMap;
use std::path::PathBuf;

use coldsnap::digest::Digest;
use coldsnap::registry::{Access, Registry, tag_of};
use coldsnap::store::{AdmittedPayload, NodeStore};
use serde::Serialize;

use crate::output::{CliError, Output};

/// How the registry is reached.
#[derive(Debug, clap::Args)]
pub struct RegistryArgs {
    /// Speak HTTP without TLS.
    #[arg(long)]
    plain_http: bool,
    /// File with credentials, in the form of Docker's config.json.
    #[arg(long, value_name = "FILE")]
    credentials: Option<PathBuf>,
}

impl RegistryArgs {
    /// The same for the library.
    pub fn access(&self) -> Access {
        Access { plain_http: self.plain_http, credentials_file: self.credentials.clone() }
    }
}

/// A payload in a repository.
#[derive(Debug, Serialize)]
pub struct PayloadRow {
    digest: Digest,
    bytes: u64,
    tag: String,
    /// Digest of the manifest; null in a dry run.
    manifest: Option<Digest>,
    /// Whether the repository had the payload with its manifest before.
    present: bool,
    /// Bytes that were sent; of a dry run, that would be.
    pushed_bytes: u64,
}

impl PayloadRow {
    /// For people.
    pub fn text(&self, dry_run: bool) -> String {
        let did = match (self.present, self.pushed_bytes, dry_run) {
            (true, ..) => "is there".to_owned(),
            (false, 0, false) => "was there, its manifest is new".to_owned(),
            (false, 0, true) => "is there, its manifest would be new".to_owned(),
            (false, bytes, false) => format!("pushed, {bytes} bytes"),
            (false, bytes, true) => format!("would be pushed, {bytes} bytes"),
        };
        format!("payload  {}  {did}", self.digest)
    }
}

/// Admits each payload, with its committed size where that is known.
///
/// # Errors
/// The first one that is not admitted: nothing is pushed then.
pub fn admit(
    store: &NodeStore,
    payloads: &BTreeMap<Digest, Option<u64>>,
    output: &Output,
) -> Result<Vec<AdmittedPayload>, CliError> {
    let mut progress = output.progress("verifying", payloads.values().flatten().sum());
    let admitted =
        payloads.iter().map(|(digest, bytes)| store.admit(digest, *bytes, &mut |n| progress.advance(n)));
    Ok(admitted.collect::<Result<_, _>>()?)
}

/// Pushes each payload, or says in a dry run what would be.
///
/// # Errors
/// The first one that cannot be pushed; those before it stay, complete with their manifests.
pub fn push(
    registry: &Registry,
    payloads: &[AdmittedPayload],
    dry_run: bool,
    output: &Output,
) -> Result<Vec<PayloadRow>, CliError> {
    let mut rows = Vec::new();
    for payload in payloads {
        let (digest, bytes) = (*payload.digest(), payload.bytes());
        let (state, manifest) = if dry_run {
            (registry.payload_state(&digest, bytes)?, None)
        } else {
            let mut progress = output.progress("pushing", bytes);
            let pushed = registry.push_payload(payload, &mut |n| progress.advance(n))?;
            (pushed.before, Some(pushed.manifest))
        };
        rows.push(PayloadRow {
            digest,
            bytes,
            tag: tag_of(&digest),
            manifest,
            present: state.blob && state.manifest,
            pushed_bytes: if state.blob { 0 } else { bytes },
        });
    }
    Ok(rows)
}
