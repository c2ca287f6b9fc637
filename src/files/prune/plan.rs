//! Plans which packs to mark, unmark, rewrite and delete.

use std::collections::{HashMap, HashSet};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use jiff::Timestamp;

use super::providers::Providers;
use super::{MAX_SAVE_DURATION, PruneOptions};
use crate::error::FilesError;
use crate::id::Id;
use crate::index::{
    BlobLocation, BlobLocations, IndexFile, IndexToPrune, IndexedPack, MAX_SAVED_BLOBS, PackExtent,
};
use crate::pack::{BlobType, MAX_PACK_BLOBS, PackedBlob};
use crate::repository::{MAX_CONCURRENT_REQUESTS, Repository};
use crate::snapshot::Snapshot;
use crate::tree_reader::TreeReader;
use crate::tree_references::TreeReferences;

/// Maximum numbers of packs deleted and rewritten per run.
const MAX_DELETIONS: usize = 5_000;
const MAX_REWRITES: usize = 1_000;
/// Packs with more than this percentage of unused bytes are rewritten without their unused blobs.
const MAX_UNUSED_PERCENT: u64 = 50;
/// Chunk packs smaller than this are merged once there are [`MIN_MERGED_PACKS`] of them, because each save writes at
/// least one pack no matter how little has changed. Tree packs aren't merged, because restores read the trees of a save
/// together. Tests use a lower minimum.
const SMALL_PACK_BYTES: u64 = 1 << 20;
pub(crate) const MIN_MERGED_PACKS: usize = if cfg!(test) { 12 } else { 256 };
/// Packs aren't merged while the index lists more blobs than this: until the merged packs are deleted, their blobs are
/// listed twice.
const MAX_MERGED_INDEX_BLOBS: usize = MAX_SAVED_BLOBS / 2;
/// An index with this many blobs is treated as full. A save that fails with `TooManyBlobs` can leave fewer than
/// [`MAX_SAVED_BLOBS`] in the index, because its last packs are never indexed.
const MIN_FULL_INDEX_BLOBS: usize = MAX_SAVED_BLOBS / 20 * 19;

/// Larger packs aren't prefetched, to bound memory use: machines write the packs, and may make them large. This is
/// twice the size of packs written by a save.
const MAX_PREFETCHED_PACK_BYTES: u64 = 16 << 20;

/// Blobs referenced by snapshots.
#[derive(Default)]
pub(super) struct UsedBlobs {
    locations: BlobLocations,
    /// Whether each blob is referenced, by position in `locations`. A set of ids would take many times the memory.
    is_used: Vec<bool>,
}

impl UsedBlobs {
    pub(super) async fn find(
        repository: &Repository,
        index: &[(Id, IndexFile)],
        snapshots: &[(Id, &Snapshot)],
    ) -> Result<Self, FilesError> {
        let mut locations = BlobLocations::default();
        for (_, file) in index {
            locations.load(file);
        }
        let locations = locations.finish_loading();
        let mut is_used = vec![false; locations.len()];
        let mut trees = TreeReader::new(repository, &locations);
        let read_pack = |number: u32, pack: PackExtent| {
            let repository = repository.clone();
            async move {
                // On failure, the tree reader retries and tries other copies.
                let bytes = match pack.end {
                    1..=MAX_PREFETCHED_PACK_BYTES => repository.read_pack(pack.id, 0..pack.end).await.ok(),
                    _ => None,
                };
                (number, bytes)
            }
        };
        let mut reads = FuturesUnordered::new();
        // Trees found but not yet recorded in `is_used`.
        let mut found: Vec<Id> = snapshots.iter().map(|(_, snapshot)| snapshot.tree).collect();
        // Trees to read next: the tree reader either has their packs in memory or must read the trees itself.
        let mut ready = Vec::new();
        // The remaining trees, by pack number.
        let mut waiting: HashMap<u32, Vec<Id>> = HashMap::new();
        // One tree location for each pack in `waiting` whose read hasn't started yet.
        let mut unread: Vec<BlobLocation> = Vec::new();
        loop {
            for id in found.drain(..) {
                let position = locations.position(BlobType::Tree, id)?;
                if std::mem::replace(&mut is_used[position], true) {
                    continue;
                }
                let location = locations.find(BlobType::Tree, id)?;
                if trees.has_pack(location.pack) {
                    ready.push(id);
                    continue;
                }
                let ids = waiting.entry(location.pack).or_default();
                if ids.is_empty() {
                    unread.push(location);
                }
                ids.push(id);
            }
            if let Some(id) = ready.pop() {
                let TreeReferences { subtrees, chunks } = trees.read_references(id).await?;
                found.extend(subtrees);
                for chunk in chunks {
                    is_used[locations.position(BlobType::Data, chunk)?] = true;
                }
                continue;
            }
            while reads.len() < MAX_CONCURRENT_REQUESTS
                && let Some(location) = unread.pop()
            {
                reads.push(read_pack(location.pack, locations.pack(location)));
            }
            let Some((number, bytes)) = reads.next().await else { break };
            if let Some(bytes) = bytes {
                trees.add_pack(number, bytes);
            }
            ready.extend(waiting.remove(&number).unwrap_or_default());
        }
        Ok(Self { locations, is_used })
    }

