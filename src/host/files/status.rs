//! The file backup's status. Written by the service; read by the heartbeat, the gateway, `svcctl doctor` and
//! `svc-sync-agent status`.

use std::path::Path;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::access::AccessError;
use super::checks::FileChecks;
use super::home_path::HomePath;
use crate::system::layout::Layout;
use svc_base::clock;
use svc_base::fsx::{self, FileError};
use svc_base::untrusted_text::truncate_printable;
use svc_files::save::{ExcludedEntry, ExcludedSizes, SPECIAL_FILE_NOTE, SaveResult};
use svc_http::openapi::MAX_SAFE_INTEGER;
use svc_wire::files::{ExcludedFile, ExcludedFiles, FileBackupStatus};

const FORMAT_VERSION: u32 = 1;
const STATUS_FILE: &str = "status.json";
/// Unsaved changes and failures are reported once they are this old.
const MAX_PENDING_AGE: SignedDuration = SignedDuration::from_mins(10);
/// Age at which the last save is reported as too old. The service saves every few minutes even without changes, because
/// some files aren't watched.
const MAX_SAVE_AGE: SignedDuration = SignedDuration::from_mins(40);

/// File-backup status, as stored in `/var/lib/svc/files/status.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FilesStatus {
    version: u32,
    /// Everything written before this time is in the store.
    #[serde(with = "clock::wire_option")]
    pub saved_until: Option<Timestamp>,
    /// When the service detected the first unsaved change.
    #[serde(with = "clock::wire_option")]
    pub changed_since: Option<Timestamp>,
    /// Estimated size of the unsaved changes, in bytes; `None` if there are none or the size is unknown.
    pub pending_bytes: Option<u64>,
    /// Latest snapshot id.
    pub snapshot: Option<String>,
    /// Counts from the last full save.
    pub files: u64,
    pub bytes: u64,
    pub excluded: u64,
    pub special: u64,
    /// Notes naming the first few sockets, FIFOs and devices.
    pub notes: Vec<String>,
    /// Sizes of the excluded files when last measured.
    pub excluded_files: Option<ExcludedFiles>,
    /// Number of entries the last save couldn't read.
    pub unreadable: u64,
    pub first_unreadable: Option<String>,
    /// Number of files that kept changing while the last save tried to read them.
    pub unstable: u64,
    /// Error from reading the owner's rules, if any, and their first invalid lines, which are ignored.
    pub invalid_rules: Vec<String>,
    /// Error from the last save; `None` if it succeeded.
    pub error: Option<String>,
    /// When saves started failing; `None` if the last one succeeded.
    #[serde(with = "clock::wire_option")]
    pub failing_since: Option<Timestamp>,
    /// The [`FileChecks::damage_found_at`] for which all files were last reread.
    #[serde(rename = "repairedAt", with = "clock::wire_option")]
    pub repaired_damage_found_at: Option<Timestamp>,
    /// Key problem that would keep a later machine from reading the file backup, if any is known.
    pub key_problem: Option<String>,
    /// When a save last failed. Later successes do not clear it.
    #[serde(with = "clock::wire_option")]
    pub failed_at: Option<Timestamp>,
}

