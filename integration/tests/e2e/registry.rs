//! Payloads and capsules through a real registry: there, back on another node, and what a failure on the way leaves.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use coldsnap_integration::ctr::{COLDSNAP, Launch};
use coldsnap_integration::node::{Node, bytes_below};
use coldsnap_integration::process::{self, wait_for};
use coldsnap_integration::registry::Registry;
use coldsnap_integration::{coldsnap, guest};
use serde_json::Value;

use crate::restore::{CAPSULE, make_capsule, start};
use crate::story;

const MODEL: &str = "/tmp/published.safetensors";
const BYTES: u64 = 64 << 20;
/// The store of another node.
const OTHER: &str = "/var/lib/coldsnap/other";
/// `user:secret`, hashed with bcrypt.
const HTPASSWD: &str = "user:$2b$05$3yknzuL/CCvjOkGQrYnr..//M2vvRPPBl.4TAIIS9Orx.4JWhPM8a\n";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

fn registry(node: &Node, htpasswd: Option<&str>) -> Result<Registry> {
    Registry::start(node.logs(), htpasswd)
}

/// A capsule with one payload of 64 MiB in the node's store; the payload's digest.
fn capsule(node: &Node) -> Result<String> {
    guest::write_model(MODEL.as_ref(), usize::try_from(BYTES >> 20)?)?;
    let captured = make_capsule(node, "block", &["--model", MODEL])?;
    ensure!(captured["payload_bytes"] == BYTES, "{captured}");
    Ok(captured["workers"][0]["payload"].as_str().context("no payload")?.to_owned())
}

fn pack(store: &str, digest: &str) -> PathBuf {
    let hex = digest.trim_start_matches("sha256:");
    Path::new(store).join(format!("model-payloads/sha256/{hex}.pack"))
}

fn push(digest: &str, repository: &str, further: &[&str]) -> Result<Value> {
    coldsnap::run(["payload", "push", digest, "--to", repository, "--plain-http"].iter().chain(further))
}

/// A configuration of another node, whose only source is the repository.
fn other_node(node: &Node, repository: &str, rate: &str) -> Result<String> {
    let path = node.logs().join("other.toml");
    let text = format!(
        "[store]\nroot = \"{OTHER}\"\nreserve = 0\n[staging]\nbandwidth_limit = \"{rate}\"\n[[sources]]\nkind = \"oci\"\nrepository = \"{repository}\"\nplain_http = true\n"
    );
    fs::write(&path, text)?;
    Ok(path.to_str().context("the path is not UTF-8")?.to_owned())
}

fn stage<'a>(config: &'a str, digest: &'a str) -> [&'a str; 7] {
    ["--config", config, "payload", "stage", digest, "--bytes", "67108864"]
}

/// Bytes that a stager has written so far.
fn staged() -> Result<u64> {
    bytes_below(&Path::new(OTHER).join("model-payloads"))
}

