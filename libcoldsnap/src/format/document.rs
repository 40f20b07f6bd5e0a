//! Reading and writing of one JSON document, the same way for every kind.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::json::Json;
use crate::durable;

/// No manifest or descriptor is larger; a manifest has about 300 bytes per extent.
pub const MAX_DOCUMENT_BYTES: u64 = 256 << 20;

/// A document that is not what its format says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{document}: {field}: {problem}")]
pub struct FormatError {
    /// Which kind of document, e.g. `native-manifest.json`.
    pub document: &'static str,
    /// Path of the offending field in it, e.g. `model_weight_extents[3].crc32`; `.` is the document itself.
    pub field: String,
    /// What is wrong.
    pub problem: String,
}

impl FormatError {
    pub(crate) fn new(document: &'static str, field: impl Into<String>, problem: impl ToString) -> Self {
        Self { document, field: field.into(), problem: problem.to_string() }
    }
}

/// A document file that cannot be read, parsed or written.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// The file system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
    /// The content breaks its format.
    #[error("cannot use {}: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: FormatError,
    },
}

impl DocumentError {
    /// The stable name of the kind of error.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Io { .. } => "Io",
            Self::Format { .. } => "Malformed",
        }
    }
}

/// Parses exactly one JSON value.
pub(crate) fn parse<T: DeserializeOwned>(document: &'static str, bytes: &[u8]) -> Result<T, FormatError> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json)
        .map_err(|e| FormatError::new(document, e.path().to_string(), e.inner()))?;
    json.end().map_err(|e| FormatError::new(document, ".", format!("data after the document: {e}")))?;
    Ok(value)
}

/// Refuses more than `most` bytes.
pub(crate) fn limit(document: &'static str, bytes: &[u8], most: u64) -> Result<(), FormatError> {
    if bytes.len() as u64 <= most {
        return Ok(());
    }
    Err(FormatError::new(document, ".", format!("{} bytes, more than {most}", bytes.len())))
}

/// As [`parse`], for documents that keep values unread: no key twice anywhere, and no integer that 64 bits cannot hold,
/// because neither would survive.
pub(crate) fn parse_exact<T: DeserializeOwned>(
    document: &'static str,
    bytes: &[u8],
) -> Result<T, FormatError> {
    let value = parse(document, bytes)?;
    let exact = Json::parse(bytes).map_err(|e| FormatError::new(document, ".", e))?;
    match exact.first_beyond_64_bits() {
        Some(field) => Err(FormatError::new(document, field, "an integer that 64 bits cannot hold")),
        None => Ok(value),
    }
}

/// The document as it is written: indent 2, sorted keys, newline at the end.
pub(crate) fn to_bytes<T: Serialize>(document: &'static str, value: &T) -> Result<Vec<u8>, FormatError> {
    let fail = |e: &dyn ToString| FormatError::new(document, ".", e.to_string());
    let text = serde_json::to_vec(value).map_err(|e| fail(&e))?;
    Ok(Json::parse(&text).map_err(|e| fail(&e))?.document().into_bytes())
}

/// Reads `path` and hands its bytes to `parse`.
pub(crate) fn read<T>(
    path: &Path,
    document: &'static str,
    parse: impl FnOnce(&[u8]) -> Result<T, FormatError>,
) -> Result<T, DocumentError> {
    parse(&read_bytes(path, document)?)
        .map_err(|source| DocumentError::Format { path: path.to_owned(), source })
}

/// Reads a whole document.
pub(crate) fn read_bytes(path: &Path, document: &'static str) -> Result<Vec<u8>, DocumentError> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|f| f.take(MAX_DOCUMENT_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|source| DocumentError::Io { action: "read", path: path.to_owned(), source })?;
    if bytes.len() as u64 > MAX_DOCUMENT_BYTES {
        let source = FormatError::new(document, ".", format!("larger than {MAX_DOCUMENT_BYTES} bytes"));
        return Err(DocumentError::Format { path: path.to_owned(), source });
    }
    Ok(bytes)
}

/// Writes a document durably with mode 0644.
pub(crate) fn write(path: &Path, bytes: Result<Vec<u8>, FormatError>) -> Result<(), DocumentError> {
    let bytes = bytes.map_err(|source| DocumentError::Format { path: path.to_owned(), source })?;
    durable::write_file(path, &bytes, 0o644).map_err(|source| DocumentError::Io {
        action: "write",
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    #[expect(dead_code, reason = "only parsed")]
    struct Sample {
        list: Vec<u8>,
    }

    #[test]
    fn errors_name_the_field() {
        let error = |text: &str| parse::<Sample>("sample", text.as_bytes()).unwrap_err();
        assert_eq!(error(r#"{"list":[1,"x"]}"#).field, "list[1]");
        assert!(error("{}").problem.contains("missing field `list`"));
        assert!(error(r#"{"list":[]} {}"#).problem.contains("data after"));
        assert!(error("").problem.contains("EOF"));
        assert!(parse::<Sample>("sample", b" {\"list\":[1]} \n").is_ok());
    }

    #[test]
    fn written_sorted_with_newline() {
        let value = serde_json::json!({"b": {"z": 1, "a": 2}, "a": [1.5]});
        let text = String::from_utf8(to_bytes("sample", &value).unwrap()).unwrap();
        assert_eq!(text, "{\n  \"a\": [\n    1.5\n  ],\n  \"b\": {\n    \"a\": 2,\n    \"z\": 1\n  }\n}\n");
    }
}
