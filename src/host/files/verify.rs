//! `svc-sync-agent verify`: rereads part of the file backup to find damage before a recovery needs the data. Once a
//! week, it also restores a sample of files and compares it with the files on the machine.
//!
//! The damage report lists the affected files and snapshots. The run also requests a save, in which `svc-files`
//! rewrites the damaged content if the machine still has it.

use std::collections::HashSet;
use std::time::Duration;

use anyhow::anyhow;
use jiff::Timestamp;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::clock;
use svc_base::error_chain::format_chain;
use svc_base::fsx::{self, FileError};
use svc_base::quantity::{format_bytes, pluralize};
use svc_base::untrusted_text::truncate_printable;
use svc_files::affected::{AffectedFiles, AffectedPath, find_affected_files};
use svc_files::verify::{PackShare, find_unindexed_blob, find_unusable_snapshot, verify};
use svc_files::{FilesError, Id, Repository};
use svc_store::StoreError;

use super::access::{AccessError, FilesSettings};
use super::checks::{AffectedFile, DAMAGED_INDEX, FileChecks, VerifyResult};
use super::drill::drill;
use super::home_path::HomePath;
use super::save_request::SAVE_REQUEST;
use super::status::FilesStatus;
use crate::system::activity;
use crate::system::config;
use crate::system::layout::Layout;
use crate::system::lock::Lock;

/// Name of the verification request file, in the requests directory.
pub const REQUEST: &str = "files-verify";
/// Pointer name in messages and in the damage record.
const POINTER: &str = "pointer files/latest";
/// Key file name in the damage record.
const KEY_FILE: &str = "key file";
const LOCK_FILE: &str = "verify.lock";
/// Maximum time to wait for another verification to finish.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3600);

/// Errors that prevent a check from completing.
#[derive(Debug, thiserror::Error)]
enum CheckError {
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("no files have been saved yet")]
    NothingSaved,
    /// At least one snapshot other than the latest can't be restored. Intact ones aren't affected.
    #[error("a snapshot other than the latest cannot be restored")]
    UnusableSnapshot(#[source] FilesError),
}

/// Verifies the due shares, or every share with `should_verify_all`. Once that completes, runs a drill if one is due.
/// If the drill newly finds damage, verifies every share to locate all of it.
///
/// # Errors
/// `Refused` on damage or differences; `Unavailable` if a check couldn't be completed; `TryAgain` if the lock isn't
/// acquired within an hour; `Config` if the configuration is invalid; `Internal` if a local file can't be read or
/// written.
pub async fn run(layout: Layout, should_verify_all: bool) -> Result<(), Failure> {
    let lock = Lock::wait(&layout.files_state().join(LOCK_FILE), LOCK_TIMEOUT).await;
    // Remove the request even without the lock or with an invalid configuration: systemd restarts this program for as
    // long as the request exists.
    fsx::remove_if_exists(&layout.request(REQUEST)).or_exit(Exit::Internal)?;
    let _lock = lock.or_exit(Exit::TryAgain)?;
    let mut env = config::environment(&layout);
    let days = config::read_verify_within_days(&mut env);
    let days = env.finish(Some(days))?;
    let settings = FilesSettings::read(layout)?;
    let layout = &settings.layout;
    let mut checks = FileChecks::read(layout).or_exit(Exit::Internal)?;
    let now = clock::now_ms();
    let days = u16::try_from(days).unwrap_or(u16::MAX);
    let shares =
        if should_verify_all { checks.select_all_shares(days) } else { checks.select_shares(days, now) };
    let (mut result, is_readable) =
        verify_and_record(&settings, &mut checks, &shares, now).await.or_exit(Exit::Internal)?;
    let mut error = result.error.clone();
    if is_readable
        && checks.is_drill_due(now)
        && let Some(drill) = drill(&settings, now).await
    {
        // Failed drills are retried daily, but only the first to find damage triggers a full verification.
        let was_damaged = checks.drill.as_ref().is_some_and(|drill| drill.is_damaged);
        let should_locate_damage = drill.is_damaged && !was_damaged && !should_verify_all;
        error = error.or_else(|| drill.error.clone());
        checks.record_drill(drill, now);
        checks.write(layout).or_exit(Exit::Internal)?;
        if should_locate_damage {
            let shares = checks.select_all_shares(days);
            (result, _) =
                verify_and_record(&settings, &mut checks, &shares, now).await.or_exit(Exit::Internal)?;
        }
    }
    if checks.has_repairable_damage() {
        // The save rewrites the damaged content or snapshot if the machine still has the files.
        fsx::write_atomic(&layout.request(SAVE_REQUEST), b"", 0o644).or_exit(Exit::Internal)?;
    }
    if let Some(problem) = checks.find_problem() {
        activity::note(layout, &format!("file-backup verification: {problem}"));
        return Err(Failure::new(Exit::Refused, anyhow!("{problem}")));
    }
    if let Some(error) = error {
        return Err(Failure::new(Exit::Unavailable, anyhow!("{error}")));
    }
    let packs = format!("{} ({})", pluralize(result.packs, "pack"), format_bytes(result.bytes));
    let text = match result.recoverable {
        0 => format!("{packs} read in full: no damage found"),
        count => format!(
            "{packs} read in full: nothing is lost; the content of {} can be read from these or other packs",
            pluralize(count, "damaged pack")
        ),
    };
    activity::note(layout, &format!("file-backup verification: {text}"));
    println!("{text}");
    Ok(())
}

