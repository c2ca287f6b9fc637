//! Retries with jittered exponential backoff, until there has been no progress for a given time.

use std::time::{Duration, Instant};

const INITIAL_BACKOFF: Duration = Duration::from_millis(250);
const MAX_BACKOFF: Duration = Duration::from_secs(10);

/// Its deadline counts from the last progress, so a long transfer that advances is never given up.
#[derive(Debug)]
pub struct Backoff {
    stall_timeout: Duration,
    end: Instant,
    next_pause: Duration,
}

impl Backoff {
    pub fn new(stall_timeout: Duration) -> Self {
        Self { stall_timeout, end: Instant::now() + stall_timeout, next_pause: INITIAL_BACKOFF }
    }

    /// Records progress: resets the deadline and the backoff.
    pub fn progress(&mut self) {
        self.end = Instant::now() + self.stall_timeout;
        self.next_pause = INITIAL_BACKOFF;
    }

    /// Pauses before the next attempt, or returns [`DeadlinePassed`].
    pub async fn pause(&mut self) -> Result<(), DeadlinePassed> {
        let remaining = self.end.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(DeadlinePassed);
        }
        let jitter = f64::from(uuid::Uuid::new_v4().as_bytes()[0]) / 255.0;
        let pause = self.next_pause.mul_f64(0.5 + jitter / 2.0);
        self.next_pause = (self.next_pause * 2).min(MAX_BACKOFF);
        tokio::time::sleep(pause.min(remaining)).await;
        Ok(())
    }
}

/// The deadline has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeadlinePassed;
