//! Restores a snapshot, or some of its entries, to an empty directory.
//!
//! First the trees are read. If the target has enough space, the directories, the links and the files (without content)
//! are created; then the chunks are read pack by pack and written to their places; owners, modes and times come last.
//! Names are checked when a tree is parsed: each entry stays in its directory.

mod content;
mod metadata;
mod plan;
mod target;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use svc_base::accounts::Accounts;
use svc_base::failpoint;

use crate::blocking::run_blocking;
use crate::error::FilesError;
use crate::history::Entry;
use crate::repository::Repository;
use crate::snapshot::Snapshot;
use metadata::Owners;
use plan::Start;

/// A restore leaves this share of the file system free, and at most `MAX_RESERVE_BYTES`: the database is on it, too.
const RESERVE_SHARE: u64 = 20;
const MAX_RESERVE_BYTES: u64 = 1 << 30;

/// The fail points of a restore.
pub const FAILPOINTS: &[&str] =
    &["files.restore.planned", "files.restore.written", "files.restore.completed"];

/// Where to restore.
#[derive(Debug, Clone)]
pub struct RestoreOptions {
    /// Must be empty and closed to other users. Neither is checked.
    pub target: PathBuf,
    /// The root directory of the system whose accounts own the files. An id is kept if the system has no account of that
    /// name.
    pub system_root: PathBuf,
    /// The user and group that own everything; `None` for those of the snapshot. Executables then lose their set-user-ID
    /// and set-group-ID bits.
    pub owner: Option<(u32, u32)>,
}

impl RestoreOptions {
    /// Restores to `target`, with the owners of the snapshot.
    pub fn new(target: PathBuf, system_root: PathBuf) -> Self {
        Self { target, system_root, owner: None }
    }
}

/// The progress of a restore, shared with another task. Bytes are uncompressed.
#[derive(Debug, Default)]
pub struct RestoreProgress {
    total_bytes: AtomicU64,
    written_bytes: AtomicU64,
    total_files: AtomicU64,
}

impl RestoreProgress {
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes.load(Ordering::Relaxed)
    }

    pub fn written_bytes(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }

    pub fn total_files(&self) -> u64 {
        self.total_files.load(Ordering::Relaxed)
    }
}

/// The result of a restore.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Restored {
    pub files: u64,
    pub directories: u64,
    pub bytes: u64,
    /// Entries whose owner, mode, times or attributes could not be set.
    pub incomplete: u64,
    pub first_incomplete: Option<String>,
}

/// Returns the space that a restore may take in a directory, in bytes: the free space without a reserve.
///
/// # Errors
/// `Io` if the free space cannot be read.
pub fn available_bytes(directory: &Path) -> Result<u64, FilesError> {
    let stat = rustix::fs::statvfs(directory).map_err(FilesError::io("read the free space of", directory))?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    let reserve = (bytes(stat.f_blocks) / RESERVE_SHARE).min(MAX_RESERVE_BYTES);
    Ok(bytes(stat.f_bavail).saturating_sub(reserve))
}

/// Restores a snapshot. Every chunk's hash is checked before it is written.
///
/// # Errors
/// `NoSpace`, `Corrupt`, `Io`, or a store error. The target may then be partly written: retry with a new, empty one.
pub async fn restore(
    repository: &Repository,
    snapshot: &Snapshot,
    options: &RestoreOptions,
    progress: &RestoreProgress,
) -> Result<Restored, FilesError> {
    restore_from(repository, Start::Tree(snapshot.tree), options, progress).await
}

/// Restores entries of a snapshot, each with everything below it, to these names in the target.
///
/// # Errors
/// Those of [`restore`].
pub async fn restore_entries(
    repository: &Repository,
    entries: impl IntoIterator<Item = (&Entry, String)>,
    options: &RestoreOptions,
    progress: &RestoreProgress,
) -> Result<Restored, FilesError> {
    let entries = entries.into_iter().map(|(entry, name)| (entry.node.clone(), PathBuf::from(name)));
    restore_from(repository, Start::Entries(entries.collect()), options, progress).await
}

async fn restore_from(
    repository: &Repository,
    start: Start,
    options: &RestoreOptions,
    progress: &RestoreProgress,
) -> Result<Restored, FilesError> {
    let locations = repository.load_locations().await?;
    let plan = plan::RestorePlan::create(repository, &locations, start).await?;
    plan.check_space(&options.target)?;
    progress.total_bytes.store(plan.total_bytes, Ordering::Relaxed);
    progress.total_files.store(plan.files.len() as u64, Ordering::Relaxed);
    let target = options.target.clone();
    let plan = run_blocking(move || plan.create_entries(&target).map(|()| plan)).await?;
    failpoint::trigger("files.restore.planned")?;
    let needed = plan.needed_bytes();
    let written = content::write_contents(repository, &locations, plan, &options.target, progress).await;
    let plan = written.map_err(|error| error.or_no_space(needed))?;
    failpoint::trigger("files.restore.written")?;
    let owners = match options.owner {
        Some((uid, gid)) => Owners::Fixed { uid, gid },
        None => Owners::Saved(Accounts::load(&options.system_root).names()),
    };
    let target = options.target.clone();
    let restored = run_blocking(move || metadata::apply(&plan, &target, &owners)).await?;
    failpoint::trigger("files.restore.completed")?;
    Ok(restored)
}
