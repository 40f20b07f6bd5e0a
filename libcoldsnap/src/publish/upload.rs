//! Upload of objects by the LFS batch protocol: transfers `basic` (one request) and `multipart` (parts of a size that
//! the hub names, then a request that joins them).

use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use ureq::SendBody;
use ureq::http::Method;

use super::hub_api::Api;
use super::{Progress, PublishError};
use crate::digest::Digest;
use crate::hub::http::{Client, HttpError, header, refused};
use crate::source::pace::{Pace, pause};
use crate::store::AdmittedPayload;

/// How the LFS protocol marks its JSON.
pub(super) const LFS: [(&str, &str); 2] =
    [("accept", "application/vnd.git-lfs+json"), ("content-type", "application/vnd.git-lfs+json")];

/// Tries of one request.
const ATTEMPTS: u32 = 4;
/// Pause before the second try; doubled before each further one.
const PAUSE: Duration = Duration::from_millis(500);
/// Longest pause that a server can ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
const READ_BYTES: usize = 1 << 20;
/// What the hub wants to see of a file to say how it stores it.
const SAMPLE_BYTES: usize = 512;
/// Most parts of one object; more would be an error of the hub.
const PARTS: u64 = 10_000;

pub(super) struct Uploader<'a> {
    pub client: &'a Client,
    pub api: &'a Api<'a>,
    pub cancelled: &'a dyn Fn() -> bool,
    pub progress: &'a mut dyn FnMut(Progress<'_>),
    pub pace: Pace,
}

impl Uploader<'_> {
    /// Brings the payloads into the hub's storage; tells which ones were there already.
    pub(super) fn upload(
        &mut self,
        packs: &[&AdmittedPayload],
        hub: &impl Fn(HttpError) -> PublishError,
    ) -> Result<Vec<Digest>, PublishError> {
        let mut samples = Vec::new();
        for pack in packs {
            let mut sample = vec![0; SAMPLE_BYTES];
            let n = pack.file().read_at(&mut sample, 0).map_err(|e| hub(local(pack, &e)))?;
            samples.push((*pack, STANDARD.encode(&sample[..n])));
        }
        self.api.announce(&samples).map_err(hub)?;
        let mut there = Vec::new();
        for pack in packs {
            if (self.cancelled)() {
                return Err(PublishError::Cancelled);
            }
            // Asked for one after the other, because the addresses expire.
            let answer = self.api.batch(pack).map_err(hub)?;
            match self.object(pack, &answer) {
                Ok(true) => {}
                Ok(false) => there.push(*pack.digest()),
                Err(_) if (self.cancelled)() => return Err(PublishError::Cancelled),
                Err(error) => return Err(hub(error)),
            }
        }
        Ok(there)
    }

    /// Uploads one object unless the hub has it.
    fn object(&mut self, pack: &AdmittedPayload, answer: &Value) -> Result<bool, HttpError> {
        let hex = pack.digest().hex();
        let odd =
            |problem: &str| HttpError::Refused(format!("LFS object {hex}: the hub's answer has {problem}"));
        let objects = answer["objects"].as_array().ok_or_else(|| odd("no list of objects"))?;
        let object = objects.iter().find(|o| o["oid"] == *hex).ok_or_else(|| odd("no such object"))?;
        if let Some(error) = object["error"].as_object() {
            let said = error.get("message").and_then(Value::as_str).unwrap_or("no reason");
            return Err(HttpError::Refused(format!("LFS object {hex}: the hub refuses it: {said}")));
        }
        let actions = &object["actions"];
        if actions.is_null() {
            return Ok(false);
        }
        let href = |action: &Value| {
            let href = action["href"].as_str().ok_or_else(|| odd("an action without address"))?;
            let encrypted =
                href.starts_with("https://") || self.client.endpoint().as_str().starts_with("http://");
            if encrypted { Ok(href.to_owned()) } else { Err(odd("an address that is not encrypted")) }
        };
        let upload = href(&actions["upload"])?;
        let headers = text_fields(&actions["upload"]["header"]);
        match answer["transfer"].as_str() {
            Some("multipart") if headers.iter().any(|(name, _)| *name == "chunk_size") => {
                self.parts(pack, &upload, &headers).map_err(|e| match e {
                    Parts::Http(error) => error,
                    Parts::Odd(problem) => odd(problem),
                })?;
            }
            Some("basic" | "multipart") | None => {
                self.put(pack, &upload, &headers, 0, pack.bytes())?;
            }
            Some(_) => return Err(odd("a transfer that was not offered")),
        }
        if !actions["verify"].is_null() {
            let url = href(&actions["verify"])?;
            let headers = [&LFS[..], &text_fields(&actions["verify"]["header"])].concat();
            let body = json!({"oid": hex, "size": pack.bytes()}).to_string();
            self.retry(|this| {
                let response = this.client.send(&Method::POST, &url, &headers, body.as_str())?;
                if response.status().is_success() {
                    Ok(())
                } else {
                    Err(refused(&Method::POST, &url, response))
                }
            })?;
        }
        Ok(true)
    }

    fn parts(&mut self, pack: &AdmittedPayload, join: &str, headers: &[(&str, &str)]) -> Result<(), Parts> {
        let size = headers.iter().find(|(name, _)| *name == "chunk_size");
        let size: u64 = size
            .and_then(|(_, size)| size.parse().ok())
            .filter(|size| *size > 0)
            .ok_or(Parts::Odd("no usable chunk_size"))?;
        let count = pack.bytes().div_ceil(size);
        let mut urls: Vec<(u64, &str)> =
            headers.iter().filter_map(|(name, url)| Some((name.parse().ok()?, *url))).collect();
        urls.sort_unstable();
        if count > PARTS || !urls.iter().map(|(n, _)| *n).eq(1..=count) {
            return Err(Parts::Odd("another number of parts than the size needs"));
        }
        let mut parts = Vec::new();
        for (n, url) in urls {
            let from = (n - 1) * size;
            let etag = self.put(pack, url, &[], from, size.min(pack.bytes() - from))?;
            let etag = etag.ok_or(Parts::Odd("a part without ETag"))?;
            parts.push(json!({"partNumber": n, "etag": etag}));
        }
        let body = json!({"oid": pack.digest().hex(), "parts": parts}).to_string();
        self.retry(|this| {
            let response = this.client.send(&Method::POST, join, &LFS, body.as_str())?;
            if response.status().is_success() { Ok(()) } else { Err(refused(&Method::POST, join, response)) }
        })?;
        Ok(())
    }

    /// Uploads bytes of a payload in one request; the answer's ETag.
    fn put(
        &mut self,
        pack: &AdmittedPayload,
        url: &str,
        headers: &[(&str, &str)],
        from: u64,
        bytes: u64,
    ) -> Result<Option<String>, HttpError> {
        let length = bytes.to_string();
        let headers = [headers, &[("content-length", &length)]].concat();
        self.retry(|this| {
            let Uploader { client, cancelled, progress, pace, .. } = this;
            let mut body = Section {
                pack,
                at: from,
                end: from + bytes,
                sent: &mut |n| {
                    pace.wait(n, *cancelled);
                    progress(Progress::Sent(pack.digest(), n));
                    !cancelled()
                },
            };
            let response = client.send(&Method::PUT, url, &headers, SendBody::from_reader(&mut body))?;
            if !response.status().is_success() {
                return Err(refused(&Method::PUT, url, response));
            }
            Ok(header(&response, "etag").map(ToOwned::to_owned))
        })
    }

    fn retry<T>(
        &mut self,
        mut request: impl FnMut(&mut Self) -> Result<T, HttpError>,
    ) -> Result<T, HttpError> {
        let mut attempt = 1;
        loop {
            let error = match request(self) {
                Err(error) if error.may_pass() && attempt < ATTEMPTS && !(self.cancelled)() => error,
                result => return result,
            };
            tracing::warn!(%error, attempt, "upload: trying again");
            let asked = match error {
                HttpError::Status { retry_after, .. } => retry_after.unwrap_or_default(),
                _ => Duration::ZERO,
            };
            pause(asked.min(LONGEST_PAUSE).max(PAUSE * (1 << (attempt - 1))), self.cancelled);
            attempt += 1;
        }
    }
}

