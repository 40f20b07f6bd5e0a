//! The rewrite: ranges of anonymous private memory become private mappings of a file, and their pages
//! leave the pages image.
//!
//! Nothing here decides what is mapped where; that is the capture's plan. The result is only used after
//! [`super::prove`] compared it with the dump, page by page.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use super::image::{Builder, ImageError, Magic, write};
use super::process::ProcessImages;
use super::proto::{FileEntry, FownEntry, MntEntry, PagemapEntry, RegFileEntry, VmaEntry};
use super::runs::{PAGE_SIZE, PageRun, ProcessMemory, Source, sub_run};
use super::{map_flags, pagemap_flags, vma_status};

/// `FileEntry.type` of a regular file.
const FD_TYPE_REG: u32 = 1;
/// Read-only bind of a file or directory: MS_RDONLY | MS_RELATIME.
const BIND_FLAGS: u32 = 0x1 | 0x20_0000;

/// One range of addresses that becomes a private mapping of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    /// First address, page aligned.
    pub start: u64,
    /// First address behind, page aligned.
    pub end: u64,
    /// Id of the file entry.
    pub file: u32,
    /// Offset in the file of the byte at `start`, page aligned.
    pub offset: u64,
}

/// What a rewrite of one process did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rewritten {
    /// Size of the new pages image in bytes.
    pub pages_bytes: u64,
    /// Number of memory areas in the new image.
    pub areas: usize,
}

/// Why a rewrite failed.
#[derive(Debug, thiserror::Error)]
pub enum RemapError {
    /// An image could not be written.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The plan does not fit the dump: a bug in the planner, found before anything is used.
    #[error("process {pid}: the mapping of {start:#x}-{end:#x} does not fit the dump: {reason}")]
    Plan {
        /// The process.
        pid: u32,
        /// First address.
        start: u64,
        /// First address behind.
        end: u64,
        /// What is wrong.
        reason: &'static str,
    },
}

/// Writes `mm`, `pagemap` and `pages` of one process into `out`, with `mappings` (in address order, each
/// inside one convertible area) applied. `residuals` are the bytes of earlier residuals by file id.
///
/// # Errors
/// When a mapping does not fit the dump, or an I/O error.
pub fn rewrite_process(
    process: &ProcessImages,
    memory: &ProcessMemory,
    mappings: &[Mapping],
    residuals: &BTreeMap<u32, &[u8]>,
    out: &Path,
) -> Result<Rewritten, RemapError> {
    let areas = rewrite_areas(process.pid, &memory.vmas, mappings)?;
    let mut mm = process.mm.clone();
    mm.vmas = areas;
    let name = format!("mm-{}.img", process.pid);
    let mut image = Builder::new(&name, Magic::Mm);
    image.push(&mm)?;
    write(&out.join(&name), image)?;

    let name = format!("pagemap-{}.img", process.pid);
    let mut image = Builder::new(&name, Magic::Pagemap);
    image.push(&process.pagemap_head)?;
    let pages_path = out.join(&process.pages_name);
    let io = |source| ImageError::Io { action: "write", path: pages_path.clone(), source };
    let mut pages = BufWriter::with_capacity(1 << 20, File::create(&pages_path).map_err(io)?);
    let mut pages_bytes = 0;
    for run in remaining(&memory.runs, mappings) {
        let mut entry = PagemapEntry::new();
        entry.set_vaddr(run.start);
        entry.set_compat_nr_pages(0);
        entry.set_nr_pages((run.end - run.start) / PAGE_SIZE);
        entry.set_flags(run.flags & !pagemap_flags::PARENT);
        image.push(&entry)?;
        let bytes = bytes_of(process, residuals, &run).ok_or(RemapError::Plan {
            pid: process.pid,
            start: run.start,
            end: run.end,
            reason: "its bytes are not in the dump",
        })?;
        pages.write_all(bytes).map_err(io)?;
        pages_bytes += bytes.len() as u64;
    }
    pages.flush().map_err(io)?;
    write(&out.join(&name), image)?;
    Ok(Rewritten { pages_bytes, areas: mm.vmas.len() })
}

