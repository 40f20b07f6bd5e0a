//! Compares files with the native manifest that describes them: sizes, identity, every extent's digest and
//! checksum, and the zero padding.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::CheckError;
use crate::digest::Digest;
use crate::extent::LayoutError;
use crate::format::native_manifest::{BlobStat, NativeManifest};
use crate::format::pack::{self, ExtentSummer};
use crate::format::residual::ResidualLayout;

const READ_BYTES: usize = 256 << 10;

/// What was compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct FileReport {
    /// Size of the file.
    pub bytes: u64,
    /// Number of extents, each with a matching checksum.
    pub extents: usize,
    /// Whether the digest of the whole file was compared with its name.
    pub whole_digest: bool,
}

/// Compares a pack with the manifest, whose own rules hold ([`NativeManifest::layout`]). A file named
/// `<64hex>.pack` must have that digest. `progress` is called with the number of bytes read since the last call,
/// [`pack_work`] together.
///
/// # Errors
/// `SizeChanged`; `IdentityChanged` when an extent has other bytes, or when the payload is not portable and this
/// is another file; `PathDigestMismatch`; `Malformed` when padding is not zero. Of several extents the first in the
/// manifest is named.
pub fn check_pack(
    manifest: &NativeManifest,
    path: &Path,
    progress: &mut dyn FnMut(u64),
) -> Result<FileReport, CheckError> {
    let stat = (!manifest.portable_model_payload).then_some(&manifest.model_blob_stat);
    let extents = manifest.model_weight_extents.iter().enumerate().map(|(n, extent)| Job {
        name: format!("model_weight_extents[{n}]"),
        offset: extent.offset,
        size: extent.size,
        padding: pack::padding(extent.size),
        check: Check::Extent { sha256: Some(extent.sha256), crc32: extent.crc32 },
    });
    let jobs: Vec<_> = whole_file(path, manifest.model_blob_bytes).into_iter().chain(extents).collect();
    run(path, manifest.model_blob_bytes, ("model_blob_bytes", stat), &jobs, progress)
}

/// Number of bytes that [`check_pack`] reads.
pub fn pack_work(manifest: &NativeManifest, path: &Path) -> u64 {
    let whole = whole_file(path, manifest.model_blob_bytes).map_or(0, |job| job.size);
    manifest.model_weight_bytes + whole
}

/// Compares a residual blob with the manifest, whose own rules hold. `progress` gets
/// `residual_bytes` together.
///
/// # Errors
/// As [`check_pack`], without digests: residual extents have a CRC-32.
pub fn check_residual(
    manifest: &NativeManifest,
    path: &Path,
    progress: &mut dyn FnMut(u64),
) -> Result<FileReport, CheckError> {
    let stat = (!manifest.portable_residual_blob).then_some(&manifest.residual_blob_stat);
    let padded = manifest.residual_layout == ResidualLayout::SharedPadded;
    let extents = manifest.residual_extents.iter().enumerate().map(|(n, extent)| Job {
        name: format!("residual_extents[{n}]"),
        offset: extent.offset,
        size: extent.size,
        padding: if padded { pack::padding(extent.size) } else { 0 },
        check: Check::Extent { sha256: None, crc32: extent.crc32 },
    });
    let jobs: Vec<_> = extents.collect();
    run(path, manifest.residual_blob_bytes, ("residual_blob_bytes", stat), &jobs, progress)
}

/// Compares a pack with the digest that its name is, and its size with the alignment: all that is known without a manifest.
///
/// # Errors
/// `Malformed` for a size that no pack has, `PathDigestMismatch`.
pub(super) fn check_named(
    path: &Path,
    named: &Digest,
    progress: super::Progress<'_>,
) -> Result<FileReport, CheckError> {
    let io = |source| CheckError::Io { path: path.to_owned(), source };
    let bytes = path.metadata().map_err(io)?.len();
    if bytes == 0 || bytes % pack::ALIGNMENT != 0 {
        let problem = format!("{bytes} bytes: a pack is a positive multiple of {}", pack::ALIGNMENT);
        return Err(super::layout_error(path, LayoutError::malformed("file", problem)));
    }
    let check = Check::WholeFile { named: *named };
    let job = Job { name: "file".to_owned(), offset: 0, size: bytes, padding: 0, check };
    run(path, bytes, ("size", None), &[job], &mut |n| progress("hashing the pack", bytes, n))
}

struct Job {
    name: String,
    offset: u64,
    size: u64,
    /// Zero bytes that must follow.
    padding: u64,
    check: Check,
}

enum Check {
    Extent { sha256: Option<Digest>, crc32: u32 },
    WholeFile { named: Digest },
}

fn whole_file(path: &Path, size: u64) -> Option<Job> {
    let hex = path.file_name()?.to_str()?.strip_suffix(".pack")?;
    let named = Digest::from_hex(hex).ok()?;
    Some(Job { name: "file".to_owned(), offset: 0, size, padding: 0, check: Check::WholeFile { named } })
}

