//! Out-of-memory events of a container, from the kernel's notifications about its memory cgroup.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use containerd_shim_protos::events::task::TaskOOM;
use log::{debug, warn};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::inotify;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::cgroup::{Cgroup, table};
use crate::container::Container;

/// Publishes an event for each kill by the kernel, until the container's first process has ended.
pub async fn watch(container: Arc<Container>) {
    let result = match container.cgroup() {
        Some(Cgroup::Unified(directory)) => watch_unified(&container, directory).await,
        Some(Cgroup::PerController(directories)) => match directories.get("memory") {
            Some(directory) => watch_memory_controller(&container, directory).await,
            None => Ok(()),
        },
        None => Ok(()),
    };
    if let Err(error) = result {
        warn!("container {}: no out-of-memory events: {error}", container.id);
    }
}

fn publish(container: &Container) {
    container.host.events.publish(TaskOOM { container_id: container.id.clone(), ..Default::default() });
}

/// cgroup v2: the kernel modifies `memory.events`, which counts.
async fn watch_unified(container: &Container, directory: &Path) -> io::Result<()> {
    let kills = || table(directory, "memory.events").get("oom_kill").copied().unwrap_or_default();
    let changes = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
    inotify::add_watch(&changes, directory.join("memory.events"), inotify::WatchFlags::MODIFY)?;
    let mut known = 0;
    watch_descriptor(container, changes, |changes| {
        let mut buffer = [MaybeUninit::uninit(); 512];
        let mut reader = inotify::Reader::new(changes.as_fd(), &mut buffer);
        // One is enough to look at the counter; the rest of the buffer belongs to it.
        reader.next()?;
        let now = kills();
        if now > known {
            publish(container);
        }
        known = now;
        Ok(())
    })
    .await
}

/// cgroup v1: the kernel signals an eventfd that was registered for `memory.oom_control`.
async fn watch_memory_controller(container: &Container, directory: &Path) -> io::Result<()> {
    let signal = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let control = File::open(directory.join("memory.oom_control"))?;
    let registration = format!("{} {}", signal.as_raw_fd(), control.as_raw_fd());
    std::fs::write(directory.join("cgroup.event_control"), registration)?;
    drop(control);
    watch_descriptor(container, signal, |signal| {
        rustix::io::read(signal, &mut [0; 8])?;
        // It is signalled, too, when the group is removed.
        if directory.exists() {
            publish(container);
        }
        Ok(())
    })
    .await
}

async fn watch_descriptor(
    container: &Container,
    descriptor: OwnedFd,
    mut handle: impl FnMut(&OwnedFd) -> io::Result<()>,
) -> io::Result<()> {
    // SAFETY: the `AsyncFd` owns the descriptor, which stays open and the same until it is dropped.
    let descriptor = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }?;
    loop {
        let mut ready = tokio::select! {
            ready = descriptor.readable() => ready?,
            _ = container.init.wait() => break,
        };
        // Would-block only means that the next notification has to be awaited.
        if let Ok(result) = ready.try_io(|descriptor| handle(descriptor.get_ref())) {
            result?;
        }
    }
    debug!("container {}: the out-of-memory watch ends", container.id);
    Ok(())
}
