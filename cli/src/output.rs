//! What every command prints: text for people, one JSON value for programs, a progress bar for long work.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

/// Work that is done earlier shows no bar.
const BAR_AFTER: Duration = Duration::from_secs(1);

/// Kind of an error of usage that only shows when the command runs; its exit status is 2.
pub const USAGE: &str = "Usage";

/// Why a command failed. The kind is stable, the message is for people.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct CliError {
    kind: String,
    message: String,
    printed: bool,
}

impl CliError {
    /// An error of this kind.
    pub fn new(kind: impl Into<String>, message: impl Display) -> Self {
        Self { kind: kind.into(), message: message.to_string(), printed: false }
    }

    /// Its kind.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// An error whose details stand in a result that was printed already: with `--json` nothing more is printed,
    /// because one command prints one JSON value.
    pub fn in_result(kind: impl Into<String>, message: impl Display) -> Self {
        Self { printed: true, ..Self::new(kind, message) }
    }
}

/// How an error stands in JSON: `{"error": {"kind", "message"}}`.
pub fn error_json(kind: &str, message: &dyn Display) -> serde_json::Value {
    serde_json::json!({"error": {"kind": kind, "message": message.to_string()}})
}

/// The library's errors carry their kind.
macro_rules! from_library {
    ($($error:ty),* $(,)?) => {
        $(impl From<$error> for CliError {
            fn from(error: $error) -> Self {
                Self::new(error.kind(), error)
            }
        })*
    };
}

from_library!(
    coldsnap::check::CheckError,
    coldsnap::config::ConfigError,
    coldsnap::extent::LayoutError,
    coldsnap::format::DocumentError,
    coldsnap::overlay::OverlayError,
    coldsnap::hub::PlaceError,
    coldsnap::hub::TokenError,
    coldsnap::publish::PublishError,
    coldsnap::recover::RecoverError,
    coldsnap::recover::mode::ModeError,
    coldsnap::registry::RegistryError,
    coldsnap::source::BringError,
    coldsnap::source::SourceError,
    coldsnap::store::AdmitError,
    coldsnap::store::StoreError,
    coldsnap::store::WatermarkError,
);

/// Where results go.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    json: bool,
}

impl Output {
    /// Prints JSON instead of text when `json`.
    pub const fn new(json: bool) -> Self {
        Self { json }
    }

    /// Prints the result of a command: `value` as JSON, or `text`.
    ///
    /// # Errors
    /// When stdout cannot be written. A reader that went away is none.
    pub fn result<T: Serialize>(&self, value: &T, text: impl FnOnce() -> String) -> Result<(), CliError> {
        let text = if self.json {
            serde_json::to_string(value).map_err(|e| CliError::new("Internal", e))?
        } else {
            text()
        };
        print(&text).map_err(|e| CliError::new("Io", format!("cannot write to stdout: {e}")))
    }

    /// The exit status of a command; prints its error.
    pub fn finish(&self, result: Result<(), CliError>) -> ExitCode {
        let Err(error) = result else { return ExitCode::SUCCESS };
        let status = if error.kind == USAGE { ExitCode::from(2) } else { ExitCode::FAILURE };
        if self.json && error.printed {
            return status;
        }
        if self.json {
            let value = error_json(&error.kind, &error.message);
            // Nothing is left to do when that fails.
            let _ = print(&value.to_string());
        } else {
            eprintln!("error: {error} [{}]", error.kind);
        }
        status
    }

    /// A bar over `total` bytes on a terminal, nothing elsewhere.
    pub fn progress(&self, what: &'static str, total: u64) -> Progress {
        let wanted = !self.json && io::stderr().is_terminal();
        Progress { what, total, done: 0, started: Instant::now(), wanted, bar: None }
    }
}

fn print(text: &str) -> io::Result<()> {
    match writeln!(io::stdout().lock(), "{text}") {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Progress of one piece of work. The bar goes away when this is dropped.
#[derive(Debug)]
pub struct Progress {
    what: &'static str,
    total: u64,
    done: u64,
    started: Instant,
    wanted: bool,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Says that so many bytes more are done.
    pub fn advance(&mut self, bytes: u64) {
        self.reach(self.done + bytes);
    }

    /// Says that so many bytes are done, be it fewer than before.
    pub fn reach(&mut self, bytes: u64) {
        self.done = bytes;
        if !self.wanted {
            return;
        }
        if let Some(bar) = &self.bar {
            bar.set_position(self.done);
        } else if self.started.elapsed() >= BAR_AFTER {
            let bar = ProgressBar::with_draw_target(Some(self.total), ProgressDrawTarget::stderr());
            let template = "{msg} [{bar:40}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
            bar.set_style(
                ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar.set_message(self.what);
            bar.set_position(self.done);
            self.bar = Some(bar);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
