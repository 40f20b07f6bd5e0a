//! The verifier: the only code that makes an [`AdmittedPayload`].
//!
//! A payload is admitted by its record when the record is kept as it must be and names exactly the file that
//! is there; otherwise by hashing it in full. Concurrent admissions of one digest hash once: whoever waited for
//! the lock finds the record of whoever had it.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{Advice, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::lock::DigestLock;
use super::{AdmitError, NodeStore, ahead, blob_name, record_path};
use crate::digest::{Digest, Sha256, lanes};
use crate::durable;
use crate::format::native_manifest::BlobStat;
use crate::format::validation::{self, FileIdentity, ValidationRecord};

/// Reads fit the second-level cache, and are long enough that the page cache gets large folios.
pub(super) const READ_BYTES: usize = 256 << 10;
/// How often a file is hashed again because only its ctime changed meanwhile (chmod, chown, a link).
const ATTEMPTS: usize = 3;
/// Older kernels stamp files with a clock that ticks this rarely; a change within the tick shows no new ctime.
const CLOCK_TICK: Duration = Duration::from_millis(10);

/// How an admission was decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evidence {
    /// The record matched.
    CachedFullSha256,
    /// The content was hashed by this operation.
    FullSha256ThisOperation,
}

impl Evidence {
    /// The name in records and output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CachedFullSha256 => "cached-full-sha256",
            Self::FullSha256ThisOperation => "full-sha256-this-operation",
        }
    }
}

impl std::fmt::Display for Evidence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What became of the validation record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordKept {
    /// It was there and matched.
    Reused,
    /// It was written or replaced.
    Written,
    /// It could not be written; why. The payload is verified all the same, the next admission hashes it again.
    NotWritten(String),
}

/// A payload whose content is proved to have its digest. It holds the file open, so that what was verified is
/// what is mapped.
#[derive(Debug)]
pub struct AdmittedPayload {
    digest: Digest,
    path: PathBuf,
    file: File,
    identity: FileIdentity,
    evidence: Evidence,
    pub(super) bytes_hashed: u64,
    record: RecordKept,
}

impl AdmittedPayload {
    /// The payload.
    pub const fn digest(&self) -> &Digest {
        &self.digest
    }

    /// Size in bytes.
    pub const fn bytes(&self) -> u64 {
        self.identity.content.size
    }

    /// Its path in the store.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The verified file, open for reading.
    pub const fn file(&self) -> &File {
        &self.file
    }

    /// How the admission was decided.
    pub const fn evidence(&self) -> Evidence {
        self.evidence
    }

    /// Payload bytes that this operation hashed; 0 when the record matched.
    pub const fn bytes_hashed(&self) -> u64 {
        self.bytes_hashed
    }

    /// What became of the validation record.
    pub const fn record(&self) -> &RecordKept {
        &self.record
    }

    /// The file's identity, as a manifest records it.
    pub const fn blob_stat(&self) -> BlobStat {
        let FileIdentity { content, diagnostic } = self.identity;
        BlobStat {
            device: content.device,
            inode: content.inode,
            bytes: content.size,
            mtime_ns: content.mtime_ns,
            ctime_ns: diagnostic.ctime_ns,
        }
    }

    pub(super) const fn identity(&self) -> &FileIdentity {
        &self.identity
    }
}

/// A payload that is being hashed.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) digest: Digest,
    pub(super) file: File,
    pub(super) before: FileIdentity,
}

