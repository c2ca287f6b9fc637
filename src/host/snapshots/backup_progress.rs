//! What the backup under way has done so far: `svc-db-backup` writes it, the gateway shows it to the platform.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::fsx::{self, FileError};
use crate::host::system::layout::Layout;

const FORMAT: u32 = 1;

/// One run of a backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupProgress {
    version: u32,
    #[serde(with = "clock::wire")]
    pub began_at: Timestamp,
    /// As `backup.jsonl` names it.
    pub stage: String,
    /// Bytes that `pg_dump` has written.
    pub dumped_bytes: u64,
    /// Bytes that the object store has acknowledged.
    pub uploaded_bytes: u64,
    #[serde(with = "clock::wire")]
    pub updated_at: Timestamp,
}

impl BackupProgress {
    pub fn new(began_at: Timestamp, stage: String) -> Self {
        Self {
            version: FORMAT,
            began_at,
            stage,
            dumped_bytes: 0,
            uploaded_bytes: 0,
            updated_at: clock::now_ms(),
        }
    }

    /// What is not readable is of a later version, and shows nothing.
    ///
    /// # Errors
    /// When the file exists and the disk does not return it.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&layout.backup_progress())?;
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    /// Replaces the file atomically: a reader never sees a part of it.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields are JSON");
        fsx::write_atomic(&layout.backup_progress(), &text, 0o644)
    }
}
