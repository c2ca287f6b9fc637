//! Saves the home directory: a thread walks it and splits changed files into chunks, worker threads compress and
//! encrypt the chunks that the repository does not have, and the caller's task uploads the packs.
//!
//! A snapshot is written last, after the packs that it needs and the index of their blobs. A save that fails leaves
//! packs behind. The next save uses those that are in the index.

mod changes;
mod database;
mod entry_stat;
mod excluded;
mod exclusions;
mod file;
mod git;
mod listing;
mod pending;
mod save_database;
mod upload;
mod walk;
mod workers;
mod write_back;

use std::collections::HashSet;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use tokio::sync::mpsc;

use svc_base::failpoint;
use svc_store::StoreError;

use crate::error::FilesError;
use crate::id::Id;
use crate::index::KnownBlobs;
use crate::pack::BlobType;
use crate::repository::{ObjectKind, Repository};
use crate::snapshot::{Snapshot, SnapshotOrigin};
use crate::tree_reader::TreeReader;

pub use changes::ChangeSet;
use changes::Scope;
pub use excluded::{ExcludedEntry, ExcludedSizes};
pub use exclusions::Exclusions;
pub use pending::estimate_pending_bytes;
pub use walk::SPECIAL_FILE_NOTE;

/// The fail points of a save.
pub const FAILPOINTS: &[&str] =
    &["files.save.walked", "files.save.pack", "files.save.index", "files.save.snapshot"];

const DEFAULT_WORKERS: usize = 1;
/// The stack size of the walking thread, for deep directories. Unused parts of the stack take no memory.
const WALK_STACK_BYTES: usize = 64 << 20;
/// An incremental save checks whether the index that it has read is still current, unless an earlier save did so within
/// this interval. The check lists the index, which has a file for each save since the last pruning.
const INDEX_CHECK_INTERVAL: Duration = Duration::from_secs(600);
/// A save that takes longer checks whether the index that it has read is still current. Pruning deletes a pack no
/// earlier than 72 hours after marking it; the difference is a margin.
const MAX_UNCHECKED_DURATION: Duration = Duration::from_secs(48 * 3600);
/// A pack that was marked for deletion longer ago than this may be deleted before pruning finds the new snapshot. The
/// same margin applies.
const MAX_MARK_AGE: SignedDuration = SignedDuration::from_hours(48);

/// The directory to save, and how its snapshots are labeled.
#[derive(Debug, Clone)]
pub struct SaveOptions {
    /// The directory to save.
    pub home: PathBuf,
    /// The directory's path as shown in the snapshot.
    pub shown_path: String,
    /// The snapshots' host name: the owner's handle.
    pub hostname: String,
    pub username: String,
    pub origin: SnapshotOrigin,
    pub exclusions: Exclusions,
    /// Whether a save of the whole home directory measures what it excludes.
    pub should_measure_excluded: bool,
    /// The root directory of the system whose accounts own the files.
    pub system_root: PathBuf,
    /// Number of threads that compress and encrypt chunks.
    pub workers: usize,
    /// The time of the snapshots; `None` for the current time.
    pub time: Option<Timestamp>,
    /// Maximum average rate of uploads; `None` for no limit.
    pub max_bytes_per_second: Option<NonZeroU64>,
}

impl SaveOptions {
    pub fn new(home: PathBuf, origin: SnapshotOrigin) -> Self {
        let shown_path = home.to_string_lossy().into_owned();
        Self {
            home,
            shown_path,
            hostname: String::new(),
            username: String::new(),
            origin,
            exclusions: Exclusions::default(),
            should_measure_excluded: false,
            system_root: PathBuf::from("/"),
            workers: DEFAULT_WORKERS,
            time: None,
            max_bytes_per_second: None,
        }
    }
}

/// The counts of a save. An incremental save counts only what it visited.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SaveCounts {
    pub files: u64,
    pub directories: u64,
    /// The sum of the files' sizes.
    pub bytes: u64,
    /// Files that were read, because they are new or changed.
    pub files_read: u64,
    /// Sockets, FIFOs and devices.
    pub special: u64,
    /// Entries that match [`Exclusions`], that are in a cache directory, or that are on another file system. An
    /// excluded directory counts as one entry.
    pub excluded: u64,
    /// `None` if they were not measured.
    pub excluded_sizes: Option<ExcludedSizes>,
    /// Files and databases that changed during every attempt to read them; the content of the last attempt is saved.
    pub unstable: u64,
    /// Entries that could not be read. An entry that is in the parent snapshot is kept as it was.
    pub unreadable: u64,
    pub first_unreadable: Option<String>,
    /// Descriptions of the first special files and unstable entries.
    pub notes: Vec<String>,
}

