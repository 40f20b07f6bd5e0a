//! Memory whose every word follows from a seed and its place, so that a check needs no second copy to compare with, and a test can make a
//! model file with the very bytes of a guest's memory.

use anyhow::{Result, bail};

/// Size of a page.
pub const PAGE: usize = 4096;
/// Words of a page.
pub const WORDS: usize = PAGE / 8;

/// The word at place `index` of memory made from `seed`; never 0, so that a lost page always shows.
pub fn word(seed: u64, index: u64) -> u64 {
    // splitmix64: every bit depends on every bit of seed and index.
    let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) | 1
}

/// Fills `memory` with the words of `seed` for page `page`.
pub fn fill(memory: &mut [u64], seed: u64, page: usize) {
    for (index, place) in memory.iter_mut().enumerate() {
        *place = word(seed, (page * WORDS + index) as u64);
    }
}

/// Compares `memory` with the words of `seed` for page `page`.
///
/// # Errors
/// The address of the first wrong word, what stands there and what should.
pub fn check(memory: &[u64], seed: u64, page: usize) -> Result<()> {
    for (index, found) in memory.iter().enumerate() {
        let expected = word(seed, (page * WORDS + index) as u64);
        if *found != expected {
            bail!(
                "{found:p}: found {found:016x}, expected {expected:016x} (page {page} of its region, word {index})"
            );
        }
    }
    Ok(())
}
