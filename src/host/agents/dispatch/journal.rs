//! Dispatches that are accepted and not recorded yet: after a crash those that waited go on waiting, and those that ran are
//! recorded as cut off. Nothing that was accepted is forgotten.
//!
//! Each has a file of its own, `ID.json`. A batch is accepted whole or not at all, so that it has one, `ID.batch`, beside
//! those of its entries that have begun. On a disk without room for that an `ID.begun` without content says that one has.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use serde::de::DeserializeOwned;
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

/// Which file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Of {
    One(String),
    Batch(String),
}

/// The directory of those files.
#[derive(Debug, Clone)]
pub struct Journal(PathBuf);

impl Journal {
    pub fn new(dir: PathBuf) -> Self {
        Self(dir)
    }

    fn path(&self, of: &Of) -> PathBuf {
        match of {
            Of::One(id) => self.0.join(format!("{id}.json")),
            Of::Batch(id) => self.0.join(format!("{id}.batch")),
        }
    }

    /// One, or all of a batch.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn write(&self, all: &[Kept]) -> Result<(), FileError> {
        let (of, text) = match all {
            [] => return Ok(()),
            [one] => (Of::One(one.id.clone()), serde_json::to_vec(one)),
            [first, ..] => {
                let batch = first.batch.as_ref().map_or(&first.id, |batch| &batch.id);
                (Of::Batch(batch.clone()), serde_json::to_vec(all))
            }
        };
        fsx::write_atomic(&self.path(&of), &text.expect("plain fields are JSON"), 0o600)
    }

    /// That its agent is started, by a name alone, which needs no room. False: not even that could be kept, and after a
    /// crash it would be started again.
    pub fn mark_begun(&self, one: &Kept) -> bool {
        let mark = self.mark(&one.id);
        let marked = std::fs::File::create(&mark).and_then(|file| file.sync_all());
        let marked = marked.map_err(FileError::at("create", &mark)).and_then(|()| fsx::sync_dir(&self.0));
        let Err(error) = marked else { return true };
        tracing::warn!(error = %chain(&error), "it cannot be kept that a dispatch is started");
        !self.may_be_of(&one.id)
    }

    /// Whether there is a file that would say what the mark of this id is of, if it could be read.
    fn may_be_of(&self, id: &str) -> bool {
        let batch = id.rsplit_once('.').map(|(batch, _)| Of::Batch(batch.to_owned()));
        [Some(Of::One(id.to_owned())), batch].iter().flatten().any(|of| self.path(of).exists())
    }

    fn mark(&self, id: &str) -> PathBuf {
        self.0.join(format!("{id}.begun"))
    }

    /// It is recorded, or was never accepted.
    pub fn remove(&self, of: &Of) {
        let mark = if let Of::One(id) = of { fsx::remove_if_exists(&self.mark(id)) } else { Ok(()) };
        if let Err(error) = fsx::remove_if_exists(&self.path(of)).and(mark) {
            tracing::warn!(error = %chain(&error), "a dispatch that has ended is still in the journal");
        }
    }

    /// All that is there, in the order in which it was accepted. A file that is none of ours, or cannot be read, is left
    /// and said. Before anything is written.
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
        let mut found: BTreeMap<String, Kept> = BTreeMap::new();
        let mut begun = Vec::new();
        for entry in entries {
            let path = entry.map_err(FileError::at("read", &self.0))?.path();
            match path.extension().and_then(OsStr::to_str) {
                // What it has come to is later than what its batch says of it.
                Some("json") => found.extend(kept::<Kept>(&path).map(|kept| (kept.id.clone(), kept))),
                Some("batch") => {
                    for kept in kept::<Vec<Kept>>(&path).into_iter().flatten() {
                        found.entry(kept.id.clone()).or_insert(kept);
                    }
                }
                Some("begun") => begun.push(path),
                _ => {}
            }
        }
        for mark in begun {
            let id = mark.file_stem().and_then(OsStr::to_str).unwrap_or_default();
            match found.get_mut(id) {
                Some(kept) => kept.started_at = kept.started_at.or_else(|| Some(written_at(&mark))),
                None if self.may_be_of(id) => {}
                // What it was of was never accepted for certain, or is recorded.
                None => {
                    if let Err(error) = fsx::remove_if_exists(&mark) {
                        tracing::warn!(error = %chain(&error), "a mark of a dispatch stays in the journal");
                    }
                }
            }
        }
        let mut all: Vec<Kept> = found.into_values().filter(|kept| kept.version == Kept::VERSION).collect();
        all.sort_by(|a, b| (a.accepted_at, index(a), &a.id).cmp(&(b.accepted_at, index(b), &b.id)));
        Ok(all)
    }
}

