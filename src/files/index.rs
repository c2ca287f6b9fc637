//! The index maps blobs to packs. It is the union of all index files in the repository.

use std::collections::{HashMap, HashSet};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::error::FilesError;
use crate::id::Id;
use crate::key::OVERHEAD_BYTES;
use crate::pack::{BlobType, FinishedPack, PackedBlob};

/// A single index file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct IndexFile {
    pub(crate) packs: Vec<IndexedPack>,
    /// Packs marked for deletion. At the time of marking, the other packs held every referenced blob. Saves must not
    /// rely on these packs; restores may read them until they are deleted. `rustic` uses the same field; `restic`
    /// ignores it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) packs_to_delete: Vec<IndexedPack>,
}

impl IndexFile {
    /// Drops blobs of all other types.
    pub(crate) fn retain_blobs(&mut self, blob_type: BlobType) {
        for pack in self.packs.iter_mut().chain(&mut self.packs_to_delete) {
            pack.blobs.retain(|blob| blob.blob_type == blob_type);
        }
    }

    pub(crate) fn blob_count(&self) -> usize {
        self.packs.iter().chain(&self.packs_to_delete).map(|pack| pack.blobs.len()).sum()
    }
}

/// The index as loaded for pruning.
#[derive(Debug)]
pub(crate) struct IndexToPrune {
    /// Each pack appears only in the first file that lists it with a given marking.
    pub(crate) files: Vec<(Id, IndexFile)>,
    /// See [`ListedPacks::files_with_duplicates`].
    pub(crate) files_with_duplicates: HashSet<Id>,
    /// Number of blobs listed in the index.
    pub(crate) blobs: usize,
}

/// Packs in the index files read so far. An interrupted prune can leave the same pack listed in several files.
#[derive(Debug, Default)]
pub(crate) struct ListedPacks {
    /// The first file that lists each pack, keyed by pack digest and whether the pack is marked for deletion.
    first_files: HashMap<(Id, bool), Id>,
    /// Number of blobs in these packs.
    pub(crate) blobs: usize,
    /// Files that share packs with other files. Pruning replaces all of them: a concurrent prune might delete any one
    /// of them, so none can be relied on.
    pub(crate) files_with_duplicates: HashSet<Id>,
}

impl ListedPacks {
    pub(crate) fn pack_count(&self) -> usize {
        self.first_files.len()
    }

    /// Removes packs already listed with the same marking by an earlier file. Counts the blobs of packs not listed by
    /// any earlier file.
    pub(crate) fn remove_duplicate_packs(&mut self, id: Id, file: &mut IndexFile) {
        for (packs, is_marked) in [(&mut file.packs, false), (&mut file.packs_to_delete, true)] {
            packs.retain(|pack| {
                let digest = pack.digest();
                let same_marking = self.first_files.get(&(digest, is_marked)).copied();
                let other_marking = self.first_files.get(&(digest, !is_marked)).copied();
                if let Some(first) = same_marking.or(other_marking) {
                    self.files_with_duplicates.extend([first, id]);
                } else {
                    // Empty packs take memory too, so count each as one blob.
                    self.blobs += pack.blobs.len().max(1);
                }
                if same_marking.is_none() {
                    self.first_files.insert((digest, is_marked), id);
                }
                same_marking.is_none()
            });
        }
    }
}

/// A pack and its blobs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct IndexedPack {
    pub(crate) id: Id,
    pub(crate) blobs: Vec<PackedBlob>,
    /// When the pack was marked for deletion.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) time: Option<Timestamp>,
}

impl IndexedPack {
    /// Hashes the pack's id together with its blobs. The id alone isn't enough: someone with a stolen key could list
    /// different blobs for the pack, and that list must not replace the genuine one.
    pub(crate) fn digest(&self) -> Id {
        let mut bytes = self.id.as_bytes().to_vec();
        for PackedBlob { id, blob_type, offset, length, uncompressed_length } in &self.blobs {
            bytes.extend_from_slice(id.as_bytes());
            bytes.push(u8::from(*blob_type == BlobType::Tree));
            for number in [offset, length, uncompressed_length] {
                bytes.extend_from_slice(&number.to_le_bytes());
            }
        }
        Id::of(&bytes)
    }
}

impl From<FinishedPack> for IndexedPack {
    fn from(pack: FinishedPack) -> Self {
        Self { id: pack.id, blobs: pack.blobs, time: None }
    }
}

/// The set of blobs in the repository. Loaded ids live in a sorted vector, at 32 bytes per id.
#[derive(Debug, Default)]
pub(crate) struct KnownBlobs {
    data: KnownIds,
    trees: KnownIds,
    /// Number of blobs listed in the index, including duplicates and those in packs marked for deletion.
    listed: usize,
}

