//! Where the checkpoint of a container is on the host: the capture recorded where the container saw it, the spec of
//! the container that is about to start says what is mounted there now.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::files::Place;
use crate::capture::facts::CheckpointFacts;
use crate::format::recovery_manifest::ModelSource;

/// A bind mount of a spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bind<'a> {
    /// Path on the host.
    pub source: &'a str,
    /// Absolute path in the container, without a slash at the end.
    pub destination: &'a str,
}

/// The bind mounts of an OCI spec.
pub fn binds(spec: &Value) -> Vec<Bind<'_>> {
    let mounts = spec.get("mounts").and_then(Value::as_array);
    mounts.into_iter().flatten().filter_map(bind).collect()
}

fn bind(mount: &Value) -> Option<Bind<'_>> {
    let options = mount.get("options").and_then(Value::as_array);
    let mut options = options.into_iter().flatten().filter_map(Value::as_str);
    let is_bind = mount.get("type").and_then(Value::as_str) == Some("bind")
        || options.any(|option| option == "bind" || option == "rbind");
    let destination = mount.get("destination")?.as_str()?.trim_end_matches('/');
    let source = mount.get("source")?.as_str()?;
    let usable = is_bind && Path::new(source).is_absolute() && destination.starts_with('/');
    usable.then_some(Bind { source, destination })
}

/// Where to look: what the capture recorded, through the container's mounts and its root filesystem, then the
/// directories of the configuration.
pub fn places(
    recorded: &[CheckpointFacts],
    rootfs: &Path,
    spec: &Value,
    configured: &[PathBuf],
    model: Option<&ModelSource>,
) -> Vec<Place> {
    let binds = binds(spec);
    let recorded = recorded.iter().map(|fact| through(fact, rootfs, &binds));
    recorded.chain(configured.iter().map(|path| Place::named(path, model))).collect()
}

fn through(fact: &CheckpointFacts, rootfs: &Path, binds: &[Bind<'_>]) -> Place {
    let covering = binds
        .iter()
        .filter_map(|bind| Some((bind, Path::new(&fact.path).strip_prefix(bind.destination).ok()?)))
        .max_by_key(|(bind, _)| bind.destination.len());
    let file = fact.file.clone();
    match covering {
        // The file itself is mounted.
        Some((bind, rest)) if rest.as_os_str().is_empty() && file.is_some() => {
            let source = Path::new(bind.source);
            let real = source.canonicalize().unwrap_or_else(|_| source.to_owned());
            Place {
                root: real.parent().unwrap_or(Path::new("/")).to_owned(),
                path: real.file_name().map(PathBuf::from).unwrap_or_default(),
                file,
            }
        }
        Some((bind, rest)) => Place { root: bind.source.into(), path: rest.to_owned(), file },
        None => Place { root: rootfs.to_owned(), path: fact.path.trim_start_matches('/').into(), file },
    }
}

/// Where the container sees a checkpoint that the host has at `path`; none when no bind mount shows it. `root` is the
/// container's root as the host sees it (`/proc/<pid>/root`).
pub fn seen_by_container(path: &Path, root: &Path, binds: &[Bind<'_>]) -> Option<CheckpointFacts> {
    let file =
        path.is_file().then(|| path.file_name().map(|name| name.to_string_lossy().into_owned())).flatten();
    let inside =
        |path: PathBuf| Some(CheckpointFacts { path: path.to_str()?.to_owned(), file: file.clone() });
    if let Ok(rest) = path.strip_prefix(root) {
        return inside(Path::new("/").join(rest));
    }
    let real = path.canonicalize().ok()?;
    let shown = |bind: &Bind<'_>| {
        let source = Path::new(bind.source).canonicalize().ok()?;
        let rest = real.strip_prefix(&source).ok()?;
        let destination = Path::new(bind.destination);
        let seen = if rest.as_os_str().is_empty() { destination.to_owned() } else { destination.join(rest) };
        Some((source.as_os_str().len(), seen))
    };
    let (_, seen) = binds.iter().filter_map(shown).max_by_key(|(length, _)| *length)?;
    inside(seen)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    fn fact(path: &str, file: Option<&str>) -> CheckpointFacts {
        CheckpointFacts { path: path.to_owned(), file: file.map(str::to_owned) }
    }

    #[test]
    fn a_checkpoint_is_found_again_through_the_mounts() {
        let dir = tempfile::tempdir().unwrap();
        let models = dir.path().join("models");
        fs::create_dir_all(models.join("sub")).unwrap();
        fs::write(models.join("m.gguf"), b"x").unwrap();
        fs::write(dir.path().join("single.gguf"), b"x").unwrap();
        let (models, single) = (models.to_str().unwrap(), dir.path().join("single.gguf"));
        let spec = json!({"mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/", "type": "bind", "source": "/somewhere"},
            {"destination": "/models/", "type": "none", "source": models, "options": ["rbind", "ro"]},
            {"destination": "/one.gguf", "type": "bind", "source": single},
            {"destination": "/relative", "type": "bind", "source": "x"},
        ]});
        let binds = binds(&spec);
        assert_eq!(binds.len(), 2);
        let root = Path::new("/proc/1/root");
        for (host, expected) in [
            (format!("{models}/m.gguf"), Some(fact("/models/m.gguf", Some("m.gguf")))),
            (models.to_owned(), Some(fact("/models", None))),
            (format!("{models}/sub"), Some(fact("/models/sub", None))),
            (single.to_str().unwrap().to_owned(), Some(fact("/one.gguf", Some("single.gguf")))),
            ("/proc/1/root/opt/m".to_owned(), Some(fact("/opt/m", None))),
            (dir.path().to_str().unwrap().to_owned(), None),
            ("/does/not/exist".to_owned(), None),
        ] {
            assert_eq!(seen_by_container(Path::new(&host), root, &binds), expected, "{host}");
        }
        let rootfs = Path::new("/bundle/rootfs");
        let place = |root: &str, path: &str, file: Option<&str>| Place {
            root: root.into(),
            path: path.into(),
            file: file.map(str::to_owned),
        };
        let recorded = [
            fact("/models/m.gguf", Some("m.gguf")),
            fact("/models", None),
            fact("/one.gguf", Some("captured-name.gguf")),
            fact("/opt/m", None),
        ];
        let found = places(&recorded, rootfs, &spec, &["/srv/models".into()], None);
        let real = dir.path().canonicalize().unwrap();
        assert_eq!(
            found,
            [
                place(models, "m.gguf", Some("m.gguf")),
                place(models, "", None),
                place(real.to_str().unwrap(), "single.gguf", Some("captured-name.gguf")),
                place("/bundle/rootfs", "opt/m", None),
                place("/srv/models", "", None),
            ]
        );
    }
}
