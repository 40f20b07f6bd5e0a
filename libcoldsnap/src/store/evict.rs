//! Eviction: payloads that nobody has leased or pinned go, least recently leased first, until there is room.
//!
//! Which payloads those are is looked up without a lock, and again under the lock of each one before it goes. Leases
//! and pins are taken under the same lock, so that whoever has one keeps its payload. A payload whose lock is held is
//! just being used, and stays.

use super::{NodeStore, PayloadInfo, PayloadState, StoreError, Usage, Watermarks};
use crate::digest::Digest;

/// What [`NodeStore::evict`] removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eviction {
    /// When the store is above the high watermark, enough to come down to the low one.
    Watermarks(Watermarks),
    /// Everything that is neither leased nor pinned.
    AllUnused,
}

/// What was removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Evicted {
    /// The payloads in the order of their removal, with their sizes.
    pub payloads: Vec<(Digest, u64)>,
    /// Sum of the sizes. The blocks of a payload that a process still has open are free when it closes it.
    pub bytes: u64,
    /// Bytes that should have gone but are leased, pinned or in use.
    pub missing: u64,
    /// Payloads whose removal failed.
    pub failures: Vec<EvictionFailure>,
}

/// A payload that should have gone and could not be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvictionFailure {
    /// The payload.
    pub digest: Digest,
    /// Why it is still here.
    pub reason: String,
}

impl NodeStore {
    /// How full the store is.
    ///
    /// # Errors
    /// When the store or its file system cannot be inspected.
    pub fn usage(&self) -> Result<Usage, StoreError> {
        self.usage_of(&self.list()?)
    }

    /// Removes payloads that are neither leased nor pinned, least recently leased first. With `dry_run` nothing is
    /// removed, and the answer is what would be.
    ///
    /// # Errors
    /// When the store cannot be read. A payload that cannot be removed is in the answer.
    pub fn evict(&self, eviction: &Eviction, dry_run: bool) -> Result<Evicted, StoreError> {
        let payloads = self.list()?;
        match eviction {
            Eviction::AllUnused => {
                let evicted = self.evict_from(payloads, u64::MAX, dry_run)?;
                Ok(Evicted { missing: 0, ..evicted })
            }
            Eviction::Watermarks(watermarks) => {
                let excess = watermarks.excess(&self.usage_of(&payloads)?);
                self.evict_from(payloads, excess, dry_run)
            }
        }
    }

    /// Makes room for `bytes` more: with watermarks as [`Self::evict`] would do with the bytes already here, and if
    /// the reserve would still be touched, as many payloads more as are needed. None when all of them would not help.
    ///
    /// # Errors
    /// When there is not enough room, or the file system cannot be inspected.
    pub fn make_room(&self, bytes: u64) -> Result<(), StoreError> {
        let directory = self.payload_directory();
        if let Some(watermarks) = &self.watermarks {
            let payloads = self.list()?;
            let usage = self.usage_of(&payloads)?.with(bytes);
            self.log(&self.evict_from(payloads, watermarks.excess(&usage), false)?);
        }
        let wanted = bytes.saturating_add(self.reserve);
        let mut available = self.available()?;
        if available < wanted && self.watermarks.is_some() {
            let payloads = self.list()?;
            let evictable: u64 = payloads.iter().filter(|p| is_unused(p)).map(|p| p.bytes).sum();
            if evictable >= wanted - available {
                self.log(&self.evict_from(payloads, wanted - available, false)?);
                available = self.available()?;
            }
        }
        if available >= wanted {
            return Ok(());
        }
        let reserve = self.reserve;
        Err(StoreError::InsufficientSpace { path: directory, needed: bytes, reserve, available })
    }

    fn evict_from(
        &self,
        mut payloads: Vec<PayloadInfo>,
        wanted: u64,
        dry_run: bool,
    ) -> Result<Evicted, StoreError> {
        payloads.retain(is_unused);
        payloads.sort_by_key(|payload| (payload.last_used_unix_ns, payload.digest));
        let mut evicted = Evicted::default();
        for payload in payloads {
            if evicted.bytes >= wanted {
                break;
            }
            let removed = if dry_run { Ok(true) } else { self.remove_if_unused(&payload) };
            match removed {
                Ok(true) => {
                    evicted.bytes += payload.bytes;
                    evicted.payloads.push((payload.digest, payload.bytes));
                }
                Ok(false) => {}
                Err(error) => {
                    let failure = EvictionFailure { digest: payload.digest, reason: error.to_string() };
                    evicted.failures.push(failure);
                }
            }
        }
        evicted.missing = wanted.saturating_sub(evicted.bytes);
        Ok(evicted)
    }

    /// Removes a payload unless somebody uses it, has used it since it was listed, or wants it kept.
    fn remove_if_unused(&self, payload: &PayloadInfo) -> Result<bool, StoreError> {
        let digest = &payload.digest;
        let locked = self.try_lock(digest).map_err(StoreError::io("lock the payload", &payload.path))?;
        let Some(lock) = locked else { return Ok(false) };
        let used_since = self.last_leased(digest).is_some_and(|used| used > payload.last_used_unix_ns);
        if used_since || self.is_pinned(digest)? || !self.lease_owners(digest)?.is_empty() {
            return Ok(false);
        }
        self.remove_files(digest, &lock)?;
        Ok(true)
    }

    fn usage_of(&self, payloads: &[PayloadInfo]) -> Result<Usage, StoreError> {
        let statvfs = self.statvfs()?;
        let bytes = |blocks: u64| blocks.saturating_mul(statvfs.f_frsize);
        let used = bytes(statvfs.f_blocks.saturating_sub(statvfs.f_bfree));
        Ok(Usage {
            payload_bytes: payloads.iter().map(|payload| payload.bytes).sum(),
            filesystem_used: used,
            // As df counts: without the blocks that only root may use.
            filesystem_bytes: used.saturating_add(bytes(statvfs.f_bavail)),
        })
    }

    /// Bytes that can still be written.
    fn available(&self) -> Result<u64, StoreError> {
        let statvfs = self.statvfs()?;
        Ok(statvfs.f_bavail.saturating_mul(statvfs.f_frsize))
    }

    fn statvfs(&self) -> Result<rustix::fs::StatVfs, StoreError> {
        let directory = self.payload_directory();
        rustix::fs::statvfs(&directory)
            .map_err(|e| StoreError::io("inspect the file system of", &directory)(e.into()))
    }

    fn log(&self, evicted: &Evicted) {
        for (digest, bytes) in &evicted.payloads {
            tracing::info!(payload = %digest, bytes, store = %self.root.display(), "evicted a payload to make room");
        }
        for EvictionFailure { digest, reason } in &evicted.failures {
            tracing::warn!(payload = %digest, reason, "cannot evict a payload");
        }
    }
}

fn is_unused(payload: &PayloadInfo) -> bool {
    // Something else than a file is for fsck to report.
    let file = !matches!(payload.state, PayloadState::Unusable(_));
    file && payload.leases == 0 && !payload.pinned
}
