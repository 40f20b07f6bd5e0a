//! containerd's filter language, as `List` receives it.
//!
//! ```text
//! filter    := selector ("," selector)*          every selector must match; an empty filter matches all
//! selector  := fieldpath (operator value)?       without an operator: the field is present
//! fieldpath := field ("." field)*
//! field     := quoted | [A-Za-z0-9_]+
//! operator  := "==" | "!=" | "~="                equal, not equal, regular expression
//! value     := quoted | anything without "," and white space
//! quoted    := "..." with Go's escapes; after "~=" also /.../ and |...|
//! ```
//! Of several filters one must match. Source: containerd `pkg/filters` and, for the fields of a snapshot,
//! `core/snapshots/storage`.

use std::iter::Peekable;
use std::str::CharIndices;

use regex::Regex;

use crate::metadata::Info;

/// A text that is not a filter.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{filter:?} is not a filter: at byte {position}: {problem}")]
pub struct FilterError {
    filter: String,
    position: usize,
    problem: String,
}

/// A list of filters; matches a snapshot when one of them does, or when the list is empty.
#[derive(Debug, Default)]
pub struct Filters(Vec<Vec<Selector>>);

#[derive(Debug)]
struct Selector {
    field: Vec<String>,
    test: Test,
}

#[derive(Debug)]
enum Test {
    Present,
    Equal(String),
    NotEqual(String),
    /// `None`: the expression does not compile; containerd lets such a selector match nothing.
    Matches(Option<Regex>),
}

impl Filters {
    /// Parses every element of `texts`.
    ///
    /// # Errors
    /// The first text that does not follow the grammar.
    pub fn parse(texts: &[String]) -> Result<Self, FilterError> {
        texts.iter().map(|text| Parser::new(text).filter()).collect::<Result<_, _>>().map(Self)
    }

    /// Whether the snapshot is to be listed.
    pub fn matches(&self, info: &Info) -> bool {
        self.0.is_empty() || self.0.iter().any(|all| all.iter().all(|selector| selector.matches(info)))
    }
}

impl Selector {
    fn matches(&self, info: &Info) -> bool {
        let value = field(info, &self.field);
        match &self.test {
            Test::Present => value.is_some(),
            Test::Equal(wanted) => value == Some(wanted),
            // An absent field reads as the empty text here and for expressions.
            Test::NotEqual(wanted) => value.unwrap_or_default() != wanted,
            Test::Matches(expression) => {
                expression.as_ref().is_some_and(|e| e.is_match(value.unwrap_or_default()))
            }
        }
    }
}

fn field<'a>(info: &'a Info, path: &[String]) -> Option<&'a str> {
    match path.first()?.as_str() {
        "name" => Some(&info.name),
        "parent" => Some(info.parent.as_deref().unwrap_or_default()),
        "kind" => Some(info.kind.name()),
        "labels" => info.labels.get(&path[1..].join(".")).map(String::as_str),
        _ => None,
    }
}

struct Parser<'a> {
    text: &'a str,
    rest: Peekable<CharIndices<'a>>,
}

impl<'a> Parser<'a> {
    fn new(text: &'a str) -> Self {
        Self { text, rest: text.char_indices().peekable() }
    }

    fn filter(mut self) -> Result<Vec<Selector>, FilterError> {
        let mut selectors = Vec::new();
        if self.text.is_empty() {
            return Ok(selectors);
        }
        loop {
            selectors.push(self.selector()?);
            match self.rest.next() {
                None => return Ok(selectors),
                Some((_, ',')) => {}
                Some((position, found)) => return Err(self.error(position, format!("unexpected {found:?}"))),
            }
        }
    }

