//! The capsule layer: a deterministic tar of the capsule directory, compressed with zstd.
//!
//! Equal contents give equal bytes: entries in name order, owner 0, time 0, fixed modes.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

use crate::capsule;
use crate::digest::Digest;
use crate::inspect::CapsuleFiles;

/// Restores are rare next to reads of the unpacked layer; speed of the capture counts.
const ZSTD_LEVEL: i32 = 1;
/// `artifact.json` and `capture.json`; anything larger is not one of ours.
const MAX_DOCUMENT: u64 = 16 << 20;
/// Marks the directory as opaque, so that nothing of an older capsule below shows through.
const OPAQUE: &str = ".wh..wh..opq";

/// A finished layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Digest of the compressed bytes.
    pub digest: Digest,
    /// Size of the compressed bytes.
    pub bytes: u64,
    /// Digest of the uncompressed tar (the OCI DiffID).
    pub diff_id: Digest,
}

/// Writes the tree below `root` (whose paths are the paths in the container) as a layer into `out`.
/// `opaque` is a directory in it that hides what lower layers have there.
///
/// # Errors
/// Any I/O error, or a file that is neither a directory nor a regular file.
pub fn write_layer(root: &Path, opaque: &Path, out: &Path) -> io::Result<Layer> {
    let compressed = Hashing::new(BufWriter::with_capacity(1 << 20, File::create(out)?));
    let zstd = zstd::stream::Encoder::new(compressed, ZSTD_LEVEL)?;
    let mut tar = Builder::new(Hashing::new(zstd));
    tar.mode(tar::HeaderMode::Deterministic);
    append(&mut tar, root, Path::new(""), opaque)?;
    let (zstd, diff_id, _) = tar.into_inner()?.finish();
    let (mut file, digest, bytes) = zstd.finish()?.finish();
    file.flush()?;
    file.get_ref().sync_all()?;
    Ok(Layer { digest, bytes, diff_id })
}

/// The documents and file sizes of a compressed capsule layer.
///
/// # Errors
/// When it is no such layer, or a document is unreasonably large.
pub fn read_layer(compressed: impl Read) -> io::Result<CapsuleFiles> {
    let wanted = |path: &str| path == capsule::ARTIFACT_PATH || path == capsule::CAPTURE_PATH;
    read_layer_with(compressed, wanted, MAX_DOCUMENT)
}

/// The same with the documents whose path is `wanted`, each at most `limit` bytes and all together too.
///
/// # Errors
/// As [`read_layer`].
pub fn read_layer_with(
    compressed: impl Read,
    wanted: impl Fn(&str) -> bool,
    limit: u64,
) -> io::Result<CapsuleFiles> {
    let mut left = limit;
    let mut files = CapsuleFiles::default();
    let mut tar = tar::Archive::new(zstd::stream::Decoder::new(compressed)?);
    for entry in tar.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.to_string_lossy().into_owned();
        if !entry.header().entry_type().is_file() {
            continue;
        }
        files.sizes.insert(path.clone(), entry.size());
        if wanted(&path) {
            left = left.checked_sub(entry.size()).ok_or_else(|| {
                io::Error::other(format!("{path} has {} bytes, which is too much", entry.size()))
            })?;
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes)?;
            files.documents.insert(path, bytes);
        }
    }
    Ok(files)
}

