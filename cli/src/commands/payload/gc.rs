//! `coldsnap payload gc` and `rm`: what leaves the store.

use coldsnap::digest::Digest;
use coldsnap::store::{Evicted, Eviction, NodeStore, Usage, Watermark, Watermarks};
use serde::Serialize;

use crate::node::Node;
use crate::output::{CliError, Output};

/// Remove what interrupted writers left, and evict payloads: when the store is above the high watermark, those that
/// nobody has leased or pinned, least recently leased first, down to the low one.
#[derive(Debug, clap::Args)]
pub struct GcArgs {
    /// High watermark instead of the configured one: bytes of payloads (800GB), or percent of the file system (85%).
    #[arg(long, value_name = "LIMIT", requires = "low", conflicts_with = "all_unused")]
    high: Option<Watermark>,
    /// Low watermark instead of the configured one.
    #[arg(long, value_name = "LIMIT", requires = "high")]
    low: Option<Watermark>,
    /// Evict every payload that nobody has leased or pinned, and remove what interrupted stagings could go on with.
    #[arg(long)]
    all_unused: bool,
    /// Only say which payloads would go.
    #[arg(long)]
    dry_run: bool,
}

/// Remove payloads that nobody has leased.
#[derive(Debug, clap::Args)]
pub struct RmArgs {
    /// The payloads.
    #[arg(required = true, value_name = "DIGEST")]
    digests: Vec<Digest>,
    /// Also those that are pinned. Nothing removes a leased payload.
    #[arg(long)]
    force: bool,
}

#[derive(Serialize)]
struct GcReport {
    dry_run: bool,
    /// None: nothing but temporaries was to go.
    #[serde(flatten)]
    limits: Limits,
    temporaries_removed: usize,
    evicted: Vec<Removed>,
    bytes: u64,
    missing_bytes: u64,
    failed: Vec<Failed>,
    usage: UsageReport,
}

#[derive(Serialize)]
struct Limits {
    high_watermark: Option<String>,
    low_watermark: Option<String>,
    all_unused: bool,
}

#[derive(Serialize)]
struct Removed {
    digest: Digest,
    bytes: u64,
}

#[derive(Serialize)]
struct Failed {
    digest: Digest,
    reason: String,
}

/// After the eviction.
#[derive(Serialize)]
struct UsageReport {
    payload_bytes: u64,
    filesystem_used: u64,
    filesystem_bytes: u64,
}

#[derive(Serialize)]
struct RmReport {
    removed: Vec<Removed>,
}

/// Runs `gc`.
///
/// # Errors
/// When the store cannot be read, or a payload that should go cannot be removed.
pub fn gc(args: &GcArgs, node: &Node, output: &Output) -> Result<(), CliError> {
    let watermarks = match (args.high, args.low) {
        (Some(high), Some(low)) => Some(Watermarks::new(high, low)?),
        _ => node.config.store.watermarks().map_err(|problem| CliError::new("Malformed", problem))?,
    };
    let eviction =
        if args.all_unused { Some(Eviction::AllUnused) } else { watermarks.map(Eviction::Watermarks) };
    let store = node.store();
    let temporaries_removed = match (args.dry_run, args.all_unused) {
        (true, _) => 0,
        (false, true) => store.sweep_interrupted()?,
        (false, false) => store.sweep()?,
    };
    let evicted = match &eviction {
        Some(eviction) => store.evict(eviction, args.dry_run)?,
        None => Evicted::default(),
    };
    let report = GcReport::new(args, eviction.as_ref(), temporaries_removed, evicted, store.usage()?);
    output.result(&report, || report.text())?;
    match report.failed.len() {
        0 => Ok(()),
        n => Err(CliError::in_result("Io", format!("{n} payloads could not be removed"))),
    }
}

impl GcReport {
    fn new(
        args: &GcArgs,
        eviction: Option<&Eviction>,
        temporaries_removed: usize,
        evicted: Evicted,
        usage: Usage,
    ) -> Self {
        let marks = match eviction {
            Some(Eviction::Watermarks(marks)) => Some(marks),
            _ => None,
        };
        Self {
            dry_run: args.dry_run,
            limits: Limits {
                high_watermark: marks.map(|marks| marks.high().to_string()),
                low_watermark: marks.map(|marks| marks.low().to_string()),
                all_unused: args.all_unused,
            },
            temporaries_removed,
            evicted: evicted.payloads.into_iter().map(|(digest, bytes)| Removed { digest, bytes }).collect(),
            bytes: evicted.bytes,
            missing_bytes: evicted.missing,
            failed: evicted
                .failures
                .into_iter()
                .map(|failure| Failed { digest: failure.digest, reason: failure.reason })
                .collect(),
            usage: UsageReport {
                payload_bytes: usage.payload_bytes,
                filesystem_used: usage.filesystem_used,
                filesystem_bytes: usage.filesystem_bytes,
            },
        }
    }

    fn text(&self) -> String {
        let mut lines: Vec<String> =
            self.evicted.iter().map(|gone| format!("{}  {:>14}", gone.digest, gone.bytes)).collect();
        lines.extend(self.failed.iter().map(|failed| format!("{} stays: {}", failed.digest, failed.reason)));
        let verb = if self.dry_run { "would be evicted" } else { "evicted" };
        lines.push(format!("{} payloads {verb}, {} bytes", self.evicted.len(), self.bytes));
        if self.temporaries_removed > 0 {
            lines.push(format!("{} temporaries removed", self.temporaries_removed));
        }
        if self.missing_bytes > 0 {
            let missing = self.missing_bytes;
            lines.push(format!("{missing} bytes more should go, but are leased, pinned or in use"));
        }
        if self.limits.high_watermark.is_none() && !self.limits.all_unused {
            lines.push("no watermarks: set them in the configuration, or give --high and --low".to_owned());
        }
        lines.push(format!("{} bytes of payloads in the store", self.usage.payload_bytes));
        lines.join("\n")
    }
}

/// Runs `rm`.
///
/// # Errors
/// When a payload is not here, leased, or pinned without `--force`. Those before it are removed then.
pub fn rm(args: &RmArgs, store: &NodeStore, output: &Output) -> Result<(), CliError> {
    let mut removed = Vec::new();
    for digest in &args.digests {
        removed.push(Removed { digest: *digest, bytes: store.remove(digest, args.force)? });
    }
    let report = RmReport { removed };
    output.result(&report, || {
        let line = |gone: &Removed| format!("{} removed, {} bytes", gone.digest, gone.bytes);
        report.removed.iter().map(line).collect::<Vec<_>>().join("\n")
    })
}
