//! Delete: what remains of an exec or of a container, except the bundle, which is containerd's.

use std::sync::Arc;

use containerd_shim_protos::api::{DeleteResponse, Status};
use containerd_shim_protos::events::task::TaskDelete;

use crate::container::Container;
use crate::error::TaskError;
use crate::exit::timestamp;
use crate::materialize::release_leases;
use crate::mount::unmount_below;
use crate::process::Process;

/// Deletes an exec.
///
/// # Errors
/// There is none, or it is running.
pub async fn delete_exec(container: &Container, exec_id: &str) -> Result<DeleteResponse, TaskError> {
    let process = container.process(exec_id)?;
    let _transition = process.transition.lock().await;
    if !matches!(process.status(), Status::CREATED | Status::STOPPED) {
        return Err(container.wrong_state(&format!("exec {exec_id} is running and cannot be deleted")));
    }
    process.copies.lock().await.shutdown().await;
    // Not there when the exec was started.
    let _ = std::fs::remove_file(container.bundle.join(format!("{exec_id}-process.json")));
    container.remove_exec(exec_id);
    Ok(response(&process))
}

/// Deletes a container that has stopped or was never started.
///
/// # Errors
/// It runs or is paused, the runtime cannot delete it, or its root filesystem cannot be unmounted; Delete can then be
/// repeated.
pub async fn delete_container(container: &Arc<Container>) -> Result<DeleteResponse, TaskError> {
    let init = &container.init;
    let _transition = init.transition.lock().await;
    container.require_status("be deleted", &[Status::CREATED, Status::STOPPED])?;
    init.copies.lock().await.shutdown().await;
    match container.runc.delete(&container.id, false).await {
        // Before a restore, and after a checkpoint that ended the container.
        Err(error) if error.no_such_container() => {}
        result => result?,
    }
    let bundle = container.bundle.clone();
    // It waits for a mount that is in use.
    let unmounted = tokio::task::spawn_blocking(move || unmount_below(&bundle)).await;
    unmounted.map_err(|error| TaskError::Other(format!("unmounting died: {error}")))??;
    release_leases(&container.bundle, &container.host.namespace, &container.id);
    let response = response(init);
    container.host.events.publish(TaskDelete {
        container_id: container.id.clone(),
        pid: response.pid,
        exit_status: response.exit_status,
        exited_at: response.exited_at.clone(),
        ..Default::default()
    });
    Ok(response)
}

fn response(process: &Process) -> DeleteResponse {
    let exit = process.exit();
    DeleteResponse {
        pid: process.pid_u32(),
        exit_status: exit.map(|exit| exit.status).unwrap_or_default(),
        exited_at: exit.map(|exit| timestamp(exit.at)).into(),
        ..Default::default()
    }
}
