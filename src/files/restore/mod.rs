//! Restores a snapshot, or selected entries of it, into an empty directory.
//!
//! The first pass reads all trees to check that the target has enough space. Entries are then restored in batches to
//! bound memory use: create directories, symlinks, and files at full size but without content; read chunks pack by pack
//! and write them to the files; create hard links; set the owner, mode and times of files and symlinks. Directory
//! attributes are set last. Names are validated when a tree is parsed, so entries can't escape their directory.

mod batch;
mod content;
mod hard_links;
mod metadata;
mod space;
mod survey;
mod target;
mod walk;

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use svc_base::accounts::Accounts;
use svc_base::failpoint;

use crate::blocking::run_blocking;
use crate::error::FilesError;
use crate::hard_link_paths::HardLinkPaths;
use crate::history::Entry;
use crate::index::BlobLocations;
use crate::repository::Repository;
use crate::snapshot::Snapshot;
use batch::{Batch, PlannedEntry};
use metadata::{AttributeWriter, Owners};
use space::FreeSpace;
pub use space::available_bytes;
use survey::Survey;
use walk::{Walk, WalkStart};

/// Fail points on the restore path.
pub const FAILPOINTS: &[&str] =
    &["files.restore.created", "files.restore.written", "files.restore.completed"];

/// Configures [`restore`] and [`restore_entries`].
#[derive(Debug, Clone)]
pub struct RestoreOptions {
    /// Must be empty and inaccessible to other users. Not checked.
    pub target: PathBuf,
    /// Root of the system whose accounts own the files. Saved ids are used as is if no account has the saved name.
    pub system_root: PathBuf,
    /// User and group to own everything; `None` restores the saved owners. Either way, files lose their setuid and
    /// setgid bits.
    pub owner: Option<(u32, u32)>,
    /// Whether to leave out files with corrupt or missing content, and restore corrupt or missing directories empty.
    /// Otherwise, any damage fails the restore.
    pub should_skip_damaged: bool,
}

impl RestoreOptions {
    /// Returns options for restoring to `target` with the saved owners.
    pub fn new(target: PathBuf, system_root: PathBuf) -> Self {
        Self { target, system_root, owner: None, should_skip_damaged: false }
    }
}

/// Restore progress, shared with another task. Byte counts are uncompressed.
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

/// Damaged files and directories, whose content wasn't restored because it is corrupt or missing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DamagedEntries {
    pub count: u64,
    /// The first paths, relative to the target.
    pub first_paths: Vec<PathBuf>,
}

impl DamagedEntries {
    /// Maximum number of paths in [`Self::first_paths`].
    const MAX_PATHS: usize = 20;

    fn add(&mut self, path: PathBuf) {
        self.count += 1;
        if self.first_paths.len() < Self::MAX_PATHS {
            self.first_paths.push(path);
        }
    }

    fn append(&mut self, other: Self) {
        self.count += other.count;
        self.first_paths.extend(other.first_paths);
        self.first_paths.truncate(Self::MAX_PATHS);
    }
}

/// Outcome of a restore.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RestoreReport {
    pub files: u64,
    pub directories: u64,
    pub bytes: u64,
    /// Entries whose owner, mode, times or extended attributes couldn't be set.
    pub incomplete: u64,
    pub first_incomplete: Option<String>,
    /// Empty unless corrupt entries are skipped.
    pub damaged: DamagedEntries,
}

/// Restores a snapshot, verifying each chunk's hash before writing it.
///
/// # Errors
/// [`FilesError::NoSpace`] or [`FilesError::NoInodes`] if the target's file system is too small;
/// [`FilesError::Corrupt`] if an object is corrupt or a blob is missing from the index; [`FilesError::IndexChanging`]
/// if the index changed during every attempt to read it; [`FilesError::Io`] if an entry can't be created or written;
/// [`FilesError::Store`] if the store fails or an object is missing. With [`RestoreOptions::should_skip_damaged`], only
/// damage to the index or to the snapshot's root directory is an error. The target may be left partially written, so
/// retry with a new, empty one.
pub async fn restore(
    repository: &Repository,
    snapshot: &Snapshot,
    options: &RestoreOptions,
    progress: &RestoreProgress,
) -> Result<RestoreReport, FilesError> {
    restore_from(repository, WalkStart::Tree(snapshot.tree), options, progress).await
}

/// Restores selected entries of a snapshot recursively, each under the given name in the target.
///
/// # Errors
/// See [`restore`]; each given directory is treated like the root directory.
pub async fn restore_entries(
    repository: &Repository,
    entries: impl IntoIterator<Item = (&Entry, String)>,
    options: &RestoreOptions,
    progress: &RestoreProgress,
) -> Result<RestoreReport, FilesError> {
    let entries = entries.into_iter().map(|(entry, name)| entry.node.clone().with_name(OsStr::new(&name)));
    restore_from(repository, WalkStart::Entries(entries.collect()), options, progress).await
}

