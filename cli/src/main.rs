//! `coldsnap`: the command for people and managers. Each command translates its arguments to library calls.
//!
//! Exit status: 0 done, 1 failed, 2 wrong usage. With `--json` the result, or `{"error": {"kind", "message"}}`,
//! is one JSON value on stdout.

mod artifact;
mod commands;
mod containerd;
mod interrupt;
mod node;
mod output;
mod tools;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use coldsnap::config::DEFAULT_PATH;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

use crate::commands::{
    capabilities, capture, check, config, doctor, inspect, materialize, overlay, payload, publish_native, rm,
    verify,
};
use crate::node::Node;
use crate::output::Output;

/// Captures inference servers and brings them back as ordinary container starts.
#[derive(Debug, Parser)]
#[command(name = "coldsnap", version)]
struct Cli {
    /// Print one JSON value instead of text.
    #[arg(long, global = true)]
    json: bool,
    /// Configuration of the node.
    #[arg(long, global = true, value_name = "FILE", env = "COLDSNAP_CONFIG", default_value = DEFAULT_PATH)]
    config: PathBuf,
    /// Directory of the node store, if it is not the configured one.
    #[arg(long, global = true, value_name = "DIR", env = "COLDSNAP_STORE")]
    store: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Capture(capture::Args),
    Inspect(inspect::Args),
    Verify(verify::Args),
    Check(check::Args),
    Payload(payload::Args),
    Materialize(materialize::Args),
    Overlay(overlay::Args),
    Rm(rm::Args),
    PublishNative(publish_native::Args),
    Config(config::Args),
    Doctor(doctor::Args),
    /// Print what this build can do.
    Capabilities,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_env_filter(log_filter()).init();
    let output = Output::new(cli.json);
    let node = || Node::load(&cli.config, cli.store.as_deref());
    let result = match cli.command {
        Command::Capture(args) => node().and_then(|node| capture::run(args, &node, &output)),
        Command::Inspect(args) => node().and_then(|node| inspect::run(args, &node, &output)),
        Command::Verify(args) => node().and_then(|node| verify::run(&args, &node, &output)),
        Command::Check(args) => node().and_then(|node| check::run(args, &node, &output)),
        Command::Payload(args) => node().and_then(|node| payload::run(args, &node, &output)),
        Command::Materialize(args) => {
            node().and_then(|node| materialize::run(args, &node, &cli.config, &output))
        }
        Command::Overlay(args) => node().and_then(|node| overlay::run(args, &node, &output)),
        Command::Rm(args) => node().and_then(|node| rm::run(args, &node, &output)),
        Command::PublishNative(args) => node().and_then(|node| publish_native::run(&args, &node, &output)),
        Command::Config(args) => config::run(&args, &cli.config, cli.store.as_deref(), &output),
        Command::Doctor(args) => node().and_then(|node| doctor::run(args, &node, &output)),
        Command::Capabilities => capabilities::run(&output),
    };
    output.finish(result)
}

fn log_filter() -> EnvFilter {
    let filter = EnvFilter::builder()
        .with_default_directive(LevelFilter::WARN.into())
        .with_env_var("COLDSNAP_LOG")
        .from_env_lossy();
    // Below this level they write addresses with their query, and signed addresses are secrets.
    let quiet = ["ureq=info", "ureq_proto=info"];
    quiet.iter().filter_map(|directive| directive.parse().ok()).fold(filter, EnvFilter::add_directive)
}
