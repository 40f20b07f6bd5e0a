//! `coldsnap capture`: a running container becomes a capsule image and a payload in the node store.

pub mod image;
mod spec;
mod staging;

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use coldsnap::capsule;
use coldsnap::capture::checkpoint::{Checkpoint, CheckpointError};
use coldsnap::capture::facts::{ProcessFacts, Tools};
use coldsnap::capture::layer::{Layer, write_layer};
use coldsnap::capture::preflight::{Finding, preflight};
use coldsnap::capture::run::{CaptureError, CaptureReport, CaptureRequest, capture};
use coldsnap::capture::scope::MappingScope;
use coldsnap::capture::source::model_source;
use coldsnap::store::{NodeStore, StoreError};
use containerd_client::types::Descriptor;
use serde::Serialize;

use crate::containerd::{CheckpointOptions, Containerd, ContainerdError};
use crate::node::Node;
use crate::output::{CliError, Output, Progress};
use crate::tools;
use image::{BaseImage, DIFF_LAYER_TYPE, ProcessConfig, Target};
use spec::SpecFacts;
use staging::{Frozen, Staging};

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

/// Shows the phases of a capture as progress bars.
struct Bars {
    output: Output,
    bar: Option<Progress>,
}

impl coldsnap::capture::progress::Progress for Bars {
    fn begin(&mut self, phase: &'static str, total: u64) {
        self.bar = None;
        self.bar = Some(self.output.progress(phase, total));
    }

    fn advance(&mut self, bytes: u64) {
        if let Some(bar) = &mut self.bar {
            bar.advance(bytes);
        }
    }
}

async fn capture_container(
    args: Args,
    store: NodeStore,
    output: Output,
) -> Result<CaptureOutput, CaptureCommandError> {
    let began = Instant::now();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let capture_id = format!("cap-{}-{}", now.as_millis(), std::process::id());
    let containerd = Containerd::connect(&args.address, &args.namespace).await?;
    clean_up_after_others(&args, &store).await?;

    let container = containerd.container(&args.container).await?;
    let runtime = container.runtime.as_ref().map(|r| r.name.clone()).unwrap_or_default();
    if !runtime.contains("coldsnap") {
        return Err(CaptureCommandError::Runtime { container: args.container, runtime });
    }
    let spec_bytes = container.spec.as_ref().map(|any| any.value.as_slice()).unwrap_or_default();
    let facts = SpecFacts::parse(spec_bytes).map_err(CaptureCommandError::Spec)?;
    let pid = containerd.task_pid(&args.container).await?;
    let findings = preflight(&containerd.pids(&args.container).await?);
    if !findings.is_empty() {
        return Err(CaptureCommandError::NotDumpable(findings));
    }
    let base = BaseImage::read(&containerd, &container.image).await?;
    let checkpoint = if args.model.is_empty() { None } else { Some(Checkpoint::open_all(&args.model)?) };

    let staging = Staging::create(&store, &capture_id).map_err(|source| CaptureCommandError::Io {
        action: "stage the capture in",
        path: store.root().into(),
        source,
    })?;
    let mut job = Job {
        args,
        output,
        store,
        containerd,
        container,
        facts,
        base,
        checkpoint,
        staging,
        capture_id,
        pid,
        now,
    };
    job.containerd.take_lease(&format!("coldsnap-{}", job.capture_id)).await?;
    let result = tokio::select! {
        result = job.run(began) => result,
        () = interrupted() => Err(CaptureCommandError::Interrupted),
    };
    if result.is_err() {
        // Also when the container was not frozen: resuming a running container is refused and harmless.
        let _ = job.containerd.resume(&job.args.container).await;
    }
    let _ = job.containerd.release_lease().await;
    result
}

async fn interrupted() {
    use tokio::signal::unix::{SignalKind, signal};
    match (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) {
        (Ok(mut int), Ok(mut term)) => {
            tokio::select! { _ = int.recv() => {}, _ = term.recv() => {} }
        }
        _ => std::future::pending().await,
    }
}

/// Removes what killed captures left and thaws the containers that they froze.
async fn clean_up_after_others(args: &Args, store: &NodeStore) -> Result<(), CaptureCommandError> {
    let error = |source| CaptureCommandError::Io { action: "clean up", path: store.root().into(), source };
    for frozen in staging::sweep(store).map_err(error)? {
        let Frozen { namespace, container } = &frozen;
        tracing::warn!(
            namespace,
            container,
            "an interrupted capture left this container frozen; it is resumed"
        );
        let containerd = Containerd::connect(&args.address, namespace).await?;
        let _ = containerd.resume(container).await;
    }
    store.sweep()?;
    Ok(())
}

struct Job {
    args: Args,
    output: Output,
    store: NodeStore,
    containerd: Containerd,
    container: containerd_client::services::v1::Container,
    facts: SpecFacts,
    base: BaseImage,
    checkpoint: Option<Checkpoint>,
    staging: Staging,
    capture_id: String,
    pid: u32,
    now: Duration,
}

impl Job {
    async fn run(&mut self, began: Instant) -> Result<CaptureOutput, CaptureCommandError> {
        let (changes, freeze_seconds) = self.dump().await?;
        let (report, layer) = self.build_capsule().await?;
        let image_digest = image::write(
            &self.containerd,
            &self.base,
            &changes,
            (&self.staging.layer_file(), &layer),
            &ProcessConfig { args: &self.facts.args, env: &self.facts.env, cwd: &self.facts.cwd },
            &Target {
                reference: &self.args.image,
                snapshotter: &self.container.snapshotter,
                artifact: &report.artifact,
                attempt: &self.capture_id,
            },
        )
        .await?;
        if !self.args.leave_running {
            self.containerd.kill_and_wait(&self.args.container).await?;
        }
        Ok(CaptureOutput {
            image: self.args.image.clone(),
            image_digest: image_digest.to_string(),
            layer_bytes: layer.bytes,
            capture_seconds: began.elapsed().as_secs_f64(),
            freeze_seconds,
            left_running: self.args.leave_running,
            report,
        })
    }

