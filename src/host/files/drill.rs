//! The weekly `svc-sync-agent verify` drill: restores a sample of files and compares them with those on the machine.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use sha2::{Digest, Sha256};
use svc_base::error_chain::format_chain;
use svc_base::fsx::FileError;
use svc_base::untrusted_text::truncate_printable;
use svc_files::history::{Entry, EntryKind, History};
use svc_files::path_stack::PathStack;
use svc_files::restore::{RestoreOptions, RestoreProgress, available_bytes, restore_entries};
use svc_files::{FilesError, Repository};
use svc_store::StoreError;

use super::access::{AccessError, FilesSettings};
use super::checks::DrillResult;
use super::home_path::HomePath;
use super::owner::open_home;
use crate::system::layout::Layout;

/// Sample limits. The sample also uses at most a quarter of the available space.
const MAX_SAMPLE_FILES: usize = 50;
const MAX_SAMPLE_BYTES: u64 = 256 << 20;
/// Directory for restored files, inside the file-backup state directory.
const STAGING: &str = "drill";
/// Maximum number of differing files listed in the result.
const MAX_NAMED_FILES: usize = 10;

/// Errors that keep a drill from completing.
#[derive(Debug, thiserror::Error)]
enum FileDrillError {
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("no files have been saved yet")]
    NothingSaved,
    #[error("there is too little free space to restore a sample")]
    NoSpace,
    #[error("file not fully restored: {0}")]
    Incomplete(String),
}

impl FileDrillError {
    fn is_no_space(&self) -> bool {
        matches!(self, Self::NoSpace) || matches!(self, Self::Files(error) if error.is_no_space())
    }

    fn is_damage(&self) -> bool {
        matches!(self, Self::Files(error) | Self::Access(AccessError::Files(error)) if error.is_damage())
    }
}

/// Restores a sample of the latest snapshot's files, and compares those that haven't changed since with the files on
/// the machine. Returns `None` on low disk space: this isn't damage, and the next verification retries the drill.
pub(super) async fn drill(settings: &FilesSettings, now: Timestamp) -> Option<DrillResult> {
    let mut result = DrillResult { at: Some(now), ..DrillResult::default() };
    let staging = settings.layout.files_state().join(STAGING);
    let compared = match recreate_directory(&staging) {
        Ok(()) => compare_sample(settings, &staging, &mut result).await,
        Err(error) => Err(FileDrillError::from(error)),
    };
    if let Err(error) = remove_all(&staging) {
        tracing::warn!(error = %format_chain(&error), "cannot remove files restored by the drill");
    }
    match compared {
        Ok(()) => {}
        Err(error) if error.is_no_space() => {
            tracing::warn!(error = %format_chain(&error), "file backup drill postponed");
            return None;
        }
        Err(error) => {
            tracing::error!(error = %format_chain(&error), "file backup drill failed");
            (result.error, result.is_damaged) = (Some(format_chain(&error)), error.is_damage());
        }
    }
    Some(result)
}

/// Creates an empty directory that other users can't access, first removing any files left there by a killed drill.
fn recreate_directory(dir: &Path) -> Result<(), FileError> {
    remove_all(dir)?;
    std::fs::DirBuilder::new().mode(0o700).create(dir).map_err(FileError::wrap("create", dir))
}

fn remove_all(dir: &Path) -> Result<(), FileError> {
    match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(FileError::wrap("remove", dir)(error)),
        _ => Ok(()),
    }
}

async fn compare_sample(
    settings: &FilesSettings,
    staging: &Path,
    result: &mut DrillResult,
) -> Result<(), FileDrillError> {
    let repository = settings.open_with_stored_key().await?.ok_or(FileDrillError::NothingSaved)?;
    let history = History::open(Repository::clone(&repository)).await?;
    let latest = settings.read_latest().await?;
    let snapshot =
        latest.and_then(|id| history.find_snapshot_by_id(id)).or_else(|| history.find_snapshot(None));
    let (_, snapshot) = snapshot.ok_or(FileDrillError::NothingSaved)?;
    let root = history.find(snapshot, Path::new("")).await?.ok_or(FileDrillError::NothingSaved)?;
    let mut sample = draw_sample(&history, root).await?;
    drop(history);
    let has_content = |sample: &[(PathBuf, Entry)]| sample.iter().any(|(_, entry)| entry.size() > 0);
    let had_content = has_content(&sample);
    let available = available_bytes(staging)? / 4;
    let mut budget = MAX_SAMPLE_BYTES.min(available);
    sample.retain(|(_, entry)| match budget.checked_sub(entry.size()) {
        Some(remaining) => {
            budget = remaining;
            true
        }
        None => false,
    });
    if had_content && !has_content(&sample) && available < MAX_SAMPLE_BYTES {
        return Err(FileDrillError::NoSpace);
    }
    let uid_and_gid = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    let options = RestoreOptions {
        owner: Some(uid_and_gid),
        ..RestoreOptions::new(staging.to_owned(), settings.layout.root().to_owned())
    };
    let entries = sample.iter().enumerate().map(|(number, (_, entry))| (entry, number.to_string()));
    let restored = restore_entries(&repository, entries, &options, &RestoreProgress::default()).await?;
    if let Some(first) = restored.first_incomplete {
        return Err(FileDrillError::Incomplete(first));
    }
    (result.files, result.bytes) = (restored.files, restored.bytes);
    for (number, (path, entry)) in sample.into_iter().enumerate() {
        let (layout, relative) = (settings.layout.clone(), path.clone());
        let restored = staging.join(number.to_string());
        let compare = move || compare(&layout, &relative, &entry, &restored);
        let is_same = tokio::task::spawn_blocking(compare).await.ok().flatten();
        let Some(is_same) = is_same else { continue };
        result.compared += 1;
        if !is_same {
            result.differing_count += 1;
            if result.differing.len() < MAX_NAMED_FILES {
                result.differing.push(truncate_printable(&HomePath::from_relative(path).to_string()));
            }
        }
    }
    Ok(())
}

