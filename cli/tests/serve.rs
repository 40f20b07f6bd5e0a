//! `coldsnap payload serve`: the real binary, a client that writes HTTP by hand.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use coldsnap::digest::Digest;
use coldsnap::store::NodeStore;
use rustix::fs::FlockOperation;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

const PAYLOAD_BYTES: u64 = 8 << 20;

/// A store with one payload, and a server in front of it.
struct Server {
    dir: TempDir,
    store: NodeStore,
    digest: Digest,
    child: Child,
    token: String,
}

impl Server {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = NodeStore::open(dir.path().join("store")).unwrap().with_reserve(0);
        let digest = publish(&store, 7);
        let mut child = command(dir.path())
            .args(["--json", "--store", store.root().to_str().unwrap()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        let ready: Value = serde_json::from_str(&ready).unwrap();
        assert_eq!(ready["api"], "v1");
        assert_eq!(ready["store"], store.root().to_str().unwrap());
        let token = fs::read_to_string(dir.path().join("token")).unwrap().trim_end().to_owned();
        Self { dir, store, digest, child, token }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("run/payloads.sock")
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(self.socket()).unwrap()
    }

    /// Sends a request with the token; the answer is read later.
    fn send(&self, method: &str, path: &str, body: &str) -> UnixStream {
        let mut stream = self.connect();
        let length = body.len();
        let authorization = format!("Authorization: Bearer {}\r\n", self.token);
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: coldsnap\r\n{authorization}Connection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        stream
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let (status, _, body) = answer(self.send(method, path, body));
        (status, body)
    }

    fn admit(&self, digest: &Digest) -> (u16, Value) {
        self.ask("POST", "/v1/admit", &json!({"sha256": digest}).to_string())
    }

    fn forget(&self, digest: &Digest) {
        let record = format!("{}.coldsnap-validation.json", self.store.payload_path(digest).display());
        fs::remove_file(record).unwrap();
    }

    /// Keeps every verification of a payload from beginning while it is held.
    fn lock(&self, digest: &Digest) -> File {
        let name = format!("model-payloads/sha256/.{}.pack.lock", digest.hex());
        let file = File::open(self.store.root().join(name)).unwrap();
        rustix::fs::flock(&file, FlockOperation::LockExclusive).unwrap();
        file
    }

    /// Bytes that the server has read from files.
    fn bytes_read(&self) -> u64 {
        let counters = fs::read_to_string(format!("/proc/{}/io", self.child.id())).unwrap();
        counters.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits until so many of its threads wait for a lock of a digest.
    fn wait_for_blocked_threads(&self, wanted: usize) {
        for _ in 0..500 {
            let inode = fs::read_to_string("/proc/locks").unwrap();
            let pid = format!(" {} ", self.child.id());
            if inode.lines().filter(|line| line.contains("->") && line.contains(&pid)).count() >= wanted {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        panic!("no thread of the server waits for a lock");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coldsnap"));
    command.args(["payload", "serve", "--socket"]).arg(dir.join("run/payloads.sock"));
    command.arg("--token-file").arg(dir.join("token")).env_remove("COLDSNAP_STORE").stdin(Stdio::null());
    command
}

fn publish(store: &NodeStore, byte: u8) -> Digest {
    let data = vec![byte; usize::try_from(PAYLOAD_BYTES).unwrap()];
    *store.publish_pack(&[vec![&data]], &mut |_| ()).unwrap().payload.digest()
}

/// Status, head and JSON body of an answer on a connection that the server closes.
fn answer(mut stream: UnixStream) -> (u16, String, Value) {
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_ascii_lowercase(), serde_json::from_str(body).unwrap())
}

#[test]
fn admission_lists_and_health_have_stable_json() {
    let server = Server::start();
    let (status, report) = server.admit(&server.digest);
    assert_eq!(status, 200);
    let mut expected = json!({
        "digest": server.digest,
        "path": server.store.payload_path(&server.digest),
        "bytes": PAYLOAD_BYTES,
        "evidence": "cached-full-sha256",
        "bytes_hashed": 0,
        "record": "reused",
    });
    expected["seconds"] = report["seconds"].clone();
    assert_eq!(report, expected);

    server.forget(&server.digest);
    let body = json!({"sha256": server.digest, "bytes": PAYLOAD_BYTES}).to_string();
    let (status, report) = server.ask("POST", "/v1/admit", &body);
    assert_eq!((status, &report["evidence"]), (200, &json!("full-sha256-this-operation")));
    assert_eq!((&report["bytes_hashed"], &report["record"]), (&json!(PAYLOAD_BYTES), &json!("written")));

    let (status, listing) = server.ask("GET", "/v1/payloads", "");
    assert_eq!((status, listing["payloads"].as_array().unwrap().len()), (200, 1));
    assert_eq!(listing["payloads"][0]["state"], "verified");
    assert_eq!(listing["payloads"][0]["digest"], json!(server.digest));

    let (status, health) = server.ask("GET", "/v1/health", "");
    assert_eq!((status, &health["status"], &health["api"]), (200, &json!("ok"), &json!("v1")));
}

#[test]
fn what_is_not_admitted_is_an_error_with_kind_and_status() {
    let server = Server::start();
    let error = |(status, body): (u16, Value)| {
        assert!(!body["error"]["message"].as_str().unwrap().is_empty());
        (status, body["error"]["kind"].as_str().unwrap().to_owned())
    };
    assert_eq!(error(server.admit(&Digest::of(b"other"))), (404, "PayloadMissing".to_owned()));
    let body = json!({"sha256": server.digest, "bytes": 4096}).to_string();
    assert_eq!(error(server.ask("POST", "/v1/admit", &body)), (409, "SizeChanged".to_owned()));
    let path = server.store.payload_path(&server.digest);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    File::options().write(true).open(&path).unwrap().write_all(b"x").unwrap();
    assert_eq!(error(server.admit(&server.digest)), (409, "DigestMismatch".to_owned()));
    fs::rename(&path, path.with_extension("elsewhere")).unwrap();
    std::os::unix::fs::symlink(path.with_extension("elsewhere"), &path).unwrap();
    assert_eq!(error(server.admit(&server.digest)), (409, "NotRegularFile".to_owned()));
}

#[test]
fn unknown_paths_methods_fields_and_bodies_are_errors() {
    let server = Server::start();
    let digest = server.digest.to_string();
    let large = format!("{{\"sha256\": \"{digest}\"{}}}", " ".repeat(5000));
    for (method, path, body, status, kind) in [
        ("GET", "/", String::new(), 404, "UnknownPath"),
        ("GET", "/v2/health", String::new(), 404, "UnknownPath"),
        ("GET", "/v1/health/", String::new(), 404, "UnknownPath"),
        ("GET", "/v1/health?x=1", String::new(), 404, "UnknownPath"),
        ("GET", "/v1/admit", String::new(), 405, "Method"),
        ("POST", "/v1/payloads", String::new(), 405, "Method"),
        ("POST", "/v1/admit", String::new(), 400, "Malformed"),
        ("POST", "/v1/admit", "[]".to_owned(), 400, "Malformed"),
        ("POST", "/v1/admit", json!({"bytes": 1}).to_string(), 400, "Malformed"),
        ("POST", "/v1/admit", json!({"sha256": digest, "more": 1}).to_string(), 400, "Malformed"),
        ("POST", "/v1/admit", json!({"sha256": digest.to_uppercase()}).to_string(), 400, "Malformed"),
        ("POST", "/v1/admit", json!({"sha256": digest, "bytes": -1}).to_string(), 400, "Malformed"),
        ("POST", "/v1/admit", json!({"sha256": digest}).to_string() + "{}", 400, "Malformed"),
        (
            "POST",
            "/v1/admit",
            format!("{{\"sha256\":\"{digest}\",\"sha256\":\"{digest}\"}}"),
            400,
            "Malformed",
        ),
        ("POST", "/v1/admit", large, 413, "Malformed"),
    ] {
        let (found, answer) = server.ask(method, path, &body);
        assert_eq!(
            (found, answer["error"]["kind"].as_str()),
            (status, Some(kind)),
            "{method} {path} {body:.90}"
        );
    }
    let (_, head, _) = answer(server.send("PUT", "/v1/admit", ""));
    assert!(head.contains("allow: post"), "{head}");
}

#[test]
fn without_the_token_nothing_is_said() {
    let server = Server::start();
    for authorization in [String::new(), format!("Authorization: Bearer {}x\r\n", server.token)] {
        for path in ["/v1/health", "/v1/payloads", "/v1/admit", "/other"] {
            let mut stream = server.connect();
            write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n{authorization}Connection: close\r\n\r\n")
                .unwrap();
            let (status, head, body) = answer(stream);
            assert_eq!((status, &body["error"]["kind"]), (401, &json!("Unauthorized")), "{path}");
            assert!(head.contains("www-authenticate: bearer"), "{head}");
        }
    }
}

#[test]
fn socket_and_token_file_are_private() {
    let server = Server::start();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!(mode(&server.socket()), 0o600);
    assert_eq!(mode(server.socket().parent().unwrap()), 0o700);
    assert_eq!(mode(&server.dir.path().join("token")), 0o600);
    assert!(server.token.len() >= 32);
    let other = Server::start();
    assert_ne!(server.token, other.token);
}

#[track_caller]
fn refuses_to_start(dir: &Path, kind: &str, word: &str) {
    let output = command(dir).args(["--store", dir.to_str().unwrap(), "--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(error["error"]["kind"], kind, "{error}");
    assert!(error["error"]["message"].as_str().unwrap().contains(word), "{error}");
}

#[test]
fn a_token_file_that_others_may_read_or_that_holds_no_token_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    for (content, mode, word) in [
        ("0123456789abcdef0123456789abcdef\n", 0o640, "mode is 640"),
        ("0123456789abcdef0123456789abcde\n", 0o600, "at least 32"),
        ("0123456789abcdef 123456789abcdef\n", 0o600, "without spaces"),
        ("", 0o600, "at least 32"),
    ] {
        fs::write(&token, content).unwrap();
        fs::set_permissions(&token, fs::Permissions::from_mode(mode)).unwrap();
        refuses_to_start(dir.path(), "Token", word);
    }
    let elsewhere = dir.path().join("elsewhere");
    fs::write(&elsewhere, "0123456789abcdef0123456789abcdef\n").unwrap();
    fs::set_permissions(&elsewhere, fs::Permissions::from_mode(0o600)).unwrap();
    fs::remove_file(&token).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &token).unwrap();
    refuses_to_start(dir.path(), "Token", "cannot use the token file");
    assert!(!dir.path().join("run").exists());
}

#[test]
fn a_directory_that_others_may_write_a_live_socket_and_other_files_are_refused_and_a_stale_socket_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    for mode in [0o770, 0o707] {
        fs::DirBuilder::new().mode(0o700).create(&run).unwrap();
        fs::set_permissions(&run, fs::Permissions::from_mode(mode)).unwrap();
        refuses_to_start(dir.path(), "Socket", "write permission");
        fs::remove_dir(&run).unwrap();
    }
    fs::DirBuilder::new().mode(0o700).create(&run).unwrap();
    let socket = run.join("payloads.sock");
    fs::write(&socket, "data").unwrap();
    refuses_to_start(dir.path(), "Socket", "not a socket");
    fs::remove_file(&socket).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    refuses_to_start(dir.path(), "Socket", "another process");
    assert!(UnixStream::connect(&socket).is_ok(), "the living socket is left alone");
    drop(listener);
    let mut child = command(dir.path())
        .args(["--store", dir.path().to_str().unwrap()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    assert!(ready.starts_with("listening on"), "{ready}");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn concurrent_requests_for_one_digest_verify_once() {
    let server = Server::start();
    server.forget(&server.digest);
    let lock = server.lock(&server.digest);
    let before = server.bytes_read();
    let body = json!({"sha256": server.digest}).to_string();
    let clients: Vec<_> = (0..8).map(|_| server.send("POST", "/v1/admit", &body)).collect();
    server.wait_for_blocked_threads(1);
    drop(lock);
    for client in clients {
        let (status, _, report) = answer(client);
        assert_eq!((status, &report["digest"]), (200, &json!(server.digest)));
    }
    let read = server.bytes_read() - before;
    assert!((PAYLOAD_BYTES..2 * PAYLOAD_BYTES).contains(&read), "{read} bytes were read");
}

#[test]
fn a_long_verification_holds_up_nothing_else() {
    let server = Server::start();
    let other = publish(&server.store, 9);
    let third = publish(&server.store, 11);
    server.forget(&server.digest);
    server.forget(&third);
    let lock = server.lock(&server.digest);
    let waiting = server.send("POST", "/v1/admit", &json!({"sha256": server.digest}).to_string());
    server.wait_for_blocked_threads(1);
    assert_eq!(server.admit(&other).1["evidence"], "cached-full-sha256");
    assert_eq!(server.admit(&third).1["evidence"], "full-sha256-this-operation");
    assert_eq!(server.ask("GET", "/v1/health", "").0, 200);
    drop(lock);
    assert_eq!(answer(waiting).0, 200);
}

#[test]
fn a_client_that_goes_away_does_not_stop_a_verification_that_others_wait_for() {
    let server = Server::start();
    server.forget(&server.digest);
    let lock = server.lock(&server.digest);
    let body = json!({"sha256": server.digest}).to_string();
    let first = server.send("POST", "/v1/admit", &body);
    server.wait_for_blocked_threads(1);
    let second = server.send("POST", "/v1/admit", &body);
    drop(first);
    assert_eq!(server.ask("GET", "/v1/health", "").0, 200);
    drop(lock);
    let (status, _, report) = answer(second);
    assert_eq!((status, &report["digest"]), (200, &json!(server.digest)));
    assert_eq!(server.admit(&server.digest).1["evidence"], "cached-full-sha256");
}

#[test]
fn a_signal_ends_it_after_the_answers_and_removes_the_socket() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut server = Server::start();
        server.forget(&server.digest);
        let lock = server.lock(&server.digest);
        let waiting = server.send("POST", "/v1/admit", &json!({"sha256": server.digest}).to_string());
        server.wait_for_blocked_threads(1);
        server.signal(signal);
        while server.socket().exists() {
            thread::sleep(Duration::from_millis(5));
        }
        drop(lock);
        assert_eq!(answer(waiting).0, 200);
        assert_eq!(server.child.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn two_requests_on_one_connection() {
    let server = Server::start();
    let mut stream = server.connect();
    for connection in ["keep-alive", "close"] {
        write!(
            stream,
            "GET /v1/health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\nConnection: {connection}\r\n\r\n",
            server.token
        )
        .unwrap();
    }
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 2, "{text}");
}
