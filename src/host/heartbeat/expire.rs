//! Retention: what is older than 30 days by the day in its name is deleted. A file without such a name is never touched.
//!
//! The clock alone decides nothing: today is at most the day after the newest record. One run under a clock that is
//! weeks ahead deletes what a day passing would, and a machine that was off for long keeps its records until it has newer
//! ones.

use std::path::Path;

use jiff::ToSpan;
use jiff::civil::Date;

use crate::fsx::{self, FileError};
use crate::host::records::names::{ACTIVITY, AUDIT, INTERACTIONS};

/// The specification's part 8.
const KEPT_DAYS: i32 = 30;

/// The day in a record's name.
fn day(name: &str) -> Option<Date> {
    [ACTIVITY, AUDIT, INTERACTIONS].iter().find_map(|record| record.day(name))
}

/// Of these files, those whose names say that they have had their time, in order.
fn over(names: Vec<String>, today: Date) -> Vec<String> {
    let newest = names.iter().filter_map(|name| day(name)).max();
    let after_newest = newest.and_then(|newest| newest.tomorrow().ok());
    let today = after_newest.map_or(today, |after| after.min(today));
    let Ok(oldest) = today.checked_sub(KEPT_DAYS.days()) else { return Vec::new() };
    let mut over: Vec<String> =
        names.into_iter().filter(|name| day(name).is_some_and(|day| day < oldest)).collect();
    over.sort();
    over
}

/// Deletes what has had its time; the names of it.
///
/// # Errors
/// [`FileError`]; what comes after stays until the next run.
pub fn expire(logs: &Path, today: Date) -> Result<Vec<String>, FileError> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(logs).map_err(FileError::at("read", logs))? {
        let name = entry.map_err(FileError::at("read", logs))?.file_name();
        names.extend(name.to_str().map(str::to_owned));
    }
    let over = over(names, today);
    for name in &over {
        fsx::remove_if_there(&logs.join(name))?;
    }
    Ok(over)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const TODAY: Date = Date::constant(2026, 11, 21);

    proptest! {
        #[test]
        fn whatever_the_clock_says_the_newest_thirty_days_stay(
            days in proptest::collection::btree_set(-400_i32..400, 0..60),
            clock in -1000_i32..1000,
        ) {
            let date = |days: i32| TODAY.checked_add(days.days()).unwrap();
            let name = |days: i32| AUDIT.dated(date(days), 1);
            let over: BTreeSet<String> = over(days.iter().map(|day| name(*day)).collect(), date(clock)).into_iter().collect();
            let newest = days.last().copied().unwrap_or_default();
            for day in &days {
                let is_over = over.contains(&name(*day));
                prop_assert!(!is_over || newest - day >= KEPT_DAYS, "{} of {} at {}", day, newest, clock);
                prop_assert!(!is_over || clock - day > KEPT_DAYS, "{} at {}", day, clock);
                // A clock that is right, or behind, deletes all that it did.
                if clock <= newest + 1 {
                    prop_assert_eq!(is_over, clock - day > KEPT_DAYS);
                }
            }
        }
    }

    #[test]
    fn a_clock_that_is_weeks_ahead_deletes_one_days_worth() {
        let names: Vec<String> =
            (0..40).map(|ago| AUDIT.dated(TODAY.checked_sub(ago.days()).unwrap(), 1)).collect();
        let ahead = TODAY.checked_add(31.days()).unwrap();
        let gone = over(names, ahead);
        assert_eq!(gone.len(), 10, "{gone:?}");
        assert_eq!(gone.last().unwrap(), "audit-2026-10-22.jsonl");
    }

    #[test]
    fn thirty_days_are_kept_and_the_thirty_first_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let stay = [
            "activity-2026-10-22.log",
            "audit-2026-11-20.jsonl",
            "interactions-2026-11-21.jsonl",
            "interactions-2027-01-01.jsonl",
            "usage.jsonl",
            "backup-2020-01-01.jsonl",
            "audit.jsonl",
        ];
        let go = ["activity-2026-10-21.log", "audit-2026-10-21.2.jsonl", "interactions-2025-12-31.jsonl"];
        for name in stay.iter().chain(&go) {
            std::fs::write(dir.path().join(name), "x").unwrap();
        }
        assert_eq!(expire(dir.path(), TODAY).unwrap(), go);
        assert!(expire(dir.path(), TODAY).unwrap().is_empty());
        assert!(stay.iter().all(|name| dir.path().join(name).exists()));
    }
}
