//! The `coldsnap` command, as a manager uses it: with `--json`.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;

use crate::node::program;
use crate::process;

/// What `coldsnap --json` prints when it fails.
#[derive(Debug, Deserialize)]
pub struct Failure {
    /// Stable name of the kind of error.
    pub kind: String,
    /// For people.
    pub message: String,
}

/// `coldsnap --json` with `arguments`, not yet started.
pub fn command<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(program("coldsnap"));
    command.arg("--json").args(arguments);
    command
}

/// Runs `coldsnap` and returns the one value that it prints.
pub fn run<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> Result<Value> {
    let json = process::run(&mut command(arguments))?;
    serde_json::from_str(&json).with_context(|| format!("coldsnap --json printed {json:?}"))
}

/// Captures container `id` as `image`; `further` are more arguments.
pub fn capture(id: &str, image: &str, further: &[&str]) -> Result<Value> {
    run(["capture", id, "--image", image].iter().chain(further))
}

/// Runs `coldsnap`, which has to fail as the manual says: status 1 and one error value.
pub fn fails<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> Result<Failure> {
    #[derive(Deserialize)]
    struct Printed {
        error: Failure,
    }
    let out = process::output(&mut command(arguments))?;
    ensure!(out.status.code() == Some(1), "expected status 1: {out:?}");
    let printed: Printed =
        serde_json::from_slice(&out.stdout).with_context(|| format!("not an error value: {out:?}"))?;
    Ok(printed.error)
}
