//! From matched runs to model extents: whole pages that hold bytes of the checkpoint and zero padding,
//! and nothing else.

use super::super::checkpoint::{Checkpoint, to_index};
use super::equal::is_zero;
use super::{MatchError, MatchedRun, MemoryRegion, check_regions};

/// Whole pages of memory that a checkpoint can rebuild: tensors and the zero padding between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelExtent {
    /// Address of the first byte, a multiple of the page size.
    pub address: u64,
    /// Bytes, a multiple of the page size.
    pub len: u64,
    /// Where the bytes come from, in address order, disjoint. Bytes between pieces are zero.
    pub pieces: Vec<Piece>,
    /// The tensors or parts of tensors, as (name, offset in this extent, bytes), in address order: the
    /// input of the extent's `semantic_id`.
    pub members: Vec<(String, u64, u64)>,
}

/// A part of an extent that is equal to a part of a checkpoint file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index into [`Checkpoint::files`].
    pub file_index: usize,
    /// The tensor that owns the bytes; none for nonzero padding between two tensors of the file.
    pub tensor: Option<String>,
    /// First byte in the file.
    pub file_offset: u64,
    /// Bytes, at least one.
    pub length: u64,
    /// First byte in the extent.
    pub extent_offset: u64,
}

/// A piece before it belongs to an extent.
#[derive(Clone, Copy, Debug)]
struct Span {
    region: usize,
    /// First byte in the region.
    start: usize,
    len: usize,
    file_index: usize,
    file_offset: u64,
    tensor: Option<usize>,
}

impl Span {
    fn end(&self) -> usize {
        self.start + self.len
    }
}

