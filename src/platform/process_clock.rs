//! Compares this process's clock with the database's: leases and deadlines use the database's clock; tokens and proofs
//! use this process's clock.
//!
//! This module does not correct any clock. The result is logged, exported as a metric, and used in the readiness check.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::db::{self, Db};
use svc_base::metrics::CLOCK_SKEW;
use svc_http::problem::format_chain;

const COMPARE_INTERVAL: Duration = Duration::from_secs(30);
/// The stored skew before the first comparison.
const UNKNOWN_SKEW: i64 = i64::MIN;

pub struct ProcessClock {
    /// See [`Self::skew_ms`]; [`UNKNOWN_SKEW`] before the first comparison.
    skew_ms: AtomicI64,
    max_skew: Duration,
}

impl ProcessClock {
    pub fn new(max_skew: Duration) -> Self {
        Self { skew_ms: AtomicI64::new(UNKNOWN_SKEW), max_skew }
    }

    /// Returns how far this process's clock is ahead of the database's, in milliseconds; `None` before the first
    /// comparison.
    pub fn skew_ms(&self) -> Option<i64> {
        Some(self.skew_ms.load(Ordering::Relaxed)).filter(|skew| *skew != UNKNOWN_SKEW)
    }

    /// Returns whether the clocks agree or have not been compared yet.
    pub fn is_within_tolerance(&self) -> bool {
        self.skew_ms().is_none_or(|skew| self.is_within(skew))
    }

    fn is_within(&self, skew_ms: i64) -> bool {
        Duration::from_millis(skew_ms.unsigned_abs()) <= self.max_skew
    }

    /// Compares the clocks. If the database is unavailable, the last result is kept.
    pub async fn compare(&self, db: &Db) {
        let measure = async {
            let session = db.session().await?;
            let (before, start) = (Timestamp::now(), Instant::now());
            let database_time = db::servers::now(&session).await?;
            Ok::<i64, db::DbError>(compute_skew_ms(before, start.elapsed(), database_time))
        };
        match measure.await {
            Ok(skew) => self.record(skew),
            Err(error) => {
                tracing::debug!(error = %format_chain(&error), "cannot compare this process's clock with the database's");
            }
        }
    }

    fn record(&self, skew_ms: i64) {
        let was_within_tolerance = self.is_within_tolerance();
        self.skew_ms.store(skew_ms, Ordering::Relaxed);
        CLOCK_SKEW.set([], skew_ms as f64 / 1000.0);
        let max_ms = self.max_skew.as_millis();
        if !self.is_within(skew_ms) {
            tracing::warn!(
                skew_ms,
                max_ms,
                "this process's clock differs from the database's: check time synchronization"
            );
        } else if !was_within_tolerance {
            tracing::info!(skew_ms, "this process's clock agrees with the database's again");
        }
    }
}

/// Computes the smallest skew that is consistent with the measurement: the database read its clock at some time during
/// the round trip.
fn compute_skew_ms(before: Timestamp, round_trip: Duration, database_time: Timestamp) -> i64 {
    let ahead_ms = before.as_millisecond() - database_time.as_millisecond();
    let round_trip_ms = i64::try_from(round_trip.as_millis()).unwrap_or(i64::MAX);
    if ahead_ms >= 0 { ahead_ms } else { ahead_ms.saturating_add(round_trip_ms).min(0) }
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
    fn skew_excludes_round_trip() {
        let timestamp = |ms: i64| Timestamp::from_millisecond(ms).unwrap();
        let round_trip = Duration::from_millis(400);
        assert_eq!(
            compute_skew_ms(timestamp(10_000), round_trip, timestamp(10_300)),
            0,
            "within the round trip"
        );
        assert_eq!(compute_skew_ms(timestamp(10_000), round_trip, timestamp(13_400)), -3000);
        assert_eq!(compute_skew_ms(timestamp(10_000), round_trip, timestamp(7_000)), 3000);
        let clock = ProcessClock::new(Duration::from_secs(2));
        assert!(clock.is_within_tolerance(), "clocks that have not been compared count as agreeing");
        clock.record(-3000);
        assert!(!clock.is_within_tolerance());
        clock.record(1999);
        assert!(clock.is_within_tolerance());
    }
}
