//! Canonical JSON: the one byte sequence of a JSON value, for digests.
//!
//! Keys sorted by code point, separators `,` and `:`, ASCII only (`\uXXXX` lowercase, surrogate pairs, 0x7f
//! escaped too), integers exact, floats in the shortest form that reads back, with `.0` when integral and
//! with a signed exponent of at least two digits outside 1e-4..1e16; -0.0 is kept. NaN and infinities
//! cannot occur: a [`Value`] cannot hold them. Integers are exact between -2^63 and 2^64 - 1; JSON text with a
//! larger integer literal is a float to `serde_json` already when it is parsed.

use std::fmt::Write as _;

use serde_json::{Number, Value};

use crate::digest::Digest;

/// The canonical text of `value`.
pub fn to_string(value: &Value) -> String {
    let mut out = String::new();
    write_value(&mut out, value);
    out
}

/// The SHA-256 of the canonical text of `value`.
pub fn digest(value: &Value) -> Digest {
    Digest::of(to_string(value).as_bytes())
}

fn write_value(out: &mut String, value: &Value) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Number(number) => write_number(out, number),
        Value::String(text) => write_text(out, text),
        Value::Array(items) => {
            out.push('[');
            for (n, item) in items.iter().enumerate() {
                if n > 0 {
                    out.push(',');
                }
                write_value(out, item);
            }
            out.push(']');
        }
        Value::Object(map) => {
            let mut pairs: Vec<_> = map.iter().collect();
            // UTF-8 bytes sort like code points.
            pairs.sort_by_key(|(key, _)| *key);
            out.push('{');
            for (n, (key, item)) in pairs.into_iter().enumerate() {
                if n > 0 {
                    out.push(',');
                }
                write_text(out, key);
                out.push(':');
                write_value(out, item);
            }
            out.push('}');
        }
    }
}

fn write_text(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            ' '..='~' => out.push(c),
            _ => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a String cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
    out.push('"');
}

fn write_number(out: &mut String, number: &Number) {
    match number.as_f64() {
        Some(float) if number.is_f64() => write_float(out, float),
        _ => out.push_str(&number.to_string()),
    }
}

fn write_float(out: &mut String, float: f64) {
    if float == 0.0 {
        out.push_str(if float.is_sign_negative() { "-0.0" } else { "0.0" });
        return;
    }
    // Rust's own text is the shortest that reads back: `-d.ddde-7`.
    let scientific = format!("{float:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = float.to_string();
        out.push_str(&plain);
        if !plain.contains('.') {
            out.push_str(".0");
        }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        let _ = write!(out, "{mantissa}e{sign}{:02}", exponent.unsigned_abs());
    }
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
