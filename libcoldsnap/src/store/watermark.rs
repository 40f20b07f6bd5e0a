//! Watermarks: how full a store may get, and how empty an eviction makes it.
//!
//! In bytes they limit the payloads of the store; in percent they limit the file system that it is on, whoever uses it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::config::Bytes;

/// Units of output, largest last.
const UNITS: [(&str, u32); 5] = [("", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];

/// A limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watermark {
    /// Bytes of payloads in the store.
    Bytes(u64),
    /// Percent of the file system in use, 0 to 100.
    Percent(u8),
}

/// Why watermarks are unusable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WatermarkError {
    /// Not a limit.
    #[error(
        "{0:?} is not a watermark: expected a number of bytes, e.g. 800GB or 1.5TiB, or a percentage from 0% to 100%"
    )]
    Malformed(String),
    /// They cannot be compared.
    #[error("the watermarks {high} and {low} cannot be compared: give both in bytes or both in percent")]
    Mixed {
        /// The high one.
        high: Watermark,
        /// The low one.
        low: Watermark,
    },
    /// The low one must be lower.
    #[error("the low watermark {low} is not lower than the high watermark {high}")]
    Order {
        /// The high one.
        high: Watermark,
        /// The low one.
        low: Watermark,
    },
}

impl WatermarkError {
    /// The stable name of the kind of error.
    pub const fn kind(&self) -> &'static str {
        "Malformed"
    }
}

impl FromStr for Watermark {
    type Err = WatermarkError;

    fn from_str(text: &str) -> Result<Self, WatermarkError> {
        let malformed = || WatermarkError::Malformed(text.to_owned());
        let Some(percent) = text.strip_suffix('%') else {
            return text.parse().map(|Bytes(bytes)| Self::Bytes(bytes)).map_err(|_| malformed());
        };
        // Digits only: the parser of integers takes a sign.
        let digits = percent.bytes().all(|b| b.is_ascii_digit());
        let percent = percent.parse().ok().filter(|percent| digits && *percent <= 100);
        percent.map(Self::Percent).ok_or_else(malformed)
    }
}

impl<'de> Deserialize<'de> for Watermark {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(
            untagged,
            expecting = "expected a number of bytes, also as text with a unit (\"1.5GiB\"), or a percentage (\"85%\")"
        )]
        enum Form {
            Number(u64),
            Text(String),
        }
        match Form::deserialize(deserializer)? {
            Form::Number(bytes) => Ok(Self::Bytes(bytes)),
            Form::Text(text) => text.parse().map_err(de::Error::custom),
        }
    }
}

impl fmt::Display for Watermark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::Bytes(bytes) => {
                let exact = |(_, shift): &&(&str, u32)| *bytes > 0 && bytes.is_multiple_of(1 << shift);
                let (name, shift) = UNITS.iter().rev().find(exact).unwrap_or(&UNITS[0]);
                write!(f, "{}{name}", bytes >> shift)
            }
        }
    }
}

/// As it is parsed.
impl Serialize for Watermark {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Above the high one payloads are removed until the low one is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watermarks {
    high: Watermark,
    low: Watermark,
}

/// How full a store is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of all payloads.
    pub payload_bytes: u64,
    /// Bytes in use on the file system, by anything.
    pub filesystem_used: u64,
    /// Bytes that the file system has for those in use and for what may still be written.
    pub filesystem_bytes: u64,
}

impl Watermarks {
    /// Both limits.
    ///
    /// # Errors
    /// When they have different units, or `low` is not lower.
    pub fn new(high: Watermark, low: Watermark) -> Result<Self, WatermarkError> {
        let ordered = match (high, low) {
            (Watermark::Bytes(high), Watermark::Bytes(low)) => low < high,
            (Watermark::Percent(high), Watermark::Percent(low)) => low < high,
            _ => return Err(WatermarkError::Mixed { high, low }),
        };
        if ordered { Ok(Self { high, low }) } else { Err(WatermarkError::Order { high, low }) }
    }

