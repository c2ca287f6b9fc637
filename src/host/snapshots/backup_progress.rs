//! Progress of the running backup, written by `svc-db-backup`, reported to the platform by the gateway, and read by
//! `svc-update` while it waits for a snapshot.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::system::layout::Layout;
use svc_base::clock;
use svc_base::fsx::{self, FileError};

const FORMAT_VERSION: u32 = 1;

/// Progress of a backup run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupProgress {
    version: u32,
    #[serde(with = "clock::wire")]
    pub began_at: Timestamp,
    /// The stage, as named in `backup.jsonl`.
    pub stage: String,
    /// Bytes written by `pg_dump`.
    pub dumped_bytes: u64,
    /// Bytes acknowledged by the object store.
    pub uploaded_bytes: u64,
    #[serde(with = "clock::wire")]
    pub updated_at: Timestamp,
}

impl BackupProgress {
    pub fn new(began_at: Timestamp, stage: String) -> Self {
        Self {
            version: FORMAT_VERSION,
            began_at,
            stage,
            dumped_bytes: 0,
            uploaded_bytes: 0,
            updated_at: clock::now_ms(),
        }
    }

    /// Reads the progress file. Returns `None` if it's missing or malformed, for example because a later release wrote
    /// it.
    ///
    /// # Errors
    /// [`FileError`] if the file exists but can't be read.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&layout.backup_progress())?;
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    /// Replaces the file atomically, so readers never see a partial write.
    pub fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::write_atomic(&layout.backup_progress(), &text, 0o644)
    }

    /// Removes the progress of the last run. Anything else that takes the backup lock must call this, because the
    /// gateway reports the file as the progress of the current lock holder.
    pub fn remove(layout: &Layout) -> Result<(), FileError> {
        fsx::remove_if_exists(&layout.backup_progress())
    }
}
