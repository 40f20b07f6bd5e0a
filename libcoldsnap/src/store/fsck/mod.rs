//! Checks a whole store: names, modes, sizes, records, leases, pins, temporaries, and on demand every byte.
//!
//! Runs beside everything else: what belongs to a payload is looked at under its lock, and a payload whose lock is
//! held is left out. A repair removes or moves only what nothing can use, so that it needs no judgement. Everything
//! else says what a person can do.

mod payload;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::sweep::Temporary;
use super::{NodeStore, StoreError, usage};
use crate::digest::Digest;
use crate::format::validation;

/// Where packs go that have another content than their name says.
pub(super) const DAMAGED: &str = "damaged";

/// What to do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FsckOptions {
    /// Hash every payload, whatever its record says.
    pub full: bool,
    /// Remove what is garbage, move damaged packs aside, set the modes right.
    pub repair: bool,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Nothing is wrong.
    Note,
    /// Costs space or time, and breaks nothing.
    Warning,
    /// The store is inconsistent: something that it promises does not hold.
    Error,
}

impl Severity {
    /// The name in output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// One thing that is not as it should be, or worth knowing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// Stable name of the kind of finding.
    pub kind: &'static str,
    /// The file.
    pub path: PathBuf,
    /// What was found.
    pub message: String,
    /// What to do about it; empty when there is nothing to do.
    pub remedy: String,
    /// Whether it was put right.
    pub repaired: bool,
}

/// The result of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FsckReport {
    /// Payloads that are here.
    pub payloads: usize,
    /// Their size.
    pub bytes: u64,
    /// Bytes that were hashed.
    pub bytes_hashed: u64,
    /// Lease files.
    pub leases: usize,
    /// Pin files.
    pub pins: usize,
    /// What was found, by path.
    pub findings: Vec<Finding>,
}

impl FsckReport {
    /// Whether every promise holds: no error, or each of them was put right.
    pub fn is_consistent(&self) -> bool {
        !self.findings.iter().any(|found| found.severity == Severity::Error && !found.repaired)
    }
}

/// What the names of the store say about one payload.
#[derive(Debug, Default)]
struct Named {
    /// Kept about it; garbage when it is not here.
    leftovers: Vec<PathBuf>,
    leases: Vec<PathBuf>,
    pin: Option<PathBuf>,
}

impl NodeStore {
    /// Checks the store. `progress` is called with the number of bytes hashed since the last call.
    ///
    /// # Errors
    /// When there is no store, or a directory of it cannot be read. What is wrong with a file is a finding.
    pub fn fsck(
        &self,
        options: FsckOptions,
        progress: &mut dyn FnMut(u64),
    ) -> Result<FsckReport, StoreError> {
        fs::read_dir(&self.root).map_err(StoreError::io("read the store", &self.root))?;
        let mut check = Check { store: self, options, report: FsckReport::default(), progress };
        check.directories();
        let mut payloads = BTreeMap::<Digest, Named>::new();
        check.payload_names(&mut payloads)?;
        check.other_names(&mut payloads)?;
        for (digest, named) in &payloads {
            check.payload(digest, named)?;
        }
        let mut report = check.report;
        report.findings.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(report)
    }
}

/// A check that runs.
struct Check<'a> {
    store: &'a NodeStore,
    options: FsckOptions,
    report: FsckReport,
    progress: &'a mut dyn FnMut(u64),
}

