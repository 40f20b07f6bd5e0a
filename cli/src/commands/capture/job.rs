//! The steps of a capture: what `capture` and `overlay create` have in common.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use coldsnap::capsule;
use coldsnap::capture::checkpoint::Checkpoint;
use coldsnap::capture::facts::{CheckpointFacts, ProcessFacts, Tools};
use coldsnap::capture::layer::{Layer, write_layer};
use coldsnap::capture::preflight::preflight;
use coldsnap::capture::run::{CaptureReport, CaptureRequest, capture};
use coldsnap::capture::scope::MappingScope;
use coldsnap::capture::source::model_source;
use coldsnap::overlay::mount::{lower_layers, with_layers};
use coldsnap::overlay::{self, Portable};
use coldsnap::recover::locate;
use coldsnap::store::NodeStore;
use containerd_client::types::{Descriptor, Mount};

use super::CaptureCommandError;
use super::image::{BaseImage, DIFF_LAYER_TYPE};
use super::spec::SpecFacts;
use super::staging::{self, Frozen, Staging};
use crate::containerd::{CheckpointOptions, Containerd, runtime_binary};
use crate::output::{Output, Progress};
use crate::tools;

/// What is captured, and how.
#[derive(Debug)]
pub struct Request {
    /// The container's id.
    pub container: String,
    /// Name of the capsule image; `None`: that of the container's own image.
    pub image: Option<String>,
    /// Checkpoint files that tell which memory is the model's.
    pub model: Vec<PathBuf>,
    /// Let the container go on afterwards.
    pub leave_running: bool,
    /// Which memory is mapped.
    pub scope: MappingScope,
    /// Keep established TCP connections in the restored process.
    pub tcp_established: bool,
    /// containerd's socket.
    pub address: PathBuf,
    /// containerd namespace.
    pub namespace: String,
}

/// A capture that has begun.
pub struct Job {
    /// What was asked for.
    pub request: Request,
    /// Where progress is shown.
    output: Output,
    /// The node store.
    pub store: NodeStore,
    /// The connection; its lease holds what the capture writes.
    pub containerd: Containerd,
    /// The container.
    pub container: containerd_client::services::v1::Container,
    /// What its spec says.
    pub facts: SpecFacts,
    /// The image that it was made from.
    pub base: BaseImage,
    checkpoint: Option<Checkpoint>,
    /// Where everything is made.
    pub staging: Staging,
    /// Identifier of the capture.
    pub capture_id: String,
    pid: u32,
    now: Duration,
}

/// What [`Job::dump`] leaves.
#[derive(Debug)]
pub struct Dumped {
    /// The container's changed files as a layer in the content store.
    pub changes: Descriptor,
    /// Options of the overlay mount of the layers below the container's own; `None` when there is no such mount.
    pub lower: Option<Vec<String>>,
    /// The capsule in these layers.
    pub portable: Option<Portable>,
    /// Seconds that the container was frozen.
    pub freeze_seconds: f64,
}

impl Job {
    /// Looks at everything that can be looked at before the container is stopped.
    ///
    /// # Errors
    /// The container cannot be captured; it goes on.
    pub async fn begin(
        request: Request,
        store: NodeStore,
        output: Output,
    ) -> Result<Self, CaptureCommandError> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let capture_id = format!("cap-{}-{}", now.as_millis(), std::process::id());
        let containerd = Containerd::connect(&request.address, &request.namespace).await?;
        clean_up_after_others(&request.address, &store).await?;

        let container = containerd.container(&request.container).await?;
        let runtime = container.runtime.as_ref().map(|r| r.name.clone()).unwrap_or_default();
        if !runtime.contains("coldsnap") {
            return Err(CaptureCommandError::Runtime { container: request.container, runtime });
        }
        let spec_bytes = container.spec.as_ref().map(|any| any.value.as_slice()).unwrap_or_default();
        let facts = SpecFacts::parse(spec_bytes).map_err(CaptureCommandError::Spec)?;
        let pid = containerd.task_pid(&request.container).await?;
        let findings = preflight(&containerd.pids(&request.container).await?);
        if !findings.is_empty() {
            return Err(CaptureCommandError::NotDumpable(findings));
        }
        let base = BaseImage::read(&containerd, &container.image).await?;
        let checkpoint =
            if request.model.is_empty() { None } else { Some(Checkpoint::open_all(&request.model)?) };

        let staging = Staging::create(&store, &capture_id).map_err(|source| CaptureCommandError::Io {
            action: "stage the capture in",
            path: store.root().into(),
            source,
        })?;
        let mut job = Self {
            request,
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
        Ok(job)
    }

