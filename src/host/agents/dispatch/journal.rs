//! Journal of accepted dispatches that haven't been recorded yet. After a crash, queued dispatches are requeued and
//! running ones are recorded as interrupted, so no accepted dispatch is lost.
//!
//! Each dispatch has its own file, `ID.json`. A batch of several entries is accepted atomically in a single file,
//! `ID.batch`. A batch entry that has started, ended or been refused also has its own file, removed after the batch
//! file. On a full disk, an empty `ID.begun` file marks a dispatch as started.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::request::PromptEntry;
use crate::records::entry::Interaction;
use crate::records::limits::Period;
use svc_base::clock;
use svc_base::error_chain::format_chain;
use svc_base::fsx::{self, FileError};

/// Position of a dispatch in its batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchPosition {
    pub id: String,
    pub index: usize,
    /// Number of entries in the batch.
    #[serde(rename = "of")]
    pub size: usize,
}

/// An accepted dispatch, as written to the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JournalEntry {
    pub version: u32,
    pub id: String,
    pub sender_id: String,
    #[serde(flatten)]
    pub entry: PromptEntry,
    pub batch: Option<BatchPosition>,
    pub fingerprint: String,
    #[serde(with = "clock::wire")]
    pub accepted_at: Timestamp,
    /// When the run began, even if the agent failed to start.
    #[serde(default, with = "clock::wire_option")]
    pub started_at: Option<Timestamp>,
    /// The result, until its record is durable.
    #[serde(default)]
    pub ended: Option<Interaction>,
    /// The limit this dispatch was refused for. Retained until its file, or its batch file, is removed.
    #[serde(default)]
    pub refused: Option<Period>,
}

impl JournalEntry {
    pub const FORMAT_VERSION: u32 = 1;

    /// The dispatch's own file.
    pub fn file(&self) -> JournalFile {
        let id = self.id.clone();
        match &self.batch {
            Some(position) => JournalFile::Entry { batch: position.id.clone(), id },
            None => JournalFile::Dispatch(id),
        }
    }
}

/// Identifies a journal file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JournalFile {
    /// A dispatch outside a batch.
    Dispatch(String),
    Batch(String),
    /// A batch entry's own file.
    Entry {
        batch: String,
        id: String,
    },
}

impl JournalFile {
    /// Takes the removable files, in removal order. A batch file lists its entries as not started, so an entry's own
    /// file is removed only after the batch file; otherwise, the entry could run again.
    pub fn take_removable(prunable_files: &mut Vec<Self>) -> Vec<Self> {
        let batch_id = |file: &Self| if let Self::Batch(id) = file { Some(id.clone()) } else { None };
        let batches: BTreeSet<String> = prunable_files.iter().filter_map(batch_id).collect();
        let is_removable = |file: &Self| match file {
            Self::Entry { batch, .. } => batches.contains(batch),
            Self::Dispatch(_) | Self::Batch(_) => true,
        };
        let (mut removable, waiting): (Vec<Self>, Vec<Self>) =
            prunable_files.drain(..).partition(is_removable);
        removable.sort_by_key(|file| matches!(file, Self::Entry { .. }));
        *prunable_files = waiting;
        removable
    }
}

/// The journal directory.
#[derive(Debug, Clone)]
pub struct Journal(PathBuf);

impl Journal {
    pub fn new(dir: PathBuf) -> Self {
        Self(dir)
    }

    fn path(&self, file: &JournalFile) -> PathBuf {
        match file {
            JournalFile::Dispatch(id) | JournalFile::Entry { id, .. } => self.0.join(format!("{id}.json")),
            JournalFile::Batch(id) => self.0.join(format!("{id}.batch")),
        }
    }

    /// Writes a single dispatch, or all dispatches of a batch.
    pub fn write(&self, entries: &[JournalEntry]) -> Result<(), FileError> {
        let (file, text) = match entries {
            [] => return Ok(()),
            [entry] => (JournalFile::Dispatch(entry.id.clone()), serde_json::to_vec(entry)),
            [first, ..] => {
                let batch = first.batch.as_ref().map_or(&first.id, |batch| &batch.id);
                (JournalFile::Batch(batch.clone()), serde_json::to_vec(entries))
            }
        };
        fsx::write_atomic(&self.path(&file), &text.expect("plain fields serialize to JSON"), 0o600)
    }

