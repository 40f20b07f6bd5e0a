//! The container format of CRIU images: two magic numbers, then length-prefixed messages.
//!
//! Parsing works on bytes; the two functions at the end do the I/O.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use protobuf::Message;

/// First word of an image of format 1.1.
const IMG_COMMON_MAGIC: u32 = 0x5456_4319;
/// A message longer than this is not one of CRIU's (its own limit on reading is far lower).
const MAX_ENTRY: usize = 64 << 20;
/// An image of entries larger than this is refused before it is read.
const MAX_IMAGE: u64 = 1 << 30;

/// Second word of the images that ColdSnap reads (source: CRIU `criu/include/magic.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Magic {
    /// `inventory.img`
    Inventory = 0x5831_3116,
    /// `pstree.img`
    Pstree = 0x5027_3030,
    /// `mm-<pid>.img`
    Mm = 0x5749_2820,
    /// `pagemap-<pid>.img`
    Pagemap = 0x5608_4025,
    /// `files.img`
    Files = 0x5630_3138,
    /// `mountpoints-<id>.img`
    Mounts = 0x5556_3928,
}

/// What is wrong with an image file.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// Reading or writing failed.
    #[error("cannot {action} CRIU image {}: {source}", path.display())]
    Io {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The bytes are not an image of the expected kind.
    #[error("CRIU image {name} is malformed: {reason}")]
    Malformed {
        /// The file's name.
        name: String,
        /// What was found.
        reason: String,
    },
}

/// Splits an image into the byte strings of its messages.
///
/// # Errors
/// [`ImageError::Malformed`] for a wrong magic, a truncated entry or trailing bytes.
pub fn split<'a>(name: &str, magic: Magic, bytes: &'a [u8]) -> Result<Vec<&'a [u8]>, ImageError> {
    let malformed = |reason: String| ImageError::Malformed { name: name.to_owned(), reason };
    let word = |at: usize| -> Option<u32> {
        let word = bytes.get(at..at + 4)?;
        Some(u32::from_le_bytes(word.try_into().ok()?))
    };
    let (first, second) = (word(0), word(4));
    if first != Some(IMG_COMMON_MAGIC) {
        return Err(malformed(format!(
            "first word is {first:x?}, expected {IMG_COMMON_MAGIC:#x} (format 1.1)"
        )));
    }
    if second != Some(magic as u32) {
        return Err(malformed(format!(
            "second word is {second:x?}, expected {:#x} ({magic:?})",
            magic as u32
        )));
    }
    let mut entries = Vec::new();
    let mut at = 8;
    while at < bytes.len() {
        let size = word(at).ok_or_else(|| malformed(format!("truncated entry size at byte {at}")))? as usize;
        if size > MAX_ENTRY {
            return Err(malformed(format!("entry of {size} bytes at byte {at}")));
        }
        let entry = bytes
            .get(at + 4..at + 4 + size)
            .ok_or_else(|| malformed(format!("entry of {size} bytes at byte {at} is truncated")))?;
        entries.push(entry);
        at += 4 + size;
    }
    Ok(entries)
}

/// Parses one message of an image.
///
/// # Errors
/// [`ImageError::Malformed`] when it is not such a message.
pub fn parse<M: Message>(name: &str, bytes: &[u8]) -> Result<M, ImageError> {
    M::parse_from_bytes(bytes)
        .map_err(|e| ImageError::Malformed { name: name.to_owned(), reason: format!("{}: {e}", M::NAME) })
}

/// Builds an image: the inverse of [`split`], message by message.
#[derive(Debug)]
pub struct Builder {
    name: String,
    bytes: Vec<u8>,
}

impl Builder {
    /// An image without messages. `name` is for error messages.
    pub fn new(name: &str, magic: Magic) -> Self {
        let mut bytes = IMG_COMMON_MAGIC.to_le_bytes().to_vec();
        bytes.extend((magic as u32).to_le_bytes());
        Self { name: name.to_owned(), bytes }
    }

    /// Appends a message.
    ///
    /// # Errors
    /// When a required field is missing or the message is too long.
    pub fn push(&mut self, message: &impl Message) -> Result<(), ImageError> {
        let malformed = |reason: String| ImageError::Malformed { name: self.name.clone(), reason };
        let body = message.write_to_bytes().map_err(|e| malformed(e.to_string()))?;
        let size =
            u32::try_from(body.len()).map_err(|_| malformed(format!("entry of {} bytes", body.len())))?;
        self.bytes.extend(size.to_le_bytes());
        self.bytes.extend(body);
        Ok(())
    }

