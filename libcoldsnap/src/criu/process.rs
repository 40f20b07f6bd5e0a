//! One dump, read: the process tree's memory images, the open files and the mounts.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::areas;
use super::image::{self, ImageError, Magic};
use super::proto::{FileEntry, MmEntry, MntEntry, PagemapEntry, PagemapHead, PstreeEntry};
use crate::mapped_file::MappedFile;

/// The images of one dump that a remap needs.
#[derive(Debug)]
pub struct ImageSet {
    /// The directory.
    pub dir: PathBuf,
    /// Processes that have memory, in the order of the process tree.
    pub processes: Vec<ProcessImages>,
    /// `files.img`
    pub files: Vec<FileEntry>,
    /// Name of the one mountpoints image.
    pub mounts_name: String,
    /// Its entries.
    pub mounts: Vec<MntEntry>,
}

/// The memory images of one process.
#[derive(Debug)]
pub struct ProcessImages {
    /// Its pid in the container's pid namespace.
    pub pid: u32,
    /// Its memory areas.
    pub mm: MmEntry,
    /// The head of its pagemap.
    pub pagemap_head: PagemapHead,
    /// Which pages are in the pages image, in address order.
    pub pagemap: Vec<PagemapEntry>,
    /// Name of its pages image.
    pub pages_name: String,
    /// The pages, in the order of the pagemap.
    pub pages: MappedFile,
}

/// Why a dump cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// One of its images is not readable or malformed.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// An image that must be there is missing.
    #[error("the dump in {} misses {name}; dump again", dir.display())]
    Missing {
        /// The dump's directory.
        dir: PathBuf,
        /// The image.
        name: String,
    },
    /// The dump is of a kind that is not supported.
    #[error("{what} is not supported by a capture yet")]
    Unsupported {
        /// What was found.
        what: String,
    },
}

/// The mount id of the container's root: the entry with mount point `/`.
pub fn root_mount(mounts: &[MntEntry]) -> Option<&MntEntry> {
    mounts.iter().find(|m| m.mountpoint() == "/")
}

impl ImageSet {
    /// Reads the images of `dir`.
    ///
    /// # Errors
    /// A missing or malformed image, or a dump of a kind that is not supported (incremental dumps,
    /// nested mount namespaces).
    pub fn read(dir: &Path) -> Result<Self, DumpError> {
        let missing = |name: &str| DumpError::Missing { dir: dir.to_owned(), name: name.to_owned() };
        if dir.join("parent").symlink_metadata().is_ok() {
            return Err(DumpError::Unsupported { what: "an incremental dump (it has a parent)".into() });
        }
        for name in ["inventory.img", "pstree.img", "files.img"] {
            if !dir.join(name).is_file() {
                return Err(missing(name));
            }
        }
        let mut mounts_names = names(dir)
            .map_err(|source| ImageError::Io { action: "read", path: dir.to_owned(), source })?
            .into_iter()
            .filter(|n| n.starts_with("mountpoints-") && n.ends_with(".img"));
        let mounts_name = mounts_names.next().ok_or_else(|| missing("mountpoints-<id>.img"))?;
        if mounts_names.next().is_some() {
            return Err(DumpError::Unsupported { what: "a container with nested mount namespaces".into() });
        }
        let mounts = image::read_all(&dir.join(&mounts_name), Magic::Mounts)?;

        let mut processes = Vec::new();
        let mut pages_ids = HashSet::new();
        for task in image::read_all::<PstreeEntry>(&dir.join("pstree.img"), Magic::Pstree)? {
            let mm = dir.join(format!("mm-{}.img", task.pid()));
            if !mm.exists() {
                // A zombie, or a task that shares another one's memory: nothing of its own.
                continue;
            }
            let process = ProcessImages::read(dir, task.pid())?;
            if !pages_ids.insert(process.pagemap_head.pages_id()) {
                return Err(DumpError::Unsupported {
                    what: format!("{} used by two processes", process.pages_name),
                });
            }
            processes.push(process);
        }
        let files = image::read_all(&dir.join("files.img"), Magic::Files)?;
        Ok(Self { dir: dir.to_owned(), processes, files, mounts_name, mounts })
    }

    /// Every file name in the dump's directory, sorted.
    ///
    /// # Errors
    /// Any error of reading the directory.
    pub fn names(&self) -> io::Result<Vec<String>> {
        names(&self.dir)
    }
}

impl ProcessImages {
    fn read(dir: &Path, pid: u32) -> Result<Self, DumpError> {
        let name = format!("mm-{pid}.img");
        let mm = image::read_one(&dir.join(&name), Magic::Mm)?;
        areas::check(&name, &mm)?;
        let name = format!("pagemap-{pid}.img");
        let path = dir.join(&name);
        if !path.is_file() {
            return Err(DumpError::Missing { dir: dir.to_owned(), name });
        }
        let bytes = image::read_bytes(&path)?;
        let mut entries = image::split(&name, Magic::Pagemap, &bytes)?.into_iter();
        let head = entries
            .next()
            .ok_or_else(|| ImageError::Malformed { name: name.clone(), reason: "it has no head".into() })?;
        let pagemap_head: PagemapHead = image::parse(&name, head)?;
        let pagemap = entries.map(|e| image::parse(&name, e)).collect::<Result<_, _>>()?;
        let pages_name = format!("pages-{}.img", pagemap_head.pages_id());
        let pages_path = dir.join(&pages_name);
        if !pages_path.is_file() {
            return Err(DumpError::Missing { dir: dir.to_owned(), name: pages_name });
        }
        let pages = MappedFile::open(&pages_path).map_err(|source| ImageError::Io {
            action: "read",
            path: pages_path,
            source: source.into(),
        })?;
        Ok(Self { pid, mm, pagemap_head, pagemap, pages_name, pages })
    }
}

fn names(dir: &Path) -> io::Result<Vec<String>> {
    let mut names = fs::read_dir(dir)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}
