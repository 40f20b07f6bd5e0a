//! Plain containers: what every client expects of a runtime and a snapshotter.

use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use coldsnap_integration::ctr::Plugins;
use coldsnap_integration::process::{run, shown, wait_for};
use coldsnap_integration::{guest, node::Node};
use std::time::Duration;

use crate::{container, on_both, start_guest, story};

on_both!(
    a_guest_runs_and_is_killed,
    exec_has_its_own_output_and_status,
    output_goes_to_a_log_file,
    the_exit_status_is_the_process_s,
    standard_input_reaches_the_process_and_ends,
    a_terminal_is_one,
    pause_stops_and_resume_goes_on,
    a_missing_program_fails_the_start,
    what_one_container_writes_another_does_not_see,
);

fn a_guest_runs_and_is_killed(plugins: Plugins) {
    story("a_guest_runs_and_is_killed", plugins, |node| {
        let ctr = node.ctr();
        let control = start_guest(ctr, plugins, "c1", "block")?;
        guest::check(&control)?;
        let task = ctr.task("c1")?;
        ensure!(task.status == "RUNNING", "{task:?}");
        ensure!(
            ctr.pids("c1")? == [task.pid],
            "one process, {}, but ps says {:?}",
            task.pid,
            ctr.pids("c1")?
        );
        ensure!(ctr.init_pid("c1")? == task.pid, "the pid file and containerd disagree");
        ctr.kill("c1", "SIGKILL")?;
        wait_stopped(node, "c1")?;
        ensure!(ctr.remove_task("c1")? == 128 + 9);
        Ok(())
    });
}

fn exec_has_its_own_output_and_status(plugins: Plugins) {
    story("exec_has_its_own_output_and_status", plugins, |node| {
        let ctr = node.ctr();
        start_guest(ctr, plugins, "c1", "threads")?;
        ensure!(ctr.exec("c1", &["/bin/sh", "-c", "echo out; echo error >&2"])? == "out");
        let out = ctr.output(ctr.exec_arguments("c1", &["/bin/sh", "-c", "exit 9"]))?;
        ensure!(out.status.code() == Some(9), "{out:?}");
        let out = ctr.output(ctr.exec_arguments("c1", &["/no/such/program"]))?;
        ensure!(!out.status.success(), "{out:?}");
        let first = ctr.exec("c1", &["/bin/sh", "-c", "read first < /proc/1/comm; echo $first"])?;
        ensure!(first == "guest", "an exec sees the container's processes, the first is {first:?}");
        ensure!(ctr.task("c1")?.status == "RUNNING");
        Ok(())
    });
}

fn output_goes_to_a_log_file(plugins: Plugins) {
    story("output_goes_to_a_log_file", plugins, |node| {
        let ctr = node.ctr();
        let log = node.logs().join("container.log");
        let launch = container(plugins, "c1", &["/bin/sh", "-c", "echo one; echo two >&2; exec sleep 1000"]);
        let flags = vec!["--log-uri".to_owned(), format!("file://{}", log.display())];
        ctr.start(&coldsnap_integration::ctr::Launch { flags, ..launch })?;
        wait_for("both lines in the log", Duration::from_secs(5), || {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            Ok((text.contains("one\n") && text.contains("two\n")).then_some(()))
        })
    });
}

fn the_exit_status_is_the_process_s(plugins: Plugins) {
    story("the_exit_status_is_the_process_s", plugins, |node| {
        let ctr = node.ctr();
        for status in [0, 1, 42, 255] {
            let mut launch =
                container(plugins, "c1", &["/bin/sh", "-c", &format!("echo said; exit {status}")]);
            launch.flags = vec!["--rm".to_owned()];
            let out = ctr.output(launch.arguments(false))?;
            ensure!(out.status.code() == Some(status), "expected {status}: {out:?}");
            ensure!(out.stdout == b"said\n", "{out:?}");
        }
        ctr.start(&container(
            plugins,
            "c2",
            &["/bin/sh", "-c", "trap 'exit 5' TERM; while :; do sleep 0.05; done"],
        ))?;
        std::thread::sleep(Duration::from_millis(200));
        ctr.kill("c2", "SIGTERM")?;
        wait_stopped(node, "c2")?;
        ensure!(ctr.remove_task("c2")? == 5);
        Ok(())
    });
}

