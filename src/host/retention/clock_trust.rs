//! Decides whether the system clock is trusted, from earlier readings and the time since boot.
//!
//! A clock that is set weeks ahead would expire every record immediately. After a jump, the lower of the expected time
//! and the clock's time is used until the clock has been stable for a day. NTP corrects a clock in less than an hour,
//! so a wrong clock is not stable for that long unless the machine has no time server.
//!
//! A boot also counts as a jump if the clock is more than a day ahead of the last check or, without an earlier check,
//! of the last write to a record: `time-sync.target` is reached even if no time server responds. A machine that was off
//! for weeks therefore expires its records one day after it was switched on.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::system::process_stat::{ProcessStat, TICKS_PER_SECOND};
use svc_base::fsx::{self, FileError};

const DAY_SECONDS: i64 = 86_400;
/// A clock that differs by at most this has been corrected, and has not jumped.
const MAX_DRIFT_SECONDS: i64 = 900;

/// The clock and the time since boot, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockReading {
    pub clock: i64,
    pub up: i64,
    /// The last write to a record, if there is any.
    pub last_write: Option<i64>,
}

/// The state kept between checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClockState {
    /// Boot time by the trusted clock.
    started: i64,
    up: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    doubted: Option<UntrustedClock>,
}

/// A clock that is not trusted yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct UntrustedClock {
    /// Boot time by this clock.
    started: i64,
    /// The time since boot when this clock was first read.
    since_up: i64,
}

/// Returns the time to use and the state to keep.
pub fn assess_clock(state: Option<ClockState>, now: ClockReading) -> (i64, ClockState) {
    let started = now.clock - now.up;
    let is_near = |other: i64| (started - other).abs() <= MAX_DRIFT_SECONDS;
    let believed = (now.clock, ClockState { started, up: now.up, doubted: None });
    let (expected, doubted) = match state {
        Some(state) if state.up <= now.up => {
            if is_near(state.started) {
                return believed;
            }
            (state.started, state.doubted)
        }
        // This is the first check, or the first after a boot: since the last check, at least the uptime has passed.
        _ => {
            let expected = state.map(|state| state.started + state.up);
            let Some(expected) = expected.or(now.last_write.map(|last| last - now.up)) else {
                return believed;
            };
            if started - expected <= DAY_SECONDS {
                return believed;
            }
            (expected, None)
        }
    };
    let since_up =
        doubted.filter(|doubted| is_near(doubted.started)).map_or(now.up, |doubted| doubted.since_up);
    if now.up - since_up >= DAY_SECONDS {
        return believed;
    }
    let doubted = Some(UntrustedClock { started, since_up });
    (now.clock.min(expected + now.up), ClockState { started: expected, up: now.up, doubted })
}

/// Finds the last modification of a file in this directory, in seconds since 1970; `None` if there is no file.
fn find_last_write(dir: &Path) -> Result<Option<i64>, FileError> {
    let mut last = None;
    for entry in std::fs::read_dir(dir).map_err(FileError::wrap("read", dir))? {
        let path = entry.map_err(FileError::wrap("read", dir))?.path();
        let meta = std::fs::symlink_metadata(&path).map_err(FileError::wrap("stat", &path))?;
        if meta.is_file() {
            last = last.max(Some(meta.mtime()));
        }
    }
    Ok(last)
}

