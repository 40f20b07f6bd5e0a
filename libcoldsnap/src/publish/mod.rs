//! Publication of an artifact's payloads in a repository of the Hugging Face hub.
//!
//! The order makes a dangling descriptor impossible: every pack is hashed here, uploaded, committed, and read back at
//! the commit; only then is the new descriptor written, to a new file. Whatever fails before leaves at most objects
//! in the hub's storage that no commit names. The same command again goes on from there.

mod hub_api;
mod upload;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::digest::Digest;
use crate::format::artifact::{Artifact, ArtifactError};
use crate::hub::http::{Client, HttpError};
use crate::hub::{Endpoint, Repository, Token};
use crate::source::pace::Pace;
use crate::store::{AdmitError, AdmittedPayload, Evidence, NodeStore};

use hub_api::{Api, Remote};
use upload::Uploader;

/// How often a commit is tried again on top of somebody else's.
const COMMITS: u32 = 4;

/// Where payloads are published.
#[derive(Debug, Clone)]
pub struct Target {
    /// The hub.
    pub endpoint: Endpoint,
    /// The repository.
    pub repository: Repository,
    /// Its branch.
    pub branch: String,
}

/// How payloads are published.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Verify and compare, but change nothing anywhere.
    pub dry_run: bool,
    /// Create the repository when it does not exist.
    pub create: bool,
    /// Create it private.
    pub private: bool,
    /// Bytes per second; none for no limit.
    pub bandwidth: Option<u64>,
}

/// What was done, or with `dry_run` would be.
#[derive(Debug, Clone, Serialize)]
pub struct Published {
    /// The repository.
    pub repository: String,
    /// The branch.
    pub branch: String,
    /// The commit that has every payload; null when the run was dry and no commit has them all.
    pub revision: Option<String>,
    /// Whether the repository was, or would be, created.
    pub created: bool,
    /// Whether a commit was, or would be, made.
    pub committed: bool,
    /// Each distinct payload.
    pub payloads: Vec<PublishedPayload>,
    /// The new descriptor; null when the run was dry.
    pub output: Option<PathBuf>,
}

/// One payload of [`Published`].
#[derive(Debug, Clone, Serialize)]
pub struct PublishedPayload {
    /// The payload.
    pub digest: Digest,
    /// Its path in the repository.
    pub path: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// What was there, and what was, or would be, done.
    pub action: Action,
}

/// What one payload needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// The branch has it.
    Present,
    /// The hub's storage has it, it only needs a commit.
    Commit,
    /// It is uploaded and committed.
    Upload,
}

/// What happens while payloads are published.
#[derive(Debug, Clone, Copy)]
pub enum Progress<'a> {
    /// So many bytes of this payload were hashed since the last call.
    Verified(&'a Digest, u64),
    /// So many bytes of this payload were sent since the last call; those of a try that failed count again.
    Sent(&'a Digest, u64),
}

/// Payloads could not be published. No descriptor was written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum PublishError {
    #[error("{} exists; a descriptor is never overwritten, name another --output", .0.display())]
    OutputExists(PathBuf),
    #[error("cannot write {}: {source}", path.display())]
    Output { path: PathBuf, source: io::Error },
    #[error("the artifact has no model payloads: there is nothing to publish")]
    NoPayloads,
    #[error("{0:?} is no name of a branch")]
    Branch(String),
    #[error("the model payload {digest} cannot be published from this host: {source}")]
    Payload { digest: Digest, source: AdmitError },
    #[error(
        "the repository {repository} does not exist, or the token may not see it; create it, or say --create"
    )]
    NoRepository { repository: String, source: HttpError },
    #[error("the repository has other content at {path}: found {found}; nothing is overwritten")]
    Occupied { path: String, found: String },
    #[error("cannot publish in {repository}: {source}")]
    Hub { repository: String, source: HttpError },
    #[error("the published payload cannot be confirmed: {0}; no descriptor was written")]
    Unconfirmed(String),
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    #[error("publication was cancelled; the same command goes on from here")]
    Cancelled,
}

