//! The remapper and its proof on generated image sets: whatever is mapped, the memory stays the same; whatever
//! is damaged afterwards, the proof finds it.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test that fails panics")]

mod dump;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use coldsnap::criu::image::{self, Builder, Magic};
use coldsnap::criu::process::ImageSet;
use coldsnap::criu::proto::{MmEntry, PagemapEntry};
use coldsnap::criu::prove::prove;
use coldsnap::criu::remap::{Mapping, rewrite_process};
use coldsnap::criu::runs::{PAGE_SIZE, memory_of};
use coldsnap::criu::vma_status::{ANON_PRIVATE, AREA_STACK};
use dump::{area, present, write_image, write_process};
use proptest::prelude::*;

const FILE: u32 = 9;

/// One area: pages before it, its pages, whether it is a stack.
type Area = (u64, u64, bool);

#[derive(Debug, Clone)]
struct Dump {
    areas: Vec<Area>,
    /// For each page of all areas: present?
    present: Vec<bool>,
    /// For each page: mapped, when it may be?
    mapped: Vec<bool>,
    seed: u8,
}

fn dumps() -> impl Strategy<Value = Dump> {
    let areas = prop::collection::vec((0_u64..3, 1_u64..12, prop::bool::weighted(0.1)), 1..8);
    areas.prop_flat_map(|areas| {
        let pages = usize::try_from(areas.iter().map(|a| a.1).sum::<u64>()).unwrap();
        let flags = || prop::collection::vec(any::<bool>(), pages);
        (Just(areas), flags(), flags(), any::<u8>()).prop_map(|(areas, present, mapped, seed)| Dump {
            areas,
            present,
            mapped,
            seed,
        })
    })
}

fn page(seed: u8, number: usize) -> Vec<u8> {
    // Neighbouring pages differ, so that a page that is taken for another one is noticed.
    (0..PAGE_SIZE).map(|i| (i as usize * 7 + number * 31 + usize::from(seed)).to_le_bytes()[0]).collect()
}

/// Writes the dump's images; the mappings of the plan and the bytes of the mapped file.
fn write_dump(dump: &Dump, dir: &Path) -> (Vec<Mapping>, Vec<u8>) {
    let mut vmas = Vec::new();
    let mut pagemap: Vec<PagemapEntry> = Vec::new();
    let (mut pages, mut file, mut mappings) = (Vec::new(), Vec::new(), Vec::<Mapping>::new());
    let mut address = 0x10_0000;
    let mut number = 0;
    for &(gap, count, stack) in &dump.areas {
        address += gap * PAGE_SIZE;
        let status = ANON_PRIVATE | if stack { AREA_STACK } else { 0 };
        vmas.push(area(address, address + count * PAGE_SIZE, status));
        let area_start = address;
        for _ in 0..count {
            let content = page(dump.seed, number);
            if dump.present[number] {
                pages.extend(&content);
                // A run goes on over the border of an area when the addresses do.
                match pagemap.last_mut() {
                    Some(last) if last.vaddr() + last.nr_pages() * PAGE_SIZE == address => {
                        last.set_nr_pages(last.nr_pages() + 1);
                    }
                    _ => {
                        pagemap.push(present(address, 1));
                    }
                }
                if dump.mapped[number] && !stack {
                    match mappings.last_mut() {
                        Some(last) if last.end == address && last.start >= area_start => {
                            last.end += PAGE_SIZE
                        }
                        _ => mappings.push(Mapping {
                            start: address,
                            end: address + PAGE_SIZE,
                            file: FILE,
                            offset: file.len() as u64,
                        }),
                    }
                    file.extend(&content);
                }
            }
            address += PAGE_SIZE;
            number += 1;
        }
    }
    write_process(dir, vmas, &pagemap, &pages);
    (mappings, file)
}

