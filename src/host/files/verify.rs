//! `svc-sync-agent verify`: reads a share of the file backup again, so that damage is found before a recovery needs it;
//! once a week, also compares a sample of files with those on the machine.
//!
//! Damage names its files and moments. The service then writes again what the machine still has.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::anyhow;
use futures_util::TryStreamExt;
use jiff::Timestamp;
use sha2::{Digest, Sha256};
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::chain::format_chain;
use svc_base::clock;
use svc_base::fsx;
use svc_base::quantity::{format_bytes, pluralize};
use svc_base::untrusted_text::truncate_printable;
use svc_files::affected::{Affected, AffectedPath, find_affected};
use svc_files::history::{Entry, EntryKind, History};
use svc_files::verify::{Share, verify};
use svc_files::{FilesError, Repository};
use svc_store::StoreError;

use super::access::{AccessError, FilesSettings};
use super::checks::{AffectedFile, DrillResult, FileChecks, VerifyResult};
use super::home_path::HomePath;
use super::owner::open_home;
use super::save_request::SAVE_REQUEST;
use crate::system::activity;
use crate::system::config;
use crate::system::layout::Layout;
use crate::system::lock::Lock;

/// The file that requests a verification.
pub const REQUEST: &str = "files-verify";
const LOCK_FILE: &str = "verify.lock";
/// How long another verification is waited for.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3600);
/// The sample of a drill.
const SAMPLE_FILES: usize = 50;
const MAX_SAMPLE_BYTES: u64 = 1 << 30;
const MAX_NAMED_FILES: usize = 10;

/// Why a check could not be completed.
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
}

/// Verifies today's share, or everything, and runs a drill if one is due.
///
/// # Errors
/// `Refused` if something is damaged or differs; `Unavailable` if a check could not be completed.
pub async fn run(layout: Layout, all: bool) -> Result<(), Failure> {
    let mut env = config::environment(&layout);
    let days = config::read_verify_within_days(&mut env);
    let days = env.finish(Some(days))?;
    let lock = Lock::wait(&layout.files_state().join(LOCK_FILE), LOCK_TIMEOUT).await;
    // Also without the lock, because systemd starts this program again while the request exists.
    fsx::remove_if_exists(&layout.request(REQUEST)).or_exit(Exit::Internal)?;
    let _lock = lock.or_exit(Exit::TryAgain)?;
    let settings = FilesSettings::read(layout)?;
    let layout = &settings.layout;
    let mut checks = FileChecks::read(layout).or_exit(Exit::Internal)?;
    let now = clock::now_ms();
    let days = u16::try_from(days).unwrap_or(u16::MAX);
    let shares = if all { checks.select_all_shares(days) } else { checks.select_shares(days, now) };
    let mut result = VerifyResult { at: Some(now), ..VerifyResult::default() };
    let verified = verify_shares(&settings, &mut checks, &shares, &mut result).await;
    result.error = verified.as_ref().err().map(|error| format_chain(error));
    checks.verify = Some(result.clone());
    checks.write(layout).or_exit(Exit::Internal)?;
    let mut error = result.error.clone();
    if verified.is_ok() && checks.is_drill_due(now) {
        let drill = drill(&settings, now).await;
        error = error.or_else(|| drill.error.clone());
        checks.drill = Some(drill);
        checks.write(layout).or_exit(Exit::Internal)?;
    }
    if !checks.damaged.is_empty() {
        // The service writes again what the machine still has.
        fsx::write_atomic(&layout.request(SAVE_REQUEST), b"", 0o644).or_exit(Exit::Internal)?;
    }
    if let Some(problem) = checks.find_problem() {
        activity::note(layout, &format!("verification of the file backup: {problem}"));
        return Err(Failure::new(Exit::Refused, anyhow!("{problem}")));
    }
    if let Some(error) = error {
        return Err(Failure::new(Exit::Unavailable, anyhow!("{error}")));
    }
    let read = format!("{} ({})", pluralize(result.packs, "pack"), format_bytes(result.bytes));
    let text = match result.replaced {
        0 => format!("{read} read in full: all are intact"),
        count => format!(
            "{read} read in full: nothing is lost; other packs have the content of {count} damaged ones"
        ),
    };
    activity::note(layout, &format!("verification of the file backup: {text}"));
    println!("{text}");
    Ok(())
}

