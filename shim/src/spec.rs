//! The bundle's `config.json`, kept as a document: what the shim does not know must survive its edits.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use thiserror::Error;

use crate::mount::LiftedBind;

/// The annotation from which the runtime takes the path of a CRIU configuration, at checkpoint and at restore.
const CRIU_CONFIG_ANNOTATION: &str = "org.criu.config";

/// `config.json` could not be used.
#[derive(Debug, Error)]
pub enum SpecError {
    /// It cannot be read or written.
    #[error("cannot {act} {}: {source}", .path.display())]
    Io {
        /// `read` or `write`.
        act: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// It is not what the OCI runtime specification says.
    #[error("{} is no OCI runtime configuration: {problem}", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// How a container gets a namespace of one kind.
#[derive(Debug, PartialEq, Eq)]
pub enum Namespace<'a> {
    /// It stays in the namespace of the runtime.
    Host,
    /// It gets one of its own.
    Own,
    /// It joins the one at this path.
    Joined(&'a str),
}

/// The document and where it belongs.
#[derive(Debug)]
pub struct Spec {
    path: PathBuf,
    value: Value,
    changed: bool,
}

impl Spec {
    /// Reads `config.json` of `bundle`.
    ///
    /// # Errors
    /// The file cannot be read, or is no JSON object.
    pub fn load(bundle: &Path) -> Result<Self, SpecError> {
        let path = bundle.join("config.json");
        let bytes = std::fs::read(&path).map_err(|source| SpecError::Io {
            act: "read",
            path: path.clone(),
            source,
        })?;
        let value: Value = serde_json::from_slice(&bytes)
            .map_err(|error| SpecError::Malformed { path: path.clone(), problem: error.to_string() })?;
        if !value.is_object() {
            return Err(SpecError::Malformed { path, problem: "it is no object".to_owned() });
        }
        Ok(Self { path, value, changed: false })
    }

    /// The whole document.
    pub fn document(&self) -> &Value {
        &self.value
    }

    /// The same, and nothing else of this value.
    pub fn into_document(self) -> Value {
        self.value
    }

    /// The value of an annotation.
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.value.get("annotations")?.get(key)?.as_str()
    }

    /// The root filesystem; a relative path in the document starts at the bundle.
    pub fn rootfs(&self) -> Option<PathBuf> {
        let path = self.value.pointer("/root/path")?.as_str()?;
        Some(self.path.parent()?.join(path))
    }

    /// Where the runtime makes the container's cgroups.
    pub fn cgroups_path(&self) -> Option<&str> {
        self.value.pointer("/linux/cgroupsPath")?.as_str()
    }

    /// How the container gets its namespace of kind `kind` (`pid`, `network`, ...).
    pub fn namespace(&self, kind: &str) -> Namespace<'_> {
        let entries = self.value.pointer("/linux/namespaces").and_then(Value::as_array);
        let entry = entries
            .into_iter()
            .flatten()
            .find(|entry| entry.get("type").and_then(Value::as_str) == Some(kind));
        match entry.map(|entry| entry.get("path").and_then(Value::as_str).unwrap_or_default()) {
            None => Namespace::Host,
            Some("") => Namespace::Own,
            Some(path) => Namespace::Joined(path),
        }
    }

    /// Whether something is mounted at `destination`.
    pub fn has_mount(&self, destination: &str) -> bool {
        let mounts = self.value.get("mounts").and_then(Value::as_array);
        let mut mounts = mounts.into_iter().flatten();
        mounts.any(|mount| {
            mount.get("destination").and_then(Value::as_str).map(|d| d.trim_end_matches('/'))
                == Some(destination)
        })
    }

    /// Makes the runtime mount `bind`; a mount that is there already stays alone.
    ///
    /// # Errors
    /// The document's `mounts` is no array.
    pub fn add_bind(&mut self, bind: &LiftedBind) -> Result<(), SpecError> {
        let entry = json!({
            "destination": bind.destination,
            "type": "bind",
            "source": bind.source,
            "options": bind.options,
        });
        let malformed = self.malformed("`mounts` is no array");
        let Some(document) = self.value.as_object_mut() else { return Err(malformed) };
        let mounts = document.entry("mounts").or_insert_with(|| json!([]));
        if mounts.is_null() {
            *mounts = json!([]);
        }
        let Some(mounts) = mounts.as_array_mut() else { return Err(malformed) };
        if !mounts.contains(&entry) {
            mounts.push(entry);
            self.changed = true;
        }
        Ok(())
    }

