//! How old the router's routes are, shared with the readiness of the process.
//!
//! Invariant: routes are served only while they are younger than the configured bound, and never before the first load.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The watcher confirms the routes at least each half second; its statements have 2 s.
const CURRENT_WITHIN: Duration = Duration::from_secs(4);
const NEVER: u64 = 0;

/// When the routes were last known to match the database.
pub struct Freshness {
    start: Instant,
    /// Milliseconds after `start`, plus one; [`NEVER`] before the first load.
    confirmed_ms: AtomicU64,
    max_staleness: Duration,
}

/// What the routes are worth now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Routes {
    NotLoaded,
    Current,
    /// The database cannot be read, and the routes are still young enough to be served.
    Stale,
    TooOld,
}

impl Routes {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotLoaded => "not_loaded",
            Self::Current => "current",
            Self::Stale => "stale",
            Self::TooOld => "too_old",
        }
    }

    pub fn are_served(self) -> bool {
        matches!(self, Self::Current | Self::Stale)
    }
}

impl Freshness {
    pub fn new(max_staleness: Duration) -> Self {
        Self { start: Instant::now(), confirmed_ms: AtomicU64::new(NEVER), max_staleness }
    }

    pub fn max_staleness(&self) -> Duration {
        self.max_staleness
    }

    /// Notes that the routes matched the database at `at`.
    pub(super) fn confirm(&self, at: Instant) {
        let since = at.saturating_duration_since(self.start).as_millis();
        let confirmed = u64::try_from(since).unwrap_or(u64::MAX - 1) + 1;
        self.confirmed_ms.fetch_max(confirmed, Ordering::AcqRel);
    }

    /// `None` before the first load.
    pub fn age(&self) -> Option<Duration> {
        match self.confirmed_ms.load(Ordering::Acquire) {
            NEVER => None,
            confirmed => {
                Some(self.start.elapsed().saturating_sub(Duration::from_millis(confirmed.saturating_sub(1))))
            }
        }
    }

    pub fn routes(&self) -> Routes {
        match self.age() {
            None => Routes::NotLoaded,
            Some(age) if age < CURRENT_WITHIN.min(self.max_staleness) => Routes::Current,
            Some(age) if age < self.max_staleness => Routes::Stale,
            Some(_) => Routes::TooOld,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_go_stale_and_then_too_old() {
        let freshness = Freshness::new(Duration::from_secs(1800));
        assert_eq!((freshness.routes(), freshness.age()), (Routes::NotLoaded, None));
        let start = Instant::now();
        freshness.confirm(start);
        assert_eq!(freshness.routes(), Routes::Current);
        let confirmed_ago = |seconds: u64| {
            let mut freshness = Freshness::new(Duration::from_secs(1800));
            freshness.start = start.checked_sub(Duration::from_secs(seconds)).unwrap();
            freshness.confirm(freshness.start);
            freshness.routes()
        };
        assert_eq!(confirmed_ago(15), Routes::Stale);
        assert_eq!(confirmed_ago(1799), Routes::Stale);
        assert_eq!(confirmed_ago(1801), Routes::TooOld);
        assert!(!Routes::NotLoaded.are_served() && !Routes::TooOld.are_served());
    }
}
