//! `coldsnap verify`: admits one payload.

use std::path::PathBuf;
use std::time::Instant;

use coldsnap::digest::Digest;
use coldsnap::extent::LayoutError;
use coldsnap::store::{AdmittedPayload, NodeStore, RecordKept};
use serde::Serialize;

use crate::output::{CliError, Output};

/// Verify a model payload: by its validation record, or by hashing it in full and writing the record.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The payload, at the only path it may have: <store>/model-payloads/sha256/<64hex>.pack
    #[arg(value_name = "PACK")]
    pack: PathBuf,
    /// Its digest.
    #[arg(long, value_name = "sha256:HEX")]
    sha256: Digest,
    /// Its committed size.
    #[arg(long, value_name = "N")]
    bytes: Option<u64>,
}

#[derive(Serialize)]
struct Report<'a> {
    digest: &'a Digest,
    path: String,
    bytes: u64,
    evidence: &'static str,
    bytes_hashed: u64,
    seconds: f64,
    /// `reused`, `written` or `not written: <reason>`
    record: String,
}

/// Runs the command.
///
/// # Errors
/// `PathDigestMismatch` when the path is not the digest's, or what the verifier answers.
pub fn run(args: Args, output: &Output) -> Result<(), CliError> {
    let started = Instant::now();
    let payload = admit(&args, output)?;
    let report = Report {
        digest: payload.digest(),
        path: payload.path().display().to_string(),
        bytes: payload.bytes(),
        evidence: payload.evidence().name(),
        bytes_hashed: payload.bytes_hashed(),
        seconds: started.elapsed().as_secs_f64(),
        record: match payload.record() {
            RecordKept::Reused => "reused".to_owned(),
            RecordKept::Written => "written".to_owned(),
            RecordKept::NotWritten(reason) => format!("not written: {reason}"),
        },
    };
    output.result(&report, || {
        format!(
            "{} is {}\n{} bytes, evidence {}, {} bytes hashed in {:.3} s, record {}",
            report.path,
            report.digest,
            report.bytes,
            report.evidence,
            report.bytes_hashed,
            report.seconds,
            report.record
        )
    })
}

fn admit(args: &Args, output: &Output) -> Result<AdmittedPayload, CliError> {
    let path = std::path::absolute(&args.pack)
        .map_err(|e| CliError::new("Io", format!("cannot resolve {}: {e}", args.pack.display())))?;
    let store = match NodeStore::of_payload_path(&path) {
        Some((store, digest)) if digest == args.sha256 => store,
        _ => return Err(LayoutError::PathDigestMismatch { path, digest: args.sha256 }.into()),
    };
    let total = std::fs::symlink_metadata(&path).map_or(0, |metadata| metadata.len());
    let mut progress = output.progress("verifying", total);
    Ok(store.admit(&args.sha256, args.bytes, &mut |bytes| progress.advance(bytes))?)
}