fn standard_input_reaches_the_process_and_ends(plugins: Plugins) {
    story("standard_input_reaches_the_process_and_ends", plugins, |node| {
        let mut launch = container(plugins, "c1", &["/usr/bin/cat"]);
        launch.flags = vec!["--rm".to_owned()];
        let mut command = node.ctr().command(launch.arguments(false));
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        // More than fits into fifos and pipes: ctr forgets to tell of an end of its input that it meets before the task is made.
        let text = "a line\n".repeat(200_000);
        let mut stdin = child.stdin.take().expect("piped");
        let written = text.clone();
        let writer = std::thread::spawn(move || stdin.write_all(written.as_bytes()));
        let out = child.wait_with_output()?;
        writer.join().expect("the writer")?;
        ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        ensure!(out.stdout == text.as_bytes(), "{} of {} bytes came back", out.stdout.len(), text.len());
        Ok(())
    });
}

fn a_terminal_is_one(plugins: Plugins) {
    story("a_terminal_is_one", plugins, |node| {
        let mut launch =
            container(plugins, "c1", &["/bin/sh", "-c", "test -t 0 && test -t 1 && echo is-a-terminal"]);
        launch.flags = vec!["--rm".to_owned(), "--tty".to_owned()];
        let line = shown(&node.ctr().command(launch.arguments(false)));
        let line = line.replace(
            "test -t 0 && test -t 1 && echo is-a-terminal",
            "'test -t 0 && test -t 1 && echo is-a-terminal'",
        );
        // ctr wants a terminal of its own: script gives it one.
        let said =
            run(Command::new("script").args(["--quiet", "--return", "--command", &line, "/dev/null"]))?;
        ensure!(said.trim().ends_with("is-a-terminal"), "{said:?}");
        Ok(())
    });
}

fn pause_stops_and_resume_goes_on(plugins: Plugins) {
    story("pause_stops_and_resume_goes_on", plugins, |node| {
        let ctr = node.ctr();
        let control = start_guest(ctr, plugins, "c1", "block")?;
        ctr.run(["tasks", "pause", "c1"])?;
        ensure!(ctr.task("c1")?.status == "PAUSED");
        std::fs::write(control.join("ask"), "1 check\n")?;
        std::thread::sleep(Duration::from_millis(100));
        ensure!(control.join("ask").exists(), "a paused guest took a question");
        ctr.run(["tasks", "resume", "c1"])?;
        ensure!(ctr.task("c1")?.status == "RUNNING");
        wait_for("the guest to take the question", Duration::from_secs(5), || {
            Ok((!control.join("ask").exists()).then_some(()))
        })?;
        ensure!(guest::check(&control)? == 2);
        Ok(())
    });
}

fn a_missing_program_fails_the_start(plugins: Plugins) {
    story("a_missing_program_fails_the_start", plugins, |node| {
        let out = node.ctr().output(container(plugins, "c1", &["/no/such/program"]).arguments(true))?;
        let said = String::from_utf8_lossy(&out.stderr);
        ensure!(!out.status.success() && said.contains("/no/such/program"), "{said}");
        Ok(())
    });
}

fn what_one_container_writes_another_does_not_see(plugins: Plugins) {
    story("what_one_container_writes_another_does_not_see", plugins, |node| {
        let ctr = node.ctr();
        for id in ["c1", "c2"] {
            ctr.start(&container(plugins, id, &["/usr/bin/sleep", "1000"]))?;
        }
        ctr.exec("c1", &["/bin/sh", "-c", "echo mine > /etc/mine"])?;
        ensure!(ctr.exec("c1", &["/usr/bin/cat", "/etc/mine"])? == "mine");
        let out = ctr.output(ctr.exec_arguments("c2", &["/usr/bin/cat", "/etc/mine"]))?;
        ensure!(!out.status.success(), "{out:?}");
        Ok(())
    });
}

/// Waits until containerd knows that the task of `id` ended.
pub fn wait_stopped(node: &Node, id: &str) -> Result<()> {
    let stopped = || Ok((node.ctr().task(id)?.status == "STOPPED").then_some(()));
    wait_for(&format!("the task of {id} to stop"), Duration::from_secs(5), stopped)
}
