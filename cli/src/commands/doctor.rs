//! `coldsnap doctor`: what this node lacks for captures and restores, and how to get it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use coldsnap::store::NodeStore;
use rustix::fs::statfs;
use serde::Serialize;

use crate::containerd::Containerd;
use crate::node::Node;
use crate::output::{CliError, Output};
use crate::tools;

const TMPFS_MAGIC: u64 = 0x0102_1994;
const SHIM: &str = "containerd-shim-coldsnap-v1";
/// Free space below which captures are likely to fail: the store keeps 1 GiB in reserve.
const LITTLE_SPACE: u64 = 4 << 30;

/// Check this node: kernel, CRIU, runc, containerd, plugin registration, file systems.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// containerd's socket.
    #[arg(long, value_name = "SOCKET", default_value = "/run/containerd/containerd.sock")]
    address: PathBuf,
}

/// How a check went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it must be.
    Ok,
    /// Works, with a disadvantage.
    Warning,
    /// Captures or restores do not work.
    Failed,
}

/// One check.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it went.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// What helps; empty when all is well.
    pub help: String,
}

impl Check {
    fn new(name: &'static str, status: Status, found: impl Into<String>, help: &str) -> Self {
        let help = if status == Status::Ok { "" } else { help };
        Self { name, status, found: found.into(), help: help.to_owned() }
    }
}

/// Runs the command.
///
/// # Errors
/// `Doctor` when a check failed; the checks are printed all the same.
pub fn run(args: Args, node: &Node, output: &Output) -> Result<(), CliError> {
    let runtime = tokio::runtime::Runtime::new().map_err(|e| CliError::new("Io", e))?;
    let checks = runtime.block_on(checks(&args, node.root()));
    let failed = checks.iter().filter(|c| c.status == Status::Failed).count();
    output.result(&checks, || text(&checks))?;
    if failed == 0 { Ok(()) } else { Err(CliError::in_result("Doctor", format!("{failed} checks failed"))) }
}

fn text(checks: &[Check]) -> String {
    let line = |check: &Check| {
        let mark = match check.status {
            Status::Ok => "ok  ",
            Status::Warning => "warn",
            Status::Failed => "FAIL",
        };
        let help = if check.help.is_empty() { String::new() } else { format!("\n       {}", check.help) };
        format!("{mark}   {:<14}{}{help}", check.name, check.found)
    };
    checks.iter().map(line).collect::<Vec<_>>().join("\n")
}

async fn checks(args: &Args, store: &Path) -> Vec<Check> {
    let mut checks =
        vec![kernel(), criu(), runc(), network_lock(), run_is_tmpfs(), cgroups(), shim(), node_store(store)];
    checks.extend(containerd(&args.address).await);
    checks
}

fn kernel() -> Check {
    const HELP: &str = "use a kernel of 5.9 or newer (CAP_CHECKPOINT_RESTORE, openat2)";
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let status = if version >= (5, 9) { Status::Ok } else { Status::Failed };
    Check::new("kernel", status, release, HELP)
}

fn criu() -> Check {
    const INSTALL: &str = "install CRIU 4.0 or newer (Debian: package criu of trixie or forky)";
    let Some(version) = tools::version("criu") else {
        return Check::new("criu", Status::Failed, "not found in PATH", INSTALL);
    };
    match Command::new("criu").arg("check").output() {
        Ok(output) if output.status.success() => {
            Check::new("criu", Status::Ok, format!("{version}, check passed"), "")
        }
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            let line = text.lines().find(|l| l.contains("Error")).unwrap_or("criu check failed").to_owned();
            Check::new("criu", Status::Failed, format!("{version}: {line}"), INSTALL)
        }
        Err(error) => Check::new("criu", Status::Failed, error.to_string(), INSTALL),
    }
}

fn runc() -> Check {
    const HELP: &str = "install runc 1.2 or newer, built with checkpoint support";
    let Some(version) = tools::version("runc") else {
        return Check::new("runc", Status::Failed, "not found in PATH", HELP);
    };
    let features = Command::new("runc").arg("features").output().ok();
    let features = features.and_then(|o| serde_json::from_slice::<serde_json::Value>(&o.stdout).ok());
    let enabled = features
        .and_then(|f| f.pointer("/annotations/org.opencontainers.runc.checkpoint.enabled").cloned())
        .is_some_and(|v| v == "true");
    let status = if enabled { Status::Ok } else { Status::Failed };
    let found = if enabled { version } else { format!("{version}, without checkpoint support") };
    Check::new("runc", status, found, HELP)
}

