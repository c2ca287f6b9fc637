//! Jittered exponential backoff that gives up after a given time without progress.

use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

/// Jitter at most doubles a delay, so the first pause is at most 250 ms and any pause at most 10 s.
const DELAYS: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_millis(125))
    .with_max_delay(Duration::from_secs(5))
    .with_jitter()
    .without_max_times();

/// Backoff with a deadline that is reset on progress, so a long transfer isn't abandoned while it's still advancing.
#[derive(Debug)]
pub struct Backoff {
    stall_timeout: Duration,
    deadline: Instant,
    delays: ExponentialBackoff,
}

impl Backoff {
    pub fn new(stall_timeout: Duration) -> Self {
        Self { stall_timeout, deadline: Instant::now() + stall_timeout, delays: DELAYS.build() }
    }

    /// Records progress, resetting the deadline and the backoff.
    pub fn record_progress(&mut self) {
        self.deadline = Instant::now() + self.stall_timeout;
        self.delays = DELAYS.build();
    }

    /// Pauses before the next attempt. If the deadline has passed, returns [`DeadlinePassed`] immediately.
    pub async fn pause(&mut self) -> Result<(), DeadlinePassed> {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(DeadlinePassed);
        }
        let pause = self.delays.next().unwrap_or(remaining);
        tokio::time::sleep(pause.min(remaining)).await;
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeadlinePassed;