/// A finished save.
#[derive(Debug, Clone)]
pub struct SaveResult {
    pub id: Id,
    pub snapshot: Snapshot,
    pub counts: SaveCounts,
    /// Entries that could not be read, or that changed while they were read. The next incremental save must visit them.
    pub retry: ChangeSet,
    /// The number of bytes uploaded in packs.
    pub uploaded_bytes: u64,
    /// How long the save took, excluding waits for the rate limit after the last directory was visited. Files that were
    /// moved during this time may be missing.
    pub duration: Duration,
    /// How long the uploaded bytes take at the maximum rate: an upper bound on the time that the save waited because of
    /// the limit. Zero without a limit.
    pub throttled: Duration,
    /// Whether nothing had changed, so that no snapshot was written and `id` is the parent's.
    pub is_unchanged: bool,
}

/// Saves one directory repeatedly.
pub struct Saver {
    repository: Repository,
    options: SaveOptions,
    /// The index, including what the last save added. `None` before the first save, after the damaged packs have
    /// changed, after a failed save, whose packs may not be in the repository, and after a long save during which index
    /// files were replaced.
    index: Option<LoadedIndex>,
    /// Packs that are damaged. Blobs that are in no other pack count as missing.
    damaged_packs: HashSet<Id>,
    lost_snapshot: Option<Id>,
    /// Whether the next save checks the index, even if the last check was recent.
    must_check_index: bool,
    /// [`INDEX_CHECK_INTERVAL`], except in most tests, which prune more often.
    pub(crate) index_check_interval: Duration,
    /// [`MAX_UNCHECKED_DURATION`], except in tests.
    pub(crate) max_unchecked_duration: Duration,
    upload_limiter: upload::RateLimiter,
}

struct LoadedIndex {
    blobs: KnownBlobs,
    /// The index files that were read or written.
    files: Vec<Id>,
    /// When these files were last known to exist.
    checked_at: Instant,
}

impl Saver {
    pub fn new(repository: Repository, options: SaveOptions) -> Self {
        Self {
            repository,
            options,
            index: None,
            damaged_packs: HashSet::new(),
            lost_snapshot: None,
            must_check_index: false,
            index_check_interval: if cfg!(test) { Duration::ZERO } else { INDEX_CHECK_INTERVAL },
            max_unchecked_duration: MAX_UNCHECKED_DURATION,
            upload_limiter: upload::RateLimiter::default(),
        }
    }

    pub fn repository(&self) -> &Repository {
        &self.repository
    }

    pub fn options_mut(&mut self) -> &mut SaveOptions {
        &mut self.options
    }

    /// Sets the packs that are damaged. [`Self::save`] rewrites all blobs that are in no other pack, if the directory
    /// still has their content. The parameter lists packs, not blobs, because a pack can have thousands of blobs.
    pub fn set_damaged_packs(&mut self, damaged_packs: HashSet<Id>) {
        if self.damaged_packs != damaged_packs {
            self.damaged_packs = damaged_packs;
            self.index = None;
        }
    }

