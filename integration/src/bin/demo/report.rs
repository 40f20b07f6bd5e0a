//! `report.json`, and the tables a person reads. Every figure that is shown is in the report, every list holds the runs in the order they were made.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Everything the demo measured. Times are from just before the client's start command to the first token of the answer.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// When the demo started, RFC 3339, UTC.
    pub date: String,
    pub machine: Machine,
    /// What ran, by program.
    pub versions: BTreeMap<String, String>,
    /// Runs of each measurement; they are interleaved: one of each kind, then the next of each kind.
    pub repetitions: usize,
    pub prompt: String,
    pub answer: String,
    /// Every server, however it started, gave `answer`.
    pub answers_equal: bool,
    pub cold_start_first_token_ms: ByCache,
    /// The first start of the capsule image: containerd unpacks the capsule layer in it.
    pub first_restore_first_token_ms: f64,
    pub restore_warm_first_token_ms: Vec<f64>,
    pub restore_cold_first_token_ms: Vec<f64>,
    /// In the same runs: until `ctr run` was over, that is, the container ran.
    pub restore_warm_started_ms: Vec<f64>,
    pub restore_cold_started_ms: Vec<f64>,
    pub capture_seconds: f64,
    /// How long the server stood still.
    pub freeze_seconds: f64,
    pub pages_image_bytes: u64,
    pub residual_bytes: u64,
    pub payload_bytes: u64,
    /// What the first capture added to the disk: payload, capsule image and its unpacked layer.
    pub stored_bytes: u64,
    /// What two later captures, of a new cold-started server and of a restored one, added to the store of payloads.
    pub second_capture_new_payload_bytes: u64,
    pub model_bytes_matched_ratio: f64,
    pub tokens_per_second: TokensPerSecond,
    pub replicas: Vec<Replica>,
    pub peer: Peer,
}

/// The machine the figures come from.
#[derive(Debug, Default, Serialize)]
pub struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub memory_kb: u64,
    pub kernel: String,
    /// Processes that wanted a processor, averaged over the minute before the demo. Times of a busy machine say little.
    pub load_average: f64,
}

#[derive(Debug, Default, Serialize)]
pub struct ByCache {
    pub warm_cache: Vec<f64>,
    pub cold_cache: Vec<f64>,
}

#[derive(Debug, Default, Serialize)]
pub struct TokensPerSecond {
    pub cold_started: Vec<f64>,
    pub restored: Vec<f64>,
}

/// One of several servers from one capsule, measured while all of them ran.
#[derive(Debug, Default, Serialize)]
pub struct Replica {
    pub private_kb: u64,
    pub shared_kb: u64,
    pub anonymous_kb: u64,
    pub first_token_ms: f64,
}

/// `ctr containers checkpoint` and `restore` with containerd's own runtime and snapshotter.
#[derive(Debug, Default, Serialize)]
pub struct Peer {
    pub checkpoint_seconds: f64,
    pub restore_cold_first_token_ms: Vec<f64>,
    pub restore_warm_first_token_ms: Vec<f64>,
    pub stored_bytes: u64,
    /// Of one restored server while another server runs, so that what the two share counts as shared.
    pub private_kb: u64,
}

/// What `coldsnap --json capture` prints, as far as the demo reads it.
#[derive(Debug, Deserialize)]
pub struct Capture {
    pub capture_seconds: f64,
    pub freeze_seconds: f64,
    pub pages_image_bytes: u64,
    pub residual_bytes: u64,
    pub payload_bytes: u64,
    pub payload_reused: bool,
    /// Absent when the memory is mapped from a payload since an earlier restore: nothing had to be found.
    pub model_bytes_matched_ratio: Option<f64>,
}

impl Machine {
    /// Reads what the kernel says.
    pub fn this() -> Result<Self> {
        let value = |path: &str, key: &str| -> Result<String> {
            let text = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
            let line = text
                .lines()
                .find(|line| line.starts_with(key))
                .with_context(|| format!("{path} has no {key}"))?;
            Ok(line.split_once(':').map_or("", |(_, value)| value).trim().to_owned())
        };
        Ok(Self {
            cpu: value("/proc/cpuinfo", "model name")?,
            cores: std::thread::available_parallelism()?.get(),
            memory_kb: value("/proc/meminfo", "MemTotal")?
                .trim_end_matches(" kB")
                .parse()
                .context("MemTotal is not a number")?,
            load_average: fs::read_to_string("/proc/loadavg")?
                .split(' ')
                .next()
                .and_then(|load| load.parse().ok())
                .context("cannot understand /proc/loadavg")?,
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        })
    }
}

/// The middle value; the mean of the two middle ones of an even number; 0 of nothing.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// The median of `a[i] / b[i]`: runs of one round met the same load.
fn paired_ratio(a: &[f64], b: &[f64]) -> f64 {
    median(&a.iter().zip(b).map(|(a, b)| a / b).collect::<Vec<_>>())
}

fn range(values: &[f64], unit: &str) -> String {
    let (min, max) =
        values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), v| (min.min(*v), max.max(*v)));
    format!("{:.0}{unit} ({min:.0}..{max:.0})", median(values))
}

