//! The shim's binary with a fake OCI runtime (`fake-runc`) and a fake containerd: what clients rely on, without root.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic, as tests do")]

mod harness;
#[path = "../../../libcoldsnap/tests/common/recoverable.rs"]
mod recoverable;
mod recovery;

use std::path::Path;

use containerd_shim_protos::api::{
    CreateTaskRequest, DeleteRequest, ExecProcessRequest, KillRequest, StartRequest, StateRequest, Status,
    WaitRequest,
};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::ttrpc::{self, Code, context};
use harness::Shim;

fn code<T: std::fmt::Debug>(result: ttrpc::Result<T>) -> Code {
    match result.unwrap_err() {
        ttrpc::Error::RpcStatus(status) => status.code(),
        other => panic!("no status: {other}"),
    }
}

fn start(exec_id: &str) -> StartRequest {
    StartRequest { id: "c".to_owned(), exec_id: exec_id.to_owned(), ..Default::default() }
}

fn exec(exec_id: &str) -> ExecProcessRequest {
    let spec = Any { type_url: "process".to_owned(), value: b"{}".to_vec(), ..Default::default() };
    ExecProcessRequest {
        id: "c".to_owned(),
        exec_id: exec_id.to_owned(),
        spec: Some(spec).into(),
        ..Default::default()
    }
}

impl Shim {
    async fn status(&self) -> Status {
        let request = StateRequest { id: "c".to_owned(), ..Default::default() };
        self.task.state(context::Context::default(), &request).await.unwrap().status.enum_value_or_default()
    }

    async fn exit_status(&self, exec_id: &str) -> u32 {
        let request = WaitRequest { id: "c".to_owned(), exec_id: exec_id.to_owned(), ..Default::default() };
        self.task.wait(context::Context::default(), &request).await.unwrap().exit_status
    }

    async fn kill(&self, exec_id: &str, signal: u32) -> ttrpc::Result<()> {
        let request =
            KillRequest { id: "c".to_owned(), exec_id: exec_id.to_owned(), signal, ..Default::default() };
        self.task.kill(context::Context::default(), &request).await.map(drop)
    }

    async fn delete(&self, exec_id: &str) -> ttrpc::Result<u32> {
        let request = DeleteRequest { id: "c".to_owned(), exec_id: exec_id.to_owned(), ..Default::default() };
        self.task.delete(context::Context::default(), &request).await.map(|response| response.exit_status)
    }
}

#[tokio::test]
async fn a_container_lives_and_leaves_nothing() {
    let mut shim = Shim::start("echo out; echo err >&2; read line; exit 7").await;
    let log = shim.path("output.log");
    let request = CreateTaskRequest { stdout: format!("file://{}", log.display()), ..shim.create_request() };
    let ctx = context::Context::default;
    let created = shim.task.create(ctx(), &request).await.unwrap();
    assert!(created.pid > 0);
    assert_eq!(shim.status().await, Status::CREATED);
    assert_eq!(code(shim.task.create(ctx(), &request).await), Code::ALREADY_EXISTS);

    assert_eq!(shim.task.start(ctx(), &start("")).await.unwrap().pid, created.pid);
    assert_eq!(shim.exit_status("").await, 7);
    assert_eq!(shim.status().await, Status::STOPPED);
    assert_eq!(code(shim.task.start(ctx(), &start("")).await), Code::FAILED_PRECONDITION);
    assert_eq!(code(shim.kill("", 9).await), Code::NOT_FOUND);
    assert_eq!(shim.delete("").await.unwrap(), 7);
    assert_eq!(code(shim.delete("").await), Code::NOT_FOUND);
    let mut lines: Vec<_> = std::fs::read_to_string(&log).unwrap().lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["err", "out"]);
    assert_eq!(shim.topics(4).await, ["/tasks/create", "/tasks/start", "/tasks/exit", "/tasks/delete"]);
    assert_eq!(std::fs::read_dir(shim.path("state/test")).unwrap().count(), 0);
    shim.shut_down().await;
}

