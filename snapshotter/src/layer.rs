//! What a layer has to do with a capsule, found in its directory when it is committed.
//!
//! A layer is untrusted: every path is opened beneath its directory without following a symbolic link,
//! and nothing larger than a descriptor can be is read.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use coldsnap::capsule;
use coldsnap::format::artifact;
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::error::Error;
use crate::payloads;
use crate::record::{Layer, Payload, Record};

/// A descriptor of a few hundred workers has some hundred kilobytes.
const MAX_ARTIFACT_BYTES: u64 = artifact::MAX_BYTES;

/// Extended attributes by which overlay marks a directory that hides what is below it; the second one is
/// used by mounts with `userxattr`.
const OPAQUE_ATTRIBUTES: [&str; 2] = ["trusted.overlay.opaque", "user.overlay.opaque"];

/// Looks for a capsule in the layer whose content is at `fs`.
///
/// # Errors
/// Only those that say nothing about the layer's content, as when `fs` cannot be opened. A layer that is
/// wrong in itself is [`Layer::Broken`], not an error: it must be possible to pull and remove it.
pub fn inspect(fs: &Path) -> Result<Layer, Error> {
    let root = File::open(fs).map_err(Error::io("open the layer", fs))?;
    let failed = |path: &str, errno: Errno| Error::io("inspect", &fs.join(path))(errno);

    // Outermost first: a directory that is not in this layer ends the search.
    let mut prefix = String::new();
    for name in capsule::CAPSULE_DIR.split('/') {
        if !prefix.is_empty() {
            prefix.push('/');
        }
        prefix.push_str(name);
        let hidden = |what: &str| Ok(Layer::Hidden { reason: format!("/{prefix} {what}") });
        match probe(root.as_fd(), &prefix).map_err(|e| failed(&prefix, e))? {
            Entry::Absent => return Ok(Layer::Plain),
            Entry::Whiteout => return hidden("is removed"),
            Entry::File | Entry::Other => return hidden("is not a directory"),
            Entry::Directory => {}
        }
        // Below an opaque directory nothing of a lower capsule is left; one of this layer may follow.
        let opaque = is_opaque(root.as_fd(), &prefix).map_err(|e| failed(&prefix, e))?;
        if opaque && matches!(probe(root.as_fd(), capsule::ARTIFACT_PATH), Ok(Entry::Absent)) {
            return hidden("is replaced by a directory without a capsule");
        }
    }

    let broken = |reason: String| Ok(Layer::Broken { reason });
    let path = capsule::ARTIFACT_PATH;
    match probe(root.as_fd(), path).map_err(|e| failed(path, e))? {
        Entry::File => {}
        Entry::Absent => {
            let reason = format!("/{} is changed without a new {}", capsule::CAPSULE_DIR, file_name(path));
            return Ok(Layer::Hidden { reason });
        }
        Entry::Whiteout => return Ok(Layer::Hidden { reason: format!("/{path} is removed") }),
        Entry::Directory | Entry::Other => return broken(format!("/{path} is not a regular file")),
    }
    let mut bytes = Vec::new();
    File::from(open(root.as_fd(), path, OFlags::RDONLY).map_err(|e| failed(path, e))?)
        .take(MAX_ARTIFACT_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(Error::io("read", &fs.join(path)))?;
    if bytes.len() as u64 > MAX_ARTIFACT_BYTES {
        return broken(format!("/{path} is larger than {MAX_ARTIFACT_BYTES} bytes"));
    }
    let payloads = match payloads::requirements(&bytes) {
        Ok(payloads) => payloads,
        Err(reason) => return broken(format!("/{path}: {reason}")),
    };
    // A bind needs a file to stand on; without one not even a cold start would get its mounts.
    for payload in &payloads {
        let target = bind_target(payload);
        if probe(root.as_fd(), &target).map_err(|e| failed(&target, e))? != Entry::File {
            return broken(format!("/{target}, over which the payload is mounted, is not a regular file"));
        }
    }
    Ok(Layer::Capsule { payloads })
}

/// The capsule that a container on these ancestors (nearest first) sees: the nearest layer that says
/// anything about one decides.
pub fn of_chain(ancestors: &[Record]) -> &Layer {
    ancestors.iter().map(|a| &a.layer).find(|layer| **layer != Layer::Plain).unwrap_or(&Layer::Plain)
}

/// Where a payload is mounted, relative to the container's root.
pub fn bind_target(payload: &Payload) -> String {
    format!("{}/{}/{}", capsule::HYDRATION_DIR, payload.worker, capsule::PACK_NAME)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    Absent,
    /// Overlay's mark for a removed file: a character device 0:0.
    Whiteout,
    Directory,
    File,
    Other,
}

/// What is at `path` in the layer.
fn probe(root: impl AsFd, path: &str) -> Result<Entry, Errno> {
    let entry = match open(root, path, OFlags::PATH | OFlags::NOFOLLOW) {
        Ok(entry) => entry,
        Err(Errno::NOENT) => return Ok(Entry::Absent),
        // A component on the way is no directory, or a link, or leads out of the layer.
        Err(Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => return Ok(Entry::Other),
        Err(errno) => return Err(errno),
    };
    let stat = rustix::fs::fstat(&entry)?;
    Ok(match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Entry::Directory,
        FileType::RegularFile => Entry::File,
        FileType::CharacterDevice if stat.st_rdev == 0 => Entry::Whiteout,
        _ => Entry::Other,
    })
}

fn is_opaque(root: impl AsFd, path: &str) -> Result<bool, Errno> {
    let directory = open(root, path, OFlags::RDONLY | OFlags::DIRECTORY)?;
    for name in OPAQUE_ATTRIBUTES {
        let mut value = [0; 8];
        match rustix::fs::fgetxattr(&directory, name, &mut value) {
            Ok(length) if value.get(..length) == Some(b"y") => return Ok(true),
            // Longer values are not overlay's mark.
            Ok(_) | Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::RANGE) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(false)
}

fn open(root: impl AsFd, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    rustix::fs::openat2(root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use coldsnap::digest::Digest;
    use rustix::fs::{CWD, XattrFlags, makedev, mknodat, setxattr};
    use tempfile::TempDir;

    use super::*;
    use crate::testing;

    fn layer() -> TempDir {
        tempfile::tempdir().unwrap()
    }

    fn payload(worker: &str, bytes: u64) -> Payload {
        Payload { worker: worker.to_owned(), digest: Digest::of(worker.as_bytes()), bytes }
    }

    fn write_capsule(layer: &TempDir, payloads: &[Payload]) {
        let payloads: Vec<_> = payloads.iter().map(|p| (p.worker.as_str(), p.digest, p.bytes)).collect();
        testing::write_capsule(layer.path(), &payloads);
    }

    fn whiteout(layer: &TempDir, path: &str) {
        let path = layer.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        mknodat(CWD, &path, FileType::CharacterDevice, Mode::empty(), makedev(0, 0)).unwrap();
    }

    fn opaque(layer: &TempDir, path: &str) {
        let path = layer.path().join(path);
        fs::create_dir_all(&path).unwrap();
        setxattr(&path, "trusted.overlay.opaque", b"y", XattrFlags::empty()).unwrap();
    }

    fn reason(layer: &TempDir) -> (&'static str, String) {
        match inspect(layer.path()).unwrap() {
            Layer::Plain => ("plain", String::new()),
            Layer::Capsule { .. } => ("capsule", String::new()),
            Layer::Broken { reason } => ("broken", reason),
            Layer::Hidden { reason } => ("hidden", reason),
        }
    }

    #[test]
    fn finds_the_payloads_of_a_capsule() {
        let layer = layer();
        let payloads = vec![payload("w0", 4096), payload("w1", 8192)];
        write_capsule(&layer, &payloads);
        assert_eq!(inspect(layer.path()).unwrap(), Layer::Capsule { payloads });
    }

    #[test]
    fn a_replacing_capsule_directory_is_a_capsule() {
        let layer = layer();
        let payloads = vec![payload("w0", 4096)];
        write_capsule(&layer, &payloads);
        opaque(&layer, "opt/coldsnap/capsule");
        assert_eq!(inspect(layer.path()).unwrap(), Layer::Capsule { payloads });
    }

    #[test]
    fn layers_without_a_capsule_are_plain() {
        let layer = layer();
        assert_eq!(reason(&layer).0, "plain");
        fs::create_dir_all(layer.path().join("opt/coldsnap")).unwrap();
        fs::write(layer.path().join("opt/coldsnap/readme"), "").unwrap();
        assert_eq!(reason(&layer).0, "plain");
    }

    #[test]
    fn layers_that_hide_a_capsule() {
        for path in ["opt", "opt/coldsnap", "opt/coldsnap/capsule", "opt/coldsnap/capsule/artifact.json"] {
            let layer = layer();
            whiteout(&layer, path);
            assert_eq!(reason(&layer), ("hidden", format!("/{path} is removed")));
        }
        for path in ["opt", "opt/coldsnap", "opt/coldsnap/capsule"] {
            let layer = layer();
            opaque(&layer, path);
            assert_eq!(reason(&layer).0, "hidden", "{path}");
        }
        let layer = layer();
        fs::create_dir_all(layer.path().join("opt/coldsnap/capsule/hydration")).unwrap();
        assert_eq!(reason(&layer).0, "hidden");
    }

    #[test]
    fn links_are_not_followed() {
        let elsewhere = layer();
        write_capsule(&elsewhere, &[]);
        let target = elsewhere.path().join("opt/coldsnap");
        let layer = layer();
        fs::create_dir(layer.path().join("opt")).unwrap();
        symlink(&target, layer.path().join("opt/coldsnap")).unwrap();
        assert_eq!(reason(&layer), ("hidden", "/opt/coldsnap is not a directory".to_owned()));

        let layer = self::layer();
        fs::create_dir_all(layer.path().join("opt/coldsnap/capsule")).unwrap();
        symlink(target.join("capsule/artifact.json"), layer.path().join(capsule::ARTIFACT_PATH)).unwrap();
        assert_eq!(reason(&layer).0, "broken");
    }

    #[test]
    fn what_cannot_be_understood_is_broken() {
        let write = |layer: &TempDir, bytes: &[u8]| {
            fs::create_dir_all(layer.path().join(capsule::CAPSULE_DIR)).unwrap();
            fs::write(layer.path().join(capsule::ARTIFACT_PATH), bytes).unwrap();
        };
        let layer = layer();
        write(&layer, b"{");
        assert_eq!(reason(&layer).0, "broken");
        write(&layer, &vec![b' '; 4 * 1024 * 1024 + 1]);
        assert!(reason(&layer).1.contains("larger"), "{:?}", reason(&layer));

        let layer = self::layer();
        let payload = payload("w0", 4096);
        write_capsule(&layer, std::slice::from_ref(&payload));
        fs::remove_file(layer.path().join(bind_target(&payload))).unwrap();
        assert!(reason(&layer).1.contains("model-weights.pack"), "{:?}", reason(&layer));
    }

    #[test]
    fn the_nearest_layer_that_speaks_decides() {
        let record = |layer| Record { layer, ..Record::default() };
        let upper = Layer::Capsule { payloads: vec![] };
        let lower = Layer::Broken { reason: String::new() };
        let chain = [record(Layer::Plain), record(upper.clone()), record(lower)];
        assert_eq!(of_chain(&chain), &upper);
        assert_eq!(of_chain(&chain[..1]), &Layer::Plain);
        assert_eq!(of_chain(&[]), &Layer::Plain);
    }
}