/// A size for people, in units of 10^6 bytes.
pub fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// Prints rows in columns as wide as their widest cell, the first row as a heading.
fn table(rows: &[Vec<String>]) {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    for (index, row) in rows.iter().enumerate() {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        println!("  {}", cells.collect::<Vec<_>>().join("   ").trim_end());
        if index == 0 {
            println!("  {}", widths.iter().map(|width| "-".repeat(*width)).collect::<Vec<_>>().join("   "));
        }
    }
}

fn cells<const N: usize>(row: [&str; N]) -> Vec<String> {
    row.map(str::to_owned).to_vec()
}

impl Report {
    /// The three ways side by side. Each line compares runs with the same state of the page cache.
    pub fn print_comparison(&self) {
        let (warm, cold) =
            (&self.cold_start_first_token_ms.warm_cache, &self.cold_start_first_token_ms.cold_cache);
        let private = self.replicas.iter().map(|replica| replica.private_kb).max().unwrap_or(0);
        println!(
            "\nmedian (min..max) of {} interleaved runs each, from `ctr` to the first token:",
            self.repetitions
        );
        table(&[
            cells([
                "",
                "cold start",
                "coldsnap restore",
                "ctr checkpoint/restore",
                "restore is faster than: start",
                "peer",
            ]),
            cells([
                "page cache warm",
                &range(warm, " ms"),
                &range(&self.restore_warm_first_token_ms, " ms"),
                &range(&self.peer.restore_warm_first_token_ms, " ms"),
                &format!("{:.1}x", paired_ratio(warm, &self.restore_warm_first_token_ms)),
                &format!(
                    "{:.1}x",
                    paired_ratio(&self.peer.restore_warm_first_token_ms, &self.restore_warm_first_token_ms)
                ),
            ]),
            cells([
                "page cache dropped",
                &range(cold, " ms"),
                &range(&self.restore_cold_first_token_ms, " ms"),
                &range(&self.peer.restore_cold_first_token_ms, " ms"),
                &format!("{:.1}x", paired_ratio(cold, &self.restore_cold_first_token_ms)),
                &format!(
                    "{:.1}x",
                    paired_ratio(&self.peer.restore_cold_first_token_ms, &self.restore_cold_first_token_ms)
                ),
            ]),
            cells([
                "stored on disk",
                "",
                &megabytes(self.stored_bytes),
                &megabytes(self.peer.stored_bytes),
                "",
                "",
            ]),
            cells([
                "private memory of one",
                "",
                &megabytes(private * 1024),
                &megabytes(self.peer.private_kb * 1024),
                "",
                "",
            ]),
        ]);
    }

    /// The replicas, measured while all of them ran.
    pub fn print_replicas(&self) {
        let mut rows = vec![cells(["replica", "first token", "private", "of it anonymous", "shared"])];
        for (index, replica) in self.replicas.iter().enumerate() {
            rows.push(vec![
                format!("r{}", index + 1),
                format!("{:.0} ms", replica.first_token_ms),
                megabytes(replica.private_kb * 1024),
                megabytes(replica.anonymous_kb * 1024),
                megabytes(replica.shared_kb * 1024),
            ]);
        }
        table(&rows);
    }

    /// Each expectation beside what was measured. Times depend on the machine and its load: they are shown, not enforced.
    pub fn print_expectations(&self) {
        let private = self.replicas.iter().map(|replica| replica.private_kb).max().unwrap_or(0);
        let speed = paired_ratio(&self.tokens_per_second.restored, &self.tokens_per_second.cold_started);
        let mut rows = vec![cells(["expected (2 cores, idle)", "measured", ""])];
        let mut row = |expected: &str, measured: String, met: bool| {
            rows.push(vec![expected.to_owned(), measured, if met { "met" } else { "NOT MET" }.to_owned()]);
        };
        let (warm, cold) =
            (median(&self.restore_warm_first_token_ms), median(&self.restore_cold_first_token_ms));
        row(
            "restore to first token, page cache warm: at most 300 ms",
            format!("{warm:.0} ms"),
            warm <= 300.0,
        );
        row(
            "restore to first token, page cache dropped: at most 650 ms",
            format!("{cold:.0} ms"),
            cold <= 650.0,
        );
        row("pages-*.img: under 8 MB", megabytes(self.pages_image_bytes), self.pages_image_bytes < 8_000_000);
        row(
            "private memory of each replica: under 40 MB",
            megabytes(private * 1024),
            private * 1024 < 40_000_000,
        );
        row(
            "tokens per second, restored / cold-started: at least 0.97",
            format!("{speed:.2}"),
            speed >= 0.97,
        );
        let again = self.second_capture_new_payload_bytes;
        row("payload bytes added by two more captures: 0", again.to_string(), again == 0);
        let matched = self.model_bytes_matched_ratio;
        row(
            "tensor bytes found in the server's memory: at least 99 %",
            format!("{:.2} %", matched * 100.0),
            matched >= 0.99,
        );
        row("answers equal", self.answers_equal.to_string(), self.answers_equal);
        table(&rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_between_the_two_middle_ones() {
        assert_eq!(median(&[]).to_bits(), 0.0_f64.to_bits());
        assert_eq!(median(&[3.0, 1.0, 2.0]).to_bits(), 2.0_f64.to_bits());
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]).to_bits(), 2.5_f64.to_bits());
    }

    #[test]
    fn ratios_are_taken_pair_by_pair() {
        assert_eq!(paired_ratio(&[10.0, 1000.0, 30.0], &[5.0, 1.0, 10.0]).to_bits(), 3.0_f64.to_bits());
    }
}