impl FilesStatus {
    /// Reads the status file; `None` if it doesn't exist. An invalid file or a different format version yields a status
    /// with no known saves.
    ///
    /// # Errors
    /// If the file exists but cannot be read.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let Some(text) = fsx::read_if_exists(&layout.files_state().join(STATUS_FILE))? else {
            return Ok(None);
        };
        let status =
            serde_json::from_slice::<Self>(&text).ok().filter(|status| status.version == FORMAT_VERSION);
        let mut status = status.unwrap_or_else(|| Self {
            error: Some("the recorded state of the file backup is invalid".to_owned()),
            ..Self::default()
        });
        status.correct_future_times(clock::now_ms());
        Ok(Some(status))
    }

    /// Records a successful save.
    pub(super) fn record_saved(&mut self, saved: &SaveResult, is_full: bool, saved_until: Timestamp) {
        let counts = &saved.counts;
        if is_full {
            (self.files, self.bytes) = (counts.files, counts.bytes);
            (self.excluded, self.special) = (counts.excluded, counts.special);
            let specials = counts.notes.iter().filter(|note| note.starts_with(SPECIAL_FILE_NOTE));
            self.notes = specials.cloned().collect();
        }
        if let Some(sizes) = &counts.excluded_sizes {
            self.excluded_files = Some(to_excluded_files(sizes, saved_until));
        }
        (self.unreadable, self.unstable) = (counts.unreadable, counts.unstable);
        self.first_unreadable.clone_from(&counts.first_unreadable);
        self.snapshot = Some(saved.id.to_string());
        self.saved_until = Some(saved_until);
        (self.changed_since, self.pending_bytes) = (None, None);
        (self.error, self.failing_since) = (None, None);
    }

    /// Records whether the platform has the key, based on the outcome of the last key request.
    pub(super) fn record_key(&mut self, error: Option<&AccessError>) {
        match error {
            None => self.key_problem = None,
            // Other errors, such as outages, don't reveal whether the platform has the key.
            Some(error) => self.key_problem = error.to_key_problem().or(self.key_problem.take()),
        }
    }

    /// Corrects times recorded while the clock was ahead; otherwise, new changes would be treated as already saved, and
    /// requested saves as failed. Returns whether any time was corrected.
    pub fn correct_future_times(&mut self, now: Timestamp) -> bool {
        let before = (self.saved_until, self.changed_since, self.failing_since, self.failed_at);
        self.saved_until = self.saved_until.filter(|at| *at <= now);
        self.failed_at = self.failed_at.filter(|at| *at <= now);
        for since in [&mut self.changed_since, &mut self.failing_since].into_iter().flatten() {
            *since = (*since).min(now);
        }
        before != (self.saved_until, self.changed_since, self.failing_since, self.failed_at)
    }

    /// Whether corruption requires rereading all files, given [`FileChecks::damage_found_at`]. Times are only compared
    /// for equality, because the clock may have been ahead when earlier corruption was found.
    pub fn needs_repair(&self, damage_found_at: Option<Timestamp>) -> bool {
        damage_found_at.is_some() && damage_found_at != self.repaired_damage_found_at
    }

    /// Whether changes have gone unsaved for too long, or the saved state is unknown.
    pub fn is_unsaved(&self, now: Timestamp) -> bool {
        // The service always records one of these times, so without any, the file is invalid or the clock was ahead.
        let is_unknown =
            self.saved_until.is_none() && self.changed_since.is_none() && self.failing_since.is_none();
        is_unknown || self.find_unsaved_since(now).is_some()
    }

    /// Returns the time since which changes have been unsaved, but only if saves are overdue: the first unsaved change
    /// or failure is at least `MAX_PENDING_AGE` old, or the last save is at least `MAX_SAVE_AGE` old.
    pub fn find_unsaved_since(&self, now: Timestamp) -> Option<Timestamp> {
        let since = self.changed_since.or(self.failing_since).or(self.saved_until)?;
        let is_old = |at: Timestamp, limit: SignedDuration| now.duration_since(at) >= limit;
        let is_pending =
            self.changed_since.or(self.failing_since).is_some_and(|at| is_old(at, MAX_PENDING_AGE));
        let is_stale = self.saved_until.is_some_and(|at| is_old(at, MAX_SAVE_AGE));
        (is_pending || is_stale).then_some(since)
    }

    /// Returns the status shown to the owner and operators, including check results.
    pub fn to_report(&self, checks: &FileChecks) -> FileBackupStatus {
        FileBackupStatus {
            saved_until: self.saved_until.map(Into::into),
            changed_since: self.changed_since.map(Into::into),
            pending_bytes: self.pending_bytes.map(|bytes| bytes.min(MAX_SAFE_INTEGER)),
            error: self.error.clone(),
            files: self.files,
            bytes: self.bytes.min(MAX_SAFE_INTEGER),
            unreadable: self.unreadable,
            first_unreadable: self.first_unreadable.clone(),
            unstable: self.unstable,
            invalid_rules: self.invalid_rules.clone(),
            excluded: self.excluded_files.clone(),
            verified_at: checks.verified_at().map(Into::into),
            drilled_at: checks.drilled_at().map(Into::into),
            damage: self.find_problem(checks),
        }
    }

    /// Describes entries the last save couldn't read, if any.
    pub fn describe_unreadable(&self) -> Option<String> {
        let first =
            self.first_unreadable.as_ref().map_or_else(String::new, |first| format!(" (first: {first})"));
        let (subject, verb) = match self.unreadable {
            0 => return None,
            1 => ("1 entry".to_owned(), "is"),
            count => (format!("{count} entries"), "are"),
        };
        Some(format!("{subject} of the owner's home cannot be read, and {verb} not saved{first}"))
    }

    /// Describes the most serious known problem with the saved data.
    pub fn find_problem(&self, checks: &FileChecks) -> Option<String> {
        checks.find_problem().or_else(|| self.key_problem.clone())
    }

    /// Writes the status file, creating its directory if necessary.
    pub fn write(&mut self, layout: &Layout) -> Result<(), FileError> {
        self.version = FORMAT_VERSION;
        let dir = layout.files_state();
        std::fs::create_dir_all(&dir).map_err(FileError::wrap("create", &dir))?;
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        // Files are saved even while the disk is full, and the status must show that.
        fsx::write_atomic_or_in_place(&dir.join(STATUS_FILE), &text, 0o644)
    }
}

