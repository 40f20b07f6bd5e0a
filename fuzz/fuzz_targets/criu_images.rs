//! CRIU images of one process: reading, the memory's runs, the comparison with a manifest, and the proof.
#![no_main]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use coldsnap::criu::process::{ImageSet, root_mount};
use coldsnap::criu::prove::prove;
use coldsnap::criu::runs::memory_of;
use coldsnap::format::native_manifest::NativeManifest;
use coldsnap::restore::compare_images;
use libfuzzer_sys::fuzz_target;

static MANIFEST: LazyLock<NativeManifest> = LazyLock::new(|| {
    NativeManifest::parse(include_bytes!("../../libcoldsnap/tests/vectors/native-manifest.json"))
        .expect("the vector is valid")
});
static DIRECTORY: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.expect("a directory for the images")
});

const NAMES: [&str; 7] = [
    "inventory.img", "pstree.img", "files.img", "mountpoints-1.img", "mm-1.img", "pagemap-1.img", "pages-1.img",
];

// The input holds the files one after the other, each behind its length in two bytes.
fuzz_target!(|input: &[u8]| {
    let mut rest = input;
    let mut files = Vec::new();
    for name in NAMES {
        let (length, behind) = rest.split_first_chunk::<2>().unwrap_or((&[0; 2], &[]));
        let (bytes, behind) = behind.split_at(usize::from(u16::from_le_bytes(*length)).min(behind.len()));
        fs::write(DIRECTORY.path().join(name), bytes).expect("the directory can be written");
        files.push(bytes);
        rest = behind;
    }
    let _ = compare_images(&MANIFEST, "opt/coldsnap/capsule/hydration/w0", files[2], ("mm-1.img", files[4]));
    let Ok(images) = ImageSet::read(DIRECTORY.path()) else { return };
    let _ = root_mount(&images.mounts);
    for process in &images.processes {
        let residuals: BTreeMap<u32, u64> = images.files.iter().map(|f| (f.id(), f.reg.size())).collect();
        let _ = memory_of(process, &residuals);
        let _ = memory_of(process, &BTreeMap::new());
        let files = images.files.iter().map(|f| (f.id(), &b"our file's bytes"[..])).collect();
        // A process restores the same memory as itself, unless its images are impossible.
        let _ = prove(process, &files, process, &files);
    }
});
