//! The adapter's interface to a rate budget that several processes share.

use std::time::{Duration, Instant};

use async_trait::async_trait;

/// A rate budget that all users of one provider project share.
#[async_trait]
pub trait RateBudget: Send + Sync {
    /// Reserves up to `wanted` calls, releases `unused` reserved calls that were not made, and reports the budget from
    /// the provider's last response. Returns `None` if the shared budget is unavailable.
    async fn reserve(
        &self,
        wanted: u32,
        unused: u32,
        observed: Option<ObservedBudget>,
    ) -> Option<BudgetGrant>;

    /// Reports that the provider rejected a call: no process may call the provider until `wait` has passed.
    async fn suspend_calls(&self, wait: Duration);
}

/// The state of the rate limit, as reported in one of the provider's responses.
#[derive(Debug, Clone, Copy)]
pub struct ObservedBudget {
    pub remaining: f64,
    pub capacity: f64,
    /// A lower bound on the refill rate, in calls per second; `None` if too few calls were used to compute it.
    pub refill_per_second: Option<f64>,
    /// When the response arrived.
    pub received_at: Instant,
}

/// The outcome of a reservation. If no calls were granted, `wait` is the delay before the next attempt.
#[derive(Debug, Clone, Copy)]
pub struct BudgetGrant {
    pub calls: u32,
    pub wait: Duration,
}
