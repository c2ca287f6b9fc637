//! Checks the state of the file backup.

use jiff::Timestamp;

use crate::files::checks::FileChecks;
use crate::files::restore_outcome::RestoreOutcome;
use crate::files::status::FilesStatus;
use crate::system::layout::Layout;
use svc_base::diagnosis::Findings;
use svc_base::quantity::pluralize;

const NEXT_STEP: &str =
    "run `journalctl -u svc-files -n 50` to find the cause, then `systemctl restart svc-files`";

const VERIFY_NEXT_STEP: &str = "run `svc-sync-agent verify`";

const KEY_NEXT_STEP: &str =
    "keep a copy of /var/lib/svc/files/key outside this machine, and tell the platform's operator";

const RETRY_NEXT_STEP: &str = "repair the store, then run `svc-sync-agent restore-home --retry`; as a last \
                               resort, add `--skip-damaged` to skip damaged files and directories, or use \
                               `--give-up` to keep the machine's own files";

pub fn check(layout: &Layout) -> Findings {
    let findings = Findings::new("file-backup");
    match RestoreOutcome::read(layout) {
        Ok(Some(RestoreOutcome { error: Some(error), .. })) => {
            let what = format!(
                "the previous machine's files have not been restored, and no files are being saved: {error}"
            );
            return findings.problem(what, RETRY_NEXT_STEP);
        }
        Ok(_) => {}
        Err(error) => return findings.skipped(format!("{error}; run the doctor as root")),
    }
    let status = match FilesStatus::read(layout) {
        Ok(Some(status)) => status,
        Ok(None) if layout.restore_complete().exists() => {
            return findings.warning("the owner's files have not been saved yet", NEXT_STEP);
        }
        Ok(None) => return findings.ok("the machine is not in use yet"),
        Err(error) => return findings.skipped(format!("{error}; run the doctor as root")),
    };
    let now = Timestamp::now();
    if status.is_unsaved(now) {
        let reason = status.error.map(|error| format!(": {error}")).unwrap_or_default();
        return findings
            .problem(format!("changes to the owner's files have not been saved{reason}"), NEXT_STEP);
    }
    let checks = FileChecks::read(layout).unwrap_or_default();
    if let Some(problem) = checks.find_problem() {
        return findings.problem(format!("the file backup is damaged: {problem}"), VERIFY_NEXT_STEP);
    }
    if let Some(problem) = &status.key_problem {
        return findings.problem(format!("the file backup cannot be restored: {problem}"), KEY_NEXT_STEP);
    }
    if let Some(failure) = checks.find_failure(now) {
        return findings.problem(format!("the file backup may be damaged: {failure}"), VERIFY_NEXT_STEP);
    }
    let Some(saved_until) = status.saved_until else {
        return findings.ok("the first save of the owner's files has not completed yet");
    };
    let age = now.duration_since(saved_until).as_secs().max(0);
    let what = format!("{} saved as of {age} s ago", pluralize(status.files, "file"));
    if status.unreadable == 0 {
        return findings.ok(what);
    }
    let first = status.first_unreadable.unwrap_or_default();
    findings.warning(
        format!("{what}, but {} could not be read (first: {first})", pluralize(status.unreadable, "item")),
        "run `journalctl -u svc-files -n 50`",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use svc_base::diagnosis::Level;

    #[test]
    fn check_reports_invalid_state_as_problem() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        std::fs::create_dir_all(layout.files_state()).unwrap();
        std::fs::write(layout.files_state().join("status.json"), "{").unwrap();
        let findings = check(&layout).into_list();
        assert_eq!((findings.len(), findings[0].level), (1, Level::Problem), "{findings:?}");
        assert!(findings[0].what.contains("state of the file backup is invalid"), "{findings:?}");
    }
}
