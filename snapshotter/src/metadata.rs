//! The durable table of snapshots.
//!
//! A commit of the database is the point where an operation happened; everything that a record refers to
//! is made durable before, and removed only after. The file says which version of this layout it holds.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

use coldsnap::durable;
use redb::{
    Builder, Database, DatabaseError, ReadOnlyTable, ReadableDatabase, ReadableTable, StorageError, Table,
    TableDefinition, WriteTransaction,
};

use crate::error::Error;
pub use crate::record::{Info, Kind, Layer, Payload, Record, Time, Usage};

/// Version of the tables below.
pub const VERSION: u64 = 1;

/// Key or name to record, in JSON.
const SNAPSHOTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("snapshots");
/// (id of the parent, id of the child).
const CHILDREN: TableDefinition<'_, (u64, u64), ()> = TableDefinition::new("children");
/// Ids of removed snapshots whose directories still exist.
const REMOVED: TableDefinition<'_, u64, ()> = TableDefinition::new("removed");
/// `version` and `next_id`.
const COUNTERS: TableDefinition<'_, &str, u64> = TableDefinition::new("counters");

/// A few thousand records fit many times; the default of 1 GiB is for databases of another size.
const CACHE_BYTES: usize = 8 << 20;

/// The open database.
#[derive(Debug)]
pub struct Metadata {
    path: PathBuf,
    /// None while it could not be opened again.
    database: RwLock<Option<Database>>,
    /// After an I/O error (a full disk) the database refuses everything until it is opened again.
    failed: AtomicBool,
}

impl Metadata {
    /// Opens the database, creates it when there is none, and repairs it after a crash.
    ///
    /// # Errors
    /// When another process has it open, when it is damaged, or when a newer version wrote it.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let database = open_database(path)?;
        let metadata = Self {
            path: path.to_owned(),
            database: RwLock::new(Some(database)),
            failed: AtomicBool::new(false),
        };
        let version = metadata.write(|w| {
            let found = w.counter("version")?;
            if found.is_none() {
                w.set_counter("version", VERSION)?;
            }
            Ok(found.unwrap_or(VERSION))
        })?;
        if version != VERSION {
            return Err(Error::Damaged(format!(
                "{} has version {version}, this program reads version {VERSION}; run the program that wrote it",
                path.display()
            )));
        }
        durable::sync_directory(durable::parent(path)).map_err(Error::io("fsync the directory of", path))?;
        Ok(metadata)
    }

    /// Runs `f` on one consistent state.
    ///
    /// # Errors
    /// Those of `f`, and those of the database.
    pub fn read<T>(&self, f: impl FnOnce(&Reader) -> Result<T, Error>) -> Result<T, Error> {
        self.reopen_after_failure()?;
        let guard = self.database.read().unwrap_or_else(PoisonError::into_inner);
        let reading = "read";
        let transaction = open(&guard)?.begin_read().map_err(|e| Error::metadata(reading, e))?;
        let reader = Reader {
            snapshots: transaction.open_table(SNAPSHOTS).map_err(|e| Error::metadata(reading, e))?,
            removed: transaction.open_table(REMOVED).map_err(|e| Error::metadata(reading, e))?,
        };
        f(&reader)
    }

    /// Runs `f` alone and makes what it did durable; when it fails, nothing happened.
    ///
    /// # Errors
    /// Those of `f`, and those of the database.
    pub fn write<T>(&self, f: impl FnOnce(&mut Writer<'_>) -> Result<T, Error>) -> Result<T, Error> {
        self.reopen_after_failure()?;
        let guard = self.database.read().unwrap_or_else(PoisonError::into_inner);
        let transaction = open(&guard)?.begin_write().map_err(|e| Error::metadata("write", e));
        let result = transaction.and_then(|transaction| {
            let result = f(&mut Writer::new(&transaction)?)?;
            transaction.commit().map_err(|e| Error::metadata("commit", e))?;
            Ok(result)
        });
        if let Err(Error::Metadata { source, .. }) = &result
            && matches!(**source, redb::Error::Io(_) | redb::Error::PreviousIo)
        {
            self.failed.store(true, Ordering::Release);
        }
        result
    }

    fn reopen_after_failure(&self) -> Result<(), Error> {
        if !self.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut database = self.database.write().unwrap_or_else(PoisonError::into_inner);
        if self.failed.load(Ordering::Acquire) {
            // The old handle holds the file's lock.
            *database = None;
            *database = Some(open_database(&self.path)?);
            self.failed.store(false, Ordering::Release);
        }
        Ok(())
    }
}

