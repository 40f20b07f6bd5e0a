//! The gRPC service: translates requests to [`Snapshotter`] calls on a blocking thread, and errors to codes.

use std::pin::Pin;
use std::sync::Arc;

use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use crate::error::Error;
use crate::filter::Filters;
use crate::proto::v1;
use crate::proto::v1::snapshots_server::Snapshots;
use crate::record::{Info, Kind, Time};
use crate::snapshotter::Snapshotter;

/// Snapshots per message of a list, as many as containerd's own server sends.
const LIST_BLOCK: usize = 100;

/// The service on one snapshotter.
#[derive(Clone, Debug)]
pub struct Service(Arc<Snapshotter>);

impl Service {
    /// Serves `snapshotter`.
    pub fn new(snapshotter: Arc<Snapshotter>) -> Self {
        Self(snapshotter)
    }

    /// Runs `f` where it may block. It runs to its end even when the client goes away.
    async fn run<T: Send + 'static>(
        &self,
        call: &'static str,
        f: impl FnOnce(&Snapshotter) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Status> {
        let snapshotter = Arc::clone(&self.0);
        match tokio::task::spawn_blocking(move || f(&snapshotter)).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => {
                let status = status(&error);
                if status.code() == tonic::Code::Internal {
                    tracing::error!(call, %error, "call failed");
                } else {
                    tracing::debug!(call, %error, "call refused");
                }
                Err(status)
            }
            Err(panicked) => {
                tracing::error!(call, error = %panicked, "call ended in a defect of this program");
                Err(Status::internal(format!("{call} ended in a defect of the snapshotter; see its log")))
            }
        }
    }
}

/// The code by which containerd's clients recognise the class of an error.
fn status(error: &Error) -> Status {
    let message = error.to_string();
    match error {
        Error::AlreadyExists(_) => Status::already_exists(message),
        Error::NotFound(_) => Status::not_found(message),
        Error::FailedPrecondition(_) => Status::failed_precondition(message),
        Error::InvalidArgument(_) => Status::invalid_argument(message),
        Error::Unimplemented(_) => Status::unimplemented(message),
        Error::Metadata { .. }
        | Error::Damaged(_)
        | Error::Store(_)
        | Error::Config(_)
        | Error::Io { .. } => Status::internal(message),
    }
}

#[tonic::async_trait]
impl Snapshots for Service {
    async fn prepare(
        &self,
        request: Request<v1::PrepareSnapshotRequest>,
    ) -> Result<Response<v1::PrepareSnapshotResponse>, Status> {
        let v1::PrepareSnapshotRequest { key, parent, labels, .. } = request.into_inner();
        let mounts = self
            .run("Prepare", move |s| {
                s.create(Kind::Active, &key, some(&parent), labels.into_iter().collect())
            })
            .await?;
        Ok(Response::new(v1::PrepareSnapshotResponse { mounts }))
    }

    async fn view(
        &self,
        request: Request<v1::ViewSnapshotRequest>,
    ) -> Result<Response<v1::ViewSnapshotResponse>, Status> {
        let v1::ViewSnapshotRequest { key, parent, labels, .. } = request.into_inner();
        let mounts = self
            .run("View", move |s| s.create(Kind::View, &key, some(&parent), labels.into_iter().collect()))
            .await?;
        Ok(Response::new(v1::ViewSnapshotResponse { mounts }))
    }

    async fn mounts(
        &self,
        request: Request<v1::MountsRequest>,
    ) -> Result<Response<v1::MountsResponse>, Status> {
        let key = request.into_inner().key;
        let mounts = self.run("Mounts", move |s| s.mounts(&key)).await?;
        Ok(Response::new(v1::MountsResponse { mounts }))
    }

    async fn commit(&self, request: Request<v1::CommitSnapshotRequest>) -> Result<Response<()>, Status> {
        let v1::CommitSnapshotRequest { name, key, parent, labels, .. } = request.into_inner();
        self.run("Commit", move |s| s.commit(&name, &key, some(&parent), labels.into_iter().collect()))
            .await?;
        Ok(Response::new(()))
    }

