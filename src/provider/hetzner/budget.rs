//! Keeps calls within the provider's rate limit, with one budget for all clones of the adapter and, with a
//! [`RateBudget`], for all processes that share it.
//!
//! Calls are suspended when the provider reports an empty budget or returns 429. A call waits while calls are
//! suspended, and until it has been reserved in the shared budget. While the shared budget is unavailable, calls are
//! sent without a reservation. One round trip to the shared budget reserves up to [`RESERVATION_BATCH`] calls. The
//! budget also limits the calls in flight.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::HeaderMap;
use http::header::DATE;
use jiff::fmt::rfc2822;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::{ObservedBudget, RateBudget};

const MAX_CALLS_IN_FLIGHT: usize = 8;
/// Number of calls that are reserved in the shared budget at once.
const RESERVATION_BATCH: u32 = 16;
const RESERVATION_TTL: Duration = Duration::from_secs(10);
/// After this timeout, calls are sent without a reservation.
const SHARED_BUDGET_TIMEOUT: Duration = Duration::from_secs(2);
/// The provider's limits are per hour. A longer reset time is wrong and is capped, because the refill rate derived from
/// it would stop all calls.
const MAX_RESET_TIME: Duration = Duration::from_secs(3600);
/// Minimum number of used calls for a reliable refill rate.
const MIN_USED_CALLS: u64 = 5;

/// No call could be made within the maximum wait.
#[derive(Debug, Clone, Copy)]
pub(super) struct BudgetExhausted;

/// The adapter's rate budget. All clones share one state.
#[derive(Clone)]
pub(super) struct Budget {
    in_flight: Arc<Semaphore>,
    state: Arc<Mutex<State>>,
    shared: Option<Arc<dyn RateBudget>>,
    max_wait: Duration,
}

#[derive(Default)]
struct State {
    /// The time until which calls are suspended.
    suspended_until: Option<Instant>,
    /// Calls reserved in the shared budget but not yet made.
    reserved: u32,
    /// The time at which the reserved calls expire. The next reservation returns them to the shared budget.
    reserved_until: Option<Instant>,
    /// The last observation that has not been reported to the shared budget yet.
    observed: Option<ObservedBudget>,
}

impl Budget {
    pub(super) fn new(max_wait: Duration, shared: Option<Arc<dyn RateBudget>>) -> Self {
        Self {
            in_flight: Arc::new(Semaphore::new(MAX_CALLS_IN_FLIGHT)),
            state: Arc::default(),
            shared,
            max_wait,
        }
    }

    /// Waits for an in-flight permit, for the end of a suspension, and for a reservation in the shared budget.
    /// The call counts as in flight until the permit is dropped.
    ///
    /// # Errors
    /// [`BudgetExhausted`] if no permit was released within the maximum wait, or if there is a shared budget and calls
    /// were still suspended or no call could be reserved. Without a shared budget, a permit is granted after that wait
    /// even if calls are still suspended.
    pub(super) async fn acquire(&self) -> Result<OwnedSemaphorePermit, BudgetExhausted> {
        // Other tasks' responses may extend the suspension repeatedly, so `max_wait` also bounds the total wait.
        let deadline = Instant::now() + self.max_wait;
        let permit = tokio::time::timeout_at(deadline, Arc::clone(&self.in_flight).acquire_owned()).await;
        let permit = permit.map_err(|_| BudgetExhausted)?.expect("the semaphore is never closed");
        loop {
            let until = match self.suspended_until() {
                Some(until) => until,
                None => match self.reserve_call().await {
                    Ok(()) => return Ok(permit),
                    Err(wait) => Instant::now() + wait,
                },
            };
            if Instant::now() >= deadline {
                // Without a shared budget, the suspension is only an estimate: it ignores calls by other users.
                return if self.shared.is_none() { Ok(permit) } else { Err(BudgetExhausted) };
            }
            tokio::time::sleep_until(until.min(deadline)).await;
        }
    }

    /// Reserves a call in the shared budget. Also succeeds if there is no shared budget or it is unavailable. The error
    /// is the delay before the next attempt.
    async fn reserve_call(&self) -> Result<(), Duration> {
        let Some(shared) = &self.shared else { return Ok(()) };
        let (unused, observed) = {
            let mut state = self.lock_state();
            if state.reserved > 0 && state.reserved_until.is_some_and(|until| until > Instant::now()) {
                state.reserved -= 1;
                return Ok(());
            }
            (std::mem::take(&mut state.reserved), state.observed.take())
        };
        let Ok(Some(grant)) =
            tokio::time::timeout(SHARED_BUDGET_TIMEOUT, shared.reserve(RESERVATION_BATCH, unused, observed))
                .await
        else {
            return Ok(());
        };
        if grant.calls == 0 {
            return Err(grant.wait.max(Duration::from_millis(20)).mul_f64(1.0 + jitter() / 4.0));
        }
        let mut state = self.lock_state();
        state.reserved += grant.calls - 1;
        state.reserved_until = Some(Instant::now() + RESERVATION_TTL);
        Ok(())
    }

