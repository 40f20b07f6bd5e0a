//! Other programs on this host.

use std::process::Command;

/// The version that `program --version` prints (see [`coldsnap::node::version_in`]). `None` when the program cannot be
/// run.
pub fn version(program: &str) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    coldsnap::node::version_in(&String::from_utf8_lossy(&output.stdout))
}
