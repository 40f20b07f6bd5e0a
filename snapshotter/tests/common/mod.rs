//! The real service on a socket, called as containerd calls it, and its mounts made as containerd makes them.

// Each test binary uses a part of this.
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

pub mod capsule;
pub mod mount;
pub mod tree;

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use coldsnap::digest::Digest;
use coldsnap::store::NodeStore;
use coldsnap_snapshotter::proto::Mount;
use coldsnap_snapshotter::proto::v1::snapshots_client::SnapshotsClient;
use coldsnap_snapshotter::proto::v1::{self, Info};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

/// A snapshotter process with its own root, store and socket, in a mount namespace that ends with the test.
pub struct Node {
    pub directory: TempDir,
    runtime: Runtime,
    process: Child,
    client: SnapshotsClient<Channel>,
}

impl Node {
    pub fn start() -> Self {
        Self::start_on(|_| {})
    }

    /// Lets `prepare` arrange the root before the process starts.
    pub fn start_on(prepare: impl FnOnce(&Path)) -> Self {
        mount::private_namespace();
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("work")).unwrap();
        fs::create_dir(directory.path().join("root")).unwrap();
        prepare(&directory.path().join("root"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (process, client) = spawn(directory.path(), &runtime, None);
        Self { directory, runtime, process, client }
    }

    pub fn root(&self) -> PathBuf {
        self.directory.path().join("root")
    }

    pub fn store(&self) -> NodeStore {
        NodeStore::at(self.directory.path().join("store"))
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    /// A new empty directory.
    pub fn new_directory(&self) -> PathBuf {
        let work = self.directory.path().join("work");
        let path = work.join(fs::read_dir(&work).unwrap().count().to_string());
        fs::create_dir(&path).unwrap();
        path
    }

    /// Puts a payload with this content, padded as packs are, into the store and answers its digest.
    pub fn put_payload(&self, content: &str) -> Digest {
        let content = pack(content);
        let digest = Digest::of(&content);
        let path = self.store().payload_path(&digest);
        coldsnap::durable::write_file(&path, &content, 0o444).unwrap();
        digest
    }

    /// Owners of leases, in order.
    pub fn leases(&self) -> Vec<String> {
        let mut owners: Vec<_> = self.store().leases().unwrap().into_iter().map(|l| l.owner).collect();
        owners.sort();
        owners
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    pub fn kill(&mut self) {
        kill_process(self.pid(), Signal::KILL).unwrap();
        assert_eq!(self.process.wait().unwrap().signal(), Some(9));
    }

    pub fn stop(&mut self) -> ExitStatus {
        kill_process(self.pid(), Signal::TERM).unwrap();
        // The client has to run, so that it can hang up.
        self.runtime.block_on(async {
            loop {
                if let Some(status) = self.process.try_wait().unwrap() {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
    }

    /// Stops the process while the client does not react.
    pub fn stop_with_stuck_client(&mut self) -> ExitStatus {
        kill_process(self.pid(), Signal::TERM).unwrap();
        self.process.wait().unwrap()
    }

    /// Starts the process again after it ended.
    pub fn restart(&mut self) {
        self.restart_with_fault(None);
    }

    /// Starts the process again so that it dies at this point.
    pub fn restart_with_fault(&mut self, fault: Option<&str>) {
        self.process.wait().unwrap();
        (self.process, self.client) = spawn(self.directory.path(), &self.runtime, fault);
    }

    /// Waits for the process to die by kill -9.
    pub fn expect_killed(&mut self) {
        assert_eq!(self.process.wait().unwrap().signal(), Some(9), "{}", self.log());
    }

    pub fn prepare(&mut self, key: &str, parent: &str) -> Result<Vec<Mount>, Status> {
        self.prepare_labelled(key, parent, &[])
    }

    pub fn prepare_labelled(
        &mut self,
        key: &str,
        parent: &str,
        labels: &[(&str, &str)],
    ) -> Result<Vec<Mount>, Status> {
        let request = v1::PrepareSnapshotRequest {
            snapshotter: "coldsnap".to_owned(),
            key: key.to_owned(),
            parent: parent.to_owned(),
            labels: map(labels),
        };
        self.runtime.block_on(self.client.prepare(request)).map(|r| r.into_inner().mounts)
    }

    pub fn view(&mut self, key: &str, parent: &str) -> Result<Vec<Mount>, Status> {
        self.view_labelled(key, parent, &[])
    }

    pub fn view_labelled(
        &mut self,
        key: &str,
        parent: &str,
        labels: &[(&str, &str)],
    ) -> Result<Vec<Mount>, Status> {
        let request = v1::ViewSnapshotRequest {
            snapshotter: "coldsnap".to_owned(),
            key: key.to_owned(),
            parent: parent.to_owned(),
            labels: map(labels),
        };
        self.runtime.block_on(self.client.view(request)).map(|r| r.into_inner().mounts)
    }

    pub fn mounts(&mut self, key: &str) -> Result<Vec<Mount>, Status> {
        let request = v1::MountsRequest { snapshotter: String::new(), key: key.to_owned() };
        self.runtime.block_on(self.client.mounts(request)).map(|r| r.into_inner().mounts)
    }

    pub fn commit(&mut self, name: &str, key: &str) -> Result<(), Status> {
        self.commit_with(name, key, "", &[])
    }

    pub fn commit_with(
        &mut self,
        name: &str,
        key: &str,
        parent: &str,
        labels: &[(&str, &str)],
    ) -> Result<(), Status> {
        let request = v1::CommitSnapshotRequest {
            snapshotter: String::new(),
            name: name.to_owned(),
            key: key.to_owned(),
            parent: parent.to_owned(),
            labels: map(labels),
        };
        self.runtime.block_on(self.client.commit(request)).map(|r| r.into_inner())
    }

    pub fn remove(&mut self, key: &str) -> Result<(), Status> {
        let request = v1::RemoveSnapshotRequest { snapshotter: String::new(), key: key.to_owned() };
        self.runtime.block_on(self.client.remove(request)).map(|r| r.into_inner())
    }

    pub fn stat(&mut self, key: &str) -> Result<Info, Status> {
        let request = v1::StatSnapshotRequest { snapshotter: String::new(), key: key.to_owned() };
        self.runtime.block_on(self.client.stat(request)).map(|r| r.into_inner().info.unwrap())
    }

    pub fn update(&mut self, info: Info, paths: &[&str]) -> Result<Info, Status> {
        let paths = paths.iter().map(|p| (*p).to_owned()).collect();
        let request = v1::UpdateSnapshotRequest {
            snapshotter: String::new(),
            info: Some(info),
            update_mask: Some(prost_types::FieldMask { paths }),
        };
        self.runtime.block_on(self.client.update(request)).map(|r| r.into_inner().info.unwrap())
    }

    pub fn list(&mut self, filters: &[&str]) -> Result<Vec<Info>, Status> {
        let filters = filters.iter().map(|f| (*f).to_owned()).collect();
        let request = v1::ListSnapshotsRequest { snapshotter: String::new(), filters };
        self.runtime.block_on(async {
            let mut stream = self.client.list(request).await?.into_inner();
            let mut infos = Vec::new();
            while let Some(block) = stream.message().await? {
                assert!(!block.info.is_empty() && block.info.len() <= 100);
                infos.extend(block.info);
            }
            Ok(infos)
        })
    }

    /// Names that match, in order.
    pub fn names(&mut self, filters: &[&str]) -> Vec<String> {
        let mut names: Vec<_> = self.list(filters).unwrap().into_iter().map(|i| i.name).collect();
        names.sort();
        names
    }

    /// Bytes and inodes.
    pub fn usage(&mut self, key: &str) -> Result<(i64, i64), Status> {
        let request = v1::UsageRequest { snapshotter: String::new(), key: key.to_owned() };
        self.runtime.block_on(self.client.usage(request)).map(|r| {
            let usage = r.into_inner();
            (usage.size, usage.inodes)
        })
    }

    pub fn cleanup(&mut self) -> Result<(), Status> {
        let request = v1::CleanupRequest { snapshotter: String::new() };
        self.runtime.block_on(self.client.cleanup(request)).map(|r| r.into_inner())
    }

    /// Prepares `count` snapshots on `parent` at the same time.
    pub fn in_parallel(&mut self, count: usize, parent: &str) {
        let client = &self.client;
        let prepare = |n| {
            let mut client = client.clone();
            let request = v1::PrepareSnapshotRequest {
                key: format!("parallel/{n}"),
                parent: parent.to_owned(),
                ..v1::PrepareSnapshotRequest::default()
            };
            async move { client.prepare(request).await.unwrap() }
        };
        self.runtime.block_on(async {
            let mut calls = tokio::task::JoinSet::new();
            for n in 0..count {
                calls.spawn(prepare(n));
            }
            calls.join_all().await;
        });
    }

    /// Prepares on `parent`, lets `fill` write into the mounted snapshot, commits as `name`.
    pub fn layer(&mut self, name: &str, parent: &str, fill: impl FnOnce(&Path)) {
        let key = format!("extract-1-abcd sha256:{name}");
        let mounts = self.prepare(&key, parent).unwrap();
        let target = self.new_directory();
        mount::with(&mounts, &target, |root| fill(root));
        self.commit(name, &key).unwrap();
    }

    /// Removes every snapshot, children first, and checks that nothing is left anywhere.
    pub fn remove_all_and_check(&mut self) {
        loop {
            let names = self.names(&[]);
            if names.is_empty() {
                break;
            }
            let removed = names.iter().filter(|name| self.remove(name).is_ok()).count();
            assert!(removed > 0, "none of {names:?} can be removed");
        }
        self.cleanup().unwrap();
        let left: Vec<_> = fs::read_dir(self.root().join("snapshots")).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
        assert!(self.leases().is_empty(), "{:?}", self.leases());
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Size of every payload of these tests.
pub const PACK_BYTES: u64 = 4096;

/// The content with the padding of a pack.
pub fn pack(content: &str) -> Vec<u8> {
    let mut bytes = content.as_bytes().to_vec();
    bytes.resize(PACK_BYTES.try_into().unwrap(), 0);
    bytes
}

fn map(labels: &[(&str, &str)]) -> HashMap<String, String> {
    labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

/// The command that serves below `directory`.
pub fn command(directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coldsnap-snapshotter"));
    command
        .arg("--address")
        .arg(directory.join("run/snapshotter.sock"))
        .arg("--root")
        .arg(directory.join("root"))
        .arg("--store")
        .arg(directory.join("store"))
        .env("COLDSNAP_LOG", "debug,h2=info,tonic=info,hyper=info");
    command
}

fn spawn(directory: &Path, runtime: &Runtime, fault: Option<&str>) -> (Child, SnapshotsClient<Channel>) {
    let notify = directory.join("notify");
    let _ = fs::remove_file(&notify);
    let ready = UnixDatagram::bind(&notify).unwrap();
    ready.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut command = command(directory);
    command
        .env("NOTIFY_SOCKET", &notify)
        .stderr(File::options().create(true).append(true).open(directory.join("log")).unwrap());
    if let Some(fault) = fault {
        command.env("COLDSNAP_SNAPSHOTTER_FAULT", fault);
    }
    let process = command.spawn().unwrap();
    let mut buffer = [0; 64];
    let length = ready.recv(&mut buffer).unwrap_or_else(|e| {
        panic!("not ready: {e}\n{}", fs::read_to_string(directory.join("log")).unwrap_or_default())
    });
    assert_eq!(&buffer[..length], b"READY=1");
    let address = format!("unix:{}", directory.join("run/snapshotter.sock").display());
    let channel = runtime.block_on(Endpoint::from_shared(address).unwrap().connect()).unwrap();
    (process, SnapshotsClient::new(channel))
}
