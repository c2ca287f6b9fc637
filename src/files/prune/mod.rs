//! Removes expired snapshots and unreferenced packs.
//!
//! A concurrent save may rely on blobs in the index, so packs are deleted in two phases. A pack is first marked in the
//! index, so that later saves don't rely on it, and is deleted after a grace period if it's still unreferenced by then.
//! Packs younger than the grace period are never marked, because a save may be about to reference them. Packs newer
//! than the latest snapshot may belong to a save that takes days. Until they are 30 days old, they aren't marked either
//! unless the index is full, and unindexed ones aren't deleted.
//!
//! Invariant: after a crash between any two requests, every remaining snapshot can still be restored. An index file is
//! deleted only after its replacement has been written, and a pack only once no index file lists it.

mod damaged_snapshot;
mod expired;
mod plan;
mod providers;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use jiff::{SignedDuration, Timestamp};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use svc_base::failpoint;
use svc_store::StoreError;

use crate::error::FilesError;
use crate::id::Id;
use crate::index::{IndexFile, IndexToPrune, IndexedPack, MAX_INDEX_BLOBS, MAX_SAVED_BLOBS};
use crate::pack::{BlobType, FinishedPack, PackWriter, PackedBlob};
use crate::repository::{MAX_CONCURRENT_REQUESTS, MAX_PACK_BYTES, ObjectKind, Repository};
use crate::retention::RetentionPolicy;
use crate::snapshot::Snapshot;
use damaged_snapshot::name_damaged_snapshot;
use expired::select_expired;
#[cfg(test)]
pub(crate) use plan::MIN_MERGED_PACKS;
use plan::{PrunePlan, UsedBlobs};

/// Fail points of a prune run.
pub const FAILPOINTS: &[&str] =
    &["files.prune.planned", "files.prune.rewritten", "files.prune.indexed", "files.prune.replaced"];

/// Maximum duration of a save. The packs of longer or abandoned saves may be deleted before the snapshot is written.
const MAX_SAVE_DURATION: SignedDuration = SignedDuration::from_hours(30 * 24);
/// Index files are written once they list this many blobs. Tests use small files.
const TARGET_INDEX_BLOBS: usize = if cfg!(test) { 2_000 } else { 20_000 };
/// Index files with fewer blobs are merged if there are more than [`MAX_SMALL_INDEX_FILES`] of them.
const MIN_INDEX_BLOBS: usize = TARGET_INDEX_BLOBS / 2;
const MAX_SMALL_INDEX_FILES: usize = 16;

#[derive(Debug, Clone)]
pub struct PruneOptions {
    pub policy: RetentionPolicy,
    /// Snapshots to retain regardless of the policy, such as the one referenced by the files pointer.
    pub protected: Vec<Id>,
    /// Must exceed the duration of any restore, and the longest time for which a save relies on the index without
    /// rereading it.
    pub grace_period: SignedDuration,
    pub now: Timestamp,
    /// Whether to only report what would be done.
    pub is_dry_run: bool,
    /// Deadline for the damaged-snapshot search, so that the caller gets the error before its own timeout.
    pub search_deadline: Option<Instant>,
}

/// Changes planned by a run, and applied unless it's a dry run. A run that finds damaged packs while applying the
/// changes marks and deletes fewer packs than reported.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PruneReport {
    pub kept_snapshots: u64,
    pub removed_snapshots: u64,
    /// Packs marked for deletion by this run, including rewritten ones.
    pub marked_packs: u64,
    /// Unused blob bytes in the packs marked by this run or a later one.
    pub reclaimable_bytes: u64,
    /// Marked packs that are referenced again.
    pub unmarked_packs: u64,
    pub rewritten_packs: u64,
    /// Marked packs whose grace period has expired, and orphans, i.e. packs not listed in any index file.
    pub deleted_packs: u64,
    /// Packs deferred to the next run, which can delete or rewrite them immediately, because this run would have taken
    /// too long.
    pub deferred_packs: u64,
}

