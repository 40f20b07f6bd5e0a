//! The container's root filesystem: which of containerd's mounts make it, mounting and unmounting.
//!
//! A mount below the root that is a read-only bind (a payload) is not mounted here but lifted into the OCI spec:
//! the runtime then mounts it inside the container and CRIU knows it as a declared external mount.

use std::ffi::CString;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use containerd_shim_protos::types::mount::Mount;
use log::warn;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, mount_remount, unmount,
};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use thiserror::Error;

/// The kernel copies at most one page of mount options.
const OPTION_LIMIT: usize = 4096;
/// How often and how long an unmount waits for a file that is still in use.
const BUSY_RETRIES: u32 = 20;
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// The root filesystem could not be mounted or unmounted.
#[derive(Debug, Error)]
pub enum MountError {
    /// The kernel refused.
    #[error("cannot {act}: {source}")]
    Kernel {
        /// What was being done, and to what.
        act: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// The request's mount cannot be used.
    #[error("mount of {mount_source:?} (type {kind:?}, target {target:?}): {problem}")]
    Unusable {
        /// Its source.
        mount_source: String,
        /// Its filesystem type.
        kind: String,
        /// Its path below the root filesystem.
        target: String,
        /// What is wrong with it and what would help.
        problem: &'static str,
    },
}

impl MountError {
    fn unusable(mount: &Mount, problem: &'static str) -> Self {
        Self::Unusable {
            mount_source: mount.source.clone(),
            kind: mount.type_.clone(),
            target: mount.target.clone(),
            problem,
        }
    }
}

fn kernel(act: impl Into<String>) -> impl FnOnce(rustix::io::Errno) -> MountError {
    let act = act.into();
    |errno| MountError::Kernel { act, source: errno.into() }
}

/// A read-only bind that the runtime mounts inside the container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiftedBind {
    /// File or directory of the host.
    pub source: String,
    /// Absolute path in the container.
    pub destination: String,
    /// OCI mount options.
    pub options: Vec<String>,
}

/// containerd's mounts, sorted by who mounts them.
#[derive(Debug, Default)]
pub struct RootMounts {
    /// Mounted by the shim, in this order.
    pub direct: Vec<Mount>,
    /// Mounted by the runtime.
    pub lifted: Vec<LiftedBind>,
}

impl RootMounts {
    /// Sorts the mounts of a create request.
    ///
    /// # Errors
    /// A target leaves the root filesystem, or an option is unknown to this shim.
    pub fn sort(mounts: Vec<Mount>) -> Result<Self, MountError> {
        let mut sorted = Self::default();
        for mount in mounts {
            if mount.target.is_empty() {
                sorted.direct.push(mount);
                continue;
            }
            let destination = destination(&mount)?;
            let has = |name: &str| mount.options.iter().any(|option| option == name);
            let is_bind = mount.type_ == "bind" || has("bind") || has("rbind");
            if is_bind && has("ro") {
                sorted.lifted.push(LiftedBind {
                    destination,
                    options: lifted_options(&mount),
                    source: mount.source,
                });
            } else {
                sorted.direct.push(mount);
            }
        }
        Ok(sorted)
    }
}

/// Mounts all of `mounts` at `rootfs`, in this order.
///
/// # Errors
/// The kernel refuses one; those before stay mounted ([`unmount_below`] removes them).
pub fn mount_all(mounts: &[Mount], rootfs: &Path) -> Result<(), MountError> {
    for mount in mounts {
        let target = match mount.target.as_str() {
            "" => rootfs.to_owned(),
            _ => existing_below(rootfs, mount)?,
        };
        mount_one(mount, &target)?;
    }
    Ok(())
}

fn destination(mount: &Mount) -> Result<String, MountError> {
    let target = Path::new(mount.target.trim_start_matches('/'));
    let plain = target.components().all(|component| matches!(component, Component::Normal(_)));
    match target.to_str() {
        Some(text) if plain && !text.is_empty() => Ok(format!("/{text}")),
        _ => Err(MountError::unusable(
            mount,
            "its target must be a path below the root filesystem, without ..",
        )),
    }
}

fn lifted_options(mount: &Mount) -> Vec<String> {
    let mut options = mount.options.clone();
    for always in ["bind", "ro", "nosuid", "nodev"] {
        if !options.iter().any(|option| option == always || (always == "bind" && option == "rbind")) {
            options.push(always.to_owned());
        }
    }
    options
}

