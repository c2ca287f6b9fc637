//! Decides whether to trust the system clock, based on earlier readings and the time since boot.
//!
//! A clock set weeks ahead would immediately expire every dated log file. After a jump, we use the earlier of the
//! expected time and the clock's time until the clock has been stable for a day. NTP corrects a clock in under an hour,
//! so a wrong clock doesn't stay stable that long unless the machine has no time server.
//!
//! The first check after a boot is different, because only the clock shows how long the machine was off. It trusts the
//! clock unless the boot was more than a day after the last check or, without an earlier check, after the last pre-boot
//! write to a log file. In that case, the clock is treated as having jumped: the unit starts after `time-sync.target`,
//! but that target is reached even if no time server responds. A machine that was off for weeks therefore expires its
//! log files one day after power-on.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::system::process_stat::{ProcessStat, TICKS_PER_SECOND};
use svc_base::fsx::{self, FileError};

const DAY_SECONDS: i64 = 86_400;
/// Differences up to this are treated as NTP corrections, not jumps.
const MAX_DRIFT_SECONDS: i64 = 900;
/// Checks run hourly. If the machine reboots between two checks, the boot is at most this long after the first one, and
/// the second one at most this long after the boot.
const MAX_REBOOT_SECONDS: i64 = 2 * 3600;

/// A system clock and uptime reading, with the last log-file write. Times are in seconds since the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockReading {
    pub clock: i64,
    pub uptime_seconds: i64,
    /// Time of the last log-file write before the boot, or `None` if there is no such file.
    pub last_write: Option<i64>,
}

/// State persisted between checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClockState {
    /// Boot time according to the trusted clock.
    #[serde(rename = "started")]
    boot_time: i64,
    /// Uptime at the last check.
    #[serde(rename = "up")]
    uptime_seconds: i64,
    #[serde(rename = "doubted", default, skip_serializing_if = "Option::is_none")]
    untrusted: Option<UntrustedClock>,
}

/// A clock that is not yet trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct UntrustedClock {
    /// Boot time according to this clock.
    #[serde(rename = "started")]
    boot_time: i64,
    /// Uptime when this clock was first seen.
    #[serde(rename = "sinceUp")]
    first_seen_uptime_seconds: i64,
}

/// Returns the time to use, in seconds since the Unix epoch, and the state to persist.
pub fn assess_clock(state: Option<ClockState>, now: ClockReading) -> (i64, ClockState) {
    let uptime_seconds = now.uptime_seconds;
    let boot_time = now.clock - uptime_seconds;
    let is_near = |other: i64| (boot_time - other).abs() <= MAX_DRIFT_SECONDS;
    let trusted = (now.clock, ClockState { boot_time, uptime_seconds, untrusted: None });
    let (expected, untrusted) = match state {
        Some(state) if state.uptime_seconds <= uptime_seconds => {
            if is_near(state.boot_time) || may_have_rebooted(state, boot_time, uptime_seconds) {
                return trusted;
            }
            (state.boot_time, state.untrusted)
        }
        // First check ever or since boot. The machine booted after the last check or write, so at least the uptime has
        // passed since then.
        _ => {
            let expected = state.map(|state| state.boot_time + state.uptime_seconds);
            let Some(expected) = expected.or(now.last_write) else { return trusted };
            if boot_time - expected <= DAY_SECONDS {
                return trusted;
            }
            (expected, None)
        }
    };
    let same_clock = untrusted.filter(|untrusted| is_near(untrusted.boot_time));
    let first_seen_uptime_seconds =
        same_clock.map_or(uptime_seconds, |untrusted| untrusted.first_seen_uptime_seconds);
    if uptime_seconds - first_seen_uptime_seconds >= DAY_SECONDS {
        return trusted;
    }
    let untrusted = Some(UntrustedClock { boot_time, first_seen_uptime_seconds });
    (now.clock.min(expected + uptime_seconds), ClockState { boot_time: expected, uptime_seconds, untrusted })
}

/// Returns whether the machine may have rebooted since the last check even though the uptime has grown: the last check
/// may have run even sooner after the previous boot. A clock jump that looks like a reboot is accepted: it is at most
/// `2 * MAX_REBOOT_SECONDS`, too short to matter.
fn may_have_rebooted(state: ClockState, boot_time: i64, uptime_seconds: i64) -> bool {
    let last_check = state.boot_time + state.uptime_seconds;
    uptime_seconds <= MAX_REBOOT_SECONDS
        && (-MAX_DRIFT_SECONDS..=MAX_REBOOT_SECONDS).contains(&(boot_time - last_check))
}

