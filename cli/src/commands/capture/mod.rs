//! `coldsnap capture`: a running container becomes a capsule image and a payload in the node store.

pub mod image;
pub mod job;
mod spec;
mod staging;

use std::io;
use std::path::PathBuf;
use std::time::Instant;

use coldsnap::capture::checkpoint::CheckpointError;
use coldsnap::capture::preflight::Finding;
use coldsnap::capture::run::{CaptureError, CaptureReport};
use coldsnap::capture::scope::MappingScope;
use coldsnap::node::NodeError;
use coldsnap::overlay::OverlayError;
use coldsnap::store::{NodeStore, StoreError};
use serde::Serialize;

use crate::containerd::ContainerdError;
use crate::node::Node;
use crate::output::{CliError, Output};
use image::{ProcessConfig, Target};
use job::{Job, Request, interrupted};

/// Capture a running container: write its model's bytes into the node store and everything else into a
/// capsule image, from which `ctr run` with the coldsnap runtime restores it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The container's id.
    container: String,
    /// Name of the capsule image.
    #[arg(long, value_name = "REF")]
    image: String,
    /// Checkpoint files that tell which memory is the model's: a .safetensors or .gguf file or a Hugging Face
    /// snapshot directory. Without it everything large is residual.
    #[arg(long, value_name = "PATH")]
    model: Vec<PathBuf>,
    /// Let the container go on afterwards; without this it is stopped once the capsule is complete.
    #[arg(long)]
    leave_running: bool,
    /// Which memory is mapped from files instead of copied at a restore: model, large or all. `large` narrows
    /// itself to `model` when a process uses an allocator that takes purged memory for zeroed.
    #[arg(long, value_name = "SCOPE", default_value_t = MappingScope::Large)]
    scope: MappingScope,
    /// Keep established TCP connections in the restored process; only right when it gets the same addresses.
    #[arg(long)]
    tcp_established: bool,
    /// containerd's socket.
    #[arg(long, value_name = "SOCKET", default_value = "/run/containerd/containerd.sock")]
    address: PathBuf,
    /// containerd namespace.
    #[arg(long, short, env = "CONTAINERD_NAMESPACE", default_value = "default")]
    namespace: String,
}

/// What `coldsnap capture --json` prints.
#[derive(Debug, Serialize)]
pub struct CaptureOutput {
    /// Name of the capsule image.
    pub image: String,
    /// Digest of its manifest.
    pub image_digest: String,
    /// Size of the capsule layer, compressed, bytes.
    pub layer_bytes: u64,
    /// Seconds from start to end.
    pub capture_seconds: f64,
    /// Seconds that the container was frozen for the dump.
    pub freeze_seconds: f64,
    /// Whether the container runs on.
    pub left_running: bool,
    /// What the capture made.
    #[serde(flatten)]
    pub report: CaptureReport,
}

/// A capture failed; the container runs as before.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CaptureCommandError {
    #[error(transparent)]
    Containerd(#[from] ContainerdError),
    #[error("container {container} runs on {runtime}; start it with --runtime io.containerd.coldsnap.v1")]
    Runtime { container: String, runtime: String },
    #[error("the container's OCI spec is unusable: {0}")]
    Spec(String),
    #[error("the container cannot be captured: {}", list(.0))]
    NotDumpable(Vec<Finding>),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("{0}{hint}", hint = .1.as_deref().unwrap_or_default())]
    Dump(ContainerdError, Option<String>),
    #[error(transparent)]
    Capture(#[from] CaptureError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error(transparent)]
    Overlay(#[from] OverlayError),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error("the overlay's layers cannot be mounted: {0}")]
    Layers(String),
    #[error("interrupted by a signal")]
    Interrupted,
    #[error("a part of the capture panicked: {0}")]
    Panicked(String),
}

fn list(findings: &[Finding]) -> String {
    findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

impl CaptureCommandError {
    /// The stable name of the kind of error.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Containerd(_) => "Containerd",
            Self::Runtime { .. } => "Runtime",
            Self::Spec(_) => "Spec",
            Self::NotDumpable(_) => "NotDumpable",
            Self::Checkpoint(_) => "Checkpoint",
            Self::Dump(..) => "Dump",
            Self::Capture(_) => "Capture",
            Self::Store(_) => "Store",
            Self::Io { .. } => "Io",
            Self::Overlay(source) => source.kind(),
            Self::Node(_) => "Node",
            Self::Layers(_) => "Layers",
            Self::Interrupted => "Interrupted",
            Self::Panicked(_) => "Panicked",
        }
    }
}

