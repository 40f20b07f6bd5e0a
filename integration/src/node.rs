//! The node under test: one containerd with our two plugins, started fresh, restarted and killed as a story wants.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::ctr::{COLDSNAP, Ctr};
use crate::leftovers::{self, Leftovers};
use crate::process::wait_for;

const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";
const CONTAINERD_STATE: &str = "/run/containerd";
const SNAPSHOTTER_SOCKET: &str = "/run/coldsnap/snapshotter.sock";
/// Where containerd keeps blobs and snapshots, our snapshotter its snapshots, and the node store its payloads.
const STORES: [&str; 4] = [
    "/var/lib/containerd/io.containerd.content.v1.content/blobs",
    "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs",
    "/var/lib/coldsnap/snapshotter",
    "/var/lib/coldsnap/model-payloads",
];
const READY_LIMIT: Duration = Duration::from_secs(20);

/// The repository, which the node sees at the path it has outside.
pub fn repository() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package)
}

/// A program of this repository, built by `make build`.
pub fn program(name: &str) -> PathBuf {
    repository().join("target/release").join(name)
}

/// The model that `node.sh prepare` downloads.
pub fn model() -> PathBuf {
    repository().join("target/node/model/gemma-3-270m-q4_k_m.gguf")
}

/// Whether our plugins are part of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum With {
    /// containerd with our snapshotter as proxy plugin and our shim on its PATH.
    ColdSnap,
    /// containerd as Debian ships it.
    StockOnly,
}

/// A running containerd, with or without our snapshotter. Dropping it kills both and whatever containers are left.
#[derive(Debug)]
pub struct Node {
    with: With,
    logs: PathBuf,
    before: Leftovers,
    containerd: Option<Child>,
    snapshotter: Option<Child>,
    ctr: Ctr,
}

impl Node {
    /// Starts a node with empty state; its logs go to `target/node/logs/<story>/`.
    pub fn start(story: &str, with: With) -> Result<Self> {
        if std::env::var_os("COLDSNAP_NODE").is_none() {
            bail!(
                "this needs the test node: run it by `make test`, `make demo` or integration/node/node.sh run"
            );
        }
        for directory in ["/var/lib/containerd", "/var/lib/coldsnap"] {
            wipe(Path::new(directory))?;
        }
        let logs = repository().join("target/node/logs").join(story);
        let _ = fs::remove_dir_all(&logs);
        fs::create_dir_all(&logs).with_context(|| format!("cannot create {}", logs.display()))?;
        let ctr = Ctr::new(CONTAINERD_SOCKET, CONTAINERD_STATE);
        let mut node =
            Self { with, logs, before: Leftovers::now()?, containerd: None, snapshotter: None, ctr };
        if with == With::ColdSnap {
            node.start_snapshotter()?;
        }
        node.start_containerd()?;
        Ok(node)
    }

    /// The client.
    pub fn ctr(&self) -> &Ctr {
        &self.ctr
    }

    /// Where this node's daemons write their logs.
    pub fn logs(&self) -> &Path {
        &self.logs
    }

    /// Starts our snapshotter and waits until it answers.
    pub fn start_snapshotter(&mut self) -> Result<()> {
        let program = program("coldsnap-snapshotter");
        let mut command = Command::new(&program);
        command.env("RUST_LOG", "info");
        self.snapshotter = Some(self.spawn("snapshotter", &mut command)?);
        wait_for("the snapshotter's socket", READY_LIMIT, || {
            still_runs(&mut self.snapshotter, "the snapshotter", &self.logs)?;
            Ok(UnixStream::connect(SNAPSHOTTER_SOCKET).ok())
        })?;
        Ok(())
    }

    /// Waits until containerd reaches a restarted snapshotter: it dials again only some time after a connection failed.
    pub fn wait_snapshotter_connected(&self) -> Result<()> {
        wait_for("containerd to find the snapshotter", READY_LIMIT, || {
            let listed = self.ctr.output(["snapshots", "--snapshotter", COLDSNAP.snapshotter, "list"])?;
            Ok(listed.status.success().then_some(()))
        })
    }