    /// Whether the store has this snapshot. Does not use the cache.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn has_snapshot(&self, id: Id) -> Result<bool, FilesError> {
        let path = self.repository.path(ObjectKind::Snapshot, id);
        Ok(self.repository.bucket.head(&path).await?.is_some())
    }

    /// Sets the snapshot that the store has lost, if any. A save with this snapshot as its parent writes a new snapshot
    /// even if nothing has changed.
    pub fn set_lost_snapshot(&mut self, lost_snapshot: Option<Id>) {
        self.lost_snapshot = lost_snapshot;
    }

    /// Makes the next save check that the store has all index files. A save of the whole directory always does.
    pub fn require_index_check(&mut self) {
        self.must_check_index = true;
    }

    /// Saves the whole directory. Files that have not changed since the snapshot `parent` are not read again.
    ///
    /// # Errors
    /// If the store fails; [`FilesError::Corrupt`] if the index is damaged; [`FilesError::IndexChanging`] if it changed
    /// during every attempt to read it; [`FilesError::TooManyBlobs`] if the repository would have too many blobs;
    /// [`FilesError::Io`] if the directory itself cannot be read; [`FilesError::SaveTooLong`] if the save took more
    /// than 48 hours, and a blob that it needs is no longer in the index, or was marked for deletion more than 48 hours
    /// ago; [`FilesError::Thread`] or [`FilesError::Stopped`] if a thread cannot be started or panics. The repository
    /// stays consistent; the next save reuses the packs that are already indexed.
    pub async fn save(&mut self, parent: Option<(Id, Snapshot)>) -> Result<SaveResult, FilesError> {
        self.save_scope(parent, None).await
    }

    /// Saves what has changed since the snapshot `parent`. Nothing else is visited, unless the parent's trees cannot be
    /// read, or the index had to be read; in these cases, the whole directory is saved.
    ///
    /// # Errors
    /// See [`Self::save`].
    pub async fn save_changes(
        &mut self,
        parent: (Id, Snapshot),
        changes: ChangeSet,
    ) -> Result<SaveResult, FilesError> {
        self.save_scope(Some(parent), Some(changes)).await
    }

    async fn save_scope(
        &mut self,
        parent: Option<(Id, Snapshot)>,
        changes: Option<ChangeSet>,
    ) -> Result<SaveResult, FilesError> {
        let began = Instant::now();
        let must_check = std::mem::take(&mut self.must_check_index) || changes.is_none();
        let (LoadedIndex { blobs: mut known, mut files, checked_at }, is_reloaded) =
            self.take_index(must_check).await?;
        // A parent whose tree cannot be read is useless, so the whole home directory is read.
        let is_readable = |tree| {
            known.contains(BlobType::Tree, tree)
                || matches!(self.repository.read_cached_tree(tree), Ok(Some(_)))
        };
        let mut parent = parent.filter(|(_, snapshot)| is_readable(snapshot.tree));
        if let Some((_, snapshot)) = parent.as_ref().filter(|_| is_reloaded) {
            match self.load_missing_trees(snapshot.tree).await {
                Ok(()) => {}
                // The files still exist in the home directory: read them again, and write their trees again.
                Err(
                    error @ (FilesError::Corrupt { .. } | FilesError::Store(StoreError::NotFound { .. })),
                ) => {
                    tracing::error!(%error, "a tree of the latest snapshot is damaged; saving everything again");
                    known.remove_trees();
                    parent = None;
                }
                Err(error) => return Err(error),
            }
        }
        // The store may have lost index files that list unchanged content.
        let changes = changes.filter(|_| parent.is_some() && !is_reloaded);
        let repository = &self.repository;
        let time = self.options.time.unwrap_or_else(Timestamp::now);
        // Capacity 1: a worker waits while the store is slow, so that packs do not fill up memory.
        let (packs, finished_packs) = mpsc::channel(1);
        let is_stopped = StopOnDrop(Arc::new(AtomicBool::new(false)));
        let walk = walk::Walk {
            repository: repository.clone(),
            options: self.options.clone(),
            known,
            packs,
            is_stopped: Arc::clone(&is_stopped.0),
        };
        let parent_tree = parent.as_ref().map(|(_, snapshot)| snapshot.tree);
        let (sender, walked) = tokio::sync::oneshot::channel();
        std::thread::Builder::new()
            .name("files-walk".to_owned())
            .stack_size(WALK_STACK_BYTES)
            .spawn(move || {
                let scope = changes.as_ref().map_or(Scope::All, Scope::Changed);
                let began = Instant::now();
                let walked = walk.run(parent_tree, scope);
                // There is no receiver if the save was cancelled.
                let _ = sender.send((walked, began.elapsed()));
            })
            .map_err(FilesError::Thread)?;
        let max_rate = self.options.max_bytes_per_second;
        let uploaded = upload::upload(repository, finished_packs, &mut self.upload_limiter, max_rate).await;
        is_stopped.0.store(uploaded.is_err(), Ordering::Relaxed);
        // If both failed, the upload's error is the cause.
        let walked = walked.await.map_err(|_| FilesError::Stopped);
        let upload::UploadResult { bytes: uploaded_bytes, throttled, index_files } = uploaded?;
        files.extend(index_files);
        let (walked, walk_duration) = walked?;
        let walk::WalkResult { tree, counts, retry, trees, known } = walked?;
        if let Some(trees) = trees {
            repository.retain_cached_trees(&trees);
        }
        failpoint::trigger("files.save.walked")?;
        let duration = began.elapsed().saturating_sub(throttled).max(walk_duration);
        if let Some((id, snapshot)) = &parent
            && snapshot.tree == tree
            && self.lost_snapshot != Some(*id)
        {
            self.index = Some(LoadedIndex { blobs: known, files, checked_at });
            return Ok(SaveResult {
                id: *id,
                snapshot: snapshot.clone(),
                counts,
                retry,
                uploaded_bytes,
                duration,
                throttled,
                is_unchanged: true,
            });
        }
        let mut index = Some(LoadedIndex { blobs: known, files, checked_at });
        if began.elapsed() > self.max_unchecked_duration
            && let Some(LoadedIndex { files, .. }) = &index
            && !self.has_index_files(files).await?
        {
            // Frees the memory for the new index. The next save reads it again.
            index = None;
            self.ensure_retained(tree).await?;
        }
        let snapshot = Snapshot {
            time,
            parent: parent.map(|(id, _)| id),
            tree,
            paths: vec![self.options.shown_path.clone()],
            hostname: self.options.hostname.clone(),
            username: self.options.username.clone(),
            tags: self.options.origin.to_tags(),
        };
        failpoint::trigger("files.save.snapshot")?;
        let id = repository.write_json(ObjectKind::Snapshot, &snapshot).await?;
        self.index = index;
        Ok(SaveResult {
            id,
            snapshot,
            counts,
            retry,
            uploaded_bytes,
            duration,
            throttled,
            is_unchanged: false,
        })
    }

    /// Returns the index, and whether it was read from the store. It is read again if one of its files was replaced,
    /// because known blobs may have been marked for deletion. This is checked if `must_check`, or if the last check is
    /// at least [`INDEX_CHECK_INTERVAL`] old.
    async fn take_index(&mut self, must_check: bool) -> Result<(LoadedIndex, bool), FilesError> {
        let now = Instant::now();
        if let Some(loaded) = self.index.take() {
            if !must_check && now.duration_since(loaded.checked_at) < self.index_check_interval {
                return Ok((loaded, false));
            }
            if self.has_index_files(&loaded.files).await? {
                return Ok((LoadedIndex { checked_at: now, ..loaded }, false));
            }
        }
        let (blobs, files) = self.repository.load_known_blobs(&self.damaged_packs).await?;
        self.repository.retain_cached_index_files(&files.iter().copied().collect());
        Ok((LoadedIndex { blobs, files, checked_at: now }, true))
    }

    /// Whether the repository still has all of these index files.
    async fn has_index_files(&self, files: &[Id]) -> Result<bool, FilesError> {
        let present: HashSet<Id> = self.repository.list(ObjectKind::Index).await?.into_iter().collect();
        Ok(files.iter().all(|file| present.contains(file)))
    }

    /// Checks that pruning will find a new snapshot with this tree before it deletes the only copy of a blob that the
    /// snapshot needs.
    ///
    /// # Errors
    /// [`FilesError::SaveTooLong`] if pruning may delete such a copy first; the errors of reading the index and the
    /// trees.
    async fn ensure_retained(&self, root: Id) -> Result<(), FilesError> {
        let retained = self.repository.load_retained_blobs(Timestamp::now() - MAX_MARK_AGE).await?;
        let locations = self.repository.load_tree_locations().await?;
        let mut trees = TreeReader::new(&self.repository, &locations);
        let mut seen = HashSet::new();
        let mut pending = vec![root];
        while let Some(id) = pending.pop() {
            if !seen.insert(id) {
                continue;
            }
            if !retained.contains(BlobType::Tree, id) {
                return Err(FilesError::SaveTooLong);
            }
            for node in trees.read(id).await?.nodes {
                pending.extend(node.subtree);
                if node.content.iter().flatten().any(|chunk| !retained.contains(BlobType::Data, *chunk)) {
                    return Err(FilesError::SaveTooLong);
                }
            }
        }
        Ok(())
    }

    /// Loads the parent's trees into the cache, from which the walk reads them. If a tree is missing there, the walk
    /// reads all files below it.
    async fn load_missing_trees(&self, root: Id) -> Result<(), FilesError> {
        let mut pending = vec![root];
        while let Some(id) = pending.pop() {
            let Some(tree) = self.repository.read_cached_tree(id)? else {
                pending.push(id);
                break;
            };
            pending.extend(tree.nodes.iter().filter_map(|node| node.subtree));
        }
        if pending.is_empty() {
            return Ok(());
        }
        let locations = self.repository.load_tree_locations().await?;
        let mut trees = TreeReader::new(&self.repository, &locations);
        while let Some(id) = pending.pop() {
            pending.extend(trees.read(id).await?.nodes.iter().filter_map(|node| node.subtree));
        }
        Ok(())
    }
}

/// Reads the snapshot that a save compares the files with; `None` if it is missing or damaged. Without it, the save
/// reads all files.
///
/// # Errors
/// If the store fails.
pub async fn read_parent(repository: &Repository, id: Id) -> Result<Option<(Id, Snapshot)>, FilesError> {
    match repository.read_snapshot(id).await {
        Ok(snapshot) => Ok(Some((id, snapshot))),
        Err(error) if error.is_damage() => {
            tracing::error!(%error, "cannot read the latest snapshot");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Stops the walk on drop: a cancelled save drops it.
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
