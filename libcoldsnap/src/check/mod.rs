//! Checks anything that the format knows: a document of any kind with the files beside it, a pack, the directory of a
//! worker, a whole capsule. The first rule that does not hold is the error.

mod capsule_dir;
mod document;
mod files;

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::capsule;
use crate::capture::facts::FactsError;
use crate::digest::Digest;
use crate::extent::LayoutError;
use crate::format::descriptor::DescriptorError;
use crate::format::native_manifest::NativeManifest;
use crate::format::recovery_manifest::RecoveryManifest;
use crate::format::validation::{self, FileIdentity};
use crate::format::{DocumentError, FormatError};
use crate::restore::LayoutMismatch;
use crate::store::NodeStore;

pub use document::{Document, Summary};
pub use files::{FileReport, check_pack, check_residual, pack_work};

/// Why something is refused.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// It is not what the manifest or descriptor says.
    #[error("{}: {source}", path.display())]
    Layout {
        /// The file.
        path: PathBuf,
        /// What differs.
        source: LayoutError,
    },
    /// It cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
    /// A document that cannot be read or is malformed.
    #[error(transparent)]
    Document(#[from] DocumentError),
    /// A descriptor that breaks a rule.
    #[error("cannot use {}: {source}", path.display())]
    Descriptor {
        /// The file.
        path: PathBuf,
        /// Which rule.
        source: DescriptorError,
    },
    /// `capture.json` is unusable.
    #[error(transparent)]
    Facts(#[from] FactsError),
    /// The CRIU images of a capsule and the manifest of a worker do not belong together.
    #[error("worker {worker} of {}: {source}", path.display())]
    Images {
        /// The capsule's directory.
        path: PathBuf,
        /// The worker.
        worker: String,
        /// What differs.
        source: LayoutMismatch,
    },
    /// Nothing that the format knows.
    #[error("{}: {found}; expected {EXPECTED}", path.display())]
    Unrecognized {
        /// The path.
        path: PathBuf,
        /// What was found.
        found: String,
    },
}

const EXPECTED: &str = "an artifact descriptor, overlay, native or recovery manifest, validation record, capture.json, a \
                        pack beside its manifest or named by its digest, or the directory of a capsule or worker";

impl CheckError {
    /// The stable name of the kind of error.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Layout { source, .. } => source.kind(),
            Self::Io { .. } => "Io",
            Self::Document(source) => source.kind(),
            Self::Descriptor { source, .. } => source.kind(),
            Self::Facts(FactsError::Io { .. }) => "Io",
            Self::Facts(FactsError::Malformed { .. }) => "Malformed",
            Self::Images { source: LayoutMismatch::Layout(source), .. } => source.kind(),
            Self::Images { source: LayoutMismatch::Size { .. }, .. } => "SizeChanged",
            Self::Images {
                source: LayoutMismatch::Unlisted { .. } | LayoutMismatch::Unmapped { .. },
                ..
            } => "IdentityChanged",
            Self::Images { .. } => "Malformed",
            Self::Unrecognized { .. } => "Unrecognized",
        }
    }
}

/// A file that was compared with what describes it.
#[derive(Debug, Clone, Serialize)]
pub struct Compared {
    /// The file.
    pub path: PathBuf,
    /// Size, extents and whether its whole digest was compared.
    #[serde(flatten)]
    pub report: FileReport,
}

/// What was checked; every rule holds.
#[derive(Debug, Clone, Serialize)]
pub struct Checked {
    /// What it is, and its main figures.
    #[serde(flatten)]
    pub summary: Summary,
    /// Documents that were checked with it, in this order.
    pub documents: Vec<PathBuf>,
    /// Files whose bytes were compared.
    pub files: Vec<Compared>,
    /// What was not compared, and why.
    pub not_compared: Vec<String>,
}

/// What to check besides the path itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options<'a> {
    /// The pack of a manifest, instead of the one beside it.
    pub pack: Option<&'a Path>,
    /// The residual of a manifest, instead of the one beside it.
    pub residual: Option<&'a Path>,
    /// Where a capsule's payloads may be.
    pub store: Option<&'a NodeStore>,
}

