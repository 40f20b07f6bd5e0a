//! A process that rebuilds payloads beside a running service: what it needs is written into the store first, so that
//! the work does not depend on the container or on whoever asked for it.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use super::capsule::CapsuleDocuments;
use super::files::Place;
use super::record::{self, Reason, Trigger, io_error};
use crate::durable;
use crate::format::artifact::PayloadRequirement;
use crate::format::document;
use crate::format::{DocumentError, FormatError};
use crate::store::NodeStore;

/// The command that does the work.
pub const PROGRAM: &str = "coldsnap";
const DOCUMENT: &str = "materialization request";
const KIND: &str = "coldsnap-materialization-request";
const FILE: &str = ".request.json";
const LOG: &str = ".log";
/// The lowest priority for the processor.
const NICE: i32 = 19;

/// What the process is to do, beside the capsule's documents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    kind: String,
    /// Workers whose payloads are wanted.
    pub workers: Vec<String>,
    /// Who wants them.
    pub trigger: Trigger,
    /// Where the checkpoint is.
    pub places: Vec<Place>,
}

impl Request {
    /// Reads the request in a capsule's directory of the store.
    ///
    /// # Errors
    /// It cannot be read or is malformed.
    pub fn read(directory: &Path) -> Result<Self, DocumentError> {
        document::read(&directory.join(FILE), DOCUMENT, |bytes| {
            let request: Self = document::parse(DOCUMENT, bytes)?;
            match request.kind == KIND {
                true => Ok(request),
                false => Err(FormatError::new(DOCUMENT, "kind", format!("it is not {KIND}"))),
            }
        })
    }
}

/// Notes that these payloads are wanted and writes what a process needs to rebuild them. None when somebody works on
/// all of them already, else the directory to [`start`] with.
///
/// # Errors
/// What the file system answers.
pub fn schedule(
    store: &NodeStore,
    capsule: &CapsuleDocuments,
    payloads: &[PayloadRequirement],
    trigger: Trigger,
    places: &[Place],
) -> Result<Option<PathBuf>, DocumentError> {
    let mut workers = Vec::new();
    for payload in payloads {
        if record::note(store, capsule, payload, trigger, None)? {
            workers.push(payload.worker.clone());
        }
    }
    if workers.is_empty() {
        return Ok(None);
    }
    let directory = record::directory(store, &capsule.digest);
    capsule.write(&directory).map_err(io_error("write", &directory))?;
    let request = Request { kind: KIND.to_owned(), workers, trigger, places: places.to_vec() };
    let path = directory.join(FILE);
    let bytes = document::to_bytes(DOCUMENT, &request)
        .map_err(|source| DocumentError::Format { path: path.clone(), source })?;
    durable::write_file(&path, &bytes, 0o600).map_err(io_error("write", &path))?;
    Ok(Some(directory))
}

/// Notes that payloads cannot be rebuilt, unless somebody works on them.
///
/// # Errors
/// What the file system answers.
pub fn note_failure(
    store: &NodeStore,
    capsule: &CapsuleDocuments,
    payloads: &[PayloadRequirement],
    trigger: Trigger,
    reason: &Reason,
) -> Result<(), DocumentError> {
    for payload in payloads {
        record::note(store, capsule, payload, trigger, Some(reason))?;
    }
    Ok(())
}

/// The `coldsnap` command: beside the running program, else the first in PATH.
pub fn program() -> Option<PathBuf> {
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join(PROGRAM)));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let candidates = beside.into_iter().chain(std::env::split_paths(&path).map(|dir| dir.join(PROGRAM)));
    candidates.into_iter().find(|candidate| candidate.is_file())
}

/// Starts the process for what [`schedule`] wrote, and does not wait for it. The caller reaps it, or ends before it.
/// Without `config` it reads the configuration that the environment names.
///
/// # Errors
/// The program cannot be executed.
pub fn start(program: &Path, store: &NodeStore, config: Option<&Path>, directory: &Path) -> io::Result<u32> {
    let log =
        OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(directory.join(LOG))?;
    let mut command = Command::new(program);
    if let Some(config) = config {
        command.arg("--config").arg(std::path::absolute(config)?);
    }
    let child = command
        .arg("--store")
        .arg(store.root())
        .arg("materialize")
        .arg("--request")
        .arg(directory)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()?;
    Ok(child.id())
}

/// Makes this process one that nobody waits for and that disturbs nobody: a session of its own, lowest priority for
/// processor and disk. What cannot be had is not worth failing for.
pub fn step_back() {
    let _ = rustix::process::setsid();
    let _ = rustix::process::setpriority_process(None, NICE);
    // SAFETY: the call takes three numbers and changes only the calling thread's own priority for the disk:
    // IOPRIO_WHO_PROCESS, this thread, class IDLE. Threads that are started later inherit it.
    unsafe { libc::syscall(libc::SYS_ioprio_set, 1, 0, 3 << 13) };
    // The kernel's out-of-memory killer takes it before any service.
    let _ = fs::write("/proc/self/oom_score_adj", "1000");
}