/// Joins runs to extents and cuts these to whole pages of `page_size` bytes.
///
/// Runs that touch are joined, as are runs with less than a page of zero bytes between them: loaders
/// align tensors, and the padding is part of every page that holds the end of one tensor and the
/// beginning of the next. Bytes outside tensors are never at the border of an extent. An extent lies
/// in one region: give regions split where extents must end (VMA borders) and contiguous elsewhere.
///
/// The last step proves the result: every byte of every extent is compared with its piece, or with zero.
///
/// # Errors
/// For runs outside `regions`, for regions or a page size that are not sound, and
/// [`MatchError::Unequal`] when memory or checkpoint are not what the runs were found in.
pub fn model_extents(
    runs: &[MatchedRun],
    checkpoint: &Checkpoint,
    regions: &[MemoryRegion<'_>],
    page_size: u64,
) -> Result<Vec<ModelExtent>, MatchError> {
    if !page_size.is_power_of_two() {
        return Err(MatchError::PageSize { found: page_size });
    }
    let regions = check_regions(regions)?;
    let mut spans = Vec::new();
    for run in runs {
        add_spans(run, checkpoint, &regions, page_size, &mut spans)?;
    }
    spans.sort_by_key(|span| (span.region, span.start));

    let mut extents = Vec::new();
    let mut rest = &spans[..];
    while !rest.is_empty() {
        let joined =
            1 + rest.windows(2).take_while(|pair| joins(&pair[0], &pair[1], &regions, page_size)).count();
        let (group, after) = rest.split_at(joined);
        extents.extend(cut(group, checkpoint, &regions, page_size));
        rest = after;
    }
    for extent in &extents {
        prove(extent, checkpoint, &regions)?;
    }
    Ok(extents)
}

/// Splits a run at the tensors' borders. Padding between tensors becomes a span of its own unless it
/// is zero; what the run holds before its first and after its last tensor is dropped.
fn add_spans(
    run: &MatchedRun,
    checkpoint: &Checkpoint,
    regions: &[MemoryRegion<'_>],
    page_size: u64,
    spans: &mut Vec<Span>,
) -> Result<(), MatchError> {
    let outside = || MatchError::RunOutsideRegions { address: run.address, len: run.len };
    let region =
        regions.partition_point(|region| region.address <= run.address).checked_sub(1).ok_or_else(outside)?;
    let start = run.address - regions[region].address;
    let data = regions[region].data;
    if start.checked_add(run.len).is_none_or(|end| end > data.len() as u64) {
        return Err(outside());
    }
    let file_end = run.file_offset.checked_add(run.len).ok_or_else(outside)?;
    let span = |from: u64, to: u64, tensor| Span {
        region,
        start: to_index(start + (from - run.file_offset)),
        len: to_index(to - from),
        file_index: run.file_index,
        file_offset: from,
        tensor,
    };

    // Where the last span of this run ended; padding is kept only between two tensors.
    let mut previous_end = None;
    for position in checkpoint.tensors_from(run.file_index, run.file_offset) {
        let tensor = &checkpoint.tensors()[position];
        let from = tensor.file_offset.max(run.file_offset);
        let to = (tensor.file_offset + tensor.len).min(file_end);
        if from >= to {
            break;
        }
        // A run that reaches beyond its last tensor's padding claims the next one's first zero bytes by
        // accident: as padding they are zero anyway, as a member they would be noise.
        let part = span(from, to, Some(position));
        if to - from < tensor.len.min(page_size) && is_zero(&data[part.start..part.end()]) {
            previous_end = None;
            continue;
        }
        if let Some(end) = previous_end.filter(|&end| from > end && from - end < page_size) {
            let padding = span(end, from, None);
            if !is_zero(&data[padding.start..padding.end()]) {
                spans.push(padding);
            }
        }
        spans.push(part);
        previous_end = Some(to);
    }
    Ok(())
}

fn joins(left: &Span, right: &Span, regions: &[MemoryRegion<'_>], page_size: u64) -> bool {
    left.region == right.region
        && left.end() <= right.start
        && ((right.start - left.end()) as u64) < page_size
        && is_zero(&regions[left.region].data[left.end()..right.start])
}

/// The whole pages of a group of joined spans; none when there is no whole page.
fn cut(
    group: &[Span],
    checkpoint: &Checkpoint,
    regions: &[MemoryRegion<'_>],
    page_size: u64,
) -> Option<ModelExtent> {
    let (first, last) = (group.first()?, group.last()?);
    let base = regions[first.region].address;
    let address = (base + first.start as u64).checked_next_multiple_of(page_size)?;
    let end = (base + last.end() as u64) / page_size * page_size;
    if address >= end {
        return None;
    }
    let mut extent = ModelExtent { address, len: end - address, pieces: Vec::new(), members: Vec::new() };
    for span in group {
        let span_address = base + span.start as u64;
        let (from, to) = (span_address.max(address), (span_address + span.len as u64).min(end));
        if from >= to {
            continue;
        }
        let tensor = span.tensor.map(|position| checkpoint.tensors()[position].name.clone());
        let (extent_offset, length) = (from - address, to - from);
        if let Some(name) = &tensor {
            extent.members.push((name.clone(), extent_offset, length));
        }
        let file_offset = span.file_offset + (from - span_address);
        extent.pieces.push(Piece { file_index: span.file_index, tensor, file_offset, length, extent_offset });
    }
    Some(extent)
}

/// Compares every byte of an extent with what it is said to be.
fn prove(
    extent: &ModelExtent,
    checkpoint: &Checkpoint,
    regions: &[MemoryRegion<'_>],
) -> Result<(), MatchError> {
    let region = regions.partition_point(|region| region.address <= extent.address).saturating_sub(1);
    let start = to_index(extent.address - regions[region].address);
    let memory = &regions[region].data[start..start + to_index(extent.len)];
    let unequal = |offset: usize, source: &str| MatchError::Unequal {
        address: extent.address + offset as u64,
        source_name: source.to_owned(),
    };
    let mut done = 0;
    for piece in &extent.pieces {
        let (at, len) = (to_index(piece.extent_offset), to_index(piece.length));
        if !is_zero(&memory[done..at]) {
            return Err(unequal(done, "zero padding"));
        }
        let file = &checkpoint.files()[piece.file_index];
        let from = to_index(piece.file_offset);
        if memory[at..at + len] != file.data[from..from + len] {
            return Err(unequal(at, &file.name));
        }
        done = at + len;
    }
    if !is_zero(&memory[done..]) {
        return Err(unequal(done, "zero padding"));
    }
    Ok(())
}
