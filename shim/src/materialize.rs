//! Recovery at a start: when nothing but payloads is missing, they are rebuilt from the pinned checkpoint, before the
//! restore or beside the cold start that serves meanwhile.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use coldsnap::capsule;
use coldsnap::config::{Config, MaterializeMode};
use coldsnap::format::artifact::PayloadRequirement;
use coldsnap::recover::background;
use coldsnap::recover::capsule::{CapsuleDocuments, facts};
use coldsnap::recover::files::{Place, Places};
use coldsnap::recover::locate::places;
use coldsnap::recover::mode::resolve;
use coldsnap::recover::record::{Reason, Trigger};
use coldsnap::recover::run::{Job, materialize};
use coldsnap::restore::RestoreMode;
use coldsnap::source::Limits;
use coldsnap::store::NodeStore;
use log::{info, warn};
use serde_json::Value;

use crate::mount::LiftedBind;
use crate::restore::{NoRestore, Plan, decide, store};
use crate::spec::Spec;

/// In the bundle of a container that has leases of its own.
const LEASE_MARK: &str = "payload-lease";

/// A container that is about to start.
#[derive(Debug)]
pub struct Start {
    /// containerd's id of it.
    pub id: String,
    /// containerd's namespace.
    pub namespace: String,
    /// Its bundle directory.
    pub bundle: PathBuf,
    /// Its mounted root filesystem.
    pub rootfs: PathBuf,
    /// What its annotation says about restores.
    pub restore: RestoreMode,
    /// What its annotation says about materialization.
    pub materialize: Option<MaterializeMode>,
}

/// The decision about a restore; in mode `required` missing payloads are rebuilt first, in mode `async` a process in
/// the background begins to rebuild them while the container starts cold.
///
/// # Errors
/// What stands against the restore, and why a payload could not be rebuilt.
pub fn decide_and_recover(start: &Start, document: &Value) -> Result<Option<Plan>, NoRestore> {
    let store = store();
    let decided = decide(&store, &start.rootfs, document, start.restore);
    let refused = match decided {
        Err(refused) => refused,
        Ok(decided) => return Ok(decided),
    };
    let Some(lacking) = refused.only_lacks_payloads() else {
        return Err(NoRestore::new(&refused, start.restore));
    };
    let spec = Spec::load(&start.bundle);
    let mut spec = spec.map_err(|error| NoRestore::new(&error, start.restore))?;
    match recover(start, &store, &mut spec, &lacking) {
        Ok(true) => decide(&store, &start.rootfs, spec.document(), start.restore)
            .map_err(|refused| NoRestore::new(&refused, start.restore)),
        Ok(false) => Err(NoRestore::new(&refused, start.restore)),
        Err(reason) => {
            Err(NoRestore::new(&format!("{refused}; it was not rebuilt: {reason}"), start.restore))
        }
    }
}

/// Whether the payloads are here and bound now.
fn recover(start: &Start, store: &NodeStore, spec: &mut Spec, lacking: &[&str]) -> Result<bool, String> {
    let capsule = CapsuleDocuments::read(&start.rootfs).map_err(|e| e.to_string())?;
    let config = Config::of_node().map_err(|e| e.to_string())?;
    let mode = resolve(start.materialize, config.materialize.mode, &capsule.artifact);
    let mode = mode.map_err(|e| e.to_string())?;
    if mode == MaterializeMode::Off {
        return Ok(false);
    }
    let wanted = |payload: &PayloadRequirement| lacking.contains(&payload.worker.as_str());
    let missing: Vec<PayloadRequirement> = capsule.artifact.payloads().into_iter().filter(wanted).collect();
    let facts = facts(&start.rootfs).map_err(|e| e.to_string())?;
    let model = missing.first().and_then(|payload| capsule.model_source(&payload.worker));
    let configured = &config.materialize.checkpoints;
    let places = places(&facts.checkpoint, &start.rootfs, spec.document(), configured, model.as_ref());
    if mode == MaterializeMode::Required {
        let limits = Limits { bandwidth: config.staging.bandwidth_limit.map(|limit| limit.0) };
        return rebuild(start, store, spec, capsule, &missing, places, limits).map(|()| true);
    }
    // A container that is refused needs nothing beside it.
    if start.restore == RestoreMode::Auto {
        rebuild_later(start, store, &capsule, &missing, &places);
    }
    Ok(false)
}

