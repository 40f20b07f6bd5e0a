//! Artifact descriptor: what is accepted is written and read back alike.
#![no_main]

use coldsnap::format::artifact::Artifact;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(artifact) = Artifact::parse(bytes) {
        let written = artifact.to_bytes().expect("an accepted descriptor can be written");
        assert_eq!(Artifact::parse(&written).expect("what was written is accepted"), artifact);
        for payload in artifact.payloads() {
            assert!(payload.bytes % 4096 == 0 && payload.bytes > 0);
        }
    }
});