/// Returns the time to use for the expiry of the records in `logs`. `file` holds the state of earlier checks.
pub fn update_trusted_time(file: &Path, logs: &Path, clock: Timestamp) -> Result<Timestamp, FileError> {
    // The systemd unit hides other files that contain the uptime.
    let stat =
        ProcessStat::of_this_process().map_err(FileError::wrap("read", Path::new("/proc/self/stat")))?;
    let up = (stat.started / TICKS_PER_SECOND).cast_signed();
    let text = fsx::read_if_exists(file)?;
    let state = text.and_then(|text| serde_json::from_slice(&text).ok());
    let reading = ClockReading { clock: clock.as_second(), up, last_write: find_last_write(logs)? };
    let (believed, new_state) = assess_clock(state, reading);
    fsx::write_atomic(file, &serde_json::to_vec(&new_state).expect("plain fields are JSON"), 0o600)?;
    if believed < clock.as_second() {
        tracing::warn!(%clock, believed, "the clock has jumped: fewer records expire until it has been stable for a day");
    }
    Ok(Timestamp::from_second(believed).unwrap_or(clock))
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: i64 = 1_795_000_000;

    fn at(hours_up: i64, ahead: i64) -> ClockReading {
        let up = hours_up * 3600;
        ClockReading { clock: START + up + ahead * DAY_SECONDS, up, last_write: None }
    }

    /// The days by which the trusted clock is ahead at each check.
    fn ahead(checks: &[ClockReading]) -> Vec<i64> {
        let mut state = None;
        let day = |reading: &ClockReading| {
            let (believed, new_state) = assess_clock(state, *reading);
            state = Some(new_state);
            (believed - START - reading.up).div_euclid(DAY_SECONDS)
        };
        checks.iter().map(day).collect()
    }

    #[test]
    fn trusts_jump_ahead_after_one_stable_day() {
        assert_eq!(ahead(&[at(1, 0), at(2, 40), at(3, 40), at(4, 0), at(5, 40)]), [0, 0, 0, 0, 0]);
        assert_eq!(ahead(&[at(1, 0), at(2, 40), at(25, 40), at(26, 40), at(27, 40)]), [0, 0, 0, 40, 40]);
        assert_eq!(
            ahead(&[at(1, 0), at(2, 40), at(14, 70), at(27, 40)]),
            [0, 0, 0, 0],
            "each jump restarts the day"
        );
    }

    #[test]
    fn trusts_earlier_clock_and_quick_reboot_immediately() {
        assert_eq!(ahead(&[at(1, 0), at(2, -40)]), [0, -40]);
        let booted = ClockReading { clock: START + 31 * 3600, up: 60, last_write: None };
        assert_eq!(assess_clock(Some(assess_clock(None, at(30, 0)).1), booted).0, booted.clock);
        assert_eq!(ahead(&[at(1, 40)]), [40], "there is neither an earlier reading nor a record");
        let ClockReading { clock, up, .. } = at(2, 0);
        let step = ClockReading { clock: clock + 600, up, last_write: None };
        let (believed, new_state) = assess_clock(Some(assess_clock(None, at(1, 0)).1), step);
        assert_eq!((believed, new_state.doubted), (clock + 600, None), "a small step is not a jump");
    }

    #[test]
    fn boot_far_ahead_is_trusted_after_a_day() {
        let before = assess_clock(None, at(30, 0)).1;
        let booted =
            |up: i64| ClockReading { clock: START + 90 * DAY_SECONDS + up, up, last_write: Some(START) };
        let last = START + 30 * 3600;
        let (believed, state) = assess_clock(Some(before), booted(60));
        assert_eq!(believed, last + 60, "the machine was off for weeks, or its clock is wrong");
        let (believed, state) = assess_clock(Some(state), booted(DAY_SECONDS));
        assert_eq!(believed, last + DAY_SECONDS);
        let (believed, state) = assess_clock(Some(state), booted(60 + DAY_SECONDS));
        assert_eq!((believed, state.doubted), (booted(60 + DAY_SECONDS).clock, None));
        // Without a state file, the records show the last time.
        let (believed, _) = assess_clock(None, booted(60));
        assert_eq!(believed, START);
        let recent = ClockReading { last_write: Some(booted(60).clock - 3600), ..booted(60) };
        assert_eq!(assess_clock(None, recent).0, recent.clock);
    }

    #[test]
    fn persists_state_and_ignores_damaged_file() {
        let dir = tempfile::tempdir().unwrap();
        let (file, logs) = (dir.path().join("clock.json"), dir.path().join("logs"));
        std::fs::create_dir(&logs).unwrap();
        let now = Timestamp::now();
        assert_eq!(update_trusted_time(&file, &logs, now).unwrap().as_second(), now.as_second());
        let ahead = now.checked_add(jiff::SignedDuration::from_hours(24 * 40)).unwrap();
        let days = |at: Timestamp| (at.as_second() - now.as_second()) / DAY_SECONDS;
        assert_eq!(days(update_trusted_time(&file, &logs, ahead).unwrap()), 0);
        std::fs::write(&file, "{").unwrap();
        assert_eq!(days(update_trusted_time(&file, &logs, ahead).unwrap()), 40);
        std::fs::write(&file, "{").unwrap();
        std::fs::write(logs.join("activity.log"), "").unwrap();
        assert!(
            days(update_trusted_time(&file, &logs, ahead).unwrap()) < 40,
            "a record was written just now"
        );
    }
}
