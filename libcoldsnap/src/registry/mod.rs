//! One repository of an OCI registry: blobs by digest, from any offset, and to it.
//!
//! Payloads are raw blobs. A blob lives as long as a manifest names it, so each has one (`payload.rs`), in the form
//! of the CNCF ModelPack specification. The protocol is that of the OCI distribution specification 1.1, spoken by
//! `oci-client`; its errors name the addresses to which a registry redirects, which may hold signatures, so that
//! they are not passed on as they are.

mod credentials;
mod payload;

use std::error::Error;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::str::FromStr;
use std::time::{Duration, Instant};

use oci_client::client::{BlobResponse, Client, ClientConfig, ClientProtocol};
use oci_client::errors::{OciDistributionError, OciErrorCode};
use oci_client::secrets::RegistryAuth;
use oci_client::{Reference, RegistryOperation};
use tokio::runtime::Runtime;
use tokio_stream::StreamExt;

use crate::digest::Digest;
use crate::source::FetchError;
use crate::store::AdmitError;

pub use credentials::{Credentials, read as read_credentials};
pub use payload::{PayloadState, Pushed, tag_of};

const CONNECT: Duration = Duration::from_secs(10);
/// A registry that sends nothing for so long broke off.
const SILENCE: Duration = Duration::from_secs(60);
/// How often waiting work looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(100);
/// Of an answer that is no error of the specification, this much is quoted.
const QUOTED: usize = 200;

/// A registry did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// A text is not a repository.
    #[error("{text:?} is not a repository: {problem}; expected HOST[:PORT]/NAME")]
    Repository {
        /// The text.
        text: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The file with credentials cannot be used.
    #[error("cannot use the credentials in {}: {problem}", path.display())]
    Credentials {
        /// The file.
        path: PathBuf,
        /// Why not.
        problem: String,
    },
    /// The registry does not have it.
    #[error("the registry cannot {action}: not found{}", detail(.answer))]
    NotFound {
        /// What was asked.
        action: String,
        /// What the registry said; may be empty.
        answer: String,
    },
    /// The registry refuses us.
    #[error("the registry denies us to {action}: {answer}; are the credentials right (--credentials)?")]
    Denied {
        /// What was asked.
        action: String,
        /// What the registry said.
        answer: String,
    },
    /// The registry cannot be reached, broke off or asks to wait.
    #[error("cannot {action}: {reason}")]
    Unavailable {
        /// What was asked.
        action: String,
        /// Why not.
        reason: String,
    },
    /// The registry answered what it must not, or refuses the request itself.
    #[error("the registry cannot {action}: {answer}")]
    Refused {
        /// What was asked.
        action: String,
        /// What the registry said.
        answer: String,
    },
    /// The payload that was to be pushed is not what it must be.
    #[error(transparent)]
    Payload(#[from] AdmitError),
    /// The system refused.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}

fn detail(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(" ({text})") }
}

impl RegistryError {
    /// The stable name of the kind of error.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Repository { .. } => "Malformed",
            Self::Credentials { .. } => "Credentials",
            Self::NotFound { .. } => "RegistryNotFound",
            Self::Denied { .. } => "RegistryDenied",
            Self::Unavailable { .. } => "RegistryUnavailable",
            Self::Refused { .. } => "RegistryRefused",
            Self::Payload(error) => error.kind(),
            Self::Io { .. } => "Io",
        }
    }

    fn from_client(action: &str, error: OciDistributionError) -> Self {
        match error {
            OciDistributionError::AuthenticationFailure(answer) => Self::denied(action, &quote(&answer)),
            OciDistributionError::UnauthorizedError { .. } => Self::of_status(action, 401, ""),
            OciDistributionError::RegistryError { envelope, .. } => {
                let Some(first) = envelope.errors.into_iter().next() else {
                    return Self::refused(action, "an error without a code");
                };
                let answer = quote(&first.message);
                match first.code {
                    OciErrorCode::BlobUnknown
                    | OciErrorCode::ManifestUnknown
                    | OciErrorCode::NameUnknown
                    | OciErrorCode::NotFound => Self::NotFound { action: action.to_owned(), answer },
                    OciErrorCode::Unauthorized | OciErrorCode::Denied => Self::denied(action, &answer),
                    OciErrorCode::Toomanyrequests => Self::unavailable(action, answer),
                    code => Self::refused(action, &format!("{code:?}: {answer}")),
                }
            }
            OciDistributionError::ServerError { code, message, .. } => {
                Self::of_status(action, code, &message)
            }
            OciDistributionError::RequestError(error) => match error.status() {
                Some(status) => Self::of_status(action, status.as_u16(), ""),
                None => Self::unavailable(action, innermost(&error)),
            },
            OciDistributionError::IoError(error) => Self::unavailable(action, innermost(&error)),
            other => Self::refused(action, &quote(&other.to_string())),
        }
    }

    fn of_status(action: &str, status: u16, answer: &str) -> Self {
        let answer = quote(answer);
        let said = format!("HTTP status {status}{}", detail(&answer));
        match status {
            401 | 403 => Self::denied(action, &said),
            404 => Self::NotFound { action: action.to_owned(), answer },
            408 | 429 | 500.. => Self::unavailable(action, said),
            _ => Self::refused(action, &said),
        }
    }

    fn denied(action: &str, answer: &str) -> Self {
        Self::Denied { action: action.to_owned(), answer: answer.to_owned() }
    }

    fn refused(action: &str, answer: &str) -> Self {
        Self::Refused { action: action.to_owned(), answer: answer.to_owned() }
    }

    fn unavailable(action: &str, reason: String) -> Self {
        Self::Unavailable { action: action.to_owned(), reason }
    }
}