/// Verifies shares and records the result. Also returns whether the latest snapshot appears to be restorable.
///
/// # Errors
/// If the result can't be written. Other errors become part of the result.
async fn verify_and_record(
    settings: &FilesSettings,
    checks: &mut FileChecks,
    shares: &[PackShare],
    now: Timestamp,
) -> Result<(VerifyResult, bool), FileError> {
    let mut result = VerifyResult { at: Some(now), ..VerifyResult::default() };
    let verified = verify_shares(settings, checks, shares, &mut result).await;
    result.error = verified.as_ref().err().map(|error| format_chain(error));
    if let Err(CheckError::Files(error)) = &verified
        && error.is_damage()
    {
        checks.unreadable = Some(format_chain(error));
    }
    checks.record_verification(result.clone(), now);
    checks.write(&settings.layout)?;
    Ok((result, matches!(verified, Ok(()) | Err(CheckError::UnusableSnapshot(_)))))
}

async fn verify_shares(
    settings: &FilesSettings,
    checks: &mut FileChecks,
    shares: &[PackShare],
    result: &mut VerifyResult,
) -> Result<(), CheckError> {
    // The cache would mask damage to the index and snapshots.
    let uncached = settings.open_uncached().await?.ok_or(CheckError::NothingSaved)?;
    let repository = settings.open_with_stored_key().await?.ok_or(CheckError::NothingSaved)?;
    if let Some(RepairableDamage { part, error }) = check_latest(settings, &repository, &uncached).await? {
        checks.record_damaged_latest(&part, clock::now_ms());
        return Err(error.into());
    }
    checks.record_readable();
    // Complete after the loop, because shares with known damage are verified in every run.
    let mut damaged_blobs: HashSet<Id> = HashSet::new();
    for share in shares {
        let verified = verify(&repository, *share).await?;
        result.packs += verified.packs;
        result.bytes += verified.bytes;
        result.recoverable += verified.recoverable.len() as u64;
        for damaged in &verified.damaged {
            let blobs = damaged.blobs.len();
            tracing::error!(pack = %damaged.pack, reason = damaged.reason, blobs, "a pack is damaged");
        }
        for damaged in &verified.recoverable {
            tracing::warn!(
                pack = %damaged.pack,
                reason = damaged.reason,
                "a pack is damaged, but its content can be read from this or other packs"
            );
        }
        damaged_blobs.extend(verified.damaged.iter().flat_map(|damaged| &damaged.blobs));
        checks.record_share(*share, &verified, clock::now_ms());
        // Persist the result before searching for affected files, which can take a long time.
        checks.write(&settings.layout).map_err(AccessError::File)?;
    }
    let affected = if damaged_blobs.is_empty() {
        AffectedFiles::default()
    } else {
        find_affected_files(&repository, &damaged_blobs).await?
    };
    (checks.affected_snapshots, checks.has_more_affected) = (affected.snapshots, affected.has_more);
    let describe = |file: AffectedPath| AffectedFile {
        path: truncate_printable(&HomePath::from_relative(file.path).to_string()),
        first: file.first,
        last: file.last,
    };
    checks.affected = Some(affected.paths.into_iter().map(describe).collect());
    // Checked last so that an unusable earlier snapshot doesn't block the other checks.
    match find_unusable_snapshot(&repository, &uncached).await? {
        Some(error) => Err(CheckError::UnusableSnapshot(error)),
        None => Ok(()),
    }
}

/// Damage that a save can repair.
struct RepairableDamage {
    /// The damaged part, as in [`FileChecks::record_damaged_latest`].
    part: String,
    error: FilesError,
}

/// Checks that the pointer references a readable snapshot, that the index contains everything it needs, and that
/// `restic` can open the repository.
async fn check_latest(
    settings: &FilesSettings,
    repository: &Repository,
    uncached: &Repository,
) -> Result<Option<RepairableDamage>, CheckError> {
    let damage = |part: String, error: FilesError| Ok(Some(RepairableDamage { part, error }));
    let pointer_damage = |reason: &str| damage(POINTER.to_owned(), FilesError::corrupt(POINTER, &reason));
    // Read this before the pointer, which may not reference a snapshot until this machine's first save completes.
    let status = FilesStatus::read(&settings.layout).map_err(AccessError::File)?;
    let has_saved = status.is_some_and(|status| status.saved_until.is_some());
    let latest = match settings.read_latest().await {
        Ok(Some(latest)) => latest,
        Ok(None) if has_saved => {
            return pointer_damage("it names no snapshot, although this machine has saved files");
        }
        Ok(None) => return Err(CheckError::NothingSaved),
        Err(StoreError::Corrupt { reason, .. }) => return pointer_damage(&reason),
        Err(error) => return Err(error.into()),
    };
    let snapshot = match uncached.read_snapshot(latest).await {
        Ok(snapshot) => snapshot,
        Err(error) if error.is_damage() => return damage(latest.to_string(), error),
        Err(error) => return Err(error.into()),
    };
    if let Some(error) = find_unindexed_blob(repository, uncached, &snapshot).await? {
        return damage(DAMAGED_INDEX.to_owned(), error);
    }
    match uncached.check_key_file().await {
        Ok(()) => Ok(None),
        Err(error) if error.is_damage() => damage(KEY_FILE.to_owned(), error),
        Err(error) => Err(error.into()),
    }
}
