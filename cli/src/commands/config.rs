//! `coldsnap config`: what the node's configuration says, with every default.

use std::path::{Path, PathBuf};

use coldsnap::config::Config;
use serde::Serialize;

use crate::node::Node;
use crate::output::{CliError, Output};

/// Print the configuration in effect, or check a file that is to become it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The file to check, instead of the one in use.
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
}

#[derive(Serialize)]
struct Report {
    path: String,
    /// Whether there is such a file; without it every value is the default.
    exists: bool,
    config: Config,
}

/// Runs the command.
///
/// # Errors
/// When the file cannot be read or breaks a rule.
pub fn run(args: &Args, path: &Path, store: Option<&Path>, output: &Output) -> Result<(), CliError> {
    let path = args.file.as_deref().unwrap_or(path);
    if args.file.is_some() && !path.exists() {
        return Err(CliError::new("Io", format!("there is no configuration {}", path.display())));
    }
    let node = Node::load(path, store)?;
    let mut config = node.config.clone();
    node.root().clone_into(&mut config.store.root);
    let text = config.to_toml().map_err(|e| CliError::new("Internal", e))?;
    let report = Report { path: path.display().to_string(), exists: path.exists(), config };
    output.result(&report, || {
        let from = if report.exists { "" } else { " does not exist: these are the defaults" };
        format!("# {}{from}\n{}", report.path, text.trim_end())
    })
}
