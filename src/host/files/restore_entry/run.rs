//! Serves the pending request.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use rustix::io::Errno;
use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::chain::format_chain;
use svc_base::clock::{self, rfc3339_ms};
use svc_base::failpoint::{self, Injected};
use svc_base::fsx::FileError;
use svc_files::FilesError;
use svc_files::history::{EntryKind, History};
use svc_files::restore::{RestoreOptions, RestoreProgress, Restored, restore_entries};
use svc_wire::files::{FileRestore, FileRestoreStatus};

use super::put::Directory;
use super::request::{RestoreRequest, read_state, write_state};
use crate::files::access::{AccessError, FilesSettings, retry};
use crate::files::home_path::{HomePath, HomePathError, SHOWN_HOME};
use crate::files::owner::owner_ids;
use crate::files::save_request::{self, SaveRequestError};
use crate::files::staging::{ENTRY_STAGING, Staging};
use crate::system::activity;
use crate::system::layout::Layout;
use crate::system::lock::Lock;
use crate::system::quiesce::Quiesce;

/// How long the store may be unreachable before a request fails.
const OUTAGE_TIMEOUT: Duration = Duration::from_secs(600);
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// The entry's name in the staging directory.
const STAGED: &str = "entry";
const MAX_KEEP_ATTEMPTS: u32 = 10;
/// Maximum number of runs that start to restore the same entry: one that needs too much memory is killed each time.
const MAX_ATTEMPTS: u32 = 5;
const LOCK_FILE: &str = "entry-restore.lock";

/// The capabilities of `svc-files-request.service`: to give the files to the owner's user, and to reach directories that
/// only that user can enter.
pub const CAPABILITIES: CapabilitySet = crate::files::gate::CAPABILITIES;

/// The fail points of a restore.
pub const FAILPOINTS: &[&str] =
    &["files.entry.staged", "files.entry.exchanged", "files.entry.placed", "files.entry.recorded"];

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
enum RestoreError {
    #[error("the request names an invalid path: {0}")]
    Path(#[from] HomePathError),
    #[error("no files have been saved yet")]
    NothingSaved,
    #[error("there is no snapshot at or before {}", rfc3339_ms(*.0))]
    NoSnapshot(Timestamp),
    #[error("{path} did not exist at {}", rfc3339_ms(*.at))]
    NotFound { path: HomePath, at: Timestamp },
    #[error("{0} is a device, FIFO or socket, of which nothing is saved")]
    Special(HomePath),
    #[error("{0} is, or contains, a directory that only the machine writes; restore to another path")]
    Reserved(HomePath),
    #[error("{0} already exists; restore to another path, or replace it")]
    Taken(HomePath),
    #[error("{0} is on another file system than the home directory; choose another place with `into`")]
    OtherFileSystem(HomePath),
    #[error("the present state could not be saved, so nothing was replaced")]
    Unsaved(#[source] SaveRequestError),
    #[error("the platform has stopped this machine's writers for a final backup; nothing was restored")]
    Quiesced,
    #[error(
        "it was interrupted {MAX_ATTEMPTS} times, perhaps because the machine has too little memory for so many files; \
         restore a part of the directory"
    )]
    Killed,
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("cannot move the restored entry into place")]
    Move(#[from] Errno),
    #[error(transparent)]
    Injected(#[from] Injected),
}

impl RestoreError {
    fn is_transient(&self) -> bool {
        match self {
            Self::Access(error) => error.is_transient(),
            Self::Files(error) => error.is_transient(),
            _ => false,
        }
    }
}

/// What to do with a complete entry in the staging directory. Names are bytes, because not all are text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Placement {
    request_id: String,
    /// The directory and the name for the entry, below the home directory.
    directory: Vec<u8>,
    name: Vec<u8>,
    /// The name under which the present entry is kept.
    kept_as: Option<Vec<u8>>,
    #[serde(flatten)]
    staged: Staged,
}

