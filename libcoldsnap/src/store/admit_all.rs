//! Admission of several payloads at once: what must be hashed is spread over the cores, two payloads in step on
//! each where there are more payloads than cores.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufReader};
use std::sync::mpsc::{self, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::lock::DigestLock;
use super::verify::{self, Begun};
use super::{AdmitError, AdmittedPayload, NodeStore};
use crate::digest::{Digest, Sha256, lanes};

/// The answer for one payload.
pub type Admission = Result<AdmittedPayload, AdmitError>;

/// A payload that is being hashed, under its lock.
struct Job {
    position: usize,
    begun: Begun,
    lock: DigestLock,
}

enum Event {
    Bytes(u64),
    Done(usize, Admission),
}

impl NodeStore {
    /// Admits several payloads, each given with its committed size where that is known; the answers are in the same
    /// order. Each one is admitted as by [`Self::admit`]; a payload that is named twice is hashed once. `progress`
    /// is called with the number of bytes hashed since the last call.
    pub fn admit_all(
        &self,
        payloads: &[(Digest, Option<u64>)],
        progress: &mut dyn FnMut(u64),
    ) -> Vec<Admission> {
        let mut seen = HashSet::new();
        let mut answers: Vec<Option<Admission>> = Vec::with_capacity(payloads.len());
        let mut unverified = Vec::new();
        for (position, (digest, bytes)) in payloads.iter().enumerate() {
            let answer = self.admit_by_record(digest, *bytes).transpose();
            if answer.is_none() && seen.insert(*digest) {
                unverified.push(position);
            }
            answers.push(answer);
        }
        // One alone is hashed below, on two cores.
        if unverified.len() > 1 {
            self.hash_free(payloads, unverified, &mut answers, progress);
        }
        // Named twice, or verified by somebody else at this time. Waiting only now, while no lock is held, cannot deadlock and
        // keeps nobody waiting.
        let admit = |(answer, (digest, bytes)): (Option<Admission>, &(Digest, Option<u64>))| {
            answer.unwrap_or_else(|| self.admit(digest, *bytes, progress))
        };
        answers.into_iter().zip(payloads).map(admit).collect()
    }

    /// Hashes those whose lock is free.
    fn hash_free(
        &self,
        payloads: &[(Digest, Option<u64>)],
        unverified: Vec<usize>,
        answers: &mut [Option<Admission>],
        progress: &mut dyn FnMut(u64),
    ) {
        let threads = thread::available_parallelism().map_or(1, usize::from).min(unverified.len());
        // One payload per core as long as there are cores: that is faster than two on one.
        let most = if unverified.len() > threads { usize::MAX } else { 1 };
        let queue = Mutex::new(unverified.into_iter());
        thread::scope(|scope| {
            let (sender, receiver) = mpsc::channel();
            for _ in 0..threads {
                let (sender, queue) = (sender.clone(), &queue);
                scope.spawn(move || {
                    let mut taken = 0;
                    let next = || {
                        while taken < most {
                            taken += 1;
                            let position = queue.lock().unwrap_or_else(PoisonError::into_inner).next()?;
                            match self.start(position, payloads[position]).transpose() {
                                Some(Ok(job)) => return Some(job),
                                // The receiver outlives the threads.
                                Some(Err(error)) => drop(sender.send(Event::Done(position, Err(error)))),
                                None => {}
                            }
                        }
                        None
                    };
                    lanes::sum_all::<_, _, Sha256>(
                        next,
                        |job: Job, found| {
                            let position = job.position;
                            let answer = self.finish(job, payloads[position].1, found, &sender);
                            drop(sender.send(Event::Done(position, answer)));
                        },
                        |bytes| drop(sender.send(Event::Bytes(bytes))),
                    );
                });
            }
            drop(sender);
            for event in receiver {
                match event {
                    Event::Bytes(bytes) => progress(bytes),
                    Event::Done(position, answer) => answers[position] = Some(answer),
                }
            }
        });
    }

    /// Prepares the hashing of a payload. None when somebody else has its lock, or verified it just now.
    fn start(
        &self,
        position: usize,
        (digest, bytes): (Digest, Option<u64>),
    ) -> Result<Option<(Job, BufReader<File>)>, AdmitError> {
        let path = self.payload_path(&digest);
        let lock = self.try_lock(&digest).map_err(AdmitError::io("lock the payload", &path))?;
        let Some(lock) = lock else { return Ok(None) };
        // Somebody may have verified it meanwhile: the second look at the record answers then.
        if self.admit_by_record(&digest, bytes)?.is_some() {
            return Ok(None);
        }
        let begun = self.begin(&digest, bytes)?;
        let stream = verify::reader(&begun.file).map_err(AdmitError::io("read", &path))?;
        Ok(Some((Job { position, begun, lock }, stream)))
    }

    fn finish(
        &self,
        Job { begun, lock, .. }: Job,
        bytes: Option<u64>,
        found: io::Result<Digest>,
        events: &Sender<Event>,
    ) -> Admission {
        let (digest, hashed) = (begun.digest, begun.before.content.size);
        if let Some(payload) = self.conclude(begun, found, hashed)? {
            return Ok(payload);
        }
        let mut progress = |bytes| drop(events.send(Event::Bytes(bytes)));
        let mut payload = self.admit_locked(&digest, bytes, &mut progress, &lock)?;
        payload.bytes_hashed += hashed;
        Ok(payload)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn store() -> (tempfile::TempDir, NodeStore, Digest) {
        let dir = tempfile::tempdir().unwrap();
        let store = NodeStore::open(dir.path()).unwrap().with_reserve(0);
        let digest = *store.publish_pack(&[vec![&[7; 5000][..]]], &mut |_| ()).unwrap().payload.digest();
        fs::remove_file(super::super::record_path(&store.payload_path(&digest))).unwrap();
        (dir, store, digest)
    }

    #[test]
    fn a_ctime_that_changed_meanwhile_costs_one_more_hash() {
        let (_dir, store, digest) = store();
        let (job, _) = store.start(0, (digest, None)).unwrap().unwrap();
        fs::set_permissions(store.payload_path(&digest), fs::Permissions::from_mode(0o640)).unwrap();
        let (events, received) = mpsc::channel();
        let payload = store.finish(job, None, Ok(digest), &events).unwrap();
        assert_eq!(payload.bytes_hashed(), 2 * 8192);
        drop(events);
        let again: u64 =
            received.into_iter().map(|event| if let Event::Bytes(n) = event { n } else { 0 }).sum();
        assert_eq!(again, 8192);
    }

    #[test]
    fn another_file_meanwhile_is_an_error() {
        let (_dir, store, digest) = store();
        let path = store.payload_path(&digest);
        let (job, _) = store.start(0, (digest, None)).unwrap().unwrap();
        let copy = path.with_extension("copy");
        fs::copy(&path, &copy).unwrap();
        fs::rename(&copy, &path).unwrap();
        let error = store.finish(job, None, Ok(digest), &mpsc::channel().0).unwrap_err();
        assert_eq!(error.kind(), "IdentityChanged");
    }

    #[test]
    fn what_somebody_else_verifies_is_left_to_him() {
        let (_dir, store, digest) = store();
        let (job, _) = store.start(0, (digest, None)).unwrap().unwrap();
        assert!(store.start(0, (digest, None)).unwrap().is_none());
        store.finish(job, None, Ok(digest), &mpsc::channel().0).unwrap();
        assert!(store.start(0, (digest, None)).unwrap().is_none(), "the record answers now");
    }
}