    pub(super) fn contains(&self, blob: &PackedBlob) -> bool {
        self.position(blob).is_some()
    }

    /// Returns the number of positions, including those of unreferenced blobs.
    pub(super) fn position_count(&self) -> usize {
        self.is_used.len()
    }

    /// Returns the blob's position, or `None` if the blob is unreferenced.
    pub(super) fn position(&self, blob: &PackedBlob) -> Option<usize> {
        let position = self.locations.position(blob.blob_type, blob.id).ok()?;
        self.is_used[position].then_some(position)
    }

    /// Whether the blob is referenced and listed by several unmarked packs.
    pub(super) fn has_copies(&self, blob: &PackedBlob) -> bool {
        // Unmarked locations come first, so if another copy is in an unmarked pack, the first one is too.
        self.contains(blob) && self.locations.has_other_unmarked_copy(blob.blob_type, blob.id)
    }
}

#[derive(Default)]
pub(super) struct PrunePlan {
    pub(super) marked: HashSet<Id>,
    pub(super) reclaimable_bytes: u64,
    pub(super) unmarked: HashSet<Id>,
    /// Packs marked in one index file but not in another, because an earlier run was interrupted or one of the files is
    /// forged. This run unmarks them.
    half_marked: HashSet<Id>,
    /// Digests of the unmarked listings of packs in `half_marked`.
    half_marked_digests: HashSet<Id>,
    /// Packs whose used blobs are copied to new packs, with their used-blob counts: packs with many unused blobs and,
    /// after [`Self::limit_work`], small packs. They are marked as well.
    pub(super) rewritten: HashMap<Id, usize>,
    /// Small packs to merge, oldest first, with their used-blob counts.
    small: Vec<(Id, usize)>,
    /// Marked packs, which are also removed from the index, and orphans.
    pub(super) deleted: HashSet<Id>,
    /// Selects the providing pack for blobs found in several packs.
    pub(super) providers: Providers,
}

