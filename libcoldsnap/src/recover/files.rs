//! Opening the files of a checkpoint by the names that a manifest records.
//!
//! A name in a manifest is untrusted. It reaches only into the places that the caller names: every component is
//! resolved below the place's root by the kernel (`openat2`, `RESOLVE_BENEATH`). Symbolic links are followed as
//! long as they stay there, because a Hugging Face cache is made of them: its `snapshots/<revision>/<file>` leads to
//! `../../blobs/<hash>`, so that the root of such a place is the directory above `snapshots`.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags, open, openat2};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::RecoverError;
use crate::capture::checkpoint::Checkpoint;
use crate::capture::source::metadata_sha256;
use crate::digest::Digest;
use crate::format::descriptor::is_clean_relative;
use crate::format::recovery_manifest::ModelSource;

/// A checkpoint whose files can be opened by name.
pub trait CheckpointFiles: fmt::Debug + Send + Sync {
    /// Where it is, for people.
    fn place(&self) -> String;

    /// Opens the file that the checkpoint knows by this name.
    ///
    /// # Errors
    /// It is not there, or cannot be used.
    fn open(&self, name: &str) -> Result<Box<dyn CheckpointFile>, RecoverError>;

    /// The digest of the metadata of a checkpoint that consists of these files, as a capture computes it; none when
    /// the headers cannot be read here.
    fn metadata_sha256(&self, names: &[&str]) -> Option<Digest> {
        let _ = names;
        None
    }
}

/// An open file of a checkpoint.
pub trait CheckpointFile: fmt::Debug + Send + Sync {
    /// Its size.
    fn bytes(&self) -> io::Result<u64>;

    /// Fills `buffer` from `offset`.
    ///
    /// # Errors
    /// Fewer bytes, or what the system answers.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Where it was opened, for people.
    fn place(&self) -> String;
}

/// A directory that has checkpoint files, or one such file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// Nothing outside of this directory is reached.
    pub root: PathBuf,
    /// The directory of the names, or the file itself, below the root; empty for the root.
    pub path: PathBuf,
    /// The name that the checkpoint has for the file; absent for a directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

impl Place {
    /// The place that a person named: a file, a directory, a snapshot of a Hugging Face cache
    /// (`.../snapshots/<revision>`), the directory of one model in such a cache, or the whole cache. The latter two
    /// need to know the model.
    pub fn named(path: &Path, model: Option<&ModelSource>) -> Self {
        if path.is_file() {
            // Whoever names a file means what it leads to; its name is the one that was given.
            let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
            let (root, name) = (real.parent().unwrap_or(Path::new("/")), real.file_name());
            return Self {
                root: root.to_owned(),
                path: name.map(PathBuf::from).unwrap_or_default(),
                file: path.file_name().map(|name| name.to_string_lossy().into_owned()),
            };
        }
        let within = |root: &Path, path: PathBuf| Self { root: root.to_owned(), path, file: None };
        if let Some(model) = model {
            let snapshot = Path::new("snapshots").join(&model.revision);
            let cached = Path::new(&format!("models--{}", model.model_id.replace('/', "--"))).join(&snapshot);
            for candidate in [snapshot, cached] {
                let clean = candidate.to_str().is_some_and(is_clean_relative);
                if clean && path.join(&candidate).is_dir() {
                    return within(path, candidate);
                }
            }
        }
        // Absolute, so that the parent of `.` is found.
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        match (absolute.parent(), absolute.file_name()) {
            (Some(parent), Some(revision)) if parent.file_name().is_some_and(|n| n == "snapshots") => {
                let snapshot = Path::new("snapshots").join(revision);
                within(parent.parent().unwrap_or(Path::new("/")), snapshot)
            }
            _ => within(path, PathBuf::new()),
        }
    }

    /// Opens what the checkpoint knows by this name.
    fn open(&self, name: &str) -> io::Result<File> {
        let below = match &self.file {
            Some(file) if file == name => self.path.clone(),
            Some(_) => return Err(io::ErrorKind::NotFound.into()),
            None => self.path.join(name),
        };
        let root = open(&self.root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        // O_NONBLOCK: opening a pipe that somebody put there must not wait for a writer.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        Ok(openat2(&root, &below, flags, Mode::empty(), resolve)?.into())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path.as_os_str().is_empty() {
            true => write!(f, "{}", self.root.display()),
            false => write!(f, "{}", self.root.join(&self.path).display()),
        }
    }
}

/// Places, searched in order.
#[derive(Debug, Clone, Default)]
pub struct Places(pub Vec<Place>);

impl Places {
    fn find(&self, name: &str) -> Result<(File, &Place), RecoverError> {
        let file = || name.to_owned();
        if !is_clean_relative(name) {
            let problem = format!("{name:?} is not a clean relative path");
            return Err(RecoverError::BadPiece { extent: "of the manifest".to_owned(), problem });
        }
        if self.0.is_empty() {
            return Err(RecoverError::NoPlace {
                help: "give --checkpoint, or list directories in materialize.checkpoints of the configuration",
            });
        }
        let mut refused = None;
        for place in &self.0 {
            let error = match place.open(name) {
                Ok(opened) => {
                    let metadata = opened.metadata();
                    let metadata = metadata.map_err(|source| RecoverError::Io {
                        action: "ask",
                        file: file(),
                        source,
                    })?;
                    if metadata.is_file() {
                        return Ok((opened, place));
                    }
                    RecoverError::NotRegular { file: file(), place: place.to_string() }
                }
                Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                    continue;
                }
                Err(e) => match Errno::from_io_error(&e) {
                    Some(Errno::XDEV | Errno::LOOP) => {
                        RecoverError::LeadsOut { file: file(), place: place.root.display().to_string() }
                    }
                    _ => RecoverError::Io { action: "open", file: file(), source: e },
                },
            };
            refused = refused.or(Some(error));
        }
        let looked = || self.0.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        Err(refused.unwrap_or_else(|| RecoverError::MissingFile { file: file(), looked: looked() }))
    }
}

