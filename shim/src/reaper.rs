//! Reaps every child of the shim and hands exit statuses to whoever waits for them.
//!
//! The shim is a child subreaper: it inherits the containers' processes from the runtime that started them, and
//! orphans from containers that share the host's pid namespace. A `waitpid` for one pid cannot reap the unknown
//! ones, so one place waits for all. A process that was started by the runtime becomes known only when its pid
//! file has been read; an exit that comes before is kept as long as somebody is about to ask (`Inheritance`).

use std::collections::HashMap;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use log::{debug, warn};
use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, kill_process, set_parent_process_death_signal, wait,
};
use time::OffsetDateTime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// Base that shells and containerd add to a signal number to make an exit status.
const SIGNAL_STATUS_BASE: u32 = 128;

/// How and when a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// The exit code, or 128 + the number of the signal that ended it.
    pub status: u32,
    /// When the shim reaped it.
    pub at: OffsetDateTime,
}

/// A child that the shim started itself.
#[derive(Debug)]
pub struct Spawned {
    /// Resolves when the child was reaped.
    pub exit: oneshot::Receiver<Exit>,
}

#[derive(Debug, Default)]
struct Children {
    watched: HashMap<i32, oneshot::Sender<Exit>>,
    unclaimed: HashMap<i32, Exit>,
    inheriting: usize,
}

/// See the module's description.
#[derive(Debug, Default)]
pub struct Reaper {
    children: Mutex<Children>,
}

impl Reaper {
    /// Starts reaping: must be called inside a tokio runtime, once per process, before the first child is started.
    ///
    /// # Errors
    /// The SIGCHLD handler cannot be installed.
    pub fn start() -> io::Result<Arc<Self>> {
        let reaper = Arc::new(Self::default());
        let mut children_changed = signal(SignalKind::child())?;
        let this = Arc::clone(&reaper);
        tokio::spawn(async move {
            while children_changed.recv().await.is_some() {
                this.reap();
            }
        });
        Ok(reaper)
    }

