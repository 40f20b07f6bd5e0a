//! What the descriptors (artifact, target-local overlay) have in common: objects, and the rules of ids, owners and
//! paths. Each descriptor names itself in the errors.

use std::collections::{HashMap, HashSet};
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};

use super::document::{DocumentError, FormatError};
use super::pack;
use crate::digest::Digest;
use crate::durable;
use crate::extent::LayoutError;

/// Role of a payload object.
pub const PAYLOAD_ROLE: &str = "model-weight-payload";

/// A file with its digest.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Object {
    /// What it is.
    pub role: String,
    /// `unit/<id>`, `worker/<id>`, ...
    pub owner: String,
    /// Relative, clean path.
    pub path: String,
    /// Size.
    pub bytes: u64,
    /// Digest of the content.
    pub sha256: Digest,
}

impl Object {
    /// The payload object of a worker: its path follows from its digest.
    pub fn payload(worker: &str, digest: Digest, bytes: u64) -> Self {
        Self {
            role: PAYLOAD_ROLE.to_owned(),
            owner: format!("worker/{worker}"),
            path: digest.payload_path().display().to_string(),
            bytes,
            sha256: digest,
        }
    }
}

/// Why a descriptor is refused or not written.
#[derive(Debug, thiserror::Error)]
pub enum DescriptorError {
    /// The document breaks the format or a rule.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A payload object whose path does not follow from its digest, two objects of one path that differ, or an object
    /// that is not the one it must be equal to.
    #[error("{document}: {field}: {source}")]
    Layout {
        /// Which kind of document.
        document: &'static str,
        /// The object.
        field: String,
        /// What is wrong.
        source: LayoutError,
    },
    /// The file cannot be read or written.
    #[error(transparent)]
    File(DocumentError),
}

impl DescriptorError {
    /// The stable name of the kind of error.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Format(_) => "Malformed",
            Self::Layout { source, .. } => source.kind(),
            Self::File(source) => source.kind(),
        }
    }

    /// Path of the offending field in the document; nothing for an error of the file system.
    pub fn field(&self) -> Option<&str> {
        match self {
            Self::Format(source) => Some(&source.field),
            Self::Layout { field, .. } => Some(field),
            Self::File(_) => None,
        }
    }
}

/// Writes a descriptor durably to a new file: descriptors are never overwritten.
pub(super) fn write_new(path: &Path, bytes: &[u8]) -> Result<(), DescriptorError> {
    durable::write_new_file(path, bytes, 0o644).map_err(|source| {
        DescriptorError::File(DocumentError::Io { action: "write", path: path.to_owned(), source })
    })
}

/// `^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`
pub fn is_id(text: &str) -> bool {
    text.len() <= 128
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

/// Whether a path is relative, not empty, and free of `.`, `..` and doubled or trailing slashes.
pub fn is_clean_relative(path: &str) -> bool {
    let rebuilt: Option<Vec<&str>> = Path::new(path)
        .components()
        .map(|c| match c {
            Component::Normal(name) => name.to_str(),
            _ => None,
        })
        .collect();
    !path.is_empty() && !path.contains('\0') && rebuilt.is_some_and(|parts| parts.join("/") == path)
}

/// The rules, for the document that is named in errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    pub document: &'static str,
}

impl Rules {
    pub fn refuse<T>(self, field: impl Into<String>, problem: impl ToString) -> Result<T, DescriptorError> {
        Err(FormatError::new(self.document, field, problem).into())
    }

    pub fn layout<T>(self, field: impl Into<String>, source: LayoutError) -> Result<T, DescriptorError> {
        Err(DescriptorError::Layout { document: self.document, field: field.into(), source })
    }

    pub fn id(self, field: impl Into<String>, text: &str) -> Result<(), DescriptorError> {
        if is_id(text) {
            return Ok(());
        }
        self.refuse(
            field,
            format!("{text:?} is not an id: expected a letter or digit, then up to 127 of A-Z a-z 0-9 . _ -"),
        )
    }

