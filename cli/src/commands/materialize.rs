//! `coldsnap materialize`: rebuilds the payloads of a capsule from the pinned checkpoint, and shows how far that is.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use coldsnap::config::MaterializeMode;
use coldsnap::digest::Digest;
use coldsnap::format::artifact::PayloadRequirement;
use coldsnap::recover::background::{self, Request};
use coldsnap::recover::capsule::CapsuleDocuments;
use coldsnap::recover::files::{Place, Places};
use coldsnap::recover::mode::resolve;
use coldsnap::recover::record::{self, Found, Materialization, Trigger};
use coldsnap::recover::run::{Job, MaterializeError, materialize};
use coldsnap::source::{Event, Limits};
use coldsnap::store::NodeStore;
use serde::Serialize;

use crate::artifact::Images;
use crate::node::Node;
use crate::output::{CliError, Output};

/// Rebuild the payloads of a capsule from the checkpoint that they were captured from; nothing is published unless
/// the result has the committed size and digest.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A capsule image in containerd, an artifact.json in a capsule's directory, or a directory with a capsule.
    #[arg(value_name = "IMAGE|ARTIFACT|DIRECTORY", required_unless_present_any = ["status", "request"])]
    capsule: Option<String>,
    /// Where the checkpoint is: a file, a directory, a snapshot of a Hugging Face cache, or a whole cache. Without it
    /// the directories that the configuration lists.
    #[arg(long, value_name = "PATH", conflicts_with = "status")]
    checkpoint: Vec<PathBuf>,
    /// Only the payload of this worker.
    #[arg(long, value_name = "ID", conflicts_with = "status")]
    worker: Option<String>,
    /// Leave the work to a process in the background; --status shows it.
    #[arg(long, conflicts_with = "status")]
    background: bool,
    /// Show the states of materializations, of all or of this capsule.
    #[arg(long)]
    status: bool,
    /// Do what was scheduled in this directory of the store.
    #[arg(long, value_name = "DIR", hide = true, conflicts_with_all = ["capsule", "status", "background"])]
    request: Option<PathBuf>,
    #[command(flatten)]
    images: Images,
}

#[derive(Serialize)]
struct Report {
    artifact: Digest,
    capture_id: String,
    workers: Vec<Rebuilt>,
}

#[derive(Serialize)]
struct Rebuilt {
    worker: String,
    payload: Digest,
    bytes: u64,
    /// Bytes that were read from the checkpoint now; 0 when the payload was here.
    rebuilt_bytes: u64,
    /// Bytes that an interrupted attempt had left.
    resumed_bytes: u64,
    seconds: f64,
}

#[derive(Serialize)]
struct Scheduled {
    artifact: Digest,
    capture_id: String,
    /// The process in the background; null when somebody works on everything already.
    pid: Option<u32>,
}

#[derive(Serialize)]
struct Status {
    materializations: Vec<Row>,
    /// State files that cannot be understood.
    problems: Vec<Problem>,
}

#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    document: Materialization,
    /// Whether somebody works on it now.
    alive: bool,
    /// Whether the payload is in the store, not verified here.
    payload_here: bool,
}

#[derive(Serialize)]
struct Problem {
    path: String,
    problem: String,
}

/// Runs the command.
///
/// # Errors
/// There is no such capsule, or a payload cannot be rebuilt.
pub fn run(args: Args, node: &Node, config: &Path, output: &Output) -> Result<(), CliError> {
    if args.status {
        return status(&args, &node.store(), output);
    }
    let limits = Limits { bandwidth: node.config.staging.bandwidth_limit.map(|limit| limit.0) };
    let store = node.open_store()?;
    if let Some(directory) = &args.request {
        background::step_back();
        let request = Request::read(directory)?;
        let capsule = Arc::new(CapsuleDocuments::read(directory)?);
        let places = |_: &str| request.places.clone();
        return rebuild(&store, &capsule, &request.workers, request.trigger, &places, limits, output);
    }
    let capsule = Arc::new(args.images.capsule(args.capsule.as_deref().unwrap_or_default())?);
    let workers = match &args.worker {
        Some(worker) => vec![capsule.payload(worker)?.worker],
        None => capsule.artifact.payloads().into_iter().map(|payload| payload.worker).collect(),
    };
    if workers.is_empty() {
        return Err(CliError::new("NotRecoverable", "the artifact has no model payload"));
    }
    resolve(Some(MaterializeMode::Required), None, &capsule.artifact)?;
    let named =
        if args.checkpoint.is_empty() { &node.config.materialize.checkpoints } else { &args.checkpoint };
    let places = |worker: &str| {
        let model = capsule.model_source(worker);
        named.iter().map(|path| Place::named(path, model.as_ref())).collect::<Vec<_>>()
    };
    if args.background {
        return in_background(&store, config, &capsule, &workers, &places(&workers[0]), output);
    }
    rebuild(&store, &capsule, &workers, Trigger::Command, &places, limits, output)
}

