//! Publishing of task events to containerd, in order.
//!
//! The shim library's own publisher retries a failed event beside the queue, so that a later event can overtake it,
//! and cannot be flushed. Clients take TaskExit for the last word about a process: order matters here.

use std::sync::Arc;
use std::time::Duration;

use containerd_shim::event::Event;
use containerd_shim::util::{convert_to_any, timestamp};
use containerd_shim_protos::events::container::ContainerUpdate;
use containerd_shim_protos::protobuf::MessageDyn;
use containerd_shim_protos::shim::event::Envelope;
use containerd_shim_protos::shim::events::ForwardRequest;
use containerd_shim_protos::shim_async::{Client, EventsClient};
use containerd_shim_protos::ttrpc::{self, context};
use log::{debug, error, warn};
use tokio::sync::{mpsc, oneshot};

/// Topic of the event that says why a restore became a cold start.
pub const RESTORE_FALLBACK_TOPIC: &str = "/coldsnap/restore-fallback";

/// containerd answers an event within microseconds; one that hangs must not hold the queue up for ever.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// containerd's own shims give up on an event after five attempts too.
const ATTEMPTS: u32 = 5;
/// How long a shim that shuts down waits for the queue.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug)]
enum Order {
    Send(Box<Envelope>),
    Flush(oneshot::Sender<()>),
}

/// The queue's entrance; cheap to clone.
#[derive(Clone, Debug)]
pub struct Events {
    namespace: Arc<str>,
    orders: mpsc::UnboundedSender<Order>,
}

impl Events {
    /// Starts the queue for containerd's ttrpc socket at `address`.
    pub fn start(address: String, namespace: &str) -> Self {
        let (orders, queue) = mpsc::unbounded_channel();
        tokio::spawn(forward(address, queue));
        Self { namespace: namespace.into(), orders }
    }

    /// Queues a task event.
    pub fn publish(&self, event: impl Event) {
        let topic = event.topic();
        self.publish_as(&topic, Box::new(event));
    }

    /// Queues the event that says why container `id` was started cold although a restore was wanted.
    pub fn publish_fallback(&self, id: &str, reason: &str) {
        // Clients show only message types that they know: this one has an id and a map of strings.
        let event = ContainerUpdate {
            id: id.to_owned(),
            labels: [("reason".to_owned(), reason.to_owned())].into(),
            ..Default::default()
        };
        self.publish_as(RESTORE_FALLBACK_TOPIC, Box::new(event));
    }

    /// Waits until everything queued so far was sent or given up.
    pub async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        if self.orders.send(Order::Flush(done)).is_err() {
            return;
        }
        if tokio::time::timeout(FLUSH_TIMEOUT, flushed).await.is_err() {
            warn!("events are still queued after {FLUSH_TIMEOUT:?}; they are lost");
        }
    }

    fn publish_as(&self, topic: &str, event: Box<dyn MessageDyn>) {
        let envelope = timestamp().and_then(|timestamp| {
            Ok(Envelope {
                topic: topic.to_owned(),
                namespace: self.namespace.to_string(),
                timestamp: Some(timestamp).into(),
                event: Some(convert_to_any(event)?).into(),
                ..Default::default()
            })
        });
        match envelope {
            // The queue ends only with the process.
            Ok(envelope) => drop(self.orders.send(Order::Send(Box::new(envelope)))),
            Err(error) => error!("cannot encode event {topic}: {error}"),
        }
    }
}

async fn forward(address: String, mut queue: mpsc::UnboundedReceiver<Order>) {
    let address = match address.contains("://") {
        true => address,
        false => format!("unix://{address}"),
    };
    let mut client = None;
    while let Some(order) = queue.recv().await {
        match order {
            Order::Send(envelope) => send(&address, &mut client, *envelope).await,
            Order::Flush(done) => drop(done.send(())),
        }
    }
}

async fn send(address: &str, client: &mut Option<EventsClient>, envelope: Envelope) {
    let topic = envelope.topic.clone();
    let request = ForwardRequest { envelope: Some(envelope).into(), ..Default::default() };
    for attempt in 0..ATTEMPTS {
        // The first new connection is made at once: containerd was restarted, long ago as a rule.
        let pause = Duration::from_secs(u64::from(attempt.saturating_sub(1)));
        tokio::time::sleep(pause).await;
        match try_send(address, client, &request).await {
            Ok(()) => return,
            Err(error) if attempt + 1 == ATTEMPTS => error!("event {topic} is lost: {error}"),
            Err(error) => debug!("event {topic}: {error}"),
        }
        *client = None;
    }
}

async fn try_send(
    address: &str,
    client: &mut Option<EventsClient>,
    request: &ForwardRequest,
) -> Result<(), ttrpc::Error> {
    let connected = match client {
        Some(client) => client,
        None => client.insert(EventsClient::new(Client::connect(address).await?)),
    };
    connected.forward(context::with_duration(SEND_TIMEOUT), request).await.map(drop)
}
