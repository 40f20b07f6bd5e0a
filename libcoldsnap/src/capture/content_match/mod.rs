//! Content match: which bytes of a process's memory are bytes of its checkpoint.
//!
//! Says what is model-owned without the engine's help. Engines copy tensors into memory at addresses
//! and in an order of their choice, so every tensor is looked for on its own, at any address that is
//! a multiple of eight from where the region begins:
//!
//! 1. [`ContentMatcher::new`] reads the checkpoint once and keeps a sparse set of anchor words.
//! 2. [`ContentMatcher::find`] scans memory for anchors and extends each to the longest equal run.
//! 3. [`model_extents`] joins runs across alignment padding, cuts them to whole pages, and proves
//!    every byte of the result.
//!
//! What is found does not depend on addresses, only on content and on offsets in a page, nor on the
//! number of threads. A tensor with varied content is found where at least some hundred bytes of it
//! lie together (one word in 32 is an anchor by default); one that repeats few words may be missed
//! unless it lies beside its neighbour of the file. What is missed is residual, never wrong.

mod equal;
mod extents;
mod index;
mod scan;

use std::fmt;

pub use extents::{ModelExtent, Piece, model_extents};

use super::checkpoint::{Checkpoint, index};
use index::AnchorIndex;
use scan::Scanner;

/// A contiguous run of dumped pages.
#[derive(Clone, Copy)]
pub struct MemoryRegion<'a> {
    /// Address of the first byte in the dumped process, a multiple of eight (of the page size for
    /// dumped pages).
    pub address: u64,
    /// The bytes.
    pub data: &'a [u8],
}

impl fmt::Debug for MemoryRegion<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryRegion({:#x}, {} bytes)", self.address, self.data.len())
    }
}

/// How to look.
#[derive(Clone, Copy, Debug)]
pub struct MatchOptions {
    /// Shortest run that counts, in bytes, at least eight. Short runs matter because they lie between
    /// long ones: without them the long ones could not be joined.
    pub min_run: usize,
    /// Threads that scan memory; the result does not depend on it.
    pub threads: usize,
    /// One anchor in this many words of the checkpoint; more for checkpoints over 8 GiB.
    pub anchor_interval: u32,
}

impl Default for MatchOptions {
    fn default() -> Self {
        Self { min_run: 256, threads: 1, anchor_interval: 32 }
    }
}

/// Bytes of memory that are equal to bytes of a checkpoint file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MatchedRun {
    /// Address of the first byte.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// Index into [`Checkpoint::files`].
    pub file_index: usize,
    /// First byte in the file. A run may hold bytes outside tensors: file padding, or the header.
    pub file_offset: u64,
}

/// What [`ContentMatcher::find`] found.
#[derive(Debug)]
pub struct Matches {
    /// The runs, sorted by address, disjoint.
    pub runs: Vec<MatchedRun>,
    /// The work it took.
    pub stats: MatchStats,
}

/// Counts of work, for reports and for the proof that it is linear in the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MatchStats {
    /// Anchors in the index.
    pub anchors: u64,
    /// Bytes of memory scanned.
    pub scanned_bytes: u64,
    /// Words of memory that were looked up.
    pub probed_words: u64,
    /// Places in the checkpoint that were compared with memory.
    pub candidates: u64,
    /// Bytes found equal in those comparisons.
    pub compared_bytes: u64,
}

impl MatchStats {
    fn add(&mut self, other: &Self) {
        self.scanned_bytes += other.scanned_bytes;
        self.probed_words += other.probed_words;
        self.candidates += other.candidates;
        self.compared_bytes += other.compared_bytes;
    }
}

/// Why memory was not matched.
#[derive(Debug, thiserror::Error)]
pub enum MatchError {
    /// More bytes than the anchor table can address.
    #[error("the checkpoint has {bytes} bytes, content match takes at most {limit}")]
    CheckpointTooLarge {
        /// Bytes of all files.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A region that does not begin at a word, or that ends beyond the address space.
    #[error(
        "memory region of {len} bytes at {address:#x} is not aligned to 8 bytes or leaves the address space"
    )]
    Misaligned {
        /// The region's address.
        address: u64,
        /// Its length.
        len: u64,
    },
    /// Two regions share addresses.
    #[error("memory regions at {first:#x} and {second:#x} overlap")]
    Overlap {
        /// The lower region.
        first: u64,
        /// The higher region.
        second: u64,
    },
    /// Runs of other regions.
    #[error("a run of {len} bytes at {address:#x} is in no memory region")]
    RunOutsideRegions {
        /// The run's address.
        address: u64,
        /// Its length.
        len: u64,
    },
    /// No page has this size.
    #[error("page size {found} is not a power of two")]
    PageSize {
        /// The value.
        found: u64,
    },
    /// Memory is not what it was said to be.
    #[error(
        "memory at {address:#x} is not equal to {source_name}: the checkpoint or the dump changed during the capture"
    )]
    Unequal {
        /// First address of the piece that differs.
        address: u64,
        /// The checkpoint file, or the zero padding.
        source_name: String,
    },
}

