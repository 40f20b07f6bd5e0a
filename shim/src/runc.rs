//! The runtime binary (`runc` or one that takes the same arguments), one method per command.
//!
//! Messages are taken from the runtime's JSON log, which goes to a memory file: nothing is left in the bundle and
//! concurrent commands do not read each other's errors.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, memfd_create};
use serde::Deserialize;
use thiserror::Error;

use crate::reaper::Reaper;

/// The binary that is used when the options name none.
pub const DEFAULT_BINARY: &str = "runc";
/// Parent of the runtime's state directories, one per containerd namespace, when the options name none.
pub const DEFAULT_ROOT: &str = "/run/containerd/runc";

/// A command of the runtime failed.
#[derive(Debug, Error)]
pub enum RuncError {
    /// The binary did not start.
    #[error("cannot run the OCI runtime {} {operation}: {source}", .binary.display())]
    Spawn {
        /// The binary.
        binary: PathBuf,
        /// The runtime's command.
        operation: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The binary ran and reported a failure.
    #[error("OCI runtime {operation} failed: {message}")]
    Failed {
        /// The runtime's command.
        operation: &'static str,
        /// The runtime's own words, or its exit status when it said nothing.
        message: String,
    },
    /// The binary succeeded but what it should have left is unusable.
    #[error("OCI runtime {operation}: cannot use {what}: {found}")]
    Result {
        /// The runtime's command.
        operation: &'static str,
        /// What should be there.
        what: String,
        /// What was found instead.
        found: String,
    },
}

impl RuncError {
    /// The runtime says that it knows no such container.
    pub fn no_such_container(&self) -> bool {
        self.message_contains("does not exist")
    }

    /// The runtime says that the process it should act on has ended.
    pub fn already_finished(&self) -> bool {
        ["os: process already finished", "container not running", "no such process"]
            .iter()
            .any(|text| self.message_contains(text))
    }

    fn message_contains(&self, text: &str) -> bool {
        matches!(self, Self::Failed { message, .. } if message.to_lowercase().contains(text))
    }
}

/// The three descriptors a container's process gets; `/dev/null` where there is none.
#[derive(Debug, Default)]
pub struct ChildStdio {
    /// Descriptor 0.
    pub stdin: Option<OwnedFd>,
    /// Descriptor 1.
    pub stdout: Option<OwnedFd>,
    /// Descriptor 2.
    pub stderr: Option<OwnedFd>,
}

/// What `create` and `restore` have in common.
#[derive(Debug)]
pub struct NewContainer<'a> {
    /// Where the runtime writes the pid of the container's first process.
    pub pid_file: &'a Path,
    /// Socket that receives the terminal's master side.
    pub console_socket: Option<&'a Path>,
    /// Use `MS_MOVE` instead of `pivot_root`.
    pub no_pivot: bool,
    /// Stay in the caller's session keyring.
    pub no_new_keyring: bool,
}

/// Arguments of `runc restore` beyond [`NewContainer`].
#[derive(Debug)]
pub struct RestoreImages<'a> {
    /// Directory of the CRIU images.
    pub images: &'a Path,
    /// Directory for CRIU's log and temporary files.
    pub work: &'a Path,
    /// Directory of the parent images of an incremental checkpoint.
    pub parent: Option<&'a Path>,
}

/// Arguments of `runc checkpoint`.
#[derive(Debug)]
pub struct Checkpoint<'a> {
    /// Directory that receives the CRIU images.
    pub images: &'a Path,
    /// Directory for CRIU's log and temporary files.
    pub work: &'a Path,
    /// Let the container run on.
    pub leave_running: bool,
    /// Keep established TCP connections.
    pub tcp_established: bool,
    /// Allow Unix sockets whose peer is outside of the container.
    pub external_unix_sockets: bool,
    /// Allow a terminal.
    pub shell_job: bool,
    /// Allow file locks.
    pub file_locks: bool,
    /// Namespaces that are restored empty.
    pub empty_namespaces: &'a [String],
    /// `soft`, `full`, `strict`, `ignore`; empty for the runtime's default.
    pub cgroups_mode: &'a str,
}

/// The runtime binary with the settings that every command shares.
#[derive(Debug)]
pub struct Runc {
    binary: PathBuf,
    root: PathBuf,
    systemd_cgroup: bool,
    reaper: Arc<Reaper>,
}

impl Runc {
    /// `binary` and `root` may be empty: then the defaults are used. The state directory is `root/namespace`.
    pub fn new(binary: &str, root: &str, namespace: &str, systemd_cgroup: bool, reaper: Arc<Reaper>) -> Self {
        let binary = if binary.is_empty() { DEFAULT_BINARY } else { binary };
        let root = if root.is_empty() { DEFAULT_ROOT } else { root };
        Self { binary: binary.into(), root: Path::new(root).join(namespace), systemd_cgroup, reaper }
    }

    /// The binary.
    pub fn binary(&self) -> &Path {
        &self.binary
    }

