//! A repository of an OCI registry as a source: the payload's digest is the name of its blob.

use std::path::PathBuf;

use super::{FetchError, Sink, Source, Wanted};
use crate::registry::{Access, Registry, RegistryError, Repository};

/// Payloads as raw blobs of one repository.
#[derive(Debug)]
pub struct OciSource {
    repository: Repository,
    access: Access,
}

impl OciSource {
    /// A source of the payloads in `repository` (`host[:port]/name`); asks nobody.
    ///
    /// # Errors
    /// When the text is not a repository.
    pub fn new(
        repository: &str,
        plain_http: bool,
        credentials_file: Option<PathBuf>,
    ) -> Result<Self, RegistryError> {
        Ok(Self { repository: repository.parse()?, access: Access { plain_http, credentials_file } })
    }
}

impl Source for OciSource {
    fn name(&self) -> String {
        format!("registry {}", self.repository)
    }

    fn fetch(&self, wanted: &Wanted, from: u64, sink: &mut Sink<'_>) -> Result<(), FetchError> {
        // Anew for each call: tokens expire, and the file with credentials may be another one by now.
        let registry = Registry::open(&self.repository, &self.access)?;
        registry.read_blob(&wanted.digest, wanted.bytes, from, sink)
    }
}
