//! Several payloads admitted at once: the same answers as one by one, each hashed once.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::fs;
use std::thread;

use coldsnap::digest::Digest;
use coldsnap::store::{Evidence, NodeStore, RecordKept};
use common::{flip_byte, publish, record_path, store};
use tempfile::TempDir;

/// Payloads of different sizes without records.
fn unverified(count: usize) -> (TempDir, NodeStore, Vec<(Digest, Option<u64>)>) {
    let (dir, store) = store();
    let payloads = (1..=count)
        .map(|n| {
            let data = vec![u8::try_from(n).unwrap(); 300_000 * n + 1];
            let payload = publish(&store, &[&data]).payload;
            fs::remove_file(record_path(&store, payload.digest())).unwrap();
            (*payload.digest(), Some(payload.bytes()))
        })
        .collect();
    (dir, store, payloads)
}

fn bytes(payloads: &[(Digest, Option<u64>)]) -> u64 {
    payloads.iter().map(|(_, bytes)| bytes.unwrap()).sum()
}

#[test]
fn answers_come_in_order_and_each_payload_is_hashed_once() {
    for count in [0, 1, 2, 3, 7] {
        let (_dir, store, mut payloads) = unverified(count);
        payloads.reverse();
        let mut hashed = 0;
        let answers = store.admit_all(&payloads, &mut |n| hashed += n);
        assert_eq!(answers.len(), count);
        for (answer, (digest, bytes)) in answers.iter().zip(&payloads) {
            let payload = answer.as_ref().unwrap();
            assert_eq!((payload.digest(), Some(payload.bytes())), (digest, *bytes));
            assert_eq!(payload.evidence(), Evidence::FullSha256ThisOperation);
            assert_eq!(payload.bytes_hashed(), payload.bytes());
            assert_eq!(payload.record(), &RecordKept::Written);
        }
        assert_eq!(hashed, bytes(&payloads));
        for answer in store.admit_all(&payloads, &mut |_| panic!("hashed again")) {
            assert_eq!(answer.unwrap().evidence(), Evidence::CachedFullSha256);
        }
    }
}

#[test]
fn a_payload_that_is_named_twice_is_hashed_once() {
    let (_dir, store, payloads) = unverified(2);
    let twice = [payloads[1], payloads[0], payloads[1]];
    let mut hashed = 0;
    let answers = store.admit_all(&twice, &mut |n| hashed += n);
    assert_eq!(hashed, bytes(&payloads));
    assert_eq!(answers[2].as_ref().unwrap().digest(), &payloads[1].0);
    assert_eq!(answers[2].as_ref().unwrap().evidence(), Evidence::CachedFullSha256);
}

#[test]
fn one_bad_payload_does_not_disturb_the_others() {
    let (_dir, store, mut payloads) = unverified(6);
    flip_byte(&store.payload_path(&payloads[1].0));
    fs::remove_file(store.payload_path(&payloads[2].0)).unwrap();
    payloads[4].1 = Some(4096);
    let answers = store.admit_all(&payloads, &mut |_| ());
    let kinds: Vec<_> =
        answers.iter().map(|a| a.as_ref().map_or_else(|e| e.kind(), |_| "admitted")).collect();
    assert_eq!(
        kinds,
        ["admitted", "DigestMismatch", "PayloadMissing", "admitted", "SizeChanged", "admitted"]
    );
    assert!(!record_path(&store, &payloads[1].0).exists());
}

#[test]
fn concurrent_requests_in_any_order_hash_once_and_end() {
    let (_dir, store, payloads) = unverified(6);
    let threads: Vec<_> = (0..6)
        .map(|n| {
            let (store, mut payloads) = (store.clone(), payloads.clone());
            payloads.rotate_left(n);
            if n % 2 == 1 {
                payloads.reverse();
            }
            thread::spawn(move || {
                let answers = store.admit_all(&payloads, &mut |_| ());
                answers.iter().map(|answer| answer.as_ref().unwrap().bytes_hashed()).sum::<u64>()
            })
        })
        .collect();
    let hashed: u64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
    assert_eq!(hashed, bytes(&payloads));
}
