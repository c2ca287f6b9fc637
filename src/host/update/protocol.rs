//! What is shared about updates: how one is asked for, and how the last one ended, as the heartbeat tells it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::fsx::{self, FileError};
use crate::host::system::layout::Layout;
use crate::http::request_id;
use crate::machine::name::ImageVersion;

/// The request file, as gateway and sync agent write it.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    pub image_version: ImageVersion,
    #[serde(with = "crate::clock::wire")]
    pub requested_at: Timestamp,
    request_id: String,
}

impl Request {
    /// For the request of now.
    pub fn new(image_version: ImageVersion) -> Self {
        Self::under(request_id::current(), image_version)
    }

    /// For a request that was made before.
    pub fn under(request_id: String, image_version: ImageVersion) -> Self {
        Self { image_version, requested_at: crate::clock::now_ms(), request_id }
    }

    /// Asks; the unit that serves it removes the file.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields are JSON");
        fsx::write_atomic(&layout.request("update"), &text, 0o600)
    }
}

/// An update that waits for a snapshot of the database.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotWait {
    #[serde(with = "crate::clock::wire")]
    pub since: Timestamp,
    /// Why the last attempt did not succeed; empty while the first one runs.
    pub why: String,
}

impl SnapshotWait {
    /// The wait of the update under way, and the release that it would bring.
    ///
    /// # Errors
    /// When the journal exists and cannot be read.
    pub fn read(layout: &Layout) -> Result<Option<(ImageVersion, Self)>, FileError> {
        #[derive(Deserialize)]
        struct Open {
            to: ImageVersion,
            waiting: Option<SnapshotWait>,
        }
        let text = fsx::read_if_there(&layout.update_journal())?;
        let open: Option<Open> = text.and_then(|text| serde_json::from_slice(&text).ok());
        Ok(open.and_then(|open| Some((open.to, open.waiting?))))
    }
}

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

/// The outcome of the last update, and which request it served.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Last {
    #[serde(flatten)]
    pub outcome: Outcome,
    #[serde(default)]
    pub request_id: Option<String>,
}

/// The last one, if there was one that can be read.
///
/// # Errors
/// When the file is there and cannot be read.
pub fn last(layout: &Layout) -> Result<Option<Last>, FileError> {
    Ok(fsx::read_if_there(&layout.last_update())?.and_then(|text| serde_json::from_slice(&text).ok()))
}
