//! Content made to cost time: the work is counted, not timed.

use super::fixture::{Format, checkpoint, noise};
use super::*;

/// Work of matching `memory` against one tensor of `content`, both made for `len` bytes.
fn work(len: usize, content: fn(usize) -> Vec<u8>, memory: fn(usize) -> Vec<u8>) -> MatchStats {
    let (_dir, checkpoint) = checkpoint(Format::Safetensors, &[content(len)]);
    let options = MatchOptions { anchor_interval: 1, ..Default::default() };
    let matcher = ContentMatcher::with_sampling(&checkpoint, options, Sampling::ALL).unwrap();
    let memory = memory(len);
    matcher.find(&[MemoryRegion { address: BASE, data: &memory }]).unwrap().stats
}

fn words(len: usize, word: impl Fn(usize) -> u64) -> Vec<u8> {
    (0..len / 8).flat_map(|position| word(position).to_le_bytes()).collect()
}

/// A sequence of two words without a pattern.
fn two_words(seed: u64, len: usize) -> Vec<u8> {
    noise(seed, len / 8)
        .into_iter()
        .flat_map(|byte| (u64::from(byte & 1) + 0x3f80_0000_3f80_0000).to_le_bytes())
        .collect()
}

/// Pieces just shorter than the minimum run, told apart by the word between them.
fn short_pieces(len: usize) -> Vec<u8> {
    words(
        len,
        |position| {
            if position % 31 == 30 { position as u64 } else { 0x1111 * (1 + position as u64 % 31 % 3) }
        },
    )
}

type Maker = fn(usize) -> Vec<u8>;

#[test]
fn work_is_linear_in_repetitive_memory() {
    let constant: Maker = |len| words(len, |_| 0x3f80_3f80_3f80_3f80);
    let alternating: Maker = |len| words(len, |position| 1 + position as u64 % 2);
    let period_three: Maker = |len| words(len, |position| 0x1111 * (1 + position as u64 % 3));
    let cases: [(&str, Maker, Maker); 8] = [
        ("constant", constant, constant),
        ("alternating", alternating, alternating),
        ("constant in short pieces", |len| short_pieces(len), constant),
        ("short pieces", short_pieces, short_pieces),
        ("short pieces in a pattern", short_pieces, period_three),
        ("two words", |len| two_words(1, len), |len| two_words(2, len)),
        ("zeros", |len| vec![0; len], |len| vec![0; len]),
        ("one long tensor, many starts", |len| noise(1, len), |len| noise(1, len / 16).repeat(16)),
    ];
    for (name, content, memory) in cases {
        let small = work(1 << 16, content, memory);
        let large = work(1 << 20, content, memory);
        // At most four candidates per word, each failing within the minimum run to both sides, or
        // leading to a run that is skipped.
        let bound =
            |stats: &MatchStats| stats.compared_bytes + 8 * stats.probed_words <= 260 * stats.scanned_bytes;
        assert!(bound(&small) && bound(&large), "{name}: {small:?} {large:?}");
        let grown = (large.compared_bytes + large.probed_words) as f64;
        assert!(
            grown <= 20.0 * (small.compared_bytes + small.probed_words + 1000) as f64,
            "{name}: {small:?} {large:?}"
        );
    }
}

#[test]
fn a_repeated_word_does_not_fill_the_index() {
    let stats = work(1 << 20, |len| words(len, |position| 1 + position as u64 % 7), |_| Vec::new());
    assert!(stats.anchors <= 7 * 4, "{stats:?}");
    let stats = work(1 << 20, |len| words(len, |_| 7), |_| Vec::new());
    assert_eq!(stats.anchors, 1);
}

#[test]
fn words_chosen_to_be_anchors_do_not_fill_the_index() {
    // The words whose hashes are 1, 2, 3, ...: every one is selected, and no two are equal.
    let inverse = (0..6).fold(1u64, |x, _| x.wrapping_mul(2u64.wrapping_sub(anchors::HASH.wrapping_mul(x))));
    let content = words(1 << 20, |position| (position as u64 + 1).wrapping_mul(inverse));
    let (_dir, checkpoint) = checkpoint(Format::Safetensors, std::slice::from_ref(&content));
    let matcher = ContentMatcher::with_sampling(&checkpoint, MatchOptions::default(), Sampling::ALL).unwrap();
    let found = matcher.find(&[MemoryRegion { address: BASE, data: &content }]).unwrap();
    assert!(found.stats.anchors < (1 << 17) / 16, "{:?}", found.stats);
    assert_eq!(found.runs.len(), 1);
    assert_eq!(found.runs[0].len, 1 << 20);
}

#[test]
fn a_repeated_word_that_leads_nowhere_is_tried_once() {
    let content = words(1 << 16, |position| if position % 31 == 30 { position as u64 } else { 7 });
    let (_dir, checkpoint) = checkpoint(Format::Safetensors, &[content]);
    let options = MatchOptions { anchor_interval: 1, ..Default::default() };
    let matcher = ContentMatcher::new(&checkpoint, options).unwrap();
    let memory = words(1 << 16, |_| 7);
    let found = matcher.find(&[MemoryRegion { address: BASE, data: &memory }]).unwrap();
    assert_eq!((found.runs.len(), found.stats.probed_words), (0, 1));
}

#[test]
fn small_tensors_that_differ_late_cost_no_more() {
    // Sixteen small tensors that agree up to their last word, and a gap full of their first word.
    let mut contents = vec![noise(1, 10_000)];
    contents.extend((0..16).map(|n| words(8192, |position| if position == 1023 { n + 2 } else { 1 })));
    let (_dir, checkpoint) = checkpoint(Format::Safetensors, &contents);
    let memory = [&contents[0][..], &words(16_000, |_| 1), &contents[0]].concat();
    let matcher = ContentMatcher::new(&checkpoint, MatchOptions::default()).unwrap();
    let stats = matcher.find(&[MemoryRegion { address: BASE, data: &memory }]).unwrap().stats;
    assert!(stats.compared_bytes < 40 * memory.len() as u64, "{stats:?}");
}
