//! Progress of the running backup: `svc-db-backup` writes it, the gateway reports it to the platform, and `svc-update`
//! reads it while it waits for a snapshot.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::system::layout::Layout;
use svc_base::clock;
use svc_base::fsx::{self, FileError};

const FORMAT_VERSION: u32 = 1;

/// Progress of one backup run.
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

    /// Returns `None` if there is no file, or if it does not parse, for instance because a later release wrote it.
    ///
    /// # Errors
    /// [`FileError`] if the file exists and cannot be read.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&layout.backup_progress())?;
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    /// Replaces the file atomically: a reader never sees a partial one.
    pub fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::write_atomic(&layout.backup_progress(), &text, 0o644)
    }

    /// Removes the progress of the last run. Any other action that takes the backup's lock must call this, because the
    /// gateway reports the file as the progress of the process that holds the lock.
    pub fn remove(layout: &Layout) -> Result<(), FileError> {
        fsx::remove_if_exists(&layout.backup_progress())
    }
}