/// The target of a mount below the root: it must not lead out of it through a symbolic link.
fn existing_below(rootfs: &Path, mount: &Mount) -> Result<PathBuf, MountError> {
    let path = rootfs.join(destination(mount)?.trim_start_matches('/'));
    let act = format!("find the mount target {}", path.display());
    let real = path.canonicalize().map_err(|source| MountError::Kernel { act, source })?;
    let root = rootfs
        .canonicalize()
        .map_err(|source| MountError::Kernel { act: format!("find {}", rootfs.display()), source })?;
    if real.starts_with(&root) {
        Ok(real)
    } else {
        Err(MountError::unusable(
            mount,
            "its target leads out of the root filesystem through a symbolic link",
        ))
    }
}

/// fstab-style options in the kernel's terms.
#[derive(Debug, PartialEq, Eq)]
struct Options {
    flags: MountFlags,
    recursive: bool,
    propagation: MountPropagationFlags,
    data: Vec<String>,
}

impl Options {
    fn parse(mount: &Mount) -> Result<Self, MountError> {
        let mut options = Self {
            flags: MountFlags::empty(),
            recursive: false,
            propagation: MountPropagationFlags::empty(),
            data: Vec::new(),
        };
        for option in &mount.options {
            options.add(option, mount)?;
        }
        Ok(options)
    }

    fn add(&mut self, option: &str, mount: &Mount) -> Result<(), MountError> {
        let (flag, set) = match option {
            "" | "defaults" => return Ok(()),
            "bind" => (MountFlags::BIND, true),
            "rbind" => {
                self.recursive = true;
                (MountFlags::BIND, true)
            }
            "ro" => (MountFlags::RDONLY, true),
            "rw" => (MountFlags::RDONLY, false),
            "nosuid" => (MountFlags::NOSUID, true),
            "suid" => (MountFlags::NOSUID, false),
            "nodev" => (MountFlags::NODEV, true),
            "dev" => (MountFlags::NODEV, false),
            "noexec" => (MountFlags::NOEXEC, true),
            "exec" => (MountFlags::NOEXEC, false),
            "sync" => (MountFlags::SYNCHRONOUS, true),
            "async" => (MountFlags::SYNCHRONOUS, false),
            "dirsync" => (MountFlags::DIRSYNC, true),
            "noatime" => (MountFlags::NOATIME, true),
            "atime" => (MountFlags::NOATIME, false),
            "nodiratime" => (MountFlags::NODIRATIME, true),
            "diratime" => (MountFlags::NODIRATIME, false),
            "relatime" => (MountFlags::RELATIME, true),
            "norelatime" => (MountFlags::RELATIME, false),
            "strictatime" => (MountFlags::STRICTATIME, true),
            "nostrictatime" => (MountFlags::STRICTATIME, false),
            "private" | "rprivate" | "slave" | "rslave" | "shared" | "rshared" | "unbindable"
            | "runbindable" => {
                return self.add_propagation(option);
            }
            "remount" | "loop" => {
                return Err(MountError::unusable(
                    mount,
                    "remount and loop mounts are not implemented by this shim",
                ));
            }
            _ if option.starts_with("uidmap=") || option.starts_with("gidmap=") => {
                return Err(MountError::unusable(mount, "id-mapped mounts are not implemented by this shim"));
            }
            _ => {
                self.data.push(option.to_owned());
                return Ok(());
            }
        };
        self.flags.set(flag, set);
        Ok(())
    }

    fn add_propagation(&mut self, option: &str) -> Result<(), MountError> {
        let kind = option.strip_prefix('r').unwrap_or(option);
        self.propagation |= match kind {
            "private" => MountPropagationFlags::PRIVATE,
            "slave" => MountPropagationFlags::DOWNSTREAM,
            "shared" => MountPropagationFlags::SHARED,
            _ => MountPropagationFlags::UNBINDABLE,
        };
        if kind != option {
            self.propagation |= MountPropagationFlags::REC;
        }
        Ok(())
    }
}

