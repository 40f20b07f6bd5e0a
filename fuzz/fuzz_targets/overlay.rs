//! Target-local overlay: what is accepted is written and read back alike, and matches its own target.
#![no_main]

use coldsnap::format::overlay::{Overlay, portable_digest};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = portable_digest(bytes);
    if let Ok(overlay) = Overlay::parse(bytes) {
        let written = overlay.to_bytes().expect("an accepted overlay can be written");
        assert_eq!(Overlay::parse(&written).expect("what was written is accepted"), overlay);
        assert!(overlay.mismatches(&overlay.target).is_empty());
    }
});
