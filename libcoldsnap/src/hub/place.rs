//! Names of things on the hub. Their characters are checked once, so that addresses can be put together from them.

use std::fmt;
use std::str::FromStr;

use crate::digest::Digest;

/// Used when no endpoint is configured.
pub const PUBLIC_ENDPOINT: &str = "https://huggingface.co";

/// A name that cannot be one.
#[derive(Debug, thiserror::Error)]
#[error("{text:?} is not {expected}")]
pub struct PlaceError {
    text: String,
    expected: &'static str,
}

impl PlaceError {
    /// The stable name of the kind of error.
    pub const fn kind(&self) -> &'static str {
        "Malformed"
    }
}

fn refuse<T>(text: &str, expected: &'static str) -> Result<T, PlaceError> {
    Err(PlaceError { text: text.to_owned(), expected })
}

/// Scheme, host and port of a hub, with an optional path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint(String);

impl FromStr for Endpoint {
    type Err = PlaceError;

    fn from_str(text: &str) -> Result<Self, PlaceError> {
        const EXPECTED: &str = "the address of a hub: expected e.g. \"https://hub.example\", without user, \
                                query or fragment";
        let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
        let valid = |rest: &&str| {
            !rest.is_empty()
                && !rest.starts_with(['/', ':'])
                && rest.bytes().all(|byte| byte.is_ascii_graphic() && !b"@?#\\\"<>%{}|^`".contains(&byte))
        };
        match rest.filter(valid) {
            Some(_) => Ok(Self(text.trim_end_matches('/').to_owned())),
            None => refuse(text, EXPECTED),
        }
    }
}

impl Endpoint {
    /// The address without a slash at its end.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The configured endpoint, else the one in the environment (`HF_ENDPOINT`), else the public one.
    ///
    /// # Errors
    /// When that is no address of a hub.
    pub fn find(configured: Option<&str>) -> Result<Self, PlaceError> {
        let environment = std::env::var("HF_ENDPOINT").ok().filter(|text| !text.is_empty());
        configured.map(ToOwned::to_owned).or(environment).as_deref().unwrap_or(PUBLIC_ENDPOINT).parse()
    }
}

/// `owner/name`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repository(String);

impl FromStr for Repository {
    type Err = PlaceError;

    fn from_str(text: &str) -> Result<Self, PlaceError> {
        let part = |part: &str| {
            part.len() <= 96
                && part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        };
        match text.split_once('/') {
            Some((owner, name)) if part(owner) && part(name) => Ok(Self(text.to_owned())),
            _ => refuse(text, "a repository: expected owner/name of A-Z a-z 0-9 . _ -"),
        }
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Repository {
    /// Owner and name.
    pub fn parts(&self) -> (&str, &str) {
        self.0.split_once('/').unwrap_or(("", &self.0))
    }
}

/// A repository at a pinned commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The hub.
    pub endpoint: Endpoint,
    /// The repository.
    pub repository: Repository,
    /// Its commit, 40 hex digits.
    revision: String,
}

impl Place {
    /// # Errors
    /// When `revision` is no commit.
    pub fn new(endpoint: Endpoint, repository: Repository, revision: &str) -> Result<Self, PlaceError> {
        if !is_commit(revision) {
            return refuse(revision, "a commit: expected 40 lower-case hex digits, not a branch or tag");
        }
        Ok(Self { endpoint, repository, revision: revision.to_owned() })
    }

    /// The commit.
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// Where the payload is.
    pub fn resolve(&self, digest: &Digest) -> String {
        let Self { endpoint, repository, revision } = self;
        let path = digest.payload_path();
        format!("{}/{repository}/resolve/{revision}/{}", endpoint.as_str(), path.display())
    }
}

/// 40 lower-case hex digits.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_change_an_address_are_refused() {
        for good in ["https://hub.example", "http://127.0.0.1:8080/", "https://hub.example/mirror"] {
            assert!(!good.parse::<Endpoint>().unwrap().as_str().ends_with('/'));
        }
        for bad in
            ["", "hub.example", "ftp://x", "https://", "https://user:pw@x", "https://x?y", "https://x#y"]
        {
            assert!(bad.parse::<Endpoint>().is_err(), "{bad}");
        }
        for bad in ["", "name", "a/b/c", "../b", "a/..", "a/b?x", "a/", "/b", "a/b c", "a/b%2f", "-a/b"] {
            assert!(bad.parse::<Repository>().is_err(), "{bad}");
        }
        let place = |revision: &str| {
            let repository = "owner/a.b-c_1".parse().unwrap();
            Place::new("https://hub.example/".parse().unwrap(), repository, revision)
        };
        for bad in ["main", "", &"A".repeat(40), &"a".repeat(39), &"a".repeat(64)] {
            assert!(place(bad).is_err(), "{bad}");
        }
        let digest = Digest::of(b"");
        assert_eq!(
            place(&"a".repeat(40)).unwrap().resolve(&digest),
            format!(
                "https://hub.example/owner/a.b-c_1/resolve/{}/model-payloads/sha256/\
                 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855.pack",
                "a".repeat(40)
            )
        );
    }
}
