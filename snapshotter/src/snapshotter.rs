//! The snapshotter itself: containerd's semantics over metadata and directories. Every call blocks.
//!
//! Semantics and classes of errors follow containerd's `core/snapshots/storage` and its overlayfs
//! snapshotter; what differs is written down where it does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::Error;
use crate::fault;
use crate::filter::Filters;
use crate::keylock::KeyLocks;
use crate::layer;
use crate::layout::Layout;
use crate::metadata::{Lookup, Metadata, Reader};
use crate::mounts;
use crate::overlay;
use crate::payloads::Payloads;
use crate::proto::Mount;
use crate::record::{Info, Kind, Layer, Payload, Record, Time, Usage};
use crate::{key, recovery, usage};

/// Labels by which a client asks for shifted user and group ids.
const ID_MAPPING_LABELS: [&str; 2] =
    ["containerd.io/snapshot/uidmapping", "containerd.io/snapshot/gidmapping"];

/// Labels by name.
pub type Labels = BTreeMap<String, String>;

/// Overlay snapshots below one root, payloads from one store.
#[derive(Debug)]
pub struct Snapshotter {
    layout: Layout,
    metadata: Metadata,
    overlay_options: Vec<String>,
    payloads: Payloads,
    keys: KeyLocks,
    next_id: AtomicU64,
    cleaning: Mutex<()>,
}

impl Snapshotter {
    /// Opens the snapshots below `root` and the payload store below `store`, creating both when they are
    /// missing, and brings them to a consistent state after a crash.
    ///
    /// # Errors
    /// When another process serves `root`, when an overlay cannot be mounted there, or when the metadata
    /// cannot be read.
    pub fn open(root: &Path, store: &Path) -> Result<Self, Error> {
        let layout = Layout::create(root)?;
        // First of all: it is the lock that keeps a second snapshotter away.
        let metadata = Metadata::open(&layout.metadata())?;
        let payloads = Payloads::open(store)?;
        let overlay_options = overlay::detect_options(&layout)?;
        let next_id = recovery::recover(&layout, &metadata, &payloads)?;
        Ok(Self {
            layout,
            metadata,
            overlay_options,
            payloads,
            keys: KeyLocks::default(),
            next_id: AtomicU64::new(next_id),
            cleaning: Mutex::new(()),
        })
    }

    /// Makes an active snapshot or a view called `key` on the committed snapshot `parent`, and answers its
    /// mounts. One that a container can use also gets the payloads of the capsule below, as far as they are on
    /// this node and verify; one that receives a layer, or serves to compute one, does not.
    ///
    /// # Errors
    /// `AlreadyExists` for the key, `NotFound` for the parent, `InvalidArgument` for a parent that is not
    /// committed.
    pub fn create(
        &self,
        kind: Kind,
        key: &str,
        parent: Option<&str>,
        labels: Labels,
    ) -> Result<Vec<Mount>, Error> {
        if key.is_empty() {
            return Err(Error::InvalidArgument("a snapshot needs a key".to_owned()));
        }
        if let Some(label) = ID_MAPPING_LABELS.iter().find(|l| labels.contains_key(**l)) {
            return Err(Error::Unimplemented(format!(
                "cannot prepare snapshot {key:?}: label {label} asks for shifted ids, which this snapshotter \
                 does not do yet; run the container without a user namespace"
            )));
        }
        let _busy = self.keys.lock(key);
        let ancestors = self.metadata.read(|r| check_new(r, key, parent))?;
        let binds = match kind {
            Kind::Active if key::is_unpack(key, labels.keys()) => Vec::new(),
            // Only of the capsule layer itself: on anything above it both sides have the same payloads.
            Kind::View if ancestors.first().is_some_and(|a| is_compared_capsule(key, a)) => Vec::new(),
            _ => self.acquire_for(key, &ancestors),
        };
        let result = self.record_new(kind, key, parent, labels, &ancestors, &binds);
        if result.is_err() && !binds.is_empty() {
            self.payloads.release(key);
        }
        result.map(|record| self.answer(&record, &ancestors, &binds))
    }

    fn acquire_for(&self, key: &str, ancestors: &[Record]) -> Vec<(Payload, PathBuf)> {
        match layer::of_chain(ancestors) {
            Layer::Capsule { payloads } => self.payloads.acquire(key, payloads),
            Layer::Broken { reason } => {
                tracing::warn!(key, reason, "the image has a broken capsule: it cannot be restored from");
                Vec::new()
            }
            Layer::Hidden { reason } => {
                tracing::debug!(key, reason, "the image hides what capsule may be below");
                Vec::new()
            }
            Layer::Plain => Vec::new(),
        }
    }

