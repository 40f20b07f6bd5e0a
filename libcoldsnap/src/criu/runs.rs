//! The memory of one process as runs: which addresses have bytes, and where those bytes are.
//!
//! A pagemap entry may span several adjacent memory areas. Runs never do: they are split at the areas'
//! borders first, because a rewrite that forgets this loses pages.

use std::collections::BTreeMap;

use super::image::ImageError;
use super::pagemap_flags::{PARENT, PRESENT};
use super::process::ProcessImages;
use super::proto::{PagemapEntry, VmaEntry};
use super::{map_flags, vma_status};

/// Page size of the supported architectures' CRIU images.
pub const PAGE_SIZE: u64 = 4096;

/// Where the bytes of a run are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// In the process's pages image, from this byte on.
    Pages(u64),
    /// In a residual of an earlier capture that the process still maps: file id and byte offset.
    Residual {
        /// Id of the file entry.
        file: u32,
        /// Offset of the first byte.
        offset: u64,
    },
}

impl Source {
    fn advanced(self, bytes: u64) -> Self {
        match self {
            Self::Pages(offset) => Self::Pages(offset + bytes),
            Self::Residual { file, offset } => Self::Residual { file, offset: offset + bytes },
        }
    }
}

/// A range of addresses inside one memory area whose pages have bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRun {
    /// First address, page aligned.
    pub start: u64,
    /// First address behind, page aligned.
    pub end: u64,
    /// Where the bytes are.
    pub source: Source,
    /// Flags for the pagemap entry of pages that stay.
    pub flags: u32,
    /// Index of the memory area in [`ProcessMemory::vmas`], or `None` when no area contains the run (CRIU
    /// never writes such an entry; it is kept as it is).
    pub vma: Option<usize>,
}

/// Areas and runs of one process.
#[derive(Debug)]
pub struct ProcessMemory {
    /// The memory areas in image order. A private mapping of an earlier capture's residual appears as the
    /// anonymous memory that it stands for.
    pub vmas: Vec<VmaEntry>,
    /// Runs in address order, disjoint, each inside one area.
    pub runs: Vec<PageRun>,
}

/// Number of pages of a pagemap entry; newer images set only `nr_pages`.
pub fn page_count(entry: &PagemapEntry) -> u64 {
    if entry.has_nr_pages() && entry.nr_pages() != 0 {
        entry.nr_pages()
    } else {
        u64::from(entry.compat_nr_pages())
    }
}

/// The pagemap's entries as runs that are not split yet; also checks that they use up the pages image.
///
/// # Errors
/// [`ImageError::Malformed`] when entries are unordered, overlap, refer to a parent image, or need another
/// number of bytes than the pages image has.
pub fn pagemap_runs(process: &ProcessImages) -> Result<Vec<PageRun>, ImageError> {
    let name = format!("pagemap-{}.img", process.pid);
    let malformed = |reason: String| ImageError::Malformed { name: name.clone(), reason };
    let mut runs = Vec::with_capacity(process.pagemap.len());
    let mut offset = 0;
    let mut previous_end = 0;
    for entry in &process.pagemap {
        let start = entry.vaddr();
        let flags = if entry.has_flags() { entry.flags() } else { PRESENT };
        if flags & PARENT != 0 || entry.in_parent() || flags & PRESENT == 0 {
            return Err(malformed(format!(
                "entry {start:#x} has flags {flags:#x}: its pages are not in this dump"
            )));
        }
        let bytes = page_count(entry)
            .checked_mul(PAGE_SIZE)
            .filter(|bytes| *bytes > 0)
            .ok_or_else(|| malformed(format!("entry {start:#x} has {} pages", page_count(entry))))?;
        let end =
            start.checked_add(bytes).ok_or_else(|| malformed(format!("entry {start:#x} wraps around")))?;
        if start % PAGE_SIZE != 0 || start < previous_end {
            return Err(malformed(format!(
                "entry {start:#x} is unaligned, unordered or overlaps the one before"
            )));
        }
        runs.push(PageRun { start, end, source: Source::Pages(offset), flags, vma: None });
        offset += bytes;
        previous_end = end;
    }
    if offset != process.pages.len() as u64 {
        return Err(malformed(format!(
            "its entries need {offset} bytes, {} has {}",
            process.pages_name,
            process.pages.len()
        )));
    }
    Ok(runs)
}

