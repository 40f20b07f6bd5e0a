//! Resource usage of a container, from its cgroups, in the messages that kubelet and `ctr task metrics` read.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use containerd_shim::util::convert_to_any;
use containerd_shim_protos::cgroups::metrics as v1;
use containerd_shim_protos::cgroups_v2::metrics as v2;
use containerd_shim_protos::protobuf::well_known_types::any::Any;

use crate::cgroup::{Cgroup, number, table};
use crate::container::Container;
use crate::error::TaskError;

/// v1 counts CPU time in ticks of this many nanoseconds (`USER_HZ` is 100 everywhere).
const TICK_NANOSECONDS: u64 = 10_000_000;

/// The metrics of the container's cgroups: memory, CPU, pids and I/O.
///
/// # Errors
/// The container does not run yet, so that it has no cgroup.
pub fn collect(container: &Container) -> Result<Any, TaskError> {
    let cgroup = container
        .cgroup()
        .ok_or_else(|| TaskError::NotFound(format!("container {} has no cgroup yet", container.id)))?;
    let message = match cgroup {
        Cgroup::Unified(directory) => convert_to_any(Box::new(unified(directory))),
        Cgroup::PerController(directories) => convert_to_any(Box::new(per_controller(directories))),
    };
    message.map_err(|error| TaskError::Other(format!("container {}: metrics: {error}", container.id)))
}

fn unified(directory: &Path) -> v2::Metrics {
    let value = |file: &str| number(directory, file).unwrap_or_default();
    let mut metrics = v2::Metrics::new();
    metrics.pids =
        Some(v2::PidsStat { current: value("pids.current"), limit: value("pids.max"), ..Default::default() })
            .into();
    metrics.cpu = Some(unified_cpu(&table(directory, "cpu.stat"))).into();
    metrics.memory = Some(v2::MemoryStat {
        usage: value("memory.current"),
        usage_limit: value("memory.max"),
        max_usage: value("memory.peak"),
        swap_usage: value("memory.swap.current"),
        swap_limit: value("memory.swap.max"),
        swap_max_usage: value("memory.swap.peak"),
        ..unified_memory(&table(directory, "memory.stat"))
    })
    .into();
    let events = table(directory, "memory.events");
    let event = |key: &str| events.get(key).copied().unwrap_or_default();
    metrics.memory_events = Some(v2::MemoryEvents {
        low: event("low"),
        high: event("high"),
        max: event("max"),
        oom: event("oom"),
        oom_kill: event("oom_kill"),
        oom_group_kill: event("oom_group_kill"),
        ..Default::default()
    })
    .into();
    let io = std::fs::read_to_string(directory.join("io.stat")).unwrap_or_default();
    let usage = io.lines().filter_map(unified_io).collect();
    metrics.io = Some(v2::IOStat { usage, ..Default::default() }).into();
    metrics
}

fn unified_cpu(stat: &HashMap<String, u64>) -> v2::CPUStat {
    let value = |key: &str| stat.get(key).copied().unwrap_or_default();
    v2::CPUStat {
        usage_usec: value("usage_usec"),
        user_usec: value("user_usec"),
        system_usec: value("system_usec"),
        nr_periods: value("nr_periods"),
        nr_throttled: value("nr_throttled"),
        throttled_usec: value("throttled_usec"),
        nr_bursts: value("nr_bursts"),
        burst_usec: value("burst_usec"),
        ..Default::default()
    }
}

fn unified_memory(stat: &HashMap<String, u64>) -> v2::MemoryStat {
    let value = |key: &str| stat.get(key).copied().unwrap_or_default();
    v2::MemoryStat {
        anon: value("anon"),
        file: value("file"),
        kernel_stack: value("kernel_stack"),
        slab: value("slab"),
        sock: value("sock"),
        shmem: value("shmem"),
        file_mapped: value("file_mapped"),
        file_dirty: value("file_dirty"),
        file_writeback: value("file_writeback"),
        anon_thp: value("anon_thp"),
        inactive_anon: value("inactive_anon"),
        active_anon: value("active_anon"),
        inactive_file: value("inactive_file"),
        active_file: value("active_file"),
        unevictable: value("unevictable"),
        slab_reclaimable: value("slab_reclaimable"),
        slab_unreclaimable: value("slab_unreclaimable"),
        pgfault: value("pgfault"),
        pgmajfault: value("pgmajfault"),
        // Split in two since Linux 5.9; the message has one field.
        workingset_refault: value("workingset_refault")
            + value("workingset_refault_anon")
            + value("workingset_refault_file"),
        workingset_activate: value("workingset_activate")
            + value("workingset_activate_anon")
            + value("workingset_activate_file"),
        workingset_nodereclaim: value("workingset_nodereclaim"),
        pgrefill: value("pgrefill"),
        pgscan: value("pgscan"),
        pgsteal: value("pgsteal"),
        pgactivate: value("pgactivate"),
        pgdeactivate: value("pgdeactivate"),
        pglazyfree: value("pglazyfree"),
        pglazyfreed: value("pglazyfreed"),
        thp_fault_alloc: value("thp_fault_alloc"),
        thp_collapse_alloc: value("thp_collapse_alloc"),
        ..Default::default()
    }
}

