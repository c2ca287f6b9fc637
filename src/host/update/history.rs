//! Persistent update records: last outcome, history, previous release and quarantined releases.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::protocol::{FORMAT_VERSION, Outcome};
use super::releases;
use crate::system::layout::Layout;
use crate::system::release;
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::{self, FileError};
use svc_machine::name::ImageVersion;

/// Maximum number of history entries.
const MAX_HISTORY_LINES: usize = 200;
/// Releases to retain in addition to the current and the previous one.
const EXTRA_RELEASES: usize = 1;

#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{} is malformed or has an unsupported version", .path.display())]
    Unreadable { path: PathBuf },
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

/// Line in `history.jsonl`. The newest one is also in `last.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HistoryEntry {
    pub format: u32,
    pub id: Uuid,
    pub from: ImageVersion,
    #[serde(with = "svc_base::clock::wire")]
    pub started_at: Timestamp,
    pub request_id: String,
    #[serde(flatten)]
    pub outcome: Outcome,
}

impl HistoryEntry {
    pub fn new(
        id: Uuid,
        from: ImageVersion,
        started_at: Timestamp,
        request_id: String,
        outcome: Outcome,
    ) -> Self {
        Self { format: FORMAT_VERSION, id, from, started_at, request_id, outcome }
    }
}

/// Writes the entry to `last.json` and appends it to the history. Idempotent.
pub fn record(layout: &Layout, entry: &HistoryEntry) -> Result<(), HistoryError> {
    let line = serde_json::to_string(entry).expect("plain fields serialize to JSON");
    fsx::write_atomic(&layout.last_update(), line.as_bytes(), 0o644)?;
    failpoint::trigger("update.outcome_recorded")?;
    let mut entries = read_history(layout)?;
    if entries.iter().any(|existing| existing.id == entry.id) {
        return Ok(());
    }
    entries.push(entry.clone());
    let first = entries.len().saturating_sub(MAX_HISTORY_LINES);
    let mut text = Vec::new();
    for entry in &entries[first..] {
        serde_json::to_writer(&mut text, entry).expect("plain fields serialize to JSON");
        // Writing to a `Vec` can't fail.
        let _ = text.write_all(b"\n");
    }
    fsx::write_atomic(&history_path(layout), &text, 0o644)?;
    failpoint::trigger("update.history_written")?;
    Ok(())
}

fn history_path(layout: &Layout) -> PathBuf {
    layout.update_state().join("history.jsonl")
}

/// Returns the most recent finished updates, oldest first. Skips unparsable lines.
pub fn read_history(layout: &Layout) -> Result<Vec<HistoryEntry>, FileError> {
    let text = fsx::read_if_exists(&history_path(layout))?.unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReleaseRecord {
    version: u32,
    /// Target of `svc-update rollback`. After a rollback, this is the current release, and another rollback is refused.
    previous: Option<ImageVersion>,
    quarantined: Vec<QuarantinedRelease>,
}

/// A release that was rolled back on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QuarantinedRelease {
    pub version: ImageVersion,
    #[serde(with = "svc_base::clock::wire")]
    pub at: Timestamp,
    pub why: String,
}

fn read_releases(layout: &Layout) -> Result<ReleaseRecord, HistoryError> {
    let path = layout.update_state().join("releases.json");
    let Some(text) = fsx::read_if_exists(&path)? else { return Ok(ReleaseRecord::default()) };
    match serde_json::from_slice::<ReleaseRecord>(&text) {
        Ok(releases) if releases.version == FORMAT_VERSION => Ok(releases),
        _ => Err(HistoryError::Unreadable { path }),
    }
}

fn update_releases(layout: &Layout, change: impl FnOnce(&mut ReleaseRecord)) -> Result<(), HistoryError> {
    let mut releases = read_releases(layout)?;
    change(&mut releases);
    releases.version = FORMAT_VERSION;
    let text = serde_json::to_vec_pretty(&releases).expect("plain fields serialize to JSON");
    Ok(fsx::write_atomic(&layout.update_state().join("releases.json"), &text, 0o644)?)
}

/// Returns the previous release if it is still installed. After `svc-update rollback`, that's the current release
/// itself.
pub fn find_previous(layout: &Layout) -> Result<Option<ImageVersion>, HistoryError> {
    Ok(read_releases(layout)?.previous.filter(|version| layout.release(version).is_dir()))
}

pub fn record_previous(layout: &Layout, version: &ImageVersion) -> Result<(), HistoryError> {
    update_releases(layout, |releases| releases.previous = Some(version.clone()))
}

