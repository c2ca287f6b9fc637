//! File-backup entries in `backup.jsonl`.
//!
//! The service saves up to four times a minute, and each entry is itself a change to save. So we only append one an
//! hour, as for database backups, plus one when saves start failing or recover, or when the service starts.

use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde::Serialize;
use svc_base::clock;
use svc_base::error_chain::format_chain;
use svc_files::save::SaveResult;
use svc_http::openapi::MAX_SAFE_INTEGER;

use crate::records::backup::{self, BackupKind, Status};
use crate::system::layout::Layout;

const RECORD_INTERVAL: Duration = Duration::from_secs(3600);
/// Minimum interval between a failure entry and the next success entry.
const RECOVERY_INTERVAL: Duration = Duration::from_secs(60);

/// A `backup.jsonl` entry.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FileBackupRecord {
    /// When the last save started.
    #[serde(with = "clock::wire")]
    timestamp: Timestamp,
    kind: BackupKind,
    status: Status,
    stage: &'static str,
    /// Key of the latest snapshot, relative to the slot prefix; absent after a failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    /// Total size of the saved files; absent after a failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    size_bytes: Option<u64>,
    /// Snapshots taken since the previous entry, and bytes uploaded for them.
    snapshots: u64,
    uploaded_bytes: u64,
    duration_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// When a save started.
#[derive(Debug, Clone, Copy)]
pub(super) struct SaveStart {
    /// Every write before this time is included in the save.
    pub(super) checked_at: Timestamp,
    /// Start time, for measuring how long the save took.
    pub(super) started_at: Instant,
}

/// Decides which saves to record.
#[derive(Debug, Default)]
pub(super) struct SaveRecords {
    /// Time and status of the last attempt to write an entry.
    last_attempt: Option<(Instant, Status)>,
    /// Snapshots taken since the last written entry, and bytes uploaded for them.
    snapshots: u64,
    uploaded_bytes: u64,
}

impl SaveRecords {
    /// Records a successful save. `size_bytes` is the size of all saved files.
    pub(super) fn record_success(
        &mut self,
        layout: &Layout,
        saved: &SaveResult,
        size_bytes: u64,
        start: SaveStart,
    ) {
        self.uploaded_bytes += saved.uploaded_bytes;
        self.snapshots += u64::from(!saved.is_unchanged);
        let record = FileBackupRecord {
            stage: "done",
            key: Some(format!("files/snapshots/{}", saved.id)),
            size_bytes: Some(size_bytes.min(MAX_SAFE_INTEGER)),
            ..self.new_record(Status::Success, start)
        };
        self.write_if_due(layout, &record);
    }

    /// Records a failed save.
    pub(super) fn record_failure(&mut self, layout: &Layout, error: &str, start: SaveStart) {
        let error = Some(error.to_owned());
        let record = FileBackupRecord { error, ..self.new_record(Status::Error, start) };
        self.write_if_due(layout, &record);
    }

    fn new_record(&self, status: Status, start: SaveStart) -> FileBackupRecord {
        FileBackupRecord {
            timestamp: start.checked_at,
            kind: BackupKind::Files,
            status,
            stage: "save",
            key: None,
            size_bytes: None,
            snapshots: self.snapshots,
            uploaded_bytes: self.uploaded_bytes.min(MAX_SAFE_INTEGER),
            duration_ms: u64::try_from(start.started_at.elapsed().as_millis()).unwrap_or(u64::MAX),
            error: None,
        }
    }

    /// Errors are only logged: a full disk must not stop the backup.
    fn write_if_due(&mut self, layout: &Layout, record: &FileBackupRecord) {
        let (now, status) = (Instant::now(), record.status);
        if !is_record_due(self.last_attempt, status, now) {
            return;
        }
        let line = serde_json::to_vec(record).expect("plain fields serialize to JSON");
        match backup::append(layout, &line) {
            Ok(()) => *self = Self { last_attempt: Some((now, status)), ..Self::default() },
            Err(error) => {
                self.last_attempt = Some((now, status));
                tracing::warn!(error = %format_chain(&error), "could not record the result of the file backup");
            }
        }
    }
}

/// Whether a save with this status should be recorded.
fn is_record_due(last: Option<(Instant, Status)>, status: Status, now: Instant) -> bool {
    let Some((at, last)) = last else { return true };
    let interval = match (last, status) {
        (Status::Success, Status::Error) => Duration::ZERO,
        (Status::Error, Status::Success) => RECOVERY_INTERVAL,
        _ => RECORD_INTERVAL,
    };
    now.duration_since(at) >= interval
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_is_due_hourly_and_on_status_change() {
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        assert!(is_record_due(None, Status::Success, now));
        assert!(!is_record_due(Some((now, Status::Success)), Status::Success, after(3599)));
        assert!(is_record_due(Some((now, Status::Success)), Status::Success, after(3600)));
        assert!(is_record_due(Some((now, Status::Success)), Status::Error, after(1)));
        assert!(!is_record_due(Some((now, Status::Error)), Status::Error, after(3599)));
        assert!(!is_record_due(Some((now, Status::Error)), Status::Success, after(59)));
        assert!(is_record_due(Some((now, Status::Error)), Status::Success, after(60)));
    }
}
