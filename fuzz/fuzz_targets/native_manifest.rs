//! Native manifest: no panic in any rule; a proof covers exactly the allocations; written and read back alike.
#![no_main]

use coldsnap::format::native_manifest::NativeManifest;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(manifest) = NativeManifest::parse(bytes) else { return };
    let written = manifest.to_bytes().expect("a parsed manifest can be written");
    assert_eq!(NativeManifest::parse(&written).expect("what was written is accepted"), manifest);
    let _ = manifest.pack_layout();
    if let Ok(layout) = manifest.layout() {
        let owned: u64 = layout.pieces().iter().map(|piece| piece.extent.size()).sum();
        assert_eq!(owned, manifest.allocation_bytes);
        assert_eq!(manifest.model_weight_bytes + manifest.residual_bytes, manifest.allocation_bytes);
    }
});
