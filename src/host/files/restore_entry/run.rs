//! `svc-sync-agent serve-restore`: serves the pending restore request.

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
use svc_base::clock::{self, rfc3339_ms};
use svc_base::error_chain::format_chain;
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::FileError;
use svc_files::FilesError;
use svc_files::history::{EntryKind, History};
use svc_files::restore::{RestoreOptions, RestoreProgress, RestoreReport, restore_entries};
use svc_wire::files::{FileRestore, FileRestoreStatus};

use super::entry_placement::Directory;
use super::request::{RestoreRequest, describe_damaged, read_state, write_state};
use crate::files::access::{AccessError, FilesSettings, retry};
use crate::files::home_path::{DISPLAY_HOME, HomePath, HomePathError};
use crate::files::owner::owner_ids;
use crate::files::save_request::{self, SaveRequestError};
use crate::files::staging::{ENTRY_STAGING, Staging};
use crate::system::activity;
use crate::system::layout::Layout;
use crate::system::lock::Lock;
use crate::system::quiesce::Quiesce;

/// How long to retry transient store or platform errors before failing the request.
const OUTAGE_TIMEOUT: Duration = Duration::from_secs(600);
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Entry name in the staging directory.
const STAGED_NAME: &str = "entry";
/// Maximum number of names to try for the replaced entry.
const MAX_RENAME_ATTEMPTS: u32 = 10;
/// Maximum number of runs per request: a restore that runs out of memory is killed every time.
const MAX_ATTEMPTS: u32 = 5;
const LOCK_FILE: &str = "entry-restore.lock";

/// Capabilities of `svc-files-request.service`, which hands files to the owner's user and accesses directories that
/// only that user can enter.
pub const CAPABILITIES: CapabilitySet = crate::files::restore_home::CAPABILITIES;

/// Fail points in an entry restore.
pub const FAILPOINTS: &[&str] =
    &["files.entry.staged", "files.entry.exchanged", "files.entry.placed", "files.entry.recorded"];

/// Error from serving a restore request.
#[derive(Debug, thiserror::Error)]
enum RestoreError {
    #[error("invalid path in request: {0}")]
    Path(#[from] HomePathError),
    #[error("no files have been saved yet")]
    NothingSaved,
    #[error("there is no snapshot at or before {}", rfc3339_ms(*.0))]
    NoSnapshot(Timestamp),
    #[error("{path} is not in the snapshot taken at {}", rfc3339_ms(*.at))]
    NotFound { path: HomePath, at: Timestamp },
    #[error("{0} is a device, FIFO or socket; these are not saved")]
    Special(HomePath),
    #[error("{0} overlaps a directory that is reserved for the machine; restore to another path")]
    Reserved(HomePath),
    #[error("{0} already exists; restore to another path, or replace it")]
    AlreadyExists(HomePath),
    #[error("{0} is on a different file system from the home directory; restore to another path")]
    OtherFileSystem(HomePath),
    #[error("cannot save the current state; nothing was replaced")]
    SaveFailed(#[source] SaveRequestError),
    #[error(
        "the platform has stopped this machine's writers for a final backup, or has replaced or deleted this machine; \
         nothing was restored"
    )]
    Quiesced,
    #[error(
        "the restore was interrupted {MAX_ATTEMPTS} times, possibly because of too little memory for this many files; \
         restore part of the directory"
    )]
    TooManyAttempts,
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("cannot move the restored entry into place")]
    Move(#[from] Errno),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
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

/// Destination of the restored entry. Names are bytes, since they may not be valid UTF-8.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Placement {
    request_id: String,
    /// Target directory, relative to the user's home directory, and the entry's name in it.
    directory: Vec<u8>,
    name: Vec<u8>,
    /// New name for the existing entry; `None` if nothing is replaced.
    kept_as: Option<Vec<u8>>,
    #[serde(flatten)]
    staged: StagedEntry,
}

/// The restored entry in the staging directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct StagedEntry {
    /// When the snapshot was taken.
    saved_at: Timestamp,
    /// Inode of the restored entry, for detecting after an interruption whether it has already been moved.
    inode: u64,
    files: u64,
    bytes: u64,
    incomplete: u64,
    /// Describes corrupt entries whose content was skipped, if any.
    #[serde(default)]
    left_out: Option<String>,
}

impl Placement {
    /// Returns the display path of `name` in the target directory.
    fn display_path(&self, name: &[u8]) -> String {
        let path = Path::new(DISPLAY_HOME).join(bytes_to_name(&self.directory)).join(bytes_to_name(name));
        path.display().to_string()
    }

    /// Maps an error from moving the entry into place.
    fn classify_move_error(&self, error: Errno) -> RestoreError {
        let path = Path::new(&bytes_to_name(&self.directory)).join(bytes_to_name(&self.name));
        match error {
            Errno::EXIST => RestoreError::AlreadyExists(HomePath::from_relative(path)),
            Errno::XDEV => RestoreError::OtherFileSystem(HomePath::from_relative(path)),
            error => error.into(),
        }
    }
}