/// Progress of a check: what is read now, its size, and how many bytes more were read.
pub type Progress<'a> = &'a mut dyn FnMut(&'static str, u64, u64);

/// Checks whatever is at `path`.
///
/// # Errors
/// The first rule that does not hold, by its kind; `Unrecognized` when the format knows nothing like it.
pub fn check(path: &Path, options: &Options<'_>, progress: Progress<'_>) -> Result<Checked, CheckError> {
    if path.is_dir() {
        return directory(path, options, progress);
    }
    let Some(document) = Document::read(path)? else {
        return pack(path, progress);
    };
    document.check(path)?;
    let mut checked = Checked {
        summary: document.summary(),
        documents: vec![path.to_owned()],
        files: Vec::new(),
        not_compared: Vec::new(),
    };
    match &document {
        Document::NativeManifest(manifest) => {
            let beside = sibling(path, capsule::RECOVERY_MANIFEST_NAME);
            if beside.is_file() {
                recovery_beside(&beside, manifest)?;
                checked.documents.push(beside);
            }
            compare_files(path, manifest, options, progress, &mut checked)?;
        }
        Document::RecoveryManifest(manifest) => {
            let beside = sibling(path, capsule::NATIVE_MANIFEST_NAME);
            if beside.is_file() {
                let native = native(&beside)?;
                manifest.check_against(&native).map_err(|source| layout_error(path, source))?;
                checked.documents.push(beside);
            }
        }
        Document::ValidationRecord(record) => {
            checked.not_compared.push(document::record_state(path, record)?);
        }
        _ => {}
    }
    Ok(checked)
}

fn directory(path: &Path, options: &Options<'_>, progress: Progress<'_>) -> Result<Checked, CheckError> {
    let inside = path.join(capsule::CAPSULE_DIR);
    for root in [path, inside.as_path()] {
        if root.join(capsule_dir::ARTIFACT_NAME).is_file() {
            return capsule_dir::check(root, options.store, progress);
        }
    }
    for name in [capsule::NATIVE_MANIFEST_NAME, capsule::RECOVERY_MANIFEST_NAME] {
        let manifest = path.join(name);
        if manifest.is_file() {
            return check(&manifest, options, progress);
        }
    }
    Err(unrecognized(path, "a directory without artifact.json or manifest"))
}

/// A file that is no document: a pack named by its digest, or beside its manifest.
fn pack(path: &Path, progress: Progress<'_>) -> Result<Checked, CheckError> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let named = name.strip_suffix(".pack").and_then(|hex| Digest::from_hex(hex).ok());
    let manifest = sibling(path, capsule::NATIVE_MANIFEST_NAME);
    let (report, documents) = match named {
        None if name == capsule::PACK_NAME && manifest.is_file() => {
            let native = native(&manifest)?;
            let work = pack_work(&native, path);
            let mut advance = |n| progress("checking the pack", work, n);
            (check_pack(&native, path, &mut advance)?, vec![manifest])
        }
        None => return Err(unrecognized(path, "neither a JSON document nor a pack")),
        Some(digest) => (files::check_named(path, &digest, progress)?, Vec::new()),
    };
    let summary = Summary::Pack { digest: named, bytes: report.bytes };
    let files = vec![Compared { path: path.to_owned(), report }];
    let alone = documents.is_empty();
    let not_compared = alone
        .then(|| "extents and padding: only a manifest says where they are".to_owned())
        .into_iter()
        .collect();
    Ok(Checked { summary, documents, files, not_compared })
}

fn compare_files(
    path: &Path,
    manifest: &NativeManifest,
    options: &Options<'_>,
    progress: Progress<'_>,
    checked: &mut Checked,
) -> Result<(), CheckError> {
    let beside = sibling(path, capsule::PACK_NAME);
    // In a capsule the pack's place is an empty file that the payload is bound over.
    let here = beside.metadata().is_ok_and(|found| found.len() > 0);
    match options.pack.or(here.then_some(&beside)) {
        Some(pack) => {
            let work = pack_work(manifest, pack);
            let report = check_pack(manifest, pack, &mut |n| progress("checking the pack", work, n))?;
            checked.files.push(Compared { path: pack.to_owned(), report });
        }
        None if manifest.model_blob_bytes > 0 => {
            checked.not_compared.push("the pack: it is not here".to_owned())
        }
        None => {}
    }
    let beside = sibling(path, capsule::RESIDUAL_NAME);
    match options.residual.or(beside.is_file().then_some(&beside)) {
        Some(residual) => {
            let work = manifest.residual_bytes;
            let mut advance = |n| progress("checking the residual", work, n);
            let report = check_residual(manifest, residual, &mut advance)?;
            checked.files.push(Compared { path: residual.to_owned(), report });
        }
        None => checked.not_compared.push("the residual: it is not here".to_owned()),
    }
    Ok(())
}

fn native(path: &Path) -> Result<NativeManifest, CheckError> {
    let manifest = NativeManifest::read(path)?;
    manifest.layout().map_err(|source| layout_error(path, source))?;
    Ok(manifest)
}

fn recovery_beside(path: &Path, native: &NativeManifest) -> Result<RecoveryManifest, CheckError> {
    let manifest = RecoveryManifest::read(path)?;
    manifest.layout().and_then(|_| manifest.check_against(native)).map_err(|e| layout_error(path, e))?;
    Ok(manifest)
}

fn sibling(path: &Path, name: &str) -> PathBuf {
    path.with_file_name(name)
}

fn layout_error(path: &Path, source: LayoutError) -> CheckError {
    CheckError::Layout { path: path.to_owned(), source }
}

fn malformed(path: &Path, document: &'static str, field: &str, problem: impl ToString) -> CheckError {
    let source = FormatError { document, field: field.to_owned(), problem: problem.to_string() };
    DocumentError::Format { path: path.to_owned(), source }.into()
}

fn unrecognized(path: &Path, found: impl Into<String>) -> CheckError {
    CheckError::Unrecognized { path: path.to_owned(), found: found.into() }
}