    fn record_new(
        &self,
        kind: Kind,
        key: &str,
        parent: Option<&str>,
        labels: Labels,
        ancestors: &[Record],
        binds: &[(Payload, PathBuf)],
    ) -> Result<Record, Error> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let below = ancestors.first().map(|a| a.id);
        let now = Time::now();
        let info = Info {
            name: key.to_owned(),
            parent: parent.map(str::to_owned),
            kind,
            labels: without_empty(labels),
            created: now,
            updated: now,
        };
        let binds = binds.iter().map(|(payload, _)| payload.clone()).collect();
        let record = Record { id, info, binds, ..Record::default() };
        self.layout.make(id, kind, below)?;
        let result = self.metadata.write(|w| {
            // The parent may have been replaced while a payload was verified.
            if check_new(w, key, parent)?.first().map(|a| a.id) != below {
                return Err(Error::NotFound(format!("parent snapshot {parent:?} was removed meanwhile")));
            }
            if let Some(below) = below {
                w.link(below, id)?;
            }
            let next = w.counter("next_id")?.unwrap_or_default().max(id + 1);
            w.set_counter("next_id", next)?;
            w.put(&record)
        });
        if let Err(error) = result {
            let _ = self.layout.delete(id);
            return Err(error);
        }
        fault::point("create.recorded");
        Ok(record)
    }

    fn answer(&self, record: &Record, ancestors: &[Record], binds: &[(Payload, PathBuf)]) -> Vec<Mount> {
        mounts::build(&self.layout, &self.overlay_options, record, ancestors, binds)
    }

    /// The mounts of an active snapshot or view, as they were answered when it was made. A payload that does
    /// not verify any more is left out and logged.
    ///
    /// # Errors
    /// `NotFound`; `FailedPrecondition` for a committed snapshot.
    pub fn mounts(&self, key: &str) -> Result<Vec<Mount>, Error> {
        let _busy = self.keys.lock(key);
        let (record, ancestors) = self.metadata.read(|r| {
            let record = r.require(key)?;
            if record.info.kind == Kind::Committed {
                return Err(Error::FailedPrecondition(format!(
                    "snapshot {key:?} is committed; only active snapshots and views have mounts"
                )));
            }
            let ancestors = r.ancestors(record.info.parent.as_deref())?;
            Ok((record, ancestors))
        })?;
        let binds = self.payloads.acquire(key, &record.binds);
        Ok(self.answer(&record, &ancestors, &binds))
    }

    /// Freezes the active snapshot `key` as `name`, on `parent` if it was prepared without one.
    ///
    /// # Errors
    /// `AlreadyExists` for the name, `NotFound` for the key or parent, `FailedPrecondition` for a key that is
    /// not active or a parent that is not committed, `InvalidArgument` for another parent than before.
    pub fn commit(&self, name: &str, key: &str, parent: Option<&str>, labels: Labels) -> Result<(), Error> {
        if name.is_empty() {
            return Err(Error::InvalidArgument(format!("snapshot {key:?} needs a name to be committed as")));
        }
        let _busy = self.keys.lock(key);
        let id = self.metadata.read(|r| check_commit(r, name, key, parent))?.id;
        let fs = self.layout.fs(id);
        let usage = usage::measure(&fs)?;
        let layer = layer::inspect(&fs)?;
        match &layer {
            Layer::Capsule { payloads } => {
                tracing::info!(name, payloads = payloads.len(), "committed layer is a capsule");
            }
            Layer::Broken { reason } => tracing::warn!(name, reason, "committed layer is a broken capsule"),
            Layer::Plain | Layer::Hidden { .. } => {}
        }
        self.layout.sync(id)?;
        fault::point("commit.synced");
        let labels = without_empty(labels);
        let leased = self.metadata.write(|w| {
            let old = check_commit(w, name, key, parent)?;
            let now = Time::now();
            let parent = old.info.parent.as_deref().or(parent).map(str::to_owned);
            let info = Info {
                name: name.to_owned(),
                parent,
                kind: Kind::Committed,
                labels,
                created: now,
                updated: now,
            };
            if let Some(parent) = &info.parent {
                let below = w.require(parent)?.id;
                w.link(below, id)?;
            }
            w.delete(key)?;
            w.put(&Record { id, info, usage, layer, binds: Vec::new() })?;
            Ok(!old.binds.is_empty())
        })?;
        fault::point("commit.recorded");
        if leased {
            self.payloads.release(key);
        }
        Ok(())
    }

    /// Forgets the snapshot `key`. Its space is freed by [`Self::cleanup`].
    ///
    /// # Errors
    /// `NotFound`; `FailedPrecondition` when something stands on it.
    pub fn remove(&self, key: &str) -> Result<(), Error> {
        let _busy = self.keys.lock(key);
        let leased = self.metadata.write(|w| {
            let record = w.require(key)?;
            if w.has_children(record.id)? {
                return Err(Error::FailedPrecondition(format!(
                    "cannot remove snapshot {key:?}: other snapshots stand on it"
                )));
            }
            if let Some(parent) = &record.info.parent {
                let below = w.require(parent)?.id;
                w.unlink(below, record.id)?;
            }
            w.delete(key)?;
            w.add_removed(record.id)?;
            Ok(!record.binds.is_empty())
        })?;
        fault::point("remove.recorded");
        if leased {
            self.payloads.release(key);
        }
        Ok(())
    }

    /// What is known of a snapshot.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn stat(&self, key: &str) -> Result<Info, Error> {
        Ok(self.metadata.read(|r| r.require(key))?.info)
    }

    /// Sets labels of the snapshot `info.name`: all of them for the path `labels` or for no path at all, one
    /// for `labels.<name>`. An empty value removes a label.
    ///
    /// # Errors
    /// `NotFound`; `InvalidArgument` for any other path.
    pub fn update(&self, info: Info, paths: &[String]) -> Result<Info, Error> {
        self.metadata.write(|w| {
            let mut record = w.require(&info.name)?;
            let labels = &mut record.info.labels;
            if paths.is_empty() {
                labels.clone_from(&info.labels);
            }
            for path in paths {
                match path.strip_prefix("labels.") {
                    Some(name) => {
                        labels.insert(name.to_owned(), info.labels.get(name).cloned().unwrap_or_default());
                    }
                    None if path == "labels" => labels.clone_from(&info.labels),
                    None => {
                        return Err(Error::InvalidArgument(format!(
                            "field {path:?} of snapshot {:?} cannot be updated; only labels can",
                            info.name
                        )));
                    }
                }
            }
            labels.retain(|_, value| !value.is_empty());
            record.info.updated = Time::now();
            w.put(&record)?;
            Ok(record.info)
        })
    }

    /// Snapshots that match one of the filters, in order of names.
    ///
    /// # Errors
    /// Those of the database.
    pub fn list(&self, filters: &Filters) -> Result<Vec<Info>, Error> {
        let records = self.metadata.read(Reader::all)?;
        Ok(records.into_iter().map(|r| r.info).filter(|info| filters.matches(info)).collect())
    }

    /// Space of a snapshot without its ancestors: stored for a committed one, measured for an active one;
    /// a view takes none.
    ///
    /// # Errors
    /// `NotFound`, and those of the file system.
    pub fn usage(&self, key: &str) -> Result<Usage, Error> {
        let record = self.metadata.read(|r| r.require(key))?;
        match record.info.kind {
            Kind::Active => usage::measure(&self.layout.fs(record.id)),
            Kind::Committed | Kind::View => Ok(record.usage),
        }
    }

    /// Deletes the directories of removed snapshots. One that cannot be deleted is logged and tried again
    /// the next time.
    ///
    /// # Errors
    /// Those of the database.
    pub fn cleanup(&self) -> Result<(), Error> {
        let _alone = self.cleaning.lock().unwrap_or_else(PoisonError::into_inner);
        let mut deleted = Vec::new();
        for id in self.metadata.read(Reader::removed)? {
            match self.layout.delete(id) {
                Ok(()) => deleted.push(id),
                Err(error) => tracing::warn!(id, %error, "cannot delete the directory of a removed snapshot"),
            }
        }
        if deleted.is_empty() {
            return Ok(());
        }
        fault::point("cleanup.deleted");
        self.metadata.write(|w| deleted.iter().try_for_each(|id| w.clear_removed(*id)))
    }
}

