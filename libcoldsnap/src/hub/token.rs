//! The access token of the hub. It comes from a file or from the environment, and is shown nowhere.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Longer than any token.
const LONGEST: u64 = 4096;
/// Holds the token.
const VARIABLE: &str = "HF_TOKEN";
/// Names a file that holds the token.
const FILE_VARIABLE: &str = "HF_TOKEN_PATH";

/// An access token.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(...)")
    }
}

/// The token cannot be used. Never contains it.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file cannot be read.
    #[error("cannot read the token file {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
    /// Others can read the file.
    #[error("the token file {} can be used by others (mode {mode:04o}): make it 0600", path.display())]
    Readable {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// What is there is no token.
    #[error("{place} holds no token: expected one line of visible ASCII characters")]
    Malformed {
        /// File or environment variable.
        place: String,
    },
}

impl TokenError {
    /// The stable name of the kind of error.
    pub const fn kind(&self) -> &'static str {
        "Source"
    }
}

impl Token {
    /// Reads the token from `file`; without one from the environment: `HF_TOKEN`, else the file that
    /// `HF_TOKEN_PATH` names, else none.
    ///
    /// # Errors
    /// When the named file cannot be read, can be used by group or others, or holds no token.
    pub fn find(file: Option<&Path>) -> Result<Option<Self>, TokenError> {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        match (file, variable(VARIABLE), variable(FILE_VARIABLE)) {
            (Some(file), ..) => Self::read(file).map(Some),
            (None, Some(token), _) => Self::parse(VARIABLE, &token.to_string_lossy()).map(Some),
            (None, None, Some(file)) => Self::read(Path::new(&file)).map(Some),
            (None, None, None) => Ok(None),
        }
    }

    /// Reads the token from a file that only its owner can use.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        let io = |source| TokenError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let mode = file.metadata().map_err(io)?.mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(TokenError::Readable { path: path.to_owned(), mode });
        }
        let mut text = String::new();
        file.take(LONGEST + 1).read_to_string(&mut text).map_err(io)?;
        Self::parse(&path.display().to_string(), &text)
    }

    fn parse(place: &str, text: &str) -> Result<Self, TokenError> {
        let token = text.trim();
        let valid = !token.is_empty()
            && token.len() as u64 <= LONGEST
            && token.bytes().all(|byte| byte.is_ascii_graphic());
        if !valid {
            return Err(TokenError::Malformed { place: place.to_owned() });
        }
        Ok(Self(token.to_owned()))
    }

    /// Value of the header `Authorization`.
    #[cfg(feature = "sources")]
    pub(super) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_token_file_is_private_and_the_token_is_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, "hf_secret\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let error = Token::read(&path).unwrap_err().to_string();
        assert!(error.contains("0640") && !error.contains("hf_secret"), "{error}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let token = Token::read(&path).unwrap();
        assert_eq!(token, Token("hf_secret".to_owned()), "without the line's end");
        assert!(!format!("{token:?}").contains("secret"));
        for text in ["", " \n", "hf_a hf_b", "hf_a\nhf_b", "hf_\u{e4}"] {
            fs::write(&path, text).unwrap();
            let error = Token::read(&path).unwrap_err();
            assert!(matches!(error, TokenError::Malformed { .. }), "{text:?}");
            assert!(!error.to_string().contains("hf_"));
        }
        assert!(matches!(Token::read(&dir.path().join("none")), Err(TokenError::Io { .. })));
    }
}