#[derive(Debug, Default)]
struct KnownIds {
    sorted: Vec<Id>,
    added: HashSet<Id>,
}

/// Maximum number of blobs in the index, including those in packs marked for deletion: enough for several million
/// files. A pack listed by several index files counts once.
pub(crate) const MAX_INDEX_BLOBS: usize = MAX_SAVED_BLOBS / 4 * 5;
/// Limit for saves, which fail once the index lists more blobs than this. Pruning may exceed it, because it writes some
/// blobs a second time.
pub(crate) const MAX_SAVED_BLOBS: usize = if cfg!(test) { 20_000 } else { 4_000_000 };
/// Maximum number of blobs in the index when pruning. It's higher so that pruning can shrink an index that exceeds
/// [`MAX_INDEX_BLOBS`].
pub(crate) const MAX_PRUNED_INDEX_BLOBS: usize = MAX_INDEX_BLOBS / 2 * 3;

/// Minimum number of added ids to trigger a merge into the sorted ones. For large indexes, the threshold is an eighth
/// of the index size.
const MIN_MERGED_IDS: usize = 1 << 16;

impl KnownIds {
    fn insert(&mut self, id: Id) -> bool {
        if self.sorted.binary_search(&id).is_ok() || !self.added.insert(id) {
            return false;
        }
        if self.added.len() >= MIN_MERGED_IDS.max(self.sorted.len() / 8) {
            self.merge();
        }
        true
    }

    fn merge(&mut self) {
        self.sorted.extend(self.added.drain());
        self.sorted.sort_unstable();
        self.sorted.dedup();
        self.added = HashSet::new();
    }
}

impl KnownBlobs {
    /// Adds the blobs of an index file, except those in packs marked for deletion. Call [`Self::finish_loading`] after
    /// the last file.
    pub(crate) fn load(&mut self, file: &IndexFile) {
        for blob in file.packs.iter().flat_map(|pack| &pack.blobs) {
            self.ids(blob.blob_type).sorted.push(blob.id);
        }
    }

    /// Must be called after the last [`Self::load`]. `listed` is the number of blobs listed in the index, or more if
    /// packs hold very few blobs each, because the number of packs is limited too.
    pub(crate) fn finish_loading(&mut self, listed: usize) {
        self.listed = listed;
        for ids in [&mut self.data, &mut self.trees] {
            ids.merge();
            ids.sorted.shrink_to_fit();
        }
    }

    /// Forgets all trees, so that they get rewritten.
    pub(crate) fn remove_trees(&mut self) {
        self.trees = KnownIds::default();
    }

    /// Adds a blob. Returns `false` if it was already known.
    pub(crate) fn insert(&mut self, blob_type: BlobType, id: Id) -> bool {
        let is_new = self.ids(blob_type).insert(id);
        self.listed += usize::from(is_new);
        is_new
    }

    /// Adds a blob to be saved. Returns `false` if it was already known.
    ///
    /// # Errors
    /// [`FilesError::TooManyBlobs`] if the index would then list more than `MAX_SAVED_BLOBS` blobs: pruning could push
    /// it past `MAX_INDEX_BLOBS`, making it unreadable.
    pub(crate) fn insert_new(&mut self, blob_type: BlobType, id: Id) -> Result<bool, FilesError> {
        let is_new = self.insert(blob_type, id);
        if is_new && self.listed > MAX_SAVED_BLOBS {
            Err(FilesError::TooManyBlobs(MAX_SAVED_BLOBS))
        } else {
            Ok(is_new)
        }
    }

    pub(crate) fn contains(&self, blob_type: BlobType, id: Id) -> bool {
        let ids = match blob_type {
            BlobType::Data => &self.data,
            BlobType::Tree => &self.trees,
        };
        ids.sorted.binary_search(&id).is_ok() || ids.added.contains(&id)
    }

    fn ids(&mut self, blob_type: BlobType) -> &mut KnownIds {
        match blob_type {
            BlobType::Data => &mut self.data,
            BlobType::Tree => &mut self.trees,
        }
    }
}

/// Maps blobs to their locations, held in sorted vectors at 48 bytes per location.
#[derive(Debug, Default)]
pub(crate) struct BlobLocations {
    packs: Vec<PackExtent>,
    data: LocationTable,
    trees: LocationTable,
}

/// Locations for blobs of a single type.
#[derive(Debug, Default)]
struct LocationTable {
    /// Sorted by id once all index files are loaded.
    sorted: Vec<(Id, BlobLocation)>,
    /// Additional locations of blobs stored in several packs, sorted by id.
    others: Vec<(Id, BlobLocation)>,
}

