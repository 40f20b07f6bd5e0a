//! Canonical JSON: one more pass changes nothing, and serde_json reads the same value.
#![no_main]

use coldsnap::format::canonical_json;
use coldsnap::format::json::Json;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(canonical) = canonical_json::of_text(bytes) else { return };
    assert!(canonical.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
    assert_eq!(canonical_json::of_text(canonical.as_bytes()).as_ref(), Ok(&canonical));
    let document = Json::parse(bytes).expect("parsed before").document();
    assert_eq!(canonical_json::of_text(document.as_bytes()).as_ref(), Ok(&canonical));
    let theirs: serde_json::Value = serde_json::from_slice(bytes).expect("serde_json accepts at least as much");
    let from_canonical: serde_json::Value = serde_json::from_str(&canonical).expect("canonical JSON is JSON");
    // Two values differ only in what serde_json cannot hold: -0 and integers beyond 64 bits.
    if Json::from(&theirs).canonical() == canonical {
        assert_eq!(from_canonical, theirs);
    }
});
