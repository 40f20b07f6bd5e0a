//! Ctrl-C during work that can be continued later: the first one ends it in order, the second one at once.

use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::output::CliError;

/// Status of a program that SIGINT ended.
const INTERRUPTED: i32 = 130;

/// Becomes true at the first SIGINT or SIGTERM.
///
/// # Errors
/// When the system cannot deliver signals to us.
pub fn flag() -> Result<Arc<AtomicBool>, CliError> {
    let fail = |e| CliError::new("Io", format!("cannot wait for signals: {e}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().map_err(fail)?;
    let (mut interrupt, mut terminate) = {
        let _context = runtime.enter();
        (signal(SignalKind::interrupt()).map_err(fail)?, signal(SignalKind::terminate()).map_err(fail)?)
    };
    let flag = Arc::new(AtomicBool::new(false));
    let raised = flag.clone();
    std::thread::spawn(move || {
        runtime.block_on(either(&mut interrupt, &mut terminate));
        raised.store(true, Ordering::Relaxed);
        runtime.block_on(either(&mut interrupt, &mut terminate));
        process::exit(INTERRUPTED);
    });
    Ok(flag)
}

async fn either(a: &mut Signal, b: &mut Signal) {
    tokio::select! {
        _ = a.recv() => {}
        _ = b.recv() => {}
    }
}
