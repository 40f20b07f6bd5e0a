//! capture.json: what is accepted is written and read back alike.
#![no_main]

use coldsnap::capture::facts::CaptureFacts;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(facts) = CaptureFacts::parse("capture.json", bytes) {
        let written = facts.to_json().expect("accepted facts can be written");
        assert_eq!(CaptureFacts::parse("capture.json", &written).expect("what was written is accepted"), facts);
    }
});
