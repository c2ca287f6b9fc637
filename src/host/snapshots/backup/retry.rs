//! Retries of the hourly run, so that a short outage of store or database does not cost an hour of changes.

use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

use crate::system::vars;
use svc_base::applet::{Exit, Failure};
use svc_base::config::Env;

/// Retries end before the next hourly run.
const RETRY_WINDOW: Duration = Duration::from_secs(45 * 60);
const MAX_BACKOFF: Duration = Duration::from_secs(15 * 60);

/// The backoff between the attempts of one run; it doubles.
#[derive(Debug)]
pub struct Retry {
    delays: ExponentialBackoff,
    end: Instant,
}

impl Retry {
    /// `BACKUP_RETRY_SECONDS`: the first pause.
    pub fn read(env: &mut Env) -> Self {
        let seconds: u64 = env.or_default(&vars::BACKUP_RETRY_SECONDS);
        if seconds == 0 {
            env.mistake(&vars::BACKUP_RETRY_SECONDS, "must be at least 1");
        }
        Self::new(Duration::from_secs(seconds.max(1)))
    }

    fn new(first: Duration) -> Self {
        let delays =
            ExponentialBuilder::new().with_min_delay(first).with_max_delay(MAX_BACKOFF).without_max_times();
        Self { delays: delays.build(), end: Instant::now() + RETRY_WINDOW }
    }

    /// The pause before the next attempt; `None` if the failure is permanent or the time is up.
    pub fn pause(&mut self, failure: &Failure) -> Option<Duration> {
        if !matches!(failure.exit, Exit::Unavailable | Exit::Internal | Exit::TryAgain) {
            return None;
        }
        self.delays.next().filter(|pause| Instant::now() + *pause < self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_until_next_hourly_run() {
        let mut retry = Retry::read(&mut Env::from_pairs([("BACKUP_RETRY_SECONDS", "600")]));
        let failed = |exit| Failure::new(exit, anyhow::anyhow!("x"));
        assert_eq!(retry.pause(&failed(Exit::Refused)), None, "a person decides");
        assert_eq!(retry.pause(&failed(Exit::Permission)), None, "this machine was replaced");
        assert_eq!(retry.pause(&failed(Exit::Unavailable)), Some(Duration::from_secs(600)));
        assert_eq!(retry.pause(&failed(Exit::Internal)), Some(Duration::from_secs(900)));
        let mut late = Retry::new(RETRY_WINDOW);
        assert_eq!(late.pause(&failed(Exit::Unavailable)), None);
    }
}
