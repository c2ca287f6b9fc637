//! Rotation: renames a log file started before today to a dated name.
//!
//! Renaming loses nothing: a writer with the file open keeps writing to it, and each append opens the file by name
//! (`host::records::writer`). Files are never overwritten: if a name is taken, a number is added. The first line's
//! timestamp gives the day the file was started, so rotation is stateless and catches up on missed days.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use jiff::Timestamp;
use jiff::civil::Date;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, RenameFlags, renameat2};
use serde::Deserialize;

use crate::records::calendar::Calendar;
use crate::records::log_file_names::DatedLog;
use svc_base::fsx::{self, FileError};

/// Maximum number of files per day. Reaching it indicates a bug.
const MAX_FILES_PER_DAY: u32 = 1000;
/// Maximum number of bytes read from the first line.
const MAX_FIRST_LINE_BYTES: u64 = 64 << 10;

/// First and last day covered by a log file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DaySpan {
    pub first: Date,
    pub last: Date,
}

/// Returns the day for a log file's new name, or `None` if the file was started today or later. This is the file's last
/// day, so that no line expires early, even if the clock was set back. If the last day is today, which isn't over yet,
/// returns yesterday instead; today's lines in the file then expire one day early.
pub fn rotation_day(span: DaySpan, today: Date) -> Option<Date> {
    let yesterday = today.yesterday().ok()?;
    (span.first < today).then(|| if span.last == today { yesterday } else { span.last })
}

/// Rotates a log file if due, returning its new name.
pub fn rotate(
    logs: &Path,
    log: DatedLog,
    calendar: &Calendar,
    today: Date,
) -> Result<Option<String>, FileError> {
    let current = logs.join(log.current_name());
    let Some(span) = read_span(&current, calendar).map_err(FileError::wrap("read", &current))? else {
        return Ok(None);
    };
    let Some(day) = rotation_day(span, today) else { return Ok(None) };
    for n in 1..=MAX_FILES_PER_DAY {
        let name = log.dated_name(day, n);
        let renamed =
            renameat2(AT_FDCWD, &current, AT_FDCWD, &logs.join(&name), RenameFlags::RENAME_NOREPLACE);
        match renamed {
            Ok(()) => {
                fsx::sync_dir(logs)?;
                return Ok(Some(name));
            }
            Err(Errno::EEXIST) => {}
            // Another program has renamed or deleted the file.
            Err(Errno::ENOENT) => return Ok(None),
            Err(error) => return Err(FileError::wrap("rename", &current)(error.into())),
        }
    }
    Err(FileError::wrap("rename", &current)(io::Error::other("no free file name for the day")))
}

/// Reads the first and last day of a log file, or `None` if it is missing, empty or not a regular file. Symbolic links
/// are an error.
fn read_span(path: &Path, calendar: &Calendar) -> io::Result<Option<DaySpan>> {
    let mut options = File::options();
    let opened = options.read(true).custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits()).open(path);
    let file = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let meta = file.metadata()?;
    if !meta.is_file() || meta.len() == 0 {
        return Ok(None);
    }
    let modified = Timestamp::try_from(meta.modified()?).map_err(io::Error::other)?;
    // Prefer the first line's timestamp, then the file's birth time.
    let birth_time = meta.created().ok().and_then(|at| Timestamp::try_from(at).ok());
    let line_time = parse_line_time(read_first_line(file)?.as_slice());
    let first = line_time.or(birth_time).unwrap_or(modified).min(modified);
    let last = line_time.unwrap_or(modified).max(modified);
    Ok(Some(DaySpan { first: calendar.day(first), last: calendar.day(last) }))
}

fn read_first_line(file: File) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    BufReader::new(file.take(MAX_FIRST_LINE_BYTES)).read_until(b'\n', &mut line)?;
    Ok(line)
}

