//! CRIU's logs: the few lines that say why it failed.

use std::path::Path;

/// At most so many lines are quoted.
const MAX_LINES: usize = 6;

/// The lines of a CRIU log (`dump.log`, `restore.log`) that decided: its `Error` lines in order, without
/// the ones that CRIU itself ignores, the time stamps removed. Empty when the log cannot be read.
pub fn decisive_lines(path: &Path) -> Vec<String> {
    let text = std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    decisive(&text.unwrap_or_default())
}

fn decisive(log: &str) -> Vec<String> {
    let mut lines: Vec<String> = log
        .lines()
        .filter_map(|line| {
            let at = line.find("Error (")?;
            Some(line[at..].trim_end().to_owned())
        })
        // Raising its own limits is optional for CRIU.
        .filter(|line| !line.contains("rlimit: Can't setup RLIMIT_NOFILE"))
        .collect();
    lines.dedup();
    // The first errors are the cause, the last one says which phase failed.
    if lines.len() > MAX_LINES {
        let last = lines.pop();
        lines.truncate(MAX_LINES - 1);
        lines.extend(last);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_deciding_lines() {
        let log = "\
(00.044278) ========================================
(00.044289) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.160036) 23 fdinfo 1: pos:            0x699 flags:           100001/0
(00.160066) Error (criu/files-reg.c:1790): Can't lookup mount=63 for fd=1 path=/b/out.log
(00.236335) Error (criu/cr-dump.c:1975): Dumping FAILED.
";
        assert_eq!(
            decisive(log),
            [
                "Error (criu/files-reg.c:1790): Can't lookup mount=63 for fd=1 path=/b/out.log",
                "Error (criu/cr-dump.c:1975): Dumping FAILED."
            ]
        );
        assert!(decisive("").is_empty());
    }
}
