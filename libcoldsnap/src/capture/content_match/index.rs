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
//! the few forced ones too, if there are any. A small tensor may have no anchor, or make no run that
//! is long enough; it matters only as the filling between larger ones and is looked for there.

use std::collections::HashMap;

use super::super::checkpoint::{Checkpoint, Tensor};
use super::MatchError;

/// Places of one word that are kept; further ones are found through other words near them.
pub(super) const MAX_CANDIDATES: usize = 4;
/// Anchors aimed at for the whole checkpoint: bounds the table to 512 MiB. A checkpoint with more
/// words gets sparser anchors.
const MAX_ANCHORS: usize = 1 << 25;
/// Largest tensor that is looked for between runs too, and so needs no anchor by force.
pub(super) const MAX_SMALL: usize = 8192;
/// Small tensors that are kept of those that begin with the same word.
const SMALL_PER_WORD: usize = 16;
/// Anchors by force per tensor and in all; the latter keeps the bitmap of forced anchors sparse.
const FORCED_PER_TENSOR: usize = 2;
const MAX_FORCED: usize = 1 << 13;
/// Words of a tensor that are tried for a forced anchor.
const FORCED_SEARCH: usize = 4096;
/// A table slot is tag and place: the place is a byte offset into the files laid end to end, plus one.
const PLACE_BITS: u32 = 44;
const PLACE_MASK: u64 = (1 << PLACE_BITS) - 1;

const HASH: u64 = 0x9E37_79B9_7F4A_7C15;
const REHASH: u64 = 0xD6E8_FEB8_6659_FD93;

