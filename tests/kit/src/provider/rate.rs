//! The provider's rate limit: a token bucket and its three headers.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use http::HeaderMap;

/// The bucket's size and refill rate.
#[derive(Debug, Clone, Copy)]
pub struct RateLimit {
    pub limit: u32,
    pub per_second: f64,
}

impl Default for RateLimit {
    /// The provider's default: 3600 calls per hour.
    fn default() -> Self {
        Self { limit: 3600, per_second: 1.0 }
    }
}

pub(super) struct TokenBucket {
    rate: RateLimit,
    tokens: f64,
    refilled_at: Instant,
}

/// The bucket's decision on one call.
#[derive(Debug, Clone, Copy)]
pub(super) struct RateDecision {
    pub(super) is_allowed: bool,
    limit: u32,
    remaining: u32,
    reset_unix: u64,
}

impl TokenBucket {
    pub(super) fn new(rate: RateLimit) -> Self {
        Self { rate, tokens: f64::from(rate.limit), refilled_at: Instant::now() }
    }

    pub(super) fn take(&mut self) -> RateDecision {
        let now = Instant::now();
        let limit = f64::from(self.rate.limit);
        self.tokens =
            (self.tokens + (now - self.refilled_at).as_secs_f64() * self.rate.per_second).min(limit);
        self.refilled_at = now;
        let is_allowed = self.tokens >= 1.0;
        if is_allowed {
            self.tokens -= 1.0;
        }
        let full_in = Duration::from_secs_f64((limit - self.tokens) / self.rate.per_second);
        RateDecision {
            is_allowed,
            limit: self.rate.limit,
            remaining: self.tokens as u32,
            reset_unix: (since_epoch() + full_in).as_secs_f64().ceil() as u64,
        }
    }
}

impl RateDecision {
    pub(super) fn write_headers(self, headers: &mut HeaderMap) {
        headers.insert("ratelimit-limit", self.limit.into());
        headers.insert("ratelimit-remaining", self.remaining.into());
        headers.insert("ratelimit-reset", self.reset_unix.into());
    }

    /// The same decision, but with headers that report an empty bucket until the reset.
    pub(super) fn exhausted(self, reset_in_seconds: u64) -> Self {
        Self { remaining: 0, reset_unix: since_epoch().as_secs() + reset_in_seconds, ..self }
    }
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
