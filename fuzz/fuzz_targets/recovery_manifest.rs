//! Recovery manifest, alone and against the native manifest of the vector.
#![no_main]

use std::sync::LazyLock;

use coldsnap::format::native_manifest::NativeManifest;
use coldsnap::format::recovery_manifest::RecoveryManifest;
use libfuzzer_sys::fuzz_target;

static NATIVE: LazyLock<NativeManifest> = LazyLock::new(|| {
    NativeManifest::parse(include_bytes!("../../libcoldsnap/tests/vectors/native-manifest.json"))
        .expect("the vector is valid")
});

fuzz_target!(|bytes: &[u8]| {
    let Ok(manifest) = RecoveryManifest::parse(bytes) else { return };
    let written = manifest.to_bytes().expect("a parsed manifest can be written");
    assert_eq!(RecoveryManifest::parse(&written).expect("what was written is accepted"), manifest);
    let _ = manifest.check_against(&NATIVE);
    if manifest.layout().is_ok() {
        for source in &manifest.recovery_sources {
            let extent = manifest
                .model_weight_extents
                .iter()
                .find(|extent| extent.semantic_id == source.semantic_id)
                .expect("an accepted source names an extent");
            let bytes: u64 = source.pieces.iter().map(|piece| piece.length).sum();
            assert!(bytes <= extent.size);
        }
    }
});