    /// Where the runtime keeps what it knows about container `id`.
    pub fn state_directory(&self, id: &str) -> PathBuf {
        self.root.join(id)
    }

    /// Makes the container; its first process waits for [`Runc::start`].
    pub async fn create(
        &self,
        id: &str,
        bundle: &Path,
        new: &NewContainer<'_>,
        stdio: ChildStdio,
    ) -> Result<(), RuncError> {
        let mut call = Call::new("create");
        call.value("--bundle", bundle)
            .new_container(new)
            .flag_if(new.no_new_keyring, "--no-new-keyring")
            .arg(id);
        self.run(call, Some(stdio)).await.map(drop)
    }

    /// Lets the first process of a created container run.
    pub async fn start(&self, id: &str) -> Result<(), RuncError> {
        self.run(Call::with("start", &[id]), None).await.map(drop)
    }

    /// Sends a signal to the container's first process, or to all of its processes.
    pub async fn kill(&self, id: &str, signal: u32, all: bool) -> Result<(), RuncError> {
        let mut call = Call::new("kill");
        call.flag_if(all, "--all").arg(id).arg(signal.to_string());
        self.run(call, None).await.map(drop)
    }

    /// Removes the container's state and cgroups; `force` kills it first and accepts that there is none.
    pub async fn delete(&self, id: &str, force: bool) -> Result<(), RuncError> {
        let mut call = Call::new("delete");
        call.flag_if(force, "--force").arg(id);
        self.run(call, None).await.map(drop)
    }

    /// Freezes all processes of the container.
    pub async fn pause(&self, id: &str) -> Result<(), RuncError> {
        self.run(Call::with("pause", &[id]), None).await.map(drop)
    }

    /// Thaws all processes of the container.
    pub async fn resume(&self, id: &str) -> Result<(), RuncError> {
        self.run(Call::with("resume", &[id]), None).await.map(drop)
    }

    /// Runs the process of the OCI process description in file `process` inside the container.
    pub async fn exec(
        &self,
        id: &str,
        process: &Path,
        pid_file: &Path,
        console_socket: Option<&Path>,
        stdio: ChildStdio,
    ) -> Result<(), RuncError> {
        let mut call = Call::new("exec");
        call.value("--process", process).arg("--detach").value("--pid-file", pid_file);
        if let Some(socket) = console_socket {
            call.value("--console-socket", socket);
        }
        call.arg(id);
        self.run(call, Some(stdio)).await.map(drop)
    }

    /// Pids (as the shim sees them) of all processes of the container.
    pub async fn pids(&self, id: &str) -> Result<Vec<u32>, RuncError> {
        let output = self.run(Call::with("ps", &["--format", "json", id]), None).await?;
        // The runtime prints `null` when there is no process.
        let pids: Option<Vec<u32>> = serde_json::from_slice(&output).map_err(|error| RuncError::Result {
            operation: "ps",
            what: format!("its output {:?}", String::from_utf8_lossy(&output)),
            found: error.to_string(),
        })?;
        Ok(pids.unwrap_or_default())
    }

    /// Changes resource limits; the file `resources` holds an OCI `LinuxResources` document.
    pub async fn update(&self, id: &str, resources: &Path) -> Result<(), RuncError> {
        let mut call = Call::new("update");
        call.value("--resources", resources).arg(id);
        self.run(call, None).await.map(drop)
    }

    /// Writes CRIU images of the container.
    pub async fn checkpoint(&self, id: &str, options: &Checkpoint<'_>) -> Result<(), RuncError> {
        let mut call = Call::new("checkpoint");
        call.value("--image-path", options.images)
            .value("--work-path", options.work)
            .flag_if(options.leave_running, "--leave-running")
            .flag_if(options.tcp_established, "--tcp-established")
            .flag_if(options.external_unix_sockets, "--ext-unix-sk")
            .flag_if(options.shell_job, "--shell-job")
            .flag_if(options.file_locks, "--file-locks");
        for namespace in options.empty_namespaces {
            call.value("--empty-ns", namespace);
        }
        if !options.cgroups_mode.is_empty() {
            call.value("--manage-cgroups-mode", options.cgroups_mode);
        }
        call.arg(id);
        self.run(call, None).await.map(drop)
    }

    /// Makes a running container from CRIU images.
    pub async fn restore(
        &self,
        id: &str,
        bundle: &Path,
        new: &NewContainer<'_>,
        from: &RestoreImages<'_>,
        stdio: ChildStdio,
    ) -> Result<(), RuncError> {
        let mut call = Call::new("restore");
        call.arg("--detach")
            .arg("--no-subreaper")
            .value("--image-path", from.images)
            .value("--work-path", from.work);
        if let Some(parent) = from.parent {
            call.value("--parent-path", parent);
        }
        call.value("--bundle", bundle).new_container(new).arg(id);
        self.run(call, Some(stdio)).await.map(drop)
    }