    fn selector(&mut self) -> Result<Selector, FilterError> {
        let mut field = vec![self.field()?];
        while self.rest.next_if(|(_, c)| *c == '.').is_some() {
            field.push(self.field()?);
        }
        if matches!(self.rest.peek(), None | Some((_, ','))) {
            return Ok(Selector { field, test: Test::Present });
        }
        self.skip_space();
        let position = self.position();
        let test = match self.take_while(|c| matches!(c, '=' | '!' | '~')) {
            "==" => Test::Equal(self.value(false)?),
            "!=" => Test::NotEqual(self.value(false)?),
            "~=" => {
                let text = self.value(true)?;
                Test::Matches(
                    Regex::new(&text)
                        .inspect_err(|error| tracing::warn!(%error, "a filter's expression does not compile"))
                        .ok(),
                )
            }
            other => {
                return Err(self.error(position, format!("expected ==, != or ~=, found {other:?}")));
            }
        };
        Ok(Selector { field, test })
    }

    fn field(&mut self) -> Result<String, FilterError> {
        self.skip_space();
        let position = self.position();
        match self.rest.peek() {
            Some((_, '"')) => self.quoted('"'),
            _ => match self.take_while(|c| c == '_' || c.is_ascii_alphanumeric()) {
                "" => Err(self.error(position, "expected a field")),
                name => Ok(name.to_owned()),
            },
        }
    }

    fn value(&mut self, expression: bool) -> Result<String, FilterError> {
        self.skip_space();
        let position = self.position();
        match self.rest.peek() {
            Some((_, '"')) => self.quoted('"'),
            Some((_, quote @ ('/' | '|'))) if expression => {
                let quote = *quote;
                self.quoted(quote)
            }
            None | Some((_, ',' | '.' | '=' | '!' | '~' | '/' | '|')) => Err(self
                .error(position, "expected a value; one that begins with a special character needs quotes")),
            Some(_) => Ok(self.take_while(|c| c != ',' && !c.is_whitespace() && !c.is_control()).to_owned()),
        }
    }

