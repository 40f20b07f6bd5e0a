//! `make demo`: a real LLM server is captured once and comes back as ordinary container starts, beside containerd's own checkpoint and restore.
//! Runs inside the test node; writes `target/demo/report.json`.

mod report;
mod story;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use coldsnap_integration::node::repository;

#[derive(Debug, Parser)]
#[command(about = "Tells ColdSnap's story with real parts and measures it")]
struct Options {
    /// Runs of each measurement.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    repetitions: u16,
    /// Where to write the report.
    #[arg(long, default_value_os_t = repository().join("target/demo/report.json"))]
    report: PathBuf,
}

fn main() -> ExitCode {
    match demo(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\ndemo failed: {error:#}\nlogs of the node: target/node/logs/demo");
            ExitCode::FAILURE
        }
    }
}

fn demo(options: &Options) -> Result<()> {
    let report = story::tell(usize::from(options.repetitions))?;
    if let Some(directory) = options.report.parent() {
        fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    }
    let mut json = serde_json::to_string_pretty(&report)?;
    json.push('\n');
    fs::write(&options.report, json).with_context(|| format!("cannot write {}", options.report.display()))?;
    println!("\nreport: target/demo/report.json");
    Ok(())
}
