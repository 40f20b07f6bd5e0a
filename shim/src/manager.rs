//! What containerd asks of the binary itself: start a shim, clean up after a dead one, describe the runtime.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use containerd_shim::asynchronous::{ExitSignal, Shim, spawn};
use containerd_shim::publisher::RemotePublisher;
use containerd_shim::{Config, Error, Flags, StartOpts};
use containerd_shim_protos::api::DeleteResponse;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::types::introspection::RuntimeInfo;
use log::{info, warn};
use tokio::sync::OnceCell;

use crate::container::Host;
use crate::events::Events;
use crate::reaper::Reaper;
use crate::service::Service;
use crate::spec::Spec;
use crate::{cleanup, features};

/// The pod that a container belongs to: its containers share one shim.
const SANDBOX_ANNOTATION: &str = "io.kubernetes.cri.sandbox-id";

/// One invocation of the binary.
pub struct Manager {
    id: String,
    namespace: String,
    socket: String,
    address: String,
    bundle: PathBuf,
    exit: Arc<ExitSignal>,
    events: OnceCell<Events>,
}

#[async_trait]
impl Shim for Manager {
    type T = Service;

    async fn new(_runtime_id: &str, flags: &Flags, _config: &mut Config) -> Self {
        Self {
            id: flags.id.clone(),
            namespace: flags.namespace.clone(),
            socket: flags.socket.clone(),
            address: flags.address.clone(),
            bundle: flags.bundle.clone().into(),
            exit: Arc::new(ExitSignal::default()),
            events: OnceCell::new(),
        }
    }

    async fn start_shim(&mut self, options: StartOpts) -> Result<String, Error> {
        let spec = Spec::load(Path::new(".")).map_err(|error| Error::InvalidArgument(error.to_string()))?;
        let grouping = spec.annotation(SANDBOX_ANNOTATION).unwrap_or(&options.id).to_owned();
        let address = options.socket_address(&grouping);
        match probe(socket_path(&address)) {
            // The shim of the pod.
            Socket::Serves => return Ok(address),
            Socket::Stale => remove_socket(socket_path(&address)),
            Socket::Absent => {}
        }
        let address = spawn(options, &grouping, Vec::new()).await?;
        match probe(socket_path(&address)) {
            Socket::Serves => Ok(address),
            // containerd would not call `delete` for a shim that it never reached.
            _ => {
                remove_socket(socket_path(&address));
                Err(Error::Other(format!(
                    "the shim for {grouping} died while it started; its log may say why"
                )))
            }
        }
    }

    async fn delete_shim(&mut self) -> Result<DeleteResponse, Error> {
        let bundle = match self.bundle.as_os_str().is_empty() {
            true => std::env::current_dir()
                .map_err(|err| Error::IoError { context: "find the bundle".to_owned(), err })?,
            false => self.bundle.clone(),
        };
        let reaper =
            Reaper::start().map_err(|err| Error::IoError { context: "start the reaper".to_owned(), err })?;
        let response = cleanup::after_dead_shim(&self.id, &self.namespace, &bundle, reaper).await;
        let address = containerd_shim::socket_address(&self.address, &self.namespace, &self.id);
        if probe(socket_path(&address)) == Socket::Stale {
            remove_socket(socket_path(&address));
        }
        Ok(response)
    }

    async fn wait(&mut self) {
        self.exit.wait().await;
        if let Some(events) = self.events.get() {
            events.flush().await;
        }
        remove_socket(socket_path(&self.socket));
    }

    async fn create_task_service(&self, publisher: RemotePublisher) -> Service {
        let events = Events::start(publisher.address.clone(), &self.namespace);
        let _ = self.events.set(events.clone());
        let reaper = match Reaper::start() {
            Ok(reaper) => reaper,
            Err(error) => {
                // Nothing could be started or waited for.
                log::error!("cannot receive SIGCHLD: {error}");
                std::process::exit(1);
            }
        };
        info!("shim {} for {}/{}", env!("CARGO_PKG_VERSION"), self.namespace, self.id);
        let host = Host { namespace: self.namespace.clone(), events, reaper };
        Service::new(host, Arc::clone(&self.exit))
    }

    fn runtime_info(runtime_id: &str, options: Option<&Any>) -> Result<RuntimeInfo, Error> {
        features::runtime_info(runtime_id, options).map_err(|error| Error::Other(error.to_string()))
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Socket {
    Absent,
    Stale,
    Serves,
}

fn probe(path: &Path) -> Socket {
    match UnixStream::connect(path) {
        Ok(_) => Socket::Serves,
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Socket::Stale,
        Err(_) => Socket::Absent,
    }
}

fn socket_path(address: &str) -> &Path {
    Path::new(address.strip_prefix("unix://").unwrap_or(address))
}

fn remove_socket(path: &Path) {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            warn!("cannot remove the socket {}: {error}", path.display());
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn sockets_are_told_apart() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        assert_eq!(probe(&path), Socket::Absent);
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(probe(&path), Socket::Serves);
        drop(listener);
        assert_eq!(probe(&path), Socket::Stale);
        remove_socket(&path);
        assert_eq!(probe(&path), Socket::Absent);
    }
}
