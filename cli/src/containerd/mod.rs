//! What the command asks of containerd: containers, tasks, content, snapshots, images. One namespace,
//! one lease for everything that is written.

mod content;
mod snapshots;
mod tasks;

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, SystemTime};

use containerd_client::services::v1 as api;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

pub use content::Blob;
pub use tasks::{CheckpointOptions, runtime_binary};

/// How long what an interrupted command wrote may stay before containerd collects it.
const LEASE_LIFETIME: Duration = Duration::from_secs(3600);

/// A request to containerd failed.
#[derive(Debug, thiserror::Error)]
pub enum ContainerdError {
    /// No connection.
    #[error(
        "cannot connect to containerd at {address}: {source}; is it running, and is the address right (--address)?"
    )]
    Connect {
        /// The socket.
        address: String,
        /// The transport's error.
        source: tonic::transport::Error,
    },
    /// A request was answered with an error.
    #[error("containerd cannot {action}: {}", status.message())]
    Request {
        /// What was asked.
        action: String,
        /// The answer.
        status: Status,
    },
    /// An answer is not what the interface promises.
    #[error("containerd's answer to {action} is unusable: {reason}")]
    Answer {
        /// What was asked.
        action: String,
        /// What was found.
        reason: String,
    },
    /// A local file could not be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
}

pub(crate) fn failed(action: impl Into<String>) -> impl FnOnce(Status) -> ContainerdError {
    let action = action.into();
    move |status| ContainerdError::Request { action, status }
}

/// A connection to containerd.
#[derive(Debug, Clone)]
pub struct Containerd {
    channel: Channel,
    namespace: AsciiMetadataValue,
    lease: Option<AsciiMetadataValue>,
}

impl Containerd {
    /// Connects to the socket at `address`; requests are for `namespace`.
    ///
    /// # Errors
    /// When nobody answers there, or the namespace is not a header value.
    pub async fn connect(address: &Path, namespace: &str) -> Result<Self, ContainerdError> {
        let namespace = namespace.parse().map_err(|_| ContainerdError::Answer {
            action: "use a namespace".into(),
            reason: format!("{namespace:?} is not a namespace"),
        })?;
        let channel = containerd_client::connect(address)
            .await
            .map_err(|source| ContainerdError::Connect { address: address.display().to_string(), source })?;
        Ok(Self { channel, namespace, lease: None })
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let headers = request.metadata_mut();
        headers.insert("containerd-namespace", self.namespace.clone());
        if let Some(lease) = &self.lease {
            headers.insert("containerd-lease", lease.clone());
        }
        request
    }

