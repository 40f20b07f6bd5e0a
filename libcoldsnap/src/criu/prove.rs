//! The proof of a rewrite: what a restore would put at every address before and after it is the same.
//!
//! It shares no code with the remapper. Both image sets are cut at every border of an area or a pagemap
//! entry of either; inside such an interval each side has one source, and the two are compared byte by byte.
//! (Forgetting that a pagemap entry may span areas once lost pages in a restore that CRIU called successful.)

use std::collections::{BTreeMap, BTreeSet};

use super::process::ProcessImages;
use super::proto::VmaEntry;
use super::runs::{PAGE_SIZE, page_count};
use super::{map_flags, vma_status};

/// The two image sets differ.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "process {pid}: the rewritten images restore other memory at {start:#x}-{end:#x} than the dump: {difference}"
)]
pub struct Unproven {
    /// The process.
    pub pid: u32,
    /// First address of the interval.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// What differs.
    pub difference: &'static str,
}

/// Bytes of the files that ColdSnap maps (payloads and residuals), by file id of one image set.
pub type OurFiles<'a> = BTreeMap<u32, &'a [u8]>;

/// What the proof looked at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Proof {
    /// Bytes compared.
    pub bytes: u64,
    /// Intervals compared.
    pub intervals: u64,
}

/// Compares one process before and after.
///
/// # Errors
/// The first interval that differs.
pub fn prove(
    before: &ProcessImages,
    before_files: &OurFiles<'_>,
    after: &ProcessImages,
    after_files: &OurFiles<'_>,
) -> Result<Proof, Unproven> {
    let old = Side::new(before, before_files);
    let new = Side::new(after, after_files);
    let unproven = |start, end, difference| Unproven { pid: before.pid, start, end, difference };
    let (old, new) = match (old, new) {
        (Some(old), Some(new)) => (old, new),
        _ => return Err(unproven(0, 0, "a pagemap needs more bytes than its pages image has")),
    };
    let mut borders = BTreeSet::new();
    old.borders(&mut borders);
    new.borders(&mut borders);
    let borders: Vec<u64> = borders.into_iter().collect();
    let mut proof = Proof::default();
    for pair in borders.windows(2) {
        let (start, end) = (pair[0], pair[1]);
        let (was, is) = (old.at(start, end), new.at(start, end));
        let fail = |difference| Err(unproven(start, end, difference));
        match (was.area, is.area) {
            (None, None) => {}
            (Some(a), Some(b)) if same_attributes(a, b) => {}
            (Some(_), Some(_)) => return fail("the memory area's attributes"),
            _ => return fail("a memory area is missing or new"),
        }
        if !same_guards(&old, &new, start, end) {
            return fail("guard ranges");
        }
        match (was.content, is.content) {
            (Content::Bytes(a), Content::Bytes(b)) => {
                if a != b {
                    return fail("the bytes");
                }
                proof.bytes += end - start;
            }
            (Content::Zero, Content::Zero) => {}
            (Content::Other { file: a, offset: x }, Content::Other { file: b, offset: y })
                if (a, x) == (b, y) => {}
            (Content::Unreadable, _) | (_, Content::Unreadable) => {
                return fail("a file is shorter than its mapping");
            }
            _ => return fail("the source of the bytes"),
        }
        proof.intervals += 1;
    }
    Ok(proof)
}

#[derive(Debug, PartialEq, Eq)]
enum Content<'a> {
    /// These bytes.
    Bytes(&'a [u8]),
    /// Untouched anonymous memory.
    Zero,
    /// A mapping that is not ours, without pages of its own.
    Other { file: u64, offset: u64 },
    /// Our file does not reach so far.
    Unreadable,
}

struct At<'a> {
    area: Option<&'a VmaEntry>,
    content: Content<'a>,
}

struct Side<'a> {
    areas: Vec<&'a VmaEntry>,
    guards: Vec<(u64, u64)>,
    /// start, end, bytes
    pages: Vec<(u64, u64, &'a [u8])>,
    files: &'a OurFiles<'a>,
}

impl<'a> Side<'a> {
    fn new(process: &'a ProcessImages, files: &'a OurFiles<'a>) -> Option<Self> {
        let (guards, mut areas): (Vec<&VmaEntry>, Vec<_>) =
            process.mm.vmas.iter().partition(|v| v.status() & vma_status::AREA_GUARD != 0);
        areas.sort_by_key(|v| v.start());
        let mut pages = Vec::with_capacity(process.pagemap.len());
        let mut rest: &[u8] = &process.pages;
        for entry in &process.pagemap {
            let len = page_count(entry).checked_mul(PAGE_SIZE)?;
            let (bytes, behind) = rest.split_at_checked(usize::try_from(len).ok()?)?;
            pages.push((entry.vaddr(), entry.vaddr().checked_add(len)?, bytes));
            rest = behind;
        }
        pages.sort_by_key(|(start, ..)| *start);
        let guards = guards.iter().map(|v| (v.start(), v.end())).collect();
        Some(Self { areas, guards, pages, files })
    }

    fn borders(&self, borders: &mut BTreeSet<u64>) {
        borders.extend(self.areas.iter().flat_map(|v| [v.start(), v.end()]));
        borders.extend(self.pages.iter().flat_map(|(start, end, _)| [*start, *end]));
        borders.extend(self.guards.iter().flat_map(|(start, end)| [*start, *end]));
    }

    fn at(&self, start: u64, end: u64) -> At<'a> {
        let area = self.areas.get(self.areas.partition_point(|v| v.end() <= start)).copied();
        let area = area.filter(|v| v.start() <= start);
        let len = usize::try_from(end - start).unwrap_or(usize::MAX);
        let slice = |bytes: &'a [u8], offset: u64| -> Content<'a> {
            let from = usize::try_from(offset).unwrap_or(usize::MAX);
            bytes.get(from..from.saturating_add(len)).map_or(Content::Unreadable, Content::Bytes)
        };
        let page = self.pages.get(self.pages.partition_point(|(_, end, _)| *end <= start));
        let content = match (page, area) {
            (Some((page_start, _, bytes)), _) if *page_start <= start => slice(bytes, start - page_start),
            (_, Some(area)) => {
                let offset = area.pgoff() + (start - area.start());
                let ours = u32::try_from(area.shmid()).ok().and_then(|id| self.files.get(&id));
                match ours.filter(|_| area.status() & vma_status::FILE_PRIVATE != 0) {
                    Some(bytes) => slice(bytes, offset),
                    None if area.status() & vma_status::ANON_PRIVATE != 0 => Content::Zero,
                    None => Content::Other { file: area.shmid(), offset },
                }
            }
            (_, None) => Content::Zero,
        };
        At { area, content }
    }
}

/// Everything but where private memory comes from.
fn same_attributes(a: &VmaEntry, b: &VmaEntry) -> bool {
    const FROM: u32 = vma_status::ANON_PRIVATE | vma_status::FILE_PRIVATE;
    a.prot() == b.prot()
        && a.madv() == b.madv()
        && a.status() & !FROM == b.status() & !FROM
        && (a.status() & FROM == 0) == (b.status() & FROM == 0)
        && a.flags() & !map_flags::ANONYMOUS == b.flags() & !map_flags::ANONYMOUS
}

fn same_guards(old: &Side<'_>, new: &Side<'_>, start: u64, end: u64) -> bool {
    let guarded = |side: &Side<'_>| side.guards.iter().any(|(s, e)| *s <= start && end <= *e);
    guarded(old) == guarded(new)
}