fn rebuild(
    store: &NodeStore,
    capsule: &Arc<CapsuleDocuments>,
    workers: &[String],
    trigger: Trigger,
    places: &dyn Fn(&str) -> Vec<Place>,
    limits: Limits,
    output: &Output,
) -> Result<(), CliError> {
    let mut rebuilt = Vec::new();
    let mut failed: Option<(String, MaterializeError)> = None;
    for worker in workers {
        let files = Arc::new(Places(places(worker)));
        let job = Job { capsule: Arc::clone(capsule), worker: worker.clone(), trigger, files };
        match rebuild_one(store, &job, limits, output) {
            Ok(row) => rebuilt.push(row),
            // The others are wanted all the same.
            Err(error) => failed = failed.or(Some((worker.clone(), error))),
        }
    }
    if let Some((worker, error)) = failed {
        return Err(CliError::new(error.kind(), format!("worker {worker}: {error}")));
    }
    let report = Report {
        artifact: capsule.digest,
        capture_id: capsule.artifact.capture_id.clone(),
        workers: rebuilt,
    };
    output.result(&report, || {
        let line = |w: &Rebuilt| {
            let how = match w.rebuilt_bytes {
                0 if w.resumed_bytes == 0 => "was here".to_owned(),
                bytes => format!("{bytes} bytes from the checkpoint in {:.1} s", w.seconds),
            };
            format!("worker {}: payload {}, {} bytes, {how}", w.worker, w.payload, w.bytes)
        };
        report.workers.iter().map(line).collect::<Vec<_>>().join("\n")
    })
}

fn rebuild_one(
    store: &NodeStore,
    job: &Job,
    limits: Limits,
    output: &Output,
) -> Result<Rebuilt, MaterializeError> {
    let began = Instant::now();
    let payload = job.capsule.payload(&job.worker)?;
    let mut progress = output.progress("rebuilding", payload.bytes);
    let mut shown = 0;
    let brought = materialize(store, job, &limits, &|| false, &mut |event| {
        if let Event::Bytes { here, .. } = event {
            progress.advance(here.saturating_sub(shown));
            shown = shown.max(here);
        }
    })?;
    Ok(Rebuilt {
        worker: payload.worker,
        payload: payload.digest,
        bytes: payload.bytes,
        rebuilt_bytes: brought.fetched,
        resumed_bytes: brought.resumed,
        seconds: began.elapsed().as_secs_f64(),
    })
}

fn in_background(
    store: &NodeStore,
    config: &Path,
    capsule: &CapsuleDocuments,
    workers: &[String],
    places: &[Place],
    output: &Output,
) -> Result<(), CliError> {
    let wanted = |payload: &PayloadRequirement| workers.contains(&payload.worker);
    let payloads: Vec<_> = capsule.artifact.payloads().into_iter().filter(wanted).collect();
    // The paths must mean the same in another working directory.
    let absolute = |place: &Place| {
        let root = std::path::absolute(&place.root).unwrap_or_else(|_| place.root.clone());
        Place { root, ..place.clone() }
    };
    let places: Vec<_> = places.iter().map(absolute).collect();
    let directory = background::schedule(store, capsule, &payloads, Trigger::Command, &places)?;
    let pid = match directory {
        None => None,
        Some(directory) => {
            let program = std::env::current_exe().map_err(|e| CliError::new("Io", e))?;
            let started = background::start(&program, store, Some(config), &directory);
            Some(started.map_err(|e| CliError::new("Io", format!("cannot start a process: {e}")))?)
        }
    };
    let report = Scheduled { artifact: capsule.digest, capture_id: capsule.artifact.capture_id.clone(), pid };
    output.result(&report, || match pid {
        Some(pid) => format!("process {pid} rebuilds it; coldsnap materialize --status shows how far it is"),
        None => "somebody rebuilds it already; coldsnap materialize --status shows how far it is".to_owned(),
    })
}

fn status(args: &Args, store: &NodeStore, output: &Output) -> Result<(), CliError> {
    let named = args.capsule.as_ref().map(|text| args.images.capsule(text)).transpose()?;
    let artifact = named.map(|capsule| capsule.digest);
    let listing = record::list(store, artifact.as_ref())?;
    let row = |Found { document, alive }: Found| {
        let metadata = std::fs::symlink_metadata(store.payload_path(&document.payload));
        let payload_here = metadata.is_ok_and(|m| m.is_file() && m.len() == document.bytes);
        Row { document, alive, payload_here }
    };
    let problem = |(path, problem): (PathBuf, String)| Problem { path: path.display().to_string(), problem };
    let status = Status {
        materializations: listing.found.into_iter().map(row).collect(),
        problems: listing.problems.into_iter().map(problem).collect(),
    };
    output.result(&status, || status.text())
}

impl Status {
    fn text(&self) -> String {
        let mut lines = Vec::new();
        for Row { document: d, alive, payload_here } in &self.materializations {
            let percent = d.bytes_done.saturating_mul(100) / d.bytes.max(1);
            let mut line = format!("{} {}  {}  {}", d.capture_id, d.worker, d.payload, d.state.name());
            match d.state {
                record::State::Writing | record::State::Verifying if *alive => {
                    line += &format!(" {percent} % of {} bytes", d.bytes);
                }
                record::State::Writing | record::State::Verifying => {
                    line += &format!(" {percent} % of {} bytes, interrupted: run it again", d.bytes);
                }
                record::State::Ready if !payload_here => line += ", but the payload was removed since",
                _ => {}
            }
            if let Some(reason) = &d.reason {
                line += &format!(": {} [{}]", reason.message, reason.kind);
            }
            lines.push(line);
        }
        lines.extend(self.problems.iter().map(|p| format!("{}: {}", p.path, p.problem)));
        if lines.is_empty() { "no materializations".to_owned() } else { lines.join("\n") }
    }
}