    /// Ends the capture. After a failure the container runs on.
    pub async fn end(&mut self, failed: bool) {
        if failed {
            // Also when the container was not frozen: resuming a running container is refused and harmless.
            let _ = self.containerd.resume(&self.request.container).await;
        }
        let _ = self.containerd.release_lease().await;
    }

    /// When the capture began, nanoseconds since 1970.
    pub fn created_unix_ns(&self) -> u64 {
        u64::try_from(self.now.as_nanos()).unwrap_or(u64::MAX)
    }

    /// The container's root as its processes see it.
    pub fn container_root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.pid))
    }

    /// The binary of the OCI runtime that runs the container.
    pub fn runtime_binary(&self) -> String {
        runtime_binary(&self.container)
    }

    /// Stops the container, unless it was asked to let it run.
    ///
    /// # Errors
    /// A request fails.
    pub async fn stop_unless_left_running(&self) -> Result<(), CaptureCommandError> {
        if !self.request.leave_running {
            self.containerd.kill_and_wait(&self.request.container).await?;
        }
        Ok(())
    }

    /// Freezes the container, dumps its processes and what it changed on disk. It goes on afterwards only when it was
    /// asked for; else it stays frozen until the capsule is complete, so that a failure loses nothing.
    ///
    /// # Errors
    /// CRIU or containerd failed.
    pub async fn dump(&mut self) -> Result<Dumped, CaptureCommandError> {
        let id = self.request.container.clone();
        let frozen = Frozen { namespace: self.request.namespace.clone(), container: id.clone() };
        let staging_error =
            |path: PathBuf| move |source| CaptureCommandError::Io { action: "write into", path, source };
        self.staging.note_frozen(&frozen).map_err(staging_error(self.staging.dump()))?;
        let began = Instant::now();
        self.containerd.pause(&id).await?;
        let options = CheckpointOptions {
            open_tcp: self.request.tcp_established,
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
        let mut dumped = self.changes().await?;
        dumped.freeze_seconds = began.elapsed().as_secs_f64();
        if self.request.leave_running {
            self.containerd.resume(&id).await?;
            self.staging.note_thawed().map_err(staging_error(self.staging.dump()))?;
        }
        Ok(dumped)
    }

    /// What the container changed on disk, compared with its image.
    async fn changes(&self) -> Result<Dumped, CaptureCommandError> {
        let (snapshotter, key) = (&self.container.snapshotter, &self.container.snapshot_key);
        let parent = self.containerd.snapshot_parent(snapshotter, key).await?.unwrap_or_default();
        let mut upper = self.containerd.snapshot_mounts(snapshotter, key).await?;
        let view = format!("{}-parent", self.capture_id);
        let lower = self.containerd.view_snapshot(snapshotter, &view, &parent).await?;
        let compared = async {
            let portable = capsule_below(&lower);
            if let Some(portable) = &portable {
                self.add_overlay(portable, &mut upper)?;
            }
            let root = upper.iter().find(|mount| mount.r#type == "overlay" && mount.target.is_empty());
            let lower_options = root.map(|mount| mount.options.clone());
            let changes = self.containerd.diff(lower, upper, DIFF_LAYER_TYPE).await?;
            Ok(Dumped { changes, lower: lower_options, portable, freeze_seconds: 0.0 })
        }
        .await;
        self.containerd.remove_snapshot(snapshotter, &view).await?;
        compared
    }

    /// A container that was restored from an overlay of this node has files that neither its snapshot nor its image has:
    /// they belong to what it changed.
    fn add_overlay(&self, portable: &Portable, upper: &mut [Mount]) -> Result<(), CaptureCommandError> {
        let Some(used) = overlay::used_by(&self.store, portable, &self.container_root())? else {
            return Ok(());
        };
        let changes = [used.changes()];
        for mount in upper.iter_mut().filter(|mount| mount.target.is_empty()) {
            mount.options = with_layers(&mount.options, &changes).map_err(CaptureCommandError::Layers)?;
        }
        Ok(())
    }

    /// Where the container has the files of `--model`, for a recovery in a container with the same mounts. `root` is
    /// the container's root.
    fn checkpoint_seen(&self, root: &Path) -> Vec<CheckpointFacts> {
        let spec = self.container.spec.as_ref().map(|any| any.value.as_slice()).unwrap_or_default();
        let spec: serde_json::Value = serde_json::from_slice(spec).unwrap_or_default();
        let binds = locate::binds(&spec);
        let models = self.request.model.iter();
        models.filter_map(|path| locate::seen_by_container(path, root, &binds)).collect()
    }

    /// Payload, residual, images, descriptor in the tree below `layer_root`: everything that needs no containerd, off the
    /// async threads.
    ///
    /// # Errors
    /// See [`coldsnap::capture::run::CaptureError`].
    pub async fn build_capsule(&mut self, layer_root: PathBuf) -> Result<CaptureReport, CaptureCommandError> {
        let checkpoint = self.checkpoint.take();
        let first = self.request.model.first().cloned();
        let (store, output) = (self.store.clone(), self.output);
        let (dump, root) = (self.staging.dump(), self.container_root());
        let checkpoint_seen = self.checkpoint_seen(&root);
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let runtime = self.runtime_binary();
        let request = OwnedRequest {
            capture_id: self.capture_id.clone(),
            created_unix_ns: self.created_unix_ns(),
            host,
            scope: self.request.scope,
            keep_tcp: self.request.tcp_established,
            process: ProcessFacts { args: self.facts.args.clone(), terminal: self.facts.terminal },
            binds: self.facts.binds.clone(),
            checkpoint_seen,
            image_reference: self.request.image.clone().unwrap_or_else(|| self.container.image.clone()),
        };
        let work = move || -> Result<CaptureReport, CaptureCommandError> {
            let tools = Tools {
                coldsnap: env!("CARGO_PKG_VERSION").to_owned(),
                criu: tools::version("criu").unwrap_or_default(),
                runtime: tools::version(&runtime).unwrap_or_default(),
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
                checkpoint_seen: request.checkpoint_seen,
                scope: request.scope,
                keep_tcp: request.keep_tcp,
                process: request.process,
                binds: request.binds,
                tools,
                image_reference: request.image_reference,
            };
            Ok(capture(&request, &mut Bars { output, bar: None })?)
        };
        off_the_async_threads(work).await
    }

    /// The capsule's tree in the staging directory as a layer.
    ///
    /// # Errors
    /// Any I/O error.
    pub async fn write_layer(&self) -> Result<Layer, CaptureCommandError> {
        let (root, file) = (self.staging.layer(), self.staging.layer_file());
        off_the_async_threads(move || {
            write_layer(&root, Path::new(capsule::CAPSULE_DIR), &file)
                .map_err(|source| CaptureCommandError::Io { action: "write", path: file, source })
        })
        .await
    }
}

/// The capsule in the layers of these mounts. One that cannot be read is none: it cannot have been restored from.
fn capsule_below(mounts: &[Mount]) -> Option<Portable> {
    let root = mounts.iter().find(|mount| mount.target.is_empty())?;
    let layers = lower_layers(&root.options).unwrap_or_else(|| vec![PathBuf::from(&root.source)]);
    Portable::in_layers(&layers).ok()
}

/// Runs blocking work.
///
/// # Errors
/// Those of the work, or that it panicked.
pub async fn off_the_async_threads<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CaptureCommandError> + Send + 'static,
) -> Result<T, CaptureCommandError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(panicked) => Err(CaptureCommandError::Panicked(panicked.to_string())),
    }
}

