//! Which checkpoint a payload's bytes come from, pinned.

use std::path::Path;

use serde_json::json;

use super::checkpoint::Checkpoint;
use crate::digest::Digest;
use crate::format::canonical_json;
use crate::format::recovery_manifest::ModelSource;

/// Revision of a checkpoint that lies on the node and comes from no repository.
pub const LOCAL: &str = "local";

/// Describes the checkpoint at `path`. In a Hugging Face cache (`models--<org>--<name>/snapshots/<commit>`) the
/// path tells id and revision; else the file's name is the id and the revision is `local`. The digest pins file
/// names, file sizes and every tensor's name and place.
pub fn model_source(path: &Path, checkpoint: &Checkpoint) -> ModelSource {
    let (model_id, revision) = hugging_face(path).unwrap_or_else(|| {
        let name =
            path.file_name().map_or_else(|| "checkpoint".to_owned(), |n| n.to_string_lossy().into_owned());
        (name, LOCAL.to_owned())
    });
    ModelSource { model_id, revision, metadata_sha256: metadata_sha256(checkpoint) }
}

/// The digest that pins file names, file sizes and every tensor's name and place.
pub fn metadata_sha256(checkpoint: &Checkpoint) -> Digest {
    let files: Vec<_> = checkpoint.files().iter().map(|f| json!([f.name, f.data.len()])).collect();
    let tensors: Vec<_> =
        checkpoint.tensors().iter().map(|t| json!([t.name, t.file_index, t.file_offset, t.len])).collect();
    canonical_json::digest(&json!({"files": files, "tensors": tensors}))
}

fn hugging_face(path: &Path) -> Option<(String, String)> {
    let parts: Vec<&str> = path.iter().filter_map(|p| p.to_str()).collect();
    let at = parts.windows(3).position(|w| w[0].starts_with("models--") && w[1] == "snapshots")?;
    let revision = parts[at + 2];
    let pinned =
        revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'a'..=b'f'));
    pinned.then(|| (parts[at].trim_start_matches("models--").replacen("--", "/", 1), revision.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hugging_face_cache_tells_id_and_revision() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let path = format!("/cache/hub/models--org--some-model/snapshots/{commit}/model.safetensors");
        assert_eq!(hugging_face(Path::new(&path)), Some(("org/some-model".into(), commit.into())));
        assert_eq!(hugging_face(Path::new("/cache/models--org--m/snapshots/main")), None);
        assert_eq!(hugging_face(Path::new("/models/m.gguf")), None);
    }
}
