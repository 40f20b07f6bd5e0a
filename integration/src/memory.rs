//! Memory of processes and the page cache, as the kernel counts them.

use std::fs;
use std::ops::AddAssign;

use anyhow::{Context, Result, anyhow};

/// Resident memory of one or several processes, in KiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// Pages that no other process maps (`Private_Clean + Private_Dirty`). A file page mapped by one process only counts here.
    pub private_kb: u64,
    /// Pages that another process maps too (`Shared_Clean + Shared_Dirty`).
    pub shared_kb: u64,
    /// Anonymous pages, private copies of file pages included.
    pub anonymous_kb: u64,
    /// Every resident page divided by the number of its users.
    pub proportional_kb: u64,
}

impl AddAssign for Memory {
    fn add_assign(&mut self, other: Self) {
        self.private_kb += other.private_kb;
        self.shared_kb += other.shared_kb;
        self.anonymous_kb += other.anonymous_kb;
        self.proportional_kb += other.proportional_kb;
    }
}

/// The sum over `pids`, from `/proc/<pid>/smaps_rollup`.
pub fn of(pids: &[u32]) -> Result<Memory> {
    let mut total = Memory::default();
    for pid in pids {
        let path = format!("/proc/{pid}/smaps_rollup");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        total += parse(&text).with_context(|| format!("cannot understand {path}"))?;
    }
    Ok(total)
}

fn parse(rollup: &str) -> Result<Memory> {
    let kb = |key: &str| -> Result<u64> {
        let line = rollup.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        let value = line.and_then(|rest| rest.trim().strip_suffix(" kB"));
        value
            .ok_or_else(|| anyhow!("it has no {key}"))?
            .parse()
            .with_context(|| format!("{key} is not a number"))
    };
    Ok(Memory {
        private_kb: kb("Private_Clean")? + kb("Private_Dirty")?,
        shared_kb: kb("Shared_Clean")? + kb("Shared_Dirty")?,
        anonymous_kb: kb("Anonymous")?,
        proportional_kb: kb("Pss")?,
    })
}

/// Writes everything dirty to the disks and empties the page, dentry and inode caches of this machine: the next reader reads from disk.
pub fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3").context("cannot drop the caches")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rollup_is_summed_by_kind() {
        let text = "00400000-7ffd0000 ---p 00000000 00:00 0    [rollup]\nRss:  900 kB\nPss:   500 kB\nPss_Anon:  7 kB\nShared_Clean:  400 kB\n\
                    Shared_Dirty: 1 kB\nPrivate_Clean:  20 kB\nPrivate_Dirty:   30 kB\nAnonymous:  31 kB\n";
        let expected = Memory { private_kb: 50, shared_kb: 401, anonymous_kb: 31, proportional_kb: 500 };
        assert_eq!(parse(text).unwrap(), expected);
    }

    #[test]
    fn a_missing_line_is_an_error_that_names_it() {
        assert_eq!(parse("Pss: 1 kB\n").unwrap_err().to_string(), "it has no Private_Clean");
    }
}
