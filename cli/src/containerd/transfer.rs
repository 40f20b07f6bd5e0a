//! containerd's transfer service: it pushes an image to a registry itself, with its own content and connections.

use std::time::{SystemTime, UNIX_EPOCH};

use containerd_client::services::v1 as api;
use containerd_client::to_any;
use containerd_client::types::transfer as types;
use prost::Message;
use prost_types::Any;
use tokio::sync::mpsc::{self, Sender};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::{Containerd, ContainerdError, failed};

/// What containerd asks during a push.
pub trait PushListener {
    /// So many bytes of a blob were sent, of its size; `name` is unique for each blob of the push.
    fn progress(&mut self, name: &str, sent: u64, of: u64);

    /// User name and secret for a registry host, if there are any.
    fn credentials(&mut self, host: &str) -> Option<(String, String)>;
}

/// A stream of messages beside a request, by the name that the request gives.
struct Side {
    name: String,
    send: Sender<Any>,
    receive: Streaming<Any>,
}

impl Containerd {
    /// Pushes the image `name` as `reference`. What the registry has is not sent again; the manifest comes last.
    ///
    /// # Errors
    /// When a request fails; the message quotes containerd.
    pub async fn push_image(
        &self,
        name: &str,
        reference: &str,
        plain_http: bool,
        listener: &mut dyn PushListener,
    ) -> Result<(), ContainerdError> {
        let action = format!("push {name} as {reference}");
        let mut progress = self.side("progress").await?;
        let mut auth = self.side("auth").await?;
        let source = types::ImageStore { name: name.to_owned(), ..Default::default() };
        let destination = types::OciRegistry {
            reference: reference.to_owned(),
            resolver: Some(types::RegistryResolver {
                auth_stream: auth.name.clone(),
                default_scheme: if plain_http { "http" } else { "https" }.to_owned(),
                ..Default::default()
            }),
        };
        let request = api::TransferRequest {
            source: Some(to_any(&source)),
            destination: Some(to_any(&destination)),
            options: Some(api::TransferOptions { progress_stream: progress.name.clone() }),
        };
        let mut client = api::transfer_client::TransferClient::new(self.channel.clone());
        let transfer = client.transfer(self.request(request));
        tokio::pin!(transfer);
        // containerd closes the streams when the transfer is over; one that ends earlier is not asked again.
        let (mut progress_open, mut auth_open) = (true, true);
        loop {
            tokio::select! {
                done = &mut transfer => {
                    done.map_err(failed(action))?;
                    return Ok(());
                }
                message = progress.receive.message(), if progress_open => match message {
                    Ok(Some(message)) => tell(&message, listener),
                    _ => progress_open = false,
                },
                message = auth.receive.message(), if auth_open => match message {
                    Ok(Some(message)) => {
                        let answer = answer(&message, listener);
                        auth_open = auth.send.send(to_any(&answer)).await.is_ok();
                    }
                    _ => auth_open = false,
                },
            }
        }
    }

    async fn side(&self, kind: &str) -> Result<Side, ContainerdError> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = format!("coldsnap-{kind}-{}-{}", std::process::id(), since.as_nanos());
        let action = format!("open a stream for {kind}");
        let (send, outgoing) = mpsc::channel(4);
        // The first message names the stream; containerd confirms it.
        if send.send(to_any(&api::StreamInit { id: name.clone() })).await.is_err() {
            return Err(ContainerdError::Answer { action, reason: "it is closed".into() });
        }
        let mut client = api::streaming_client::StreamingClient::new(self.channel.clone());
        let opened = client.stream(self.request(ReceiverStream::new(outgoing))).await;
        let mut receive = opened.map_err(failed(action.clone()))?.into_inner();
        match receive.message().await.map_err(failed(action.clone()))? {
            Some(_) => Ok(Side { name, send, receive }),
            None => Err(ContainerdError::Answer { action, reason: "it ended".into() }),
        }
    }
}

fn tell(message: &Any, listener: &mut dyn PushListener) {
    let Ok(event) = types::Progress::decode(message.value.as_slice()) else { return };
    let (Ok(sent), Ok(of)) = (u64::try_from(event.progress), u64::try_from(event.total)) else { return };
    tracing::debug!(event = event.event, name = event.name, sent, of, "push");
    if of > 0 {
        listener.progress(&event.name, sent, of);
    }
}

fn answer(message: &Any, listener: &mut dyn PushListener) -> types::AuthResponse {
    let request = types::AuthRequest::decode(message.value.as_slice()).unwrap_or_default();
    match listener.credentials(&request.host) {
        Some((username, secret)) => types::AuthResponse {
            auth_type: types::AuthType::Credentials.into(),
            username,
            secret,
            ..Default::default()
        },
        None => types::AuthResponse::default(),
    }
}
