//! Running programs and saying, when one fails, which one, with which arguments, and in its own words.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

/// Runs `command` to its end and returns what it wrote, whatever its exit status.
pub fn output(command: &mut Command) -> Result<Output> {
    command.output().with_context(|| format!("cannot run {}", shown(command)))
}

/// Runs `command` and returns its standard output without trailing white space.
///
/// # Errors
/// A status other than 0; the message holds the command line and everything the program wrote.
pub fn run(command: &mut Command) -> Result<String> {
    let out = output(command)?;
    let stdout = String::from_utf8_lossy(&out.stdout);
    if !out.status.success() {
        bail!(
            "{} ended with {}\n{}{stdout}",
            shown(command),
            out.status,
            String::from_utf8_lossy(&out.stderr)
        );
    }
    Ok(stdout.trim_end().to_owned())
}

/// The command line as one would type it, without its environment.
pub fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

/// Asks `ready` every few milliseconds until it answers `Ok(Some(_))`.
///
/// # Errors
/// The first error of `ready`, or `what` with the time waited when `limit` is over.
pub fn wait_for<T>(what: &str, limit: Duration, mut ready: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = ready()? {
            return Ok(value);
        }
        if start.elapsed() > limit {
            bail!("waited {} s in vain for {what}", limit.as_secs_f32());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Kills every child of this process, so that whoever waits for one learns that it ended.
pub fn kill_children() {
    let own = std::process::id().to_string();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        // `pid (name) state ppid ...`; a name may hold spaces and parentheses.
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1));
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        if let (Some(pid), true) = (pid, parent == Some(&own)) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}
