//! A container of this shim: what is known about it, and its processes. The acts are in files of their own.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use coldsnap::restore::ReadAhead;
use containerd_shim_protos::api::Status;
use tokio::sync::watch;

use crate::cgroup::Cgroup;
use crate::error::TaskError;
use crate::events::Events;
use crate::options::Options;
use crate::overlay::UsedOverlay;
use crate::process::Process;
use crate::reaper::Reaper;
use crate::restore::Plan;
use crate::runc::Runc;
use crate::timing::Timings;

/// What all containers of a shim share.
#[derive(Clone, Debug)]
pub struct Host {
    /// containerd's namespace.
    pub namespace: String,
    /// The way to containerd.
    pub events: Events,
    /// Where exits come from.
    pub reaper: Arc<Reaper>,
}

/// See the module's description.
#[derive(Debug)]
pub struct Container {
    /// containerd's id of it.
    pub id: String,
    /// Its bundle directory.
    pub bundle: PathBuf,
    /// Its runtime options.
    pub options: Options,
    /// The runtime with these options.
    pub runc: Runc,
    /// What it shares with the shim's other containers.
    pub host: Host,
    /// Its first process.
    pub init: Arc<Process>,
    /// Its pid namespace is the host's or another container's: the kernel does not end its processes with the first.
    pub shares_pid_namespace: bool,
    /// It has a network namespace that begins with it.
    pub has_own_network: bool,
    pending_restore: Mutex<Option<Plan>>,
    read_ahead: Mutex<Option<ReadAhead>>,
    overlay: Mutex<Option<UsedOverlay>>,
    /// Phases of its start.
    pub timings: Mutex<Timings>,
    execs: Mutex<HashMap<String, Arc<Process>>>,
    running_execs: watch::Sender<usize>,
    init_ended: AtomicBool,
    cgroup: OnceLock<Cgroup>,
}

/// The facts a container is made from.
#[derive(Debug)]
pub struct NewContainer {
    /// See [`Container::id`].
    pub id: String,
    /// See [`Container::bundle`].
    pub bundle: PathBuf,
    /// See [`Container::options`].
    pub options: Options,
    /// See [`Container::init`].
    pub init: Process,
    /// See [`Container::shares_pid_namespace`].
    pub shares_pid_namespace: bool,
    /// See [`Container::has_own_network`].
    pub has_own_network: bool,
}

impl Container {
    /// A container that does not run yet.
    pub fn new(host: Host, new: NewContainer) -> Self {
        let NewContainer { id, bundle, options, init, shares_pid_namespace, has_own_network } = new;
        let runc = Runc::new(
            &options.binary_name,
            &options.root,
            &host.namespace,
            options.systemd_cgroup,
            Arc::clone(&host.reaper),
        );
        Self {
            id,
            bundle,
            options,
            runc,
            host,
            init: Arc::new(init),
            shares_pid_namespace,
            has_own_network,
            pending_restore: Mutex::default(),
            read_ahead: Mutex::default(),
            overlay: Mutex::default(),
            timings: Mutex::default(),
            execs: Mutex::default(),
            running_execs: watch::Sender::new(0),
            init_ended: AtomicBool::new(false),
            cgroup: OnceLock::new(),
        }
    }

    /// The process that a request means: the first one for an empty id.
    ///
    /// # Errors
    /// There is no such exec.
    pub fn process(&self, exec_id: &str) -> Result<Arc<Process>, TaskError> {
        if exec_id.is_empty() {
            return Ok(Arc::clone(&self.init));
        }
        let found = self.execs().get(exec_id).cloned();
        found.ok_or_else(|| TaskError::NotFound(format!("container {} has no exec {exec_id}", self.id)))
    }

    /// All execs.
    pub fn exec_processes(&self) -> Vec<Arc<Process>> {
        self.execs().values().cloned().collect()
    }

    /// Adds an exec.
    ///
    /// # Errors
    /// Its id is taken.
    pub fn add_exec(&self, process: Process) -> Result<(), TaskError> {
        match self.execs().entry(process.id.clone()) {
            Entry::Occupied(_) => Err(TaskError::AlreadyExists(format!("exec {}", process.id))),
            Entry::Vacant(vacant) => {
                vacant.insert(Arc::new(process));
                Ok(())
            }
        }
    }

    /// Forgets an exec.
    pub fn remove_exec(&self, exec_id: &str) {
        self.execs().remove(exec_id);
    }

    /// Counts an exec as running; its [`RunningExec`] must live until its exit was published.
    ///
    /// # Errors
    /// The container's first process has ended: nothing can be started in it.
    pub fn count_running_exec(self: &Arc<Self>) -> Result<RunningExec, TaskError> {
        let running = RunningExec::new(Arc::clone(self));
        // After counting, so that either the end of the first process waits for this exec, or the exec sees the end.
        if self.init_ended.load(Ordering::SeqCst) {
            return Err(self.wrong_state("no exec can start: its first process has ended"));
        }
        Ok(running)
    }

