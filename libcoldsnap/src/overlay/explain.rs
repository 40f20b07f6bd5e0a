//! Every binding of an overlay beside what it is here: for people who ask why an overlay is used or not.

use serde::Serialize;

use super::{LocalOverlay, Portable};
use crate::format::descriptor::Object;
use crate::format::overlay::{Overlay, Target};

/// One binding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Binding {
    /// Path of the field in `overlay.json`.
    pub field: &'static str,
    /// What the overlay is bound to.
    pub captured: String,
    /// What it is here.
    pub here: String,
    /// Whether both are equal.
    pub equal: bool,
}

/// The bindings of an overlay to its portable artifact and, when it could be described, to this machine.
pub fn explain(overlay: &LocalOverlay, portable: &Portable, here: Option<&Target>) -> Vec<Binding> {
    let document = &overlay.document;
    let theirs = portable.artifact.weights.model_payloads.iter().flat_map(|p| &p.objects);
    let driver = portable.artifact.driver_ref();
    let mut bindings = vec![
        Binding::of(
            "portable_descriptor",
            document.portable_descriptor.to_string(),
            portable.digest.to_string(),
        ),
        Binding::of("snapshot_driver", format!("{:?}", document.snapshot_driver), format!("{driver:?}")),
        Binding::of("payloads", payloads(&document.payloads), payloads(theirs)),
    ];
    if let Some(here) = here {
        bindings.extend(target(document, here));
    }
    bindings
}

impl Binding {
    fn of(field: &'static str, captured: String, here: String) -> Self {
        Self { equal: captured == here, field, captured, here }
    }
}

/// Which bindings hold says [`Overlay::mismatches`] alone.
fn target(document: &Overlay, here: &Target) -> Vec<Binding> {
    let mismatches = document.mismatches(here);
    let bound = &document.target;
    let hosts = bound.hosts.iter().map(|h| format!("{} ({})", h.machine_id_sha256, h.hostname));
    let version = |text: &Option<String>| text.clone().unwrap_or_else(|| "none".to_owned());
    let values = [
        ("target.hosts", hosts.collect::<Vec<_>>().join(", ")),
        ("target.accelerators", format!("{:?}", bound.accelerators)),
        ("target.versions.kernel", bound.versions.kernel.clone()),
        ("target.versions.criu", bound.versions.criu.clone()),
        ("target.versions.runc", bound.versions.runc.clone()),
        ("target.versions.nvidia_driver", version(&bound.versions.nvidia_driver)),
        ("target.versions.cuda", version(&bound.versions.cuda)),
        ("target.cpu_features", bound.cpu_features.join(" ")),
    ];
    let binding =
        |(field, captured): (&'static str, String)| match mismatches.iter().find(|m| m.field == field) {
            None => Binding { field, here: captured.clone(), captured, equal: true },
            Some(m) => Binding { field, captured: m.bound_to.clone(), here: m.found.clone(), equal: false },
        };
    values.into_iter().map(binding).collect()
}

fn payloads<'a>(objects: impl IntoIterator<Item = &'a Object>) -> String {
    let text = |o: &Object| format!("{} {} {} {} bytes", o.owner, o.role, o.sha256, o.bytes);
    let mut texts: Vec<String> = objects.into_iter().map(text).collect();
    texts.sort_unstable();
    if texts.is_empty() { "none".to_owned() } else { texts.join(", ") }
}
