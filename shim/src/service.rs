//! The task service: containerd's requests in, acts of the other modules out.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use containerd_shim::asynchronous::ExitSignal;
use containerd_shim_protos::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest,
    CreateTaskResponse, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest, PauseRequest,
    PidsRequest, PidsResponse, ResizePtyRequest, ResumeRequest, ShutdownRequest, StartRequest, StartResponse,
    StateRequest, StateResponse, StatsRequest, StatsResponse, Status, UpdateTaskRequest, WaitRequest,
    WaitResponse,
};
use containerd_shim_protos::shim_async::Task;
use containerd_shim_protos::ttrpc::{self, r#async::TtrpcContext};
use log::{debug, info};

use crate::container::{Container, Host};
use crate::error::TaskError;
use crate::{checkpoint, control, create, delete, exec, exit, start, stats};

type Containers = Mutex<HashMap<String, Slot>>;

/// A container, or the id of one that is being made.
#[derive(Clone, Debug)]
enum Slot {
    Reserved,
    Made(Arc<Container>),
}

/// The containers of this shim.
#[derive(Clone)]
pub struct Service {
    host: Host,
    containers: Arc<Containers>,
    exit: Arc<ExitSignal>,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Service").field("host", &self.host).finish_non_exhaustive()
    }
}

impl Service {
    /// A service without containers; it raises `exit` when it was asked to shut down.
    pub fn new(host: Host, exit: Arc<ExitSignal>) -> Self {
        Self { host, containers: Arc::default(), exit }
    }

    fn containers(&self) -> MutexGuard<'_, HashMap<String, Slot>> {
        self.containers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn container(&self, id: &str) -> Result<Arc<Container>, TaskError> {
        match self.containers().get(id) {
            Some(Slot::Made(container)) => Ok(Arc::clone(container)),
            _ => Err(TaskError::NotFound(format!("container {id} is not created"))),
        }
    }

    async fn create_container(self, request: CreateTaskRequest) -> Result<CreateTaskResponse, TaskError> {
        let id = request.id.clone();
        match self.containers().entry(id.clone()) {
            Entry::Occupied(_) => return Err(TaskError::AlreadyExists(format!("container {id}"))),
            Entry::Vacant(vacant) => drop(vacant.insert(Slot::Reserved)),
        }
        match create::create(self.host.clone(), request).await {
            Ok(container) => {
                let pid = container.init.pid_u32();
                self.containers().insert(id, Slot::Made(container));
                Ok(CreateTaskResponse { pid, ..Default::default() })
            }
            Err(error) => {
                self.containers().remove(&id);
                Err(error)
            }
        }
    }

    async fn delete(self, request: DeleteRequest) -> Result<DeleteResponse, TaskError> {
        let container = self.container(&request.id)?;
        if !request.exec_id.is_empty() {
            return delete::delete_exec(&container, &request.exec_id).await;
        }
        let response = delete::delete_container(&container).await?;
        self.containers().remove(&request.id);
        Ok(response)
    }

    fn process_state(&self, request: &StateRequest) -> Result<StateResponse, TaskError> {
        let container = self.container(&request.id)?;
        let process = container.process(&request.exec_id)?;
        let exit = process.exit();
        let (mut status, container_status) = (process.status(), container.init.status());
        if status == Status::RUNNING && matches!(container_status, Status::PAUSED | Status::PAUSING) {
            // An exec is frozen together with its container.
            status = container_status;
        }
        Ok(StateResponse {
            id: if process.id.is_empty() { container.id.clone() } else { process.id.clone() },
            bundle: container.bundle.display().to_string(),
            pid: process.pid_u32(),
            status: status.into(),
            stdin: process.stdio.stdin.clone(),
            stdout: process.stdio.stdout.clone(),
            stderr: process.stdio.stderr.clone(),
            terminal: process.stdio.terminal,
            exit_status: exit.map(|exit| exit.status).unwrap_or_default(),
            exited_at: exit.map(|exit| exit::timestamp(exit.at)).into(),
            exec_id: process.id.clone(),
            ..Default::default()
        })
    }
}

/// Carries `act` out in a task of its own: a client that gives up does not leave a half-done act behind, and a panic
/// in it is an error of this one request.
async fn detached<T: Send + 'static>(
    name: &'static str,
    act: impl Future<Output = Result<T, TaskError>> + Send + 'static,
) -> ttrpc::Result<T> {
    debug!("request {name}");
    let result = match tokio::spawn(act).await {
        Ok(result) => result,
        Err(error) => Err(TaskError::Other(format!("{name} died: {error}"))),
    };
    result.map_err(|error| {
        info!("{name} failed: {error}");
        error.into()
    })
}

#[async_trait]
impl Task for Service {
    async fn create(
        &self,
        _: &TtrpcContext,
        request: CreateTaskRequest,
    ) -> ttrpc::Result<CreateTaskResponse> {
        detached("create", self.clone().create_container(request)).await
    }

