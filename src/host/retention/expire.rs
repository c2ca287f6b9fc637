//! Retention: deletes activity, audit and interaction logs whose file names are dated more than 30 days ago. All other
//! files are retained.
//!
//! Age is measured from the current day rather than the newest file, so that an idle machine's log files expire as
//! well. `clock_trust` determines the current day, to keep a wrong clock from deleting everything.

use std::path::Path;

use jiff::ToSpan;
use jiff::civil::Date;

use crate::records::log_file_names::{ACTIVITY, AUDIT, INTERACTIONS};
use svc_base::fsx::{self, FileError};

/// Retention period required by part 8 of the specification.
const RETENTION_DAYS: i32 = 30;

/// Parses the date in a log file name.
fn parse_log_day(name: &str) -> Option<Date> {
    [ACTIVITY, AUDIT, INTERACTIONS].iter().find_map(|log| log.parse_day(name))
}

/// Returns the expired names, sorted.
fn expired_names(names: Vec<String>, today: Date) -> Vec<String> {
    let Ok(oldest) = today.checked_sub(RETENTION_DAYS.days()) else { return Vec::new() };
    let mut expired: Vec<String> =
        names.into_iter().filter(|name| parse_log_day(name).is_some_and(|day| day < oldest)).collect();
    expired.sort();
    expired
}

/// Deletes expired log files and returns their names.
///
/// # Errors
/// [`FileError`] if the directory cannot be read, or from the first failed deletion; the other log files are still
/// deleted.
pub fn expire(logs: &Path, today: Date) -> Result<Vec<String>, FileError> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(logs).map_err(FileError::wrap("read", logs))? {
        let name = entry.map_err(FileError::wrap("read", logs))?.file_name();
        names.extend(name.to_str().map(str::to_owned));
    }
    let expired = expired_names(names, today);
    let removed: Vec<_> = expired.iter().map(|name| fsx::remove_if_exists(&logs.join(name))).collect();
    removed.into_iter().collect::<Result<(), FileError>>()?;
    Ok(expired)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::retention::clock_trust::{ClockReading, assess_clock};

    const TODAY: Date = Date::constant(2026, 11, 21);

    proptest! {
        #[test]
        fn expiry_keeps_exactly_the_last_thirty_days(
            days in proptest::collection::btree_set(-400_i32..400, 0..60),
            today in -1000_i32..1000,
        ) {
            let date = |days: i32| TODAY.checked_add(days.days()).unwrap();
            let name = |days: i32| AUDIT.dated_name(date(days), 1);
            let names = days.iter().map(|day| name(*day)).collect();
            let expired: BTreeSet<String> = expired_names(names, date(today)).into_iter().collect();
            for day in &days {
                let is_expired = expired.contains(&name(*day));
                prop_assert_eq!(is_expired, today - day > RETENTION_DAYS, "{} at {}", day, today);
            }
        }
    }

    #[test]
    fn keeps_thirty_days_and_deletes_older() {
        let dir = tempfile::tempdir().unwrap();
        let retained = [
            "activity-2026-10-22.log",
            "audit-2026-11-20.jsonl",
            "interactions-2026-11-21.jsonl",
            "interactions-2027-01-01.jsonl",
            "usage.jsonl",
            "backup-2020-01-01.jsonl",
            "audit.jsonl",
        ];
        let old = ["activity-2026-10-21.log", "audit-2026-10-21.2.jsonl", "interactions-2025-12-31.jsonl"];
        for name in retained.iter().chain(&old) {
            std::fs::write(dir.path().join(name), "x").unwrap();
        }
        assert_eq!(expire(dir.path(), TODAY).unwrap(), old);
        assert!(expire(dir.path(), TODAY).unwrap().is_empty());
        assert!(retained.iter().all(|name| dir.path().join(name).exists()));
    }

    #[test]
    fn failed_deletion_does_not_stop_the_others() {
        let dir = tempfile::tempdir().unwrap();
        let (first, last) = ("audit-2026-10-01.jsonl", "audit-2026-10-02.jsonl");
        std::fs::create_dir(dir.path().join(first)).unwrap();
        for name in [last, "audit-2026-11-20.jsonl"] {
            std::fs::write(dir.path().join(name), "x").unwrap();
        }
        expire(dir.path(), TODAY).unwrap_err();
        assert!(dir.path().join(first).exists() && !dir.path().join(last).exists());
    }

    /// Simulates four months hour by hour. Each hour, the check runs, and a log file for the clock's current day is
    /// written unless the clock is behind. A jump is a start hour, a number of days ahead, and a duration of less than
    /// a day in hours. `off` is a power-off period of up to two months: its start hour and its duration in days.
    fn simulate_four_months(jumps: &[(u16, i64, u8)], off: Option<(u16, u16)>) -> Result<(), TestCaseError> {
        const HOUR: i64 = 3600;
        let start: i64 = TODAY.to_zoned(jiff::tz::TimeZone::UTC).unwrap().timestamp().as_second();
        let day_at =
            |at: i64| jiff::Timestamp::from_second(at).unwrap().to_zoned(jiff::tz::TimeZone::UTC).date();
        // File names, with the true hour of the last write.
        let mut files: std::collections::BTreeMap<String, i64> = std::collections::BTreeMap::new();
        let (mut state, mut uptime_hours, mut correct_hours) = (None, 0, 0);
        for hour in 0..120 * 24 {
            if off.is_some_and(|(from, days)| {
                (i64::from(from)..i64::from(from) + i64::from(days) * 24).contains(&hour)
            }) {
                (uptime_hours, correct_hours) = (0, 0);
                continue;
            }
            let true_time = start + hour * HOUR;
            let active_jump = jumps
                .iter()
                .find(|(at, _, hours)| (i64::from(*at)..i64::from(*at) + i64::from(*hours)).contains(&hour));
            let days_ahead = active_jump.filter(|_| uptime_hours > 0).map_or(0, |(_, days, _)| *days);
            correct_hours = if days_ahead == 0 { correct_hours + 1 } else { 0 };
            let clock = true_time + days_ahead * 24 * HOUR;
            let (trusted_time, new_state) = assess_clock(
                state,
                ClockReading { clock, uptime_seconds: uptime_hours * HOUR, last_write: None },
            );
            (state, uptime_hours) = (Some(new_state), uptime_hours + 1);
            if days_ahead >= 0 {
                files.insert(AUDIT.dated_name(day_at(clock), 1), hour);
            }
            let today = day_at(trusted_time);
            for name in expired_names(files.keys().cloned().collect(), today) {
                let written = files.remove(&name).unwrap();
                prop_assert!(
                    hour - written >= i64::from(RETENTION_DAYS) * 24,
                    "{} expired in hour {}, last written in hour {}",
                    name,
                    hour,
                    written
                );
            }
            if correct_hours > 25 {
                let overdue = files.keys().find(|name| {
                    day_at(true_time).since(parse_log_day(name).unwrap()).unwrap().get_days() > RETENTION_DAYS
                });
                prop_assert_eq!(overdue, None, "in hour {}", hour);
            }
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        #[test]
        fn short_clock_jumps_never_shift_expiry(
            jumps in prop::collection::vec((0_u16..2800, -400_i64..400, 1_u8..23), 0..6),
            off in prop::option::of((0_u16..2000, 1_u16..60)),
        ) {
            simulate_four_months(&jumps, off)?;
        }
    }
}
