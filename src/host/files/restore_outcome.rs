//! Outcome of restoring the owner's files, read by later boots and other programs.

use std::fs;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use svc_base::clock;
use svc_base::fsx::{self, FileError};
use svc_base::quantity::pluralize;

use crate::system::layout::Layout;

pub(super) const FORMAT_VERSION: u32 = 1;

/// Restore outcome, as stored in `/var/lib/svc/files/restored.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RestoreOutcome {
    pub(super) version: u32,
    #[serde(with = "clock::wire")]
    pub ended_at: Timestamp,
    /// The restored snapshot; `None` if there was none or it couldn't be restored.
    pub snapshot: Option<String>,
    /// The time up to which the snapshot contains all changes.
    #[serde(with = "clock::wire_option")]
    pub taken_at: Option<Timestamp>,
    pub files: u64,
    pub bytes: u64,
    /// Number of entries whose owner, mode, times or xattrs couldn't be set.
    pub incomplete: u64,
    /// Number of corrupt files that were skipped and corrupt directories that were restored empty.
    #[serde(default)]
    pub damaged: u64,
    /// Paths of the first few corrupt entries.
    #[serde(default)]
    pub damaged_paths: Vec<String>,
    /// Reason the snapshot wasn't restored, if any.
    pub error: Option<String>,
    /// Whether an operator abandoned the restore.
    #[serde(default)]
    pub is_given_up: bool,
}

impl RestoreOutcome {
    /// An outcome without any restored files.
    pub(super) fn nothing() -> Self {
        Self { version: FORMAT_VERSION, ended_at: clock::now_ms(), ..Self::default() }
    }

    /// An outcome for files not restored because of `error`.
    pub(super) fn failed(error: String) -> Self {
        Self { version: FORMAT_VERSION, ended_at: clock::now_ms(), error: Some(error), ..Self::default() }
    }

    /// Reads the recorded outcome; `None` if there is none or the file is invalid.
    ///
    /// # Errors
    /// If the file exists but cannot be read.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&layout.files_restore_outcome())?;
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    pub(super) fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let dir = layout.files_state();
        fs::create_dir_all(&dir).map_err(FileError::wrap("create", &dir))?;
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::write_atomic(&layout.files_restore_outcome(), &text, 0o644)
    }

    /// Describes the restore for the log.
    pub(super) fn describe(&self) -> String {
        match (&self.snapshot, self.taken_at) {
            (Some(_), Some(at)) => {
                let files = pluralize(self.files, "file");
                let restored = format!("restored {files} as of {}", clock::rfc3339_ms(at));
                if self.damaged == 0 {
                    return restored;
                }
                let damaged = pluralize(self.damaged, "damaged item");
                let named = self.damaged_paths.join(", ");
                format!("{restored}, without the content of {damaged}: {named}")
            }
            _ => "no files were restored: there is no file backup from an earlier machine".to_owned(),
        }
    }
}
