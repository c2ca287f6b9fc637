//! A saver for the slot's repository, opened at the snapshot that the pointer names.

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
    /// The snapshot with which the next save compares the files; `None` if there is none, or if it is damaged.
    pub(super) parent: Option<(Id, Snapshot)>,
    /// Whether this machine took the snapshot that the pointer names.
    pub(super) is_parent_from_this_machine: bool,
    /// The id of the snapshot that the pointer names.
    pub(super) pointer_target: Option<String>,
}

impl OpenSaver {
    /// Opens the saver. Also returns why the platform has not sent the repository's key, if this machine's own key was
    /// used.
    ///
    /// # Errors
    /// [`AccessError`] if the repository cannot be opened, or if this machine has not restored its predecessor's files;
    /// [`PointerError::Fenced`] if this machine has been replaced; others if the store fails.
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

    /// Whether the pointer in the store still names the same snapshot.
    ///
    /// # Errors
    /// [`PointerError::Fenced`] if this machine has been replaced; others if the store fails.
    pub(super) async fn is_pointer_current(&self, settings: &FilesSettings) -> Result<bool, SaveError> {
        let latest = read_latest(settings).await?;
        Ok(latest.map(|snapshot| snapshot.id) == self.pointer_target)
    }

    /// Returns the parent's id if the store no longer has that snapshot, which may still be in the machine's cache.
    ///
    /// # Errors
    /// If the store fails.
    pub(super) async fn find_lost_parent(&self) -> Result<Option<Id>, SaveError> {
        let Some((id, _)) = &self.parent else { return Ok(None) };
        Ok(if self.saver.has_snapshot(*id).await? { None } else { Some(*id) })
    }
}

/// Returns the snapshot that the pointer names. Fails on a machine that has been replaced, because the pointer would
/// never move to its new snapshots.
async fn read_latest(settings: &FilesSettings) -> Result<Option<FilesSnapshotRef>, SaveError> {
    let Some(pointer) = files_pointer::read(&settings.bucket, &settings.slot).await? else { return Ok(None) };
    let pointer = pointer.value;
    pointer.admit(settings.epoch(), settings.identity.machine).map_err(PointerError::from)?;
    Ok(pointer.snapshot)
}

/// Returns an error if this machine has not restored its predecessor's files. This happens if the machine was set up by
/// an earlier release that did not restore files.
fn ensure_latest_was_restored(
    settings: &FilesSettings,
    latest: Option<&FilesSnapshotRef>,
) -> Result<(), SaveError> {
    let identity = &settings.identity;
    // Compare with the epoch at provisioning: the current one was raised if a recovery was undone, and the machine of
    // that recovery is not a predecessor.
    let is_from_predecessor =
        latest.is_some_and(|latest| latest.machine_id != identity.machine && latest.epoch < identity.epoch);
    if is_from_predecessor && RestoreOutcome::read(&settings.layout).map_err(AccessError::File)?.is_none() {
        return Err(AccessError::NotRestored.into());
    }
    Ok(())
}