/// Whether an area is anonymous private memory whose pages may come from a private file mapping instead.
pub fn is_convertible(vma: &VmaEntry) -> bool {
    const LEFT_ALONE: u32 = vma_status::AREA_STACK
        | vma_status::AREA_VSYSCALL
        | vma_status::AREA_VDSO
        | vma_status::AREA_SYSVIPC
        | vma_status::AREA_SOCKET
        | vma_status::AREA_VVAR
        | vma_status::AREA_AIORING
        | vma_status::AREA_MEMFD
        | vma_status::AREA_SHSTK
        | vma_status::AREA_GUARD
        | vma_status::EXT_PLUGIN;
    // MADV_WIPEONFORK is refused by the kernel on file mappings.
    const MADV_WIPEONFORK: u64 = 1 << 18;
    vma.status() & vma_status::ANON_PRIVATE != 0
        && vma.status() & LEFT_ALONE == 0
        && vma.shmid() == 0
        && vma.flags() & (map_flags::HUGETLB | map_flags::GROWSDOWN) == 0
        && vma.madv() & MADV_WIPEONFORK == 0
}

/// Whether the entry stands for a kernel memory area (guard ranges are listed as areas but lie inside one).
fn is_area(vma: &VmaEntry) -> bool {
    vma.status() & vma_status::AREA_GUARD == 0
}

/// Reads areas and runs of a process. `residuals` gives the length in bytes of each file entry that is a
/// residual of an earlier capture; private mappings of those become anonymous memory again, with their bytes.
///
/// # Errors
/// [`ImageError::Malformed`] for a pagemap that does not fit its pages, areas that overlap, or a mapping
/// that reaches beyond its residual.
pub fn memory_of(
    process: &ProcessImages,
    residuals: &BTreeMap<u32, u64>,
) -> Result<ProcessMemory, ImageError> {
    let name = format!("mm-{}.img", process.pid);
    let malformed = |reason: String| ImageError::Malformed { name: name.clone(), reason };
    let mut vmas = process.mm.vmas.clone();
    let mut under = Vec::new();
    for (index, vma) in vmas.iter_mut().enumerate() {
        let file = u32::try_from(vma.shmid()).ok().filter(|id| residuals.contains_key(id));
        if let Some(file) = file.filter(|_| vma.status() & vma_status::FILE_PRIVATE != 0) {
            let offset = vma.pgoff();
            let len = vma.end() - vma.start();
            if offset.checked_add(len).is_none_or(|end| end > residuals[&file]) {
                return Err(malformed(format!("area {:#x} maps beyond its residual", vma.start())));
            }
            under.push(PageRun {
                start: vma.start(),
                end: vma.end(),
                source: Source::Residual { file, offset },
                flags: PRESENT,
                vma: Some(index),
            });
            vma.set_status(vma.status() & !vma_status::FILE_PRIVATE | vma_status::ANON_PRIVATE);
            vma.set_flags(vma.flags() | map_flags::ANONYMOUS);
            vma.set_shmid(0);
            vma.set_pgoff(0);
            vma.clear_fdflags();
        }
    }
    let over = split_at_areas(&vmas, pagemap_runs(process)?);
    Ok(ProcessMemory { vmas, runs: overlay(&under, &over) })
}

