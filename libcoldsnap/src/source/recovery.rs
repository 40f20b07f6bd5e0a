//! Recovery as a source: payloads that no other place has are rebuilt from the pinned checkpoint.

use std::path::PathBuf;
use std::sync::Arc;

use super::{FetchError, Sink, Source, Wanted};
use crate::config::MaterializeMode;
use crate::recover::capsule::CapsuleDocuments;
use crate::recover::checkpoint::FromCheckpoint;
use crate::recover::files::{Place, Places};
use crate::recover::mode::resolve;

/// Rebuilds the payloads of one capsule from the checkpoint files in these places.
#[derive(Debug)]
pub struct RecoverySource {
    capsule: Option<Arc<CapsuleDocuments>>,
    paths: Vec<PathBuf>,
}

impl RecoverySource {
    /// Looks for the checkpoint in `paths`: files, directories, snapshots of a Hugging Face cache, or whole caches.
    /// Without a capsule nothing says how a payload is rebuilt.
    pub const fn new(capsule: Option<Arc<CapsuleDocuments>>, paths: Vec<PathBuf>) -> Self {
        Self { capsule, paths }
    }
}

impl Source for RecoverySource {
    fn name(&self) -> String {
        let paths: Vec<_> = self.paths.iter().map(|path| path.display().to_string()).collect();
        format!("checkpoint {}", paths.join(", "))
    }

    fn fetch(&self, wanted: &Wanted, from: u64, sink: &mut Sink<'_>) -> Result<(), FetchError> {
        let refused = |why: String| Err(FetchError::Refused(why));
        let Some(capsule) = &self.capsule else {
            let why = "a digest does not say how its payload is rebuilt: name the capsule";
            return refused(why.to_owned());
        };
        if let Err(error) = resolve(Some(MaterializeMode::Required), None, &capsule.artifact) {
            return refused(error.to_string());
        }
        let payloads = capsule.artifact.payloads();
        let Some(payload) = payloads.iter().find(|payload| payload.digest == wanted.digest) else {
            return Err(FetchError::NotFound("the capsule has no such payload".to_owned()));
        };
        let model = capsule.model_source(&payload.worker);
        let places = self.paths.iter().map(|path| Place::named(path, model.as_ref())).collect();
        let files = Arc::new(Places(places));
        FromCheckpoint::new(Arc::clone(capsule), &payload.worker, files).fetch(wanted, from, sink)
    }
}
