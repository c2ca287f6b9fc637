//! What an update has come to, on disk: written before each step, so that whoever comes after a kill goes on from there.
//!
//! The file is there exactly while an update is open. The invariant: one update is open at a time, under the lock.

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::protocol::SnapshotWait;
use super::state::{Event, State};
use crate::fsx::{self, FileError};
use crate::host::system::layout::Layout;
use crate::machine::name::ImageVersion;
use crate::store::bundle::KeySet;

const FORMAT: u32 = 1;
/// How often one step is taken up again.
const MOST_ATTEMPTS: u32 = 5;

#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error("{} is not a journal that this program can read: {why}", .path.display())]
    Unreadable { path: PathBuf, why: String },
    #[error(transparent)]
    File(#[from] FileError),
}

/// What is to become current.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Aim {
    /// A release that is brought.
    Apply,
    /// The release before, which is here.
    Rollback,
}

/// Rules that an operator on the machine may lift.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Allowances {
    pub downgrade: bool,
    pub quarantined: bool,
}

/// What an update is to do, and what it found when it began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    pub aim: Aim,
    pub from: ImageVersion,
    pub to: ImageVersion,
    pub allow: Allowances,
    /// Services that ran when it began: they must run when it ends.
    pub running: Vec<String>,
    /// Whether the gateway was ready then. Where it was not, being alive is enough.
    pub was_ready: bool,
    pub request_id: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Journal {
    version: u32,
    pub id: Uuid,
    #[serde(flatten)]
    pub plan: Plan,
    #[serde(with = "crate::clock::wire")]
    pub started_at: Timestamp,
    /// Of the state that it is in.
    attempts: u32,
    pub state: State,
    /// Why there is no snapshot yet, while the update waits for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<SnapshotWait>,
    /// What is trusted once the release is well, by its verified manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_set: Option<KeySet>,
}

impl Journal {
    pub fn open(plan: Plan, started_at: Timestamp) -> Self {
        Self {
            version: FORMAT,
            id: Uuid::now_v7(),
            plan,
            started_at,
            attempts: 0,
            state: State::Preparing,
            waiting: None,
            key_set: None,
        }
    }

    /// The update that is open, if one is.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn read(layout: &Layout) -> Result<Option<Self>, JournalError> {
        let path = layout.update_journal();
        let Some(text) = fsx::read_if_there(&path)? else { return Ok(None) };
        parse(&path, &text).map(Some)
    }

    /// # Errors
    /// [`FileError`].
    pub fn save(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec_pretty(self).expect("plain fields are JSON");
        fsx::write_atomic(&layout.update_journal(), &text, 0o644)
    }

    /// Counts that its step is taken up; `false` when that was often enough.
    #[must_use]
    pub fn take_up(&mut self) -> bool {
        self.attempts += 1;
        self.state.has_ended() || self.attempts <= MOST_ATTEMPTS
    }

    #[must_use]
    pub fn after(self, event: Event) -> Self {
        Self { attempts: 0, state: self.state.clone().after(event), waiting: None, ..self }
    }
}

fn parse(path: &Path, text: &[u8]) -> Result<Journal, JournalError> {
    let unreadable = |why: String| JournalError::Unreadable { path: path.to_owned(), why };
    let journal: Journal = serde_json::from_slice(text).map_err(|why| unreadable(why.to_string()))?;
    if journal.version != FORMAT {
        return Err(unreadable(format!("its format is {}", journal.version)));
    }
    Ok(journal)
}
