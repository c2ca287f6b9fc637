//! What is left of a look at snapshots: a line of `backup-checks.jsonl`, and the last of its kind for heartbeat, metrics
//! and doctor.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::fsx::{self, FileError};
use crate::host::records::jsonl;
use crate::host::system::layout::Layout;

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Success,
    Error,
}

/// How a snapshot is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckKind {
    /// Read again from the store.
    Verify,
    /// Restored into a database of its own.
    Drill,
}

impl CheckKind {
    pub const ALL: [Self; 2] = [Self::Verify, Self::Drill];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Verify => "verify",
            Self::Drill => "drill",
        }
    }
}

/// One run. Sizes in bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Check {
    pub version: u32,
    /// When it ended.
    #[serde(with = "clock::wire")]
    pub timestamp: Timestamp,
    pub check: CheckKind,
    pub status: Status,
    /// Snapshots that were found as they were written.
    pub snapshots: u64,
    pub size_bytes: u64,
    pub duration_ms: u64,
    /// Of a single one that was looked at: its key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Keys of those that are not as they were written.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub damaged: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Check {
    pub const VERSION: u32 = 1;

    /// # Errors
    /// [`FileError`].
    pub fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let line = serde_json::to_vec(self).expect("a record of plain fields is JSON");
        fsx::write_atomic(&layout.last_check(self.check.as_str()), &line, 0o644)?;
        jsonl::append_line(&layout.logs().join("backup-checks.jsonl"), &line)
    }

    /// The last of its kind on this machine.
    ///
    /// # Errors
    /// [`FileError`]; what is there and cannot be read as one counts as none.
    pub fn last(layout: &Layout, kind: CheckKind) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&layout.last_check(kind.as_str()))?;
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
    }
}
