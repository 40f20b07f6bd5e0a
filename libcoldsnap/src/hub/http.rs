//! One HTTP request at a time: TLS with the system's certificates, time limits, no redirect followed by itself, and the
//! access token only ever to the hub.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use ureq::http::{self, Method, Request, Response, header};
use ureq::tls::{RootCerts, TlsConfig, TlsProvider};
use ureq::{Agent, AsSendBody, Body, Proxy};

use super::{Endpoint, Token};

/// Time to find a host and to connect to it.
const CONNECT: Duration = Duration::from_secs(20);
/// Time until an answer begins.
const ANSWER: Duration = Duration::from_secs(60);
/// Time in which at least one byte must come or go.
const STALL: Duration = Duration::from_secs(30);
/// Most redirects that are followed.
pub(crate) const REDIRECTS: usize = 5;
/// Most that is read of an answer in JSON.
const JSON_BYTES: u64 = 16 << 20;
/// Most that is shown of what a server says.
const SHOWN: usize = 300;

/// Why a request got no useful answer.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// No connection, or it broke. It may work later.
    #[error("cannot {what}: {problem}")]
    Unreachable {
        /// Method and address, without query.
        what: String,
        /// What happened.
        problem: String,
    },
    /// The server says no.
    #[error("{what}: the server answered {status}{}", detail(.message))]
    Status {
        /// Method and address, without query.
        what: String,
        /// HTTP status.
        status: u16,
        /// What the server said.
        message: String,
        /// When it wants to be asked again.
        retry_after: Option<Duration>,
    },
    /// The server answers what cannot be right, or must not be asked this way.
    #[error("{0}")]
    Refused(String),
}

fn detail(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}

impl HttpError {
    /// Whether the same request may work later.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Status { status, .. } => matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504),
            Self::Refused(_) => false,
        }
    }
}

/// Speaks with one hub and with the hosts that it names.
#[derive(Debug)]
pub(crate) struct Client {
    agent: Agent,
    endpoint: Endpoint,
    token: Option<Token>,
}

impl Client {
    /// # Errors
    /// A token is not sent in the clear to another machine.
    pub(crate) fn new(endpoint: &Endpoint, token: Option<Token>) -> Result<Self, HttpError> {
        let plain = endpoint.as_str().strip_prefix("http://");
        if token.is_some() && plain.is_some_and(|rest| !is_loopback(rest)) {
            let what = format!("{}: an access token is only sent over https", endpoint.as_str());
            return Err(HttpError::Refused(what));
        }
        let tls = TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .root_certs(RootCerts::PlatformVerifier)
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .build();
        // The token must not pass a proxy in the clear on its way to this machine.
        let proxy = if token.is_some() && plain.is_some() { None } else { Proxy::try_from_env() };
        let agent = Agent::config_builder()
            .tls_config(tls)
            .proxy(proxy)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_resolve(Some(CONNECT))
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(ANSWER))
            .timeout_per_read(Some(STALL))
            .timeout_per_write(Some(STALL))
            .user_agent(concat!("coldsnap/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        Ok(Self { agent, endpoint: endpoint.clone(), token })
    }

    /// The hub.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Whether `url` is on the hub: the token may go there.
    pub(crate) fn on_hub(&self, url: &str) -> bool {
        origin(url) == origin(self.endpoint.as_str())
    }

    /// Sends one request; whatever status comes back is the answer.
    ///
    /// # Errors
    /// [`HttpError::Unreachable`], or an address or header that cannot be.
    pub(crate) fn send(
        &self,
        method: &Method,
        url: &str,
        headers: &[(&str, &str)],
        body: impl AsSendBody,
    ) -> Result<Response<Body>, HttpError> {
        let mut request = Request::builder().method(method.clone()).uri(url);
        request = request.header(header::ACCEPT_ENCODING, "identity");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(token) = self.token.as_ref().filter(|_| self.on_hub(url)) {
            let mut value = http::HeaderValue::from_str(&token.header())
                .map_err(|_| HttpError::Refused("the access token cannot be sent".to_owned()))?;
            value.set_sensitive(true);
            request = request.header(header::AUTHORIZATION, value);
        }
        let what = describe(method, url);
        let request = request.body(body).map_err(|e| HttpError::Refused(format!("cannot {what}: {e}")))?;
        tracing::debug!(%method, url = shown(url), "request");
        self.agent.run(request).map_err(|error| failed(what, &error))
    }

    /// Sends a request to the hub's API and reads the JSON that it answers.
    ///
    /// # Errors
    /// Also a status that is no success.
    pub(crate) fn json(
        &self,
        method: &Method,
        url: &str,
        headers: &[(&str, &str)],
        body: impl AsSendBody,
    ) -> Result<Value, HttpError> {
        let response = self.send(method, url, headers, body)?;
        if !response.status().is_success() {
            return Err(refused(method, url, response));
        }
        let what = describe(method, url);
        let mut body = response.into_body();
        let text =
            body.with_config().limit(JSON_BYTES).read_to_vec().map_err(|e| failed(what.clone(), &e))?;
        serde_json::from_slice(&text)
            .map_err(|e| HttpError::Refused(format!("{what}: the answer is no JSON: {e}")))
    }
}

/// The error that a status is. Reads what the server says about it.
pub(crate) fn refused(method: &Method, url: &str, response: Response<Body>) -> HttpError {
    let status = response.status().as_u16();
    let retry_after = header(&response, "retry-after").and_then(|text| text.trim().parse().ok());
    let said = ["x-error-code", "x-error-message"].map(|name| header(&response, name).unwrap_or(""));
    let mut message = said.join(" ").trim().to_owned();
    if message.is_empty() {
        let mut body = response.into_body();
        let text = body.with_config().limit(JSON_BYTES).read_to_vec().unwrap_or_default();
        let json: Value = serde_json::from_slice(&text).unwrap_or_default();
        message = json["error"].as_str().or(json["message"].as_str()).unwrap_or("").to_owned();
    }
    HttpError::Status {
        what: describe(method, url),
        status,
        message: printable(&message),
        retry_after: retry_after.map(Duration::from_secs),
    }
}

/// The value of a header, if it is text.
pub(crate) fn header<'a>(response: &'a Response<Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

/// Where a redirect leads.
///
/// # Errors
/// No target, one of another kind than an address or an absolute path, or one that gives up encryption.
pub(crate) fn redirect(from: &str, response: &Response<Body>) -> Result<String, HttpError> {
    let wrong = |what: &str| HttpError::Refused(format!("{} redirects {what}", shown(from)));
    let target = header(response, "location").ok_or_else(|| wrong("nowhere"))?;
    let target = if target.starts_with('/') && !target.starts_with("//") {
        format!("{}{target}", origin(from))
    } else {
        target.to_owned()
    };
    if target.starts_with("https://") || (target.starts_with("http://") && from.starts_with("http://")) {
        return Ok(target);
    }
    Err(wrong(&format!("to {}, which is not encrypted or no address", printable(shown(&target)))))
}

/// An error of the transport.
pub(crate) fn failed(what: String, error: &ureq::Error) -> HttpError {
    let problem = error.to_string();
    match error {
        ureq::Error::Http(_) | ureq::Error::BadUri(_) | ureq::Error::Rustls(_) | ureq::Error::Tls(_) => {
            HttpError::Refused(format!("cannot {what}: {problem}"))
        }
        _ => HttpError::Unreachable { what, problem },
    }
}

/// Method and address, without the query: signed addresses are secrets.
pub(crate) fn describe(method: &Method, url: &str) -> String {
    format!("{method} {}", printable(shown(url)))
}

fn shown(url: &str) -> &str {
    url.split(['?', '#']).next().unwrap_or_default()
}

/// Scheme, host and port.
fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |at| at + 3);
    let end = url[host..].find(['/', '?', '#']).map_or(url.len(), |at| host + at);
    &url[..end]
}