fn bytes_to_name(bytes: &[u8]) -> OsString {
    OsString::from_vec(bytes.to_vec())
}

/// Serves the pending request, if any.
///
/// # Errors
/// `Unavailable` if the restore fails and `Config` if the configuration is invalid: in both cases, the request is
/// removed and its state contains the reason. `Refused` if the request file is invalid; it is removed as well.
/// `TryAgain` if the lock can't be acquired or the replaced entry can't be moved; the request is retained. `Internal`
/// if a local file can't be read or written.
pub async fn serve(layout: Layout) -> Result<(), Failure> {
    let _lock = Lock::acquire(&layout.files_state().join(LOCK_FILE)).or_exit(Exit::TryAgain)?;
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
    // Do this before any removal: an interrupted run may have left the replaced entry in the staging directory. A
    // directory that belongs to another user can't contain one, and makes the restore below fail with the reason.
    if staging.verify_if_exists().is_ok()
        && let Err(error) = finish_exchange(&layout, &staging)
    {
        return Err(fail_and_keep_request(&layout, request.to_state(), error));
    }
    if read_state(&layout).or_exit(Exit::Internal)?.is_some_and(|state| has_ended(&state)) {
        // An earlier run was interrupted between recording the final state and cleaning up.
        return clean_up(&layout, &staging).or_exit(Exit::Internal);
    }
    let settings = match FilesSettings::read(layout.clone()) {
        Err(failure) if failure.exit == Exit::Config => {
            // Drop the request, or systemd would start this program again immediately.
            let (status, error) = (FileRestoreStatus::Failed, Some(format!("{:#}", failure.error)));
            let mut state = FileRestore { status, error, ..request.to_state() };
            write_progress(&layout, &mut state);
            clean_up(&layout, &staging).or_exit(Exit::Internal)?;
            activity::note(&layout, &request.describe_result(&state));
            return Err(failure);
        }
        settings => settings?,
    };
    let layout = &settings.layout;
    let mut state = request.to_state();
    state.status = FileRestoreStatus::Running;
    write_progress(layout, &mut state);
    let result = restore(&settings, &staging, &mut request, &mut state).await;
    if matches!(find_exchanged(&staging), Ok(Some(_)))
        && let Err(error) = result
    {
        return Err(fail_and_keep_request(layout, state, error));
    }
    if result.is_err() {
        // Remove the staging directory first: if the restore has filled the disk, the state cannot be written.
        remove_staging(&staging);
    }
    state.status = if result.is_ok() { FileRestoreStatus::Done } else { FileRestoreStatus::Failed };
    if let Err(error) = &result {
        state.error = Some(format_chain(error));
    }
    write_state(layout, &mut state).or_exit(Exit::Internal)?;
    failpoint::trigger("files.entry.recorded").or_exit(Exit::Internal)?;
    clean_up(layout, &staging).or_exit(Exit::Internal)?;
    activity::note(layout, &request.describe_result(&state));
    result.map_err(|error| Failure::new(Exit::Unavailable, error))
}

/// Keeps the request so that the next run moves the replaced entry, which may still be in the staging directory.
fn fail_and_keep_request(layout: &Layout, mut state: FileRestore, error: RestoreError) -> Failure {
    state.status = FileRestoreStatus::Running;
    state.error = Some(format_chain(&error));
    write_progress(layout, &mut state);
    Failure::new(Exit::TryAgain, error)
}

/// Removes the served request and the staging directory.
fn clean_up(layout: &Layout, staging: &Staging) -> Result<(), FileError> {
    remove_staging(staging);
    RestoreRequest::remove(layout)
}

/// Removes the staging directory unless it contains a replaced entry that could not be moved yet. Best effort: the next
/// restore retries the removal.
fn remove_staging(staging: &Staging) {
    if matches!(find_exchanged(staging), Err(_) | Ok(Some(_))) {
        return;
    }
    if let Err(error) = staging.remove() {
        tracing::warn!(error = %format_chain(&error), "cannot remove the restore staging directory");
    }
}

/// Writes the progress. Errors are only logged, since the state is written again at the end.
fn write_progress(layout: &Layout, state: &mut FileRestore) {
    if let Err(error) = write_state(layout, state) {
        tracing::debug!(error = %format_chain(&error), "cannot write restore progress");
    }
}