    /// Freezes the container, dumps its processes and what it changed on disk. It goes on afterwards only with
    /// `--leave-running`; else it stays frozen until the capsule is complete, so that a failure loses nothing.
    async fn dump(&mut self) -> Result<(Descriptor, f64), CaptureCommandError> {
        let id = self.args.container.clone();
        let frozen = Frozen { namespace: self.args.namespace.clone(), container: id.clone() };
        let staging_error =
            |path: PathBuf| move |source| CaptureCommandError::Io { action: "write into", path, source };
        self.staging.note_frozen(&frozen).map_err(staging_error(self.staging.dump()))?;
        let began = Instant::now();
        self.containerd.pause(&id).await?;
        let options = CheckpointOptions {
            open_tcp: self.args.tcp_established,
            external_unix_sockets: true,
            terminal: self.facts.terminal,
            file_locks: true,
            image_path: self.staging.dump().display().to_string(),
            work_path: self.staging.work().display().to_string(),
            ..Default::default()
        };
        if let Err(error) = self.containerd.checkpoint(&id, &options).await {
            let lines = coldsnap::criu::log::decisive_lines(&self.staging.work().join("dump.log"));
            let quoted = lines.iter().any(|line| error.to_string().contains(line.as_str()));
            let hint = (!lines.is_empty() && !quoted).then(|| format!("; CRIU says: {}", lines.join("; ")));
            return Err(CaptureCommandError::Dump(error, hint));
        }
        let changes = self.changes().await?;
        let freeze_seconds = began.elapsed().as_secs_f64();
        if self.args.leave_running {
            self.containerd.resume(&id).await?;
            self.staging.note_thawed().map_err(staging_error(self.staging.dump()))?;
        }
        Ok((changes, freeze_seconds))
    }

    /// The container's changed files as a layer in the content store.
    async fn changes(&self) -> Result<Descriptor, ContainerdError> {
        let (snapshotter, key) = (&self.container.snapshotter, &self.container.snapshot_key);
        let parent = self.containerd.snapshot_parent(snapshotter, key).await?.unwrap_or_default();
        let upper = self.containerd.snapshot_mounts(snapshotter, key).await?;
        let view = format!("{}-parent", self.capture_id);
        let lower = self.containerd.view_snapshot(snapshotter, &view, &parent).await?;
        let changes = self.containerd.diff(lower, upper, DIFF_LAYER_TYPE).await;
        self.containerd.remove_snapshot(snapshotter, &view).await?;
        changes
    }

    /// Payload, residual, images, descriptor, layer: everything that needs no containerd, off the async threads.
    async fn build_capsule(&mut self) -> Result<(CaptureReport, Layer), CaptureCommandError> {
        let checkpoint = self.checkpoint.take();
        let first = self.args.model.first().cloned();
        let (store, output) = (self.store.clone(), self.output);
        let (dump, layer_root, layer_file) =
            (self.staging.dump(), self.staging.layer(), self.staging.layer_file());
        let root = PathBuf::from(format!("/proc/{}/root", self.pid));
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let request = OwnedRequest {
            capture_id: self.capture_id.clone(),
            created_unix_ns: u64::try_from(self.now.as_nanos()).unwrap_or(u64::MAX),
            host,
            scope: self.args.scope,
            keep_tcp: self.args.tcp_established,
            process: ProcessFacts { args: self.facts.args.clone(), terminal: self.facts.terminal },
            binds: self.facts.binds.clone(),
            image_reference: self.args.image.clone(),
        };
        let work = move || -> Result<(CaptureReport, Layer), CaptureCommandError> {
            let tools = Tools {
                coldsnap: env!("CARGO_PKG_VERSION").to_owned(),
                criu: tools::version("criu").unwrap_or_default(),
                runtime: tools::version("runc").unwrap_or_default(),
            };
            let model_source = first.zip(checkpoint.as_ref()).map(|(path, c)| model_source(&path, c));
            let request = CaptureRequest {
                capture_id: request.capture_id,
                created_unix_ns: request.created_unix_ns,
                host: request.host,
                dump_dir: &dump,
                container_root: &root,
                layer_root: &layer_root,
                store: &store,
                checkpoint: checkpoint.as_ref(),
                model_source,
                scope: request.scope,
                keep_tcp: request.keep_tcp,
                process: request.process,
                binds: request.binds,
                tools,
                image_reference: request.image_reference,
            };
            let report = capture(&request, &mut Bars { output, bar: None })?;
            let layer = write_layer(&layer_root, Path::new(capsule::CAPSULE_DIR), &layer_file)
                .map_err(|source| CaptureCommandError::Io { action: "write", path: layer_file, source })?;
            Ok((report, layer))
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(result) => result,
            Err(panicked) => Err(CaptureCommandError::Panicked(panicked.to_string())),
        }
    }
}

struct OwnedRequest {
    capture_id: String,
    created_unix_ns: u64,
    host: String,
    scope: MappingScope,
    keep_tcp: bool,
    process: ProcessFacts,
    binds: Vec<String>,
    image_reference: String,
}
