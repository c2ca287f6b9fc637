//! Update files that other programs read or write: the request, the wait for a snapshot, and the outcome that the
//! heartbeat reports.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::system::layout::Layout;
use svc_base::fsx::{self, FileError};
use svc_http::request_id;
use svc_machine::name::ImageVersion;

/// The format version of `releases.json`, `history.jsonl` and `last.json`.
pub const FORMAT_VERSION: u32 = 1;

/// The request file, as the gateway and the sync agent write it.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UpdateRequest {
    pub image_version: ImageVersion,
    #[serde(with = "svc_base::clock::wire")]
    pub requested_at: Timestamp,
    request_id: String,
}

impl UpdateRequest {
    /// Creates an update request with the current request id.
    pub fn new(image_version: ImageVersion) -> Self {
        Self::with_request_id(request_id::current(), image_version)
    }

    /// Creates an update request with the given request id.
    pub fn with_request_id(request_id: String, image_version: ImageVersion) -> Self {
        Self { image_version, requested_at: svc_base::clock::now_ms(), request_id }
    }

    /// Writes the request; the run that serves it removes the file.
    pub fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::write_atomic(&layout.request("update"), &text, 0o600)
    }
}

/// An update's wait for a database snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotWait {
    #[serde(with = "svc_base::clock::wire")]
    pub since: Timestamp,
    /// The reason the last attempt failed; empty during the first attempt.
    pub why: String,
}

impl SnapshotWait {
    /// Reads the open update's wait, with the update's target release; `None` if no update is waiting, or the journal
    /// cannot be parsed.
    ///
    /// # Errors
    /// [`FileError`] if the journal exists and cannot be read.
    pub fn read(layout: &Layout) -> Result<Option<(ImageVersion, Self)>, FileError> {
        #[derive(Deserialize)]
        struct OpenUpdate {
            to: ImageVersion,
            waiting: Option<SnapshotWait>,
        }
        let text = fsx::read_if_exists(&layout.update_journal())?;
        let update: Option<OpenUpdate> = text.and_then(|text| serde_json::from_slice(&text).ok());
        Ok(update.and_then(|update| Some((update.to, update.waiting?))))
    }

    /// Describes the wait: `has been waiting for a snapshot since …`, and the reason the last attempt failed.
    pub fn describe(&self) -> String {
        let since = svc_base::clock::rfc3339_ms(self.since);
        let reason = if self.why.is_empty() { String::new() } else { format!(": {}", self.why) };
        format!("has been waiting for a snapshot since {since}{reason}")
    }
}

/// How an update ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UpdateResult {
    /// The release is running and healthy.
    Updated,
    /// The switch failed or the release was unhealthy; the previous one is running again and healthy.
    RolledBack,
    /// The release was rejected, or a policy forbade the update; nothing was changed.
    Refused,
    /// A step before the switch failed and nothing was changed; or the rollback failed, and the machine needs an
    /// operator.
    Failed,
}

/// An update's result and details, as recorded in `last.json` and `history.jsonl`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Outcome {
    /// The target release.
    pub version: ImageVersion,
    pub outcome: UpdateResult,
    /// The stage that failed, or `done`.
    pub stage: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(with = "svc_base::clock::wire")]
    pub at: Timestamp,
}

impl Outcome {
    /// Describes the outcome for `activity.log` and the terminal.
    pub fn describe(&self, from: &ImageVersion) -> String {
        let Self { version, stage, .. } = self;
        let error = self.error.as_deref().unwrap_or("unknown error");
        match self.outcome {
            UpdateResult::Updated => format!("the machine was updated from {from} to {version}"),
            UpdateResult::RolledBack => {
                format!("the update to {version} was rolled back to {from} ({stage}): {error}")
            }
            UpdateResult::Refused => format!("the update to {version} was refused ({stage}): {error}"),
            UpdateResult::Failed => format!("the update to {version} failed ({stage}): {error}"),
        }
    }
}

/// The outcome of the last update, with its request id.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LastUpdate {
    #[serde(flatten)]
    pub outcome: Outcome,
    #[serde(default)]
    pub request_id: Option<String>,
}

/// Reads the outcome of the last update; `None` if the file does not exist or cannot be parsed.
///
/// # Errors
/// [`FileError`] if the file exists and cannot be read.
pub fn read_last(layout: &Layout) -> Result<Option<LastUpdate>, FileError> {
    Ok(fsx::read_if_exists(&layout.last_update())?.and_then(|text| serde_json::from_slice(&text).ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn describe_omits_reason_during_first_attempt() {
        let wait =
            |reason: &str| SnapshotWait { since: Timestamp::UNIX_EPOCH, why: reason.to_owned() }.describe();
        assert!(wait("").ends_with("since 1970-01-01T00:00:00.000Z"), "{}", wait(""));
        assert!(wait("no space").ends_with("00.000Z: no space"), "{}", wait("no space"));
    }
}
