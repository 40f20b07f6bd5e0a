//! Payloads and a registry that does everything that a registry may do, and some things that it must not. What real
//! registries do is in the stories of the test node.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(feature = "sources")]

#[path = "hub/http.rs"]
#[allow(dead_code, reason = "a part of it is for hubs")]
mod http;

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::sync::{Arc, Mutex};

use coldsnap::config::{Config, SourceConfig};
use coldsnap::digest::Digest;
use coldsnap::registry::{Access, Registry};
use coldsnap::source::{FetchError, OciSource, Source, Wanted, sources_for};
use coldsnap::store::NodeStore;
use http::{Request, Response, Server};

/// What a server saw: method, path, range, authorization.
type Seen = Arc<Mutex<Vec<(String, String, Option<String>, Option<String>)>>>;

fn serve(answer: impl Fn(&Request) -> Response + Send + Sync + 'static) -> (Server, Seen) {
    let seen = Seen::default();
    let noted = seen.clone();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Server::start(listener, move |request| {
        let header = |name| request.header(name).map(str::to_owned);
        noted.lock().unwrap().push((
            request.method.clone(),
            request.path.clone(),
            header("range"),
            header("authorization"),
        ));
        answer(&request)
    });
    (server, seen)
}

fn payload() -> (Vec<u8>, Wanted) {
    let bytes: Vec<u8> = (0..100_000_u32).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    let wanted = Wanted { digest: Digest::of(&bytes), bytes: 100_000 };
    (bytes, wanted)
}

/// The part that a range asks for.
fn partial(request: &Request, bytes: &[u8]) -> Response {
    let range = request.header("range").and_then(|text| text.strip_prefix("bytes=")?.strip_suffix('-'));
    let from: usize = range.unwrap().parse().unwrap();
    Response { body: bytes[from..].to_vec(), ..Response::new(206) }
}

fn source(server: &Server, access: Option<&std::path::Path>) -> OciSource {
    OciSource::new(&format!("{}/models/x", server.address), true, access.map(Into::into)).unwrap()
}

fn fetch(source: &OciSource, wanted: &Wanted, from: u64) -> (Vec<u8>, Result<(), FetchError>) {
    let mut got = Vec::new();
    let result = source.fetch(wanted, from, &mut |chunk| {
        got.extend_from_slice(chunk);
        Ok(())
    });
    (got, result)
}

