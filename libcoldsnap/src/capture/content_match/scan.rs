//! The scan of memory: anchors found, verified and extended to runs.
//!
//! A region is cut into chunks of fixed size that are scanned independently, by any number of
//! threads, and stitched in order: the result does not depend on the number of threads. The work is
//! linear in the memory: a candidate that fails costs less than the minimum run, one that succeeds
//! is skipped over.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::checkpoint::{Checkpoint, to_index};
use super::anchors::{AnchorIndex, BATCH, hash};
use super::equal::{common_prefix, common_suffix};
use super::small::{MAX_SMALL, SmallTensors};
use super::{MatchStats, MemoryRegion};

/// Memory that is scanned in one go.
const CHUNK: usize = 32 << 20;
/// Bytes of small tensors that are compared for each byte between runs, at most.
const SMALL_EFFORT: usize = 16;
/// How far from a run small tensors are looked for: there may be several, with their padding.
const NEAR: usize = 2 * MAX_SMALL;

/// A run inside one region: `start` is an offset in the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub start: usize,
    pub len: usize,
    pub file: usize,
    pub file_offset: usize,
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
    pub min_run: usize,
    pub chunk: usize,
}

impl<'a> Scanner<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint, min_run: usize) -> Self {
        Self { checkpoint, min_run, chunk: CHUNK }
    }

    /// Adds to `found`, the sorted runs of each region, those that the anchors lead to in the rest of
    /// memory.
    pub(super) fn scan(
        &self,
        regions: &[MemoryRegion<'_>],
        index: &AnchorIndex,
        mut found: Vec<Vec<Run>>,
        threads: usize,
        stats: &mut MatchStats,
    ) -> Vec<Vec<Run>> {
        let mut chunks = Vec::new();
        for (region, (memory, runs)) in regions.iter().zip(&found).enumerate() {
            self.add_chunks(region, memory.data.len(), runs, &mut chunks);
        }
        let next = AtomicUsize::new(0);
        let work = || {
            let mut stats = MatchStats::default();
            let mut done = Vec::new();
            loop {
                let position = next.fetch_add(1, Ordering::Relaxed);
                let Some((region, chunk)) = chunks.get(position) else {
                    return (done, stats);
                };
                done.push((position, self.scan_chunk(regions[*region].data, chunk, index, &mut stats)));
            }
        };
        let mut done = Vec::with_capacity(chunks.len());
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads.min(chunks.len())).map(|_| scope.spawn(work)).collect();
            let mut results = vec![work()];
            for other in others {
                results.push(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            }
            for (runs, part) in results {
                done.extend(runs);
                stats.add(&part);
            }
        });
        done.sort_by_key(|(position, _)| *position);

        for (position, runs) in done {
            found[chunks[position].0].extend(runs);
        }
        for (runs, memory) in found.iter_mut().zip(regions) {
            runs.sort_by_key(|run| run.start);
            *runs = self.stitch(memory.data, std::mem::take(runs), stats);
        }
        found
    }

    /// Adds the memory between the runs of a region, cut at multiples of the chunk size.
    fn add_chunks(&self, region: usize, len: usize, runs: &[Run], chunks: &mut Vec<(usize, Range<usize>)>) {
        let mut start = 0;
        for (end, after) in runs.iter().map(|run| (run.start, run.end())).chain([(len, len)]) {
            while start < end {
                let cut = end.min((start + 1).next_multiple_of(self.chunk));
                chunks.push((region, start..cut));
                start = cut;
            }
            start = after;
        }
    }

    /// Adds the small tensors, and gives every run the borders of its tensors.
    pub(super) fn finish(
        &self,
        data: &[u8],
        runs: &mut Vec<Run>,
        small: &SmallTensors,
        stats: &mut MatchStats,
    ) {
        *runs = self.fill_gaps(data, std::mem::take(runs), small, stats);
        self.settle_borders(data, runs);
    }

    /// The runs of `data[chunk]`, not extended beyond it.
    fn scan_chunk(
        &self,
        data: &[u8],
        chunk: &Range<usize>,
        anchors: &AnchorIndex,
        stats: &mut MatchStats,
    ) -> Vec<Run> {
        let mut runs = Vec::new();
        let mut progress = Progress { claimed: chunk.start, failed: None };
        let mut at = chunk.start.next_multiple_of(8);
        stats.scanned_bytes += chunk.len() as u64;
        'batches: while at + 8 <= chunk.end {
            let words = data[at..chunk.end].as_chunks().0;
            for position in anchors.candidates(words).iter() {
                let position = at + position * 8;
                if let Some(run) = self.probe(data, chunk, anchors, position, &mut progress, stats) {
                    at = run.end().next_multiple_of(8);
                    runs.push(run);
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
        anchors: &AnchorIndex,
        position: usize,
        progress: &mut Progress,
        stats: &mut MatchStats,
    ) -> Option<Run> {
        let word = u64::from_le_bytes(*data[position..].first_chunk()?);
        if word == 0 || progress.has_failed(position, word) {
            return None;
        }
        stats.probed_words += 1;
        // Looking back into claimed memory tells whether the run is long enough, no more.
        let low = progress.claimed.saturating_sub(self.min_run).max(chunk.start);
        let mut best: Option<Run> = None;
        let mut tried = false;
        for (file, offset) in anchors.places(hash(word)) {
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
                best = Some(Run { start, len: left + right, file, file_offset });
            }
        }
        let accepted = best.filter(|run| run.len >= self.min_run).map(|run| run.from(progress.claimed));
        match accepted {
            Some(run) => progress.claimed = run.end(),
            None if tried => progress.failed = Some((position, word)),
            None => {}
        }
        accepted
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

    /// Adds the small tensors near runs that the scan cannot see. Without them the runs around them
    /// could not be joined.
    fn fill_gaps(
        &self,
        data: &[u8],
        runs: Vec<Run>,
        small: &SmallTensors,
        stats: &mut MatchStats,
    ) -> Vec<Run> {
        let mut all = Vec::with_capacity(runs.len());
        let mut gap_start = 0;
        for run in runs.iter().copied().map(Some).chain([None]) {
            let gap_end = run.map_or(data.len(), |run| run.start);
            let after = if gap_start == 0 { 0 } else { NEAR };
            let before = if run.is_none() { 0 } else { NEAR };
            if gap_end - gap_start <= after + before {
                self.add_small(data, gap_start..gap_end, small, &mut all, stats);
            } else {
                self.add_small(data, gap_start..gap_start + after, small, &mut all, stats);
                self.add_small(data, gap_end - before..gap_end, small, &mut all, stats);
            }
            if let Some(run) = run {
                gap_start = run.end();
                all.push(run);
            }
        }
        all
    }

    /// Adds the small tensors in `gap`.
    fn add_small(
        &self,
        data: &[u8],
        gap: Range<usize>,
        small: &SmallTensors,
        runs: &mut Vec<Run>,
        stats: &mut MatchStats,
    ) {
        let mut effort = gap.len() * SMALL_EFFORT;
        // The run before may reach into the word at which the tensor begins.
        let mut at = gap.start / 8 * 8;
        while let Some(word) = data[at.min(gap.end)..gap.end].first_chunk() {
            let mut found = None;
            for &(position, offset) in small.beginning_with(u64::from_le_bytes(*word)) {
                let tensor = &self.checkpoint.tensors()[position];
                let content = self.checkpoint.tensor_data(tensor);
                let Some(start) = at.checked_sub(offset) else { continue };
                let equal = common_prefix(&data[start..gap.end], content);
                stats.candidates += 1;
                stats.compared_bytes += equal as u64;
                if equal == content.len() && start + equal > gap.start {
                    let (file, file_offset) = (tensor.file_index, to_index(tensor.file_offset));
                    found = Some(Run { start, len: equal, file, file_offset }.from(gap.start));
                    break;
                }
                effort = effort.saturating_sub(equal + 8);
                if effort == 0 {
                    return;
                }
            }
            at = found.map_or(at + 8, |run| run.end().next_multiple_of(8));
            runs.extend(found);
        }
    }

    /// Moves the border between touching runs to where a tensor begins. The first run may reach into the
    /// second one's tensor, when what follows in the file happens to begin with the same bytes, zeros
    /// mostly.
    fn settle_borders(&self, data: &[u8], runs: &mut [Run]) {
        for position in 1..runs.len() {
            let (left, right) = (runs[position - 1], runs[position]);
            if left.end() != right.start {
                continue;
            }
            let tensor_at = |run: &Run, offset: usize| {
                let position = self.checkpoint.tensors_from(run.file, offset as u64).next()?;
                let tensor = &self.checkpoint.tensors()[position];
                let start = to_index(tensor.file_offset);
                (start <= offset).then(|| start..start + to_index(tensor.len))
            };
            let Some(beginning) = tensor_at(&right, right.file_offset) else { continue };
            let back = right.file_offset - beginning.start;
            if back == 0 || back > self.min_run || back >= left.len {
                continue;
            }
            let content = &self.checkpoint.files()[right.file].data[beginning.start..right.file_offset];
            if data[right.start - back..right.start] == *content {
                runs[position - 1].len -= back;
                runs[position].start -= back;
                runs[position].file_offset -= back;
                runs[position].len += back;
            }
        }
    }
}

/// How far the scan of a chunk is.
struct Progress {
    /// End of the last run.
    claimed: usize,
    /// Position of the last word that led nowhere, and the word: its immediate repetitions lead nowhere
    /// as well.
    failed: Option<(usize, u64)>,
}

impl Progress {
    fn has_failed(&mut self, position: usize, word: u64) -> bool {
        let repeated = self.failed.is_some_and(|(before, failed)| word == failed && position == before + 8);
        if repeated {
            self.failed = Some((position, word));
        }
        repeated
    }
}