pub fn read_quarantined(layout: &Layout) -> Result<Vec<QuarantinedRelease>, HistoryError> {
    Ok(read_releases(layout)?.quarantined)
}

pub fn quarantine(
    layout: &Layout,
    version: &ImageVersion,
    at: Timestamp,
    reason: &str,
) -> Result<(), HistoryError> {
    update_releases(layout, |releases| {
        releases.quarantined.retain(|other| other.version != *version);
        releases.quarantined.push(QuarantinedRelease {
            version: version.clone(),
            at,
            why: reason.to_owned(),
        });
        if releases.previous.as_ref() == Some(version) {
            releases.previous = None;
        }
    })
}

pub fn unquarantine(layout: &Layout, version: &ImageVersion) -> Result<(), HistoryError> {
    update_releases(layout, |releases| releases.quarantined.retain(|other| other.version != *version))
}

/// Removes all releases except the current one, the previous one, and the most recently unpacked of the remaining ones
/// that aren't quarantined.
pub fn prune(layout: &Layout) -> Result<(), HistoryError> {
    let Some(current) = release::current_version(layout) else { return Ok(()) };
    let releases = read_releases(layout)?;
    let mut others: Vec<_> = releases::list_versions(layout)?
        .into_iter()
        .filter(|version| *version != current && Some(version) != releases.previous.as_ref())
        .map(|version| {
            let is_quarantined = releases.quarantined.iter().any(|other| other.version == version);
            let modified_at = fs::metadata(layout.release(&version)).and_then(|meta| meta.modified()).ok();
            (!is_quarantined, modified_at, version)
        })
        .collect();
    others.sort();
    let usable = others.iter().filter(|(is_usable, _, _)| *is_usable).count();
    let keep = usable.min(EXTRA_RELEASES);
    others.truncate(others.len() - keep);
    for (_, _, version) in others {
        let dir = layout.release(&version);
        // Rename first, so a partly removed directory is never mistaken for a release.
        let removed = layout.releases().join(format!(".{version}.partial-removed"));
        fs::rename(&dir, &removed).map_err(FileError::wrap("rename", &dir))?;
        fs::remove_dir_all(&removed).map_err(FileError::wrap("remove", &removed))?;
        tracing::info!(%version, "removed old release");
    }
    failpoint::trigger("update.pruned")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prune_keeps_current_previous_and_one_more() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let version = |text: &str| -> ImageVersion { text.parse().unwrap() };
        for name in ["1", "2", "3", "4", "5"] {
            let dir = layout.release(&version(name));
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("file"), "").unwrap();
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        fsx::symlink_atomic(std::path::Path::new("releases/2"), &layout.current()).unwrap();
        record_previous(&layout, &version("1")).unwrap();
        quarantine(&layout, &version("5"), Timestamp::UNIX_EPOCH, "x").unwrap();
        prune(&layout).unwrap();
        let kept: Vec<_> =
            releases::list_versions(&layout).unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(kept, ["1", "2", "4"]);
        prune(&layout).unwrap();
        assert_eq!(releases::list_versions(&layout).unwrap().len(), 3);
        assert_eq!(fs::read_dir(layout.releases()).unwrap().count(), 3);
    }

    #[test]
    fn record_is_idempotent_and_skips_torn_lines() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let outcome = Outcome {
            version: "2".parse().unwrap(),
            outcome: crate::update::protocol::UpdateResult::RolledBack,
            stage: "health".to_owned(),
            error: Some("x".to_owned()),
            at: Timestamp::UNIX_EPOCH,
        };
        let id = Uuid::new_v4();
        let entry = HistoryEntry::new(
            id,
            "1".parse().unwrap(),
            Timestamp::UNIX_EPOCH,
            "r".to_owned(),
            outcome.clone(),
        );
        record(&layout, &entry).unwrap();
        record(&layout, &entry).unwrap();
        assert_eq!(read_history(&layout).unwrap(), std::slice::from_ref(&entry));
        let last = crate::update::protocol::read_last(&layout).unwrap().unwrap();
        assert_eq!((last.outcome, last.request_id.as_deref()), (outcome, Some("r")));
        let mut text = fs::read(history_path(&layout)).unwrap();
        text.extend(b"{\"torn");
        fs::write(history_path(&layout), text).unwrap();
        record(&layout, &HistoryEntry { id: Uuid::new_v4(), ..entry }).unwrap();
        assert_eq!(read_history(&layout).unwrap().len(), 2);
    }
}