fn run(
    path: &Path,
    bytes: u64,
    (bytes_field, stat): (&str, Option<&BlobStat>),
    jobs: &[Job],
    progress: &mut dyn FnMut(u64),
) -> Result<FileReport, CheckError> {
    let io = |source| CheckError::Io { path: path.to_owned(), source };
    let layout = |source| CheckError::Layout { path: path.to_owned(), source };
    let file = File::open(path).map_err(io)?;
    let metadata = file.metadata().map_err(io)?;
    if !metadata.is_file() {
        return Err(layout(LayoutError::malformed("file", "it is not a regular file")));
    }
    LayoutError::same_size(&format!("the file ({bytes_field})"), bytes, metadata.len()).map_err(layout)?;
    let found = BlobStat::of(&metadata);
    if let Some(expected) = stat.filter(|expected| !expected.same_content(&found)) {
        return Err(layout(LayoutError::IdentityChanged {
            what: "the file, which the manifest does not call portable,".to_owned(),
            expected: format!("{expected:?}"),
            found: format!("{found:?}"),
        }));
    }
    match first_failure(&file, path, jobs, progress) {
        Some(Failure::Layout(source)) => Err(layout(source)),
        Some(Failure::Io(source)) => Err(io(source)),
        None => {
            let whole = jobs.iter().filter(|job| matches!(job.check, Check::WholeFile { .. })).count();
            Ok(FileReport { bytes, extents: jobs.len() - whole, whole_digest: whole > 0 })
        }
    }
}

enum Failure {
    Layout(LayoutError),
    Io(io::Error),
}

enum Event {
    Bytes(u64),
    Failed(usize, Failure),
}

/// Runs the jobs on all cores. The digest of the whole file takes longest and stands first; its failure is
/// reported last, because a failing extent says more.
fn first_failure(file: &File, path: &Path, jobs: &[Job], progress: &mut dyn FnMut(u64)) -> Option<Failure> {
    let next = AtomicUsize::new(0);
    let threads = thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    let mut first: Option<(usize, Failure)> = None;
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        for _ in 0..threads {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                while let Some((n, job)) = job_at(jobs, next) {
                    // The receiver outlives the threads.
                    let mut read = |bytes| drop(sender.send(Event::Bytes(bytes)));
                    if let Err(failure) = job.run(file, path, &mut read) {
                        let rank = if matches!(job.check, Check::WholeFile { .. }) { usize::MAX } else { n };
                        drop(sender.send(Event::Failed(rank, failure)));
                    }
                }
            });
        }
        drop(sender);
        for event in receiver {
            match event {
                Event::Bytes(bytes) => progress(bytes),
                Event::Failed(n, failure) if first.as_ref().is_none_or(|(m, _)| n < *m) => {
                    first = Some((n, failure));
                }
                Event::Failed(..) => {}
            }
        }
    });
    first.map(|(_, failure)| failure)
}

fn job_at<'a>(jobs: &'a [Job], next: &AtomicUsize) -> Option<(usize, &'a Job)> {
    let n = next.fetch_add(1, Ordering::Relaxed);
    Some((n, jobs.get(n)?))
}

impl Job {
    fn run(&self, file: &File, path: &Path, progress: &mut dyn FnMut(u64)) -> Result<(), Failure> {
        match self.check {
            Check::WholeFile { named } => {
                let mut hasher = Sha256::new();
                self.read(file, progress, |bytes| hasher.update(bytes))?;
                let found = Digest::from_bytes(hasher.finalize().into());
                if found == named {
                    return Ok(());
                }
                Err(Failure::Layout(LayoutError::PathDigestMismatch { path: path.to_owned(), digest: found }))
            }
            Check::Extent { sha256: Some(expected), crc32 } => {
                let mut summer = ExtentSummer::default();
                self.read(file, progress, |bytes| summer.update(bytes))?;
                let found = summer.finish();
                self.same("sha256", expected.hex(), found.sha256.hex())?;
                self.same_crc32(crc32, found.crc32)?;
                self.check_padding(file)
            }
            Check::Extent { sha256: None, crc32 } => {
                let mut hasher = crc32fast::Hasher::new();
                self.read(file, progress, |bytes| hasher.update(bytes))?;
                self.same_crc32(crc32, hasher.finalize())?;
                self.check_padding(file)
            }
        }
    }

    fn read(
        &self,
        file: &File,
        progress: &mut dyn FnMut(u64),
        mut consume: impl FnMut(&[u8]),
    ) -> Result<(), Failure> {
        let mut buffer = vec![0; READ_BYTES.min(usize::try_from(self.size).unwrap_or(READ_BYTES))];
        let (mut offset, end) = (self.offset, self.offset + self.size);
        while offset < end {
            let length = usize::try_from(end - offset).map_or(buffer.len(), |left| left.min(buffer.len()));
            let piece = &mut buffer[..length];
            file.read_exact_at(piece, offset).map_err(Failure::Io)?;
            consume(piece);
            offset += piece.len() as u64;
            progress(piece.len() as u64);
        }
        Ok(())
    }