/// Resolves at SIGINT or SIGTERM.
pub async fn interrupted() {
    use tokio::signal::unix::{SignalKind, signal};
    match (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) {
        (Ok(mut int), Ok(mut term)) => {
            tokio::select! { _ = int.recv() => {}, _ = term.recv() => {} }
        }
        _ => std::future::pending().await,
    }
}

/// Removes what killed captures left and thaws the containers that they froze.
async fn clean_up_after_others(address: &Path, store: &NodeStore) -> Result<(), CaptureCommandError> {
    let error = |source| CaptureCommandError::Io { action: "clean up", path: store.root().into(), source };
    for frozen in staging::sweep(store).map_err(error)? {
        let Frozen { namespace, container } = &frozen;
        tracing::warn!(
            namespace,
            container,
            "an interrupted capture left this container frozen; it is resumed"
        );
        let containerd = Containerd::connect(address, namespace).await?;
        let _ = containerd.resume(container).await;
    }
    store.sweep()?;
    overlay::sweep(store, |id| staging::exists(store, id))?;
    Ok(())
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

struct OwnedRequest {
    capture_id: String,
    created_unix_ns: u64,
    host: String,
    scope: MappingScope,
    keep_tcp: bool,
    process: ProcessFacts,
    binds: Vec<String>,
    checkpoint_seen: Vec<CheckpointFacts>,
    image_reference: String,
}
