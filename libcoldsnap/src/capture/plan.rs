//! What goes where: model-owned ranges to the payload, other large present runs to the residual, short runs
//! stay in CRIU's pages.

use std::ops::Range;

use super::scope::MappingScope;
use crate::criu::proto::VmaEntry;
use crate::criu::runs::{PAGE_SIZE, PageRun, ProcessMemory, is_convertible};

/// Anonymous memory from this size on is mapped in scope `large` (design: mapped-restore).
const LARGE: u64 = 32 << 20;
/// A run shorter than this stays in the pages image: a mapping costs two areas, a page costs 4 KiB.
const MIN_RUN: u64 = 16 * PAGE_SIZE;
/// Areas that a rewritten process may have; the kernel's default limit `vm.max_map_count` is 65530.
const MAX_AREAS: usize = 60_000;

/// Ranges of one process that become mappings, in address order and disjoint.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Ranges that the model payload owns.
    pub model: Vec<Range<u64>>,
    /// Ranges that go to the residual.
    pub residual: Vec<Range<u64>>,
}

/// Plans one process. `model` are page-aligned ranges that content match found, in address order.
///
/// Model ranges that are not wholly in convertible memory with bytes are dropped (a range in a stack or in a
/// file mapping cannot be mapped); they stay with CRIU.
pub fn plan(memory: &ProcessMemory, model: &[Range<u64>], scope: MappingScope) -> Plan {
    let present = contiguous(&memory.runs, |run| run.vma.is_some_and(|i| is_convertible(&memory.vmas[i])));
    let model: Vec<Range<u64>> = model
        .iter()
        .filter(|m| m.start < m.end && present.iter().any(|p| p.start <= m.start && m.end <= p.end))
        .cloned()
        .collect();
    let residual = match scope {
        MappingScope::Model => Vec::new(),
        MappingScope::Large => candidates(memory, &model, LARGE),
        MappingScope::All => candidates(memory, &model, 0),
    };
    let mut min_run = MIN_RUN;
    loop {
        let long: Vec<_> = residual.iter().filter(|r| r.end - r.start >= min_run).cloned().collect();
        if memory.vmas.len() + 2 * (long.len() + model.len()) <= MAX_AREAS || long.is_empty() {
            return Plan { model, residual: long };
        }
        min_run *= 2;
    }
}

fn candidates(memory: &ProcessMemory, model: &[Range<u64>], at_least: u64) -> Vec<Range<u64>> {
    let large = large_areas(&memory.vmas, at_least);
    let present = contiguous(&memory.runs, |run| run.vma.is_some_and(|i| large[i]));
    present.into_iter().flat_map(|range| subtract(range, model)).collect()
}

/// For each area whether it is convertible and belongs to a stretch of adjacent equal memory of at least
/// `at_least` bytes. The stretch counts, not the area: a restore splits an area at every mapping, and the kernel
/// merges what lies side by side.
fn large_areas(vmas: &[VmaEntry], at_least: u64) -> Vec<bool> {
    let mut large = vec![false; vmas.len()];
    let mut first = 0;
    for index in 0..vmas.len() {
        let last_of_stretch = vmas.get(index + 1).is_none_or(|next| {
            let vma = &vmas[index];
            next.start() != vma.end()
                || next.prot() != vma.prot()
                || is_convertible(next) != is_convertible(vma)
        });
        if last_of_stretch {
            let size = vmas[index].end().saturating_sub(vmas[first].start());
            if is_convertible(&vmas[index]) && size >= at_least {
                large[first..=index].fill(true);
            }
            first = index + 1;
        }
    }
    large
}

/// Address ranges covered by runs without a gap.
fn contiguous(runs: &[PageRun], keep: impl Fn(&PageRun) -> bool) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for run in runs.iter().filter(|run| keep(run)) {
        match ranges.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => ranges.push(run.start..run.end),
        }
    }
    ranges
}

fn subtract(range: Range<u64>, holes: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut left = Vec::new();
    let mut at = range.start;
    let first = holes.partition_point(|h| h.end <= range.start);
    for hole in holes[first..].iter().take_while(|h| h.start < range.end) {
        if at < hole.start {
            left.push(at..hole.start);
        }
        at = at.max(hole.end);
    }
    if at < range.end {
        left.push(at..range.end);
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::criu::runs::Source;
    use crate::criu::vma_status;

    const M: u64 = 1 << 20;

    fn one(range: Range<u64>) -> Vec<Range<u64>> {
        std::iter::once(range).collect()
    }

    fn area(start: u64, end: u64, status: u32) -> VmaEntry {
        let mut vma = VmaEntry::new();
        vma.set_start(start);
        vma.set_end(end);
        vma.set_prot(3);
        vma.set_status(status);
        vma
    }

    fn run(start: u64, end: u64, vma: usize) -> PageRun {
        PageRun { start, end, source: Source::Pages(0), flags: 4, vma: Some(vma) }
    }

    #[test]
    fn model_first_then_long_runs_of_large_areas() {
        let anon = vma_status::ANON_PRIVATE;
        let memory = ProcessMemory {
            vmas: vec![area(M, 65 * M, anon), area(100 * M, 101 * M, anon), area(200 * M, 264 * M, anon | 2)],
            runs: vec![
                run(M, 9 * M, 0),
                run(10 * M, 10 * M + PAGE_SIZE, 0),
                run(100 * M, 101 * M, 1),
                run(200 * M, 201 * M, 2),
            ],
        };
        let model = [2 * M..4 * M, 8 * M..12 * M, 200 * M..201 * M];
        let large = plan(&memory, &model, MappingScope::Large);
        // The second range is not wholly present, the third lies in a stack.
        assert_eq!(large.model, one(2 * M..4 * M));
        assert_eq!(large.residual, [M..2 * M, 4 * M..9 * M]);
        let all = plan(&memory, &model, MappingScope::All);
        assert_eq!(all.residual, [M..2 * M, 4 * M..9 * M, 100 * M..101 * M]);
        assert!(plan(&memory, &model, MappingScope::Model).residual.is_empty());
    }

    #[test]
    fn pieces_of_a_restored_area_count_together() {
        let anon = vma_status::ANON_PRIVATE;
        let memory = ProcessMemory {
            vmas: vec![area(0x1000, 20 * M, anon), area(20 * M, 40 * M, anon)],
            runs: vec![run(19 * M, 20 * M, 0), run(20 * M, 21 * M, 1)],
        };
        assert_eq!(plan(&memory, &[], MappingScope::Large).residual, one(19 * M..21 * M));
    }
}
