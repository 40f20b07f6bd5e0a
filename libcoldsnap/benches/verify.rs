//! The verifier's rates, each beside what it is compared with.
//!
//!     cargo bench -p coldsnap --bench verify -- [MiB per payload] [directory]
//!
//! Four payloads of 512 MiB by default, in a temporary directory, in the page cache. What is compared alternates
//! within a round; a ratio is the median of the rounds' ratios, beside the smallest and the largest. The machine
//! must have nothing else to do: these are wall clock times.

use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use coldsnap::digest::{Digest, Sha256};
use coldsnap::store::NodeStore;
use sha2::Digest as _;

const ROUNDS: usize = 9;
const PAYLOADS: usize = 4;
const ADMISSIONS: usize = 2000;
/// Streams in memory are hashed in pieces of this size, as extents are.
const PIECE: usize = 256 << 10;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    let mebibytes: usize = arguments.next().map_or(Ok(512), |text| text.parse())?;
    let directory = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let scratch = tempfile::tempdir_in(directory)?;
    let store = NodeStore::open(scratch.path())?.with_reserve(0);
    let contents: Vec<Vec<u8>> =
        (1..=PAYLOADS as u64).map(|seed| random_bytes(mebibytes << 20, seed)).collect();
    let mut payloads = Vec::new();
    for content in &contents {
        payloads.push(*store.publish_pack(&[vec![content]], &mut |_| ())?.payload.digest());
    }
    let payload = mebibytes << 20;
    let cores = thread::available_parallelism().map_or(1, usize::from);
    println!("{PAYLOADS} payloads of {mebibytes} MiB, {cores} cores, {ROUNDS} rounds");
    // Written past the page cache.
    for digest in &payloads {
        black_box(Digest::of(&fs::read(store.payload_path(digest))?));
    }

    processor();
    whole_file(&store, &payloads[0], payload)?;
    at_once(&store, &payloads, payload)?;
    in_memory(&contents);
    second_use(&store, &payloads[0])
}

/// What the processor's SHA instructions can do, with nothing to read and all of it in the first-level cache: no
/// verification on this machine is faster, whatever its bar.
fn processor() {
    const BYTES: usize = 16 << 10;
    const TIMES: usize = 20_000;
    let content = random_bytes(BYTES, 99);
    let on_two_cores = |hash: &(dyn Fn(&[u8]) + Sync)| {
        let started = Instant::now();
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| hash(&content));
            }
        });
        started.elapsed().as_secs_f64()
    };
    let (mut alone, mut in_step) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        alone.push(on_two_cores(&|content| {
            let mut sum = Sha256::default();
            (0..TIMES).for_each(|_| sum.update(content));
            black_box(sum.finish());
        }));
        in_step.push(on_two_cores(&|content| {
            let (mut a, mut b) = (Sha256::default(), Sha256::default());
            (0..TIMES).for_each(|_| Sha256::update_two((&mut a, content), (&mut b, content)));
            black_box((a.finish(), b.finish()));
        }));
    }
    println!(
        "the processor's limit, in cache, on two cores: one stream each {:.2} GB/s, two in step each {:.2} GB/s",
        rate(2 * BYTES * TIMES, median(alone)),
        rate(4 * BYTES * TIMES, median(in_step))
    );
}

/// First use of one payload, beside the programs that people use for it.
fn whole_file(store: &NodeStore, digest: &Digest, bytes: usize) -> Result<()> {
    let path = store.payload_path(digest);
    let programs = [("openssl", &["dgst", "-sha256"][..], 0.97), ("sha256sum", &[][..], 5.0)];
    let mut found = Vec::new();
    for (program, arguments, bar) in programs {
        if run(program, arguments, Path::new("/dev/null")).is_err() {
            println!("first use / {program}: {program} is not installed, not measured");
        } else {
            let start: Vec<f64> = (0..ROUNDS)
                .map(|_| run(program, arguments, Path::new("/dev/null")))
                .collect::<Result<_>>()?;
            found.push((program, arguments, bar, median(start), Vec::new(), Vec::new()));
        }
    }
    for _ in 0..ROUNDS {
        for (program, arguments, _, _, ours, theirs) in &mut found {
            forget(store, digest)?;
            let started = Instant::now();
            let payload = store.admit(digest, None, &mut |_| ())?;
            ours.push(started.elapsed().as_secs_f64());
            ensure!(payload.bytes_hashed() == bytes as u64, "the payload was not hashed");
            theirs.push(run(program, arguments, &path)?);
        }
    }
    for (program, _, bar, start, ours, theirs) in found {
        println!(
            "first use, whole file: {:.2} GB/s; {program}: {:.2} GB/s (of it {:.1} ms to start)",
            rate(bytes, median(ours.clone())),
            rate(bytes, median(theirs.clone())),
            start * 1e3
        );
        print_ratio(&format!("first use / {program}"), &theirs, &ours, bar);
    }
    Ok(())
}

