//! Random checkpoints and memory, against an oracle that compares everything with everything.

use std::collections::HashMap;

use proptest::prelude::*;

use super::fixture::{Format, checkpoint, noise};
use super::*;

const MIN_RUN: usize = 64;

/// What is put into memory, each at a multiple of eight.
#[derive(Clone, Debug)]
enum Part {
    /// A slice of a tensor: which one, first word and bytes as parts of 1000.
    Tensor(usize, usize, usize),
    Noise(usize),
    Zeros(usize),
}

#[derive(Clone, Debug)]
struct Case {
    format: Format,
    contents: Vec<Vec<u8>>,
    memory: Vec<u8>,
}

fn part() -> impl Strategy<Value = Part> {
    let slice = prop_oneof![
        4 => Just((0, 1000)),
        1 => (0..800usize, 100..1000usize),
    ];
    prop_oneof![
        6 => (any::<usize>(), slice).prop_map(|(tensor, (first, len))| Part::Tensor(tensor, first, len)),
        1 => (0..600usize).prop_map(Part::Noise),
        2 => (0..6000usize).prop_map(Part::Zeros),
    ]
}

/// Tensors: varied content by its length, or a few bytes repeated, zeros among them.
fn content(monotonous: bool) -> BoxedStrategy<Result<usize, Vec<u8>>> {
    let varied = (1..2500usize).prop_map(Ok);
    if !monotonous {
        return varied.boxed();
    }
    let repeated =
        (proptest::collection::vec(0..3u8, 1..20), 1..400usize).prop_map(|(unit, n)| Err(unit.repeat(n)));
    prop_oneof![2 => varied, 1 => repeated].boxed()
}

prop_compose! {
    fn case(monotonous: bool)(
        format in prop_oneof![Just(Format::Safetensors), Just(Format::Gguf)],
        contents in proptest::collection::vec(content(monotonous), 1..6),
        parts in proptest::collection::vec((part(), 0..3usize), 1..12),
        damage in proptest::collection::vec((any::<usize>(), 1..40usize, any::<u64>()), 0..4),
    ) -> Case {
        // Varied tensors differ from their first word on: with common beginnings several runs are right.
        let contents: Vec<Vec<u8>> = (contents.into_iter().enumerate())
            .map(|(seed, content)| content.map_or_else(|repeated| repeated, |len| noise(seed as u64, len)))
            .collect();
        let mut memory = Vec::new();
        for (position, (part, words)) in parts.into_iter().enumerate() {
            let seed = position as u64 + 1000;
            match part {
                Part::Tensor(tensor, first, len) => {
                    let content = &contents[tensor % contents.len()];
                    let from = content.len() * first / 1000 / 8 * 8;
                    memory.extend(&content[from..(from + content.len() * len / 1000).min(content.len())]);
                }
                Part::Noise(len) => memory.extend(noise(seed, len)),
                Part::Zeros(len) => memory.resize(memory.len() + len, 0),
            }
            memory.resize(memory.len().next_multiple_of(8) + words * 8, 0);
        }
        for (at, len, seed) in damage {
            let at = at % memory.len().max(1);
            let end = (at + len).min(memory.len());
            memory[at..end].copy_from_slice(&noise(seed, end - at));
        }
        Case { format, contents, memory }
    }
}

/// For every byte of memory, and for every byte of the file, whether it lies in an equal run of at least
/// `min_run` bytes that holds an aligned nonzero word of a tensor. Compares every word of memory with
/// every word of every tensor.
fn oracle(checkpoint: &Checkpoint, memory: &[u8], min_run: usize) -> (Vec<bool>, Vec<bool>) {
    let file = &*checkpoint.files()[0].data;
    let mut covered = (vec![false; memory.len()], vec![false; file.len()]);
    // Where the last run on a diagonal ended: inside a run nothing new begins.
    let mut ends: HashMap<usize, usize> = HashMap::new();
    let starts: Vec<usize> = (checkpoint.tensors().iter())
        .flat_map(|tensor| {
            let start = tensor.file_offset as usize;
            (0..tensor.len as usize / 8).map(move |word| start + word * 8)
        })
        .collect();
    for at in (0..memory.len() / 8 * 8).step_by(8) {
        let word = &memory[at..at + 8];
        if word == [0; 8] {
            continue;
        }
        for &offset in starts.iter().filter(|&&offset| &file[offset..offset + 8] == word) {
            let diagonal = file.len() + at - offset;
            if ends.get(&diagonal).is_some_and(|&end| at < end) {
                continue;
            }
            let mut from = 0;
            while from < at.min(offset) && memory[at - from - 1] == file[offset - from - 1] {
                from += 1;
            }
            let mut to = 8;
            while at + to < memory.len() && offset + to < file.len() && memory[at + to] == file[offset + to] {
                to += 1;
            }
            ends.insert(diagonal, at + to);
            if from + to >= min_run {
                covered.0[at - from..at + to].fill(true);
                covered.1[offset - from..offset + to].fill(true);
            }
        }
    }
    covered
}

