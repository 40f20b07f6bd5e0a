//! A hub on this machine for tests: a real HTTP server that behaves as the Hugging Face hub does towards payloads, and
//! a second one on another port as its content network. Written from the documented protocol, without any code of the
//! program that is tested.

#![allow(clippy::unwrap_used, dead_code, reason = "helpers of tests, each used by some of them")]

pub mod artifact;
pub mod http;

use std::collections::{BTreeMap, HashMap};
use std::net::TcpListener;
use std::sync::{Arc, Mutex, MutexGuard};

use http::{Request, Response, Server};
use serde_json::{Value, json};

/// Something that goes wrong, a number of times.
#[derive(Debug, Clone, PartialEq)]
pub enum Fault {
    /// The content network closes the connection before this byte of the object.
    CutDownload(usize),
    /// The content network delivers an object with a wrong last byte.
    WrongBytes,
    /// It ignores ranges.
    NoRange,
    /// The object at its address is another one now.
    OtherEtag,
    /// A range that was not asked for.
    WrongRange,
    /// The hub says that it answers for another commit.
    WrongCommit,
    /// The hub says that the file is another object.
    WrongObject,
    /// The hub says that the file has another size.
    WrongSize,
    /// The hub redirects here.
    Redirect(String),
    /// Requests whose path contains this get a status, with `Retry-After`.
    Status(&'static str, u16, Option<u64>),
    /// The first bytes of an upload whose path contains this arrive, then the connection closes.
    LoseUpload(&'static str),
    /// Somebody else commits first.
    Overtaken,
    /// The hub wants the file outside LFS.
    Regular,
}

/// What was asked.
#[derive(Debug, Clone)]
pub struct Seen {
    pub server: &'static str,
    pub method: String,
    pub path: String,
    pub authorization: Option<String>,
    pub range: Option<String>,
    pub if_range: Option<String>,
    pub status: u16,
    /// Bytes of the body that came.
    pub received: usize,
    /// Bytes of the body that went.
    pub sent: usize,
}

#[derive(Debug, Default)]
struct Repo {
    head: String,
    /// Files by commit: digest in hex and size.
    commits: HashMap<String, BTreeMap<String, (String, usize)>>,
    private: bool,
}

#[derive(Debug, Default)]
pub struct State {
    repos: HashMap<String, Repo>,
    pub objects: HashMap<String, Vec<u8>>,
    parts: HashMap<String, BTreeMap<usize, Vec<u8>>>,
    faults: Vec<(Fault, usize)>,
    pub seen: Vec<Seen>,
    token: Option<String>,
    /// Larger objects are uploaded in parts of this size.
    part_bytes: Option<usize>,
    commits: usize,
    hub: String,
    cdn: String,
}

/// See the module. Stops when it is dropped.
#[derive(Debug)]
pub struct Hub {
    state: Arc<Mutex<State>>,
    servers: Vec<Server>,
}

impl Hub {
    pub fn start() -> Self {
        let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (hub, cdn) = (listen(), listen());
        let address = |listener: &TcpListener| format!("http://{}", listener.local_addr().unwrap());
        let state = State { hub: address(&hub), cdn: address(&cdn), ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let serve = |server: &'static str, listener| {
            let state = state.clone();
            Server::start(listener, move |request| state.lock().unwrap().answer(server, &request))
        };
        let servers = vec![serve("hub", hub), serve("cdn", cdn)];
        Self { state, servers }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn endpoint(&self) -> String {
        self.state().hub.clone()
    }

    pub fn require_token(&self, token: &str) {
        self.state().token = Some(token.to_owned());
    }

    pub fn upload_in_parts_of(&self, bytes: usize) {
        self.state().part_bytes = Some(bytes);
    }

    pub fn fault(&self, fault: Fault, times: usize) {
        self.state().faults.push((fault, times));
    }

    pub fn create(&self, repository: &str) {
        self.state().create(repository, false);
    }

    /// Commits a payload and tells the commit.
    pub fn put(&self, repository: &str, hex: &str, bytes: &[u8]) -> String {
        self.put_at(repository, &format!("model-payloads/sha256/{hex}.pack"), hex, bytes)
    }

    pub fn put_at(&self, repository: &str, path: &str, hex: &str, bytes: &[u8]) -> String {
        let mut state = self.state();
        state.create(repository, false);
        state.objects.insert(hex.to_owned(), bytes.to_vec());
        state.commit(repository, &[(path.to_owned(), hex.to_owned(), bytes.len())])
    }

    /// The files at the head of a repository's branch: path to digest in hex and size.
    pub fn files(&self, repository: &str) -> BTreeMap<String, (String, usize)> {
        let state = self.state();
        let repo = &state.repos[repository];
        repo.commits[&repo.head].clone()
    }

    pub fn head(&self, repository: &str) -> Option<String> {
        self.state().repos.get(repository).map(|repo| repo.head.clone())
    }

    pub fn is_private(&self, repository: &str) -> bool {
        self.state().repos[repository].private
    }

    /// What was asked since the last call.
    pub fn take_seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.state().seen)
    }
}

fn bad(status: u16, code: &str, message: &str) -> Response {
    Response::new(status).with("X-Error-Code", code).with("X-Error-Message", message)
}

impl State {
    fn create(&mut self, repository: &str, private: bool) {
        if !self.repos.contains_key(repository) {
            let repo = Repo { private, ..Repo::default() };
            self.repos.insert(repository.to_owned(), repo);
            self.commit(repository, &[(".gitattributes".to_owned(), "a".repeat(64), 1519)]);
        }
    }

