//! Retention: what is older than 30 days by the day in its name is deleted. A file without such a name is never touched.

use std::path::Path;

use jiff::ToSpan;
use jiff::civil::Date;

use super::names::{ACTIVITY, AUDIT, INTERACTIONS};
use crate::fsx::{self, FileError};

/// The specification's part 8.
const KEPT_DAYS: i32 = 30;

/// Whether a file's name says that it has had its time.
pub fn is_over(name: &str, today: Date) -> bool {
    let day = [ACTIVITY, AUDIT, INTERACTIONS].iter().find_map(|record| record.day(name));
    let oldest = today.checked_sub(KEPT_DAYS.days());
    day.zip(oldest.ok()).is_some_and(|(day, oldest)| day < oldest)
}

/// Deletes what has had its time; the names of it.
///
/// # Errors
/// [`FileError`]; what comes after stays until the next run.
pub fn expire(logs: &Path, today: Date) -> Result<Vec<String>, FileError> {
    let mut over = Vec::new();
    for entry in std::fs::read_dir(logs).map_err(FileError::at("read", logs))? {
        let name = entry.map_err(FileError::at("read", logs))?.file_name();
        over.extend(name.to_str().filter(|name| is_over(name, today)).map(str::to_owned));
    }
    over.sort();
    for name in &over {
        fsx::remove_if_there(&logs.join(name))?;
    }
    Ok(over)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TODAY: Date = Date::constant(2026, 11, 21);

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
