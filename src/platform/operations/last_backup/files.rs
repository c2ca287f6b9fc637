//! The owner's files in the final backup. The host saves them by itself once its writers have stopped; the step waits
//! for that after the database is saved, but not long: the files that are not saved stay on the kept server.

use jiff::{SignedDuration, Timestamp};

use super::final_backup::HostReport;
use super::progress::LastBackupProgress;
use crate::operations::host_call::FilesProgress;
use svc_base::clock;
use svc_base::untrusted_text::truncate_printable;

/// How long the step waits for the files after the database is saved.
const TIMEOUT: SignedDuration = SignedDuration::from_mins(3);

fn files_in(report: &HostReport) -> Option<&FilesProgress> {
    match report {
        HostReport::Backups(host) => host.files.as_deref(),
        HostReport::Unsupported => None,
    }
}

/// Whether everything that the writers wrote before they stopped is saved. Both times are by the host's clock.
fn are_saved(files: &FilesProgress, progress: &LastBackupProgress) -> bool {
    files.saved_until.zip(progress.first_requested_at).is_some_and(|(saved, stopped)| saved >= stopped)
}

/// Whether to wait for the files.
pub fn should_wait(report: &HostReport, progress: &mut LastBackupProgress, now: Timestamp) -> bool {
    let Some(files) = files_in(report) else { return false };
    if are_saved(files, progress) {
        return false;
    }
    let since = *progress.files_awaited_since.get_or_insert(now);
    now.duration_since(since) < TIMEOUT
}

/// Describes what is saved of the files, as the end of a note.
pub fn describe(report: &HostReport, progress: &LastBackupProgress) -> String {
    let Some(files) = files_in(report) else { return String::new() };
    let why =
        files.error.as_deref().map(|error| format!(" ({})", truncate_printable(error))).unwrap_or_default();
    match files.saved_until.map(clock::rfc3339_ms) {
        Some(at) if are_saved(files, progress) => format!("; the owner's files are saved as of {at}"),
        Some(at) => {
            format!(
                "; the owner's files are saved only as of {at}{why}: later changes are only on the machine's server"
            )
        }
        None => format!("; the owner's files are not saved{why}: they are only on the machine's server"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operations::host_call::BackupProgress;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn requested_at_100() -> LastBackupProgress {
        let mut progress = LastBackupProgress::default();
        progress.first_requested_at = Some(at(100));
        progress
    }

    fn report(saved_until: Option<i64>) -> HostReport {
        let files =
            FilesProgress { saved_until: saved_until.map(at), error: Some("the store is away".to_owned()) };
        HostReport::Backups(BackupProgress { files: Some(Box::new(files)), ..BackupProgress::default() })
    }

    #[test]
    fn step_waits_for_files_only_for_a_while() {
        let mut progress = requested_at_100();
        assert!(!should_wait(&report(Some(100)), &mut progress, at(0)));
        assert!(!should_wait(&HostReport::Unsupported, &mut progress, at(0)));
        assert!(should_wait(&report(Some(99)), &mut progress, at(1000)));
        assert!(should_wait(&report(None), &mut progress, at(1179)));
        assert!(!should_wait(&report(None), &mut progress, at(1180)));
    }

    #[test]
    fn note_says_which_moment_of_the_files_is_saved() {
        let progress = requested_at_100();
        let saved = describe(&report(Some(101)), &progress);
        assert!(saved.contains("saved as of 1970-01-01T00:01:41"), "{saved}");
        let missing = describe(&report(Some(99)), &progress);
        assert!(
            missing.contains("as of 1970-01-01T00:01:39") && missing.contains("the store is away"),
            "{missing}"
        );
        assert!(describe(&report(None), &progress).contains("are not saved (the store is away)"));
        assert_eq!(describe(&HostReport::Unsupported, &progress), "");
    }
}
