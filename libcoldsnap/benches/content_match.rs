//! Rates of content match, beside what one core of this machine can read and compare.
//!
//!     cargo bench -p coldsnap --bench content_match -- [model.gguf | snapshot directory]
//!
//! Without an argument `COLDSNAP_BENCH_MODEL` names the checkpoint; without that a random one of
//! 256 MiB is made. Every row is the median of seven rounds; the rows alternate within a round. Rates
//! are bytes per second of the calling thread's processor time, which other work on the machine
//! disturbs least; the last column is the rate by the wall clock.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use coldsnap::capture::checkpoint::Checkpoint;
use coldsnap::capture::content_match::{
    ContentMatcher, MatchOptions, MatchStats, MemoryRegion, model_extents,
};

const ROUNDS: usize = 7;
const PAGE: u64 = 4096;
const BASE: u64 = 0x7f00_0000_0000;

fn main() -> Result<()> {
    let argument = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    let named =
        argument.map(PathBuf::from).or_else(|| std::env::var_os("COLDSNAP_BENCH_MODEL").map(PathBuf::from));
    let scratch = tempfile::tempdir()?;
    let path = match named {
        Some(path) => path,
        None => random_checkpoint(scratch.path())?,
    };
    let checkpoint = Checkpoint::open(&path)?;

    // Tensors lie at multiples of 64 bytes, as tensor libraries align them, in another order than in
    // the file and with zero padding between them.
    let mut matched: Vec<u8> = vec![0; 64];
    for (position, tensor) in checkpoint.tensors().iter().rev().enumerate() {
        matched.extend_from_slice(checkpoint.tensor_data(tensor));
        matched.resize(matched.len().next_multiple_of(64) + position % 7 * 64, 0);
    }
    let copy = matched.clone();
    let shard: Vec<u8> =
        matched.chunks(8192).flat_map(|pages| &pages[..pages.len().min(4096)]).copied().collect();
    let random = random_bytes(matched.len(), 7);
    let zeros = vec![0u8; matched.len()];
    let constant: Vec<u8> = [0x80, 0x3f].repeat(matched.len() / 2);
    let tensor_bytes = usize::try_from(checkpoint.tensor_bytes())?;
    let options = MatchOptions::default();

    let mut rows = Rows::default();
    let mut ratio = 0.0;
    let mut stats = MatchStats::default();
    let mut extents = Vec::new();
    for _ in 0..ROUNDS {
        rows.time("read every word (limit of a scan)", matched.len(), || {
            matched.as_chunks().0.iter().fold(0, |sum: u64, word| sum.wrapping_add(u64::from_le_bytes(*word)))
        });
        rows.time("compare with a copy (limit of a match)", matched.len(), || {
            black_box(&matched[..]) == black_box(&copy[..])
        });
        let matcher = rows.time("prepare: samples of the checkpoint", tensor_bytes, || {
            ContentMatcher::new(&checkpoint, options)
        })?;
        let two = ContentMatcher::new(&checkpoint, MatchOptions { threads: 2, ..options })?;
        let region = |data| [MemoryRegion { address: BASE, data }];
        let matches = rows.time("scan matched memory", matched.len(), || matcher.find(&region(&matched)))?;
        rows.time("scan matched memory, two threads", matched.len(), || two.find(&region(&matched)))?;
        rows.time("scan every second page, twice", shard.len(), || matcher.find(&region(&shard)))?;
        rows.time("scan random memory", random.len(), || matcher.find(&region(&random)))?;
        rows.time("scan random memory, two threads", random.len(), || two.find(&region(&random)))?;
        rows.time("scan zeros", zeros.len(), || matcher.find(&region(&zeros)))?;
        rows.time("scan constant memory (bf16 ones)", constant.len(), || matcher.find(&region(&constant)))?;
        extents = rows.time("join, cut and prove", matched.len(), || {
            model_extents(&matches.runs, &checkpoint, &region(&matched), PAGE)
        })?;
        rows.time("all of it: prepare, scan, prove", matched.len(), || -> Result<_> {
            let matcher = ContentMatcher::new(&checkpoint, options)?;
            let runs = matcher.find(&region(&matched))?.runs;
            Ok(model_extents(&runs, &checkpoint, &region(&matched), PAGE)?)
        })?;
        ratio = matcher.matched_ratio(&matches.runs);
        stats = matches.stats;
    }
    println!("checkpoint: {} tensors, {tensor_bytes} bytes", checkpoint.tensors().len());
    println!(
        "memory per row: {} bytes; matched {ratio:.6}; extents {}; {stats:?}",
        matched.len(),
        extents.len()
    );
    rows.print();
    Ok(())
}

/// Name, bytes, processor seconds and wall clock seconds of each row, in the order of their appearance.
#[derive(Default)]
struct Rows(Vec<(&'static str, usize, Vec<f64>, Vec<f64>)>);

impl Rows {
    fn time<T>(&mut self, name: &'static str, bytes: usize, act: impl FnOnce() -> T) -> T {
        let (wall, processor) = (Instant::now(), processor_seconds());
        let result = black_box(act());
        let (processor, wall) = (processor_seconds() - processor, wall.elapsed().as_secs_f64());
        if !self.0.iter().any(|row| row.0 == name) {
            self.0.push((name, bytes, Vec::new(), Vec::new()));
        }
        for row in self.0.iter_mut().filter(|row| row.0 == name) {
            row.2.push(processor);
            row.3.push(wall);
        }
        result
    }

    #[expect(clippy::cast_precision_loss, reason = "rates for people")]
    fn print(mut self) {
        println!("{:<42} {:>8} {:>8} {:>8} {:>8}", "GB/s", "median", "min", "max", "wall");
        for (name, bytes, processor, wall) in &mut self.0 {
            processor.sort_by(f64::total_cmp);
            wall.sort_by(f64::total_cmp);
            let rate = |seconds: f64| *bytes as f64 / seconds / 1e9;
            let (first, middle, last) = (processor[0], processor[ROUNDS / 2], processor[ROUNDS - 1]);
            print!("{name:<42} {:>8.2} {:>8.2} {:>8.2}", rate(middle), rate(last), rate(first));
            println!(" {:>8.2}", rate(wall[ROUNDS / 2]));
        }
    }
}

/// Processor time of the calling thread.
#[expect(clippy::cast_precision_loss, reason = "seconds for people")]
fn processor_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the answer; the call has no other effect.
    let answer = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    if answer == 0 { time.tv_sec as f64 + time.tv_nsec as f64 / 1e9 } else { f64::NAN }
}

/// SplitMix64: any content without repetition will do.
fn random_bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bytes.extend_from_slice(&(z ^ (z >> 31)).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn random_checkpoint(directory: &Path) -> Result<PathBuf> {
    let tensor = 4usize << 20;
    let entries: Vec<String> = (0..64)
        .map(|n| {
            let (from, to) = (n * tensor, (n + 1) * tensor);
            format!(r#""layer.{n}":{{"dtype":"U8","shape":[{tensor}],"data_offsets":[{from},{to}]}}"#)
        })
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    let mut file = u64::try_from(header.len())?.to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&random_bytes(64 * tensor, 1));
    let path = directory.join("model.safetensors");
    std::fs::write(&path, file)?;
    Ok(path)
}
