//! The requests and their answers. Every answer is one JSON value; an error is `{"error": {"kind", "message"}}`.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use coldsnap::digest::Digest;
use coldsnap::store::{AdmitError, NodeStore};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, AUTHORIZATION, CONTENT_TYPE, HeaderValue, WWW_AUTHENTICATE};
use hyper::{Method, Request, Response, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::token::Token;
use super::verifications::Verifications;
use crate::commands::payload::ls::Listing;
use crate::output::error_json;

/// The version in every path.
pub const VERSION: &str = "v1";
/// A request is one small object.
const MAX_BODY_BYTES: usize = 4 << 10;
/// A body must be there within this time.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// What answers requests.
#[derive(Debug)]
pub struct Api {
    store: NodeStore,
    token: Token,
    verifications: Arc<Verifications>,
}

/// Body of `POST /v1/admit`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AdmitRequest {
    sha256: Digest,
    #[serde(default)]
    bytes: Option<u64>,
}

/// Why a request has no result.
#[derive(Debug, Clone)]
pub struct Problem {
    status: StatusCode,
    kind: &'static str,
    message: String,
    /// The method that the path has, where another one was used.
    allow: Option<&'static str>,
}

impl Problem {
    /// Something that is nobody's fault but the server's.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "Internal", message)
    }

    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), allow: None }
    }

    fn malformed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "Malformed", message)
    }
}

impl From<&AdmitError> for Problem {
    fn from(error: &AdmitError) -> Self {
        let status = match error {
            AdmitError::NotFound { .. } => StatusCode::NOT_FOUND,
            AdmitError::Io { .. } => StatusCode::INTERNAL_SERVER_ERROR,
            // What is at the payload's path is not the payload.
            _ => StatusCode::CONFLICT,
        };
        Self::new(status, error.kind(), error.to_string())
    }
}

impl Api {
    /// Answers requests about `store` that come with `token`.
    pub fn new(store: NodeStore, token: Token) -> Self {
        Self { verifications: Arc::new(Verifications::new(store.clone())), store, token }
    }

    /// Answers one request.
    ///
    /// # Errors
    /// None: what goes wrong is an answer too.
    pub async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Result<Response<Full<Bytes>>, Infallible> {
        Ok(match self.result(request).await {
            Ok(value) => response(StatusCode::OK, &value),
            Err(problem) => {
                let mut response = response(problem.status, &error_json(problem.kind, &problem.message));
                let headers = response.headers_mut();
                if problem.status == StatusCode::UNAUTHORIZED {
                    headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
                }
                if let Some(method) = problem.allow {
                    headers.insert(ALLOW, HeaderValue::from_static(method));
                }
                response
            }
        })
    }

    async fn result(&self, request: Request<Incoming>) -> Result<Value, Problem> {
        let authorization = request.headers().get(AUTHORIZATION).map(HeaderValue::as_bytes);
        if !self.token.is_in(authorization) {
            let message = "the request does not carry the token: send Authorization: Bearer <content of the token file>";
            return Err(Problem::new(StatusCode::UNAUTHORIZED, "Unauthorized", message));
        }
        let method = request.method().clone();
        match request.uri().path_and_query().map(|path| path.as_str().to_owned()).as_deref() {
            Some("/v1/health") => {
                only(&method, "GET")?;
                Ok(json!({
                    "status": "ok",
                    "version": env!("CARGO_PKG_VERSION"),
                    "api": VERSION,
                    "store": self.store.root().display().to_string(),
                }))
            }
            Some("/v1/payloads") => {
                only(&method, "GET")?;
                self.payloads().await
            }
            Some("/v1/admit") => {
                only(&method, "POST")?;
                let AdmitRequest { sha256, bytes } = parse(&body(request).await?)?;
                to_json(&self.verifications.admit(sha256, bytes).await?)
            }
            _ => {
                let message = "there are GET /v1/health, GET /v1/payloads and POST /v1/admit";
                Err(Problem::new(StatusCode::NOT_FOUND, "UnknownPath", message))
            }
        }
    }

    async fn payloads(&self) -> Result<Value, Problem> {
        let store = self.store.clone();
        let listing = tokio::task::spawn_blocking(move || Listing::of(&store)).await;
        let listing = listing.map_err(|e| Problem::internal(format!("cannot list the store: {e}")))?;
        let listing =
            listing.map_err(|e| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, e.kind(), e.to_string()))?;
        to_json(&listing)
    }
}

fn only(method: &Method, expected: &'static str) -> Result<(), Problem> {
    if method.as_str() == expected {
        return Ok(());
    }
    let message = format!("the method is {method}, expected {expected}");
    let problem = Problem::new(StatusCode::METHOD_NOT_ALLOWED, "Method", message);
    Err(Problem { allow: Some(expected), ..problem })
}

async fn body(request: Request<Incoming>) -> Result<Bytes, Problem> {
    let body = Limited::new(request.into_body(), MAX_BODY_BYTES).collect();
    match tokio::time::timeout(BODY_TIMEOUT, body).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(e)) if e.is::<http_body_util::LengthLimitError>() => Err(Problem::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "Malformed",
            format!("the body is larger than {MAX_BODY_BYTES} bytes"),
        )),
        Ok(Err(e)) => Err(Problem::malformed(format!("the body cannot be read: {e}"))),
        Err(_) => Err(Problem::new(
            StatusCode::REQUEST_TIMEOUT,
            "Timeout",
            format!("the body was not there within {} s", BODY_TIMEOUT.as_secs()),
        )),
    }
}

fn parse(body: &[u8]) -> Result<AdmitRequest, Problem> {
    serde_json::from_slice(body).map_err(|e| {
        Problem::malformed(format!(
            "the body is not {{\"sha256\": \"sha256:<64hex>\", \"bytes\": <number, optional>}}: {e}"
        ))
    })
}

fn to_json(value: &impl Serialize) -> Result<Value, Problem> {
    serde_json::to_value(value).map_err(|e| Problem::internal(e.to_string()))
}

fn response(status: StatusCode, value: &Value) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(format!("{value}\n"))));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