    /// Updates the budget from the headers of a response that took `elapsed` to arrive. If the budget is empty,
    /// suspends calls until one call has been refilled.
    pub(super) fn update(&self, headers: &HeaderMap, elapsed: Duration) {
        let (Some(limit), Some(remaining), Some(reset)) = (
            parse_number_header(headers, "ratelimit-limit"),
            parse_number_header(headers, "ratelimit-remaining"),
            time_until_reset(headers),
        ) else {
            return;
        };
        let refill_per_second = min_refill_rate(limit.saturating_sub(remaining), reset + elapsed);
        let received_at = std::time::Instant::now();
        self.lock_state().observed = Some(ObservedBudget {
            remaining: remaining as f64,
            capacity: limit as f64,
            refill_per_second,
            received_at,
        });
        if remaining == 0 {
            // The provider refills evenly, and sends the time of the full refill.
            self.suspend_for(reset / u32::try_from(limit.max(1)).unwrap_or(u32::MAX));
        }
    }

    /// Suspends calls after a 429 until the provider's reset time, or for `fallback` if the response contains no reset
    /// time, but for at most the maximum wait. Returns the duration of the suspension.
    pub(super) fn suspend_after_rate_limit(&self, headers: &HeaderMap, fallback: Duration) -> Duration {
        let wait = time_until_reset(headers).unwrap_or(fallback).min(self.max_wait);
        self.suspend_for(wait);
        wait
    }

    /// Reports a 429 to the other users of the shared budget, which suspend their calls for the same time.
    pub(super) async fn report_rate_limit(&self, wait: Duration) {
        if let Some(shared) = &self.shared {
            // If the report fails, the provider itself rejects the other users' calls.
            let _ = tokio::time::timeout(SHARED_BUDGET_TIMEOUT, shared.suspend_calls(wait)).await;
        }
    }

    fn suspend_for(&self, wait: Duration) {
        let until = Instant::now() + wait.min(self.max_wait);
        let mut state = self.lock_state();
        state.suspended_until = Some(state.suspended_until.map_or(until, |previous| previous.max(until)));
        state.reserved = 0;
    }

    /// Returns the time until which calls are suspended; `None` if they are not.
    fn suspended_until(&self) -> Option<Instant> {
        self.lock_state().suspended_until.filter(|until| *until > Instant::now())
    }