    /// Marks a dispatch as started with an empty file, which takes up no disk space. Returns `false` if the marker
    /// can't be created and the dispatch may be in the journal, where a crash would make it start again.
    pub fn mark_started(&self, entry: &JournalEntry) -> bool {
        let marker = self.start_marker_path(&entry.id);
        let marked = std::fs::File::create(&marker).and_then(|file| file.sync_all());
        let marked = marked.map_err(FileError::wrap("create", &marker)).and_then(|()| fsx::sync_dir(&self.0));
        let Err(error) = marked else { return true };
        tracing::warn!(error = %format_chain(&error), "cannot mark a dispatch as started");
        !self.may_have_file(&entry.id)
    }

    /// Whether the journal may contain a file for this id, readable or not.
    fn may_have_file(&self, id: &str) -> bool {
        let batch = id.rsplit_once('.').map(|(batch, _)| JournalFile::Batch(batch.to_owned()));
        [Some(JournalFile::Dispatch(id.to_owned())), batch]
            .iter()
            .flatten()
            .any(|file| self.path(file).exists())
    }

    fn start_marker_path(&self, id: &str) -> PathBuf {
        self.0.join(format!("{id}.begun"))
    }

    /// Removes the files of recorded or refused dispatches and ended batches, given in [`JournalFile::take_removable`]
    /// order. Files that can't be removed stay until the next start.
    pub fn remove_all(&self, files: &[JournalFile]) {
        let mut remaining_batches: BTreeSet<&str> = BTreeSet::new();
        for file in files {
            // The batch file lists its entries as not started, so their own files must outlive it.
            if matches!(file, JournalFile::Entry { batch, .. } if remaining_batches.contains(batch.as_str()))
            {
                continue;
            }
            let Err(error) = self.remove(file) else { continue };
            tracing::warn!(error = %format_chain(&error), "cannot remove an ended dispatch from the journal");
            if let JournalFile::Batch(id) = file {
                remaining_batches.insert(id.as_str());
            }
        }
    }

    fn remove(&self, file: &JournalFile) -> Result<(), FileError> {
        fsx::remove_if_exists(&self.path(file))?;
        match file {
            // Remove the start marker last: it may be all that keeps the dispatch from starting again.
            JournalFile::Dispatch(id) | JournalFile::Entry { id, .. } => {
                fsx::remove_if_exists(&self.start_marker_path(id))
            }
            JournalFile::Batch(_) => Ok(()),
        }
    }

    /// Reads all entries in order of acceptance, removing temporary files and stale start markers. Unreadable and
    /// invalid files are logged and left in place. Must be called before anything is written.
    ///
    /// A batch entry whose own file is unreadable or invalid is returned as started, so its agent can't run twice.
    ///
    /// # Errors
    /// [`FileError`] if the journal exists but cannot be read, or if a temporary file cannot be removed.
    pub fn read(&self) -> Result<Vec<JournalEntry>, FileError> {
        let entries = match std::fs::read_dir(&self.0) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(FileError::wrap("read", &self.0))?,
        };
        // No writer is active yet, so any temporary files are leftovers.
        fsx::remove_leftover_temps_in(&self.0, |_| true)?;
        let mut by_id: BTreeMap<String, JournalEntry> = BTreeMap::new();
        let (mut markers, mut unreadable) = (Vec::new(), Vec::new());
        for entry in entries {
            let path = entry.map_err(FileError::wrap("read", &self.0))?.path();
            match path.extension().and_then(OsStr::to_str) {
                // An entry's own file is newer than its batch file.
                Some("json") => match read_journal_file::<JournalEntry>(&path) {
                    Some(entry) => {
                        by_id.insert(entry.id.clone(), entry);
                    }
                    None => unreadable.push(path),
                },
                Some("batch") => {
                    for entry in read_journal_file::<Vec<JournalEntry>>(&path).into_iter().flatten() {
                        by_id.entry(entry.id.clone()).or_insert(entry);
                    }
                }
                Some("begun") => markers.push(path),
                _ => {}
            }
        }
        for path in unreadable {
            if let Some(entry) = by_id.get_mut(dispatch_id(&path)) {
                entry.started_at = Some(modified_at(&path));
            }
        }
        for marker in markers {
            let id = dispatch_id(&marker);
            match by_id.get_mut(id) {
                Some(entry) => entry.started_at = entry.started_at.or_else(|| Some(modified_at(&marker))),
                None if self.may_have_file(id) => {}
                // The dispatch is already recorded, or was never in the journal.
                None => {
                    if let Err(error) = fsx::remove_if_exists(&marker) {
                        tracing::warn!(error = %format_chain(&error), "cannot remove a start marker from the journal");
                    }
                }
            }
        }
        let (mut all, unknown): (Vec<_>, Vec<_>) =
            by_id.into_values().partition(|entry| entry.version == JournalEntry::FORMAT_VERSION);
        for JournalEntry { id, version, .. } in unknown {
            tracing::warn!(
                svc_dispatch_id = %id,
                version,
                "unsupported version of a dispatch's journal entry; leaving the entry in place"
            );
        }
        all.sort_by(|a, b| {
            (a.accepted_at, batch_index(a), &a.id).cmp(&(b.accepted_at, batch_index(b), &b.id))
        });
        Ok(all)
    }
}

