//! The scan of memory: anchors found, verified and extended to runs.
//!
//! A region is cut into chunks of fixed size that are scanned independently, by any number of
//! threads, and stitched in order: the result does not depend on the number of threads. The work is
//! linear in the memory: a candidate that fails costs less than the minimum run, one that succeeds
//! is skipped over.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::checkpoint::{Checkpoint, index};
use super::equal::{common_prefix, common_suffix, leading_zeros};
use super::index::{AnchorIndex, BATCH, hash};
use super::{MatchStats, MemoryRegion};

/// Memory that is scanned in one go.
const CHUNK: usize = 32 << 20;
/// Zero bytes between two tensors in memory that still count as the padding between neighbours.
const MAX_PADDING: usize = 4096;
/// Tensors without a nonzero byte that are skipped to find the next neighbour.
const MAX_ZERO_TENSORS: usize = 4;

/// A run inside one region: `start` is an offset in the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub start: usize,
    pub len: usize,
    pub file: usize,
    pub file_offset: usize,
    /// Kept however short: it holds a whole tensor, found beside its neighbour.
    whole: bool,
}

impl Run {
    pub(super) fn end(&self) -> usize {
        self.start + self.len
    }

    fn file_end(&self) -> usize {
        self.file_offset + self.len
    }

    /// The part at and after `start`.
    fn from(self, start: usize) -> Self {
        let cut = start.saturating_sub(self.start);
        Self { start: self.start + cut, len: self.len - cut, file_offset: self.file_offset + cut, ..self }
    }
}

/// Scans memory against one checkpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scanner<'a> {
    pub checkpoint: &'a Checkpoint,
    pub index: &'a AnchorIndex,
    pub min_run: usize,
    pub chunk: usize,
}

