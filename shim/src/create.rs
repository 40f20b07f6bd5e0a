//! Create: the root filesystem, the spec, the decision, and for a cold start the created container.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use coldsnap::config::MaterializeMode;
use coldsnap::restore::{ModeError, RestoreMode};
use containerd_shim_protos::api::CreateTaskRequest;
use containerd_shim_protos::events::task::{TaskCreate, TaskIO};
use log::{info, warn};

use crate::console::ConsoleSocket;
use crate::container::{CRIU_CONFIG_FILE, Container, Host, NewContainer, read_pid};
use crate::error::TaskError;
use crate::exit::begin_init;
use crate::materialize::{Start, decide_and_recover, release_leases};
use crate::mount::{RootMounts, mount_all, unmount_below};
use crate::options::Options;
use crate::overlay::{self, OverlayMode, OverlayModeError, Root};
use crate::process::Process;
use crate::restore::{NoRestore, Plan, from_checkpoint};
use crate::runc::{self, ChildStdio};
use crate::spec::{Namespace, Spec};
use crate::stdio::{ShimEnds, StdioRequest, make_pipes};

/// Name of the console socket of the first process, in the bundle.
const CONSOLE_SOCKET: &str = "init-console.sock";

/// Makes the container of a request; nothing of it is left after an error.
///
/// # Errors
/// The request cannot be used, the root filesystem not be mounted, a required restore was refused, or the runtime
/// failed.
pub async fn create(host: Host, request: CreateTaskRequest) -> Result<Arc<Container>, TaskError> {
    let bundle = PathBuf::from(&request.bundle);
    let options = Options::decode(request.options.as_ref())?;
    options.save(&bundle)?;
    let mounts = RootMounts::sort(request.rootfs.clone())?;
    let rootfs = bundle.join("rootfs");
    let (namespace, id) = (host.namespace.clone(), request.id.clone());
    create_in(host, request, options, &mounts, &rootfs).await.inspect_err(|_| {
        unmount_below(&rootfs).unwrap_or_else(|error| warn!("after a failed create: {error}"));
        release_leases(&bundle, &namespace, &id);
    })
}

async fn create_in(
    host: Host,
    request: CreateTaskRequest,
    options: Options,
    mounts: &RootMounts,
    rootfs: &Path,
) -> Result<Arc<Container>, TaskError> {
    let bundle = PathBuf::from(&request.bundle);
    let mut spec = Spec::load(&bundle)?;
    let began = Instant::now();
    if !mounts.direct.is_empty() {
        match std::fs::create_dir(rootfs) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(TaskError::io(format!("make {}", rootfs.display()))(error));
            }
            _ => mount_all(&mounts.direct, rootfs)?,
        }
    }
    for bind in &mounts.lifted {
        spec.add_bind(bind)?;
    }
    spec.set_criu_config(&bundle.join(CRIU_CONFIG_FILE))?;
    spec.save()?;

    let stdio = StdioRequest {
        stdin: request.stdin.clone(),
        stdout: request.stdout.clone(),
        stderr: request.stderr.clone(),
        terminal: request.terminal,
    };
    let container = Arc::new(Container::new(
        host,
        NewContainer {
            id: request.id.clone(),
            bundle,
            options,
            init: Process::new("", stdio),
            shares_pid_namespace: spec.namespace("pid") != Namespace::Own,
            has_own_network: spec.namespace("network") == Namespace::Own,
        },
    ));
    container.timings().record("mount", began);

    // Held until TaskCreate is published: an exit that comes earlier waits for it.
    let transition = container.init.transition.lock().await;
    let began = Instant::now();
    let pending = decide_restore(&container, rootfs, mounts, spec, &request).await?;
    container.timings().record("decide", began);
    match pending {
        Some(plan) => {
            info!("container {}: Start will restore {}", container.id, plan.capture_id);
            container.set_pending_restore(plan);
        }
        None => create_cold(&container).await?,
    }
    publish(&container, request);
    drop(transition);
    Ok(container)
}

async fn decide_restore(
    container: &Container,
    mounted: &Path,
    mounts: &RootMounts,
    spec: Spec,
    request: &CreateTaskRequest,
) -> Result<Option<Plan>, TaskError> {
    if !request.checkpoint.is_empty() {
        return from_checkpoint(&request.checkpoint, &request.parent_checkpoint).map(Some).map_err(refused);
    }
    let mode = match spec.annotation(coldsnap::capsule::RESTORE_ANNOTATION) {
        Some(text) => {
            text.parse().map_err(|error: ModeError| TaskError::InvalidArgument(error.to_string()))?
        }
        None => RestoreMode::default(),
    };
    let overlay = match spec.annotation(coldsnap::capsule::OVERLAY_ANNOTATION) {
        Some(text) => {
            text.parse().map_err(|error: OverlayModeError| TaskError::InvalidArgument(error.to_string()))?
        }
        None => OverlayMode::default(),
    };
    let materialize = match spec.annotation(coldsnap::capsule::MATERIALIZE_ANNOTATION) {
        Some(text) => {
            let mode = text.parse::<MaterializeMode>();
            Some(mode.map_err(|error| TaskError::InvalidArgument(error.to_string()))?)
        }
        None => None,
    };
    let root = Root {
        mounted: mounted.to_owned(),
        path: spec.rootfs().unwrap_or_else(|| mounted.to_owned()),
        mounts: mounts.direct.clone(),
        spec: spec.into_document(),
        mode,
        materialize,
    };
    if mode != RestoreMode::Never && overlay == OverlayMode::Auto {
        let began = Instant::now();
        if let Some(plan) = overlay::decide(container, &root).await? {
            container.timings().record("overlay", began);
            return Ok(Some(plan));
        }
    }
    decide_portable(container, root).await
}

