//! Text view of a slot's file backups.

use secrecy::ExposeSecret;

use super::human::{format_bytes, format_time};
use super::table::{self, Cell};
use super::{Color, View};
use crate::args::SlotTarget;
use svc_base::quantity::pluralize;
use svc_base::untrusted_text::one_line;
use svc_wire::files::{
    ExcludedFiles, FileBackupStatus, FileEntry, FileKind, FileListing, FileRestore, FileVersions,
    FilesAccess, FilesPrunePlan, FilesUsage,
};
use svc_wire::host::FileBackupReport;
use svc_wire::text::Time;

/// Formats a machine's file-backup status as `saved 2026-01-01 00:00:00 UTC, 5 s ago; 1234 files, 5.0 GiB`.
pub fn cell(view: &View, report: &FileBackupReport) -> Cell {
    let saved = match report.saved_until.as_deref() {
        Some(at) => format!("saved {}", format_time(view.now, at)),
        None => "not saved yet".to_owned(),
    };
    let mut line = format!("{saved}; {}, {}", pluralize(report.files, "file"), format_bytes(report.bytes));
    if let Some(bytes) = report.pending_bytes {
        line.push_str(&format!("; {} of changes not saved yet", format_bytes(bytes)));
    }
    if let Some(at) = report.restored_as_of.as_deref() {
        line.push_str(&format!("; restored as of {}", format_time(view.now, at)));
    }
    if let Some(at) = report.verified_at.as_deref() {
        line.push_str(&format!("; verified {}", format_time(view.now, at)));
    }
    if let Some(damage) = &report.damage {
        return Cell::colored(Some(Color::Bad), format!("{line}; damaged: {damage}"));
    }
    match &report.error {
        Some(error) => Cell::colored(Some(Color::Bad), format!("{line}; the last save failed: {error}")),
        None => line.into(),
    }
}

/// Shows the slot's repository location and plaintext password.
pub fn access(view: &View, slot: &SlotTarget, access: &FilesAccess) -> String {
    let pairs = [
        ("slot", slot.to_string().into()),
        ("repository", access.repository.clone().into()),
        ("password", access.key.key.expose_secret().to_owned().into()),
    ];
    table::render_pairs(view, &pairs)
}

/// Shows a machine's file-backup status.
pub fn status(view: &View, status: &FileBackupStatus) -> String {
    let time = |at: &Option<Time>| {
        at.as_deref().map_or_else(|| "not yet".to_owned(), |at| format_time(view.now, at))
    };
    let bad = |text: String| Cell::colored(Some(Color::Bad), one_line(&text).into_owned());
    let mut pairs = vec![("saved", Cell::from(time(&status.saved_until)))];
    if status.changed_since.is_some() {
        let bytes =
            status.pending_bytes.map_or_else(String::new, |bytes| format!(", {}", format_bytes(bytes)));
        pairs.push(("not saved", format!("changes since {}{bytes}", time(&status.changed_since)).into()));
    }
    let counted = format!("{}, {} at the last full scan", status.files, format_bytes(status.bytes));
    pairs.push(("files", counted.into()));
    if let Some(excluded) = &status.excluded {
        pairs.extend(excluded_pairs(view, excluded));
    }
    if status.unreadable > 0 {
        let first = status.first_unreadable.as_deref().unwrap_or_default();
        pairs.push(("unreadable", bad(format!("{} (first: {first})", status.unreadable))));
    }
    if status.unstable > 0 {
        let files = pluralize(status.unstable, "file");
        pairs.push(("unstable", format!("{files} changed during every read").into()));
    }
    pairs.extend(status.invalid_rules.iter().map(|line| (".svcignore", bad(format!("invalid: {line}")))));
    pairs.push(("verified", time(&status.verified_at).into()));
    pairs.push(("drilled", time(&status.drilled_at).into()));
    pairs.extend(status.damage.iter().map(|damage| ("damaged", bad(damage.clone()))));
    pairs.extend(status.error.iter().map(|error| ("error", bad(error.clone()))));
    table::render_pairs(view, &pairs)
}

/// Returns rows for the excluded files' total size and the largest entries.
fn excluded_pairs(view: &View, excluded: &ExcludedFiles) -> Vec<(&'static str, Cell)> {
    let measured = format_time(view.now, &excluded.measured_at);
    let mut pairs = vec![("excluded", format!("{excluded}; measured {measured}").into())];
    pairs.extend(
        excluded.largest.iter().map(|file| ("", Cell::from(one_line(&file.to_string()).into_owned()))),
    );
    pairs
}

