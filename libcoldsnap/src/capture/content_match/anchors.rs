//! Anchors: the words of the checkpoint by which its content is recognised in memory.
//!
//! A multiplicative hash of an aligned 8-byte word decides whether the word is an anchor, in the
//! same way for the checkpoint and for memory. One word in 32 is enough: a page-sized piece of a
//! tensor holds 16 on average. The scan of memory then looks up one word in 32 only, and the
//! lookup meets a small bitmap before it meets the table.
//!
//! Some words are useless and would cost time without limit: zero words are never anchors, a word
//! equal to its predecessor adds nothing to it, and a word has at most [`MAX_CANDIDATES`] places. A
//! large tensor that is left without an anchor gets one by force; memory words are checked against
//! the few forced ones too, if there are any.

use std::ops::Range;

use super::super::checkpoint::{Checkpoint, Tensor};
use super::MatchError;
use super::small::{MAX_SMALL, WordSet};

/// Places of one word that are kept; further ones are found through other words near them.
pub(super) const MAX_CANDIDATES: usize = 4;
/// Anchors aimed at for the whole checkpoint: bounds the table to 512 MiB. A checkpoint with more
/// words gets sparser anchors.
const MAX_ANCHORS: usize = 1 << 25;
/// Anchors by force per tensor and in all; the latter keeps the bitmap of forced anchors sparse.
const FORCED_PER_TENSOR: usize = 2;
const MAX_FORCED: usize = 1 << 13;
/// Slots of the table that are tried for one word, so that words chosen to collide cost no more.
const MAX_PROBES: usize = 64;
/// Words of a tensor that are tried for a forced anchor.
const FORCED_SEARCH: usize = 4096;
/// A table slot is tag and place: the place is a byte offset into the files laid end to end, plus one.
const PLACE_BITS: u32 = 44;
const PLACE_MASK: u64 = (1 << PLACE_BITS) - 1;

pub(super) const HASH: u64 = 0x9E37_79B9_7F4A_7C15;
const REHASH: u64 = 0xD6E8_FEB8_6659_FD93;

/// Where every anchor lies in the checkpoint.
#[derive(Debug)]
pub(super) struct AnchorIndex {
    /// A word is an anchor when its hash minus one is below this (so that zero never is).
    threshold: u64,
    /// The hashes of forced anchors, none for most checkpoints.
    forced: Option<Box<WordSet>>,
    filter: Bitmap,
    slots: Vec<u64>,
    slot_shift: u32,
    /// Start of each file when all are laid end to end.
    bases: Vec<u64>,
    anchors: usize,
}

/// Which parts of a tensor anchors are taken from; sizes in bytes, multiples of eight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sampling {
    /// Everything before this.
    pub head: usize,
    /// Behind it this much at every multiple of `stride`.
    pub window: usize,
    pub stride: usize,
}

impl Sampling {
    /// Finds every copy of a tensor, and every piece of a megabyte, without reading the checkpoint.
    pub(super) const SPARSE: Self = Self { head: 64 << 10, window: 8 << 10, stride: 1 << 20 };
    /// Finds pieces of a page.
    pub(super) const ALL: Self = Self { head: usize::MAX, ..Self::SPARSE };

    /// The ranges of a tensor of so many words.
    fn ranges(self, words: usize) -> impl Iterator<Item = Range<usize>> {
        let head = (self.head / 8).min(words);
        let (stride, window) = (self.stride / 8, self.window / 8);
        let behind = (head.next_multiple_of(stride).max(stride)..words).step_by(stride);
        std::iter::once(0..head).chain(behind.map(move |start| start..words.min(start + window)))
    }
}

/// The hash of a word; zero for the zero word only. The highest bits depend on every bit of the word.
#[inline(always)]
pub(super) fn hash(word: u64) -> u64 {
    word.wrapping_mul(HASH)
}

/// Words that are searched for anchors together.
pub(super) const BATCH: usize = 256;

/// Positions in a batch of words, in order.
pub(super) struct Positions {
    buffer: [u16; BATCH],
    len: usize,
}