enum Parts {
    Http(HttpError),
    Odd(&'static str),
}

impl From<HttpError> for Parts {
    fn from(error: HttpError) -> Self {
        Self::Http(error)
    }
}

fn local(pack: &AdmittedPayload, error: &io::Error) -> HttpError {
    HttpError::Refused(format!("cannot read {}: {error}", pack.path().display()))
}

/// The fields of an object that are text.
fn text_fields(value: &Value) -> Vec<(&str, &str)> {
    let fields = value.as_object().into_iter().flatten();
    fields.filter_map(|(name, value)| Some((name.as_str(), value.as_str()?))).collect()
}

/// Bytes of a payload as a request's body.
struct Section<'a> {
    pack: &'a AdmittedPayload,
    at: u64,
    end: u64,
    /// Told how many bytes go; false ends the upload.
    sent: &'a mut dyn FnMut(u64) -> bool,
}

impl Read for Section<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end - self.at).unwrap_or(usize::MAX);
        let wanted = left.min(buffer.len());
        let n = self.pack.file().read_at(&mut buffer[..wanted], self.at)?;
        if n == 0 && wanted > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += n as u64;
        if n > 0 && !(self.sent)(n as u64) {
            return Err(io::Error::other("cancelled"));
        }
        Ok(n)
    }
}

/// The digest of what is in a payload's file now; none when cancelled.
pub(super) fn hash(
    pack: &AdmittedPayload,
    cancelled: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64),
) -> io::Result<Option<Digest>> {
    let mut sha256 = Sha256::new();
    let mut buffer = vec![0; READ_BYTES];
    let mut at = 0;
    loop {
        if cancelled() {
            return Ok(None);
        }
        match pack.file().read_at(&mut buffer, at) {
            Ok(0) => return Ok(Some(Digest::from_bytes(sha256.finalize().into()))),
            Ok(n) => {
                sha256.update(&buffer[..n]);
                at += n as u64;
                progress(n as u64);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}
