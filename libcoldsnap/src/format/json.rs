//! A JSON value that keeps everything: integers of any size, floats that read back, and no key twice.
//!
//! `serde_json`'s own value turns an integer beyond 64 bits into a float, takes the last of two equal keys, and reads
//! `-0` as a float. What is hashed or handed on unread (canonical JSON, `model_execution_state`) therefore goes
//! through this one.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};
use serde_json::Value;
use serde_json::value::RawValue;

/// Lists and objects inside each other; the limit of `serde_json`, so that both accept the same documents.
pub const MAX_DEPTH: usize = 127;

/// Text of a value inside a document that is parsed at most; in memory it takes about sixteen times as much.
pub const MAX_EMBEDDED_BYTES: usize = 16 << 20;

/// The value.
#[derive(Debug, Clone, PartialEq)]
pub enum Json {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// An integer, as its shortest decimal text.
    Integer(String),
    /// A number with a fraction or an exponent; finite.
    Float(f64),
    /// A string.
    Text(String),
    /// A list.
    List(Vec<Json>),
    /// An object; the map sorts by UTF-8 bytes, which is the order of code points.
    Object(BTreeMap<String, Json>),
}

/// A text that is not one JSON value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem} at byte {offset}")]
pub struct JsonError {
    /// Where.
    pub offset: usize,
    /// What is wrong there.
    pub problem: String,
}

impl Json {
    /// Parses exactly one value.
    ///
    /// # Errors
    /// Names the byte at which the text stops being one: syntax, trailing data, an unpaired surrogate, a number beyond
    /// the largest float, a key that is there twice, more than [`MAX_DEPTH`] levels.
    pub fn parse(bytes: &[u8]) -> Result<Self, JsonError> {
        let text = std::str::from_utf8(bytes)
            .map_err(|e| JsonError { offset: e.valid_up_to(), problem: "not UTF-8".to_owned() })?;
        let mut parser = Parser { text, at: 0 };
        let value = parser.value(0)?;
        parser.space();
        if parser.at < text.len() {
            return parser.fail("data after the value");
        }
        Ok(value)
    }

    /// The canonical text: compact, sorted, ASCII only.
    pub fn canonical(&self) -> String {
        let mut out = String::new();
        Writer { out: &mut out, ascii: true, indent: None }.value(self, 0);
        out
    }

    /// The text of a document: indent 2, sorted, UTF-8, newline at the end.
    pub fn document(&self) -> String {
        let mut out = String::new();
        Writer { out: &mut out, ascii: false, indent: Some("  ") }.value(self, 0);
        out.push('\n');
        out
    }

    /// The path of the first integer that 64 bits cannot hold, e.g. `launch.units[0].seed`.
    pub(crate) fn first_beyond_64_bits(&self) -> Option<String> {
        let inside = |step: String, value: &Self| {
            let rest = value.first_beyond_64_bits()?;
            let separator = if rest.is_empty() || rest.starts_with('[') { "" } else { "." };
            Some(step + separator + &rest)
        };
        match self {
            Self::Integer(text) => {
                (text.parse::<i64>().is_err() && text.parse::<u64>().is_err()).then(String::new)
            }
            Self::List(items) => items.iter().enumerate().find_map(|(n, v)| inside(format!("[{n}]"), v)),
            Self::Object(map) => map.iter().find_map(|(key, v)| inside(key.clone(), v)),
            _ => None,
        }
    }
}

impl From<&Value> for Json {
    fn from(value: &Value) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Bool(bool) => Self::Bool(*bool),
            Value::Number(number) => match number.as_f64() {
                Some(float) if number.is_f64() => Self::Float(float),
                _ => Self::Integer(number.to_string()),
            },
            Value::String(text) => Self::Text(text.clone()),
            Value::Array(items) => Self::List(items.iter().map(Self::from).collect()),
            Value::Object(map) => Self::Object(map.iter().map(|(k, v)| (k.clone(), v.into())).collect()),
        }
    }
}

