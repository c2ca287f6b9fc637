//! An update's journal, on disk. It is written before each step, so that the next run resumes an interrupted update.
//!
//! The file exists only while an update is open. The lock in the same directory ensures that at most one update is
//! open.

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::protocol::SnapshotWait;
use super::state::{Event, State};
use crate::system::layout::Layout;
use svc_base::fsx::{self, FileError};
use svc_machine::name::ImageVersion;
use svc_store::bundle::KeySet;

const FORMAT_VERSION: u32 = 1;
/// Maximum number of attempts per step. A step is attempted again only if a run was interrupted.
const MAX_ATTEMPTS: u32 = 5;

#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error("cannot read the journal {}: {reason}", .path.display())]
    Unreadable { path: PathBuf, reason: String },
    #[error(transparent)]
    File(#[from] FileError),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum UpdateKind {
    /// Makes the release in a signed manifest current; it is fetched unless it is already installed.
    Apply,
    /// Returns to the previous release, which is still installed.
    Rollback,
}

/// The policies that an operator on the machine has waived for an update.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Allowances {
    pub downgrade: bool,
    pub quarantined: bool,
    /// Parts that the release may lack.
    #[serde(default)]
    pub removal: Vec<String>,
    /// Do not wait for a snapshot.
    #[serde(default)]
    pub without_snapshot: bool,
}

/// An update's plan, and the state of the machine when the update began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UpdatePlan {
    #[serde(rename = "aim")]
    pub kind: UpdateKind,
    pub from: ImageVersion,
    pub to: ImageVersion,
    pub allow: Allowances,
    /// Services, other than the gateway, that were running when the update began. The health check includes them.
    pub running: Vec<String>,
    /// Whether the gateway was ready when the update began. If it was not, liveness is enough.
    pub was_ready: bool,
    pub request_id: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Journal {
    version: u32,
    pub id: Uuid,
    #[serde(flatten)]
    pub plan: UpdatePlan,
    #[serde(with = "svc_base::clock::wire")]
    pub started_at: Timestamp,
    /// Number of attempts at the current step.
    attempts: u32,
    pub state: State,
    /// The wait for a snapshot, if the update is waiting for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<SnapshotWait>,
    /// The key set from the verified manifest; it is trusted once the release is healthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_set: Option<KeySet>,
}

impl Journal {
    pub fn new(plan: UpdatePlan, started_at: Timestamp) -> Self {
        Self {
            version: FORMAT_VERSION,
            id: Uuid::now_v7(),
            plan,
            started_at,
            attempts: 0,
            state: State::Preparing,
            waiting: None,
            key_set: None,
        }
    }

    /// Reads the journal for the open update, if any.
    pub fn read(layout: &Layout) -> Result<Option<Self>, JournalError> {
        let path = layout.update_journal();
        let Some(text) = fsx::read_if_exists(&path)? else { return Ok(None) };
        parse(&path, &text).map(Some)
    }

    pub fn save(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec_pretty(self).expect("plain fields serialize to JSON");
        fsx::write_atomic(&layout.update_journal(), &text, 0o644)
    }

    /// Counts an attempt at the current step. Returns `false` once the attempts are exhausted. After the update has
    /// ended, attempts to write its records are not limited.
    #[must_use]
    pub fn start_attempt(&mut self) -> bool {
        self.attempts += 1;
        self.state.has_ended() || self.attempts <= MAX_ATTEMPTS
    }

    #[must_use]
    pub fn apply_event(self, event: Event) -> Self {
        Self { attempts: 0, state: self.state.clone().apply_event(event), waiting: None, ..self }
    }
}

fn parse(path: &Path, text: &[u8]) -> Result<Journal, JournalError> {
    let parse_error = |reason: String| JournalError::Unreadable { path: path.to_owned(), reason };
    let journal: Journal = serde_json::from_slice(text).map_err(|error| parse_error(error.to_string()))?;
    if journal.version != FORMAT_VERSION {
        return Err(parse_error(format!("unsupported format {}", journal.version)));
    }
    Ok(journal)
}