async fn restore(
    settings: &FilesSettings,
    staging: &Staging,
    request: &mut RestoreRequest,
    state: &mut FileRestore,
) -> Result<(), RestoreError> {
    let complete = if staging.verify_if_exists()? { staging.read_complete::<Placement>()? } else { None };
    let owner = owner_ids(&settings.layout);
    let placement = match complete.filter(|placement| placement.request_id == request.request_id) {
        // An earlier run staged the entry but was interrupted later.
        Some(placement) => placement,
        None => {
            ensure_writable(&settings.layout)?;
            if request.attempts >= MAX_ATTEMPTS {
                return Err(RestoreError::TooManyAttempts);
            }
            if let Err(error) = request.start_attempt(&settings.layout) {
                // Possibly a full disk. If the restore then fails, its files are removed.
                tracing::warn!(error = %format_chain(&error), "cannot record the restore attempt");
            }
            stage(settings, request, state, staging, owner).await?
        }
    };
    failpoint::trigger("files.entry.staged")?;
    // If the entry is gone, an earlier run was interrupted after moving it.
    if find_inode(&staging.files().join(STAGED_NAME))? == Some(placement.staged.inode) {
        // Check again: the download may have taken a long time.
        ensure_writable(&settings.layout)?;
        move_into_place(&settings.layout, staging, &placement, owner)?;
    }
    state.kept_as = match finish_exchange(&settings.layout, staging)? {
        Some(path) => Some(path),
        None => find_replaced_entry(&settings.layout, &placement)?,
    };
    failpoint::trigger("files.entry.placed")?;
    state.saved_at = Some(placement.staged.saved_at.into());
    state.restored_to = Some(placement.display_path(&placement.name));
    let StagedEntry { files, bytes, incomplete, left_out, .. } = placement.staged;
    state.error = left_out;
    (state.files, state.incomplete, state.total_bytes, state.written_bytes) =
        (files, incomplete, bytes, bytes);
    Ok(())
}

/// Refuses to change files once the writers have stopped or the machine is superseded.
fn ensure_writable(layout: &Layout) -> Result<(), RestoreError> {
    let is_quiesced = Quiesce::read(layout)?.is_some_and(|quiesce| quiesce.quiesced_at.is_some());
    if is_quiesced || layout.superseded().exists() { Err(RestoreError::Quiesced) } else { Ok(()) }
}

