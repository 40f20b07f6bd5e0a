//! SHA-256 digests and the one path that a payload may have.
//!
//! A payload path is always derived from a digest and never read from a manifest, so that no
//! manifest can point a restore at another file.

pub(crate) mod lanes;
mod sha256;
#[cfg(target_arch = "x86_64")]
mod sha_ni;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use sha256::Sha256;

/// A SHA-256 digest, written `sha256:<64 lowercase hex>`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

/// Why a text is not a digest.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{text:?} is not a digest: expected sha256:<64 lowercase hex digits>")]
pub struct DigestError {
    text: String,
}

impl Digest {
    /// The digest with these 32 bytes.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The SHA-256 of `data`.
    pub fn of(data: &[u8]) -> Self {
        let mut sha256 = Sha256::default();
        sha256.update(data);
        sha256.finish()
    }

    /// The 32 bytes, most significant first.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The 64 lowercase hex digits, without the algorithm.
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }

    /// Parses 64 lowercase hex digits without the algorithm (per-extent digests are written so).
    ///
    /// # Errors
    /// When the text has another length or holds anything but `0-9a-f`.
    pub fn from_hex(text: &str) -> Result<Self, DigestError> {
        let error = || DigestError { text: text.to_owned() };
        if text.len() != 64 || !text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(error());
        }
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes).map_err(|_| error())?;
        Ok(Self(bytes))
    }

    /// `model-payloads/sha256/<64hex>.pack`, relative to the store's root or a repository's root.
    pub fn payload_path(&self) -> PathBuf {
        PathBuf::from(format!("model-payloads/sha256/{}.pack", self.hex()))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", hex::encode(self.0))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let hex = text.strip_prefix("sha256:").ok_or_else(|| DigestError { text: text.to_owned() })?;
        Self::from_hex(hex).map_err(|_| DigestError { text: text.to_owned() })
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trip_and_path() {
        let text = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let digest: Digest = text.parse().unwrap();
        assert_eq!(digest, Digest::of(b""));
        assert_eq!(digest.to_string(), text);
        assert_eq!(
            digest.payload_path().to_str().unwrap(),
            "model-payloads/sha256/e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855.pack"
        );
    }

    #[test]
    fn refuses_everything_else() {
        let hex = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        for text in [
            hex.to_owned(),
            format!("sha256:{}", hex.to_uppercase()),
            format!("sha512:{hex}"),
            format!("sha256:{hex}0"),
            format!("sha256:{}", &hex[1..]),
            format!("sha256: {}", &hex[1..]),
            format!("sha256:+{}", &hex[1..]),
            String::new(),
        ] {
            assert!(text.parse::<Digest>().is_err(), "{text} was accepted");
        }
    }
}
