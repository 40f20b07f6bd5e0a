use serde_json::{Value, json};

use super::*;

const VECTOR: &[u8] = include_bytes!("../../../tests/vectors/native-manifest.json");

fn value() -> Value {
    serde_json::from_slice(VECTOR).unwrap()
}

fn parse(value: &Value) -> Result<NativeManifest, FormatError> {
    NativeManifest::parse(value.to_string().as_bytes())
}

fn refused(change: impl FnOnce(&mut Value)) -> LayoutError {
    let mut value = value();
    change(&mut value);
    parse(&value).unwrap().layout().unwrap_err()
}

#[test]
fn vector_is_read_proved_and_written_alike() {
    let manifest = NativeManifest::parse(VECTOR).unwrap();
    let layout = manifest.layout().unwrap();
    assert_eq!(layout.pieces().len(), 4);
    assert_eq!(manifest.pack_layout().unwrap().bytes(), 12288);
    let mut expected = VECTOR.to_vec();
    if expected.last() != Some(&b'\n') {
        expected.push(b'\n');
    }
    assert_eq!(String::from_utf8(manifest.to_bytes().unwrap()), String::from_utf8(expected));
}

#[test]
fn every_field_is_required_except_the_optional_ones() {
    let optional = ["residual_layout", "residual_capture_backend"];
    for field in value().as_object().unwrap().keys() {
        let mut changed = value();
        changed.as_object_mut().unwrap().remove(field);
        let result = parse(&changed);
        if optional.contains(&field.as_str()) {
            result.unwrap();
        } else {
            assert!(result.unwrap_err().to_string().contains(field), "{field}");
        }
    }
}

#[test]
fn wrong_types_are_named() {
    for (pointer, wrong, field) in [
        ("/model_weight_extents/1/crc32", json!("27D94E23"), "model_weight_extents[1].crc32"),
        ("/model_weight_extents/0/sha256", json!("sha256:00"), "model_weight_extents[0].sha256"),
        ("/entries/0/ptr", json!(-1), "entries[0].ptr"),
        ("/entries/0/size", json!(1.5), "entries[0].size"),
        ("/kind", json!("sglang-worker"), "kind"),
        ("/format", json!(2), "format"),
        ("/residual_layout", json!("shared-padded-v2"), "residual_layout"),
        ("/residual_layout", Value::Null, "residual_layout"),
        ("/verify_mode", json!("none"), "verify_mode"),
        ("/weight_source", json!("safetensors"), "weight_source"),
        ("/checksum", json!("md5"), "checksum"),
    ] {
        let mut changed = value();
        *changed.pointer_mut(pointer).unwrap() = wrong;
        assert_eq!(parse(&changed).unwrap_err().field, field);
    }
    let mut trailing = VECTOR.to_vec();
    trailing.extend_from_slice(b"{}");
    assert!(NativeManifest::parse(&trailing).unwrap_err().problem.contains("data after"));
}

#[test]
fn fields_of_others_are_tolerated_and_execution_state_is_kept() {
    let mut changed = value();
    changed["added_by_another"] = json!([1]);
    changed["model_execution_state"] = json!({"b": 1, "a": [null]});
    let manifest = parse(&changed).unwrap();
    let written: Value = serde_json::from_slice(&manifest.to_bytes().unwrap()).unwrap();
    assert_eq!(written["model_execution_state"], json!({"b": 1, "a": [null]}));
}

