//! Selects one pack for each blob that several packs contain.

use std::collections::HashMap;

use jiff::Timestamp;

use super::plan::UsedBlobs;
use crate::id::Id;
use crate::index::IndexedPack;

/// The pack selected for each blob that several packs contain. Blobs are identified by position, because a map keyed by
/// id would take more than ten times the memory.
#[derive(Default)]
pub(super) struct Providers {
    /// The number of each pack, from one.
    numbers: HashMap<Id, u32>,
    /// For each blob, the number of the pack that provides it; zero if any pack may.
    by_position: Vec<u32>,
}

impl Providers {
    /// Selects the newest pack for each blob, because a save writes a damaged blob again, to a new pack. Among packs of
    /// the same age, selects the one with the most blobs, so that small packs become unused.
    pub(super) fn select<'a>(
        packs: impl Iterator<Item = &'a IndexedPack>,
        used: &UsedBlobs,
        uploads: &HashMap<Id, Timestamp>,
    ) -> Self {
        let uploaded = packs.filter_map(|pack| Some((*uploads.get(&pack.id)?, pack)));
        let mut best_last: Vec<(Timestamp, &IndexedPack)> = uploaded.collect();
        best_last.sort_unstable_by_key(|(time, pack)| (*time, pack.blobs.len(), pack.id));
        let mut selected = Self { numbers: HashMap::new(), by_position: vec![0; used.position_count()] };
        for (number, (_, pack)) in (1..).zip(best_last) {
            selected.numbers.insert(pack.id, number);
            for blob in pack.blobs.iter().filter(|blob| used.has_copies(blob)) {
                if let Some(position) = used.position(blob) {
                    selected.by_position[position] = number;
                }
            }
        }
        selected
    }

    /// Whether the pack provides the blob at the position.
    pub(super) fn provides(&self, pack: Id, position: usize) -> bool {
        let provider = self.by_position[position];
        provider == 0 || self.numbers.get(&pack) == Some(&provider)
    }
}