fn mount_one(request: &Mount, target: &Path) -> Result<(), MountError> {
    let options = Options::parse(request)?;
    let act = |verb: &str| format!("{verb} {} {} at {}", request.type_, request.source, target.display());
    let data_length: usize = options.data.iter().map(|option| option.len() + 1).sum();
    if data_length < OPTION_LIMIT {
        mount_now(request, target, &options, &options.data)?;
    } else {
        let (directory, data) = shortened(&options.data)
            .filter(|(_, data)| data.iter().map(|option| option.len() + 1).sum::<usize>() < OPTION_LIMIT)
            .ok_or_else(|| {
                MountError::unusable(request, "its options are longer than a page, also when shortened")
            })?;
        mount_in_directory(&directory, request, target, &options, &data)?;
    }
    if !options.propagation.is_empty() {
        mount_change(target, options.propagation).map_err(kernel(act("set the propagation of")))?;
    }
    // A bind takes its flags only from a second call.
    if options.flags.contains(MountFlags::BIND) && options.flags != MountFlags::BIND {
        mount_remount(target, options.flags, c"").map_err(kernel(act("set the flags of")))?;
    }
    Ok(())
}

fn mount_now(request: &Mount, target: &Path, options: &Options, data: &[String]) -> Result<(), MountError> {
    let act = format!("mount {} {} at {}", request.type_, request.source, target.display());
    let data = CString::new(data.join(","))
        .map_err(|_| MountError::unusable(request, "an option contains a zero byte"))?;
    let mut flags = options.flags;
    if options.recursive {
        flags |= MountFlags::from_bits_retain(MountPropagationFlags::REC.bits());
    }
    mount(&request.source, target, &request.type_, flags, data.as_c_str()).map_err(kernel(act))
}

/// Mounts from a thread whose current directory is `directory`, so that lower directories can be named relative to it.
fn mount_in_directory(
    directory: &str,
    request: &Mount,
    target: &Path,
    options: &Options,
    data: &[String],
) -> Result<(), MountError> {
    let act = format!("use {directory} as the base of overlay layers");
    let target =
        std::path::absolute(target).map_err(|source| MountError::Kernel { act: act.clone(), source })?;
    std::thread::scope(|scope| {
        let mounting = scope.spawn(|| {
            // SAFETY: only the thread's own file system context (current directory, umask) is unshared; file
            // descriptors stay shared.
            unsafe { unshare_unsafe(UnshareFlags::FS) }.map_err(kernel(act.clone()))?;
            rustix::process::chdir(directory).map_err(kernel(act.clone()))?;
            mount_now(request, &target, options, data)
        });
        mounting.join().unwrap_or_else(|_| {
            Err(MountError::Kernel {
                act: act.clone(),
                source: io::Error::other("the mounting thread panicked"),
            })
        })
    })
}

/// The longest common directory of an overlay's layers, and the options with the layers relative to it.
fn shortened(data: &[String]) -> Option<(String, Vec<String>)> {
    let layers: Vec<&str> =
        data.iter().find_map(|option| option.strip_prefix("lowerdir="))?.split(':').collect();
    let first = layers.first()?;
    let common = layers.iter().fold(first.len(), |common, layer| {
        first.bytes().zip(layer.bytes()).take(common).take_while(|(a, b)| a == b).count()
    });
    let directory = first.get(..=first.get(..common)?.rfind('/')?)?;
    let relative: Vec<&str> =
        layers.iter().map(|layer| layer.strip_prefix(directory).unwrap_or(layer)).collect();
    let lower = format!("lowerdir={}", relative.join(":"));
    let data = data.iter().map(|option| match option.starts_with("lowerdir=") {
        true => lower.clone(),
        false => option.clone(),
    });
    Some((directory.to_owned(), data.collect()))
}

/// Unmounts everything at and below `root`, the last mounted first. Nothing mounted is success.
///
/// # Errors
/// The mount table cannot be read, or the kernel refuses to unmount (a busy mount is detached instead).
pub fn unmount_below(root: &Path) -> Result<(), MountError> {
    let act = "read /proc/self/mountinfo".to_owned();
    let table = std::fs::read("/proc/self/mountinfo").map_err(|source| MountError::Kernel { act, source })?;
    let root = std::path::absolute(root)
        .map_err(|source| MountError::Kernel { act: format!("find {}", root.display()), source })?;
    for point in mount_points(&table).into_iter().rev().filter(|point| point.starts_with(&root)) {
        unmount_one(&point)?;
    }
    Ok(())
}