fn open(database: &Option<Database>) -> Result<&Database, Error> {
    database.as_ref().ok_or_else(|| Error::metadata("open", redb::Error::PreviousIo))
}

fn open_database(path: &Path) -> Result<Database, Error> {
    let database = Builder::new()
        .set_cache_size(CACHE_BYTES)
        // An altered file is refused here; without this the first access to it would panic.
        .set_check_integrity_on_open(true)
        .create(path)
        .map_err(|error| match error {
            DatabaseError::DatabaseAlreadyOpen => Error::FailedPrecondition(format!(
                "{} is open in another process: another snapshotter serves this root",
                path.display()
            )),
            DatabaseError::Storage(StorageError::Corrupted(found)) => Error::Damaged(format!(
                "{}: {found}. Restore the file from a backup, or move it away and start again: the snapshot \
                 directories are then set aside under quarantine/ and images must be pulled again",
                path.display()
            )),
            other => Error::metadata("open", other),
        })?;
    let transaction = database.begin_write().map_err(|e| Error::metadata("open", e))?;
    // A read transaction cannot open a table that was never written to.
    drop(Writer::new(&transaction)?);
    transaction.commit().map_err(|e| Error::metadata("open", e))?;
    Ok(database)
}

/// Look-ups that a reader and a writer have in common.
pub trait Lookup {
    /// The record of this name, if there is one.
    ///
    /// # Errors
    /// Those of the database, and [`Error::Damaged`] for a record that cannot be read.
    fn get(&self, name: &str) -> Result<Option<Record>, Error>;

    /// The record of this name.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is none.
    fn require(&self, name: &str) -> Result<Record, Error> {
        self.get(name)?.ok_or_else(|| Error::no_snapshot(name))
    }

    /// The snapshot called `parent` and everything below it, nearest first; nothing for `None`.
    ///
    /// # Errors
    /// [`Error::NotFound`] when one of them is missing.
    fn ancestors(&self, parent: Option<&str>) -> Result<Vec<Record>, Error> {
        let mut chain = Vec::new();
        let mut next = parent.map(str::to_owned);
        while let Some(name) = next.take() {
            let record = self
                .get(&name)?
                .ok_or_else(|| Error::NotFound(format!("parent snapshot {name:?} does not exist")))?;
            next.clone_from(&record.info.parent);
            chain.push(record);
        }
        Ok(chain)
    }
}

/// One consistent state.
#[derive(Debug)]
pub struct Reader {
    snapshots: ReadOnlyTable<&'static str, &'static [u8]>,
    removed: ReadOnlyTable<u64, ()>,
}

impl Reader {
    /// Every record, in order of names.
    ///
    /// # Errors
    /// Those of the database, and [`Error::Damaged`].
    pub fn all(&self) -> Result<Vec<Record>, Error> {
        let entries = self.snapshots.iter().map_err(|e| Error::metadata("read", e))?;
        entries
            .map(|entry| {
                let (name, value) = entry.map_err(|e| Error::metadata("read", e))?;
                decode(name.value(), value.value())
            })
            .collect()
    }

    /// Ids of removed snapshots whose directories may still exist.
    ///
    /// # Errors
    /// Those of the database.
    pub fn removed(&self) -> Result<Vec<u64>, Error> {
        let entries = self.removed.iter().map_err(|e| Error::metadata("read", e))?;
        entries.map(|entry| Ok(entry.map_err(|e| Error::metadata("read", e))?.0.value())).collect()
    }
}

