//! Reading below a container's root filesystem, whose content is untrusted: no symbolic link is followed and
//! nothing outside is reached.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags, open, openat2};

use super::Refusal;

/// Descriptors, manifests and images of entries; anything larger is not one of ours.
const MAX_DOCUMENT: u64 = crate::format::MAX_DOCUMENT_BYTES;

/// Opens a regular file below `rootfs`, following no symbolic link.
///
/// # Errors
/// What the system answers, and `InvalidData` for anything but a regular file.
pub fn open_file(rootfs: &Path, path: &str) -> io::Result<File> {
    let root = open(rootfs, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let file = File::from(openat2(&root, path, flags, Mode::empty(), resolve)?);
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidData, "not a regular file"))
    }
}

/// The size of a regular file below `rootfs`.
pub fn size(rootfs: &Path, path: &str) -> io::Result<u64> {
    Ok(open_file(rootfs, path)?.metadata()?.len())
}

/// The bytes of a document below `rootfs`.
pub fn read(rootfs: &Path, path: &str) -> Result<Vec<u8>, Refusal> {
    let unreadable = |source| Refusal::Unreadable { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    open_file(rootfs, path)
        .and_then(|file| file.take(MAX_DOCUMENT + 1).read_to_end(&mut bytes))
        .map_err(unreadable)?;
    if bytes.len() as u64 > MAX_DOCUMENT {
        return Err(unreadable(io::Error::new(io::ErrorKind::InvalidData, "it is too large")));
    }
    Ok(bytes)
}

/// As [`read`], `None` when there is no such file.
pub fn read_optional(rootfs: &Path, path: &str) -> Result<Option<Vec<u8>>, Refusal> {
    match read(rootfs, path) {
        Err(Refusal::Unreadable { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn nothing_outside_is_reached() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("opt/real")).unwrap();
        fs::write(dir.path().join("secret"), b"x").unwrap();
        fs::write(root.join("opt/real/a"), b"inside").unwrap();
        symlink("real", root.join("opt/link")).unwrap();
        symlink("../../secret", root.join("opt/secret")).unwrap();
        assert_eq!(read(&root, "opt/real/a").unwrap(), b"inside");
        for path in ["opt/link/a", "opt/secret", "../secret", "/etc/hostname", "opt/real"] {
            assert!(read(&root, path).is_err(), "{path}");
        }
        assert!(read_optional(&root, "opt/none").unwrap().is_none());
        assert!(read_optional(&root, "opt/secret").is_err());
    }
}
