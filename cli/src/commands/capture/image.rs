//! The capsule image: the container's image without an earlier capsule layer, then what the container changed,
//! then the capsule layer.

use std::collections::HashMap;
use std::path::Path;
use std::time::SystemTime;

use coldsnap::capsule;
use coldsnap::capture::layer::Layer;
use coldsnap::digest::Digest;
use containerd_client::services::v1 as api;
use containerd_client::types::Descriptor;
use serde_json::{Value, json};

use crate::containerd::{Blob, Containerd, ContainerdError};

const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG_TYPE: &str = "application/vnd.oci.image.config.v1+json";
const CAPSULE_LAYER_TYPE: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
/// Media type of the layer with the container's changes; every client reads gzip.
pub const DIFF_LAYER_TYPE: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
/// Annotation of the capsule layer's descriptor in the manifest.
const LAYER_ANNOTATION: &str = "coldsnap.io/capsule";
/// Label of a content blob: digest of the uncompressed bytes.
const UNCOMPRESSED_LABEL: &str = "containerd.io/uncompressed";

/// The image that a container was made from, for this node's platform.
#[derive(Debug)]
pub struct BaseImage {
    manifest: Value,
    config: Value,
}

/// A layer for the new image.
#[derive(Debug, Clone)]
struct ImageLayer {
    descriptor: Value,
    diff_id: String,
    history: Value,
}

/// What the new image's configuration says about the process.
#[derive(Debug)]
pub struct ProcessConfig<'a> {
    /// Arguments of the captured process.
    pub args: &'a [String],
    /// Its environment, `NAME=value`.
    pub env: &'a [String],
    /// Its working directory.
    pub cwd: &'a str,
}

fn unusable(what: &str, reason: impl ToString) -> ContainerdError {
    ContainerdError::Answer { action: format!("read {what}"), reason: reason.to_string() }
}

impl BaseImage {
    /// Reads manifest and configuration of the image `name`.
    ///
    /// # Errors
    /// When the image is gone, has no manifest for this architecture, or a document is not readable.
    pub async fn read(containerd: &Containerd, name: &str) -> Result<Self, ContainerdError> {
        let what = format!("image {name}");
        let image = containerd.image(name).await?;
        let target = image.and_then(|i| i.target).ok_or_else(|| {
            unusable(&what, "it does not exist; the capsule needs the image that the container was made from")
        })?;
        let mut digest = target.digest;
        let mut document = read_json(containerd, &what, &digest).await?;
        if let Some(manifests) = document.get("manifests").and_then(Value::as_array) {
            let wanted = manifests
                .iter()
                .find(|m| is_this_platform(m))
                .ok_or_else(|| unusable(&what, format!("it has no manifest for linux/{}", architecture())))?;
            digest = text(wanted, "digest").to_owned();
            document = read_json(containerd, &what, &digest).await?;
        }
        let config_digest = document.pointer("/config/digest").and_then(Value::as_str).unwrap_or_default();
        let config = read_json(containerd, &what, config_digest).await?;
        Ok(Self { manifest: document, config })
    }

    /// Digest of the capsule layer, or `None` when the image has none.
    pub fn capsule_layer(&self) -> Option<String> {
        let layers = self.manifest.get("layers")?.as_array()?;
        let layer = layers.iter().rfind(|l| l.pointer(&annotation_pointer()).is_some())?;
        Some(text(layer, "digest").to_owned())
    }

    /// An annotation of the manifest.
    pub fn annotation(&self, name: &str) -> Option<&str> {
        self.manifest.get("annotations")?.get(name)?.as_str()
    }

    /// The layers without an earlier capsule layer.
    fn layers(&self) -> Result<Vec<ImageLayer>, ContainerdError> {
        let descriptors = self.manifest.get("layers").and_then(Value::as_array).cloned().unwrap_or_default();
        let diff_ids =
            self.config.pointer("/rootfs/diff_ids").and_then(Value::as_array).cloned().unwrap_or_default();
        if descriptors.len() != diff_ids.len() {
            let reason = format!("{} layers and {} diff ids", descriptors.len(), diff_ids.len());
            return Err(unusable("the image's manifest and configuration", reason));
        }
        let history = self.config.get("history").and_then(Value::as_array).cloned().unwrap_or_default();
        let mut history = history.into_iter().filter(|h| h.get("empty_layer") != Some(&Value::Bool(true)));
        let layers = descriptors.into_iter().zip(diff_ids).map(|(descriptor, diff_id)| ImageLayer {
            diff_id: diff_id.as_str().unwrap_or_default().to_owned(),
            history: history.next().unwrap_or_else(|| json!({"created_by": "unknown"})),
            descriptor,
        });
        let is_capsule = |l: &ImageLayer| l.descriptor.pointer(&annotation_pointer()).is_some();
        Ok(layers.filter(|l| !is_capsule(l)).collect())
    }
}

