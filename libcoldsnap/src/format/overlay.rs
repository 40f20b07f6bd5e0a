//! `overlay.json`: a target-local residual overlay. After a restore on this host the unit was captured again, and the
//! new capsule lies here: it is used instead of the portable one by exactly this host, as long as nothing that it was
//! captured with has changed. The payloads stay the portable artifact's: an overlay names them and never holds them.
//!
//! It is never published. A missing, stale or invalid overlay means: use the portable artifact.
//!
//! [`Overlay::parse`] is strict, unknown fields included. [`Overlay::check_against`] compares it with the portable
//! descriptor, [`Overlay::mismatches`] with the machine it would be used on.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::artifact::{Artifact, DriverId, DriverRef};
use super::descriptor::{self, DescriptorError, Object, Rules};
use super::document::{self, FormatError};
use crate::digest::Digest;
use crate::extent::LayoutError;

/// How errors name the document.
pub const DOCUMENT: &str = "overlay.json";
/// The only value of `format`.
pub const FORMAT: u32 = 1;
/// The only value of `kind`.
pub const KIND: &str = "coldsnap-target-overlay";
/// The only value of `state`.
pub const STATE: &str = "committed";

const RULES: Rules = Rules { document: DOCUMENT };

/// The whole document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overlay {
    /// [`FORMAT`].
    pub format: u32,
    /// [`KIND`].
    pub kind: String,
    /// [`STATE`].
    pub state: String,
    /// Id of the capture on the target.
    pub capture_id: String,
    /// When it was captured, nanoseconds since the epoch.
    pub created_unix_ns: u64,
    /// Digest of the portable artifact's descriptor, see [`portable_digest`].
    pub portable_descriptor: Digest,
    /// Equal to the portable artifact's.
    pub snapshot_driver: DriverRef,
    /// The machines; equality is exact.
    pub target: Target,
    /// Equal in owner, role, bytes and digest to the portable artifact's payload objects. May be empty only for `host`.
    pub payloads: Vec<Object>,
    /// The files of the local capsule, paths relative to its directory.
    pub capsule_objects: Vec<Object>,
}

/// Everything about the target that must not change while an overlay is used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// The hosts of the units, by rank: the position is the rank.
    pub hosts: Vec<HostIdentity>,
    /// All accelerators that the workers use, by host and position; empty for `host`.
    pub accelerators: Vec<Accelerator>,
    /// Exact versions of what made the images and runs them.
    pub versions: Versions,
    /// CPU features that every host of `hosts` has, as `/proc/cpuinfo` names them: sorted, unique.
    pub cpu_features: Vec<String>,
}

/// One machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostIdentity {
    /// SHA-256 of the text of `/etc/machine-id` without white space around it: the id itself is confidential.
    pub machine_id_sha256: Digest,
    /// Its name, free text: for people, never compared.
    pub hostname: String,
}

/// One accelerator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Accelerator {
    /// Rank of its host.
    pub host: usize,
    /// The device's own id, e.g. `GPU-...`.
    pub uuid: String,
    /// Product name.
    pub model: String,
    /// Size of its memory.
    pub memory_bytes: u64,
}

/// Versions, compared as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Versions {
    /// `uname -r`
    pub kernel: String,
    /// CRIU.
    pub criu: String,
    /// The OCI runtime.
    pub runc: String,
    /// NVIDIA driver; absent exactly for `host`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvidia_driver: Option<String>,
    /// CUDA in the container; absent exactly for `host`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda: Option<String>,
}

/// A binding that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Mismatch {
    /// Path of the field in the overlay.
    pub field: String,
    /// What the overlay is bound to.
    pub bound_to: String,
    /// What was found.
    pub found: String,
}

/// The digest by which an overlay names its portable artifact: of the canonical JSON of the descriptor as it stands in
/// the file, so that the layout of the text does not matter and every value does.
///
/// # Errors
/// When the bytes are not one JSON value.
pub fn portable_digest(artifact: &[u8]) -> Result<Digest, FormatError> {
    match super::canonical_json::of_text(artifact) {
        Ok(text) => Ok(Digest::of(text.as_bytes())),
        Err(e) => Err(FormatError::new(super::artifact::DOCUMENT, ".", e)),
    }
}

