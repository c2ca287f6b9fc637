//! The last backup: whether it succeeded, and how old it is.

use jiff::Timestamp;
use serde::Deserialize;

use crate::diagnosis::Findings;
use crate::fsx;
use crate::host::snapshots::check_log::{Check, CheckKind, Status};
use crate::host::snapshots::held_snapshot::HeldSnapshot;
use crate::host::system::layout::Layout;
use crate::store::key;

/// Backups are hourly: one missed, and time for the next.
const OVERDUE_SECONDS: i64 = 2 * 3600 + 600;
/// Drills are weekly: one missed, and time for the next.
const MOST_DAYS: i64 = 15;
const NEXT: &str = "journalctl -u svc-db-backup -n 50; systemctl start svc-db-backup";

#[derive(Deserialize)]
struct Record {
    timestamp: Timestamp,
    status: String,
    key: Option<String>,
    error: Option<String>,
}

pub fn check(layout: &Layout) -> Findings {
    let findings = Findings::of("backup");
    if let Ok(Some(held)) = HeldSnapshot::read(layout) {
        return findings.problem(held.to_string(), "svc-db-backup accept, if nothing is missed");
    }
    let text = match fsx::read_if_there(&layout.last_backup()) {
        Ok(Some(text)) => text,
        Ok(None) => return never(findings, layout),
        Err(error) => return findings.skipped(format!("{error}; run this as root")),
    };
    let Ok(record) = serde_json::from_slice::<Record>(&text) else {
        return findings.problem("last-backup.json cannot be read", NEXT);
    };
    if record.status != "success" {
        let why = record.error.unwrap_or_else(|| "it does not say why".to_owned());
        return findings.problem(format!("the last one failed: {why}"), NEXT);
    }
    let taken = record.key.as_deref().and_then(key::taken_at).unwrap_or(record.timestamp);
    let age = Timestamp::now().as_second() - taken.as_second();
    let told = format!("the last verified snapshot is {} min old", age / 60);
    if age > OVERDUE_SECONDS {
        return findings.problem(told, format!("systemctl list-timers svc-db-backup.timer; {NEXT}"));
    }
    findings.ok(told)
}

/// What the last looks at snapshots said: whether they could be read again, and restored.
pub fn snapshots(layout: &Layout) -> Findings {
    let mut findings = Findings::of("snapshots");
    let mut told = Vec::new();
    for kind in CheckKind::ALL {
        let unit = format!("svc-db-{}", kind.as_str());
        let next = format!("journalctl -u {unit} -n 50; systemctl start {unit}");
        match Check::last(layout, kind) {
            Ok(None) => told.push(format!("no {} yet", kind.as_str())),
            Ok(Some(check)) if check.status == Status::Success => {
                let days = (Timestamp::now().as_second() - check.timestamp.as_second()) / 86_400;
                let last = format!("the last {} succeeded {days} days ago", kind.as_str());
                if days > MOST_DAYS {
                    findings = findings.warning(last, format!("systemctl list-timers {unit}.timer; {next}"));
                } else {
                    told.push(last);
                }
            }
            Ok(Some(check)) => {
                let why = check.error.unwrap_or_else(|| "it does not say why".to_owned());
                findings = findings.problem(format!("the last {} failed: {why}", kind.as_str()), next);
            }
            Err(error) => findings = findings.skipped(format!("{error}; run this as root")),
        }
    }
    findings.or_ok(told.join(", "))
}

/// A machine that has just begun has none yet.
fn never(findings: Findings, layout: &Layout) -> Findings {
    let since = std::fs::metadata(layout.restore_complete()).and_then(|meta| meta.modified()).ok();
    let age = since.and_then(|at| at.elapsed().ok()).map_or(0, |age| age.as_secs());
    if i64::try_from(age).unwrap_or(i64::MAX) > OVERDUE_SECONDS {
        return findings.problem("there has been none on this machine", NEXT);
    }
    findings.warning(
        "there has been none on this machine yet",
        "the timer runs hourly; `svcctl backup now` asks for one",
    )
}