#[test]
#[ignore = "needs the test node: make test"]
fn registry_a_payload_is_pushed_once_and_staged_by_another_node() {
    story("registry_payload", COLDSNAP, |node| {
        let registry = registry(node, None)?;
        let repository = registry.repository("models/payloads");
        let digest = capsule(node)?;

        let said = push(&digest, &repository, &["--dry-run"])?;
        ensure!(
            said["payloads"][0]["pushed_bytes"] == BYTES && said["payloads"][0]["present"] == false,
            "{said}"
        );
        ensure!(registry.stored_bytes()? == 0, "a dry run pushed something");

        let said = push(&digest, &repository, &[])?;
        ensure!(said["payloads"][0]["pushed_bytes"] == BYTES, "{said}");
        ensure!(fs::read(registry.blob(&digest))? == fs::read(pack("/var/lib/coldsnap", &digest))?);
        let tag = said["payloads"][0]["tag"].as_str().context("no tag")?.to_owned();
        let manifest = registry.get(&format!("/v2/models/payloads/manifests/{tag}"), MANIFEST)?;
        ensure!(manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json", "{manifest}");
        let layer = &manifest["layers"][0];
        ensure!(layer["mediaType"] == "application/vnd.cncf.model.weight.v1.raw", "{manifest}");
        ensure!(layer["digest"] == digest.as_str() && layer["size"] == BYTES, "{manifest}");

        let again = push(&digest, &repository, &[])?;
        ensure!(
            again["payloads"][0]["present"] == true && again["payloads"][0]["pushed_bytes"] == 0,
            "{again}"
        );
        let puts = registry.requests()?.into_iter().filter(|r| r.method == "PUT").count();
        ensure!(puts == 3, "{puts} uploads: expected the payload, a configuration and a manifest, each once");

        let config = other_node(node, &repository, "1GB")?;
        let said = coldsnap::run(stage(&config, &digest))?;
        ensure!(said["payloads"][0]["fetched"] == BYTES && said["payloads"][0]["resumed"] == 0, "{said}");
        ensure!(fs::read(pack(OTHER, &digest))? == fs::read(pack("/var/lib/coldsnap", &digest))?);
        let absent = format!("sha256:{}", "0".repeat(64));
        let error = coldsnap::fails(stage(&config, &absent))?;
        ensure!(error.kind == "PayloadUnavailable" && error.message.contains(&repository), "{error:?}");
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn registry_killed_in_the_middle_is_asked_for_the_rest_only() {
    story("registry_resume", COLDSNAP, |node| {
        let mut registry = registry(node, None)?;
        let repository = registry.repository("payloads");
        let digest = capsule(node)?;
        push(&digest, &repository, &[])?;
        let config = other_node(node, &repository, "16MB")?;
        let staging = coldsnap::command(stage(&config, &digest)).stdout(Stdio::piped()).spawn()?;
        wait_for("a part of the payload", Duration::from_secs(20), || {
            Ok(staged()?.ge(&(16 << 20)).then_some(()))
        })?;
        registry.kill()?;
        let failed = staging.wait_with_output()?;
        ensure!(!failed.status.success(), "it staged a payload from a killed registry: {failed:?}");
        let left = staged()?;
        ensure!((16 << 20..BYTES).contains(&left), "{left} bytes are left");
        ensure!(!pack(OTHER, &digest).exists());

        registry.restart()?;
        let before = registry.requests()?.len();
        let said = coldsnap::run(stage(&config, &digest))?;
        let row = &said["payloads"][0];
        let (resumed, fetched) = (row["resumed"].as_u64().unwrap_or(0), row["fetched"].as_u64().unwrap_or(0));
        ensure!(resumed > left - 4096 && resumed + fetched == BYTES, "{left} bytes were left: {said}");
        let requests = registry.requests()?;
        let asked: Vec<_> =
            requests[before..].iter().filter(|r| r.method == "GET" && r.path.contains("/blobs/")).collect();
        ensure!(asked.len() == 1 && asked[0].status == 206 && asked[0].bytes == fetched, "{asked:?}");
        ensure!(fs::read(pack(OTHER, &digest))? == fs::read(pack("/var/lib/coldsnap", &digest))?);
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn registry_with_a_flipped_byte_is_refused() {
    story("registry_flipped", COLDSNAP, |node| {
        let registry = registry(node, None)?;
        let repository = registry.repository("payloads");
        let digest = capsule(node)?;
        push(&digest, &repository, &[])?;
        let blob = fs::File::options().read(true).write(true).open(registry.blob(&digest))?;
        let mut byte = [0];
        blob.read_exact_at(&mut byte, BYTES / 2)?;
        blob.write_all_at(&[byte[0] ^ 1], BYTES / 2)?;

        let config = other_node(node, &repository, "1GB")?;
        let error = coldsnap::fails(stage(&config, &digest))?;
        ensure!(error.kind == "PayloadUnavailable" && error.message.contains(&digest), "{error:?}");
        ensure!(staged()? == 0, "something stays of wrong bytes");

        // And wrong bytes of this node never get there: the pack is hashed while it is sent.
        let wrong = fs::read(pack("/var/lib/coldsnap", &digest))?;
        let file = pack("/var/lib/coldsnap", &digest);
        let kept = fs::metadata(&file)?;
        fs::remove_file(&file)?;
        let mut wrong = wrong;
        wrong[0] ^= 1;
        fs::write(&file, wrong)?;
        fs::set_permissions(&file, kept.permissions())?;
        let error = coldsnap::fails([
            "payload",
            "push",
            &digest,
            "--to",
            &registry.repository("wrong"),
            "--plain-http",
        ])?;
        ensure!(error.kind == "DigestMismatch", "{error:?}");
        ensure!(!registry.tag("wrong", "").exists());
        Ok(())
    });
}

fn publish<'a>(reference: &'a str, output: &'a str, further: &[&'a str]) -> Vec<&'a str> {
    let all = ["publish", CAPSULE, reference, "--plain-http", "--output", output];
    all.into_iter().chain(further.iter().copied()).collect()
}

#[test]
#[ignore = "needs the test node: make test"]
fn registry_published_capsule_is_pulled_staged_and_restored() {
    story("registry_publish", COLDSNAP, |node| {
        let registry = registry(node, None)?;
        let reference = format!("{}:1", registry.repository("capsules/guest"));
        let digest = capsule(node)?;
        let output = node.logs().join("published.json");
        let output = output.to_str().context("the path is not UTF-8")?;

        let said = coldsnap::run(publish(&reference, output, &["--with-payloads", "--dry-run"]))?;
        ensure!(said["payloads"][0]["pushed_bytes"] == BYTES && said["descriptor"].is_null(), "{said}");
        let planned = said["pushed_bytes"].as_u64().context("pushed_bytes")?;
        ensure!(planned > 0 && registry.stored_bytes()? == 0 && !Path::new(output).exists(), "{said}");

        let said = coldsnap::run(publish(&reference, output, &["--with-payloads"]))?;
        let pinned = said["pinned"].as_str().context("pinned")?.to_owned();
        ensure!(said["pushed_bytes"] == planned && said["descriptor"] == output, "{said}");
        let descriptor: Value = serde_json::from_slice(&fs::read(output)?)?;
        let image = &descriptor["capsule"]["images"][0];
        ensure!(image["reference"] == pinned.as_str() && image["digest"] == said["digest"], "{image}");
        ensure!(
            pinned.ends_with(&format!("capsules/guest@{}", said["digest"].as_str().unwrap_or("?"))),
            "{pinned}"
        );
        let manifest = registry.get("/v2/capsules/guest/manifests/1", MANIFEST)?;
        ensure!(manifest["annotations"]["coldsnap.io/artifact"].is_string(), "{manifest}");

        // A second run finds everything there, and replaces no descriptor.
        ensure!(coldsnap::fails(publish(&reference, output, &[]))?.kind == "AlreadyExists");
        let second = format!("{output}.2");
        let said = coldsnap::run(publish(&reference, &second, &["--with-payloads"]))?;
        ensure!(said["present"] == true && said["pushed_bytes"] == 0, "{said}");
        ensure!(fs::read(&second)? == fs::read(output)?);

        // The node forgets everything; what it needs comes from the registry.
        node.ctr().run(["images", "rm", "--sync", CAPSULE])?;
        fs::remove_file(pack("/var/lib/coldsnap", &digest))?;
        node.ctr().run([
            "images",
            "pull",
            "--local",
            "--plain-http",
            "--snapshotter",
            "coldsnap",
            &pinned,
        ])?;
        let config = other_node(node, &registry.repository("capsules/guest"), "1GB")?;
        let said =
            coldsnap::run(["--config", &config, "--store", "/var/lib/coldsnap", "payload", "stage", output])?;
        ensure!(said["payloads"][0]["fetched"] == BYTES, "{said}");
        for id in ["r1", "r2"] {
            let launch = Launch::new(COLDSNAP, &pinned, id).flags([
                "--null-io",
                "--annotation",
                "coldsnap.io/restore=require",
            ]);
            ensure!(guest::check(&start(node, &launch)?)? == 2, "{id} was started cold");
        }
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn registry_tag_of_another_image_is_not_replaced() {
    story("registry_tag", COLDSNAP, |node| {
        let registry = registry(node, None)?;
        let reference = format!("{}:1", registry.repository("guest"));
        let output = node.logs().join("published.json");
        let output = output.to_str().context("the path is not UTF-8")?;
        make_capsule(node, "block", &[])?;
        coldsnap::run(publish(&reference, output, &[]))?;
        let second = format!("{output}.2");
        make_capsule(node, "threads", &[])?;
        ensure!(coldsnap::fails(publish(&reference, &second, &[]))?.kind == "TagExists");
        ensure!(!Path::new(&second).exists());
        let error = coldsnap::fails(["publish", guest::IMAGE, &reference, "--plain-http", "--dry-run"])?;
        ensure!(error.kind == "NotACapsule", "{error:?}");
        Ok(())
    });
}

#[test]
#[ignore = "needs the test node: make test"]
fn registry_killed_during_a_push_keeps_no_tag_and_leaves_no_descriptor() {
    story("registry_broken_push", COLDSNAP, |node| {
        let mut registry = registry(node, None)?;
        let reference = format!("{}:1", registry.repository("guest"));
        let digest = capsule(node)?;
        let output = node.logs().join("published.json");
        let output = output.to_str().context("the path is not UTF-8")?;
        // The payload, then the capsule with the payload there.
        for further in [&["--with-payloads"][..], &[]] {
            let publishing =
                coldsnap::command(publish(&reference, output, further)).stdout(Stdio::piped()).spawn()?;
            let uploads = registry.uploads("guest");
            wait_for("an upload", Duration::from_secs(30), || {
                // A directory may go away while it is read.
                Ok(bytes_below(&uploads).unwrap_or(0).gt(&0).then_some(()))
            })?;
            registry.kill()?;
            let failed = publishing.wait_with_output()?;
            let said = String::from_utf8_lossy(&failed.stdout).into_owned();
            ensure!(failed.status.code() == Some(1), "it published to a killed registry: {failed:?}");
            ensure!(!Path::new(output).exists() && !registry.tag("guest", "1").exists(), "{said}");
            ensure!(
                further.is_empty() || !tag_of(&registry, &digest).exists(),
                "a manifest without its payload: {said}"
            );
            fs::remove_dir_all(&uploads)?;
            registry.restart()?;
            if !further.is_empty() {
                push(&digest, &registry.repository("guest"), &[])?;
            }
        }
        let said = coldsnap::run(publish(&reference, output, &["--with-payloads"]))?;
        ensure!(said["present"] == false && said["payloads"][0]["present"] == true, "{said}");
        ensure!(Path::new(output).exists() && registry.tag("guest", "1").exists());
        Ok(())
    });
}

fn tag_of(registry: &Registry, digest: &str) -> PathBuf {
    registry.tag("guest", &format!("coldsnap-{}", digest.trim_start_matches("sha256:")))
}

#[test]
#[ignore = "needs the test node: make test"]
fn registry_that_wants_credentials_gets_them_from_the_file() {
    story("registry_credentials", COLDSNAP, |node| {
        let registry = registry(node, Some(HTPASSWD))?;
        let repository = registry.repository("guest");
        let digest = capsule(node)?;
        let credentials = node.logs().join("credentials.json");
        // base64 of user:secret
        let text = format!(r#"{{"auths": {{"{}": {{"auth": "dXNlcjpzZWNyZXQ="}}}}}}"#, registry.address());
        fs::write(&credentials, text)?;
        let credentials = credentials.to_str().context("the path is not UTF-8")?;

        let error = coldsnap::fails(["payload", "push", &digest, "--to", &repository, "--plain-http"])?;
        ensure!(error.kind == "RegistryDenied", "{error:?}");
        push(&digest, &repository, &["--credentials", credentials])?;
        let output = node.logs().join("published.json");
        let output = output.to_str().context("the path is not UTF-8")?;
        let reference = format!("{repository}:1");
        coldsnap::run(publish(&reference, output, &["--credentials", credentials]))?;

        let config = other_node(node, &repository, "1GB")?;
        let error = coldsnap::fails(stage(&config, &digest))?;
        ensure!(error.message.contains("denied"), "{error:?}");
        let mut text = fs::read_to_string(&config)?;
        text += &format!("credentials_file = \"{credentials}\"\n");
        fs::write(&config, text)?;
        let mut staging = coldsnap::command(stage(&config, &digest));
        let out = process::output(staging.env("COLDSNAP_LOG", "trace"))?;
        ensure!(out.status.success(), "{out:?}");
        let log = String::from_utf8_lossy(&out.stderr);
        ensure!(!log.contains("dXNlcjpzZWNyZXQ") && !log.contains("secret"), "a secret is in the log: {log}");
        Ok(())
    });
}
