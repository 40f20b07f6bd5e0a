//! The per-container CRIU configuration (the file that the annotation `org.criu.config` names).
//!
//! runc hands CRIU its options by RPC; what it has no option for goes into this file, which wins over RPC.

use std::fmt::Write as _;

/// Annotation of the OCI spec that tells runc the path of the configuration file.
pub const CONFIG_ANNOTATION: &str = "org.criu.config";

/// What to do with established TCP connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EstablishedTcp {
    /// They are closed in the restored process (a replica has other addresses).
    #[default]
    Close,
    /// They are kept; only right when the restored container has the same addresses.
    Keep,
}

/// The configuration for a dump.
pub fn dump_config(tcp: EstablishedTcp) -> String {
    common(tcp)
}

/// The configuration for a restore.
pub fn restore_config(tcp: EstablishedTcp) -> String {
    common(tcp)
}

fn common(tcp: EstablishedTcp) -> String {
    let mut config = String::new();
    let line = match tcp {
        EstablishedTcp::Close => "tcp-close",
        EstablishedTcp::Keep => "tcp-established",
    };
    let _ = writeln!(config, "{line}");
    // Unlinked POSIX semaphores and other files that lost their name but are still mapped.
    let _ = writeln!(config, "link-remap");
    config
}
