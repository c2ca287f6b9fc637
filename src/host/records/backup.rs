//! Types that all lines of `backup.jsonl` use, and the function that appends a line.

use serde::{Deserialize, Serialize};
use svc_base::fsx::FileError;

use super::jsonl;
use crate::system::layout::Layout;

/// The data that a backup contains.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackupKind {
    /// Also assumed for lines without a kind, which earlier releases wrote.
    #[default]
    Database,
    Files,
}

/// The outcome of a backup or of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Success,
    Error,
}

/// Appends a line. The programs that back up the database and the files may do so at the same time.
///
/// # Errors
/// See [`jsonl::append_line`].
pub fn append(layout: &Layout, line: &[u8]) -> Result<(), FileError> {
    jsonl::append_line(&layout.logs().join("backup.jsonl"), line)
}
