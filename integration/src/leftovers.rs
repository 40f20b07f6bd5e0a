//! What a container may leave behind on a node, and the check that it did not.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::ctr::NAMESPACE;

/// Directories that are empty, or absent, while no container exists: run-time state of runc, bundles and sockets of shims, leases of payloads,
/// captures in progress.
const EMPTY_DIRECTORIES: [&str; 6] = [
    "/run/containerd/runc/default",
    "/run/containerd/io.containerd.runtime.v2.task/default",
    "/run/containerd/s",
    "/run/coldsnap/runc/default",
    "/var/lib/coldsnap/leases",
    "/var/lib/coldsnap/captures",
];

/// Everything that containers have on the node at one moment, as lines a person can read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Leftovers(BTreeSet<String>);

impl Leftovers {
    /// Looks at mounts, cgroups, state directories and shim processes.
    pub fn now() -> Result<Self> {
        let mut found = BTreeSet::new();
        found.extend(mounts()?.into_iter().map(|target| format!("mount {target}")));
        found.extend(cgroups()?.into_iter().map(|path| format!("cgroup {}", path.display())));
        for directory in EMPTY_DIRECTORIES {
            found.extend(
                entries(Path::new(directory))?.into_iter().map(|path| format!("state {}", path.display())),
            );
        }
        found.extend(shims()?.into_iter().map(|(pid, name)| format!("process {pid} {name}")));
        Ok(Self(found))
    }

    /// What is here and was not in `before`.
    pub fn since(&self, before: &Self) -> Vec<String> {
        self.0.difference(&before.0).cloned().collect()
    }
}

/// Fails, naming each, if anything is on the node that was not there `before`. What containerd and shims do after they answered gets ten
/// seconds: containerd collects removed snapshots, and with them their leases, at a pace that it measures itself.
pub fn assert_clean(before: &Leftovers) -> Result<()> {
    let mut left = Vec::new();
    for _ in 0..1000 {
        left = Leftovers::now()?.since(before);
        if left.is_empty() {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    bail!("left behind on the node:\n  {}", left.join("\n  "))
}

/// Removes what an aborted test left, by force: processes, then mounts, cgroups and state. Errors are for the next test's check to find.
pub fn clear(before: &Leftovers) {
    for (pid, _) in shims().unwrap_or_default() {
        kill(pid);
    }
    for cgroup in cgroups().unwrap_or_default() {
        for pid in fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default().lines() {
            if let Ok(pid) = pid.parse() {
                kill(pid);
            }
        }
    }
    std::thread::sleep(std::time::Duration::from_millis(50));
    let baseline = |target: &String| before.0.contains(&format!("mount {target}"));
    for target in mounts().unwrap_or_default().into_iter().rev().filter(|target| !baseline(target)) {
        let _ = rustix::mount::unmount(target, rustix::mount::UnmountFlags::DETACH);
    }
    for cgroup in cgroups().unwrap_or_default().into_iter().rev() {
        let _ = fs::remove_dir(cgroup);
    }
    for directory in ["/run/containerd", "/run/coldsnap"] {
        let _ = fs::remove_dir_all(directory);
    }
}

fn kill(pid: i32) {
    if let Some(pid) = rustix::process::Pid::from_raw(pid) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Mount points in the order in which they were mounted.
fn mounts() -> Result<Vec<String>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("cannot read the mounts")?;
    Ok(table.lines().filter_map(|line| line.split(' ').nth(4)).map(str::to_owned).collect())
}

/// The groups of the tests' containers in every hierarchy, parents first.
fn cgroups() -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut parents = vec![PathBuf::from("/sys/fs/cgroup")];
    parents.extend(entries(Path::new("/sys/fs/cgroup"))?);
    for parent in parents {
        walk(&parent.join(NAMESPACE), &mut found)?;
    }
    Ok(found)
}

fn walk(group: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in entries(group)? {
        if entry.is_dir() {
            found.push(entry.clone());
            walk(&entry, found)?;
        }
    }
    Ok(())
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    match fs::read_dir(directory) {
        Ok(listing) => listing.map(|entry| Ok(entry?.path())).collect(),
        Err(error)
            if matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) =>
        {
            Ok(Vec::new())
        }
        Err(error) => Err(error).with_context(|| format!("cannot list {}", directory.display())),
    }
}

/// Process id and name of every shim that lives.
pub fn shims() -> Result<Vec<(i32, String)>> {
    let mut found = Vec::new();
    for entry in entries(Path::new("/proc"))? {
        let Some(pid) = entry.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok())
        else {
            continue;
        };
        // A process that is gone or a zombie has no command line.
        let line = fs::read(entry.join("cmdline")).unwrap_or_default();
        let program =
            String::from_utf8_lossy(line.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned();
        if program.contains("containerd-shim-") {
            found.push((pid, program));
        }
    }
    Ok(found)
}
