//! One process of a container as containerd sees it: the first one or an exec.

use std::sync::{Mutex, MutexGuard, PoisonError};

use containerd_shim::asynchronous::io::Pty;
use containerd_shim_protos::api::Status;
use tokio::sync::watch;

use crate::reaper::Exit;
use crate::stdio::{Copies, StdioRequest};

/// State that changes during a process's life.
#[derive(Debug)]
struct Life {
    status: Status,
    pid: i32,
}

/// See the module's description.
pub struct Process {
    /// The exec's id; empty for the container's first process.
    pub id: String,
    /// Its standard streams.
    pub stdio: StdioRequest,
    /// Held by whoever changes the process (start, kill, pause, delete, ...), and by its exit: so an exit is
    /// published only after the event that announces the start.
    pub transition: tokio::sync::Mutex<()>,
    /// The copies of its streams.
    pub copies: tokio::sync::Mutex<Copies>,
    life: Mutex<Life>,
    console: Mutex<Option<Pty>>,
    exit: watch::Sender<Option<Exit>>,
}

impl std::fmt::Debug for Process {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Process")
            .field("id", &self.id)
            .field("life", &self.life)
            .finish_non_exhaustive()
    }
}

impl Process {
    /// A process that is not running yet and has no pid.
    pub fn new(id: &str, stdio: StdioRequest) -> Self {
        Self {
            id: id.to_owned(),
            stdio,
            transition: tokio::sync::Mutex::default(),
            copies: tokio::sync::Mutex::default(),
            life: Mutex::new(Life { status: Status::CREATED, pid: 0 }),
            console: Mutex::default(),
            exit: watch::Sender::new(None),
        }
    }

    /// Its state.
    pub fn status(&self) -> Status {
        self.life().status
    }

    /// Sets its state, unless it has ended: that is final.
    pub fn set_status(&self, status: Status) {
        let mut life = self.life();
        if life.status != Status::STOPPED {
            life.status = status;
        }
    }

    /// Its pid as the shim sees it; 0 as long as there is none.
    pub fn pid(&self) -> i32 {
        self.life().pid
    }

    /// Its pid in the form of containerd's messages.
    pub fn pid_u32(&self) -> u32 {
        u32::try_from(self.pid()).unwrap_or_default()
    }

    /// Sets its pid.
    pub fn set_pid(&self, pid: i32) {
        self.life().pid = pid;
    }

    /// How it ended, if it has.
    pub fn exit(&self) -> Option<Exit> {
        *self.exit.borrow()
    }

    /// Records its end; only the first call counts.
    pub fn set_exit(&self, exit: Exit) {
        self.life().status = Status::STOPPED;
        self.exit.send_if_modified(|known| {
            let first = known.is_none();
            known.get_or_insert(exit);
            first
        });
        *self.console() = None;
    }

    /// Waits for its end.
    pub async fn wait(&self) -> Option<Exit> {
        let mut exit = self.exit.subscribe();
        exit.wait_for(Option::is_some).await.ok().and_then(|exit| *exit)
    }

    /// Its terminal.
    pub fn console(&self) -> MutexGuard<'_, Option<Pty>> {
        self.console.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::OffsetDateTime;

    #[tokio::test]
    async fn the_first_exit_is_final() {
        let process = Process::new("", StdioRequest::default());
        let exit = Exit { status: 3, at: OffsetDateTime::now_utc() };
        process.set_exit(exit);
        process.set_exit(Exit { status: 4, ..exit });
        process.set_status(Status::RUNNING);
        assert_eq!(process.wait().await, Some(exit));
        assert_eq!(process.exit(), Some(exit));
        assert_eq!(process.status(), Status::STOPPED);
    }
}
