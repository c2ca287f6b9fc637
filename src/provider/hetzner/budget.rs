//! The provider's rate limit as one budget of this process, shared by every clone of the adapter.
//!
//! Nobody sends while the provider has said that nothing is left. It bounds calls in flight as well.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::HeaderMap;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

const CALLS_IN_FLIGHT: usize = 8;

/// Cloned with the adapter; all clones share one gate.
#[derive(Debug, Clone)]
pub(super) struct Budget {
    in_flight: Arc<Semaphore>,
    closed_until: Arc<Mutex<Option<Instant>>>,
    longest_wait: Duration,
}

impl Budget {
    pub(super) fn new(longest_wait: Duration) -> Self {
        Self {
            in_flight: Arc::new(Semaphore::new(CALLS_IN_FLIGHT)),
            closed_until: Arc::default(),
            longest_wait,
        }
    }

    /// Waits for a place and for the gate; the place is held until the permit is dropped.
    pub(super) async fn enter(&self) -> OwnedSemaphorePermit {
        let place = Arc::clone(&self.in_flight).acquire_owned().await.expect("the semaphore is never closed");
        // Others may move the gate while we wait; nobody waits longer than the longest wait for it.
        let latest = Instant::now() + self.longest_wait;
        while let Some(until) = self.gate().filter(|until| *until > Instant::now()) {
            tokio::time::sleep_until(until.min(latest)).await;
            if Instant::now() >= latest {
                break;
            }
        }
        place
    }

    /// Learns from any answer: when its budget is spent, the gate closes for the time in which one call comes back.
    pub(super) fn learn(&self, headers: &HeaderMap) {
        let (Some(limit), Some(0), Some(reset)) =
            (number(headers, "ratelimit-limit"), number(headers, "ratelimit-remaining"), reset_in(headers))
        else {
            return;
        };
        // The provider refills evenly and names the time when all is back.
        let one_call = reset / u32::try_from(limit.max(1)).unwrap_or(u32::MAX);
        self.close_for(one_call);
    }

    /// Closes the gate after a 429 until the provider's reset, or for `fallback` where it names none.
    pub(super) fn refused(&self, headers: &HeaderMap, fallback: Duration) -> Duration {
        let wait = reset_in(headers).unwrap_or(fallback).min(self.longest_wait);
        self.close_for(wait);
        wait
    }

    fn close_for(&self, wait: Duration) {
        let until = Instant::now() + wait.min(self.longest_wait);
        let mut gate = self.closed_until.lock().unwrap_or_else(PoisonError::into_inner);
        *gate = Some(gate.map_or(until, |before| before.max(until)));
    }

    fn gate(&self) -> Option<Instant> {
        *self.closed_until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

/// `RateLimit-Reset` is a Unix time in seconds.
fn reset_in(headers: &HeaderMap) -> Option<Duration> {
    let reset = UNIX_EPOCH.checked_add(Duration::from_secs(number(headers, "ratelimit-reset")?))?;
    Some(reset.duration_since(SystemTime::now()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(remaining: u64, reset_in_seconds: u64) -> HeaderMap {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let mut headers = HeaderMap::new();
        headers.insert("ratelimit-limit", 3600.into());
        headers.insert("ratelimit-remaining", remaining.into());
        headers.insert("ratelimit-reset", (now + reset_in_seconds).into());
        headers
    }

    #[tokio::test]
    async fn a_spent_budget_waits_for_one_call_and_a_refusal_for_the_reset_within_bounds() {
        let longest = Duration::from_millis(400);
        let budget = Budget::new(longest);
        let clone = budget.clone();

        budget.learn(&headers(1, 3600));
        assert_eq!(budget.gate(), None, "something is left");

        let start = Instant::now();
        budget.learn(&headers(0, 360));
        drop(clone.enter().await);
        assert!(start.elapsed() >= Duration::from_millis(95), "{:?}", start.elapsed());

        let start = Instant::now();
        assert_eq!(budget.refused(&headers(0, 3600), Duration::ZERO), longest);
        drop(clone.enter().await);
        assert!(start.elapsed() >= longest, "{:?}", start.elapsed());
    }

    #[test]
    fn a_reset_in_the_past_or_unreadable_is_no_wait() {
        let mut past = headers(0, 0);
        past.insert("ratelimit-reset", 1.into());
        assert_eq!(reset_in(&past), Some(Duration::ZERO));
        past.insert("ratelimit-reset", "soon".parse().unwrap());
        assert_eq!(reset_in(&past), None);
    }
}