async fn verify_shares(
    settings: &FilesSettings,
    checks: &mut FileChecks,
    shares: &[Share],
    result: &mut VerifyResult,
) -> Result<(), CheckError> {
    let repository = settings.open_with_stored_key().await?.ok_or(CheckError::NothingSaved)?;
    for share in shares {
        let verified = verify(&repository, *share).await?;
        result.packs += verified.packs;
        result.bytes += verified.bytes;
        result.replaced += verified.replaced.len() as u64;
        for damaged in &verified.damaged {
            tracing::error!(pack = %damaged.pack, why = damaged.why, blobs = damaged.blobs.len(), "a pack is damaged");
        }
        for damaged in &verified.replaced {
            tracing::warn!(pack = %damaged.pack, why = damaged.why, "a pack is damaged; other packs have its content");
        }
        checks.record_share(*share, &verified, clock::now_ms());
    }
    let blobs = checks.damaged_blobs();
    let affected =
        if blobs.is_empty() { Affected::default() } else { find_affected(&repository, &blobs).await? };
    checks.affected_snapshots = affected.snapshots;
    let describe = |file: AffectedPath| AffectedFile {
        path: truncate_printable(&HomePath::from_relative(file.path).to_string()),
        first: file.first,
        last: file.last,
    };
    checks.affected = Some(affected.paths.into_iter().map(describe).collect());
    Ok(())
}

/// Reads a sample of the latest snapshot's files, and compares those that have not changed since with the present ones.
async fn drill(settings: &FilesSettings, now: Timestamp) -> DrillResult {
    let mut result = DrillResult { at: Some(now), ..DrillResult::default() };
    if let Err(error) = compare_sample(settings, &mut result).await {
        tracing::error!(error = %format_chain(&error), "the drill of the file backup failed");
        result.error = Some(format_chain(&error));
    }
    result
}

async fn compare_sample(settings: &FilesSettings, result: &mut DrillResult) -> Result<(), CheckError> {
    let repository = settings.open_with_stored_key().await?.ok_or(CheckError::NothingSaved)?;
    let history = History::open_with_contents(Repository::clone(&repository)).await?;
    let (_, snapshot) = history.find_snapshot(None).ok_or(CheckError::NothingSaved)?;
    let root = history.find(snapshot, Path::new("")).await?.ok_or(CheckError::NothingSaved)?;
    for (path, entry) in draw_sample(&history, root).await? {
        if result.bytes + entry.size() > MAX_SAMPLE_BYTES {
            continue;
        }
        let mut hash = Sha256::new();
        let mut content = std::pin::pin!(history.read_content(&entry));
        while let Some(chunk) = content.try_next().await? {
            result.bytes += chunk.len() as u64;
            hash.update(&chunk);
        }
        result.files += 1;
        let (layout, below) = (settings.layout.clone(), path.clone());
        let present = tokio::task::spawn_blocking(move || hash_present(&layout, &below, &entry));
        let present = present.await.ok().flatten();
        let Some(present) = present else { continue };
        result.compared += 1;
        if present[..] != hash.finalize()[..] {
            result.differing_count += 1;
            if result.differing.len() < MAX_NAMED_FILES {
                result.differing.push(truncate_printable(&HomePath::from_relative(path).to_string()));
            }
        }
    }
    Ok(())
}

/// Draws files at random, each with the same probability.
async fn draw_sample(history: &History, root: Entry) -> Result<Vec<(PathBuf, Entry)>, FilesError> {
    let mut sample: Vec<(PathBuf, Entry)> = Vec::new();
    let mut seen = 0_u128;
    let mut pending = vec![(PathBuf::new(), root)];
    while let Some((directory, entry)) = pending.pop() {
        for entry in history.list(&entry).await? {
            let path = directory.join(entry.name());
            match entry.kind() {
                EntryKind::Directory => pending.push((path, entry)),
                EntryKind::File => {
                    seen += 1;
                    // Reservoir sampling: the n-th file replaces one of the sample with probability size / n.
                    let drawn = uuid::Uuid::new_v4().as_u128() % seen;
                    if sample.len() < SAMPLE_FILES {
                        sample.push((path, entry));
                    } else if let Some(place) = usize::try_from(drawn).ok().and_then(|at| sample.get_mut(at))
                    {
                        *place = (path, entry);
                    }
                }
                EntryKind::Link | EntryKind::Special => {}
            }
        }
    }
    Ok(sample)
}

/// Returns the hash of the present file; `None` if it has changed since, or cannot be read.
fn hash_present(layout: &Layout, path: &Path, entry: &Entry) -> Option<[u8; 32]> {
    let mut file = open_home(layout, &layout.user_home()).ok()?.open_file(path).ok()?;
    let is_same = |meta: &std::fs::Metadata| {
        let nanoseconds = |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
        let (changed_at, inode) = entry.changed_at();
        meta.len() == entry.size()
            && meta.ino() == inode
            && nanoseconds(meta.mtime(), meta.mtime_nsec()) == entry.modified_at().as_nanosecond()
            && nanoseconds(meta.ctime(), meta.ctime_nsec()) == changed_at.as_nanosecond()
    };
    file.metadata().ok().filter(is_same)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 128 << 10];
    loop {
        match file.read(&mut buffer).ok()? {
            0 => break,
            read => hash.update(&buffer[..read]),
        }
    }
    file.metadata().ok().filter(is_same)?;
    Some(hash.finalize().into())
}