    /// The whole image.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// Reads every message of an image that holds one kind of message.
///
/// # Errors
/// As [`split`] and [`parse`], or an I/O error.
pub fn read_all<M: Message>(path: &Path, magic: Magic) -> Result<Vec<M>, ImageError> {
    let bytes = read_bytes(path)?;
    let name = file_name(path);
    split(&name, magic, &bytes)?.into_iter().map(|entry| parse(&name, entry)).collect()
}

/// Reads the image that must hold exactly one message.
///
/// # Errors
/// As [`read_all`], or when there is another number of messages.
pub fn read_one<M: Message>(path: &Path, magic: Magic) -> Result<M, ImageError> {
    let mut all = read_all(path, magic)?;
    match (all.pop(), all.len()) {
        (Some(one), 0) => Ok(one),
        (found, rest) => Err(ImageError::Malformed {
            name: file_name(path),
            reason: format!("{} entries, expected 1", rest + usize::from(found.is_some())),
        }),
    }
}

/// The bytes of an image of entries (never used for pages).
///
/// # Errors
/// Any I/O error, or a file that is unreasonably large.
pub fn read_bytes(path: &Path) -> Result<Vec<u8>, ImageError> {
    let error = |source| ImageError::Io { action: "read", path: path.to_owned(), source };
    let size = fs::metadata(path).map_err(error)?.len();
    if size > MAX_IMAGE {
        return Err(ImageError::Malformed {
            name: file_name(path),
            reason: format!("{size} bytes is too large"),
        });
    }
    fs::read(path).map_err(error)
}

/// Writes a finished image.
///
/// # Errors
/// Any I/O error.
pub fn write(path: &Path, image: Builder) -> Result<(), ImageError> {
    fs::write(path, image.into_bytes()).map_err(|source| ImageError::Io {
        action: "write",
        path: path.to_owned(),
        source,
    })
}

/// The last component of `path` for error messages.
pub(crate) fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::super::proto::VmaEntry;
    use super::*;

    fn vma_with_unknown_field() -> Vec<u8> {
        let mut vma = VmaEntry::new();
        vma.set_start(4096);
        vma.set_end(8192);
        vma.set_pgoff(0);
        vma.set_shmid(0);
        vma.set_prot(3);
        vma.set_flags(0x22);
        vma.set_status(0x201);
        vma.set_fd(-1);
        let mut bytes = vma.write_to_bytes().unwrap();
        // Field 77, varint 5: a field that a newer CRIU might add.
        bytes.extend([0xe8, 0x04, 5]);
        bytes
    }

    #[test]
    fn unknown_fields_survive_a_rewrite() {
        let bytes = vma_with_unknown_field();
        let mut vma: VmaEntry = parse("x", &bytes).unwrap();
        vma.set_end(12288);
        let again = vma.write_to_bytes().unwrap();
        assert!(again.windows(3).any(|w| w == [0xe8, 0x04, 5]));
    }

    #[test]
    fn build_and_split() {
        let vma: VmaEntry = parse("x", &vma_with_unknown_field()).unwrap();
        let mut image = Builder::new("mm-1.img", Magic::Mm);
        image.push(&vma).unwrap();
        image.push(&vma).unwrap();
        let bytes = image.into_bytes();
        let entries = split("mm-1.img", Magic::Mm, &bytes).unwrap();
        assert_eq!(entries.len(), 2);
        assert_eq!(parse::<VmaEntry>("mm-1.img", entries[1]).unwrap(), vma);
    }

    #[test]
    fn malformed_images_are_refused() {
        let good = Builder::new("x", Magic::Mm).into_bytes();
        let cases: [(&str, Vec<u8>); 6] = [
            ("empty", vec![]),
            ("wrong first word", [&[0u8; 4][..], &good[4..]].concat()),
            ("wrong second word", Builder::new("x", Magic::Files).into_bytes()),
            ("truncated size", [&good[..], &[1, 0]].concat()),
            ("truncated entry", [&good[..], &[4, 0, 0, 0, 1]].concat()),
            ("huge entry", [&good[..], &[0xff, 0xff, 0xff, 0xff]].concat()),
        ];
        for (what, bytes) in cases {
            assert!(split("x", Magic::Mm, &bytes).is_err(), "{what}");
        }
        assert!(parse::<VmaEntry>("x", &[8, 1]).is_err(), "missing required fields");
    }
}
