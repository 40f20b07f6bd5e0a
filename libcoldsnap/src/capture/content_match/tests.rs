//! Content match against a naive oracle, and the properties every result must have.

mod fixture;
mod hostile;
mod property;

use super::*;
use fixture::{Format, checkpoint, noise, place};

const PAGE: u64 = 4096;
const BASE: u64 = 0x7f12_3456_7000;

fn find(checkpoint: &Checkpoint, memory: &[u8]) -> Vec<MatchedRun> {
    let matcher = ContentMatcher::new(checkpoint, MatchOptions::default()).unwrap();
    matcher.find(&[MemoryRegion { address: BASE, data: memory }]).unwrap().runs
}

fn extents(checkpoint: &Checkpoint, memory: &[u8]) -> Vec<ModelExtent> {
    let regions = [MemoryRegion { address: BASE, data: memory }];
    model_extents(&find(checkpoint, memory), checkpoint, &regions, PAGE).unwrap()
}

fn find_in_chunks(
    matcher: &ContentMatcher<'_>,
    chunk: usize,
    regions: &[MemoryRegion<'_>],
    threads: usize,
) -> (Vec<MatchedRun>, MatchStats) {
    let scanner = Scanner { chunk, ..Scanner::new(matcher.checkpoint, matcher.options.min_run) };
    let mut stats = MatchStats::default();
    (matcher.find_with(&scanner, regions, &[], threads, &mut stats).unwrap(), stats)
}

#[test]
fn tensors_in_another_order_become_one_extent() {
    let contents = [noise(1, 20_000), noise(2, 1000), noise(3, 30_000), vec![0, 0, 0x80, 0x3f]];
    let (_dir, checkpoint) = checkpoint(Format::Gguf, &contents);
    // As llama.cpp lays them out: every tensor at a multiple of 64, zeros between them; before and
    // behind them the allocator's bytes.
    let mut memory = noise(9, 16);
    for tensor in [2, 0, 3, 1] {
        place(&mut memory, 64, &contents[tensor]);
    }
    memory.extend(noise(10, 9000));

    let found = extents(&checkpoint, &memory);
    assert_eq!(found.len(), 1);
    let extent = &found[0];
    // The last tensor ends at 64 + 30016 + 20032 + 64 + 1000.
    assert_eq!((extent.address, extent.len), (BASE + PAGE, (51_176 / PAGE - 1) * PAGE));
    let names: Vec<&str> = extent.members.iter().map(|member| member.0.as_str()).collect();
    assert_eq!(names, ["t2", "t0"]);
    assert_eq!(extent.members[1], ("t0".to_owned(), 64 + 30_016 - PAGE, 49_152 - 30_080));
    let piece = &extent.pieces[0];
    assert_eq!(piece.tensor.as_deref(), Some("t2"));
    assert_eq!(piece.file_offset, checkpoint.tensors()[2].file_offset + PAGE - 64);

    let matcher = ContentMatcher::new(&checkpoint, MatchOptions::default()).unwrap();
    let runs = find(&checkpoint, &memory);
    assert_eq!(matcher.matched_bytes(&runs), checkpoint.tensor_bytes());
    assert!((matcher.matched_ratio(&runs) - 1.0).abs() < f64::EPSILON);
}

#[test]
fn a_column_shard_is_one_extent_of_many_pieces() {
    // Two ranks split a matrix of 64 rows by columns: memory holds the second half of every row.
    let matrix = noise(1, 64 * 8192);
    let (_dir, checkpoint) = checkpoint(Format::Safetensors, std::slice::from_ref(&matrix));
    let memory: Vec<u8> = matrix.chunks(8192).flat_map(|row| &row[4096..]).copied().collect();
    let found = extents(&checkpoint, &memory);
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].len, found[0].pieces.len()), (64 * 4096, 64));
    assert_eq!(found[0].members[1], ("t0".to_owned(), 4096, 4096));
    let matcher = ContentMatcher::new(&checkpoint, MatchOptions::default()).unwrap();
    assert!((matcher.matched_ratio(&find(&checkpoint, &memory)) - 0.5).abs() < f64::EPSILON);
}