impl PublishError {
    /// The stable name of the kind of error.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::OutputExists(_) => "AlreadyExists",
            Self::Output { .. } => "Io",
            Self::NoPayloads => "NoPayloads",
            Self::Branch(_) => "Malformed",
            Self::Payload { source, .. } => source.kind(),
            Self::NoRepository { .. } | Self::Occupied { .. } | Self::Hub { .. } => "Hub",
            Self::Unconfirmed(_) => "Unconfirmed",
            Self::Artifact(error) => error.kind(),
            Self::Cancelled => "Cancelled",
        }
    }
}

/// Publishes the payloads of `artifact` from `store` and writes the descriptor that says so to the new file `output`.
///
/// # Errors
/// See [`PublishError`]; then there is no descriptor.
#[allow(clippy::too_many_arguments, reason = "what, from where, to where, how")]
pub fn publish(
    artifact: &Artifact,
    store: &NodeStore,
    target: &Target,
    token: Option<Token>,
    options: &Options,
    output: &Path,
    cancelled: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Published, PublishError> {
    if !options.dry_run {
        check_output(output)?;
    }
    let repository = target.repository.to_string();
    let hub = |source| PublishError::Hub { repository: repository.clone(), source };
    let client = Client::new(&target.endpoint, token).map_err(hub)?;
    let api = Api::new(&client, target)?;
    let packs = verify(artifact, store, cancelled, progress)?;

    let (head, created) = match api.head() {
        Ok(head) => (Some(head), false),
        Err(source) if is_missing(&source) && options.create && options.dry_run => (None, true),
        Err(source) if is_missing(&source) && options.create => {
            api.create(options.private).map_err(hub)?;
            (Some(api.head().map_err(hub)?), true)
        }
        Err(source) if is_missing(&source) => {
            return Err(PublishError::NoRepository { repository, source });
        }
        Err(source) => return Err(hub(source)),
    };
    let mut missing = match &head {
        Some(head) => missing_at(&api, head, &packs, &hub)?,
        None => packs.iter().collect(),
    };
    let mut actions: BTreeMap<Digest, Action> = BTreeMap::new();
    actions.extend(packs.iter().map(|pack| (*pack.digest(), Action::Present)));
    actions.extend(missing.iter().map(|pack| (*pack.digest(), Action::Upload)));
    let mut committed = options.dry_run && !missing.is_empty();
    let mut revision = head;
    if options.dry_run {
        revision = revision.filter(|_| missing.is_empty());
    } else {
        if !missing.is_empty() {
            let mut uploader = Uploader {
                client: &client,
                api: &api,
                cancelled,
                progress,
                pace: Pace::new(options.bandwidth),
            };
            let there = uploader.upload(&missing, &hub)?;
            actions.extend(there.into_iter().map(|digest| (digest, Action::Commit)));
        }
        for attempt in 1.. {
            let Some(parent) = revision.as_deref().filter(|_| !missing.is_empty()) else { break };
            if cancelled() {
                return Err(PublishError::Cancelled);
            }
            match api.commit(&missing, parent) {
                Ok(commit) => {
                    revision = Some(commit);
                    committed = true;
                    break;
                }
                // Somebody else committed meanwhile, perhaps the same payloads.
                Err(HttpError::Status { status: 409 | 412, .. }) if attempt < COMMITS => {
                    let head = api.head().map_err(hub)?;
                    missing = missing_at(&api, &head, &packs, &hub)?;
                    revision = Some(head);
                }
                Err(source) => return Err(hub(source)),
            }
        }
    }
    let mut published = Published {
        repository: repository.clone(),
        branch: target.branch.clone(),
        revision,
        created,
        committed,
        payloads: packs.iter().map(|pack| describe(pack, actions[pack.digest()])).collect(),
        output: None,
    };
    if let Some(revision) = published.revision.as_deref().filter(|_| !options.dry_run) {
        confirm(&api, revision, &packs)?;
        let mut descriptor = artifact.clone();
        if let Some(payloads) = &mut descriptor.weights.model_payloads {
            payloads.repository = repository;
            payloads.revision = revision.to_owned();
        }
        descriptor.write_new(output)?;
        published.output = Some(output.to_owned());
    }
    Ok(published)
}

fn is_missing(error: &HttpError) -> bool {
    // The hub does not tell a stranger whether a repository is private or none.
    matches!(error, HttpError::Status { status: 401 | 404, .. })
}

/// That the descriptor could be written at the end: a failure there would come after hours of upload.
fn check_output(output: &Path) -> Result<(), PublishError> {
    if output.symlink_metadata().is_ok() {
        return Err(PublishError::OutputExists(output.to_owned()));
    }
    let fail = |source| PublishError::Output { path: output.to_owned(), source };
    let directory = crate::durable::parent(output);
    if !directory.metadata().map_err(fail)?.is_dir() {
        return Err(fail(io::ErrorKind::NotADirectory.into()));
    }
    rustix::fs::access(directory, rustix::fs::Access::WRITE_OK).map_err(|errno| fail(errno.into()))
}

fn describe(pack: &AdmittedPayload, action: Action) -> PublishedPayload {
    let path = pack.digest().payload_path().display().to_string();
    PublishedPayload { digest: *pack.digest(), path, bytes: pack.bytes(), action }
}

/// Hashes every distinct payload in full, whatever its record says: what is published cannot be taken back.
fn verify(
    artifact: &Artifact,
    store: &NodeStore,
    cancelled: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Vec<AdmittedPayload>, PublishError> {
    let wanted: BTreeMap<Digest, u64> =
        artifact.payloads().into_iter().map(|payload| (payload.digest, payload.bytes)).collect();
    if wanted.is_empty() {
        return Err(PublishError::NoPayloads);
    }
    let mut packs = Vec::new();
    for (digest, bytes) in wanted {
        let fail = |source| PublishError::Payload { digest, source };
        let pack = store
            .admit(&digest, Some(bytes), &mut |n| progress(Progress::Verified(&digest, n)))
            .map_err(fail)?;
        if pack.evidence() != Evidence::FullSha256ThisOperation {
            let mut advance = |n| progress(Progress::Verified(&digest, n));
            let found = upload::hash(&pack, cancelled, &mut advance)
                .map_err(|source| AdmitError::Io { action: "read", path: pack.path().to_owned(), source })
                .map_err(fail)?
                .ok_or(PublishError::Cancelled)?;
            if found != digest {
                let path = pack.path().to_owned();
                return Err(fail(AdmitError::DigestMismatch { path, expected: digest, found }));
            }
        }
        packs.push(pack);
    }
    Ok(packs)
}

/// The payloads that a commit lacks.
fn missing_at<'a>(
    api: &Api<'_>,
    revision: &str,
    packs: &'a [AdmittedPayload],
    hub: &impl Fn(HttpError) -> PublishError,
) -> Result<Vec<&'a AdmittedPayload>, PublishError> {
    let there = api.files(revision, packs).map_err(hub)?;
    let mut missing = Vec::new();
    for pack in packs {
        let path = pack.digest().payload_path().display().to_string();
        match there.get(&path) {
            None => missing.push(pack),
            Some(Remote { sha256: Some(hex), bytes })
                if *hex == pack.digest().hex() && *bytes == pack.bytes() => {}
            Some(Remote { sha256, bytes }) => {
                let object = sha256.as_deref().unwrap_or("a file outside LFS");
                return Err(PublishError::Occupied { path, found: format!("{object}, {bytes} bytes") });
            }
        }
    }
    Ok(missing)
}

/// That everybody who reads the pinned commit gets what was verified here.
fn confirm(api: &Api<'_>, revision: &str, packs: &[AdmittedPayload]) -> Result<(), PublishError> {
    let unconfirmed = |problem: String| PublishError::Unconfirmed(problem);
    let commit = api.commit_of(revision).map_err(|e| unconfirmed(e.to_string()))?;
    if commit != revision {
        return Err(unconfirmed(format!("the hub resolves the commit {revision} to {commit:?}")));
    }
    packs.iter().try_for_each(|pack| api.confirm(revision, pack).map_err(|e| unconfirmed(e.to_string())))
}