/// Runs the command.
///
/// # Errors
/// See [`CaptureCommandError`]; the container is as it was, and nothing half made is left.
pub fn run(args: Args, node: &Node, output: &Output) -> Result<(), CliError> {
    let store = node.open_store()?;
    let runtime = tokio::runtime::Runtime::new().map_err(|e| CliError::new("Io", e))?;
    let captured = runtime.block_on(capture_container(args, store, *output));
    // A capture that a signal interrupted may still compute; the process ends anyway.
    runtime.shutdown_background();
    let captured = captured.map_err(|e| CliError::new(e.kind(), e))?;
    output.result(&captured, || text(&captured))
}

fn text(captured: &CaptureOutput) -> String {
    let CaptureOutput { image, report, .. } = captured;
    let mut lines = vec![format!(
        "{image} captured in {:.1} s (frozen {:.2} s), layer {:.1} MB, pages {:.1} MB, residual {:.1} MB",
        captured.capture_seconds,
        captured.freeze_seconds,
        megabytes(captured.layer_bytes),
        megabytes(report.pages_image_bytes),
        megabytes(report.residual_bytes),
    )];
    for worker in &report.workers {
        lines.push(match &worker.payload {
            Some(payload) => format!(
                "worker {}: payload {payload}, {:.1} MB in {} extents{}",
                worker.id,
                megabytes(worker.payload_bytes),
                worker.model_extents,
                if report.payload_reused { ", already in the store" } else { "" },
            ),
            None => format!("worker {}: no model bytes found, everything large is residual", worker.id),
        });
    }
    if let Some(ratio) = report.model_bytes_matched_ratio {
        lines.push(format!("{:.2} % of the checkpoint's tensor bytes found in memory", ratio * 100.0));
    }
    lines.extend(report.scope_narrowed.iter().map(|what| format!("mapping scope narrowed to model: {what}")));
    lines.push(if captured.left_running {
        "the container runs on".to_owned()
    } else {
        "the container is stopped; remove it and run the image to restore it".to_owned()
    });
    lines.join("\n")
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

async fn capture_container(
    args: Args,
    store: NodeStore,
    output: Output,
) -> Result<CaptureOutput, CaptureCommandError> {
    let began = Instant::now();
    let request = Request {
        container: args.container,
        image: Some(args.image.clone()),
        model: args.model,
        leave_running: args.leave_running,
        scope: args.scope,
        tcp_established: args.tcp_established,
        address: args.address,
        namespace: args.namespace,
    };
    let mut job = Job::begin(request, store, output).await?;
    let result = tokio::select! {
        result = finish(&mut job, &args.image, began) => result,
        () = interrupted() => Err(CaptureCommandError::Interrupted),
    };
    job.end(result.is_err()).await;
    result
}

async fn finish(job: &mut Job, image: &str, began: Instant) -> Result<CaptureOutput, CaptureCommandError> {
    let dumped = job.dump().await?;
    let report = job.build_capsule(job.staging.layer()).await?;
    let layer = job.write_layer().await?;
    let image_digest = image::write(
        &job.containerd,
        &job.base,
        &dumped.changes,
        (&job.staging.layer_file(), &layer),
        &ProcessConfig { args: &job.facts.args, env: &job.facts.env, cwd: &job.facts.cwd },
        &Target {
            reference: image,
            snapshotter: &job.container.snapshotter,
            artifact: &report.artifact,
            attempt: &job.capture_id,
        },
    )
    .await?;
    job.stop_unless_left_running().await?;
    Ok(CaptureOutput {
        image: image.to_owned(),
        image_digest: image_digest.to_string(),
        layer_bytes: layer.bytes,
        capture_seconds: began.elapsed().as_secs_f64(),
        freeze_seconds: dumped.freeze_seconds,
        left_running: job.request.leave_running,
        report,
    })
}