impl Lookup for Reader {
    fn get(&self, name: &str) -> Result<Option<Record>, Error> {
        lookup(&self.snapshots, name)
    }
}

/// The state while it is changed.
#[derive(Debug)]
pub struct Writer<'t> {
    snapshots: Table<'t, &'static str, &'static [u8]>,
    children: Table<'t, (u64, u64), ()>,
    removed: Table<'t, u64, ()>,
    counters: Table<'t, &'static str, u64>,
}

impl<'t> Writer<'t> {
    fn new(transaction: &'t WriteTransaction) -> Result<Self, Error> {
        let open = |e| Error::metadata("open", e);
        Ok(Self {
            snapshots: transaction.open_table(SNAPSHOTS).map_err(open)?,
            children: transaction.open_table(CHILDREN).map_err(open)?,
            removed: transaction.open_table(REMOVED).map_err(open)?,
            counters: transaction.open_table(COUNTERS).map_err(open)?,
        })
    }

    /// Writes the record under its name, replacing another one.
    ///
    /// # Errors
    /// Those of the database.
    pub fn put(&mut self, record: &Record) -> Result<(), Error> {
        let text = serde_json::to_vec(record).map_err(|e| Error::Damaged(e.to_string()))?;
        self.snapshots
            .insert(record.info.name.as_str(), text.as_slice())
            .map_err(|e| Error::metadata("write", e))?;
        Ok(())
    }

    /// Deletes the record of this name; that there is none is not an error.
    ///
    /// # Errors
    /// Those of the database.
    pub fn delete(&mut self, name: &str) -> Result<(), Error> {
        self.snapshots.remove(name).map_err(|e| Error::metadata("write", e))?;
        Ok(())
    }

    /// Notes that `child` stands on `parent`.
    ///
    /// # Errors
    /// Those of the database.
    pub fn link(&mut self, parent: u64, child: u64) -> Result<(), Error> {
        self.children.insert((parent, child), ()).map_err(|e| Error::metadata("write", e))?;
        Ok(())
    }

    /// Forgets that `child` stands on `parent`.
    ///
    /// # Errors
    /// Those of the database.
    pub fn unlink(&mut self, parent: u64, child: u64) -> Result<(), Error> {
        self.children.remove((parent, child)).map_err(|e| Error::metadata("write", e))?;
        Ok(())
    }

    /// Whether something stands on the snapshot with this id.
    ///
    /// # Errors
    /// Those of the database.
    pub fn has_children(&self, id: u64) -> Result<bool, Error> {
        let mut children =
            self.children.range((id, 0)..=(id, u64::MAX)).map_err(|e| Error::metadata("read", e))?;
        children.next().transpose().map(|c| c.is_some()).map_err(|e| Error::metadata("read", e))
    }

    /// Notes that the directory of this id is to be deleted.
    ///
    /// # Errors
    /// Those of the database.
    pub fn add_removed(&mut self, id: u64) -> Result<(), Error> {
        self.removed.insert(id, ()).map_err(|e| Error::metadata("write", e))?;
        Ok(())
    }

    /// Notes that the directory of this id is gone.
    ///
    /// # Errors
    /// Those of the database.
    pub fn clear_removed(&mut self, id: u64) -> Result<(), Error> {
        self.removed.remove(id).map_err(|e| Error::metadata("write", e))?;
        Ok(())
    }

    /// A counter, if it was ever set.
    ///
    /// # Errors
    /// Those of the database.
    pub fn counter(&self, name: &str) -> Result<Option<u64>, Error> {
        Ok(self.counters.get(name).map_err(|e| Error::metadata("read", e))?.map(|v| v.value()))
    }

    /// Sets a counter.
    ///
    /// # Errors
    /// Those of the database.
    pub fn set_counter(&mut self, name: &str, value: u64) -> Result<(), Error> {
        self.counters.insert(name, value).map_err(|e| Error::metadata("write", e))?;
        Ok(())
    }
}

