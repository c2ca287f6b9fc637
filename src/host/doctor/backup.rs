//! Checks the result and age of the last backup, snapshot verification and drill.

use jiff::Timestamp;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::records::backup::Status;
use crate::snapshots::check_log::{CheckKind, CheckRecord, LastCheckError};
use crate::snapshots::held_snapshot::HeldSnapshot;
use crate::system::layout::Layout;
use svc_base::diagnosis::Findings;
use svc_base::fsx;
use svc_base::quantity::pluralize;
use svc_store::key;

/// Backups run hourly. Allow one missed run, plus time for the next.
const MAX_BACKUP_AGE_SECONDS: i64 = 2 * 3600 + 600;
/// Drills, the least frequent check, run weekly. Allow one missed run, plus time for the next.
const MAX_CHECK_AGE_DAYS: i64 = 15;
const NEXT_STEP: &str =
    "run `journalctl -u svc-db-backup -n 50` to find the cause, then `systemctl start svc-db-backup`";

#[derive(Deserialize)]
struct BackupRecord {
    timestamp: Timestamp,
    status: String,
    key: Option<String>,
    error: Option<String>,
    /// Set if the snapshot is complete but held back.
    held: Option<IgnoredAny>,
}

pub fn check(layout: &Layout) -> Findings {
    let mut findings = Findings::new("backup");
    let held = HeldSnapshot::read(layout).ok().flatten();
    if let Some(held) = &held {
        let next = "if the loss is intended, run `svc-db-backup accept`; otherwise load the latest snapshot \
                    with `svc-db-backup side open` and copy the rows back, or restore it with `svcctl \
                    recover USER`";
        findings = findings.problem(held.to_string(), next);
    }
    let text = match fsx::read_if_exists(&layout.last_backup()) {
        Ok(Some(text)) => text,
        Ok(None) => return assess_missing_backup(findings, layout),
        Err(error) => return findings.skipped(format!("{error}; run the doctor as root")),
    };
    let Ok(record) = serde_json::from_slice::<BackupRecord>(&text) else {
        return findings.problem("last-backup.json is not a valid backup record", NEXT_STEP);
    };
    // A later backup can fail for a reason other than the reported loss.
    let is_reported = held.is_some() && record.held.is_some();
    if record.status != "success" && !is_reported {
        let reason = record.error.unwrap_or_else(|| "no reason recorded".to_owned());
        return findings.problem(format!("the last backup failed: {reason}"), NEXT_STEP);
    }
    let taken = record.key.as_deref().and_then(key::taken_at).unwrap_or(record.timestamp);
    let age = Timestamp::now().as_second() - taken.as_second();
    let summary = format!("the last verified snapshot is {} min old", age / 60);
    if age > MAX_BACKUP_AGE_SECONDS {
        let next = format!("check the timer with `systemctl list-timers svc-db-backup.timer`; {NEXT_STEP}");
        return findings.problem(summary, next);
    }
    findings.or_ok(summary)
}

/// Checks the last verification and the last drill.
pub fn check_snapshots(layout: &Layout) -> Findings {
    let mut findings = Findings::new("snapshots");
    let mut summary = Vec::new();
    let days_in_use = read_seconds_in_use(layout) / 86_400;
    for &kind in CheckKind::ALL {
        let unit = format!("svc-db-{}", kind.as_str());
        let next =
            format!("run `journalctl -u {unit} -n 50` to find the cause, then `systemctl start {unit}`");
        let timer_next = format!("check the timer with `systemctl list-timers {unit}.timer`; {next}");
        match CheckRecord::read_last(layout, kind) {
            Ok(None) if days_in_use > MAX_CHECK_AGE_DAYS => {
                let what = format!("there has been no {} on this machine", noun(kind));
                findings = findings.warning(what, timer_next);
            }
            Ok(None) => summary.push(format!("no {} yet", noun(kind))),
            Ok(Some(check)) if check.status == Status::Success => {
                let days = (Timestamp::now().as_second() - check.timestamp.as_second()) / 86_400;
                let age = match u64::try_from(days) {
                    Ok(days @ 1..) => pluralize(days, "day"),
                    _ => "less than a day".to_owned(),
                };
                let last = format!("the last {} succeeded {age} ago", noun(kind));
                if days > MAX_CHECK_AGE_DAYS {
                    findings = findings.warning(last, timer_next);
                } else {
                    summary.push(last);
                }
            }
            Ok(Some(check)) => {
                let reason = check.error.unwrap_or_else(|| "no reason recorded".to_owned());
                findings = findings.problem(format!("the last {} failed: {reason}", noun(kind)), next);
            }
            Err(error @ LastCheckError::Malformed { .. }) => {
                findings = findings.problem(error.to_string(), next);
            }
            Err(LastCheckError::File(error)) => {
                findings = findings.skipped(format!("{error}; run the doctor as root"));
            }
        }
    }
    findings.or_ok(summary.join(", "))
}