/// Finds the latest modification time of any file in a directory, ignoring files modified after `latest`. Returns
/// `None` if there are none. Times are in seconds since the Unix epoch.
fn find_last_write(dir: &Path, latest: i64) -> Result<Option<i64>, FileError> {
    let mut last = None;
    for entry in std::fs::read_dir(dir).map_err(FileError::wrap("read", dir))? {
        let path = entry.map_err(FileError::wrap("read", dir))?.path();
        let meta = match std::fs::symlink_metadata(&path) {
            // Another program has since renamed or deleted the file.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            meta => meta.map_err(FileError::wrap("stat", &path))?,
        };
        if meta.is_file() && meta.mtime() <= latest {
            last = last.max(Some(meta.mtime()));
        }
    }
    Ok(last)
}

/// Assesses the clock, persists the new state to `state_file`, and returns the time to use for expiring the log files
/// in `logs`. Logs a warning if the clock isn't trusted.
pub fn update_trusted_time(state_file: &Path, logs: &Path, clock: Timestamp) -> Result<Timestamp, FileError> {
    // The systemd unit hides `/proc/uptime` (`ProcSubset=pid`). This process has just started, so its start time in
    // ticks since boot serves as the uptime.
    let stat = ProcessStat::current().map_err(FileError::wrap("read", Path::new("/proc/self/stat")))?;
    let uptime_seconds = (stat.start_ticks / TICKS_PER_SECOND).cast_signed();
    let text = fsx::read_if_exists(state_file)?;
    let state = text.and_then(|text| serde_json::from_slice(&text).ok());
    let clock_seconds = clock.as_second();
    // Ignore later writes: the gateway writes at every start, so their times may come from the same wrong clock.
    let last_write = find_last_write(logs, clock_seconds - uptime_seconds - MAX_DRIFT_SECONDS)?;
    let reading = ClockReading { clock: clock_seconds, uptime_seconds, last_write };
    let (trusted_seconds, new_state) = assess_clock(state, reading);
    fsx::write_atomic(
        state_file,
        &serde_json::to_vec(&new_state).expect("plain fields serialize to JSON"),
        0o600,
    )?;
    let trusted_time = Timestamp::from_second(trusted_seconds).unwrap_or(clock);
    if trusted_seconds < clock_seconds {
        tracing::warn!(%clock, %trusted_time, "clock jumped; expiring fewer log files until it has been stable for a day");
    }
    Ok(trusted_time)
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: i64 = 1_795_000_000;

    /// Returns a reading from a clock that is `days_ahead` days ahead.
    fn at(uptime_hours: i64, days_ahead: i64) -> ClockReading {
        let uptime_seconds = uptime_hours * 3600;
        let clock = START + uptime_seconds + days_ahead * DAY_SECONDS;
        ClockReading { clock, uptime_seconds, last_write: None }
    }

    /// Returns how many days ahead the trusted time is at each check.
    fn days_ahead(checks: &[ClockReading]) -> Vec<i64> {
        let mut state = None;
        let day = |reading: &ClockReading| {
            let (trusted_time, new_state) = assess_clock(state, *reading);
            state = Some(new_state);
            (trusted_time - START - reading.uptime_seconds).div_euclid(DAY_SECONDS)
        };
        checks.iter().map(day).collect()
    }

    #[test]
    fn jump_ahead_is_trusted_after_one_stable_day() {
        assert_eq!(days_ahead(&[at(1, 0), at(2, 40), at(3, 40), at(4, 0), at(5, 40)]), [0, 0, 0, 0, 0]);
        assert_eq!(days_ahead(&[at(1, 0), at(2, 40), at(25, 40), at(26, 40), at(27, 40)]), [0, 0, 0, 40, 40]);
        assert_eq!(
            days_ahead(&[at(1, 0), at(2, 40), at(14, 70), at(27, 40)]),
            [0, 0, 0, 0],
            "each jump restarts the day"
        );
    }

    #[test]
    fn earlier_clock_and_quick_reboot_are_trusted_immediately() {
        assert_eq!(days_ahead(&[at(1, 0), at(2, -40)]), [0, -40]);
        let booted = ClockReading { clock: START + 31 * 3600, uptime_seconds: 60, last_write: None };
        assert_eq!(assess_clock(Some(assess_clock(None, at(30, 0)).1), booted).0, booted.clock);
        assert_eq!(days_ahead(&[at(1, 40)]), [40], "no earlier reading or log file");
        let ClockReading { clock, uptime_seconds, .. } = at(2, 0);
        let step = ClockReading { clock: clock + 600, uptime_seconds, last_write: None };
        let (trusted_time, new_state) = assess_clock(Some(assess_clock(None, at(1, 0)).1), step);
        assert_eq!((trusted_time, new_state.untrusted), (clock + 600, None), "a small step is not a jump");
    }

    #[test]
    fn reboot_is_recognized_even_if_uptime_has_grown() {
        let reading_at = |boot_minute: i64, uptime_minutes: i64| {
            let uptime_seconds = uptime_minutes * 60;
            ClockReading {
                clock: START + boot_minute * 60 + uptime_seconds,
                uptime_seconds,
                last_write: None,
            }
        };
        let before = assess_clock(None, reading_at(0, 2)).1;
        let rebooted = reading_at(20, 42);
        let (trusted_time, state) = assess_clock(Some(before), rebooted);
        assert_eq!((trusted_time, state.untrusted), (rebooted.clock, None));
        // These are clock jumps: after a reboot, an hourly check would have run sooner.
        for jumped in [reading_at(5 * 60, 42), reading_at(20, 5 * 60)] {
            assert!(assess_clock(Some(before), jumped).0 < jumped.clock, "{jumped:?}");
        }
    }

    #[test]
    fn clock_far_ahead_after_boot_is_trusted_after_a_day() {
        let before = assess_clock(None, at(30, 0)).1;
        let booted = |uptime_seconds: i64| {
            let clock = START + 90 * DAY_SECONDS + uptime_seconds;
            ClockReading { clock, uptime_seconds, last_write: Some(START) }
        };
        let last = START + 30 * 3600;
        let (trusted_time, state) = assess_clock(Some(before), booted(60));
        assert_eq!(trusted_time, last + 60, "the machine was off for weeks, or its clock is wrong");
        let (trusted_time, state) = assess_clock(Some(state), booted(DAY_SECONDS));
        assert_eq!(trusted_time, last + DAY_SECONDS);
        let (trusted_time, state) = assess_clock(Some(state), booted(60 + DAY_SECONDS));
        assert_eq!((trusted_time, state.untrusted), (booted(60 + DAY_SECONDS).clock, None));
        // Without state, the last log-file write stands in for the last check.
        let (trusted_time, _) = assess_clock(None, booted(60));
        assert_eq!(trusted_time, START + 60);
        let recent = ClockReading { last_write: Some(booted(60).clock - 3600), ..booted(60) };
        assert_eq!(assess_clock(None, recent).0, recent.clock);
    }

    #[test]
    fn state_is_persisted_and_malformed_file_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let (file, logs) = (dir.path().join("clock.json"), dir.path().join("logs"));
        std::fs::create_dir(&logs).unwrap();
        let now = Timestamp::now();
        assert_eq!(update_trusted_time(&file, &logs, now).unwrap().as_second(), now.as_second());
        let jumped = now.checked_add(jiff::SignedDuration::from_hours(24 * 40)).unwrap();
        let days = |at: Timestamp| (at.as_second() - now.as_second()) / DAY_SECONDS;
        assert_eq!(days(update_trusted_time(&file, &logs, jumped).unwrap()), 0);
        std::fs::write(&file, "{").unwrap();
        assert_eq!(days(update_trusted_time(&file, &logs, jumped).unwrap()), 40);
        std::fs::write(&file, "{").unwrap();
        // One log file from long before the boot, and one written since with the wrong clock.
        for (name, modified) in [("audit.jsonl", Timestamp::UNIX_EPOCH), ("activity.log", jumped)] {
            let log_file = std::fs::File::create(logs.join(name)).unwrap();
            log_file.set_modified(modified.into()).unwrap();
        }
        assert!(
            days(update_trusted_time(&file, &logs, jumped).unwrap()) < 40,
            "clock trusted even though the last log file is old"
        );
    }
}