/// Prunes a repository.
///
/// # Errors
/// `Corrupt` if a snapshot, an index file or a referenced tree is corrupt, or if a snapshot references an unindexed
/// blob; in these cases, nothing is removed. Also `Corrupt` if a pack to rewrite is missing; in that case, expired
/// snapshots are removed, but packs aren't. `IndexChanging` if the index changed during every attempt to read it; a
/// store error if the store fails.
pub async fn prune(repository: &Repository, options: &PruneOptions) -> Result<PruneReport, FilesError> {
    // List snapshots before reading the index, so that the index contains all of their blobs.
    let snapshots = repository.list_snapshot_uploads().await?;
    let index = repository.load_index_to_prune().await?;
    let expired = select_expired(&snapshots, options);
    let kept = snapshots.iter().filter(|(id, ..)| !expired.contains(id)).map(|(id, kept, _)| (*id, kept));
    let kept_snapshots: Vec<(Id, &Snapshot)> = kept.collect();
    let used = match UsedBlobs::find(repository, &index.files, &kept_snapshots).await {
        Ok(used) => used,
        Err(error) => {
            return Err(name_damaged_snapshot(repository, &kept_snapshots, options, error).await);
        }
    };
    let uploads: HashMap<Id, Timestamp> = repository.list_packs().await?.into_iter().collect();
    let last_snapshot = snapshots.iter().map(|(_, _, uploaded)| *uploaded).max();
    let mut plan = PrunePlan::create(&index, &used, &uploads, last_snapshot, options);
    // A concurrent save may add blobs up to its own limit.
    let deferred_packs = plan.limit_work(MAX_INDEX_BLOBS.saturating_sub(index.blobs.max(MAX_SAVED_BLOBS)));
    let mut report = PruneReport {
        kept_snapshots: kept_snapshots.len() as u64,
        removed_snapshots: expired.len() as u64,
        marked_packs: plan.marked.len() as u64,
        reclaimable_bytes: plan.reclaimable_bytes,
        unmarked_packs: plan.unmarked.len() as u64,
        rewritten_packs: plan.rewritten.len() as u64,
        deleted_packs: plan.deleted.len() as u64,
        deferred_packs: deferred_packs as u64,
    };
    if options.is_dry_run {
        return Ok(report);
    }
    failpoint::trigger("files.prune.planned")?;
    repository
        .delete_all(expired.iter().map(|id| repository.path(ObjectKind::Snapshot, *id)).collect())
        .await?;
    keep_needed_packs(repository, &index.files, &used, &mut plan).await?;
    let new_packs = rewrite_packs(repository, &index.files, &mut plan, &used, &uploads).await?;
    if plan.rewritten.is_empty() && plan.deleted.is_empty() {
        // This run didn't rewrite or delete any packs, e.g. because all of them are corrupt, so an immediate rerun
        // probably wouldn't make progress either.
        report.deferred_packs = 0;
    }
    failpoint::trigger("files.prune.rewritten")?;
    replace_index(repository, index, &plan, new_packs, options.now).await?;
    failpoint::trigger("files.prune.replaced")?;
    repository.delete_all(plan.deleted.iter().map(|id| repository.pack_path(*id)).collect()).await?;
    Ok(report)
}

