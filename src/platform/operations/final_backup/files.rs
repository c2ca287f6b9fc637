//! Determines whether the owner's files are saved, and whether the step waits for them. The host saves the files
//! automatically once its writers have stopped. After the database is saved, the step waits a limited time for the
//! files. If they are still not saved, or if the host reports that they could not be restored completely, the machine's
//! server may hold the only copy.

use std::fmt;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::progress::FinalBackupProgress;
use super::snapshot_proof::HostReport;
use svc_base::clock;
use svc_base::untrusted_text::truncate_printable;
use svc_wire::heartbeat::{FILES_DAMAGED, FILES_NOT_RESTORED, FILES_UNREADABLE};

/// How long the step waits for the files after the database is saved.
const FILES_TIMEOUT: SignedDuration = SignedDuration::from_mins(3);

/// Which of the owner's files are saved. The display text is appended to a note.
#[derive(Debug, PartialEq, Eq)]
pub enum SavedFiles {
    /// The host reports no file backup: its release does not save files, or it has not recorded a state yet.
    Unsupported,
    /// Everything that the writers wrote before they stopped.
    Complete { until: Timestamp },
    /// Only what was written before `until`; nothing if it is `None`.
    Partial { until: Option<Timestamp>, error: Option<String> },
    /// A problem, reported by the host or found with the key, may prevent a new machine from restoring everything.
    /// `can_improve` is true if waiting may help.
    Unreliable { problem: String, can_improve: bool },
}

impl SavedFiles {
    /// Evaluates the host's report. `attention` contains the attention items of the machine's last heartbeat.
    pub fn from_report(report: &HostReport, progress: &FinalBackupProgress, attention: &Value) -> Self {
        if let Some(problem) = find_attention_detail(attention, FILES_NOT_RESTORED) {
            return Self::Unreliable { problem: problem.to_owned(), can_improve: false };
        }
        let files = match report {
            HostReport::Backups(host) => host.files.as_deref(),
            HostReport::Unsupported => None,
        };
        // Both times are by the host's clock.
        let stopped_at = progress.quiesced_at.or(progress.first_requested_at);
        let saved_until = files.and_then(|files| files.saved_until);
        let complete_until = saved_until.filter(|until| stopped_at.is_some_and(|stopped| *until >= stopped));
        let unreadable = files.and_then(|files| files.unreadable.as_deref()).map(truncate_printable);
        let problem = find_attention_detail(attention, FILES_DAMAGED).map(str::to_owned).or(unreadable);
        match (files, complete_until, problem) {
            (_, _, Some(problem)) => {
                Self::Unreliable { problem, can_improve: files.is_some() && complete_until.is_none() }
            }
            (_, Some(until), None) => Self::Complete { until },
            (Some(files), None, None) => {
                Self::Partial { until: saved_until, error: files.error.as_deref().map(truncate_printable) }
            }
            (None, None, None) => Self::Unsupported,
        }
    }

    /// Returns the time since which files are unsaved; `None` if they are saved, or if the host reports no file backup.
    /// The inner time is `None` if no files were ever saved, or if it is not known which are.
    pub fn unsaved_since(&self) -> Option<Option<Timestamp>> {
        match self {
            Self::Unsupported | Self::Complete { .. } => None,
            Self::Partial { until, .. } => Some(*until),
            Self::Unreliable { .. } => Some(None),
        }
    }

    /// Returns why the step waits for the files, at most for `FILES_TIMEOUT`; `None` if it does not wait.
    pub fn wait_reason(&self, progress: &mut FinalBackupProgress, now: Timestamp) -> Option<String> {
        let reason = match self {
            Self::Unsupported | Self::Complete { .. } | Self::Unreliable { can_improve: false, .. } => {
                return None;
            }
            Self::Partial { error, .. } => error.as_deref(),
            Self::Unreliable { problem, can_improve: true } => Some(problem.as_str()),
        };
        let since = *progress.files_awaited_since.get_or_insert(now);
        let reason = reason.map_or_else(String::new, |reason| format!(": {reason}"));
        (now.duration_since(since) < FILES_TIMEOUT)
            .then(|| format!("the owner's files are not saved yet{reason}"))
    }
}

/// Returns the detail of an attention item that says that the file backup may be incomplete.
pub fn find_reported_problem(attention: &Value) -> Option<&str> {
    [FILES_NOT_RESTORED, FILES_DAMAGED, FILES_UNREADABLE]
        .into_iter()
        .find_map(|code| find_attention_detail(attention, code))
}

fn find_attention_detail<'a>(attention: &'a Value, code: &str) -> Option<&'a str> {
    attention.as_array()?.iter().find(|item| item["code"] == code)?["detail"].as_str()
}

