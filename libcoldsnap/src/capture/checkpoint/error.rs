//! What can be wrong with a checkpoint.

use std::io;
use std::path::PathBuf;

use crate::mapped_file::MapError;

/// Why a checkpoint cannot serve as a reference.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file cannot be opened, asked or mapped.
    #[error("cannot read the checkpoint: {0}")]
    Map(#[from] MapError),
    /// A directory cannot be read.
    #[error("cannot list the checkpoint directory {}: {source}", path.display())]
    List {
        /// The directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A name cannot be recorded in a manifest.
    #[error("the name of {} is not UTF-8: manifests cannot record it, rename the file", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
    },
    /// The directory holds nothing to read.
    #[error("no .safetensors or .gguf file in {}: name the snapshot directory or a file", path.display())]
    NoFiles {
        /// The directory.
        path: PathBuf,
    },
    /// More files than any checkpoint has.
    #[error("more than {limit} checkpoint files below {}: name the directory of one model", path.display())]
    TooManyFiles {
        /// The directory.
        path: PathBuf,
        /// The limit.
        limit: usize,
    },
    /// The files are sound but hold no tensor with bytes.
    #[error("the checkpoint {} holds no tensors", path.display())]
    NoTensors {
        /// The first path that was named.
        path: PathBuf,
    },
    /// Two files would be recorded under one name.
    #[error("{} and {} have the same name in manifests: name their common directory", first.display(), second.display())]
    SameName {
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// Neither format.
    #[error("{} is neither a GGUF nor a safetensors file", path.display())]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },
    /// The header is not what its format demands.
    #[error("cannot read the header of {}: {error}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        error: Box<HeaderError>,
    },
    /// The file is not what it was when it was opened.
    #[error("{} changed while it was the reference: use an immutable copy and capture again", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
}

/// What is wrong with the header of a checkpoint file. Offsets count from the beginning of the file.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The file ends too early.
    #[error("the file ends inside {what} at offset {offset}")]
    Truncated {
        /// What was being read.
        what: &'static str,
        /// Where it begins.
        offset: u64,
    },
    /// A size or count beyond its limit.
    #[error("{what} is {found}, more than {limit}")]
    TooLarge {
        /// Which size or count.
        what: &'static str,
        /// The value in the file.
        found: u64,
        /// The limit: what the file can hold or what the format allows.
        limit: u64,
    },
    /// A version that is not read.
    #[error("GGUF version {found} is not supported (2 and 3 in little-endian are)")]
    Version {
        /// The version field.
        found: u32,
    },
    /// A field holds a value that its format does not allow.
    #[error("{what} at offset {offset}: {found}")]
    Invalid {
        /// Which field.
        what: &'static str,
        /// Where it is.
        offset: u64,
        /// What was found.
        found: String,
    },
    /// The JSON header is not what safetensors demands.
    #[error("the JSON header: {0}")]
    Json(#[from] serde_json::Error),
    /// Two tensors of one name.
    #[error("two tensors are named {name:?}")]
    DuplicateTensor {
        /// The name.
        name: String,
    },
    /// A tensor's bytes are not all in the file.
    #[error("tensor {name:?} of {len} bytes at offset {offset} is not inside the file of {file_len} bytes")]
    OutsideFile {
        /// The tensor.
        name: String,
        /// Its first byte.
        offset: u64,
        /// Its length in bytes.
        len: u64,
        /// The file's length in bytes.
        file_len: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors {first:?} and {second:?} overlap")]
    Overlap {
        /// The tensor that begins first.
        first: String,
        /// The other.
        second: String,
    },
    /// Bytes that no tensor owns, where the format allows none.
    #[error("{len} bytes at offset {offset} belong to no tensor")]
    Hole {
        /// The first such byte.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// Shape and type contradict the range, or overflow.
    #[error("tensor {name:?}: {found}")]
    Shape {
        /// The tensor.
        name: String,
        /// The contradiction.
        found: String,
    },
}