    /// Refuses new execs and waits for the end of those that run.
    pub async fn end_of_execs(&self) {
        self.init_ended.store(true, Ordering::SeqCst);
        let mut running = self.running_execs.subscribe();
        // The sender lives in `self`.
        let _ = running.wait_for(|&count| count == 0).await;
    }

    /// Refuses new execs.
    pub fn set_init_ended(&self) {
        self.init_ended.store(true, Ordering::SeqCst);
    }

    /// Fails unless the first process is in one of `allowed`.
    ///
    /// # Errors
    /// It is not; `act` says what cannot be done then.
    pub fn require_status(&self, act: &str, allowed: &[Status]) -> Result<(), TaskError> {
        let status = self.init.status();
        if allowed.contains(&status) {
            return Ok(());
        }
        Err(self.wrong_state(&format!("cannot {act}: it is {}", status_name(status))))
    }

    /// An error about this container's state.
    pub fn wrong_state(&self, problem: &str) -> TaskError {
        TaskError::FailedPrecondition(format!("container {}: {problem}", self.id))
    }

    /// The timings, locked.
    pub fn timings(&self) -> MutexGuard<'_, Timings> {
        self.timings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the restore that Create decided.
    pub fn take_pending_restore(&self) -> Option<Plan> {
        self.pending_restore.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Sets the restore that Start carries out.
    pub fn set_pending_restore(&self, plan: Plan) {
        *self.pending_restore.lock().unwrap_or_else(PoisonError::into_inner) = Some(plan);
    }

    /// Lets a restore's read-ahead go on after the restore, which needs only a part of what it reads, until
    /// [`Container::end_read_ahead`].
    pub fn keep_read_ahead(&self, read_ahead: Option<ReadAhead>) {
        *self.read_ahead.lock().unwrap_or_else(PoisonError::into_inner) = read_ahead;
    }

    /// Ends the read-ahead: nobody is left to profit from it.
    pub fn end_read_ahead(&self) {
        self.keep_read_ahead(None);
    }

    /// Keeps the overlay that the container was restored from in place as long as the container exists.
    pub fn keep_overlay(&self, overlay: Option<UsedOverlay>) {
        *self.overlay.lock().unwrap_or_else(PoisonError::into_inner) = overlay;
    }

    /// Begins the life of the first process as `pid`.
    pub fn set_init_pid(&self, pid: i32) {
        self.init.set_pid(pid);
        // Later the process may be gone, and with it the way to find them.
        if let Some(cgroup) = Cgroup::of_process(pid) {
            let _ = self.cgroup.set(cgroup);
        }
    }

    /// The cgroups of the container, from its first start on.
    pub fn cgroup(&self) -> Option<&Cgroup> {
        self.cgroup.get()
    }

    /// The file in the bundle that takes the pid of the first process.
    pub fn pid_file(&self) -> PathBuf {
        self.bundle.join(INIT_PID_FILE)
    }

    /// The container's CRIU configuration.
    pub fn criu_config_file(&self) -> PathBuf {
        self.bundle.join(CRIU_CONFIG_FILE)
    }

    fn execs(&self) -> MutexGuard<'_, HashMap<String, Arc<Process>>> {
        self.execs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// In the bundle: pid of the container's first process.
pub const INIT_PID_FILE: &str = "init.pid";
/// In the bundle: the file that annotation `org.criu.config` names.
pub const CRIU_CONFIG_FILE: &str = "criu.conf";

/// See [`Container::count_running_exec`].
#[derive(Debug)]
pub struct RunningExec {
    container: Arc<Container>,
}

impl RunningExec {
    fn new(container: Arc<Container>) -> Self {
        container.running_execs.send_modify(|count| *count += 1);
        Self { container }
    }
}

impl Drop for RunningExec {
    fn drop(&mut self) {
        self.container.running_execs.send_modify(|count| *count -= 1);
    }
}

/// A state in words.
pub fn status_name(status: Status) -> &'static str {
    match status {
        Status::CREATED => "created",
        Status::RUNNING => "running",
        Status::STOPPED => "stopped",
        Status::PAUSED => "paused",
        Status::PAUSING => "pausing",
        Status::UNKNOWN => "in an unknown state",
    }
}

/// Reads a pid file of the runtime.
///
/// # Errors
/// It is not there, or holds no pid.
pub fn read_pid(path: &Path) -> Result<i32, TaskError> {
    let act = format!("read the pid file {}", path.display());
    let text = std::fs::read_to_string(path).map_err(TaskError::io(act.clone()))?;
    let pid = text.trim().parse().ok().filter(|&pid| pid > 0);
    pid.ok_or_else(|| TaskError::Other(format!("cannot {act}: it holds {text:?}")))
}
