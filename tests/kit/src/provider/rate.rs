//! The provider's rate limit: a bucket that refills evenly, and its three headers.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use http::HeaderMap;

/// How many calls are let through at once, and how fast they come back.
#[derive(Debug, Clone, Copy)]
pub struct RateLimit {
    pub limit: u32,
    pub per_second: f64,
}

impl Default for RateLimit {
    /// The provider's own: 3600 an hour.
    fn default() -> Self {
        Self { limit: 3600, per_second: 1.0 }
    }
}

pub(super) struct Bucket {
    rate: RateLimit,
    left: f64,
    at: Instant,
}

/// What the bucket said to one call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Verdict {
    pub(super) allowed: bool,
    limit: u32,
    remaining: u32,
    reset_unix: u64,
}

impl Bucket {
    pub(super) fn new(rate: RateLimit) -> Self {
        Self { rate, left: f64::from(rate.limit), at: Instant::now() }
    }

    pub(super) fn take(&mut self) -> Verdict {
        let now = Instant::now();
        let limit = f64::from(self.rate.limit);
        self.left = (self.left + (now - self.at).as_secs_f64() * self.rate.per_second).min(limit);
        self.at = now;
        let allowed = self.left >= 1.0;
        if allowed {
            self.left -= 1.0;
        }
        let full_in = Duration::from_secs_f64((limit - self.left) / self.rate.per_second);
        Verdict {
            allowed,
            limit: self.rate.limit,
            remaining: self.left as u32,
            reset_unix: (since_epoch() + full_in).as_secs_f64().ceil() as u64,
        }
    }
}

impl Verdict {
    pub(super) fn write(self, headers: &mut HeaderMap) {
        headers.insert("ratelimit-limit", self.limit.into());
        headers.insert("ratelimit-remaining", self.remaining.into());
        headers.insert("ratelimit-reset", self.reset_unix.into());
    }

    /// As if nothing were left until then.
    pub(super) fn spent(self, reset_in_seconds: u64) -> Self {
        Self { remaining: 0, reset_unix: since_epoch().as_secs() + reset_in_seconds, ..self }
    }
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
