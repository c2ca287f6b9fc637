//! Rate-limits requests by key, with one token bucket per key (GCRA).

use std::hash::Hash;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use governor::clock::{Clock, DefaultClock};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};

/// Number of checks after which full buckets are dropped, so that memory depends only on the active keys.
const SWEEP_INTERVAL_CHECKS: u32 = 4096;

/// A rate limit per key, with a burst.
pub struct RateLimit<K: Hash + Eq + Clone> {
    /// `None` for no limit.
    buckets: Option<DefaultKeyedRateLimiter<K>>,
    checks: AtomicU32,
}

impl<K: Hash + Eq + Clone> RateLimit<K> {
    /// Creates a limit with a burst of `burst_seconds` times the rate. A `per_second` of 0 means no limit.
    pub fn new(per_second: u32, burst_seconds: u32) -> Self {
        let quota = NonZeroU32::new(per_second).map(|rate| {
            let burst = per_second.saturating_mul(burst_seconds);
            Quota::per_second(rate).allow_burst(NonZeroU32::new(burst).unwrap_or(rate))
        });
        Self::with_quota(quota)
    }

    /// Creates a limit of one request per key per `interval`, with a burst. `interval` must not be zero.
    pub fn every(interval: Duration, burst: u32) -> Self {
        let burst = NonZeroU32::new(burst).unwrap_or(NonZeroU32::MIN);
        Self::with_quota(Quota::with_period(interval).map(|quota| quota.allow_burst(burst)))
    }

    pub fn unlimited() -> Self {
        Self::with_quota(None)
    }

    fn with_quota(quota: Option<Quota>) -> Self {
        Self { buckets: quota.map(RateLimiter::keyed), checks: AtomicU32::new(0) }
    }

    /// Counts a request with this key.
    ///
    /// # Errors
    /// If the rate is exceeded: the time after which a request with this key will be admitted. The request is not
    /// counted.
    pub fn check(&self, key: &K) -> Result<(), Duration> {
        let Some(buckets) = &self.buckets else { return Ok(()) };
        if self.checks.fetch_add(1, Ordering::Relaxed) % SWEEP_INTERVAL_CHECKS == SWEEP_INTERVAL_CHECKS - 1 {
            buckets.retain_recent();
        }
        buckets.check_key(key).map_err(|not_until| not_until.wait_time_from(DefaultClock::default().now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_has_a_separate_burst() {
        let limit = RateLimit::new(1, 3);
        for _ in 0..3 {
            assert_eq!(limit.check(&"a"), Ok(()));
        }
        let wait = limit.check(&"a").unwrap_err();
        assert!(wait > Duration::ZERO && wait <= Duration::from_secs(1), "{wait:?}");
        assert_eq!(limit.check(&"b"), Ok(()));
    }

    #[test]
    fn rate_can_be_below_one_per_second() {
        let limit = RateLimit::every(Duration::from_secs(10), 2);
        assert_eq!((limit.check(&"a"), limit.check(&"a")), (Ok(()), Ok(())));
        assert!(limit.check(&"a").unwrap_err() > Duration::from_secs(8));
    }

    #[test]
    fn zero_means_no_limit() {
        let limit = RateLimit::new(0, 3);
        assert!((0..1000).all(|_| limit.check(&"a").is_ok()));
    }

    #[test]
    fn full_buckets_are_dropped() {
        let limit = RateLimit::new(1_000_000, 1);
        for key in 0..3 * SWEEP_INTERVAL_CHECKS {
            limit.check(&key).unwrap();
        }
        let bucket_count = limit.buckets.as_ref().map_or(0, RateLimiter::len);
        assert!(bucket_count <= SWEEP_INTERVAL_CHECKS as usize, "{bucket_count}");
    }
}
