//! The stages of a backup run.

use serde::Serialize;

/// A stage of a backup run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Stage {
    /// Checks that a backup is allowed: the machine hasn't been replaced or deleted, its restore is complete, and this
    /// is the database it serves.
    Gate,
    /// Opens the transaction snapshot.
    Snapshot,
    /// Dumps the database, and verifies and uploads the dump.
    Dump,
    /// Completes the upload, which makes the object visible.
    Upload,
    /// Writes the sidecar. Records still use the old stage name.
    #[serde(rename = "sideRecord")]
    Sidecar,
    /// Moves the pointer, unless the snapshot is held back.
    Pointer,
    /// The snapshot is the latest; replaced databases are dropped when due.
    Done,
}

impl Stage {
    /// Returns the stage name as it appears in records.
    pub fn name(self) -> String {
        let name = serde_json::to_value(self).ok();
        name.and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
    }
}
