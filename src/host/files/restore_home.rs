//! `svc-sync-agent restore-home`: restores the owner's files on a new machine, before the database restore and gateway
//! startup.
//!
//! Files are restored to a staging directory on the same file system and moved into place only once complete, so a
//! killed run can be retried. On a machine in use, the replaced entries are kept among the owner's files.
//!
//! If the backup is corrupt, the machine starts without the files, because the owner still needs the database. The
//! outcome is recorded, and the machine doesn't save files, so that the snapshot remains the latest one. An operator
//! can retry the restore, optionally skipping corrupt files and directories, or abandon it. Any other error fails the
//! boot, which systemd retries unless the disk is too small, the platform has refused the key, or the configuration is
//! invalid.

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::lchown;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use jiff::Timestamp;
use rustix::io::Errno;
use rustix::thread::CapabilitySet;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::clock;
use svc_base::error_chain::format_chain;
use svc_base::failpoint;
use svc_base::fsx::{self, FileError};
use svc_base::variable::Variable;
use svc_files::history::History;
use svc_files::restore::{RestoreOptions, RestoreProgress, RestoreReport, restore};
use svc_files::usage::has_snapshots;
use svc_files::{FilesError, Id, Repository, Snapshot};
use svc_store::StoreError;
use svc_store::files_pointer::{self, FilesSnapshotRef};

use super::access::{AccessError, FilesSettings, retry};
use super::home_path::HomePath;
use super::home_placement;
use super::owner::owner_ids;
use super::restore_entry::Directory;
use super::restore_home_error::RestoreHomeError;
use super::restore_outcome::{FORMAT_VERSION, RestoreOutcome};
use super::save_request::SAVE_REQUEST;
use super::staging::{HOME_STAGING, Staging};
use crate::system::activity;
use crate::system::boot_progress::BootReporter;
use crate::system::config;
use crate::system::layout::Layout;
use crate::system::lock::{Lock, LockError};
use crate::system::progress::Progress;
use crate::system::vars;

/// How long to retry transient store or platform errors before failing the boot. systemd then restarts the unit.
const OUTAGE_TIMEOUT: Duration = Duration::from_secs(3600);
const RESTORE_PHASE: &str = "restoring the owner's files";
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
const LOCK_FILE: &str = "home-restore.lock";
const SKIPPED: &str = "an operator started the machine without them (`svcctl recover --without-files`)";
const GIVEN_UP: &str = "an operator chose not to restore the previous machine's files; this machine now saves its own \
                        files, and the previous machine's last snapshot is kept until it is 90 days old";

/// Capabilities `svc-files-restore.service` needs to restore file owners and modes.
pub const CAPABILITIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID);

/// Fail points in a home directory restore.
pub const FAILPOINTS: &[&str] = &["files.gate.restored", "files.gate.marked", "files.gate.placed"];

/// Restores the owner's files on a new machine. Requires `should_retry` if an earlier restore failed, or if the machine
/// is in use and has never restored files. Does nothing after a successful restore. With `should_skip_damaged`, corrupt
/// files and the contents of corrupt directories are skipped, and the restore is treated as successful.
///
/// With `SVC_RESTORE_FILES=false`, the first boot only records that files weren't restored.
///
/// # Errors
/// `Refused` if the disk is too small or, with `should_retry`, if the backup is corrupt or an operator has abandoned
/// the restore; on first boot, corruption is only recorded. `Permission` if the platform refuses the key; `Unavailable`
/// if the restore fails for any other reason, such as a store outage; `TryAgain` if another process is already
/// restoring the files; `Config` if the configuration is invalid; `Internal` if the outcome cannot be read or written.
pub async fn run(layout: Layout, should_retry: bool, should_skip_damaged: bool) -> Result<(), Failure> {
    if is_done(&layout, should_retry)? {
        return Ok(());
    }
    let _lock = acquire_lock(&layout)?;
    // Check again under the lock: another process may have just restored the files.
    if is_done(&layout, should_retry)? {
        return Ok(());
    }
    if !should_retry && !is_restore_requested(&layout)? {
        return record_skipped(&layout);
    }
    let settings = FilesSettings::read(layout)?;
    let progress = Arc::new(Progress::default());
    let _reporter = BootReporter::start(&settings.layout, progress.subscribe());
    let earlier = RestoreOutcome::read(&settings.layout).or_exit(Exit::Internal)?;
    let earlier_error = earlier.and_then(|outcome| outcome.error);
    let has_failed = earlier_error.is_some();
    let expected = match earlier_error {
        // There was a snapshot back then, so an empty store isn't success.
        Some(error) if error != SKIPPED => ExpectedSnapshot::Certain,
        None if settings.layout.restore_complete().exists() => ExpectedSnapshot::Unknown,
        None if should_expect_files(&settings.layout)? => ExpectedSnapshot::Certain,
        Some(_) | None => ExpectedSnapshot::IfAnyExists,
    };
    match restore_files(&settings, &progress, expected, should_skip_damaged).await {
        Ok(outcome) => {
            outcome.write(&settings.layout).or_exit(Exit::Internal)?;
            let text = outcome.describe();
            activity::note(&settings.layout, &text);
            println!("{text}");
            if has_failed {
                request_save(&settings.layout);
            }
            Ok(())
        }
        Err(error) if !error.is_damage() => Err(error.into_failure()),
        Err(error) => {
            let text = format_chain(&error);
            tracing::error!(error = text, "cannot restore the owner's files; continuing without them");
            RestoreOutcome::failed(text.clone()).write(&settings.layout).or_exit(Exit::Internal)?;
            activity::note(&settings.layout, &format!("the owner's files could not be restored: {text}"));
            // Don't fail the unit on first boot, or the machine wouldn't start.
            if should_retry { Err(Failure::new(Exit::Refused, error)) } else { Ok(()) }
        }
    }
}