/// The bytes of a run, or `None` when its source is not there.
pub fn bytes_of<'a>(
    process: &'a ProcessImages,
    residuals: &BTreeMap<u32, &'a [u8]>,
    run: &PageRun,
) -> Option<&'a [u8]> {
    let (bytes, offset): (&[u8], u64) = match run.source {
        Source::Pages(offset) => (&process.pages, offset),
        Source::Residual { file, offset } => (residuals.get(&file)?, offset),
    };
    let start = usize::try_from(offset).ok()?;
    let len = usize::try_from(run.end - run.start).ok()?;
    bytes.get(start..start.checked_add(len)?)
}

/// The areas with every mapping cut out as an area of its own.
fn rewrite_areas(pid: u32, vmas: &[VmaEntry], mappings: &[Mapping]) -> Result<Vec<VmaEntry>, RemapError> {
    let mut areas = Vec::with_capacity(vmas.len() + 2 * mappings.len());
    let mut used = 0;
    for vma in vmas {
        if !super::runs::is_convertible(vma) {
            areas.push(vma.clone());
            continue;
        }
        let first = mappings.partition_point(|m| m.end <= vma.start());
        let mut at = vma.start();
        for mapping in mappings[first..].iter().take_while(|m| m.start < vma.end()) {
            if mapping.start < at || mapping.end > vma.end() {
                return Err(plan(
                    pid,
                    mapping,
                    "it is not inside one memory area, or overlaps another mapping",
                ));
            }
            if [mapping.start, mapping.end, mapping.offset].iter().any(|x| x % PAGE_SIZE != 0) {
                return Err(plan(pid, mapping, "it is not page aligned"));
            }
            if at < mapping.start {
                areas.push(piece(vma, at, mapping.start));
            }
            areas.push(file_piece(vma, mapping));
            at = mapping.end;
            used += 1;
        }
        if at < vma.end() {
            areas.push(piece(vma, at, vma.end()));
        }
    }
    if used != mappings.len() {
        let outside = mappings.iter().find(|m| {
            !vmas.iter().any(|v| super::runs::is_convertible(v) && v.start() <= m.start && m.end <= v.end())
        });
        if let Some(mapping) = outside.or(mappings.first()) {
            return Err(plan(pid, mapping, "no convertible memory area holds it"));
        }
    }
    Ok(areas)
}

fn plan(pid: u32, mapping: &Mapping, reason: &'static str) -> RemapError {
    RemapError::Plan { pid, start: mapping.start, end: mapping.end, reason }
}

fn piece(vma: &VmaEntry, start: u64, end: u64) -> VmaEntry {
    let mut piece = vma.clone();
    piece.set_start(start);
    piece.set_end(end);
    piece
}

fn file_piece(vma: &VmaEntry, mapping: &Mapping) -> VmaEntry {
    let mut piece = piece(vma, mapping.start, mapping.end);
    piece.set_status(vma.status() & !vma_status::ANON_PRIVATE | vma_status::FILE_PRIVATE);
    piece.set_flags(vma.flags() & !map_flags::ANONYMOUS);
    piece.set_shmid(u64::from(mapping.file));
    piece.set_pgoff(mapping.offset);
    // O_RDONLY: a private mapping may be written without it.
    piece.set_fdflags(0);
    piece
}

/// Runs without the mapped ranges.
fn remaining(runs: &[PageRun], mappings: &[Mapping]) -> Vec<PageRun> {
    let mut left = Vec::with_capacity(runs.len());
    for run in runs {
        let mut at = run.start;
        let first = mappings.partition_point(|m| m.end <= run.start);
        for mapping in mappings[first..].iter().take_while(|m| m.start < run.end) {
            if at < mapping.start {
                left.push(sub_run(run, at, mapping.start));
            }
            at = at.max(mapping.end);
        }
        if at < run.end {
            left.push(sub_run(run, at, run.end));
        }
    }
    left
}

