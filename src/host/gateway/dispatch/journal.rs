//! Dispatches that are accepted and not recorded yet, one file for each: after a crash those that waited go on waiting,
//! and those that ran are recorded as cut off. Nothing that was accepted is forgotten.

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::request::Entry;
use crate::chain::chain;
use crate::clock;
use crate::fsx::{self, FileError};
use crate::host::records::entry::Interaction;

/// Where in its batch a dispatch stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    pub id: String,
    pub index: usize,
    /// Entries of the batch.
    pub of: usize,
}

/// What is kept of a dispatch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Kept {
    pub version: u32,
    pub id: String,
    pub sender_id: String,
    #[serde(flatten)]
    pub entry: Entry,
    pub batch: Option<Place>,
    pub fingerprint: String,
    #[serde(with = "clock::wire")]
    pub accepted_at: Timestamp,
    /// When its agent was started.
    #[serde(default, with = "clock::wire_option")]
    pub started_at: Option<Timestamp>,
    /// How it ended, while it is not certain that the record has it.
    #[serde(default)]
    pub ended: Option<Interaction>,
}

impl Kept {
    pub const VERSION: u32 = 1;
}

/// The directory of those files.
#[derive(Debug, Clone)]
pub struct Journal(PathBuf);

impl Journal {
    pub fn new(dir: PathBuf) -> Self {
        Self(dir)
    }

    fn path(&self, id: &str) -> PathBuf {
        self.0.join(format!("{id}.json"))
    }

    /// # Errors
    /// [`FileError`].
    pub fn write(&self, kept: &Kept) -> Result<(), FileError> {
        let text = serde_json::to_vec(kept).expect("plain fields are JSON");
        fsx::write_atomic(&self.path(&kept.id), &text, 0o600)
    }

    /// It is recorded, or was never accepted.
    pub fn remove(&self, id: &str) {
        if let Err(error) = fsx::remove_if_there(&self.path(id)) {
            tracing::warn!(error = %chain(&error), "a dispatch that has ended is still in the journal");
        }
    }

    /// All that is there, in the order in which it was accepted. A file that is none of ours is left and said. Before
    /// anything is written.
    ///
    /// # Errors
    /// [`FileError`], where there is a journal and it cannot be read.
    pub fn read(&self) -> Result<Vec<Kept>, FileError> {
        let entries = match std::fs::read_dir(&self.0) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(FileError::at("read", &self.0))?,
        };
        // Nobody writes here yet.
        fsx::remove_torn_in(&self.0, |_| true)?;
        let mut all = Vec::new();
        for entry in entries {
            let path = entry.map_err(FileError::at("read", &self.0))?.path();
            if path.extension().is_some_and(|ending| ending == "json") {
                all.extend(kept(&path)?);
            }
        }
        all.sort_by(|a, b| (a.accepted_at, index(a), &a.id).cmp(&(b.accepted_at, index(b), &b.id)));
        Ok(all)
    }
}

fn index(kept: &Kept) -> usize {
    kept.batch.as_ref().map_or(0, |batch| batch.index)
}

fn kept(path: &Path) -> Result<Option<Kept>, FileError> {
    let Some(text) = fsx::read_if_there(path)? else { return Ok(None) };
    match serde_json::from_slice::<Kept>(&text) {
        Ok(kept) if kept.version == Kept::VERSION => Ok(Some(kept)),
        _ => {
            tracing::warn!(path = %path.display(), "this is no dispatch that this release knows; it is left");
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dispatch(id: &str, at: &str) -> Kept {
        Kept {
            version: Kept::VERSION,
            id: id.to_owned(),
            sender_id: "u".to_owned(),
            entry: Entry {
                agent_name: "a".to_owned(),
                model: None,
                conversation_id: None,
                prompt: "do it".to_owned(),
                deadline_seconds: 60,
            },
            batch: None,
            fingerprint: "f".to_owned(),
            accepted_at: at.parse().unwrap(),
            started_at: None,
            ended: None,
        }
    }

    #[test]
    fn what_is_kept_comes_back_in_its_order() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::new(dir.path().join("dispatches"));
        assert_eq!(journal.read().unwrap(), []);
        let (late, early) =
            (dispatch("a", "2026-11-22T10:00:01.000Z"), dispatch("b", "2026-11-22T10:00:00.000Z"));
        let started = Kept { started_at: Some("2026-11-22T10:00:02.000Z".parse().unwrap()), ..late.clone() };
        for kept in [&late, &early, &started] {
            journal.write(kept).unwrap();
        }
        std::fs::write(dir.path().join("dispatches/torn.json"), "{\"version\": 1").unwrap();
        assert_eq!(journal.read().unwrap(), [early, started]);
        journal.remove("a");
        journal.remove("a");
        assert_eq!(journal.read().unwrap().len(), 1);
    }
}