    /// Starts `command`; the child dies with the shim (the runtime's helpers must not outlive a killed shim).
    ///
    /// Must be called on a thread that lives as long as the shim: the kernel ties the death signal to the thread.
    ///
    /// # Errors
    /// The program cannot be executed.
    pub fn spawn(&self, command: &mut Command) -> io::Result<Spawned> {
        // SAFETY: the closure makes one system call (prctl), allocates nothing and takes no lock.
        unsafe { command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?)) };
        // Holding the lock keeps `reap` from seeing the child before it is registered.
        let mut children = self.lock();
        let child = command.spawn()?;
        let (sender, exit) = oneshot::channel();
        if let Ok(pid) = i32::try_from(child.id()) {
            children.watched.insert(pid, sender);
        }
        Ok(Spawned { exit })
    }

    /// Announces that the runtime is about to leave a process to the shim. Exits of unknown children are kept
    /// until the last such announcement is dropped.
    pub fn inheritance(self: &Arc<Self>) -> Inheritance {
        self.lock().inheriting += 1;
        Inheritance { reaper: Arc::clone(self) }
    }

    /// Sends a signal to a child that has not been reaped.
    ///
    /// # Errors
    /// `ESRCH` when the child was reaped (its pid may belong to another process by now), or `kill`'s own error.
    pub fn kill(&self, pid: i32, number: u32) -> io::Result<()> {
        let children = self.lock();
        if !children.watched.contains_key(&pid) {
            return Err(rustix::io::Errno::SRCH.into());
        }
        let (Some(pid), Some(signal)) = (Pid::from_raw(pid), signal_from_number(number)) else {
            return Err(rustix::io::Errno::INVAL.into());
        };
        Ok(kill_process(pid, signal)?)
    }

    fn reap(&self) {
        loop {
            // Under the lock, so that `kill` never signals a pid that has just been freed.
            let mut children = self.lock();
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => children.ended(pid.as_raw_pid(), status),
                Ok(None) | Err(rustix::io::Errno::CHILD) => return,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    warn!("cannot reap children: {error}");
                    return;
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Children> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Children {
    fn ended(&mut self, pid: i32, status: WaitStatus) {
        let Some(status) = exit_status(status) else { return };
        let exit = Exit { status, at: OffsetDateTime::now_utc() };
        match self.watched.remove(&pid) {
            // The receiver may be gone: then nobody wants to know.
            Some(sender) => drop(sender.send(exit)),
            None if self.inheriting > 0 => drop(self.unclaimed.insert(pid, exit)),
            None => debug!("reaped orphan {pid}, status {status}"),
        }
    }
}

/// While this lives, the exit of an inherited child is not lost. See [`Reaper::inheritance`].
#[derive(Debug)]
pub struct Inheritance {
    reaper: Arc<Reaper>,
}

impl Inheritance {
    /// Waits for the exit of the inherited child `pid`, also when it has already been reaped.
    pub fn watch(&self, pid: i32) -> oneshot::Receiver<Exit> {
        let (sender, exit) = oneshot::channel();
        let mut children = self.reaper.lock();
        match children.unclaimed.remove(&pid) {
            Some(early) => drop(sender.send(early)),
            None => drop(children.watched.insert(pid, sender)),
        }
        exit
    }
}

impl Drop for Inheritance {
    fn drop(&mut self) {
        let mut children = self.reaper.lock();
        children.inheriting -= 1;
        if children.inheriting == 0 {
            children.unclaimed.clear();
        }
    }
}

/// The signal of that number; `None` outside of what the kernel knows (0 is not a signal that can be sent here).
pub fn signal_from_number(number: u32) -> Option<Signal> {
    let number = i32::try_from(number).ok().filter(|number| (1..=64).contains(number))?;
    // SAFETY: rustix leaves the numbers that libc reserves (32 and 33) to us; sending one is harmless to the
    // shim, which never sends signals to itself.
    Some(unsafe { Signal::from_raw_unchecked(number) })
}

fn exit_status(status: WaitStatus) -> Option<u32> {
    let code = status.exit_status().and_then(|code| u32::try_from(code).ok());
    let signal = status.terminating_signal().and_then(|signal| u32::try_from(signal).ok());
    code.or(signal.map(|signal| SIGNAL_STATUS_BASE + signal))
}

#[cfg(test)]
mod tests {
    use super::*;

    // The one test of this crate that starts processes: a reaper takes all children of the test process.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[expect(clippy::zombie_processes, reason = "the reaper waits for them")]
    async fn exits_reach_those_who_wait_also_late() {
        let reaper = Reaper::start().unwrap();

        let failing = reaper.spawn(Command::new("sh").args(["-c", "exit 7"])).unwrap();
        assert_eq!(failing.exit.await.unwrap().status, 7);
        let killed = reaper.spawn(Command::new("sh").args(["-c", "kill -9 $$"])).unwrap();
        assert_eq!(killed.exit.await.unwrap().status, 137);

        // A child that nobody watches ends before its pid is known.
        let inheritance = reaper.inheritance();
        let orphan = Command::new("sh").args(["-c", "exit 3"]).spawn().unwrap();
        let pid = i32::try_from(orphan.id()).unwrap();
        while !reaper.lock().unclaimed.contains_key(&pid) {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        assert_eq!(inheritance.watch(pid).await.unwrap().status, 3);
        assert_eq!(reaper.kill(pid, 15).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        drop(inheritance);

        let sleeping = Command::new("sleep").arg("100").spawn().unwrap();
        let pid = i32::try_from(sleeping.id()).unwrap();
        let exit = reaper.inheritance().watch(pid);
        reaper.kill(pid, 15).unwrap();
        assert_eq!(exit.await.unwrap().status, 143);
        assert!(reaper.lock().watched.is_empty());
    }

    #[test]
    fn only_real_signal_numbers_are_accepted() {
        assert_eq!(signal_from_number(9), Some(Signal::KILL));
        assert!(signal_from_number(34).is_some());
        assert_eq!(signal_from_number(0), None);
        assert_eq!(signal_from_number(65), None);
    }
}
