//! A whole capsule: the descriptor, every object it pins, and what the parts say about each other.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::document::distinct;
use super::{
    CheckError, Checked, Compared, FileReport, Progress, Summary, check_pack, check_residual, layout_error,
    malformed, native, pack_work, recovery_beside,
};
use crate::capsule;
use crate::capture::facts::CaptureFacts;
use crate::digest::Digest;
use crate::extent::LayoutError;
use crate::format::MAX_DOCUMENT_BYTES;
use crate::format::artifact::{self, Artifact};
use crate::restore::{compare_images, open_below};
use crate::store::NodeStore;

/// Names relative to the capsule's directory.
pub(super) const ARTIFACT_NAME: &str = "artifact.json";
const CAPTURE_NAME: &str = "capture.json";

/// Checks the capsule in `root`. No symbolic link below it is followed.
pub(super) fn check(
    root: &Path,
    store: Option<&NodeStore>,
    progress: Progress<'_>,
) -> Result<Checked, CheckError> {
    let path = root.join(ARTIFACT_NAME);
    let artifact = Artifact::parse(&read(root, ARTIFACT_NAME)?)
        .map_err(|source| CheckError::Descriptor { path: path.clone(), source })?;
    let mut checked = Checked {
        summary: Summary::Capsule {
            capture_id: artifact.capture_id.clone(),
            driver: artifact.snapshot_driver.id,
            workers: artifact.launch.execution.workers.iter().map(|w| w.id.clone()).collect(),
            objects: artifact.capsule.objects.len(),
            object_bytes: artifact.capsule.objects.iter().map(|o| o.bytes).fold(0, u64::saturating_add),
            payloads: distinct(artifact.payloads().into_iter().map(|p| p.digest)),
        },
        documents: vec![path],
        files: Vec::new(),
        not_compared: Vec::new(),
    };
    objects(root, &artifact, progress, &mut checked)?;
    nothing_else(root, &artifact)?;

    let facts_path = root.join(CAPTURE_NAME);
    let facts = CaptureFacts::parse(&facts_path.display().to_string(), &read(root, CAPTURE_NAME)?)?;
    same_capture(&facts_path, &artifact, &facts.capture_id)?;
    for image in &facts.images {
        let found = open(root, &format!("images/{}", image.name))?.1;
        LayoutError::same_size(&format!("image {}", image.name), image.bytes, found)
            .map_err(|source| layout_error(&facts_path, source))?;
    }
    checked.documents.push(facts_path.clone());
    for (n, worker) in facts.workers.iter().enumerate() {
        if !artifact.launch.execution.workers.iter().any(|w| w.id == worker.id) {
            let problem = format!("the descriptor has no worker {:?}", worker.id);
            return Err(malformed(&facts_path, CAPTURE_NAME, &format!("workers[{n}].id"), problem));
        }
        self::worker(root, &artifact, &worker.id, worker.pid, store, progress, &mut checked)?;
    }
    Ok(checked)
}

/// Size and digest of every object.
fn objects(
    root: &Path,
    artifact: &Artifact,
    progress: Progress<'_>,
    checked: &mut Checked,
) -> Result<(), CheckError> {
    let total = artifact.capsule.objects.iter().map(|o| o.bytes).fold(0, u64::saturating_add);
    let mut buffer = vec![0; 256 << 10];
    for object in &artifact.capsule.objects {
        let path = root.join(&object.path);
        let (mut file, bytes) = open(root, &object.path)?;
        LayoutError::same_size("the object", object.bytes, bytes).map_err(|e| layout_error(&path, e))?;
        let mut hasher = Sha256::new();
        loop {
            let read =
                file.read(&mut buffer).map_err(|e| CheckError::Io { path: path.clone(), source: e })?;
            if read == 0 {
                break;
            }
            hasher.update(&buffer[..read]);
            progress("checking the capsule's objects", total, read as u64);
        }
        let found = Digest::from_bytes(hasher.finalize().into());
        if found != object.sha256 {
            let (expected, found) = (object.sha256.to_string(), found.to_string());
            let what = format!("the {}", object.role);
            return Err(layout_error(&path, LayoutError::IdentityChanged { what, expected, found }));
        }
        checked.files.push(Compared { path, report: FileReport { bytes, extents: 0, whole_digest: true } });
    }
    Ok(())
}

