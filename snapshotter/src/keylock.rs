//! One operation at a time per snapshot key.
//!
//! Preparing a container may verify a payload for seconds before anything is recorded; meanwhile a second
//! Prepare or a Remove of the same key must not take or give back the leases of the first.

use std::collections::HashSet;
use std::sync::{Condvar, Mutex, PoisonError};

/// The keys in use.
#[derive(Debug, Default)]
pub struct KeyLocks {
    busy: Mutex<HashSet<String>>,
    freed: Condvar,
}

/// A key is in use while this lives.
#[derive(Debug)]
pub struct KeyGuard<'a> {
    locks: &'a KeyLocks,
    key: String,
}

impl KeyLocks {
    /// Waits until nobody uses `key`, and uses it. Blocks the thread.
    pub fn lock(&self, key: &str) -> KeyGuard<'_> {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        while !busy.insert(key.to_owned()) {
            busy = self.freed.wait(busy).unwrap_or_else(PoisonError::into_inner);
        }
        KeyGuard { locks: self, key: key.to_owned() }
    }
}

impl Drop for KeyGuard<'_> {
    fn drop(&mut self) {
        self.locks.busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
        self.locks.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn one_holder_per_key() {
        let locks = KeyLocks::default();
        let inside = AtomicUsize::new(0);
        let _other = locks.lock("other");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let _guard = locks.lock("key");
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                    std::thread::yield_now();
                    inside.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        assert_eq!(locks.busy.lock().unwrap().len(), 1);
    }
}
