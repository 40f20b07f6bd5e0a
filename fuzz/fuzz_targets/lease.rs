//! Lease: only accepted under the name of its own payload.
#![no_main]

use coldsnap::digest::Digest;
use coldsnap::store::Lease;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let digest = Digest::of(b"");
    if let Ok(lease) = Lease::parse(bytes, &digest) {
        assert_eq!(lease.digest, digest);
        assert!(Lease::parse(bytes, &Digest::of(b"another")).is_err());
    }
});
