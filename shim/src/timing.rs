//! How long the phases of a start took: for the log and for `timing.json` in the bundle.

use std::path::Path;
use std::time::Instant;

use log::{info, warn};
use serde_json::{Map, Value, json};

/// In the bundle.
const FILE: &str = "timing.json";

/// Durations in milliseconds, in the order in which the phases ended.
#[derive(Debug, Default)]
pub struct Timings {
    phases: Vec<(&'static str, f64)>,
}

impl Timings {
    /// Records that `phase` began at `since` and ends now.
    pub fn record(&mut self, phase: &'static str, since: Instant) {
        self.phases.push((phase, since.elapsed().as_secs_f64() * 1000.0));
    }

    /// Logs all phases of `act` and writes them to the bundle; a failed write is only logged.
    pub fn report(&self, act: &str, id: &str, bundle: &Path) {
        let text: Vec<String> = self.phases.iter().map(|(phase, ms)| format!("{phase} {ms:.1} ms")).collect();
        info!("{act} {id}: {}", text.join(", "));
        let phases: Map<String, Value> =
            self.phases.iter().map(|(phase, ms)| (format!("{phase}_ms"), json!(ms))).collect();
        let document = json!({ "act": act, "phases": phases }).to_string();
        let path = bundle.join(FILE);
        // Not through the durable writer: a lost timing is no loss, and an fsync would cost what is measured here.
        if let Err(error) = std::fs::write(&path, document) {
            warn!("cannot write {}: {error}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_written_to_the_bundle() {
        let bundle = tempfile::tempdir().unwrap();
        let mut timings = Timings::default();
        timings.record("mount", Instant::now());
        timings.report("start", "c1", bundle.path());
        let document: Value =
            serde_json::from_slice(&std::fs::read(bundle.path().join(FILE)).unwrap()).unwrap();
        assert_eq!(document["act"], "start");
        assert!(document["phases"]["mount_ms"].as_f64().unwrap() >= 0.0);
    }
}
