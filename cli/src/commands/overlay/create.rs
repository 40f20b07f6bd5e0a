//! `coldsnap overlay create`: captures a restored container again and keeps the result on this node.

use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use coldsnap::capture::run::CaptureReport;
use coldsnap::capture::scope::MappingScope;
use coldsnap::node::{ToolVersions, target};
use coldsnap::overlay::mount::with_upper;
use coldsnap::overlay::{NewOverlay, OverlayError, Published, publish};
use coldsnap::store::NodeStore;
use containerd_client::types::Mount;
use serde::Serialize;

use super::Client;
use crate::commands::capture::CaptureCommandError;
use crate::commands::capture::job::{Job, Request, interrupted, off_the_async_threads};
use crate::node::Node;
use crate::output::{CliError, Output};
use crate::tools;

/// Capture a container again that was restored from a capsule image, and use the result for later starts of that image on
/// this node. The container goes on.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The container's id.
    container: String,
    /// Stop the container once the overlay is complete.
    #[arg(long)]
    stop: bool,
    /// Which memory is mapped from files instead of copied at a restore: model, large or all.
    #[arg(long, value_name = "SCOPE", default_value_t = MappingScope::Large)]
    scope: MappingScope,
    /// Keep established TCP connections in the restored process; only right when it gets the same addresses.
    #[arg(long)]
    tcp_established: bool,
    #[command(flatten)]
    client: Client,
}

/// What `coldsnap overlay create --json` prints.
#[derive(Debug, Serialize)]
struct Created {
    /// Id of the overlay; null when it was discarded because its capsule equals the portable one.
    overlay: Option<String>,
    /// Where it lies.
    directory: Option<PathBuf>,
    /// Digest by which overlays name the portable descriptor.
    portable_descriptor: String,
    /// The image that it is for.
    image: String,
    /// Seconds from start to end.
    capture_seconds: f64,
    /// Seconds that the container was frozen.
    freeze_seconds: f64,
    /// Whether the container runs on.
    left_running: bool,
    #[serde(flatten)]
    report: CaptureReport,
}

/// Runs the command.
///
/// # Errors
/// See [`CaptureCommandError`]; the container is as it was, and nothing half made is left.
pub fn run(args: Args, node: &Node, output: &Output) -> Result<(), CliError> {
    let store = node.open_store()?;
    let runtime = tokio::runtime::Runtime::new().map_err(|e| CliError::new("Io", e))?;
    let created = runtime.block_on(create(args, store, *output));
    runtime.shutdown_background();
    let created = created.map_err(|e| CliError::new(e.kind(), e))?;
    output.result(&created, || text(&created))
}

fn text(created: &Created) -> String {
    let Created { overlay, image, capture_seconds, freeze_seconds, .. } = created;
    let Some(id) = overlay else {
        return format!("nothing is kept: the new capsule equals that of {image}");
    };
    format!(
        "overlay {id} of {image} made in {capture_seconds:.1} s (frozen {freeze_seconds:.2} s)\nlater starts of the image on \
         this node use it as long as `coldsnap overlay explain {image}` says so"
    )
}

async fn create(args: Args, store: NodeStore, output: Output) -> Result<Created, CaptureCommandError> {
    let began = Instant::now();
    let request = Request {
        container: args.container,
        image: None,
        model: Vec::new(),
        leave_running: !args.stop,
        scope: args.scope,
        tcp_established: args.tcp_established,
        address: args.client.address,
        namespace: args.client.namespace,
    };
    let mut job = Job::begin(request, store, output).await?;
    let result = tokio::select! {
        result = finish(&mut job, began) => result,
        () = interrupted() => Err(CaptureCommandError::Interrupted),
    };
    job.end(result.is_err()).await;
    result
}

async fn finish(job: &mut Job, began: Instant) -> Result<Created, CaptureCommandError> {
    let runtime = job.runtime_binary();
    let tools = move || Ok(ToolVersions { criu: tools::version("criu"), runc: tools::version(&runtime) });
    // Before anything is stopped: without them nothing can be bound.
    let target = target(&off_the_async_threads(tools).await?)?;

    let dumped = job.dump().await?;
    let portable = dumped.portable.ok_or(OverlayError::NoCapsule)?;
    let new = NewOverlay::begin(job.staging.overlay(), &job.container_root())?;
    let lower = dumped.lower.ok_or_else(|| {
        CaptureCommandError::Layers("the container's root filesystem is no overlay mount".to_owned())
    })?;
    let work = job.staging.overlay_work();
    let io = |source| CaptureCommandError::Io { action: "make", path: work.clone(), source };
    fs::create_dir(&work).map_err(io)?;
    let options = with_upper(&lower, &new.changes(), &work).map_err(CaptureCommandError::Layers)?;
    let overlay =
        Mount { r#type: "overlay".to_owned(), source: "overlay".to_owned(), target: String::new(), options };
    job.containerd.apply(dumped.changes, vec![overlay]).await?;
    let report = job.build_capsule(new.capsule()).await?;

    let (store, created_unix_ns) = (job.store.clone(), job.created_unix_ns());
    let portable_descriptor = portable.digest.to_string();
    let stored =
        off_the_async_threads(move || Ok(publish(&store, new, &portable, target, created_unix_ns)?)).await?;
    job.stop_unless_left_running().await?;
    let stored = match &stored {
        Published::Stored(overlay) => Some((overlay.id().to_owned(), overlay.directory().to_owned())),
        Published::Redundant => None,
    };
    let (overlay, directory) = stored.unzip();
    Ok(Created {
        overlay,
        directory,
        portable_descriptor,
        image: job.container.image.clone(),
        capture_seconds: began.elapsed().as_secs_f64(),
        freeze_seconds: dumped.freeze_seconds,
        left_running: job.request.leave_running,
        report,
    })
}