/// Every file is an object, the descriptor, or the empty place of a payload.
fn nothing_else(root: &Path, artifact: &Artifact) -> Result<(), CheckError> {
    let listed: BTreeSet<PathBuf> = artifact.capsule.objects.iter().map(|o| PathBuf::from(&o.path)).collect();
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        let io = |source| CheckError::Io { path: root.join(&directory), source };
        for entry in fs::read_dir(root.join(&directory)).map_err(io)? {
            let name = directory.join(entry.map_err(io)?.file_name());
            let found = root.join(&name).symlink_metadata().map_err(io)?;
            let place = name.file_name().is_some_and(|n| n == capsule::PACK_NAME) && found.len() == 0;
            if found.is_dir() {
                directories.push(name);
            } else if !listed.contains(&name)
                && name != Path::new(ARTIFACT_NAME)
                && !(found.is_file() && place)
            {
                let problem = format!("{} is not listed", name.display());
                return Err(malformed(
                    &root.join(ARTIFACT_NAME),
                    artifact::DOCUMENT,
                    "capsule.objects",
                    problem,
                ));
            }
        }
    }
    Ok(())
}

fn worker(
    root: &Path,
    artifact: &Artifact,
    id: &str,
    pid: u32,
    store: Option<&NodeStore>,
    progress: Progress<'_>,
    checked: &mut Checked,
) -> Result<(), CheckError> {
    let directory = root.join("hydration").join(id);
    let path = directory.join(capsule::NATIVE_MANIFEST_NAME);
    let manifest = native(&path)?;
    same_capture(&path, artifact, &manifest.capture_id)?;
    if manifest.worker_id != id {
        let problem = format!("{:?}, the directory is of worker {id:?}", manifest.worker_id);
        return Err(malformed(&path, "native-manifest.json", "worker_id", problem));
    }
    let recovery = directory.join(capsule::RECOVERY_MANIFEST_NAME);
    recovery_beside(&recovery, &manifest)?;
    checked.documents.extend([path.clone(), recovery]);

    let residual = directory.join(capsule::RESIDUAL_NAME);
    let work = manifest.residual_bytes;
    let report = check_residual(&manifest, &residual, &mut |n| progress("checking the residual", work, n))?;
    checked.files.push(Compared { path: residual, report });

    let mm_name = format!("mm-{pid}.img");
    let (files, mm) = (read(root, "images/files.img")?, read(root, &format!("images/{mm_name}"))?);
    let in_container = capsule::worker_dir(id).to_string_lossy().into_owned();
    compare_images(&manifest, &in_container, &files, (&mm_name, &mm))
        .map_err(|source| CheckError::Images { path: root.to_owned(), worker: id.to_owned(), source })?;

    let payload = artifact.payloads().into_iter().find(|p| p.worker == id);
    let bytes = payload.as_ref().map_or(0, |p| p.bytes);
    LayoutError::same_size(
        "model_blob_bytes and the payload of the descriptor",
        bytes,
        manifest.model_blob_bytes,
    )
    .map_err(|source| layout_error(&path, source))?;
    let Some(payload) = payload else { return Ok(()) };
    let in_store = store.map(|store| store.payload_path(&payload.digest)).filter(|path| path.is_file());
    match in_store {
        // Its name is its digest, which is compared too.
        Some(pack) => {
            let work = pack_work(&manifest, &pack);
            let report = check_pack(&manifest, &pack, &mut |n| progress("checking the payload", work, n))?;
            checked.files.push(Compared { path: pack, report });
        }
        None => {
            let digest: Digest = payload.digest;
            checked
                .not_compared
                .push(format!("payload {digest} of worker {id}: it is not in the node store"));
        }
    }
    Ok(())
}

fn same_capture(path: &Path, artifact: &Artifact, found: &str) -> Result<(), CheckError> {
    if artifact.capture_id == found {
        return Ok(());
    }
    let (expected, found) = (artifact.capture_id.clone(), found.to_owned());
    let what = "capture_id".to_owned();
    Err(layout_error(path, LayoutError::IdentityChanged { what, expected, found }))
}

fn open(root: &Path, name: &str) -> Result<(fs::File, u64), CheckError> {
    let io = |source| CheckError::Io { path: root.join(name), source };
    let file = open_below(root, name).map_err(io)?;
    let bytes = file.metadata().map_err(io)?.len();
    Ok((file, bytes))
}

fn read(root: &Path, name: &str) -> Result<Vec<u8>, CheckError> {
    let io = |source| CheckError::Io { path: root.join(name), source };
    let mut bytes = Vec::new();
    open(root, name)?.0.take(MAX_DOCUMENT_BYTES).read_to_end(&mut bytes).map_err(io)?;
    Ok(bytes)
}
