//! Tasks: pids, pause, resume, kill, checkpoint.

use containerd_client::services::v1 as api;
use prost::Message;

use super::{Containerd, ContainerdError, failed};

/// `containerd.runc.v1.CheckpointOptions`, the options that shims of the runc family take.
#[derive(Clone, PartialEq, Message)]
pub struct CheckpointOptions {
    /// Stop the container after the checkpoint.
    #[prost(bool, tag = "1")]
    pub exit: bool,
    /// Keep established TCP connections.
    #[prost(bool, tag = "2")]
    pub open_tcp: bool,
    /// Allow unix sockets whose peer is outside.
    #[prost(bool, tag = "3")]
    pub external_unix_sockets: bool,
    /// Allow terminals.
    #[prost(bool, tag = "4")]
    pub terminal: bool,
    /// Allow file locks.
    #[prost(bool, tag = "5")]
    pub file_locks: bool,
    /// Where the images go; containerd passes it on.
    #[prost(string, tag = "8")]
    pub image_path: String,
    /// Where CRIU's log goes.
    #[prost(string, tag = "9")]
    pub work_path: String,
}

/// What is read of `containerd.runc.v1.Options`.
#[derive(Clone, PartialEq, Message)]
struct RuntimeOptions {
    /// Name or path of the OCI runtime.
    #[prost(string, tag = "6")]
    binary_name: String,
}

/// The OCI runtime's binary that runs a container: the one of its options, else `runc`.
pub fn runtime_binary(container: &api::Container) -> String {
    let options = container.runtime.as_ref().and_then(|runtime| runtime.options.as_ref());
    let options = options.filter(|any| any.type_url.ends_with("containerd.runc.v1.Options"));
    let options = options.and_then(|any| RuntimeOptions::decode(any.value.as_slice()).ok());
    options.map(|o| o.binary_name).filter(|name| !name.is_empty()).unwrap_or_else(|| "runc".to_owned())
}

impl Containerd {
    fn tasks(&self) -> api::tasks_client::TasksClient<tonic::transport::Channel> {
        api::tasks_client::TasksClient::new(self.channel.clone())
    }

    /// Pid of the container's first process on the host.
    ///
    /// # Errors
    /// When there is no task or the request fails.
    pub async fn task_pid(&self, container: &str) -> Result<u32, ContainerdError> {
        let action = format!("find the task of container {container}");
        let request = api::GetRequest { container_id: container.to_owned(), exec_id: String::new() };
        let answer = self.tasks().get(self.request(request)).await.map_err(failed(action.clone()))?;
        match answer.into_inner().process {
            Some(process) if process.pid != 0 => Ok(process.pid),
            _ => {
                Err(ContainerdError::Answer { action, reason: "the container has no running process".into() })
            }
        }
    }

    /// Pids of all processes of the container on the host.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn pids(&self, container: &str) -> Result<Vec<u32>, ContainerdError> {
        let request = api::ListPidsRequest { container_id: container.to_owned() };
        let answer = self
            .tasks()
            .list_pids(self.request(request))
            .await
            .map_err(failed(format!("list the processes of container {container}")))?;
        Ok(answer.into_inner().processes.into_iter().map(|p| p.pid).collect())
    }

    /// Freezes the container.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn pause(&self, container: &str) -> Result<(), ContainerdError> {
        let request = api::PauseTaskRequest { container_id: container.to_owned() };
        self.tasks()
            .pause(self.request(request))
            .await
            .map_err(failed(format!("pause container {container}")))?;
        Ok(())
    }

    /// Thaws the container.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn resume(&self, container: &str) -> Result<(), ContainerdError> {
        let request = api::ResumeTaskRequest { container_id: container.to_owned() };
        self.tasks()
            .resume(self.request(request))
            .await
            .map_err(failed(format!("resume container {container}")))?;
        Ok(())
    }

    /// Ends the container's processes with SIGKILL and waits for the first process's end.
    ///
    /// # Errors
    /// When a request fails.
    pub async fn kill_and_wait(&self, container: &str) -> Result<(), ContainerdError> {
        const SIGKILL: u32 = 9;
        let kill = api::KillRequest {
            container_id: container.to_owned(),
            exec_id: String::new(),
            signal: SIGKILL,
            all: true,
        };
        self.tasks().kill(self.request(kill)).await.map_err(failed(format!("stop container {container}")))?;
        let wait = api::WaitRequest { container_id: container.to_owned(), exec_id: String::new() };
        self.tasks()
            .wait(self.request(wait))
            .await
            .map_err(failed(format!("wait for container {container}")))?;
        Ok(())
    }

    /// Dumps the container's processes into `options.image_path`.
    ///
    /// # Errors
    /// When the request fails; the message quotes CRIU.
    pub async fn checkpoint(
        &self,
        container: &str,
        options: &CheckpointOptions,
    ) -> Result<(), ContainerdError> {
        let request = api::CheckpointTaskRequest {
            container_id: container.to_owned(),
            parent_checkpoint: String::new(),
            options: Some(prost_types::Any {
                type_url: "containerd.runc.v1.CheckpointOptions".into(),
                value: options.encode_to_vec(),
            }),
        };
        self.tasks()
            .checkpoint(self.request(request))
            .await
            .map_err(failed(format!("dump the processes of container {container}")))?;
        Ok(())
    }
}
