//! Payloads in a registry: each a raw blob and a manifest that names it, after the CNCF ModelPack specification.
//!
//! The manifest depends on nothing but the payload, and so does its tag: who pushes a payload again changes nothing,
//! and equal payloads of different captures are one. It is written last, so that there is none of a payload
//! that did not arrive.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use oci_client::errors::OciDistributionError;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::{LOOK, Registry, RegistryError, silence};
use crate::digest::Digest;
use crate::store::{AdmitError, AdmittedPayload};

/// Media types and annotations of the ModelPack specification and the OCI image specification.
const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const ARTIFACT_TYPE: &str = "application/vnd.cncf.model.manifest.v1+json";
const CONFIG_TYPE: &str = "application/vnd.cncf.model.config.v1+json";
const WEIGHT_TYPE: &str = "application/vnd.cncf.model.weight.v1.raw";
const FILE_PATH: &str = "org.cncf.model.filepath";

/// Bytes that are read, hashed and sent at a time.
const CHUNK: usize = 1 << 20;
/// A registry may move a payload to its storage before it answers; one that does nothing for so long broke off.
const SILENCE: Duration = Duration::from_secs(600);

/// What a repository has of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PayloadState {
    /// The bytes.
    pub blob: bool,
    /// The manifest that keeps them.
    pub manifest: bool,
}

/// A payload that is in a repository now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// What the repository had before.
    pub before: PayloadState,
    /// Tag of the manifest.
    pub tag: String,
    /// Digest of the manifest.
    pub manifest: Digest,
}

/// The tag of a payload's manifest.
pub fn tag_of(payload: &Digest) -> String {
    format!("coldsnap-{}", payload.hex())
}

/// The manifest of a payload and the configuration that it names.
struct Documents {
    manifest: Vec<u8>,
    config: Vec<u8>,
}

fn documents(payload: &Digest, bytes: u64) -> Documents {
    let config = json!({
        "config": {},
        "descriptor": {},
        "modelfs": {"type": "layers", "diffIds": [payload.to_string()]},
    });
    let config = text(&config);
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": {
            "mediaType": CONFIG_TYPE,
            "digest": Digest::of(&config).to_string(),
            "size": config.len(),
        },
        "layers": [{
            "mediaType": WEIGHT_TYPE,
            "digest": payload.to_string(),
            "size": bytes,
            "annotations": { (FILE_PATH): payload.payload_path() },
        }],
    });
    Documents { manifest: text(&manifest), config }
}

