//! Restore or cold start, decided before anything starts.
//!
//! A capsule lies in the container's root filesystem. It is untrusted: whatever a restore needs from the host or
//! from the container's spec is compared first, and everything that differs is said at once.

mod layout;
mod objects;
mod read_ahead;
pub(crate) mod root;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde_json::Value;

use crate::capsule;
use crate::capture::facts::{CaptureFacts, FactsError};
use crate::criu::config::{EstablishedTcp, restore_config};
use crate::digest::Digest;
use crate::format::artifact::{Artifact, PayloadRequirement};
use crate::store::{AdmitError, AdmittedPayload, NodeStore};

pub use layout::{LayoutMismatch, compare_images};
pub use read_ahead::ReadAhead;
pub use root::open_file as open_below;

/// What the annotation `coldsnap.io/restore` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RestoreMode {
    /// Restore where possible, else start cold and say why.
    #[default]
    Auto,
    /// Restore or fail.
    Require,
    /// Always start cold.
    Never,
}

/// The annotation has another value.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("annotation {} is {found:?}: expected auto, require or never", capsule::RESTORE_ANNOTATION)]
pub struct ModeError {
    found: String,
}

impl FromStr for RestoreMode {
    type Err = ModeError;

    fn from_str(text: &str) -> Result<Self, ModeError> {
        match text {
            "auto" => Ok(Self::Auto),
            "require" => Ok(Self::Require),
            "never" => Ok(Self::Never),
            other => Err(ModeError { found: other.to_owned() }),
        }
    }
}

/// The container that is about to start.
#[derive(Debug)]
pub struct LiveContainer<'a> {
    /// Its mounted root filesystem on the host.
    pub rootfs: &'a Path,
    /// Its OCI spec, with the payload binds among the mounts.
    pub spec: &'a Value,
    /// The node store.
    pub store: &'a NodeStore,
}

/// The answer of [`decide`].
#[derive(Debug)]
pub enum Decision {
    /// An ordinary cold start.
    Cold(ColdReason),
    /// A restore; nothing stands against it.
    Restore(Box<RestorePlan>),
}

/// Why a container starts cold without anything being wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ColdReason {
    /// The annotation says `never`.
    NotWanted,
    /// The root filesystem holds no capsule.
    NoCapsule,
    /// The container runs another command than the captured one.
    OtherCommand {
        /// The captured arguments.
        captured: Vec<String>,
        /// The arguments asked for.
        requested: Vec<String>,
    },
}

impl fmt::Display for ColdReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotWanted => write!(f, "annotation {} is never", capsule::RESTORE_ANNOTATION),
            Self::NoCapsule => write!(f, "the image holds no capsule (no /{})", capsule::ARTIFACT_PATH),
            Self::OtherCommand { captured, requested } => {
                write!(f, "the container runs {requested:?}, the capsule was captured from {captured:?}")
            }
        }
    }
}

/// One thing that stands against a restore.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Refusal {
    #[error("no restore is possible: {0}")]
    Cold(ColdReason),
    #[error("the capsule's {path} cannot be read: {source}")]
    Unreadable { path: String, source: io::Error },
    #[error(transparent)]
    Facts(#[from] FactsError),
    #[error("the capsule's {path} is malformed: {reason}")]
    Malformed { path: String, reason: String },
    #[error("the capsule was captured on {captured}, this node is {here}: capture again on such a node")]
    Architecture { captured: String, here: String },
    #[error("the capsule was captured with pages of {captured} bytes, this node has {here}")]
    PageSize { captured: u64, here: u64 },
    #[error("CRIU image {name} is {problem}: the capsule is damaged, pull or capture it again")]
    Image { name: String, problem: String },
    #[error("the capsule's {path} is not the one that its descriptor pins: {problem}")]
    Object { path: String, problem: String },
    #[error("the container has no mount at {0}, which the captured process had: add the bind mount")]
    MissingMount(String),
    #[error("the captured process {}, the container's process {}: run the container {} a terminal", with(.captured), with(.requested), if *.captured { "with" } else { "without" })]
    Terminal { captured: bool, requested: bool },
    #[error(
        "payload {digest} of worker {worker} is not on this node: import it into the node store, then create the \
         container again"
    )]
    MissingPayload { worker: String, digest: Digest },
    #[error("payload of worker {worker}: {source}")]
    Payload { worker: String, source: AdmitError },
    #[error(
        "the mount at {destination} is not payload {digest} of the node store but {source_path}: start the container \
         with the coldsnap snapshotter"
    )]
    PayloadBind { destination: String, digest: Digest, source_path: String },
    #[error("worker {worker}: {mismatch}")]
    Layout { worker: String, mismatch: LayoutMismatch },
}