async fn restore_from(
    repository: &Repository,
    start: WalkStart,
    options: &RestoreOptions,
    progress: &RestoreProgress,
) -> Result<RestoreReport, FilesError> {
    let locations = repository.load_locations().await?;
    let should_skip_damaged = options.should_skip_damaged;
    let mut walk = Walk::new(repository, &locations, should_skip_damaged);
    walk.start(start.clone());
    let survey = Survey::create(&mut walk, &locations, FreeSpace::read(&options.target)?).await?;
    // May be nonzero after an earlier attempt.
    progress.written_bytes.store(0, Ordering::Relaxed);
    progress.total_bytes.store(survey.bytes, Ordering::Relaxed);
    progress.total_files.store(survey.files, Ordering::Relaxed);
    let owners = match options.owner {
        Some((uid, gid)) => Owners::Fixed { uid, gid },
        None => Owners::Saved(Accounts::load(&options.system_root).names()),
    };
    let mut restore = Restore {
        repository,
        locations: &locations,
        target: &options.target,
        needed_bytes: survey.needed_bytes,
        attributes: AttributeWriter::new(owners),
        should_skip_damaged,
        damaged: DamagedEntries::default(),
        damaged_hard_linked_files: HashSet::new(),
        progress,
    };
    walk.start(start);
    let (mut batch, mut hard_link_paths) = (Batch::default(), HardLinkPaths::default());
    while let Some(directory) = walk.next().await? {
        for (path, node) in directory.into_entries() {
            batch.add(path, node, &mut hard_link_paths, &locations, should_skip_damaged)?;
            if batch.is_full() {
                restore = restore.restore_batch(std::mem::take(&mut batch)).await?;
            }
        }
    }
    restore = restore.restore_batch(batch).await?;
    let (attributes, target) = (restore.attributes, options.target.clone());
    let restored = run_blocking(move || attributes.finish(&target)).await;
    let mut restored = restored.map_err(|error| error.or_no_space(survey.needed_bytes))?;
    restored.damaged = walk.damaged;
    restored.damaged.append(restore.damaged);
    failpoint::trigger("files.restore.completed")?;
    Ok(restored)
}

/// A restore in progress.
struct Restore<'a> {
    repository: &'a Repository,
    locations: &'a BlobLocations,
    target: &'a Path,
    /// Space required by all files and directories, in bytes.
    needed_bytes: u64,
    attributes: AttributeWriter,
    should_skip_damaged: bool,
    /// Corrupt files, which are left out.
    damaged: DamagedEntries,
    /// First paths of corrupt hard-linked files, whose other links may be in later batches.
    damaged_hard_linked_files: HashSet<PathBuf>,
    progress: &'a RestoreProgress,
}

impl Restore<'_> {
    /// Restores a batch, except for directory attributes, which are set last.
    async fn restore_batch(mut self, batch: Batch) -> Result<Self, FilesError> {
        let written = self.create_and_write(batch).await;
        let batch = written.map_err(|error| error.or_no_space(self.needed_bytes))?;
        failpoint::trigger("files.restore.written")?;
        let (mut attributes, target) = (self.attributes, self.target.to_owned());
        self.attributes = run_blocking(move || attributes.apply(batch, &target).map(|()| attributes)).await?;
        Ok(self)
    }

    async fn create_and_write(&mut self, batch: Batch) -> Result<Batch, FilesError> {
        let target = self.target.to_owned();
        let batch = run_blocking(move || batch.create_entries(&target).map(|()| batch)).await?;
        failpoint::trigger("files.restore.created")?;
        let (skip, progress) = (self.should_skip_damaged, self.progress);
        let written =
            content::write_contents(self.repository, self.locations, batch, self.target, skip, progress);
        let mut batch = written.await?;
        let left_out = self.leave_out_damaged(&mut batch);
        let target = self.target.to_owned();
        run_blocking(move || batch.complete_entries(&target, &left_out).map(|()| batch)).await
    }

    /// Removes corrupt files and their hard links from a batch and counts them. Returns the files, which the caller
    /// must delete.
    fn leave_out_damaged(&mut self, batch: &mut Batch) -> Vec<PlannedEntry> {
        let left_out = batch.take_damaged();
        for PlannedEntry { path, node } in &left_out {
            if node.hard_link_key().is_some() {
                self.damaged_hard_linked_files.insert(path.clone());
            }
            self.damaged.add(path.clone());
        }
        for (path, first) in std::mem::take(&mut batch.hard_links) {
            if self.damaged_hard_linked_files.contains(&*first) {
                self.damaged.add(path);
            } else {
                batch.hard_links.push((path, first));
            }
        }
        left_out
    }
}