impl CheckpointFiles for Places {
    fn place(&self) -> String {
        self.0.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    }

    fn open(&self, name: &str) -> Result<Box<dyn CheckpointFile>, RecoverError> {
        let (file, place) = self.find(name)?;
        let path = if place.file.is_some() { place.to_string() } else { format!("{place}/{name}") };
        Ok(Box::new(LocalFile { file, path }))
    }

    fn metadata_sha256(&self, names: &[&str]) -> Option<Digest> {
        let files: Vec<_> =
            names.iter().map(|name| Some((*name, self.find(name).ok()?.0))).collect::<Option<_>>()?;
        let named = files.iter().map(|(name, file)| {
            // What was opened is what is read, wherever its name leads by now.
            ((*name).to_owned(), PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())))
        });
        let checkpoint = Checkpoint::open_named(named.collect()).ok()?;
        Some(metadata_sha256(&checkpoint))
    }
}

#[derive(Debug)]
struct LocalFile {
    file: File,
    path: String,
}

impl CheckpointFile for LocalFile {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    fn place(&self) -> String {
        self.path.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn read(places: &Places, name: &str) -> Result<Vec<u8>, RecoverError> {
        let file = places.open(name)?;
        let mut bytes = vec![0; usize::try_from(file.bytes().unwrap()).unwrap()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        Ok(bytes)
    }

    fn named(path: &Path, model: Option<&ModelSource>) -> Places {
        Places(vec![Place::named(path, model)])
    }

    #[test]
    fn a_hugging_face_cache_is_followed_inside_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let revision = "0123456789abcdef0123456789abcdef01234567";
        let model = dir.path().join("hub/models--org--m");
        let snapshot = model.join("snapshots").join(revision);
        fs::create_dir_all(snapshot.join("part")).unwrap();
        fs::create_dir_all(model.join("blobs")).unwrap();
        fs::write(model.join("blobs/abc"), b"weights").unwrap();
        symlink("../../blobs/abc", snapshot.join("m.safetensors")).unwrap();
        symlink("../../../blobs/abc", snapshot.join("part/p.safetensors")).unwrap();
        fs::write(dir.path().join("secret"), b"secret").unwrap();
        symlink("../../../../secret", snapshot.join("out.safetensors")).unwrap();
        let source = ModelSource {
            model_id: "org/m".to_owned(),
            revision: revision.to_owned(),
            metadata_sha256: Digest::of(b""),
        };
        for path in [&snapshot, &model, &dir.path().join("hub")] {
            let places = named(path, Some(&source));
            assert_eq!(read(&places, "m.safetensors").unwrap(), b"weights", "{}", path.display());
            assert_eq!(read(&places, "part/p.safetensors").unwrap(), b"weights");
            let error = read(&places, "out.safetensors").unwrap_err();
            assert!(matches!(error, RecoverError::LeadsOut { .. }), "{error}");
        }
        let hostile = ModelSource { model_id: "../secret".to_owned(), ..source };
        assert_eq!(Place::named(dir.path(), Some(&hostile)).path, Path::new(""));
    }

    #[test]
    fn names_reach_nothing_outside() {
        let dir = tempfile::tempdir().unwrap();
        let inside = dir.path().join("in");
        fs::create_dir_all(inside.join("sub")).unwrap();
        fs::write(dir.path().join("secret"), b"secret").unwrap();
        symlink(dir.path().join("secret"), inside.join("absolute")).unwrap();
        symlink("../secret", inside.join("relative")).unwrap();
        symlink("loop", inside.join("loop")).unwrap();
        let places = named(&inside, None);
        for name in ["absolute", "relative", "loop"] {
            let error = read(&places, name).unwrap_err();
            assert_eq!(error.kind(), "CheckpointRefused", "{name}: {error}");
        }
        for name in ["../secret", "/etc/hostname", "sub/../../secret", ""] {
            assert_eq!(read(&places, name).unwrap_err().kind(), "Malformed", "{name}");
        }
        assert!(matches!(read(&places, "sub").unwrap_err(), RecoverError::NotRegular { .. }));
        let missing = read(&places, "none").unwrap_err();
        assert_eq!(missing.kind(), "CheckpointMissing");
        assert!(missing.to_string().contains(&inside.display().to_string()), "{missing}");
        assert!(matches!(read(&Places::default(), "x").unwrap_err(), RecoverError::NoPlace { .. }));
    }

    #[test]
    fn a_named_file_is_found_by_the_name_that_was_given() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("blobs")).unwrap();
        fs::write(dir.path().join("blobs/abc"), b"weights").unwrap();
        symlink("blobs/abc", dir.path().join("m.gguf")).unwrap();
        let places = named(&dir.path().join("m.gguf"), None);
        assert_eq!(read(&places, "m.gguf").unwrap(), b"weights");
        assert_eq!(read(&places, "abc").unwrap_err().kind(), "CheckpointMissing");
    }

    #[test]
    fn a_pipe_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            dir.path().join("m.gguf"),
            rustix::fs::FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        )
        .unwrap();
        let error = read(&named(dir.path(), None), "m.gguf").unwrap_err();
        assert!(matches!(error, RecoverError::NotRegular { .. }), "{error}");
    }
}