/// Everything that stands against a restore, at once.
#[derive(Debug)]
pub struct RestoreRefused {
    /// Never empty.
    pub refusals: Vec<Refusal>,
}

impl fmt::Display for RestoreRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the capsule cannot be restored here: ")?;
        for (index, refusal) in self.refusals.iter().enumerate() {
            if index > 0 {
                f.write_str("; ")?;
            }
            write!(f, "{refusal}")?;
        }
        Ok(())
    }
}

impl std::error::Error for RestoreRefused {}

impl From<Refusal> for RestoreRefused {
    fn from(refusal: Refusal) -> Self {
        Self { refusals: vec![refusal] }
    }
}

/// What a restore needs; only [`decide`] makes one.
#[derive(Debug)]
pub struct RestorePlan {
    images_dir: PathBuf,
    capture_id: String,
    tcp: EstablishedTcp,
    payloads: Vec<AdmittedPayload>,
    residuals: Vec<PathBuf>,
}

impl RestorePlan {
    /// Directory of the CRIU images on the host.
    pub fn images_dir(&self) -> &Path {
        &self.images_dir
    }

    /// Identifier of the capture that is restored.
    pub fn capture_id(&self) -> &str {
        &self.capture_id
    }

    /// Content of the CRIU configuration file for this restore.
    pub fn criu_config(&self) -> String {
        restore_config(self.tcp)
    }

    /// The admitted payloads.
    pub fn payloads(&self) -> &[AdmittedPayload] {
        &self.payloads
    }

    /// Starts reading what the restored process will map into the page cache, in a thread; ends early when
    /// the answer is dropped.
    pub fn start_read_ahead(&self) -> ReadAhead {
        let images =
            std::fs::read_dir(&self.images_dir).into_iter().flatten().flatten().map(|entry| entry.path());
        let payloads = self.payloads.iter().map(|p| p.path().to_owned());
        ReadAhead::start(images.chain(self.residuals.iter().cloned()).chain(payloads).collect())
    }
}

/// Decides between a cold start and a restore.
///
/// # Errors
/// Everything that stands against a restore of a capsule that is there and wanted. In mode `require` also the
/// reasons for which another container would simply start cold.
pub fn decide(live: &LiveContainer<'_>, mode: RestoreMode) -> Result<Decision, RestoreRefused> {
    let cold = |reason: ColdReason| match mode {
        RestoreMode::Require => Err(Refusal::Cold(reason).into()),
        _ => Ok(Decision::Cold(reason)),
    };
    if mode == RestoreMode::Never {
        return Ok(Decision::Cold(ColdReason::NotWanted));
    }
    let Some(artifact) = root::read_optional(live.rootfs, capsule::ARTIFACT_PATH)? else {
        return cold(ColdReason::NoCapsule);
    };
    let artifact = Artifact::parse(&artifact)
        .map_err(|e| Refusal::Malformed { path: capsule::ARTIFACT_PATH.to_owned(), reason: e.to_string() })?;
    let facts = root::read(live.rootfs, capsule::CAPTURE_PATH)?;
    let facts = CaptureFacts::parse(capsule::CAPTURE_PATH, &facts).map_err(Refusal::from)?;
    let requested = process_args(live.spec);
    if requested != facts.process.args {
        return cold(ColdReason::OtherCommand { captured: facts.process.args, requested });
    }

    let mut refusals = Vec::new();
    let terminal = live.spec.pointer("/process/terminal").and_then(Value::as_bool).unwrap_or_default();
    if terminal != facts.process.terminal {
        refusals.push(Refusal::Terminal { captured: facts.process.terminal, requested: terminal });
    }
    compare_host(&facts, &mut refusals);
    compare_mounts(&facts, live.spec, &mut refusals);
    objects::check(live.rootfs, &artifact, &mut refusals);
    let images_dir = check_images(live, &facts, &mut refusals);
    let payloads = admit_payloads(live, &artifact.payloads(), &mut refusals);
    for worker in &facts.workers {
        let payload = payloads.iter().find(|(id, _)| *id == worker.id).map(|(_, payload)| payload);
        if let Err(mismatch) = layout::check(live.rootfs, worker, payload) {
            refusals.push(Refusal::Layout { worker: worker.id.clone(), mismatch });
        }
    }
    if !refusals.is_empty() {
        return Err(RestoreRefused { refusals });
    }
    Ok(Decision::Restore(Box::new(RestorePlan {
        images_dir,
        capture_id: facts.capture_id,
        tcp: if facts.keep_tcp { EstablishedTcp::Keep } else { EstablishedTcp::Close },
        payloads: payloads.into_iter().map(|(_, payload)| payload).collect(),
        residuals: facts
            .workers
            .iter()
            .map(|w| live.rootfs.join(capsule::worker_dir(&w.id)).join(capsule::RESIDUAL_NAME))
            .collect(),
    })))
}