fn unmount_one(point: &Path) -> Result<(), MountError> {
    for _ in 0..BUSY_RETRIES {
        match unmount(point, UnmountFlags::NOFOLLOW) {
            // Gone already, or no mount point any more.
            Ok(()) | Err(rustix::io::Errno::NOENT | rustix::io::Errno::INVAL) => return Ok(()),
            Err(rustix::io::Errno::BUSY) => std::thread::sleep(BUSY_PAUSE),
            Err(errno) => return Err(kernel(format!("unmount {}", point.display()))(errno)),
        }
    }
    warn!("{} is still in use: detached, it goes away with its last user", point.display());
    unmount(point, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)
        .map_err(kernel(format!("detach {}", point.display())))
}

/// The mount points of a mountinfo table, in mount order.
fn mount_points(table: &[u8]) -> Vec<PathBuf> {
    use std::os::unix::ffi::OsStringExt;
    let field = |line: &[u8]| line.split(|&byte| byte == b' ').nth(4).map(unescaped);
    let lines = table.split(|&byte| byte == b'\n');
    lines.filter_map(field).map(|bytes| PathBuf::from(std::ffi::OsString::from_vec(bytes))).collect()
}

/// mountinfo writes blanks, newlines and backslashes as three octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let escaped = (first == b'\\')
            .then(|| tail.get(..3).and_then(|digits| std::str::from_utf8(digits).ok()))
            .flatten()
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(escaped.unwrap_or(first));
        rest = if escaped.is_some() { tail.get(3..).unwrap_or_default() } else { tail };
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(kind: &str, source: &str, target: &str, options: &[&str]) -> Mount {
        Mount {
            type_: kind.to_owned(),
            source: source.to_owned(),
            target: target.to_owned(),
            options: options.iter().map(|&option| option.to_owned()).collect(),
            ..Default::default()
        }
    }

    #[test]
    fn read_only_binds_below_the_root_are_lifted() {
        let sorted = RootMounts::sort(vec![
            request("overlay", "overlay", "", &["lowerdir=/a:/b"]),
            request("bind", "/store/x.pack", "opt/x.pack", &["ro", "bind"]),
            request("bind", "/scratch", "/data", &["rw", "rbind"]),
        ])
        .unwrap();
        assert_eq!(sorted.direct.len(), 2);
        assert_eq!(
            sorted.lifted,
            [LiftedBind {
                source: "/store/x.pack".to_owned(),
                destination: "/opt/x.pack".to_owned(),
                options: ["ro", "bind", "nosuid", "nodev"].map(str::to_owned).to_vec(),
            }]
        );
    }

    #[test]
    fn a_target_outside_of_the_root_is_refused() {
        for target in ["../etc", "a/../../b", "/"] {
            let result = RootMounts::sort(vec![request("bind", "/x", target, &["ro", "bind"])]);
            assert!(matches!(result, Err(MountError::Unusable { .. })), "{target}");
        }
    }

    #[test]
    fn options_become_flags_and_data() {
        let parse = |options: &[&str]| Options::parse(&request("overlay", "o", "", options));
        let parsed = parse(&["rbind", "ro", "rw", "nosuid", "rslave", "index=off", "lowerdir=/a"]).unwrap();
        assert_eq!(parsed.flags, MountFlags::BIND | MountFlags::NOSUID);
        assert!(parsed.recursive);
        assert_eq!(parsed.propagation, MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC);
        assert_eq!(parsed.data, ["index=off", "lowerdir=/a"]);
        assert!(parse(&["loop"]).is_err());
        assert!(parse(&["uidmap=0:1000:1"]).is_err());
    }

    #[test]
    fn long_layer_lists_become_relative() {
        let data = ["upperdir=/u", "lowerdir=/var/snapshots/12/fs:/var/snapshots/1/fs"].map(str::to_owned);
        let (directory, data) = shortened(&data).unwrap();
        assert_eq!(directory, "/var/snapshots/");
        assert_eq!(data, ["upperdir=/u", "lowerdir=12/fs:1/fs"]);
        assert!(shortened(&["index=off".to_owned()]).is_none());
    }

    #[test]
    fn mount_points_are_unescaped() {
        let table =
            b"22 1 0:21 / /proc rw - proc proc rw\n23 1 0:22 / /a\\040b\\134c rw shared:1 - tmpfs t rw\n";
        assert_eq!(mount_points(table), [PathBuf::from("/proc"), PathBuf::from("/a b\\c")]);
    }
}