/// A regular file's entry for `files.img`: `path` in the container, on mount `mnt_id`, `size` bytes.
pub fn regular_file(id: u32, path: &str, mnt_id: i32, size: u64, mode: u32) -> FileEntry {
    let mut owner = FownEntry::new();
    owner.set_uid(0);
    owner.set_euid(0);
    owner.set_signum(0);
    owner.set_pid_type(0);
    owner.set_pid(0);
    let mut regular = RegFileEntry::new();
    regular.set_id(id);
    regular.set_flags(0);
    regular.set_pos(0);
    regular.fown = Some(owner).into();
    regular.set_name(path.to_owned());
    regular.set_mnt_id(mnt_id);
    regular.set_size(size);
    regular.set_mode(mode);
    let mut entry = FileEntry::new();
    entry.set_type(FD_TYPE_REG);
    entry.set_id(id);
    entry.reg = Some(regular).into();
    entry
}

/// A mount entry for a bind that the OCI spec of the restore declares at `destination`.
pub fn external_bind(mnt_id: u32, parent: u32, destination: &str) -> MntEntry {
    let mut mount = MntEntry::new();
    mount.set_fstype(0);
    mount.set_mnt_id(mnt_id);
    mount.set_root_dev(0);
    mount.set_parent_mnt_id(parent);
    mount.set_flags(BIND_FLAGS);
    mount.set_root("/".to_owned());
    mount.set_mountpoint(destination.to_owned());
    mount.set_source("coldsnap".to_owned());
    mount.set_options(String::new());
    mount.set_shared_id(0);
    mount.set_master_id(0);
    mount.set_sb_flags(0);
    mount.set_ext_key(destination.to_owned());
    mount
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area(start: u64, end: u64) -> VmaEntry {
        let mut vma = VmaEntry::new();
        vma.set_start(start);
        vma.set_end(end);
        vma.set_pgoff(0);
        vma.set_shmid(0);
        vma.set_prot(3);
        vma.set_flags(0x22);
        vma.set_status(vma_status::ANON_PRIVATE | 1);
        vma.set_fd(-1);
        vma
    }

    fn mapping(start: u64, end: u64) -> Mapping {
        Mapping { start, end, file: 9, offset: 0x1000 }
    }

    #[test]
    fn a_mapping_in_the_middle_makes_three_areas() {
        let areas = rewrite_areas(1, &[area(0x1000, 0x9000)], &[mapping(0x3000, 0x5000)]).unwrap();
        let got: Vec<_> = areas.iter().map(|a| (a.start(), a.end(), a.shmid(), a.flags())).collect();
        assert_eq!(got, [(0x1000, 0x3000, 0, 0x22), (0x3000, 0x5000, 9, 0x2), (0x5000, 0x9000, 0, 0x22)]);
        assert_eq!(areas[1].status(), vma_status::FILE_PRIVATE | 1);
        assert_eq!(areas[1].pgoff(), 0x1000);
    }

    #[test]
    fn mappings_that_do_not_fit_are_refused() {
        let areas = [area(0x1000, 0x3000), area(0x3000, 0x5000)];
        for bad in [
            vec![mapping(0x2000, 0x4000)],
            vec![mapping(0x0, 0x1000)],
            vec![mapping(0x1800, 0x2000)],
            vec![mapping(0x1000, 0x3000), mapping(0x2000, 0x3000)],
            vec![mapping(0x8000, 0x9000)],
        ] {
            assert!(rewrite_areas(1, &areas, &bad).is_err(), "{bad:x?}");
        }
    }

    #[test]
    fn mapped_ranges_leave_the_pagemap() {
        let run = PageRun { start: 0x1000, end: 0x9000, source: Source::Pages(0), flags: 4, vma: Some(0) };
        let left = remaining(&[run], &[mapping(0x1000, 0x2000), mapping(0x4000, 0x5000)]);
        let got: Vec<_> = left.iter().map(|r| (r.start, r.end, r.source)).collect();
        assert_eq!(got, [(0x2000, 0x4000, Source::Pages(0x1000)), (0x5000, 0x9000, Source::Pages(0x4000))]);
    }
}
