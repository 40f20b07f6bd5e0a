//! `ctr`, containerd's own command line: the tests act on containers only as any client would.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, anyhow, bail};

use crate::process;

/// The containerd namespace of every test; it is also the directory of their cgroups.
pub const NAMESPACE: &str = "default";

/// Which runtime and which snapshotter start a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plugins {
    /// Runtime name, for example `io.containerd.runc.v2`.
    pub runtime: &'static str,
    /// Snapshotter name, for example `overlayfs`.
    pub snapshotter: &'static str,
}

/// What this repository builds.
pub const COLDSNAP: Plugins = Plugins { runtime: "io.containerd.coldsnap.v1", snapshotter: "coldsnap" };
/// What containerd brings: the peer of every measurement, and the oracle of tests that run on both.
pub const STOCK: Plugins = Plugins { runtime: "io.containerd.runc.v2", snapshotter: "overlayfs" };

/// A `ctr run`: what to start, and how.
#[derive(Debug, Clone)]
pub struct Launch<'a> {
    /// Runtime and snapshotter.
    pub plugins: Plugins,
    /// Image reference.
    pub image: &'a str,
    /// Container id.
    pub id: &'a str,
    /// Further flags of `ctr run`, for example `--mount`.
    pub flags: Vec<String>,
    /// Arguments instead of the image's own command; empty for the image's.
    pub command: Vec<String>,
}

impl<'a> Launch<'a> {
    /// A container `id` from `image`, with no further flags.
    pub fn new(plugins: Plugins, image: &'a str, id: &'a str) -> Self {
        Self { plugins, image, id, flags: Vec::new(), command: Vec::new() }
    }

    /// Adds flags of `ctr run`.
    pub fn flags<S: Into<String>>(mut self, flags: impl IntoIterator<Item = S>) -> Self {
        self.flags.extend(flags.into_iter().map(Into::into));
        self
    }

    /// Adds a read-only bind mount of a host directory or file.
    pub fn read_only_bind(self, source: &Path, target: &str) -> Self {
        let mount = format!("type=bind,src={},dst={target},options=rbind:ro", source.display());
        self.flags(["--mount".to_owned(), mount])
    }

    /// Replaces the image's command.
    pub fn command<S: Into<String>>(mut self, words: impl IntoIterator<Item = S>) -> Self {
        self.command = words.into_iter().map(Into::into).collect();
        self
    }

    /// The whole command line after `ctr`.
    pub fn arguments(&self, detached: bool) -> Vec<String> {
        let mut words = vec!["run".to_owned()];
        words.extend(detached.then(|| "-d".to_owned()));
        words.extend(
            ["--runtime", self.plugins.runtime, "--snapshotter", self.plugins.snapshotter].map(str::to_owned),
        );
        words.extend(self.flags.iter().cloned());
        words.extend([self.image.to_owned(), self.id.to_owned()]);
        words.extend(self.command.iter().cloned());
        words
    }
}

/// A row of `ctr tasks list`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// Container id.
    pub id: String,
    /// Process id of its first process, in the node's pid namespace.
    pub pid: u32,
    /// `RUNNING`, `PAUSED`, `STOPPED`, ...
    pub status: String,
}

/// The client of one containerd, by the address of its socket.
#[derive(Debug, Clone)]
pub struct Ctr {
    address: PathBuf,
    state: PathBuf,
}

impl Ctr {
    /// A client of the containerd that listens at `address` and keeps its run-time state in `state`.
    pub fn new(address: impl Into<PathBuf>, state: impl Into<PathBuf>) -> Self {
        Self { address: address.into(), state: state.into() }
    }

