//! Tracks the age of the router's routes, for the router and for the process's readiness check.
//!
//! Invariant: routes are served only while their age is below the configured maximum, and never before the first load.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Routes below this age count as current: the watcher confirms them at least every 500 ms, and a poll has a timeout of
/// 2 s.
const MAX_CURRENT_AGE: Duration = Duration::from_secs(4);
const NOT_LOADED: u64 = 0;

/// Tracks when the routes last matched the database.
pub struct RouteFreshness {
    start: Instant,
    /// Milliseconds after `start`, plus one; [`NOT_LOADED`] before the first load.
    confirmed_ms: AtomicU64,
    max_staleness: Duration,
}

/// Whether the routes are current enough to be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoutesState {
    NotLoaded,
    Current,
    /// The database is unreachable, but the routes are recent enough to be served.
    Stale,
    TooOld,
}

impl RoutesState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotLoaded => "not_loaded",
            Self::Current => "current",
            Self::Stale => "stale",
            Self::TooOld => "too_old",
        }
    }

    pub fn is_usable(self) -> bool {
        matches!(self, Self::Current | Self::Stale)
    }
}

impl RouteFreshness {
    pub fn new(max_staleness: Duration) -> Self {
        Self { start: Instant::now(), confirmed_ms: AtomicU64::new(NOT_LOADED), max_staleness }
    }

    pub fn max_staleness(&self) -> Duration {
        self.max_staleness
    }

    /// Records that the routes matched the database at `read_at`.
    pub fn confirm(&self, read_at: Instant) {
        let elapsed_ms = read_at.saturating_duration_since(self.start).as_millis();
        let confirmed = u64::try_from(elapsed_ms).unwrap_or(u64::MAX - 1) + 1;
        self.confirmed_ms.fetch_max(confirmed, Ordering::AcqRel);
    }

    /// Returns the age of the routes; `None` before the first load.
    pub fn age(&self) -> Option<Duration> {
        match self.confirmed_ms.load(Ordering::Acquire) {
            NOT_LOADED => None,
            confirmed => {
                Some(self.start.elapsed().saturating_sub(Duration::from_millis(confirmed.saturating_sub(1))))
            }
        }
    }

    pub fn state(&self) -> RoutesState {
        match self.age() {
            None => RoutesState::NotLoaded,
            Some(age) if age < MAX_CURRENT_AGE.min(self.max_staleness) => RoutesState::Current,
            Some(age) if age < self.max_staleness => RoutesState::Stale,
            Some(_) => RoutesState::TooOld,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_become_stale_then_too_old() {
        let freshness = RouteFreshness::new(Duration::from_secs(1800));
        assert_eq!((freshness.state(), freshness.age()), (RoutesState::NotLoaded, None));
        let start = Instant::now();
        freshness.confirm(start);
        assert_eq!(freshness.state(), RoutesState::Current);
        let confirmed_ago = |seconds: u64| {
            let mut freshness = RouteFreshness::new(Duration::from_secs(1800));
            freshness.start = start.checked_sub(Duration::from_secs(seconds)).unwrap();
            freshness.confirm(freshness.start);
            freshness.state()
        };
        assert_eq!(confirmed_ago(15), RoutesState::Stale);
        assert_eq!(confirmed_ago(1799), RoutesState::Stale);
        assert_eq!(confirmed_ago(1801), RoutesState::TooOld);
        assert!(!RoutesState::NotLoaded.is_usable() && !RoutesState::TooOld.is_usable());
    }
}
