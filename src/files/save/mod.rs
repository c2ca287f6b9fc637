//! Saves the home directory. One thread walks it and splits changed files into chunks, worker threads compress and
//! encrypt chunks missing from the repository, and the caller's task uploads the packs.
//!
//! The snapshot is written last, after its packs and their index. A failed save leaves packs behind; the next save
//! reuses those already indexed.

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

/// Fail points on the save path.
pub const FAILPOINTS: &[&str] =
    &["files.save.walked", "files.save.pack", "files.save.index", "files.save.snapshot"];

const DEFAULT_WORKERS: usize = 1;
/// Stack size of the walk thread, for deep directories. Unused stack takes no memory.
const WALK_STACK_BYTES: usize = 64 << 20;
/// How often incremental saves check that the loaded index is still current. The check lists the index, which has one
/// file per save since the last prune.
const INDEX_CHECK_INTERVAL: Duration = Duration::from_secs(600);
/// Longer saves check that the loaded index is still current. Pruning deletes a pack no earlier than 72 hours after
/// marking it; the difference is a safety margin.
const MAX_UNCHECKED_DURATION: Duration = Duration::from_secs(48 * 3600);
/// Packs marked for deletion longer ago than this may be deleted before pruning finds the new snapshot. The same margin
/// applies.
const MAX_MARK_AGE: SignedDuration = SignedDuration::from_hours(48);

/// Configures a [`Saver`]: what to save, and how to label the snapshots.
#[derive(Debug, Clone)]
pub struct SaveOptions {
    /// The directory to save.
    pub home: PathBuf,
    /// Directory path shown in the snapshots.
    pub shown_path: String,
    /// Host name in the snapshots: the owner's handle.
    pub hostname: String,
    pub username: String,
    pub origin: SnapshotOrigin,
    pub exclusions: Exclusions,
    /// Whether full saves measure excluded entries.
    pub should_measure_excluded: bool,
    /// Root of the system whose accounts own the files.
    pub system_root: PathBuf,
    /// Number of threads compressing and encrypting chunks.
    pub workers: usize,
    /// Snapshot time; `None` for the current time.
    pub time: Option<Timestamp>,
    /// Maximum average upload rate; `None` for no limit.
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

/// Save statistics. Incremental saves count only what they visit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SaveCounts {
    pub files: u64,
    pub directories: u64,
    /// Total file size.
    pub bytes: u64,
    /// New or changed files, which were read.
    pub files_read: u64,
    /// Sockets, FIFOs and devices.
    pub special: u64,
    /// Entries that match [`Exclusions`], are in a cache directory, or are on another file system. An excluded
    /// directory counts as one entry.
    pub excluded: u64,
    /// `None` if not measured.
    pub excluded_sizes: Option<ExcludedSizes>,
    /// Files and databases that changed during every read attempt. The last attempt's content is saved.
    pub unstable: u64,
    /// Unreadable entries. Those in the parent snapshot are carried over unchanged.
    pub unreadable: u64,
    pub first_unreadable: Option<String>,
    /// Descriptions of the first special files and unstable entries.
    pub notes: Vec<String>,
}

/// Result of a completed save.
#[derive(Debug, Clone)]
pub struct SaveResult {
    pub id: Id,
    pub snapshot: Snapshot,
    pub counts: SaveCounts,
    /// Entries that couldn't be read or kept changing. The next incremental save must visit them.
    pub retry: ChangeSet,
    /// Pack bytes uploaded.
    pub uploaded_bytes: u64,
    /// How long the save took, excluding rate-limit waits after the last directory was visited. Files moved during this
    /// time may be missing.
    pub duration: Duration,
    /// How long the uploaded bytes take at the maximum rate: an upper bound on rate-limit waits. Zero without a limit.
    pub throttled: Duration,
    /// Whether nothing changed, in which case no snapshot was written and `id` is the parent's.
    pub is_unchanged: bool,
}

/// Saves one directory, reusing the index across saves.
pub struct Saver {
    repository: Repository,
    options: SaveOptions,
    /// The index, including the last save's additions. `None` before the first save, after the damaged packs changed,
    /// after a failed save (its packs may not be in the repository), and after a long save during which index files
    /// were replaced.
    index: Option<LoadedIndex>,
    /// Corrupt packs. Blobs without a copy in another pack are treated as missing.
    damaged_packs: HashSet<Id>,
    lost_snapshot: Option<Id>,
    /// Whether the next save checks the index even if the last check was recent.
    must_check_index: bool,
    /// [`INDEX_CHECK_INTERVAL`], except in most tests, which prune more often.
    pub(crate) index_check_interval: Duration,
    /// [`MAX_UNCHECKED_DURATION`], except in tests.
    pub(crate) max_unchecked_duration: Duration,
    upload_limiter: upload::RateLimiter,
}

struct LoadedIndex {
    blobs: KnownBlobs,
    /// Index files read or written.
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

