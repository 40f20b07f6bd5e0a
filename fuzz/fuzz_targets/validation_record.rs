//! Validation record: written and read back alike; unknown fields are dropped.
#![no_main]

use coldsnap::format::validation::ValidationRecord;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(record) = ValidationRecord::parse(bytes) {
        let written = record.to_bytes().expect("a parsed record can be written");
        assert_eq!(ValidationRecord::parse(&written).expect("what was written is accepted"), record);
    }
});
