//! Before anything is stopped: does a process hold what CRIU cannot dump?
//!
//! Every finding names the process and the descriptor. CRIU has the last word; this says it earlier and plainer.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::path::Path;

use serde::Serialize;

/// One descriptor that keeps a process from being captured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The process's pid on the host.
    pub pid: u32,
    /// Its command name.
    pub comm: String,
    /// The descriptor's number.
    pub fd: u32,
    /// What the descriptor refers to, as the kernel names it.
    pub target: String,
    /// Why it cannot be dumped and what helps.
    pub reason: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "process {} ({}) has descriptor {} open on {}: {}",
            self.pid, self.comm, self.fd, self.target, self.reason
        )
    }
}

/// Descriptors by the start of the kernel's name for them.
const NOT_DUMPABLE: [(&str, &str); 8] = [
    (
        "anon_inode:[io_uring]",
        "io_uring rings cannot be dumped; run the container with containerd's default seccomp profile \
         (it forbids io_uring), or make the program use epoll (vLLM: asyncio instead of uvloop)",
    ),
    ("anon_inode:[perf_event]", "performance counters cannot be dumped; close them before the capture"),
    ("anon_inode:[userfaultfd]", "userfaultfd cannot be dumped"),
    ("anon_inode:kvm", "virtual machines cannot be dumped"),
    ("anon_inode:bpf", "BPF programs and links cannot be dumped"),
    ("/dev/nvidia", "accelerator devices need the n580 or n610 snapshot driver, which is not there yet"),
    ("/dev/dri/", "accelerator devices cannot be dumped"),
    ("/dev/kfd", "accelerator devices cannot be dumped"),
];

/// Looks at every descriptor of the processes `pids` (host pids). Processes that are gone are skipped.
pub fn preflight(pids: &[u32]) -> Vec<Finding> {
    pids.iter().flat_map(|pid| inspect(*pid)).collect()
}

fn inspect(pid: u32) -> Vec<Finding> {
    let proc = Path::new("/proc").join(pid.to_string());
    let comm = fs::read_to_string(proc.join("comm")).unwrap_or_default().trim_end().to_owned();
    let mounts = mount_ids(&fs::read_to_string(proc.join("mountinfo")).unwrap_or_default());
    let Ok(descriptors) = fs::read_dir(proc.join("fd")) else { return Vec::new() };
    let mut findings = Vec::new();
    for entry in descriptors.flatten() {
        let Some(fd) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let target = target.to_string_lossy().into_owned();
        let info = fs::read_to_string(proc.join("fdinfo").join(fd.to_string())).unwrap_or_default();
        if let Some(reason) = reason(&target, mount_id(&info), &mounts) {
            findings.push(Finding { pid, comm: comm.clone(), fd, target, reason });
        }
    }
    findings.sort_by_key(|f| f.fd);
    findings
}

/// Why a descriptor with this name and mount id cannot be dumped.
fn reason(target: &str, mount: Option<u32>, mounts: &HashSet<u32>) -> Option<String> {
    if let Some((_, reason)) = NOT_DUMPABLE.iter().find(|(start, _)| target.starts_with(start)) {
        return Some((*reason).to_owned());
    }
    // runc opens the container's own /dev/null and terminal again.
    let regular = target.starts_with('/')
        && !target.starts_with("/memfd:")
        && !target.starts_with("/dev/")
        && !target.starts_with("/SYSV");
    match mount {
        Some(id) if regular && !mounts.is_empty() && !mounts.contains(&id) => Some(
            "the file lies outside the container's mounts (often output redirected to a host file); \
             use a pipe, containerd's log URI, or a bind mount"
                .to_owned(),
        ),
        _ => None,
    }
}

/// The first field of each line of `mountinfo`.
fn mount_ids(mountinfo: &str) -> HashSet<u32> {
    mountinfo.lines().filter_map(|line| line.split(' ').next()?.parse().ok()).collect()
}

/// The `mnt_id` line of `fdinfo`.
fn mount_id(fdinfo: &str) -> Option<u32> {
    fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_what_cannot_be_dumped() {
        let mounts = HashSet::from([20, 21]);
        assert!(reason("anon_inode:[io_uring]", Some(9), &mounts).is_some_and(|r| r.contains("io_uring")));
        assert!(reason("/dev/nvidia0", Some(20), &mounts).is_some());
        assert!(reason("/var/log/out.log", Some(99), &mounts).is_some_and(|r| r.contains("outside")));
        for fine in ["/var/log/out.log", "/models/m.gguf"] {
            assert_eq!(reason(fine, Some(20), &mounts), None);
        }
        for fine in ["/memfd:x (deleted)", "/dev/null", "pipe:[1]", "socket:[2]", "anon_inode:[eventpoll]"] {
            assert_eq!(reason(fine, Some(99), &mounts), None);
        }
    }

    #[test]
    fn this_process_has_nothing_undumpable_but_a_foreign_file_is_found_in_text() {
        assert_eq!(mount_id("pos:\t0\nflags:\t0100000\nmnt_id:\t28\nino:\t5\n"), Some(28));
        assert_eq!(
            mount_ids("28 1 254:0 / / rw - ext4 /dev/vda rw\n29 28 0:5 / /proc rw - proc proc rw\n").len(),
            2
        );
    }
}