#[test]
fn pieces_between_samples_are_found_once_any_piece_is() {
    // Every second page of a large tensor: most lie between the samples.
    let tensor = noise(1, 4 << 20);
    let (_dir, checkpoint) = checkpoint(Format::Safetensors, std::slice::from_ref(&tensor));
    let memory: Vec<u8> = tensor.chunks(8192).flat_map(|pages| &pages[..4096]).copied().collect();
    let found = extents(&checkpoint, &memory);
    assert_eq!(
        found.iter().map(|extent| (extent.len, extent.pieces.len())).collect::<Vec<_>>(),
        [(2 << 20, 512)]
    );
    // A process without the model is scanned once.
    let matcher = ContentMatcher::new(&checkpoint, MatchOptions::default()).unwrap();
    let other = noise(2, 1 << 20);
    let stats = matcher.find(&[MemoryRegion { address: BASE, data: &other }]).unwrap().stats;
    assert_eq!(stats.scanned_bytes, 1 << 20);
}

#[test]
fn tied_tensors_count_as_found_together() {
    let shared = noise(1, 9000);
    let (_dir, checkpoint) =
        checkpoint(Format::Safetensors, &[shared.clone(), noise(2, 1000), shared.clone()]);
    let mut memory = Vec::new();
    place(&mut memory, 8, &shared);
    let matcher = ContentMatcher::new(&checkpoint, MatchOptions::default()).unwrap();
    let runs = find(&checkpoint, &memory);
    assert_eq!(matcher.matched_bytes(&runs), 18_000);
    // Twice in memory is not twice found.
    place(&mut memory, 8, &shared);
    assert_eq!(matcher.matched_bytes(&find(&checkpoint, &memory)), 18_000);
}

#[test]
fn monotonous_tensors_are_found_beside_others() {
    // Ones, as in the scales of a fresh model: no hash selects their word on purpose.
    let ones = 1f32.to_le_bytes().repeat(600);
    let many_ones = 1f32.to_le_bytes().repeat(5000);
    let contents = [noise(1, 10_000), ones.clone(), noise(2, 10_000), many_ones.clone(), noise(3, 10_000)];
    let (_dir, checkpoint) = checkpoint(Format::Gguf, &contents);
    let mut memory = Vec::new();
    for content in &contents {
        place(&mut memory, 256, content);
    }
    let found = extents(&checkpoint, &memory);
    assert_eq!(found.len(), 1, "{:?}", find(&checkpoint, &memory));
    assert_eq!(found[0].len, memory.len() as u64 / PAGE * PAGE);
    // Alone, the large one is found by its forced anchor.
    assert_eq!(find(&checkpoint, &many_ones)[0].len, 20_000);
}

#[test]
fn zeros_are_never_matched_alone() {
    let (_dir, checkpoint) = checkpoint(Format::Gguf, &[vec![0; 50_000], noise(1, 5000)]);
    assert_eq!(find(&checkpoint, &vec![0; 100_000]), []);
}

#[test]
fn a_gap_of_a_page_or_of_anything_but_zeros_separates_extents() {
    let contents = [noise(1, 16_384), noise(2, 16_384)];
    let (_dir, checkpoint) = checkpoint(Format::Safetensors, &contents);
    let join = |gap: &[u8]| extents(&checkpoint, &[&contents[1][..], gap, &contents[0]].concat()).len();
    assert_eq!(join(&[]), 1);
    assert_eq!(join(&[0; 4088]), 1);
    assert_eq!(join(&[0; 4096]), 2);
    let mut dirty = [0; 64];
    dirty[63] = 1;
    assert_eq!(join(&dirty), 2);
}

