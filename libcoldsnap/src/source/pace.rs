//! Waiting: the bandwidth limit, and pauses that end when nobody waits for the payload any more.

use std::time::{Duration, Instant};

/// How often waiting work looks whether it is still wanted.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// Waits; ends early when `cancelled` says so.
pub(crate) fn pause(time: Duration, cancelled: &dyn Fn() -> bool) {
    let until = Instant::now() + time;
    while !cancelled() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(LOOK));
    }
}

/// Holds the rate of the delivered bytes at the limit.
#[derive(Debug)]
pub(crate) struct Pace {
    limit: Option<u64>,
    /// When the bytes so far are due.
    due: Instant,
}

impl Pace {
    pub(crate) fn new(limit: Option<u64>) -> Self {
        Self { limit: limit.filter(|limit| *limit > 0), due: Instant::now() }
    }

    /// Waits until so many bytes more were allowed.
    pub(crate) fn wait(&mut self, bytes: u64, cancelled: &dyn Fn() -> bool) {
        let wait = self.owed(bytes, Instant::now());
        if !wait.is_zero() {
            pause(wait, cancelled);
        }
    }

    fn owed(&mut self, bytes: u64, now: Instant) -> Duration {
        let Some(limit) = self.limit else { return Duration::ZERO };
        #[allow(clippy::cast_precision_loss, reason = "a time needs no more digits")]
        let cost = Duration::from_secs_f64(bytes as f64 / limit as f64);
        // Time in which nothing came is not made up for.
        self.due = self.due.max(now) + cost;
        self.due.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_held_and_idle_time_is_not_made_up_for() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut pace = Pace { limit: Some(1000), due: start };
        assert_eq!(pace.owed(500, at(0)), Duration::from_millis(500));
        assert_eq!(pace.owed(500, at(500)), Duration::from_millis(500));
        assert_eq!(pace.owed(500, at(600)), Duration::from_millis(900), "two chunks in one interval");
        assert_eq!(pace.owed(250, at(60_000)), Duration::from_millis(250), "a minute without bytes");
        assert_eq!(Pace::new(None).owed(u64::MAX, at(0)), Duration::ZERO);
        assert_eq!(Pace::new(Some(0)).owed(u64::MAX, at(0)), Duration::ZERO);
    }
}
