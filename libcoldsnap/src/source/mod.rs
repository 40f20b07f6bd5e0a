//! Where a payload can come from, and how it is brought from there into the store.
//!
//! A source delivers a payload's bytes in order from any offset. It is not trusted: the store hashes what arrives, and
//! only the committed size and digest make it a payload. [`bring`] tries the sources in the configured order; one that
//! fails in the middle is asked again, from where it stopped, before the next one is.

#[cfg(feature = "sources")]
pub mod oci;

use std::fmt;
use std::time::{Duration, Instant};

use crate::digest::Digest;
use crate::store::{AdmittedPayload, NodeStore, StagedPayload, Staging, StoreError};

/// Tries of one source in one call, when they fail in a way that may pass.
const ATTEMPTS: u32 = 4;
/// Pause before the second try; doubled before each further one.
const PAUSE: Duration = Duration::from_millis(500);
/// How often waiting work looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(50);

/// A place that may have payloads.
pub trait Source: fmt::Debug + Send + Sync {
    /// Names it in messages: kind and place, without secrets.
    fn name(&self) -> String;

    /// Delivers the payload's bytes in order, from offset `from` to its end, to `sink`.
    ///
    /// # Errors
    /// What stands against it, or the error of `sink` as it is.
    fn fetch(&self, wanted: &Wanted, from: u64, sink: &mut Sink<'_>) -> Result<(), FetchError>;
}

/// A payload that is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// The payload.
    pub digest: Digest,
    /// Its committed size in bytes.
    pub bytes: u64,
}

/// Takes the bytes that a source delivers.
pub type Sink<'a> = dyn FnMut(&[u8]) -> Result<(), FetchError> + 'a;

/// Why a source did not deliver.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// It does not have the payload.
    #[error("it does not have the payload{}", detail(.0))]
    NotFound(String),
    /// It refuses us.
    #[error("access denied: {0}")]
    Denied(String),
    /// It cannot be reached, or broke off; later it may work.
    #[error("{0}")]
    Unavailable(String),
    /// It cannot begin at the wanted offset.
    #[error("it cannot continue at byte {from}")]
    NoRange {
        /// The offset.
        from: u64,
    },
    /// It answers what cannot be right, or is not configured for this payload.
    #[error("{0}")]
    Refused(String),
    /// The store cannot take the bytes.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Nobody wants the payload any more.
    #[error("cancelled")]
    Cancelled,
}

fn detail(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {text}") }
}

/// How a payload is brought.
#[derive(Debug, Clone, Copy, Default)]
pub struct Limits {
    /// Bytes per second over all sources of one call; none for no limit.
    pub bandwidth: Option<u64>,
}

/// What happens while a payload is brought.
#[derive(Debug, Clone, Copy)]
pub enum Event<'a> {
    /// Somebody else brings or verifies the same payload.
    Waiting,
    /// So many bytes are here, of the wanted ones.
    Bytes {
        /// Bytes that are here.
        here: u64,
        /// All bytes.
        of: u64,
    },
    /// This source is asked, beginning at this offset.
    Asking {
        /// [`Source::name`].
        source: &'a str,
        /// First byte that is missing.
        from: u64,
    },
    /// This source failed.
    Failed {
        /// [`Source::name`].
        source: &'a str,
        /// Why.
        error: &'a FetchError,
    },
}

/// A payload that is here now.
#[derive(Debug)]
pub struct Brought {
    /// The payload.
    pub payload: AdmittedPayload,
    /// The source that delivered its last byte; none when it was here already.
    pub source: Option<String>,
    /// Bytes that the sources delivered in this call.
    pub fetched: u64,
    /// Bytes that an interrupted call had left.
    pub resumed: u64,
}

/// Why a payload could not be brought.
#[derive(Debug, thiserror::Error)]
pub enum BringError {
    /// No source is configured.
    #[error(
        "the model payload {digest} is not in the store and no source is configured: import it with `coldsnap payload \
         import`, or name sources in the configuration"
    )]
    NoSources {
        /// The payload.
        digest: Digest,
    },
    /// No source delivered it.
    #[error("no source delivered the model payload {digest}: {}", join(.failures))]
    Failed {
        /// The payload.
        digest: Digest,
        /// Each source with what it said, in order.
        failures: Vec<(String, FetchError)>,
    },
    /// Nobody wants it any more. What is here stays for the next call.
    #[error("bringing the model payload {digest} was cancelled")]
    Cancelled {
        /// The payload.
        digest: Digest,
    },
    /// The store cannot take it.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl BringError {
    /// The stable name of the kind of error.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NoSources { .. } | Self::Failed { .. } => "PayloadUnavailable",
            Self::Cancelled { .. } => "Cancelled",
            Self::Store(error) => error.kind(),
        }
    }
}

fn join(failures: &[(String, FetchError)]) -> String {
    let each = failures.iter().map(|(source, error)| format!("{source}: {error}"));
    each.collect::<Vec<_>>().join("; ")
}