    /// `ctr` with `arguments`, not yet started.
    pub fn command<S: AsRef<std::ffi::OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new("ctr");
        command.arg("--address").arg(&self.address).args(["--namespace", NAMESPACE]).args(arguments);
        command
    }

    /// Runs `ctr` and returns its standard output.
    ///
    /// # Errors
    /// A status other than 0, with everything `ctr` wrote.
    pub fn run<S: AsRef<std::ffi::OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Result<String> {
        process::run(&mut self.command(arguments))
    }

    /// Runs `ctr` and returns whatever came of it.
    pub fn output<S: AsRef<std::ffi::OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = S>,
    ) -> Result<Output> {
        process::output(&mut self.command(arguments))
    }

    /// `ctr run -d`.
    pub fn start(&self, launch: &Launch<'_>) -> Result<()> {
        self.run(launch.arguments(true)).map(drop)
    }

    /// Imports an image archive and unpacks it with `snapshotter`.
    pub fn import(&self, archive: &Path, snapshotter: &str) -> Result<()> {
        let archive = archive.to_str().context("the archive's path is not UTF-8")?;
        self.run(["images", "import", "--local", "--snapshotter", snapshotter, archive]).map(drop)
    }

    /// Every task. `ctr` has no structured output for this.
    pub fn tasks(&self) -> Result<Vec<Task>> {
        let table = self.run(["tasks", "list"])?;
        let row = |line: &str| -> Result<Task> {
            match line.split_whitespace().collect::<Vec<_>>()[..] {
                [id, pid, status] => {
                    Ok(Task { id: id.to_owned(), pid: pid.parse()?, status: status.to_owned() })
                }
                _ => bail!("cannot understand this row of `ctr tasks list`: {line:?}"),
            }
        };
        table.lines().skip(1).map(row).collect()
    }

    /// The task of container `id`.
    pub fn task(&self, id: &str) -> Result<Task> {
        self.tasks()?
            .into_iter()
            .find(|task| task.id == id)
            .ok_or_else(|| anyhow!("container {id} has no task"))
    }

    /// Every process of container `id`, as its shim answers.
    pub fn pids(&self, id: &str) -> Result<Vec<u32>> {
        let table = self.run(["tasks", "ps", id])?;
        let pid = |line: &str| line.split_whitespace().next().and_then(|word| word.parse().ok());
        let row =
            |line| pid(line).ok_or_else(|| anyhow!("cannot understand this row of `ctr tasks ps`: {line:?}"));
        table.lines().skip(1).map(row).collect()
    }

    /// The directory that containerd and the shim share for container `id`.
    pub fn bundle(&self, id: &str) -> PathBuf {
        self.state.join("io.containerd.runtime.v2.task").join(NAMESPACE).join(id)
    }

    /// The first process of a started container, from the pid file in its bundle: no round trip stands between a start and a first request.
    pub fn init_pid(&self, id: &str) -> Result<u32> {
        let path = self.bundle(id).join("init.pid");
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        text.trim().parse().with_context(|| format!("{} holds {text:?}, not a process id", path.display()))
    }

    /// Runs a command in container `id` and returns its standard output.
    pub fn exec(&self, id: &str, command: &[&str]) -> Result<String> {
        self.run(self.exec_arguments(id, command))
    }

    /// The `ctr` arguments of [`Ctr::exec`], for callers that want the exit status.
    pub fn exec_arguments(&self, id: &str, command: &[&str]) -> Vec<String> {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let exec_id = format!("exec-{}", NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        let words = ["tasks", "exec", "--exec-id", &exec_id, id].into_iter().chain(command.iter().copied());
        words.map(str::to_owned).collect()
    }

    /// Sends `signal` to the first process of container `id`.
    pub fn kill(&self, id: &str, signal: &str) -> Result<()> {
        self.run(["tasks", "kill", "--signal", signal, id]).map(drop)
    }

    /// Removes a stopped task and returns its exit status.
    pub fn remove_task(&self, id: &str) -> Result<u32> {
        let out = self.output(["tasks", "rm", id])?;
        let said = String::from_utf8_lossy(&out.stderr);
        // ctr has no other place for it than a warning.
        match said.rsplit_once("exit with non-zero exit code ") {
            Some((_, status)) => status
                .trim_end()
                .trim_end_matches('"')
                .parse()
                .with_context(|| format!("cannot understand {said:?}")),
            None if out.status.success() => Ok(0),
            None => bail!("cannot remove the task of container {id}: {said}"),
        }
    }

    /// Removes the task, killing it if it runs, and the container with its snapshot.
    pub fn remove(&self, id: &str) -> Result<()> {
        let out = self.output(["tasks", "rm", "--force", id])?;
        let said = String::from_utf8_lossy(&out.stderr);
        if !out.status.success() && !said.contains("not found") {
            bail!("cannot remove the task of container {id}: {said}");
        }
        self.run(["containers", "rm", id]).map(drop)
    }

    /// Removes every container.
    pub fn remove_all(&self) -> Result<()> {
        for id in self.run(["containers", "list", "--quiet"])?.lines() {
            self.remove(id)?;
        }
        Ok(())
    }
}