    /// Sets the corrupt packs. [`Self::save`] rewrites all blobs without a copy in another pack, if the directory still
    /// has their content. Takes packs rather than blobs because a pack can have thousands of blobs.
    pub fn set_damaged_packs(&mut self, damaged_packs: HashSet<Id>) {
        if self.damaged_packs != damaged_packs {
            self.damaged_packs = damaged_packs;
            self.index = None;
        }
    }

    /// Checks whether the store has this snapshot, bypassing the cache.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn has_snapshot(&self, id: Id) -> Result<bool, FilesError> {
        let path = self.repository.path(ObjectKind::Snapshot, id);
        Ok(self.repository.bucket.head(&path).await?.is_some())
    }

    /// Sets the snapshot lost from the store, if any. Saves with it as their parent write a new snapshot even if
    /// nothing changed.
    pub fn set_lost_snapshot(&mut self, lost_snapshot: Option<Id>) {
        self.lost_snapshot = lost_snapshot;
    }

    /// Makes the next save check that the store has all index files. Full saves always do.
    pub fn require_index_check(&mut self) {
        self.must_check_index = true;
    }

    /// Saves the whole directory. Files unchanged since the snapshot `parent` aren't read again.
    ///
    /// # Errors
    /// If the store fails; [`FilesError::Corrupt`] if the index is corrupt; [`FilesError::IndexChanging`] if it changed
    /// during every attempt to read it; [`FilesError::TooManyBlobs`] if the repository would have too many blobs;
    /// [`FilesError::Io`] if the directory itself can't be read; [`FilesError::SaveTooLong`] if the save took more than
    /// 48 hours and a required blob is no longer in the index, or was marked for deletion more than 48 hours ago;
    /// [`FilesError::Thread`] or [`FilesError::Stopped`] if a thread can't be started or panics. The repository stays
    /// consistent, and the next save reuses packs already indexed.
    pub async fn save(&mut self, parent: Option<(Id, Snapshot)>) -> Result<SaveResult, FilesError> {
        self.save_scope(parent, None).await
    }

    /// Saves changes since the snapshot `parent` without visiting anything else. Falls back to saving the whole
    /// directory if the parent's trees can't be read or the index had to be read from the store.
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
        // A parent with an unreadable tree is useless, so read the whole home directory.
        let is_readable = |tree| {
            known.contains(BlobType::Tree, tree)
                || matches!(self.repository.read_cached_tree(tree), Ok(Some(_)))
        };
        let mut parent = parent.filter(|(_, snapshot)| is_readable(snapshot.tree));
        if let Some((_, snapshot)) = parent.as_ref().filter(|_| is_reloaded) {
            match self.load_missing_trees(snapshot.tree).await {
                Ok(()) => {}
                // The files still exist in the home directory, so read them and write their trees again.
                Err(
                    error @ (FilesError::Corrupt { .. } | FilesError::Store(StoreError::NotFound { .. })),
                ) => {
                    tracing::error!(%error, "unreadable tree in the latest snapshot; saving everything again");
                    known.remove_trees();
                    parent = None;
                }
                Err(error) => return Err(error),
            }
        }
        // Index files covering unchanged content may be lost.
        let changes = changes.filter(|_| parent.is_some() && !is_reloaded);
        let repository = &self.repository;
        let time = self.options.time.unwrap_or_else(Timestamp::now);
        // Capacity 1 for backpressure: packs must not fill up memory while the store is slow.
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
                // The receiver is gone if the save was cancelled.
                let _ = sender.send((walked, began.elapsed()));
            })
            .map_err(FilesError::Thread)?;
        let max_rate = self.options.max_bytes_per_second;
        let uploaded = upload::upload(repository, finished_packs, &mut self.upload_limiter, max_rate).await;
        is_stopped.0.store(uploaded.is_err(), Ordering::Relaxed);
        // If both failed, the upload error is the cause.
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
            // Free memory for the new index. The next save reads it again.
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

    /// Returns the index, and whether it was read from the store. It's reloaded if one of its files was replaced,
    /// because known blobs may have been marked for deletion. Checks this if `must_check`, or if the last check is at
    /// least [`INDEX_CHECK_INTERVAL`] old.
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

    /// Whether all of these index files still exist.
    async fn has_index_files(&self, files: &[Id]) -> Result<bool, FilesError> {
        let present: HashSet<Id> = self.repository.list(ObjectKind::Index).await?.into_iter().collect();
        Ok(files.iter().all(|file| present.contains(file)))
    }

    /// Checks that pruning will find a new snapshot with this tree before deleting the only copy of any of its blobs.
    ///
    /// # Errors
    /// [`FilesError::SaveTooLong`] if pruning may delete such a copy first; errors from reading the index and the
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

    /// Loads the parent's trees into the cache for the walk. If a tree isn't cached, the walk reads all files below it.
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

/// Reads a save's parent snapshot. Returns `None` if it's missing or corrupt, in which case the save reads all files.
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

/// Stops the walk on drop, so that cancelling a save cancels its walk.
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
