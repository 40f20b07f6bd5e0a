//! Which memory may be mapped from a file, and why less than usual where an allocator forbids it.
//!
//! MADV_DONTNEED gives zeros on anonymous memory but the file's bytes on a private file mapping. An allocator
//! that treats purged memory as zeroed would hand stale bytes to `calloc`. glibc keeps a high-water mark and is
//! safe; jemalloc, tcmalloc, mimalloc and the Go runtime are not.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use memchr::memmem;
use serde::{Deserialize, Serialize};

/// How much of a process's memory is mapped instead of copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MappingScope {
    /// Only model-owned ranges.
    Model,
    /// Also what is present in anonymous private memory of 32 MiB and more, unless the process uses an
    /// allocator that takes purged memory for zeroed.
    #[default]
    Large,
    /// Every long run of anonymous private memory, whatever the allocator. Opt-in.
    All,
}

/// The text is not a scope.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is not a mapping scope: expected model, large or all")]
pub struct ScopeError(String);

impl FromStr for MappingScope {
    type Err = ScopeError;

    fn from_str(text: &str) -> Result<Self, ScopeError> {
        match text {
            "model" => Ok(Self::Model),
            "large" => Ok(Self::Large),
            "all" => Ok(Self::All),
            other => Err(ScopeError(other.to_owned())),
        }
    }
}

impl fmt::Display for MappingScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Model => "model",
            Self::Large => "large",
            Self::All => "all",
        })
    }
}

/// What betrays an allocator or runtime: a part of a mapped file's name, or bytes of an executable mapping.
struct Marker {
    name: &'static str,
    file_name: &'static str,
    bytes: &'static [u8],
}

const MARKERS: [Marker; 4] = [
    Marker { name: "jemalloc", file_name: "libjemalloc", bytes: b"<jemalloc>: " },
    Marker { name: "tcmalloc", file_name: "libtcmalloc", bytes: b"tcmalloc::" },
    Marker { name: "mimalloc", file_name: "libmimalloc", bytes: b"mimalloc: " },
    Marker { name: "the Go runtime", file_name: "\0", bytes: b"\xff Go buildinf:" },
];

/// Names the allocator or runtime in one executable file that takes purged memory for zeroed.
pub fn zero_assuming(path: &Path, bytes: &[u8]) -> Option<&'static str> {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    MARKERS
        .iter()
        .find(|m| name.contains(m.file_name) || memmem::find(bytes, m.bytes).is_some())
        .map(|m| m.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocators_are_found_by_name_and_by_content() {
        let none = zero_assuming(Path::new("/usr/lib/libc.so.6"), b"glibc malloc");
        assert_eq!(none, None);
        for (path, bytes, expected) in [
            ("/usr/lib/libjemalloc.so.2", &b""[..], "jemalloc"),
            ("/usr/bin/static", b"..<jemalloc>: Error..", "jemalloc"),
            ("/usr/lib/libtcmalloc_minimal.so.4", b"", "tcmalloc"),
            ("/usr/lib/libmimalloc.so.2.1", b"", "mimalloc"),
            ("/usr/bin/gopher", b"\x01\xff Go buildinf:\x08", "the Go runtime"),
        ] {
            assert_eq!(zero_assuming(Path::new(path), bytes), Some(expected), "{path}");
        }
    }

    #[test]
    fn scope_text_round_trip() {
        for scope in [MappingScope::Model, MappingScope::Large, MappingScope::All] {
            assert_eq!(scope.to_string().parse(), Ok(scope));
        }
        assert!("everything".parse::<MappingScope>().is_err());
    }
}