/// Where every anchor lies in the checkpoint.
#[derive(Debug)]
pub(super) struct AnchorIndex {
    /// A word is an anchor when its hash minus one is below this (so that zero never is).
    threshold: u64,
    /// The hashes of forced anchors, none for most checkpoints.
    forced: Option<Box<WordSet>>,
    small: SmallTensors,
    filter: Bitmap,
    slots: Vec<u64>,
    slot_shift: u32,
    /// Start of each file when all are laid end to end.
    bases: Vec<u64>,
    /// For every tensor the first tensor with the same content, often itself.
    originals: Vec<usize>,
    anchors: usize,
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
    /// Positions where `wanted` holds for the hash. Without branches, which would be unpredictable: the
    /// next slot of the buffer is always written and only kept for a hit.
    #[inline(always)]
    fn of(words: &[[u8; 8]], wanted: impl Fn(u64) -> bool) -> Self {
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
    /// Reads every tensor once. `interval` is the mean distance of anchors in words, rounded up to
    /// a power of two.
    pub(super) fn build(checkpoint: &Checkpoint, interval: u32) -> Result<Self, MatchError> {
        let mut bases = Vec::with_capacity(checkpoint.files().len());
        let mut total = 0u64;
        for file in checkpoint.files() {
            bases.push(total);
            total = total.saturating_add(file.data.len() as u64);
        }
        if total >= PLACE_MASK {
            return Err(MatchError::CheckpointTooLarge { bytes: total, limit: PLACE_MASK });
        }
        let words: usize = checkpoint.tensors().iter().map(|t| checkpoint.tensor_data(t).len() / 8).sum();
        let mut interval_log = interval.max(1).next_power_of_two().trailing_zeros();
        while words >> interval_log > MAX_ANCHORS {
            interval_log += 1;
        }

        let capacity = anchor_budget(words, interval_log) + MAX_FORCED;
        let slots_log = (capacity + capacity / 2).next_power_of_two().trailing_zeros();
        let mut index = Self {
            threshold: u64::MAX >> interval_log,
            forced: None,
            small: SmallTensors::default(),
            filter: Bitmap::new(capacity * 8),
            slots: vec![0; 1 << slots_log],
            slot_shift: 64 - slots_log,
            bases,
            originals: originals(checkpoint),
            anchors: 0,
        };

        let mut words_seen = 0;
        let mut forced = 0;
        for (position, tensor) in checkpoint.tensors().iter().enumerate() {
            if index.originals[position] != position {
                continue;
            }
            let data = checkpoint.tensor_data(tensor);
            words_seen += data.len() / 8;
            let before = index.anchors;
            index.add_selected(tensor, data, anchor_budget(words_seen, interval_log) + forced);
            if data.len() <= MAX_SMALL {
                index.small.insert(position, data);
            } else if index.anchors == before {
                forced += index.add_forced(tensor, data, FORCED_PER_TENSOR.min(MAX_FORCED - forced));
            }
        }
        Ok(index)
    }

    /// Adds the anchors of one tensor, up to `budget` anchors in all.
    fn add_selected(&mut self, tensor: &Tensor, data: &[u8], budget: usize) {
        let mut place = self.bases[tensor.file_index] + tensor.file_offset;
        let words = data.as_chunks().0;
        let mut previous = [0; 8];
        for batch in words.chunks(BATCH) {
            for position in Positions::of(batch, |hash| self.selects(hash)).iter() {
                let before = if position == 0 { previous } else { batch[position - 1] };
                if batch[position] != before {
                    if self.anchors >= budget {
                        return;
                    }
                    self.insert(hash(u64::from_le_bytes(batch[position])), place + position as u64 * 8);
                }
            }
            previous = batch[batch.len() - 1];
            place += batch.len() as u64 * 8;
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

    /// Adds a place of a word; false when the word has enough places.
    fn insert(&mut self, hash: u64, place: u64) -> bool {
        let key = rehash(hash);
        let tag = tag(key);
        let mut slot = self.slot(key);
        let mut same = 0;
        while self.slots[slot] != 0 {
            if self.slots[slot] & !PLACE_MASK == tag {
                same += 1;
                if same == MAX_CANDIDATES {
                    return false;
                }
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
        let mut open = hash != 0;
        std::iter::from_fn(move || {
            while open {
                let entry = self.slots[slot];
                slot = (slot + 1) & (self.slots.len() - 1);
                open = entry != 0;
                if open && entry & !PLACE_MASK == tag {
                    return Some(self.place((entry & PLACE_MASK) - 1));
                }
            }
            None
        })
    }

    fn place(&self, place: u64) -> (usize, usize) {
        let file = self.bases.partition_point(|&base| base <= place) - 1;
        (file, super::index(place - self.bases[file]))
    }

    fn slot(&self, key: u64) -> usize {
        super::index(key >> self.slot_shift)
    }

    /// The small tensors.
    pub(super) fn small(&self) -> &SmallTensors {
        &self.small
    }

    /// For every tensor the first tensor with the same content.
    pub(super) fn originals(&self) -> &[usize] {
        &self.originals
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

/// For every tensor the first one with the same content. Engines that tie two tensors keep one
/// copy in memory, which must count as both.
fn originals(checkpoint: &Checkpoint) -> Vec<usize> {
    let mut first = HashMap::new();
    let tensors = checkpoint.tensors();
    let original = |(position, tensor): (usize, &Tensor)| {
        let data = checkpoint.tensor_data(tensor);
        let candidate = *first.entry((data.len(), sample(data))).or_insert(position);
        // One comparison per tensor: contents that agree in the sample but differ stay apart.
        let same = candidate == position || checkpoint.tensor_data(&tensors[candidate]) == data;
        if same { candidate } else { position }
    };
    tensors.iter().enumerate().map(original).collect()
}

/// A hash of 64 words spread over the data.
fn sample(data: &[u8]) -> u64 {
    let step = (data.len() / 64).max(8);
    let samples = (0..data.len()).step_by(step).filter_map(|at| data[at..].first_chunk());
    samples.fold(0, |sum, word| rehash(sum ^ hash(u64::from_le_bytes(*word))))
}

/// Small tensors by their first nonzero word.
#[derive(Debug, Default)]
pub(super) struct SmallTensors {
    set: WordSet,
    /// (tensor, offset of the word in it), earlier tensors first.
    by_word: HashMap<u64, Vec<(usize, usize)>>,
}

impl SmallTensors {
    fn insert(&mut self, tensor: usize, data: &[u8]) {
        let first = data.chunks(8).map(padded_word).enumerate().find(|(_, word)| *word != 0);
        if let Some((position, word)) = first {
            let places = self.by_word.entry(word).or_default();
            if places.len() < SMALL_PER_WORD {
                places.push((tensor, position * 8));
                self.set.insert(hash(word));
            }
        }
    }

    /// The tensors whose first nonzero word this is, with its offset. Behind a tensor shorter than a
    /// word, memory is taken to be zero up to the word's end.
    #[inline]
    pub(super) fn beginning_with(&self, word: u64) -> &[(usize, usize)] {
        if word == 0 || !self.set.contains(hash(word)) {
            return &[];
        }
        self.by_word.get(&word).map_or(&[], Vec::as_slice)
    }
}

/// A word, or the rest of a tensor that is shorter than a word and zeros.
fn padded_word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
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
        self.words[super::index(bit / 64)] |= 1 << (bit % 64);
    }

    #[inline(always)]
    fn contains(&self, key: u64) -> bool {
        let bit = key >> self.shift;
        self.words[super::index(bit / 64)] >> (bit % 64) & 1 != 0
    }
}

/// As [`Bitmap`], of a fixed size that fits the first-level cache: it is asked for every word.
#[derive(Debug)]
struct WordSet([u64; 1024]);

impl Default for WordSet {
    fn default() -> Self {
        Self([0; 1024])
    }
}

impl WordSet {
    /// Whether the hash shares its bit with the hash of the zero word.
    fn collides_with_zero(hash: u64) -> bool {
        hash >> 48 == 0
    }

    fn insert(&mut self, hash: u64) {
        self.0[super::index(hash >> 54)] |= 1 << ((hash >> 48) % 64);
    }

    #[inline(always)]
    fn contains(&self, hash: u64) -> bool {
        self.0[super::index(hash >> 54)] >> ((hash >> 48) % 64) & 1 != 0
    }
}