impl Lookup for Writer<'_> {
    fn get(&self, name: &str) -> Result<Option<Record>, Error> {
        lookup(&self.snapshots, name)
    }
}

fn lookup(
    table: &impl ReadableTable<&'static str, &'static [u8]>,
    name: &str,
) -> Result<Option<Record>, Error> {
    let value = table.get(name).map_err(|e| Error::metadata("read", e))?;
    value.map(|v| decode(name, v.value())).transpose()
}

fn decode(name: &str, value: &[u8]) -> Result<Record, Error> {
    serde_json::from_slice(value).map_err(|e| Error::Damaged(format!("the record of snapshot {name:?}: {e}")))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn record(id: u64, name: &str, parent: Option<&str>) -> Record {
        let info = Info { name: name.to_owned(), parent: parent.map(str::to_owned), ..Info::default() };
        Record { id, info, ..Record::default() }
    }

    #[test]
    fn survives_reopening_and_is_exclusive() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metadata.redb");
        let layer = Layer::Broken { reason: "x".to_owned() };
        let stored = Record { layer, ..record(7, "a", None) };
        {
            let metadata = Metadata::open(&path).unwrap();
            metadata.write(|w| w.put(&stored)).unwrap();
            assert!(matches!(Metadata::open(&path), Err(Error::FailedPrecondition(_))));
        }
        let metadata = Metadata::open(&path).unwrap();
        assert_eq!(metadata.read(|r| r.get("a")).unwrap(), Some(stored));
        assert_eq!(metadata.read(|r| r.get("b")).unwrap(), None);
    }

    #[test]
    fn a_failed_write_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let metadata = Metadata::open(&dir.path().join("m")).unwrap();
        let result: Result<(), _> = metadata.write(|w| {
            w.put(&record(1, "a", None))?;
            Err(Error::InvalidArgument("no".to_owned()))
        });
        assert!(result.is_err());
        assert!(metadata.read(Reader::all).unwrap().is_empty());
    }

    #[test]
    fn children_and_ancestors() {
        let dir = tempfile::tempdir().unwrap();
        let metadata = Metadata::open(&dir.path().join("m")).unwrap();
        metadata
            .write(|w| {
                w.put(&record(1, "a", None))?;
                w.put(&record(2, "b", Some("a")))?;
                w.put(&record(3, "c", Some("b")))?;
                w.link(1, 2)?;
                w.link(2, 3)
            })
            .unwrap();
        metadata
            .write(|w| {
                assert!(w.has_children(1)?);
                assert!(!w.has_children(3)?);
                w.unlink(1, 2)?;
                assert!(!w.has_children(1)?);
                Ok(())
            })
            .unwrap();
        let ids = |name| -> Result<Vec<u64>, Error> {
            metadata.read(|r| Ok(r.ancestors(name)?.iter().map(|a| a.id).collect()))
        };
        assert_eq!(ids(Some("c")).unwrap(), [3, 2, 1]);
        assert!(ids(None).unwrap().is_empty());
        assert!(matches!(ids(Some("x")), Err(Error::NotFound(_))));
    }

    #[test]
    fn another_version_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        Metadata::open(&path).unwrap().write(|w| w.set_counter("version", 2)).unwrap();
        let error = Metadata::open(&path).unwrap_err().to_string();
        assert!(error.contains("version 2"), "{error}");
    }

    #[test]
    fn a_damaged_file_is_refused_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let metadata = Metadata::open(&path).unwrap();
        for id in 0..200 {
            metadata.write(|w| w.put(&record(id, &format!("snapshot-{id}"), None))).unwrap();
        }
        drop(metadata);
        let mut bytes = fs::read(&path).unwrap();
        for byte in &mut bytes[4096..] {
            *byte ^= 0x5a;
        }
        fs::write(&path, &bytes).unwrap();
        let error = Metadata::open(&path).unwrap_err();
        assert!(matches!(error, Error::Damaged(_)), "{error}");
        fs::write(&path, b"not a database, and longer than nothing").unwrap();
        assert!(Metadata::open(&path).is_err());
    }
}
