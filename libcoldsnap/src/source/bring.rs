//! The order in which sources are asked, and what a failure of one means for it and for the next.

use std::time::Duration;

use super::pace::{LOOK, Pace, pause};
use super::{BringError, Brought, Event, FetchError, Limits, Source, Wanted};
use crate::store::{AdmitError, AdmittedPayload, NodeStore, StagedPayload, Staging, StoreError};

/// Tries of one source without progress, when they fail in a way that may pass.
const ATTEMPTS: u32 = 4;
/// Pause before the second try; doubled before each further one.
const PAUSE: Duration = Duration::from_millis(500);
/// A source that wants us to wait longer is given up.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// A try that brought so many bytes more than any before it does not count: a large payload may outlive many
/// connections, and a source that sends a byte at a time may not hold us for ever.
const PROGRESS: u64 = 1 << 20;

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
    let pace = Pace::new(limits.bandwidth);
    let mut work = Work { store, wanted, cancelled, report, pace, fetched: 0 };
    let mut staged = match work.turn()? {
        Staging::Present(payload) => return Ok(work.brought(payload, None, 0)),
        Staging::Needed(staged) => staged,
    };
    if staged.written() == wanted.bytes {
        // An interrupted call left all of it.
        staged = match work.finish(staged)? {
            Finish::Here(payload) => return Ok(work.brought(payload, None, wanted.bytes)),
            Finish::Wrong(_, empty) => empty,
        };
    }
    if sources.is_empty() {
        return Err(BringError::NoSources { digest: wanted.digest });
    }
    let mut failures = Vec::new();
    for source in sources {
        let name = source.name();
        match work.ask(source.as_ref(), &name, staged)? {
            Asked::Here(payload, resumed) => return Ok(work.brought(payload, Some(name), resumed)),
            Asked::GivenUp(error, left) => {
                failures.push((name, error));
                staged = left;
            }
        }
    }
    Err(BringError::Failed { digest: wanted.digest, failures })
}

/// One call of [`bring`].
struct Work<'a> {
    store: &'a NodeStore,
    wanted: &'a Wanted,
    cancelled: &'a dyn Fn() -> bool,
    report: &'a mut dyn FnMut(Event<'_>),
    pace: Pace,
    fetched: u64,
}

/// What became of one source.
enum Asked {
    /// It delivered the payload; so many bytes were here before.
    Here(AdmittedPayload, u64),
    /// It did not; the next source goes on from what is here.
    GivenUp(FetchError, Box<StagedPayload>),
}

/// What became of bytes in the right number.
enum Finish {
    Here(AdmittedPayload),
    /// They were not the payload; here is a new beginning.
    Wrong(StoreError, Box<StagedPayload>),
}

impl Work<'_> {
    fn brought(&self, payload: AdmittedPayload, source: Option<String>, resumed: u64) -> Brought {
        Brought { payload, source, fetched: self.fetched, resumed }
    }

    /// Asks one source until it delivered or has to be given up.
    fn ask(
        &mut self,
        source: &dyn Source,
        name: &str,
        mut staged: Box<StagedPayload>,
    ) -> Result<Asked, BringError> {
        let digest = self.wanted.digest;
        let mut tries = 0_u32;
        let mut furthest = staged.written();
        // Whether every byte that is here came from this source: only then wrong bytes are its fault.
        let mut alone = staged.written() == 0;
        loop {
            let from = staged.written();
            let error = match self.fetch(source, name, &mut staged) {
                Ok(()) => {
                    let resumed = staged.resumed();
                    match self.finish(staged)? {
                        Finish::Here(payload) => return Ok(Asked::Here(payload, resumed)),
                        Finish::Wrong(error, empty) => {
                            staged = empty;
                            let error = FetchError::Store(error);
                            (self.report)(Event::Failed { source: name, error: &error });
                            if alone {
                                return Ok(Asked::GivenUp(error, staged));
                            }
                            alone = staged.written() == 0;
                            furthest = staged.written();
                            continue;
                        }
                    }
                }
                Err(error) => error,
            };
            (self.report)(Event::Failed { source: name, error: &error });
            tries += 1;
            if staged.written() >= furthest + PROGRESS {
                furthest = staged.written();
                tries = 0;
            }
            let wait = match error {
                FetchError::Cancelled => return Err(BringError::Cancelled { digest }),
                // It sent more than the payload has.
                FetchError::Store(StoreError::Admit(_)) => return Ok(Asked::GivenUp(error, staged)),
                FetchError::Store(error) => return Err(error.into()),
                FetchError::NoRange { .. } if from > 0 => {
                    staged.restart()?;
                    alone = true;
                    Duration::ZERO
                }
                FetchError::Unavailable(_) => PAUSE * (1 << tries.saturating_sub(1)),
                FetchError::Busy { after, .. } if after <= LONGEST_PAUSE => after.max(PAUSE),
                _ => return Ok(Asked::GivenUp(error, staged)),
            };
            if tries >= ATTEMPTS {
                return Ok(Asked::GivenUp(error, staged));
            }
            pause(wait, self.cancelled);
        }
    }

    /// One try. On success all bytes are here.
    fn fetch(
        &mut self,
        source: &dyn Source,
        name: &str,
        staged: &mut StagedPayload,
    ) -> Result<(), FetchError> {
        if (self.cancelled)() {
            return Err(FetchError::Cancelled);
        }
        let Wanted { bytes, .. } = *self.wanted;
        let from = staged.written();
        (self.report)(Event::Asking { source: name, from });
        source.fetch(self.wanted, from, &mut |chunk| {
            if (self.cancelled)() {
                return Err(FetchError::Cancelled);
            }
            staged.append(chunk)?;
            self.fetched += chunk.len() as u64;
            (self.report)(Event::Bytes { here: staged.written(), of: bytes });
            self.pace.wait(chunk.len() as u64, self.cancelled);
            Ok(())
        })?;
        if staged.written() == bytes {
            return Ok(());
        }
        Err(FetchError::Unavailable(format!("it ended after {} of {bytes} bytes", staged.written())))
    }

    fn finish(&mut self, staged: Box<StagedPayload>) -> Result<Finish, BringError> {
        match staged.commit() {
            Ok(payload) => Ok(Finish::Here(payload)),
            Err(error @ StoreError::Admit(AdmitError::DigestMismatch { .. })) => Ok(match self.turn()? {
                Staging::Present(payload) => Finish::Here(payload),
                Staging::Needed(staged) => Finish::Wrong(error, staged),
            }),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits while somebody else brings or verifies the payload.
    fn turn(&mut self) -> Result<Staging, BringError> {
        let Wanted { digest, bytes } = *self.wanted;
        let mut waiting = false;
        loop {
            let mut here = 0;
            let staging = self.store.try_stage(&digest, bytes, &mut |hashed| {
                here += hashed;
                (self.report)(Event::Bytes { here, of: bytes });
            })?;
            if let Some(staging) = staging {
                return Ok(staging);
            }
            if !waiting {
                (self.report)(Event::Waiting);
                waiting = true;
            }
            if (self.cancelled)() {
                return Err(BringError::Cancelled { digest });
            }
            std::thread::sleep(LOOK);
        }
    }
}

#[cfg(test)]
#[path = "bring_tests.rs"]
mod tests;