fn network_lock() -> Check {
    let found: Vec<_> = ["iptables-restore", "nft"].into_iter().filter(|p| in_path(p).is_some()).collect();
    let status = if found.is_empty() { Status::Warning } else { Status::Ok };
    let text = if found.is_empty() { "neither iptables nor nft".to_owned() } else { found.join(", ") };
    Check::new(
        "network lock",
        status,
        text,
        "install iptables: CRIU needs it to dump established TCP connections",
    )
}

fn run_is_tmpfs() -> Check {
    let tmpfs = statfs("/run").is_ok_and(|s| u64::try_from(s.f_type).ok() == Some(TMPFS_MAGIC));
    let (status, found) = if tmpfs { (Status::Ok, "tmpfs") } else { (Status::Warning, "not a tmpfs") };
    Check::new(
        "/run",
        status,
        found,
        "mount a tmpfs on /run: CRIU keeps its kernel probes there and else repeats them at each restore (15 ms)",
    )
}

fn cgroups() -> Check {
    let unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let hybrid = Path::new("/sys/fs/cgroup/unified").exists();
    let legacy = Path::new("/sys/fs/cgroup/memory").exists();
    let (status, found) = match (unified, hybrid, legacy) {
        (true, ..) => (Status::Ok, "version 2"),
        (false, true, _) => (Status::Ok, "version 1 with version 2 beside it (hybrid)"),
        (false, false, true) => (Status::Ok, "version 1"),
        _ => (Status::Failed, "none mounted"),
    };
    Check::new("cgroups", status, found, "mount the cgroup file system on /sys/fs/cgroup")
}

fn shim() -> Check {
    match in_path(SHIM) {
        Some(path) => Check::new("shim", Status::Ok, path.display().to_string(), ""),
        None => Check::new(
            "shim",
            Status::Failed,
            format!("{SHIM} not found in PATH"),
            "copy it to /usr/local/bin, or wherever containerd's PATH leads",
        ),
    }
}

fn node_store(root: &Path) -> Check {
    const HELP: &str = "give the node store a directory on a local file system with free space (--store)";
    if let Err(error) = NodeStore::open(root) {
        return Check::new("node store", Status::Failed, error.to_string(), HELP);
    }
    match statfs(root) {
        Ok(stat) => {
            let free = stat.f_bavail.saturating_mul(u64::try_from(stat.f_bsize).unwrap_or(0));
            let tmpfs = u64::try_from(stat.f_type).ok() == Some(TMPFS_MAGIC);
            let found =
                format!("{}, {} MiB free{}", root.display(), free >> 20, if tmpfs { ", tmpfs" } else { "" });
            let status = if free < LITTLE_SPACE || tmpfs { Status::Warning } else { Status::Ok };
            Check::new("node store", status, found, HELP)
        }
        Err(error) => Check::new("node store", Status::Failed, format!("{}: {error}", root.display()), HELP),
    }
}

async fn containerd(address: &Path) -> Vec<Check> {
    const START: &str = "install containerd 2.0 or newer and start it";
    const REGISTER: &str =
        "install config/containerd/50-coldsnap.toml, start coldsnap-snapshotter, restart containerd";
    let containerd = match Containerd::connect(address, "default").await {
        Ok(containerd) => containerd,
        Err(error) => return vec![Check::new("containerd", Status::Failed, error.to_string(), START)],
    };
    let version = match containerd.version().await {
        Ok(version) => version,
        Err(error) => return vec![Check::new("containerd", Status::Failed, error.to_string(), START)],
    };
    let major: u32 =
        version.trim_start_matches('v').split('.').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    let status = if major >= 2 { Status::Ok } else { Status::Failed };
    let mut checks = vec![Check::new("containerd", status, version, START)];
    checks.push(match containerd.snapshotter_state("coldsnap").await {
        Ok(Some(None)) => match containerd.snapshotter_answers("coldsnap").await {
            Ok(()) => Check::new("snapshotter", Status::Ok, "registered and answering", ""),
            Err(error) => Check::new("snapshotter", Status::Failed, error.to_string(), REGISTER),
        },
        Ok(Some(Some(error))) => Check::new("snapshotter", Status::Failed, error, REGISTER),
        Ok(None) => Check::new("snapshotter", Status::Failed, "not registered with containerd", REGISTER),
        Err(error) => Check::new("snapshotter", Status::Failed, error.to_string(), REGISTER),
    });
    checks
}

fn in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(|p| fs::metadata(p).is_ok_and(|m| m.is_file()))
}