    fn commit(&mut self, repository: &str, files: &[(String, String, usize)]) -> String {
        self.commits += 1;
        let id = format!("{:040x}", 0xc0_1d00 + self.commits);
        let repo = self.repos.get_mut(repository).unwrap();
        let mut all = repo.commits.get(&repo.head).cloned().unwrap_or_default();
        all.extend(files.iter().cloned().map(|(path, hex, size)| (path, (hex, size))));
        repo.commits.insert(id.clone(), all);
        repo.head = id.clone();
        id
    }

    /// Whether the fault happens now.
    fn happens(&mut self, wanted: impl Fn(&Fault) -> bool) -> Option<Fault> {
        let found = self.faults.iter_mut().find(|(fault, left)| *left > 0 && wanted(fault))?;
        found.1 -= 1;
        Some(found.0.clone())
    }

    fn answer(&mut self, server: &'static str, request: &Request) -> Response {
        let status = |fault: &Fault| matches!(fault, Fault::Status(part, ..) if request.path.contains(part));
        let response = match self.happens(status) {
            Some(Fault::Status(_, status, after)) => {
                let response = bad(status, "", "scripted");
                after.map(|after| response.with("Retry-After", after)).unwrap_or(bad(status, "", "scripted"))
            }
            _ if server == "cdn" => self.cdn(request),
            _ => self.hub(request),
        };
        let sent = if request.method == "HEAD" { 0 } else { response.cut.unwrap_or(response.body.len()) };
        self.seen.push(Seen {
            server,
            method: request.method.clone(),
            path: request.path.clone(),
            authorization: request.header("authorization").map(ToOwned::to_owned),
            range: request.header("range").map(ToOwned::to_owned),
            if_range: request.header("if-range").map(ToOwned::to_owned),
            status: response.status,
            received: request.body.len(),
            sent,
        });
        response
    }

