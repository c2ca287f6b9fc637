//! The journal of a swap, written before the swap. It contains the new database's oid, which does not change when the
//! database is renamed, so the next run can determine whether the swap happened.

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

    /// Returns whether a run is in progress, or was interrupted, between the write of the journal and its removal.
    pub fn is_open(layout: &Layout) -> bool {
        path(layout).exists()
    }

    /// Returns `None` if there is no journal, or if it does not parse. In the second case, the swap has not begun,
    /// because it begins only after the journal has been written completely.
    ///
    /// # Errors
    /// [`FileError`] if the file exists and cannot be read.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&path(layout))?;
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    pub fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::write_atomic(&path(layout), &text, 0o600)
    }

    /// Returns whether this is the journal of a restore of `snapshot`.
    pub fn is_for(&self, snapshot: &SnapshotRef) -> bool {
        self.version == 1 && self.key == snapshot.key && self.sha256 == snapshot.sha256
    }
}

pub fn remove(layout: &Layout) -> Result<(), FileError> {
    fsx::remove_if_exists(&path(layout))
}
