//! `coldsnap payload`: the payloads of this node's store, one file per command.

mod fsck;
mod gc;
mod leases;
mod ls;
mod pins;
mod serve;
mod stage;
mod transfer;

use clap::Subcommand;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::node::Node;
use crate::output::{CliError, Output};

/// Model payloads in the node store.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List them: size, whether the validation record holds, leases, pins, last use.
    Ls,
    Stage(stage::Args),
    Import(transfer::ImportArgs),
    Export(transfer::ExportArgs),
    Pin(pins::PinArgs),
    Unpin(pins::UnpinArgs),
    /// List who has leased which payload.
    Leases,
    Release(leases::ReleaseArgs),
    Gc(gc::GcArgs),
    Rm(gc::RmArgs),
    Fsck(fsck::Args),
    Serve(serve::Args),
}

/// Runs the command.
///
/// # Errors
/// What the subcommand answers.
pub fn run(args: Args, node: &Node, output: &Output) -> Result<(), CliError> {
    match args.command {
        Command::Ls => ls::run(&node.store(), output),
        Command::Stage(args) => stage::run(&args, node, output),
        Command::Import(args) => transfer::import(&args, &node.open_store()?, output),
        Command::Export(args) => transfer::export(&args, &node.store(), output),
        Command::Pin(args) => pins::pin(&args, &node.store(), output),
        Command::Unpin(args) => pins::unpin(&args, &node.store(), output),
        Command::Leases => leases::list(&node.store(), output),
        Command::Release(args) => leases::release(&args, &node.store(), output),
        Command::Gc(args) => gc::gc(&args, node, output),
        Command::Rm(args) => gc::rm(&args, &node.store(), output),
        Command::Fsck(args) => fsck::run(&args, &node.store(), output),
        Command::Serve(args) => serve::run(&args, node.store(), output),
    }
}

/// A time for people, in whole seconds.
fn time(unix_ns: u64) -> String {
    let seconds = i64::try_from(unix_ns / 1_000_000_000).unwrap_or(i64::MAX);
    let formatted =
        OffsetDateTime::from_unix_timestamp(seconds).ok().and_then(|time| time.format(&Rfc3339).ok());
    formatted.unwrap_or_else(|| "?".to_owned())
}