/// Returns whether the restored file matches the current one, or `None` if the current one has changed since it was
/// saved or either is unreadable. A missing restored file is a mismatch.
fn compare(layout: &Layout, path: &Path, entry: &Entry, restored: &Path) -> Option<bool> {
    let mut current = open_home(layout, &layout.user_home()).ok()?.open_file(path).ok()?;
    let modified_at = |meta: &Metadata| to_nanoseconds(meta.mtime(), meta.mtime_nsec());
    let is_unchanged = |meta: &Metadata| {
        let (ctime, inode) = entry.ctime_and_inode();
        meta.len() == entry.size()
            && meta.ino() == inode
            && modified_at(meta) == entry.modified_at().as_nanosecond()
            && to_nanoseconds(meta.ctime(), meta.ctime_nsec()) == ctime.as_nanosecond()
    };
    let meta = current.metadata().ok().filter(is_unchanged)?;
    let current_hash = hash(&mut current, entry.size())?;
    current.metadata().ok().filter(is_unchanged)?;
    let mut restored = match File::open(restored) {
        Ok(restored) => restored,
        // The file's mode denies reads even to its owner, and this process lacks the service's capabilities.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return None,
        Err(_) => return Some(false),
    };
    let restored_meta = restored.metadata().ok()?;
    // Restoring with a different owner drops the setuid and setgid bits.
    let mode = |meta: &Metadata| meta.mode() & 0o1777;
    let has_same_metadata =
        mode(&restored_meta) == mode(&meta) && modified_at(&restored_meta) == modified_at(&meta);
    Some(has_same_metadata && hash(&mut restored, entry.size())? == current_hash)
}

fn to_nanoseconds(seconds: i64, nanoseconds: i64) -> i128 {
    i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds)
}

/// Hashes a file of the given size. Reads at most one extra byte, in case a program is still appending to the file.
fn hash(file: &mut File, size: u64) -> Option<[u8; 32]> {
    let mut file = file.take(size.saturating_add(1));
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 128 << 10];
    loop {
        match file.read(&mut buffer).ok()? {
            0 => return Some(hash.finalize().into()),
            read => hash.update(&buffer[..read]),
        }
    }
}

/// Draws a uniform random sample of files.
async fn draw_sample(history: &History, root: Entry) -> Result<Vec<(PathBuf, Entry)>, FilesError> {
    let mut sample: Vec<(PathBuf, Entry)> = Vec::new();
    let mut file_count = 0_u128;
    // Full paths of deep directories would take too much memory.
    let (mut pending_paths, mut pending) = (PathStack::default(), vec![root]);
    pending_paths.push(Path::new(""));
    while let (Some(directory), Some(entry)) = (pending_paths.pop(), pending.pop()) {
        for entry in history.list(&entry).await? {
            let path = directory.join(entry.name());
            match entry.kind() {
                EntryKind::Directory => {
                    pending_paths.push(&path);
                    pending.push(entry);
                }
                EntryKind::File => {
                    file_count += 1;
                    // Reservoir sampling: the n-th file replaces a sampled one with probability size / n.
                    let drawn = uuid::Uuid::new_v4().as_u128() % file_count;
                    if sample.len() < MAX_SAMPLE_FILES {
                        sample.push((path, entry));
                    } else if let Some(replaced) =
                        usize::try_from(drawn).ok().and_then(|index| sample.get_mut(index))
                    {
                        *replaced = (path, entry);
                    }
                }
                EntryKind::Symlink | EntryKind::Special => {}
            }
        }
    }
    Ok(sample)
}
