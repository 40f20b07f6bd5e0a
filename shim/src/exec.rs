//! Additional processes in a running container.

use std::path::PathBuf;
use std::sync::Arc;

use containerd_shim_protos::api::{ExecProcessRequest, Status};
use containerd_shim_protos::events::task::{TaskExecAdded, TaskExecStarted};
use serde_json::Value;
use time::OffsetDateTime;

use crate::console::ConsoleSocket;
use crate::container::{Container, read_pid};
use crate::create::{Streams, connect_streams};
use crate::error::TaskError;
use crate::exit::supervise_exec;
use crate::process::Process;
use crate::reaper::{Exit, SIGKILL};
use crate::start::NEVER_RAN;
use crate::stdio::{ShimEnds, StdioRequest};

/// Adds an exec to a running container; it runs after its own Start.
///
/// # Errors
/// The container is not running, the id is taken, or the process description cannot be used.
pub fn add_exec(container: &Container, request: ExecProcessRequest) -> Result<(), TaskError> {
    container.require_status("take an exec", &[Status::RUNNING])?;
    if !is_file_name(&request.exec_id) {
        return Err(TaskError::InvalidArgument(format!("exec id {:?} is no plain name", request.exec_id)));
    }
    let description = request.spec.as_ref().map(|any| any.value.as_slice()).unwrap_or_default();
    let mut description: Value = serde_json::from_slice(description).map_err(|error| {
        TaskError::InvalidArgument(format!(
            "exec {}: its process description is no JSON: {error}",
            request.exec_id
        ))
    })?;
    let Some(fields) = description.as_object_mut() else {
        return Err(TaskError::InvalidArgument(format!("exec {}: no process description", request.exec_id)));
    };
    fields.insert("terminal".to_owned(), Value::Bool(request.terminal));

    let file = process_file(container, &request.exec_id);
    let stdio = StdioRequest {
        stdin: request.stdin,
        stdout: request.stdout,
        stderr: request.stderr,
        terminal: request.terminal,
    };
    container.add_exec(Process::new(&request.exec_id, stdio))?;
    if let Err(error) = std::fs::write(&file, description.to_string()) {
        container.remove_exec(&request.exec_id);
        return Err(TaskError::io(format!("write {}", file.display()))(error));
    }
    container.host.events.publish(TaskExecAdded {
        container_id: container.id.clone(),
        exec_id: request.exec_id,
        ..Default::default()
    });
    Ok(())
}

/// Starts an exec and answers its pid.
///
/// # Errors
/// It was started before, the container is not running, or the runtime failed.
pub async fn start_exec(container: &Arc<Container>, exec_id: &str) -> Result<u32, TaskError> {
    let process = container.process(exec_id)?;
    let _transition = process.transition.lock().await;
    if process.status() != Status::CREATED {
        return Err(container.wrong_state(&format!("exec {exec_id} was started before")));
    }
    container.require_status("start an exec", &[Status::RUNNING])?;
    let running = container.count_running_exec()?;
    let inheritance = container.host.reaper.inheritance();
    let began = run(container, &process).await.inspect_err(|_| {
        process.set_exit(Exit { status: NEVER_RAN, at: OffsetDateTime::now_utc() });
    })?;
    process.set_pid(began.pid);
    process.set_status(Status::RUNNING);
    let exit = inheritance.watch(began.pid);
    let connected = connect_streams(&process, began.console, began.ends).await;
    container.host.events.publish(TaskExecStarted {
        container_id: container.id.clone(),
        exec_id: exec_id.to_owned(),
        pid: process.pid_u32(),
        ..Default::default()
    });
    tokio::spawn(supervise_exec(Arc::clone(container), Arc::clone(&process), exit, running));
    if let Err(error) = connected {
        // It runs, but nobody can talk to it.
        let _ = container.host.reaper.kill(began.pid, SIGKILL);
        return Err(error);
    }
    Ok(process.pid_u32())
}

/// An exec that the runtime has started.
#[derive(Debug)]
struct Began {
    pid: i32,
    console: Option<ConsoleSocket>,
    ends: ShimEnds,
}

async fn run(container: &Container, process: &Process) -> Result<Began, TaskError> {
    let exec_id = &process.id;
    let owner = (container.options.io_uid, container.options.io_gid);
    let streams =
        Streams::open(&container.bundle, &format!("{exec_id}-console.sock"), &process.stdio, owner)?;
    let pid_file = container.bundle.join(format!("{exec_id}.pid"));
    let description = process_file(container, exec_id);
    let console_socket = streams.console.as_ref().map(ConsoleSocket::path);
    let result =
        container.runc.exec(&container.id, &description, &pid_file, console_socket, streams.child).await;
    // The runtime has read it.
    let _ = std::fs::remove_file(&description);
    result?;
    let pid = read_pid(&pid_file);
    let _ = std::fs::remove_file(&pid_file);
    Ok(Began { pid: pid?, console: streams.console, ends: streams.ends })
}

fn process_file(container: &Container, exec_id: &str) -> PathBuf {
    container.bundle.join(format!("{exec_id}-process.json"))
}

/// Exec ids become file names in the bundle. containerd checks them too; a shim does not rely on its client.
fn is_file_name(id: &str) -> bool {
    !id.is_empty() && !id.starts_with('.') && !id.contains(['/', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exec_ids_cannot_leave_the_bundle() {
        assert!(is_file_name("exec-1"));
        for id in ["", ".", "../x", "a/b", ".hidden", "a\0"] {
            assert!(!is_file_name(id), "{id:?}");
        }
    }
}
