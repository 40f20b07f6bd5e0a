//! OCI images made on the spot from files of the node: deterministic layers in an OCI archive that `ctr images import` takes.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::process;

/// The files of one layer, by path without a leading slash; written in that order, with no times and owned by root.
#[derive(Debug, Default)]
pub struct Layer(BTreeMap<PathBuf, Entry>);

#[derive(Debug)]
enum Entry {
    Directory,
    Link(PathBuf),
    File { content: Content, mode: u32 },
}

#[derive(Debug)]
enum Content {
    Of(PathBuf),
    Bytes(Vec<u8>),
}

impl Layer {
    /// A layer with the directories that every container needs.
    pub fn new() -> Self {
        let mut layer = Self::default();
        for directory in ["dev", "etc", "proc", "run", "sys", "tmp"] {
            layer.0.insert(directory.into(), Entry::Directory);
        }
        layer
    }

    /// Adds an empty directory.
    pub fn directory(&mut self, path: &str) {
        self.0.insert(path.trim_start_matches('/').into(), Entry::Directory);
    }

    /// Adds a file of given content.
    pub fn bytes(&mut self, path: &str, content: impl Into<Vec<u8>>, mode: u32) {
        self.0.insert(
            path.trim_start_matches('/').into(),
            Entry::File { content: Content::Bytes(content.into()), mode },
        );
    }

    /// Adds a file of the node under another path.
    pub fn file(&mut self, source: &Path, path: &str) -> Result<()> {
        let mode = fs::metadata(source)
            .with_context(|| format!("cannot read {}", source.display()))?
            .permissions()
            .mode()
            & 0o7777;
        self.0.insert(
            path.trim_start_matches('/').into(),
            Entry::File { content: Content::Of(source.to_owned()), mode },
        );
        Ok(())
    }

    /// Adds a file of the node at its own path, with every symbolic link that leads to it.
    pub fn host_file(&mut self, path: &Path) -> Result<()> {
        let mut resolved = PathBuf::from("/");
        let mut rest: Vec<PathBuf> = components(path);
        let mut links = 0;
        while !rest.is_empty() {
            let here = resolved.join(rest.remove(0));
            let kind = fs::symlink_metadata(&here)
                .with_context(|| format!("cannot read {}", here.display()))?
                .file_type();
            let name = here.strip_prefix("/")?.to_owned();
            if kind.is_symlink() {
                links += 1;
                if links > 40 {
                    bail!("too many symbolic links on the way to {}", path.display());
                }
                let target = fs::read_link(&here)?;
                let base = if target.is_absolute() { PathBuf::from("/") } else { resolved.clone() };
                self.0.insert(name, Entry::Link(target.clone()));
                let mut ahead = components(&normal(&base.join(target)));
                ahead.append(&mut rest);
                (resolved, rest) = (PathBuf::from("/"), ahead);
            } else if kind.is_dir() {
                self.0.entry(name).or_insert(Entry::Directory);
                resolved = here;
            } else {
                return self.file(&here, &name.to_string_lossy());
            }
        }
        Ok(())
    }

    /// Adds programs or libraries of the node with all shared libraries they need.
    pub fn programs<P: AsRef<OsStr>>(&mut self, paths: &[P]) -> Result<()> {
        for path in paths {
            self.host_file(Path::new(path))?;
        }
        self.libraries_of(paths)
    }

    /// Adds the shared libraries that `ldd` names for `paths`.
    pub fn libraries_of<P: AsRef<OsStr>>(&mut self, paths: &[P]) -> Result<()> {
        let listing = process::run(Command::new("ldd").args(paths))?;
        if let Some(line) = listing.lines().find(|line| line.contains("not found")) {
            bail!("a library is missing on the node: {}", line.trim());
        }
        let words = listing
            .lines()
            .filter(|line| line.starts_with(char::is_whitespace))
            .flat_map(str::split_whitespace);
        for library in words.filter(|word| word.starts_with('/')) {
            self.host_file(Path::new(library))?;
        }
        Ok(())
    }