impl PrunePlan {
    /// Creates a plan. `uploads` maps packs to their upload times, and `last_snapshot` is the upload time of the latest
    /// snapshot.
    pub(super) fn create(
        index: &IndexToPrune,
        used: &UsedBlobs,
        uploads: &HashMap<Id, Timestamp>,
        last_snapshot: Option<Timestamp>,
        options: &PruneOptions,
    ) -> Self {
        let is_old = |time: Timestamp| options.now.duration_since(time) > options.grace_period;
        // If the machine never saves again, its unfinished upload is retained for `MAX_SAVE_DURATION`.
        let is_settled = |time: Timestamp| {
            let is_before_snapshot = last_snapshot.is_some_and(|last| time <= last);
            let is_abandoned = options.now.duration_since(time) > MAX_SAVE_DURATION;
            is_old(time) && (is_before_snapshot || is_abandoned)
        };
        // Saves fail while the index is full, so no later snapshot shows that their packs are unused. Those packs must
        // not keep the index full.
        let is_full = index.blobs >= MIN_FULL_INDEX_BLOBS;
        let can_mark =
            |pack: Id| uploads.get(&pack).is_some_and(|time| is_settled(*time) || (is_full && is_old(*time)));
        let mut plan = Self::default();
        let files = &index.files;
        let active: HashMap<Id, &IndexedPack> =
            files.iter().flat_map(|(_, file)| &file.packs).map(|pack| (pack.id, pack)).collect();
        // Someone with a stolen key could list different blobs for a pack.
        let mut marked: HashMap<Id, Vec<&IndexedPack>> = HashMap::new();
        for pack in files.iter().flat_map(|(_, file)| &file.packs_to_delete) {
            marked.entry(pack.id).or_default().push(pack);
        }
        plan.providers = Providers::select(active.values().copied(), used, uploads);
        // Count each blob as used in only one pack.
        let mut counted = vec![false; used.position_count()];
        // Packs missing from the store can't provide blobs.
        let mut packs: Vec<&IndexedPack> =
            active.values().copied().filter(|pack| uploads.contains_key(&pack.id)).collect();
        packs.sort_unstable_by_key(|pack| (std::cmp::Reverse(pack.blobs.len()), pack.id));
        let (mut small, mut unused_bytes_in_small) = (Vec::new(), 0);
        for pack in packs {
            let (mut used_blobs, mut used_bytes) = (0, 0);
            for blob in &pack.blobs {
                if let Some(position) = used.position(blob)
                    && plan.providers.provides(pack.id, position)
                    && !counted[position]
                {
                    counted[position] = true;
                    used_blobs += 1;
                    used_bytes += u64::from(blob.length);
                }
            }
            let bytes: u64 = pack.blobs.iter().map(|blob| u64::from(blob.length)).sum();
            if !can_mark(pack.id) {
                continue;
            }
            if (bytes - used_bytes) * 100 <= bytes * MAX_UNUSED_PERCENT {
                let is_small = bytes < SMALL_PACK_BYTES && pack.blobs.len() < MAX_PACK_BLOBS / 2;
                if is_small && pack.blobs.first().is_some_and(|blob| blob.blob_type == BlobType::Data) {
                    small.push((pack.id, used_blobs));
                    unused_bytes_in_small += bytes - used_bytes;
                }
                continue;
            }
            if used_bytes > 0 {
                plan.rewritten.insert(pack.id, used_blobs);
            }
            plan.marked.insert(pack.id);
            plan.reclaimable_bytes += bytes - used_bytes;
        }
        if small.len() >= MIN_MERGED_PACKS && index.blobs <= MAX_MERGED_INDEX_BLOBS {
            small.sort_unstable_by_key(|(pack, _)| (uploads.get(pack).copied(), *pack));
            plan.small = small;
            plan.reclaimable_bytes += unused_bytes_in_small;
        }
        for (id, listings) in &marked {
            let is_needed =
                |blob: &PackedBlob| used.position(blob).is_some_and(|position| !counted[position]);
            if active.contains_key(id) {
                plan.half_marked.insert(*id);
            } else if listings.iter().flat_map(|pack| &pack.blobs).any(is_needed) {
                plan.unmarked.insert(*id);
            } else if listings.iter().all(|pack| pack.time.is_none_or(is_old)) {
                plan.deleted.insert(*id);
            }
        }
        let half_marked = files.iter().flat_map(|(_, file)| &file.packs);
        let half_marked = half_marked.filter(|pack| plan.half_marked.contains(&pack.id));
        plan.half_marked_digests = half_marked.map(IndexedPack::digest).collect();
        let is_orphan = |id: &Id| !active.contains_key(id) && !marked.contains_key(id);
        // A running save writes its index files later and wouldn't notice a deleted pack, so retain orphans even if the
        // index is full.
        let orphans = uploads.iter().filter(|(id, time)| is_orphan(id) && is_settled(**time));
        plan.deleted.extend(orphans.map(|(id, _)| *id));
        plan
    }

    /// Defers deletions and rewrites to later runs if they would take too long. Rewrites add at most `max_new_blobs`
    /// blobs to the index, to keep it readable. Returns the number of packs that the next run could delete or rewrite
    /// immediately; rewrites that don't fit in the index must wait until marked packs are deleted.
    pub(super) fn limit_work(&mut self, max_new_blobs: usize) -> usize {
        let mut deferred = self.deleted.len().saturating_sub(MAX_DELETIONS);
        if deferred > 0 {
            self.deleted = self.deleted.drain().take(MAX_DELETIONS).collect();
        }
        let (mut rewrites, mut new_blobs) = (0, 0);
        self.rewritten.retain(|pack, used_blobs| {
            let has_space = new_blobs + *used_blobs <= max_new_blobs;
            let is_kept = has_space && rewrites < MAX_REWRITES;
            if is_kept {
                rewrites += 1;
                new_blobs += *used_blobs;
            } else {
                self.marked.remove(pack);
                deferred += usize::from(has_space);
            }
            is_kept
        });
        deferred + self.add_merges(MAX_REWRITES - rewrites, max_new_blobs - new_blobs)
    }

    /// Schedules the oldest small packs for rewriting. Returns the number of remaining small packs that the next run
    /// could merge.
    fn add_merges(&mut self, max_packs: usize, max_new_blobs: usize) -> usize {
        let (mut count, mut new_blobs) = (0, 0);
        for (_, used_blobs) in self.small.iter().take(max_packs) {
            if new_blobs + used_blobs > max_new_blobs {
                break;
            }
            (count, new_blobs) = (count + 1, new_blobs + used_blobs);
        }
        let is_limited_by_space = count < self.small.len().min(max_packs);
        if count >= MIN_MERGED_PACKS {
            for (pack, used_blobs) in self.small.drain(..count) {
                self.rewritten.insert(pack, used_blobs);
                self.marked.insert(pack);
            }
        }
        if self.small.len() >= MIN_MERGED_PACKS && !is_limited_by_space { self.small.len() } else { 0 }
    }