fn copy_tables(from: &Path, to: &Path) {
    for name in ["inventory.img", "pstree.img", "files.img", "mountpoints-1.img"] {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
}

fn remap(dump: &Dump) -> (tempfile::TempDir, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let (before, after) = (dir.path().join("before"), dir.path().join("after"));
    fs::create_dir(&before).unwrap();
    fs::create_dir(&after).unwrap();
    let (mappings, file) = write_dump(dump, &before);
    let set = ImageSet::read(&before).unwrap();
    let memory = memory_of(&set.processes[0], &BTreeMap::new()).unwrap();
    rewrite_process(&set.processes[0], &memory, &mappings, &BTreeMap::new(), &after).unwrap();
    copy_tables(&before, &after);
    (dir, file)
}

fn is_proven(dir: &Path, file: &[u8]) -> bool {
    let before = ImageSet::read(&dir.join("before")).unwrap();
    let Ok(after) = ImageSet::read(&dir.join("after")) else { return false };
    let files = BTreeMap::from([(FILE, file)]);
    prove(&before.processes[0], &BTreeMap::new(), &after.processes[0], &files).is_ok()
}

proptest! {
    #[test]
    fn memory_is_the_same_whatever_is_mapped(dump in dumps()) {
        let (dir, file) = remap(&dump);
        prop_assert!(is_proven(dir.path(), &file));
        let left = fs::metadata(dir.path().join("after/pages-1.img")).unwrap().len();
        let all = fs::metadata(dir.path().join("before/pages-1.img")).unwrap().len();
        prop_assert_eq!(left + file.len() as u64, all, "every page is in exactly one place");
    }

    #[test]
    fn a_flipped_byte_is_found(dump in dumps(), at in any::<prop::sample::Index>()) {
        let (dir, mut file) = remap(&dump);
        let path = dir.path().join("after/pages-1.img");
        let mut pages = fs::read(&path).unwrap();
        let total = pages.len() + file.len();
        prop_assume!(total > 0);
        let at = at.index(total);
        match at.checked_sub(pages.len()) {
            None => pages[at] ^= 1,
            Some(at) => file[at] ^= 1,
        }
        fs::write(&path, pages).unwrap();
        prop_assert!(!is_proven(dir.path(), &file));
    }

    #[test]
    fn a_lost_page_is_found(dump in dumps(), which in any::<prop::sample::Index>()) {
        let (dir, file) = remap(&dump);
        let after = dir.path().join("after");
        let path = after.join("pagemap-1.img");
        let bytes = fs::read(&path).unwrap();
        let mut entries = image::split("pagemap-1.img", Magic::Pagemap, &bytes).unwrap();
        prop_assume!(entries.len() > 1);
        let lost = 1 + which.index(entries.len() - 1);
        let entry: PagemapEntry = image::parse("pagemap-1.img", entries[lost]).unwrap();
        let earlier: u64 = entries[1..lost]
            .iter()
            .map(|e| image::parse::<PagemapEntry>("pagemap-1.img", e).unwrap().nr_pages() * PAGE_SIZE)
            .sum();
        entries.remove(lost);
        let mut new = Builder::new("pagemap-1.img", Magic::Pagemap).into_bytes();
        for entry in &entries {
            new.extend(u32::try_from(entry.len()).unwrap().to_le_bytes());
            new.extend(*entry);
        }
        let pages = fs::read(after.join("pages-1.img")).unwrap();
        let (from, to) = (earlier as usize, (earlier + entry.nr_pages() * PAGE_SIZE) as usize);
        fs::write(after.join("pages-1.img"), [&pages[..from], &pages[to..]].concat()).unwrap();
        fs::write(&path, new).unwrap();
        prop_assert!(!is_proven(dir.path(), &file));
    }

    #[test]
    fn a_changed_area_is_found(dump in dumps(), which in any::<prop::sample::Index>(), how in 0..5_u8) {
        let (dir, file) = remap(&dump);
        let path = dir.path().join("after/mm-1.img");
        let mut mm: MmEntry = image::read_one(&path, Magic::Mm).unwrap();
        let which = which.index(mm.vmas.len());
        let area = &mut mm.vmas[which];
        match how {
            0 => area.set_prot(area.prot() ^ 2),
            1 => area.set_madv(1 << 14),
            2 => area.set_status(area.status() ^ AREA_STACK),
            3 => area.set_end(area.end() - PAGE_SIZE),
            _ if area.shmid() == u64::from(FILE) => area.set_pgoff(area.pgoff() + PAGE_SIZE),
            _ => { mm.vmas.remove(which); }
        }
        write_image(&dir.path().join("after"), "mm-1.img", Magic::Mm, &[&mm]);
        prop_assert!(!is_proven(dir.path(), &file));
    }
}