impl From<RegistryError> for FetchError {
    fn from(error: RegistryError) -> Self {
        match error {
            RegistryError::NotFound { answer, .. } => Self::NotFound(answer),
            RegistryError::Denied { answer, .. } => Self::Denied(answer),
            RegistryError::Unavailable { reason, .. } => Self::Unavailable(reason),
            _ => Self::Refused(error.to_string()),
        }
    }
}

/// The cause at the end of the chain: the errors before it repeat the address.
fn innermost(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

/// The beginning of what a server wrote, in one line.
fn quote(text: &str) -> String {
    let printable = text.replace(|c: char| c.is_control(), " ");
    let line = printable.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

/// Names a repository: `host[:port]/name`. The host is never guessed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repository {
    host: String,
    name: String,
}

impl Repository {
    /// `host[:port]`
    pub fn host(&self) -> &str {
        &self.host
    }

    fn with_tag(&self, tag: &str) -> Reference {
        Reference::with_tag(self.host.clone(), self.name.clone(), tag.to_owned())
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.host, self.name)
    }
}

impl FromStr for Repository {
    type Err = RegistryError;

    fn from_str(text: &str) -> Result<Self, RegistryError> {
        let wrong =
            |problem: &str| RegistryError::Repository { text: text.to_owned(), problem: problem.to_owned() };
        let (host, name) = text.split_once('/').ok_or_else(|| wrong("no name"))?;
        if !(host == "localhost" || host.contains(['.', ':'])) {
            return Err(wrong("the part before the first slash is not a host"));
        }
        if name.contains([':', '@']) {
            return Err(wrong("it has a tag or a digest"));
        }
        let parsed = Reference::try_from(text).map_err(|e| wrong(&e.to_string()))?;
        if parsed.registry() != host || parsed.repository() != name {
            return Err(wrong("the host is not one"));
        }
        Ok(Self { host: host.to_owned(), name: name.to_owned() })
    }
}

/// How a registry is reached.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// HTTP without TLS.
    pub plain_http: bool,
    /// File in the form of Docker's `config.json`; none for anonymous access.
    pub credentials_file: Option<PathBuf>,
}

impl Access {
    /// The credentials for a host; none without a file.
    ///
    /// # Errors
    /// When the file cannot be used, or has none for the host.
    pub fn credentials(&self, host: &str) -> Result<Option<Credentials>, RegistryError> {
        let Some(path) = &self.credentials_file else { return Ok(None) };
        if self.plain_http && !is_loopback(host) {
            let problem = format!("they are not sent to {host} in the clear");
            return Err(RegistryError::Credentials { path: path.clone(), problem });
        }
        read_credentials(path, host).map(Some)
    }
}

