//! The token that a client must know: what keeps out a process that can reach the socket but not the file.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use coldsnap::digest::Digest;
use coldsnap::durable;
use rustix::fs::OFlags;

use crate::output::CliError;

/// A shorter token could be guessed.
const MIN_BYTES: usize = 32;
const MAX_BYTES: u64 = 4096;

/// The digest of the token: the token itself is kept nowhere.
pub struct Token(Digest);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// Reads the file; writes one with a random token when there is none.
    ///
    /// # Errors
    /// When the file is not a regular file of ours without permissions for others, or holds no token.
    pub fn load_or_create(path: &Path) -> Result<Self, CliError> {
        let fail = |what: String| {
            CliError::new("Token", format!("cannot use the token file {}: {what}", path.display()))
        };
        if let Err(e) = std::fs::symlink_metadata(path)
            && e.kind() == io::ErrorKind::NotFound
        {
            match create(path) {
                // Somebody was faster: his token is as good.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                result => result.map_err(|e| fail(format!("it cannot be made: {e}")))?,
            }
        }
        let text = read(path).map_err(fail)?;
        let token = text.strip_suffix('\n').unwrap_or(&text);
        if token.len() < MIN_BYTES || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(fail(format!(
                "expected one line of at least {MIN_BYTES} printable characters without spaces; remove the file to have one made"
            )));
        }
        Ok(Self(Digest::of(token.as_bytes())))
    }

    /// Whether the value of an `Authorization` header carries this token. Takes the same time whatever is wrong
    /// with a token of the same length.
    pub fn is_in(&self, authorization: Option<&[u8]>) -> bool {
        let given = authorization
            .and_then(|value| value.split_at_checked(7))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"Bearer "))
            .map(|(_, token)| Digest::of(token));
        given.is_some_and(|given| {
            let differences = given.as_bytes().iter().zip(self.0.as_bytes());
            std::hint::black_box(differences.fold(0, |found, (a, b)| found | (a ^ b))) == 0
        })
    }
}

fn create(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(durable::parent(path))?;
    let mut random = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    durable::write_new_file(path, format!("{}\n", Digest::of(&random).hex()).as_bytes(), 0o600)
}

fn read(path: &Path) -> Result<String, String> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|e| e.to_string())?;
    let metadata = file.metadata().map_err(|e| e.to_string())?;
    if !metadata.is_file() {
        return Err("it is not a regular file".to_owned());
    }
    if metadata.mode() & 0o077 != 0 {
        return Err(format!("its mode is {:o}, expected 600", metadata.mode() & 0o7777));
    }
    let user = rustix::process::geteuid().as_raw();
    if metadata.uid() != user {
        return Err(format!("it belongs to user {}, expected {user}", metadata.uid()));
    }
    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text).map_err(|e| e.to_string())?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_after_bearer_is_right() {
        let secret = "0123456789abcdef0123456789abcdef";
        let token = Token(Digest::of(secret.as_bytes()));
        assert!(token.is_in(Some(format!("Bearer {secret}").as_bytes())));
        assert!(token.is_in(Some(format!("bearer {secret}").as_bytes())));
        for wrong in [
            String::new(),
            "Bearer ".to_owned(),
            secret.to_owned(),
            format!("Basic {secret}"),
            format!("Bearer {secret} "),
            format!("Bearer {}", &secret[1..]),
            format!("Bearer {}g", &secret[..31]),
        ] {
            assert!(!token.is_in(Some(wrong.as_bytes())), "{wrong:?} was accepted");
        }
        assert!(!token.is_in(None));
        assert_eq!(format!("{token:?}"), "Token");
    }
}