/// Only from `serde_json`, and not inside a flattened or untagged type: it needs the text.
impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        if raw.get().len() > MAX_EMBEDDED_BYTES {
            let problem = format!("{} bytes, more than {MAX_EMBEDDED_BYTES}", raw.get().len());
            return Err(de::Error::custom(problem));
        }
        Self::parse(raw.get().as_bytes()).map_err(de::Error::custom)
    }
}

/// Only to `serde_json`'s text, not to its value.
impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        RawValue::from_string(self.canonical()).map_err(ser::Error::custom)?.serialize(serializer)
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl Parser<'_> {
    fn fail<T>(&self, problem: impl Into<String>) -> Result<T, JsonError> {
        Err(JsonError { offset: self.at, problem: problem.into() })
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn take(&mut self, byte: u8) -> bool {
        let there = self.peek() == Some(byte);
        self.at += usize::from(there);
        there
    }

    fn word(&mut self, word: &str, value: Json) -> Result<Json, JsonError> {
        if !self.text[self.at..].starts_with(word) {
            return self.fail("expected a value");
        }
        self.at += word.len();
        Ok(value)
    }

    fn value(&mut self, depth: usize) -> Result<Json, JsonError> {
        self.space();
        match self.peek() {
            Some(b'{' | b'[') if depth == MAX_DEPTH => {
                self.fail(format!("more than {MAX_DEPTH} levels of lists and objects"))
            }
            Some(b'{') => self.object(depth + 1),
            Some(b'[') => self.list(depth + 1),
            Some(b'"') => Ok(Json::Text(self.string()?)),
            Some(b't') => self.word("true", Json::Bool(true)),
            Some(b'f') => self.word("false", Json::Bool(false)),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => self.word("null", Json::Null),
        }
    }

    fn object(&mut self, depth: usize) -> Result<Json, JsonError> {
        self.at += 1;
        let mut map = BTreeMap::new();
        self.space();
        if self.take(b'}') {
            return Ok(Json::Object(map));
        }
        loop {
            self.space();
            let start = self.at;
            let key = self.string()?;
            if map.contains_key(&key) {
                return Err(JsonError { offset: start, problem: format!("the key {key:?} is there twice") });
            }
            self.space();
            if !self.take(b':') {
                return self.fail("expected `:`");
            }
            let value = self.value(depth)?;
            map.insert(key, value);
            self.space();
            if self.take(b'}') {
                return Ok(Json::Object(map));
            }
            if !self.take(b',') {
                return self.fail("expected `,` or `}`");
            }
        }
    }

    fn list(&mut self, depth: usize) -> Result<Json, JsonError> {
        self.at += 1;
        let mut items = Vec::new();
        self.space();
        if self.take(b']') {
            return Ok(Json::List(items));
        }
        loop {
            items.push(self.value(depth)?);
            self.space();
            if self.take(b']') {
                return Ok(Json::List(items));
            }
            if !self.take(b',') {
                return self.fail("expected `,` or `]`");
            }
        }
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at == start { self.fail("expected a digit") } else { Ok(()) }
    }

    fn number(&mut self) -> Result<Json, JsonError> {
        let start = self.at;
        self.take(b'-');
        if !self.take(b'0') {
            self.digits()?;
        }
        let integer = self.at;
        if self.take(b'.') {
            self.digits()?;
        }
        if self.take(b'e') || self.take(b'E') {
            let _sign = self.take(b'+') || self.take(b'-');
            self.digits()?;
        }
        let text = &self.text[start..self.at];
        if self.at == integer {
            return Ok(Json::Integer(if text == "-0" { "0" } else { text }.to_owned()));
        }
        match text.parse::<f64>() {
            Ok(float) if float.is_finite() => Ok(Json::Float(float)),
            _ => self.fail(format!("{text} is beyond the largest float")),
        }
    }

    fn string(&mut self) -> Result<String, JsonError> {
        if !self.take(b'"') {
            return self.fail("expected a string");
        }
        let mut out = String::new();
        loop {
            let rest = &self.text[self.at..];
            let plain = rest.find(['"', '\\']).unwrap_or(rest.len());
            let (part, _) = rest.split_at(plain);
            if let Some(control) = part.find(|c: char| c < ' ') {
                self.at += control;
                return self.fail("a control character in a string");
            }
            out.push_str(part);
            self.at += plain;
            if self.take(b'"') {
                return Ok(out);
            }
            if !self.take(b'\\') {
                return self.fail("a string without end");
            }
            out.push(self.escape()?);
        }
    }

    fn escape(&mut self) -> Result<char, JsonError> {
        let escaped = self.peek();
        self.at += usize::from(escaped.is_some());
        match escaped {
            Some(c @ (b'"' | b'\\' | b'/')) => Ok(char::from(c)),
            Some(b'n') => Ok('\n'),
            Some(b'r') => Ok('\r'),
            Some(b't') => Ok('\t'),
            Some(b'b') => Ok('\u{8}'),
            Some(b'f') => Ok('\u{c}'),
            Some(b'u') => {
                let first = self.unit()?;
                let mut units = vec![first];
                // A high surrogate is half a character.
                if (0xd800..0xdc00).contains(&first) && self.text[self.at..].starts_with("\\u") {
                    self.at += 2;
                    units.push(self.unit()?);
                }
                match char::decode_utf16(units.iter().copied()).collect::<Result<Vec<_>, _>>().as_deref() {
                    Ok([c]) => Ok(*c),
                    _ => self.fail("an unpaired surrogate"),
                }
            }
            _ => self.fail("an unknown escape"),
        }
    }

    fn unit(&mut self) -> Result<u16, JsonError> {
        let hex = self.text.as_bytes().get(self.at..self.at + 4).unwrap_or_default();
        let mut unit = 0;
        if hex.len() < 4 {
            return self.fail("expected four hex digits");
        }
        for byte in hex {
            let Some(digit) = char::from(*byte).to_digit(16).and_then(|d| u16::try_from(d).ok()) else {
                return self.fail("expected four hex digits");
            };
            unit = unit << 4 | digit;
        }
        self.at += 4;
        Ok(unit)
    }
}

