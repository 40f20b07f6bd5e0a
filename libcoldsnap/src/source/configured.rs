//! The sources that a configuration names, and the one that an artifact brings along.

use super::{DirectorySource, HubSource, Source};
use crate::config::{Config, SourceConfig};
use crate::format::artifact::Artifact;
use crate::hub::http::HttpError;
use crate::hub::{Endpoint, Place, PlaceError, Repository, Token, TokenError};

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
    #[error("sources of kind {0:?} are not implemented")]
    Unimplemented(&'static str),
}

impl SourceError {
    /// The stable name of the kind of error.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Unimplemented(_) => "Unimplemented",
            _ => "Source",
        }
    }
}

/// The configured sources in their order; after them the repository in which the artifact says that its payloads are
/// published.
///
/// # Errors
/// A source that cannot be used, e.g. because of its token file.
pub fn sources_for(
    config: &Config,
    artifact: Option<&Artifact>,
) -> Result<Vec<Box<dyn Source>>, SourceError> {
    let mut sources =
        config.sources.iter().map(|source| open_source(config, source)).collect::<Result<Vec<_>, _>>()?;
    let published = artifact.and_then(|artifact| artifact.weights.model_payloads.as_ref());
    if let Some(published) = published.filter(|published| !published.repository.is_empty()) {
        let (repository, revision) = (published.repository.clone(), published.revision.clone());
        match repository.parse::<Repository>() {
            Ok(_) => {
                let source =
                    SourceConfig::HuggingFace { repository, revision, endpoint: None, token_file: None };
                sources.push(open_source(config, &source)?);
            }
            // Others may publish elsewhere than on a hub.
            Err(error) => tracing::warn!(%error, "the artifact's publication is no source of this program"),
        }
    }
    Ok(sources)
}

/// One source; asks nothing yet.
///
/// # Errors
/// When it cannot be used.
pub fn open_source(config: &Config, source: &SourceConfig) -> Result<Box<dyn Source>, SourceError> {
    Ok(match source {
        SourceConfig::Directory { path } => Box::new(DirectorySource::new(path)),
        SourceConfig::HuggingFace { repository, revision, endpoint, token_file } => {
            let defaults = &config.huggingface;
            let endpoint = Endpoint::find(endpoint.as_deref().or(defaults.endpoint.as_deref()))?;
            let token = Token::find(token_file.as_deref().or(defaults.token_file.as_deref()))?;
            Box::new(HubSource::new(Place::new(endpoint, repository.parse()?, revision)?, token)?)
        }
        SourceConfig::Oci { .. } => return Err(SourceError::Unimplemented("oci")),
    })
}