/// The content of the staging directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Staged {
    /// When the snapshot was taken.
    saved_at: Timestamp,
    /// The inode of the restored entry, which says where it is after an interrupted exchange.
    inode: u64,
    files: u64,
    bytes: u64,
    incomplete: u64,
}

impl Placement {
    fn shown(&self, name: &[u8]) -> String {
        let path = Path::new(SHOWN_HOME).join(bytes_to_name(&self.directory)).join(bytes_to_name(name));
        path.display().to_string()
    }
}

impl Placement {
    /// Explains why the entry cannot be moved to its place.
    fn explain(&self, error: Errno) -> RestoreError {
        let path = Path::new(&bytes_to_name(&self.directory)).join(bytes_to_name(&self.name));
        match error {
            Errno::EXIST => RestoreError::Taken(HomePath::from_relative(path)),
            Errno::XDEV => RestoreError::OtherFileSystem(HomePath::from_relative(path)),
            error => error.into(),
        }
    }
}

fn bytes_to_name(bytes: &[u8]) -> OsString {
    OsString::from_vec(bytes.to_vec())
}

/// Serves the pending request, if there is one.
///
/// # Errors
/// `Unavailable` if it fails. It is then removed: its state says why. A killed run is repeated.
pub async fn serve(layout: Layout) -> Result<(), Failure> {
    let _lock = Lock::take(&layout.files_state().join(LOCK_FILE)).or_exit(Exit::TryAgain)?;
    let Some(request) = RestoreRequest::read(&layout).or_exit(Exit::Internal)? else { return Ok(()) };
    let mut request = match request {
        Ok(request) => request,
        Err(error) => {
            RestoreRequest::remove(&layout).or_exit(Exit::Internal)?;
            return Err(Failure::new(Exit::Refused, error));
        }
    };
    let has_ended = |state: &FileRestore| state.request_id == request.request_id && state.status.has_ended();
    let staging = Staging::new(&layout, ENTRY_STAGING);
    // Before anything is removed: an interrupted run may have left the owner's present entry there. A directory of another
    // user has none; the restore then says so.
    if staging.ensure_own().is_ok()
        && let Err(error) = finish_exchange(&layout, &staging)
    {
        return Err(keep_trying(&layout, request.to_state(), error));
    }
    if read_state(&layout).or_exit(Exit::Internal)?.is_some_and(|state| has_ended(&state)) {
        // An earlier run was interrupted after its end. What cannot be removed is removed by the next restore.
        return clean_up(&layout, &staging).or_exit(Exit::Internal);
    }
    let settings = FilesSettings::read(layout)?;
    let layout = &settings.layout;
    let mut state = request.to_state();
    state.status = FileRestoreStatus::Running;
    write_progress(layout, &mut state);
    let result = restore(&settings, &staging, &mut request, &mut state).await;
    if matches!(find_exchanged(&staging), Ok(Some(_)))
        && let Err(error) = result
    {
        return Err(keep_trying(layout, state, error));
    }
    if result.is_err() {
        // First, because a full disk may be the reason, and then the state could not be written.
        remove_staging(&staging);
    }
    state.status = if result.is_ok() { FileRestoreStatus::Done } else { FileRestoreStatus::Failed };
    state.error = result.as_ref().err().map(|error| format_chain(error));
    write_state(layout, &mut state).or_exit(Exit::Internal)?;
    failpoint::pass("files.entry.recorded").or_exit(Exit::Internal)?;
    clean_up(layout, &staging).or_exit(Exit::Internal)?;
    activity::note(layout, &describe(&request, &state));
    result.map_err(|error| Failure::new(Exit::Unavailable, error))
}

/// Keeps the request, because the owner's present entry is still in the staging directory: the next run moves it.
fn keep_trying(layout: &Layout, mut state: FileRestore, error: RestoreError) -> Failure {
    state.status = FileRestoreStatus::Running;
    state.error = Some(format_chain(&error));
    write_progress(layout, &mut state);
    Failure::new(Exit::TryAgain, error)
}

