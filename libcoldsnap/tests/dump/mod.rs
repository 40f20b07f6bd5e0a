//! Builds the images of a dump that has one process.

#![allow(clippy::unwrap_used, dead_code, reason = "helpers of tests")]

use std::fs;
use std::path::Path;

use coldsnap::criu::image::{Builder, Magic};
use coldsnap::criu::proto::{
    FileEntry, InventoryEntry, MmEntry, MntEntry, PagemapEntry, PagemapHead, PstreeEntry, VmaEntry,
};
use coldsnap::criu::remap::{external_bind, regular_file};

/// An anonymous private area.
pub fn area(start: u64, end: u64, status: u32) -> VmaEntry {
    let mut vma = VmaEntry::new();
    vma.set_start(start);
    vma.set_end(end);
    vma.set_pgoff(0);
    vma.set_shmid(0);
    vma.set_prot(3);
    vma.set_flags(0x22);
    vma.set_status(status);
    vma.set_fd(-1);
    vma
}

/// Pages in the pages image, as CRIU marks them: lazy and present.
pub fn present(start: u64, pages: u64) -> PagemapEntry {
    let mut entry = PagemapEntry::new();
    entry.set_vaddr(start);
    entry.set_compat_nr_pages(0);
    entry.set_nr_pages(pages);
    entry.set_flags(6);
    entry
}

/// Writes an image of entries.
pub fn write_image(dir: &Path, name: &str, magic: Magic, entries: &[&dyn protobuf::MessageDyn]) {
    let mut bytes = Builder::new(name, magic).into_bytes();
    for entry in entries {
        let body = entry.write_to_bytes_dyn().unwrap();
        bytes.extend(u32::try_from(body.len()).unwrap().to_le_bytes());
        bytes.extend(body);
    }
    fs::write(dir.join(name), bytes).unwrap();
}

/// One process of a dump: its pid, its areas, what is present, and those pages.
pub struct Process<'a> {
    pub pid: u32,
    pub vmas: Vec<VmaEntry>,
    pub pagemap: &'a [PagemapEntry],
    pub pages: &'a [u8],
}

/// Writes the images of process 1 with these areas and pages.
pub fn write_process(dir: &Path, vmas: Vec<VmaEntry>, pagemap: &[PagemapEntry], pages: &[u8]) {
    write_processes(dir, vec![Process { pid: 1, vmas, pagemap, pages }]);
}

/// Writes the images of several processes; the first is the parent of the others.
pub fn write_processes(dir: &Path, processes: Vec<Process<'_>>) {
    let mut tasks = Vec::new();
    for process in processes {
        let pid = process.pid;
        let mut mm = MmEntry::new();
        mm.set_exe_file_id(1);
        mm.vmas = process.vmas;
        write_image(dir, &format!("mm-{pid}.img"), Magic::Mm, &[&mm]);
        let mut head = PagemapHead::new();
        head.set_pages_id(pid);
        let mut entries: Vec<&dyn protobuf::MessageDyn> = vec![&head];
        entries.extend(process.pagemap.iter().map(|e| e as &dyn protobuf::MessageDyn));
        write_image(dir, &format!("pagemap-{pid}.img"), Magic::Pagemap, &entries);
        fs::write(dir.join(format!("pages-{pid}.img")), process.pages).unwrap();
        let mut task = PstreeEntry::new();
        task.set_pid(pid);
        task.set_ppid(if tasks.is_empty() { 0 } else { 1 });
        task.set_pgid(pid);
        task.set_sid(1);
        tasks.push(task);
    }
    let mut inventory = InventoryEntry::new();
    inventory.set_img_version(2);
    write_image(dir, "inventory.img", Magic::Inventory, &[&inventory]);
    let tasks: Vec<_> = tasks.iter().map(|t| t as &dyn protobuf::MessageDyn).collect();
    write_image(dir, "pstree.img", Magic::Pstree, &tasks);
    let exe: FileEntry = regular_file(1, "/bin/x", 1, 1, 0o100_755);
    write_image(dir, "files.img", Magic::Files, &[&exe]);
    let root: MntEntry = external_bind(1, 0, "/");
    write_image(dir, "mountpoints-1.img", Magic::Mounts, &[&root]);
}