/// Splits runs at the borders of memory areas and tells each its area.
fn split_at_areas(vmas: &[VmaEntry], runs: Vec<PageRun>) -> Vec<PageRun> {
    let mut areas: Vec<(u64, u64, usize)> =
        vmas.iter().enumerate().filter(|(_, v)| is_area(v)).map(|(i, v)| (v.start(), v.end(), i)).collect();
    areas.sort_unstable();
    let mut split = Vec::with_capacity(runs.len());
    for mut run in runs {
        while run.start < run.end {
            let next = areas.partition_point(|(_, end, _)| *end <= run.start);
            let (end, vma) = match areas.get(next) {
                Some(&(start, end, index)) if start <= run.start => (end.min(run.end), Some(index)),
                Some(&(start, ..)) => (start.min(run.end), None),
                None => (run.end, None),
            };
            split.push(PageRun { end, vma, ..run });
            run.source = run.source.advanced(end - run.start);
            run.start = end;
        }
    }
    split
}

/// `under` with `over` on top: where both have bytes, `over` wins. Both are in address order and disjoint.
fn overlay(under: &[PageRun], over: &[PageRun]) -> Vec<PageRun> {
    let mut result: Vec<PageRun> = over.to_vec();
    for base in under {
        let mut start = base.start;
        let first = over.partition_point(|run| run.end <= base.start);
        for run in over[first..].iter().take_while(|run| run.start < base.end) {
            if start < run.start {
                result.push(sub_run(base, start, run.start));
            }
            start = start.max(run.end);
        }
        if start < base.end {
            result.push(sub_run(base, start, base.end));
        }
    }
    result.sort_unstable_by_key(|run| run.start);
    result
}

/// The part of a run from `start` to `end`, which must lie inside it.
pub fn sub_run(run: &PageRun, start: u64, end: u64) -> PageRun {
    PageRun { start, end, source: run.source.advanced(start - run.start), ..*run }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vma(start: u64, end: u64) -> VmaEntry {
        let mut vma = VmaEntry::new();
        vma.set_start(start);
        vma.set_end(end);
        vma.set_status(vma_status::ANON_PRIVATE);
        vma
    }

    fn run(start: u64, end: u64, source: Source) -> PageRun {
        PageRun { start, end, source, flags: PRESENT, vma: None }
    }

    #[test]
    fn a_run_over_neighbouring_areas_is_split_at_their_border() {
        let vmas = [vma(0x1000, 0x3000), vma(0x3000, 0x5000), vma(0x8000, 0x9000)];
        let runs = split_at_areas(&vmas, vec![run(0x2000, 0x6000, Source::Pages(0x1000))]);
        let got: Vec<_> = runs.iter().map(|r| (r.start, r.end, r.source, r.vma)).collect();
        assert_eq!(
            got,
            [
                (0x2000, 0x3000, Source::Pages(0x1000), Some(0)),
                (0x3000, 0x5000, Source::Pages(0x2000), Some(1)),
                (0x5000, 0x6000, Source::Pages(0x4000), None),
            ]
        );
    }

    #[test]
    fn written_pages_win_over_the_residual_below() {
        let residual = Source::Residual { file: 7, offset: 0x10000 };
        let under = [run(0x1000, 0x6000, residual)];
        let over = [run(0x0, 0x1000, Source::Pages(0)), run(0x2000, 0x3000, Source::Pages(0x1000))];
        let got: Vec<_> = overlay(&under, &over).iter().map(|r| (r.start, r.end, r.source)).collect();
        assert_eq!(
            got,
            [
                (0x0, 0x1000, Source::Pages(0)),
                (0x1000, 0x2000, Source::Residual { file: 7, offset: 0x10000 }),
                (0x2000, 0x3000, Source::Pages(0x1000)),
                (0x3000, 0x6000, Source::Residual { file: 7, offset: 0x12000 }),
            ]
        );
    }

    #[test]
    fn special_areas_are_left_alone() {
        assert!(is_convertible(&vma(0, 4096)));
        for status in [vma_status::AREA_STACK, vma_status::AREA_GUARD, vma_status::AREA_VDSO] {
            let mut special = vma(0, 4096);
            special.set_status(vma_status::ANON_PRIVATE | status);
            assert!(!is_convertible(&special));
        }
        let mut hugetlb = vma(0, 4096);
        hugetlb.set_flags(map_flags::HUGETLB);
        assert!(!is_convertible(&hugetlb));
    }
}
