//! The stages of a backup run.

use serde::Serialize;

/// A stage of a backup run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Stage {
    /// Checks whether a backup is permitted: the machine has not been replaced or deleted, its restore is complete,
    /// and the database is the one that it serves.
    Gate,
    /// Opens the transaction snapshot.
    Snapshot,
    /// Dumps the database, and verifies and uploads the dump.
    Dump,
    /// Completes the upload, so that the object appears.
    Upload,
    /// Writes the sidecar. Records still use the stage's former name.
    #[serde(rename = "sideRecord")]
    Sidecar,
    /// Moves the pointer, unless the snapshot is held back.
    Pointer,
    /// The snapshot is the latest; replaced databases are dropped when due.
    Done,
}

impl Stage {
    /// Returns the stage's name in records.
    pub fn name(self) -> String {
        let name = serde_json::to_value(self).ok();
        name.and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
    }
}