/// Writes the capsule image `reference` and unpacks it for `snapshotter`; its manifest's digest.
///
/// # Errors
/// When a request to containerd fails.
pub async fn write(
    containerd: &Containerd,
    base: &BaseImage,
    changes: &Descriptor,
    capsule_layer: (&Path, &Layer),
    process: &ProcessConfig<'_>,
    target: &Target<'_>,
) -> Result<Digest, ContainerdError> {
    let mut layers = base.layers()?;
    layers.extend(changes_layer(containerd, changes).await?);
    layers.push(write_capsule_layer(containerd, capsule_layer.0, capsule_layer.1).await?);

    let config = configuration(&base.config, &layers, process, target.artifact);
    let chain = chain_ids(&layers)?;
    let top = chain.last().cloned().unwrap_or_default();
    let config_labels =
        HashMap::from([(format!("containerd.io/gc.ref.snapshot.{}", target.snapshotter), top)]);
    let config = containerd.write_document(&to_bytes(&config)?, config_labels).await?;

    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": descriptor(CONFIG_TYPE, &config),
        "layers": layers.iter().map(|l| l.descriptor.clone()).collect::<Vec<_>>(),
        "annotations": {
            (capsule::IMAGE_LABEL): target.artifact.to_string(),
            (capsule::CAPTURE_LABEL): target.attempt,
        },
    });
    let mut labels: HashMap<String, String> = layers
        .iter()
        .enumerate()
        .map(|(n, l)| {
            (format!("containerd.io/gc.ref.content.l.{n}"), text(&l.descriptor, "digest").to_owned())
        })
        .collect();
    labels.insert("containerd.io/gc.ref.content.config".to_owned(), config.digest.to_string());
    let manifest = containerd.write_document(&to_bytes(&manifest)?, labels).await?;

    let mut parent = String::new();
    for (layer, chain_id) in layers.iter().zip(&chain) {
        containerd
            .unpack_layer(
                target.snapshotter,
                to_descriptor(&layer.descriptor),
                &parent,
                chain_id,
                target.attempt,
            )
            .await?;
        parent.clone_from(chain_id);
    }
    let now = Some(prost_types::Timestamp::from(SystemTime::now()));
    containerd
        .put_image(api::Image {
            name: target.reference.to_owned(),
            labels: HashMap::from([
                (capsule::IMAGE_LABEL.to_owned(), target.artifact.to_string()),
                (capsule::CAPTURE_LABEL.to_owned(), target.attempt.to_owned()),
            ]),
            target: Some(Descriptor {
                media_type: MANIFEST_TYPE.to_owned(),
                digest: manifest.digest.to_string(),
                size: i64::try_from(manifest.size).unwrap_or(i64::MAX),
                annotations: HashMap::new(),
            }),
            created_at: now,
            updated_at: now,
        })
        .await?;
    Ok(manifest.digest)
}

/// Where a capsule image goes.
#[derive(Debug)]
pub struct Target<'a> {
    /// Name of the image.
    pub reference: &'a str,
    /// Snapshotter that it is unpacked for.
    pub snapshotter: &'a str,
    /// Digest of the artifact descriptor.
    pub artifact: &'a Digest,
    /// Id of the capture.
    pub attempt: &'a str,
}

/// The layer of the container's changes, unless it is empty.
async fn changes_layer(
    containerd: &Containerd,
    changes: &Descriptor,
) -> Result<Option<ImageLayer>, ContainerdError> {
    // An empty tar is two blocks of zeros.
    let empty = Digest::of(&[0; 1024]).to_string();
    let labels = containerd.content_labels(&changes.digest).await?;
    let diff_id = labels.get(UNCOMPRESSED_LABEL).cloned().unwrap_or_else(|| changes.digest.clone());
    if diff_id == empty {
        return Ok(None);
    }
    Ok(Some(ImageLayer {
        descriptor: json!({
            "mediaType": changes.media_type,
            "digest": changes.digest,
            "size": changes.size,
        }),
        diff_id,
        history: json!({"created_by": "coldsnap capture: files that the container changed"}),
    }))
}

async fn write_capsule_layer(
    containerd: &Containerd,
    path: &Path,
    layer: &Layer,
) -> Result<ImageLayer, ContainerdError> {
    let blob = Blob { digest: layer.digest, size: layer.bytes };
    let labels = HashMap::from([(UNCOMPRESSED_LABEL.to_owned(), layer.diff_id.to_string())]);
    containerd.write_file(path, &blob, labels).await?;
    let mut descriptor = descriptor(CAPSULE_LAYER_TYPE, &blob);
    descriptor["annotations"] = json!({ (LAYER_ANNOTATION): "true" });
    Ok(ImageLayer {
        descriptor,
        diff_id: layer.diff_id.to_string(),
        history: json!({"created_by": "coldsnap capture: capsule"}),
    })
}