/// The same of a directory that holds a capsule layer's tree (`opt/coldsnap/capsule` below `root`).
///
/// # Errors
/// Any I/O error.
pub fn read_tree(root: &Path) -> io::Result<CapsuleFiles> {
    fn walk(root: &Path, relative: &Path, files: &mut CapsuleFiles) -> io::Result<()> {
        for entry in fs::read_dir(root.join(relative))? {
            let name = relative.join(entry?.file_name());
            let metadata = fs::symlink_metadata(root.join(&name))?;
            if metadata.is_dir() {
                walk(root, &name, files)?;
            } else if metadata.is_file() {
                files.sizes.insert(name.to_string_lossy().into_owned(), metadata.len());
            }
        }
        Ok(())
    }
    let mut files = CapsuleFiles::default();
    walk(root, Path::new(capsule::CAPSULE_DIR), &mut files)?;
    for path in [capsule::ARTIFACT_PATH, capsule::CAPTURE_PATH] {
        if files.sizes.get(path).is_some_and(|size| *size <= MAX_DOCUMENT) {
            files.documents.insert(path.to_owned(), fs::read(root.join(path))?);
        }
    }
    Ok(files)
}

fn append<W: Write>(tar: &mut Builder<W>, root: &Path, relative: &Path, opaque: &Path) -> io::Result<()> {
    let mut names: Vec<PathBuf> = fs::read_dir(root.join(relative))?
        .map(|entry| Ok(relative.join(entry?.file_name())))
        .collect::<io::Result<_>>()?;
    names.sort();
    if relative == opaque {
        tar.append_data(&mut header(EntryType::Regular, 0o644, 0), relative.join(OPAQUE), io::empty())?;
    }
    for name in names {
        let path = root.join(&name);
        let metadata = fs::symlink_metadata(&path)?;
        if metadata.is_dir() {
            tar.append_data(&mut header(EntryType::Directory, 0o755, 0), &name, io::empty())?;
            append(tar, root, &name, opaque)?;
        } else if metadata.is_file() {
            // Exactly the announced size, whatever happens to the file meanwhile.
            let source = File::open(&path)?.take(metadata.len());
            tar.append_data(&mut header(EntryType::Regular, 0o644, metadata.len()), &name, source)?;
        } else {
            return Err(io::Error::other(format!("{} is neither a directory nor a file", path.display())));
        }
    }
    Ok(())
}

fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

/// A writer that hashes and counts what passes.
struct Hashing<W> {
    inner: W,
    hash: Sha256,
    bytes: u64,
}

impl<W> Hashing<W> {
    fn new(inner: W) -> Self {
        Self { inner, hash: Sha256::new(), bytes: 0 }
    }

    fn finish(self) -> (W, Digest, u64) {
        (self.inner, Digest::from_bytes(self.hash.finalize().into()), self.bytes)
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(data)?;
        self.hash.update(&data[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn tree(dir: &Path) {
        fs::create_dir_all(dir.join("opt/c/images")).unwrap();
        fs::write(dir.join("opt/c/b"), b"second").unwrap();
        fs::write(dir.join("opt/c/a"), b"first").unwrap();
        fs::write(dir.join("opt/c/images/x.img"), vec![7; 5000]).unwrap();
    }

    #[test]
    fn equal_trees_give_equal_layers_whatever_their_times_and_modes() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        tree(&one.path().join("t"));
        tree(&two.path().join("t"));
        fs::set_permissions(two.path().join("t/opt/c/a"), fs::Permissions::from_mode(0o600)).unwrap();
        let write = |dir: &Path| write_layer(&dir.join("t"), Path::new("opt/c"), &dir.join("layer")).unwrap();
        let (first, second) = (write(one.path()), write(two.path()));
        assert_eq!(first, second);
        let compressed = fs::read(one.path().join("layer")).unwrap();
        assert_eq!(first.digest, Digest::of(&compressed));
        assert_eq!(first.bytes, compressed.len() as u64);
        let tar = zstd::decode_all(&compressed[..]).unwrap();
        assert_eq!(first.diff_id, Digest::of(&tar));
        let mut files = BTreeMap::new();
        for entry in tar::Archive::new(&tar[..]).entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().into_owned();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            files.insert(path.to_str().unwrap().to_owned(), bytes.len());
        }
        assert_eq!(files["opt/c/images/x.img"], 5000);
        assert_eq!(files["opt/c/.wh..wh..opq"], 0);
    }
}
