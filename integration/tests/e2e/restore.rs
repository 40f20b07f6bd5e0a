//! A capsule comes back as an ordinary container start: the same memory, the same process, and everything a client does with a container.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use coldsnap_integration::ctr::{COLDSNAP, Launch};
use coldsnap_integration::node::Node;
use coldsnap_integration::process::wait_for;
use coldsnap_integration::{coldsnap, guest, memory};

use crate::cold::wait_stopped;
use crate::guests::jemalloc;
use crate::{container, start_guest, story};

/// The capsule image of these stories.
pub const CAPSULE: &str = "demo.local/guest-capsule:1";

/// A container of the capsule image, with the captured command.
pub fn capsule_container(id: &str) -> Launch<'_> {
    Launch::new(COLDSNAP, CAPSULE, id).flags(["--null-io"])
}

/// Starts a guest, asks it once, captures it and removes it: whoever is restored counts on from 1.
pub fn make_capsule(node: &Node, kind: &str, further: &[&str]) -> Result<serde_json::Value> {
    let control = start_guest(node.ctr(), COLDSNAP, "origin", kind)?;
    ensure!(guest::check(&control)? == 1);
    let captured = coldsnap::capture("origin", CAPSULE, further)?;
    node.ctr().remove("origin")?;
    Ok(captured)
}

/// Starts a container and returns the control directory of the guest in it.
pub fn start(node: &Node, launch: &Launch<'_>) -> Result<PathBuf> {
    node.ctr().start(launch)?;
    let control = guest::control(node.ctr().task(launch.id)?.pid);
    guest::wait_ready(&control)?;
    Ok(control)
}

fn anonymous_kb(node: &Node, id: &str) -> Result<u64> {
    Ok(memory::of(&node.ctr().pids(id)?)?.anonymous_kb)
}

/// Captured with the default scope and with everything mapped, restored twice each; then what the kind writes and allocates is right as well.
fn comes_back(kind: &str, further: &[&str]) {
    story(&format!("comes_back_{kind}"), COLDSNAP, |node| {
        for scope in ["large", "all"] {
            let captured = make_capsule(node, kind, &["--scope", scope])?;
            let residual = captured["residual_bytes"].as_u64().context("residual_bytes")?;
            ensure!(
                scope == "large" || residual > 40 << 20,
                "with all mapped the residual is {residual} bytes"
            );
            for id in ["r1", "r2"] {
                let control = start(node, &capsule_container(id))?;
                ensure!(guest::check(&control)? == 2, "{id} was started cold");
                ensure!(guest::check(&control)? == 3);
            }
            let control = guest::control(node.ctr().task("r1")?.pid);
            further.iter().try_for_each(|command| guest::ask(&control, command).map(drop))?;
            guest::check(&guest::control(node.ctr().task("r2")?.pid))?;
            node.ctr().remove_all()?;
        }
        Ok(())
    });
}

