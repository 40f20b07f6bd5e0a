//! Header of a safetensors file: ranges tile the data part.
#![no_main]

use coldsnap::capture::checkpoint::tensor_ranges;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if bytes.starts_with(b"GGUF") {
        return;
    }
    let Ok(Some(ranges)) = tensor_ranges(bytes) else { return };
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("accepted, so it has a length"));
    let mut end = 8 + header;
    for (name, range) in ranges {
        assert_eq!(range.start, end, "{name}");
        end = range.end;
    }
    assert_eq!(end, bytes.len() as u64);
});
