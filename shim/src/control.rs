//! Acts on a container that exists: signals, pausing, resources, processes, streams.

use std::collections::HashMap;

use containerd_shim::util::convert_to_any;
use containerd_shim_protos::api::{KillRequest, ProcessInfo, ResizePtyRequest, Status};
use containerd_shim_protos::events::task::{TaskPaused, TaskResumed};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::shim::oci::ProcessDetails;
use time::OffsetDateTime;

use crate::console;
use crate::container::Container;
use crate::error::TaskError;
use crate::reaper::{Exit, KILLED};

/// Sends a signal to the first process, to all processes, or to an exec.
///
/// # Errors
/// The process has ended ("not found", as containerd's own shim says), was not started, or the runtime failed.
pub async fn kill(container: &Container, request: &KillRequest) -> Result<(), TaskError> {
    let process = container.process(&request.exec_id)?;
    let _transition = process.transition.lock().await;
    let finished = || TaskError::NotFound("process already finished".to_owned());
    if request.exec_id.is_empty() {
        if container.take_pending_restore().is_some() {
            // Nothing runs yet. The container ends here, so that a client can delete it.
            process.set_exit(Exit { status: KILLED, at: OffsetDateTime::now_utc() });
            return Ok(());
        }
        // Also for a process that has ended: others of the container may be left.
        return container.runc.kill(&container.id, request.signal, request.all).await.map_err(
            |error| match (error.already_finished(), error.no_such_container()) {
                (true, _) => finished(),
                (_, true) => TaskError::NotFound(format!("no such container {}", container.id)),
                _ => error.into(),
            },
        );
    }
    match process.status() {
        Status::CREATED => Err(container.wrong_state(&format!("exec {} was not started", process.id))),
        Status::STOPPED => Err(finished()),
        _ => container.host.reaper.kill(process.pid(), request.signal).map_err(|error| {
            match error.raw_os_error() {
                Some(libc::ESRCH) => finished(),
                _ => TaskError::io(format!("send signal {} to exec {}", request.signal, process.id))(error),
            }
        }),
    }
}

/// Freezes all processes.
///
/// # Errors
/// The container is not running, or the runtime failed.
pub async fn pause(container: &Container) -> Result<(), TaskError> {
    let _transition = container.init.transition.lock().await;
    container.require_status("be paused", &[Status::RUNNING])?;
    container.init.set_status(Status::PAUSING);
    let result = container.runc.pause(&container.id).await;
    container.init.set_status(if result.is_ok() { Status::PAUSED } else { Status::RUNNING });
    result?;
    container.host.events.publish(TaskPaused { container_id: container.id.clone(), ..Default::default() });
    Ok(())
}

/// Thaws all processes.
///
/// # Errors
/// The container is not paused, or the runtime failed.
pub async fn resume(container: &Container) -> Result<(), TaskError> {
    let _transition = container.init.transition.lock().await;
    container.require_status("be resumed", &[Status::PAUSED])?;
    container.runc.resume(&container.id).await?;
    container.init.set_status(Status::RUNNING);
    container.host.events.publish(TaskResumed { container_id: container.id.clone(), ..Default::default() });
    Ok(())
}

/// Changes resource limits; `resources` carries an OCI `LinuxResources` document as JSON.
///
/// # Errors
/// The container has stopped, there is no document, or the runtime failed.
pub async fn update(container: &Container, resources: Option<&Any>) -> Result<(), TaskError> {
    let _transition = container.init.transition.lock().await;
    container.require_status("be updated", &[Status::CREATED, Status::RUNNING, Status::PAUSED])?;
    let resources = resources
        .filter(|any| {
            serde_json::from_slice::<serde_json::Value>(&any.value).is_ok_and(|value| value.is_object())
        })
        .ok_or_else(|| {
            TaskError::InvalidArgument("update: the resources are no LinuxResources document".to_owned())
        })?;
    let file = container.bundle.join("update-resources.json");
    std::fs::write(&file, &resources.value).map_err(TaskError::io(format!("write {}", file.display())))?;
    let result = container.runc.update(&container.id, &file).await;
    let _ = std::fs::remove_file(&file);
    Ok(result?)
}

/// All processes of the container.
///
/// # Errors
/// The runtime failed.
pub async fn pids(container: &Container) -> Result<Vec<ProcessInfo>, TaskError> {
    let pids = match container.runc.pids(&container.id).await {
        // Before a restore, and after the runtime forgot a checkpointed container.
        Err(error) if error.no_such_container() => Vec::new(),
        pids => pids?,
    };
    let execs: HashMap<u32, String> = container
        .exec_processes()
        .iter()
        .filter(|process| process.status() == Status::RUNNING)
        .map(|process| (process.pid_u32(), process.id.clone()))
        .collect();
    pids.into_iter()
        .map(|pid| {
            let details = execs.get(&pid).map(|exec_id| {
                convert_to_any(Box::new(ProcessDetails { exec_id: exec_id.clone(), ..Default::default() }))
            });
            let info = details.transpose().map_err(|error| TaskError::Other(error.to_string()))?;
            Ok(ProcessInfo { pid, info: info.into(), ..Default::default() })
        })
        .collect()
}

/// Sets the size of a process's terminal; a process without one ignores it, as with containerd's own shim.
///
/// # Errors
/// There is no such exec, or the size is refused.
pub fn resize_pty(container: &Container, request: &ResizePtyRequest) -> Result<(), TaskError> {
    let process = container.process(&request.exec_id)?;
    match process.console().as_ref() {
        Some(terminal) => console::resize(terminal, request.width, request.height),
        None => Ok(()),
    }
}

/// Lets a process see the end of its input.
///
/// # Errors
/// There is no such exec.
pub async fn close_stdin(container: &Container, exec_id: &str) -> Result<(), TaskError> {
    let process = container.process(exec_id)?;
    process.copies.lock().await.close_stdin();
    Ok(())
}
