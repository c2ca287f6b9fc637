//! Shared types for `backup.jsonl` entries, and a function to append them.

use serde::{Deserialize, Serialize};
use svc_base::fsx::FileError;

use super::jsonl;
use crate::system::layout::Layout;

/// Kind of data in a backup.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackupKind {
    /// Default for lines without a kind, as written by earlier releases.
    #[default]
    Database,
    Files,
}

/// Outcome of a backup or check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Success,
    Error,
}

/// Appends a line. The database and file backup programs may append concurrently.
///
/// # Errors
/// See [`jsonl::append_line`].
pub fn append(layout: &Layout, line: &[u8]) -> Result<(), FileError> {
    jsonl::append_line(&layout.logs().join("backup.jsonl"), line)
}
