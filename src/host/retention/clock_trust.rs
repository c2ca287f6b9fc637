//! Decides whether the system clock is trusted, from earlier readings and the time since boot. Pure, apart from its file.
//!
//! A clock set weeks ahead would expire every record at once. After a jump, the earlier time is used until the new one
//! has been stable for a day. After a boot, the clock is trusted: `time-sync.target` has synchronized it.

use std::path::Path;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::system::process_stat::{ProcessStat, TICKS_PER_SECOND};
use svc_base::fsx::{self, FileError};

const DAY_SECONDS: i64 = 86_400;
/// Clocks that differ by at most this are the same clock, corrected.
const MAX_DRIFT_SECONDS: i64 = 900;

/// The clock and the time since boot, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    pub clock: i64,
    pub up: i64,
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
    started: i64,
    since_up: i64,
}

/// Returns the time to use and the state to keep.
pub fn assess_clock(state: Option<ClockState>, now: Reading) -> (i64, ClockState) {
    let started = now.clock - now.up;
    let is_near = |other: i64| (started - other).abs() <= MAX_DRIFT_SECONDS;
    let believed = (now.clock, ClockState { started, up: now.up, doubted: None });
    let Some(state) = state.filter(|state| state.up <= now.up && !is_near(state.started)) else {
        return believed;
    };
    let since_up =
        state.doubted.filter(|doubted| is_near(doubted.started)).map_or(now.up, |doubted| doubted.since_up);
    if now.up - since_up >= DAY_SECONDS {
        return believed;
    }
    let doubted = Some(UntrustedClock { started, since_up });
    (now.clock.min(state.started + now.up), ClockState { started: state.started, up: now.up, doubted })
}

/// Returns the time to use for expiry. `file` holds the state of earlier checks.
pub fn trusted_time(file: &Path, clock: Timestamp) -> Result<Timestamp, FileError> {
    // The unit hides other files with the uptime.
    let own = ProcessStat::of_this_process().map_err(FileError::at("read", Path::new("/proc/self/stat")))?;
    let up = (own.started / TICKS_PER_SECOND).cast_signed();
    let text = fsx::read_if_exists(file)?;
    let state = text.and_then(|text| serde_json::from_slice(&text).ok());
    let (believed, new_state) = assess_clock(state, Reading { clock: clock.as_second(), up });
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

    fn at(hours_up: i64, ahead: i64) -> Reading {
        Reading { clock: START + hours_up * 3600 + ahead * DAY_SECONDS, up: hours_up * 3600 }
    }

    /// Days by which the trusted clock is ahead at each check.
    fn ahead(checks: &[Reading]) -> Vec<i64> {
        let mut state = None;
        let day = |reading: &Reading| {
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
    fn trusts_earlier_clock_and_boot_at_once() {
        assert_eq!(ahead(&[at(1, 0), at(2, -40)]), [0, -40]);
        let again = Reading { clock: START + 90 * DAY_SECONDS, up: 60 };
        assert_eq!(ahead(&[at(30, 0), again]), [0, 89], "the machine was off for weeks");
        assert_eq!(ahead(&[at(1, 40)]), [40], "no earlier reading");
        let Reading { clock, up } = at(2, 0);
        let (believed, new_state) =
            assess_clock(Some(assess_clock(None, at(1, 0)).1), Reading { clock: clock + 600, up });
        assert_eq!((believed, new_state.doubted), (clock + 600, None), "a small step is not a jump");
    }

    #[test]
    fn persists_state_and_ignores_damaged_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("clock.json");
        let now = Timestamp::now();
        assert_eq!(trusted_time(&file, now).unwrap().as_second(), now.as_second());
        let ahead = now.checked_add(jiff::SignedDuration::from_hours(24 * 40)).unwrap();
        let days = |at: Timestamp| (at.as_second() - now.as_second()) / DAY_SECONDS;
        assert_eq!(days(trusted_time(&file, ahead).unwrap()), 0);
        std::fs::write(&file, "{").unwrap();
        assert_eq!(days(trusted_time(&file, ahead).unwrap()), 40);
    }
}
