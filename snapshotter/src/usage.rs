//! Disk usage of one layer.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::error::Error;
use crate::record::Usage;

/// Bytes of allocated blocks and inodes below `directory` and of itself; hard links count once.
/// Files that disappear meanwhile are not counted: a container may be working there.
///
/// # Errors
/// Those of the file system.
pub fn measure(directory: &Path) -> Result<Usage, Error> {
    let mut usage = Usage::default();
    let mut linked = HashSet::new();
    let top = fs::symlink_metadata(directory).map_err(Error::io("measure", directory))?;
    count(&top, &mut usage, &mut linked);
    let mut pending = vec![directory.to_owned()];
    while let Some(path) = pending.pop() {
        let Some(entries) = gone(fs::read_dir(&path)).map_err(Error::io("measure", &path))? else {
            continue;
        };
        for entry in entries {
            let Some(entry) = gone(entry).map_err(Error::io("measure", &path))? else { continue };
            let Some(metadata) = gone(entry.metadata()).map_err(Error::io("measure", &entry.path()))? else {
                continue;
            };
            count(&metadata, &mut usage, &mut linked);
            if metadata.is_dir() {
                pending.push(entry.path());
            }
        }
    }
    Ok(usage)
}

fn count(metadata: &fs::Metadata, usage: &mut Usage, linked: &mut HashSet<(u64, u64)>) {
    let shared = metadata.nlink() > 1 && !metadata.is_dir();
    if shared && !linked.insert((metadata.dev(), metadata.ino())) {
        return;
    }
    // stat counts blocks of 512 bytes whatever the file system's block size is.
    usage.size += metadata.blocks() * 512;
    usage.inodes += 1;
}

fn gone<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        result => result.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_blocks_and_hard_links_once() {
        let dir = tempfile::tempdir().unwrap();
        let empty = measure(dir.path()).unwrap();
        assert_eq!(empty.inodes, 1);
        fs::create_dir(dir.path().join("d")).unwrap();
        fs::write(dir.path().join("d/a"), vec![1; 100_000]).unwrap();
        fs::hard_link(dir.path().join("d/a"), dir.path().join("b")).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("link")).unwrap();
        fs::File::open(dir.path().join("d/a")).unwrap().sync_all().unwrap();
        let usage = measure(dir.path()).unwrap();
        assert_eq!(usage.inodes, 4);
        let added = usage.size - empty.size;
        assert!((100_000..200_000).contains(&added), "{added}");
    }

    #[test]
    fn a_missing_directory_is_an_error() {
        assert!(measure(Path::new("/nonexistent/fs")).is_err());
    }
}