/// Abandons the restore: this machine keeps its own files instead of its predecessor's and starts saving them. Its next
/// snapshot becomes the latest; earlier ones stay in the backup.
///
/// # Errors
/// `Refused` if no restore has failed on this machine, or if one was interrupted while moving files; `TryAgain` if
/// another process is already restoring the files; `Internal` if the outcome cannot be read or written.
pub fn give_up(layout: &Layout) -> Result<(), Failure> {
    let _lock = acquire_lock(layout)?;
    let has_failed = match RestoreOutcome::read(layout).or_exit(Exit::Internal)? {
        Some(outcome) => outcome.error.is_some(),
        // This machine was set up by a release that didn't restore files, so there is no recorded outcome.
        None => layout.restore_complete().exists(),
    };
    if !has_failed {
        let error = anyhow!("no restore has failed on this machine, so there is nothing to abandon");
        return Err(Failure::new(Exit::Refused, error));
    }
    let staging = Staging::new(layout, HOME_STAGING);
    // If there's no directory now, don't use one that appears later: another user can create it at any time.
    let is_interrupted = staging.verify_if_exists().or_exit(Exit::Internal)?;
    if is_interrupted && staging.read_complete::<RestoreOutcome>().or_exit(Exit::Internal)?.is_some() {
        let error = anyhow!(
            "a restore was interrupted while it moved the files into place: complete it with `svc-sync-agent restore-home --retry`"
        );
        return Err(Failure::new(Exit::Refused, error));
    }
    if is_interrupted {
        keep_replaced(layout, &staging).or_exit(Exit::Internal)?;
        staging.remove().or_exit(Exit::Internal)?;
    }
    let outcome = RestoreOutcome { is_given_up: true, ..RestoreOutcome::nothing() };
    outcome.write(layout).or_exit(Exit::Internal)?;
    activity::note(layout, GIVEN_UP);
    println!("{GIVEN_UP}");
    request_save(layout);
    Ok(())
}

/// Requests a save, so that the service doesn't wait out the backoff from its last failed one.
fn request_save(layout: &Layout) {
    if let Err(error) = fsx::write_atomic(&layout.request(SAVE_REQUEST), b"", 0o644) {
        tracing::warn!(error = %format_chain(&error), "cannot request a file save");
    }
}

fn acquire_lock(layout: &Layout) -> Result<Lock, Failure> {
    Lock::acquire(&layout.files_state().join(LOCK_FILE)).map_err(|error| {
        let exit = if matches!(error, LockError::Held) { Exit::TryAgain } else { Exit::Internal };
        Failure::new(exit, error)
    })
}

/// Whether the first boot should restore the owner's files.
fn is_restore_requested(layout: &Layout) -> Result<bool, Failure> {
    read_flag(layout, &vars::SVC_RESTORE_FILES)
}