    /// A quoted text with Go's escapes. Escapes name bytes, so the result is collected as bytes.
    fn quoted(&mut self, quote: char) -> Result<String, FilterError> {
        let start = self.position();
        self.rest.next();
        let mut bytes = Vec::new();
        loop {
            match self.rest.next() {
                Some((_, c)) if c == quote => break,
                None | Some((_, '\n')) => return Err(self.error(start, "the quoted text does not end")),
                Some((position, '\\')) => self.escape(position, quote, &mut bytes)?,
                Some((_, c)) => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        String::from_utf8(bytes).map_err(|_| self.error(start, "the quoted text is not UTF-8"))
    }

    fn escape(&mut self, position: usize, quote: char, bytes: &mut Vec<u8>) -> Result<(), FilterError> {
        let Some((_, c)) = self.rest.next() else {
            return Err(self.error(position, "illegal escape sequence"));
        };
        let value = match c {
            'a' => 0x07,
            'b' => 0x08,
            'f' => 0x0c,
            'n' => 0x0a,
            'r' => 0x0d,
            't' => 0x09,
            'v' => 0x0b,
            '\\' => 0x5c,
            c if c == quote => u32::from(c),
            '0'..='7' => self.digits(position, c.to_digit(8).unwrap_or_default(), 2, 8)?,
            'x' => self.digits(position, 0, 2, 16)?,
            'u' => self.digits(position, 0, 4, 16)?,
            'U' => self.digits(position, 0, 8, 16)?,
            _ => return Err(self.error(position, "illegal escape sequence")),
        };
        if matches!(c, 'u' | 'U') {
            let c = char::from_u32(value).ok_or_else(|| self.error(position, "not a Unicode code point"))?;
            bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
        } else {
            bytes.push(u8::try_from(value).map_err(|_| self.error(position, "the escape exceeds one byte"))?);
        }
        Ok(())
    }

    /// Exactly `count` more digits after those that gave `value`.
    fn digits(&mut self, position: usize, value: u32, count: u32, radix: u32) -> Result<u32, FilterError> {
        (0..count).try_fold(value, |value, _| {
            let digit = self.rest.next().and_then(|(_, c)| c.to_digit(radix));
            match (value.checked_mul(radix), digit) {
                (Some(shifted), Some(digit)) => Ok(shifted + digit),
                _ => Err(self.error(position, "illegal numeric escape sequence")),
            }
        })
    }

    fn skip_space(&mut self) {
        self.take_while(char::is_whitespace);
    }

    fn take_while(&mut self, wanted: impl Fn(char) -> bool) -> &'a str {
        let start = self.position();
        while self.rest.next_if(|(_, c)| wanted(*c)).is_some() {}
        &self.text[start..self.position()]
    }

    fn position(&mut self) -> usize {
        self.rest.peek().map_or(self.text.len(), |(position, _)| *position)
    }

    fn error(&self, position: usize, problem: impl Into<String>) -> FilterError {
        FilterError { filter: self.text.to_owned(), position, problem: problem.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::Kind;

    fn info() -> Info {
        Info {
            name: "default/3/web".to_owned(),
            parent: Some("default/2/sha256:ab".to_owned()),
            kind: Kind::Active,
            labels: [
                ("l".to_owned(), "1".to_owned()),
                ("containerd.io/gc.root".to_owned(), "a b,c".to_owned()),
            ]
            .into(),
            ..Info::default()
        }
    }

    fn matches(filter: &str) -> bool {
        Filters::parse(&[filter.to_owned()]).unwrap().matches(&info())
    }

    #[test]
    fn selectors() {
        for (filter, wanted) in [
            ("", true),
            ("name", true),
            ("name==default/3/web", true),
            ("name==default/3/we", false),
            (" name == default/3/web", true),
            ("name!=x", true),
            ("name!=default/3/web", false),
            ("name~=^default/.*web$", true),
            (r"name~=/\/3\//", true),
            ("name~=|/4/|", false),
            ("name~=/(/", false),
            ("kind==active", true),
            ("kind==view", false),
            ("kind==committed", false),
            ("parent==\"default/2/sha256:ab\"", true),
            ("parent!=\"\"", true),
            ("parent", true),
            ("labels.l", true),
            ("labels.l==1", true),
            ("labels.m", false),
            ("labels.m!=1", true),
            ("labels.m~=^$", true),
            ("labels", false),
            (r#"labels."containerd.io/gc.root""#, true),
            ("labels.containerd", false),
            (r#"labels."containerd.io/gc.root"=="a b,c""#, true),
            (r#"labels."containerd.io/gc.root"=="\x61\040b\u002cc""#, true),
            ("name==default/3/web,labels.l", true),
            ("name==default/3/web,labels.m", false),
            ("unknown", false),
            ("unknown!=1", true),
        ] {
            assert_eq!(matches(filter), wanted, "{filter}");
        }
    }

    #[test]
    fn labels_with_dots_need_no_quotes_when_the_parts_are_fields() {
        let mut info = info();
        info.labels.insert("a.b.c".to_owned(), "x".to_owned());
        assert!(Filters::parse(&["labels.a.b.c==x".to_owned()]).unwrap().matches(&info));
    }

    #[test]
    fn one_of_several_filters_is_enough_and_none_is_too() {
        let parse = |filters: &[&str]| {
            Filters::parse(&filters.iter().map(|f| (*f).to_owned()).collect::<Vec<_>>()).unwrap()
        };
        assert!(parse(&[]).matches(&info()));
        assert!(parse(&["name==x", "kind==active"]).matches(&info()));
        assert!(!parse(&["name==x", "kind==view"]).matches(&info()));
    }

    #[test]
    fn an_absent_parent_is_the_empty_text() {
        let base = Info { parent: None, ..info() };
        assert!(Filters::parse(&["parent==\"\"".to_owned()]).unwrap().matches(&base));
        assert!(!Filters::parse(&["parent!=\"\"".to_owned()]).unwrap().matches(&base));
    }

    #[test]
    fn refuses_what_is_not_a_filter() {
        for filter in [
            ",",
            "name=",
            "name=x",
            "name===x",
            "name==",
            "name==,kind",
            "name==x,",
            "name==x kind",
            "==x",
            "name.",
            ".name",
            "name==\"x",
            "name==\"\\q\"",
            "name==\"\\777\"",
            "name==\"\\xff\"",
            "name==\"\\ud800\"",
            "name==/x/",
            "name==.x",
            "na-me",
        ] {
            let error = Filters::parse(&[filter.to_owned()]);
            assert!(error.is_err(), "{filter} was accepted");
        }
    }
}
