//! The guest image and how to ask a guest (see `src/bin/guest`) to check its memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::image::{self, Layer};
use crate::process::wait_for;

/// The reference of the guest's image.
pub const IMAGE: &str = "demo.local/guest:1";
/// Where questions and answers are files, in the guest's own root.
pub const CONTROL: &str = "/guest";
/// Where the image has jemalloc, for `LD_PRELOAD`.
pub const JEMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2";

/// Writes the guest's image to `archive`: the guest program at `/usr/bin/guest`, a shell, a few tools and jemalloc.
pub fn write_image(archive: &Path, guest: &Path) -> Result<()> {
    let mut layer = Layer::new();
    layer.programs(&[
        "/bin/sh",
        "/usr/bin/cat",
        "/usr/bin/echo",
        "/usr/bin/sleep",
        "/usr/bin/true",
        "/usr/bin/id",
        JEMALLOC,
    ])?;
    layer.libraries_of(&[guest])?;
    layer.directory(CONTROL);
    layer.file(guest, "/usr/bin/guest")?;
    let config = json!({"Cmd": ["/usr/bin/guest", "block"], "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"], "WorkingDir": "/"});
    image::write(archive, IMAGE, &layer, &config)
}

/// The control directory of the guest whose process is `pid`, in a container or on the node.
pub fn control(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/root{CONTROL}"))
}

/// Waits until the guest has made its memory.
pub fn wait_ready(control: &Path) -> Result<()> {
    let answer = control.join("answer");
    wait_for("the guest to make its memory", Duration::from_secs(30), || Ok(answer.exists().then_some(())))
}

/// Asks one thing and returns the answer.
///
/// # Errors
/// The guest said `bad`, or nothing within 30 seconds.
pub fn ask(control: &Path, command: &str) -> Result<String> {
    // A restored guest finds the last answer of the captured one: a number must not come twice, whoever asks.
    let number = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
    let question = control.join("ask");
    let partial = control.join("ask.partial");
    fs::write(&partial, format!("{number} {command}\n"))
        .with_context(|| format!("cannot write {}", partial.display()))?;
    fs::rename(&partial, &question).with_context(|| format!("cannot publish {}", question.display()))?;
    let prefix = format!("{number} ");
    let answer = wait_for(&format!("the guest's answer to {command:?}"), Duration::from_secs(30), || {
        let text = fs::read_to_string(control.join("answer")).context("the guest has no answer file")?;
        Ok(text.strip_prefix(&prefix).map(|answer| answer.trim_end().to_owned()))
    })?;
    match answer.strip_prefix("bad ") {
        Some(wrong) => bail!("the guest says to {command:?}: {wrong}"),
        None => Ok(answer),
    }
}

/// Asks for a check of all memory; returns how often this process was asked before and since it was started.
pub fn check(control: &Path) -> Result<u64> {
    let answer = ask(control, "check")?;
    match answer.split(' ').collect::<Vec<_>>()[..] {
        ["ok", bytes, "asked", asked] if bytes != "0" => {
            asked.parse().with_context(|| format!("cannot understand {answer:?}"))
        }
        _ => bail!("the guest says {answer:?}"),
    }
}