/// As the oracle's answer, for what was found.
fn coverage(checkpoint: &Checkpoint, memory: &[u8], runs: &[MatchedRun]) -> (Vec<bool>, Vec<bool>) {
    let mut covered = (vec![false; memory.len()], vec![false; checkpoint.files()[0].data.len()]);
    for run in runs {
        let (start, offset, len) =
            ((run.address - BASE) as usize, run.file_offset as usize, run.len as usize);
        covered.0[start..start + len].fill(true);
        covered.1[offset..offset + len].fill(true);
    }
    covered
}

/// What must hold for any result.
fn check_runs(checkpoint: &Checkpoint, memory: &[u8], runs: &[MatchedRun]) -> Result<(), TestCaseError> {
    for pair in runs.windows(2) {
        prop_assert!(pair[0].address + pair[0].len <= pair[1].address);
    }
    for run in runs {
        prop_assert!(run.len > 0);
        let start = (run.address - BASE) as usize;
        let offset = run.file_offset as usize;
        let len = run.len as usize;
        let file = &checkpoint.files()[run.file_index].data;
        prop_assert_eq!(&memory[start..start + len], &file[offset..offset + len]);
    }
    Ok(())
}

/// What must hold for any extents: whole pages, and every byte is where its piece says, or zero.
fn check_extents(
    checkpoint: &Checkpoint,
    memory: &[u8],
    extents: &[ModelExtent],
    page: u64,
) -> Result<(), TestCaseError> {
    for pair in extents.windows(2) {
        prop_assert!(pair[0].address + pair[0].len <= pair[1].address);
    }
    for extent in extents {
        prop_assert!(extent.len > 0 && extent.len % page == 0 && extent.address % page == 0);
        let start = (extent.address - BASE) as usize;
        let mut rebuilt = vec![0; extent.len as usize];
        let mut end = 0;
        let mut members = Vec::new();
        for piece in &extent.pieces {
            prop_assert!(piece.extent_offset >= end && piece.length > 0);
            prop_assert!(piece.extent_offset - end < page);
            end = piece.extent_offset + piece.length;
            let file = &checkpoint.files()[piece.file_index].data;
            let from = piece.file_offset as usize;
            rebuilt[piece.extent_offset as usize..end as usize]
                .copy_from_slice(&file[from..from + piece.length as usize]);
            if let Some(name) = &piece.tensor {
                let tensor = checkpoint.tensors().iter().find(|tensor| tensor.name == *name).unwrap();
                prop_assert!(piece.file_offset >= tensor.file_offset);
                prop_assert!(piece.file_offset + piece.length <= tensor.file_offset + tensor.len);
                members.push((name.clone(), piece.extent_offset, piece.length));
            }
        }
        prop_assert!(extent.len - end < page);
        prop_assert_eq!(&members, &extent.members);
        prop_assert_eq!(&rebuilt, &memory[start..start + extent.len as usize]);
    }
    Ok(())
}

fn matcher(checkpoint: &Checkpoint, anchor_interval: u32, sampling: Sampling) -> ContentMatcher<'_> {
    let options = MatchOptions { min_run: MIN_RUN, threads: 1, anchor_interval };
    ContentMatcher::with_sampling(checkpoint, options, sampling).unwrap()
}

/// Samples so small that most tensors need the second scan.
const SAMPLES: Sampling = Sampling { head: 64, window: 32, stride: 512 };

