//! A repository of the Hugging Face hub at a pinned commit.
//!
//! The hub answers a request for a file with a redirect to a content network, and tells on that answer which commit it
//! resolved and which object the file is. Both are compared before a byte is fetched.

use std::collections::HashMap;
use std::io::Read;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ureq::http::{Method, Response, StatusCode};
use ureq::{Body, SendBody};

use super::{FetchError, Sink, Source, Wanted};
use crate::digest::Digest;
use crate::hub::Place;
use crate::hub::Token;
use crate::hub::http::{Client, HttpError, REDIRECTS, describe, header, redirect, refused};

const READ_BYTES: usize = 1 << 20;

/// See the module.
#[derive(Debug)]
pub struct HubSource {
    client: Client,
    place: Place,
    /// What the server called the object when it began to deliver it: only that object can be continued.
    etags: Mutex<HashMap<Digest, String>>,
}

impl HubSource {
    /// The source; asks nothing yet.
    ///
    /// # Errors
    /// A token that would be sent unencrypted.
    pub fn new(place: Place, token: Option<Token>) -> Result<Self, HttpError> {
        let client = Client::new(&place.endpoint, token)?;
        Ok(Self { client, place, etags: Mutex::default() })
    }

    /// The response that carries the payload's bytes from `from` on.
    fn request(&self, wanted: &Wanted, from: u64) -> Result<Response<Body>, FetchError> {
        let mut url = self.place.resolve(&wanted.digest);
        let range = format!("bytes={from}-");
        let etag = self.etags.lock().unwrap_or_else(PoisonError::into_inner).get(&wanted.digest).cloned();
        for _ in 0..=REDIRECTS {
            let mut headers = Vec::new();
            if from > 0 {
                headers.push(("range", range.as_str()));
                headers.extend(etag.as_deref().map(|etag| ("if-range", etag)));
            }
            let response = self.client.send(&Method::GET, &url, &headers, SendBody::none())?;
            let status = response.status();
            if !status.is_success() && !status.is_redirection() {
                return Err(refused(&Method::GET, &url, response).into());
            }
            let on_hub = self.client.on_hub(&url);
            let next = if status.is_redirection() { Some(redirect(&url, &response)?) } else { None };
            if on_hub {
                // An answer that leads elsewhere on the hub may say nothing yet.
                let last = next.as_deref().is_none_or(|next| !self.client.on_hub(next));
                self.check_answer(wanted, &response, last)?;
            }
            match next {
                Some(next) => url = next,
                None => {
                    self.check_delivery(wanted, from, &response)?;
                    return Ok(response);
                }
            }
        }
        Err(FetchError::Refused(format!("more than {REDIRECTS} redirects")))
    }

    /// The hub's own answer: commit, and digest and size of the object.
    fn check_answer(&self, wanted: &Wanted, response: &Response<Body>, last: bool) -> Result<(), FetchError> {
        let pinned = self.place.revision();
        match header(response, "x-repo-commit") {
            Some(commit) if commit != pinned => {
                let what = format!("it answers for commit {commit:?} instead of the pinned {pinned}");
                return Err(FetchError::Refused(what));
            }
            None if last => {
                return Err(FetchError::Refused("it does not say for which commit it answers".to_owned()));
            }
            _ => {}
        }
        let digest = wanted.digest.hex();
        if let Some(etag) = header(response, "x-linked-etag")
            && unquoted(etag) != digest
        {
            let what = format!("it has another object at the payload's path: {etag:?}");
            return Err(FetchError::Refused(what));
        }
        if let Some(size) = header(response, "x-linked-size")
            && size.parse() != Ok(wanted.bytes)
        {
            let what = format!("it has {size:?} bytes at the payload's path, expected {}", wanted.bytes);
            return Err(FetchError::Refused(what));
        }
        Ok(())
    }

    /// The answer that carries bytes: that they are the ones from `from` on.
    fn check_delivery(
        &self,
        wanted: &Wanted,
        from: u64,
        response: &Response<Body>,
    ) -> Result<(), FetchError> {
        let Wanted { digest, bytes } = *wanted;
        let expected = match response.status() {
            StatusCode::OK if from > 0 => return Err(FetchError::NoRange { from }),
            StatusCode::OK => bytes,
            StatusCode::PARTIAL_CONTENT if from > 0 => {
                let range = header(response, "content-range").unwrap_or("");
                if content_range(range) != Some((from, bytes)) {
                    let what = format!("it sends {range:?}, wanted was byte {from} to the end of {bytes}");
                    return Err(FetchError::Refused(what));
                }
                bytes - from
            }
            status => {
                return Err(FetchError::Refused(format!("it answered {status} to a request for bytes")));
            }
        };
        if let Some(length) = header(response, "content-length")
            && length.parse() != Ok(expected)
        {
            return Err(FetchError::Refused(format!("it sends {length:?} bytes, expected {expected}")));
        }
        let mut etags = self.etags.lock().unwrap_or_else(PoisonError::into_inner);
        match header(response, "etag").filter(|etag| etag.starts_with('"')) {
            Some(etag) => etags.insert(digest, etag.to_owned()),
            None => etags.remove(&digest),
        };
        Ok(())
    }
}

/// An entity tag without its quotes and its mark of weakness.
pub(crate) fn unquoted(etag: &str) -> &str {
    etag.trim_start_matches("W/").trim_matches('"')
}

/// First byte and size of the whole, when the range goes to the end.
fn content_range(text: &str) -> Option<(u64, u64)> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last, total) = (first.parse().ok()?, last.parse::<u64>().ok()?, total.parse().ok()?);
    (last.checked_add(1) == Some(total)).then_some((first, total))
}

impl From<HttpError> for FetchError {
    fn from(error: HttpError) -> Self {
        let what = error.to_string();
        match error {
            HttpError::Status { status: 404 | 410, .. } => Self::NotFound(what),
            HttpError::Status { status: 401 | 403 | 407, .. } => Self::Denied(what),
            HttpError::Status { retry_after: Some(after), .. } if error.may_pass() => {
                Self::Busy { after: after.max(Duration::from_secs(1)), what }
            }
            _ if error.may_pass() => Self::Unavailable(what),
            _ => Self::Refused(what),
        }
    }
}

impl Source for HubSource {
    fn name(&self) -> String {
        let Place { endpoint, repository, .. } = &self.place;
        format!("huggingface {}/{repository}@{}", endpoint.as_str(), self.place.revision())
    }

    fn fetch(&self, wanted: &Wanted, from: u64, sink: &mut Sink<'_>) -> Result<(), FetchError> {
        let response = self.request(wanted, from)?;
        let mut body = response.into_body().into_reader();
        let mut buffer = vec![0; READ_BYTES];
        let mut at = from;
        loop {
            match body.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(n) => {
                    sink(&buffer[..n])?;
                    at += n as u64;
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => {
                    let what = describe(&Method::GET, &self.place.resolve(&wanted.digest));
                    return Err(FetchError::Unavailable(format!("{what} broke off at byte {at}: {e}")));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_understood_only_when_it_goes_to_the_end() {
        assert_eq!(content_range("bytes 5-9/10"), Some((5, 10)));
        for bad in
            ["", "bytes 5-8/10", "bytes 5-9/*", "bytes */10", "5-9/10", "bytes 5-18446744073709551615/0"]
        {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }
}