/// A checkpoint prepared for matching; serves any number of processes.
#[derive(Debug)]
pub struct ContentMatcher<'c> {
    checkpoint: &'c Checkpoint,
    options: MatchOptions,
    index: AnchorIndex,
}

impl<'c> ContentMatcher<'c> {
    /// Reads every tensor once and indexes its anchors.
    ///
    /// # Errors
    /// For a checkpoint of more than 16 TiB.
    pub fn new(checkpoint: &'c Checkpoint, options: MatchOptions) -> Result<Self, MatchError> {
        let index = AnchorIndex::build(checkpoint, options.anchor_interval)?;
        Ok(Self { checkpoint, options, index })
    }

    /// The checkpoint that it was made for.
    pub fn checkpoint(&self) -> &'c Checkpoint {
        self.checkpoint
    }

    /// The runs of memory that are equal to parts of the checkpoint.
    ///
    /// # Errors
    /// For regions that are not aligned or overlap.
    pub fn find(&self, regions: &[MemoryRegion<'_>]) -> Result<Matches, MatchError> {
        let regions = check_regions(regions)?;
        let mut stats = MatchStats { anchors: self.index.anchors() as u64, ..MatchStats::default() };
        let scanner = Scanner::new(self.checkpoint, &self.index, self.options.min_run.max(8));
        let by_region = scanner.scan(&regions, self.options.threads, &mut stats);
        let runs = regions.iter().zip(by_region).flat_map(|(region, runs)| {
            runs.into_iter().map(|run| MatchedRun {
                address: region.address + run.start as u64,
                len: run.len as u64,
                file_index: run.file,
                file_offset: run.file_offset as u64,
            })
        });
        Ok(Matches { runs: runs.collect(), stats })
    }

    /// How many of the checkpoint's tensor bytes the runs hold, each byte counted once however often it
    /// was found. Tensors with the same content count as found together.
    pub fn matched_bytes(&self, runs: &[MatchedRun]) -> u64 {
        let tensors = self.checkpoint.tensors();
        let mut found = Vec::new();
        for run in runs {
            let end = run.file_offset + run.len;
            for position in self.checkpoint.tensors_from(run.file_index, run.file_offset) {
                let tensor = &tensors[position];
                if tensor.file_offset >= end {
                    break;
                }
                let from = run.file_offset.saturating_sub(tensor.file_offset);
                let to = (end - tensor.file_offset).min(tensor.len);
                found.push((self.index.originals()[position], from, to));
            }
        }
        found.sort_unstable();
        let mut copies = vec![0; tensors.len()];
        for &original in self.index.originals() {
            copies[original] += 1;
        }
        let mut bytes = 0;
        let mut counted = (usize::MAX, 0);
        for (original, from, to) in found {
            let done = if counted.0 == original { counted.1 } else { 0 };
            bytes += to.saturating_sub(from.max(done)) * copies[original];
            counted = (original, done.max(to));
        }
        bytes
    }

    /// The part of the checkpoint's tensor bytes that the runs hold, between 0 and 1.
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn matched_ratio(&self, runs: &[MatchedRun]) -> f64 {
        self.matched_bytes(runs) as f64 / self.checkpoint.tensor_bytes().max(1) as f64
    }
}

/// The regions in address order, aligned and disjoint.
fn check_regions<'a>(regions: &[MemoryRegion<'a>]) -> Result<Vec<MemoryRegion<'a>>, MatchError> {
    let mut regions = regions.to_vec();
    regions.sort_by_key(|region| region.address);
    for region in &regions {
        let len = region.data.len() as u64;
        if region.address % 8 != 0 || region.address.checked_add(len).is_none() {
            return Err(MatchError::Misaligned { address: region.address, len });
        }
    }
    for pair in regions.windows(2) {
        if pair[0].address + pair[0].data.len() as u64 > pair[1].address {
            return Err(MatchError::Overlap { first: pair[0].address, second: pair[1].address });
        }
    }
    Ok(regions)
}

#[cfg(test)]
mod tests;
