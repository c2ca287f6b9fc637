//! Plans which packs a run marks, unmarks, rewrites and deletes.

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

/// Maximum numbers of packs that one run deletes and rewrites.
const MAX_DELETIONS: usize = 5_000;
const MAX_REWRITES: usize = 1_000;
/// A pack is rewritten without its unused blobs if more than this percentage of its bytes is unused.
const MAX_UNUSED_PERCENT: u64 = 50;
/// Packs of chunks with fewer bytes than this are merged once there are [`MIN_MERGED_PACKS`] of them: each save writes
/// at least one pack, however little has changed. Packs of trees are not merged, because restores read the trees of one
/// save together. Tests use a lower minimum.
const SMALL_PACK_BYTES: u64 = 1 << 20;
pub(crate) const MIN_MERGED_PACKS: usize = if cfg!(test) { 12 } else { 256 };
/// Packs are not merged while the index has more blobs than this: until the merged packs are deleted, the index lists
/// their blobs twice.
const MAX_MERGED_INDEX_BLOBS: usize = MAX_SAVED_BLOBS / 2;
/// An index with this many blobs counts as full. A save that fails with `TooManyBlobs` can leave fewer than
/// [`MAX_SAVED_BLOBS`] in the index, because no index file lists its last packs.
const MIN_FULL_INDEX_BLOBS: usize = MAX_SAVED_BLOBS / 20 * 19;

/// Packs with more bytes than this are not prefetched, because machines write the packs and may write large ones. The
/// limit is twice the size of the packs that a save writes.
const MAX_PREFETCHED_PACK_BYTES: u64 = 16 << 20;

/// The blobs that snapshots need.
#[derive(Default)]
pub(super) struct UsedBlobs {
    locations: BlobLocations,
    /// Whether each blob is needed, by its position in `locations`. A set of ids would take many times the memory.
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
                // The tree reader retries a failed read, and tries other copies.
                let bytes = match pack.end {
                    1..=MAX_PREFETCHED_PACK_BYTES => repository.read_pack(pack.id, 0..pack.end).await.ok(),
                    _ => None,
                };
                (number, bytes)
            }
        };
        let mut reads = FuturesUnordered::new();
        // Trees that have been found, but not yet counted as used.
        let mut found: Vec<Id> = snapshots.iter().map(|(_, snapshot)| snapshot.tree).collect();
        // Trees to read next: the tree reader has their packs in memory, or must read them itself.
        let mut ready = Vec::new();
        // The other trees, by the number of their pack.
        let mut waiting: HashMap<u32, Vec<Id>> = HashMap::new();
        // For each pack in `waiting` that is not being read yet, the location of one of its trees.
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

    /// Returns the number of positions, including those of blobs that no snapshot needs.
    pub(super) fn position_count(&self) -> usize {
        self.is_used.len()
    }

    /// Returns the blob's position; `None` if no snapshot needs the blob.
    pub(super) fn position(&self, blob: &PackedBlob) -> Option<usize> {
        let position = self.locations.position(blob.blob_type, blob.id).ok()?;
        self.is_used[position].then_some(position)
    }

    /// Whether a snapshot needs the blob, and several packs that are not marked for deletion list it.
    pub(super) fn has_copies(&self, blob: &PackedBlob) -> bool {
        // If any location is in such a pack, the first one is.
        self.contains(blob) && self.locations.has_other_unmarked_copy(blob.blob_type, blob.id)
    }
}

#[derive(Default)]
pub(super) struct PrunePlan {
    pub(super) marked: HashSet<Id>,
    pub(super) reclaimable_bytes: u64,
    pub(super) unmarked: HashSet<Id>,
    /// Packs that are marked in one index file but not in another, because an earlier run was interrupted, or because
    /// one of the files is forged. This run unmarks them.
    half_marked: HashSet<Id>,
    /// The digests of the unmarked listings of the packs in `half_marked`.
    half_marked_digests: HashSet<Id>,
    /// Packs whose used blobs are written to new packs, with the number of these blobs: packs with many unused blobs
    /// and, after [`Self::limit_work`], small packs. They are marked as well.
    pub(super) rewritten: HashMap<Id, usize>,
    /// Small packs to merge, oldest first, with the numbers of their used blobs.
    small: Vec<(Id, usize)>,
    /// Marked packs, which are removed from the index as well, and orphans.
    pub(super) deleted: HashSet<Id>,
    /// The pack that provides the blob, for each blob that several packs have.
    pub(super) providers: Providers,
}

