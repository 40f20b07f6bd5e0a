//! Manifests and records of other implementations: what is accepted, what is kept, and one change per rule that must be
//! refused by its kind.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use coldsnap::extent::LayoutError;
use coldsnap::format::FormatError;
use coldsnap::format::canonical_json;
use coldsnap::format::native_manifest::NativeManifest;
use coldsnap::format::recovery_manifest::RecoveryManifest;
use coldsnap::format::validation::ValidationRecord;
use serde_json::{Value, json};

const PADDED: &[u8] = include_bytes!("vectors/native-manifest.json");
const CONTIGUOUS: &[u8] = include_bytes!("samples/native-manifest-contiguous.json");
const RECOVERY: &[u8] = include_bytes!("samples/recovery-manifest.json");

fn value(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

#[test]
fn both_residual_layouts_of_other_implementations_are_accepted_and_written_alike() {
    for sample in [PADDED, CONTIGUOUS] {
        let manifest = NativeManifest::parse(sample).unwrap();
        assert_eq!(manifest.layout().unwrap().pieces().len(), 4);
        let written = manifest.to_bytes().unwrap();
        assert_eq!(
            String::from_utf8(written).unwrap().trim_end(),
            std::str::from_utf8(sample).unwrap().trim_end()
        );
    }
}

#[test]
fn a_model_execution_state_keeps_every_value() {
    let written = NativeManifest::parse(CONTIGUOUS).unwrap().to_bytes().unwrap();
    let state = |bytes: &[u8]| {
        let text = std::str::from_utf8(bytes).unwrap();
        let start = text.find("\"model_execution_state\": ").unwrap();
        let end = text.find("\"model_weight_bytes\"").unwrap();
        text[start..end].to_owned()
    };
    assert_eq!(state(&written), state(CONTIGUOUS));
    // 128-bit integers, which serde_json alone would turn into floats.
    assert!(state(&written).contains("35399562948360463058890781895381311971"));
    let recovery =
        RecoveryManifest::from_native(&NativeManifest::parse(CONTIGUOUS).unwrap(), model_source(), vec![]);
    assert!(state(&recovery.unwrap().to_bytes().unwrap()).contains("35399562948360463058890781895381311971"));
}

fn model_source() -> Option<coldsnap::format::recovery_manifest::ModelSource> {
    RecoveryManifest::parse(RECOVERY).unwrap().model_source
}

#[test]
fn what_others_add_to_a_manifest_or_record_is_tolerated_and_not_kept() {
    for sample in [PADDED, RECOVERY, include_bytes!("samples/validation-record.json")] {
        let mut more = value(sample);
        more["added_by_another"] = json!({"x": [1]});
        let more = more.to_string();
        let written = match value(sample)["weight_source"].as_str() {
            Some("split-native") => NativeManifest::parse(more.as_bytes()).unwrap().to_bytes().unwrap(),
            Some(_) => RecoveryManifest::parse(more.as_bytes()).unwrap().to_bytes().unwrap(),
            None => ValidationRecord::parse(more.as_bytes()).unwrap().to_bytes().unwrap(),
        };
        assert_eq!(value(&written), value(sample));
    }
}

fn native(value: &Value) -> Result<NativeManifest, FormatError> {
    NativeManifest::parse(value.to_string().as_bytes())
}

fn host_native() -> Value {
    let mut v = value(PADDED);
    v["kind"] = json!("coldsnap-host-process");
    v["page_size"] = json!(4096);
    for list in ["model_weight_extents", "residual_extents"] {
        v[list].as_array_mut().unwrap().iter_mut().for_each(|e| e["placement"] = json!("copied"));
    }
    v
}

#[test]
fn every_rule_of_a_native_manifest_has_its_kind_and_names_its_field() {
    let (padded, contiguous, host) = (value(PADDED), value(CONTIGUOUS), host_native());
    let base = padded["entries"][0]["ptr"].as_u64().unwrap();
    let entry = |size: u64| json!([{"ptr": base, "size": size, "tag": "weights"}]);
    for (sample, pointer, wrong, kind, named) in [
        // Coverage.
        (&padded, "/entries", entry(20480), "Gap", "0x7f0000005000"),
        (&padded, "/entries/0/size", json!(0), "Malformed", "entries[0]"),
        (&padded, "/entries/0/ptr", json!(0), "Malformed", "entries[0]"),
        (&padded, "/entries/0/tag", json!("kv_cache"), "Malformed", "model_weight_extents[0].allocation_ptr"),
        (&padded, "/model_weight_extents/0/size", json!(0), "Malformed", "model_weight_extents[0]"),
        (&padded, "/model_weight_extents/0/ptr", json!(0), "Malformed", "model_weight_extents[0]"),
        (&padded, "/model_weight_extents/1/size", json!(4096), "Gap", "gap"),
        (&padded, "/model_weight_extents/1/size", json!(4098), "Overlap", "residual_extents[0]"),
        (&padded, "/model_weight_extents/1/size", json!(u64::MAX), "Malformed", "model_weight_extents[1]"),
        (&padded, "/residual_extents/1/size", json!(8065), "OutsideAllocation", "residual_extents[1]"),
        (
            &padded,
            "/residual_extents/0/allocation_ptr",
            json!(base + 1),
            "OutsideAllocation",
            "residual_extents[0]",
        ),
        (&padded, "/residual_extents", json!([]), "Gap", "gap"),
        // Sums.
        (&padded, "/allocation_bytes", json!(16385), "SizeChanged", "allocation_bytes"),
        (&padded, "/model_weight_bytes", json!(4224), "SizeChanged", "model_weight_bytes"),
        (&padded, "/residual_bytes", json!(12160), "SizeChanged", "residual_bytes"),
        // Pack.
        (
            &padded,
            "/model_weight_extents/1/offset",
            json!(8192),
            "Malformed",
            "model_weight_extents[1].offset",
        ),
        (
            &padded,
            "/model_weight_extents/0/offset",
            json!(4096),
            "Malformed",
            "model_weight_extents[0].offset",
        ),
        (
            &padded,
            "/model_weight_extents/0/sha256",
            json!("f".repeat(64)),
            "Malformed",
            "model_weight_extents[1]",
        ),
        (&padded, "/model_blob_bytes", json!(16384), "SizeChanged", "model_blob_bytes"),
        // Residual, both layouts.
        (&padded, "/residual_extents/1/offset", json!(4097), "Malformed", "residual_extents[1].offset"),
        (&padded, "/residual_extents/1/offset", json!(0), "Malformed", ".offset"),
        (&padded, "/residual_blob_bytes", json!(8192), "SizeChanged", "residual_blob_bytes"),
        (&contiguous, "/residual_extents/1/offset", json!(4096), "Malformed", "residual_extents[1].offset"),
        (&contiguous, "/residual_extents/1/offset", json!(4094), "Malformed", "residual_extents[1].offset"),
        (&contiguous, "/residual_blob_bytes", json!(12160), "SizeChanged", "residual_blob_bytes"),
        // Identities.
        (&padded, "/blob_stat/bytes", json!(1), "SizeChanged", "blob_stat.bytes"),
        (&padded, "/model_blob_stat/bytes", json!(1), "SizeChanged", "model_blob_stat.bytes"),
        (&padded, "/residual_blob_stat/bytes", json!(1), "SizeChanged", "residual_blob_stat.bytes"),
        // Ours.
        (&host, "/page_size", json!(null), "Malformed", "page_size"),
        (&host, "/page_size", json!(2048), "Malformed", "page_size"),
        (&host, "/page_size", json!(12288), "Malformed", "page_size"),
        (&host, "/residual_extents/0/placement", json!(null), "Malformed", "residual_extents[0].placement"),
        (
            &host,
            "/residual_extents/0/placement",
            json!("mapped"),
            "Malformed",
            "residual_extents[0].placement",
        ),
        (&host, "/kind", json!("vllm-live-process-cumem"), "Malformed", "page_size"),
    ] {
        let mut changed = sample.clone();
        *changed.pointer_mut(pointer).unwrap() = wrong;
        let error = native(&changed).unwrap().layout().unwrap_err();
        assert_eq!(error.kind(), kind, "{pointer}: {error}");
        assert!(error.to_string().contains(named), "{pointer}: {named} is not in: {error}");
    }
    native(&padded).unwrap().layout().unwrap();
    native(&host).unwrap().layout().unwrap();
}

#[test]
fn a_page_size_or_placement_belongs_to_the_host_kind_only() {
    let mut changed = value(PADDED);
    changed["page_size"] = json!(4096);
    assert!(native(&changed).unwrap().layout().unwrap_err().to_string().contains("page_size"));
    let mut changed = value(PADDED);
    changed["residual_extents"][1]["placement"] = json!("copied");
    let error = native(&changed).unwrap().layout().unwrap_err().to_string();
    assert!(error.contains("residual_extents[1].placement"), "{error}");
}

#[test]
fn a_gap_between_listed_pieces_is_legal_only_in_a_shared_blob() {
    let mut shared = value(PADDED);
    shared["residual_extents"][1]["offset"] = json!(40960);
    shared["residual_blob_bytes"] = json!(65536);
    shared["residual_blob_stat"]["bytes"] = json!(65536);
    native(&shared).unwrap().layout().unwrap();
}

fn recovery(value: &Value) -> RecoveryManifest {
    RecoveryManifest::parse(value.to_string().as_bytes()).unwrap()
}

#[test]
fn a_recovery_manifest_of_another_implementation_is_read_and_written_alike() {
    let manifest = RecoveryManifest::parse(RECOVERY).unwrap();
    manifest.layout().unwrap();
    manifest.check_against(&NativeManifest::parse(PADDED).unwrap()).unwrap();
    assert_eq!(String::from_utf8(manifest.to_bytes().unwrap()), String::from_utf8(RECOVERY.to_vec()));
}

#[test]
fn every_rule_of_a_recovery_manifest_has_its_kind_and_names_its_field() {
    for (pointer, wrong, kind, named) in [
        ("/model_weight_extents/1/size", json!(4096), "Gap", "gap"),
        ("/residual_bytes", json!(1), "SizeChanged", "residual_bytes"),
        ("/model_weight_bytes", json!(1), "SizeChanged", "model_weight_bytes"),
        ("/allocation_bytes", json!(1), "SizeChanged", "allocation_bytes"),
        ("/residual_blob_stat/bytes", json!(1), "SizeChanged", "residual_blob_stat.bytes"),
        ("/residual_extents/0/offset", json!(1), "Malformed", "residual_extents[0].offset"),
        ("/model_source", json!(null), "Malformed", "model_source"),
        (
            "/recovery_sources/0/semantic_id",
            json!("0".repeat(64)),
            "Malformed",
            "recovery_sources[0].semantic_id",
        ),
        (
            "/recovery_sources/1/semantic_id",
            value(RECOVERY)["recovery_sources"][0]["semantic_id"].clone(),
            "Malformed",
            "recovery_sources[1].semantic_id",
        ),
        ("/recovery_sources/0/pieces/0/length", json!(4096), "Malformed", "recovery_sources[0].pieces"),
        ("/recovery_sources/0/pieces/0/length", json!(4098), "Malformed", "recovery_sources[0].pieces[0]"),
        ("/recovery_sources/0/pieces/0/length", json!(0), "Malformed", "recovery_sources[0].pieces[0]"),
        (
            "/recovery_sources/0/pieces/0/file",
            json!("/etc/passwd"),
            "Malformed",
            "recovery_sources[0].pieces[0]",
        ),
        (
            "/recovery_sources/0/pieces/0/file_offset",
            json!(u64::MAX),
            "Malformed",
            "recovery_sources[0].pieces[0]",
        ),
    ] {
        let mut changed = value(RECOVERY);
        *changed.pointer_mut(pointer).unwrap() = wrong;
        let error = recovery(&changed).layout().unwrap_err();
        assert_eq!(error.kind(), kind, "{pointer}: {error}");
        assert!(error.to_string().contains(named), "{pointer}: {named} is not in: {error}");
    }
}

#[test]
fn a_recovery_manifest_of_another_worker_or_capture_is_refused() {
    let padded = NativeManifest::parse(PADDED).unwrap();
    for (pointer, wrong, named) in [
        ("/worker_id", json!("tp1"), "worker_id"),
        ("/capture_id", json!("cap-other"), "capture_id"),
        ("/identity", json!("x"), "identity"),
        ("/kind", json!("coldsnap-host-process"), "kind"),
        ("/residual_blob_bytes", json!(16384), "residual_blob_bytes"),
        ("/residual_extents/0/crc32", json!("00000000"), "residual_extents"),
        ("/entries/0/tag", json!("other"), "entries"),
        ("/model_weight_extents/0/semantic_id", json!("0".repeat(64)), "model_weight_extents"),
    ] {
        let mut changed = value(RECOVERY);
        *changed.pointer_mut(pointer).unwrap() = wrong;
        let error: LayoutError = recovery(&changed).check_against(&padded).unwrap_err();
        assert!(error.to_string().contains(named), "{pointer}: {error}");
    }
    let contiguous = NativeManifest::parse(CONTIGUOUS).unwrap();
    assert!(recovery(&value(RECOVERY)).check_against(&contiguous).is_err());
}

#[test]
fn trailing_data_missing_fields_and_wrong_types_name_document_and_field() {
    for (sample, document) in [
        (PADDED, "native-manifest.json"),
        (RECOVERY, "manifest.json"),
        (&include_bytes!("samples/validation-record.json")[..], "coldsnap-validation.json"),
    ] {
        let parse = |bytes: &[u8]| match document {
            "native-manifest.json" => NativeManifest::parse(bytes).map(drop),
            "manifest.json" => RecoveryManifest::parse(bytes).map(drop),
            _ => ValidationRecord::parse(bytes).map(drop),
        };
        parse(sample).unwrap();
        let error = parse(&[sample, b" 0"].concat()).unwrap_err();
        assert_eq!((error.document, error.field.as_str()), (document, "."));
        for field in value(sample).as_object().unwrap().keys() {
            let mut wrong = value(sample);
            wrong[field] = json!([[]]);
            // The state is anything.
            if field != "model_execution_state" {
                let error = parse(wrong.to_string().as_bytes()).unwrap_err();
                assert!(error.field.starts_with(field), "{field}: {error}");
            }
        }
    }
}

#[test]
fn every_canonical_json_vector_is_met_from_text_too() {
    let file = include_str!("vectors/canonical-json.json");
    // The text of each value as it stands in the file, not as serde_json reads it.
    let mut rest = file;
    let cases = value(file.as_bytes());
    for case in cases["canonical_json"].as_array().unwrap() {
        let start = rest.find("\"value\": ").unwrap() + "\"value\": ".len();
        let end = rest.find("\"canonical\": ").unwrap();
        let text = rest[start..end].trim_end().trim_end_matches(',');
        assert_eq!(canonical_json::of_text(text.as_bytes()).unwrap(), case["canonical"].as_str().unwrap());
        rest = &rest[end + 1..];
    }
}

/// Bits and canonical text of doubles, by another implementation.
#[test]
fn floats_are_written_as_another_implementation_writes_them() {
    let cases: Vec<(String, String)> = serde_json::from_slice(include_bytes!("samples/floats.json")).unwrap();
    assert!(cases.len() > 200);
    for (bits, text) in cases {
        let float = f64::from_bits(u64::from_str_radix(&bits, 16).unwrap());
        assert_eq!(canonical_json::to_string(&Value::from(float)), text, "{bits}");
        assert_eq!(canonical_json::of_text(text.as_bytes()).unwrap(), text, "{bits}");
    }
}

#[test]
fn the_specification_s_worked_example_has_the_vectors_numbers() {
    let specification = include_str!("../../docs/format.md");
    let example = &specification[specification.find("## Worked example").unwrap()..];
    let packs = value(include_bytes!("vectors/packs.json"));
    let pack = packs["packs"].as_array().unwrap().iter().find(|p| p["name"] == "two-unaligned").unwrap();
    let manifest = value(PADDED);
    let ids = value(include_bytes!("vectors/semantic-ids.json"));
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let mut numbers = vec![text(&pack["pack_sha256"]), text(&pack["object_path"])];
    for list in ["model_weight_extents", "residual_extents"] {
        numbers.extend(manifest[list].as_array().unwrap().iter().map(|extent| text(&extent["crc32"])));
    }
    numbers.extend(pack["extents_out"].as_array().unwrap().iter().map(|extent| text(&extent["sha256"])));
    numbers.extend([0, 2].map(|n| text(&ids["semantic_ids"][n]["semantic_id"])));
    numbers.push(text(&value(include_bytes!("vectors/canonical-json.json"))["canonical_json"][0]["sha256"]));
    for number in numbers {
        assert!(example.contains(&number), "{number}");
    }
}
