//! Snapshots and the diffs between them.

use std::collections::HashMap;

use containerd_client::services::v1 as api;
use containerd_client::services::v1::snapshots as snap;
use containerd_client::types::{Descriptor, Mount};

use super::{Containerd, ContainerdError, failed};

impl Containerd {
    fn snapshots(&self) -> snap::snapshots_client::SnapshotsClient<tonic::transport::Channel> {
        snap::snapshots_client::SnapshotsClient::new(self.channel.clone())
    }

    /// The parent of a snapshot; empty when it has none. `None` when there is no such snapshot.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn snapshot_parent(
        &self,
        snapshotter: &str,
        key: &str,
    ) -> Result<Option<String>, ContainerdError> {
        let request = snap::StatSnapshotRequest { snapshotter: snapshotter.to_owned(), key: key.to_owned() };
        match self.snapshots().stat(self.request(request)).await {
            Ok(answer) => Ok(Some(answer.into_inner().info.map(|i| i.parent).unwrap_or_default())),
            Err(status) if status.code() == tonic::Code::NotFound => Ok(None),
            Err(status) => Err(failed(format!("describe snapshot {key}"))(status)),
        }
    }

    /// The mounts of an active snapshot or view.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn snapshot_mounts(&self, snapshotter: &str, key: &str) -> Result<Vec<Mount>, ContainerdError> {
        let request = snap::MountsRequest { snapshotter: snapshotter.to_owned(), key: key.to_owned() };
        let answer = self
            .snapshots()
            .mounts(self.request(request))
            .await
            .map_err(failed(format!("tell the mounts of snapshot {key}")))?;
        Ok(answer.into_inner().mounts)
    }

    /// A read-only view `key` of the committed snapshot `parent`; its mounts.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn view_snapshot(
        &self,
        snapshotter: &str,
        key: &str,
        parent: &str,
    ) -> Result<Vec<Mount>, ContainerdError> {
        let request = snap::ViewSnapshotRequest {
            snapshotter: snapshotter.to_owned(),
            key: key.to_owned(),
            parent: parent.to_owned(),
            labels: HashMap::new(),
        };
        let answer = self
            .snapshots()
            .view(self.request(request))
            .await
            .map_err(failed(format!("view snapshot {parent}")))?;
        Ok(answer.into_inner().mounts)
    }

    /// Removes a snapshot.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn remove_snapshot(&self, snapshotter: &str, key: &str) -> Result<(), ContainerdError> {
        let request =
            snap::RemoveSnapshotRequest { snapshotter: snapshotter.to_owned(), key: key.to_owned() };
        self.snapshots()
            .remove(self.request(request))
            .await
            .map_err(failed(format!("remove snapshot {key}")))?;
        Ok(())
    }

    /// Writes the difference between two sets of mounts as a layer; its descriptor.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn diff(
        &self,
        left: Vec<Mount>,
        right: Vec<Mount>,
        media_type: &str,
    ) -> Result<Descriptor, ContainerdError> {
        let mut client = api::diff_client::DiffClient::new(self.channel.clone());
        let action = "write the container's changed files as a layer";
        let request =
            api::DiffRequest { left, right, media_type: media_type.to_owned(), ..Default::default() };
        let answer = client.diff(self.request(request)).await.map_err(failed(action))?;
        answer.into_inner().diff.ok_or_else(|| ContainerdError::Answer {
            action: action.into(),
            reason: "no descriptor in it".into(),
        })
    }

    /// Unpacks one layer as the committed snapshot `chain_id` on top of `parent` (empty for the first layer),
    /// unless it is there.
    ///
    /// # Errors
    /// When a request fails; a half unpacked snapshot is removed.
    pub async fn unpack_layer(
        &self,
        snapshotter: &str,
        layer: Descriptor,
        parent: &str,
        chain_id: &str,
        attempt: &str,
    ) -> Result<(), ContainerdError> {
        if self.snapshot_parent(snapshotter, chain_id).await?.is_some() {
            return Ok(());
        }
        // The form and the label tell a snapshotter that this is an unpack.
        let key = format!("extract-{attempt} {chain_id}");
        let prepare = snap::PrepareSnapshotRequest {
            snapshotter: snapshotter.to_owned(),
            key: key.clone(),
            parent: parent.to_owned(),
            labels: HashMap::from([("containerd.io/snapshot.ref".to_owned(), chain_id.to_owned())]),
        };
        let mounts = match self.snapshots().prepare(self.request(prepare)).await {
            Ok(answer) => answer.into_inner().mounts,
            Err(status) if status.code() == tonic::Code::AlreadyExists => return Ok(()),
            Err(status) => return Err(failed(format!("prepare snapshot {key}"))(status)),
        };
        let applied = self.apply_and_commit(snapshotter, layer, mounts, &key, chain_id).await;
        if applied.is_err() {
            let _ = self.remove_snapshot(snapshotter, &key).await;
        }
        applied
    }

    /// Unpacks one layer into what `mounts` name; of one overlay mount it is the upper layer.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn apply(&self, layer: Descriptor, mounts: Vec<Mount>) -> Result<(), ContainerdError> {
        let mut client = api::diff_client::DiffClient::new(self.channel.clone());
        let action = format!("unpack layer {}", layer.digest);
        let apply = api::ApplyRequest { diff: Some(layer), mounts, ..Default::default() };
        client.apply(self.request(apply)).await.map_err(failed(action))?;
        Ok(())
    }

    async fn apply_and_commit(
        &self,
        snapshotter: &str,
        layer: Descriptor,
        mounts: Vec<Mount>,
        key: &str,
        chain_id: &str,
    ) -> Result<(), ContainerdError> {
        self.apply(layer, mounts).await?;
        let commit = snap::CommitSnapshotRequest {
            snapshotter: snapshotter.to_owned(),
            name: chain_id.to_owned(),
            key: key.to_owned(),
            labels: HashMap::new(),
        };
        match self.snapshots().commit(self.request(commit)).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == tonic::Code::AlreadyExists => {
                self.remove_snapshot(snapshotter, key).await
            }
            Err(status) => Err(failed(format!("commit snapshot {chain_id}"))(status)),
        }
    }
}
