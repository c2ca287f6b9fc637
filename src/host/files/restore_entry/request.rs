//! The restore request file and the state file written by the service.

use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use svc_base::clock;
use svc_base::fsx::{self, FileError};
use svc_base::quantity::pluralize;
use svc_files::restore::DamagedEntries;
use svc_wire::files::{FileRestore, FileRestoreStatus};

use crate::files::home_path::HomePath;
use crate::system::layout::Layout;

/// Request file name, in the requests directory.
const REQUEST_FILE: &str = "files-restore";
/// State file name, in the file-backup state directory.
const STATE_FILE: &str = "entry-restore.json";

/// Entry restore request, as stored in the request file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RestoreRequest {
    pub request_id: String,
    #[serde(with = "clock::wire")]
    pub requested_at: Timestamp,
    /// The entry to restore, as formatted by [`HomePath`].
    pub path: String,
    /// Restore from the last snapshot at or before this time, by default the request time. Later times are treated as
    /// the request time unless they exactly match a snapshot.
    #[serde(with = "clock::wire_option", default)]
    pub time: Option<Timestamp>,
    /// Where to restore the entry. Defaults to its original path or, if that exists and is not replaced, a new name
    /// next to it.
    pub into: Option<String>,
    /// Whether to replace an existing entry. It is saved first and kept under another name.
    pub replace: bool,
    /// Number of restore attempts started.
    #[serde(default)]
    pub attempts: u32,
}

impl RestoreRequest {
    /// Creates a request with a new id. The HTTP request id is unsuitable, since clients may reuse it.
    pub fn new(path: String, time: Option<Timestamp>, into: Option<String>, replace: bool) -> Self {
        let (request_id, requested_at) = (uuid::Uuid::now_v7().to_string(), clock::now_ms());
        Self { request_id, requested_at, path, time, into, replace, attempts: 0 }
    }

    /// Replaces the id with one derived from an idempotency key and the request's fields, so that a retried request
    /// gets the same id.
    #[must_use]
    pub fn with_idempotency_key(self, key: &str) -> Self {
        let request = format!("{:?}", (&self.path, self.time, &self.into, self.replace));
        Self { request_id: format!("{}-{}", hash_text(key), hash_text(&request)), ..self }
    }

    /// Whether `request_id` was derived from the same idempotency key as this request, which must have one.
    pub fn has_same_idempotency_key(&self, request_id: &str) -> bool {
        let key = |id: &str| id.split('-').next().map(str::to_owned);
        key(&self.request_id) == key(request_id)
    }

    /// Writes the request file. Returns `false` if a request is already pending.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn submit(&self, layout: &Layout) -> Result<bool, FileError> {
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::create_atomic(&layout.request(REQUEST_FILE), &text, 0o600)
    }

    /// Durably counts an attempt before it starts, since a killed run can't record its own failure.
    pub(super) fn start_attempt(&mut self, layout: &Layout) -> Result<(), FileError> {
        self.attempts += 1;
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::write_atomic(&layout.request(REQUEST_FILE), &text, 0o600)
    }

    /// Reads the pending request. The inner error is a parse failure, so retrying is pointless.
    ///
    /// # Errors
    /// If the file exists but cannot be read.
    pub(super) fn read(layout: &Layout) -> Result<Option<Result<Self, serde_json::Error>>, FileError> {
        let text = fsx::read_if_exists(&layout.request(REQUEST_FILE))?;
        Ok(text.map(|text| serde_json::from_slice(&text)))
    }

    pub(super) fn remove(layout: &Layout) -> Result<(), FileError> {
        fsx::remove_if_exists(&layout.request(REQUEST_FILE))
    }

    /// Returns the initial state of a request not yet served.
    pub(super) fn to_state(&self) -> FileRestore {
        FileRestore {
            request_id: self.request_id.clone(),
            status: FileRestoreStatus::Pending,
            path: self.path.clone(),
            requested_at: self.requested_at.into(),
            saved_at: None,
            restored_to: None,
            kept_as: None,
            files: 0,
            total_bytes: 0,
            written_bytes: 0,
            incomplete: 0,
            error: None,
            // Not the current time: clients take an unchanged state to mean that the restore is stuck.
            updated_at: self.requested_at.into(),
        }
    }

    /// Describes the final state of the request.
    pub(super) fn describe_result(&self, state: &FileRestore) -> String {
        let error = state.error.as_deref();
        let Some(restored_to) = &state.restored_to else {
            let reason = error.unwrap_or("the reason is unknown");
            return format!("{} could not be restored: {reason}", self.path);
        };
        let at = state.saved_at.as_ref().map_or("an unknown time", |at| at.as_str());
        let kept_note = state
            .kept_as
            .as_ref()
            .map_or_else(String::new, |path| format!("; the replaced entry is now {path}"));
        let damage_note = error.map_or_else(String::new, |error| format!("; {error}"));
        format!("restored {} as it was at {at} to {restored_to}{kept_note}{damage_note}", self.path)
    }
}

/// Describes corrupt entries below a restored directory, if any.
pub(super) fn describe_damaged(directory: &HomePath, damaged: &DamagedEntries) -> Option<String> {
    let first = damaged.first_paths.iter().map(|staged| {
        // The first component is the directory's name in the staging directory.
        let relative: PathBuf = staged.components().skip(1).collect();
        HomePath::from_relative(directory.as_path().join(relative)).to_line()
    });
    let names = first.collect::<Vec<_>>().join(", ");
    let items = pluralize(damaged.count, "damaged item");
    (damaged.count > 0).then(|| format!("the content of {items} was left out: {names}"))
}

fn hash_text(text: &str) -> String {
    hex::encode(&Sha256::digest(text)[..16])
}

/// Returns the state of the pending request, or else the last one. `None` if there has never been a request, or if the
/// state file is invalid.
///
/// # Errors
/// If a file exists but cannot be read.
pub fn read_current_state(layout: &Layout) -> Result<Option<FileRestore>, FileError> {
    // Read the request first: it is removed only after the final state has been written.
    let request = RestoreRequest::read(layout)?.and_then(Result::ok);
    let state = read_state(layout)?;
    Ok(match request {
        Some(request) if state.as_ref().is_none_or(|state| state.request_id != request.request_id) => {
            Some(request.to_state())
        }
        _ => state,
    })
}

pub(super) fn read_state(layout: &Layout) -> Result<Option<FileRestore>, FileError> {
    let text = fsx::read_if_exists(&layout.files_state().join(STATE_FILE))?;
    Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
}

/// Writes the state file, updating its timestamp.
///
/// # Errors
/// If the file cannot be written.
pub(super) fn write_state(layout: &Layout, state: &mut FileRestore) -> Result<(), FileError> {
    state.updated_at = clock::now_ms().into();
    let text = serde_json::to_vec(state).expect("plain fields serialize to JSON");
    fsx::write_atomic(&layout.files_state().join(STATE_FILE), &text, 0o600)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_is_constant_until_request_is_served() {
        let requested_at = Timestamp::UNIX_EPOCH;
        let request =
            RestoreRequest { requested_at, ..RestoreRequest::new("a".to_owned(), None, None, false) };
        let state = request.to_state();
        assert_eq!(state.updated_at, state.requested_at);
    }
}
