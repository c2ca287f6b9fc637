//! The state of the file backup, for the heartbeat, `svc-doctor` and the operator. The service writes it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::system::layout::Layout;
use svc_base::clock;
use svc_base::fsx::{self, FileError};

const FORMAT: u32 = 1;
const FILE: &str = "status.json";

/// The content of `/var/lib/svc/files/status.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FilesStatus {
    version: u32,
    /// Everything that was written before this time is in the store.
    #[serde(with = "clock::wire_option")]
    pub saved_until: Option<Timestamp>,
    /// When the first change was seen that is not in the store yet.
    #[serde(with = "clock::wire_option")]
    pub changed_since: Option<Timestamp>,
    /// The latest snapshot's id.
    pub snapshot: Option<String>,
    /// The counts of the last save of the whole home.
    pub files: u64,
    pub bytes: u64,
    pub excluded: u64,
    pub special: u64,
    /// Entries of the last save that could not be read.
    pub unreadable: u64,
    pub first_unreadable: Option<String>,
    /// Files of the last save that changed whenever they were read.
    pub unstable: u64,
    /// Why the last save failed; `None` if it succeeded.
    pub error: Option<String>,
    #[serde(with = "clock::wire_option")]
    pub failing_since: Option<Timestamp>,
}

impl FilesStatus {
    /// Reads the file; `None` if there is none, or if another version wrote it.
    ///
    /// # Errors
    /// If the file exists and cannot be read.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&layout.files_state().join(FILE))?;
        let status = text.and_then(|text| serde_json::from_slice::<Self>(&text).ok());
        Ok(status.filter(|status| status.version == FORMAT))
    }

    /// # Errors
    /// If the file cannot be written.
    pub fn write(&mut self, layout: &Layout) -> Result<(), FileError> {
        self.version = FORMAT;
        let dir = layout.files_state();
        std::fs::create_dir_all(&dir).map_err(FileError::wrap("create", &dir))?;
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::write_atomic(&dir.join(FILE), &text, 0o644)
    }
}
