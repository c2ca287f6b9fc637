//! Write-ahead journal for a database swap. It records the new database's oid, which survives a rename, so the next run
//! can tell whether the swap happened.

use serde::{Deserialize, Serialize};

use crate::snapshots::staging::ScratchDatabase;
use crate::system::layout::Layout;
use svc_base::fsx::{self, FileError};
use svc_store::pointer::SnapshotRef;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Journal {
    version: u32,
    pub key: String,
    sha256: String,
    pub scratch_oid: u32,
}

pub fn path(layout: &Layout) -> std::path::PathBuf {
    layout.restore_state().join("journal.json")
}

impl Journal {
    pub fn new(snapshot: &SnapshotRef, scratch: &ScratchDatabase) -> Self {
        Self {
            version: 1,
            key: snapshot.key.clone(),
            sha256: snapshot.sha256.clone(),
            scratch_oid: scratch.oid,
        }
    }

    /// Returns whether a journal exists, i.e. a run is in progress or was interrupted before removing it.
    pub fn is_open(layout: &Layout) -> bool {
        path(layout).exists()
    }

    /// Returns `None` if there is no journal or it doesn't parse. An unparsable journal means the swap never started,
    /// since the journal is written completely first.
    ///
    /// # Errors
    /// [`FileError`] if the file exists but cannot be read.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&path(layout))?;
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    pub fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::write_atomic(&path(layout), &text, 0o600)
    }

    /// Returns whether this journal belongs to a restore of `snapshot`.
    pub fn is_for(&self, snapshot: &SnapshotRef) -> bool {
        self.version == 1 && self.key == snapshot.key && self.sha256 == snapshot.sha256
    }
}

pub fn remove(layout: &Layout) -> Result<(), FileError> {
    fsx::remove_if_exists(&path(layout))
}