/// Removes the served request, and what is left of the restore.
fn clean_up(layout: &Layout, staging: &Staging) -> Result<(), FileError> {
    remove_staging(staging);
    RestoreRequest::remove(layout)
}

/// Removes the staging directory. If that fails, the next restore removes it, or says why it cannot. An entry of the owner
/// that was exchanged for the restored one, and could not be moved yet, is kept for the next run.
fn remove_staging(staging: &Staging) {
    if matches!(find_exchanged(staging), Err(_) | Ok(Some(_))) {
        return;
    }
    if let Err(error) = staging.remove() {
        tracing::warn!(error = %format_chain(&error), "cannot remove the staging directory of a restore");
    }
}

/// Writes the progress, which is written again at the end.
fn write_progress(layout: &Layout, state: &mut FileRestore) {
    if let Err(error) = write_state(layout, state) {
        tracing::debug!(error = %format_chain(&error), "cannot write the progress of a restore");
    }
}

fn describe(request: &RestoreRequest, state: &FileRestore) -> String {
    match (&state.restored_to, &state.error) {
        (Some(restored_to), None) => {
            let at = state.saved_at.as_ref().map_or("an unknown time", |at| at.as_str());
            let kept = state
                .kept_as
                .as_ref()
                .map_or_else(String::new, |kept| format!("; what was there is now {kept}"));
            format!("restored {} as it was at {at} to {restored_to}{kept}", request.path)
        }
        (_, error) => {
            let why = error.as_deref().unwrap_or("no reason is known");
            format!("{} could not be restored: {why}", request.path)
        }
    }
}

async fn restore(
    settings: &FilesSettings,
    staging: &Staging,
    request: &mut RestoreRequest,
    state: &mut FileRestore,
) -> Result<(), RestoreError> {
    let complete = if staging.ensure_own()? { staging.read_complete::<Placement>()? } else { None };
    let owner = owner_ids(&settings.layout);
    let placement = match complete.filter(|placement| placement.request_id == request.request_id) {
        // An earlier run was interrupted while it moved the entry.
        Some(placement) => placement,
        None => {
            ensure_writable(&settings.layout)?;
            if request.attempts >= MAX_ATTEMPTS {
                return Err(RestoreError::Killed);
            }
            if let Err(error) = request.start_attempt(&settings.layout) {
                // The disk may be full. The restore frees space if it fails.
                tracing::warn!(error = %format_chain(&error), "cannot count an attempt to restore an entry");
            }
            stage(settings, request, state, staging, owner).await?
        }
    };
    failpoint::pass("files.entry.staged")?;
    // Otherwise, an earlier run has moved the entry, and was then interrupted.
    if find_inode(&staging.files().join(STAGED))? == Some(placement.staged.inode) {
        // The download may have taken long.
        ensure_writable(&settings.layout)?;
        put(&settings.layout, staging, &placement, owner)?;
    }
    state.kept_as = match finish_exchange(&settings.layout, staging)? {
        Some(kept) => Some(kept),
        None => find_kept(&settings.layout, &placement)?,
    };
    failpoint::pass("files.entry.placed")?;
    state.saved_at = Some(placement.staged.saved_at.into());
    state.restored_to = Some(placement.shown(&placement.name));
    let Staged { files, bytes, incomplete, .. } = placement.staged;
    (state.files, state.incomplete, state.total_bytes, state.written_bytes) =
        (files, incomplete, bytes, bytes);
    Ok(())
}

/// Refuses to change the home after its final save.
fn ensure_writable(layout: &Layout) -> Result<(), RestoreError> {
    let is_quiesced = Quiesce::read(layout)?.is_some_and(|quiesce| quiesce.quiesced_at.is_some());
    if is_quiesced || layout.superseded().exists() { Err(RestoreError::Quiesced) } else { Ok(()) }
}

