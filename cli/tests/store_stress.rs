//! 16 processes stage, lease, verify and evict over 8 digests while they are killed at random. Whoever holds a lease
//! has its payload, the very file with every byte, and afterwards the store is consistent.
//!
//! Five seconds by default; `COLDSNAP_STRESS_SECONDS` says how long (`make stress`: 60).

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::env;
use std::fs::{self, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use coldsnap::digest::Digest;
use coldsnap::store::{
    AdmitError, AdmittedPayload, Eviction, NodeStore, Staging, StoreError, Watermark, Watermarks,
};
use serde_json::Value;

const PROCESSES: usize = 16;
const DIGESTS: usize = 8;
const TEST: &str = "killed_processes_leave_the_store_consistent";
const CHILD: &str = "COLDSNAP_STRESS_CHILD_DIRECTORY";

/// xorshift
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

/// The payloads: 256 KiB to a little more than 1 MiB, so that kills meet every step of a staging.
fn payloads() -> Vec<(Digest, Vec<u8>)> {
    let payload = |n: usize| {
        let mut random = Random(0x9e37_79b9_7f4a_7c15 + n as u64);
        let size = (256 << 10) * (1 + n % 4) + 4096 * n;
        let bytes: Vec<u8> = (0..size / 8).flat_map(|_| random.below(u64::MAX).to_le_bytes()).collect();
        (Digest::of(&bytes), bytes)
    };
    (0..DIGESTS).map(payload).collect()
}

/// Where events are counted: one byte per event, so that a kill loses none.
struct Counts(PathBuf);

impl Counts {
    fn add(&self, event: &str, n: usize) {
        let mut file = OpenOptions::new().create(true).append(true).open(self.0.join(event)).unwrap();
        file.write_all(&vec![b'.'; n]).unwrap();
    }

    fn get(&self, event: &str) -> u64 {
        fs::metadata(self.0.join(event)).map_or(0, |m| m.len())
    }
}

fn open_store(directory: &Path) -> NodeStore {
    NodeStore::open(directory.join("store")).unwrap().with_reserve(0)
}

fn owner(pid: u32) -> String {
    format!("stress/{pid}")
}

/// Works until it is killed. A violation of a promise is a panic, which the parent sees.
fn child(directory: &Path) {
    let parent_dies = rustix::process::Signal::KILL;
    rustix::process::set_parent_process_death_signal(Some(parent_dies)).unwrap();
    let (store, payloads) = (open_store(directory), payloads());
    let counts = Counts(directory.join("counts"));
    let mut random = Random(0x2545_f491_4f6c_dd1d ^ (u64::from(std::process::id()) << 20));
    let total: u64 = payloads.iter().map(|(_, bytes)| bytes.len() as u64).sum();
    let marks = Watermarks::new(Watermark::Bytes(total * 2 / 5), Watermark::Bytes(total / 5)).unwrap();
    loop {
        let (digest, bytes) = &payloads[usize::try_from(random.below(DIGESTS as u64)).unwrap()];
        let payload = stage(&store, digest, bytes, &mut random, &counts);
        match store.lease(&payload, &owner(std::process::id())) {
            Ok(()) => {
                counts.add("leased", 1);
                for _ in 0..=random.below(2) {
                    check(&store, &payload, bytes);
                    counts.add("verified", 1);
                    sleep(Duration::from_millis(random.below(20)));
                }
                check(&store, &payload, bytes);
                store.release(&owner(std::process::id())).unwrap();
            }
            Err(StoreError::PayloadGone { .. }) => counts.add("evicted before the lease", 1),
            Err(error) => panic!("{error}"),
        }
        match random.below(4) {
            0 => {
                let evicted = store.evict(&Eviction::Watermarks(marks), false).unwrap();
                assert!(evicted.failures.is_empty(), "{evicted:?}");
                counts.add("evicted", evicted.payloads.len());
            }
            1 => counts.add("swept", store.sweep().unwrap()),
            // Costs the next user a verification.
            2 => {
                for mode in [0o400, 0o444] {
                    // It may be evicted.
                    let _ = fs::set_permissions(store.payload_path(digest), Permissions::from_mode(mode));
                }
            }
            _ => sleep(Duration::from_millis(random.below(40))),
        }
    }
}

fn stage(
    store: &NodeStore,
    digest: &Digest,
    bytes: &[u8],
    random: &mut Random,
    counts: &Counts,
) -> AdmittedPayload {
    loop {
        let staging = match store.stage(digest, bytes.len() as u64, &mut |_| ()) {
            // chmod and eviction do not ask.
            Err(StoreError::Admit(AdmitError::Changed { .. })) => continue,
            result => result.unwrap(),
        };
        let mut staged = match staging {
            Staging::Present(payload) => return payload,
            Staging::Needed(staged) => staged,
        };
        if staged.resumed() > 0 {
            counts.add("taken over", 1);
        }
        let start = usize::try_from(staged.written()).unwrap();
        for chunk in bytes[start..].chunks(100_000) {
            staged.append(chunk).unwrap();
            if random.below(8) == 0 {
                sleep(Duration::from_millis(1));
            }
        }
        match staged.commit() {
            Ok(payload) => {
                counts.add("staged", 1);
                return payload;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// What a lease promises: the file at the payload's path is the one that was leased, with every byte.
fn check(store: &NodeStore, payload: &AdmittedPayload, expected: &[u8]) {
    let path = store.payload_path(payload.digest());
    let inode = fs::metadata(&path).map(|m| m.ino()).unwrap_or_else(|e| panic!("leased and gone: {e}"));
    assert_eq!(inode, payload.blob_stat().inode, "leased and replaced");
    assert!(fs::read(&path).unwrap() == expected, "leased and changed");
}

/// The processes; none outlives the test.
struct Processes {
    directory: PathBuf,
    running: Vec<Child>,
}

impl Processes {
    fn start(directory: &Path) -> Self {
        let running = (0..PROCESSES).map(|_| spawn(directory)).collect();
        Self { directory: directory.to_owned(), running }
    }

    /// Kills one and starts another in its place. The lease that it had is given back as its manager would do.
    fn replace(&mut self, n: usize, store: &NodeStore) {
        let pid = kill(&mut self.running[n]);
        store.release(&owner(pid)).unwrap();
        self.running[n] = spawn(&self.directory);
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn spawn(directory: &Path) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", TEST, "--nocapture"])
        .env(CHILD, directory)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Fails when it has ended by itself: then it has found a broken promise, and said so on standard error.
fn kill(child: &mut Child) -> u32 {
    child.kill().unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.signal(), Some(9), "a process ended by itself: {status}");
    child.id()
}

fn fsck(store: &NodeStore, repair: bool) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coldsnap"));
    command.args(["--json", "payload", "fsck", "--full", "--store"]).arg(store.root());
    if repair {
        command.arg("--repair");
    }
    let output = command.output().unwrap();
    let report = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{report}");
    serde_json::from_str(&report).unwrap()
}

fn kinds(report: &Value) -> Vec<&str> {
    report["findings"].as_array().unwrap().iter().map(|row| row["kind"].as_str().unwrap()).collect()
}

#[test]
fn killed_processes_leave_the_store_consistent() {
    if let Some(directory) = env::var_os(CHILD) {
        return child(Path::new(&directory));
    }
    let seconds = env::var("COLDSNAP_STRESS_SECONDS").map_or(5, |text| text.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let (store, payloads) = (open_store(dir.path()), payloads());
    let counts = Counts(dir.path().join("counts"));
    fs::create_dir(&counts.0).unwrap();
    let mut random = Random(0x1234_5678_9abc_def1);
    let (pinned, bytes) = &payloads[0];
    let pinned_inode = stage(&store, pinned, bytes, &mut random, &counts).blob_stat().inode;
    store.pin(pinned, Some("stays through all of this")).unwrap();

    let mut processes = Processes::start(dir.path());
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut killed = 0;
    while Instant::now() < end {
        sleep(Duration::from_millis(5 + random.below(60)));
        processes.replace(usize::try_from(random.below(PROCESSES as u64)).unwrap(), &store);
        killed += 1;
    }
    let last: Vec<u32> = processes.running.iter_mut().map(kill).collect();
    drop(processes);
    killed += last.len();

    // The last ones died with leases: those hold.
    let leases = store.leases().unwrap().len();
    let found = fsck(&store, false);
    let garbage = ["StaleTemporary", "Interrupted", "Leftover", "PackMode"];
    assert!(kinds(&found).iter().all(|kind| garbage.contains(kind)), "{found}");
    for pid in last {
        store.release(&owner(pid)).unwrap();
    }
    fsck(&store, true);
    let clean = fsck(&store, false);
    assert!(kinds(&clean).iter().all(|kind| *kind == "Interrupted"), "{clean}");
    assert_eq!((&clean["leases"], &clean["pins"]), (&0.into(), &1.into()));
    assert_eq!(fs::metadata(store.payload_path(pinned)).unwrap().ino(), pinned_inode, "pinned and replaced");

    // What was left is used or removed by whoever needs the payload next.
    for (digest, bytes) in &payloads {
        stage(&store, digest, bytes, &mut random, &counts);
    }
    let end_state = fsck(&store, false);
    assert_eq!((kinds(&end_state), &end_state["payloads"]), (Vec::new(), &DIGESTS.into()), "{end_state}");

    let events =
        ["staged", "taken over", "leased", "verified", "evicted", "evicted before the lease", "swept"];
    let text: Vec<_> = events.iter().map(|event| format!("{} {event}", counts.get(event))).collect();
    println!("{seconds} s: {killed} killed, {leases} leases left by the last, {}", text.join(", "));
    for event in ["staged", "leased", "verified", "evicted"] {
        assert!(counts.get(event) > 0, "nothing was {event}");
    }
}
