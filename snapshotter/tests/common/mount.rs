//! Mounts as containerd makes them: each below the root of the first, unmounted in reverse order.

use std::ffi::CString;
use std::path::Path;
use std::time::{Duration, Instant};

use coldsnap_snapshotter::proto::Mount;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags,
    UnmountFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount,
    mount_change, mount_remount, move_mount, unmount,
};
use rustix::thread::UnshareFlags;

/// Puts the calling thread into its own mount namespace, which the kernel dissolves with the thread.
pub fn private_namespace() {
    // SAFETY: only the file system attributes of this thread are unshared; nothing in this process relies on
    // sharing its working directory or mounts with other threads.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }.expect("these tests need root");
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
}

/// Mounts a file system of this size, which its memory bounds.
pub fn small_file_system(bytes: usize, target: &Path) {
    let data = CString::new(format!("size={bytes},mode=0700")).unwrap();
    mount("tmpfs", target, "tmpfs", MountFlags::empty(), Some(data.as_c_str())).unwrap();
}

/// Mounts all, runs `f` on the root, unmounts all.
pub fn with<T>(mounts: &[Mount], target: &Path, f: impl FnOnce(&Path) -> T) -> T {
    all(mounts, target);
    let result = f(target);
    for mount in mounts.iter().rev() {
        unmount_quiet(&target.join(&mount.target));
    }
    result
}

/// Unmounts. Between its fork and its exec a program that another test starts has every open file of this process, also
/// one below the mount: that is over in a moment.
fn unmount_quiet(target: &Path) {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        match unmount(target, UnmountFlags::empty()) {
            Err(Errno::BUSY) if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
            result => return result.unwrap(),
        }
    }
}

/// Mounts all.
pub fn all(mounts: &[Mount], target: &Path) {
    for mount in mounts {
        one(mount, &target.join(&mount.target));
    }
}

fn one(m: &Mount, target: &Path) {
    let mut flags = MountFlags::empty();
    let mut data = Vec::new();
    for option in &m.options {
        match option.as_str() {
            "bind" => flags |= MountFlags::BIND,
            "rbind" => flags |= MountFlags::BIND | MountFlags::REC,
            "ro" => flags |= MountFlags::RDONLY,
            "rw" => flags -= MountFlags::RDONLY,
            other => data.push(other),
        }
    }
    let data = data.join(",");
    if data.len() > 3584 {
        return long_overlay(m, target);
    }
    let text = CString::new(data).unwrap();
    mount(m.source.as_str(), target, m.r#type.as_str(), flags, Some(text.as_c_str()))
        .unwrap_or_else(|e| panic!("cannot mount {m:?} on {}: {e}", target.display()));
    if flags.contains(MountFlags::BIND | MountFlags::RDONLY) {
        mount_remount(target, MountFlags::BIND | MountFlags::RDONLY, "").unwrap();
    }
}

/// mount(2) takes one page of options; the newer calls take one option at a time.
fn long_overlay(m: &Mount, target: &Path) {
    let context = fsopen(m.r#type.as_str(), FsOpenFlags::empty()).unwrap();
    for option in &m.options {
        match option.split_once('=') {
            Some(("lowerdir", paths)) => {
                for path in paths.split(':') {
                    fsconfig_set_string(&context, "lowerdir+", path).unwrap();
                }
            }
            Some((key, value)) => fsconfig_set_string(&context, key, value).unwrap(),
            None => fsconfig_set_flag(&context, option.as_str()).unwrap(),
        }
    }
    fsconfig_create(&context).unwrap();
    let mount = fsmount(&context, FsMountFlags::empty(), MountAttrFlags::empty()).unwrap();
    move_mount(&mount, "", rustix::fs::CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).unwrap();
}

/// Mount points of this thread's namespace below `directory`.
pub fn below(directory: &Path) -> Vec<String> {
    let table = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(str::to_owned);
    points.filter(|point| Path::new(point).starts_with(directory)).collect()
}