/// Restores the entry to the staging directory and decides where to move it.
async fn stage(
    settings: &FilesSettings,
    request: &RestoreRequest,
    state: &mut FileRestore,
    staging: &Staging,
    owner: Option<(u32, u32)>,
) -> Result<Placement, RestoreError> {
    let path: HomePath = request.path.parse()?;
    let target: HomePath = match &request.into {
        Some(into) => into.parse()?,
        None => path.clone(),
    };
    if target.is_reserved() {
        return Err(RestoreError::Reserved(target));
    }
    let (directory_path, name) = target.split().ok_or_else(|| RestoreError::Reserved(target.clone()))?;
    if request.replace {
        save_request::save_now(&settings.layout).await.map_err(RestoreError::SaveFailed)?;
    }
    let counts = RestoreProgress::default();
    let attempt = async || restore_to_staging(settings, request, &path, staging, owner, &counts).await;
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
        (true, false, Some(_)) => return Err(RestoreError::AlreadyExists(target)),
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

/// Restores the entry to the emptied staging directory.
async fn restore_to_staging(
    settings: &FilesSettings,
    request: &RestoreRequest,
    path: &HomePath,
    staging: &Staging,
    owner: Option<(u32, u32)>,
    counts: &RestoreProgress,
) -> Result<StagedEntry, RestoreError> {
    let repository = settings.open_with_stored_key().await?.ok_or(RestoreError::NothingSaved)?;
    let repository = repository.with_outage_timeout(OUTAGE_TIMEOUT);
    let history = History::open_for_restore(repository.clone()).await?;
    // By default, and if the client's clock is ahead, use the request time: `stage` has since saved the state to be
    // replaced, and a retry must find the same snapshot. A later time is used only if it exactly matches a snapshot,
    // which was then taken while the machine's clock was ahead.
    let time = request.time.unwrap_or(request.requested_at);
    let max_time = time.min(request.requested_at);
    let is_exact = |at: Timestamp| at.as_millisecond() == time.as_millisecond();
    let exact = history.find_snapshot(Some(time)).filter(|(_, snapshot)| is_exact(snapshot.time));
    let selected = exact.or_else(|| history.find_snapshot(Some(max_time)));
    let (_, snapshot) = selected.ok_or(RestoreError::NoSnapshot(max_time))?;
    let at = snapshot.time;
    let entry = history.find(snapshot, path.as_path()).await?;
    let entry = entry.ok_or_else(|| RestoreError::NotFound { path: path.clone(), at })?;
    drop(history);
    if entry.kind() == EntryKind::Special {
        return Err(RestoreError::Special(path.clone()));
    }
    staging.recreate()?;
    let options = RestoreOptions {
        owner,
        should_skip_damaged: entry.kind() == EntryKind::Directory,
        ..RestoreOptions::new(staging.files(), settings.layout.root().to_owned())
    };
    let restored = restore_entries(&repository, [(&entry, STAGED_NAME.to_owned())], &options, counts).await?;
    if let Some(first) = &restored.first_incomplete {
        tracing::warn!(
            entries = restored.incomplete,
            first,
            "could not restore the owner, mode, times or xattrs of some files"
        );
    }
    let RestoreReport { files, bytes, incomplete, damaged, .. } = restored;
    let inode = find_inode(&staging.files().join(STAGED_NAME))?.unwrap_or(0);
    let left_out = describe_damaged(path, &damaged);
    Ok(StagedEntry { saved_at: at, inode, files, bytes, incomplete, left_out })
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

/// Moves the restored entry into place. An existing entry is exchanged with it atomically, so the path always exists;
/// [`finish_exchange`] then moves the replaced entry next to the restored one.
fn move_into_place(
    layout: &Layout,
    staging: &Staging,
    placement: &Placement,
    owner: Option<(u32, u32)>,
) -> Result<(), RestoreError> {
    let staged = staging.files().join(STAGED_NAME);
    let path = bytes_to_name(&placement.directory);
    let directory = Directory::open(&layout.user_home(), Path::new(&path), owner)?;
    let name = bytes_to_name(&placement.name);
    if placement.kept_as.is_some() {
        match directory.exchange(&name, &staged) {
            Ok(()) => return Ok(failpoint::trigger("files.entry.exchanged")?),
            // One of the owner's programs has removed the existing entry concurrently.
            Err(Errno::NOENT) => {}
            Err(error) => return Err(placement.classify_move_error(error)),
        }
    }
    directory.move_in(&staged, &name).map_err(|error| placement.classify_move_error(error))
}

/// Returns the placement if the restored entry is in place but the replaced one is still in the staging directory.
fn find_exchanged(staging: &Staging) -> Result<Option<Placement>, RestoreError> {
    let complete = if staging.verify_if_exists()? { staging.read_complete::<Placement>()? } else { None };
    let Some(placement) = complete else { return Ok(None) };
    let inode = find_inode(&staging.files().join(STAGED_NAME))?;
    Ok(Some(placement).filter(|placement| inode.is_some_and(|inode| inode != placement.staged.inode)))
}

/// Moves the replaced entry, if any, from the staging directory to a name next to the restored one, and returns its
/// display path. Rolls back the exchange if the move fails for any reason other than a taken name.
fn finish_exchange(layout: &Layout, staging: &Staging) -> Result<Option<String>, RestoreError> {
    let Some(mut placement) = find_exchanged(staging)? else { return Ok(None) };
    let staged = staging.files().join(STAGED_NAME);
    let path = bytes_to_name(&placement.directory);
    let directory = Directory::open(&layout.user_home(), Path::new(&path), owner_ids(layout))?;
    let mut kept_as = bytes_to_name(placement.kept_as.as_ref().unwrap_or(&placement.name));
    for _ in 0..MAX_RENAME_ATTEMPTS {
        match directory.move_in(&staged, &kept_as) {
            Ok(()) => return Ok(Some(placement.display_path(kept_as.as_bytes()))),
            // One of the owner's programs has created this entry concurrently. Record the new name first, for
            // `find_replaced_entry`, but move the entry even if that fails, so it doesn't stay hidden.
            Err(Errno::EXIST) => {
                let name = bytes_to_name(&placement.name);
                kept_as = directory.find_free_name(&name, "replaced", clock::now_ms())?;
                placement.kept_as = Some(kept_as.as_bytes().to_vec());
                if let Err(error) = staging.mark_complete(&placement) {
                    tracing::warn!(error = %format_chain(&error), "cannot record the name of the replaced entry");
                }
            }
            Err(error) => {
                let name = bytes_to_name(&placement.name);
                if let Err(error) = directory.exchange(&name, &staged) {
                    tracing::error!(%error, "cannot roll back the exchange of the restored and replaced entries");
                }
                return Err(error.into());
            }
        }
    }
    Err(Errno::EXIST.into())
}

/// Returns the display path of the replaced entry if an earlier, interrupted run has moved it.
fn find_replaced_entry(layout: &Layout, placement: &Placement) -> Result<Option<String>, RestoreError> {
    let Some(kept_as) = &placement.kept_as else { return Ok(None) };
    let path = bytes_to_name(&placement.directory);
    let directory = Directory::open(&layout.user_home(), Path::new(&path), owner_ids(layout))?;
    Ok(directory.has(&bytes_to_name(kept_as))?.then(|| placement.display_path(kept_as)))
}

fn find_inode(path: &Path) -> Result<Option<u64>, FileError> {
    match std::fs::symlink_metadata(path) {
        Ok(meta) => Ok(Some(meta.ino())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileError::wrap("read", path)(error)),
    }
}