impl NodeStore {
    /// Admits a payload: by its record, or by hashing it in full and writing the record. `bytes` is the
    /// committed size where it is known. `progress` is called with the number of bytes hashed since the last call.
    /// Waits while another process verifies the same payload.
    ///
    /// # Errors
    /// Missing, not a regular file, reached through a link, of another size or digest, or changed meanwhile.
    /// The old record stays as it was then.
    pub fn admit(
        &self,
        digest: &Digest,
        bytes: Option<u64>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<AdmittedPayload, AdmitError> {
        if let Some(payload) = self.admit_by_record(digest, bytes)? {
            return Ok(payload);
        }
        let path = self.payload_path(digest);
        let lock = self.lock(digest).map_err(AdmitError::io("lock the payload", &path))?;
        self.admit_locked(digest, bytes, progress, &lock)
    }

    /// [`Self::admit`] for the holder of the lock.
    pub(super) fn admit_locked(
        &self,
        digest: &Digest,
        bytes: Option<u64>,
        progress: &mut dyn FnMut(u64),
        lock: &DigestLock,
    ) -> Result<AdmittedPayload, AdmitError> {
        match self.admit_by_record(digest, bytes)? {
            Some(payload) => Ok(payload),
            None => self.admit_by_content(digest, bytes, progress, lock),
        }
    }

    /// [`Self::admit_locked`] that hashes the payload whatever its record says.
    pub(super) fn admit_by_content(
        &self,
        digest: &Digest,
        bytes: Option<u64>,
        progress: &mut dyn FnMut(u64),
        _lock: &DigestLock,
    ) -> Result<AdmittedPayload, AdmitError> {
        let mut bytes_hashed = 0;
        for _ in 0..ATTEMPTS {
            let begun = self.begin(digest, bytes)?;
            let found = hash(&begun.file, &mut |n| {
                bytes_hashed += n;
                progress(n);
            });
            if let Some(payload) = self.conclude(begun, found, bytes_hashed)? {
                return Ok(payload);
            }
        }
        let path = self.payload_path(digest);
        Err(AdmitError::Changed { path, what: "its ctime keeps changing".to_owned() })
    }

    /// Opens a payload to be hashed, at a time after which every change shows.
    pub(super) fn begin(&self, digest: &Digest, bytes: Option<u64>) -> Result<Begun, AdmitError> {
        let (file, before) = self.open_payload(digest, bytes)?;
        wait_out_tick(&before);
        Ok(Begun { digest: *digest, file, before })
    }

    /// Judges what was hashed. None: only the ctime changed meanwhile, so it must be hashed again.
    pub(super) fn conclude(
        &self,
        begun: Begun,
        found: io::Result<Digest>,
        bytes_hashed: u64,
    ) -> Result<Option<AdmittedPayload>, AdmitError> {
        let Begun { digest, file, before } = begun;
        let path = self.payload_path(&digest);
        let found = found.map_err(AdmitError::io("read", &path))?;
        let changed = |what: String| AdmitError::Changed { path: path.clone(), what };
        let (_, after) = self.open_payload(&digest, None).map_err(|e| changed(e.to_string()))?;
        if after.content != before.content {
            return Err(changed(format!("it was {:?} and is {:?}", before.content, after.content)));
        }
        if after != before {
            return Ok(None);
        }
        if found != digest {
            return Err(AdmitError::DigestMismatch { path, expected: digest, found });
        }
        Ok(Some(self.verified(digest, file, before, bytes_hashed)))
    }

    /// Writes the record of a payload whose content was hashed, and admits it.
    pub(super) fn verified(
        &self,
        digest: Digest,
        file: File,
        identity: FileIdentity,
        bytes_hashed: u64,
    ) -> AdmittedPayload {
        let path = self.payload_path(&digest);
        let evidence = Evidence::FullSha256ThisOperation;
        let record = match write_record(&path, digest, &identity, evidence) {
            Ok(()) => RecordKept::Written,
            Err(problem) => {
                tracing::warn!(payload = %digest, %problem, "cannot keep the validation record");
                RecordKept::NotWritten(problem)
            }
        };
        AdmittedPayload { digest, path, file, identity, evidence, bytes_hashed, record }
    }

    /// Admits a payload by its record, and answers None where that takes hashing. Takes no lock and reads no byte
    /// of the payload.
    ///
    /// # Errors
    /// As [`Self::admit`], except for what only hashing finds.
    pub fn admit_by_record(
        &self,
        digest: &Digest,
        bytes: Option<u64>,
    ) -> Result<Option<AdmittedPayload>, AdmitError> {
        let (file, identity) = self.open_payload(digest, bytes)?;
        let path = self.payload_path(digest);
        let Ok(record) = read_record(&record_path(&path)) else { return Ok(None) };
        if record.matches(&blob_name(digest), *digest, &identity).is_err() {
            return Ok(None);
        }
        Ok(Some(AdmittedPayload {
            digest: *digest,
            path,
            file,
            identity,
            evidence: Evidence::CachedFullSha256,
            bytes_hashed: 0,
            record: RecordKept::Reused,
        }))
    }

    /// Opens a payload without following any link below the store's root.
    pub(super) fn open_payload(
        &self,
        digest: &Digest,
        bytes: Option<u64>,
    ) -> Result<(File, FileIdentity), AdmitError> {
        let path = self.payload_path(digest);
        let not_regular = |found| AdmitError::NotRegular { path: path.clone(), found };
        let file = match self.open_beneath(&digest.payload_path()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Err(AdmitError::NotFound { digest: *digest, path }),
            Err(Errno::LOOP) => return Err(not_regular("a symbolic link")),
            Err(errno) => return Err(AdmitError::io("open", &path)(errno.into())),
        };
        let metadata = file.metadata().map_err(AdmitError::io("inspect", &path))?;
        if !metadata.is_file() {
            return Err(not_regular("a directory or special file"));
        }
        match bytes.filter(|expected| *expected != metadata.size()) {
            Some(expected) => Err(AdmitError::SizeMismatch { path, expected, found: metadata.size() }),
            None => Ok((file, FileIdentity::of(&metadata))),
        }
    }

    fn open_beneath(&self, path: &Path) -> rustix::io::Result<File> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&self.root, flags, Mode::empty())?;
        // NONBLOCK: a FIFO in the payload's place must not hang us.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let open = || rustix::fs::openat2(&root, path, flags, Mode::empty(), resolve);
        Ok(rustix::io::retry_on_intr(open)?.into())
    }
}

