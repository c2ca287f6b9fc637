//! Compares this process's clock with the database's: leases and deadlines use the database's clock; tokens, proofs
//! and the provider's rate limit use this process's.
//!
//! Corrects nothing: it logs, measures, and reports to the readiness check.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::db::{self, Db};
use svc_base::metrics::CLOCK_SKEW;
use svc_http::problem::chain;

const COMPARE_INTERVAL: Duration = Duration::from_secs(30);
const UNKNOWN: i64 = i64::MIN;

pub struct ProcessClock {
    /// How far this process's clock is ahead, in milliseconds.
    skew_ms: AtomicI64,
    max_skew: Duration,
}

impl ProcessClock {
    pub fn new(max_skew: Duration) -> Self {
        Self { skew_ms: AtomicI64::new(UNKNOWN), max_skew }
    }

    /// How far this process's clock is ahead of the database's, in milliseconds; `None` before the first comparison.
    pub fn skew_ms(&self) -> Option<i64> {
        Some(self.skew_ms.load(Ordering::Relaxed)).filter(|skew| *skew != UNKNOWN)
    }

    /// Whether the two clocks agree, or have not been compared.
    pub fn is_ok(&self) -> bool {
        self.skew_ms().is_none_or(|skew| self.is_within(skew))
    }

    fn is_within(&self, skew_ms: i64) -> bool {
        Duration::from_millis(skew_ms.unsigned_abs()) <= self.max_skew
    }

    /// Compares the clocks. The last result stays if the database is unavailable.
    pub async fn compare(&self, db: &Db) {
        let read = async {
            let session = db.session().await?;
            let (before, began) = (Timestamp::now(), Instant::now());
            let database_time = db::servers::now(&session).await?;
            Ok::<i64, db::DbError>(skew_ms(before, began.elapsed(), database_time))
        };
        match read.await {
            Ok(skew) => self.record(skew),
            Err(error) => {
                tracing::debug!(error = %chain(&error), "cannot compare the clocks of process and database");
            }
        }
    }

    fn record(&self, skew_ms: i64) {
        let was_ok = self.is_ok();
        self.skew_ms.store(skew_ms, Ordering::Relaxed);
        CLOCK_SKEW.set([], skew_ms as f64 / 1000.0);
        let max_ms = self.max_skew.as_millis();
        if !self.is_within(skew_ms) {
            tracing::warn!(
                skew_ms,
                max_ms,
                "this process's clock differs from the database's: check time synchronisation"
            );
        } else if !was_ok {
            tracing::info!(skew_ms, "this process's clock agrees with the database's again");
        }
    }
}

/// The smallest offset consistent with the reading: the database read its clock at some moment of the round trip.
fn skew_ms(before: Timestamp, round_trip: Duration, database_time: Timestamp) -> i64 {
    let ahead = before.as_millisecond() - database_time.as_millisecond();
    let round_trip = i64::try_from(round_trip.as_millis()).unwrap_or(i64::MAX);
    if ahead >= 0 { ahead } else { ahead.saturating_add(round_trip).min(0) }
}

/// Compares the clocks until `stop`.
pub async fn run(clock: Arc<ProcessClock>, db: Db, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(COMPARE_INTERVAL) => {}
        }
        clock.compare(&db).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_response_counts_as_no_skew() {
        let at = |ms: i64| Timestamp::from_millisecond(ms).unwrap();
        let took = Duration::from_millis(400);
        assert_eq!(skew_ms(at(10_000), took, at(10_300)), 0, "read within the round trip");
        assert_eq!(skew_ms(at(10_000), took, at(13_400)), -3000);
        assert_eq!(skew_ms(at(10_000), took, at(7_000)), 3000);
        let clock = ProcessClock::new(Duration::from_secs(2));
        assert!(clock.is_ok(), "not compared yet");
        clock.record(-3000);
        assert!(!clock.is_ok());
        clock.record(1999);
        assert!(clock.is_ok());
    }
}