    fn write(&self, to: impl Write) -> Result<()> {
        let mut tar = tar::Builder::new(to);
        for (path, entry) in &self.0 {
            let mut header = tar::Header::new_gnu();
            header.set_mtime(0);
            header.set_uid(0);
            header.set_gid(0);
            header.set_size(0);
            header.set_mode(0o755);
            match entry {
                Entry::Directory => {
                    header.set_entry_type(tar::EntryType::Directory);
                    tar.append_data(&mut header, path, std::io::empty())?;
                }
                Entry::Link(target) => {
                    header.set_entry_type(tar::EntryType::Symlink);
                    tar.append_link(&mut header, path, target)?;
                }
                Entry::File { content, mode } => {
                    header.set_mode(*mode);
                    match content {
                        Content::Bytes(bytes) => {
                            header.set_size(bytes.len() as u64);
                            tar.append_data(&mut header, path, bytes.as_slice())?;
                        }
                        Content::Of(source) => {
                            let file = fs::File::open(source)
                                .with_context(|| format!("cannot read {}", source.display()))?;
                            header.set_size(file.metadata()?.len());
                            tar.append_data(&mut header, path, file)?;
                        }
                    }
                }
            }
        }
        Ok(tar.into_inner()?.flush()?)
    }
}

fn components(path: &Path) -> Vec<PathBuf> {
    path.components()
        .filter(|part| matches!(part, Component::Normal(_)))
        .map(|part| PathBuf::from(part.as_os_str()))
        .collect()
}

/// `path` without `.` and `..`; it has no links before its last part, so that this is what the kernel would find.
fn normal(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                parts.pop();
            }
            Component::CurDir => {}
            other => parts.push(other),
        }
    }
    parts
}

/// Writes an OCI archive of one layer for this machine's architecture to `archive`. `config` is the image configuration's `config` object
/// (`Entrypoint`, `Cmd`, `Env`, ...).
pub fn write(archive: &Path, reference: &str, layer: &Layer, config: &Value) -> Result<()> {
    let mut tar = Vec::new();
    layer.write(&mut tar).with_context(|| format!("cannot write the layer of {reference}"))?;
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let mut layout = Layer::default();
    let mut blob = |media_type: &str, bytes: Vec<u8>| -> Value {
        let digest = hex::encode(Sha256::digest(&bytes));
        let descriptor =
            json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len()});
        layout.bytes(&format!("blobs/sha256/{digest}"), bytes, 0o644);
        descriptor
    };
    let layer = blob("application/vnd.oci.image.layer.v1.tar", tar);
    let config = json!({"architecture": architecture, "os": "linux", "config": config,
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]}});
    let config = blob("application/vnd.oci.image.config.v1+json", serde_json::to_vec(&config)?);
    let manifest = json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": [layer]});
    let mut manifest = blob("application/vnd.oci.image.manifest.v1+json", serde_json::to_vec(&manifest)?);
    manifest["annotations"] = json!({"io.containerd.image.name": reference});
    layout.bytes("oci-layout", r#"{"imageLayoutVersion":"1.0.0"}"#, 0o644);
    layout.bytes(
        "index.json",
        serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [manifest]}))?,
        0o644,
    );
    let file = fs::File::create(archive).with_context(|| format!("cannot create {}", archive.display()))?;
    layout.write(file).with_context(|| format!("cannot write {}", archive.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_files_give_the_same_layer() {
        let write = |names: [&str; 2]| {
            let mut layer = Layer::new();
            for name in names {
                layer.bytes(name, name, 0o644);
            }
            let mut bytes = Vec::new();
            layer.write(&mut bytes).unwrap();
            bytes
        };
        assert_eq!(write(["/a/x", "b"]), write(["b", "/a/x"]));
        assert_ne!(write(["/a/x", "b"]), write(["/a/y", "b"]));
    }

    #[test]
    fn a_program_brings_its_links_and_libraries() {
        let mut layer = Layer::new();
        layer.programs(&["/bin/sh"]).unwrap();
        let real = fs::canonicalize("/bin/sh").unwrap();
        assert!(layer.0.contains_key(real.strip_prefix("/").unwrap()));
        assert!(layer.0.keys().any(|path| path.to_string_lossy().contains("libc.so")));
    }
}