impl fmt::Display for SavedFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsupported => Ok(()),
            Self::Complete { until } => {
                write!(f, "; the owner's files are saved as of {}", clock::rfc3339_ms(*until))
            }
            Self::Partial { until, error } => {
                match until {
                    Some(at) => {
                        write!(f, "; the owner's files are saved only as of {}", clock::rfc3339_ms(*at))?;
                    }
                    None => f.write_str("; the owner's files are not saved")?,
                }
                if let Some(error) = error {
                    write!(f, " ({error})")?;
                }
                f.write_str(": unsaved changes are only on the machine's server")
            }
            Self::Unreliable { problem, .. } => write!(
                f,
                "; the owner's files may not be completely saved ({problem}): some may be only on the machine's server"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::operations::host_call::{BackupProgress, FilesProgress};

    fn timestamp(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn stopped_at_100() -> FinalBackupProgress {
        let mut progress = FinalBackupProgress::default();
        (progress.quiesced_at, progress.first_requested_at) = (Some(timestamp(100)), Some(timestamp(105)));
        progress
    }

    fn report(saved_until: Option<i64>) -> HostReport {
        let files = FilesProgress {
            saved_until: saved_until.map(timestamp),
            error: Some("the store is unavailable".to_owned()),
            unreadable: None,
        };
        HostReport::Backups(BackupProgress { files: Some(Box::new(files)), ..BackupProgress::default() })
    }

    fn attention(code: &str) -> Value {
        json!([{"code": "snapshot_held", "detail": "another"}, {"code": code, "detail": "a pack is damaged"}])
    }

    #[test]
    fn step_waits_for_files_until_timeout() {
        let mut progress = stopped_at_100();
        let mut wait_reason = |report: HostReport, attention: &Value, now: i64| {
            SavedFiles::from_report(&report, &progress, attention).wait_reason(&mut progress, timestamp(now))
        };
        let none = json!([]);
        assert_eq!(wait_reason(report(Some(100)), &none, 0), None, "saved until the writers stopped");
        assert_eq!(wait_reason(HostReport::Unsupported, &none, 0), None);
        assert_eq!(
            wait_reason(report(None), &attention(FILES_NOT_RESTORED), 0),
            None,
            "a host that could not restore the files saves none"
        );
        assert_eq!(wait_reason(report(Some(100)), &attention(FILES_DAMAGED), 0), None);
        let reason = wait_reason(report(Some(99)), &none, 1000).unwrap();
        assert_eq!(reason, "the owner's files are not saved yet: the store is unavailable");
        let reason = wait_reason(report(None), &attention(FILES_DAMAGED), 1179).unwrap();
        assert!(reason.ends_with("yet: a pack is damaged"), "{reason}");
        assert_eq!(wait_reason(report(None), &none, 1180), None);
    }

    #[test]
    fn partial_save_reports_files_unsaved_since_last_save() {
        let from_report =
            |report: HostReport| SavedFiles::from_report(&report, &stopped_at_100(), &json!([]));
        let saved = from_report(report(Some(101)));
        assert_eq!(saved.unsaved_since(), None);
        assert!(saved.to_string().contains("saved as of 1970-01-01T00:01:41"), "{saved}");
        let older = from_report(report(Some(99)));
        assert_eq!(older.unsaved_since(), Some(Some(timestamp(99))));
        assert!(older.to_string().contains("only as of 1970-01-01T00:01:39"), "{older}");
        let never = from_report(report(None));
        assert_eq!(never.unsaved_since(), Some(None));
        assert!(never.to_string().contains("are not saved (the store is unavailable): unsaved"), "{never}");
        assert_eq!(from_report(HostReport::Unsupported).to_string(), "");
    }

    #[test]
    fn files_with_reported_problem_count_as_unsaved() {
        let unreadable = Some("1 entry of the owner's home cannot be read".to_owned());
        let files = FilesProgress { saved_until: Some(timestamp(101)), error: None, unreadable };
        let report_unreadable =
            HostReport::Backups(BackupProgress { files: Some(Box::new(files)), ..BackupProgress::default() });
        let files = SavedFiles::from_report(&report_unreadable, &stopped_at_100(), &json!([]));
        assert_eq!(files.unsaved_since(), Some(None));
        assert!(files.to_string().contains("cannot be read"), "{files}");
        assert_eq!(files.wait_reason(&mut stopped_at_100(), timestamp(0)), None, "waiting would not help");
        for code in [FILES_NOT_RESTORED, FILES_DAMAGED] {
            // A host that could not restore the files has no state of its file backup.
            for report in [report(Some(101)), HostReport::Backups(BackupProgress::default())] {
                let files = SavedFiles::from_report(&report, &stopped_at_100(), &attention(code));
                assert_eq!(files.unsaved_since(), Some(None), "{code}");
                assert!(files.to_string().contains("(a pack is damaged): some"), "{files}");
            }
        }
    }
}