#[tokio::test]
async fn an_exit_during_start_comes_after_the_start() {
    let mut shim = Shim::start("exit 3").await;
    std::fs::write(shim.path("bundle/start-waits"), "").unwrap();
    let ctx = context::Context::default;
    shim.task.create(ctx(), &shim.create_request()).await.unwrap();
    // The process has ended, and was reaped, when the runtime's start returns.
    shim.task.start(ctx(), &start("")).await.unwrap();
    assert_eq!(shim.exit_status("").await, 3);
    assert_eq!(shim.topics(3).await, ["/tasks/create", "/tasks/start", "/tasks/exit"]);
    shim.delete("").await.unwrap();
    shim.shut_down().await;
}

#[tokio::test]
async fn execs_have_their_own_lives() {
    let mut shim = Shim::start("exec sleep 1000").await;
    let ctx = context::Context::default;
    shim.task.create(ctx(), &shim.create_request()).await.unwrap();
    assert_eq!(code(shim.task.exec(ctx(), &exec("e")).await), Code::FAILED_PRECONDITION);
    shim.task.start(ctx(), &start("")).await.unwrap();

    std::fs::write(shim.path("bundle/exec-command"), "exit 5").unwrap();
    shim.task.exec(ctx(), &exec("e")).await.unwrap();
    assert_eq!(code(shim.task.exec(ctx(), &exec("e")).await), Code::ALREADY_EXISTS);
    assert_eq!(code(shim.task.exec(ctx(), &exec("../e")).await), Code::INVALID_ARGUMENT);
    assert_eq!(code(shim.task.start(ctx(), &start("other")).await), Code::NOT_FOUND);
    shim.task.start(ctx(), &start("e")).await.unwrap();
    assert_eq!(shim.exit_status("e").await, 5);
    assert_eq!(shim.delete("e").await.unwrap(), 5);

    std::fs::write(shim.path("bundle/exec-command"), "exec sleep 1000").unwrap();
    shim.task.exec(ctx(), &exec("long")).await.unwrap();
    assert_eq!(code(shim.kill("long", 9).await), Code::FAILED_PRECONDITION);
    shim.task.start(ctx(), &start("long")).await.unwrap();
    assert_eq!(code(shim.delete("long").await), Code::FAILED_PRECONDITION);
    assert_eq!(code(shim.delete("").await), Code::FAILED_PRECONDITION);

    // The exit of the first process is the container's last one.
    shim.kill("", 15).await.unwrap();
    shim.kill("long", 9).await.unwrap();
    assert_eq!(shim.exit_status("").await, 143);
    assert_eq!(shim.exit_status("long").await, 137);
    assert_eq!(code(shim.kill("long", 9).await), Code::NOT_FOUND);
    assert_eq!(code(shim.task.exec(ctx(), &exec("late")).await), Code::FAILED_PRECONDITION);
    shim.delete("").await.unwrap();
    assert_eq!(
        shim.topics(10).await,
        [
            "/tasks/create",
            "/tasks/start",
            "/tasks/exec-added",
            "/tasks/exec-started",
            "/tasks/exit",
            "/tasks/exec-added",
            "/tasks/exec-started",
            "/tasks/exit",
            "/tasks/exit",
            "/tasks/delete"
        ]
    );
    shim.shut_down().await;
}

#[tokio::test]
async fn images_are_restored_at_start() {
    let mut shim = Shim::start("exec sleep 1000").await;
    let request = restore_request(&shim, &[]);
    let ctx = context::Context::default;
    assert_eq!(shim.task.create(ctx(), &request).await.unwrap().pid, 0);
    assert_eq!(shim.status().await, Status::CREATED);
    let pid = shim.task.start(ctx(), &start("")).await.unwrap().pid;
    assert!(pid > 0);
    assert_eq!(shim.status().await, Status::RUNNING);
    let timing = std::fs::read_to_string(shim.path("bundle/timing.json")).unwrap();
    assert!(timing.contains("restore_ms"), "{timing}");
    shim.kill("", 9).await.unwrap();
    assert_eq!(shim.exit_status("").await, 137);
    shim.delete("").await.unwrap();
    assert_eq!(shim.topics(4).await, ["/tasks/create", "/tasks/start", "/tasks/exit", "/tasks/delete"]);
    shim.shut_down().await;
}