    fn hub(&mut self, request: &Request) -> Response {
        // Its address is signed.
        if let Some(hex) = request.path.strip_prefix("/api/complete_multipart/") {
            return self.complete(hex, request);
        }
        let wanted = self.token.as_ref().map(|token| format!("Bearer {token}"));
        if wanted.is_some() && request.header("authorization") != wanted.as_deref() {
            return bad(401, "", "Invalid username or password.");
        }
        let parts: Vec<&str> = request.path.split('/').skip(1).collect();
        match (request.method.as_str(), parts.as_slice()) {
            ("GET" | "HEAD", [owner, name, "resolve", revision, path @ ..]) => {
                self.resolve(&format!("{owner}/{name}"), revision, &path.join("/"))
            }
            ("POST", ["api", "repos", "create"]) => {
                let body = request.json();
                let repository =
                    format!("{}/{}", body["organization"].as_str().unwrap(), body["name"].as_str().unwrap());
                if self.repos.contains_key(&repository) {
                    return bad(409, "", "You already created this model repo");
                }
                self.create(&repository, body["private"] == true);
                Response::json(&json!({"url": format!("{}/{repository}", self.hub)}))
            }
            (method, ["api", "models", owner, name, action, revision]) => {
                let repository = format!("{owner}/{name}");
                let Some(repo) = self.repos.get(&repository) else {
                    return bad(404, "RepoNotFound", "Repository not found");
                };
                let revision = if *revision == "main" { repo.head.clone() } else { (*revision).to_owned() };
                let Some(files) = repo.commits.get(&revision) else {
                    return bad(404, "RevisionNotFound", "Invalid rev id");
                };
                match (method, *action) {
                    ("GET", "revision") => Response::json(&json!({"id": repository, "sha": revision})),
                    ("POST", "paths-info") => {
                        let body = request.json();
                        let paths = body["paths"].as_array().unwrap().iter();
                        let found = paths.filter_map(|path| {
                            let path = path.as_str().unwrap();
                            let (hex, size) = files.get(path)?;
                            let lfs = json!({"oid": hex, "size": size, "pointerSize": 134});
                            Some(json!({"type": "file", "path": path, "size": size, "lfs": lfs}))
                        });
                        Response::json(&Value::Array(found.collect()))
                    }
                    ("POST", "preupload") => {
                        let mode =
                            if self.happens(|f| *f == Fault::Regular).is_some() { "regular" } else { "lfs" };
                        let body = request.json();
                        let files = body["files"].as_array().unwrap().iter().map(|file| {
                            assert!(file["size"].is_u64() && file["sample"].is_string(), "{file}");
                            json!({"path": file["path"], "uploadMode": mode, "shouldIgnore": false})
                        });
                        Response::json(&json!({"files": files.collect::<Vec<_>>()}))
                    }
                    ("POST", "commit") => self.post_commit(&repository, request),
                    _ => bad(404, "", ""),
                }
            }
            ("POST", [owner, name, "info", "lfs", "objects", "batch"]) => {
                let name = name.strip_suffix(".git").unwrap();
                if !self.repos.contains_key(&format!("{owner}/{name}")) {
                    return bad(404, "RepoNotFound", "Repository not found");
                }
                self.batch(request)
            }
            ("POST", [_, _, "info", "lfs", "objects", "verify"]) => {
                let body = request.json();
                let size = self.objects.get(body["oid"].as_str().unwrap()).map(Vec::len);
                let right = size.is_some_and(|size| body["size"] == size);
                Response::new(if right { 200 } else { 404 })
            }
            _ => bad(404, "", "no such page"),
        }
    }

    fn resolve(&mut self, repository: &str, revision: &str, path: &str) -> Response {
        let Some(repo) = self.repos.get(repository) else {
            return bad(404, "RepoNotFound", "Repository not found");
        };
        let Some(files) = repo.commits.get(revision) else {
            return bad(404, "RevisionNotFound", "Invalid rev id");
        };
        let Some((hex, size)) = files.get(path).cloned() else {
            return bad(404, "EntryNotFound", "Entry not found").with("X-Repo-Commit", revision);
        };
        let wrong = |state: &mut Self, fault: Fault| state.happens(|found| *found == fault).is_some();
        let commit = if wrong(self, Fault::WrongCommit) { "f".repeat(40) } else { revision.to_owned() };
        let etag = if wrong(self, Fault::WrongObject) { "e".repeat(64) } else { hex.clone() };
        let size = if wrong(self, Fault::WrongSize) { size + 1 } else { size };
        let location = match self.happens(|fault| matches!(fault, Fault::Redirect(_))) {
            Some(Fault::Redirect(to)) => to,
            _ => format!("{}/objects/{hex}?Signature=signed-for-{}", self.cdn, &hex[..8]),
        };
        Response::new(302)
            .with("Location", location)
            .with("X-Repo-Commit", commit)
            .with("X-Linked-Etag", format!("\"{etag}\""))
            .with("X-Linked-Size", size)
    }