/// Converts the excluded entries for the status.
fn to_excluded_files(sizes: &ExcludedSizes, measured_at: Timestamp) -> ExcludedFiles {
    let display_path =
        |path: &Path| truncate_printable(&HomePath::from_relative(path.to_owned()).to_string());
    let to_file = |entry: &ExcludedEntry| ExcludedFile {
        path: display_path(&entry.path),
        entries: entry.entries,
        bytes: entry.bytes,
    };
    ExcludedFiles {
        measured_at: measured_at.into(),
        entries: sizes.entries,
        bytes: sizes.bytes,
        complete: !sizes.is_partial,
        largest: sizes.largest.iter().map(to_file).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_status_file_reads_as_nothing_saved() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        assert_eq!(FilesStatus::read(&layout).unwrap(), None);
        let mut status = FilesStatus { saved_until: Some(Timestamp::UNIX_EPOCH), ..FilesStatus::default() };
        status.write(&layout).unwrap();
        assert_eq!(FilesStatus::read(&layout).unwrap(), Some(status));
        for text in ["{", r#"{"version":2,"savedUntil":"2026-01-01T00:00:00.000Z"}"#] {
            std::fs::write(layout.files_state().join(STATUS_FILE), text).unwrap();
            let status = FilesStatus::read(&layout).unwrap().unwrap();
            assert!(status.saved_until.is_none() && status.error.is_some(), "{text}");
            assert!(status.is_unsaved(Timestamp::now()), "{text}");
        }
    }

    #[test]
    fn correct_future_times_clears_or_caps_times() {
        let at = |minute: i64| Timestamp::from_second(minute * 60).unwrap();
        let mut status = FilesStatus {
            saved_until: Some(at(1440)),
            changed_since: Some(at(1441)),
            failing_since: Some(at(5)),
            failed_at: Some(at(1440)),
            ..FilesStatus::default()
        };
        assert!(status.correct_future_times(at(10)));
        assert_eq!(
            (status.saved_until, status.changed_since, status.failing_since, status.failed_at),
            (None, Some(at(10)), Some(at(5)), None)
        );
        assert!(!status.correct_future_times(at(10)));
        assert_eq!(status.find_unsaved_since(at(20)), Some(at(10)));
        let mut only_saved = FilesStatus { saved_until: Some(at(1440)), ..FilesStatus::default() };
        assert!(!only_saved.is_unsaved(at(10)) && only_saved.correct_future_times(at(10)));
        assert!(only_saved.is_unsaved(at(10)), "the saved state is unknown");
    }

    #[test]
    fn needs_repair_until_files_are_reread_for_this_damage() {
        let at = |minute: i64| Timestamp::from_second(minute * 60).ok();
        let needs_repair = |repaired_damage_found_at, damage_found_at| {
            FilesStatus { repaired_damage_found_at, ..FilesStatus::default() }.needs_repair(damage_found_at)
        };
        assert!(!needs_repair(None, None) && !needs_repair(at(5), None));
        assert!(needs_repair(None, at(5)) && needs_repair(at(5), at(6)));
        assert!(!needs_repair(at(5), at(5)), "this damage has been repaired");
        assert!(needs_repair(at(999), at(6)), "the clock was ahead");
    }

    #[test]
    fn find_unsaved_since_reports_only_after_limits() {
        let at = |minute: i64| Timestamp::from_second(minute * 60).unwrap();
        let status = FilesStatus { saved_until: Some(at(100)), ..FilesStatus::default() };
        assert_eq!(status.find_unsaved_since(at(139)), None);
        assert_eq!(status.find_unsaved_since(at(140)), Some(at(100)), "the last save is too old");
        let changed = FilesStatus { changed_since: Some(at(101)), ..status.clone() };
        assert_eq!((changed.find_unsaved_since(at(110)), changed.is_unsaved(at(110))), (None, false));
        assert_eq!((changed.find_unsaved_since(at(111)), changed.is_unsaved(at(111))), (Some(at(101)), true));
        let failing = FilesStatus { failing_since: Some(at(101)), ..status };
        assert_eq!(failing.find_unsaved_since(at(111)), Some(at(101)));
        let never = FilesStatus { failing_since: Some(at(1)), ..FilesStatus::default() };
        assert_eq!(never.find_unsaved_since(at(11)), Some(at(1)));
    }
}
