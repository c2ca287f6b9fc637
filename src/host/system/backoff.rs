//! How long a run bears with a failing neighbour: growing, jittered pauses until nothing moved for a given time.

use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(10);

/// Counts from the last progress, so that a long transfer that moves is never given up.
#[derive(Debug)]
pub struct Patience {
    without_progress: Duration,
    end: Instant,
    next: Duration,
}

impl Patience {
    pub fn new(without_progress: Duration) -> Self {
        Self { without_progress, end: Instant::now() + without_progress, next: FIRST }
    }

    /// Something moved: start over.
    pub fn progress(&mut self) {
        self.end = Instant::now() + self.without_progress;
        self.next = FIRST;
    }

    /// Pauses before the next try, or answers `Over` when there is none.
    pub async fn pause(&mut self) -> Result<(), Over> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Over);
        }
        let jitter = f64::from(uuid::Uuid::new_v4().as_bytes()[0]) / 255.0;
        let pause = self.next.mul_f64(0.5 + jitter / 2.0);
        self.next = (self.next * 2).min(LONGEST);
        tokio::time::sleep(pause.min(left)).await;
        Ok(())
    }
}

/// The deadline has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Over;
