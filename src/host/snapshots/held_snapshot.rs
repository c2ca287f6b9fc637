//! A verified but held-back snapshot: the database lost many rows since the previous one, and the loss hasn't been
//! confirmed.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::system::layout::Layout;
use svc_base::clock;
use svc_base::fsx::{self, FileError};

const FORMAT_VERSION: u32 = 1;
/// Minimum time between two agreeing snapshots. Less than an hour, because retries may delay the earlier one.
const MIN_AGREEMENT_INTERVAL: Duration = Duration::from_secs(45 * 60);

/// Record of the newest held-back snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldSnapshot {
    version: u32,
    /// The held-back snapshot.
    pub key: String,
    /// The snapshot that remains the latest.
    pub latest: String,
    /// Describes the missing tables and rows.
    pub loss: String,
    /// When the first snapshot of the current series was held back.
    #[serde(with = "clock::wire")]
    pub since: Timestamp,
    /// Number of agreeing snapshots: consecutive hourly snapshots that show a loss since `latest`, each at least
    /// `MIN_AGREEMENT_INTERVAL` after the previous one.
    pub agreeing: u32,
    /// Uptime when the last agreeing snapshot was counted. Unlike the wall clock, it's never adjusted.
    #[serde(default)]
    counted_at_uptime_ms: Option<i64>,
}

impl HeldSnapshot {
    /// Creates the record for the first snapshot held back in favor of `latest`.
    pub fn new(key: String, latest: String, loss: String) -> Self {
        let since = clock::now_ms();
        Self { version: FORMAT_VERSION, key, latest, loss, since, agreeing: 0, counted_at_uptime_ms: None }
    }

    /// Advances the record to the next snapshot in the series.
    #[must_use]
    pub fn with_next_snapshot(self, key: String, loss: String) -> Self {
        Self { key, loss, ..self }
    }

    /// Counts the newest snapshot as agreeing, unless it was taken too soon after the last counted one.
    #[must_use]
    pub fn count_agreement(self, uptime: Duration) -> Self {
        let now = i64::try_from(uptime.as_millis()).unwrap_or(i64::MAX);
        let agreeing = match self.counted_at_uptime_ms {
            // First agreeing snapshot, or an earlier release counted the previous ones without an uptime.
            None => 1,
            Some(counted_at) if min_elapsed_ms(counted_at, now) < MIN_AGREEMENT_INTERVAL.as_millis() => {
                return self;
            }
            Some(_) => self.agreeing.saturating_add(1),
        };
        Self { agreeing, counted_at_uptime_ms: Some(now), ..self }
    }

    /// Reads the record. Returns `None` if the file is missing or malformed.
    ///
    /// # Errors
    /// [`FileError`] if the file exists but can't be read.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&layout.held_snapshot())?;
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    pub fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        // Backups run even when the disk is full. The backup lock is held, so there's no other writer.
        fsx::write_atomic_or_in_place(&layout.held_snapshot(), &text, 0o644)
    }

    /// Removes the record, so no snapshot is treated as held back.
    pub fn clear(layout: &Layout) -> Result<(), FileError> {
        fsx::remove_if_exists(&layout.held_snapshot())
    }
}

impl fmt::Display for HeldSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, latest, loss, since, .. } = self;
        let since = clock::rfc3339_ms(*since);
        write!(
            f,
            "{loss}: since {since}, snapshots are held back and {latest} stays the latest; the newest held-back \
             one is {key}"
        )
    }
}

/// Returns the minimum time elapsed between two uptimes. After a reboot, we only know that the later uptime has
/// elapsed.
fn min_elapsed_ms(from: i64, to: i64) -> u128 {
    let elapsed = if to >= from { to.saturating_sub(from) } else { to };
    u128::try_from(elapsed).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn held() -> HeldSnapshot {
        HeldSnapshot::new("k".to_owned(), "l".to_owned(), "3 rows instead of 400".to_owned())
    }

    #[test]
    fn count_agreement_counts_only_after_min_interval() {
        let quick = held()
            .count_agreement(HOUR)
            .count_agreement(HOUR)
            .count_agreement(HOUR + MIN_AGREEMENT_INTERVAL - Duration::from_millis(1));
        assert_eq!(quick.agreeing, 1);
        assert_eq!(quick.clone().count_agreement(HOUR + MIN_AGREEMENT_INTERVAL).agreeing, 2);
        assert_eq!(quick.count_agreement(2 * HOUR).count_agreement(3 * HOUR).agreeing, 3);
    }

    #[test]
    fn count_agreement_uses_only_new_uptime_after_reboot() {
        let late = held().count_agreement(100 * HOUR);
        assert_eq!(late.clone().count_agreement(HOUR / 2).agreeing, 1);
        assert_eq!(late.count_agreement(HOUR).agreeing, 2);
    }

    #[test]
    fn count_agreement_restarts_count_of_earlier_release() {
        let text = r#"{"version":1,"key":"k","latest":"l","loss":"x","since":"2026-01-02T03:04:05.678Z","agreeing":2}"#;
        let earlier: HeldSnapshot = serde_json::from_str(text).unwrap();
        assert_eq!(earlier.count_agreement(HOUR).agreeing, 1);
    }
}