impl Positions {
    /// Positions in the first batch of `words` where `wanted` holds for the hash. Without branches, which would be unpredictable: the
    /// next slot of the buffer is always written and only kept for a hit.
    #[inline(always)]
    fn of(words: &[[u8; 8]], wanted: impl Fn(u64) -> bool) -> Self {
        // A read of every cache line of the next batch, all in flight together: without it the search
        // waits for memory line by line (3.4 instead of 4.8 GB/s).
        if let Some(next) = words.get(BATCH..2 * BATCH) {
            std::hint::black_box(next.iter().step_by(8).fold(0, |sum, word| sum ^ word[0]));
        }
        let mut found = Self { buffer: [0; BATCH], len: 0 };
        for (position, word) in (0u16..).zip(words.iter().take(BATCH)) {
            found.buffer[found.len % BATCH] = position;
            found.len += usize::from(wanted(hash(u64::from_le_bytes(*word))));
        }
        found
    }

    /// Keeps the positions where `wanted` holds for the hash.
    #[inline(always)]
    fn retain(&mut self, words: &[[u8; 8]], wanted: impl Fn(u64) -> bool) {
        let mut kept = 0;
        for found in 0..self.len {
            let position = self.buffer[found];
            self.buffer[kept] = position;
            kept += usize::from(wanted(hash(u64::from_le_bytes(words[usize::from(position)]))));
        }
        self.len = kept;
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.buffer[..self.len].iter().map(|&position| usize::from(position))
    }
}

impl AnchorIndex {
    /// Indexes these tensors of the checkpoint. `interval` is the mean distance of anchors in words,
    /// rounded up to a power of two.
    pub(super) fn build(
        checkpoint: &Checkpoint,
        tensors: &[usize],
        sampling: Sampling,
        interval: u32,
    ) -> Result<Self, MatchError> {
        let mut bases = Vec::with_capacity(checkpoint.files().len());
        let mut total = 0u64;
        for file in checkpoint.files() {
            bases.push(total);
            total = total.saturating_add(file.data.len() as u64);
        }
        if total >= PLACE_MASK {
            return Err(MatchError::CheckpointTooLarge { bytes: total, limit: PLACE_MASK });
        }
        let tensors = || tensors.iter().map(|&position| &checkpoint.tensors()[position]);
        let sampled = |tensor: &Tensor| {
            sampling.ranges(super::to_index(tensor.len / 8)).map(|range| range.len()).sum::<usize>()
        };
        let words = tensors().map(sampled).sum::<usize>();
        let mut interval_log = interval.max(1).next_power_of_two().trailing_zeros();
        while words >> interval_log > MAX_ANCHORS {
            interval_log += 1;
        }

        let capacity = anchor_budget(words, interval_log) + MAX_FORCED;
        let slots_log = (capacity + capacity / 2).next_power_of_two().trailing_zeros();
        let mut index = Self {
            threshold: u64::MAX >> interval_log,
            forced: None,
            filter: Bitmap::new(capacity * 8),
            slots: vec![0; 1 << slots_log],
            slot_shift: 64 - slots_log,
            bases,
            anchors: 0,
        };

        let mut words_seen = 0;
        let mut forced = 0;
        for tensor in tensors() {
            let data = checkpoint.tensor_data(tensor);
            words_seen += sampled(tensor);
            let before = index.anchors;
            index.add_selected(tensor, data, sampling, anchor_budget(words_seen, interval_log) + forced);
            // A smaller tensor fills no page, and is looked for where it matters.
            if index.anchors == before && data.len() > MAX_SMALL {
                forced += index.add_forced(tensor, data, FORCED_PER_TENSOR.min(MAX_FORCED - forced));
            }
        }
        Ok(index)
    }

    /// Adds the anchors of one tensor, up to `budget` anchors in all.
    fn add_selected(&mut self, tensor: &Tensor, data: &[u8], sampling: Sampling, budget: usize) {
        let base = self.bases[tensor.file_index] + tensor.file_offset;
        let words = data.as_chunks().0;
        let batches = sampling.ranges(words.len()).flat_map(|range| {
            let end = range.end;
            range.step_by(BATCH).map(move |start| start..end)
        });
        for Range { start, end } in batches {
            let selected = Positions::of(&words[start..end], |hash| self.selects(hash));
            for at in selected.iter().map(|position| start + position) {
                if at > 0 && words[at] == words[at - 1] {
                    continue;
                }
                if self.anchors >= budget {
                    return;
                }
                self.insert(hash(u64::from_le_bytes(words[at])), base + at as u64 * 8);
            }
        }
    }