impl Overlay {
    /// Parses an overlay and checks all rules that need nothing else.
    ///
    /// # Errors
    /// Names the field and what is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Self, DescriptorError> {
        document::limit(DOCUMENT, bytes, super::artifact::MAX_BYTES)?;
        let overlay: Self = document::parse(DOCUMENT, bytes)?;
        overlay.check()?;
        Ok(overlay)
    }

    /// Reads and parses a file.
    ///
    /// # Errors
    /// As [`Self::parse`], and what the file system answers.
    pub fn read(path: &Path) -> Result<Self, DescriptorError> {
        document::read_bytes(path, DOCUMENT).map_err(DescriptorError::File).and_then(|b| Self::parse(&b))
    }

    /// The text of the file: indent 2, sorted keys, newline at the end.
    ///
    /// # Errors
    /// A violated rule.
    pub fn to_bytes(&self) -> Result<Vec<u8>, DescriptorError> {
        self.check()?;
        Ok(document::to_bytes(DOCUMENT, self)?)
    }

    /// Writes the overlay durably to a new file; it is never overwritten.
    ///
    /// # Errors
    /// A violated rule, an existing file, or what the file system answers.
    pub fn write_new(&self, path: &Path) -> Result<(), DescriptorError> {
        descriptor::write_new(path, &self.to_bytes()?)
    }

    /// Checks the rules that need nothing but the document.
    ///
    /// # Errors
    /// The first violation.
    pub fn check(&self) -> Result<(), DescriptorError> {
        if self.format != FORMAT {
            return RULES.refuse("format", format!("{} is not supported, expected {FORMAT}", self.format));
        }
        for (field, found, expected) in [("kind", &self.kind, KIND), ("state", &self.state, STATE)] {
            if found != expected {
                return RULES.refuse(field, format!("{found:?}, expected {expected:?}"));
            }
        }
        RULES.id("capture_id", &self.capture_id)?;
        self.check_target()?;
        let host = self.snapshot_driver.id == DriverId::Host;
        if !(host && self.payloads.is_empty()) {
            RULES.objects("payloads", &self.payloads)?;
            RULES.payload_objects("payloads", &self.payloads)?;
        }
        if self.capsule_objects.is_empty() {
            return RULES.refuse("capsule_objects", "empty: an overlay is a capsule");
        }
        RULES.objects("capsule_objects", &self.capsule_objects)
    }

    fn check_target(&self) -> Result<(), DescriptorError> {
        let Target { hosts, accelerators, versions, cpu_features } = &self.target;
        if hosts.is_empty() {
            return RULES.refuse("target.hosts", "empty");
        }
        let host = self.snapshot_driver.id == DriverId::Host;
        if host != accelerators.is_empty() {
            let problem =
                if host { "the host driver has no accelerator" } else { "empty: this driver has some" };
            return RULES.refuse("target.accelerators", problem);
        }
        for (n, accelerator) in accelerators.iter().enumerate() {
            if accelerator.host >= hosts.len() {
                let problem = format!("there is no host of rank {}", accelerator.host);
                return RULES.refuse(format!("target.accelerators[{n}].host"), problem);
            }
            if accelerators[..n].iter().any(|other| other.uuid == accelerator.uuid) {
                return RULES.refuse(format!("target.accelerators[{n}].uuid"), "listed twice");
            }
        }
        let required = [("kernel", &versions.kernel), ("criu", &versions.criu), ("runc", &versions.runc)];
        for (name, version) in required {
            if version.is_empty() {
                return RULES.refuse(format!("target.versions.{name}"), "empty: an overlay is bound to it");
            }
        }
        for (name, version) in [("nvidia_driver", &versions.nvidia_driver), ("cuda", &versions.cuda)] {
            if version.as_ref().is_some_and(String::is_empty) || version.is_none() != host {
                let problem = if host { "the host driver has none" } else { "missing or empty" };
                return RULES.refuse(format!("target.versions.{name}"), problem);
            }
        }
        for (n, feature) in cpu_features.iter().enumerate() {
            let bad = feature.is_empty() || feature.contains(char::is_whitespace);
            if bad || (n > 0 && cpu_features[n - 1] >= *feature) {
                let problem = format!("{feature:?}: expected names, sorted, each once");
                return RULES.refuse(format!("target.cpu_features[{n}]"), problem);
            }
        }
        Ok(())
    }

    /// Checks that the overlay belongs to this portable artifact: the driver, and payload objects that are equal in
    /// owner, role, size and digest. `portable` and `portable_digest` are of the same descriptor.
    ///
    /// # Errors
    /// `IdentityChanged` naming the first field that differs; `Malformed` for an object whose owner the portable
    /// artifact does not have.
    pub fn check_against(
        &self,
        portable: &Artifact,
        portable_digest: &Digest,
    ) -> Result<(), DescriptorError> {
        let changed = |field: &str, expected: String, found: String| {
            let what = format!("{field} of the portable artifact");
            RULES.layout(field, LayoutError::IdentityChanged { what, expected, found })
        };
        if self.portable_descriptor != *portable_digest {
            let (bound, found) = (self.portable_descriptor.to_string(), portable_digest.to_string());
            return changed("portable_descriptor", bound, found);
        }
        let driver = portable.driver_ref();
        if self.snapshot_driver != driver {
            return changed("snapshot_driver", format!("{:?}", self.snapshot_driver), format!("{driver:?}"));
        }
        let theirs = portable.weights.model_payloads.iter().flat_map(|p| &p.objects);
        let (ours, theirs) = (sorted(&self.payloads), sorted(theirs));
        let difference = (0..ours.len().max(theirs.len()))
            .map(|n| (ours.get(n), theirs.get(n)))
            .find(|(ours, theirs)| ours != theirs);
        if let Some((ours, theirs)) = difference {
            return changed("payloads", show(ours), show(theirs));
        }
        for (n, object) in self.capsule_objects.iter().enumerate() {
            portable.check_owner(RULES, format!("capsule_objects[{n}].owner"), &object.owner)?;
        }
        Ok(())
    }

    /// Whether the local capsule equals the portable one in every object, so that it is not worth keeping.
    pub fn is_redundant(&self, portable: &Artifact) -> bool {
        sorted(&self.capsule_objects) == sorted(&portable.capsule.objects)
    }

    /// Every binding to the target that does not hold on the machine described by `here`; the overlay is used only
    /// when there is none. Host names are not compared.
    pub fn mismatches(&self, here: &Target) -> Vec<Mismatch> {
        let mut found = Vec::new();
        let mut compare = |field: &str, bound_to: String, here: String| {
            if bound_to != here {
                found.push(Mismatch { field: format!("target.{field}"), bound_to, found: here });
            }
        };
        let bound = &self.target;
        let hosts = |target: &Target| target.hosts.iter().map(|h| h.machine_id_sha256).collect::<Vec<_>>();
        compare("hosts", format!("{:?}", hosts(bound)), format!("{:?}", hosts(here)));
        compare("accelerators", format!("{:?}", bound.accelerators), format!("{:?}", here.accelerators));
        let version = |text: &Option<String>| text.clone().unwrap_or_else(|| "none".to_owned());
        let (b, h) = (&bound.versions, &here.versions);
        compare("versions.kernel", b.kernel.clone(), h.kernel.clone());
        compare("versions.criu", b.criu.clone(), h.criu.clone());
        compare("versions.runc", b.runc.clone(), h.runc.clone());
        compare("versions.nvidia_driver", version(&b.nvidia_driver), version(&h.nvidia_driver));
        compare("versions.cuda", version(&b.cuda), version(&h.cuda));
        compare("cpu_features", bound.cpu_features.join(" "), here.cpu_features.join(" "));
        found
    }
}

fn sorted<'a>(objects: impl IntoIterator<Item = &'a Object>) -> Vec<&'a Object> {
    let mut objects: Vec<_> = objects.into_iter().collect();
    objects.sort();
    objects
}

fn show(object: Option<&&Object>) -> String {
    object.map_or_else(|| "nothing".to_owned(), |object| format!("{object:?}"))
}