    /// Whether a marked listing that the plan unmarks must be rewritten as an unmarked one. Otherwise, the index
    /// already has an unmarked listing with the same blobs.
    pub(super) fn should_add_unmarked(&self, pack: &IndexedPack) -> bool {
        !self.half_marked.contains(&pack.id) || !self.half_marked_digests.contains(&pack.digest())
    }

    /// Whether the plan unmarks this pack.
    pub(super) fn should_unmark(&self, pack: Id) -> bool {
        self.unmarked.contains(&pack) || self.half_marked.contains(&pack)
    }
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use super::*;
    use crate::retention::RetentionPolicy;

    /// Returns options for a run `days` days after `uploaded`.
    fn options_after(uploaded: Timestamp, days: i64) -> PruneOptions {
        PruneOptions {
            policy: RetentionPolicy::default(),
            protected: Vec::new(),
            grace_period: SignedDuration::from_hours(72),
            now: uploaded + SignedDuration::from_hours(24 * days),
            is_dry_run: false,
            search_deadline: None,
        }
    }

    /// Plans a run `days` days after uploading an unused pack and an orphan, with the latest snapshot uploaded
    /// `last_snapshot` seconds after them. Returns whether the pack is marked and whether the orphan is deleted.
    fn plan_for_uploads(index_blobs: usize, last_snapshot: Option<i64>, days: i64) -> (bool, bool) {
        let (pack, orphan) = (Id::of(b"pack"), Id::of(b"orphan"));
        let blob = PackedBlob {
            id: Id::of(b"blob"),
            blob_type: BlobType::Data,
            offset: 0,
            length: 40,
            uncompressed_length: 0,
        };
        let packs = vec![IndexedPack { id: pack, blobs: vec![blob], time: None }];
        let index = IndexToPrune {
            files: vec![(Id::of(b"index"), IndexFile { packs, ..IndexFile::default() })],
            files_with_duplicates: HashSet::new(),
            blobs: index_blobs,
        };
        let uploaded = Timestamp::from_second(1_000_000).unwrap();
        let options = options_after(uploaded, days);
        let uploads = HashMap::from([(pack, uploaded), (orphan, uploaded)]);
        let last_snapshot = last_snapshot.map(|seconds| uploaded + SignedDuration::from_secs(seconds));
        let plan = PrunePlan::create(&index, &UsedBlobs::default(), &uploads, last_snapshot, &options);
        (plan.marked.contains(&pack), plan.deleted.contains(&orphan))
    }

    #[test]
    fn running_save_packs_are_retained() {
        for (last_snapshot, days, is_removed) in [
            (None, 10, false),
            (Some(-1), 10, false),
            (Some(0), 10, true),
            // A save may be about to reference a young pack.
            (Some(0), 3, false),
            // An abandoned upload is deleted eventually.
            (None, 31, true),
            (Some(-1), 31, true),
        ] {
            let planned = plan_for_uploads(1, last_snapshot, days);
            assert_eq!(planned, (is_removed, is_removed), "{last_snapshot:?}, {days} days");
        }
    }

    #[test]
    fn unfinished_uploads_do_not_keep_the_index_full() {
        let plan = |index_blobs, days| plan_for_uploads(index_blobs, Some(-1), days);
        assert_eq!(plan(MIN_FULL_INDEX_BLOBS - 1, 4), (false, false));
        assert_eq!(plan(MIN_FULL_INDEX_BLOBS, 4), (true, false), "orphans are not in the index");
        assert_eq!(plan(MIN_FULL_INDEX_BLOBS, 3), (false, false));
    }

