//! Header of a GGUF file: ranges are disjoint and inside the file. The magic is put in front.
#![no_main]

use coldsnap::capture::checkpoint::tensor_ranges;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let bytes = [b"GGUF", bytes].concat();
    let Ok(Some(ranges)) = tensor_ranges(&bytes) else { return };
    let mut end = 0;
    for (name, range) in ranges {
        assert!(range.start >= end && range.start < range.end, "{name}");
        end = range.end;
    }
    assert!(end <= bytes.len() as u64);
});