#[tokio::test]
async fn a_failed_restore_says_why_and_can_be_deleted() {
    let shim = Shim::start("exec sleep 1000").await;
    let request = restore_request(&shim, &["broken"]);
    let ctx = context::Context::default;
    shim.task.create(ctx(), &request).await.unwrap();
    let error = shim.task.start(ctx(), &start("")).await.unwrap_err().to_string();
    assert!(error.contains("Error (criu/x.c:1): no luck"), "{error}");
    assert_eq!(shim.status().await, Status::STOPPED);
    assert_eq!(shim.exit_status("").await, 255);
    shim.delete("").await.unwrap();
    shim.shut_down().await;
}

#[tokio::test]
async fn a_restore_that_was_not_started_can_be_killed() {
    let shim = Shim::start("exec sleep 1000").await;
    let ctx = context::Context::default;
    shim.task.create(ctx(), &restore_request(&shim, &[])).await.unwrap();
    shim.kill("", 9).await.unwrap();
    assert_eq!(shim.exit_status("").await, 137);
    shim.delete("").await.unwrap();
    shim.shut_down().await;
}

#[tokio::test]
async fn requests_that_cannot_be_used_are_refused() {
    let shim = Shim::start("exec sleep 1000").await;
    let ctx = context::Context::default;
    let unknown = Any { type_url: "runtimeoptions.v1.Options".to_owned(), ..Default::default() };
    let refused = [
        (
            CreateTaskRequest { options: Some(unknown).into(), ..shim.create_request() },
            Code::INVALID_ARGUMENT,
        ),
        (
            CreateTaskRequest { stdout: "npipe:///x".to_owned(), ..shim.create_request() },
            Code::INVALID_ARGUMENT,
        ),
        (
            CreateTaskRequest { stdout: "binary:///x".to_owned(), ..shim.create_request() },
            Code::UNIMPLEMENTED,
        ),
        (
            CreateTaskRequest { checkpoint: "/nonexistent".to_owned(), ..shim.create_request() },
            Code::FAILED_PRECONDITION,
        ),
    ];
    for (request, expected) in refused {
        assert_eq!(code(shim.task.create(ctx(), &request).await), expected);
    }
    assert_eq!(code(shim.task.start(ctx(), &start("")).await), Code::NOT_FOUND);
    shim.shut_down().await;
}

#[tokio::test]
async fn annotations_with_other_values_are_refused() {
    let shim = Shim::start("exec sleep 1000").await;
    for key in ["coldsnap.io/restore", "coldsnap.io/overlay"] {
        let spec = format!(r#"{{"root":{{"path":"rootfs"}},"annotations":{{"{key}":"sometimes"}}}}"#);
        std::fs::write(shim.path("bundle/config.json"), spec).unwrap();
        let error = shim.task.create(context::Context::default(), &shim.create_request()).await.unwrap_err();
        assert!(error.to_string().contains(key), "{error}");
        assert_eq!(code::<()>(Err(error)), Code::INVALID_ARGUMENT);
    }
    shim.shut_down().await;
}

#[test]
fn the_binary_describes_itself() {
    let run = |arguments: &[&str], path: &Path| {
        std::process::Command::new(harness::SHIM).args(arguments).env("PATH", path).output().unwrap()
    };
    let version = run(&["-v"], Path::new("/"));
    assert!(String::from_utf8_lossy(&version.stdout).contains("io.containerd.coldsnap.v1"));

    let directory = tempfile::tempdir().unwrap();
    harness::write_script(
        &directory.path().join("runc"),
        "#!/bin/sh\necho '{\"ociVersionMin\":\"1.0.0\"}'\n",
    );
    let info = run(&["-info"], directory.path());
    assert!(info.status.success());
    let info = harness::runtime_info(&info.stdout);
    assert_eq!(info.name, "io.containerd.coldsnap.v1");
    assert!(info.features.type_url.ends_with("/runtime-spec/1/features/Features"));
    assert_eq!(info.features.value.trim_ascii_end(), b"{\"ociVersionMin\":\"1.0.0\"}");
}

fn restore_request(shim: &Shim, files: &[&str]) -> CreateTaskRequest {
    let images = shim.path("images");
    std::fs::create_dir(&images).unwrap();
    for file in files.iter().chain(&["inventory.img"]) {
        std::fs::write(images.join(file), "").unwrap();
    }
    CreateTaskRequest { checkpoint: images.display().to_string(), ..shim.create_request() }
}
