//! The documents of a capsule that a recovery needs: descriptor and manifests.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use super::RecoverError;
use super::plan::RebuildPlan;
use crate::capsule;
use crate::capture::facts::CaptureFacts;
use crate::digest::Digest;
use crate::durable;
use crate::extent::LayoutError;
use crate::format::FormatError;
use crate::format::artifact::{self, Artifact, ArtifactError, PayloadRequirement};
use crate::format::native_manifest::NativeManifest;
use crate::format::recovery_manifest::{ModelSource, RecoveryManifest};
use crate::inspect::CapsuleFiles;
use crate::restore::root;

/// Descriptor and manifests as they are in the capsule.
#[derive(Debug, Clone)]
pub struct CapsuleDocuments {
    /// The descriptor.
    pub artifact: Artifact,
    /// Digest of `artifact.json`: names the capsule in the store.
    pub digest: Digest,
    /// Content by path below the container's root.
    files: BTreeMap<String, Vec<u8>>,
}

/// The facts of the capture of the capsule below `root`. No link is followed.
///
/// # Errors
/// They cannot be read or are malformed.
pub fn facts(root: &Path) -> Result<CaptureFacts, RecoverError> {
    let path = capsule::CAPTURE_PATH;
    let problem = |problem: String| RecoverError::Capsule { path: path.to_owned(), problem };
    let bytes = root::read(root, path).map_err(|e| problem(e.to_string()))?;
    CaptureFacts::parse(path, &bytes).map_err(|e| problem(e.to_string()))
}

/// Whether a path below the container's root is one of these documents.
pub fn is_document(path: &str) -> bool {
    let manifest = |name: &str| {
        matches!(name, capsule::NATIVE_MANIFEST_NAME | capsule::RECOVERY_MANIFEST_NAME)
            && path.starts_with(capsule::HYDRATION_DIR)
    };
    path == capsule::ARTIFACT_PATH || path.rsplit('/').next().is_some_and(manifest)
}

impl CapsuleDocuments {
    /// Reads them below `root`: a container's root filesystem, a layer's tree, or what [`Self::write`] wrote. No link
    /// is followed. Manifests of workers without a payload are not read, a missing one counts only when it is used.
    ///
    /// # Errors
    /// There is no descriptor, or it is malformed.
    pub fn read(root: &Path) -> Result<Self, RecoverError> {
        let unreadable =
            |path: &str, problem: String| RecoverError::Capsule { path: path.to_owned(), problem };
        let artifact = root::read(root, capsule::ARTIFACT_PATH)
            .map_err(|e| unreadable(capsule::ARTIFACT_PATH, e.to_string()))?;
        let mut files = BTreeMap::from([(capsule::ARTIFACT_PATH.to_owned(), artifact)]);
        let parsed = parse(&files)?;
        for payload in parsed.payloads() {
            for path in manifests(&payload.worker) {
                match root::read_optional(root, &path) {
                    Ok(Some(bytes)) => drop(files.insert(path, bytes)),
                    Ok(None) => {}
                    Err(error) => return Err(unreadable(&path, error.to_string())),
                }
            }
        }
        Self::from_files(files)
    }

    /// Those of an unpacked layer.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn from_layer(layer: CapsuleFiles) -> Result<Self, RecoverError> {
        Self::from_files(layer.documents)
    }

    /// A descriptor that is known without its capsule; a recovery then says which manifest is missing.
    ///
    /// # Errors
    /// It is malformed.
    pub fn of_descriptor(bytes: Vec<u8>) -> Result<Self, RecoverError> {
        Self::from_files(BTreeMap::from([(capsule::ARTIFACT_PATH.to_owned(), bytes)]))
    }

    fn from_files(files: BTreeMap<String, Vec<u8>>) -> Result<Self, RecoverError> {
        let artifact = parse(&files)?;
        let digest = Digest::of(&files[capsule::ARTIFACT_PATH]);
        Ok(Self { artifact, digest, files })
    }

    /// Writes the documents below `root` at their paths, so that they outlive the container.
    ///
    /// # Errors
    /// What the file system answers.
    pub fn write(&self, root: &Path) -> io::Result<()> {
        for (path, bytes) in &self.files {
            let path = root.join(path);
            fs::DirBuilder::new().recursive(true).mode(0o700).create(durable::parent(&path))?;
            durable::write_file(&path, bytes, 0o600)?;
        }
        Ok(())
    }

    /// The payload of a worker.
    ///
    /// # Errors
    /// It has none.
    pub fn payload(&self, worker: &str) -> Result<PayloadRequirement, RecoverError> {
        let mut payloads = self.artifact.payloads().into_iter();
        payloads
            .find(|payload| payload.worker == worker)
            .ok_or_else(|| RecoverError::NoPayload { worker: worker.to_owned() })
    }

    /// The checkpoint that the recovery manifest of a worker pins; none when it cannot be read.
    pub fn model_source(&self, worker: &str) -> Option<ModelSource> {
        let [_, recovery] = manifests(worker);
        RecoveryManifest::parse(self.files.get(&recovery)?).ok()?.model_source
    }

    /// How the payload of a worker is rebuilt.
    ///
    /// # Errors
    /// A missing or malformed manifest, one that is not the descriptor's, or see [`RebuildPlan::new`].
    pub fn plan(&self, worker: &str) -> Result<RebuildPlan, RecoverError> {
        let payload = self.payload(worker)?;
        let [native, recovery] = manifests(worker);
        let native = NativeManifest::parse(self.document(worker, &native)?)?;
        let recovery = RecoveryManifest::parse(self.document(worker, &recovery)?)?;
        RebuildPlan::new(&payload, &native, &recovery)
    }

    /// A document, whose digest is the one in the descriptor if that lists it.
    fn document(&self, worker: &str, path: &str) -> Result<&[u8], RecoverError> {
        let bytes = self.files.get(path).ok_or_else(|| RecoverError::Capsule {
            path: path.to_owned(),
            problem: "it is not there".to_owned(),
        })?;
        let listed = self.artifact.capsule.objects.iter().find(|object| {
            path.strip_prefix(capsule::CAPSULE_DIR).and_then(|p| p.strip_prefix('/')) == Some(&object.path)
        });
        let found = Digest::of(bytes);
        if let Some(object) = listed.filter(|object| object.sha256 != found) {
            let source = LayoutError::IdentityChanged {
                what: path.to_owned(),
                expected: object.sha256.to_string(),
                found: found.to_string(),
            };
            return Err(RecoverError::Layout { worker: worker.to_owned(), source });
        }
        Ok(bytes)
    }
}

fn parse(files: &BTreeMap<String, Vec<u8>>) -> Result<Artifact, RecoverError> {
    let bytes = files.get(capsule::ARTIFACT_PATH).ok_or_else(|| RecoverError::Capsule {
        path: capsule::ARTIFACT_PATH.to_owned(),
        problem: "it is not there".to_owned(),
    })?;
    Artifact::parse(bytes).map_err(|error| match error {
        ArtifactError::Format(error) => error.into(),
        other => FormatError::new(artifact::DOCUMENT, ".", other).into(),
    })
}

/// Paths of native and recovery manifest.
fn manifests(worker: &str) -> [String; 2] {
    let dir = capsule::worker_dir(worker);
    [capsule::NATIVE_MANIFEST_NAME, capsule::RECOVERY_MANIFEST_NAME]
        .map(|name| dir.join(name).to_string_lossy().into_owned())
}