/// Whether a view with this key compares the capsule layer `below` with what is under it.
fn is_compared_capsule(key: &str, below: &Record) -> bool {
    matches!(below.layer, Layer::Capsule { .. }) && key::is_comparison(key, &below.info.name)
}

/// The ancestors of a new snapshot.
fn check_new(state: &impl Lookup, key: &str, parent: Option<&str>) -> Result<Vec<Record>, Error> {
    if state.get(key)?.is_some() {
        return Err(Error::AlreadyExists(format!("snapshot {key:?} already exists")));
    }
    let ancestors = state.ancestors(parent)?;
    match ancestors.first() {
        Some(below) if below.info.kind != Kind::Committed => Err(Error::InvalidArgument(format!(
            "parent {:?} of snapshot {key:?} is not committed",
            below.info.name
        ))),
        _ => Ok(ancestors),
    }
}

/// The active snapshot that is to be committed.
fn check_commit(state: &impl Lookup, name: &str, key: &str, parent: Option<&str>) -> Result<Record, Error> {
    if state.get(name)?.is_some() {
        return Err(Error::AlreadyExists(format!("committed snapshot {name:?} already exists")));
    }
    let record = state.require(key)?;
    if record.info.kind != Kind::Active {
        return Err(Error::FailedPrecondition(format!(
            "cannot commit snapshot {key:?}: it is {}, not active",
            record.info.kind.name()
        )));
    }
    match (record.info.parent.as_deref(), parent) {
        (Some(old), Some(new)) if old != new => {
            return Err(Error::InvalidArgument(format!(
                "cannot commit snapshot {key:?} on {new:?}: it was prepared on {old:?}"
            )));
        }
        (None, Some(new)) => {
            let below = state.ancestors(Some(new))?;
            if below.first().is_some_and(|b| b.info.kind != Kind::Committed) {
                return Err(Error::FailedPrecondition(format!(
                    "cannot commit snapshot {key:?} on {new:?}, which is not committed"
                )));
            }
        }
        _ => {}
    }
    Ok(record)
}

fn without_empty(mut labels: Labels) -> Labels {
    labels.retain(|_, value| !value.is_empty());
    labels
}