    pub fn unique_ids<'a>(
        self,
        field: &str,
        ids: impl Iterator<Item = &'a str>,
    ) -> Result<HashSet<&'a str>, DescriptorError> {
        let mut seen = HashSet::new();
        for (n, text) in ids.enumerate() {
            let field = || format!("{field}[{n}].id");
            self.id(field(), text)?;
            if !seen.insert(text) {
                return self.refuse(field(), format!("{text:?} is listed twice"));
            }
        }
        Ok(seen)
    }

    pub fn path(self, field: String, text: &str) -> Result<(), DescriptorError> {
        if is_clean_relative(text) {
            return Ok(());
        }
        self.refuse(field, format!("{text:?} is not a relative path without empty, . and .. parts"))
    }

    /// Roles, owners by their shape, and paths; equal paths only for equal content; one object per (owner, role, path).
    pub fn objects(self, field: &str, objects: &[Object]) -> Result<(), DescriptorError> {
        let mut by_path: HashMap<&str, &Object> = HashMap::new();
        let mut seen = HashSet::new();
        for (n, object) in objects.iter().enumerate() {
            let field = format!("{field}[{n}]");
            self.id(format!("{field}.role"), &object.role)?;
            self.owner(format!("{field}.owner"), &object.owner)?;
            self.path(format!("{field}.path"), &object.path)?;
            if !seen.insert((&object.owner, &object.role, &object.path)) {
                return self.refuse(field, "the same owner, role and path are listed twice");
            }
            let first = *by_path.entry(&object.path).or_insert(object);
            self.same_content(field, first, object)?;
        }
        Ok(())
    }

    /// `<kind>/<id>`, both ids.
    pub fn owner(self, field: String, owner: &str) -> Result<(&str, &str), DescriptorError> {
        match owner.split_once('/').filter(|(kind, name)| is_id(kind) && is_id(name)) {
            Some(parts) => Ok(parts),
            None => self.refuse(field, format!("{owner:?} is not an owner: expected <kind>/<id>")),
        }
    }

    fn same_content(self, field: String, first: &Object, object: &Object) -> Result<(), DescriptorError> {
        let source = if first.role != object.role {
            identity("role", &first.role, &object.role)
        } else if first.sha256 != object.sha256 {
            identity("sha256", &first.sha256.to_string(), &object.sha256.to_string())
        } else if first.bytes != object.bytes {
            let what = format!("the object at {}", object.path);
            LayoutError::SizeChanged { what, expected: first.bytes, found: object.bytes }
        } else {
            return Ok(());
        };
        self.layout(field, source)
    }

    /// Payload objects: role, a worker as owner, a padded size, and the path that follows from the digest.
    pub fn payload_objects(self, field: &str, objects: &[Object]) -> Result<(), DescriptorError> {
        if objects.is_empty() {
            return self.refuse(field, "empty");
        }
        for (n, object) in objects.iter().enumerate() {
            let field = format!("{field}[{n}]");
            if object.role != PAYLOAD_ROLE {
                let problem = format!("{:?}, expected {PAYLOAD_ROLE:?}", object.role);
                return self.refuse(format!("{field}.role"), problem);
            }
            if !object.owner.starts_with("worker/") {
                return self.refuse(format!("{field}.owner"), format!("{:?} is not a worker", object.owner));
            }
            if object.bytes == 0 || object.bytes % pack::ALIGNMENT != 0 {
                let problem = format!("{} is not a positive multiple of {}", object.bytes, pack::ALIGNMENT);
                return self.refuse(format!("{field}.bytes"), problem);
            }
            let digest = object.sha256;
            if digest.payload_path().as_os_str() != object.path.as_str() {
                let path = object.path.clone().into();
                return self
                    .layout(format!("{field}.path"), LayoutError::PathDigestMismatch { path, digest });
            }
        }
        Ok(())
    }
}

fn identity(what: &str, expected: &str, found: &str) -> LayoutError {
    let what = format!("{what} of a path that is listed before");
    LayoutError::IdentityChanged { what, expected: expected.to_owned(), found: found.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clean_paths() {
        for good in ["a", "a/b.c", "model-00001-of-00002.safetensors"] {
            assert!(is_clean_relative(good), "{good}");
        }
        for bad in ["", "/a", "a/", "a//b", "./a", "a/.", "a/../b", "..", "a\0b"] {
            assert!(!is_clean_relative(bad), "{bad}");
        }
    }

    #[test]
    fn ids() {
        for good in ["a", "0", "cap-1", "A.b_c-d", &"a".repeat(128)] {
            assert!(is_id(good), "{good}");
        }
        for bad in ["", ".a", "-a", "_a", "a/b", "a b", "ä", &"a".repeat(129)] {
            assert!(!is_id(bad), "{bad}");
        }
    }
}
