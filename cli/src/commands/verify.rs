//! `coldsnap verify`: admits payloads.

use std::time::{Duration, Instant};

use clap::error::ErrorKind;
use coldsnap::digest::Digest;
use coldsnap::extent::LayoutError;
use coldsnap::store::{AdmittedPayload, NodeStore, RecordKept};
use serde::Serialize;
use serde_json::{Value, json};

use crate::node::Node;
use crate::output::{CliError, Output, error_json};

/// Verify model payloads: by their validation records, or by hashing them in full and writing the records.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Payloads: a digest (sha256:HEX) in this node's store, or a file at the only path it may have:
    /// <store>/model-payloads/sha256/<64hex>.pack
    #[arg(value_name = "DIGEST|PACK", required = true)]
    payloads: Vec<String>,
    /// The digest that the one payload must have; its path says the same.
    #[arg(long, value_name = "sha256:HEX")]
    sha256: Option<Digest>,
    /// The committed size of the one payload.
    #[arg(long, value_name = "N")]
    bytes: Option<u64>,
}

/// The result of one verification, also as `coldsnap payload serve` answers it.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    digest: Digest,
    path: String,
    bytes: u64,
    evidence: &'static str,
    bytes_hashed: u64,
    seconds: f64,
    /// `reused`, `written` or `not written: <reason>`
    record: String,
}

impl Report {
    /// What was admitted, and how long that took.
    pub fn of(payload: &AdmittedPayload, took: Duration) -> Self {
        Self {
            digest: *payload.digest(),
            path: payload.path().display().to_string(),
            bytes: payload.bytes(),
            evidence: payload.evidence().name(),
            bytes_hashed: payload.bytes_hashed(),
            seconds: took.as_secs_f64(),
            record: match payload.record() {
                RecordKept::Reused => "reused".to_owned(),
                RecordKept::Written => "written".to_owned(),
                RecordKept::NotWritten(reason) => format!("not written: {reason}"),
            },
        }
    }

    fn text(&self) -> String {
        let Self { digest, path, bytes, evidence, bytes_hashed, seconds, record } = self;
        format!(
            "{path} is {digest}\n{bytes} bytes, evidence {evidence}, {bytes_hashed} bytes hashed in {seconds:.3} s, record {record}"
        )
    }
}

/// Runs the command.
///
/// # Errors
/// `PathDigestMismatch` when a path is not the digest's, or what the verifier answers.
pub fn run(args: &Args, node: &Node, output: &Output) -> Result<(), CliError> {
    if args.payloads.len() > 1 && (args.sha256.is_some() || args.bytes.is_some()) {
        clap::Error::raw(ErrorKind::ArgumentConflict, "--sha256 and --bytes go with one payload\n").exit();
    }
    let wanted: Vec<_> =
        args.payloads.iter().map(|name| find(name, args.sha256, node)).collect::<Result<_, _>>()?;
    let sizes = wanted.iter().map(|(store, digest)| std::fs::symlink_metadata(store.payload_path(digest)));
    let total = sizes.flatten().map(|metadata| metadata.len()).sum();
    let mut progress = output.progress("verifying", total);
    if let [(store, digest)] = &wanted[..] {
        let started = Instant::now();
        let payload = store.admit(digest, args.bytes, &mut |bytes| progress.advance(bytes))?;
        drop(progress);
        let report = Report::of(&payload, started.elapsed());
        return output.result(&report, || report.text());
    }
    let answers = admit_all(&wanted, &mut |bytes| progress.advance(bytes));
    drop(progress);
    let failed = answers.iter().filter(|(answer, _)| answer.get("error").is_some()).count();
    output.result(&json!({"payloads": answers.iter().map(|(json, _)| json).collect::<Vec<_>>()}), || {
        answers.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("\n")
    })?;
    match failed {
        0 => Ok(()),
        _ => Err(CliError::in_result(
            "NotVerified",
            format!("{failed} of {} payloads were not verified", answers.len()),
        )),
    }
}

/// Admits them store by store; each answer as JSON and as text, in the order of `wanted`.
fn admit_all(wanted: &[(NodeStore, Digest)], progress: &mut dyn FnMut(u64)) -> Vec<(Value, String)> {
    let mut answers = vec![(Value::Null, String::new()); wanted.len()];
    let mut left: Vec<usize> = (0..wanted.len()).collect();
    while let Some(&first) = left.first() {
        let store = &wanted[first].0;
        let (here, elsewhere): (Vec<_>, Vec<_>) =
            left.into_iter().partition(|&n| wanted[n].0.root() == store.root());
        left = elsewhere;
        let payloads: Vec<_> = here.iter().map(|&n| (wanted[n].1, None)).collect();
        let started = Instant::now();
        let admissions = store.admit_all(&payloads, progress);
        let took = started.elapsed();
        for (n, admission) in here.into_iter().zip(admissions) {
            answers[n] = match admission {
                Ok(payload) => {
                    let report = Report::of(&payload, took);
                    // A report is a plain structure: it has a JSON form.
                    (serde_json::to_value(&report).unwrap_or_default(), report.text())
                }
                Err(error) => {
                    let mut answer = error_json(error.kind(), &error);
                    answer["digest"] = json!(wanted[n].1);
                    (answer, format!("error: {error} [{}]", error.kind()))
                }
            };
        }
    }
    answers
}

/// The store and the digest that an argument names.
fn find(name: &str, expected: Option<Digest>, node: &Node) -> Result<(NodeStore, Digest), CliError> {
    let found = if let Ok(digest) = name.parse::<Digest>() {
        Some((node.store(), digest))
    } else {
        let path = std::path::absolute(name)
            .map_err(|e| CliError::new("Io", format!("cannot resolve {name}: {e}")))?;
        NodeStore::of_payload_path(&path)
    };
    match (found, expected) {
        (Some((store, digest)), None) => Ok((store, digest)),
        (Some((store, digest)), Some(expected)) if digest == expected => Ok((store, digest)),
        (_, Some(digest)) => {
            let path = std::path::absolute(name).unwrap_or_else(|_| name.into());
            Err(LayoutError::PathDigestMismatch { path, digest }.into())
        }
        (None, None) => Err(CliError::new(
            "PathDigestMismatch",
            format!(
                "{name} is no payload: expected sha256:<64 lowercase hex digits> or a path that ends in model-payloads/sha256/<64hex>.pack"
            ),
        )),
    }
}
