//! Start: of a created container, of a restore, and of an exec.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use containerd_shim_protos::api::Status;
use containerd_shim_protos::events::task::TaskStart;
use log::{info, warn};
use time::OffsetDateTime;

use crate::console::ConsoleSocket;
use crate::container::{Container, read_pid};
use crate::create::{Streams, connect_streams, create_cold, decide_portable};
use crate::error::TaskError;
use crate::exit::begin_init;
use crate::mount::unmount_below;
use crate::network::bring_up_loopback;
use crate::reaper::Exit;
use crate::restore::Plan;
use crate::runc::{self, RestoreImages, RuncError};

/// Exit status of a process that never ran.
pub const NEVER_RAN: u32 = 255;
/// Directory in the bundle for CRIU's files during a restore.
const RESTORE_WORK_DIR: &str = "restore-work";

/// Starts the container's first process and answers its pid.
///
/// # Errors
/// The container is not in the state "created", or the runtime failed.
pub async fn start_init(container: &Arc<Container>) -> Result<u32, TaskError> {
    let init = &container.init;
    // Held until TaskStart is published: an exit that comes earlier waits for it.
    let _transition = init.transition.lock().await;
    container.require_status("be started", &[Status::CREATED])?;
    let began = Instant::now();
    let act = match container.take_pending_restore() {
        None => {
            container.runc.start(&container.id).await?;
            "cold start"
        }
        Some(plan) => start_restore(container, plan).await.inspect_err(|_| {
            // Clients delete only what has stopped, and this container can never run.
            init.set_exit(Exit { status: NEVER_RAN, at: OffsetDateTime::now_utc() });
        })?,
    };
    container.timings().record("start", began);
    init.set_status(Status::RUNNING);
    container.host.events.publish(TaskStart {
        container_id: container.id.clone(),
        pid: init.pid_u32(),
        ..Default::default()
    });
    container.timings().report(act, &container.id, &container.bundle);
    Ok(init.pid_u32())
}

async fn start_restore(container: &Arc<Container>, mut plan: Plan) -> Result<&'static str, TaskError> {
    loop {
        let read_ahead = plan.read_ahead.take();
        let error = match restore(container, &plan).await {
            Ok(()) => {
                container.keep_read_ahead(read_ahead);
                container.keep_overlay(plan.overlay);
                return Ok("restore");
            }
            Err(error) => error,
        };
        discard_failed_restore(container).await;
        drop(read_ahead);
        if let Some(overlay) = plan.overlay.take() {
            warn!("container {}: overlay {} could not be restored: {error}", container.id, overlay.id);
            let root = overlay.take_away().await?;
            match decide_portable(container, root).await? {
                Some(portable) => {
                    plan = portable;
                    continue;
                }
                None => break,
            }
        }
        if !plan.may_start_cold {
            return Err(error);
        }
        warn!("container {}: cold start after a failed restore: {error}", container.id);
        container.host.events.publish_fallback(&container.id, &error.to_string());
        break;
    }
    create_cold(container).await?;
    container.runc.start(&container.id).await?;
    Ok("cold start")
}

async fn restore(container: &Arc<Container>, plan: &Plan) -> Result<(), TaskError> {
    let began = Instant::now();
    let work = container.bundle.join(RESTORE_WORK_DIR);
    prepare_work_directory(&work)?;
    let config = container.criu_config_file();
    std::fs::write(&config, &plan.criu_config)
        .map_err(TaskError::io(format!("write {}", config.display())))?;

    let streams = Streams::open_init(container)?;
    let pid_file = container.pid_file();
    let inheritance = container.host.reaper.inheritance();
    let new = runc::NewContainer {
        pid_file: &pid_file,
        console_socket: streams.console.as_ref().map(ConsoleSocket::path),
        no_pivot: container.options.no_pivot_root,
        no_new_keyring: container.options.no_new_keyring,
    };
    let images = RestoreImages { images: &plan.images, work: &work, parent: plan.parent.as_deref() };
    container
        .runc
        .restore(&container.id, &container.bundle, &new, &images, streams.child)
        .await
        .map_err(|error| explained(&error, &plan.capture_id, &work))?;
    container.timings().record("restore", began);

    let began = Instant::now();
    let pid = read_pid(&pid_file)?;
    let exit = inheritance.watch(pid);
    if container.has_own_network {
        bring_up_loopback(pid)?;
    }
    connect_streams(&container.init, streams.console, streams.ends).await?;
    begin_init(container, pid, exit);
    container.timings().record("post", began);
    info!("container {}: restored {} as pid {pid}", container.id, plan.capture_id);
    Ok(())
}

/// CRIU appends to its log: what an earlier attempt left would be quoted as today's error.
fn prepare_work_directory(work: &Path) -> Result<(), TaskError> {
    let act = format!("make {}", work.display());
    if work.exists() {
        std::fs::remove_dir_all(work).map_err(TaskError::io(act.clone()))?;
    }
    std::fs::create_dir(work).map_err(TaskError::io(act))
}

fn explained(error: &RuncError, capture: &str, work: &Path) -> TaskError {
    let log = work.join("restore.log");
    let lines = coldsnap::criu::log::decisive_lines(&log);
    match lines.is_empty() {
        true => TaskError::Other(format!("cannot restore {capture}: {error}")),
        false => TaskError::Other(format!(
            "cannot restore {capture}: CRIU says: {} (log: {}; {error})",
            lines.join("; "),
            log.display()
        )),
    }
}

async fn discard_failed_restore(container: &Container) {
    container.init.copies.lock().await.renew().await;
    *container.init.console() = None;
    if let Err(error) = container.runc.delete(&container.id, true).await {
        warn!("container {}: after a failed restore: {error}", container.id);
    }
    // CRIU mounts its view of the cgroups there, and leaves it when it fails early.
    if let Err(error) = unmount_below(&container.bundle.join(RESTORE_WORK_DIR)) {
        warn!("container {}: after a failed restore: {error}", container.id);
    }
}