/// Restores the entry to the staging directory, and decides where it goes.
async fn stage(
    settings: &FilesSettings,
    request: &RestoreRequest,
    state: &mut FileRestore,
    staging: &Staging,
    owner: Option<(u32, u32)>,
) -> Result<Placement, RestoreError> {
    let path: HomePath = request.path.parse()?;
    let wanted: HomePath = match &request.into {
        Some(into) => into.parse()?,
        None => path.clone(),
    };
    if wanted.is_reserved() {
        return Err(RestoreError::Reserved(wanted));
    }
    let (directory_path, name) = wanted.split().ok_or_else(|| RestoreError::Reserved(wanted.clone()))?;
    if request.replace {
        save_request::save_now(&settings.layout).await.map_err(RestoreError::Unsaved)?;
    }
    let counts = RestoreProgress::default();
    // The save before a replacement must not be the one that is restored; a repeated run restores the same one.
    let time = request.time.unwrap_or(request.requested_at);
    let attempt = async || restore_to_staging(settings, time, &path, staging, owner, &counts).await;
    let staged = tokio::select! {
        staged = retry(OUTAGE_TIMEOUT, RestoreError::is_transient, attempt) => staged?,
        never = show_progress(&counts, &settings.layout, state) => match never {},
    };
    let directory = Directory::open(&settings.layout.user_home(), directory_path, owner)?;
    let (name, kept_as) = match (directory.has(name)?, request.replace, &request.into) {
        (false, _, _) => (name.to_owned(), None),
        (true, true, _) => {
            (name.to_owned(), Some(directory.find_free_name(name, "replaced", clock::now_ms())?))
        }
        (true, false, None) => (directory.find_free_name(name, "restored", staged.saved_at)?, None),
        (true, false, Some(_)) => return Err(RestoreError::Taken(wanted)),
    };
    let placement = Placement {
        request_id: request.request_id.clone(),
        directory: directory_path.as_os_str().as_bytes().to_vec(),
        name: name.into_vec(),
        kept_as: kept_as.map(OsString::into_vec),
        staged,
    };
    staging.mark_complete(&placement)?;
    Ok(placement)
}

/// Restores the entry to the staging directory.
async fn restore_to_staging(
    settings: &FilesSettings,
    time: Timestamp,
    path: &HomePath,
    staging: &Staging,
    owner: Option<(u32, u32)>,
    counts: &RestoreProgress,
) -> Result<Staged, RestoreError> {
    let repository = settings.open_with_stored_key().await?.ok_or(RestoreError::NothingSaved)?;
    let history = History::open_for_restore(repository.clone()).await?;
    let (_, snapshot) = history.find_snapshot(Some(time)).ok_or(RestoreError::NoSnapshot(time))?;
    let at = snapshot.time;
    let entry = history.find(snapshot, path.as_path()).await?;
    let entry = entry.ok_or_else(|| RestoreError::NotFound { path: path.clone(), at })?;
    drop(history);
    if entry.kind() == EntryKind::Special {
        return Err(RestoreError::Special(path.clone()));
    }
    staging.clear()?;
    let options =
        RestoreOptions { owner, ..RestoreOptions::new(staging.files(), settings.layout.root().to_owned()) };
    let restored = restore_entries(&repository, [(&entry, STAGED.to_owned())], &options, counts).await?;
    if let Some(first) = &restored.first_incomplete {
        tracing::warn!(
            entries = restored.incomplete,
            first,
            "the mode, times or attributes of some files could not be restored"
        );
    }
    let Restored { files, bytes, incomplete, .. } = restored;
    let inode = find_inode(&staging.files().join(STAGED))?.unwrap_or(0);
    Ok(Staged { saved_at: at, inode, files, bytes, incomplete })
}