/// Whether an earlier machine had saved files when the platform created this one.
fn should_expect_files(layout: &Layout) -> Result<bool, Failure> {
    read_flag(layout, &vars::SVC_EXPECT_FILES)
}

fn read_flag(layout: &Layout, variable: &'static Variable) -> Result<bool, Failure> {
    let mut env = config::environment(layout);
    let flag = env.flag(variable);
    Ok(env.finish(Some(flag))?.is_on())
}

/// Records that the operator chose to start the machine without its files.
fn record_skipped(layout: &Layout) -> Result<(), Failure> {
    RestoreOutcome::failed(SKIPPED.to_owned()).write(layout).or_exit(Exit::Internal)?;
    tracing::warn!("not restoring the owner's files: SVC_RESTORE_FILES is off");
    activity::note(layout, &format!("the owner's files were not restored: {SKIPPED}"));
    Ok(())
}

/// Whether there's nothing to do. With `should_retry`, fails if an operator has abandoned the restore.
fn is_done(layout: &Layout, should_retry: bool) -> Result<bool, Failure> {
    match RestoreOutcome::read(layout).or_exit(Exit::Internal)? {
        Some(RestoreOutcome { error: Some(error), .. }) if !should_retry => {
            tracing::warn!(
                error,
                "an earlier restore failed; run `svc-sync-agent restore-home --retry` as root to retry"
            );
            return Ok(true);
        }
        Some(RestoreOutcome { error: Some(_), .. }) => return Ok(false),
        Some(RestoreOutcome { is_given_up: true, .. }) => {
            if should_retry {
                let error = anyhow!(
                    "an operator chose not to restore the previous machine's files; `svc-sync-agent restore PATH --time TIME` \
                     restores single files"
                );
                return Err(Failure::new(Exit::Refused, error));
            }
            return Ok(true);
        }
        Some(RestoreOutcome { error: None, .. }) => {}
        // This machine was set up by a release that didn't restore files, so there is no recorded outcome.
        None if layout.restore_complete().exists() && !should_retry => {}
        None => return Ok(false),
    }
    tracing::info!("files already restored, or machine in use; nothing to restore");
    Ok(true)
}

async fn restore_files(
    settings: &FilesSettings,
    progress: &Progress,
    expected: ExpectedSnapshot,
    should_skip_damaged: bool,
) -> Result<RestoreOutcome, RestoreHomeError> {
    let staging = Staging::new(&settings.layout, HOME_STAGING);
    // If there's no directory now, don't use one that appears later: another user can create it at any time.
    let is_resumed = staging.verify_if_exists()?;
    let complete = if is_resumed {
        // An interrupted run may have replaced some entries.
        keep_replaced(&settings.layout, &staging)?;
        staging.read_complete::<RestoreOutcome>()?
    } else {
        None
    };
    let outcome = match complete {
        // An earlier run downloaded all files but was interrupted before moving all of them.
        Some(outcome) => outcome,
        None => {
            let Some(latest) = find_latest(settings, expected).await? else {
                return Ok(RestoreOutcome::nothing());
            };
            match download(settings, &latest, &staging, progress, should_skip_damaged).await {
                Ok(outcome) => outcome,
                Err(error) => {
                    // The next run downloads all files again, so these would only waste disk space.
                    if let Err(error) = staging.remove() {
                        tracing::warn!(error = %format_chain(&error), "cannot remove an incomplete download");
                    }
                    return Err(error);
                }
            }
        }
    };
    failpoint::trigger("files.gate.marked")?;
    let (from, to, replaced) = (staging.files(), settings.layout.user_home(), staging.replaced());
    let owner = owner_ids(&settings.layout);
    let move_files = move || home_placement::move_contents(&from, &to, &replaced, owner);
    let replaced = tokio::task::spawn_blocking(move_files).await??;
    failpoint::trigger("files.gate.placed")?;
    keep_replaced(&settings.layout, &staging)?;
    staging.remove()?;
    tracing::info!(
        snapshot = outcome.snapshot,
        files = outcome.files,
        bytes = outcome.bytes,
        replaced,
        "restored the owner's files"
    );
    Ok(outcome)
}

/// Whether the pointer must reference an earlier machine's snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpectedSnapshot {
    /// Required: an earlier restore failed, or the platform knows that an earlier machine has saved files.
    Certain,
    /// Required if any snapshots exist, since this machine has saved none.
    IfAnyExists,
    /// Not required: the snapshots may be this machine's own, and therefore older than its files.
    Unknown,
}