    async fn remove(&self, request: Request<v1::RemoveSnapshotRequest>) -> Result<Response<()>, Status> {
        let key = request.into_inner().key;
        self.run("Remove", move |s| s.remove(&key)).await?;
        Ok(Response::new(()))
    }

    async fn stat(
        &self,
        request: Request<v1::StatSnapshotRequest>,
    ) -> Result<Response<v1::StatSnapshotResponse>, Status> {
        let key = request.into_inner().key;
        let info = self.run("Stat", move |s| s.stat(&key)).await?;
        Ok(Response::new(v1::StatSnapshotResponse { info: Some(to_proto(info)) }))
    }

    async fn update(
        &self,
        request: Request<v1::UpdateSnapshotRequest>,
    ) -> Result<Response<v1::UpdateSnapshotResponse>, Status> {
        let v1::UpdateSnapshotRequest { info, update_mask, .. } = request.into_inner();
        let info = info.ok_or_else(|| Status::invalid_argument("an update needs the info to set"))?;
        let info = Info { name: info.name, labels: info.labels.into_iter().collect(), ..Info::default() };
        let paths = update_mask.map(|mask| mask.paths).unwrap_or_default();
        let info = self.run("Update", move |s| s.update(info, &paths)).await?;
        Ok(Response::new(v1::UpdateSnapshotResponse { info: Some(to_proto(info)) }))
    }

    type ListStream = Pin<Box<dyn Stream<Item = Result<v1::ListSnapshotsResponse, Status>> + Send>>;

    async fn list(
        &self,
        request: Request<v1::ListSnapshotsRequest>,
    ) -> Result<Response<Self::ListStream>, Status> {
        let filters = request.into_inner().filters;
        let filters = Filters::parse(&filters).map_err(|e| Status::invalid_argument(e.to_string()))?;
        let infos = self.run("List", move |s| s.list(&filters)).await?;
        let mut infos = infos.into_iter().map(to_proto);
        let blocks: Vec<_> = std::iter::from_fn(|| {
            let info: Vec<_> = infos.by_ref().take(LIST_BLOCK).collect();
            (!info.is_empty()).then_some(Ok(v1::ListSnapshotsResponse { info }))
        })
        .collect();
        Ok(Response::new(Box::pin(tokio_stream::iter(blocks))))
    }

    async fn usage(&self, request: Request<v1::UsageRequest>) -> Result<Response<v1::UsageResponse>, Status> {
        let key = request.into_inner().key;
        let usage = self.run("Usage", move |s| s.usage(&key)).await?;
        Ok(Response::new(v1::UsageResponse {
            size: i64::try_from(usage.size).unwrap_or(i64::MAX),
            inodes: i64::try_from(usage.inodes).unwrap_or(i64::MAX),
        }))
    }

    async fn cleanup(&self, _request: Request<v1::CleanupRequest>) -> Result<Response<()>, Status> {
        self.run("Cleanup", Snapshotter::cleanup).await?;
        Ok(Response::new(()))
    }
}

/// An absent text field of a message is an empty one.
fn some(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

fn to_proto(info: Info) -> v1::Info {
    v1::Info {
        name: info.name,
        parent: info.parent.unwrap_or_default(),
        kind: match info.kind {
            Kind::View => v1::Kind::View,
            Kind::Active => v1::Kind::Active,
            Kind::Committed => v1::Kind::Committed,
        }
        .into(),
        created_at: Some(timestamp(info.created)),
        updated_at: Some(timestamp(info.updated)),
        labels: info.labels.into_iter().collect(),
    }
}

fn timestamp(time: Time) -> prost_types::Timestamp {
    prost_types::Timestamp { seconds: time.seconds, nanos: time.nanos }
}