fn sampling() -> impl Strategy<Value = Sampling> {
    prop_oneof![Just(SAMPLES), Just(Sampling::SPARSE)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// With every word an anchor, varied content is found wherever the oracle finds it.
    #[test]
    fn finds_what_the_oracle_finds(case in case(false), sampling in sampling()) {
        let (_dir, checkpoint) = checkpoint(case.format, &case.contents);
        let region = [MemoryRegion { address: BASE, data: &case.memory }];
        let matcher = matcher(&checkpoint, 1, sampling);
        let runs = matcher.find(&region).unwrap().runs;
        check_runs(&checkpoint, &case.memory, &runs)?;
        // Which zeros belong to a run depends on which of several tensors it was taken for.
        let missing = |found: &[bool], expected: &[bool], bytes: &[u8]| {
            (0..bytes.len()).filter(|&at| expected[at] && !found[at] && bytes[at] != 0).collect::<Vec<_>>()
        };
        let file = &checkpoint.files()[0].data;
        let found = coverage(&checkpoint, &case.memory, &runs);
        if sampling == SAMPLES {
            // The second scan needs a reason, something that the samples find, and looks for what is
            // not yet found; in memory the same piece may lie a second time. A small tensor takes back the
            // few bytes by which a run reached into it by accident.
            prop_assume!(!runs.is_empty());
            let lost = missing(&found.1, &oracle(&checkpoint, &case.memory, 2 * MIN_RUN).1, file);
            prop_assert!(lost.len() < 8, "{lost:?} in {runs:?}");
            return Ok(());
        }
        let expected = oracle(&checkpoint, &case.memory, MIN_RUN);
        let lost = missing(&found.0, &expected.0, &case.memory);
        prop_assert!(lost.is_empty(), "{lost:?} in {runs:?}");

        // In small chunks as well, but for what a border cuts into pieces that are too short.
        let expected = oracle(&checkpoint, &case.memory, 2 * MIN_RUN);
        for chunk in [512, 4096] {
            let runs = find_in_chunks(&matcher, chunk, &region, 1).0;
            let found = coverage(&checkpoint, &case.memory, &runs);
            let lost = missing(&found.0, &expected.0, &case.memory);
            prop_assert!(lost.is_empty(), "{lost:?} in {runs:?}, chunks of {chunk}");
        }
    }

    /// Whatever the content, nothing unequal is ever claimed, and pages, pieces and members agree.
    #[test]
    fn claims_nothing_that_is_not_equal(
        case in case(true),
        interval in prop_oneof![Just(1u32), Just(4), Just(32)],
        sampling in sampling(),
    ) {
        let (_dir, checkpoint) = checkpoint(case.format, &case.contents);
        let matcher = matcher(&checkpoint, interval, sampling);
        let region = [MemoryRegion { address: BASE, data: &case.memory }];
        let runs = matcher.find(&region).unwrap().runs;
        check_runs(&checkpoint, &case.memory, &runs)?;
        prop_assert!(matcher.matched_bytes(&runs) <= checkpoint.tensor_bytes());
        for page in [64, 512, 4096] {
            let extents = model_extents(&runs, &checkpoint, &region, page).unwrap();
            check_extents(&checkpoint, &case.memory, &extents, page)?;
        }
    }

    /// Neither the address nor the number of threads changes the result, nor other regions beside it.
    #[test]
    fn depends_on_content_only(case in case(true), pages in 0..1000u64) {
        let (_dir, checkpoint) = checkpoint(case.format, &case.contents);
        let page = 512;
        let matcher = matcher(&checkpoint, 4, SAMPLES);
        let region = [MemoryRegion { address: BASE, data: &case.memory }];
        let alone = find_in_chunks(&matcher, 1024, &region, 1);
        prop_assert_eq!(find_in_chunks(&matcher, 1024, &region, 3), alone);

        let moved = BASE + (1 << 30) + pages * page;
        let both = [
            MemoryRegion { address: moved, data: &case.memory[..] },
            MemoryRegion { address: BASE, data: &case.memory[..] },
        ];
        let runs = matcher.find(&both).unwrap().runs;
        let extents = model_extents(&runs, &checkpoint, &both, page).unwrap();
        let (low, mut high) = extents.split_at(extents.len() / 2);
        prop_assert_eq!(low.len(), high.len());
        for extent in low {
            let mut expected = extent.clone();
            expected.address += moved - BASE;
            prop_assert_eq!(&expected, &high[0]);
            high = &high[1..];
        }
    }
}