    fn batch(&mut self, request: &Request) -> Response {
        let body = request.json();
        assert_eq!((&body["operation"], &body["hash_algo"]), (&json!("upload"), &json!("sha256")));
        assert_eq!(request.header("accept"), Some("application/vnd.git-lfs+json"));
        let mut multipart = false;
        let objects: Vec<Value> = body["objects"]
            .as_array()
            .unwrap()
            .iter()
            .map(|object| {
                let oid = object["oid"].as_str().unwrap();
                let size = usize::try_from(object["size"].as_u64().unwrap()).unwrap();
                if self.objects.contains_key(oid) {
                    return json!({"oid": oid, "size": size});
                }
                let verify = json!({"href": format!("{}/any/repo.git/info/lfs/objects/verify", self.hub)});
                let upload = match self.part_bytes.filter(|part| size > *part) {
                    Some(part) => {
                        multipart = true;
                        let parts = (1..=size.div_ceil(part)).map(|n| {
                            let href = format!("{}/parts/{oid}/{n}?Signature=signed", self.cdn);
                            (format!("{n:05}"), json!(href))
                        });
                        let mut header: serde_json::Map<String, Value> = parts.collect();
                        header.insert("chunk_size".to_owned(), json!(part.to_string()));
                        let href = format!("{}/api/complete_multipart/{oid}?Signature=signed", self.hub);
                        json!({"href": href, "header": header})
                    }
                    None => json!({"href": format!("{}/upload/{oid}?Signature=signed", self.cdn)}),
                };
                let actions = json!({"upload": upload, "verify": verify});
                json!({"oid": oid, "size": size, "authenticated": true, "actions": actions})
            })
            .collect();
        let transfer = if multipart { "multipart" } else { "basic" };
        assert!(body["transfers"].as_array().unwrap().contains(&json!(transfer)));
        Response::json(&json!({"transfer": transfer, "objects": objects}))
    }

    fn complete(&mut self, hex: &str, request: &Request) -> Response {
        let body = request.json();
        assert_eq!(body["oid"], hex);
        let stored = self.parts.remove(hex).unwrap_or_default();
        let named = body["parts"].as_array().unwrap();
        let right = named.len() == stored.len()
            && named.iter().zip(&stored).all(|(named, (n, bytes))| {
                named["partNumber"] == *n && named["etag"] == json!(etag_of_part(*n, bytes))
            });
        if !right {
            return bad(400, "", "the parts are not the ones that were uploaded");
        }
        self.store(hex, stored.into_values().flatten().collect())
    }

    fn store(&mut self, hex: &str, bytes: Vec<u8>) -> Response {
        if coldsnap::digest::Digest::of(&bytes).hex() != hex {
            return bad(400, "", "the object has another digest");
        }
        self.objects.insert(hex.to_owned(), bytes);
        Response::json(&json!({}))
    }

