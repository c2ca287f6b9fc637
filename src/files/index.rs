//! The index records which pack each blob is in. It is the union of all index files in the repository.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::error::FilesError;
use crate::id::Id;
use crate::key::OVERHEAD_BYTES;
use crate::pack::{BlobType, FinishedPack, PackedBlob};

/// One index file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct IndexFile {
    pub(crate) packs: Vec<IndexedPack>,
    /// Packs that no snapshot needed when they were marked. A save must not rely on them; a restore may read them until
    /// they are deleted. `rustic` uses the same field, and `restic` ignores it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) packs_to_delete: Vec<IndexedPack>,
}

impl IndexFile {
    /// Removes the blobs of other types.
    pub(crate) fn retain_blobs(&mut self, blob_type: BlobType) {
        for pack in self.packs.iter_mut().chain(&mut self.packs_to_delete) {
            pack.blobs.retain(|blob| blob.blob_type == blob_type);
        }
    }

    pub(crate) fn blob_count(&self) -> usize {
        self.packs.iter().chain(&self.packs_to_delete).map(|pack| pack.blobs.len()).sum()
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

impl From<FinishedPack> for IndexedPack {
    fn from(pack: FinishedPack) -> Self {
        Self { id: pack.id, blobs: pack.blobs, time: None }
    }
}

/// The blobs that the repository has. Loaded ids are in a sorted vector, which takes 32 bytes per id.
#[derive(Debug, Default)]
pub(crate) struct KnownBlobs {
    data: KnownIds,
    trees: KnownIds,
}

#[derive(Debug, Default)]
struct KnownIds {
    sorted: Vec<Id>,
    added: HashSet<Id>,
}

/// Minimum number of added ids before they are merged into the sorted ones. For a large index, the threshold is an
/// eighth of its size.
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
    /// Adds the blobs of an index file. [`Self::finish_loading`] must follow.
    pub(crate) fn load(&mut self, file: &IndexFile) {
        for blob in file.packs.iter().flat_map(|pack| &pack.blobs) {
            self.ids(blob.blob_type).sorted.push(blob.id);
        }
    }

    pub(crate) fn finish_loading(&mut self) {
        for ids in [&mut self.data, &mut self.trees] {
            ids.merge();
            ids.sorted.shrink_to_fit();
        }
    }

    /// Removes blobs that are damaged, so that they are written again.
    pub(crate) fn remove(&mut self, damaged: &HashSet<Id>) {
        for ids in [&mut self.data, &mut self.trees] {
            ids.sorted.retain(|id| !damaged.contains(id));
            ids.added.retain(|id| !damaged.contains(id));
        }
    }

    /// Removes all trees, so that they are written again.
    pub(crate) fn remove_trees(&mut self) {
        self.trees = KnownIds::default();
    }

    /// Adds a blob; `false` if it was already known.
    pub(crate) fn insert(&mut self, blob_type: BlobType, id: Id) -> bool {
        self.ids(blob_type).insert(id)
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

/// The location of each blob.
#[derive(Debug, Default)]
pub(crate) struct BlobLocations {
    packs: Vec<PackExtent>,
    data: HashMap<Id, BlobLocation>,
    trees: HashMap<Id, BlobLocation>,
    /// The other locations of blobs that are in several packs.
    others: HashMap<(BlobType, Id), Vec<BlobLocation>>,
}

/// A pack and the end of its last blob.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackExtent {
    pub(crate) id: Id,
    pub(crate) end: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlobLocation {
    /// The position of the pack in [`BlobLocations::pack`].
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

    /// The number of bytes in the decrypted and decompressed blob.
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
    /// Adds the packs of an index file. Packs that are marked for deletion are used only for blobs that no other pack
    /// has.
    pub(crate) fn load(&mut self, file: IndexFile) {
        self.add_packs(file.packs, true);
        self.add_packs(file.packs_to_delete, false);
    }

    fn add_packs(&mut self, packs: Vec<IndexedPack>, is_preferred: bool) {
        for pack in packs {
            // A repository cannot have 2^32 packs: each is an object with at least one blob.
            let Ok(number) = u32::try_from(self.packs.len()) else { return };
            let end = pack.blobs.iter().map(|blob| u64::from(blob.offset) + u64::from(blob.length)).max();
            self.packs.push(PackExtent { id: pack.id, end: end.unwrap_or(0) });
            for PackedBlob { id, blob_type, offset, length, uncompressed_length } in pack.blobs {
                let location = BlobLocation { pack: number, offset, length, uncompressed_length };
                let ids = match blob_type {
                    BlobType::Data => &mut self.data,
                    BlobType::Tree => &mut self.trees,
                };
                let replaced = match ids.entry(id) {
                    Entry::Vacant(entry) => {
                        entry.insert(location);
                        None
                    }
                    Entry::Occupied(mut entry) if is_preferred => Some(entry.insert(location)),
                    Entry::Occupied(_) => Some(location),
                };
                if let Some(other) = replaced {
                    self.others.entry((blob_type, id)).or_default().push(other);
                }
            }
        }
    }

    /// Finds a blob's location.
    ///
    /// # Errors
    /// [`FilesError::Corrupt`] if the blob is not in the index.
    pub(crate) fn find(&self, blob_type: BlobType, id: Id) -> Result<BlobLocation, FilesError> {
        let (ids, name) = match blob_type {
            BlobType::Data => (&self.data, "chunk"),
            BlobType::Tree => (&self.trees, "tree"),
        };
        let found = ids.get(&id).copied();
        found.ok_or_else(|| FilesError::corrupt(format!("{name} {id}"), &"it is not in the index"))
    }

    /// Returns the other locations of a blob, for use if its first copy is damaged.
    pub(crate) fn find_others(&self, blob_type: BlobType, id: Id) -> &[BlobLocation] {
        self.others.get(&(blob_type, id)).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn pack(&self, location: BlobLocation) -> PackExtent {
        self.packs[location.pack as usize]
    }
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
        known.finish_loading();
        assert_eq!(known.data.sorted.len(), 1500, "duplicates take no memory");
        let count = MIN_MERGED_IDS as u32 + 5000;
        let added = (0..count).filter(|n| known.insert(BlobType::Data, id(*n))).count();
        assert_eq!(added as u32, count - 1500);
        assert!((0..count).all(|n| known.contains(BlobType::Data, id(n))));
        assert!(!known.contains(BlobType::Tree, id(0)), "the same bytes can be a chunk and a tree");
        assert!(known.insert(BlobType::Tree, id(0)));
    }

    #[test]
    fn index_without_compression_omits_the_length() {
        let json = serde_json::to_string(&index_file([1])).unwrap();
        assert!(!json.contains("uncompressed_length"), "{json}");
        let read: IndexFile = serde_json::from_str(&json).unwrap();
        assert_eq!(read.packs[0].blobs, index_file([1]).packs[0].blobs);
    }
}