#[test]
fn bytes_outside_tensors_are_not_model_owned() {
    // A server that read the whole file into one buffer: the header is equal as well.
    let contents = [noise(1, 9000), noise(2, 9000)];
    let (_dir, checkpoint) = checkpoint(Format::Gguf, &contents);
    let file = checkpoint.files()[0].data.to_vec();
    let first = checkpoint.tensors()[0].file_offset;
    assert_eq!(first % 8, 0);
    let mut memory = vec![0; 4096];
    memory.extend(&file);
    memory.resize(memory.len().next_multiple_of(4096), 0x55);
    let found = extents(&checkpoint, &memory);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].address, BASE + 8192);
    assert_eq!(found[0].members[0].1, 0);
    assert!(found[0].pieces.iter().all(|piece| piece.tensor.is_some() && piece.file_offset >= first));
}

#[test]
fn members_are_whole_tensors_where_neighbours_begin_with_zeros() {
    // Every tensor begins with zeros, so that a run reaches into what follows it in the file, and the
    // order in memory is another one.
    let zeros_first = |seed, zeros| [vec![0; zeros], noise(seed, 5000)].concat();
    let contents: Vec<Vec<u8>> = (0..6).map(|n| zeros_first(n, 1 + n as usize * 3)).collect();
    for format in [Format::Gguf, Format::Safetensors] {
        let (_dir, checkpoint) = checkpoint(format, &contents);
        let mut memory = Vec::new();
        for tensor in [1, 4, 0, 5, 3, 2] {
            place(&mut memory, 8, &contents[tensor]);
        }
        // Zeros follow, as they follow in the file.
        memory.resize(memory.len() + 9, 0);
        memory.extend(noise(99, 5000));
        let found = extents(&checkpoint, &memory);
        assert_eq!(found.len(), 1);
        let members: Vec<(&str, u64)> =
            found[0].members.iter().map(|(name, _, len)| (&name[..], *len)).collect();
        let len = |tensor: usize| contents[tensor].len() as u64;
        assert_eq!(
            members[..5],
            [("t1", len(1)), ("t4", len(4)), ("t0", len(0)), ("t5", len(5)), ("t3", len(3))]
        );
        assert_eq!((members.len(), members[5].0), (6, "t2"));
    }
}

#[test]
fn a_small_tensor_is_found_where_the_run_before_reaches_into_it() {
    // Behind t0 in the file come two zeros, behind it in memory a scalar that begins with two zeros.
    let contents =
        [noise(1, 8000), [vec![0; 2], noise(2, 8000)].concat(), vec![0, 0, 0x80, 0x3f], noise(3, 8000)];
    let (_dir, checkpoint) = checkpoint(Format::Safetensors, &contents);
    let memory = [&contents[0][..], &contents[2], &[0; 4], &contents[3]].concat();
    let found = extents(&checkpoint, &memory);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].members[1], ("t2".to_owned(), 8000, 4));
}

#[test]
fn zeros_behind_a_tensor_are_not_the_next_one() {
    let contents = [noise(1, 8000), [vec![0; 50], noise(2, 8000)].concat()];
    let (_dir, checkpoint) = checkpoint(Format::Safetensors, &contents);
    let memory = [&contents[0][..], &[0; 192], &noise(3, 5000)].concat();
    let found = extents(&checkpoint, &memory);
    assert_eq!(found[0].members, [("t0".to_owned(), 0, 4096)]);
    // Were the zeros a part of the extent, it would have the second page.
    assert_eq!((found.len(), found[0].len), (1, 4096));
}

#[test]
fn nonzero_padding_is_kept_between_tensors_only() {
    let contents = [noise(1, 8176), noise(2, 8192)];
    let (dir, checkpoint) = checkpoint(Format::Gguf, &contents);
    let mut file = checkpoint.files()[0].data.to_vec();
    let end = to_index(checkpoint.tensors()[0].file_offset) + 8176;
    file[end..end + 16].fill(0x77);
    drop(checkpoint);
    std::fs::write(dir.path().join("model"), &file).unwrap();
    let checkpoint = Checkpoint::open(&dir.path().join("model")).unwrap();

    let one = extents(&checkpoint, &[&contents[0][..], &[0x77; 16]].concat());
    assert_eq!((one.len(), one[0].len), (1, 4096));
    let both = extents(&checkpoint, &[&contents[0][..], &[0x77; 16], &contents[1]].concat());
    assert_eq!((both.len(), both[0].len, both[0].members.len()), (1, 16_384, 2));
    let padding =
        Piece { file_index: 0, tensor: None, file_offset: end as u64, length: 16, extent_offset: 8176 };
    assert_eq!(both[0].pieces[1], padding);
}

