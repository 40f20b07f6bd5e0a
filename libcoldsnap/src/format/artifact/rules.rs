//! The reference rules of an artifact descriptor: ids, owners, paths, and what must agree with what.

use std::collections::{BTreeMap, HashSet};

use super::{Artifact, DOCUMENT, DriverId, Object};
use crate::format::canonical_json;
use crate::format::descriptor::{DescriptorError, Rules};

const RULES: Rules = Rules { document: DOCUMENT };

fn refuse<T>(field: impl Into<String>, problem: impl ToString) -> Result<T, DescriptorError> {
    RULES.refuse(field, problem)
}

pub(super) fn check(artifact: &Artifact) -> Result<(), DescriptorError> {
    constants(artifact)?;
    driver(artifact)?;
    let ids = Ids::collect(artifact)?;
    compatibility(artifact, &ids)?;
    capsule(artifact, &ids)?;
    bindings(artifact, &ids)?;
    weights(artifact, &ids)
}

fn constants(artifact: &Artifact) -> Result<(), DescriptorError> {
    if artifact.format != super::FORMAT {
        return refuse("format", format!("{} is not supported, expected {}", artifact.format, super::FORMAT));
    }
    for (field, found, expected) in [
        ("kind", &artifact.kind, super::KIND),
        ("state", &artifact.state, super::STATE),
        ("compatibility.policy", &artifact.compatibility.policy, super::COMPATIBILITY_POLICY),
    ] {
        if found != expected {
            return refuse(field, format!("{found:?}, expected {expected:?}"));
        }
    }
    if !artifact.acceptance.accepted {
        return refuse("acceptance.accepted", "false: the capture was not accepted");
    }
    RULES.id("capture_id", &artifact.capture_id)
}

fn driver(artifact: &Artifact) -> Result<(), DescriptorError> {
    let driver = &artifact.snapshot_driver;
    let boundary = driver.id.capture_boundary();
    if driver.capture_boundary != boundary {
        let problem = format!("{:?}, this driver captures at {boundary:?}", driver.capture_boundary);
        return refuse("snapshot_driver.capture_boundary", problem);
    }
    let (found, least) = (driver.minimum_nvidia_driver_major, driver.id.minimum_nvidia_driver_major());
    // None is less than every number.
    if found < least || (least.is_none() && found.is_some()) {
        let problem = format!("{}, this driver needs {}", or_null(found), or_null(least));
        return refuse("snapshot_driver.minimum_nvidia_driver_major", problem);
    }
    let base = features("snapshot_driver.base_requirements", &driver.base_requirements)?;
    let all = features("requires", &artifact.requires)?;
    match base.difference(&all).min() {
        Some(missing) => refuse("requires.features", format!("lacks the base requirement {missing:?}")),
        None => Ok(()),
    }
}

fn or_null(number: Option<u32>) -> String {
    number.map_or_else(|| "null".to_owned(), |n| n.to_string())
}

fn features<'a>(field: &str, list: &'a super::Requirements) -> Result<HashSet<&'a str>, DescriptorError> {
    if list.format != 1 {
        return refuse(format!("{field}.format"), format!("{} is not supported, expected 1", list.format));
    }
    RULES.unique_ids(&format!("{field}.features"), list.features.iter().map(|f| f.id.as_str()))
}

/// The ids that owners can refer to, by kind.
pub(super) struct Ids<'a>(BTreeMap<&'static str, HashSet<&'a str>>);

impl<'a> Ids<'a> {
    pub(super) fn collect(artifact: &'a Artifact) -> Result<Self, DescriptorError> {
        let launch = &artifact.launch;
        let units = RULES.unique_ids("launch.units", launch.units.iter().map(|u| u.id.as_str()))?;
        if units.is_empty() {
            return refuse("launch.units", "empty");
        }
        let mut ids = BTreeMap::new();
        for (kind, name, parts) in [
            ("worker", "workers", &launch.execution.workers),
            ("group", "groups", &launch.execution.groups),
            ("service", "services", &launch.execution.services),
        ] {
            let field = format!("launch.execution.{name}");
            for (n, part) in parts.iter().enumerate() {
                if let Some(unit) = part.unit.as_deref().filter(|unit| !units.contains(unit)) {
                    return refuse(format!("{field}[{n}].unit"), format!("there is no unit {unit:?}"));
                }
            }
            ids.insert(kind, RULES.unique_ids(&field, parts.iter().map(|p| p.id.as_str()))?);
        }
        ids.insert("unit", units);
        Ok(Self(ids))
    }

    fn units(&self) -> &HashSet<&'a str> {
        &self.0["unit"]
    }

    pub(super) fn owner(&self, of: Rules, field: String, owner: &str) -> Result<(), DescriptorError> {
        let (kind, name) = of.owner(field.clone(), owner)?;
        match self.0.get(kind) {
            Some(ids) if !ids.contains(name) => of.refuse(field, format!("there is no {kind} {name:?}")),
            // Kinds that only a manager knows cannot be resolved here.
            _ => Ok(()),
        }
    }

    /// That a list names every unit once.
    fn each_unit_once<'b>(
        &self,
        field: &str,
        named: impl Iterator<Item = &'b str>,
    ) -> Result<(), DescriptorError> {
        let mut seen = HashSet::new();
        for (n, unit) in named.enumerate() {
            if !self.units().contains(unit) || !seen.insert(unit) {
                let problem = format!("{unit:?} is no unit, or listed twice");
                return refuse(format!("{field}[{n}].unit"), problem);
            }
        }
        match self.units().iter().filter(|unit| !seen.contains(**unit)).min() {
            Some(missing) => refuse(field, format!("the unit {missing:?} is missing")),
            None => Ok(()),
        }
    }
}

