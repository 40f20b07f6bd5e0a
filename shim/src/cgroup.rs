//! Where a process's cgroups are, and reading their files.
//!
//! Three layouts exist: one hierarchy for all controllers (v2), one per controller (v1), and hybrid: v1 with an empty
//! v2 tree beside it, which counts as v1.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// A killed process leaves its group within milliseconds.
const REMOVE_TRIES: u32 = 20;
const REMOVE_PAUSE: Duration = Duration::from_millis(10);

/// The cgroup directories of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cgroup {
    /// The one directory.
    Unified(PathBuf),
    /// A directory for each controller.
    PerController(HashMap<String, PathBuf>),
}

impl Cgroup {
    /// The cgroups of process `pid`; `None` when it has gone or no cgroup filesystem is mounted.
    pub fn of_process(pid: i32) -> Option<Self> {
        let membership = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
        Self::locate(&membership, &mounts)
    }

    fn locate(membership: &str, mounts: &str) -> Option<Self> {
        let hierarchies: Vec<Hierarchy<'_>> = mounts.lines().filter_map(Hierarchy::parse).collect();
        let mut per_controller = HashMap::new();
        let mut unified = None;
        for line in membership.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
            if controllers.is_empty() {
                let tree = hierarchies.iter().find(|hierarchy| hierarchy.controllers.is_none());
                unified = tree.map(|tree| tree.directory(path));
            }
            for controller in controllers.split(',').filter(|name| !name.is_empty() && !name.contains('=')) {
                let tree = hierarchies.iter().find(|hierarchy| hierarchy.has(controller));
                per_controller.extend(tree.map(|tree| (controller.to_owned(), tree.directory(path))));
            }
        }
        match per_controller.is_empty() {
            true => unified.map(Self::Unified),
            false => Some(Self::PerController(per_controller)),
        }
    }
}

/// Removes the cgroups at `path` (as in the spec's `cgroupsPath`) that a runtime which was killed left behind; the
/// runtime has removed them already when it knew the container. Processes in them are killed if the last component
/// of the path names container `id`, so that nobody else can have any.
pub fn remove_leftovers(path: &str, id: &str) {
    // systemd's form is `slice:prefix:name`; systemd removes what is empty.
    if !path.starts_with('/') || path.contains("..") {
        return;
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let directories = mounts.lines().filter_map(Hierarchy::parse).map(|hierarchy| hierarchy.directory(path));
    for directory in directories.filter(|directory| directory.is_dir()) {
        for _ in 0..REMOVE_TRIES {
            if path.rsplit('/').next().is_some_and(|name| name.contains(id)) {
                kill_members(&directory);
            }
            match std::fs::remove_dir(&directory) {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                Err(_) => std::thread::sleep(REMOVE_PAUSE),
            }
        }
    }
}

fn kill_members(directory: &Path) {
    let members = std::fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
    for pid in members.lines().filter_map(|line| line.parse().ok()).filter_map(Pid::from_raw) {
        // It may have ended since.
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// A mounted cgroup filesystem.
#[derive(Debug)]
struct Hierarchy<'a> {
    root: &'a str,
    mount_point: &'a str,
    /// `None` for the unified hierarchy.
    controllers: Option<Vec<&'a str>>,
}

impl<'a> Hierarchy<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (front, back) = line.split_once(" - ")?;
        let mut front = front.split(' ').skip(3);
        let (root, mount_point) = (front.next()?, front.next()?);
        let mut back = back.split(' ');
        let (kind, options) = (back.next()?, back.nth(1)?);
        let controllers = match kind {
            "cgroup2" => None,
            "cgroup" => Some(options.split(',').collect()),
            _ => return None,
        };
        Some(Self { root, mount_point, controllers })
    }

    fn has(&self, controller: &str) -> bool {
        self.controllers.as_ref().is_some_and(|names| names.contains(&controller))
    }

    fn directory(&self, path: &str) -> PathBuf {
        // A bind of a part of the hierarchy shows paths below that part only.
        let inside = match self.root {
            "/" => path,
            root => path.strip_prefix(root).unwrap_or(path),
        };
        Path::new(self.mount_point).join(inside.trim_start_matches('/'))
    }
}

/// A file that holds one number; `max` is the greatest.
pub fn number(directory: &Path, file: &str) -> Option<u64> {
    let text = std::fs::read_to_string(directory.join(file)).ok()?;
    parse(text.trim())
}

/// A file of lines `key number`.
pub fn table(directory: &Path, file: &str) -> HashMap<String, u64> {
    let text = std::fs::read_to_string(directory.join(file)).unwrap_or_default();
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(key, value)| Some((key.to_owned(), parse(value)?)))
        .collect()
}

fn parse(text: &str) -> Option<u64> {
    if text == "max" { Some(u64::MAX) } else { text.trim().parse().ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unified_hierarchy_is_found() {
        let mounts = "30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(
            Cgroup::locate("0::/default/c1\n", mounts),
            Some(Cgroup::Unified("/sys/fs/cgroup/default/c1".into()))
        );
        assert_eq!(Cgroup::locate("0::/default/c1\n", ""), None);
    }

    #[test]
    fn hybrid_counts_as_one_directory_per_controller() {
        let mounts = "31 25 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
                      32 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:1 - cgroup cgroup rw,cpu,cpuacct\n\
                      33 25 0:29 /part /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      34 25 0:30 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n";
        let membership = "4:memory:/part/c1\n3:name=systemd:/c1\n2:cpu,cpuacct:/default/c1\n0::/default/c1\n";
        let Some(Cgroup::PerController(found)) = Cgroup::locate(membership, mounts) else { panic!("not v1") };
        assert_eq!(found.len(), 3);
        assert_eq!(found["cpuacct"], Path::new("/sys/fs/cgroup/cpu,cpuacct/default/c1"));
        assert_eq!(found["memory"], Path::new("/sys/fs/cgroup/memory/c1"));
    }

    #[test]
    fn files_are_read_as_numbers_and_tables() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("pids.max"), "max\n").unwrap();
        std::fs::write(directory.path().join("memory.stat"), "anon 4096\nfile 7\nodd\n").unwrap();
        assert_eq!(number(directory.path(), "pids.max"), Some(u64::MAX));
        assert_eq!(number(directory.path(), "missing"), None);
        assert_eq!(
            table(directory.path(), "memory.stat"),
            HashMap::from([("anon".to_owned(), 4096), ("file".to_owned(), 7)])
        );
    }
}