    /// Names the container's CRIU configuration file. A value that was there is replaced: CRIU obeys that file as
    /// root on the host, so it is the shim's alone.
    ///
    /// # Errors
    /// The document's `annotations` is no object.
    pub fn set_criu_config(&mut self, path: &Path) -> Result<(), SpecError> {
        let path = json!(path.to_string_lossy());
        let malformed = self.malformed("`annotations` is no object");
        let Some(document) = self.value.as_object_mut() else { return Err(malformed) };
        let annotations = document.entry("annotations").or_insert_with(|| json!({}));
        if annotations.is_null() {
            *annotations = json!({});
        }
        let Some(annotations) = annotations.as_object_mut() else { return Err(malformed) };
        if annotations.get(CRIU_CONFIG_ANNOTATION) != Some(&path) {
            annotations.insert(CRIU_CONFIG_ANNOTATION.to_owned(), path);
            self.changed = true;
        }
        Ok(())
    }

    /// Writes the document back if it was edited.
    ///
    /// # Errors
    /// Any error of the file system; the old document is then still there.
    pub fn save(&mut self) -> Result<(), SpecError> {
        if !self.changed {
            return Ok(());
        }
        let bytes = serde_json::to_vec(&self.value).map_err(|error| self.malformed(&error.to_string()))?;
        coldsnap::durable::write_file(&self.path, &bytes, 0o600).map_err(|source| SpecError::Io {
            act: "write",
            path: self.path.clone(),
            source,
        })?;
        self.changed = false;
        Ok(())
    }

    fn malformed(&self, problem: &str) -> SpecError {
        SpecError::Malformed { path: self.path.clone(), problem: problem.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> (tempfile::TempDir, Spec) {
        let bundle = tempfile::tempdir().unwrap();
        std::fs::write(bundle.path().join("config.json"), text).unwrap();
        let spec = Spec::load(bundle.path()).unwrap();
        (bundle, spec)
    }

    #[test]
    fn edits_keep_what_is_unknown_and_are_written_once() {
        let (bundle, mut spec) = spec(r#"{"root":{"path":"rootfs"},"future":{"big":18446744073709551615}}"#);
        let file = bundle.path().join("config.json");
        let before = std::fs::metadata(&file).unwrap().modified().unwrap();
        spec.save().unwrap();
        assert_eq!(std::fs::metadata(&file).unwrap().modified().unwrap(), before);

        let bind = LiftedBind {
            source: "/s".to_owned(),
            destination: "/d".to_owned(),
            options: vec!["bind".to_owned(), "ro".to_owned()],
        };
        spec.add_bind(&bind).unwrap();
        spec.add_bind(&bind).unwrap();
        spec.set_criu_config(Path::new("/smuggled")).unwrap();
        spec.set_criu_config(Path::new("/b/criu.conf")).unwrap();
        spec.save().unwrap();

        let again = Spec::load(bundle.path()).unwrap();
        assert_eq!(again.value["future"]["big"], json!(u64::MAX));
        assert_eq!(
            again.value["mounts"],
            json!([{"destination": "/d", "type": "bind", "source": "/s", "options": ["bind", "ro"]}])
        );
        assert_eq!(again.annotation("org.criu.config"), Some("/b/criu.conf"));
        assert_eq!(again.rootfs().unwrap(), bundle.path().join("rootfs"));
    }

    #[test]
    fn namespaces_are_own_joined_or_the_hosts() {
        let (_bundle, spec) = spec(
            r#"{"linux":{"namespaces":[{"type":"pid"},{"type":"network","path":"/n"},{"type":"ipc","path":""}]}}"#,
        );
        assert_eq!(spec.namespace("pid"), Namespace::Own);
        assert_eq!(spec.namespace("network"), Namespace::Joined("/n"));
        assert_eq!(spec.namespace("ipc"), Namespace::Own);
        assert_eq!(spec.namespace("uts"), Namespace::Host);
    }

    #[test]
    fn what_is_no_configuration_is_refused() {
        let bundle = tempfile::tempdir().unwrap();
        assert!(matches!(Spec::load(bundle.path()), Err(SpecError::Io { .. })));
        std::fs::write(bundle.path().join("config.json"), "[]").unwrap();
        assert!(matches!(Spec::load(bundle.path()), Err(SpecError::Malformed { .. })));
        let (_bundle, mut spec) = spec(r#"{"mounts":7}"#);
        let bind = LiftedBind { source: String::new(), destination: String::new(), options: Vec::new() };
        assert!(matches!(spec.add_bind(&bind), Err(SpecError::Malformed { .. })));
    }
}
