//! Checkpoint: CRIU images of a running or paused container.

use std::path::{Path, PathBuf};

use coldsnap::criu::config::{EstablishedTcp, dump_config};
use coldsnap::criu::log::decisive_lines;
use containerd_shim::bootstrap::any_is;
use containerd_shim_protos::api::{CheckpointTaskRequest, Status};
use containerd_shim_protos::events::task::TaskCheckpointed;
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::shim::oci::CheckpointOptions;
use log::warn;

use crate::container::Container;
use crate::error::TaskError;
use crate::options::Options;
use crate::runc::{self, RuncError};

/// Directory in the bundle for CRIU's files when the request names none.
const WORK_DIR: &str = "checkpoint-work";
/// In the bundle: the log of the last checkpoint that failed, under the name that containerd's own shim uses.
const FAILED_LOG: &str = "criu-dump.log";

/// Writes CRIU images of the container to the directory that the request names.
///
/// # Errors
/// The container is not running or paused, the options cannot be used, or CRIU refused: then its decisive words are in
/// the error, its log is in the bundle, and the container goes on as before.
pub async fn checkpoint(container: &Container, request: &CheckpointTaskRequest) -> Result<(), TaskError> {
    let options = decode(request.options.as_ref())?;
    let directories = Directories::choose(&options, request, &container.options, &container.bundle)?;
    let init = &container.init;
    let _transition = init.transition.lock().await;
    container.require_status("be checkpointed", &[Status::RUNNING, Status::PAUSED])?;

    let config = container.criu_config_file();
    let tcp = if options.open_tcp { EstablishedTcp::Keep } else { EstablishedTcp::Close };
    std::fs::write(&config, dump_config(tcp))
        .map_err(TaskError::io(format!("write {}", config.display())))?;
    let work = &directories.work;
    std::fs::create_dir_all(work).map_err(TaskError::io(format!("make {}", work.display())))?;
    let call = runc::Checkpoint {
        images: &directories.images,
        work,
        leave_running: !options.exit,
        tcp_established: options.open_tcp,
        external_unix_sockets: options.external_unix_sockets,
        shell_job: options.terminal,
        file_locks: options.file_locks,
        empty_namespaces: &options.empty_namespaces,
        cgroups_mode: &options.cgroups_mode,
    };
    let result = container.runc.checkpoint(&container.id, &call).await;
    let result = result.map_err(|error| explained(container, &error, work));
    if directories.work_is_ours {
        std::fs::remove_dir_all(work)
            .unwrap_or_else(|error| warn!("cannot remove {}: {error}", work.display()));
    }
    result?;
    container.host.events.publish(TaskCheckpointed {
        container_id: container.id.clone(),
        checkpoint: directories.images.display().to_string(),
        ..Default::default()
    });
    Ok(())
}

/// containerd's clients fill the options in only for the runtime that they know by name; others get the defaults.
fn decode(any: Option<&Any>) -> Result<CheckpointOptions, TaskError> {
    let Some(any) = any.filter(|any| !any.type_url.is_empty()) else {
        return Ok(CheckpointOptions::default());
    };
    if !any_is::<CheckpointOptions>(any) {
        return Err(TaskError::InvalidArgument(format!(
            "checkpoint options of type {:?} are not known; containerd.runc.v1.CheckpointOptions is expected",
            any.type_url
        )));
    }
    CheckpointOptions::parse_from_bytes(&any.value).map_err(|error| {
        TaskError::InvalidArgument(format!("the checkpoint options cannot be decoded: {error}"))
    })
}

#[derive(Debug, PartialEq, Eq)]
struct Directories {
    images: PathBuf,
    work: PathBuf,
    work_is_ours: bool,
}

impl Directories {
    fn choose(
        options: &CheckpointOptions,
        request: &CheckpointTaskRequest,
        defaults: &Options,
        bundle: &Path,
    ) -> Result<Self, TaskError> {
        let first = |paths: [&str; 3]| paths.into_iter().find(|path| !path.is_empty()).map(PathBuf::from);
        let images =
            first([&options.image_path, &request.path, &defaults.criu_image_path]).ok_or_else(|| {
                TaskError::InvalidArgument(
                    "the checkpoint request names no directory for the images".to_owned(),
                )
            })?;
        let work = first([&options.work_path, &defaults.criu_work_path, ""]);
        Ok(Self { images, work_is_ours: work.is_none(), work: work.unwrap_or_else(|| bundle.join(WORK_DIR)) })
    }
}

fn explained(container: &Container, error: &RuncError, work: &Path) -> TaskError {
    let log = work.join("dump.log");
    let kept = container.bundle.join(FAILED_LOG);
    let lines = decisive_lines(&log);
    let place = match std::fs::copy(&log, &kept) {
        Ok(_) => format!("log: {}", kept.display()),
        Err(copy) => format!("{} cannot be kept: {copy}", log.display()),
    };
    let said = if lines.is_empty() { String::new() } else { format!("CRIU says: {}; ", lines.join("; ")) };
    TaskError::Other(format!("cannot checkpoint container {}: {said}{error} ({place})", container.id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directories(
        image: &str,
        path: &str,
        work: &str,
        default_work: &str,
    ) -> Result<Directories, TaskError> {
        let options = CheckpointOptions {
            image_path: image.to_owned(),
            work_path: work.to_owned(),
            ..Default::default()
        };
        let request = CheckpointTaskRequest { path: path.to_owned(), ..Default::default() };
        let defaults = Options { criu_work_path: default_work.to_owned(), ..Default::default() };
        Directories::choose(&options, &request, &defaults, Path::new("/b"))
    }

    #[test]
    fn the_options_directories_come_before_the_requests() {
        let chosen = directories("/image", "/path", "/work", "/default").unwrap();
        assert_eq!(
            chosen,
            Directories { images: "/image".into(), work: "/work".into(), work_is_ours: false }
        );
        let chosen = directories("", "/path", "", "").unwrap();
        assert_eq!(
            chosen,
            Directories { images: "/path".into(), work: "/b/checkpoint-work".into(), work_is_ours: true }
        );
        assert_eq!(directories("", "/path", "", "/default").unwrap().work, Path::new("/default"));
        assert!(matches!(directories("", "", "", ""), Err(TaskError::InvalidArgument(_))));
    }

    #[test]
    fn absent_options_are_the_defaults_and_unknown_ones_an_error() {
        assert_eq!(decode(None).unwrap(), CheckpointOptions::default());
        let unknown = Any { type_url: "a.b".to_owned(), ..Default::default() };
        assert!(
            matches!(decode(Some(&unknown)), Err(TaskError::InvalidArgument(text)) if text.contains("a.b"))
        );
    }
}