fn batch_index(entry: &JournalEntry) -> usize {
    entry.batch.as_ref().map_or(0, |batch| batch.index)
}

/// Extracts the dispatch id from a file name.
fn dispatch_id(path: &Path) -> &str {
    path.file_stem().and_then(OsStr::to_str).unwrap_or_default()
}

fn modified_at(path: &Path) -> Timestamp {
    let modified = std::fs::metadata(path).and_then(|meta| meta.modified());
    modified.ok().and_then(|at| Timestamp::try_from(at).ok()).unwrap_or_else(clock::now_ms)
}

fn read_journal_file<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let text = fsx::read_if_exists(path).unwrap_or_else(|error| {
        tracing::error!(error = %format_chain(&error), "cannot read a journal file; leaving it in place");
        None
    })?;
    let parsed = serde_json::from_slice(&text);
    if parsed.is_err() {
        tracing::warn!(path = %path.display(), "invalid journal file; leaving it in place");
    }
    parsed.ok()
}

#[cfg(test)]
impl JournalEntry {
    /// An accepted dispatch that hasn't started.
    pub(super) fn example(id: &str) -> Self {
        Self {
            version: Self::FORMAT_VERSION,
            id: id.to_owned(),
            sender_id: "u".to_owned(),
            entry: PromptEntry {
                agent_name: "a".to_owned(),
                model: None,
                conversation_id: None,
                prompt: "do it".to_owned(),
                deadline_seconds: 60,
            },
            batch: None,
            fingerprint: "f".to_owned(),
            accepted_at: Timestamp::UNIX_EPOCH,
            started_at: None,
            ended: None,
            refused: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dispatch(id: &str, at: &str) -> JournalEntry {
        JournalEntry { accepted_at: at.parse().unwrap(), ..JournalEntry::example(id) }
    }

    /// An entry of the batch `b`.
    fn entry(index: usize, size: usize) -> JournalEntry {
        let one = dispatch(&format!("b.{index}"), "2026-11-22T10:00:00.000Z");
        JournalEntry { batch: Some(BatchPosition { id: "b".to_owned(), index, size }), ..one }
    }

    fn journal() -> (tempfile::TempDir, Journal) {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::new(dir.path().join("dispatches"));
        (dir, journal)
    }

    #[test]
    fn read_returns_entries_in_order_of_acceptance() {
        let (dir, journal) = journal();
        assert_eq!(journal.read().unwrap(), []);
        let (late, early) =
            (dispatch("a", "2026-11-22T10:00:01.000Z"), dispatch("b", "2026-11-22T10:00:00.000Z"));
        let started =
            JournalEntry { started_at: Some("2026-11-22T10:00:02.000Z".parse().unwrap()), ..late.clone() };
        for entry in [&late, &early, &started] {
            journal.write(std::slice::from_ref(entry)).unwrap();
        }
        std::fs::write(dir.path().join("dispatches/torn.json"), "{\"version\": 1").unwrap();
        assert_eq!(journal.read().unwrap(), [early, started]);
        for _ in 0..2 {
            journal.remove(&JournalFile::Dispatch("a".to_owned())).unwrap();
        }
        assert_eq!(journal.read().unwrap().len(), 1);
    }

    #[test]
    fn mark_started_sets_started_at() {
        let (dir, journal) = journal();
        let entry = |index| entry(index, 2);
        let one = dispatch("a", "2026-11-22T10:00:01.000Z");
        journal.write(std::slice::from_ref(&one)).unwrap();
        journal.write(&[entry(0), entry(1)]).unwrap();
        assert!(journal.mark_started(&one) && journal.mark_started(&entry(1)));
        assert!(journal.mark_started(&dispatch("unknown", "2026-11-22T10:00:01.000Z")));
        std::fs::create_dir(dir.path().join("dispatches/unreadable.json")).unwrap();
        std::fs::write(dir.path().join("dispatches/unreadable.begun"), "").unwrap();
        let is_started: Vec<bool> =
            journal.read().unwrap().iter().map(|entry| entry.started_at.is_some()).collect();
        assert_eq!(is_started, [false, true, true]);
        journal.remove(&JournalFile::Dispatch("a".to_owned())).unwrap();
        journal.remove(&JournalFile::Dispatch("b.1".to_owned())).unwrap();
        assert_eq!(
            std::fs::read_dir(dir.path().join("dispatches")).unwrap().count(),
            3,
            "the batch, the unreadable file and its start marker"
        );
        // Without a marker, a journaled dispatch must not start: a crash would make it start again.
        std::fs::create_dir(dir.path().join("dispatches/b.0.begun")).unwrap();
        std::fs::create_dir(dir.path().join("dispatches/unknown.begun")).unwrap();
        assert!(!journal.mark_started(&entry(0)));
        assert!(journal.mark_started(&dispatch("unknown", "2026-11-22T10:00:01.000Z")));
    }

    #[test]
    fn entry_file_overrides_its_batch_file() {
        let (_dir, journal) = journal();
        let entry = |index| entry(index, 12);
        let all: Vec<JournalEntry> = (0..12).map(entry).collect();
        journal.write(&all).unwrap();
        assert_eq!(journal.read().unwrap(), all, "the entries are not ordered by index");
        let started =
            JournalEntry { started_at: Some("2026-11-22T10:00:02.000Z".parse().unwrap()), ..entry(2) };
        journal.write(std::slice::from_ref(&started)).unwrap();
        assert_eq!(journal.read().unwrap()[2], started);
        journal.remove(&JournalFile::Batch("b".to_owned())).unwrap();
        assert_eq!(journal.read().unwrap(), [started]);
    }

    #[test]
    fn batch_entry_with_unreadable_file_is_treated_as_started() {
        let (dir, journal) = journal();
        journal.write(&[entry(0, 2), entry(1, 2)]).unwrap();
        std::fs::write(dir.path().join("dispatches/b.1.json"), "{\"version\": 1").unwrap();
        let is_started: Vec<bool> =
            journal.read().unwrap().iter().map(|entry| entry.started_at.is_some()).collect();
        assert_eq!(is_started, [false, true]);
    }

    #[test]
    fn failed_removal_keeps_dependent_journal_files() {
        let (dir, journal) = journal();
        let path = |name: &str| dir.path().join("dispatches").join(name);
        // `remove_file` fails for a directory.
        for name in ["a.json", "b.batch"] {
            std::fs::create_dir_all(path(name)).unwrap();
        }
        for name in ["a.begun", "b.0.json", "b.0.begun", "c.0.json", "c.0.begun", "c.batch"] {
            std::fs::write(path(name), "").unwrap();
        }
        let batch = |id: &str| JournalFile::Batch(id.to_owned());
        let entry_file =
            |batch: &str| JournalFile::Entry { batch: batch.to_owned(), id: format!("{batch}.0") };
        journal.remove_all(&[
            JournalFile::Dispatch("a".to_owned()),
            batch("b"),
            batch("c"),
            entry_file("b"),
            entry_file("c"),
        ]);
        let mut names: Vec<_> = std::fs::read_dir(dir.path().join("dispatches"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["a.begun", "a.json", "b.0.begun", "b.0.json", "b.batch"]);
    }

    #[test]
    fn entry_file_is_removable_only_with_its_batch_file() {
        let one = dispatch("a", "2026-11-22T10:00:01.000Z").file();
        let (first, second) = (entry(0, 2).file(), entry(1, 2).file());
        let mut prunable_files = vec![first.clone(), one.clone()];
        assert_eq!(JournalFile::take_removable(&mut prunable_files), [one]);
        let batch = JournalFile::Batch("b".to_owned());
        prunable_files.extend([second.clone(), batch.clone()]);
        assert_eq!(JournalFile::take_removable(&mut prunable_files), [batch, first, second]);
        assert_eq!(prunable_files, []);
    }
}