impl<'a> Scanner<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint, index: &'a AnchorIndex, min_run: usize) -> Self {
        Self { checkpoint, index, min_run, chunk: CHUNK }
    }

    /// The runs of each region, sorted and disjoint.
    pub(super) fn scan(
        &self,
        regions: &[MemoryRegion<'_>],
        threads: usize,
        stats: &mut MatchStats,
    ) -> Vec<Vec<Run>> {
        let chunks: Vec<(usize, Range<usize>)> = regions
            .iter()
            .enumerate()
            .flat_map(|(region, memory)| {
                let len = memory.data.len();
                (0..len).step_by(self.chunk).map(move |start| (region, start..len.min(start + self.chunk)))
            })
            .collect();
        let next = AtomicUsize::new(0);
        let work = || {
            let mut stats = MatchStats::default();
            let mut done = Vec::new();
            loop {
                let position = next.fetch_add(1, Ordering::Relaxed);
                let Some((region, chunk)) = chunks.get(position) else {
                    return (done, stats);
                };
                done.push((position, self.scan_chunk(regions[*region].data, chunk.clone(), &mut stats)));
            }
        };
        let mut done = Vec::with_capacity(chunks.len());
        std::thread::scope(|scope| {
            let helpers: Vec<_> = (1..threads.min(chunks.len())).map(|_| scope.spawn(work)).collect();
            let mut results = vec![work()];
            for helper in helpers {
                results.push(helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            }
            for (runs, part) in results {
                done.extend(runs);
                stats.add(&part);
            }
        });
        done.sort_by_key(|(position, _)| *position);

        let mut by_region = vec![Vec::new(); regions.len()];
        for (position, runs) in done {
            by_region[chunks[position].0].extend(runs);
        }
        for (runs, memory) in by_region.iter_mut().zip(regions) {
            let stitched = self.stitch(memory.data, std::mem::take(runs), stats);
            *runs = self.add_neighbours(memory.data, stitched, stats);
            runs.retain(|run| run.len >= self.min_run || run.whole);
        }
        by_region
    }

    /// The runs of `data[chunk]`, not extended beyond it. Runs at a border inside the region may be
    /// shorter than the minimum: their other part is in the next chunk.
    fn scan_chunk(&self, data: &[u8], chunk: Range<usize>, stats: &mut MatchStats) -> Vec<Run> {
        let mut runs = Vec::new();
        let mut claimed = chunk.start;
        let mut at = chunk.start;
        let mut failed = Failed::default();
        stats.scanned_bytes += chunk.len() as u64;
        'batches: while at + 8 <= chunk.end {
            let words = data[at..chunk.end].as_chunks().0;
            for position in self.index.candidates(words).iter() {
                let position = at + position * 8;
                if let Some(run) = self.probe(data, &chunk, claimed, position, &mut failed, stats) {
                    claimed = run.end();
                    runs.push(run);
                    at = claimed.next_multiple_of(8);
                    continue 'batches;
                }
            }
            at += words.len().min(BATCH) * 8;
        }
        runs
    }

    /// The longest run through the word at `position`, without what is claimed already.
    fn probe(
        &self,
        data: &[u8],
        chunk: &Range<usize>,
        claimed: usize,
        position: usize,
        failed: &mut Failed,
        stats: &mut MatchStats,
    ) -> Option<Run> {
        let word = u64::from_le_bytes(*data[position..].first_chunk()?);
        if word == 0 || failed.repeats(position, word) {
            return None;
        }
        stats.probed_words += 1;
        // Looking back into claimed memory tells whether the run is long enough, no more.
        let low = claimed.saturating_sub(self.min_run).max(chunk.start);
        let mut best: Option<Run> = None;
        let mut tried = false;
        for (file, offset) in self.index.places(hash(word)) {
            let content = &*self.checkpoint.files()[file].data;
            if content[offset..].first_chunk() != Some(&word.to_le_bytes()) {
                continue;
            }
            tried = true;
            let left = common_suffix(&data[low..position], &content[..offset]);
            let right = common_prefix(&data[position..chunk.end], &content[offset..]);
            stats.candidates += 1;
            stats.compared_bytes += (left + right) as u64;
            if best.is_none_or(|best| left + right > best.len) {
                let (start, file_offset) = (position - left, offset - left);
                best = Some(Run { start, len: left + right, file, file_offset, whole: false });
            }
        }
        let accepted = best.filter(|run| {
            let at_border = (run.start == chunk.start && chunk.start != 0)
                || (run.end() == chunk.end && chunk.end != data.len());
            run.len >= self.min_run || at_border
        });
        if accepted.is_none() && tried {
            *failed = Failed { position, word };
        }
        accepted.map(|run| run.from(claimed))
    }

    /// Joins the runs of neighbouring chunks: extends those that end at a border, up to the next run.
    fn stitch(&self, data: &[u8], runs: Vec<Run>, stats: &mut MatchStats) -> Vec<Run> {
        let mut stitched: Vec<Run> = Vec::with_capacity(runs.len());
        for mut run in runs {
            let low = match stitched.last_mut() {
                Some(previous) => {
                    self.extend_right(data, previous, run.start, stats);
                    previous.end()
                }
                None => 0,
            };
            if run.start.is_multiple_of(self.chunk) && run.start > low {
                let content = &self.checkpoint.files()[run.file].data[..run.file_offset];
                let left = common_suffix(&data[low..run.start], content);
                stats.compared_bytes += left as u64;
                run.start -= left;
                run.file_offset -= left;
                run.len += left;
            }
            match stitched.last_mut() {
                Some(previous)
                    if previous.end() == run.start
                        && previous.file == run.file
                        && previous.file_end() == run.file_offset =>
                {
                    previous.len += run.len;
                }
                _ => stitched.push(run),
            }
        }
        if let Some(last) = stitched.last_mut() {
            self.extend_right(data, last, data.len(), stats);
        }
        stitched
    }

    fn extend_right(&self, data: &[u8], run: &mut Run, limit: usize, stats: &mut MatchStats) {
        if run.end().is_multiple_of(self.chunk) && run.end() < limit {
            let content = &self.checkpoint.files()[run.file].data[run.file_end()..];
            let right = common_prefix(&data[run.end()..limit], content);
            stats.compared_bytes += right as u64;
            run.len += right;
        }
    }

    /// Looks behind every run for the tensor that follows in the file: loaders that copy a file's
    /// tensors in order keep them in order, with other padding. This finds tensors too small or too
    /// monotonous for anchors, without which the neighbours could not be joined.
    fn add_neighbours(&self, data: &[u8], runs: Vec<Run>, stats: &mut MatchStats) -> Vec<Run> {
        let mut all = Vec::with_capacity(runs.len());
        let mut coming = runs.into_iter().peekable();
        while let Some(mut run) = coming.next() {
            let limit = coming.peek().map_or(data.len(), |next| next.start);
            loop {
                all.push(run);
                match self.neighbour(data, &run, limit, stats) {
                    Some(next) => run = next,
                    None => break,
                }
            }
        }
        all
    }

    /// The whole next tensor of the file behind `run`, before `limit`.
    fn neighbour(&self, data: &[u8], run: &Run, limit: usize, stats: &mut MatchStats) -> Option<Run> {
        let gap = &data[run.end()..limit];
        let padding = leading_zeros(&gap[..gap.len().min(MAX_PADDING)]);
        if padding == gap.len() || padding == MAX_PADDING {
            return None;
        }
        let first_byte = run.end() + padding;
        let content = &*self.checkpoint.files()[run.file].data;
        // A run may reach into the zero bytes at the beginning of its neighbour.
        let following = self.checkpoint.tensors_from(run.file, run.file_end() as u64);
        for tensor in following.take(MAX_ZERO_TENSORS).map(|position| &self.checkpoint.tensors()[position]) {
            let start = index(tensor.file_offset);
            let end = start + index(tensor.len);
            let zeros = leading_zeros(&content[start..end.min(start + MAX_PADDING)]);
            if zeros == index(tensor.len) {
                continue;
            }
            let offset = start + zeros;
            if zeros == MAX_PADDING || offset < run.file_end() {
                return None;
            }
            let right = common_prefix(&data[first_byte..limit], &content[offset..]);
            let left = common_suffix(&data[run.end()..first_byte], &content[..offset]);
            stats.candidates += 1;
            stats.compared_bytes += (left + right) as u64;
            let whole = offset + right >= end;
            return (whole || right >= self.min_run).then_some(Run {
                start: first_byte - left,
                len: left + right,
                file: run.file,
                file_offset: offset - left,
                whole,
            });
        }
        None
    }
}

/// The last word that led nowhere: its immediate repetitions lead nowhere as well.
#[derive(Default)]
struct Failed {
    position: usize,
    word: u64,
}

impl Failed {
    fn repeats(&mut self, position: usize, word: u64) -> bool {
        let repeats = word == self.word && position == self.position + 8;
        if repeats {
            self.position = position;
        }
        repeats
    }
}