    #[test]
    fn small_packs_are_merged_at_threshold() {
        let plan = |packs: usize, bytes: u32, index_blobs, days: i64| {
            let pack = |number: usize| IndexedPack {
                id: Id::of(&number.to_le_bytes()),
                blobs: vec![PackedBlob {
                    id: Id::of(&(number + 1000).to_le_bytes()),
                    blob_type: BlobType::Data,
                    offset: 0,
                    length: bytes,
                    uncompressed_length: 0,
                }],
                time: None,
            };
            let file = IndexFile { packs: (0..packs).map(pack).collect(), ..IndexFile::default() };
            let mut locations = BlobLocations::default();
            locations.load(&file);
            let used = UsedBlobs { locations: locations.finish_loading(), is_used: vec![true; packs] };
            let uploaded = Timestamp::from_second(1_000_000).unwrap();
            let uploads = file.packs.iter().map(|pack| (pack.id, uploaded)).collect();
            let index = IndexToPrune {
                files: vec![(Id::of(b"index"), file)],
                files_with_duplicates: HashSet::new(),
                blobs: index_blobs,
            };
            let options = options_after(uploaded, days);
            let mut plan = PrunePlan::create(&index, &used, &uploads, Some(uploaded), &options);
            assert_eq!((plan.limit_work(usize::MAX), plan.reclaimable_bytes), (0, 0));
            assert_eq!(plan.marked.len(), plan.rewritten.len());
            plan.rewritten.len()
        };
        let small = SMALL_PACK_BYTES as u32 - 1;
        assert_eq!(plan(MIN_MERGED_PACKS, small, 100, 4), MIN_MERGED_PACKS);
        assert_eq!(plan(MIN_MERGED_PACKS - 1, small, 100, 4), 0);
        assert_eq!(plan(MIN_MERGED_PACKS, small + 1, 100, 4), 0, "the packs are not small");
        assert_eq!(plan(MIN_MERGED_PACKS, small, 100, 3), 0, "the packs are young");
        assert_eq!(plan(MIN_MERGED_PACKS, small, MAX_MERGED_INDEX_BLOBS + 1, 4), 0, "the index is large");
    }

    #[test]
    fn limit_work_merges_oldest_packs_after_rewrites() {
        let ids = |count: usize| (0..count).map(|number| Id::of(&number.to_le_bytes()));
        let merge = |small: usize, rewrites: usize, max_new_blobs| {
            let mut plan = PrunePlan {
                small: ids(small).map(|pack| (pack, 1)).collect(),
                rewritten: (0..rewrites).map(|number| (Id::of(&(number + 9999).to_le_bytes()), 1)).collect(),
                ..PrunePlan::default()
            };
            let deferred = plan.limit_work(max_new_blobs);
            let merged = plan.marked.len();
            assert!(ids(merged).all(|pack| plan.marked.contains(&pack)), "the oldest are merged first");
            assert_eq!(plan.rewritten.len(), rewrites + merged);
            (merged, deferred)
        };
        let min = MIN_MERGED_PACKS;
        assert_eq!(merge(min, 0, usize::MAX), (min, 0));
        assert_eq!(merge(min, 5, min + 5), (min, 0));
        assert_eq!(merge(min, 5, min + 4), (0, 0), "the index has no space for all of them");
        assert_eq!(merge(MAX_REWRITES + min, 0, usize::MAX), (MAX_REWRITES, min));
        assert_eq!(merge(MAX_REWRITES + min - 1, 0, usize::MAX), (MAX_REWRITES, 0), "too few are left");
        assert_eq!(merge(min, MAX_REWRITES, usize::MAX), (0, min), "rewrites come first");
    }

    #[test]
    fn limit_work_bounds_new_blobs() {
        let packs = [b"a", b"b", b"c"].map(|name| Id::of(name));
        let mut plan = PrunePlan {
            marked: packs.into_iter().chain([Id::of(b"unused")]).collect(),
            rewritten: packs.into_iter().map(|pack| (pack, 6)).collect(),
            ..PrunePlan::default()
        };
        assert_eq!(plan.limit_work(12), 0, "the next run could not rewrite the third pack either");
        assert_eq!((plan.rewritten.len(), plan.marked.len()), (2, 3));
        assert_eq!(plan.limit_work(5), 0);
        assert_eq!((plan.rewritten.len(), plan.marked), (0, HashSet::from([Id::of(b"unused")])));
    }

    #[test]
    fn limit_work_counts_deferred_packs() {
        let ids = |count: usize| (0..count).map(|number| Id::of(&number.to_le_bytes()));
        let plan = |deletions, rewrites| PrunePlan {
            deleted: ids(deletions).collect(),
            marked: ids(rewrites).collect(),
            rewritten: ids(rewrites).map(|pack| (pack, 1)).collect(),
            ..PrunePlan::default()
        };
        for (deletions, rewrites, deferred) in
            [(MAX_DELETIONS, MAX_REWRITES, 0), (MAX_DELETIONS + 2, 0, 2), (0, MAX_REWRITES + 3, 3)]
        {
            let mut limited = plan(deletions, rewrites);
            assert_eq!(limited.limit_work(usize::MAX), deferred);
            assert_eq!(limited.deleted.len() + limited.marked.len() + deferred, deletions + rewrites);
        }
    }
}