#[test]
fn a_token_is_had_for_the_credentials_and_the_storage_gets_neither() {
    let (bytes, wanted) = payload();
    let content = bytes.clone();
    let (storage, at_storage) = serve(move |request| partial(request, &content));
    let place = format!("http://{}/bucket/blob?signature=hidden", storage.address);
    let (server, at_registry) = serve(move |request| match request.path.as_str() {
        "/token" => Response::json(&serde_json::json!({"token": "opaque", "expires_in": 60})),
        _ if request.header("authorization") != Some("Bearer opaque") => {
            let host = request.header("host").unwrap();
            let challenge = format!("Bearer realm=\"http://{host}/token\",service=\"registry\"");
            Response::new(401).with("WWW-Authenticate", challenge)
        }
        path if path.contains("/blobs/") => Response::new(307).with("Location", &place),
        _ => Response::new(200),
    });
    let dir = tempfile::tempdir().unwrap();
    let credentials = dir.path().join("config.json");
    // base64 of user:secret
    let text = format!(r#"{{"auths": {{"{}": {{"auth": "dXNlcjpzZWNyZXQ="}}}}}}"#, server.address);
    fs::write(&credentials, text).unwrap();

    let (got, result) = fetch(&source(&server, Some(&credentials)), &wanted, 4096);
    result.unwrap();
    assert_eq!(got, bytes[4096..]);
    let at_registry = at_registry.lock().unwrap();
    let token = at_registry.iter().find(|seen| seen.1 == "/token").unwrap();
    assert_eq!(token.3.as_deref(), Some("Basic dXNlcjpzZWNyZXQ="));
    let blob = at_registry.last().unwrap();
    assert_eq!(blob.1, format!("/v2/models/x/blobs/{}", wanted.digest));
    let expected = ("GET".to_owned(), "/bucket/blob".to_owned(), Some("bytes=4096-".to_owned()), None);
    assert_eq!(*at_storage.lock().unwrap(), [expected]);
}

#[test]
fn each_answer_has_its_kind_and_no_message_shows_a_signature() {
    let (_, wanted) = payload();
    for (status, body, kind) in [
        (404, r#"{"errors": [{"code": "BLOB_UNKNOWN", "message": "no such blob"}]}"#, "NotFound"),
        (401, "", "Denied"),
        (403, r#"{"errors": [{"code": "DENIED", "message": "not yours"}]}"#, "Denied"),
        (429, "slowly", "Unavailable"),
        (503, "<html>\u{1b}[31m</html>", "Unavailable"),
        (416, "", "Refused"),
        (204, "", "Refused"),
    ] {
        let (storage, _) = serve(move |_| Response { body: body.into(), ..Response::new(status) });
        let place = format!("http://{}/blob?signature=hidden", storage.address);
        let (server, _) = serve(move |request| match request.path.contains("/blobs/") {
            true => Response::new(307).with("Location", &place),
            false => Response::new(200),
        });
        let (got, result) = fetch(&source(&server, None), &wanted, 0);
        let error = result.unwrap_err();
        assert!(format!("{error:?}").starts_with(kind), "{status}: {error:?}");
        let text = error.to_string();
        assert!(!text.contains("hidden") && !text.contains('\u{1b}') && got.is_empty(), "{status}: {text}");
    }
    let (server, _) = serve(|_| Response::new(200));
    let gone = source(&server, None);
    drop(server);
    let (_, result) = fetch(&gone, &wanted, 0);
    assert!(matches!(result, Err(FetchError::Unavailable(text)) if text.contains("refused")));
}

#[test]
fn a_registry_without_ranges_is_asked_from_the_beginning() {
    let (bytes, wanted) = payload();
    let content = bytes.clone();
    let (server, _) = serve(move |_| Response { body: content.clone(), ..Response::new(200) });
    let source = source(&server, None);
    let (got, result) = fetch(&source, &wanted, 4096);
    assert!(matches!(result, Err(FetchError::NoRange { from: 4096 })) && got.is_empty());
    let (got, result) = fetch(&source, &wanted, 0);
    result.unwrap();
    assert_eq!(got, bytes);
}

#[test]
fn a_blob_of_another_size_is_refused_before_a_byte_is_taken() {
    let (bytes, wanted) = payload();
    let (server, _) = serve(move |request| match request.path.contains("/blobs/") {
        true => partial(request, &bytes[..99_999]),
        false => Response::new(200),
    });
    let (got, result) = fetch(&source(&server, None), &wanted, 10);
    assert!(matches!(result, Err(FetchError::Refused(text)) if text.contains("99999")));
    assert!(got.is_empty());
}

#[test]
fn what_came_before_a_broken_connection_is_delivered() {
    let (bytes, wanted) = payload();
    let content = bytes.clone();
    let (server, _) = serve(move |request| match request.path.contains("/blobs/") {
        true => Response { cut: Some(50_000), ..partial(request, &content) },
        false => Response::new(200),
    });
    let (got, result) = fetch(&source(&server, None), &wanted, 0);
    assert!(matches!(result, Err(FetchError::Unavailable(_))), "{result:?}");
    assert_eq!(got, bytes[..50_000]);
}

#[test]
fn nobody_waits_for_a_registry_once_the_payload_is_not_wanted() {
    let (_, wanted) = payload();
    // It accepts connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    let source = OciSource::new(&format!("{address}/x"), true, None).unwrap();
    let result = source.fetch(&wanted, 0, &mut |_| Err(FetchError::Cancelled));
    assert!(matches!(result, Err(FetchError::Cancelled)), "{result:?}");
}

#[test]
fn a_configured_registry_is_a_source() {
    let config = |repository: &str| Config {
        sources: vec![SourceConfig::Oci {
            repository: repository.to_owned(),
            plain_http: false,
            credentials_file: None,
        }],
        ..Config::default()
    };
    let sources = sources_for(&config("registry.example/models"), None).unwrap();
    assert_eq!(sources[0].name(), "registry registry.example/models");
    let error = sources_for(&config("models"), None).unwrap_err();
    assert_eq!(error.kind(), "Source");
    assert!(error.to_string().contains("HOST[:PORT]/NAME"), "{error}");
}

#[test]
fn a_pack_that_changed_since_it_was_admitted_is_not_pushed() {
    let dir = tempfile::tempdir().unwrap();
    let store = NodeStore::open(dir.path()).unwrap().with_reserve(0);
    let pack = store.publish_pack(&[vec![&[7; 3 << 20][..]]], &mut |_| ()).unwrap();
    let payload = pack.payload;
    fs::set_permissions(payload.path(), fs::Permissions::from_mode(0o644)).unwrap();
    let file = fs::File::options().write(true).open(payload.path()).unwrap();
    file.write_all_at(&[8], 5).unwrap();

    let (server, seen) = serve(|request| match request.method.as_str() {
        "HEAD" => Response::new(404),
        "POST" => Response::new(202).with("Location", "/v2/models/x/blobs/uploads/1"),
        "PUT" => Response::new(201).with("Location", "/v2/models/x/done"),
        _ if request.path.contains("/manifests/") => Response::new(404),
        _ => Response::new(200),
    });
    let repository = format!("{}/models/x", server.address).parse().unwrap();
    let access = Access { plain_http: true, credentials_file: None };
    let registry = Registry::connect(&repository, &access).unwrap();
    let mut sent = 0;
    let error = registry.push_payload(&payload, &mut |n| sent += n).unwrap_err();
    assert_eq!(error.kind(), "DigestMismatch", "{error}");
    assert!(sent < payload.bytes(), "all {sent} bytes were sent");
    // A request that does not arrive whole is none.
    let seen = seen.lock().unwrap();
    assert!(seen.iter().any(|request| request.0 == "POST"));
    assert!(seen.iter().all(|request| request.0 != "PUT"), "{seen:?}");
}
