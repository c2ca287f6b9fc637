//! `svc-sync-agent status` and `svc-sync-agent now`: commands run by hand on the machine.

use anyhow::anyhow;
use jiff::Timestamp;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::clock;
use svc_base::quantity::pluralize;
use svc_base::stdout;
use svc_base::untrusted_text::one_line;
use svc_wire::files::ExcludedFiles;

use super::checks::FileChecks;
use super::restore_outcome::RestoreOutcome;
use super::save_request::{self, SaveRequestError};
use super::status::FilesStatus;
use crate::system::layout::Layout;

/// Maximum number of excluded entries to list.
const MAX_SHOWN_EXCLUDED: usize = 5;

/// Prints the file-backup status.
///
/// # Errors
/// `Unavailable` if files couldn't be restored, the file backup has never run, changes have gone unsaved for too long,
/// or the saved state is unknown; `Internal` if the status can't be read.
pub fn show_status(layout: &Layout) -> Result<(), Failure> {
    let status = FilesStatus::read(layout).or_exit(Exit::Internal)?;
    let outcome = RestoreOutcome::read(layout).or_exit(Exit::Internal)?;
    let checks = FileChecks::read(layout).or_exit(Exit::Internal)?;
    let now = Timestamp::now();
    let text = describe_status(status.as_ref(), outcome.as_ref(), now) + &describe_checks(&checks, now);
    stdout::print(&text)?;
    let has_failed = outcome.is_some_and(|outcome| outcome.error.is_some());
    let is_unsaved = status.is_none_or(|status| status.is_unsaved(now));
    if has_failed || is_unsaved {
        return Err(Failure::new(Exit::Unavailable, anyhow!("the owner's files are not being saved")));
    }
    Ok(())
}

fn describe_checks(checks: &FileChecks, now: Timestamp) -> String {
    let age = |at: Timestamp| format!("{} h ago", now.duration_since(at).as_hours().max(0));
    let mut rows: Vec<(&str, String)> = Vec::new();
    if let Some((verify, at)) = checks.verify.as_ref().and_then(|verify| Some((verify, verify.at?))) {
        let result = verify.error.clone().unwrap_or_else(|| pluralize(verify.packs, "pack"));
        rows.push(("verified", format!("{}: {result}", age(at))));
    }
    if let Some((drill, at)) = checks.drill.as_ref().and_then(|drill| Some((drill, drill.at?))) {
        let compared = format!("{}, {} compared", pluralize(drill.files, "file"), drill.compared);
        let result = drill.error.clone().unwrap_or(compared);
        rows.push(("drilled", format!("{}: {result}", age(at))));
    }
    rows.extend(checks.find_problem().map(|problem| ("damaged", problem)));
    format_rows(&rows)
}

fn describe_status(status: Option<&FilesStatus>, outcome: Option<&RestoreOutcome>, now: Timestamp) -> String {
    let time = |at: Timestamp| {
        format!("{}, {} s ago", clock::rfc3339_ms(at), now.duration_since(at).as_secs().max(0))
    };
    let mut rows: Vec<(&str, String)> = Vec::new();
    match status {
        None => rows.push(("saved", "not yet: svc-files has not run".to_owned())),
        Some(status) => {
            rows.push(("saved", status.saved_until.map_or_else(|| "not yet".to_owned(), time)));
            rows.extend(status.changed_since.map(|at| ("changed", format!("{}; not saved yet", time(at)))));
            rows.push(("files", format!("{}, {} bytes at the last full scan", status.files, status.bytes)));
            rows.extend(status.snapshot.as_ref().map(|id| ("snapshot", id.clone())));
            let items = |count: u64| pluralize(count, "item");
            match &status.excluded_files {
                Some(excluded) => rows.extend(describe_excluded(excluded)),
                None => rows.push(("excluded", items(status.excluded))),
            }
            if status.special > 0 {
                let special = items(status.special);
                rows.push((
                    "special",
                    format!("{special} at the last full scan: sockets, FIFOs and devices are not saved"),
                ));
            }
            if status.unreadable > 0 {
                let first = status.first_unreadable.as_deref().unwrap_or_default();
                rows.push(("unreadable", format!("{} (first: {first})", items(status.unreadable))));
            }
            if status.unstable > 0 {
                let files = pluralize(status.unstable, "file");
                rows.push(("unstable", format!("{files} changed during every read")));
            }
            rows.extend(status.notes.iter().map(|note| ("note", note.clone())));
            rows.extend(status.invalid_rules.iter().map(|line| (".svcignore", format!("invalid: {line}"))));
            rows.extend(status.error.as_ref().map(|error| ("error", error.clone())));
            rows.extend(status.key_problem.as_ref().map(|problem| ("key", problem.clone())));
        }
    }
    match outcome {
        Some(RestoreOutcome { error: Some(error), .. }) => {
            rows.push((
                "restored",
                format!("no: {error}; run `svc-sync-agent restore-home --retry` as root"),
            ));
        }
        Some(RestoreOutcome { is_given_up: true, .. }) => {
            rows.push(("restored", "no: an operator decided to keep the machine's own files".to_owned()));
        }
        Some(RestoreOutcome { taken_at: Some(at), files, .. }) => {
            rows.push((
                "restored",
                format!("{} as of {}", pluralize(*files, "file"), clock::rfc3339_ms(*at)),
            ));
        }
        _ => {}
    }
    format_rows(&rows)
}