/// Returns the pointer's snapshot if it should be restored. `None` if there is none, or if the machine is in use and
/// the snapshot isn't from an earlier machine.
///
/// # Errors
/// [`RestoreHomeError::NoSnapshot`] if a required snapshot is missing: anyone with the slot's store credentials can
/// clear the pointer, and that must not look like success. Other errors if the store fails.
async fn find_latest(
    settings: &FilesSettings,
    expected: ExpectedSnapshot,
) -> Result<Option<FilesSnapshotRef>, RestoreHomeError> {
    let read_pointer = async || files_pointer::read(&settings.bucket, &settings.slot).await;
    let pointer = retry(OUTAGE_TIMEOUT, StoreError::is_transient, read_pointer).await?;
    let identity = &settings.identity;
    let is_earlier =
        |latest: &FilesSnapshotRef| latest.machine_id != identity.machine && latest.epoch < identity.epoch;
    let should_restore =
        |latest: &FilesSnapshotRef| !settings.layout.restore_complete().exists() || is_earlier(latest);
    let latest = pointer.and_then(|pointer| pointer.value.snapshot).filter(should_restore);
    if latest.is_some() {
        return Ok(latest);
    }
    let is_missing = match expected {
        ExpectedSnapshot::Certain => true,
        ExpectedSnapshot::Unknown => false,
        ExpectedSnapshot::IfAnyExists => {
            let root = settings.slot.files();
            let has_any = async || has_snapshots(&settings.bucket, &root).await;
            retry(OUTAGE_TIMEOUT, FilesError::is_transient, has_any).await?
        }
    };
    if is_missing { Err(RestoreHomeError::NoSnapshot) } else { Ok(None) }
}

/// Moves replaced entries from the staging directory to a new directory among the owner's files. On a machine not yet
/// in use, they are just records its services wrote during the boot, and are deleted.
///
/// Must be called before every removal of the staging directory.
fn keep_replaced(layout: &Layout, staging: &Staging) -> Result<(), FileError> {
    let replaced = staging.replaced();
    let is_empty = match fs::read_dir(&replaced) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(FileError::wrap("list", &replaced)(error)),
    };
    if is_empty || !layout.restore_complete().exists() {
        return fs::remove_dir_all(&replaced).map_err(FileError::wrap("remove", &replaced));
    }
    let owner = owner_ids(layout);
    if let Some((uid, gid)) = owner {
        // Don't follow links: on a retry, the owner's programs are running.
        lchown(&replaced, Some(uid), Some(gid)).map_err(FileError::wrap("change the owner of", &replaced))?;
    }
    let wrap = |errno: Errno| FileError::wrap("move", &replaced)(errno.into());
    let home = Directory::open(&layout.user_home(), Path::new("home"), owner)?;
    let name = home.find_free_name(OsStr::new("home"), "replaced", clock::now_ms()).map_err(wrap)?;
    home.move_in(&replaced, &name).map_err(wrap)?;
    let kept_as = layout.home().join(name);
    activity::note(layout, &format!("the entries replaced by the restore are now in {}", kept_as.display()));
    Ok(())
}

