//! Plans which packs a run marks, unmarks, rewrites and deletes.

use std::collections::{HashMap, HashSet};

use jiff::Timestamp;

use super::{MAX_SAVE_DURATION, PruneOptions};
use crate::error::FilesError;
use crate::id::Id;
use crate::index::{BlobLocations, IndexFile, IndexToPrune, IndexedPack, MAX_SAVED_BLOBS};
use crate::pack::{BlobType, PackedBlob};
use crate::repository::Repository;
use crate::snapshot::Snapshot;
use crate::tree_reader::TreeReader;

/// Maximum numbers of packs that one run deletes and rewrites.
const MAX_DELETIONS: usize = 5_000;
const MAX_REWRITES: usize = 1_000;
/// A pack is rewritten without its unused blobs if more than this percentage of its bytes is unused.
const MAX_UNUSED_PERCENT: u64 = 50;
/// An index with this many blobs counts as full. A save that fails with `Full` can leave fewer than
/// [`MAX_SAVED_BLOBS`], because it lists its last packs in no index file.
const MIN_FULL_INDEX_BLOBS: usize = MAX_SAVED_BLOBS / 20 * 19;

/// The blobs that snapshots need.
pub(super) struct UsedBlobs(HashSet<(BlobType, Id)>);

impl UsedBlobs {
    pub(super) async fn find(
        repository: &Repository,
        index: &[(Id, IndexFile)],
        snapshots: &[&Snapshot],
    ) -> Result<Self, FilesError> {
        let mut locations = BlobLocations::default();
        for (_, file) in index {
            locations.load(file.clone());
        }
        let locations = locations.finish_loading();
        let mut used = HashSet::new();
        let mut trees = TreeReader::new(repository, &locations);
        let mut pending: Vec<Id> = snapshots.iter().map(|snapshot| snapshot.tree).collect();
        while let Some(id) = pending.pop() {
            if !used.insert((BlobType::Tree, id)) {
                continue;
            }
            locations.find(BlobType::Tree, id)?;
            for node in trees.read(id).await?.nodes {
                pending.extend(node.subtree);
                for chunk in node.content.unwrap_or_default() {
                    locations.find(BlobType::Data, chunk)?;
                    used.insert((BlobType::Data, chunk));
                }
            }
        }
        Ok(Self(used))
    }

    pub(super) fn contains(&self, blob: &PackedBlob) -> bool {
        self.0.contains(&(blob.blob_type, blob.id))
    }
}

#[derive(Default)]
pub(super) struct PrunePlan {
    pub(super) marked: HashSet<Id>,
    pub(super) reclaimable_bytes: u64,
    pub(super) unmarked: HashSet<Id>,
    /// Packs that are marked in one index file but not in another, because an earlier run was interrupted, or because
    /// one of them is forged. They are unmarked.
    half_marked: HashSet<Id>,
    /// The digests of the listings of these packs that are not marked.
    half_marked_digests: HashSet<Id>,
    /// Packs whose used blobs are written to new packs, with the number of these blobs. They are marked as well.
    pub(super) rewritten: HashMap<Id, usize>,
    /// Marked packs, which are removed from the index as well, and orphans.
    pub(super) deleted: HashSet<Id>,
    /// The pack that provides the blob, for each blob that several packs have.
    providers: HashMap<(BlobType, Id), Id>,
}

impl PrunePlan {
    /// `uploads` has the upload times of the packs, and `last_snapshot` is that of the latest snapshot.
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
        // While the index is full, saves fail, and no later snapshot settles their packs. These must not keep it full.
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
        plan.find_providers(active.values().copied(), uploads);
        // A blob counts as used in only one pack.
        let mut counted = HashSet::new();
        // A pack that is not in the store provides no blob.
        let mut packs: Vec<&IndexedPack> =
            active.values().copied().filter(|pack| uploads.contains_key(&pack.id)).collect();
        packs.sort_unstable_by_key(|pack| (std::cmp::Reverse(pack.blobs.len()), pack.id));
        for pack in packs {
            let (mut used_blobs, mut used_bytes) = (0, 0);
            for blob in &pack.blobs {
                if used.contains(blob)
                    && plan.provides(pack.id, blob)
                    && counted.insert((blob.blob_type, blob.id))
                {
                    used_blobs += 1;
                    used_bytes += u64::from(blob.length);
                }
            }
            let bytes: u64 = pack.blobs.iter().map(|blob| u64::from(blob.length)).sum();
            if !can_mark(pack.id) || (bytes - used_bytes) * 100 <= bytes * MAX_UNUSED_PERCENT {
                continue;
            }
            if used_bytes > 0 {
                plan.rewritten.insert(pack.id, used_blobs);
            }
            plan.marked.insert(pack.id);
            plan.reclaimable_bytes += bytes - used_bytes;
        }
        for (id, listings) in &marked {
            let is_needed =
                |blob: &PackedBlob| used.contains(blob) && !counted.contains(&(blob.blob_type, blob.id));
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
        // A running save lists its packs only later. It would not notice that one was deleted, so orphans are kept even
        // if the index is full.
        let orphans = uploads.iter().filter(|(id, time)| is_orphan(id) && is_settled(**time));
        plan.deleted.extend(orphans.map(|(id, _)| *id));
        plan
    }

