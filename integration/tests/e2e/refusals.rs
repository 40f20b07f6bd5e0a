//! What cannot be restored is said plainly, and `auto` starts cold instead; what cannot be captured goes on running.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use coldsnap_integration::ctr::{COLDSNAP, Launch};
use coldsnap_integration::node::{Node, bytes_below};
use coldsnap_integration::process::wait_for;
use coldsnap_integration::{coldsnap, guest, leftovers};
use rustix::process::{Pid, Signal, kill_process};
use sha2::{Digest, Sha256};

use crate::restore::{CAPSULE, capsule_container, make_capsule, start};
use crate::{start_guest, story};

const MODEL: &str = "/tmp/block.safetensors";
const CAPTURES: &str = "/var/lib/coldsnap/captures";
const PAYLOADS: &str = "/var/lib/coldsnap/model-payloads";

fn wanting<'a>(launch: Launch<'a>, restore: &str) -> Launch<'a> {
    launch.flags(["--annotation".to_owned(), format!("coldsnap.io/restore={restore}")])
}

/// `require` fails and says `reason`; `auto` starts cold, and an event gives the reason.
fn refused_or_cold(
    node: &Node,
    launch: impl Fn(&'static str) -> Launch<'static>,
    reasons: &[&str],
) -> Result<()> {
    let out = node.ctr().output(wanting(launch("required"), "require").arguments(true))?;
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    ensure!(!out.status.success(), "a required restore started");
    for reason in reasons {
        ensure!(said.contains(reason), "expected {reason:?} in: {said}");
    }
    // There is a task if the refusal came as late as at its start.
    let _ = node.ctr().output(["tasks", "rm", "required"])?;
    let _ = node.ctr().output(["containers", "rm", "required"])?;

    let events = node.logs().join("events.log");
    let output = fs::File::create(&events)?;
    let mut watcher = node.ctr().command(["events"]).stdout(output.try_clone()?).stderr(output).spawn()?;
    std::thread::sleep(Duration::from_millis(200));
    let started = start(node, &launch("auto"));
    let seen = wait_for("the event of a fallback", Duration::from_secs(5), || {
        let text = fs::read_to_string(&events)?;
        Ok(text.lines().find(|line| line.contains("/coldsnap/restore-fallback")).map(str::to_owned))
    });
    watcher.kill()?;
    watcher.wait()?;
    ensure!(guest::check(&started?)? == 1, "auto did not start cold");
    let seen = seen?;
    for reason in reasons {
        ensure!(seen.contains(reason), "expected {reason:?} in the event: {seen}");
    }
    node.ctr().remove("auto")
}

#[test]
#[ignore = "needs the test node: make test"]
fn never_and_another_command_start_cold() {
    story("never_and_another_command_start_cold", COLDSNAP, |node| {
        make_capsule(node, "block", &[])?;
        ensure!(guest::check(&start(node, &wanting(capsule_container("r1"), "never"))?)? == 1);
        let other = || capsule_container("r2").command(["/usr/bin/guest", "threads"]);
        ensure!(guest::check(&start(node, &other())?)? == 1);
        let out = node.ctr().output(wanting(Launch { id: "r3", ..other() }, "require").arguments(true))?;
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        ensure!(!out.status.success() && said.contains("threads") && said.contains("block"), "{said}");
        let out = node.ctr().output(wanting(capsule_container("r4"), "sometimes").arguments(true))?;
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        ensure!(!out.status.success() && said.contains("sometimes"), "{said}");
        ensure!(guest::check(&start(node, &wanting(capsule_container("r5"), "require"))?)? == 2);
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn an_image_without_a_capsule_cannot_be_required() {
    story("an_image_without_a_capsule_cannot_be_required", COLDSNAP, |node| {
        let launch = Launch::new(COLDSNAP, guest::IMAGE, "c1").flags(["--null-io"]);
        let out = node.ctr().output(wanting(launch, "require").arguments(true))?;
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        ensure!(!out.status.success() && said.contains("no capsule"), "{said}");
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn a_missing_mount_is_named() {
    story("a_missing_mount_is_named", COLDSNAP, |node| {
        let data = Path::new("/var/lib/coldsnap/data");
        fs::create_dir_all(data)?;
        let origin =
            crate::container(COLDSNAP, "origin", &["/usr/bin/guest", "block"]).read_only_bind(data, "/data");
        ensure!(guest::check(&start(node, &origin)?)? == 1);
        coldsnap::capture("origin", CAPSULE, &[])?;
        node.ctr().remove("origin")?;
        refused_or_cold(node, capsule_container, &["/data"])?;
        ensure!(guest::check(&start(node, &capsule_container("r1").read_only_bind(data, "/data"))?)? == 2);
        Ok(())
    });
}

/// A capsule with a payload of 64 MiB; returns the payload's path and digest.
fn capsule_with_payload(node: &Node) -> Result<(PathBuf, String)> {
    guest::write_model(MODEL.as_ref(), 64)?;
    let captured = make_capsule(node, "block", &["--model", MODEL])?;
    let digest = captured["workers"][0]["payload"]
        .as_str()
        .with_context(|| format!("no payload: {captured}"))?
        .to_owned();
    let hex = digest.strip_prefix("sha256:").context("not a SHA-256")?;
    Ok((Path::new(PAYLOADS).join(format!("sha256/{hex}.pack")), digest))
}

#[test]
#[ignore = "needs the test node: make test"]
fn a_missing_payload_is_named() {
    story("a_missing_payload_is_named", COLDSNAP, |node| {
        let (path, digest) = capsule_with_payload(node)?;
        let kept = Path::new("/var/lib/coldsnap/kept.pack");
        fs::rename(&path, kept)?;
        refused_or_cold(node, capsule_container, &[&digest])?;
        fs::rename(kept, &path)?;
        ensure!(guest::check(&start(node, &capsule_container("r1"))?)? == 2, "the payload is back");
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn a_flipped_byte_is_never_mapped() {
    story("a_flipped_byte_is_never_mapped", COLDSNAP, |node| {
        let (path, digest) = capsule_with_payload(node)?;
        let modified = fs::metadata(&path)?.modified()?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644))?;
        let pack = fs::File::options().read(true).write(true).open(&path)?;
        let mut byte = [0];
        pack.read_exact_at(&mut byte, 30 << 20)?;
        pack.write_all_at(&[byte[0] ^ 1], 30 << 20)?;
        // As quietly as possible: the size and the time are those of the record.
        pack.set_modified(modified)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o444))?;
        refused_or_cold(node, capsule_container, &[&digest])
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn a_capsule_that_misses_an_image_is_refused() {
    story("a_capsule_that_misses_an_image_is_refused", COLDSNAP, |node| {
        make_capsule(node, "block", &[])?;
        node.ctr().start(&capsule_container("r1"))?;
        node.ctr().remove("r1")?;
        let mut removed = Vec::new();
        remove_images(Path::new("/var/lib/coldsnap/snapshotter"), "pagemap-", &mut removed)?;
        let name = removed.first().context("no CRIU image in any snapshot")?;
        refused_or_cold(node, capsule_container, &[name])
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn what_criu_refuses_is_said_in_its_words() {
    story("what_criu_refuses_is_said_in_its_words", COLDSNAP, |node| {
        make_capsule(node, "block", &[])?;
        node.ctr().start(&capsule_container("r1"))?;
        node.ctr().remove("r1")?;
        // As the descriptor says that they are, so that nobody before CRIU can see it.
        let snapshots = Path::new("/var/lib/coldsnap/snapshotter");
        let cores = files_below(snapshots, "core-")?;
        ensure!(!cores.is_empty(), "no CRIU image in any snapshot");
        for core in cores {
            let before = fs::read(&core)?;
            let mut broken = before.clone();
            broken[8..].fill(0xff);
            let (old, new) = (hex::encode(Sha256::digest(&before)), hex::encode(Sha256::digest(&broken)));
            for artifact in files_below(snapshots, "artifact.json")? {
                fs::write(&artifact, fs::read_to_string(&artifact)?.replace(&old, &new))?;
            }
            fs::write(&core, broken)?;
        }
        refused_or_cold(node, capsule_container, &["Error (criu/"])
    });
}

/// Every file below `directory` whose name begins with `start`.
fn files_below(directory: &Path, start: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.extend(files_below(&entry.path(), start)?);
        } else if entry.file_name().to_string_lossy().starts_with(start) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Removes every file below `directory` whose name begins with `start`; `removed` gets their names.
fn remove_images(directory: &Path, start: &str, removed: &mut Vec<String>) -> Result<()> {
    for file in files_below(directory, start)? {
        fs::remove_file(&file)?;
        removed.extend(file.file_name().map(|name| name.to_string_lossy().into_owned()));
    }
    Ok(())
}

#[test]
#[ignore = "needs the test node: make test"]
fn what_criu_cannot_dump_is_named_and_goes_on() {
    story("what_criu_cannot_dump_is_named_and_goes_on", COLDSNAP, |node| {
        let control = start_guest(node.ctr(), COLDSNAP, "c1", "io-uring")?;
        let pid = node.ctr().task("c1")?.pid;
        let failure = coldsnap::fails(["capture", "c1", "--image", CAPSULE])?;
        ensure!(failure.kind == "NotDumpable", "{failure:?}");
        for said in ["io_uring", &pid.to_string(), "guest", "descriptor"] {
            ensure!(failure.message.contains(said), "expected {said:?}: {failure:?}");
        }
        ensure!(guest::check(&control)? == 1, "the container does not go on");
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn a_full_disk_fails_the_capture_and_loses_nothing() {
    story("a_full_disk_fails_the_capture_and_loses_nothing", COLDSNAP, |node| {
        guest::write_model(MODEL.as_ref(), 64)?;
        let control = start_guest(node.ctr(), COLDSNAP, "c1", "block")?;
        // Too small for the payload, for the dump, for the residual beside the dump.
        let full: [(&str, &str, &[&str]); 3] = [
            (PAYLOADS, "size=32m", &["--model", MODEL]),
            (CAPTURES, "size=24m", &[]),
            (CAPTURES, "size=96m", &["--scope", "all"]),
        ];
        for ((place, size, further), asked) in full.into_iter().zip(1..) {
            let small = Mounted::tmpfs(Path::new(place), size)?;
            let arguments = ["capture", "c1", "--image", CAPSULE].iter().chain(further);
            let failure = coldsnap::fails(arguments)?;
            ensure!(failure.message.to_lowercase().contains("space"), "{place}: {failure:?}");
            ensure!(guest::check(&control)? == asked, "{place}: the container does not go on");
            ensure!(packs(Path::new(PAYLOADS))?.is_empty(), "{place}: half a payload is left");
            drop(small);
        }
        coldsnap::capture("c1", CAPSULE, &["--model", MODEL])?;
        node.ctr().remove("c1")?;
        ensure!(guest::check(&start(node, &capsule_container("r1"))?)? == 4);
        Ok(())
    });
}

/// A mount that ends with the value.
struct Mounted(PathBuf);

impl Mounted {
    fn tmpfs(at: &Path, options: &str) -> Result<Self> {
        fs::create_dir_all(at)?;
        let options = std::ffi::CString::new(options)?;
        rustix::mount::mount("tmpfs", at, "tmpfs", rustix::mount::MountFlags::empty(), options.as_c_str())?;
        Ok(Self(at.to_owned()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

/// What only CRIU notices: a file that the process had open has another size now.
#[test]
#[ignore = "needs the test node: make test"]
fn criu_s_own_words_explain_a_failed_restore() {
    story("criu_s_own_words_explain_a_failed_restore", COLDSNAP, |node| {
        let data = Path::new("/var/lib/coldsnap/data");
        fs::create_dir_all(data)?;
        fs::write(data.join("file"), "as captured")?;
        let ctr = node.ctr();
        let log = node.logs().join("container.log");
        let flags = ["--log-uri".to_owned(), format!("file://{}", log.display())];
        let begins = || fs::read_to_string(&log).unwrap_or_default().lines().count();
        let holds = "echo begins; exec 3</data/file; while :; do sleep 0.05; done";
        let origin = Launch::new(COLDSNAP, guest::IMAGE, "origin").command(["/bin/sh", "-c", holds]);
        ctr.start(&origin.flags(flags.clone()).read_only_bind(data, "/data"))?;
        wait_for("the process to begin", Duration::from_secs(5), || Ok((begins() == 1).then_some(())))?;
        std::thread::sleep(Duration::from_millis(100));
        coldsnap::capture("origin", CAPSULE, &[])?;
        ctr.remove("origin")?;
        let launch =
            |id| Launch::new(COLDSNAP, CAPSULE, id).flags(flags.clone()).read_only_bind(data, "/data");

        ctr.start(&wanting(launch("r1"), "require"))?;
        ctr.remove("r1")?;
        ensure!(begins() == 1, "r1 was started cold");
        fs::write(data.join("file"), "longer than when it was captured")?;
        let out = ctr.output(wanting(launch("r2"), "require").arguments(true))?;
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        ensure!(!out.status.success() && said.contains("bad size"), "CRIU's words are missing: {said}");
        ctr.start(&launch("r3"))?;
        wait_for("the cold start", Duration::from_secs(5), || Ok((begins() == 2).then_some(())))?;
        ensure!(ctr.task("r3")?.status == "RUNNING");
        Ok(())
    });
}

/// The shim or the snapshotter is killed at moments spread over a capture. A container dies with its shim; nothing else is lost.
fn killed_in_a_capture(
    name: &str,
    victim: impl Fn(&mut Node) -> Result<()>,
    revive: impl Fn(&mut Node) -> Result<()>,
) {
    story(name, COLDSNAP, |node| {
        guest::write_model(MODEL.as_ref(), 64)?;
        let arguments = ["capture", "c1", "--image", CAPSULE, "--model", MODEL];
        start_guest(node.ctr(), COLDSNAP, "c1", "block")?;
        let began = Instant::now();
        coldsnap::run(arguments)?;
        let whole = began.elapsed();
        node.ctr().remove("c1")?;
        for share in [2, 5, 8] {
            remove_images(Path::new(PAYLOADS), "", &mut Vec::new())?;
            start_guest(node.ctr(), COLDSNAP, "c1", "block")?;
            let mut capture =
                coldsnap::command(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
            std::thread::sleep(whole * share / 10);
            victim(node)?;
            capture.wait()?;
            revive(node)?;
            for (path, size) in packs(Path::new(PAYLOADS))? {
                ensure!(size == 64 << 20, "a half payload is eligible: {} of {size} bytes", path.display());
            }
            node.ctr().remove_all()?;
            start_guest(node.ctr(), COLDSNAP, "c1", "block")?;
            coldsnap::run(arguments).context("the capture after a failed one")?;
            let temporaries = bytes_below(Path::new("/var/lib/coldsnap/captures"))?;
            ensure!(temporaries == 0, "{temporaries} bytes of a failed capture are left");
            node.ctr().remove("c1")?;
            guest::check(&start(node, &capsule_container("r1"))?)?;
            node.ctr().remove("r1")?;
        }
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn a_shim_killed_in_a_capture() {
    let kill = |_: &mut Node| {
        for (pid, _) in leftovers::shims()? {
            kill_process(Pid::from_raw(pid).context("pid")?, Signal::KILL)?;
        }
        Ok(())
    };
    let bundle_is_gone = |node: &mut Node| {
        let bundle = node.ctr().bundle("c1");
        wait_for("containerd to clean up after the shim", Duration::from_secs(10), || {
            Ok((!bundle.exists()).then_some(()))
        })
    };
    killed_in_a_capture("a_shim_killed_in_a_capture", kill, bundle_is_gone);
}

#[test]
#[ignore = "needs the test node: make test"]
fn a_snapshotter_killed_in_a_capture() {
    killed_in_a_capture("a_snapshotter_killed_in_a_capture", Node::kill_snapshotter, |node| {
        node.start_snapshotter()?;
        node.wait_snapshotter_connected()
    });
}

/// kill -9 of the command at moments spread over a capture: the container can be asked again, no half payload is eligible, and the next capture
/// cleans up and works.
#[test]
#[ignore = "needs the test node: make test"]
fn a_killed_capture_loses_nothing() {
    story("a_killed_capture_loses_nothing", COLDSNAP, |node| {
        guest::write_model(MODEL.as_ref(), 64)?;
        let control = start_guest(node.ctr(), COLDSNAP, "c1", "block")?;
        let arguments = ["capture", "c1", "--image", CAPSULE, "--model", MODEL];
        let began = Instant::now();
        coldsnap::run(arguments.iter().chain(&["--leave-running"]))?;
        let whole = began.elapsed();
        for share in [1, 2, 3, 5, 8] {
            node.ctr().run(["images", "rm", CAPSULE])?;
            remove_images(Path::new(PAYLOADS), "", &mut Vec::new())?;
            let mut capture =
                coldsnap::command(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
            std::thread::sleep(whole * share / 10);
            capture.kill()?;
            capture.wait()?;
            // What the command had asked the shim for still runs.
            std::thread::sleep(Duration::from_millis(500));
            for (path, size) in packs(Path::new(PAYLOADS))? {
                ensure!(size == 64 << 20, "a half payload is eligible: {} of {size} bytes", path.display());
            }
            if node.ctr().run(["images", "ls", "-q"])?.contains(CAPSULE) {
                // It was killed after the capsule was complete, when it may have stopped the container already.
                node.ctr().remove("c1")?;
                guest::check(&start(node, &capsule_container("r1"))?)?;
                coldsnap::capture("r1", "demo.local/guest-capsule:2", &["--leave-running"])?;
                let temporaries = bytes_below(Path::new("/var/lib/coldsnap/captures"))?;
                ensure!(temporaries == 0, "{temporaries} bytes of a killed capture are left");
                return Ok(());
            }
            coldsnap::run(arguments.iter().chain(&["--leave-running"]))
                .context("the capture after a killed one")?;
            guest::check(&control)?;
            let temporaries = bytes_below(Path::new("/var/lib/coldsnap/captures"))?;
            ensure!(temporaries == 0, "{temporaries} bytes of a killed capture are left");
        }
        node.ctr().remove("c1")?;
        guest::check(&start(node, &capsule_container("r1"))?).map(drop)
    });
}

/// Every file that is a pack by its name, with its size.
fn packs(directory: &Path) -> Result<Vec<(PathBuf, u64)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(packs(&path)?);
        } else if path.file_name().is_some_and(|name| {
            !name.to_string_lossy().starts_with('.') && name.to_string_lossy().ends_with(".pack")
        }) {
            let size = fs::metadata(&path)?.len();
            found.push((path, size));
        }
    }
    Ok(found)
}