/// Restores the snapshot to the staging directory.
async fn download(
    settings: &FilesSettings,
    latest: &FilesSnapshotRef,
    staging: &Staging,
    progress: &Progress,
    should_skip_damaged: bool,
) -> Result<RestoreOutcome, RestoreHomeError> {
    let open = async || settings.open().await;
    let repository = retry(OUTAGE_TIMEOUT, AccessError::is_transient, open).await?;
    let repository = repository.ok_or_else(|| RestoreHomeError::NoRepository(latest.id.clone()))?;
    let repository = repository.with_outage_timeout(OUTAGE_TIMEOUT);
    let (id, taken_at) = choose_snapshot(&repository, latest, should_skip_damaged).await?;
    let options = RestoreOptions {
        should_skip_damaged,
        ..RestoreOptions::new(staging.files(), settings.layout.root().to_owned())
    };
    let counts = Arc::new(RestoreProgress::default());
    let attempt = async || -> Result<RestoreReport, RestoreHomeError> {
        let snapshot = repository.read_snapshot(id).await?;
        staging.recreate()?;
        Ok(restore(&repository, &snapshot, &options, &counts).await?)
    };
    let is_transient =
        |error: &RestoreHomeError| matches!(error, RestoreHomeError::Files(error) if error.is_transient());
    let start = Instant::now();
    let restored = tokio::select! {
        restored = retry(OUTAGE_TIMEOUT, is_transient, attempt) => restored?,
        never = show_progress(&counts, progress) => match never {},
    };
    failpoint::trigger("files.gate.restored")?;
    if let Some(first) = &restored.first_incomplete {
        tracing::warn!(
            entries = restored.incomplete,
            first,
            "could not restore the owner, mode, times or xattrs of some files"
        );
    }
    tracing::info!(seconds = start.elapsed().as_secs(), "downloaded the owner's files");
    let to_line = |path| HomePath::from_relative(path).to_line();
    let outcome = RestoreOutcome {
        version: FORMAT_VERSION,
        ended_at: clock::now_ms(),
        snapshot: Some(id.to_string()),
        taken_at: Some(taken_at),
        files: restored.files,
        bytes: restored.bytes,
        incomplete: restored.incomplete,
        damaged: restored.damaged.count,
        damaged_paths: restored.damaged.first_paths.into_iter().map(to_line).collect(),
        error: None,
        is_given_up: false,
    };
    staging.mark_complete(&outcome)?;
    Ok(outcome)
}

/// Returns the id and time of the pointer's snapshot. With `should_skip_damaged`, falls back to the newest readable
/// snapshot if that one or its home directory is corrupt or missing. Snapshots newer than the pointer's may come from a
/// replaced machine, so they are only used if there are no others.
async fn choose_snapshot(
    repository: &Repository,
    latest: &FilesSnapshotRef,
    should_skip_damaged: bool,
) -> Result<(Id, Timestamp), RestoreHomeError> {
    let id: Option<Id> = latest.id.parse().ok();
    if !should_skip_damaged {
        let id = id.ok_or(RestoreHomeError::InvalidSnapshot)?;
        let read = async || repository.read_snapshot(id).await;
        let snapshot = retry(OUTAGE_TIMEOUT, FilesError::is_transient, read).await?;
        return Ok((id, restored_as_of(latest, &snapshot)));
    }
    let find = async || -> Result<Option<(Id, Snapshot)>, FilesError> {
        let latest_only = History::open_latest(repository.clone(), id).await?;
        for directory in ["home", ""].map(Path::new) {
            let found = latest_only.find_readable_snapshot(directory, Timestamp::MAX).await?;
            if found.as_ref().is_some_and(|(found, _)| Some(*found) == id) {
                return Ok(found);
            }
            let all = History::open(repository.clone()).await?;
            for up_to in [latest.taken_at, Timestamp::MAX] {
                if let Some(found) = all.find_readable_snapshot(directory, up_to).await? {
                    return Ok(Some(found));
                }
            }
        }
        Ok(None)
    };
    match retry(OUTAGE_TIMEOUT, FilesError::is_transient, find).await? {
        Some((found, snapshot)) if Some(found) == id => Ok((found, restored_as_of(latest, &snapshot))),
        Some((found, snapshot)) => {
            let at = clock::rfc3339_ms(snapshot.time);
            tracing::warn!(at, "latest snapshot unreadable; restoring the newest readable one");
            Ok((found, snapshot.time.max(Timestamp::UNIX_EPOCH)))
        }
        None => Err(FilesError::corrupt("file backup", &"no readable snapshot").into()),
    }
}

/// Returns the time up to which a snapshot contains all changes. Anyone with the slot's store credentials can write the
/// pointer's time, so it can only move the result earlier. A time before the Unix epoch can't be real and is replaced
/// with the epoch; negative years also have no RFC 3339 form.
fn restored_as_of(latest: &FilesSnapshotRef, snapshot: &Snapshot) -> Timestamp {
    latest.taken_at.min(snapshot.time).max(Timestamp::UNIX_EPOCH)
}

async fn show_progress(counts: &RestoreProgress, progress: &Progress) -> std::convert::Infallible {
    let mut is_started = false;
    loop {
        tokio::time::sleep(PROGRESS_INTERVAL).await;
        if counts.total_bytes() > 0 && !is_started {
            progress.start_bytes_phase(RESTORE_PHASE, Some(counts.total_bytes()));
            is_started = true;
        }
        if is_started {
            progress.report_bytes(RESTORE_PHASE, counts.written_bytes(), Some(counts.total_bytes()));
        }
    }
}