fn compatibility(artifact: &Artifact, ids: &Ids<'_>) -> Result<(), DescriptorError> {
    let units = &artifact.compatibility.units;
    ids.each_unit_once("compatibility.units", units.iter().map(|u| u.unit.as_str()))?;
    let host = artifact.snapshot_driver.id == DriverId::Host;
    for (n, unit) in units.iter().enumerate() {
        let versions = [&unit.nvidia_driver_captured, &unit.nvidia_driver_min, &unit.cuda_userspace];
        if host && (versions.iter().any(|v| v.is_some()) || !unit.devices.is_empty()) {
            let problem =
                "the host driver has no accelerator: driver and CUDA versions are null, devices empty";
            return refuse(format!("compatibility.units[{n}]"), problem);
        }
        if !host && versions.iter().any(|v| v.is_none()) {
            return refuse(format!("compatibility.units[{n}]"), "driver and CUDA versions are null");
        }
    }
    Ok(())
}

fn capsule(artifact: &Artifact, ids: &Ids<'_>) -> Result<(), DescriptorError> {
    let images = &artifact.capsule.images;
    ids.each_unit_once("capsule.images", images.iter().map(|i| i.unit.as_str()))?;
    let driver = &artifact.snapshot_driver;
    for (n, image) in images.iter().enumerate() {
        let field = |name: &str| format!("capsule.images[{n}].{name}");
        if image.digest.is_none() && driver.id != DriverId::Host {
            return refuse(field("digest"), "null");
        }
        RULES.path(field("root"), &image.root)?;
        if (image.snapshot_driver.id, &image.snapshot_driver.abi) != (driver.id, &driver.abi) {
            return refuse(field("snapshot_driver"), "it differs from the artifact's snapshot driver");
        }
    }
    objects("capsule.objects", &artifact.capsule.objects, ids)
}

fn bindings(artifact: &Artifact, ids: &Ids<'_>) -> Result<(), DescriptorError> {
    for (n, binding) in artifact.runtime.bindings.iter().enumerate() {
        ids.owner(RULES, format!("runtime.bindings[{n}].owner"), &binding.owner)?;
        RULES.id(format!("runtime.bindings[{n}].kind"), &binding.kind)?;
        // What others hash is theirs to define.
        let ours = artifact.snapshot_driver.id == DriverId::Host;
        let found = canonical_json::digest(&binding.payload);
        if ours && found != binding.digest {
            let problem = format!("{}, the payload's canonical JSON has {found}", binding.digest);
            return refuse(format!("runtime.bindings[{n}].digest"), problem);
        }
    }
    Ok(())
}

fn objects(field: &str, objects: &[Object], ids: &Ids<'_>) -> Result<(), DescriptorError> {
    RULES.objects(field, objects)?;
    for (n, object) in objects.iter().enumerate() {
        ids.owner(RULES, format!("{field}[{n}].owner"), &object.owner)?;
    }
    Ok(())
}

fn weights(artifact: &Artifact, ids: &Ids<'_>) -> Result<(), DescriptorError> {
    let host = artifact.snapshot_driver.id == DriverId::Host;
    let weights = &artifact.weights;
    if weights.native.is_some() && weights.model_payloads.is_none() {
        return refuse("weights.native", "it requires weights.model_payloads");
    }
    let optional = host && weights.model_payloads.is_none();
    if weights.recovery.is_none() && !optional {
        return refuse("weights.recovery", "missing field");
    }
    if artifact.launch.model.is_none() && !optional {
        return refuse("launch.model", "missing field");
    }
    for (field, id) in [
        ("weights.native.snapshot_driver", weights.native.as_ref().map(|n| n.snapshot_driver)),
        ("weights.recovery.snapshot_driver", weights.recovery.as_ref().map(|r| r.snapshot_driver)),
    ] {
        if host && id.is_some_and(|id| id != DriverId::Host) {
            return refuse(field, "it differs from the artifact's snapshot driver");
        }
    }
    if let Some(payloads) = &weights.model_payloads {
        let field = "weights.model_payloads";
        publication(field, &payloads.repository, &payloads.revision)?;
        objects(&format!("{field}.objects"), &payloads.objects, ids)?;
        RULES.payload_objects(&format!("{field}.objects"), &payloads.objects)?;
        each_worker(artifact, host, &payloads.objects)?;
    }
    Ok(())
}

fn publication(field: &str, repository: &str, revision: &str) -> Result<(), DescriptorError> {
    if repository.is_empty() != revision.is_empty() {
        return refuse(field, "repository and revision are either both set or both empty");
    }
    let commit = revision.len() == 40 && revision.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if !revision.is_empty() && !commit {
        return refuse(format!("{field}.revision"), format!("{revision:?} is not a commit of 40 hex digits"));
    }
    Ok(())
}

/// Exactly one payload per worker; for `host` at most one, because a worker may own no model bytes.
fn each_worker(artifact: &Artifact, host: bool, objects: &[Object]) -> Result<(), DescriptorError> {
    for worker in &artifact.launch.execution.workers {
        let owner = format!("worker/{}", worker.id);
        let count = objects.iter().filter(|object| object.owner == owner).count();
        if count > 1 || (count == 0 && !host) {
            let problem = format!("the worker {:?} has {count} payload objects, expected one", worker.id);
            return refuse("weights.model_payloads.objects", problem);
        }
    }
    Ok(())
}
