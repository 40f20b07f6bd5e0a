//! End-to-end stories on a real containerd, in the test node. Each starts its own node with empty state, acts as a client would, and ends with
//! the check that nothing is left behind. Stories of plain containers run on containerd's own plugins too: that tests the tests.
//!
//! `make e2e` runs them, `make e2e STORY=word` those whose name contains the word. Elsewhere they show as ignored.

mod cold;
mod commands;
mod guests;
mod overlay;
mod recovery;
mod refusals;
mod restarts;
mod restore;
mod workers;

use std::path::Path;
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::Result;
use coldsnap_integration::ctr::{COLDSNAP, Ctr, Launch, Plugins, STOCK};
use coldsnap_integration::node::{Node, With};
use coldsnap_integration::{guest, process};

/// How long a story may take.
const LIMIT: Duration = Duration::from_secs(180);

/// Runs one story on a fresh node whose image store has the guest's image, then checks that nothing is left behind.
fn story(name: &str, plugins: Plugins, tell: impl FnOnce(&mut Node) -> Result<()>) {
    let told = || -> Result<()> {
        let mut node = Node::start(name, if plugins == STOCK { With::StockOnly } else { With::ColdSnap })?;
        node.ctr().import(guest_archive(), plugins.snapshotter)?;
        tell(&mut node)?;
        node.assert_clean()
    };
    let result = std::thread::scope(|scope| {
        let (done, ended) = channel::<()>();
        scope.spawn(move || {
            if ended.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{name}: not over after {} s: killing what this process started", LIMIT.as_secs());
                process::kill_children();
            }
        });
        let result = told();
        drop(done);
        result
    });
    if let Err(error) = result {
        panic!("{name}: {error:#}\n(logs: target/node/logs/{name})");
    }
}

/// The guest's image, written once.
fn guest_archive() -> &'static Path {
    static WRITTEN: OnceLock<()> = OnceLock::new();
    let archive = Path::new("/tmp/guest.tar");
    WRITTEN.get_or_init(|| {
        guest::write_image(archive, Path::new(env!("CARGO_BIN_EXE_guest"))).expect("the guest's image")
    });
    archive
}

/// A container of the guest's image that runs `command`.
fn container<'a>(plugins: Plugins, id: &'a str, command: &[&str]) -> Launch<'a> {
    Launch::new(plugins, guest::IMAGE, id).flags(["--null-io"]).command(command.iter().copied())
}

/// Starts a guest that makes memory of `kind`, and waits until it has.
fn start_guest(ctr: &Ctr, plugins: Plugins, id: &str, kind: &str) -> Result<std::path::PathBuf> {
    ctr.start(&container(plugins, id, &["/usr/bin/guest", kind]))?;
    let control = guest::control(ctr.task(id)?.pid);
    guest::wait_ready(&control)?;
    Ok(control)
}

/// Makes of each story `fn name(Plugins)` two tests, one per set of plugins.
macro_rules! on_both {
    ($($name:ident),* $(,)?) => {
        mod coldsnap {
            $(#[test] #[ignore = "needs the test node: make test"] fn $name() { super::$name(crate::COLDSNAP) })*
        }
        mod stock {
            $(#[test] #[ignore = "needs the test node: make test"] fn $name() { super::$name(crate::STOCK) })*
        }
    };
}
use on_both;
