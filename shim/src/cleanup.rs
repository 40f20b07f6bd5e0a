//! What the `delete` action removes after a shim has died: everything of the container but its bundle, which is
//! containerd's.

use std::path::Path;
use std::sync::Arc;

use containerd_shim_protos::api::DeleteResponse;
use time::OffsetDateTime;

use crate::cgroup;
use crate::container::{INIT_PID_FILE, read_pid};
use crate::exit::timestamp;
use crate::materialize::release_leases;
use crate::mount::unmount_below;
use crate::options::Options;
use crate::reaper::{KILLED, Reaper};
use crate::runc::Runc;
use crate::spec::Spec;

/// Kills and removes the container; what cannot be removed is reported on standard error, which containerd logs,
/// and does not keep the rest from being removed.
pub async fn after_dead_shim(
    id: &str,
    namespace: &str,
    bundle: &Path,
    reaper: Arc<Reaper>,
) -> DeleteResponse {
    let options = Options::load(bundle).unwrap_or_else(|error| {
        eprintln!("{error}; using the defaults");
        Options::default()
    });
    let runc = Runc::new(&options.binary_name, &options.root, namespace, options.systemd_cgroup, reaper);
    let report = |error: &dyn std::fmt::Display| eprintln!("container {id}: {error}");
    let state = runc.state_directory(id);
    // A runtime that was killed during a restore leaves a mount for CRIU there, which it cannot remove itself.
    let unmounted = unmount_below(&state).inspect_err(|error| report(error)).is_ok();
    runc.delete(id, true).await.unwrap_or_else(|error| report(&error));
    // ... and knows a container only if it got as far as writing its state.
    if unmounted && state.is_dir() {
        std::fs::remove_dir_all(&state).unwrap_or_else(|error| report(&error));
    }
    // A runtime that was killed while it made the container does not know it.
    match Spec::load(bundle) {
        Ok(spec) => spec.cgroups_path().into_iter().for_each(|path| cgroup::remove_leftovers(path, id)),
        Err(error) => report(&error),
    }
    unmount_below(bundle).unwrap_or_else(|error| report(&error));
    release_leases(bundle, namespace, id);
    let pid = read_pid(&bundle.join(INIT_PID_FILE)).unwrap_or_default();
    DeleteResponse {
        pid: u32::try_from(pid).unwrap_or_default(),
        exit_status: KILLED,
        exited_at: Some(timestamp(OffsetDateTime::now_utc())).into(),
        ..Default::default()
    }
}