fn with(terminal: &bool) -> &'static str {
    if *terminal { "has a terminal" } else { "has none" }
}

fn process_args(spec: &Value) -> Vec<String> {
    let args = spec.pointer("/process/args").and_then(Value::as_array);
    args.into_iter().flatten().filter_map(|a| a.as_str().map(str::to_owned)).collect()
}

fn compare_host(facts: &CaptureFacts, refusals: &mut Vec<Refusal>) {
    let system = rustix::system::uname();
    let here = system.machine().to_string_lossy();
    if facts.architecture != here {
        let here = here.into_owned();
        refusals.push(Refusal::Architecture { captured: facts.architecture.clone(), here });
    }
    let page_size = rustix::param::page_size() as u64;
    if facts.page_size != page_size {
        refusals.push(Refusal::PageSize { captured: facts.page_size, here: page_size });
    }
}

/// The spec's mounts as (destination, source).
fn mounts(spec: &Value) -> impl Iterator<Item = (&str, &str)> {
    let mounts = spec.get("mounts").and_then(Value::as_array);
    mounts.into_iter().flatten().filter_map(|mount| {
        let destination = mount.get("destination")?.as_str()?;
        Some((
            destination.trim_end_matches('/'),
            mount.get("source").and_then(Value::as_str).unwrap_or_default(),
        ))
    })
}

fn compare_mounts(facts: &CaptureFacts, spec: &Value, refusals: &mut Vec<Refusal>) {
    for wanted in &facts.binds {
        if !mounts(spec).any(|(destination, _)| destination == wanted.trim_end_matches('/')) {
            refusals.push(Refusal::MissingMount(wanted.clone()));
        }
    }
}

fn check_images(live: &LiveContainer<'_>, facts: &CaptureFacts, refusals: &mut Vec<Refusal>) -> PathBuf {
    for image in &facts.images {
        let path = format!("{}/{}", capsule::IMAGES_DIR, image.name);
        let problem = match root::size(live.rootfs, &path) {
            Ok(size) if size == image.bytes => continue,
            Ok(size) => format!("{size} bytes instead of {}", image.bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => "missing".to_owned(),
            Err(error) => format!("not readable ({error})"),
        };
        refusals.push(Refusal::Image { name: image.name.clone(), problem });
    }
    live.rootfs.join(capsule::IMAGES_DIR)
}

fn admit_payloads(
    live: &LiveContainer<'_>,
    required: &[PayloadRequirement],
    refusals: &mut Vec<Refusal>,
) -> Vec<(String, AdmittedPayload)> {
    let wanted: Vec<_> = required.iter().map(|payload| (payload.digest, Some(payload.bytes))).collect();
    let mut admitted = Vec::new();
    for (payload, admission) in required.iter().zip(live.store.admit_all(&wanted, &mut |_| {})) {
        let PayloadRequirement { worker, digest, .. } = payload;
        let source = match admission {
            Ok(payload) => payload,
            Err(AdmitError::NotFound { .. }) => {
                refusals.push(Refusal::MissingPayload { worker: worker.clone(), digest: *digest });
                continue;
            }
            Err(source) => {
                refusals.push(Refusal::Payload { worker: worker.clone(), source });
                continue;
            }
        };
        let destination = format!("/{}/{worker}/{}", capsule::HYDRATION_DIR, capsule::PACK_NAME);
        let bound = mounts(live.spec).find(|(d, _)| *d == destination).map(|(_, source)| source);
        if bound.is_some_and(|bound| same_file(Path::new(bound), source.path())) {
            admitted.push((worker.clone(), source));
        } else {
            let source_path = bound.unwrap_or("nothing").to_owned();
            refusals.push(Refusal::PayloadBind { destination, digest: *digest, source_path });
        }
    }
    admitted
}

fn same_file(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (std::fs::symlink_metadata(a), std::fs::symlink_metadata(b)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}
