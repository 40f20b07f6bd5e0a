//! Any document, as `coldsnap check` and `inspect` take it.
#![no_main]

use std::path::Path;

use coldsnap::check::Document;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(document) = Document::parse(Path::new("input.json"), bytes) {
        let summary = serde_json::to_value(document.summary()).expect("a summary can be printed");
        assert!(summary["what"].is_string());
    }
});
