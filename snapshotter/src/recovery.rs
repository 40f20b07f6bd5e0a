//! What happens at start, before the first call: directories, metadata and leases are made to agree.
//!
//! | found | done |
//! |---|---|
//! | `new-*` | deleted: it was being made |
//! | a directory that the metadata do not know, empty | deleted: its Prepare was never recorded |
//! | ... with content | set aside under `quarantine/`: the metadata were lost or are from an older run |
//! | a directory of a removed snapshot | left to Cleanup, which the caller runs once it serves |
//! | a record whose directory is missing | reported; the record stays, so that the snapshot can be removed |
//! | leases of snapshots that do not exist | given back |

use std::collections::{BTreeMap, BTreeSet};

use crate::error::Error;
use crate::layout::{Layout, delete_tree};
use crate::metadata::Metadata;
use crate::payloads::Payloads;
use crate::record::{Kind, Record};

/// Repairs what a crash left, and answers the first id that was never used.
///
/// # Errors
/// Those of the database and the file system. What does not match is no error.
pub fn recover(layout: &Layout, metadata: &Metadata, payloads: &Payloads) -> Result<u64, Error> {
    let (records, removed) = metadata.read(|r| Ok((r.all()?, r.removed()?)))?;
    let counter = metadata.write(|w| w.counter("next_id"))?.unwrap_or_default();
    let found = layout.scan()?;

    for temporary in &found.temporaries {
        tracing::info!(path = %temporary.display(), "deleting a directory that was being made");
        delete_tree(temporary)?;
    }
    for unknown in &found.unknown {
        tracing::warn!(path = %unknown.display(), "not a snapshot of this program; left alone");
    }

    let recorded: BTreeMap<u64, &Record> = records.iter().map(|r| (r.id, r)).collect();
    let removed: BTreeSet<u64> = removed.into_iter().collect();
    let mut quarantined = 0;
    for id in found.ids.iter().filter(|id| !recorded.contains_key(id) && !removed.contains(id)) {
        if layout.delete_if_empty(*id)? {
            tracing::info!(id, "deleted the directory of a snapshot that was never recorded");
        } else {
            let path = layout.quarantine(*id)?;
            quarantined += 1;
            tracing::error!(
                id,
                path = %path.display(),
                "the metadata do not know this snapshot; its directory is set aside and can be deleted once \
                 nothing in it is missed"
            );
        }
    }

    let mut missing = 0;
    for record in &records {
        let work = (record.info.kind == Kind::Active).then(|| layout.work(record.id));
        for path in std::iter::once(layout.fs(record.id)).chain(work) {
            if !path.is_dir() {
                missing += 1;
                tracing::error!(
                    name = record.info.name,
                    kind = record.info.kind.name(),
                    path = %path.display(),
                    "a directory of this snapshot is missing: remove the container or image and pull again"
                );
            }
        }
    }

    let names: BTreeSet<&str> = records.iter().map(|r| r.info.name.as_str()).collect();
    // A lease too many keeps a payload on the disk; it is no reason to keep the node from starting containers.
    let released = payloads.release_strays(|key| names.contains(key)).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot look for leases of snapshots that do not exist");
        0
    });
    tracing::info!(
        snapshots = records.len(),
        removed = removed.len(),
        quarantined,
        missing,
        released,
        "snapshots are consistent"
    );

    let used = records.iter().map(|r| r.id).chain(removed).chain(found.ids).chain(layout.quarantined());
    Ok(used.map(|id| id.saturating_add(1)).chain([counter, 1]).max().unwrap_or(1))
}