fn text(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

impl Registry {
    /// What the repository has of a payload.
    ///
    /// # Errors
    /// When the registry does not say.
    pub fn payload_state(&self, payload: &Digest, bytes: u64) -> Result<PayloadState, RegistryError> {
        let wanted = Digest::of(&documents(payload, bytes).manifest);
        let manifest = self.manifest(&tag_of(payload))? == Some(wanted);
        Ok(PayloadState { blob: self.has_blob(payload)?, manifest })
    }

    /// Pushes a payload, unless the repository has it, and then the manifest that keeps it. Every byte that is sent
    /// is hashed again; the registry gets the last ones only if the digest is right. `progress` is called with the
    /// bytes sent since the last call.
    ///
    /// # Errors
    /// What the registry answers, or a payload that is no longer what was admitted. There is no manifest then.
    pub fn push_payload(
        &self,
        payload: &AdmittedPayload,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Pushed, RegistryError> {
        let (digest, tag) = (payload.digest(), tag_of(payload.digest()));
        let documents = documents(digest, payload.bytes());
        let manifest = Digest::of(&documents.manifest);
        let before = self.payload_state(digest, payload.bytes())?;
        if !before.blob {
            self.push_blob(payload, progress)?;
        }
        if !(before.manifest && before.blob) {
            self.push_config(&documents.config)?;
            self.push_manifest(&tag, documents.manifest)?;
            // What a registry accepts and what it then has are two things.
            let found = self.manifest(&tag)?;
            if found != Some(manifest) {
                let found = found.map_or_else(|| "nothing".to_owned(), |digest| digest.to_string());
                let answer = format!("its {tag} is {found} after the push of {manifest}");
                return Err(RegistryError::refused("keep a manifest", &answer));
            }
        }
        Ok(Pushed { before, tag, manifest })
    }

    fn push_blob(
        &self,
        payload: &AdmittedPayload,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), RegistryError> {
        let action = format!("take blob {}", payload.digest());
        let file = payload
            .file()
            .try_clone()
            .map_err(|source| RegistryError::Io { action: "open the payload again", source })?;
        let sent = Arc::new(AtomicU64::new(0));
        let wrong = Arc::new(OnceLock::new());
        let pack = Pack {
            file,
            path: payload.path().to_owned(),
            digest: *payload.digest(),
            bytes: payload.bytes(),
            offset: 0,
            sha256: Sha256::new(),
            sent: sent.clone(),
            wrong: wrong.clone(),
        };
        let name = payload.digest().to_string();
        let reference = self.any();
        let pushed =
            self.client.push_blob_stream(&reference, tokio_stream::iter(pack), &name, Some(payload.bytes()));
        let result = self.runtime.block_on(async {
            let mut pushed = pin!(pushed);
            let (mut reported, mut moved) = (0, Instant::now());
            loop {
                let done = tokio::time::timeout(LOOK, pushed.as_mut()).await;
                let now = sent.load(Ordering::Relaxed);
                if now > reported {
                    progress(now - reported);
                    (reported, moved) = (now, Instant::now());
                }
                match done {
                    Ok(result) => return result.map_err(|e| RegistryError::from_client(&action, e)),
                    Err(_) if moved.elapsed() > SILENCE => {
                        return Err(RegistryError::unavailable(&action, silence(SILENCE)));
                    }
                    Err(_) => {}
                }
            }
        });
        match Arc::into_inner(wrong).and_then(OnceLock::into_inner) {
            Some(error) => Err(RegistryError::Payload(error)),
            None => result.map(drop),
        }
    }

    fn push_config(&self, config: &[u8]) -> Result<(), RegistryError> {
        let digest = Digest::of(config);
        if self.has_blob(&digest)? {
            return Ok(());
        }
        let (reference, name) = (self.any(), digest.to_string());
        let pushed = self.client.push_blob(&reference, Bytes::copy_from_slice(config), &name);
        self.ask("take a configuration", pushed).map(drop)
    }

    fn push_manifest(&self, tag: &str, manifest: Vec<u8>) -> Result<(), RegistryError> {
        let action = format!("take manifest {tag}");
        let media_type = MANIFEST_TYPE.parse().map_err(|_| RegistryError::refused(&action, "media type"))?;
        let reference = self.repository.with_tag(tag);
        self.ask(&action, self.client.push_manifest_raw(&reference, manifest, media_type)).map(drop)
    }
}

/// The bytes of a payload in order. The last ones come only if all have the digest.
struct Pack {
    file: File,
    path: PathBuf,
    digest: Digest,
    bytes: u64,
    offset: u64,
    sha256: Sha256,
    sent: Arc<AtomicU64>,
    /// Why the bytes are not the payload; the stream's own errors have no type.
    wrong: Arc<OnceLock<AdmitError>>,
}

impl Pack {
    fn chunk(&mut self) -> Result<Bytes, AdmitError> {
        let missing = usize::try_from(self.bytes - self.offset).unwrap_or(usize::MAX);
        let mut chunk = vec![0; missing.min(CHUNK)];
        let read = self.file.read_exact_at(&mut chunk, self.offset);
        read.map_err(AdmitError::io("read", &self.path))?;
        self.sha256.update(&chunk);
        self.offset += chunk.len() as u64;
        if self.offset == self.bytes {
            let found = Digest::from_bytes(self.sha256.clone().finalize().into());
            if found != self.digest {
                return Err(AdmitError::DigestMismatch {
                    path: self.path.clone(),
                    expected: self.digest,
                    found,
                });
            }
        }
        self.sent.fetch_add(chunk.len() as u64, Ordering::Relaxed);
        Ok(chunk.into())
    }
}

impl Iterator for Pack {
    type Item = Result<Bytes, OciDistributionError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.offset == self.bytes || self.wrong.get().is_some() {
            return None;
        }
        Some(self.chunk().map_err(|error| {
            let text = error.to_string();
            let _ = self.wrong.set(error);
            OciDistributionError::GenericError(Some(text))
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values are those of the specification's example, not of this file.
    #[test]
    fn a_payload_is_a_model_weight_layer_of_the_modelpack_specification() {
        let payload = Digest::of(b"pack");
        let Documents { manifest, config } = documents(&payload, 4096);
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        assert_eq!(manifest["schemaVersion"], 2);
        assert_eq!(manifest["mediaType"], "application/vnd.oci.image.manifest.v1+json");
        assert_eq!(manifest["artifactType"], "application/vnd.cncf.model.manifest.v1+json");
        assert_eq!(manifest["config"]["mediaType"], "application/vnd.cncf.model.config.v1+json");
        assert_eq!(manifest["config"]["size"], config.len());
        let layers = manifest["layers"].as_array().unwrap();
        assert_eq!(layers.len(), 1);
        assert_eq!(layers[0]["mediaType"], "application/vnd.cncf.model.weight.v1.raw");
        assert_eq!((&layers[0]["digest"], &layers[0]["size"]), (&json!(payload), &json!(4096)));
        assert_eq!(
            layers[0]["annotations"]["org.cncf.model.filepath"],
            format!("model-payloads/sha256/{}.pack", payload.hex())
        );
        let config: Value = serde_json::from_slice(&config).unwrap();
        assert_eq!(config["modelfs"], json!({"type": "layers", "diffIds": [payload]}));
        let keys: Vec<_> = config.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["config", "descriptor", "modelfs"]);
    }

    #[test]
    fn the_tag_is_one_and_depends_on_the_payload_only() {
        let tag = tag_of(&Digest::of(b""));
        assert_eq!(tag, "coldsnap-e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        // A tag has at most 128 characters.
        assert!(tag.len() <= 128);
    }
}
