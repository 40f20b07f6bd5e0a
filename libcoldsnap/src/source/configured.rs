//! The sources that a configuration names, and the one that an artifact brings along.

use std::sync::Arc;

use super::{DirectorySource, HubSource, OciSource, RecoverySource, Source};
use crate::config::{Config, SourceConfig};
use crate::hub::http::HttpError;
use crate::hub::{Endpoint, Place, PlaceError, Repository, Token, TokenError};
use crate::recover::capsule::CapsuleDocuments;
use crate::registry::RegistryError;

/// A configured source cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SourceError {
    #[error(transparent)]
    Place(#[from] PlaceError),
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

impl SourceError {
    /// The stable name of the kind of error.
    pub const fn kind(&self) -> &'static str {
        "Source"
    }
}

/// The configured sources in their order; after them the repository in which the artifact says that its payloads are
/// published. `capsule` is the one whose payloads are wanted.
///
/// # Errors
/// A source that cannot be used, e.g. because of its token file.
pub fn sources_for(
    config: &Config,
    capsule: Option<&Arc<CapsuleDocuments>>,
) -> Result<Vec<Box<dyn Source>>, SourceError> {
    let open = |source| open_source(config, source, capsule);
    let mut sources = config.sources.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let published = capsule.and_then(|capsule| capsule.artifact.weights.model_payloads.as_ref());
    if let Some(published) = published.filter(|published| !published.repository.is_empty()) {
        let (repository, revision) = (published.repository.clone(), published.revision.clone());
        match repository.parse::<Repository>() {
            Ok(_) => {
                let source =
                    SourceConfig::HuggingFace { repository, revision, endpoint: None, token_file: None };
                sources.push(open(&source)?);
            }
            // Others may publish elsewhere than on a hub.
            Err(error) => tracing::warn!(%error, "the artifact's publication is no source of this program"),
        }
    }
    Ok(sources)
}

/// One source of a capsule's payloads; asks nothing yet.
///
/// # Errors
/// When it cannot be used.
pub fn open_source(
    config: &Config,
    source: &SourceConfig,
    capsule: Option<&Arc<CapsuleDocuments>>,
) -> Result<Box<dyn Source>, SourceError> {
    Ok(match source {
        SourceConfig::Directory { path } => Box::new(DirectorySource::new(path)),
        SourceConfig::HuggingFace { repository, revision, endpoint, token_file } => {
            let defaults = &config.huggingface;
            let endpoint = Endpoint::find(endpoint.as_deref().or(defaults.endpoint.as_deref()))?;
            let token = Token::find(token_file.as_deref().or(defaults.token_file.as_deref()))?;
            Box::new(HubSource::new(Place::new(endpoint, repository.parse()?, revision)?, token)?)
        }
        SourceConfig::Oci { repository, plain_http, credentials_file } => {
            Box::new(OciSource::new(repository, *plain_http, credentials_file.clone())?)
        }
        SourceConfig::Checkpoint { paths } => {
            let paths = if paths.is_empty() { &config.materialize.checkpoints } else { paths };
            Box::new(RecoverySource::new(capsule.cloned(), paths.clone()))
        }
    })
}