impl LocationTable {
    fn position(&self, id: Id) -> Option<usize> {
        self.sorted.binary_search_by_key(&id, |(id, _)| *id).ok()
    }

    fn find(&self, id: Id) -> Option<BlobLocation> {
        self.position(id).map(|index| self.sorted[index].1)
    }

    fn find_others(&self, id: Id) -> &[(Id, BlobLocation)] {
        let start = self.others.partition_point(|(other, _)| *other < id);
        let count = self.others[start..].partition_point(|(other, _)| *other == id);
        &self.others[start..start + count]
    }

    /// Sorts the locations and moves all but the first per blob to `others`.
    fn finish_loading(&mut self, packs: &[PackExtent]) {
        // Locations in unmarked packs come first. A stable sort would allocate a buffer half as long as the vector.
        self.sorted.sort_unstable_by_key(|(id, location)| {
            (*id, packs[location.pack as usize].is_marked, location.pack, location.offset)
        });
        let others = &mut self.others;
        self.sorted.dedup_by(|next, first| {
            let is_same = next.0 == first.0;
            others.extend(is_same.then_some(*next));
            is_same
        });
        self.sorted.shrink_to_fit();
    }
}

/// A pack and the end of its last blob.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackExtent {
    pub(crate) id: Id,
    pub(crate) end: u64,
    is_marked: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlobLocation {
    /// Index into [`BlobLocations::packs`].
    pub(crate) pack: u32,
    pub(crate) offset: u32,
    pub(crate) length: u32,
    pub(crate) uncompressed_length: u32,
}

impl BlobLocation {
    pub(crate) fn range(self) -> std::ops::Range<u64> {
        let start = u64::from(self.offset);
        start..start + u64::from(self.length)
    }

    /// Length of the decrypted, decompressed blob in bytes.
    pub(crate) fn content_length(self) -> u64 {
        match self.uncompressed_length {
            0 => u64::from(self.length).saturating_sub(OVERHEAD_BYTES as u64),
            length => length.into(),
        }
    }

    pub(crate) fn to_packed(self, blob_type: BlobType, id: Id) -> PackedBlob {
        let Self { offset, length, uncompressed_length, .. } = self;
        PackedBlob { id, blob_type, offset, length, uncompressed_length }
    }
}

impl BlobLocations {
    /// Adds the packs of an index file. Unmarked packs take precedence over those marked for deletion. Call
    /// [`Self::finish_loading`] after the last file.
    pub(crate) fn load(&mut self, file: &IndexFile) {
        self.add_packs(&file.packs, false);
        self.add_packs(&file.packs_to_delete, true);
    }

    fn add_packs(&mut self, packs: &[IndexedPack], is_marked: bool) {
        for pack in packs {
            // Can't fail: the index reader caps the number of packs far below 2^32.
            let Ok(number) = u32::try_from(self.packs.len()) else { return };
            let end = pack.blobs.iter().map(|blob| u64::from(blob.offset) + u64::from(blob.length)).max();
            self.packs.push(PackExtent { id: pack.id, end: end.unwrap_or(0), is_marked });
            for &PackedBlob { id, blob_type, offset, length, uncompressed_length } in &pack.blobs {
                let location = BlobLocation { pack: number, offset, length, uncompressed_length };
                let locations = match blob_type {
                    BlobType::Data => &mut self.data,
                    BlobType::Tree => &mut self.trees,
                };
                locations.sorted.push((id, location));
            }
        }
    }

    /// Must be called after the last [`Self::load`].
    pub(crate) fn finish_loading(mut self) -> Self {
        self.data.finish_loading(&self.packs);
        self.trees.finish_loading(&self.packs);
        self
    }

    /// Finds a blob's location.
    ///
    /// # Errors
    /// [`FilesError::Corrupt`] if the blob isn't in the index.
    pub(crate) fn find(&self, blob_type: BlobType, id: Id) -> Result<BlobLocation, FilesError> {
        self.of_type(blob_type).find(id).ok_or_else(|| not_in_index(blob_type, id))
    }

    /// Returns the number of distinct blobs.
    pub(crate) fn len(&self) -> usize {
        self.data.sorted.len() + self.trees.sorted.len()
    }

    /// Returns a blob's position among all blobs, always less than [`Self::len`].
    ///
    /// # Errors
    /// [`FilesError::Corrupt`] if the blob isn't in the index.
    pub(crate) fn position(&self, blob_type: BlobType, id: Id) -> Result<usize, FilesError> {
        let position = self.of_type(blob_type).position(id).ok_or_else(|| not_in_index(blob_type, id))?;
        Ok(match blob_type {
            BlobType::Data => position,
            BlobType::Tree => self.data.sorted.len() + position,
        })
    }