    /// Adds up to `wanted` anchors of one tensor by force; returns how many were added.
    fn add_forced(&mut self, tensor: &Tensor, data: &[u8], wanted: usize) -> usize {
        let base = self.bases[tensor.file_index] + tensor.file_offset;
        let words = data.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
        let mut added = 0;
        let mut previous = 0;
        for (position, word) in words.enumerate().filter(|(_, word)| *word != 0).take(FORCED_SEARCH) {
            if added == wanted {
                break;
            }
            let hash = hash(word);
            let usable = word != previous && !WordSet::collides_with_zero(hash);
            if usable && self.insert(hash, base + position as u64 * 8) {
                self.forced.get_or_insert_default().insert(hash);
                added += 1;
            }
            previous = word;
        }
        added
    }

    #[inline(always)]
    fn selects(&self, hash: u64) -> bool {
        hash.wrapping_sub(1) < self.threshold
    }

    /// Which of the first [`BATCH`] words may be anchors.
    pub(super) fn candidates(&self, words: &[[u8; 8]]) -> Positions {
        let threshold = self.threshold;
        let mut found = match &self.forced {
            None => Positions::of(words, |hash| hash.wrapping_sub(1) < threshold),
            Some(forced) => {
                Positions::of(words, |hash| (hash.wrapping_sub(1) < threshold) | forced.contains(hash))
            }
        };
        // In a pass of its own, so that the accesses to the filter overlap.
        found.retain(words, |hash| self.filter.contains(rehash(hash)));
        found
    }

    /// Adds a place of a word; false when the word, or its part of the table, has enough.
    fn insert(&mut self, hash: u64, place: u64) -> bool {
        let key = rehash(hash);
        let tag = tag(key);
        let mut slot = self.slot(key);
        let mut same = 0;
        let mut probes = 0;
        while self.slots[slot] != 0 {
            same += usize::from(self.slots[slot] & !PLACE_MASK == tag);
            probes += 1;
            if same == MAX_CANDIDATES || probes == MAX_PROBES {
                return false;
            }
            slot = (slot + 1) & (self.slots.len() - 1);
        }
        self.slots[slot] = tag | (place + 1);
        self.filter.insert(key);
        self.anchors += 1;
        true
    }

    /// The places a word with this hash may have, as (file, offset), earlier ones first. The caller
    /// compares the bytes.
    #[inline]
    pub(super) fn places(&self, hash: u64) -> impl Iterator<Item = (usize, usize)> + '_ {
        let key = rehash(hash);
        let tag = tag(key);
        let mut slot = self.slot(key);
        let mut probes = 0;
        std::iter::from_fn(move || {
            while probes < MAX_PROBES && self.slots[slot] != 0 {
                let entry = self.slots[slot];
                slot = (slot + 1) & (self.slots.len() - 1);
                probes += 1;
                if entry & !PLACE_MASK == tag {
                    return Some(self.place((entry & PLACE_MASK) - 1));
                }
            }
            None
        })
    }

    fn place(&self, place: u64) -> (usize, usize) {
        let file = self.bases.partition_point(|&base| base <= place) - 1;
        (file, super::to_index(place - self.bases[file]))
    }

    fn slot(&self, key: u64) -> usize {
        super::to_index(key >> self.slot_shift)
    }

    /// How many anchors the index holds.
    pub(super) fn anchors(&self) -> usize {
        self.anchors
    }
}

/// Anchors allowed after this many words: a quarter more than the hash selects of varied content,
/// so that content full of one anchor cannot fill the table.
fn anchor_budget(words: usize, interval_log: u32) -> usize {
    let expected = words >> interval_log;
    expected + expected / 4 + 1024
}

fn rehash(hash: u64) -> u64 {
    (hash ^ (hash >> 32)).wrapping_mul(REHASH)
}

fn tag(key: u64) -> u64 {
    // The slot comes from the high bits: take the tag from the middle ones.
    (key >> 12) << PLACE_BITS
}

/// A set of keys by their highest bits: says "no" for certain and "perhaps" otherwise.
#[derive(Debug)]
struct Bitmap {
    words: Vec<u64>,
    shift: u32,
}

impl Bitmap {
    /// At least `bits` bits.
    fn new(bits: usize) -> Self {
        let log = bits.next_power_of_two().trailing_zeros().max(6);
        Self { words: vec![0; 1 << (log - 6)], shift: 64 - log }
    }

    fn insert(&mut self, key: u64) {
        let bit = key >> self.shift;
        self.words[super::to_index(bit / 64)] |= 1 << (bit % 64);
    }

    #[inline(always)]
    fn contains(&self, key: u64) -> bool {
        let bit = key >> self.shift;
        self.words[super::to_index(bit / 64)] >> (bit % 64) & 1 != 0
    }
}