    fn post_commit(&mut self, repository: &str, request: &Request) -> Response {
        assert_eq!(request.header("content-type"), Some("application/x-ndjson"));
        let text = String::from_utf8(request.body.clone()).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines[0]["key"], "header");
        assert!(lines[0]["value"]["summary"].is_string());
        if self.happens(|fault| *fault == Fault::Overtaken).is_some() {
            self.commit(repository, &[("README.md".to_owned(), "b".repeat(64), 7)]);
        }
        let parent = &lines[0]["value"]["parentCommit"];
        if !parent.is_null() && *parent != self.repos[repository].head.as_str() {
            return bad(412, "", "A commit has happened since. Please refresh and try again.");
        }
        let mut files = Vec::new();
        for line in &lines[1..] {
            assert_eq!((&line["key"], &line["value"]["algo"]), (&json!("lfsFile"), &json!("sha256")));
            let text = |name: &str| line["value"][name].as_str().unwrap().to_owned();
            let size = self.objects.get(&text("oid")).map(Vec::len);
            if size.is_none_or(|size| line["value"]["size"] != size) {
                return bad(400, "", "the LFS object was not uploaded");
            }
            files.push((text("path"), text("oid"), size.unwrap()));
        }
        let id = self.commit(repository, &files);
        Response::json(&json!({"success": true, "commitOid": id, "commitUrl": "", "hookOutput": ""}))
    }

    fn cdn(&mut self, request: &Request) -> Response {
        // As storage services do: a signed address and credentials are one too many.
        if request.header("authorization").is_some() {
            return bad(400, "", "Only one auth mechanism allowed");
        }
        if !request.query.contains("Signature=") {
            return bad(403, "", "not signed");
        }
        // Storage services take no body of unknown length.
        if request.method == "PUT" && request.header("content-length").is_none() {
            return bad(411, "", "MissingContentLength");
        }
        let parts: Vec<&str> = request.path.split('/').skip(1).collect();
        match (request.method.as_str(), parts.as_slice()) {
            ("GET", ["objects", hex]) => self.object(hex, request),
            ("PUT", ["upload", hex]) if self.upload_arrives(request) => self.store(hex, request.body.clone()),
            ("PUT", ["parts", hex, n]) if self.upload_arrives(request) => {
                let n = n.parse().unwrap();
                self.parts.entry((*hex).to_owned()).or_default().insert(n, request.body.clone());
                Response::new(200).with("ETag", etag_of_part(n, &request.body))
            }
            ("PUT", _) => Response::new(503),
            _ => bad(404, "", "no such object"),
        }
    }

    fn upload_arrives(&mut self, request: &Request) -> bool {
        let lost = |fault: &Fault| matches!(fault, Fault::LoseUpload(part) if request.path.contains(part));
        self.happens(lost).is_none()
    }

    fn object(&mut self, hex: &str, request: &Request) -> Response {
        let Some(mut bytes) = self.objects.get(hex).cloned() else { return bad(404, "", "no such object") };
        if self.happens(|fault| *fault == Fault::WrongBytes).is_some() {
            *bytes.last_mut().unwrap() ^= 1;
        }
        let other = self.happens(|fault| *fault == Fault::OtherEtag).is_some();
        let etag = if other { "\"other\"".to_owned() } else { format!("\"md5-{}\"", &hex[..16]) };
        let total = bytes.len();
        let range = request.header("range").and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-'));
        let same = request.header("if-range").is_none_or(|wanted| wanted == etag);
        let ignored = range.is_some() && self.happens(|fault| *fault == Fault::NoRange).is_some();
        let from: usize = range.filter(|_| same && !ignored).map_or(0, |from| from.parse().unwrap());
        if from >= total {
            return Response::new(416).with("Content-Range", format!("bytes */{total}"));
        }
        let mut response = Response::new(if from > 0 { 206 } else { 200 }).with("ETag", etag);
        response.body = bytes.split_off(from);
        if from > 0 {
            let shift = usize::from(self.happens(|fault| *fault == Fault::WrongRange).is_some());
            let shown = format!("bytes {}-{}/{total}", from + shift, total - 1);
            response = response.with("Content-Range", shown);
        }
        if let Some(Fault::CutDownload(at)) = self.happens(|fault| matches!(fault, Fault::CutDownload(_))) {
            response.cut = Some(at.saturating_sub(from));
        }
        response
    }
}

fn etag_of_part(n: usize, bytes: &[u8]) -> String {
    format!("\"part-{n}-{}\"", bytes.len())
}