/// A file from offset 0, read in pieces that fit the second-level cache.
pub(super) fn reader(file: &File) -> io::Result<BufReader<File>> {
    // Only a hint.
    let _ = rustix::fs::fadvise(file, 0, None, Advice::Sequential);
    Ok(BufReader::with_capacity(READ_BYTES, file.try_clone()?))
}

/// The digest of a whole file from offset 0.
pub(super) fn hash(file: &File, progress: &mut dyn FnMut(u64)) -> io::Result<Digest> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores > 1 && file.metadata()?.size() >= ahead::WORTHWHILE {
        // Only a hint.
        let _ = rustix::fs::fadvise(file, 0, None, Advice::Sequential);
        return ahead::hash(file, progress);
    }
    let (mut stream, mut found) = (Some(reader(file)?), None);
    lanes::sum_all::<_, _, Sha256>(
        || stream.take().map(|stream| ((), stream)),
        |(), sum| found = Some(sum),
        progress,
    );
    found.unwrap_or_else(|| Err(io::Error::other("nothing was hashed")))
}

/// The record at `path` if it is kept as it must be: a regular file, no link, no permission for group and
/// others, at most 1 MiB, one valid value.
pub(super) fn read_record(path: &Path) -> Result<ValidationRecord, String> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err("there is no record".to_owned()),
        Err(e) => return Err(format!("the record cannot be opened: {e}")),
    };
    let metadata = file.metadata().map_err(|e| format!("the record cannot be inspected: {e}"))?;
    if !metadata.is_file() {
        return Err("the record is not a regular file".to_owned());
    }
    if metadata.mode() & 0o077 != 0 {
        return Err(format!(
            "the record has mode {:o}, expected no group and other bits",
            metadata.mode() & 0o7777
        ));
    }
    let mut bytes = Vec::new();
    file.take(validation::MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| format!("the record cannot be read: {e}"))?;
    if bytes.len() as u64 > validation::MAX_BYTES {
        return Err(format!("the record is larger than {} bytes", validation::MAX_BYTES));
    }
    ValidationRecord::parse(&bytes).map_err(|e| e.to_string())
}

fn write_record(
    payload: &Path,
    digest: Digest,
    identity: &FileIdentity,
    evidence: Evidence,
) -> Result<(), String> {
    let record = ValidationRecord::new(&blob_name(&digest), digest, identity, evidence.name(), now_ns());
    let bytes = record.to_bytes().map_err(|e| e.to_string())?;
    durable::write_file(&record_path(payload), &bytes, 0o600).map_err(|e| e.to_string())
}

/// Waits until every later change of the file must show another ctime.
pub(super) fn wait_out_tick(identity: &FileIdentity) {
    let changed = u64::try_from(identity.diagnostic.ctime_ns).unwrap_or(0);
    let age = Duration::from_nanos(now_ns().saturating_sub(changed));
    std::thread::sleep(CLOCK_TICK.saturating_sub(age));
}

pub(crate) fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
