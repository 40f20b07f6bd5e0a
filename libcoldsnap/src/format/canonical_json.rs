//! Canonical JSON: the one byte sequence of a JSON value, for digests.
//!
//! Keys sorted by code point, separators `,` and `:`, ASCII only (`\uXXXX` lowercase, surrogate pairs, 0x7f
//! escaped too), integers exact, floats in the shortest form that reads back, with `.0` when integral and
//! with a signed exponent of at least two digits outside 1e-4..1e16; -0.0 is kept. NaN and infinities
//! cannot occur: neither value can hold them.

use serde_json::Value;

use super::json::{Json, JsonError};
use crate::digest::Digest;

/// The canonical text of `value`.
pub fn to_string(value: &Value) -> String {
    Json::from(value).canonical()
}

/// The SHA-256 of the canonical text of `value`.
pub fn digest(value: &Value) -> Digest {
    Digest::of(to_string(value).as_bytes())
}

/// The canonical text of the value that a JSON text holds, with integers of any size.
///
/// # Errors
/// When it is not exactly one value, see [`Json::parse`].
pub fn of_text(text: &[u8]) -> Result<String, JsonError> {
    Ok(Json::parse(text)?.canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors() {
        let file: Value =
            serde_json::from_str(include_str!("../../tests/vectors/canonical-json.json")).unwrap();
        let cases = file["canonical_json"].as_array().unwrap();
        assert_eq!(cases.len(), 4);
        for case in cases {
            let name = &case["name"];
            assert_eq!(to_string(&case["value"]), case["canonical"].as_str().unwrap(), "{name}");
            assert_eq!(of_text(case["value"].to_string().as_bytes()).unwrap(), to_string(&case["value"]));
            assert_eq!(digest(&case["value"]).hex(), case["sha256"].as_str().unwrap(), "{name}");
        }
    }

    #[test]
    fn floats() {
        for (float, text) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.0, "0.0"),
            (0.1, "0.1"),
            (123_456_789.125, "123456789.125"),
            (1e15, "1000000000000000.0"),
            (9.999_999_999_999_998e15, "9999999999999998.0"),
            (1e16, "1e+16"),
            (-1.5e16, "-1.5e+16"),
            (1e-4, "0.0001"),
            (9.5e-5, "9.5e-05"),
            (1.5e-7, "1.5e-07"),
            (1e100, "1e+100"),
            (5e-324, "5e-324"),
            (f64::MAX, "1.7976931348623157e+308"),
        ] {
            assert_eq!(to_string(&Value::from(float)), text);
        }
    }

    #[test]
    fn integers_and_escapes() {
        assert_eq!(
            to_string(&serde_json::json!([u64::MAX, i64::MIN, 0])),
            format!("[{},{},0]", u64::MAX, i64::MIN)
        );
        assert_eq!(to_string(&Value::from("\u{0}\u{8}\u{c}\r/\u{80}")), r#""\u0000\b\f\r/\u0080""#);
        assert!(serde_json::from_str::<Value>("NaN").is_err());
        assert!(serde_json::from_str::<Value>("1e999").is_err());
    }

    #[test]
    fn keys_sort_by_code_point() {
        // UTF-16 units would put U+10000 before U+FFFF.
        let value = serde_json::json!({"\u{10000}": 1, "\u{ffff}": 2});
        assert_eq!(to_string(&value), r#"{"\uffff":2,"\ud800\udc00":1}"#);
    }
}
