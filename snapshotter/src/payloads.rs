//! Model payloads: what a capsule requires.

use coldsnap::format::artifact::Artifact;

use crate::record::Payload;

/// The payloads that the capsule with this artifact descriptor requires, one per worker.
///
/// # Errors
/// Why the descriptor is refused, for people.
pub fn requirements(artifact: &[u8]) -> Result<Vec<Payload>, String> {
    let artifact = Artifact::parse(artifact).map_err(|e| e.to_string())?;
    let requirements = artifact.payloads().into_iter();
    Ok(requirements.map(|r| Payload { worker: r.worker, digest: r.digest, bytes: r.bytes }).collect())
}
