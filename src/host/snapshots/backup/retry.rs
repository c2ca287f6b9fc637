//! Retries of the hourly run, so that a short outage of the store or the database does not cost an hour of changes.

use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

use crate::system::vars;
use svc_base::applet::{Exit, Failure};
use svc_base::config::Env;

/// A retry starts at most this long after the run's start, so that it starts before the next hourly run.
const RETRY_WINDOW: Duration = Duration::from_secs(45 * 60);
const MAX_BACKOFF: Duration = Duration::from_secs(15 * 60);

/// The delays between the attempts of one run; each is twice the previous one, up to [`MAX_BACKOFF`].
#[derive(Debug)]
pub struct RetrySchedule {
    delays: ExponentialBackoff,
    deadline: Instant,
}

/// Reads `BACKUP_RETRY_SECONDS`, the first delay.
pub fn read_first_delay(env: &mut Env) -> Duration {
    let seconds: u64 = env.or_default(&vars::BACKUP_RETRY_SECONDS);
    if seconds == 0 {
        env.add_error(&vars::BACKUP_RETRY_SECONDS, "must be at least 1");
    }
    Duration::from_secs(seconds)
}

impl RetrySchedule {
    pub fn new(first: Duration) -> Self {
        let delays =
            ExponentialBuilder::new().with_min_delay(first).with_max_delay(MAX_BACKOFF).without_max_times();
        Self { delays: delays.build(), deadline: Instant::now() + RETRY_WINDOW }
    }

    /// Returns the delay before the next attempt; `None` if the failure is permanent or the retry window would end
    /// first.
    pub fn next_delay(&mut self, failure: &Failure) -> Option<Duration> {
        if !is_transient(failure) {
            return None;
        }
        self.delays.next().filter(|delay| Instant::now() + *delay < self.deadline)
    }
}

/// Returns whether a retry may succeed. After other failures, the units that serve requests for backups and drills are
/// not restarted (`RestartPreventExitStatus=`).
pub fn is_transient(failure: &Failure) -> bool {
    matches!(failure.exit, Exit::Unavailable | Exit::Internal | Exit::TryAgain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_delay_is_capped_and_ends_with_retry_window() {
        let mut retry = RetrySchedule::new(Duration::from_secs(600));
        let failure = |exit| Failure::new(exit, anyhow::anyhow!("x"));
        assert_eq!(retry.next_delay(&failure(Exit::Refused)), None, "a refused backup is not retried");
        assert_eq!(retry.next_delay(&failure(Exit::Permission)), None, "a replaced machine does not retry");
        assert_eq!(retry.next_delay(&failure(Exit::Unavailable)), Some(Duration::from_secs(600)));
        assert_eq!(retry.next_delay(&failure(Exit::Internal)), Some(Duration::from_secs(900)));
        let mut late = RetrySchedule::new(RETRY_WINDOW);
        assert_eq!(late.next_delay(&failure(Exit::Unavailable)), None);
    }
}
