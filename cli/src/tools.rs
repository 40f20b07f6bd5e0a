//! Other programs on this host.

use std::process::Command;

/// The version that `program --version` prints: the last word of its first line that has a digit, or the first
/// line. `None` when the program cannot be run.
pub fn version(program: &str) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    version_in(&text)
}

fn version_in(text: &str) -> Option<String> {
    let line = text.lines().next()?;
    let numbered = line.split_whitespace().rfind(|word| word.starts_with(|c: char| c.is_ascii_digit()));
    Some(numbered.unwrap_or(line).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(version_in("runc version 1.3.6+ds1\ncommit: x\n").as_deref(), Some("1.3.6+ds1"));
        assert_eq!(version_in("Version: 4.2.1\n").as_deref(), Some("4.2.1"));
        assert_eq!(
            version_in("containerd github.com/containerd/containerd/v2 2.1.9+unknown \n").as_deref(),
            Some("2.1.9+unknown")
        );
        assert_eq!(version_in(""), None);
    }
}
