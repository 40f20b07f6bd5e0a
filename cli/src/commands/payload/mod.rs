//! `coldsnap payload`: the payloads of this node's store, one file per command.

mod ls;
mod push;

use std::path::Path;

use clap::Subcommand;
use coldsnap::store::NodeStore;

use crate::output::{CliError, Output};

/// Model payloads in the node store.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List them: size, whether the validation record holds, number of leases.
    Ls,
    /// Push them to a repository of an OCI registry, each as a raw blob with a manifest that keeps it.
    Push(push::Args),
}

/// Runs the command.
///
/// # Errors
/// What the subcommand answers.
pub fn run(args: Args, store: &Path, output: &Output) -> Result<(), CliError> {
    match args.command {
        Command::Ls => ls::run(&NodeStore::at(store), output),
        Command::Push(args) => push::run(&args, &NodeStore::at(store), output),
    }
}
