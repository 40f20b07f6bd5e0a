//! Checkpoint references: which files a model's weights come from and where each tensor lies in them.
//!
//! Only names and byte ranges matter here; element types and shapes serve to check the ranges. The
//! files are untrusted: every count and size is bounded by the file before anything is allocated,
//! every range lies inside its file, and ranges are disjoint.

mod error;
mod ggml_types;
mod gguf;
mod safetensors;

use std::collections::HashSet;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub use error::{CheckpointError, HeaderError};

use crate::mapped_file::MappedFile;

/// Nesting of directories in a snapshot: pipelines keep one model per subdirectory, nothing is deeper.
const MAX_DEPTH: usize = 8;
/// Files in one checkpoint; the largest published ones have a few hundred.
const MAX_FILES: usize = 65_536;

/// The files of a checkpoint and the tensors in them.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<CheckpointFile>,
    tensors: Vec<Tensor>,
    /// For each file the range of its tensors in `tensors`.
    by_file: Vec<Range<usize>>,
}

/// One file of a checkpoint, mapped.
#[derive(Debug)]
pub struct CheckpointFile {
    /// The name that manifests record: relative to the snapshot directory, `/` between components;
    /// the bare file name where a file was named directly.
    pub name: String,
    /// Where the file was opened (symbolic links not resolved).
    pub path: PathBuf,
    /// The content.
    pub data: MappedFile,
}

/// One tensor with at least one byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The name in the file's header; unique in its file.
    pub name: String,
    /// Index into [`Checkpoint::files`].
    pub file_index: usize,
    /// First byte, from the beginning of the file.
    pub file_offset: u64,
    /// Bytes, at least one.
    pub len: u64,
}

/// A tensor as a header names it, before it belongs to a file of a checkpoint.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RawTensor {
    name: String,
    offset: u64,
    len: u64,
}

impl Checkpoint {
    /// Opens one `.gguf` or `.safetensors` file, or every such file in a snapshot directory.
    /// In a directory symbolic links to files are followed (a Hugging Face snapshot is made of
    /// them), links to directories and hidden entries are not.
    ///
    /// # Errors
    /// See [`CheckpointError`].
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        Self::open_all(&[path])
    }

    /// As [`open`](Self::open), for a checkpoint in several places, such as the parts of a split
    /// GGUF file.
    ///
    /// # Errors
    /// See [`CheckpointError`]; also when two files would be recorded under one name.
    pub fn open_all<P: AsRef<Path>>(paths: &[P]) -> Result<Self, CheckpointError> {
        let mut found = Vec::new();
        for path in paths.iter().map(AsRef::as_ref) {
            if path.is_dir() {
                let before = found.len();
                list(path, "", 0, &mut found)?;
                if found.len() == before {
                    return Err(CheckpointError::NoFiles { path: path.to_owned() });
                }
            } else {
                let name = path.file_name().unwrap_or(path.as_os_str());
                let name = name.to_str().ok_or_else(|| CheckpointError::NotUtf8 { path: path.to_owned() })?;
                found.push((name.to_owned(), path.to_owned()));
            }
        }
        // The order of files decides which of several equal sources is recorded: it must not depend
        // on the order of directory entries.
        found.sort();
        if let Some(pair) = found.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(CheckpointError::SameName { first: pair[0].1.clone(), second: pair[1].1.clone() });
        }

        let mut checkpoint = Self { files: Vec::new(), tensors: Vec::new(), by_file: Vec::new() };
        for (name, path) in found {
            checkpoint.add(name, path)?;
        }
        if checkpoint.tensors.is_empty() {
            let path = paths.first().map_or_else(PathBuf::new, |path| path.as_ref().to_owned());
            return Err(CheckpointError::NoTensors { path });
        }
        Ok(checkpoint)
    }

    fn add(&mut self, name: String, path: PathBuf) -> Result<(), CheckpointError> {
        let data = MappedFile::open(&path)?;
        let header = |error| CheckpointError::Header { path: path.clone(), error: Box::new(error) };
        let Some(raw) = headers(&data).map_err(header)? else {
            return Err(CheckpointError::UnknownFormat { path });
        };
        let start = self.tensors.len();
        let file_index = self.files.len();
        self.tensors.extend(raw.into_iter().map(|tensor| Tensor {
            name: tensor.name,
            file_index,
            file_offset: tensor.offset,
            len: tensor.len,
        }));
        self.by_file.push(start..self.tensors.len());
        self.files.push(CheckpointFile { name, path, data });
        Ok(())
    }

    /// The files, sorted by name.
    pub fn files(&self) -> &[CheckpointFile] {
        &self.files
    }

    /// Every tensor that has bytes, sorted by file and offset, disjoint.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The bytes of a tensor of this checkpoint.
    pub fn tensor_data(&self, tensor: &Tensor) -> &[u8] {
        let start = to_index(tensor.file_offset);
        &self.files[tensor.file_index].data[start..start + to_index(tensor.len)]
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.len).sum()
    }

    /// Indices of the tensors of a file that end after `file_offset`, in order.
    pub(crate) fn tensors_from(&self, file_index: usize, file_offset: u64) -> Range<usize> {
        let range = self.by_file[file_index].clone();
        let skipped = self.tensors[range.clone()].partition_point(|t| t.file_offset + t.len <= file_offset);
        range.start + skipped..range.end
    }

    /// Fails when a file was touched since it was opened: what was compared with it may be gone.
    ///
    /// # Errors
    /// [`CheckpointError::Changed`], or an error of asking.
    pub fn ensure_unchanged(&self) -> Result<(), CheckpointError> {
        for file in &self.files {
            if file.data.changed()? {
                return Err(CheckpointError::Changed { path: file.path.clone() });
            }
        }
        Ok(())
    }
}