/// Brings a payload into the store from the first source that delivers it, unless it is here. What an interrupted
/// call left is not fetched again. `cancelled` is asked often; `report` is told what happens.
///
/// # Errors
/// No source delivered it (each one's reason), nobody wants it any more, or the store cannot take it.
pub fn bring(
    store: &NodeStore,
    sources: &[Box<dyn Source>],
    wanted: &Wanted,
    limits: &Limits,
    cancelled: &dyn Fn() -> bool,
    report: &mut dyn FnMut(Event<'_>),
) -> Result<Brought, BringError> {
    let digest = wanted.digest;
    let mut staged = match wait_for_turn(store, wanted, cancelled, report)? {
        Staging::Present(payload) => return Ok(Brought { payload, source: None, fetched: 0, resumed: 0 }),
        Staging::Needed(staged) if sources.is_empty() && staged.written() < wanted.bytes => {
            return Err(BringError::NoSources { digest });
        }
        Staging::Needed(staged) => staged,
    };
    let mut pace = Pace::new(limits.bandwidth);
    let mut fetched = 0;
    let mut failures = Vec::new();
    // What an earlier call left may be wrong: then everything is fetched again, once.
    if staged.written() == wanted.bytes {
        match staged.commit() {
            Ok(payload) => {
                return Ok(Brought { payload, source: None, fetched: 0, resumed: wanted.bytes });
            }
            Err(error) if error.kind() == "DigestMismatch" => {
                staged = match wait_for_turn(store, wanted, cancelled, report)? {
                    Staging::Present(payload) => {
                        return Ok(Brought { payload, source: None, fetched: 0, resumed: 0 });
                    }
                    Staging::Needed(staged) => staged,
                };
            }
            Err(error) => return Err(error.into()),
        }
    }
    for source in sources {
        let name = source.name();
        let mut attempt = 0;
        loop {
            if cancelled() {
                return Err(BringError::Cancelled { digest });
            }
            let resumed = staged.resumed();
            let result = fetch(
                source.as_ref(),
                &name,
                wanted,
                &mut staged,
                &mut fetched,
                &mut pace,
                cancelled,
                report,
            );
            let error = match result {
                Ok(()) => match staged.commit() {
                    Ok(payload) => {
                        return Ok(Brought { payload, source: Some(name), fetched, resumed });
                    }
                    Err(error) => {
                        // The beginning may be what was wrong, not this source's part.
                        if resumed == 0 || error.kind() != "DigestMismatch" {
                            attempt = ATTEMPTS;
                        }
                        staged = match wait_for_turn(store, wanted, cancelled, report)? {
                            Staging::Present(payload) => {
                                return Ok(Brought { payload, source: None, fetched, resumed: 0 });
                            }
                            Staging::Needed(staged) => staged,
                        };
                        FetchError::Store(error)
                    }
                },
                Err(error) => error,
            };
            report(Event::Failed { source: &name, error: &error });
            match &error {
                FetchError::Cancelled => return Err(BringError::Cancelled { digest }),
                FetchError::NoRange { .. } if staged.written() > 0 => staged.restart()?,
                FetchError::Unavailable(_) => {}
                FetchError::Store(StoreError::Admit(_)) if attempt < ATTEMPTS => {}
                FetchError::Store(StoreError::Admit(_)) => attempt = ATTEMPTS,
                FetchError::Store(_) => {
                    let FetchError::Store(error) = error else { continue };
                    return Err(error.into());
                }
                _ => attempt = ATTEMPTS,
            }
            attempt += 1;
            if attempt >= ATTEMPTS {
                failures.push((name, error));
                break;
            }
            pause(PAUSE * (1 << (attempt - 1)), cancelled);
        }
    }
    Err(BringError::Failed { digest, failures })
}

#[allow(clippy::too_many_arguments, reason = "one call of the loop above, split for its length")]
fn fetch(
    source: &dyn Source,
    name: &str,
    wanted: &Wanted,
    staged: &mut StagedPayload,
    fetched: &mut u64,
    pace: &mut Pace,
    cancelled: &dyn Fn() -> bool,
    report: &mut dyn FnMut(Event<'_>),
) -> Result<(), FetchError> {
    let from = staged.written();
    report(Event::Asking { source: name, from });
    source.fetch(wanted, from, &mut |chunk| {
        if cancelled() {
            return Err(FetchError::Cancelled);
        }
        staged.append(chunk)?;
        *fetched += chunk.len() as u64;
        report(Event::Bytes { here: staged.written(), of: wanted.bytes });
        pace.wait(chunk.len() as u64, cancelled);
        Ok(())
    })?;
    match staged.written() {
        written if written == wanted.bytes => Ok(()),
        written => {
            Err(FetchError::Unavailable(format!("it ended after {written} of {} bytes", wanted.bytes)))
        }
    }
}

fn wait_for_turn(
    store: &NodeStore,
    wanted: &Wanted,
    cancelled: &dyn Fn() -> bool,
    report: &mut dyn FnMut(Event<'_>),
) -> Result<Staging, BringError> {
    let mut waiting = false;
    loop {
        let mut here = 0;
        let staging = store.try_stage(&wanted.digest, wanted.bytes, &mut |hashed| {
            here += hashed;
            report(Event::Bytes { here, of: wanted.bytes });
        })?;
        if let Some(staging) = staging {
            return Ok(staging);
        }
        if !waiting {
            report(Event::Waiting);
            waiting = true;
        }
        if cancelled() {
            return Err(BringError::Cancelled { digest: wanted.digest });
        }
        std::thread::sleep(LOOK);
    }
}

fn pause(time: Duration, cancelled: &dyn Fn() -> bool) {
    let until = Instant::now() + time;
    while !cancelled() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(LOOK));
    }
}

/// Holds the rate of the delivered bytes at the limit.
#[derive(Debug)]
struct Pace {
    limit: Option<u64>,
    /// When the bytes so far are due.
    due: Instant,
}

impl Pace {
    fn new(limit: Option<u64>) -> Self {
        Self { limit: limit.filter(|limit| *limit > 0), due: Instant::now() }
    }

    fn wait(&mut self, bytes: u64, cancelled: &dyn Fn() -> bool) {
        let Some(limit) = self.limit else { return };
        #[allow(clippy::cast_precision_loss, reason = "a time needs no more digits")]
        let cost = Duration::from_secs_f64(bytes as f64 / limit as f64);
        let now = Instant::now();
        // Time in which nothing came is not made up for.
        self.due = self.due.max(now) + cost;
        pause(self.due.saturating_duration_since(now), cancelled);
    }
}