impl Check<'_> {
    /// Directories that others may write are a way around every check.
    fn directories(&mut self) {
        let store = self.store;
        let payloads = store.payload_directory();
        let shared = [Some(payloads.as_path()), payloads.parent(), Some(store.root())].into_iter().flatten();
        for directory in shared {
            self.directory(directory, 0o022, "group or others may write into it");
        }
        for directory in [store.lease_directory(), store.pin_directory(), store.usage_directory()] {
            self.directory(&directory, 0o077, "group or others may use it");
        }
    }

    fn directory(&mut self, path: &Path, forbidden: u32, problem: &str) {
        let Ok(metadata) = fs::symlink_metadata(path) else { return };
        // The root may be a link: it is the administrator's.
        if !metadata.is_dir() && path != self.store.root() {
            let remedy = "put a directory in its place";
            return self.found(Severity::Error, "NotDirectory", path, "not a directory", remedy, false);
        }
        let mode = metadata.mode() & 0o7777;
        // In a directory with the sticky bit nobody replaces another's file.
        if metadata.is_dir() && mode & forbidden != 0 {
            let message = format!("mode {mode:04o}: {problem}");
            let remedy = format!("chmod {:04o}", mode & !forbidden);
            self.found(Severity::Warning, "DirectoryMode", path, &message, &remedy, false);
        }
    }

    fn payload_names(&mut self, payloads: &mut BTreeMap<Digest, Named>) -> Result<(), StoreError> {
        let directory = self.store.payload_directory();
        for name in self.store.names_in(&directory)? {
            let path = directory.join(&name);
            let name = name.to_str().unwrap_or_default();
            if let Some(digest) = stem(name, ".pack") {
                payloads.entry(digest).or_default();
            } else if let Some(digest) =
                name.strip_suffix(validation::SUFFIX).and_then(|name| stem(name, ".pack"))
            {
                payloads.entry(digest).or_default().leftovers.push(path);
            } else if name.strip_prefix('.').and_then(|name| stem(name, ".pack.lock")).is_some() {
                self.lock_file(&path);
            } else {
                self.temporary_or_stray(name, &path)?;
            }
        }
        Ok(())
    }

    fn other_names(&mut self, payloads: &mut BTreeMap<Digest, Named>) -> Result<(), StoreError> {
        for (digest, path) in self.store.lease_files()? {
            self.report.leases += 1;
            payloads.entry(digest).or_default().leases.push(path);
        }
        for (digest, path) in self.store.pin_files()? {
            self.report.pins += 1;
            payloads.entry(digest).or_default().pin = Some(path);
        }
        let known = |path: &Path, payloads: &BTreeMap<Digest, Named>| {
            payloads.values().any(|named| {
                named.leases.iter().any(|lease| lease == path) || named.pin.as_deref() == Some(path)
            })
        };
        for directory in [self.store.lease_directory(), self.store.pin_directory()] {
            for name in self.store.names_in(&directory)? {
                let path = directory.join(&name);
                if !known(&path, payloads) {
                    self.temporary_or_stray(name.to_str().unwrap_or_default(), &path)?;
                }
            }
        }
        let directory = self.store.usage_directory();
        for name in self.store.names_in(&directory)? {
            let path = directory.join(&name);
            match name.to_str().and_then(|name| stem(name, usage::SUFFIX)) {
                Some(digest) => payloads.entry(digest).or_default().leftovers.push(path),
                None => self.stray(&path),
            }
        }
        let directory = self.store.root().join(DAMAGED);
        for name in self.store.names_in(&directory)? {
            let message = "a damaged pack that was moved here";
            let remedy = "remove it when nobody wants to look into it";
            self.found(Severity::Note, "Damaged", &directory.join(name), message, remedy, false);
        }
        Ok(())
    }

    fn lock_file(&mut self, path: &Path) {
        let Ok(metadata) = fs::symlink_metadata(path) else { return };
        if !metadata.is_file() {
            let remedy = "remove it";
            return self.found(Severity::Error, "NotRegularFile", path, "not a regular file", remedy, false);
        }
        if metadata.mode() & 0o077 != 0 {
            let message = format!(
                "mode {:04o}: group or others can hold the lock and block every use of the payload",
                metadata.mode() & 0o7777
            );
            let repaired = self.options.repair && payload::set_mode(path, 0o600).is_ok();
            self.found(Severity::Warning, "LockMode", path, &message, "chmod 0600, or --repair", repaired);
        }
    }

    fn temporary_or_stray(&mut self, name: &str, path: &Path) -> Result<(), StoreError> {
        let state = self.store.temporary(name, path).map_err(StoreError::io("inspect", path))?;
        match state {
            Temporary::No => self.stray(path),
            Temporary::Gone => {}
            Temporary::Written => {
                self.found(Severity::Note, "BeingWritten", path, "being written", "", false)
            }
            Temporary::Resumable => {
                let message = "the beginning of a payload, left by an interrupted staging";
                let remedy = "the next staging goes on from here; a sweep removes it after a day";
                self.found(Severity::Note, "Interrupted", path, message, remedy, false);
            }
            Temporary::Stale => {
                let repaired = self.options.repair && self.store.remove_if_stale(name, path).is_ok();
                let message = "left by a writer that is gone";
                let remedy = "coldsnap payload gc, or --repair";
                self.found(Severity::Warning, "StaleTemporary", path, message, remedy, repaired);
            }
        }
        Ok(())
    }

    fn stray(&mut self, path: &Path) {
        if fs::symlink_metadata(path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
            return;
        }
        let remedy = "move it away; a payload is taken into the store with coldsnap payload import";
        self.found(Severity::Warning, "Stray", path, "no file of a store has this name", remedy, false);
    }

    fn found(
        &mut self,
        severity: Severity,
        kind: &'static str,
        path: &Path,
        message: &str,
        remedy: &str,
        repaired: bool,
    ) {
        let (path, message, remedy) = (path.to_owned(), message.to_owned(), remedy.to_owned());
        self.report.findings.push(Finding { severity, kind, path, message, remedy, repaired });
    }
}

/// The digest in a name `<64hex><suffix>`.
fn stem(name: &str, suffix: &str) -> Option<Digest> {
    Digest::from_hex(name.strip_suffix(suffix)?).ok()
}
