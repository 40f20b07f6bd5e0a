//! The guests themselves: each kind of memory is what it says, and a check of it can fail.

use anyhow::{Result, ensure};
use coldsnap_integration::ctr::{Plugins, STOCK};
use coldsnap_integration::{guest, memory};

use crate::{container, on_both, start_guest, story};

on_both!(every_kind_checks_its_memory);

fn every_kind_checks_its_memory(plugins: Plugins) {
    story("every_kind_checks_its_memory", plugins, |node| {
        let ctr = node.ctr();
        for kind in ["block", "threads", "fork", "neighbour", "heap", "calloc-after-free"] {
            let control = start_guest(ctr, plugins, kind, kind)?;
            ensure!(guest::check(&control)? == 1);
            ensure!(guest::check(&control)? == 2, "{kind}: a guest counts");
            let anonymous = memory::of(&ctr.pids(kind)?)?.anonymous_kb;
            ensure!(anonymous >= 50 << 10, "{kind}: {anonymous} KiB of anonymous memory");
        }
        for kind in ["block", "heap"] {
            let control = guest::control(ctr.task(kind)?.pid);
            guest::ask(&control, "write")?;
            guest::check(&control)?;
        }
        ensure!(ctr.pids("fork")?.len() == 2, "fork: {:?}", ctr.pids("fork")?);
        Ok(())
    });
}

/// A wrong byte anywhere must show, or every test that asks a guest proves nothing.
#[test]
#[ignore = "needs the test node: make test"]
fn a_changed_byte_is_found() {
    story("a_changed_byte_is_found", STOCK, |node| {
        let ctr = node.ctr();
        for kind in ["block", "threads", "fork", "neighbour", "heap", "calloc-after-free"] {
            let control = start_guest(ctr, STOCK, kind, kind)?;
            guest::check(&control)?;
            let address = change_a_byte(ctr.task(kind)?.pid)?;
            let said = guest::check(&control).expect_err("a changed byte").to_string();
            let line = format!("{address:x}");
            ensure!(
                said.contains(&line[..line.len() - 1]),
                "{kind}: changed {address:#x}, the guest says {said}"
            );
        }
        Ok(())
    });
}

/// Changes one byte in the middle of the largest anonymous mapping of a process, as a bad restore would; returns its address.
fn change_a_byte(pid: u32) -> Result<u64> {
    use std::os::unix::fs::FileExt;
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let range = |line: &str| -> Option<(u64, u64)> {
        let mut words = line.split_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let readable = words.next()?.starts_with('r');
        let anonymous = matches!(words.nth(3), None | Some("[heap]"));
        let range = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        (readable && anonymous).then_some(range)
    };
    let memory = std::fs::File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
    let (start, end) =
        maps.lines().filter_map(range).max_by_key(|(start, end)| end - start).expect("a mapping");
    let mut address = start + (end - start) / 2;
    let mut byte = [0];
    // Not in a hole of the heap, nor in the bookkeeping between its blocks: a word of the pattern has no zero byte at either side.
    loop {
        let mut around = [0; 64];
        memory.read_exact_at(&mut around, address)?;
        if around.iter().filter(|byte| **byte == 0).count() < 3 {
            address += 32;
            break;
        }
        address += 64;
    }
    memory.read_exact_at(&mut byte, address)?;
    memory.write_all_at(&[byte[0] ^ 0x80], address)?;
    Ok(address)
}

/// What the rule about zero-assuming allocators is for: see docs. Here only that jemalloc, set to purge at once, hands back what it purged,
/// and that zeros come back as long as the memory is anonymous.
#[test]
#[ignore = "needs the test node: make test"]
fn jemalloc_trusts_the_zeros_of_purged_memory() {
    story("jemalloc_trusts_the_zeros_of_purged_memory", STOCK, |node| {
        let ctr = node.ctr();
        let launch = container(STOCK, "c1", &["/usr/bin/guest", "calloc-after-free"]);
        ctr.start(&launch.flags(jemalloc()))?;
        let pid = ctr.task("c1")?.pid;
        let control = guest::control(pid);
        guest::wait_ready(&control)?;
        ensure!(
            std::fs::read_to_string(format!("/proc/{pid}/maps"))?.contains("libjemalloc"),
            "jemalloc is not loaded"
        );
        guest::check(&control)?;
        let full = memory::of(&[pid])?.anonymous_kb;
        guest::ask(&control, "free")?;
        let freed = memory::of(&[pid])?.anonymous_kb;
        ensure!(full - freed > 60 << 10, "jemalloc did not purge: {full} KiB before, {freed} KiB after");
        guest::ask(&control, "calloc")?;
        let again = memory::of(&[pid])?.anonymous_kb;
        ensure!(
            again - freed < 1 << 10,
            "calloc wrote zeros itself ({again} KiB): this build of jemalloc does not have the hazard"
        );
        Ok(())
    });
}

/// Flags that load jemalloc into a guest and make it purge what is freed at once, by MADV_DONTNEED.
pub fn jemalloc() -> [String; 4] {
    let preload = format!("LD_PRELOAD={}", guest::JEMALLOC);
    ["--env".into(), preload, "--env".into(), "MALLOC_CONF=dirty_decay_ms:0,muzzy_decay_ms:0".into()]
}
