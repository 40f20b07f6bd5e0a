//! Containers outlive the daemons around them, and nothing outlives the containers.

use std::time::Duration;

use anyhow::{Context, ensure};
use coldsnap_integration::ctr::{COLDSNAP, Plugins, STOCK};
use coldsnap_integration::process::wait_for;
use coldsnap_integration::{guest, leftovers};
use rustix::process::{Pid, Signal, kill_process};

use crate::cold::wait_stopped;
use crate::{on_both, start_guest, story};

on_both!(
    containerd_restarts_under_a_container,
    containerd_is_killed_under_a_container,
    a_killed_shim_leaves_nothing
);

fn containerd_restarts_under_a_container(plugins: Plugins) {
    story("containerd_restarts_under_a_container", plugins, |node| {
        let control = start_guest(node.ctr(), plugins, "c1", "block")?;
        node.stop_containerd()?;
        ensure!(guest::check(&control)? == 1, "the container runs on without containerd");
        node.start_containerd()?;
        let ctr = node.ctr();
        ensure!(ctr.task("c1")?.status == "RUNNING", "{:?}", ctr.task("c1")?);
        ensure!(ctr.exec("c1", &["/usr/bin/echo", "here"])? == "here");
        ensure!(guest::check(&control)? == 2);
        ctr.kill("c1", "SIGKILL")?;
        wait_stopped(node, "c1")
    });
}

fn containerd_is_killed_under_a_container(plugins: Plugins) {
    story("containerd_is_killed_under_a_container", plugins, |node| {
        let control = start_guest(node.ctr(), plugins, "c1", "block")?;
        let ends = start_guest(node.ctr(), plugins, "c2", "block")?;
        node.kill_containerd()?;
        // What ends while nobody watches is cleaned up afterwards.
        std::fs::write(ends.join("ask"), "1 exit 3\n")?;
        std::thread::sleep(Duration::from_millis(200));
        node.start_containerd()?;
        ensure!(guest::check(&control)? == 1);
        let ctr = node.ctr();
        wait_for("containerd to forget the ended task", Duration::from_secs(5), || {
            Ok((ctr.tasks()?.len() == 1).then_some(()))
        })?;
        ctr.run(["containers", "rm", "c2"]).map(drop)
    });
}

fn a_killed_shim_leaves_nothing(plugins: Plugins) {
    story("a_killed_shim_leaves_nothing", plugins, |node| {
        let ctr = node.ctr();
        start_guest(ctr, plugins, "c1", "block")?;
        let pid = ctr.task("c1")?.pid;
        let shims = leftovers::shims()?;
        ensure!(shims.len() == 1, "one shim for one container: {shims:?}");
        kill_process(Pid::from_raw(shims[0].0).context("pid")?, Signal::KILL)?;
        wait_for("containerd to clean up after the shim", Duration::from_secs(10), || {
            Ok(ctr.tasks()?.is_empty().then_some(()))
        })?;
        let gone = || Ok((!std::path::Path::new(&format!("/proc/{pid}/exe")).exists()).then_some(()));
        wait_for("the container's process to end", Duration::from_secs(5), gone)?;
        ensure!(ctr.tasks()?.is_empty(), "{:?}", ctr.tasks()?);
        ctr.run(["containers", "rm", "c1"])?;
        start_guest(ctr, plugins, "c2", "block")?;
        if plugins == STOCK {
            // The Go shim's socket stays when it is killed.
            std::fs::remove_dir_all("/run/containerd/s")?;
        }
        Ok(())
    });
}

/// The snapshotter owns no mount and no process of a container: it may come and go.
#[test]
#[ignore = "needs the test node: make test"]
fn the_snapshotter_restarts_under_a_container() {
    story("the_snapshotter_restarts_under_a_container", COLDSNAP, |node| {
        let control = start_guest(node.ctr(), COLDSNAP, "c1", "block")?;
        node.kill_snapshotter()?;
        ensure!(guest::check(&control)? == 1, "the container runs on without the snapshotter");
        let out = node.ctr().output(crate::container(COLDSNAP, "c2", &["/usr/bin/true"]).arguments(true))?;
        ensure!(!out.status.success(), "a container started without a snapshotter");
        node.start_snapshotter()?;
        node.wait_snapshotter_connected()?;
        start_guest(node.ctr(), COLDSNAP, "c3", "block")?;
        ensure!(guest::check(&control)? == 2);
        node.stop_snapshotter()?;
        node.start_snapshotter()?;
        node.ctr().remove("c1")?;
        ensure!(node.ctr().exec("c3", &["/usr/bin/echo", "here"])? == "here");
        Ok(())
    });
}
