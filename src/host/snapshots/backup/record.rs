//! The record of a run: a line of `backup.jsonl`. `last-backup.json` holds the last run's record.

use jiff::Timestamp;
use serde::Serialize;

use super::stage::Stage;
use crate::records::backup::{self, BackupKind, Status};
use crate::system::activity;
use crate::system::layout::Layout;
use svc_base::clock;
use svc_base::error_chain::format_chain;
use svc_base::fsx;

/// One attempt at a backup, or the acceptance of a held-back snapshot.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupRecord {
    /// Start time.
    #[serde(with = "clock::wire")]
    pub timestamp: Timestamp,
    pub kind: BackupKind,
    pub status: Status,
    /// The last stage reached.
    pub stage: Stage,
    pub key: Option<String>,
    pub size_bytes: Option<u64>,
    pub sha256: Option<String>,
    pub duration_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Set if the snapshot is complete but was held back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held: Option<HeldBackReason>,
    /// Whether this is the acceptance of a held-back snapshot. Only the line in `activity.log` depends on it.
    #[serde(skip)]
    pub is_acceptance: bool,
}

/// Why a complete snapshot did not become the latest.
#[derive(Debug, Serialize)]
pub struct HeldBackReason {
    /// The snapshot that stays the latest.
    pub latest: String,
    /// Describes the missing tables and rows.
    pub loss: String,
}

/// Writes `last-backup.json` and the lines in `backup.jsonl` and `activity.log`. If one write fails, the others are
/// still attempted. The caller holds the backup's lock, so there is no other writer.
///
/// An error is only logged: if it failed the run, a retry would take and upload another complete snapshot.
pub fn write(layout: &Layout, record: &BackupRecord) {
    let line = serde_json::to_vec(record).expect("plain fields serialize to JSON");
    // Backups are taken even while the disk is full, and the heartbeat and the gateway must get their results.
    let last = fsx::write_atomic_or_in_place(&layout.last_backup(), &line, 0o644);
    let appended = backup::append(layout, &line);
    for error in [last, appended].into_iter().filter_map(Result::err) {
        tracing::error!(error = %format_chain(&error), "could not record the result of the backup");
    }
    activity::note(layout, &describe(record));
}

/// Describes the run for `activity.log`.
fn describe(record: &BackupRecord) -> String {
    match (record.status, &record.key) {
        (Status::Success, Some(key)) if record.is_acceptance => {
            format!("the held-back snapshot {key} was accepted as the latest")
        }
        (Status::Success, Some(key)) => format!("the database was backed up as {key}"),
        (Status::Success, None) => "the database was backed up".to_owned(),
        (Status::Error, _) => {
            let error = record.error.as_deref().unwrap_or("unknown error");
            format!("the backup of the database failed: {error}")
        }
    }
}