fn noun(kind: CheckKind) -> &'static str {
    match kind {
        CheckKind::Verify => "verification",
        CheckKind::Drill => "drill",
    }
}

/// Assesses a missing backup, which is normal on a new machine.
fn assess_missing_backup(findings: Findings, layout: &Layout) -> Findings {
    if read_seconds_in_use(layout) > MAX_BACKUP_AGE_SECONDS {
        return findings.problem("there has been no backup on this machine", NEXT_STEP);
    }
    findings.warning(
        "there has been no backup on this machine yet",
        "wait for the hourly timer, or run `systemctl start svc-db-backup`",
    )
}

/// Returns the seconds since the restore completed, or 0 if it hasn't or the time is unknown.
fn read_seconds_in_use(layout: &Layout) -> i64 {
    let since = std::fs::metadata(layout.restore_complete()).and_then(|meta| meta.modified()).ok();
    let age = since.and_then(|at| at.elapsed().ok()).map_or(0, |age| age.as_secs());
    i64::try_from(age).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use serde_json::json;

    use super::*;
    use svc_base::diagnosis::Level;

    #[test]
    fn check_reports_later_failures_despite_held_snapshot() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let loss = "3 rows instead of 400";
        HeldSnapshot::new("key".to_owned(), "latest".to_owned(), loss.to_owned()).write(&layout).unwrap();
        let check_with = |at: Timestamp, held: Option<&str>| -> Vec<String> {
            let error = "the store refused";
            let record =
                json!({"timestamp": at.to_string(), "status": "error", "error": error, "held": held});
            std::fs::write(layout.last_backup(), record.to_string()).unwrap();
            let findings = check(&layout).into_list();
            assert!(findings.iter().all(|finding| finding.level == Level::Problem), "{findings:?}");
            assert!(findings[0].what.contains(loss), "{findings:?}");
            findings.into_iter().skip(1).map(|finding| finding.what).collect()
        };
        assert_eq!(check_with(Timestamp::now(), Some(loss)), Vec::<String>::new());
        assert_eq!(check_with(Timestamp::now(), None), ["the last backup failed: the store refused"]);
        let old = check_with(Timestamp::UNIX_EPOCH, Some(loss));
        assert!(old.len() == 1 && old[0].contains("min old"), "{old:?}");
    }

    #[test]
    fn check_snapshots_reports_invalid_record_as_problem() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        fsx::write_atomic(&layout.last_check("drill"), b"{", 0o644).unwrap();
        let findings = check_snapshots(&layout).into_list();
        assert_eq!((findings.len(), findings[0].level), (1, Level::Problem), "{findings:?}");
        assert!(findings[0].what.contains("last-drill.json"), "{findings:?}");
    }

    #[test]
    fn check_snapshots_warns_about_missing_checks_on_old_machine() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        fsx::write_atomic(&layout.restore_complete(), b"", 0o644).unwrap();
        let levels = || -> Vec<Level> {
            check_snapshots(&layout).into_list().into_iter().map(|finding| finding.level).collect()
        };
        assert_eq!(levels(), [Level::Ok]);
        let restored_at = SystemTime::now() - Duration::from_secs(16 * 86_400);
        std::fs::File::open(layout.restore_complete()).unwrap().set_modified(restored_at).unwrap();
        assert_eq!(levels(), [Level::Warning, Level::Warning]);
    }
}
