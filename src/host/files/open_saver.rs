//! Opens a [`Saver`] on the slot's repository, based on the pointer's current snapshot.

use svc_files::save::{SaveOptions, Saver, read_parent};
use svc_files::{Id, Snapshot};
use svc_store::files_pointer::{self, FilesSnapshotRef};
use svc_store::pointer_io::PointerError;

use super::access::{AccessError, FilesSettings};
use super::home_path::DISPLAY_HOME;
use super::restore_outcome::RestoreOutcome;
use super::save_error::SaveError;

pub(super) struct OpenSaver {
    pub(super) saver: Saver,
    /// Snapshot the next save diffs against; `None` if missing or corrupt.
    pub(super) parent: Option<(Id, Snapshot)>,
    /// Whether this machine took the pointer's snapshot.
    pub(super) is_parent_from_this_machine: bool,
    /// Snapshot id in the pointer.
    pub(super) pointer_target: Option<String>,
}

impl OpenSaver {
    /// Opens the saver. If the platform didn't send the repository key and this machine's own was used, also returns
    /// the reason.
    ///
    /// # Errors
    /// [`AccessError`] if the repository can't be opened, or if this machine hasn't restored its predecessor's files;
    /// [`PointerError::Fenced`] if this machine has been replaced; other errors if the store fails.
    pub(super) async fn open(settings: &FilesSettings) -> Result<(Self, Option<AccessError>), SaveError> {
        let (repository, key_error) = settings.open_or_create().await?;
        let latest = read_latest(settings).await?;
        ensure_latest_was_restored(settings, latest.as_ref())?;
        let identity = &settings.identity;
        let is_parent_from_this_machine =
            latest.as_ref().is_some_and(|latest| latest.machine_id == identity.machine);
        let pointer_target = latest.map(|snapshot| snapshot.id);
        let parent = match pointer_target.as_deref().and_then(|id| id.parse::<Id>().ok()) {
            Some(id) => read_parent(&repository, id).await?,
            None => None,
        };
        let options = SaveOptions {
            shown_path: DISPLAY_HOME.to_owned(),
            hostname: identity.handle.to_string(),
            username: "svc".to_owned(),
            system_root: settings.layout.root().to_owned(),
            max_bytes_per_second: settings.max_bytes_per_second,
            ..SaveOptions::new(settings.layout.user_home(), settings.origin())
        };
        let saver = Saver::new(repository, options);
        Ok((Self { saver, parent, is_parent_from_this_machine, pointer_target }, key_error))
    }

    /// Whether the stored pointer still references the same snapshot.
    ///
    /// # Errors
    /// [`PointerError::Fenced`] if this machine has been replaced; others if the store fails.
    pub(super) async fn is_pointer_current(&self, settings: &FilesSettings) -> Result<bool, SaveError> {
        let latest = read_latest(settings).await?;
        Ok(latest.map(|snapshot| snapshot.id) == self.pointer_target)
    }

    /// Returns the parent's id if that snapshot is gone from the store. It may still be in the local cache.
    ///
    /// # Errors
    /// If the store fails.
    pub(super) async fn find_lost_parent(&self) -> Result<Option<Id>, SaveError> {
        let Some((id, _)) = &self.parent else { return Ok(None) };
        Ok(if self.saver.has_snapshot(*id).await? { None } else { Some(*id) })
    }
}

/// Returns the pointer's snapshot. Fails on a replaced machine, since the pointer would never advance to its new
/// snapshots.
async fn read_latest(settings: &FilesSettings) -> Result<Option<FilesSnapshotRef>, SaveError> {
    let Some(pointer) = files_pointer::read(&settings.bucket, &settings.slot).await? else { return Ok(None) };
    let pointer = pointer.value;
    pointer.admit(settings.epoch(), settings.identity.machine).map_err(PointerError::from)?;
    Ok(pointer.snapshot)
}

/// Fails if this machine hasn't restored its predecessor's files, which happens if it was set up by an older release
/// that didn't restore files.
fn ensure_latest_was_restored(
    settings: &FilesSettings,
    latest: Option<&FilesSnapshotRef>,
) -> Result<(), SaveError> {
    let identity = &settings.identity;
    // Compare with the provisioning epoch: undoing a recovery raises the current one, and the machine from that
    // recovery isn't a predecessor.
    let is_from_predecessor =
        latest.is_some_and(|latest| latest.machine_id != identity.machine && latest.epoch < identity.epoch);
    if is_from_predecessor && RestoreOutcome::read(&settings.layout).map_err(AccessError::File)?.is_none() {
        return Err(AccessError::NotRestored.into());
    }
    Ok(())
}