/// Formats each row as a single line. File names come from the owner's programs and may contain line breaks or other
/// control characters.
fn format_rows(rows: &[(&str, String)]) -> String {
    rows.iter().map(|(name, text)| format!("{name:<11} {}\n", one_line(text))).collect()
}

/// Returns the rows for excluded entries: the total, then the largest.
fn describe_excluded(excluded: &ExcludedFiles) -> Vec<(&'static str, String)> {
    let largest = excluded.largest.iter().take(MAX_SHOWN_EXCLUDED).map(|file| ("", file.to_string()));
    std::iter::once(("excluded", excluded.to_string())).chain(largest).collect()
}

/// Requests a save and waits until everything written before the request is saved.
///
/// # Errors
/// `Unavailable` if the save fails or times out; `Internal` if it can't be requested or its status can't be read.
pub async fn save_now(layout: &Layout) -> Result<(), Failure> {
    let status = save_request::save_now(layout).await.map_err(|error| match error {
        SaveRequestError::File(error) => Failure::new(Exit::Internal, error),
        error => Failure::new(Exit::Unavailable, error),
    })?;
    let at = status.saved_until.map_or_else(String::new, clock::rfc3339_ms);
    println!("files saved as of {at}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use svc_wire::files::ExcludedFile;

    use super::*;
    use crate::files::checks::DrillResult;

    #[test]
    fn file_name_with_line_break_stays_in_one_row() {
        let drill = DrillResult {
            at: Some(Timestamp::UNIX_EPOCH),
            differing_count: 1,
            differing: vec!["home/x\nsaved       now".to_owned()],
            error: Some("cannot open home/y\nsaved       now".to_owned()),
            ..DrillResult::default()
        };
        let mut checks = FileChecks::default();
        checks.drill = Some(drill);
        let text = describe_checks(&checks, Timestamp::UNIX_EPOCH);
        let names: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(names, ["drilled", "damaged"], "{text}");
        assert!(text.contains("home/x; saved"), "{text}");
    }

    #[test]
    fn describe_status_includes_saved_and_unsaved_state() {
        let at = |second: i64| Timestamp::from_second(second).unwrap();
        let none = describe_status(None, None, at(0));
        assert_eq!(none, "saved       not yet: svc-files has not run\n");
        let mut status = FilesStatus::default();
        (status.saved_until, status.changed_since) = (Some(at(100)), Some(at(130)));
        (status.files, status.bytes, status.unreadable, status.unstable) = (3, 12, 1, 2);
        status.first_unreadable = Some("home/x".to_owned());
        let largest = ExcludedFile { path: "home/a/node_modules".to_owned(), entries: 9, bytes: 2048 };
        let excluded = ExcludedFiles { entries: 10, bytes: 4096, ..ExcludedFiles::default() };
        status.excluded_files = Some(ExcludedFiles { largest: vec![largest], ..excluded });
        status.error = Some("the store is unreachable".to_owned());
        status.notes = vec!["special file: home/socket".to_owned()];
        let mut outcome = RestoreOutcome::default();
        (outcome.taken_at, outcome.files) = (Some(at(50)), 2);
        let text = describe_status(Some(&status), Some(&outcome), at(140));
        for part in [
            "40 s ago",
            "10 s ago; not saved yet",
            "3, 12 bytes",
            "(first: home/x)",
            "excluded    at least 10 items, 4.0 KiB\n",
            "            home/a/node_modules: 9 items, 2.0 KiB\n",
            "the store is unreachable",
            "note        special file: home/socket\n",
            "2 files as of",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        let failed = RestoreOutcome { error: Some("damaged".to_owned()), ..RestoreOutcome::default() };
        assert!(
            describe_status(None, Some(&failed), at(0))
                .contains("no: damaged; run `svc-sync-agent restore-home --retry`")
        );
    }
}
