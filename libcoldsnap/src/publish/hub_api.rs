//! The hub's API as far as publication needs it: repositories, files at a commit, commits.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use ureq::SendBody;
use ureq::http::Method;

use super::{PublishError, Target};
use crate::hub::Place;
use crate::hub::http::{Client, HttpError, describe, header, refused};
use crate::source::unquoted;
use crate::store::AdmittedPayload;

const JSON: (&str, &str) = ("content-type", "application/json");

/// A file in a repository.
#[derive(Debug)]
pub(super) struct Remote {
    /// Digest in hex; none for a file outside LFS.
    pub sha256: Option<String>,
    pub bytes: u64,
}

/// One repository.
#[derive(Debug)]
pub(super) struct Api<'a> {
    client: &'a Client,
    target: &'a Target,
    /// As it stands in an address.
    branch: String,
}

impl<'a> Api<'a> {
    pub(super) fn new(client: &'a Client, target: &'a Target) -> Result<Self, PublishError> {
        let branch = &target.branch;
        let valid = !branch.is_empty()
            && !branch.split('/').any(|part| part.is_empty() || part.starts_with(['.', '-']))
            && branch.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-/".contains(&byte));
        if !valid {
            return Err(PublishError::Branch(branch.clone()));
        }
        Ok(Self { client, target, branch: branch.replace('/', "%2F") })
    }

    fn url(&self, action: &str, revision: &str) -> String {
        format!("{}/api/models/{}/{action}/{revision}", self.endpoint(), self.target.repository)
    }

    fn endpoint(&self) -> &str {
        self.client.endpoint().as_str()
    }

    fn post(&self, url: &str, body: &Value) -> Result<Value, HttpError> {
        self.client.json(&Method::POST, url, &[JSON], body.to_string())
    }

    /// The commit that the branch is at.
    pub(super) fn head(&self) -> Result<String, HttpError> {
        self.commit_of(&self.branch)
    }

    /// The commit that a revision is.
    pub(super) fn commit_of(&self, revision: &str) -> Result<String, HttpError> {
        let url = self.url("revision", revision);
        let answer = self.client.json(&Method::GET, &url, &[], SendBody::none())?;
        commit_id(&url, &answer["sha"])
    }

    pub(super) fn create(&self, private: bool) -> Result<(), HttpError> {
        let (owner, name) = self.target.repository.parts();
        let url = format!("{}/api/repos/create", self.endpoint());
        let body = json!({"type": "model", "name": name, "organization": owner, "private": private});
        self.post(&url, &body).map(drop)
    }

    /// The files that a commit has at the payloads' paths.
    pub(super) fn files(
        &self,
        revision: &str,
        packs: &[AdmittedPayload],
    ) -> Result<BTreeMap<String, Remote>, HttpError> {
        let url = self.url("paths-info", revision);
        let paths: Vec<String> = packs.iter().map(path).collect();
        let answer = self.post(&url, &json!({"paths": paths, "expand": false}))?;
        let files = answer.as_array().ok_or_else(|| odd(&url, "no list"))?;
        files
            .iter()
            .map(|file| {
                let path = file["path"].as_str().ok_or_else(|| odd(&url, "a file without path"))?;
                let sha256 = file["lfs"]["oid"].as_str().map(ToOwned::to_owned);
                let bytes = file["lfs"]["size"].as_u64().or(file["size"].as_u64()).unwrap_or_default();
                Ok((path.to_owned(), Remote { sha256, bytes }))
            })
            .collect()
    }

