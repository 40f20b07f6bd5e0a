//! A running shim and the containerd that it believes to talk to.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use containerd_shim_protos::api::{ConnectRequest, CreateTaskRequest, Empty, ShutdownRequest};
use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult};
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::shim::events::ForwardRequest;
use containerd_shim_protos::shim::oci::Options;
use containerd_shim_protos::shim_async::{Client, Events, TaskClient, create_events};
use containerd_shim_protos::ttrpc::r#async::{Server, TtrpcContext};
use containerd_shim_protos::ttrpc::{self, context};
use containerd_shim_protos::types::introspection::RuntimeInfo;
use tokio::sync::mpsc;

/// The program under test.
pub const SHIM: &str = env!("CARGO_BIN_EXE_containerd-shim-coldsnap-v1");
const LIMIT: Duration = Duration::from_secs(20);

struct Collector(mpsc::UnboundedSender<String>);

#[async_trait::async_trait]
impl Events for Collector {
    async fn forward(&self, _: &TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
        assert_eq!(request.envelope.namespace, "test");
        let _ = self.0.send(request.envelope.topic.clone());
        Ok(Empty::default())
    }
}

/// A shim for one container with the id `c`, started as containerd does it.
pub struct Shim {
    pub task: TaskClient,
    directory: tempfile::TempDir,
    socket: PathBuf,
    events: mpsc::UnboundedReceiver<String>,
    _containerd: Server,
}

impl Shim {
    /// The container runs `command` (a shell script).
    pub async fn start(command: &str) -> Self {
        Self::start_prepared(command, |_| {}).await
    }

    /// The same after `prepare` was told the test's directory: `bin` has the shim, `bundle` the container; `store` is
    /// the node store and `config.toml` the node's configuration.
    pub async fn start_prepared(command: &str, prepare: impl FnOnce(&Path)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let bundle = directory.path().join("bundle");
        std::fs::create_dir(&bundle).unwrap();
        let spec = r#"{"root":{"path":"rootfs"},"linux":{"namespaces":[{"type":"pid"}]}}"#;
        std::fs::write(bundle.join("config.json"), spec).unwrap();
        std::fs::create_dir(directory.path().join("bin")).unwrap();
        // A name of its own, so that the test says what is beside it.
        let shim = directory.path().join("bin/containerd-shim-coldsnap-v1");
        if std::fs::hard_link(SHIM, &shim).is_err() {
            std::fs::copy(SHIM, &shim).unwrap();
        }
        prepare(directory.path());
        std::fs::write(bundle.join("command"), command).unwrap();
        // containerd makes a fifo.
        std::fs::write(bundle.join("log"), "").unwrap();

        let (sender, events) = mpsc::unbounded_channel();
        let address = format!("unix://{}", directory.path().join("containerd.ttrpc").display());
        let service = create_events(Arc::new(Collector(sender)));
        let mut containerd = Server::new().bind(&address).unwrap().register_service(service);
        containerd.start().await.unwrap();

        let address = bootstrap(&bundle, directory.path(), &address);
        let task = TaskClient::new(Client::connect(&address).await.unwrap());
        let socket = address.strip_prefix("unix://").unwrap().into();
        Self { task, directory, socket, events, _containerd: containerd }
    }

    /// A path in the test's directory: `bundle`, `state`, ...
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A request with the fake runtime, without streams.
    pub fn create_request(&self) -> CreateTaskRequest {
        let options = Options {
            binary_name: concat!(env!("CARGO_MANIFEST_DIR"), "/tests/lifecycle/fake-runc").to_owned(),
            root: self.path("state").display().to_string(),
            ..Default::default()
        };
        let options = Any {
            type_url: "containerd.runc.v1.Options".to_owned(),
            value: options.write_to_bytes().unwrap(),
            ..Default::default()
        };
        CreateTaskRequest {
            id: "c".to_owned(),
            bundle: self.path("bundle").display().to_string(),
            options: Some(options).into(),
            ..Default::default()
        }
    }

    /// The topics of the next `count` events.
    pub async fn topics(&mut self, count: usize) -> Vec<String> {
        let mut topics = Vec::new();
        while topics.len() < count {
            let next = tokio::time::timeout(LIMIT, self.events.recv()).await;
            topics.push(next.unwrap_or_else(|_| panic!("no event after {topics:?}")).unwrap());
        }
        topics
    }

    /// Ends the shim, which must leave neither process nor socket.
    pub async fn shut_down(self) {
        let pid = self
            .task
            .connect(context::Context::default(), &ConnectRequest::default())
            .await
            .unwrap()
            .shim_pid;
        self.task.shutdown(context::Context::default(), &ShutdownRequest::default()).await.unwrap();
        let ended = async {
            while self.socket.exists() || Path::new(&format!("/proc/{pid}/exe")).exists() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(LIMIT, ended).await.unwrap_or_else(|_| panic!("shim {pid} does not end"));
    }
}

/// Runs the `start` action and answers the address of the shim.
fn bootstrap(bundle: &Path, directory: &Path, containerd: &str) -> String {
    let parameters = BootstrapParams {
        instance_id: "c".to_owned(),
        namespace: "test".to_owned(),
        containerd_ttrpc_address: containerd.to_owned(),
        containerd_grpc_address: "containerd.sock".to_owned(),
        socket_dir: Some(directory.join("s").display().to_string()),
        ..Default::default()
    };
    let mut start = Command::new(directory.join("bin/containerd-shim-coldsnap-v1"))
        .env("COLDSNAP_STORE", directory.join("store"))
        .env("COLDSNAP_CONFIG", directory.join("config.toml"))
        .env("PATH", "/usr/bin:/bin")
        .args(["-namespace", "test", "-id", "c", "-address", "containerd.sock", "start"])
        .current_dir(bundle)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    start.stdin.take().unwrap().write_all(&parameters.write_to_bytes().unwrap()).unwrap();
    let output = start.wait_with_output().unwrap();
    assert!(output.status.success());
    let result = BootstrapResult::parse_from_bytes(&output.stdout).unwrap();
    assert_eq!((result.version, result.protocol.as_str()), (3, "ttrpc"));
    result.address
}

/// Decodes the answer to `-info`.
pub fn runtime_info(bytes: &[u8]) -> RuntimeInfo {
    RuntimeInfo::parse_from_bytes(bytes).unwrap()
}

/// Writes an executable file.
pub fn write_script(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
}