async fn show_progress(
    counts: &RestoreProgress,
    layout: &Layout,
    state: &mut FileRestore,
) -> std::convert::Infallible {
    loop {
        tokio::time::sleep(PROGRESS_INTERVAL).await;
        (state.total_bytes, state.written_bytes) = (counts.total_bytes(), counts.written_bytes());
        state.files = counts.total_files();
        write_progress(layout, state);
    }
}

/// Puts the restored entry into its place. A present one that it replaces is exchanged with it in one step, so that there
/// is an entry at each moment; [`finish_exchange`] then moves it beside the restored one.
fn put(
    layout: &Layout,
    staging: &Staging,
    placement: &Placement,
    owner: Option<(u32, u32)>,
) -> Result<(), RestoreError> {
    let staged = staging.files().join(STAGED);
    let path = bytes_to_name(&placement.directory);
    let directory = Directory::open(&layout.user_home(), Path::new(&path), owner)?;
    let name = bytes_to_name(&placement.name);
    if placement.kept_as.is_some() {
        match directory.exchange(&name, &staged) {
            Ok(()) => return Ok(failpoint::pass("files.entry.exchanged")?),
            // The owner's programs have removed it in the meantime.
            Err(Errno::NOENT) => {}
            Err(error) => return Err(placement.explain(error)),
        }
    }
    directory.take(&staged, &name).map_err(|error| placement.explain(error))
}

/// Returns the placement whose restored entry was exchanged for the present one, which is still in the staging directory.
fn find_exchanged(staging: &Staging) -> Result<Option<Placement>, RestoreError> {
    let complete = if staging.ensure_own()? { staging.read_complete::<Placement>()? } else { None };
    let Some(placement) = complete else { return Ok(None) };
    let inode = find_inode(&staging.files().join(STAGED))?;
    Ok(Some(placement).filter(|placement| inode.is_some_and(|inode| inode != placement.staged.inode)))
}

/// Moves the entry that was exchanged for the restored one beside it, and returns its path as it is shown; `None` if there
/// is none. If it cannot be moved, the exchange is undone.
fn finish_exchange(layout: &Layout, staging: &Staging) -> Result<Option<String>, RestoreError> {
    let Some(placement) = find_exchanged(staging)? else { return Ok(None) };
    let staged = staging.files().join(STAGED);
    let path = bytes_to_name(&placement.directory);
    let directory = Directory::open(&layout.user_home(), Path::new(&path), owner_ids(layout))?;
    let mut kept_as = bytes_to_name(placement.kept_as.as_ref().unwrap_or(&placement.name));
    for _ in 0..MAX_KEEP_ATTEMPTS {
        match directory.take(&staged, &kept_as) {
            Ok(()) => return Ok(Some(placement.shown(kept_as.as_bytes()))),
            // The owner's programs have taken the name in the meantime.
            Err(Errno::EXIST) => {
                let name = bytes_to_name(&placement.name);
                kept_as = directory.find_free_name(&name, "replaced", clock::now_ms())?;
            }
            Err(error) => {
                let name = bytes_to_name(&placement.name);
                if let Err(error) = directory.exchange(&name, &staged) {
                    tracing::error!(%error, "cannot undo the exchange of a restored entry");
                }
                return Err(error.into());
            }
        }
    }
    Err(Errno::EXIST.into())
}

/// Returns where an earlier, interrupted run has kept the replaced entry.
fn find_kept(layout: &Layout, placement: &Placement) -> Result<Option<String>, RestoreError> {
    let Some(kept_as) = &placement.kept_as else { return Ok(None) };
    let path = bytes_to_name(&placement.directory);
    let directory = Directory::open(&layout.user_home(), Path::new(&path), owner_ids(layout))?;
    Ok(directory.has(&bytes_to_name(kept_as))?.then(|| placement.shown(kept_as)))
}

fn find_inode(path: &Path) -> Result<Option<u64>, FileError> {
    match std::fs::symlink_metadata(path) {
        Ok(meta) => Ok(Some(meta.ino())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileError::wrap("read", path)(error)),
    }
}
