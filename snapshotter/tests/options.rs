//! Where the snapshotter's node store comes from.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

fn snapshotter(directory: &Path, config: &str) -> Command {
    fs::write(directory.join("config.toml"), config).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_coldsnap-snapshotter"));
    command
        .arg("--address")
        .arg(directory.join("run/snapshotter.sock"))
        .arg("--root")
        .arg(directory.join("root"))
        .env_remove("COLDSNAP_STORE")
        .env("COLDSNAP_CONFIG", directory.join("config.toml"));
    command
}

/// Ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Which of two stores the snapshotter made its own.
fn chosen(directory: &Path, mut command: Command) -> &'static str {
    let _running = Running(command.spawn().unwrap());
    let until = Instant::now() + Duration::from_secs(60);
    while Instant::now() < until {
        for name in ["configured", "named"] {
            if directory.join(name).join("model-payloads").exists() {
                return name;
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("no store was opened");
}

#[test]
fn the_store_is_that_of_the_configuration_unless_another_is_named() {
    for expected in ["configured", "named"] {
        for option in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let config = format!("[store]\nroot = {:?}\n", dir.path().join("configured"));
            let mut command = snapshotter(dir.path(), &config);
            if expected == "named" && option {
                command.arg("--store").arg(dir.path().join("named"));
            } else if expected == "named" {
                command.env("COLDSNAP_STORE", dir.path().join("named"));
            }
            assert_eq!(chosen(dir.path(), command), expected);
        }
    }
}

#[test]
fn a_wrong_configuration_is_named_and_nothing_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let output = snapshotter(dir.path(), "[store]\nroots = \"/x\"\n").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("config.toml") && said.contains("roots"), "{said}");
    assert!(!dir.path().join("root").exists());
}
