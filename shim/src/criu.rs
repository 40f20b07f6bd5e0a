//! CRIU's configuration and log, as far as the shim deals with them itself.

use std::path::Path;

/// Configuration line: connections are dumped as closed ones and come back as closed ones.
pub const TCP_CLOSE: &str = "tcp-close";

/// A log may hold the same complaint for every page; a message needs a few.
const LINES: usize = 5;

/// The error lines of CRIU's log at `path`, the first ones, without their time stamps; none when there is no log.
pub fn decisive_lines(path: &Path) -> Vec<String> {
    let log = std::fs::read(path).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    log.lines()
        .filter_map(|line| line.find("Error (").and_then(|at| line.get(at..)))
        .take(LINES)
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_quoted_without_time_stamps() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("dump.log");
        assert!(decisive_lines(&path).is_empty());
        std::fs::write(
            &path,
            "(00.1) Warn  (x.c:1): w\n(00.2) Error (y.c:2): no\n(00.3) pie: 1: Error (z.c:3): bad\n",
        )
        .unwrap();
        assert_eq!(decisive_lines(&path), ["Error (y.c:2): no", "Error (z.c:3): bad"]);
    }
}
