//! The real binary on a store: what comes in, what goes, what stays, and what the check says about it.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use coldsnap::digest::Digest;
use coldsnap::store::NodeStore;
use serde_json::{Value, json};
use tempfile::TempDir;

struct Node {
    dir: TempDir,
    store: NodeStore,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = NodeStore::open(dir.path().join("store")).unwrap().with_reserve(0);
        fs::write(dir.path().join("config.toml"), "[store]\nreserve = 0\n").unwrap();
        Self { dir, store }
    }

    fn config(&self, text: &str) {
        fs::write(self.dir.path().join("config.toml"), text).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// One page each, verified in this order.
    fn payloads(&self, n: u8) -> Vec<Digest> {
        let publish = |n| self.store.publish_pack(&[vec![&[n + 1; 100][..]]], &mut |_| ()).unwrap();
        (0..n).map(|n| *publish(n).payload.digest()).collect()
    }

    fn lease(&self, digest: &Digest, owner: &str) {
        let payload = self.store.admit(digest, None, &mut |_| ()).unwrap();
        self.store.lease(&payload, owner).unwrap();
    }

    fn command(&self, args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_coldsnap"))
            .arg("payload")
            .args(args)
            .arg("--config")
            .arg(self.path("config.toml"))
            .env("COLDSNAP_STORE", self.store.root())
            .output()
            .unwrap()
    }

    fn json(&self, args: &[&str], status: i32) -> Value {
        let output = self.command(&[args, &["--json"]].concat());
        assert_eq!(output.status.code(), Some(status), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"))
    }

    #[track_caller]
    fn succeeds(&self, args: &[&str]) -> Value {
        self.json(args, 0)
    }

    #[track_caller]
    fn fails(&self, args: &[&str], kind: &str) -> String {
        // What clap lets through and the command finds wrong is wrong usage all the same.
        let error = self.json(args, if kind == "Usage" { 2 } else { 1 })["error"].clone();
        assert_eq!(error["kind"], kind, "{error}");
        error["message"].as_str().unwrap().to_owned()
    }

    #[track_caller]
    fn text(&self, args: &[&str]) -> String {
        let output = self.command(args);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn here(&self) -> Vec<Digest> {
        self.store.list().unwrap().into_iter().map(|payload| payload.digest).collect()
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn digests(list: &Value) -> Vec<Digest> {
    list.as_array().unwrap().iter().map(|row| row["digest"].as_str().unwrap().parse().unwrap()).collect()
}

#[test]
fn ls_shows_leases_pins_and_last_use() {
    let node = Node::new();
    let payloads = node.payloads(2);
    node.lease(&payloads[0], "a");
    node.succeeds(&["pin", &payloads[1].to_string()]);
    let listing = node.succeeds(&["ls"]);
    let row = |digest: &Digest| {
        let rows = listing["payloads"].as_array().unwrap();
        rows.iter().find(|row| row["digest"] == digest.to_string()).unwrap().clone()
    };
    let (first, second) = (row(&payloads[0]), row(&payloads[1]));
    assert_eq!((&first["leases"], &first["pinned"]), (&json!(1), &json!(false)));
    assert_eq!((&second["leases"], &second["pinned"]), (&json!(0), &json!(true)));
    assert!(first["last_used_unix_ns"].as_u64() > second["last_used_unix_ns"].as_u64(), "a lease is use");
    let plain = node.text(&["ls"]);
    assert!(plain.contains("PINNED") && plain.contains("LAST USED") && plain.contains("verified"), "{plain}");
    let year = plain.lines().nth(1).unwrap().split_whitespace().nth(4).unwrap();
    assert!(year.starts_with("20") && year.ends_with('Z'), "{plain}");
}

#[test]
fn pin_and_unpin_are_idempotent_and_say_what_changed() {
    let node = Node::new();
    let digest = node.payloads(1)[0].to_string();
    let changed = |args: &[&str]| node.succeeds(args)["payloads"][0].clone();
    assert_eq!(changed(&["pin", &digest, "--reason", "demo"])["changed"], true);
    assert_eq!(changed(&["pin", &digest]), json!({"digest": digest, "pinned": true, "changed": false}));
    assert_eq!(node.store.pins().unwrap()[0].reason.as_deref(), Some("demo"));
    assert!(node.fails(&["rm", &digest], "Pinned").contains("demo"));
    assert!(node.text(&["unpin", &digest]).ends_with("not pinned\n"));
    assert_eq!(changed(&["unpin", &digest]), json!({"digest": digest, "pinned": false, "changed": false}));
    node.fails(&["pin", &Digest::of(b"absent").to_string()], "PayloadMissing");
    assert_eq!(node.command(&["pin"]).status.code(), Some(2));
    assert_eq!(node.command(&["pin", "sha256:xyz"]).status.code(), Some(2));
}

#[test]
fn rm_refuses_what_is_leased_whoever_asks() {
    let node = Node::new();
    let payloads = node.payloads(2);
    let digest = payloads[0].to_string();
    node.lease(&payloads[0], "snapshot/default/7/web");
    for args in [&["rm", &digest][..], &["rm", &digest, "--force"]] {
        assert!(node.fails(args, "Leased").contains("snapshot/default/7/web"));
    }
    let leases = node.succeeds(&["leases"]);
    assert_eq!(leases["leases"][0]["owner"], "snapshot/default/7/web");
    assert!(node.text(&["leases"]).contains("snapshot/default/7/web"));
    let released = node.succeeds(&["release", "snapshot/default/7/web"]);
    assert_eq!(released, json!({"owner": "snapshot/default/7/web", "released": 1}));
    assert_eq!(node.succeeds(&["release", "nobody"])["released"], 0);
    assert_eq!(node.succeeds(&["rm", &digest])["removed"], json!([{"digest": digest, "bytes": 4096}]));
    assert_eq!(node.here(), payloads[1..]);
    node.fails(&["rm", &digest], "PayloadMissing");
    node.succeeds(&["pin", &payloads[1].to_string()]);
    node.succeeds(&["rm", &payloads[1].to_string(), "--force"]);
    assert!(node.here().is_empty() && node.succeeds(&["fsck"])["findings"] == json!([]));
}

#[test]
fn gc_evicts_by_the_watermarks_of_the_configuration() {
    let node = Node::new();
    let payloads = node.payloads(5);
    node.config("[store]\nreserve = 0\nhigh_watermark = \"16KiB\"\nlow_watermark = 8192\n");
    node.lease(&payloads[0], "a");
    node.store.pin(&payloads[1], None).unwrap();
    let would = node.succeeds(&["gc", "--dry-run"]);
    assert_eq!(digests(&would["evicted"]), payloads[2..]);
    assert_eq!((&would["dry_run"], &would["usage"]["payload_bytes"]), (&json!(true), &json!(5 * 4096)));
    let did = node.succeeds(&["gc"]);
    assert_eq!(did["evicted"], would["evicted"]);
    assert_eq!(did["usage"]["payload_bytes"], 8192);
    assert_eq!((&did["high_watermark"], &did["low_watermark"]), (&json!("16KiB"), &json!("8KiB")));
    assert_eq!(digests(&node.succeeds(&["gc"])["evicted"]), []);
    // Down to nothing, as far as that goes.
    let report = node.succeeds(&["gc", "--high", "4096", "--low", "0"]);
    assert_eq!((&report["evicted"], &report["missing_bytes"]), (&json!([]), &json!(8192)));
    assert!(node.text(&["gc", "--high", "1", "--low", "0"]).contains("leased, pinned or in use"));
}

#[test]
fn gc_without_watermarks_removes_only_what_writers_left() {
    let node = Node::new();
    let payloads = node.payloads(2);
    let left = node.store.root().join("model-payloads/sha256/.unnamed.pack.1-2.materializing");
    fs::write(&left, "x").unwrap();
    assert_eq!(node.succeeds(&["gc", "--dry-run"])["temporaries_removed"], 0);
    assert!(left.exists());
    let report = node.succeeds(&["gc"]);
    assert_eq!((&report["temporaries_removed"], &report["evicted"]), (&json!(1), &json!([])));
    assert!(!left.exists() && node.here().len() == 2);
    assert!(node.text(&["gc"]).contains("no watermarks"));
    assert_eq!(digests(&node.succeeds(&["gc", "--all-unused"])["evicted"]), payloads);
}

#[test]
fn gc_with_unusable_limits_is_wrong_usage_or_an_error() {
    let node = Node::new();
    for args in [
        &["gc", "--high", "1"][..],
        &["gc", "--low", "1"],
        &["gc", "--high", "x", "--low", "1"],
        &["gc", "--high", "101%", "--low", "1%"],
        &["gc", "--all-unused", "--high", "2", "--low", "1"],
    ] {
        assert_eq!(node.command(args).status.code(), Some(2), "{args:?}");
    }
    node.fails(&["gc", "--high", "1", "--low", "2"], "Malformed");
    node.fails(&["gc", "--high", "50%", "--low", "2"], "Malformed");
    node.config("[store]\nhigh_watermark = 1\n");
    assert!(node.fails(&["gc"], "Malformed").contains("low_watermark"));
    let output = Command::new(env!("CARGO_BIN_EXE_coldsnap"))
        .args(["payload", "ls", "--config", "/nonexistent/config.toml"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn the_store_of_the_configuration_is_used_unless_another_is_named() {
    let node = Node::new();
    let configured = node.path("configured");
    node.config(&format!("[store]\nroot = {:?}\n", text(&configured)));
    assert_eq!(node.succeeds(&["ls"])["store"], text(node.store.root()), "the environment counts more");
    let output = Command::new(env!("CARGO_BIN_EXE_coldsnap"))
        .args(["payload", "ls", "--json"])
        .env("COLDSNAP_CONFIG", node.path("config.toml"))
        .env_remove("COLDSNAP_STORE")
        .output()
        .unwrap();
    let listing: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(listing["store"], text(&configured));
    assert!(!configured.exists(), "looking creates nothing");
}

#[test]
fn payloads_go_from_store_to_store() {
    let (from, to) = (Node::new(), Node::new());
    let payloads = from.payloads(3);
    let share = from.path("share");
    let exported = from.succeeds(&["export", "--all", "--to", text(&share)]);
    assert_eq!(exported["exported"].as_array().unwrap().len(), 3);
    assert!(exported["exported"].as_array().unwrap().iter().all(|row| row["present"] == false));
    assert!(from.text(&["export", "--all", "--to", text(&share)]).contains("present"));
    let imported = to.succeeds(&["import", text(&share)]);
    assert_eq!(imported["failed"], json!([]));
    let mut sorted = payloads.clone();
    sorted.sort();
    assert_eq!((digests(&imported["imported"]), to.here()), (sorted.clone(), sorted));
    assert!(imported["imported"].as_array().unwrap().iter().all(|row| row["arrival"] == "copied"));
    // From the other store itself, and one file.
    assert!(to.text(&["import", text(from.store.root())]).contains("present"));
    let file = from.path("one");
    from.succeeds(&["export", &payloads[0].to_string(), "--file", text(&file)]);
    let moved = to.succeeds(&["import", "--move", text(&file), "--sha256", &payloads[0].to_string()]);
    assert_eq!(moved["imported"][0]["arrival"], "present");
    assert!(!file.exists());
    assert_eq!(to.succeeds(&["fsck", "--full"])["findings"], json!([]));
}

#[test]
fn import_takes_the_good_files_and_reports_the_others() {
    let (from, to) = (Node::new(), Node::new());
    let payloads = from.payloads(2);
    let share = from.path("share");
    from.succeeds(&["export", "--all", "--to", text(&share)]);
    let bad = share.join(payloads[0].payload_path());
    fs::set_permissions(&bad, fs::Permissions::from_mode(0o644)).unwrap();
    fs::write(&bad, [9; 4096]).unwrap();
    let report = to.json(&["import", text(&share)], 1);
    assert_eq!(digests(&report["imported"]), payloads[1..]);
    assert_eq!(report["failed"][0]["error"]["kind"], "DigestMismatch");
    assert_eq!(report["failed"][0]["path"], text(&bad));
    assert_eq!(to.here(), payloads[1..]);
    to.fails(&["import", text(&bad)], "DigestMismatch");
    to.fails(&["import", text(&from.path("absent"))], "Io");
    to.fails(&["import", text(&share), "--sha256", &payloads[0].to_string()], "Usage");
    fs::create_dir(from.path("empty")).unwrap();
    to.fails(&["import", text(&from.path("empty"))], "NotAPack");
}

#[test]
fn export_needs_payloads_and_one_place() {
    let node = Node::new();
    let payloads = node.payloads(2);
    let (first, second) = (payloads[0].to_string(), payloads[1].to_string());
    for args in [
        &["export", "--all"][..],
        &["export", "--to", "x"],
        &["export", &first, "--to", "x", "--file", "y"],
        &["export", &first, "--all", "--to", "x"],
        &["export", "--all", "--file", "y"],
    ] {
        assert_eq!(node.command(args).status.code(), Some(2), "{args:?}");
    }
    let file = node.path("copy");
    node.fails(&["export", &first, &second, "--file", text(&file)], "Usage");
    node.succeeds(&["export", &first, "--file", text(&file)]);
    node.fails(&["export", &second, "--file", text(&file)], "DestinationExists");
    node.fails(&["export", &Digest::of(b"").to_string(), "--file", text(&file)], "PayloadMissing");
}

#[test]
fn an_import_makes_room_by_the_configured_watermarks() {
    let (from, to) = (Node::new(), Node::new());
    from.payloads(4);
    let old = to.payloads(2);
    assert!(from.here().contains(&old[0]) && from.here().contains(&old[1]));
    to.config("[store]\nreserve = 0\nhigh_watermark = 8192\nlow_watermark = 4096\n");
    to.succeeds(&["import", text(from.store.root())]);
    assert!(to.here().len() <= 2, "{:?}", to.here());
}

#[test]
fn fsck_exits_with_1_when_the_store_is_inconsistent_and_with_0_when_it_is_not() {
    let node = Node::new();
    let payloads = node.payloads(2);
    node.lease(&payloads[0], "a");
    let report = node.succeeds(&["fsck"]);
    assert_eq!((&report["consistent"], &report["payloads"]), (&json!(true), &json!(2)));
    assert_eq!((&report["leases"], &report["bytes_hashed"]), (&json!(1), &json!(0)));
    assert_eq!(node.succeeds(&["fsck", "--full"])["bytes_hashed"], 8192);

    let stale = node.store.root().join("model-payloads/sha256/.unnamed.pack.1-2.materializing");
    fs::write(&stale, "x").unwrap();
    let plain = node.text(&["fsck"]);
    assert!(plain.contains("warning: ") && plain.contains("payload gc"), "{plain}");
    assert_eq!(node.succeeds(&["fsck", "--repair"])["findings"][0]["repaired"], true);
    assert!(!stale.exists());

    fs::remove_file(node.store.payload_path(&payloads[0])).unwrap();
    let report = node.json(&["fsck"], 1);
    assert_eq!(report["consistent"], false);
    let kinds: Vec<_> =
        report["findings"].as_array().unwrap().iter().map(|row| row["kind"].clone()).collect();
    assert!(kinds.contains(&json!("LeasedMissing")), "{report}");
    let output = node.command(&["fsck"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains("[Inconsistent]"));
    node.succeeds(&["release", "a"]);
    node.succeeds(&["fsck", "--repair"]);
    assert_eq!(node.succeeds(&["fsck"])["findings"], json!([]));
}
