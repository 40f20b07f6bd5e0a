//! The runtime options of a request, and the copy in the bundle that `delete` reads after the shim has died.

use std::io;
use std::path::Path;

use containerd_shim::bootstrap::any_is;
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::shim::oci;
use serde::{Deserialize, Serialize};

use crate::error::TaskError;

/// In the bundle; written at Create.
const FILE: &str = "coldsnap-options.json";

/// What the shim uses of `containerd.runc.v1.Options`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Options {
    /// The OCI runtime's binary; empty for `runc`.
    pub binary_name: String,
    /// Parent of the runtime's state directories; empty for the default.
    pub root: String,
    /// cgroups are managed through systemd.
    pub systemd_cgroup: bool,
    /// `MS_MOVE` instead of `pivot_root`.
    pub no_pivot_root: bool,
    /// No session keyring of its own.
    pub no_new_keyring: bool,
    /// User that owns the pipes.
    pub io_uid: u32,
    /// Group that owns the pipes.
    pub io_gid: u32,
    /// Directory for checkpoints whose request names none.
    pub criu_image_path: String,
    /// Directory for CRIU's files.
    pub criu_work_path: String,
}

impl Options {
    /// Decodes the options of a request; none at all gives the defaults.
    ///
    /// # Errors
    /// The message has a type that this shim does not know, or cannot be decoded.
    pub fn decode(any: Option<&Any>) -> Result<Self, TaskError> {
        // containerd sends an Any without a type when there are no options.
        let Some(any) = any.filter(|any| !any.type_url.is_empty()) else { return Ok(Self::default()) };
        if !any_is::<oci::Options>(any) {
            return Err(TaskError::InvalidArgument(format!(
                "runtime options of type {:?} are not known; containerd.runc.v1.Options is expected",
                any.type_url
            )));
        }
        let options = oci::Options::parse_from_bytes(&any.value).map_err(|error| {
            TaskError::InvalidArgument(format!(
                "runtime options ({}) cannot be decoded: {error}",
                any.type_url
            ))
        })?;
        Ok(Self {
            binary_name: options.binary_name,
            root: options.root,
            systemd_cgroup: options.systemd_cgroup,
            no_pivot_root: options.no_pivot_root,
            no_new_keyring: options.no_new_keyring,
            io_uid: options.io_uid,
            io_gid: options.io_gid,
            criu_image_path: options.criu_image_path,
            criu_work_path: options.criu_work_path,
        })
    }

    /// Leaves a copy in the bundle.
    ///
    /// # Errors
    /// Any error of the file system.
    pub fn save(&self, bundle: &Path) -> Result<(), TaskError> {
        let path = bundle.join(FILE);
        let act = format!("write {}", path.display());
        let bytes =
            serde_json::to_vec(self).map_err(|error| TaskError::Other(format!("cannot {act}: {error}")))?;
        coldsnap::durable::write_file(&path, &bytes, 0o600).map_err(TaskError::io(act))
    }

    /// The copy in the bundle; the defaults when the shim died before it wrote one.
    ///
    /// # Errors
    /// The file cannot be read or parsed.
    pub fn load(bundle: &Path) -> Result<Self, TaskError> {
        let path = bundle.join(FILE);
        let act = format!("read {}", path.display());
        match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(|error| TaskError::Other(format!("cannot {act}: {error}"))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(TaskError::io(act)(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any(type_url: &str, value: Vec<u8>) -> Any {
        Any { type_url: type_url.to_owned(), value, ..Default::default() }
    }

    #[test]
    fn options_survive_the_death_of_the_shim() {
        let message = oci::Options {
            binary_name: "crun".to_owned(),
            systemd_cgroup: true,
            io_uid: 7,
            ..Default::default()
        };
        let any = any("containerd.runc.v1.Options", message.write_to_bytes().unwrap());
        let options = Options::decode(Some(&any)).unwrap();
        assert_eq!((options.binary_name.as_str(), options.systemd_cgroup, options.io_uid), ("crun", true, 7));

        let bundle = tempfile::tempdir().unwrap();
        assert_eq!(Options::load(bundle.path()).unwrap(), Options::default());
        options.save(bundle.path()).unwrap();
        assert_eq!(Options::load(bundle.path()).unwrap(), options);
    }

    #[test]
    fn unknown_options_are_refused_by_name() {
        assert_eq!(Options::decode(None).unwrap(), Options::default());
        assert_eq!(Options::decode(Some(&any("", Vec::new()))).unwrap(), Options::default());
        let error = Options::decode(Some(&any("runtimeoptions.v1.Options", Vec::new()))).unwrap_err();
        assert!(
            matches!(&error, TaskError::InvalidArgument(text) if text.contains("runtimeoptions.v1.Options"))
        );
        let broken = Options::decode(Some(&any("containerd.runc.v1.Options", vec![0xff])));
        assert!(matches!(broken, Err(TaskError::InvalidArgument(_))));
    }
}
