//! `containerd-shim-coldsnap-v1`: a containerd runtime v2 shim (task service v3).
//!
//! Cold containers behave as with `io.containerd.runc.v2`; containers whose root filesystem holds a capsule are
//! restored from it. The lifecycle is carried out by a runc-compatible binary.

mod cgroup;
mod checkpoint;
mod cleanup;
mod console;
mod container;
mod control;
mod create;
mod delete;
mod error;
mod events;
mod exec;
mod exit;
mod features;
mod manager;
mod materialize;
mod mount;
mod network;
mod oom;
mod options;
mod overlay;
mod process;
mod reaper;
mod restore;
mod runc;
mod service;
mod spec;
mod start;
mod stats;
mod stdio;
mod timing;

use std::ffi::OsString;
use std::process::ExitCode;

use containerd_shim::Config;
use manager::Manager;
use tokio::runtime::{Builder, Runtime};

/// The name under which containerd knows this runtime.
const RUNTIME_ID: &str = "io.containerd.coldsnap.v1";
/// A shim waits most of the time: more threads would cost memory and gain nothing.
const WORKERS: usize = 2;
/// For the restore decision and for log files.
const BLOCKING_THREADS: usize = 4;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let flags = match containerd_shim::parse(&arguments) {
        Ok(flags) => flags,
        Err(error) => {
            eprintln!("{RUNTIME_ID}: {error}");
            return ExitCode::FAILURE;
        }
    };
    if flags.version {
        println!("containerd-shim-coldsnap-v1 {} ({RUNTIME_ID})", env!("CARGO_PKG_VERSION"));
        return ExitCode::SUCCESS;
    }
    let is_server = flags.action.is_empty() && !flags.info;
    let runtime = match runtime(is_server) {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("{RUNTIME_ID}: cannot start the asynchronous runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    if is_server {
        // Signals for containerd's process group are not for the shim.
        let _ = rustix::process::setsid();
    }
    // The shim has a reaper of its own, which loses no exit of a process whose pid is not known yet.
    let config = Config { no_reaper: true, ..Config::default() };
    runtime.block_on(containerd_shim::run::<Manager>(RUNTIME_ID, Some(config)));
    // A request that hangs must not keep the process.
    runtime.shutdown_background();
    ExitCode::SUCCESS
}

fn runtime(is_server: bool) -> std::io::Result<Runtime> {
    match is_server {
        true => Builder::new_multi_thread()
            .worker_threads(WORKERS)
            .max_blocking_threads(BLOCKING_THREADS)
            .enable_all()
            .build(),
        // `start`, `delete` and `-info` do one thing and end.
        false => Builder::new_current_thread().enable_all().build(),
    }
}
