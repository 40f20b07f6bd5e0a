//! Credentials for a registry from a file in the form of Docker's `config.json`.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::RegistryError;

/// A user name with its secret, which no message and no log shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The user.
    pub username: String,
    /// Password or access token.
    pub secret: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("username", &self.username).finish_non_exhaustive()
    }
}

/// Other tools keep more in this file, so that unknown fields are no error.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
struct Entry {
    /// base64 of `user:password`
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
}

/// Reads the credentials for `host` (`name[:port]`).
///
/// # Errors
/// When the file cannot be read or understood, or has no usable credentials for the host. No message quotes the file.
pub fn read(path: &Path, host: &str) -> Result<Credentials, RegistryError> {
    let wrong = |problem: String| RegistryError::Credentials { path: path.to_owned(), problem };
    let text = fs::read(path).map_err(|e| wrong(e.to_string()))?;
    parse(&text, host).map_err(wrong)
}

fn parse(text: &[u8], host: &str) -> Result<Credentials, String> {
    // The parser's own words may quote a value.
    let file: File = serde_json::from_slice(text)
        .map_err(|e| format!("it is not a config.json: line {}, column {}", e.line(), e.column()))?;
    let entry = file.auths.into_iter().find(|(key, _)| host_of(key) == canonical(host));
    let (_, entry) = entry.ok_or_else(|| format!("it has none for {host} in \"auths\""))?;
    if entry.identitytoken.is_some_and(|token| !token.is_empty()) {
        return Err(format!(
            "the entry for {host} is an identity token: user name and password or access token are needed"
        ));
    }
    if let (Some(username), Some(secret)) = (entry.username, entry.password) {
        return Ok(Credentials { username, secret });
    }
    let auth = entry
        .auth
        .filter(|auth| !auth.is_empty())
        .ok_or_else(|| format!("the entry for {host} has no \"auth\"; credential helpers are not asked"))?;
    let decoded = STANDARD.decode(auth.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    let pair = decoded.as_deref().and_then(|text| text.split_once(':'));
    let (username, secret) =
        pair.ok_or_else(|| format!("\"auth\" of {host} is not the base64 of user:password"))?;
    Ok(Credentials { username: username.to_owned(), secret: secret.to_owned() })
}

/// Keys are hosts, or addresses such as `https://index.docker.io/v1/`.
fn host_of(key: &str) -> &str {
    let rest = key.split_once("://").map_or(key, |(_, rest)| rest);
    canonical(rest.split('/').next().unwrap_or_default())
}

/// Docker's registry has several names.
fn canonical(host: &str) -> &str {
    match host {
        "index.docker.io" | "registry-1.docker.io" => "docker.io",
        host => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{
        "auths": {
            "registry.example:5000": {"auth": "dXNlcjpwYTpzcw=="},
            "https://index.docker.io/v1/": {"username": "u", "password": "p"},
            "token.example": {"identitytoken": "hidden"},
            "broken.example": {"auth": "hidden!"},
            "helped.example": {}
        },
        "credsStore": "desktop"
    }"#;

    #[test]
    fn the_entry_of_the_host_is_found() {
        let found = parse(FILE.as_bytes(), "registry.example:5000").unwrap();
        assert_eq!((found.username.as_str(), found.secret.as_str()), ("user", "pa:ss"));
        assert_eq!(parse(FILE.as_bytes(), "docker.io").unwrap().secret, "p");
    }

    #[test]
    fn nothing_shows_the_secret() {
        for (host, expected) in [
            ("registry.example", "none for registry.example"),
            ("token.example", "identity token"),
            ("broken.example", "base64"),
            ("helped.example", "credential helpers"),
        ] {
            let problem = parse(FILE.as_bytes(), host).unwrap_err();
            assert!(problem.contains(expected) && !problem.contains("hidden"), "{problem}");
        }
        let problem = parse(br#"{"auths": {"h": {"auth": "hidden", "username": 5}}}"#, "h").unwrap_err();
        assert!(problem.contains("line 1") && !problem.contains("hidden"), "{problem}");
        let shown = format!("{:?}", parse(FILE.as_bytes(), "registry.example:5000").unwrap());
        assert!(shown.contains("user") && !shown.contains("pa:ss"), "{shown}");
    }
}