    /// Returns a blob's other locations, as fallbacks for a corrupt or missing first copy.
    pub(crate) fn find_others(
        &self,
        blob_type: BlobType,
        id: Id,
    ) -> impl Iterator<Item = BlobLocation> + use<'_> {
        self.of_type(blob_type).find_others(id).iter().map(|(_, location)| *location)
    }

    /// Whether an unmarked pack holds a copy of the blob other than the first one.
    pub(crate) fn has_other_unmarked_copy(&self, blob_type: BlobType, id: Id) -> bool {
        let others = self.of_type(blob_type).find_others(id);
        others.iter().any(|(_, location)| !self.pack(*location).is_marked)
    }

    fn of_type(&self, blob_type: BlobType) -> &LocationTable {
        match blob_type {
            BlobType::Data => &self.data,
            BlobType::Tree => &self.trees,
        }
    }

    pub(crate) fn pack(&self, location: BlobLocation) -> PackExtent {
        self.packs[location.pack as usize]
    }
}

fn not_in_index(blob_type: BlobType, id: Id) -> FilesError {
    let name = match blob_type {
        BlobType::Data => "chunk",
        BlobType::Tree => "tree",
    };
    FilesError::corrupt(format!("{name} {id}"), &"it is not in the index")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u32) -> Id {
        Id::of(&n.to_le_bytes())
    }

    fn index_file(blobs: impl IntoIterator<Item = u32>) -> IndexFile {
        let blob = |n| PackedBlob {
            id: id(n),
            blob_type: BlobType::Data,
            offset: 0,
            length: 40,
            uncompressed_length: 0,
        };
        let blobs = blobs.into_iter().map(blob).collect();
        IndexFile { packs: vec![IndexedPack { id: id(0), blobs, time: None }], packs_to_delete: Vec::new() }
    }

    #[test]
    fn insert_reports_each_blob_once() {
        let mut known = KnownBlobs::default();
        known.load(&index_file(0..1000));
        known.load(&index_file(500..1500));
        known.finish_loading(2000);
        assert_eq!(known.data.sorted.len(), 1500, "duplicates take no memory");
        let count = MIN_MERGED_IDS as u32 + 5000;
        let added = (0..count).filter(|n| known.insert(BlobType::Data, id(*n))).count();
        assert_eq!(added as u32, count - 1500);
        assert!((0..count).all(|n| known.contains(BlobType::Data, id(n))));
        assert!(!known.contains(BlobType::Tree, id(0)), "the same bytes can be a chunk and a tree");
        assert!(known.insert(BlobType::Tree, id(0)));
    }

    #[test]
    fn insert_new_fails_when_index_is_full() {
        let mut known = KnownBlobs::default();
        for n in 0..MAX_SAVED_BLOBS as u32 {
            assert!(known.insert_new(BlobType::Data, id(n)).unwrap());
        }
        assert!(!known.insert_new(BlobType::Data, id(1)).unwrap(), "known blobs take no space");
        let error = known.insert_new(BlobType::Tree, id(1)).unwrap_err();
        assert!(matches!(error, FilesError::TooManyBlobs(MAX_SAVED_BLOBS)), "{error}");
    }

    #[test]
    fn find_prefers_unmarked_packs() {
        let pack = |n, blobs: &[u32]| {
            let mut pack = index_file(blobs.iter().copied()).packs.remove(0);
            pack.id = id(n);
            pack
        };
        let mut locations = BlobLocations::default();
        locations.load(&IndexFile { packs: vec![], packs_to_delete: vec![pack(100, &[1, 2])] });
        locations.load(&IndexFile { packs: vec![pack(101, &[2, 3])], packs_to_delete: vec![] });
        let locations = locations.finish_loading();
        let pack_of = |location| locations.pack(location).id;
        let find = |n| locations.find(BlobType::Data, id(n)).map(pack_of).ok();
        assert_eq!([0, 1, 2, 3].map(find), [None, Some(id(100)), Some(id(101)), Some(id(101))]);
        let others = locations.find_others(BlobType::Data, id(2));
        assert_eq!(others.map(pack_of).collect::<Vec<_>>(), [id(100)]);
        assert!(locations.find(BlobType::Tree, id(2)).is_err());
    }

    #[test]
    fn index_omits_uncompressed_length_of_uncompressed_blobs() {
        let json = serde_json::to_string(&index_file([1])).unwrap();
        assert!(!json.contains("uncompressed_length"), "{json}");
        let read: IndexFile = serde_json::from_str(&json).unwrap();
        assert_eq!(read.packs[0].blobs, index_file([1]).packs[0].blobs);
    }
}