fn refused(error: NoRestore) -> TaskError {
    TaskError::FailedPrecondition(error.to_string())
}

/// Decides about the capsule in the root's own layers; a cold start that should have been a restore is announced.
///
/// # Errors
/// A required restore was refused.
pub async fn decide_portable(container: &Container, root: Root) -> Result<Option<Plan>, TaskError> {
    let start = Start {
        id: container.id.clone(),
        namespace: container.host.namespace.clone(),
        bundle: container.bundle.clone(),
        rootfs: root.path,
        restore: root.mode,
        materialize: root.materialize,
    };
    // It may hash or rebuild a payload of many gigabytes.
    let decision = tokio::task::spawn_blocking(move || decide_and_recover(&start, &root.spec));
    match decision.await.map_err(|error| TaskError::Other(format!("the restore decision died: {error}")))? {
        Err(NoRestore::Fallback(reason)) => {
            warn!("container {}: cold start instead of a restore: {reason}", container.id);
            container.host.events.publish_fallback(&container.id, &reason);
            Ok(None)
        }
        decision => decision.map_err(refused),
    }
}

/// Has the runtime create the container, whose first process then waits for the runtime's `start`.
///
/// # Errors
/// The standard streams cannot be made, or the runtime failed; it leaves no container then.
pub async fn create_cold(container: &Arc<Container>) -> Result<(), TaskError> {
    let began = Instant::now();
    let streams = Streams::open_init(container)?;
    let pid_file = container.pid_file();
    let inheritance = container.host.reaper.inheritance();
    let new = runc::NewContainer {
        pid_file: &pid_file,
        console_socket: streams.console.as_ref().map(ConsoleSocket::path),
        no_pivot: container.options.no_pivot_root,
        no_new_keyring: container.options.no_new_keyring,
    };
    container.runc.create(&container.id, &container.bundle, &new, streams.child).await?;
    let connected = match connect_streams(&container.init, streams.console, streams.ends).await {
        Ok(()) => read_pid(&pid_file),
        Err(error) => Err(error),
    };
    match connected {
        Ok(pid) => {
            begin_init(container, pid, inheritance.watch(pid));
            container.timings().record("runtime_create", began);
            Ok(())
        }
        Err(error) => {
            container.init.copies.lock().await.abort().await;
            if let Err(delete) = container.runc.delete(&container.id, true).await {
                warn!("container {}: after a failed create: {delete}", container.id);
            }
            Err(error)
        }
    }
}

/// The streams of a process that is about to begin.
#[derive(Debug)]
pub struct Streams {
    /// The descriptors for the runtime.
    pub child: ChildStdio,
    /// Where a terminal will arrive.
    pub console: Option<ConsoleSocket>,
    /// The shim's ends of pipes.
    pub ends: ShimEnds,
}

impl Streams {
    /// Makes what `request` asks for; pipes belong to user and group `owner`, a console socket gets the name `socket`
    /// in the bundle.
    ///
    /// # Errors
    /// A pipe or socket cannot be made, or a URI not be used.
    pub fn open(
        bundle: &Path,
        socket: &str,
        request: &StdioRequest,
        owner: (u32, u32),
    ) -> Result<Self, TaskError> {
        if request.terminal {
            let console = ConsoleSocket::listen(bundle, socket)?;
            return Ok(Self {
                child: ChildStdio::default(),
                console: Some(console),
                ends: ShimEnds::default(),
            });
        }
        let (child, ends) = make_pipes(request, owner)?;
        Ok(Self { child, console: None, ends })
    }

    /// Those of the container's first process.
    ///
    /// # Errors
    /// As [`Streams::open`].
    pub fn open_init(container: &Container) -> Result<Self, TaskError> {
        let owner = (container.options.io_uid, container.options.io_gid);
        Self::open(&container.bundle, CONSOLE_SOCKET, &container.init.stdio, owner)
    }
}

/// Starts the copies between a process and containerd's fifos or log files.
///
/// # Errors
/// The terminal did not arrive, or a fifo or file cannot be opened.
pub async fn connect_streams(
    process: &Process,
    console: Option<ConsoleSocket>,
    ends: ShimEnds,
) -> Result<(), TaskError> {
    let mut copies = process.copies.lock().await;
    match console {
        Some(socket) => {
            let console = socket.receive().await?;
            copies.start_console(&process.stdio, &console)?;
            *process.console() = Some(console);
        }
        None => copies.start_pipes(&process.stdio, ends)?,
    }
    Ok(())
}

fn publish(container: &Container, request: CreateTaskRequest) {
    container.host.events.publish(TaskCreate {
        container_id: request.id,
        bundle: request.bundle,
        rootfs: request.rootfs,
        io: Some(TaskIO {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            terminal: request.terminal,
            ..Default::default()
        })
        .into(),
        checkpoint: request.checkpoint,
        pid: container.init.pid_u32(),
        ..Default::default()
    });
}
