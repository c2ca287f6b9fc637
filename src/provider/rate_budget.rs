//! The adapter's interface to a rate budget that several processes share.

use std::time::{Duration, Instant};

use async_trait::async_trait;

/// A rate budget that all users of one provider account share.
#[async_trait]
pub trait RateBudget: Send + Sync {
    /// Reserves up to `wanted` calls, returns `returned` unused ones, and reports the budget in the provider's last
    /// response. Returns `None` if the shared budget is unavailable.
    async fn reserve(
        &self,
        wanted: u32,
        returned: u32,
        observed: Option<ObservedBudget>,
    ) -> Option<BudgetGrant>;

    /// Reports a refusal by the provider: no process may call the provider for this long.
    async fn close(&self, wait: Duration);
}

/// The state of the rate limit, as reported in one of the provider's responses.
#[derive(Debug, Clone, Copy)]
pub struct ObservedBudget {
    pub remaining: f64,
    pub capacity: f64,
    /// The refill rate; `None` if too few calls are used to compute it.
    pub per_second: Option<f64>,
    pub at: Instant,
}

/// The number of granted calls, and the delay before the next request if it is 0.
#[derive(Debug, Clone, Copy)]
pub struct BudgetGrant {
    pub calls: u32,
    pub wait: Duration,
}