/// Unmarks packs that hold the only intact copy of a referenced blob. The index lists another copy, but machines write
/// the index, so we read that copy before deleting the marked pack. If this run marks the pack with the other copy, a
/// later run repeats this check before deleting that pack.
async fn keep_needed_packs(
    repository: &Repository,
    index: &[(Id, IndexFile)],
    used: &UsedBlobs,
    plan: &mut PrunePlan,
) -> Result<(), FilesError> {
    // A forged index file may list different blobs for a pack.
    let mut deleted: HashMap<Id, Vec<&IndexedPack>> = HashMap::new();
    for pack in index.iter().flat_map(|(_, file)| &file.packs_to_delete) {
        if plan.deleted.contains(&pack.id) {
            deleted.entry(pack.id).or_default().push(pack);
        }
    }
    let read_end = |id: Id| {
        let repository = repository.clone();
        async move { (id, repository.read_pack_end(id).await) }
    };
    let ids: Vec<Id> = deleted.keys().copied().collect();
    let mut ends = stream::iter(ids).map(read_end).buffer_unordered(MAX_CONCURRENT_REQUESTS);
    let mut needed: HashMap<(BlobType, Id), Vec<Id>> = HashMap::new();
    while let Some((id, end)) = ends.next().await {
        let Some(end) = end? else { continue };
        let blobs: Vec<PackedBlob> = match repository.parse_pack_end(end).await {
            Ok(blobs) => blobs,
            // Blobs are read at the offsets recorded in the index, so they may be readable despite a corrupt header.
            Err(error) if error.is_damage() => {
                deleted[&id].iter().flat_map(|pack| pack.blobs.iter().copied()).collect()
            }
            Err(error) => return Err(error),
        };
        for blob in blobs {
            if used.contains(&blob) {
                let packs = needed.entry((blob.blob_type, blob.id)).or_default();
                // A forged pack may list a blob millions of times.
                if packs.last() != Some(&id) {
                    packs.push(id);
                }
            }
        }
    }
    if needed.is_empty() {
        return Ok(());
    }
    let mut copies: HashMap<Id, Vec<PackedBlob>> = HashMap::new();
    // This run doesn't delete these packs.
    for pack in index.iter().flat_map(|(_, file)| &file.packs) {
        let blobs = pack.blobs.iter().filter(|blob| needed.contains_key(&(blob.blob_type, blob.id)));
        let blobs: Vec<PackedBlob> = blobs.copied().collect();
        if !blobs.is_empty() {
            copies.entry(pack.id).or_default().extend(blobs);
        }
    }
    let budget = Arc::new(Semaphore::new(MAX_PACK_BYTES as usize));
    let read_copies = |(pack, blobs): (Id, Vec<PackedBlob>)| {
        let (repository, budget) = (repository.clone(), Arc::clone(&budget));
        async move {
            let (bytes, permit) = read_start(&repository, pack, blobs_end(&blobs), budget).await;
            (blobs, bytes, permit)
        }
    };
    let mut reads = stream::iter(copies).map(read_copies).buffer_unordered(MAX_CONCURRENT_REQUESTS);
    while let Some((blobs, bytes, _permit)) = reads.next().await {
        let bytes = match bytes {
            Ok(bytes) => bytes,
            Err(error) if error.is_damage() => continue,
            Err(error) => return Err(error),
        };
        for blob in blobs {
            let start = blob.offset as usize;
            let sealed = bytes.get(start..start.saturating_add(blob.length as usize)).unwrap_or_default();
            if repository.open_blob(&blob, sealed).is_ok() {
                needed.remove(&(blob.blob_type, blob.id));
            }
        }
    }
    for pack in needed.into_values().flatten() {
        tracing::error!(%pack, "no other intact copy of a referenced blob; keeping the marked pack");
        plan.deleted.remove(&pack);
        plan.unmarked.insert(pack);
    }
    Ok(())
}

