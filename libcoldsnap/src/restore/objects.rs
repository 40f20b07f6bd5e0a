//! The descriptor pins every file of its capsule: what a restore reads as truth is compared with it, so that neither a
//! manifest, an image nor the facts of another capture take part because its payload happens to match.
//!
//! Residuals and pages images are compared by size only: hashing them would read all memory before a restore whose point
//! is not to. Their bytes are covered by the digest of the capsule's layer, and `coldsnap check` compares them.

use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest as _, Sha256};

use super::{Refusal, root};
use crate::capsule;
use crate::digest::Digest;
use crate::format::artifact::{Artifact, Object};

/// Compares the capsule's objects with the files below `rootfs`.
pub fn check(rootfs: &Path, artifact: &Artifact, refusals: &mut Vec<Refusal>) {
    for object in &artifact.capsule.objects {
        if let Err(problem) = compare(rootfs, object) {
            refusals.push(Refusal::Object { path: object.path.clone(), problem });
        }
    }
}

fn compare(rootfs: &Path, object: &Object) -> Result<(), String> {
    let path = format!("{}/{}", capsule::CAPSULE_DIR, object.path);
    let unreadable = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => "missing".to_owned(),
        _ => format!("not readable ({error})"),
    };
    let mut file = root::open_file(rootfs, &path).map_err(unreadable)?;
    let bytes = file.metadata().map_err(unreadable)?.len();
    if bytes != object.bytes {
        return Err(format!("{bytes} bytes instead of {}", object.bytes));
    }
    if is_memory(&object.path) {
        return Ok(());
    }
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 128 << 10];
    loop {
        match file.read(&mut buffer).map_err(unreadable)? {
            0 => break,
            read => hasher.update(&buffer[..read]),
        }
    }
    let found = Digest::from_bytes(hasher.finalize().into());
    if found == object.sha256 { Ok(()) } else { Err(format!("{found} instead of {}", object.sha256)) }
}

fn is_memory(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    name == capsule::RESIDUAL_NAME || (name.starts_with("pages-") && name.ends_with(".img"))
}