macro_rules! kinds_come_back {
    ($($name:ident $kind:literal $further:expr),* $(,)?) => {
        $(#[test] #[ignore = "needs the test node: make test"] fn $name() { comes_back($kind, &$further) })*
    };
}

kinds_come_back!(
    one_block_comes_back "block" ["write", "check"],
    threads_come_back "threads" [],
    forked_processes_come_back "fork" [],
    neighbouring_areas_come_back "neighbour" [],
    a_heap_comes_back "heap" ["write", "check", "calloc"],
    a_freed_block_comes_back "calloc-after-free" ["free", "calloc"],
);

#[test]
#[ignore = "needs the test node: make test"]
fn memory_is_mapped_not_copied_and_writes_stay_private() {
    story("memory_is_mapped_not_copied_and_writes_stay_private", COLDSNAP, |node| {
        let captured = make_capsule(node, "block", &[])?;
        let residual = captured["residual_bytes"].as_u64().context("residual_bytes")?;
        ensure!(residual >= 64 << 20, "the block is large enough to be mapped: {captured}");
        let first = start(node, &capsule_container("r1"))?;
        let second = start(node, &capsule_container("r2"))?;
        for (id, control) in [("r1", &first), ("r2", &second)] {
            guest::check(control)?;
            let anonymous = anonymous_kb(node, id)?;
            ensure!(anonymous < 8 << 10, "{id} has {anonymous} KiB of its own after reading 64 MiB");
        }
        guest::ask(&first, "write")?;
        guest::check(&first)?;
        let anonymous = anonymous_kb(node, "r1")?;
        ensure!(
            (16 << 10..28 << 10).contains(&anonymous),
            "a quarter was written, {anonymous} KiB are its own"
        );
        guest::check(&second)?;
        guest::check(&start(node, &capsule_container("r3"))?).map(drop)
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn a_serving_guest_is_captured_and_goes_on() {
    story("a_serving_guest_is_captured_and_goes_on", COLDSNAP, |node| {
        let control = start_guest(node.ctr(), COLDSNAP, "origin", "threads")?;
        let serving = std::thread::scope(|scope| -> Result<u64> {
            let capture = scope.spawn(|| coldsnap::capture("origin", CAPSULE, &["--leave-running"]));
            let mut asked = guest::check(&control)?;
            while !capture.is_finished() {
                asked = guest::check(&control)?;
            }
            let captured = capture.join().expect("the capture")?;
            ensure!(captured["left_running"] == true, "{captured}");
            Ok(asked)
        })?;
        ensure!(guest::check(&control)? == serving + 1, "the captured guest is not the one that serves");
        let restored = start(node, &capsule_container("r1"))?;
        let asked = guest::check(&restored)?;
        ensure!(
            asked > 1 && asked <= serving,
            "captured in the middle of {serving} questions, restored at {asked}"
        );
        ensure!(guest::check(&control)? == serving + 2);
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn a_restored_guest_is_captured_again() {
    story("a_restored_guest_is_captured_again", COLDSNAP, |node| {
        let model = "/tmp/block.safetensors";
        guest::write_model(model.as_ref(), 64)?;
        let first = make_capsule(node, "block", &["--model", model])?;
        ensure!(first["model_bytes_matched_ratio"].as_f64().is_some_and(|ratio| ratio >= 0.99), "{first}");
        ensure!(first["new_payload_bytes"] == 64 << 20, "{first}");
        let control = start(node, &capsule_container("r1"))?;
        guest::ask(&control, "write")?;
        ensure!(guest::check(&control)? == 3);
        let second = coldsnap::capture("r1", "demo.local/guest-capsule:2", &["--model", model])?;
        ensure!(second["new_payload_bytes"] == 0, "a second payload of the same model: {second}");
        node.ctr().remove("r1")?;
        let again = Launch::new(COLDSNAP, "demo.local/guest-capsule:2", "r2").flags(["--null-io"]);
        let control = start(node, &again)?;
        ensure!(
            guest::check(&control)? == 4,
            "the written pages and the count are those of the second capture"
        );
        // The first capsule is what it was.
        ensure!(guest::check(&start(node, &capsule_container("r3"))?)? == 2);
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn a_restored_container_is_an_ordinary_one() {
    story("a_restored_container_is_an_ordinary_one", COLDSNAP, |node| {
        let ctr = node.ctr();
        let log =
            |name: &str| vec!["--log-uri".to_owned(), format!("file://{}", node.logs().join(name).display())];
        let count = "i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.05; done";
        let origin = container(COLDSNAP, "origin", &["/bin/sh", "-c", count]);
        ctr.start(&Launch { flags: log("origin.log"), ..origin })?;
        ctr.exec("origin", &["/bin/sh", "-c", "echo mine > /etc/mine"])?;
        std::thread::sleep(Duration::from_millis(500));
        coldsnap::capture("origin", CAPSULE, &[])?;
        ctr.remove("origin")?;
        ctr.start(&Launch { flags: log("r1.log"), ..capsule_container("r1") })?;
        let restored = node.logs().join("r1.log");
        let first: u32 = wait_for("output of the restored process", Duration::from_secs(5), || {
            let text = std::fs::read_to_string(&restored).unwrap_or_default();
            Ok(text.lines().next().and_then(|line| line.strip_prefix("tick ")?.parse().ok()))
        })?;
        ensure!(first > 5, "it counts from {first}");
        let task = ctr.task("r1")?;
        ensure!(task.status == "RUNNING" && ctr.init_pid("r1")? == task.pid, "{task:?}");
        ensure!(
            ctr.exec("r1", &["/usr/bin/cat", "/etc/mine"])? == "mine",
            "the changed file is in the capsule"
        );
        ctr.run(["tasks", "pause", "r1"])?;
        ensure!(ctr.task("r1")?.status == "PAUSED");
        ctr.run(["tasks", "resume", "r1"])?;
        ctr.kill("r1", "SIGKILL")?;
        wait_stopped(node, "r1")?;
        ensure!(ctr.remove_task("r1")? == 128 + 9);
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn restored_containers_outlive_the_daemons() {
    story("restored_containers_outlive_the_daemons", COLDSNAP, |node| {
        let model = "/tmp/block.safetensors";
        guest::write_model(model.as_ref(), 64)?;
        make_capsule(node, "block", &["--model", model])?;
        let control = start(node, &capsule_container("r1"))?;
        node.kill_snapshotter()?;
        ensure!(guest::check(&control)? == 2);
        node.kill_containerd()?;
        ensure!(guest::check(&control)? == 3);
        node.start_snapshotter()?;
        node.start_containerd()?;
        ensure!(node.ctr().task("r1")?.status == "RUNNING");
        ensure!(node.ctr().exec("r1", &["/usr/bin/echo", "here"])? == "here");
        ensure!(
            guest::check(&start(node, &capsule_container("r2"))?)? == 2,
            "and the capsule starts as before"
        );
        ensure!(guest::check(&control)? == 4);
        Ok(())
    });
}

/// The hazard: an allocator that trusts the zeros of purged memory hands out the file's bytes instead when that memory is a file mapping. This
/// proves it with the scope that maps everything, and then that the default scope avoids it.
#[test]
#[ignore = "needs the test node: make test"]
fn an_allocator_that_trusts_zeros_is_not_mapped_by_default() {
    story("an_allocator_that_trusts_zeros_is_not_mapped_by_default", COLDSNAP, |node| {
        let calloc = |scope: &[&str]| -> Result<(Result<String>, serde_json::Value)> {
            node.ctr().start(
                &container(COLDSNAP, "origin", &["/usr/bin/guest", "calloc-after-free"]).flags(jemalloc()),
            )?;
            let control = guest::control(node.ctr().task("origin")?.pid);
            guest::wait_ready(&control)?;
            guest::check(&control)?;
            let captured = coldsnap::capture("origin", CAPSULE, scope)?;
            node.ctr().remove("origin")?;
            let control = start(node, &capsule_container("r1").flags(jemalloc()))?;
            ensure!(guest::check(&control)? == 2, "started cold");
            guest::ask(&control, "free")?;
            let said = guest::ask(&control, "calloc");
            node.ctr().remove("r1")?;
            Ok((said, captured))
        };
        let (said, captured) = calloc(&["--scope", "all"])?;
        let error = said.expect_err("zeros: the hazard does not exist, and the rule is not needed");
        ensure!(error.to_string().contains("not 0"), "{error:#}\n{captured}");
        let (said, captured) = calloc(&[])?;
        said.context("the default scope hands out old bytes as zeros")?;
        ensure!(captured["scope_narrowed"].to_string().contains("jemalloc"), "{captured}");
        Ok(())
    });
}