/// A checked file offset or length as a slice index; `mapped_file` asserts that it fits.
pub(crate) fn to_index(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// The tensors of a whole file by its own format; `None` when it is neither GGUF nor safetensors.
fn headers(data: &[u8]) -> Result<Option<Vec<RawTensor>>, HeaderError> {
    if data.starts_with(gguf::MAGIC) {
        gguf::tensors(data).map(Some)
    } else if data.get(8) == Some(&b'{') {
        safetensors::tensors(data).map(Some)
    } else {
        Ok(None)
    }
}

/// Name and byte range of every tensor that has bytes in a whole checkpoint file, in file order; `None` when the file is
/// neither GGUF nor safetensors.
///
/// # Errors
/// What is wrong with the header.
pub fn tensor_ranges(data: &[u8]) -> Result<Option<Vec<(String, Range<u64>)>>, HeaderError> {
    let range = |raw: RawTensor| (raw.name, raw.offset..raw.offset + raw.len);
    Ok(headers(data)?.map(|list| list.into_iter().map(range).collect()))
}

fn list(
    directory: &Path,
    prefix: &str,
    depth: usize,
    found: &mut Vec<(String, PathBuf)>,
) -> Result<(), CheckpointError> {
    let io = |source| CheckpointError::List { path: directory.to_owned(), source };
    for entry in fs::read_dir(directory).map_err(io)? {
        let entry = entry.map_err(io)?;
        let path = entry.path();
        let Some(name) = entry.file_name().to_str().map(str::to_owned) else {
            return Err(CheckpointError::NotUtf8 { path });
        };
        // Download caches keep partial files and locks in hidden directories.
        if name.starts_with('.') {
            continue;
        }
        if entry.file_type().map_err(io)?.is_dir() {
            if depth + 1 < MAX_DEPTH {
                list(&path, &format!("{prefix}{name}/"), depth + 1, found)?;
            }
        } else if name.ends_with(".safetensors") || name.ends_with(".gguf") {
            if found.len() >= MAX_FILES {
                return Err(CheckpointError::TooManyFiles { path: directory.to_owned(), limit: MAX_FILES });
            }
            found.push((format!("{prefix}{name}"), path));
        }
    }
    Ok(())
}

/// What every header must satisfy: unique names, ranges inside the file, no overlap. Drops tensors
/// without bytes and sorts the others by offset.
fn checked(mut tensors: Vec<RawTensor>, file_len: u64) -> Result<Vec<RawTensor>, HeaderError> {
    let mut names = HashSet::with_capacity(tensors.len());
    for tensor in &tensors {
        if !names.insert(tensor.name.as_str()) {
            return Err(HeaderError::DuplicateTensor { name: tensor.name.clone() });
        }
        if tensor.offset.checked_add(tensor.len).is_none_or(|end| end > file_len) {
            return Err(HeaderError::OutsideFile {
                name: tensor.name.clone(),
                offset: tensor.offset,
                len: tensor.len,
                file_len,
            });
        }
    }
    tensors.retain(|tensor| tensor.len > 0);
    tensors.sort_by_key(|tensor| tensor.offset);
    if let Some(pair) = tensors.windows(2).find(|pair| pair[0].offset + pair[0].len > pair[1].offset) {
        return Err(HeaderError::Overlap { first: pair[0].name.clone(), second: pair[1].name.clone() });
    }
    Ok(tensors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn safetensors_file(name: &str, data: &[u8]) -> Vec<u8> {
        let header =
            format!(r#"{{"{name}":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, data.len());
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
    }

    #[test]
    fn a_snapshot_directory_is_followed_through_its_links() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = dir.path().join("blobs");
        let snapshot = dir.path().join("snapshots/rev");
        fs::create_dir_all(&blobs).unwrap();
        fs::create_dir_all(snapshot.join("text_encoder")).unwrap();
        fs::create_dir_all(snapshot.join(".cache")).unwrap();
        fs::write(blobs.join("b1"), safetensors_file("w1", b"one")).unwrap();
        fs::write(blobs.join("b2"), safetensors_file("w2", b"second")).unwrap();
        symlink("../../blobs/b2", snapshot.join("model-00002-of-00002.safetensors")).unwrap();
        symlink("../../blobs/b1", snapshot.join("model-00001-of-00002.safetensors")).unwrap();
        symlink("../../../blobs/b1", snapshot.join("text_encoder/model.safetensors")).unwrap();
        symlink("..", snapshot.join("loop")).unwrap();
        fs::write(snapshot.join("model.safetensors.index.json"), "{}").unwrap();
        fs::write(snapshot.join("config.json"), "{}").unwrap();
        fs::write(snapshot.join(".cache/partial.safetensors"), "partial").unwrap();

        let checkpoint = Checkpoint::open(&snapshot).unwrap();
        let names: Vec<&str> = checkpoint.files().iter().map(|file| file.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "text_encoder/model.safetensors"
            ]
        );
        assert_eq!(checkpoint.tensor_data(&checkpoint.tensors()[1]), b"second");
        assert_eq!(checkpoint.tensor_bytes(), 3 + 6 + 3);
        checkpoint.ensure_unchanged().unwrap();

        fs::write(blobs.join("b2"), safetensors_file("w2", b"SECOND")).unwrap();
        assert!(matches!(checkpoint.ensure_unchanged(), Err(CheckpointError::Changed { .. })));
    }

    #[test]
    fn a_file_is_recognised_by_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let blob = dir.path().join("0123abcd");
        fs::write(&blob, safetensors_file("w", b"data")).unwrap();
        assert_eq!(Checkpoint::open(&blob).unwrap().files()[0].name, "0123abcd");

        for content in [&b""[..], b"GGU", b"not a checkpoint at all"] {
            fs::write(&blob, content).unwrap();
            assert!(matches!(Checkpoint::open(&blob), Err(CheckpointError::UnknownFormat { .. })));
        }
    }

    #[test]
    fn refuses_what_holds_no_tensor_or_has_no_place() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(Checkpoint::open(dir.path()), Err(CheckpointError::NoFiles { .. })));
        let dangling = dir.path().join("model.safetensors");
        symlink("../blobs/gone", &dangling).unwrap();
        assert!(matches!(Checkpoint::open(dir.path()), Err(CheckpointError::Map(_))));
        fs::remove_file(&dangling).unwrap();
        fs::write(&dangling, safetensors_file("w", b"")).unwrap();
        assert!(matches!(Checkpoint::open(dir.path()), Err(CheckpointError::NoTensors { .. })));
        let other = dir.path().join("other");
        fs::create_dir(&other).unwrap();
        fs::write(other.join("model.safetensors"), safetensors_file("w", b"x")).unwrap();
        assert!(matches!(
            Checkpoint::open_all(&[dangling, other.join("model.safetensors")]),
            Err(CheckpointError::SameName { .. })
        ));
        assert!(matches!(Checkpoint::open(&dir.path().join("missing")), Err(CheckpointError::Map(_))));
    }

    #[test]
    fn ranges_are_checked() {
        let raw = |name: &str, offset, len| RawTensor { name: name.to_owned(), offset, len };
        let sorted = checked(vec![raw("b", 4, 2), raw("none", 4, 0), raw("a", 0, 4)], 6).unwrap();
        assert_eq!(sorted, [raw("a", 0, 4), raw("b", 4, 2)]);
        assert!(matches!(
            checked(vec![raw("a", 0, 4), raw("a", 4, 1)], 6),
            Err(HeaderError::DuplicateTensor { .. })
        ));
        assert!(matches!(checked(vec![raw("a", 0, 7)], 6), Err(HeaderError::OutsideFile { .. })));
        assert!(matches!(checked(vec![raw("a", u64::MAX, 7)], 6), Err(HeaderError::OutsideFile { .. })));
        assert!(matches!(checked(vec![raw("a", 0, 4), raw("b", 3, 1)], 6), Err(HeaderError::Overlap { .. })));
    }
}
