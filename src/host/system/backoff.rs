//! Retries with jittered exponential backoff, until there has been no progress for a given time.

use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

/// The jitter adds up to the same again: the first pause is at most 250 ms, and each at most 10 s.
const DELAYS: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_millis(125))
    .with_max_delay(Duration::from_secs(5))
    .with_jitter()
    .without_max_times();

/// Its deadline counts from the last progress, so a long transfer that advances is never given up.
#[derive(Debug)]
pub struct Backoff {
    stall_timeout: Duration,
    end: Instant,
    delays: ExponentialBackoff,
}

impl Backoff {
    pub fn new(stall_timeout: Duration) -> Self {
        Self { stall_timeout, end: Instant::now() + stall_timeout, delays: DELAYS.build() }
    }

    /// Records progress: resets the deadline and the backoff.
    pub fn progress(&mut self) {
        self.end = Instant::now() + self.stall_timeout;
        self.delays = DELAYS.build();
    }

    /// Pauses before the next attempt, or returns [`DeadlinePassed`].
    pub async fn pause(&mut self) -> Result<(), DeadlinePassed> {
        let remaining = self.end.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(DeadlinePassed);
        }
        let pause = self.delays.next().unwrap_or(remaining);
        tokio::time::sleep(pause.min(remaining)).await;
        Ok(())
    }
}

/// The deadline has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeadlinePassed;