    /// Selects a pack for each blob that several packs have: the newest one, because a save writes a damaged blob
    /// again, to a new pack. Among packs of the same age, selects the one with the most blobs, so that small packs
    /// become unused.
    fn find_providers<'a>(
        &mut self,
        packs: impl Iterator<Item = &'a IndexedPack> + Clone,
        uploads: &HashMap<Id, Timestamp>,
    ) {
        let mut seen = HashSet::new();
        let blobs = packs.clone().flat_map(|pack| &pack.blobs);
        let repeated: HashSet<(BlobType, Id)> =
            blobs.map(|blob| (blob.blob_type, blob.id)).filter(|key| !seen.insert(*key)).collect();
        let mut ranks = HashMap::new();
        for pack in packs {
            let Some(time) = uploads.get(&pack.id) else { continue };
            let rank = (*time, pack.blobs.len(), pack.id);
            for blob in &pack.blobs {
                let key = (blob.blob_type, blob.id);
                if repeated.contains(&key) && ranks.get(&key).is_none_or(|best| rank > *best) {
                    ranks.insert(key, rank);
                }
            }
        }
        self.providers = ranks.into_iter().map(|(key, (_, _, pack))| (key, pack)).collect();
    }

    pub(super) fn provides(&self, pack: Id, blob: &PackedBlob) -> bool {
        self.providers.get(&(blob.blob_type, blob.id)).is_none_or(|provider| *provider == pack)
    }

    /// Leaves deletions and rewrites to later runs if they would take too long. Rewrites add at most `max_new_blobs`
    /// blobs to the index, so that it can still be read.
    pub(super) fn limit_work(&mut self, max_new_blobs: usize) {
        if self.deleted.len() > MAX_DELETIONS {
            self.deleted = self.deleted.drain().take(MAX_DELETIONS).collect();
        }
        let (mut rewrites, mut new_blobs) = (0, 0);
        self.rewritten.retain(|pack, used_blobs| {
            let is_kept = rewrites < MAX_REWRITES && new_blobs + *used_blobs <= max_new_blobs;
            if is_kept {
                rewrites += 1;
                new_blobs += *used_blobs;
            } else {
                self.marked.remove(pack);
            }
            is_kept
        });
    }

    /// Whether a listing of a pack that the plan unmarks must be written as one that is not marked. Otherwise, there is
    /// such a listing with the same blobs.
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

    /// Plans a run `days` after the upload of an unused pack and of an orphan. The latest snapshot was uploaded
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
            files_with_repeats: HashSet::new(),
            blobs: index_blobs,
        };
        let uploaded = Timestamp::from_second(1_000_000).unwrap();
        let options = PruneOptions {
            policy: RetentionPolicy::default(),
            protected: Vec::new(),
            grace_period: SignedDuration::from_hours(72),
            now: uploaded + SignedDuration::from_hours(24 * days),
            is_dry_run: false,
        };
        let uploads = HashMap::from([(pack, uploaded), (orphan, uploaded)]);
        let last_snapshot = last_snapshot.map(|seconds| uploaded + SignedDuration::from_secs(seconds));
        let plan = PrunePlan::create(&index, &UsedBlobs(HashSet::new()), &uploads, last_snapshot, &options);
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
            // An abandoned upload is deleted in the end.
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
    fn limit_work_bounds_new_blobs() {
        let packs = [b"a", b"b", b"c"].map(|name| Id::of(name));
        let mut plan = PrunePlan {
            marked: packs.into_iter().chain([Id::of(b"unused")]).collect(),
            rewritten: packs.into_iter().map(|pack| (pack, 6)).collect(),
            ..PrunePlan::default()
        };
        plan.limit_work(12);
        assert_eq!((plan.rewritten.len(), plan.marked.len()), (2, 3));
        plan.limit_work(5);
        assert_eq!((plan.rewritten.len(), plan.marked), (0, HashSet::from([Id::of(b"unused")])));
    }
}