/// Shows how much storage the slot's file backups use.
pub fn usage(view: &View, slot: &SlotTarget, usage: &FilesUsage) -> String {
    let time =
        |at: &Option<Time>| at.as_deref().map_or_else(|| "never".to_owned(), |at| format_time(view.now, at));
    let snapshots = match usage.snapshots {
        0 => "none".to_owned(),
        count => format!(
            "{count}, from {} to {}",
            time(&usage.oldest_snapshot_at),
            time(&usage.newest_snapshot_at)
        ),
    };
    let mut pairs = vec![
        ("slot", Cell::from(slot.to_string())),
        ("snapshots", snapshots.into()),
        ("packs", format!("{}, {}", usage.packs, format_bytes(usage.pack_bytes)).into()),
        ("total", format_bytes(usage.total_bytes).into()),
        ("pruned", time(&usage.pruned_at).into()),
    ];
    if let Some(error) = &usage.prune_error {
        pairs.push(("prune failed", Cell::colored(Some(Color::Bad), one_line(error).into_owned())));
    }
    table::render_pairs(view, &pairs)
}

/// Shows what a prune would do.
pub fn prune_plan(view: &View, slot: &SlotTarget, plan: &FilesPrunePlan) -> String {
    let bytes = format_bytes(plan.reclaimable_bytes);
    let pairs = [
        ("slot", slot.to_string().into()),
        ("snapshots", format!("{} kept, {} removed", plan.kept_snapshots, plan.removed_snapshots).into()),
        ("packs", format!("{} marked for deletion; {bytes} can be freed", plan.marked_packs).into()),
        ("deleted now", pluralize(plan.deleted_packs, "pack").into()),
    ];
    table::render_pairs(view, &pairs)
}

/// Shows a page of versions, newest first.
pub fn versions(view: &View, page: &FileVersions) -> String {
    if page.versions.is_empty() {
        return format!("no saved versions of {}\n", one_line(&page.path));
    }
    let rows: Vec<Vec<Cell>> = page
        .versions
        .iter()
        .map(|version| {
            let [size, mode, modified] = match &version.entry {
                Some(entry) => entry_cells(view, entry),
                None => ["did not exist".into(), "".into(), "".into()],
            };
            let time = |at: &str| Cell::from(at.to_owned());
            vec![time(&version.first_saved_at), time(&version.last_saved_at), size, mode, modified]
        })
        .collect();
    let mut text = table::render(view, &["FIRST SAVED", "LAST SAVED", "SIZE", "MODE", "MODIFIED"], &rows);
    if page.damaged_snapshots > 0 {
        let snapshots = pluralize(page.damaged_snapshots, "damaged snapshot");
        text.push_str(&format!("{snapshots} could not be searched\n"));
    }
    if let Some(before) = &page.next_before {
        text.push_str(&format!(
            "earlier versions: repeat the command with `--before {}`\n",
            one_line(before)
        ));
    }
    text
}

/// Formats an entry's size (or kind), mode and modification time.
fn entry_cells(view: &View, entry: &FileEntry) -> [Cell; 3] {
    let size = match entry.kind {
        FileKind::File => format_bytes(entry.size_bytes),
        kind => kind.to_string(),
    };
    [size.into(), entry.mode.clone().into(), format_time(view.now, &entry.modified_at).into()]
}

/// Lists a directory, or shows a single non-directory entry.
pub fn listing(view: &View, page: &FileListing) -> String {
    let is_directory = page.entry.kind == FileKind::Directory;
    let entries = if is_directory { &page.entries[..] } else { std::slice::from_ref(&page.entry) };
    let rows: Vec<Vec<Cell>> = entries
        .iter()
        .map(|entry| {
            let [size, mode, modified] = entry_cells(view, entry);
            let target = entry.target.as_ref().map_or_else(String::new, |target| format!(" -> {target}"));
            vec![size, mode, modified, one_line(&format!("{}{target}", entry.name)).into_owned().into()]
        })
        .collect();
    let mut text = format!("{} as of {}\n", one_line(&page.path), one_line(&page.saved_at));
    if !rows.is_empty() {
        text.push_str(&table::render(view, &["SIZE", "MODE", "MODIFIED", "NAME"], &rows));
    }
    if page.next_cursor.is_some() {
        let count = page.entries.len();
        text.push_str(&format!("only the first {count} entries are shown; list a subdirectory\n"));
    }
    text
}

/// Shows the result of a restore.
pub fn restored(view: &View, state: &FileRestore) -> String {
    let or_empty =
        |text: Option<&str>| Cell::from(text.map_or_else(String::new, |text| one_line(text).into_owned()));
    let mut pairs = vec![
        ("restored to", or_empty(state.restored_to.as_deref())),
        ("as of", or_empty(state.saved_at.as_deref())),
        ("files", format!("{}, {}", state.files, format_bytes(state.total_bytes)).into()),
    ];
    if let Some(path) = &state.kept_as {
        pairs.push(("previous version", one_line(path).into_owned().into()));
    }
    if state.incomplete > 0 {
        let message = format!(
            "the owner, mode, times or attributes of {} could not be set",
            pluralize(state.incomplete, "item")
        );
        pairs.push(("incomplete", Cell::colored(Some(Color::Bad), message)));
    }
    if let Some(error) = &state.error {
        pairs.push(("damaged", Cell::colored(Some(Color::Bad), one_line(error).into_owned())));
    }
    table::render_pairs(view, &pairs)
}
