//! The process under test: makes memory of known content, then checks it, word by word, whenever it is asked.
//!
//! Asked through files, so that no descriptor is open while it is captured: a line `<number> <command>` in `DIR/ask` is answered by
//! `<number> <answer>` in `DIR/answer` (see `coldsnap_integration::guest`). Commands of every kind:
//! `check`: `ok <bytes checked> asked <n>` or `bad <address> ...`; n counts on through a capture and a restore, so a cold start shows.
//! `write`: changes a part of the memory; later checks expect the change.
//! `exit <code>`: ends.

mod kinds;
mod region;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;

#[derive(Debug, Parser)]
#[command(about = "Makes memory of known content and checks it when asked")]
struct Options {
    /// Which memory to make.
    #[arg(value_enum)]
    kind: kinds::Kind,
    /// Where questions and answers are files.
    #[arg(long, default_value = coldsnap_integration::guest::CONTROL)]
    control: PathBuf,
    /// Size of the memory.
    #[arg(long, default_value_t = 64)]
    mib: usize,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let mut guest = kinds::make(options.kind, options.mib << 20)?;
    std::fs::create_dir_all(&options.control)
        .with_context(|| format!("cannot create {}", options.control.display()))?;
    let mut asked = 0_u64;
    answer(&options.control, "0 ready")?;
    loop {
        let Some((number, command)) = question(&options.control)? else {
            std::thread::sleep(Duration::from_millis(2));
            continue;
        };
        asked += 1;
        let said = match command.split_once(' ').unwrap_or((&command, "")) {
            ("exit", code) => std::process::exit(code.parse()?),
            ("check", _) => guest.check().map(|bytes| format!("ok {bytes} asked {asked}")),
            ("write", _) => guest.write().map(|()| "written".to_owned()),
            _ => guest.special(&command),
        };
        answer(
            &options.control,
            &format!("{number} {}", said.unwrap_or_else(|error| format!("bad {error:#}"))),
        )?;
    }
}

fn question(control: &Path) -> Result<Option<(u128, String)>> {
    let path = control.join("ask");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).context("cannot read the question"),
    };
    std::fs::remove_file(&path).context("cannot take the question")?;
    let Some((number, command)) = text.trim_end().split_once(' ') else {
        bail!("a question without a number: {text:?}")
    };
    Ok(Some((number.parse().context("bad number of a question")?, command.to_owned())))
}

fn answer(control: &Path, text: &str) -> Result<()> {
    let partial = control.join("answer.partial");
    std::fs::write(&partial, format!("{text}\n")).context("cannot write the answer")?;
    std::fs::rename(&partial, control.join("answer")).context("cannot publish the answer")
}