/// Copies used blobs from the packs in `plan.rewritten` to new packs.
async fn rewrite_packs(
    repository: &Repository,
    index: &[(Id, IndexFile)],
    plan: &mut PrunePlan,
    used: &UsedBlobs,
    uploads: &HashMap<Id, Timestamp>,
) -> Result<Vec<IndexedPack>, FilesError> {
    if plan.rewritten.is_empty() {
        return Ok(Vec::new());
    }
    let mut written = HashSet::new();
    let mut new_packs = Vec::new();
    let mut writers = [BlobType::Data, BlobType::Tree]
        .into_iter()
        .map(|blob_type| PackWriter::new(repository.key.clone(), blob_type).map(|writer| (blob_type, writer)))
        .collect::<Result<HashMap<_, _>, _>>()?;
    let packs = index.iter().flat_map(|(_, file)| &file.packs);
    let mut packs: Vec<&IndexedPack> = packs.filter(|pack| plan.rewritten.contains_key(&pack.id)).collect();
    // Keep blobs that were saved together close to each other.
    packs.sort_by_key(|pack| uploads.get(&pack.id));
    let budget = Arc::new(Semaphore::new(MAX_PACK_BYTES as usize));
    let mut unread = 0..packs.len();
    // Spawn the reads: an unpolled read could time out while a new pack is uploaded.
    let mut reads = JoinSet::new();
    loop {
        while reads.len() < MAX_CONCURRENT_REQUESTS
            && let Some(number) = unread.next()
        {
            let (repository, budget) = (repository.clone(), Arc::clone(&budget));
            let (id, length) = (packs[number].id, blobs_end(&packs[number].blobs));
            reads.spawn(async move {
                let (bytes, permit) = read_start(&repository, id, length, budget).await;
                (number, bytes, permit)
            });
        }
        let Some(read) = reads.join_next().await else { break };
        let (number, bytes, _permit) = read.map_err(|_| FilesError::Stopped)?;
        let pack = packs[number];
        let bytes = match bytes {
            Ok(bytes) => bytes,
            Err(FilesError::Store(StoreError::NotFound { .. })) => {
                return Err(FilesError::corrupt(format!("pack {}", pack.id), &"it does not exist"));
            }
            Err(error) if error.is_damage() => {
                keep_damaged_pack(plan, pack.id, &error);
                continue;
            }
            Err(error) => return Err(error),
        };
        for blob in &pack.blobs {
            let key = (blob.blob_type, blob.id);
            let is_provided =
                used.position(blob).is_some_and(|position| plan.providers.provides(pack.id, position));
            if !is_provided || written.contains(&key) {
                continue;
            }
            let range = blob.offset as usize..(blob.offset as usize).saturating_add(blob.length as usize);
            let sealed = bytes.get(range).unwrap_or_default();
            // Never copy a corrupt blob: the new pack would match its hash and appear intact. Keep the old pack
            // instead.
            if let Err(error) = repository.open_blob(blob, sealed) {
                keep_damaged_pack(plan, pack.id, &error);
                break;
            }
            written.insert(key);
            let writer = writers.get_mut(&blob.blob_type).expect("one writer per blob type");
            upload(repository, writer.add_sealed(*blob, sealed)?, &mut new_packs).await?;
        }
    }
    for writer in writers.values_mut() {
        upload(repository, writer.finish()?, &mut new_packs).await?;
    }
    Ok(new_packs)
}

fn keep_damaged_pack(plan: &mut PrunePlan, pack: Id, error: &FilesError) {
    tracing::error!(%pack, %error, "corrupt pack; not rewriting it");
    plan.rewritten.remove(&pack);
    plan.marked.remove(&pack);
}

/// Returns the end offset of the last blob, in bytes.
fn blobs_end(blobs: &[PackedBlob]) -> u64 {
    blobs.iter().map(|blob| u64::from(blob.offset) + u64::from(blob.length)).max().unwrap_or(0)
}

/// Reads the first `length` bytes of a pack. Machines write the packs, so they may be large: reads sharing a budget
/// hold at most [`MAX_PACK_BYTES`] in memory until their permits are dropped.
async fn read_start(
    repository: &Repository,
    pack: Id,
    length: u64,
    budget: Arc<Semaphore>,
) -> (Result<Bytes, FilesError>, Option<OwnedSemaphorePermit>) {
    let share = u32::try_from(length.min(MAX_PACK_BYTES)).unwrap_or(u32::MAX);
    // Fails only if the semaphore is closed.
    let permit = budget.acquire_many_owned(share).await.ok();
    (repository.read_pack_start(pack, length).await, permit)
}