/// Text of a server on one line of visible characters.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(SHOWN).collect()
}

/// Whether the host of `<host>[:port][/path]` is this machine.
fn is_loopback(rest: &str) -> bool {
    let authority = rest.split('/').next().unwrap_or_default();
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    };
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_not_sent_in_the_clear() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        crate::durable::write_file(&path, b"hf_secret", 0o600).unwrap();
        let token = || Some(Token::read(&path).unwrap());
        for good in ["https://hub.example", "http://127.0.0.1:80", "http://localhost", "http://[::1]:8080/x"]
        {
            let client = Client::new(&good.parse().unwrap(), token()).unwrap();
            assert!(!format!("{client:?}").contains("hf_secret"));
        }
        for bad in ["http://hub.example", "http://127.0.0.1.example", "http://localhost.example:80"] {
            assert!(Client::new(&bad.parse().unwrap(), token()).is_err(), "{bad}");
            assert!(Client::new(&bad.parse().unwrap(), None).is_ok(), "{bad}");
        }
    }

    #[test]
    fn the_hub_is_one_origin() {
        let client = Client::new(&"https://hub.example/mirror".parse().unwrap(), None).unwrap();
        assert!(client.on_hub("https://hub.example/other?x"));
        for other in [
            "http://hub.example/",
            "https://hub.example:444/",
            "https://cdn.example/",
            "https://hub.example.evil/",
            "https://hub.example@evil/",
            "/x",
        ] {
            assert!(!client.on_hub(other), "{other}");
        }
    }

    #[test]
    fn redirects_stay_encrypted() {
        let to = |from: &str, location: &str| {
            let response = Response::builder().header("location", location);
            redirect(from, &response.body(Body::builder().data(Vec::new())).unwrap()).ok()
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(to("https://a/b?c", "/d?e"), some("https://a/d?e"));
        assert_eq!(to("https://a/b", "https://c/d"), some("https://c/d"));
        assert_eq!(to("http://a/b", "http://c/d"), some("http://c/d"));
        for bad in ["http://c/d", "//c/d", "d", "", "file:///etc/passwd"] {
            assert_eq!(to("https://a/b", bad), None, "{bad}");
        }
    }
}
