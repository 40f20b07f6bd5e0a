//! The guest image and how to ask a guest (see `src/bin/guest`) to check its memory.

use std::fs;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::image::{self, Layer};
use crate::pattern::{self, PAGE, WORDS};
use crate::process::wait_for;

/// The reference of the guest's image.
pub const IMAGE: &str = "demo.local/guest:1";
/// Where questions and answers are files, in the guest's own root.
pub const CONTROL: &str = "/guest";
/// Where the image has jemalloc, for `LD_PRELOAD`.
pub const JEMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2";

/// Seed of the memory of a guest of kind `block`, as made.
pub const MADE: u64 = 1;

/// Writes a safetensors file with one tensor, whose bytes are the memory of a guest of kind `block` with `mib` MiB: what a loader that reads it
/// into one buffer would have.
pub fn write_model(path: &Path, mib: usize) -> Result<()> {
    write_pages(path, 0..(mib << 20) / PAGE)
}

/// Writes the same bytes as two files in `directory`, each with a tensor of half the size: the shards of a guest of kind `tensor-parallel`.
pub fn write_shards(directory: &Path, mib: usize) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let half = (mib << 19) / PAGE;
    write_pages(&directory.join("model-00001-of-00002.safetensors"), 0..half)?;
    write_pages(&directory.join("model-00002-of-00002.safetensors"), half..2 * half)
}

/// A file with one tensor of these pages; its name says where it begins.
fn write_pages(path: &Path, pages: Range<usize>) -> Result<()> {
    let name = format!("block.{}", pages.start);
    let header =
        json!({&name: {"dtype": "I64", "shape": [pages.len() * WORDS], "data_offsets": [0, pages.len() * PAGE]}})
            .to_string();
    let header = format!("{header:<width$}", width = header.len().next_multiple_of(8));
    let mut file =
        BufWriter::new(fs::File::create(path).with_context(|| format!("cannot create {}", path.display()))?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut words = [0; WORDS];
    for page in pages {
        pattern::fill(&mut words, MADE, page);
        words.iter().try_for_each(|word| file.write_all(&word.to_ne_bytes()))?;
    }
    file.flush().with_context(|| format!("cannot write {}", path.display()))
}

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
