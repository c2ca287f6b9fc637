//! A verified snapshot that did not become the latest: it has lost much of what the one before it holds, and nobody has
//! said that this is meant.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::fsx::{self, FileError};
use crate::host::system::layout::Layout;

const FORMAT: u32 = 1;
/// Between two snapshots that count as agreeing: hourly runs, also where one was retried for a while.
const MIN_APART: Duration = Duration::from_secs(45 * 60);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldSnapshot {
    version: u32,
    /// The snapshot that waits.
    pub key: String,
    /// The one that stays the latest.
    pub latest: String,
    /// A sentence that names the missing tables and rows.
    pub loss: String,
    /// Since when snapshots in a row have lost as much.
    #[serde(with = "clock::wire")]
    pub since: Timestamp,
    /// How many snapshots in a row agree, taken at least `MIN_APART` from each other.
    pub agreeing: u32,
    /// How long the system had been up when the last of these was taken. Steps of the clock do not change that.
    #[serde(default)]
    counted_at_uptime_ms: Option<i64>,
}

impl HeldSnapshot {
    /// The first one that is held back in favour of `latest`.
    pub fn new(key: String, latest: String, loss: String) -> Self {
        let since = clock::now_ms();
        Self { version: FORMAT, key, latest, loss, since, agreeing: 0, counted_at_uptime_ms: None }
    }

    /// The next one in a row that has lost as much.
    #[must_use]
    pub fn followed_by(self, key: String, loss: String) -> Self {
        Self { key, loss, ..self }
    }

    /// Counts the newest one as agreeing, unless it was taken too soon after the last one that counted.
    #[must_use]
    pub fn counted(self, uptime: Duration) -> Self {
        let now = i64::try_from(uptime.as_millis()).unwrap_or(i64::MAX);
        let agreeing = match self.counted_at_uptime_ms {
            // The first one, or a count of an earlier release, which did not look at times.
            None => 1,
            Some(at) if min_elapsed_ms(at, now) < MIN_APART.as_millis() => return self,
            Some(_) => self.agreeing.saturating_add(1),
        };
        Self { agreeing, counted_at_uptime_ms: Some(now), ..self }
    }

    /// What is not readable holds nothing back.
    ///
    /// # Errors
    /// When the file is there and the disk does not return it.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&layout.held_snapshot())?;
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    /// # Errors
    /// [`FileError`].
    pub fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields are JSON");
        fsx::write_atomic(&layout.held_snapshot(), &text, 0o644)
    }

    /// Nothing is held back any more.
    ///
    /// # Errors
    /// [`FileError`].
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
            "{loss}: since {since} snapshots are kept and {latest} stays the latest; the newest is {key}"
        )
    }
}

/// The least time that can have passed between two uptimes. After a restart only the later one is known to have passed.
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
    fn snapshots_agree_only_when_taken_apart() {
        let quick = held().counted(HOUR).counted(HOUR).counted(HOUR + MIN_APART - Duration::from_millis(1));
        assert_eq!(quick.agreeing, 1);
        assert_eq!(quick.clone().counted(HOUR + MIN_APART).agreeing, 2);
        assert_eq!(quick.counted(2 * HOUR).counted(3 * HOUR).agreeing, 3);
    }

    #[test]
    fn restart_shows_no_more_time_than_the_system_is_up() {
        let late = held().counted(100 * HOUR);
        assert_eq!(late.clone().counted(HOUR / 2).agreeing, 1);
        assert_eq!(late.counted(HOUR).agreeing, 2);
    }

    #[test]
    fn count_of_an_earlier_release_begins_again() {
        let text = r#"{"version":1,"key":"k","latest":"l","loss":"x","since":"2026-01-02T03:04:05.678Z","agreeing":2}"#;
        let earlier: HeldSnapshot = serde_json::from_str(text).unwrap();
        assert_eq!(earlier.counted(HOUR).agreeing, 1);
    }
}