/// Parses a line's time from its `timestamp` field or its first word.
fn parse_line_time(line: &[u8]) -> Option<Timestamp> {
    #[derive(Deserialize)]
    struct TimedLine {
        timestamp: Timestamp,
    }
    if let Ok(line) = serde_json::from_slice::<TimedLine>(line) {
        return Some(line.timestamp);
    }
    let text = std::str::from_utf8(line).ok()?;
    text.split_whitespace().next()?.trim_matches(['[', ']']).parse().ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::io::Write;
    use std::time::SystemTime;

    use jiff::ToSpan;
    use proptest::prelude::*;

    use super::*;
    use crate::records::log_file_names::{ACTIVITY, AUDIT};

    const TODAY: Date = Date::constant(2026, 11, 21);

    fn utc() -> Calendar {
        Calendar::utc()
    }

    fn at(day: Date, hour: i8) -> Timestamp {
        day.at(hour, 0, 0, 0).to_zoned(jiff::tz::TimeZone::UTC).unwrap().timestamp()
    }

    fn line(at: Timestamp, n: usize) -> String {
        format!("{{\"timestamp\":\"{at}\",\"n\":{n}}}\n")
    }

    /// Reads all files in a directory, by name.
    fn read_files(dir: &Path) -> BTreeMap<String, String> {
        let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        entries
            .map(|path| {
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                (name, fs::read_to_string(path).unwrap())
            })
            .collect()
    }

    fn write_log_file(path: &Path, text: &str, last: Timestamp) {
        fs::write(path, text).unwrap();
        File::options().append(true).open(path).unwrap().set_modified(SystemTime::from(last)).unwrap();
    }

    #[test]
    fn rotates_yesterdays_log_file_and_keeps_todays() {
        let dir = tempfile::tempdir().unwrap();
        let yesterday = TODAY.yesterday().unwrap();
        let text = line(at(yesterday, 3), 1);
        write_log_file(&dir.path().join("audit.jsonl"), &text, at(yesterday, 9));
        let name = rotate(dir.path(), AUDIT, &utc(), TODAY).unwrap();
        assert_eq!(name.as_deref(), Some("audit-2026-11-20.jsonl"));
        assert_eq!(rotate(dir.path(), AUDIT, &utc(), TODAY).unwrap(), None);
        write_log_file(&dir.path().join("audit.jsonl"), &line(at(TODAY, 0), 2), at(TODAY, 0));
        assert_eq!(rotate(dir.path(), AUDIT, &utc(), TODAY).unwrap(), None);
        assert_eq!(read_files(dir.path())["audit-2026-11-20.jsonl"], text);
    }

    #[test]
    fn rotation_loses_no_line_from_an_open_writer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("activity.log");
        let yesterday = TODAY.yesterday().unwrap();
        write_log_file(&path, &format!("{} begin\n", at(yesterday, 1)), at(yesterday, 1));
        let mut open = File::options().append(true).open(&path).unwrap();
        open.write_all(b"half of a li").unwrap();
        open.set_modified(SystemTime::from(at(yesterday, 2))).unwrap();
        rotate(dir.path(), ACTIVITY, &utc(), TODAY).unwrap().unwrap();
        open.write_all(b"ne\n").unwrap();
        assert!(read_files(dir.path())["activity-2026-11-20.log"].ends_with("half of a line\n"));
    }

    #[test]
    fn rotation_never_overwrites_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let yesterday = TODAY.yesterday().unwrap();
        for n in 1..=3 {
            write_log_file(&dir.path().join("audit.jsonl"), &line(at(yesterday, 3), n), at(yesterday, 9));
            rotate(dir.path(), AUDIT, &utc(), TODAY).unwrap().unwrap();
        }
        let names: Vec<String> = read_files(dir.path()).into_keys().collect();
        assert_eq!(names, ["audit-2026-11-20.2.jsonl", "audit-2026-11-20.3.jsonl", "audit-2026-11-20.jsonl"]);
    }

    #[test]
    fn clock_set_back_never_backdates_a_line() {
        let dir = tempfile::tempdir().unwrap();
        let long_ago = TODAY.checked_sub(20.days()).unwrap();
        // The log file is started on the right day, then continued and rotated with the clock weeks behind.
        let text = line(at(TODAY, 3), 1) + &line(at(long_ago, 9), 2);
        write_log_file(&dir.path().join("audit.jsonl"), &text, at(long_ago, 9));
        let next = long_ago.tomorrow().unwrap();
        let name = rotate(dir.path(), AUDIT, &utc(), next).unwrap();
        assert_eq!(name.as_deref(), Some("audit-2026-11-21.jsonl"));
        // Rotation still overwrites nothing once the clock is correct again.
        write_log_file(&dir.path().join("audit.jsonl"), &line(at(TODAY, 4), 3), at(TODAY, 4));
        let name = rotate(dir.path(), AUDIT, &utc(), TODAY.tomorrow().unwrap()).unwrap();
        assert_eq!(name.as_deref(), Some("audit-2026-11-21.2.jsonl"));
    }

    #[test]
    fn days_follow_the_owners_time_zone() {
        for (zone, last, first, day) in [
            // 23-hour and 25-hour days, a day without a midnight, a day whose last hour repeats, and a leap day.
            ("Europe/Berlin", "2026-03-29T21:59:59Z", "2026-03-29T22:00:00Z", "2026-03-29"),
            ("Europe/Berlin", "2026-10-25T22:59:59Z", "2026-10-25T23:00:00Z", "2026-10-25"),
            ("America/Santiago", "2026-09-06T03:59:59Z", "2026-09-06T04:00:00Z", "2026-09-05"),
            ("America/Santiago", "2026-04-05T03:59:59Z", "2026-04-05T04:00:00Z", "2026-04-04"),
            ("UTC", "2028-02-29T23:59:59Z", "2028-03-01T00:00:00Z", "2028-02-29"),
        ] {
            let calendar = Calendar::for_zone(zone).unwrap();
            let (last, first): (Timestamp, Timestamp) = (last.parse().unwrap(), first.parse().unwrap());
            let dir = tempfile::tempdir().unwrap();
            write_log_file(&dir.path().join("audit.jsonl"), &line(last, 1), last);
            assert_eq!(
                rotate(dir.path(), AUDIT, &calendar, calendar.day(last)).unwrap(),
                None,
                "{zone} {last}"
            );
            let name = rotate(dir.path(), AUDIT, &calendar, calendar.day(first)).unwrap();
            assert_eq!(name, Some(format!("audit-{day}.jsonl")), "{zone} {first}");
        }
    }

    #[test]
    fn concurrent_rotations_keep_every_line_once() {
        let dir = tempfile::tempdir().unwrap();
        let yesterday = TODAY.yesterday().unwrap();
        for n in 0..20 {
            write_log_file(&dir.path().join("audit.jsonl"), &line(at(yesterday, 3), n), at(yesterday, 9));
            let rotated: usize = std::thread::scope(|scope| {
                let run = || usize::from(rotate(dir.path(), AUDIT, &utc(), TODAY).unwrap().is_some());
                let running: Vec<_> = (0..4).map(|_| scope.spawn(run)).collect();
                running.into_iter().map(|thread| thread.join().unwrap()).sum()
            });
            assert_eq!(rotated, 1);
        }
        let files = read_files(dir.path());
        let mut lines: Vec<&str> = files.values().flat_map(|text| text.lines()).collect();
        assert_eq!((files.len(), lines.len()), (20, 20));
        lines.sort_unstable();
        lines.dedup();
        assert_eq!(lines.len(), 20);
    }

    #[test]
    fn rotation_rejects_symlinks_and_skips_empty_log_files() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("activity.log"), "").unwrap();
        assert_eq!(rotate(dir.path(), ACTIVITY, &utc(), TODAY).unwrap(), None);
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("audit.jsonl")).unwrap();
        rotate(dir.path(), AUDIT, &utc(), TODAY).unwrap_err();
    }

    #[test]
    fn parse_line_time_reads_both_formats() {
        let at: Timestamp = "2026-11-20T03:00:00Z".parse().unwrap();
        assert_eq!(parse_line_time(br#"{"op":"write","timestamp":"2026-11-20T03:00:00.000Z"}"#), Some(at));
        assert_eq!(parse_line_time(b"2026-11-20T04:00:00+01:00 something happened\n"), Some(at));
        assert_eq!(parse_line_time(b"[2026-11-20T03:00:00Z] x"), Some(at));
        assert_eq!(parse_line_time(b"something happened"), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// No line is lost or duplicated, for any missed days and any number of runs per day. No line is in a file
        /// dated before its own day, except that a line from the day of a rotation may be in the previous day's file.
        #[test]
        fn rotation_keeps_every_line_once(days in prop::collection::vec((0_i32..3, 0_usize..3, 0_usize..3), 1..12)) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("audit.jsonl");
            let (mut today, mut lines) = (TODAY, Vec::new());
            for (skipped, runs, new) in days {
                today = today.checked_add(skipped.days()).unwrap();
                for _ in 0..runs {
                    rotate(dir.path(), AUDIT, &utc(), today).unwrap();
                }
                for _ in 0..new {
                    let text = line(at(today, 12), lines.len());
                    let before = fs::read_to_string(&path).unwrap_or_default();
                    write_log_file(&path, &(before + &text), at(today, 12));
                    lines.push((today, text));
                }
            }
            rotate(dir.path(), AUDIT, &utc(), today.tomorrow().unwrap()).unwrap();
            let files = read_files(dir.path());
            prop_assert!(!files.contains_key("audit.jsonl"));
            let total: usize = files.values().map(|text| text.lines().count()).sum();
            prop_assert_eq!(total, lines.len());
            for (day, text) in lines {
                let (name, _) = files.iter().find(|(_, content)| content.contains(&text)).unwrap();
                prop_assert!(AUDIT.parse_day(name).unwrap() >= day.yesterday().unwrap(), "{} in {}", text, name);
            }
        }

        #[test]
        fn rotation_day_is_never_today(first in -40_i32..3, length in 0_i32..40) {
            let first = TODAY.checked_add(first.days()).unwrap();
            let span = DaySpan { first, last: first.checked_add(length.days()).unwrap() };
            match rotation_day(span, TODAY) {
                Some(day) => {
                    prop_assert!(first < TODAY && first <= day && day != TODAY);
                    prop_assert!(day == span.last || (span.last == TODAY && day == TODAY.yesterday().unwrap()));
                }
                None => prop_assert!(first >= TODAY),
            }
        }
    }
}
