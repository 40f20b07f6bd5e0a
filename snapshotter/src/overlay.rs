//! What overlay mounts on this host need, found out once at start.

use std::fs::{self, DirBuilder, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use rustix::fs::{Dir, FileType};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen,
};

use crate::error::Error;
use crate::layout::{Layout, delete_tree};

/// Options that every overlay mount gets, as containerd's overlayfs snapshotter chooses them.
///
/// # Errors
/// When the file system of the snapshots cannot carry an overlay.
pub fn detect_options(layout: &Layout) -> Result<Vec<String>, Error> {
    // The name makes a leftover of a crash a temporary like any other.
    let directory = layout.snapshots().join("new-probe");
    delete_tree(&directory)?;
    let result = detect(&directory);
    delete_tree(&directory)?;
    result
}

fn detect(directory: &Path) -> Result<Vec<String>, Error> {
    for path in ["", "lower1", "lower2", "upper", "work"].map(|name| directory.join(name)) {
        DirBuilder::new().mode(0o700).create(&path).map_err(Error::io("create directory", &path))?;
    }
    require_entry_types(directory)?;
    let mut options = Vec::new();
    // In a user namespace overlay may not write `trusted.*` attributes and must be told to use `user.*`.
    if !in_initial_user_namespace() && mount(directory, Some("userxattr")).is_ok() {
        options.push("userxattr".to_owned());
    }
    mount(directory, options.first().map(String::as_str)).map_err(Error::io(
        "mount an overlay (is it in the kernel, and may this process mount?) in",
        directory,
    ))?;
    // The mount above has loaded the module; only now its parameters can be looked at.
    if Path::new("/sys/module/overlay/parameters/index").exists() {
        options.push("index=off".to_owned());
    }
    Ok(options)
}

/// Without types in directory entries overlay shows its marks for removed files.
fn require_entry_types(directory: &Path) -> Result<(), Error> {
    let reading = "read directory";
    let open = File::open(directory).map_err(Error::io(reading, directory))?;
    for entry in Dir::read_from(&open).map_err(Error::io(reading, directory))? {
        let entry = entry.map_err(Error::io(reading, directory))?;
        if entry.file_type() == FileType::Unknown {
            return Err(Error::FailedPrecondition(format!(
                "the file system of {} does not store file types in directories; on XFS, format with ftype=1",
                directory.display()
            )));
        }
    }
    Ok(())
}

fn in_initial_user_namespace() -> bool {
    fs::read_to_string("/proc/self/uid_map")
        .is_ok_and(|map| map.split_whitespace().collect::<Vec<_>>() == ["0", "0", "4294967295"])
}

/// Mounts without attaching the mount anywhere: it is gone with its descriptor, also after kill -9.
fn mount(directory: &Path, option: Option<&str>) -> std::io::Result<()> {
    let open = |name| File::open(directory.join(name));
    let (lower1, lower2, upper, work) = (open("lower1")?, open("lower2")?, open("upper")?, open("work")?);
    // A value may have 255 bytes, which two paths can exceed.
    let path = |directory: &File| format!("/proc/self/fd/{}", directory.as_raw_fd());
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "lowerdir", format!("{}:{}", path(&lower1), path(&lower2)))?;
    fsconfig_set_string(&context, "upperdir", path(&upper))?;
    fsconfig_set_string(&context, "workdir", path(&work))?;
    if let Some(option) = option {
        fsconfig_set_flag(&context, option)?;
    }
    fsconfig_create(&context)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlay_can_be_mounted_and_nothing_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::create(dir.path()).unwrap();
        let options = detect_options(&layout).unwrap();
        assert!(options.iter().all(|o| o == "index=off" || o == "userxattr"), "{options:?}");
        assert_eq!(fs::read_dir(layout.snapshots()).unwrap().count(), 0);
    }
}
