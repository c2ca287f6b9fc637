//! The lines of `backup.jsonl` about the file backup.
//!
//! The service saves up to four times a minute, and each line is itself a change that must be saved. Therefore, there
//! is only one line an hour, as for database backups, and one when saves begin to fail or succeed again, or when the
//! service starts.

use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde::Serialize;
use svc_base::clock;
use svc_base::error_chain::format_chain;
use svc_files::save::SaveResult;
use svc_http::openapi::MAX_SAFE_INTEGER;

use crate::records::backup::{self, BackupKind, Status};
use crate::system::layout::Layout;

const LINE_INTERVAL: Duration = Duration::from_secs(3600);
/// Minimum interval between the line about a failure and the one about the next success.
const RECOVERY_INTERVAL: Duration = Duration::from_secs(60);

/// A line of `backup.jsonl`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FileBackupRecord {
    /// When the last save began.
    #[serde(with = "clock::wire")]
    timestamp: Timestamp,
    kind: BackupKind,
    status: Status,
    stage: &'static str,
    /// The latest snapshot's key, relative to the slot's prefix; absent after a failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    /// The size of the saved files; absent after a failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    size_bytes: Option<u64>,
    /// The number of snapshots taken since the previous line, and the bytes uploaded for them.
    snapshots: u64,
    uploaded_bytes: u64,
    duration_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// The start of a save.
#[derive(Debug, Clone, Copy)]
pub(super) struct SaveStart {
    /// The time before which every write is included in the save.
    pub(super) checked_at: Timestamp,
    /// From this, the save's duration is measured.
    pub(super) started_at: Instant,
}

/// Decides which saves get a line.
#[derive(Debug, Default)]
pub(super) struct SaveRecords {
    /// When the last line was written or could not be written, and its status.
    last_line: Option<(Instant, Status)>,
    /// The number of snapshots taken since a line was last written, and the bytes uploaded for them.
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

    /// An error is only logged, because a full disk must not stop the backup.
    fn write_if_due(&mut self, layout: &Layout, record: &FileBackupRecord) {
        let (now, status) = (Instant::now(), record.status);
        if !is_line_due(self.last_line, status, now) {
            return;
        }
        let line = serde_json::to_vec(record).expect("plain fields serialize to JSON");
        match backup::append(layout, &line) {
            Ok(()) => *self = Self { last_line: Some((now, status)), ..Self::default() },
            Err(error) => {
                self.last_line = Some((now, status));
                tracing::warn!(error = %format_chain(&error), "could not record the result of the file backup");
            }
        }
    }
}

/// Whether a save with this status gets a line.
fn is_line_due(last: Option<(Instant, Status)>, status: Status, now: Instant) -> bool {
    let Some((at, last)) = last else { return true };
    let interval = match (last, status) {
        (Status::Success, Status::Error) => Duration::ZERO,
        (Status::Error, Status::Success) => RECOVERY_INTERVAL,
        _ => LINE_INTERVAL,
    };
    now.duration_since(at) >= interval
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_due_hourly_and_when_the_status_changes() {
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        assert!(is_line_due(None, Status::Success, now));
        assert!(!is_line_due(Some((now, Status::Success)), Status::Success, after(3599)));
        assert!(is_line_due(Some((now, Status::Success)), Status::Success, after(3600)));
        assert!(is_line_due(Some((now, Status::Success)), Status::Error, after(1)));
        assert!(!is_line_due(Some((now, Status::Error)), Status::Error, after(3599)));
        assert!(!is_line_due(Some((now, Status::Error)), Status::Success, after(59)));
        assert!(is_line_due(Some((now, Status::Error)), Status::Success, after(60)));
    }
}