/// The base image's configuration with the new layers, and the captured process as the command, so that an
/// ordinary run of the image asks for the captured process.
fn configuration(
    base: &Value,
    layers: &[ImageLayer],
    process: &ProcessConfig<'_>,
    artifact: &Digest,
) -> Value {
    let mut config = base.clone();
    config["rootfs"] =
        json!({"type": "layers", "diff_ids": layers.iter().map(|l| l.diff_id.clone()).collect::<Vec<_>>()});
    config["history"] = layers.iter().map(|l| l.history.clone()).collect();
    if !config["config"].is_object() {
        config["config"] = json!({});
    }
    let run = &mut config["config"];
    run["Entrypoint"] = json!([]);
    run["Cmd"] = json!(process.args);
    run["Env"] = json!(process.env);
    run["WorkingDir"] = json!(process.cwd);
    if !run["Labels"].is_object() {
        run["Labels"] = json!({});
    }
    run["Labels"][capsule::IMAGE_LABEL] = json!(artifact.to_string());
    config
}

/// Chain ids (OCI image specification): the first is the first diff id, each further one is
/// SHA-256("<chain id> <diff id>").
fn chain_ids(layers: &[ImageLayer]) -> Result<Vec<String>, ContainerdError> {
    let mut chain: Vec<String> = Vec::with_capacity(layers.len());
    for layer in layers {
        if layer.diff_id.parse::<Digest>().is_err() {
            return Err(unusable("the image's configuration", format!("{:?} is no diff id", layer.diff_id)));
        }
        let next = match chain.last() {
            None => layer.diff_id.clone(),
            Some(parent) => Digest::of(format!("{parent} {}", layer.diff_id).as_bytes()).to_string(),
        };
        chain.push(next);
    }
    Ok(chain)
}

async fn read_json(containerd: &Containerd, what: &str, digest: &str) -> Result<Value, ContainerdError> {
    let bytes = containerd.read_document(digest).await?;
    serde_json::from_slice(&bytes).map_err(|e| unusable(what, e))
}

fn to_bytes(value: &Value) -> Result<Vec<u8>, ContainerdError> {
    serde_json::to_vec(value).map_err(|e| unusable("the new image", e))
}

fn descriptor(media_type: &str, blob: &Blob) -> Value {
    json!({"mediaType": media_type, "digest": blob.digest.to_string(), "size": blob.size})
}

fn to_descriptor(value: &Value) -> Descriptor {
    Descriptor {
        media_type: text(value, "mediaType").to_owned(),
        digest: text(value, "digest").to_owned(),
        size: value.get("size").and_then(Value::as_i64).unwrap_or_default(),
        annotations: HashMap::new(),
    }
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}

fn annotation_pointer() -> String {
    format!("/annotations/{}", LAYER_ANNOTATION.replace('/', "~1"))
}

fn is_this_platform(manifest: &Value) -> bool {
    let platform = |field: &str| manifest.pointer(&format!("/platform/{field}")).and_then(Value::as_str);
    // A manifest without a platform is for any.
    platform("os").is_none_or(|os| os == "linux")
        && platform("architecture").is_none_or(|a| a == architecture())
}

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(diff_id: &str, capsule: bool) -> (Value, Value) {
        let mut descriptor = json!({"mediaType": "m", "digest": diff_id, "size": 1});
        if capsule {
            descriptor["annotations"] = json!({ (LAYER_ANNOTATION): "true" });
        }
        (descriptor, json!(diff_id))
    }

    #[test]
    fn an_earlier_capsule_layer_is_replaced() {
        let digests: Vec<String> = (0..3).map(|n| Digest::of(&[n]).to_string()).collect();
        let (descriptors, ids): (Vec<_>, Vec<_>) =
            [layer(&digests[0], false), layer(&digests[1], true), layer(&digests[2], false)]
                .into_iter()
                .unzip();
        let base = BaseImage {
            manifest: json!({"layers": descriptors}),
            config: json!({"rootfs": {"diff_ids": ids}, "history": [{"created_by": "a"}, {"empty_layer": true}, {"created_by": "b"}]}),
        };
        let layers = base.layers().unwrap();
        assert_eq!(layers.iter().map(|l| l.diff_id.as_str()).collect::<Vec<_>>(), [&digests[0], &digests[2]]);
        assert_eq!(layers[0].history, json!({"created_by": "a"}));
    }

    #[test]
    fn chain_ids_follow_the_specification() {
        let ids: Vec<String> = ["a", "b", "c"].iter().map(|t| Digest::of(t.as_bytes()).to_string()).collect();
        let layers: Vec<ImageLayer> = ids
            .iter()
            .map(|id| ImageLayer { descriptor: json!({}), diff_id: id.clone(), history: json!({}) })
            .collect();
        let chain = chain_ids(&layers).unwrap();
        assert_eq!(chain[0], ids[0]);
        assert_eq!(chain[1], Digest::of(format!("{} {}", ids[0], ids[1]).as_bytes()).to_string());
        assert_eq!(chain[2], Digest::of(format!("{} {}", chain[1], ids[2]).as_bytes()).to_string());
    }
}
