//! The node as its configuration file and the options of the command line describe it.

use std::path::{Path, PathBuf};

use coldsnap::config::{Config, DEFAULT_PATH};
use coldsnap::store::NodeStore;

use crate::output::CliError;

/// Configuration and store.
#[derive(Debug)]
pub struct Node {
    /// The configuration.
    pub config: Config,
    root: PathBuf,
}

impl Node {
    /// Reads the configuration; `root` is the store's directory if it is not the configured one.
    ///
    /// # Errors
    /// When the configuration cannot be used, or is not where it was said to be.
    pub fn load(path: &Path, root: Option<&Path>) -> Result<Self, CliError> {
        if path != Path::new(DEFAULT_PATH) && !path.exists() {
            return Err(CliError::new("Io", format!("there is no configuration {}", path.display())));
        }
        let config = Config::read(path)?;
        let root = root.unwrap_or(&config.store.root).to_owned();
        Ok(Self { config, root })
    }

    /// The store's directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The store with its configured limits, as it is.
    pub fn store(&self) -> NodeStore {
        self.config.store.at(&self.root)
    }

    /// [`Self::store`] for a command that writes to it: its directories are there.
    ///
    /// # Errors
    /// When a directory cannot be created.
    pub fn open_store(&self) -> Result<NodeStore, CliError> {
        NodeStore::open(&self.root)?;
        Ok(self.store())
    }
}
