//! The header of a `.safetensors` file: eight bytes length, then JSON that maps a tensor's name to
//! its type, shape and range.
//!
//! As strict as the reference reader, which every engine uses: the ranges must tile the data part
//! without holes, and a range must be as long as type and shape say. A type that is not known here
//! is taken by its range: types are added to the format every few months.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::error::HeaderError;
use super::{RawTensor, checked, to_index};

/// The reference reader's limit.
const MAX_HEADER: u64 = 100_000_000;
/// The one key that is no tensor: free text of the writer.
const METADATA: &str = "__metadata__";

#[derive(Deserialize)]
struct Entry<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The tensors in the order of the header. Not a map: a repeated name must be noticed.
struct Header<'a>(Vec<(String, Entry<'a>)>);

impl<'de> Deserialize<'de> for Header<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut tensors = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        map.next_value::<HashMap<String, String>>()?;
                        continue;
                    }
                    let entry = map
                        .next_value()
                        .map_err(|error| A::Error::custom(format_args!("tensor {name:?}: {error}")))?;
                    tensors.push((name, entry));
                }
                Ok(Header(tensors))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Reads the header of the whole file `data`.
pub(super) fn tensors(data: &[u8]) -> Result<Vec<RawTensor>, HeaderError> {
    let file_len = data.len() as u64;
    let truncated = |what| HeaderError::Truncated { what, offset: 0 };
    let (length, rest) = data.split_first_chunk().ok_or_else(|| truncated("the header's length"))?;
    let length = u64::from_le_bytes(*length);
    let limit = MAX_HEADER.min(rest.len() as u64);
    if length > limit {
        return Err(HeaderError::TooLarge { what: "the header's length", found: length, limit });
    }
    let (json, payload) = rest.split_at(to_index(length));
    let Header(entries) = serde_json::from_slice(json)?;

    let start = 8 + length;
    let mut raw = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        let (begin, end) = entry.data_offsets;
        if begin > end || end > payload.len() as u64 {
            let (offset, len) = (start.saturating_add(begin), end.saturating_sub(begin));
            return Err(HeaderError::OutsideFile { name, offset, len, file_len });
        }
        let bytes = end - begin;
        if let Some(bits) = bits(&entry.dtype) {
            let expected = entry.shape.iter().try_fold(bits, |product, &dim| product.checked_mul(dim));
            if expected != bytes.checked_mul(8) {
                let found = format!("{} of shape {:?} does not fill {bytes} bytes", entry.dtype, entry.shape);
                return Err(HeaderError::Shape { name, found });
            }
        }
        raw.push(RawTensor { name, offset: start + begin, len: bytes });
    }

    let tensors = checked(raw, file_len)?;
    let mut end = start;
    for (offset, len) in tensors.iter().map(|tensor| (tensor.offset, tensor.len)).chain([(file_len, 0)]) {
        if offset != end {
            return Err(HeaderError::Hole { offset: end, len: offset - end });
        }
        end = offset + len;
    }
    Ok(tensors)
}

/// Bits of one element.
fn bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(json: &str, payload: &[u8]) -> Vec<u8> {
        [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), payload].concat()
    }

    fn error(json: &str, payload: &[u8]) -> String {
        tensors(&file(json, payload)).unwrap_err().to_string()
    }

    #[test]
    fn reads_names_and_ranges() {
        let json = r#"{"__metadata__":{"format":"pt"},
            "b":{"dtype":"F32","shape":[2],"data_offsets":[6,14]},
            "a":{"dtype":"BF16","shape":[3,1],"data_offsets":[0,6]},
            "scalar":{"dtype":"F64","shape":[],"data_offsets":[14,22]},
            "empty":{"dtype":"F64","shape":[0,4],"data_offsets":[22,22]},
            "packed":{"dtype":"F4","shape":[3,2],"data_offsets":[22,25]},
            "new":{"dtype":"F3_NEW","shape":[9],"data_offsets":[25,30],"note":1}}   "#;
        let start = 8 + json.len() as u64;
        let found = tensors(&file(json, &[7; 30])).unwrap();
        let found: Vec<_> = found.iter().map(|t| (t.name.as_str(), t.offset - start, t.len)).collect();
        assert_eq!(found, [("a", 0, 6), ("b", 6, 8), ("scalar", 14, 8), ("packed", 22, 3), ("new", 25, 5)]);
    }

    #[test]
    fn refuses_malformed_headers() {
        let one = r#"{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#;
        for (json, expected) in [
            (format!(r#"{{"a":{one},"a":{one}}}"#), r#"two tensors are named "a""#),
            (format!(r#"{{"a":{one},"b":{one}}}"#), "overlap"),
            (r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#.into(), "1 bytes at offset"),
            (r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}}"#.into(), "1 bytes at offset"),
            (r#"{"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}"#.into(), "not inside the file"),
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#.into(), "not inside the file"),
            (
                r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[18446744073709551615,18446744073709551615]}}"#
                    .into(),
                "not inside the file",
            ),
            (r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,4]}}"#.into(), "does not fill 4 bytes"),
            (
                r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,2],"data_offsets":[0,4]}}"#.into(),
                "does not fill",
            ),
            (r#"{"a":{"dtype":"U8","shape":[4]}}"#.into(), "missing field `data_offsets`"),
            (r#"{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}"#.into(), r#"tensor "a": invalid"#),
            (r#"{"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}}"#.into(), r#"tensor "a": invalid"#),
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4,4]}}"#.into(), r#"tensor "a""#),
            (r#"{"__metadata__":{"a":1}}"#.into(), "expected a string"),
            (r"[1]".into(), "expected an object of tensors"),
            (format!(r#"{{"a":{one}}}trailing"#), "trailing characters"),
            (format!(r#"{{"a":{}"#, "[".repeat(100_000)), "JSON header"),
            (format!(r#"{{"a":{{"x":{}"#, r#"{"x":"#.repeat(100_000)), "JSON header"),
        ] {
            let text = error(&json, &[7; 4]);
            assert!(text.contains(expected), "{text} for {}", &json[..json.len().min(200)]);
        }
    }

    #[test]
    fn refuses_impossible_lengths() {
        assert!(matches!(tensors(b"abc"), Err(HeaderError::Truncated { .. })));
        let mut long = file("{}", b"");
        long[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(tensors(&long), Err(HeaderError::TooLarge { limit: 2, .. })));
        long[..8].copy_from_slice(&3u64.to_le_bytes());
        assert!(matches!(tensors(&long), Err(HeaderError::TooLarge { limit: 2, .. })));
    }
}