    fn lock_state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a lower bound on the refill rate, from the used calls and the time until all are refilled, counted from the
/// start of the exchange. The provider rounds the remaining budget down, so `used` may be up to one call too high. The
/// provider's reset time counts from the response, and is rounded up to a second.
fn min_refill_rate(used: u64, refill_time: Duration) -> Option<f64> {
    (used >= MIN_USED_CALLS && !refill_time.is_zero()).then(|| (used - 1) as f64 / refill_time.as_secs_f64())
}

/// Returns a random value from 0 to 1 (exclusive), so that waiting callers do not retry at the same time.
fn jitter() -> f64 {
    f64::from(uuid::Uuid::new_v4().as_bytes()[0]) / 256.0
}

fn parse_number_header(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

/// Returns the time until `RateLimit-Reset`, a Unix time in seconds. The time counts from the response's `Date`,
/// because the local clock may be wrong.
fn time_until_reset(headers: &HeaderMap) -> Option<Duration> {
    let reset =
        UNIX_EPOCH.checked_add(Duration::from_secs(parse_number_header(headers, "ratelimit-reset")?))?;
    let date = headers.get(DATE).and_then(|date| rfc2822::parse(date.to_str().ok()?).ok());
    let now = date.map_or_else(SystemTime::now, |date| date.timestamp().into());
    Some(reset.duration_since(now).unwrap_or_default().min(MAX_RESET_TIME))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use async_trait::async_trait;

    use super::*;
    use crate::BudgetGrant;

    fn headers(remaining: u64, reset_in_seconds: u64) -> HeaderMap {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let mut headers = HeaderMap::new();
        headers.insert("ratelimit-limit", 3600.into());
        headers.insert("ratelimit-remaining", remaining.into());
        headers.insert("ratelimit-reset", (now + reset_in_seconds).into());
        headers
    }

    #[tokio::test]
    async fn acquire_waits_for_refill_or_reset_within_bounds() {
        let max_wait = Duration::from_millis(400);
        let budget = Budget::new(max_wait, None);
        let clone = budget.clone();

        budget.update(&headers(1, 3600), Duration::ZERO);
        assert_eq!(budget.suspended_until(), None, "suspended calls although the budget is not empty");

        let start = Instant::now();
        budget.update(&headers(0, 360), Duration::ZERO);
        drop(clone.acquire().await.unwrap());
        assert!(start.elapsed() >= Duration::from_millis(95), "{:?}", start.elapsed());

        let start = Instant::now();
        assert_eq!(budget.suspend_after_rate_limit(&headers(0, 3600), Duration::ZERO), max_wait);
        drop(clone.acquire().await.unwrap());
        assert!(start.elapsed() >= max_wait, "{:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn acquire_fails_if_no_permit_is_released_in_time() {
        let max_wait = Duration::from_millis(400);
        let budget = Budget::new(max_wait, None);
        let mut permits = Vec::new();
        for _ in 0..MAX_CALLS_IN_FLIGHT {
            permits.push(budget.acquire().await.unwrap());
        }
        let result = tokio::time::timeout(2 * max_wait, budget.acquire()).await.unwrap();
        assert!(result.is_err());
        permits.pop();
        assert!(budget.acquire().await.is_ok());
    }

    #[test]
    fn min_refill_rate_never_exceeds_actual_rate() {
        for rate in [0.5, 1.0, 8.0, 40.0] {
            for tenths in 50..400u32 {
                let used = f64::from(tenths) / 10.0;
                for fraction in [0.0, 0.01, 0.5, 0.99] {
                    // The provider reports the next whole second after the full refill.
                    let full_refill = fraction + used / rate;
                    let refill_time = Duration::from_secs_f64(full_refill.ceil() - fraction);
                    // The provider also rounds the remaining budget down.
                    let reported = used.ceil() as u64;
                    let derived_rate = min_refill_rate(reported, refill_time).unwrap();
                    assert!(
                        derived_rate <= rate,
                        "derived rate {derived_rate} exceeds {rate} (used {used}, fraction {fraction})"
                    );
                }
            }
        }
        assert_eq!(min_refill_rate(MIN_USED_CALLS - 1, Duration::from_secs(1)), None);
    }

    #[test]
    fn time_until_reset_is_zero_if_past_and_none_if_invalid() {
        let mut past = headers(0, 0);
        past.insert("ratelimit-reset", 1.into());
        assert_eq!(time_until_reset(&past), Some(Duration::ZERO));
        past.insert("ratelimit-reset", "soon".parse().unwrap());
        assert_eq!(time_until_reset(&past), None);
    }

    #[test]
    fn time_until_reset_counts_from_date_and_is_capped() {
        let mut headers = headers(0, 2 * 86_400);
        assert_eq!(time_until_reset(&headers), Some(MAX_RESET_TIME));
        // The local clock is two days behind.
        let date = jiff::Timestamp::now() + Duration::from_secs(2 * 86_400 - 60);
        headers.insert(DATE, date.strftime("%a, %d %b %Y %T GMT").to_string().parse().unwrap());
        let seconds = time_until_reset(&headers).unwrap().as_secs();
        assert!((59..=61).contains(&seconds), "{seconds}");
    }

    /// Grants the requested calls while any remain, and counts the requests.
    struct FakeRateBudget {
        remaining: AtomicU32,
        requests: AtomicU32,
    }

    #[async_trait]
    impl RateBudget for FakeRateBudget {
        async fn reserve(
            &self,
            wanted: u32,
            unused: u32,
            _observed: Option<ObservedBudget>,
        ) -> Option<BudgetGrant> {
            self.requests.fetch_add(1, Ordering::SeqCst);
            self.remaining.fetch_add(unused, Ordering::SeqCst);
            let calls = self.remaining.load(Ordering::SeqCst).min(wanted);
            self.remaining.fetch_sub(calls, Ordering::SeqCst);
            Some(BudgetGrant { calls, wait: Duration::from_millis(30) })
        }

        async fn suspend_calls(&self, _wait: Duration) {}
    }

    #[tokio::test]
    async fn acquire_reserves_batches_and_fails_when_empty() {
        let rate_budget =
            Arc::new(FakeRateBudget { remaining: (2 * RESERVATION_BATCH).into(), requests: 0.into() });
        let budget = Budget::new(Duration::from_millis(100), Some(rate_budget.clone()));
        for _ in 0..2 * RESERVATION_BATCH {
            drop(budget.acquire().await.unwrap());
        }
        assert_eq!(rate_budget.requests.load(Ordering::SeqCst), 2);
        assert!(budget.acquire().await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn acquire_returns_expired_reservations() {
        let rate_budget = Arc::new(FakeRateBudget { remaining: 100.into(), requests: 0.into() });
        let budget = Budget::new(Duration::from_millis(100), Some(rate_budget.clone()));
        for _ in 0..10 {
            drop(budget.acquire().await.unwrap());
            tokio::time::sleep(2 * RESERVATION_TTL).await;
        }
        assert_eq!(rate_budget.requests.load(Ordering::SeqCst), 10);
        assert_eq!(
            rate_budget.remaining.load(Ordering::SeqCst),
            100 - 10 - (RESERVATION_BATCH - 1),
            "expired reservations were not returned"
        );
    }
}
