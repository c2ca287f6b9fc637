//! Snapshot check records, one per line of `backup-checks.jsonl`. The last check of each kind is also stored in its own
//! file for the heartbeat, the metrics and the doctor.

use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::records::backup::Status;
use crate::records::jsonl;
use crate::system::activity;
use crate::system::layout::Layout;
use svc_base::clock;
use svc_base::error_chain::format_chain;
use svc_base::fsx::{self, FileError};

/// Kind of snapshot check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum CheckKind {
    /// Reads snapshots from the store in full.
    Verify,
    /// Restores the latest snapshot into a scratch database.
    Drill,
}

impl CheckKind {
    pub const ALL: &'static [Self] = <Self as strum::VariantArray>::VARIANTS;

    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A finished snapshot check.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CheckRecord {
    pub version: u32,
    /// When the check finished.
    #[serde(with = "clock::wire")]
    pub timestamp: Timestamp,
    pub check: CheckKind,
    pub status: Status,
    /// Number of intact snapshots.
    pub snapshots: u64,
    /// Total size of the intact snapshots; for a drill, the size of its snapshot, even if the drill failed.
    pub size_bytes: u64,
    pub duration_ms: u64,
    /// Set if only one snapshot was checked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Keys of damaged snapshots.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub damaged: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Errors from reading the last check.
#[derive(Debug, thiserror::Error)]
pub enum LastCheckError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("invalid check record in {}", .path.display())]
    Malformed {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
}

impl CheckRecord {
    pub const FORMAT_VERSION: u32 = 1;

    /// Stores this as the last check of its kind, and appends it to `activity.log` and `backup-checks.jsonl`. All
    /// writes are attempted even if one fails. The caller holds the check lock, so there's no concurrent writer.
    ///
    /// # Errors
    /// The first [`FileError`], which is also logged because a caller whose check failed reports that failure instead.
    pub fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let line = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        // Damage must be reported even if the disk is full.
        let last = fsx::write_atomic_or_in_place(&layout.last_check(self.check.as_str()), &line, 0o644);
        activity::note(layout, &self.describe());
        let appended = jsonl::append_line(&layout.logs().join("backup-checks.jsonl"), &line);
        last.and(appended).inspect_err(|error| {
            tracing::error!(error = %format_chain(error), "could not record the check result");
        })
    }

    /// Describes the check for `activity.log`.
    fn describe(&self) -> String {
        let name = match self.check {
            CheckKind::Verify => "snapshot verification",
            CheckKind::Drill => "snapshot test restore",
        };
        let error = self.error.as_deref().unwrap_or("unknown error");
        match self.status {
            Status::Success => format!("{name} succeeded ({} intact)", self.snapshots),
            Status::Error => format!("{name} failed: {error}"),
        }
    }

    /// Reads the last check of this kind on this machine, if any.
    ///
    /// # Errors
    /// [`LastCheckError`] if the file exists but can't be read or parsed.
    pub fn read_last(layout: &Layout, kind: CheckKind) -> Result<Option<Self>, LastCheckError> {
        let path = layout.last_check(kind.as_str());
        let Some(text) = fsx::read_if_exists(&path)? else { return Ok(None) };
        serde_json::from_slice(&text).map(Some).map_err(|source| LastCheckError::Malformed { path, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn successful_drill() -> CheckRecord {
        CheckRecord {
            version: CheckRecord::FORMAT_VERSION,
            timestamp: clock::now_ms(),
            check: CheckKind::Drill,
            status: Status::Success,
            snapshots: 1,
            size_bytes: 9,
            duration_ms: 5,
            key: None,
            damaged: Vec::new(),
            error: None,
        }
    }

    #[test]
    fn write_appends_line_if_last_check_cannot_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        // A file cannot replace a directory.
        std::fs::create_dir_all(layout.last_check("drill")).unwrap();
        let error = successful_drill().write(&layout).unwrap_err();
        assert_eq!(error.path, layout.last_check("drill"));
        let lines = std::fs::read_to_string(layout.logs().join("backup-checks.jsonl")).unwrap();
        assert_eq!(lines.lines().count(), 1);
    }

    #[test]
    fn write_describes_check_in_activity_log() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        std::fs::create_dir_all(layout.logs()).unwrap();
        let good = successful_drill();
        let bad = CheckRecord {
            check: CheckKind::Verify,
            status: Status::Error,
            error: Some("the store does not respond".to_owned()),
            ..good.clone()
        };
        good.write(&layout).unwrap();
        bad.write(&layout).unwrap();
        let text = std::fs::read_to_string(layout.logs().join("activity.log")).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].ends_with(" snapshot test restore succeeded (1 intact)"), "{text}");
        assert!(lines[1].ends_with(" snapshot verification failed: the store does not respond"), "{text}");
    }
}