    async fn start(&self, _: &TtrpcContext, request: StartRequest) -> ttrpc::Result<StartResponse> {
        let container = self.container(&request.id)?;
        let pid = detached("start", async move {
            match request.exec_id.as_str() {
                "" => start::start_init(&container).await,
                exec_id => exec::start_exec(&container, exec_id).await,
            }
        });
        Ok(StartResponse { pid: pid.await?, ..Default::default() })
    }

    async fn state(&self, _: &TtrpcContext, request: StateRequest) -> ttrpc::Result<StateResponse> {
        Ok(self.process_state(&request)?)
    }

    async fn wait(&self, _: &TtrpcContext, request: WaitRequest) -> ttrpc::Result<WaitResponse> {
        let process = self.container(&request.id)?.process(&request.exec_id)?;
        let exit = process.wait().await.ok_or_else(|| TaskError::Other("the process is lost".to_owned()))?;
        Ok(WaitResponse {
            exit_status: exit.status,
            exited_at: Some(exit::timestamp(exit.at)).into(),
            ..Default::default()
        })
    }

    async fn kill(&self, _: &TtrpcContext, request: KillRequest) -> ttrpc::Result<Empty> {
        let container = self.container(&request.id)?;
        detached("kill", async move { control::kill(&container, &request).await })
            .await
            .map(|()| Empty::default())
    }

    async fn delete(&self, _: &TtrpcContext, request: DeleteRequest) -> ttrpc::Result<DeleteResponse> {
        detached("delete", self.clone().delete(request)).await
    }

    async fn exec(&self, _: &TtrpcContext, request: ExecProcessRequest) -> ttrpc::Result<Empty> {
        exec::add_exec(&*self.container(&request.id)?, request)?;
        Ok(Empty::default())
    }

    async fn pids(&self, _: &TtrpcContext, request: PidsRequest) -> ttrpc::Result<PidsResponse> {
        let container = self.container(&request.id)?;
        let processes = detached("pids", async move { control::pids(&container).await }).await?;
        Ok(PidsResponse { processes, ..Default::default() })
    }

    async fn pause(&self, _: &TtrpcContext, request: PauseRequest) -> ttrpc::Result<Empty> {
        let container = self.container(&request.id)?;
        detached("pause", async move { control::pause(&container).await }).await.map(|()| Empty::default())
    }

    async fn resume(&self, _: &TtrpcContext, request: ResumeRequest) -> ttrpc::Result<Empty> {
        let container = self.container(&request.id)?;
        detached("resume", async move { control::resume(&container).await }).await.map(|()| Empty::default())
    }

    async fn checkpoint(&self, _: &TtrpcContext, request: CheckpointTaskRequest) -> ttrpc::Result<Empty> {
        let container = self.container(&request.id)?;
        let act = async move { checkpoint::checkpoint(&container, &request).await };
        detached("checkpoint", act).await.map(|()| Empty::default())
    }

    async fn resize_pty(&self, _: &TtrpcContext, request: ResizePtyRequest) -> ttrpc::Result<Empty> {
        control::resize_pty(&*self.container(&request.id)?, &request)?;
        Ok(Empty::default())
    }

    async fn close_io(&self, _: &TtrpcContext, request: CloseIORequest) -> ttrpc::Result<Empty> {
        let container = self.container(&request.id)?;
        if request.stdin {
            control::close_stdin(&container, &request.exec_id).await?;
        }
        Ok(Empty::default())
    }

    async fn update(&self, _: &TtrpcContext, request: UpdateTaskRequest) -> ttrpc::Result<Empty> {
        let container = self.container(&request.id)?;
        let act = async move { control::update(&container, request.resources.as_ref()).await };
        detached("update", act).await.map(|()| Empty::default())
    }

    async fn stats(&self, _: &TtrpcContext, request: StatsRequest) -> ttrpc::Result<StatsResponse> {
        let container = self.container(&request.id)?;
        Ok(StatsResponse { stats: Some(stats::collect(&container)?).into(), ..Default::default() })
    }

    async fn connect(&self, _: &TtrpcContext, request: ConnectRequest) -> ttrpc::Result<ConnectResponse> {
        // As with containerd's own shim: also for a container that does not exist.
        let task_pid =
            self.container(&request.id).map(|container| container.init.pid_u32()).unwrap_or_default();
        Ok(ConnectResponse {
            shim_pid: std::process::id(),
            task_pid,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Default::default()
        })
    }

    async fn shutdown(&self, _: &TtrpcContext, _: ShutdownRequest) -> ttrpc::Result<Empty> {
        // Other containers of the pod may still need this shim.
        if self.containers().is_empty() {
            self.exit.signal();
        }
        Ok(Empty::default())
    }
}
