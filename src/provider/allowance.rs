//! The rate budget that several users of one provider account share, as the adapter needs it.

use std::time::{Duration, Instant};

use async_trait::async_trait;

/// Where the calls are counted for all who make them.
#[async_trait]
pub trait Allowance: Send + Sync {
    /// Asks for up to `want` calls, gives `back` those that were not made, and tells what was seen of the provider last.
    /// `None`: it cannot be asked.
    async fn reserve(&self, want: u32, back: u32, seen: Option<Seen>) -> Option<Grant>;

    /// Tells that the provider has refused: nobody may call for so long.
    async fn close(&self, wait: Duration);
}

/// What an answer of the provider said of the budget.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    pub left: f64,
    pub capacity: f64,
    /// How fast calls come back; `None` where too few are gone to tell.
    pub per_second: Option<f64>,
    pub at: Instant,
}

/// So many calls may be made; where there are none, after which time to ask again.
#[derive(Debug, Clone, Copy)]
pub struct Grant {
    pub calls: u32,
    pub wait: Duration,
}