fn rebuild(
    start: &Start,
    store: &NodeStore,
    spec: &mut Spec,
    capsule: CapsuleDocuments,
    missing: &[PayloadRequirement],
    places: Vec<Place>,
    limits: Limits,
) -> Result<(), String> {
    NodeStore::open(store.root()).map_err(|e| e.to_string())?;
    let (capsule, files) = (Arc::new(capsule), Arc::new(Places(places)));
    for payload in missing {
        let began = Instant::now();
        info!("container {}: payload {} is brought from the checkpoint", start.id, payload.digest);
        let job = Job {
            capsule: Arc::clone(&capsule),
            worker: payload.worker.clone(),
            trigger: Trigger::Required,
            files: Arc::clone(&files) as _,
        };
        let brought = materialize(store, &job, &limits, &|| false, &mut |_| {});
        let brought = brought.map_err(|e| e.to_string())?;
        let seconds = began.elapsed().as_secs_f64();
        info!("container {}: payload {} is here after {seconds:.1} s", start.id, payload.digest);
        // The mark comes first: whoever deletes the container looks for a lease only when there is one.
        std::fs::write(start.bundle.join(LEASE_MARK), b"")
            .map_err(|e| format!("cannot write into {}: {e}", start.bundle.display()))?;
        store.lease(&brought.payload, &owner(&start.namespace, &start.id)).map_err(|e| e.to_string())?;
        let destination = capsule::payload_destination(&payload.worker);
        if !spec.has_mount(&destination) {
            let source = brought.payload.path().to_string_lossy().into_owned();
            let options = ["bind", "ro", "nosuid", "nodev"].map(str::to_owned).to_vec();
            spec.add_bind(&LiftedBind { source, destination, options }).map_err(|e| e.to_string())?;
        }
    }
    spec.save().map_err(|e| e.to_string())
}

/// What goes wrong here is told and recorded; the container starts all the same.
fn rebuild_later(
    start: &Start,
    store: &NodeStore,
    capsule: &CapsuleDocuments,
    missing: &[PayloadRequirement],
    places: &[Place],
) {
    let fail = |kind: &str, message: String| {
        warn!("container {}: its payload is not rebuilt in the background: {message}", start.id);
        let reason = Reason { kind: kind.to_owned(), message };
        if let Err(error) = background::note_failure(store, capsule, missing, Trigger::Async, &reason) {
            warn!("container {}: that cannot be recorded: {error}", start.id);
        }
    };
    if places.is_empty() {
        let message = "the capture did not record where the container sees the checkpoint, and \
             materialize.checkpoints of the configuration names no directory";
        return fail("CheckpointMissing", message.to_owned());
    }
    let Some(program) = background::program() else {
        let message = format!("the command {} is neither beside the shim nor in PATH", background::PROGRAM);
        return fail("Io", message);
    };
    let scheduled = background::schedule(store, capsule, missing, Trigger::Async, places);
    let started = match scheduled {
        Ok(None) => {
            info!("container {}: its payload is being rebuilt already", start.id);
            return;
        }
        Ok(Some(directory)) => {
            background::start(&program, store, None, &directory).map_err(|e| e.to_string())
        }
        Err(error) => Err(error.to_string()),
    };
    match started {
        Ok(pid) => info!("container {}: process {pid} rebuilds its payload for the next start", start.id),
        Err(error) => fail("Io", format!("{}: {error}", program.display())),
    }
}

/// Gives back the leases that the container got here.
pub fn release_leases(bundle: &Path, namespace: &str, id: &str) {
    let mark = bundle.join(LEASE_MARK);
    if !mark.exists() {
        return;
    }
    match store().release(&owner(namespace, id)) {
        Ok(_) => drop(std::fs::remove_file(mark)),
        Err(error) => warn!("container {id}: cannot release its payload leases: {error}"),
    }
}

fn owner(namespace: &str, id: &str) -> String {
    format!("container/{namespace}/{id}")
}