    /// Starts containerd and waits until it answers.
    pub fn start_containerd(&mut self) -> Result<()> {
        let config = self.logs.join("containerd.toml");
        fs::write(&config, containerd_config(self.with))
            .with_context(|| format!("cannot write {}", config.display()))?;
        let path = std::env::var("PATH").unwrap_or_default();
        let ours = repository().join("target/release");
        let mut command = Command::new("containerd");
        command.arg("--config").arg(&config).env("PATH", format!("{}:{path}", ours.display()));
        self.containerd = Some(self.spawn("containerd", &mut command)?);
        wait_for("containerd", READY_LIMIT, || {
            still_runs(&mut self.containerd, "containerd", &self.logs)?;
            let answers = UnixStream::connect(CONTAINERD_SOCKET).is_ok() && self.ctr.run(["version"]).is_ok();
            Ok(answers.then_some(()))
        })
    }

    /// Stops containerd with SIGTERM, as an administrator would; containers go on.
    pub fn stop_containerd(&mut self) -> Result<()> {
        end(&mut self.containerd, Signal::TERM)
    }

    /// Kills containerd with SIGKILL.
    pub fn kill_containerd(&mut self) -> Result<()> {
        end(&mut self.containerd, Signal::KILL)
    }

    /// Stops the snapshotter with SIGTERM.
    pub fn stop_snapshotter(&mut self) -> Result<()> {
        end(&mut self.snapshotter, Signal::TERM)
    }

    /// Kills the snapshotter with SIGKILL.
    pub fn kill_snapshotter(&mut self) -> Result<()> {
        end(&mut self.snapshotter, Signal::KILL)
    }

    /// Bytes of every image, snapshot and payload on the node's disk.
    pub fn stored_bytes(&self) -> Result<u64> {
        STORES.iter().map(|directory| bytes_below(Path::new(directory))).sum()
    }

    /// Removes every container and checks that nothing of them is left on the node.
    pub fn assert_clean(&self) -> Result<()> {
        self.ctr.remove_all()?;
        leftovers::assert_clean(&self.before)
    }

    fn spawn(&self, name: &str, command: &mut Command) -> Result<Child> {
        let path = self.logs.join(format!("{name}.log"));
        let log = File::options().create(true).append(true).open(&path);
        let log = log.with_context(|| format!("cannot open {}", path.display()))?;
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command.stdout(log.try_clone()?).stderr(log).spawn();
        child.with_context(|| format!("cannot start {program}: build it with `make build`"))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = end(&mut self.containerd, Signal::KILL);
        let _ = end(&mut self.snapshotter, Signal::KILL);
        leftovers::clear(&self.before);
    }
}

fn containerd_config(with: With) -> String {
    let proxy = r#"
[proxy_plugins.coldsnap]
type = "snapshot"
address = "/run/coldsnap/snapshotter.sock"
[proxy_plugins.coldsnap.exports]
root = "/var/lib/coldsnap/snapshotter"
"#;
    // The CRI plugins want a pod network and are not part of these stories.
    format!(
        r#"version = 3
root = "/var/lib/containerd"
state = "{CONTAINERD_STATE}"
disabled_plugins = ["io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "io.containerd.nri.v1.nri"]
[grpc]
address = "{CONTAINERD_SOCKET}"
{}"#,
        if with == With::ColdSnap { proxy } else { "" }
    )
}

fn still_runs(child: &mut Option<Child>, name: &str, logs: &Path) -> Result<()> {
    if let Some(status) = child.as_mut().map(Child::try_wait).transpose()?.flatten() {
        bail!("{name} ended with {status} before it was ready: see {}", logs.display());
    }
    Ok(())
}

fn end(child: &mut Option<Child>, signal: Signal) -> Result<()> {
    if let Some(mut child) = child.take() {
        if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            kill_process(pid, signal).context("cannot signal a daemon of the node")?;
        }
        child.wait().context("cannot wait for a daemon of the node")?;
    }
    Ok(())
}

fn wipe(directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))? {
        let path = entry?.path();
        let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(())
}

/// The sizes of all regular files below `directory`; 0 if it does not exist.
pub fn bytes_below(directory: &Path) -> Result<u64> {
    let mut total = 0;
    if !directory.exists() {
        return Ok(total);
    }
    for entry in fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        total += if metadata.is_dir() {
            bytes_below(&entry.path())?
        } else if metadata.is_file() {
            metadata.len()
        } else {
            0
        };
    }
    Ok(total)
}
