//! What happens when a process of a container ends.

use std::sync::Arc;

use containerd_shim_protos::api::Status;
use containerd_shim_protos::events::task::TaskExit;
use containerd_shim_protos::protobuf::well_known_types::timestamp::Timestamp;
use log::{error, warn};
use rustix::process::Signal;
use time::OffsetDateTime;
use tokio::sync::oneshot;

use crate::container::{Container, RunningExec};
use crate::oom;
use crate::process::Process;
use crate::reaper::Exit;

/// Begins the life of the container's first process as `pid`, whose end `exit` will tell.
pub fn begin_init(container: &Arc<Container>, pid: i32, exit: oneshot::Receiver<Exit>) {
    container.set_init_pid(pid);
    tokio::spawn(oom::watch(Arc::clone(container)));
    tokio::spawn(supervise_init(Arc::clone(container), exit));
}

/// Waits for the end of the container's first process and publishes it, as the last of the container's exits.
async fn supervise_init(container: Arc<Container>, exit: oneshot::Receiver<Exit>) {
    let Ok(exit) = exit.await else {
        error!("container {}: the exit of its first process was lost", container.id);
        return;
    };
    container.set_init_ended();
    container.end_read_ahead();
    if container.shares_pid_namespace
        && let Err(error) = container.runc.kill(&container.id, signal_number(Signal::KILL), true).await
        && !error.already_finished()
        && !error.no_such_container()
    {
        warn!("container {}: its other processes could not be killed: {error}", container.id);
    }
    container.end_of_execs().await;
    let init = &container.init;
    let _transition = init.transition.lock().await;
    // cgroup v1 leaves a frozen group behind, in which nothing could be killed or started.
    if init.status() == Status::PAUSED
        && let Err(error) = container.runc.resume(&container.id).await
        // A checkpoint ended it, and the runtime has removed everything.
        && !error.no_such_container()
    {
        warn!("container {}: it ended while it was paused, and cannot be resumed: {error}", container.id);
    }
    publish_exit(&container, init, exit);
}

/// Waits for the end of an exec and publishes it.
pub async fn supervise_exec(
    container: Arc<Container>,
    process: Arc<Process>,
    exit: oneshot::Receiver<Exit>,
    running: RunningExec,
) {
    match exit.await {
        Ok(exit) => {
            let _transition = process.transition.lock().await;
            publish_exit(&container, &process, exit);
        }
        Err(_) => error!("container {}: the exit of exec {} was lost", container.id, process.id),
    }
    drop(running);
}

fn publish_exit(container: &Container, process: &Process, exit: Exit) {
    process.set_exit(exit);
    let id = if process.id.is_empty() { &container.id } else { &process.id };
    container.host.events.publish(TaskExit {
        container_id: container.id.clone(),
        id: id.clone(),
        pid: process.pid_u32(),
        exit_status: exit.status,
        exited_at: Some(timestamp(exit.at)).into(),
        ..Default::default()
    });
}

/// A point in time in the form of containerd's messages.
pub fn timestamp(at: OffsetDateTime) -> Timestamp {
    Timestamp {
        seconds: at.unix_timestamp(),
        nanos: i32::try_from(at.nanosecond()).unwrap_or_default(),
        ..Default::default()
    }
}

/// The number of a signal in the form of containerd's messages.
pub fn signal_number(signal: Signal) -> u32 {
    u32::try_from(signal.as_raw()).unwrap_or_default()
}