    /// Runs one command to its end and answers its standard output, which is empty when `stdio` is given: then the
    /// descriptors belong to the container.
    async fn run(&self, call: Call, stdio: Option<ChildStdio>) -> Result<Vec<u8>, RuncError> {
        let operation = call.operation;
        let spawn_error = |source| RuncError::Spawn { binary: self.binary.clone(), operation, source };
        let log = memory_file("runtime-log").map_err(spawn_error)?;
        let output = memory_file("runtime-output").map_err(spawn_error)?;
        let messages = memory_file("runtime-messages").map_err(spawn_error)?;

        let mut command = Command::new(&self.binary);
        command.arg("--root").arg(&self.root).args(["--log-format", "json", "--log"]).arg(path_of(&log));
        if self.systemd_cgroup {
            command.arg("--systemd-cgroup");
        }
        command.arg(operation).args(&call.arguments);
        match stdio {
            Some(stdio) => command
                .stdin(or_null(stdio.stdin))
                .stdout(or_null(stdio.stdout))
                .stderr(or_null(stdio.stderr)),
            None => command
                .stdin(Stdio::null())
                .stdout(output.try_clone().map_err(spawn_error)?)
                .stderr(messages.try_clone().map_err(spawn_error)?),
        };
        let spawned = self.reaper.spawn(&mut command).map_err(spawn_error)?;
        // Closes the shim's copies of the container's descriptors.
        drop(command);
        let exit =
            spawned.exit.await.map_err(|_| spawn_error(io::Error::other("its exit status was lost")))?;
        if exit.status == 0 {
            return contents(output).map_err(spawn_error);
        }
        let message = last_error(&contents(log).unwrap_or_default())
            .or_else(|| last_line(&contents(messages).unwrap_or_default()))
            .unwrap_or_else(|| format!("exit status {}", exit.status));
        Err(RuncError::Failed { operation, message })
    }
}

/// A command of the runtime and its arguments.
#[derive(Debug)]
struct Call {
    operation: &'static str,
    arguments: Vec<OsString>,
}

impl Call {
    fn new(operation: &'static str) -> Self {
        Self { operation, arguments: Vec::new() }
    }

    fn with(operation: &'static str, arguments: &[&str]) -> Self {
        Self { operation, arguments: arguments.iter().map(OsString::from).collect() }
    }

    fn arg(&mut self, argument: impl AsRef<OsStr>) -> &mut Self {
        self.arguments.push(argument.as_ref().to_owned());
        self
    }

    fn flag_if(&mut self, wanted: bool, flag: &str) -> &mut Self {
        if wanted { self.arg(flag) } else { self }
    }

    fn value(&mut self, flag: &str, value: impl AsRef<OsStr>) -> &mut Self {
        self.arg(flag).arg(value)
    }

    fn new_container(&mut self, new: &NewContainer<'_>) -> &mut Self {
        self.value("--pid-file", new.pid_file).flag_if(new.no_pivot, "--no-pivot");
        if let Some(socket) = new.console_socket {
            self.value("--console-socket", socket);
        }
        self
    }
}

fn or_null(descriptor: Option<OwnedFd>) -> Stdio {
    descriptor.map_or_else(Stdio::null, Stdio::from)
}

/// An unnamed file in memory.
pub fn memory_file(name: &str) -> io::Result<File> {
    Ok(File::from(memfd_create(name, MemfdFlags::CLOEXEC)?))
}

/// A path under which another process of the same pid namespace can open the file.
fn path_of(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()))
}

/// What was written to such a file.
pub fn contents(mut file: File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The message of the last error entry of a JSON log.
fn last_error(log: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Entry {
        level: String,
        msg: String,
    }
    serde_json::Deserializer::from_slice(log)
        .into_iter::<Entry>()
        .map_while(Result::ok)
        .filter(|entry| entry.level == "error" || entry.level == "fatal")
        .last()
        .map(|entry| entry.msg.trim().to_owned())
}

fn last_line(text: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(text);
    text.lines().map(str::trim).rfind(|line| !line.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_error_of_a_log_is_the_message() {
        let log = br#"{"level":"warning","msg":"w","time":"t"}
{"level":"error","msg":"first","time":"t"}
{"level":"error","msg":"container not running\n","time":"t"}
{"level":"info","msg":"later","time":"t"}
cut off"#;
        assert_eq!(last_error(log).as_deref(), Some("container not running"));
        assert_eq!(last_error(b""), None);
        assert_eq!(last_line(b"a\nb\n\n").as_deref(), Some("b"));
    }

    #[test]
    fn known_refusals_are_recognised() {
        let failed = |message: &str| RuncError::Failed { operation: "kill", message: message.to_owned() };
        assert!(failed("container not running").already_finished());
        assert!(failed("No such process").already_finished());
        assert!(failed("container does not exist").no_such_container());
        assert!(!failed("permission denied").already_finished());
    }
}
