//! Content match: which bytes of a process's memory are bytes of its checkpoint.
//!
//! Says what is model-owned without the engine's help. Engines copy tensors into memory at addresses
//! and in an order of their choice, so every tensor is looked for on its own, at any address that is
//! a multiple of eight from where the region begins:
//!
//! 1. [`ContentMatcher::new`] takes anchor words from samples of every tensor.
//! 2. [`ContentMatcher::find`] scans memory for anchors and extends each to the longest equal run. If
//!    that finds some of the model but not all, it takes anchors from the whole of every tensor that is
//!    not complete, and scans the rest of memory for pieces: slices of a sharded model, for example.
//! 3. [`model_extents`] joins runs across alignment padding, cuts them to whole pages, and proves
//!    every byte of the result.
//!
//! What is found does not depend on addresses, only on content and on offsets in a page, nor on the
//! number of threads. A tensor with varied content is found where at least some hundred bytes of it
//! lie together (one word in 32 is an anchor by default); one that repeats a few words may be missed.
//! What is missed is residual, never wrong.

mod anchors;
mod equal;
mod extents;
mod originals;
mod scan;
mod small;

use std::fmt;

pub use extents::{ModelExtent, Piece, model_extents};

use super::checkpoint::{Checkpoint, to_index};
use anchors::{AnchorIndex, Sampling};
use originals::originals;
use scan::Scanner;
use small::{MAX_SMALL, SmallTensors};

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
    /// One anchor in this many words; more when over 8 GiB of the checkpoint must be searched for pieces.
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
    sampling: Sampling,
    /// Anchors of samples of every tensor.
    samples: AnchorIndex,
    small: SmallTensors,
    /// For every tensor the first tensor with the same content.
    originals: Vec<usize>,
}

impl<'c> ContentMatcher<'c> {
    /// Reads samples of every tensor and indexes their anchors.
    ///
    /// # Errors
    /// For a checkpoint of more than 16 TiB.
    pub fn new(checkpoint: &'c Checkpoint, options: MatchOptions) -> Result<Self, MatchError> {
        Self::with_sampling(checkpoint, options, Sampling::SPARSE)
    }

    fn with_sampling(
        checkpoint: &'c Checkpoint,
        options: MatchOptions,
        sampling: Sampling,
    ) -> Result<Self, MatchError> {
        let originals = originals(checkpoint);
        let distinct: Vec<usize> =
            (0..originals.len()).filter(|&tensor| originals[tensor] == tensor).collect();
        let samples = AnchorIndex::build(checkpoint, &distinct, sampling, options.anchor_interval)?;
        let mut small = SmallTensors::default();
        for tensor in distinct {
            let data = checkpoint.tensor_data(&checkpoint.tensors()[tensor]);
            if data.len() <= MAX_SMALL {
                small.insert(tensor, data);
            }
        }
        Ok(Self { checkpoint, options, sampling, samples, small, originals })
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
        self.find_beside(regions, &[])
    }

    /// The same for one of several processes: `elsewhere` are the runs of the others. Where the first bytes of no tensor
    /// lie there may still be the rest of tensors that others hold in part, as shards are.
    ///
    /// # Errors
    /// For regions that are not aligned or overlap.
    pub fn find_beside(
        &self,
        regions: &[MemoryRegion<'_>],
        elsewhere: &[MatchedRun],
    ) -> Result<Matches, MatchError> {
        let regions = check_regions(regions)?;
        let mut stats = MatchStats { anchors: self.samples.anchors() as u64, ..MatchStats::default() };
        let (min_run, threads) = (self.options.min_run.max(8), self.options.threads);
        let scanner = Scanner::new(self.checkpoint, min_run);
        let runs = self.find_with(&scanner, &regions, elsewhere, threads, &mut stats)?;
        Ok(Matches { runs, stats })
    }

    fn find_with(
        &self,
        scanner: &Scanner<'_>,
        regions: &[MemoryRegion<'_>],
        elsewhere: &[MatchedRun],
        threads: usize,
        stats: &mut MatchStats,
    ) -> Result<Vec<MatchedRun>, MatchError> {
        let addressed = |found: &[Vec<scan::Run>]| -> Vec<MatchedRun> {
            let runs = regions.iter().zip(found).flat_map(|(region, runs)| {
                runs.iter().map(|run| MatchedRun {
                    address: region.address + run.start as u64,
                    len: run.len as u64,
                    file_index: run.file,
                    file_offset: run.file_offset as u64,
                })
            });
            runs.collect()
        };
        let mut found = scanner.scan(regions, &self.samples, vec![Vec::new(); regions.len()], threads, stats);
        let here = addressed(&found);
        let known = if here.is_empty() { elsewhere } else { &here };
        let incomplete = self.incomplete(known);
        // Where nothing was found anywhere there is no model: the first bytes of every tensor were looked for.
        if !known.is_empty() && !incomplete.is_empty() {
            let interval = self.options.anchor_interval;
            let index = AnchorIndex::build(self.checkpoint, &incomplete, Sampling::ALL, interval)?;
            stats.anchors += index.anchors() as u64;
            found = scanner.scan(regions, &index, found, threads, stats);
        }
        for (runs, region) in found.iter_mut().zip(regions) {
            scanner.finish(region.data, runs, &self.small, stats);
        }
        Ok(addressed(&found))
    }

    /// The tensors that are not all in the runs, without those that were looked for by all of their bytes.
    fn incomplete(&self, runs: &[MatchedRun]) -> Vec<usize> {
        let found = self.found_bytes(runs);
        let tensors = self.checkpoint.tensors().iter().enumerate();
        let incomplete = tensors.filter(|(position, tensor)| {
            self.originals[*position] == *position
                && found[*position] < tensor.len
                && to_index(tensor.len) > self.sampling.head
        });
        incomplete.map(|(position, _)| position).collect()
    }

    /// How many bytes of every tensor the runs hold, as a tensor or as another one with the same content.
    fn found_bytes(&self, runs: &[MatchedRun]) -> Vec<u64> {
        let tensors = self.checkpoint.tensors();
        let mut ranges = Vec::new();
        for run in runs {
            let end = run.file_offset + run.len;
            for position in self.checkpoint.tensors_from(run.file_index, run.file_offset) {
                let tensor = &tensors[position];
                if tensor.file_offset >= end {
                    break;
                }
                let from = run.file_offset.saturating_sub(tensor.file_offset);
                let to = (end - tensor.file_offset).min(tensor.len);
                ranges.push((self.originals[position], from, to));
            }
        }
        ranges.sort_unstable();
        let mut found = vec![0; tensors.len()];
        let mut counted = (usize::MAX, 0);
        for (original, from, to) in ranges {
            let done = if counted.0 == original { counted.1 } else { 0 };
            found[original] += to.saturating_sub(from.max(done));
            counted = (original, done.max(to));
        }
        self.originals.iter().map(|&original| found[original]).collect()
    }

    /// How many of the checkpoint's tensor bytes the runs hold, each byte counted once however often it
    /// was found. Tensors with the same content count as found together.
    pub fn matched_bytes(&self, runs: &[MatchedRun]) -> u64 {
        self.found_bytes(runs).into_iter().sum()
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
#[allow(clippy::cast_possible_truncation, reason = "sizes of test data")]
mod tests;