    fn same(&self, field: &str, expected: String, found: String) -> Result<(), Failure> {
        if expected == found {
            return Ok(());
        }
        let (first, end) = (self.offset, self.offset + self.size);
        let what = format!("{field} of {} (bytes {first}..{end})", self.name);
        Err(Failure::Layout(LayoutError::IdentityChanged { what, expected, found }))
    }

    fn same_crc32(&self, expected: u32, found: u32) -> Result<(), Failure> {
        self.same("crc32", format!("{expected:08x}"), format!("{found:08x}"))
    }

    fn check_padding(&self, file: &File) -> Result<(), Failure> {
        let mut padding = vec![0; usize::try_from(self.padding).unwrap_or(0)];
        file.read_exact_at(&mut padding, self.offset + self.size).map_err(Failure::Io)?;
        if padding.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        let problem = format!("the {} bytes of padding after it are not all zero", self.padding);
        Err(Failure::Layout(LayoutError::malformed(self.name.clone(), problem)))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};

    use super::*;

    fn mod251(size: usize) -> Vec<u8> {
        (0..size).map(|i| u8::try_from(i % 251).unwrap()).collect()
    }

    /// The pack of the vector's manifest.
    fn pack() -> Vec<u8> {
        let mut pack = vec![7; 128];
        pack.resize(4096, 0);
        pack.extend(mod251(4097));
        pack.resize(12288, 0);
        pack
    }

    fn manifest(change: impl FnOnce(&mut Value)) -> NativeManifest {
        let mut value: Value =
            serde_json::from_str(include_str!("../../tests/vectors/native-manifest.json")).unwrap();
        change(&mut value);
        NativeManifest::parse(value.to_string().as_bytes()).unwrap()
    }

    fn check(manifest: &NativeManifest, name: &str, bytes: &[u8]) -> Result<FileReport, CheckError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        check_pack(manifest, &path, &mut |_| ())
    }

    #[test]
    fn the_vector_pack_matches_its_manifest() {
        let report = check(&manifest(|_| ()), "model-weights.pack", &pack()).unwrap();
        assert_eq!(report, FileReport { bytes: 12288, extents: 2, whole_digest: false });
        let named = "1cbd77415e304d02077cdfe19462be4061f6b5a3d844cc31f18322d3c008882b.pack";
        assert!(check(&manifest(|_| ()), named, &pack()).unwrap().whole_digest);
    }

    #[test]
    fn every_difference_has_its_kind() {
        let changed = |at: usize| {
            let mut bytes = pack();
            bytes[at] ^= 1;
            check(&manifest(|_| ()), "p", &bytes).unwrap_err()
        };
        for (at, kind, name) in [
            (5, "IdentityChanged", "model_weight_extents[0]"),
            (8192, "IdentityChanged", "model_weight_extents[1]"),
            (128, "Malformed", "model_weight_extents[0]"),
            (12287, "Malformed", "model_weight_extents[1]"),
        ] {
            let error = changed(at);
            assert!(error.kind() == kind && error.to_string().contains(name), "{at}: {error}");
        }
        assert_eq!(check(&manifest(|_| ()), "p", &pack()[..8192]).unwrap_err().kind(), "SizeChanged");
        let named = format!("{}.pack", "0".repeat(64));
        assert_eq!(check(&manifest(|_| ()), &named, &pack()).unwrap_err().kind(), "PathDigestMismatch");
        let bad_crc = manifest(|v| v["model_weight_extents"][1]["crc32"] = json!("00000000"));
        let error = check(&bad_crc, "p", &pack()).unwrap_err();
        assert!(error.to_string().contains("crc32 of model_weight_extents[1]"), "{error}");
        let fixed = manifest(|v| v["portable_model_payload"] = json!(false));
        assert_eq!(check(&fixed, "p", &pack()).unwrap_err().kind(), "IdentityChanged");
        assert_eq!(check_pack(&fixed, Path::new("/none"), &mut |_| ()).unwrap_err().kind(), "Io");
    }

    #[test]
    fn residual_pieces_and_their_padding() {
        let pieces = [vec![1; 4095], vec![2; 8064]];
        let manifest = manifest(|v| {
            for (n, piece) in pieces.iter().enumerate() {
                v["residual_extents"][n]["crc32"] = json!(format!("{:08x}", crc32fast::hash(piece)));
            }
        });
        let mut blob = pieces[0].clone();
        blob.push(0);
        blob.extend(&pieces[1]);
        blob.resize(12288, 0);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights.blob");
        let check = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            check_residual(&manifest, &path, &mut |_| ())
        };
        assert_eq!(check(&blob).unwrap().extents, 2);
        blob[4095] = 1;
        assert_eq!(check(&blob).unwrap_err().kind(), "Malformed");
        blob[4095] = 0;
        blob[5000] = 1;
        let error = check(&blob).unwrap_err();
        assert!(error.to_string().contains("crc32 of residual_extents[1]"), "{error}");
    }
}