/// First use of two and of four payloads, beside one.
fn at_once(store: &NodeStore, payloads: &[Digest], bytes: usize) -> Result<()> {
    let mut times = [1, 2, PAYLOADS].map(|count| (count, Vec::new()));
    for _ in 0..ROUNDS {
        for (count, times) in &mut times {
            let wanted: Vec<_> = payloads[..*count].iter().map(|digest| (*digest, None)).collect();
            for (digest, _) in &wanted {
                forget(store, digest)?;
            }
            let started = Instant::now();
            for answer in store.admit_all(&wanted, &mut |_| ()) {
                ensure!(answer?.bytes_hashed() == bytes as u64, "the payload was not hashed");
            }
            times.push(started.elapsed().as_secs_f64());
        }
    }
    let [(_, one), (_, two), (_, four)] = times;
    println!("first use, one payload: {:.2} GB/s", rate(bytes, median(one.clone())));
    for (name, count, times) in
        [("two payloads at once", 2, two), ("four, two on each of two cores", 4, four)]
    {
        println!(
            "first use, {name}: {:.2} GB/s (bar 6 on two cores)",
            rate(count * bytes, median(times.clone()))
        );
        print_speedup(&format!("{name} / one"), count, &one, &times);
    }
    Ok(())
}

/// Extents in memory: two streams in step on each of two cores, beside one after the other with `sha2`.
fn in_memory(contents: &[Vec<u8>]) {
    let bytes: usize = contents.iter().map(Vec::len).sum();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        ours.push(on_cores(contents, |pair| {
            let (mut a, mut b) = (Sha256::default(), Sha256::default());
            for (x, y) in pair[0].chunks(PIECE).zip(pair[1].chunks(PIECE)) {
                Sha256::update_two((&mut a, x), (&mut b, y));
            }
            black_box((a.finish(), b.finish()));
        }));
        theirs.push(on_cores(contents, |pair| {
            for content in pair {
                black_box(sha2::Sha256::digest(content));
            }
        }));
    }
    println!(
        "extents in memory, two in step on each of two cores: {:.2} GB/s (bar 6); one after the other with sha2: {:.2} GB/s",
        rate(bytes, median(ours.clone())),
        rate(bytes, median(theirs.clone()))
    );
    print_ratio("extents in step / one after the other", &theirs, &ours, 1.0);
}

/// One thread for every two.
fn on_cores(contents: &[Vec<u8>], act: impl Fn(&[Vec<u8>]) + Sync) -> f64 {
    let started = Instant::now();
    thread::scope(|scope| {
        for pair in contents.chunks(2) {
            scope.spawn(|| act(pair));
        }
    });
    started.elapsed().as_secs_f64()
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn second_use(store: &NodeStore, digest: &Digest) -> Result<()> {
    let record = fs::metadata(record_path(store, digest))?.len();
    let before = bytes_read()?;
    let own = bytes_read()? - before;
    let before = bytes_read()?;
    let mut times = Vec::with_capacity(ADMISSIONS);
    for _ in 0..ADMISSIONS {
        let started = Instant::now();
        let payload = store.admit(digest, None, &mut |_| ())?;
        times.push(started.elapsed().as_secs_f64() * 1e6);
        ensure!(payload.bytes_hashed() == 0, "the record did not match");
    }
    let read = bytes_read()? - before - own;
    times.sort_by(f64::total_cmp);
    println!(
        "second use: median {:.1} us, p99 {:.1} us, of {ADMISSIONS} (bar 200); {} bytes read each, record {record}, payload bytes {}",
        times[ADMISSIONS / 2],
        times[ADMISSIONS * 99 / 100],
        read as f64 / ADMISSIONS as f64,
        read.saturating_sub(record * ADMISSIONS as u64),
    );
    Ok(())
}

/// Bytes that this thread has read.
fn bytes_read() -> Result<u64> {
    let counters = fs::read_to_string("/proc/thread-self/io")?;
    let read = counters.lines().find_map(|line| line.strip_prefix("rchar: "));
    Ok(read.context("no rchar in /proc/thread-self/io")?.parse()?)
}

fn record_path(store: &NodeStore, digest: &Digest) -> PathBuf {
    PathBuf::from(format!("{}.coldsnap-validation.json", store.payload_path(digest).display()))
}

fn forget(store: &NodeStore, digest: &Digest) -> Result<()> {
    Ok(fs::remove_file(record_path(store, digest))?)
}

/// Seconds that a program takes for a file.
fn run(program: &str, arguments: &[&str], file: &Path) -> Result<f64> {
    let started = Instant::now();
    let status = Command::new(program).args(arguments).arg(file).stdout(Stdio::null()).status()?;
    ensure!(status.success(), "{program} failed");
    Ok(started.elapsed().as_secs_f64())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn rate(bytes: usize, seconds: f64) -> f64 {
    bytes as f64 / seconds / 1e9
}

/// How many times as fast as the denominator.
fn print_ratio(name: &str, denominator: &[f64], ours: &[f64], bar: f64) {
    let ratios: Vec<f64> = denominator.iter().zip(ours).map(|(theirs, ours)| theirs / ours).collect();
    print_line(name, ratios, &format!("bar {bar}"));
}

/// How many times the rate of one.
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn print_speedup(name: &str, count: usize, one: &[f64], times: &[f64]) {
    let ratios = one.iter().zip(times).map(|(one, time)| count as f64 * one / time).collect();
    print_line(name, ratios, "rate");
}

fn print_line(name: &str, ratios: Vec<f64>, remark: &str) {
    let smallest = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let largest = ratios.iter().copied().fold(0.0, f64::max);
    println!("  {name}: {:.2} (min {smallest:.2}, max {largest:.2}; {remark})", median(ratios));
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