struct Writer<'a> {
    out: &'a mut String,
    ascii: bool,
    indent: Option<&'static str>,
}

impl Writer<'_> {
    fn value(&mut self, value: &Json, depth: usize) {
        match value {
            Json::Null => self.out.push_str("null"),
            Json::Bool(bool) => self.out.push_str(if *bool { "true" } else { "false" }),
            Json::Integer(text) => self.out.push_str(text),
            Json::Float(float) => write_float(self.out, *float),
            Json::Text(text) => self.text(text),
            Json::List(items) => self.items('[', ']', depth, items.iter(), |this, item| {
                this.value(item, depth + 1);
            }),
            Json::Object(map) => self.items('{', '}', depth, map.iter(), |this, (key, item)| {
                this.text(key);
                this.out.push_str(if this.indent.is_some() { ": " } else { ":" });
                this.value(item, depth + 1);
            }),
        }
    }

    fn items<T>(
        &mut self,
        open: char,
        close: char,
        depth: usize,
        items: impl ExactSizeIterator<Item = T>,
        mut write: impl FnMut(&mut Self, T),
    ) {
        self.out.push(open);
        let empty = items.len() == 0;
        for (n, item) in items.enumerate() {
            if n > 0 {
                self.out.push(',');
            }
            self.new_line(depth + 1);
            write(self, item);
        }
        if !empty {
            self.new_line(depth);
        }
        self.out.push(close);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            (0..depth).for_each(|_| self.out.push_str(indent));
        }
    }

    fn text(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                ' '..='~' => self.out.push(c),
                '\u{7f}'.. if !self.ascii => self.out.push(c),
                _ => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a String cannot fail.
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
            }
        }
        self.out.push('"');
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
mod tests;