/// Whether `name[:port]` is this machine.
fn is_loopback(host: &str) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// A repository with the means to talk to it. Every method blocks; none may be called from asynchronous code.
pub struct Registry {
    repository: Repository,
    auth: RegistryAuth,
    client: Client,
    runtime: Runtime,
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("repository", &self.repository).finish_non_exhaustive()
    }
}

impl Registry {
    /// Prepares to talk to a repository; asks nobody.
    ///
    /// # Errors
    /// Unusable credentials.
    pub fn open(repository: &Repository, access: &Access) -> Result<Self, RegistryError> {
        let auth = match access.credentials(repository.host())? {
            Some(credentials) => RegistryAuth::Basic(credentials.username, credentials.secret),
            None => RegistryAuth::Anonymous,
        };
        // An error says that another part of the program chose one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::try_from(ClientConfig {
            protocol: if access.plain_http { ClientProtocol::Http } else { ClientProtocol::Https },
            connect_timeout: Some(CONNECT),
            // One request per payload, with its length: what every registry understands.
            use_monolithic_push: true,
            user_agent: concat!("coldsnap/", env!("CARGO_PKG_VERSION")),
            ..ClientConfig::default()
        })
        .map_err(|e| RegistryError::from_client(&talk_to(repository), e))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|source| RegistryError::Io { action: "start a runtime for the registry", source })?;
        Ok(Self { repository: repository.clone(), auth, client, runtime })
    }

    /// [`Self::open`], and gets a token for pushing if the registry wants one.
    ///
    /// # Errors
    /// Also a registry that cannot be reached or denies access.
    pub fn connect(repository: &Repository, access: &Access) -> Result<Self, RegistryError> {
        let registry = Self::open(repository, access)?;
        let reference = registry.any();
        let asked = registry.client.auth(&reference, &registry.auth, RegistryOperation::Push);
        registry.ask(&talk_to(repository), asked)?;
        Ok(registry)
    }

    /// Waits for the answer to a short request.
    fn ask<T>(
        &self,
        action: &str,
        work: impl Future<Output = Result<T, OciDistributionError>>,
    ) -> Result<T, RegistryError> {
        match self.runtime.block_on(async { tokio::time::timeout(SILENCE, work).await }) {
            Ok(answer) => answer.map_err(|e| RegistryError::from_client(action, e)),
            Err(_) => Err(RegistryError::unavailable(action, silence(SILENCE))),
        }
    }

    /// Which.
    pub const fn repository(&self) -> &Repository {
        &self.repository
    }

    /// For requests in which the tag does not matter.
    fn any(&self) -> Reference {
        self.repository.with_tag("latest")
    }

    /// Whether the repository has a blob.
    ///
    /// # Errors
    /// When the registry does not say.
    pub fn has_blob(&self, digest: &Digest) -> Result<bool, RegistryError> {
        let action = format!("look for blob {digest} in {}", self.repository);
        let (reference, name) = (self.any(), digest.to_string());
        self.ask(&action, self.client.blob_exists(&reference, &name))
    }

    /// Digest of the manifest with a tag; none when there is no such tag.
    ///
    /// # Errors
    /// When the registry does not say, or says what is no digest.
    pub fn manifest(&self, tag: &str) -> Result<Option<Digest>, RegistryError> {
        let action = format!("look for {}:{tag}", self.repository);
        let reference = self.repository.with_tag(tag);
        match self.ask(&action, self.client.fetch_manifest_digest(&reference, &self.auth)) {
            Ok(digest) => {
                let parsed = digest.parse::<Digest>();
                parsed.map(Some).map_err(|e| RegistryError::refused(&action, &e.to_string()))
            }
            Err(RegistryError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Delivers the bytes of a blob of a known size, in order, from offset `from` to its end. `sink` is also called
    /// with no bytes, so that it can end a silent connection.
    ///
    /// # Errors
    /// What the registry answers, or the error of `sink` as it is.
    pub fn read_blob(
        &self,
        digest: &Digest,
        bytes: u64,
        from: u64,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FetchError>,
    ) -> Result<(), FetchError> {
        let action = format!("deliver blob {digest}");
        let failed = |error| FetchError::from(RegistryError::from_client(&action, error));
        let name = digest.to_string();
        let reference = self.any();
        let authenticated = self.client.auth(&reference, &self.auth, RegistryOperation::Pull);
        let asked = self.client.pull_blob_stream_partial(&reference, name.as_str(), from, None);
        self.runtime.block_on(async {
            patiently(authenticated, sink).await?.map_err(failed)?;
            let mut stream = match patiently(asked, sink).await?.map_err(failed)? {
                BlobResponse::Partial(stream) => stream,
                BlobResponse::Full(stream) if from == 0 => stream,
                BlobResponse::Full(_) => return Err(FetchError::NoRange { from }),
            };
            if let Some(coming) = stream.content_length.filter(|coming| from + coming != bytes) {
                let found = from + coming;
                return Err(FetchError::Refused(format!(
                    "its blob has {found} bytes, {bytes} are committed"
                )));
            }
            while let Some(chunk) = patiently(stream.next(), sink).await? {
                sink(&chunk.map_err(|e| failed(e.into()))?)?;
            }
            Ok(())
        })
    }
}

fn talk_to(repository: &Repository) -> String {
    format!("talk to {}", repository.host())
}

fn silence(time: Duration) -> String {
    format!("the registry was silent for {} s", time.as_secs())
}

/// Waits for a registry, asking the sink meanwhile whether the bytes are still wanted.
async fn patiently<T>(
    work: impl Future<Output = T>,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), FetchError>,
) -> Result<T, FetchError> {
    let began = Instant::now();
    let mut work = pin!(work);
    loop {
        match tokio::time::timeout(LOOK, work.as_mut()).await {
            Ok(done) => return Ok(done),
            Err(_) if began.elapsed() > SILENCE => {
                return Err(FetchError::Unavailable(silence(SILENCE)));
            }
            Err(_) => sink(&[])?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_has_a_host_and_a_name() {
        for text in ["registry.example/a/b", "localhost/x", "127.0.0.1:5000/payloads"] {
            assert_eq!(text.parse::<Repository>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "payloads",
            "library/x",
            "h.example/",
            "h.example/x:tag",
            "h.example/X",
            "http://h/x",
            "[::1]:5000/x",
        ] {
            let error = text.parse::<Repository>().unwrap_err();
            assert_eq!(error.kind(), "Malformed");
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn what_a_server_writes_is_quoted_short_and_in_one_line() {
        assert_eq!(quote(" a\n b\u{1b}[0m "), "a b [0m");
        let long = quote(&"ü".repeat(1000));
        assert_eq!(long.chars().count(), QUOTED + 3);
    }

    #[test]
    fn credentials_are_not_sent_in_the_clear_to_another_machine() {
        let access =
            Access { plain_http: true, credentials_file: Some("/does/not/exist/config.json".into()) };
        let clear = "in the clear";
        for (host, refused) in
            [("registry.example", true), ("10.0.0.1:5000", true), ("127.0.0.1:5000", false)]
        {
            let error = access.credentials(host).unwrap_err().to_string();
            assert_eq!(error.contains(clear), refused, "{error}");
        }
        let access = Access { plain_http: false, ..access };
        assert!(!access.credentials("registry.example").unwrap_err().to_string().contains(clear));
        assert_eq!(Access::default().credentials("registry.example").unwrap(), None);
    }

    #[test]
    fn each_status_has_its_kind() {
        for (status, kind) in [
            (401, "RegistryDenied"),
            (403, "RegistryDenied"),
            (404, "RegistryNotFound"),
            (416, "RegistryRefused"),
            (429, "RegistryUnavailable"),
            (500, "RegistryUnavailable"),
            (503, "RegistryUnavailable"),
        ] {
            assert_eq!(RegistryError::of_status("x", status, "").kind(), kind, "{status}");
        }
    }
}
