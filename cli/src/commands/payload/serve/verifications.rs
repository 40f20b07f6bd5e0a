//! Verifications that are going on. They belong to the server, not to the request that began them: whoever asks
//! for the same payload meanwhile waits for the same answer, and a client that goes away stops nothing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use coldsnap::digest::Digest;
use coldsnap::store::NodeStore;
use tokio::sync::{Semaphore, watch};
use tokio::task::spawn_blocking;

use super::api::Problem;
use crate::commands::verify::Report;

/// So many payloads are hashed side by side; they share the cores. More wait.
const MAX_HASHING: usize = 16;

type Answer = Result<Report, Problem>;
type Wanted = (Digest, Option<u64>);

/// The verifications of one store.
#[derive(Debug)]
pub struct Verifications {
    store: NodeStore,
    running: Mutex<HashMap<Wanted, watch::Receiver<Option<Answer>>>>,
    hashing: Semaphore,
}

impl Verifications {
    /// None are running.
    pub fn new(store: NodeStore) -> Self {
        Self { store, running: Mutex::default(), hashing: Semaphore::new(MAX_HASHING) }
    }

    /// Admits a payload. A record answers at once, whatever is being hashed.
    ///
    /// # Errors
    /// What the verifier answers.
    pub async fn admit(self: &Arc<Self>, digest: Digest, bytes: Option<u64>) -> Answer {
        if let Some(report) = self.by_record(digest, bytes).await? {
            return Ok(report);
        }
        let mut answer = self.join((digest, bytes));
        match answer.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(answer)) => answer.clone(),
            _ => Err(Problem::internal("the verification ended without an answer")),
        }
    }

    async fn by_record(&self, digest: Digest, bytes: Option<u64>) -> Result<Option<Report>, Problem> {
        let store = self.store.clone();
        let admit = move || {
            let started = Instant::now();
            let payload = store.admit_by_record(&digest, bytes).map_err(|e| Problem::from(&e))?;
            Ok(payload.map(|payload| Report::of(&payload, started.elapsed())))
        };
        spawn_blocking(admit).await.unwrap_or_else(|e| Err(Problem::internal(e.to_string())))
    }

    /// Where the answer of the running verification will be; begins one if there is none.
    fn join(self: &Arc<Self>, wanted: Wanted) -> watch::Receiver<Option<Answer>> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = || {
            let (sender, receiver) = watch::channel(None);
            tokio::spawn(Arc::clone(self).verify(wanted, sender));
            receiver
        };
        running.entry(wanted).or_insert_with(begin).clone()
    }

    async fn verify(self: Arc<Self>, wanted: Wanted, sender: watch::Sender<Option<Answer>>) {
        let (digest, bytes) = wanted;
        // Never closed.
        let _permit = self.hashing.acquire().await;
        let store = self.store.clone();
        let admit = move || {
            let started = Instant::now();
            let payload = store.admit(&digest, bytes, &mut |_| ()).map_err(|e| Problem::from(&e))?;
            Ok(Report::of(&payload, started.elapsed()))
        };
        let answer = spawn_blocking(admit).await.unwrap_or_else(|e| Err(Problem::internal(e.to_string())));
        // First: who comes now must find the record, or begin anew.
        self.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&wanted);
        sender.send_replace(Some(answer));
    }
}
