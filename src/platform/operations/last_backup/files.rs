//! The owner's files in the final backup. The host saves them automatically once its writers have stopped. After the
//! database is saved, the step waits a limited time for the files. If they are still not saved, the machine's server
//! holds changes that exist nowhere else.

use std::fmt;

use jiff::{SignedDuration, Timestamp};

use super::final_backup::HostReport;
use super::progress::LastBackupProgress;
use svc_base::clock;
use svc_base::untrusted_text::truncate_printable;

/// How long the step waits for the files after the database is saved.
const TIMEOUT: SignedDuration = SignedDuration::from_mins(3);

/// Which of the owner's files are saved. Displayed as the end of a note.
#[derive(Debug, PartialEq, Eq)]
pub enum SavedFiles {
    /// The host reports no file backup: its release does not save files, or it has not recorded a state yet.
    Unsupported,
    /// Everything that the writers wrote before they stopped.
    Complete { until: Timestamp },
    /// Only what was written before `until`; nothing if it is `None`.
    Partial { until: Option<Timestamp>, error: Option<String> },
}

impl SavedFiles {
    pub fn from_report(report: &HostReport, progress: &LastBackupProgress) -> Self {
        let files = match report {
            HostReport::Backups(host) => host.files.as_deref(),
            HostReport::Unsupported => None,
        };
        let Some(files) = files else { return Self::Unsupported };
        // Both times are by the host's clock.
        let stopped_at = progress.quiesced_at.or(progress.first_requested_at);
        match files.saved_until.zip(stopped_at) {
            Some((until, stopped)) if until >= stopped => Self::Complete { until },
            _ => Self::Partial {
                until: files.saved_until,
                error: files.error.as_deref().map(truncate_printable),
            },
        }
    }

    /// Returns the time since which files are unsaved; `None` if they are saved, or if the host reports no file backup.
    /// The inner time is `None` if no files were ever saved.
    pub fn unsaved_since(&self) -> Option<Option<Timestamp>> {
        match self {
            Self::Unsupported | Self::Complete { .. } => None,
            Self::Partial { until, .. } => Some(*until),
        }
    }
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
        }
    }
}

/// Returns whether to wait for the files: until they are saved, but at most for `TIMEOUT`.
pub fn should_wait_for_files(report: &HostReport, progress: &mut LastBackupProgress, now: Timestamp) -> bool {
    if SavedFiles::from_report(report, progress).unsaved_since().is_none() {
        return false;
    }
    let since = *progress.files_awaited_since.get_or_insert(now);
    now.duration_since(since) < TIMEOUT
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operations::host_call::{BackupProgress, FilesProgress};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn stopped_at_100() -> LastBackupProgress {
        let mut progress = LastBackupProgress::default();
        (progress.quiesced_at, progress.first_requested_at) = (Some(at(100)), Some(at(105)));
        progress
    }

    fn report(saved_until: Option<i64>) -> HostReport {
        let files = FilesProgress {
            saved_until: saved_until.map(at),
            error: Some("the store is unavailable".to_owned()),
        };
        HostReport::Backups(BackupProgress { files: Some(Box::new(files)), ..BackupProgress::default() })
    }

    #[test]
    fn step_waits_for_files_until_timeout() {
        let mut progress = stopped_at_100();
        assert!(!should_wait_for_files(&report(Some(100)), &mut progress, at(0)), "the writers had stopped");
        assert!(!should_wait_for_files(&HostReport::Unsupported, &mut progress, at(0)));
        assert!(should_wait_for_files(&report(Some(99)), &mut progress, at(1000)));
        assert!(should_wait_for_files(&report(None), &mut progress, at(1179)));
        assert!(!should_wait_for_files(&report(None), &mut progress, at(1180)));
    }

    #[test]
    fn saved_files_name_time_since_which_files_are_unsaved() {
        let from_report = |report: HostReport| SavedFiles::from_report(&report, &stopped_at_100());
        let saved = from_report(report(Some(101)));
        assert_eq!(saved.unsaved_since(), None);
        assert!(saved.to_string().contains("saved as of 1970-01-01T00:01:41"), "{saved}");
        let older = from_report(report(Some(99)));
        assert_eq!(older.unsaved_since(), Some(Some(at(99))));
        assert!(older.to_string().contains("only as of 1970-01-01T00:01:39"), "{older}");
        let never = from_report(report(None));
        assert_eq!(never.unsaved_since(), Some(None));
        assert!(never.to_string().contains("are not saved (the store is unavailable): unsaved"), "{never}");
        assert_eq!(from_report(HostReport::Unsupported).to_string(), "");
    }
}