fn index(kept: &Kept) -> usize {
    kept.batch.as_ref().map_or(0, |batch| batch.index)
}

fn written_at(mark: &Path) -> Timestamp {
    let written = std::fs::metadata(mark).and_then(|meta| meta.modified());
    written.ok().and_then(|at| Timestamp::try_from(at).ok()).unwrap_or_else(clock::now_ms)
}

fn kept<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let text = fsx::read_if_exists(path).unwrap_or_else(|error| {
        tracing::error!(error = %chain(&error), "a dispatch of the journal cannot be read; it is left");
        None
    })?;
    let kept = serde_json::from_slice(&text);
    if kept.is_err() {
        tracing::warn!(path = %path.display(), "this is no dispatch that this release knows; it is left");
    }
    kept.ok()
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

    /// An entry of the batch `b`.
    fn entry(index: usize, of: usize) -> Kept {
        let one = dispatch(&format!("b.{index}"), "2026-11-22T10:00:00.000Z");
        Kept { batch: Some(Place { id: "b".to_owned(), index, of }), ..one }
    }

    fn journal() -> (tempfile::TempDir, Journal) {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::new(dir.path().join("dispatches"));
        (dir, journal)
    }

    #[test]
    fn what_is_kept_comes_back_in_its_order() {
        let (dir, journal) = journal();
        assert_eq!(journal.read().unwrap(), []);
        let (late, early) =
            (dispatch("a", "2026-11-22T10:00:01.000Z"), dispatch("b", "2026-11-22T10:00:00.000Z"));
        let started = Kept { started_at: Some("2026-11-22T10:00:02.000Z".parse().unwrap()), ..late.clone() };
        for kept in [&late, &early, &started] {
            journal.write(std::slice::from_ref(kept)).unwrap();
        }
        std::fs::write(dir.path().join("dispatches/torn.json"), "{\"version\": 1").unwrap();
        assert_eq!(journal.read().unwrap(), [early, started]);
        for _ in 0..2 {
            journal.remove(&Of::One("a".to_owned()));
        }
        assert_eq!(journal.read().unwrap().len(), 1);
    }

    #[test]
    fn one_that_began_without_room_to_say_so_has_begun_all_the_same() {
        let (dir, journal) = journal();
        let entry = |index| entry(index, 2);
        let one = dispatch("a", "2026-11-22T10:00:01.000Z");
        journal.write(std::slice::from_ref(&one)).unwrap();
        journal.write(&[entry(0), entry(1)]).unwrap();
        assert!(journal.mark_begun(&one) && journal.mark_begun(&entry(1)));
        assert!(journal.mark_begun(&dispatch("nobody", "2026-11-22T10:00:01.000Z")));
        std::fs::create_dir(dir.path().join("dispatches/unreadable.json")).unwrap();
        std::fs::write(dir.path().join("dispatches/unreadable.begun"), "").unwrap();
        let begun: Vec<bool> = journal.read().unwrap().iter().map(|kept| kept.started_at.is_some()).collect();
        assert_eq!(begun, [false, true, true]);
        journal.remove(&Of::One("a".to_owned()));
        journal.remove(&Of::One("b.1".to_owned()));
        assert_eq!(
            std::fs::read_dir(dir.path().join("dispatches")).unwrap().count(),
            3,
            "the batch, the unreadable"
        );
        // Where there is no room for a name either, what would be started again is not started.
        std::fs::create_dir(dir.path().join("dispatches/b.0.begun")).unwrap();
        std::fs::create_dir(dir.path().join("dispatches/gone.begun")).unwrap();
        assert!(!journal.mark_begun(&entry(0)));
        assert!(journal.mark_begun(&dispatch("gone", "2026-11-22T10:00:01.000Z")));
    }

    #[test]
    fn a_batch_is_one_file_and_what_its_entries_came_to_counts() {
        let (_dir, journal) = journal();
        let entry = |index| entry(index, 12);
        let all: Vec<Kept> = (0..12).map(entry).collect();
        journal.write(&all).unwrap();
        assert_eq!(journal.read().unwrap(), all, "in the order of their numbers");
        let started = Kept { started_at: Some("2026-11-22T10:00:02.000Z".parse().unwrap()), ..entry(2) };
        journal.write(std::slice::from_ref(&started)).unwrap();
        assert_eq!(journal.read().unwrap()[2], started);
        journal.remove(&Of::Batch("b".to_owned()));
        assert_eq!(journal.read().unwrap(), [started]);
    }
}
