//! How an update ended, as the machine keeps it and the heartbeat tells it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::fsx::{self, FileError};
use crate::host::layout::Layout;
use crate::machine::name::ImageVersion;

/// What became of an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The release runs and is well.
    Updated,
    /// It was not well; the one before runs again and is well.
    RolledBack,
    /// Nothing was changed, by a rule.
    Refused,
    /// Nothing was changed, or the machine needs somebody.
    Failed,
}

/// The outcome of one update.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Outcome {
    /// The release that was asked for.
    pub version: ImageVersion,
    pub outcome: End,
    /// How far it came.
    pub stage: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(with = "crate::clock::wire")]
    pub at: Timestamp,
}

/// The last one, if there was one that can be read.
///
/// # Errors
/// When the file is there and cannot be read.
pub fn last(layout: &Layout) -> Result<Option<Outcome>, FileError> {
    Ok(fsx::read_if_there(&layout.last_update())?.and_then(|text| serde_json::from_slice(&text).ok()))
}
