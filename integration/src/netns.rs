//! Acting inside a container's network namespace, as a client on the same host would through its address.

use std::fs::File;
use std::process::Command;

use anyhow::{Context, Result, anyhow};
use rustix::fd::AsFd;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::process;

/// Runs `act` on a thread that has joined the network namespace of process `pid`; sockets made there live there.
pub fn within<T: Send>(pid: u32, act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let path = format!("/proc/{pid}/ns/net");
    let namespace = File::open(&path).with_context(|| format!("cannot open {path}"))?;
    std::thread::scope(|scope| {
        scope
            .spawn(move || {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                    .with_context(|| format!("cannot join the network namespace {path}"))?;
                act()
            })
            .join()
            .map_err(|_| anyhow!("the client of process {pid} panicked"))?
    })
}

/// Sets the loopback device of process `pid`'s network namespace up. `runc restore` leaves it down in a namespace it made itself, and the Go shim
/// does not mend that: without this no client reaches a server that the peer restored.
pub fn raise_loopback(pid: u32) -> Result<()> {
    within(pid, || process::run(Command::new("ip").args(["link", "set", "lo", "up"])).map(drop))
}