async fn upload(
    repository: &Repository,
    pack: Option<FinishedPack>,
    new_packs: &mut Vec<IndexedPack>,
) -> Result<(), FilesError> {
    if let Some(pack) = pack {
        repository.write_pack(&pack).await?;
        new_packs.push(IndexedPack::from(pack));
    }
    Ok(())
}

/// Replaces index files changed by the plan. Also merges small ones, because each save adds one.
async fn replace_index(
    repository: &Repository,
    index: IndexToPrune,
    plan: &PrunePlan,
    new_packs: Vec<IndexedPack>,
    now: Timestamp,
) -> Result<(), FilesError> {
    let IndexToPrune { files, files_with_duplicates, .. } = index;
    let is_changed = |file: &IndexFile| {
        let is_removed = |pack: &IndexedPack| plan.should_unmark(pack.id) || plan.deleted.contains(&pack.id);
        file.packs.iter().any(|pack| plan.marked.contains(&pack.id))
            || file.packs_to_delete.iter().any(is_removed)
    };
    let is_small = |file: &IndexFile| file.blob_count() < MIN_INDEX_BLOBS;
    let should_merge = files.iter().filter(|(_, file)| is_small(file)).count() > MAX_SMALL_INDEX_FILES;
    let mut replaced = Vec::new();
    let mut writer = IndexWriter::new(repository);
    for pack in new_packs {
        writer.add(pack).await?;
    }
    for (id, file) in files {
        let is_merged = should_merge && is_small(&file);
        if !is_changed(&file) && !is_merged && !files_with_duplicates.contains(&id) {
            continue;
        }
        replaced.push(id);
        let (mut unmarked, marked): (Vec<_>, Vec<_>) =
            file.packs_to_delete.into_iter().partition(|pack| plan.should_unmark(pack.id));
        unmarked.retain(|pack| plan.should_add_unmarked(pack));
        for pack in file.packs.into_iter().chain(unmarked) {
            if plan.marked.contains(&pack.id) {
                writer.add_marked(IndexedPack { time: Some(now), ..pack }).await?;
            } else {
                writer.add(IndexedPack { time: None, ..pack }).await?;
            }
        }
        for pack in marked {
            if !plan.deleted.contains(&pack.id) {
                writer.add_marked(pack).await?;
            }
        }
    }
    writer.flush().await?;
    failpoint::trigger("files.prune.indexed")?;
    repository
        .delete_all(replaced.into_iter().map(|id| repository.path(ObjectKind::Index, id)).collect())
        .await?;
    Ok(())
}

/// Splits the index into files small enough to read back.
struct IndexWriter<'a> {
    repository: &'a Repository,
    file: IndexFile,
    blobs: usize,
}

impl<'a> IndexWriter<'a> {
    fn new(repository: &'a Repository) -> Self {
        Self { repository, file: IndexFile::default(), blobs: 0 }
    }

    async fn add(&mut self, pack: IndexedPack) -> Result<(), FilesError> {
        self.blobs += pack.blobs.len();
        self.file.packs.push(pack);
        self.write_if_full().await
    }

    /// Adds a pack marked for deletion.
    async fn add_marked(&mut self, pack: IndexedPack) -> Result<(), FilesError> {
        self.blobs += pack.blobs.len();
        self.file.packs_to_delete.push(pack);
        self.write_if_full().await
    }

    async fn write_if_full(&mut self) -> Result<(), FilesError> {
        if self.blobs >= TARGET_INDEX_BLOBS { self.flush().await } else { Ok(()) }
    }

    /// Writes the packs added since the last file.
    async fn flush(&mut self) -> Result<(), FilesError> {
        let file = std::mem::take(&mut self.file);
        self.blobs = 0;
        if !file.packs.is_empty() || !file.packs_to_delete.is_empty() {
            self.repository.write_json(ObjectKind::Index, &file).await?;
        }
        Ok(())
    }
}