    /// Asks how the hub wants these files; anything but LFS cannot be pinned by digest.
    pub(super) fn announce(&self, packs: &[(&AdmittedPayload, String)]) -> Result<(), HttpError> {
        let url = self.url("preupload", &self.branch);
        let files: Vec<Value> = packs
            .iter()
            .map(|(pack, sample)| json!({"path": path(pack), "size": pack.bytes(), "sample": sample}))
            .collect();
        let answer = self.post(&url, &json!({"files": files}))?;
        let files = answer["files"].as_array().ok_or_else(|| odd(&url, "no list of files"))?;
        for file in files {
            if file["uploadMode"] != "lfs" || file["shouldIgnore"] == true {
                let what = format!(
                    "{} would not be stored as an LFS object: .gitattributes needs \
                     `*.pack filter=lfs diff=lfs merge=lfs -text`, and .gitignore must not name it",
                    file["path"]
                );
                return Err(HttpError::Refused(what));
            }
        }
        Ok(())
    }

    /// Where an object is uploaded.
    pub(super) fn batch(&self, pack: &AdmittedPayload) -> Result<Value, HttpError> {
        let url = format!("{}/{}.git/info/lfs/objects/batch", self.endpoint(), self.target.repository);
        let object = json!({"oid": pack.digest().hex(), "size": pack.bytes()});
        let body = json!({
            "operation": "upload", "transfers": ["basic", "multipart"], "hash_algo": "sha256",
            "ref": {"name": format!("refs/heads/{}", self.target.branch)}, "objects": [object],
        });
        self.client.json(&Method::POST, &url, &super::upload::LFS, body.to_string())
    }

    /// Commits uploaded objects on top of `parent`.
    pub(super) fn commit(&self, packs: &[&AdmittedPayload], parent: &str) -> Result<String, HttpError> {
        let url = self.url("commit", &self.branch);
        let summary = format!("Add {} model payload(s)", packs.len());
        let mut lines = vec![
            json!({"key": "header", "value": {"summary": summary, "description": "", "parentCommit": parent}}),
        ];
        lines.extend(packs.iter().map(|pack| {
            let oid = pack.digest().hex();
            json!({"key": "lfsFile", "value":
                {"path": path(pack), "algo": "sha256", "oid": oid, "size": pack.bytes()}})
        }));
        let body: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let kind = ("content-type", "application/x-ndjson");
        let answer = self.client.json(&Method::POST, &url, &[kind], body)?;
        commit_id(&url, &answer["commitOid"])
    }

    /// That a reader of the commit gets this payload.
    pub(super) fn confirm(&self, revision: &str, pack: &AdmittedPayload) -> Result<(), HttpError> {
        let Target { endpoint, repository, .. } = self.target;
        let place = Place::new(endpoint.clone(), repository.clone(), revision)
            .map_err(|e| HttpError::Refused(e.to_string()))?;
        let url = place.resolve(pack.digest());
        let response = self.client.send(&Method::HEAD, &url, &[], SendBody::none())?;
        if !response.status().is_success() && !response.status().is_redirection() {
            return Err(refused(&Method::HEAD, &url, response));
        }
        let found = ["x-repo-commit", "x-linked-etag", "x-linked-size"].map(|name| header(&response, name));
        let [commit, etag, size] = found;
        let right = commit == Some(revision)
            && etag.map(unquoted) == Some(&*pack.digest().hex())
            && size.and_then(|size| size.parse().ok()) == Some(pack.bytes());
        if right {
            return Ok(());
        }
        let what = describe(&Method::HEAD, &url);
        Err(HttpError::Refused(format!(
            "{what}: the hub says commit {commit:?}, object {etag:?}, size {size:?}"
        )))
    }
}

/// A payload's path in every repository.
fn path(pack: &(impl std::borrow::Borrow<AdmittedPayload> + ?Sized)) -> String {
    pack.borrow().digest().payload_path().display().to_string()
}

fn odd(url: &str, problem: &str) -> HttpError {
    HttpError::Refused(format!("{}: the answer has {problem}", describe(&Method::POST, url)))
}

fn commit_id(url: &str, value: &Value) -> Result<String, HttpError> {
    match value.as_str().filter(|text| crate::hub::is_commit(text)) {
        Some(commit) => Ok(commit.to_owned()),
        None => Err(odd(url, "no commit of 40 hex digits")),
    }
}
