//! Small tensors: too small to fill a page, needed to join what lies around them.
//!
//! Such a tensor may have no anchor, or make no run that is long enough. It is looked for only near the
//! runs of other tensors, there under every word.

use std::collections::HashMap;

use super::anchors::hash;

/// Largest tensor that is small.
pub(super) const MAX_SMALL: usize = 8192;

/// Small tensors by their first nonzero word.
#[derive(Debug, Default)]
pub(super) struct SmallTensors {
    set: WordSet,
    /// (tensor, offset of the word in it), earlier tensors first.
    by_word: HashMap<u64, Vec<(usize, usize)>>,
}

impl SmallTensors {
    pub(super) fn insert(&mut self, tensor: usize, data: &[u8]) {
        let first = data.chunks(8).map(padded_word).enumerate().find(|(_, word)| *word != 0);
        if let Some((position, word)) = first {
            self.by_word.entry(word).or_default().push((tensor, position * 8));
            self.set.insert(hash(word));
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

/// A set of hashes by their highest bits: says "no" for certain and "perhaps" otherwise. Of a fixed size
/// that fits the first-level cache: it is asked for every word.
#[derive(Debug)]
pub(super) struct WordSet([u64; 1024]);

impl Default for WordSet {
    fn default() -> Self {
        Self([0; 1024])
    }
}

impl WordSet {
    /// Whether the hash shares its bit with the hash of the zero word.
    pub(super) fn collides_with_zero(hash: u64) -> bool {
        hash >> 48 == 0
    }

    pub(super) fn insert(&mut self, hash: u64) {
        self.0[super::to_index(hash >> 54)] |= 1 << ((hash >> 48) % 64);
    }

    #[inline(always)]
    pub(super) fn contains(&self, hash: u64) -> bool {
        self.0[super::to_index(hash >> 54)] >> ((hash >> 48) % 64) & 1 != 0
    }
}
