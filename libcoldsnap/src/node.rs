//! Facts of this machine that something captured on it is bound to.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};

use crate::digest::Digest;
use crate::format::overlay::{HostIdentity, Target, Versions};

const MACHINE_ID: &str = "/etc/machine-id";
const CPU_INFO: &str = "/proc/cpuinfo";

/// This machine cannot be described.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// A file of the system cannot be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: &'static str,
        /// What the system answered.
        source: io::Error,
    },
    /// There is no machine id.
    #[error(
        "{MACHINE_ID} holds {0:?}, not 32 hex digits: make one with systemd-machine-id-setup or dbus-uuidgen"
    )]
    MachineId(String),
    /// A tool did not tell its version.
    #[error("cannot tell the version of {0}: it is not in PATH or prints none")]
    Version(&'static str),
}

/// Versions of the programs that restore a process, as each prints its own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolVersions {
    /// CRIU; `None` when it could not be asked.
    pub criu: Option<String>,
    /// The OCI runtime; `None` when it could not be asked.
    pub runc: Option<String>,
}

/// This machine as the target of a capture by the `host` driver.
///
/// # Errors
/// Something that a capture is bound to is not known here.
pub fn target(tools: &ToolVersions) -> Result<Target, NodeError> {
    let system = rustix::system::uname();
    let version = |found: &Option<String>, name| found.clone().ok_or(NodeError::Version(name));
    Ok(Target {
        hosts: vec![HostIdentity {
            machine_id_sha256: machine_id()?,
            hostname: system.nodename().to_string_lossy().into_owned(),
        }],
        accelerators: Vec::new(),
        versions: Versions {
            kernel: system.release().to_string_lossy().into_owned(),
            criu: version(&tools.criu, "criu")?,
            runc: version(&tools.runc, "the OCI runtime")?,
            nvidia_driver: None,
            cuda: None,
        },
        cpu_features: cpu_features()?,
    })
}

fn machine_id() -> Result<Digest, NodeError> {
    let text = match fs::read_to_string(MACHINE_ID) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        text => text.map_err(|source| NodeError::Io { path: MACHINE_ID, source })?,
    };
    let id = text.trim();
    if id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit()) {
        Ok(Digest::of(id.as_bytes()))
    } else {
        Err(NodeError::MachineId(id.to_owned()))
    }
}

fn cpu_features() -> Result<Vec<String>, NodeError> {
    let read = |source| NodeError::Io { path: CPU_INFO, source };
    let mut features = Vec::new();
    // Only the first processor: the kernel enables what all have, and computes each further block anew.
    for line in BufReader::new(File::open(CPU_INFO).map_err(read)?).lines() {
        let line = line.map_err(read)?;
        if line.is_empty() {
            break;
        }
        if let Some(listed) = features_in(&line) {
            features = listed;
        }
    }
    Ok(features)
}

/// The features in a line of `/proc/cpuinfo` that lists them: `flags` on x86, `Features` on ARM.
fn features_in(line: &str) -> Option<Vec<String>> {
    let (name, values) = line.split_once(':')?;
    if !matches!(name.trim(), "flags" | "Features") {
        return None;
    }
    let mut features: Vec<String> = values.split_whitespace().map(str::to_owned).collect();
    features.sort_unstable();
    features.dedup();
    Some(features)
}

/// The version in what `program --version` prints: the last word of its first line that begins with a digit, or the
/// first line.
pub fn version_in(output: &str) -> Option<String> {
    let line = output.lines().next()?;
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

    #[test]
    fn features_are_sorted_and_unique() {
        assert_eq!(features_in("flags\t\t: fpu avx fpu avx2").unwrap(), ["avx", "avx2", "fpu"]);
        assert_eq!(features_in("Features\t: fp asimd").unwrap(), ["asimd", "fp"]);
        for other in ["vmx flags\t: vnmi", "bugs\t\t: spectre_v1", "", "model name\t: x"] {
            assert_eq!(features_in(other), None, "{other}");
        }
    }

    #[test]
    fn a_tool_without_version_binds_to_nothing() {
        let one = ToolVersions { criu: Some("4.2.1".to_owned()), runc: None };
        // Machines without a machine id fail earlier, with another error.
        assert!(matches!(target(&one), Err(NodeError::Version(_) | NodeError::MachineId(_))));
    }
}