#[test]
fn broken_rules_have_their_kind() {
    for (pointer, wrong, kind) in [
        ("/model_weight_extents/1/size", json!(4096), "Gap"),
        ("/model_weight_extents/1/size", json!(4098), "Overlap"),
        ("/residual_extents/1/size", json!(8065), "OutsideAllocation"),
        ("/residual_extents/1/allocation_ptr", json!(4096), "OutsideAllocation"),
        ("/entries/0/size", json!(20480), "Gap"),
        ("/model_weight_bytes", json!(4224), "SizeChanged"),
        ("/residual_bytes", json!(12160), "SizeChanged"),
        ("/allocation_bytes", json!(16385), "SizeChanged"),
        ("/model_blob_bytes", json!(8192), "SizeChanged"),
        ("/residual_blob_bytes", json!(8192), "SizeChanged"),
        ("/residual_blob_stat/bytes", json!(8192), "SizeChanged"),
        ("/model_weight_extents/1/offset", json!(8192), "Malformed"),
        ("/residual_extents/1/offset", json!(4097), "Malformed"),
        ("/entries/0/tag", json!("kv_cache"), "Malformed"),
    ] {
        let error = refused(|v| *v.pointer_mut(pointer).unwrap() = wrong);
        assert_eq!(error.kind(), kind, "{pointer}: {error}");
    }
    let error = refused(|v| v["model_weight_extents"].as_array_mut().unwrap().swap(0, 1));
    assert_eq!(error.kind(), "Malformed");
    let contiguous = refused(|v| {
        v.as_object_mut().unwrap().remove("residual_layout");
    });
    assert!(contiguous.to_string().contains("residual_extents[1].offset"), "{contiguous}");
}

#[test]
fn host_kind_needs_placement_and_page_size() {
    let host = |change: &dyn Fn(&mut Value)| {
        let mut v = value();
        v["kind"] = json!("coldsnap-host-process");
        v["page_size"] = json!(4096);
        for list in ["model_weight_extents", "residual_extents"] {
            for extent in v[list].as_array_mut().unwrap() {
                extent["placement"] = json!("copied");
            }
        }
        change(&mut v);
        parse(&v).unwrap().layout()
    };
    host(&|_| ()).unwrap();
    host(&|v| v["model_weight_extents"][0]["placement"] = json!("mapped")).unwrap();
    // Its address is 0x...1ff1, its offset 0.
    let error = host(&|v| v["residual_extents"][0]["placement"] = json!("mapped")).unwrap_err();
    assert!(error.to_string().contains("residual_extents[0].placement"), "{error}");
    assert!(host(&|v| v["page_size"] = json!(5000)).is_err());
    assert!(host(&|v| v["page_size"] = Value::Null).is_err());
    let error = host(&|v| {
        v["residual_extents"][1].as_object_mut().unwrap().remove("placement");
    });
    assert!(error.unwrap_err().to_string().contains("residual_extents[1].placement"));
    let error = host(&|v| {
        v["model_weight_extents"][1]["semantic_id"] = v["model_weight_extents"][0]["semantic_id"].clone();
    });
    assert!(error.unwrap_err().to_string().contains("model_weight_extents[1].semantic_id"));
}

#[test]
fn a_worker_without_model_bytes_is_legal_only_in_the_host_kind() {
    let without = |kind: &str| {
        let mut v = value();
        v["kind"] = json!(kind);
        v["page_size"] = json!(4096);
        v["model_weight_extents"] = json!([]);
        let base = v["entries"][0]["ptr"].clone();
        v["residual_extents"] = json!([{"ptr": base, "size": 16384, "allocation_ptr": base, "offset": 0,
            "crc32": "00000000", "placement": "copied"}]);
        v["residual_layout"] = json!("shared-padded-v1");
        for (field, number) in [
            ("model_weight_bytes", 0),
            ("model_blob_bytes", 0),
            ("blob_bytes", 0),
            ("residual_bytes", 16384),
            ("residual_blob_bytes", 16384),
        ] {
            v[field] = json!(number);
        }
        v["residual_blob_stat"]["bytes"] = json!(16384);
        for stat in ["blob_stat", "model_blob_stat"] {
            v[stat] = json!({"device": 0, "inode": 0, "bytes": 0, "mtime_ns": 0, "ctime_ns": 0});
        }
        parse(&v).unwrap().layout()
    };
    without("coldsnap-host-process").unwrap();
    assert_eq!(without("vllm-live-process-cumem").unwrap_err().kind(), "Malformed");
}
