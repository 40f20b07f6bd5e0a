//! Which overlay a start uses: the newest whose every binding holds here, and why not each of the others.

use std::collections::HashSet;

use super::{InUse, LocalOverlay, OverlayError, Portable, of};
use crate::format::overlay::{Mismatch, Target};
use crate::node::NodeError;
use crate::store::NodeStore;

/// The answer of [`choose`].
#[derive(Debug, Default)]
pub struct Choice {
    /// The overlay to use, if there is one.
    pub chosen: Option<Chosen>,
    /// Those that are not used although they are of this capsule, with every reason.
    pub passed_over: Vec<PassedOver>,
}

/// An overlay that may be used here now.
#[derive(Debug)]
pub struct Chosen {
    /// The overlay.
    pub overlay: LocalOverlay,
    /// Must live as long as its layers are mounted.
    pub hold: InUse,
}

/// An overlay that is not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassedOver {
    /// Its id.
    pub id: String,
    /// Everything that stands against it; never empty.
    pub reasons: Vec<String>,
}

/// Chooses among the overlays of `portable`. `here` describes this machine; it is asked at most once, and only when there
/// is an overlay.
///
/// # Errors
/// The directory of the overlays cannot be read or is not safe.
pub fn choose(
    store: &NodeStore,
    portable: &Portable,
    here: impl FnOnce() -> Result<Target, NodeError>,
) -> Result<Choice, OverlayError> {
    let mut choice = Choice::default();
    let found = of(store, &portable.digest)?;
    if found.is_empty() {
        return Ok(choice);
    }
    let here = here().map_err(|error| error.to_string());
    for found in found {
        let reasons = match found.overlay {
            Err(error) => vec![error.to_string()],
            Ok(overlay) => {
                let reasons = against(&overlay, portable, &here);
                match reasons.is_empty().then(|| overlay.hold()) {
                    None => reasons,
                    Some(Ok(Some(hold))) => {
                        choice.chosen = Some(Chosen { overlay, hold });
                        break;
                    }
                    Some(Ok(None)) => vec!["it was just removed".to_owned()],
                    Some(Err(error)) => vec![format!("it cannot be locked: {error}")],
                }
            }
        };
        choice.passed_over.push(PassedOver { id: found.id, reasons });
    }
    Ok(choice)
}

/// Everything that stands against an overlay.
fn against(overlay: &LocalOverlay, portable: &Portable, here: &Result<Target, String>) -> Vec<String> {
    let mut reasons = Vec::new();
    if let Err(error) = overlay.document.check_against(&portable.artifact, &portable.digest) {
        reasons.push(error.to_string());
    }
    match here {
        Ok(here) => reasons.extend(overlay.document.mismatches(here).into_iter().map(|m| reason(&m))),
        Err(error) => reasons.push(format!("this machine cannot be described: {error}")),
    }
    reasons
}

fn reason(mismatch: &Mismatch) -> String {
    let Mismatch { field, bound_to, found } = mismatch;
    if field != "target.cpu_features" {
        return format!("{field} was {bound_to}, here it is {found}");
    }
    // Two lists of a hundred words help nobody.
    let only = |a: &str, b: &str| -> String {
        let b: HashSet<&str> = b.split(' ').collect();
        let only: Vec<&str> = a.split(' ').filter(|word| !b.contains(word)).collect();
        if only.is_empty() { "nothing".to_owned() } else { only.join(" ") }
    };
    format!("{field}: here is missing {}, is new {}", only(bound_to, found), only(found, bound_to))
}