#[test]
fn a_run_counts_with_what_its_predecessor_holds() {
    // The zeros behind the first copy are claimed by it; only together with them is the piece of the
    // second copy long enough.
    let contents = [vec![5], noise(1, 841), noise(2, 1000)];
    let (_dir, checkpoint) = checkpoint(Format::Gguf, &contents);
    let mut memory = Vec::new();
    place(&mut memory, 8, &contents[1]);
    place(&mut memory, 32, &contents[1][..41]);
    memory.extend(noise(3, 47));
    let options = MatchOptions { min_run: 64, anchor_interval: 1, threads: 1 };
    let matcher = ContentMatcher::new(&checkpoint, options).unwrap();
    let runs = matcher.find(&[MemoryRegion { address: BASE, data: &memory }]).unwrap().runs;
    assert_eq!((runs.len(), runs[1].len), (2, 41));
}

#[test]
fn runs_reach_back_over_chunks_without_anchors() {
    let content = [vec![0; 8192], noise(1, 20_000)].concat();
    let (_dir, checkpoint) = checkpoint(Format::Safetensors, std::slice::from_ref(&content));
    let matcher = ContentMatcher::new(&checkpoint, MatchOptions::default()).unwrap();
    let runs = find_in_chunks(&matcher, 4096, &[MemoryRegion { address: BASE, data: &content }], 1).0;
    let expected = MatchedRun {
        address: BASE,
        len: 28_192,
        file_index: 0,
        file_offset: checkpoint.tensors()[0].file_offset,
    };
    assert_eq!(runs, [expected]);
}

#[test]
fn a_changed_byte_after_the_scan_is_noticed() {
    let contents = [noise(1, 40_000)];
    let (_dir, checkpoint) = checkpoint(Format::Safetensors, &contents);
    let mut memory = contents[0].clone();
    let runs = find(&checkpoint, &memory);
    memory[20_000] ^= 1;
    let error = model_extents(&runs, &checkpoint, &[MemoryRegion { address: BASE, data: &memory }], PAGE);
    assert!(matches!(error, Err(MatchError::Unequal { address: BASE, .. })), "{error:?}");
}

#[test]
fn impossible_questions_are_refused() {
    let (_dir, checkpoint) = checkpoint(Format::Safetensors, &[noise(1, 5000)]);
    let matcher = ContentMatcher::new(&checkpoint, MatchOptions::default()).unwrap();
    let data = &[0u8; 64][..];
    let at = |address| MemoryRegion { address, data };
    assert!(matches!(matcher.find(&[at(4)]), Err(MatchError::Misaligned { address: 4, .. })));
    assert!(matches!(matcher.find(&[at(u64::MAX - 7)]), Err(MatchError::Misaligned { .. })));
    let overlap = matcher.find(&[at(4096 + 32), at(4096)]);
    assert!(matches!(overlap, Err(MatchError::Overlap { first: 4096, second: 4128 })));
    assert_eq!(matcher.find(&[at(64), at(0)]).unwrap().runs, []);

    let run = MatchedRun { address: 4096, len: 65, file_index: 0, file_offset: 0 };
    let extents = |run, page| model_extents(&[run], &checkpoint, &[at(4096)], page);
    assert!(matches!(extents(run, PAGE), Err(MatchError::RunOutsideRegions { .. })));
    assert!(matches!(
        extents(MatchedRun { address: 0, ..run }, PAGE),
        Err(MatchError::RunOutsideRegions { .. })
    ));
    assert!(matches!(extents(run, 100), Err(MatchError::PageSize { found: 100 })));
}