/// A line of `io.stat`: `8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6`.
fn unified_io(line: &str) -> Option<v2::IOEntry> {
    let mut fields = line.split(' ');
    let (major, minor) = device(fields.next()?)?;
    let mut entry = v2::IOEntry { major, minor, ..Default::default() };
    for (key, value) in fields.filter_map(|field| field.split_once('=')) {
        let value = value.parse().unwrap_or_default();
        match key {
            "rbytes" => entry.rbytes = value,
            "wbytes" => entry.wbytes = value,
            "rios" => entry.rios = value,
            "wios" => entry.wios = value,
            _ => {}
        }
    }
    Some(entry)
}

fn device(text: &str) -> Option<(u64, u64)> {
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn per_controller(directories: &HashMap<String, PathBuf>) -> v1::Metrics {
    let mut metrics = v1::Metrics::new();
    if let Some(pids) = directories.get("pids") {
        metrics.pids = Some(v1::PidsStat {
            current: number(pids, "pids.current").unwrap_or_default(),
            // As in containerd's cgroup library: no limit is 0 in v1, the greatest number in v2.
            limit: number(pids, "pids.max").filter(|&limit| limit != u64::MAX).unwrap_or_default(),
            ..Default::default()
        })
        .into();
    }
    let cpu = v1::CPUStat {
        usage: directories.get("cpuacct").map(|directory| cpu_usage(directory)).into(),
        throttling: directories.get("cpu").map(|directory| throttling(directory)).into(),
        ..Default::default()
    };
    metrics.cpu = Some(cpu).into();
    if let Some(memory) = directories.get("memory") {
        metrics.memory = Some(memory_stat(memory)).into();
        let control = table(memory, "memory.oom_control");
        let value = |key: &str| control.get(key).copied().unwrap_or_default();
        metrics.memory_oom_control = Some(v1::MemoryOomControl {
            oom_kill_disable: value("oom_kill_disable"),
            under_oom: value("under_oom"),
            oom_kill: value("oom_kill"),
            ..Default::default()
        })
        .into();
    }
    if let Some(blkio) = directories.get("blkio") {
        metrics.blkio = Some(v1::BlkIOStat {
            io_service_bytes_recursive: block_io(blkio, "service_bytes", "io_service_bytes"),
            io_serviced_recursive: block_io(blkio, "serviced", "io_serviced"),
            ..Default::default()
        })
        .into();
    }
    metrics
}

fn cpu_usage(directory: &Path) -> v1::CPUUsage {
    let stat = table(directory, "cpuacct.stat");
    let ticks = |key: &str| stat.get(key).copied().unwrap_or_default().saturating_mul(TICK_NANOSECONDS);
    let per_cpu = std::fs::read_to_string(directory.join("cpuacct.usage_percpu")).unwrap_or_default();
    v1::CPUUsage {
        total: number(directory, "cpuacct.usage").unwrap_or_default(),
        kernel: ticks("system"),
        user: ticks("user"),
        per_cpu: per_cpu.split_whitespace().filter_map(|value| value.parse().ok()).collect(),
        ..Default::default()
    }
}

fn throttling(directory: &Path) -> v1::Throttle {
    let stat = table(directory, "cpu.stat");
    let value = |key: &str| stat.get(key).copied().unwrap_or_default();
    v1::Throttle {
        periods: value("nr_periods"),
        throttled_periods: value("nr_throttled"),
        throttled_time: value("throttled_time"),
        ..Default::default()
    }
}

fn memory_stat(directory: &Path) -> v1::MemoryStat {
    let stat = table(directory, "memory.stat");
    let value = |key: &str| stat.get(key).copied().unwrap_or_default();
    let entry = |prefix: &str| {
        let file = |name: &str| number(directory, &format!("{prefix}.{name}"));
        file("usage_in_bytes").map(|usage| v1::MemoryEntry {
            usage,
            limit: file("limit_in_bytes").unwrap_or_default(),
            max: file("max_usage_in_bytes").unwrap_or_default(),
            failcnt: file("failcnt").unwrap_or_default(),
            ..Default::default()
        })
    };
    v1::MemoryStat {
        cache: value("cache"),
        rss: value("rss"),
        rss_huge: value("rss_huge"),
        mapped_file: value("mapped_file"),
        dirty: value("dirty"),
        writeback: value("writeback"),
        pg_pg_in: value("pgpgin"),
        pg_pg_out: value("pgpgout"),
        pg_fault: value("pgfault"),
        pg_maj_fault: value("pgmajfault"),
        inactive_anon: value("inactive_anon"),
        active_anon: value("active_anon"),
        inactive_file: value("inactive_file"),
        active_file: value("active_file"),
        unevictable: value("unevictable"),
        hierarchical_memory_limit: value("hierarchical_memory_limit"),
        hierarchical_swap_limit: value("hierarchical_memsw_limit"),
        total_cache: value("total_cache"),
        total_rss: value("total_rss"),
        total_rss_huge: value("total_rss_huge"),
        total_mapped_file: value("total_mapped_file"),
        total_dirty: value("total_dirty"),
        total_writeback: value("total_writeback"),
        total_pg_pg_in: value("total_pgpgin"),
        total_pg_pg_out: value("total_pgpgout"),
        total_pg_fault: value("total_pgfault"),
        total_pg_maj_fault: value("total_pgmajfault"),
        total_inactive_anon: value("total_inactive_anon"),
        total_active_anon: value("total_active_anon"),
        total_inactive_file: value("total_inactive_file"),
        total_active_file: value("total_active_file"),
        total_unevictable: value("total_unevictable"),
        usage: entry("memory").into(),
        swap: entry("memory.memsw").into(),
        kernel: entry("memory.kmem").into(),
        kernel_tcp: entry("memory.kmem.tcp").into(),
        ..Default::default()
    }
}

/// Lines `8:0 Read 4096`; the schedulers that count are the throttling policy's and BFQ's, under different names.
fn block_io(directory: &Path, name: &str, bfq_name: &str) -> Vec<v1::BlkIOEntry> {
    let read = |file: String| std::fs::read_to_string(directory.join(file)).ok();
    let text = read(format!("blkio.throttle.io_{name}_recursive"))
        .or_else(|| read(format!("blkio.bfq.{bfq_name}_recursive")))
        .unwrap_or_default();
    text.lines().filter_map(block_io_entry).collect()
}

fn block_io_entry(line: &str) -> Option<v1::BlkIOEntry> {
    let mut fields = line.split(' ');
    let (major, minor) = device(fields.next()?)?;
    let op = fields.next()?.to_owned();
    let value = fields.next()?.parse().ok()?;
    Some(v1::BlkIOEntry { op, major, minor, value, ..Default::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(directory.path().join(name), content).unwrap();
        }
        directory
    }

    #[test]
    fn a_unified_group_is_measured() {
        let group = directory(&[
            ("pids.current", "3\n"),
            ("pids.max", "max\n"),
            ("cpu.stat", "usage_usec 70\nuser_usec 40\nsystem_usec 30\n"),
            ("memory.current", "8192\n"),
            ("memory.max", "max\n"),
            ("memory.stat", "anon 4096\nfile 1\nworkingset_refault_anon 2\nworkingset_refault_file 3\n"),
            ("memory.events", "oom 1\noom_kill 2\n"),
            ("io.stat", "8:16 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6\n"),
        ]);
        let metrics = unified(group.path());
        assert_eq!((metrics.pids.current, metrics.pids.limit), (3, u64::MAX));
        assert_eq!((metrics.cpu.usage_usec, metrics.cpu.user_usec, metrics.cpu.system_usec), (70, 40, 30));
        assert_eq!(
            (metrics.memory.usage, metrics.memory.usage_limit, metrics.memory.anon),
            (8192, u64::MAX, 4096)
        );
        assert_eq!(metrics.memory.workingset_refault, 5);
        assert_eq!((metrics.memory_events.oom, metrics.memory_events.oom_kill), (1, 2));
        let io = &metrics.io.usage[0];
        assert_eq!((io.major, io.minor, io.rbytes, io.wbytes, io.rios, io.wios), (8, 16, 1, 2, 3, 4));
    }

    #[test]
    fn controllers_are_measured_one_by_one() {
        let memory = directory(&[
            ("memory.stat", "rss 10\ntotal_inactive_file 4\nhierarchical_memsw_limit 9\n"),
            ("memory.usage_in_bytes", "100\n"),
            ("memory.limit_in_bytes", "200\n"),
            ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"),
        ]);
        let cpu = directory(&[
            ("cpuacct.usage", "77\n"),
            ("cpuacct.stat", "user 2\nsystem 1\n"),
            ("cpuacct.usage_percpu", "70 7\n"),
        ]);
        let blkio = directory(&[(
            "blkio.throttle.io_service_bytes_recursive",
            "8:0 Read 4096\n8:0 Total 4096\nTotal 4096\n",
        )]);
        let metrics = per_controller(&HashMap::from([
            ("memory".to_owned(), memory.path().to_owned()),
            ("cpuacct".to_owned(), cpu.path().to_owned()),
            ("blkio".to_owned(), blkio.path().to_owned()),
        ]));
        assert_eq!(
            (metrics.memory.rss, metrics.memory.usage.usage, metrics.memory.usage.limit),
            (10, 100, 200)
        );
        assert!(metrics.memory.swap.is_none());
        assert_eq!(metrics.memory_oom_control.oom_kill, 5);
        assert_eq!(
            (metrics.cpu.usage.total, metrics.cpu.usage.user, metrics.cpu.usage.kernel),
            (77, 20_000_000, 10_000_000)
        );
        assert_eq!(metrics.cpu.usage.per_cpu, [70, 7]);
        let io = &metrics.blkio.io_service_bytes_recursive;
        assert_eq!(io.len(), 2);
        assert_eq!((io[0].op.as_str(), io[0].major, io[0].value), ("Read", 8, 4096));
        assert!(metrics.pids.is_none());
    }
}