    /// Above this, payloads are removed.
    pub const fn high(&self) -> Watermark {
        self.high
    }

    /// Down to this.
    pub const fn low(&self) -> Watermark {
        self.low
    }

    /// Bytes that must go: 0 up to the high watermark, else as many as lie above the low one.
    pub fn excess(&self, usage: &Usage) -> u64 {
        let (used, high) = usage.against(self.high);
        let (_, low) = usage.against(self.low);
        if used > high { used - low } else { 0 }
    }
}

impl Usage {
    /// The same store with so many bytes more in it.
    #[must_use]
    pub const fn with(self, bytes: u64) -> Self {
        Self {
            payload_bytes: self.payload_bytes.saturating_add(bytes),
            filesystem_used: self.filesystem_used.saturating_add(bytes),
            ..self
        }
    }

    /// What a watermark limits, and the limit; both in bytes.
    fn against(&self, mark: Watermark) -> (u64, u64) {
        match mark {
            Watermark::Bytes(limit) => (self.payload_bytes, limit),
            Watermark::Percent(percent) => {
                let limit = u128::from(self.filesystem_bytes) * u128::from(percent) / 100;
                (self.filesystem_used, u64::try_from(limit).unwrap_or(u64::MAX))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(high: &str, low: &str) -> Result<Watermarks, WatermarkError> {
        Watermarks::new(high.parse().unwrap(), low.parse().unwrap())
    }

    #[test]
    fn watermarks_are_read_strictly() {
        for (text, expected) in [
            ("0", Watermark::Bytes(0)),
            ("1000", Watermark::Bytes(1000)),
            ("3KiB", Watermark::Bytes(3072)),
            ("500GiB", Watermark::Bytes(536_870_912_000)),
            ("2TiB", Watermark::Bytes(2_199_023_255_552)),
            ("1.5 GB", Watermark::Bytes(1_500_000_000)),
            ("85%", Watermark::Percent(85)),
            ("0%", Watermark::Percent(0)),
            ("100%", Watermark::Percent(100)),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
            assert_eq!(expected.to_string().parse(), Ok(expected), "{text}");
        }
        for text in [
            "",
            "%",
            "GiB",
            "101%",
            "300%",
            "-1",
            "-1%",
            "+1%",
            "1.5%",
            "80 %",
            " 80%",
            "80%%",
            "1gib",
            "18446744073709551616",
            "17179869184GiB",
            "١%",
        ] {
            assert!(text.parse::<Watermark>().is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn the_low_watermark_is_lower_and_in_the_same_unit() {
        assert!(marks("2GiB", "1GiB").is_ok() && marks("90%", "80%").is_ok());
        assert!(matches!(marks("80%", "80%"), Err(WatermarkError::Order { .. })));
        assert!(matches!(marks("1GiB", "2GiB"), Err(WatermarkError::Order { .. })));
        assert!(matches!(marks("90%", "1GiB"), Err(WatermarkError::Mixed { .. })));
    }

    #[test]
    fn nothing_goes_up_to_the_high_watermark_and_everything_above_the_low_one_beyond_it() {
        let usage =
            |payload_bytes, filesystem_used| Usage { payload_bytes, filesystem_used, filesystem_bytes: 1000 };
        let bytes = marks("100", "40").unwrap();
        for (used, excess) in [(0, 0), (40, 0), (100, 0), (101, 61), (500, 460)] {
            assert_eq!(bytes.excess(&usage(used, 999)), excess, "{used}");
        }
        let percent = marks("90%", "50%").unwrap();
        for (used, excess) in [(0, 0), (900, 0), (901, 401), (1000, 500)] {
            assert_eq!(percent.excess(&usage(5000, used)), excess, "{used}");
        }
        assert_eq!(bytes.excess(&usage(90, 0).with(20)), 70);
        assert_eq!(percent.excess(&usage(0, 890).with(20)), 410);
    }
}