impl PrunePlan {
    /// Creates a plan. `uploads` has the upload times of the packs, and `last_snapshot` is the upload time of the
    /// latest snapshot.
    pub(super) fn create(
        index: &IndexToPrune,
        used: &UsedBlobs,
        uploads: &HashMap<Id, Timestamp>,
        last_snapshot: Option<Timestamp>,
        options: &PruneOptions,
    ) -> Self {
        let is_old = |time: Timestamp| options.now.duration_since(time) > options.grace_period;
        // If the machine never saves again, its unfinished upload is kept for `MAX_SAVE_DURATION`.
        let is_settled = |time: Timestamp| {
            let is_before_snapshot = last_snapshot.is_some_and(|last| time <= last);
            let is_abandoned = options.now.duration_since(time) > MAX_SAVE_DURATION;
            is_old(time) && (is_before_snapshot || is_abandoned)
        };
        // While the index is full, saves fail, so no later snapshot shows that their packs are unused. These packs must
        // not keep the index full.
        let is_full = index.blobs >= MIN_FULL_INDEX_BLOBS;
        let can_mark =
            |pack: Id| uploads.get(&pack).is_some_and(|time| is_settled(*time) || (is_full && is_old(*time)));
        let mut plan = Self::default();
        let files = &index.files;
        let active: HashMap<Id, &IndexedPack> =
            files.iter().flat_map(|(_, file)| &file.packs).map(|pack| (pack.id, pack)).collect();
        // Someone with a stolen key could list other blobs for a pack.
        let mut marked: HashMap<Id, Vec<&IndexedPack>> = HashMap::new();
        for pack in files.iter().flat_map(|(_, file)| &file.packs_to_delete) {
            marked.entry(pack.id).or_default().push(pack);
        }
        plan.providers = Providers::select(active.values().copied(), used, uploads);
        // A blob counts as used in only one pack.
        let mut counted = vec![false; used.position_count()];
        // A pack that is not in the store provides no blob.
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
        // A running save writes its index files later, and would not notice that a pack was deleted. Therefore, orphans
        // are kept even if the index is full.
        let orphans = uploads.iter().filter(|(id, time)| is_orphan(id) && is_settled(**time));
        plan.deleted.extend(orphans.map(|(id, _)| *id));
        plan
    }

    /// Defers deletions and rewrites to later runs if they would take too long. Rewrites add at most `max_new_blobs`
    /// blobs to the index, so that it can still be read. Returns the number of packs that the next run could delete or
    /// rewrite immediately; rewrites for which the index has no space must wait until marked packs are deleted.
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

    /// Adds the oldest small packs to the packs to rewrite. Returns the number of remaining small packs that the next
    /// run could merge.
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

    /// Whether this marked listing of a pack, which the plan unmarks, must be written as an unmarked one. If not, the
    /// index already has an unmarked listing with the same blobs.
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

    /// Returns the options of a run `days` days after `uploaded`.
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

    /// Plans a run `days` days after the upload of an unused pack and of an orphan. The latest snapshot was uploaded
    /// `last_snapshot` seconds after them. Returns whether the pack is marked, and whether the orphan is deleted.
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
    fn packs_of_a_running_save_are_kept() {
        for (last_snapshot, days, is_removed) in [
            (None, 10, false),
            (Some(-1), 10, false),
            (Some(0), 10, true),
            // A save may be about to refer to a young pack.
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
    fn small_packs_are_merged_once_there_are_many() {
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
    fn limit_work_merges_the_oldest_packs_after_all_rewrites() {
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