    /// The version of the containerd that answers.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn version(&self) -> Result<String, ContainerdError> {
        let mut client = api::version_client::VersionClient::new(self.channel.clone());
        let answer = client.version(self.request(())).await.map_err(failed("tell its version"))?;
        Ok(answer.into_inner().version)
    }

    /// Takes a lease `id`: what is written from now on is not collected before [`Containerd::release_lease`].
    ///
    /// # Errors
    /// When the request fails.
    pub async fn take_lease(&mut self, id: &str) -> Result<(), ContainerdError> {
        let mut client = api::leases_client::LeasesClient::new(self.channel.clone());
        let expire = prost_types::Timestamp::from(SystemTime::now() + LEASE_LIFETIME).to_string();
        let labels = HashMap::from([("containerd.io/gc.expire".to_owned(), expire)]);
        let request = api::CreateRequest { id: id.to_owned(), labels };
        match client.create(self.request(request)).await {
            Ok(_) => {}
            Err(status) if status.code() == Code::AlreadyExists => {}
            Err(status) => return Err(failed(format!("create lease {id}"))(status)),
        }
        self.lease = id.parse().ok();
        Ok(())
    }

    /// Gives the lease back.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn release_lease(&mut self) -> Result<(), ContainerdError> {
        let Some(lease) = self.lease.take() else { return Ok(()) };
        let id = lease.to_str().unwrap_or_default().to_owned();
        let mut client = api::leases_client::LeasesClient::new(self.channel.clone());
        let request = api::DeleteRequest { id: id.clone(), sync: false };
        client.delete(self.request(request)).await.map_err(failed(format!("delete lease {id}")))?;
        Ok(())
    }

    /// The container `id`.
    ///
    /// # Errors
    /// When it does not exist or the request fails.
    pub async fn container(&self, id: &str) -> Result<api::Container, ContainerdError> {
        let mut client = api::containers_client::ContainersClient::new(self.channel.clone());
        let action = format!("find container {id}");
        let request = api::GetContainerRequest { id: id.to_owned() };
        let answer = client.get(self.request(request)).await.map_err(failed(action.clone()))?;
        answer
            .into_inner()
            .container
            .ok_or_else(|| ContainerdError::Answer { action, reason: "no container in it".into() })
    }

    /// The image `name`, or `None`.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn image(&self, name: &str) -> Result<Option<api::Image>, ContainerdError> {
        let mut client = api::images_client::ImagesClient::new(self.channel.clone());
        let request = api::GetImageRequest { name: name.to_owned() };
        match client.get(self.request(request)).await {
            Ok(answer) => Ok(answer.into_inner().image),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(failed(format!("find image {name}"))(status)),
        }
    }

    /// Every image.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn images(&self) -> Result<Vec<api::Image>, ContainerdError> {
        let mut client = api::images_client::ImagesClient::new(self.channel.clone());
        let request = api::ListImagesRequest { filters: Vec::new() };
        let answer = client.list(self.request(request)).await.map_err(failed("list its images"))?;
        Ok(answer.into_inner().images)
    }

    /// Removes the image `name` and collects what only it needed.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn remove_image(&self, name: &str) -> Result<(), ContainerdError> {
        let mut client = api::images_client::ImagesClient::new(self.channel.clone());
        let request = api::DeleteImageRequest { name: name.to_owned(), sync: true, target: None };
        client.delete(self.request(request)).await.map_err(failed(format!("remove image {name}")))?;
        Ok(())
    }

    /// Every container.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn containers(&self) -> Result<Vec<api::Container>, ContainerdError> {
        let mut client = api::containers_client::ContainersClient::new(self.channel.clone());
        let request = api::ListContainersRequest { filters: Vec::new() };
        let answer = client.list(self.request(request)).await.map_err(failed("list its containers"))?;
        Ok(answer.into_inner().containers)
    }

    /// Creates the image or lets its name point to another target.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn put_image(&self, image: api::Image) -> Result<(), ContainerdError> {
        let mut client = api::images_client::ImagesClient::new(self.channel.clone());
        let action = format!("write image {}", image.name);
        let create = api::CreateImageRequest { image: Some(image.clone()), source_date_epoch: None };
        match client.create(self.request(create)).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::AlreadyExists => {
                let update = api::UpdateImageRequest {
                    image: Some(image),
                    update_mask: None,
                    source_date_epoch: None,
                };
                client.update(self.request(update)).await.map_err(failed(action))?;
                Ok(())
            }
            Err(status) => Err(failed(action)(status)),
        }
    }
}

impl Containerd {
    /// Whether a snapshotter is registered, and the error of its registration if there is one.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn snapshotter_state(&self, name: &str) -> Result<Option<Option<String>>, ContainerdError> {
        let mut client = api::introspection_client::IntrospectionClient::new(self.channel.clone());
        let request = api::PluginsRequest { filters: vec![format!("id=={name}")] };
        let answer = client.plugins(self.request(request)).await.map_err(failed("list its plugins"))?;
        let found =
            answer.into_inner().plugins.into_iter().find(|p| p.r#type == "io.containerd.snapshotter.v1");
        Ok(found.map(|plugin| plugin.init_err.map(|e| e.message)))
    }

    /// Whether a registered snapshotter answers.
    ///
    /// # Errors
    /// When it does not.
    pub async fn snapshotter_answers(&self, name: &str) -> Result<(), ContainerdError> {
        // Nothing has this name; an answer of any other kind than "not found" is a failure.
        self.snapshot_parent(name, "coldsnap-doctor").await.map(drop)
    }
}
