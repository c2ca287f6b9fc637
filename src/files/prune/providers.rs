//! Selects a provider pack for each blob found in several packs.

use std::collections::HashMap;

use jiff::Timestamp;

use super::plan::UsedBlobs;
use crate::id::Id;
use crate::index::IndexedPack;

/// The selected pack for each blob found in several packs. Blobs are keyed by position, because a map keyed by id would
/// take more than ten times the memory.
#[derive(Default)]
pub(super) struct Providers {
    /// Pack numbers, starting at one.
    numbers: HashMap<Id, u32>,
    /// Number of the pack that provides each blob, or zero if any pack may.
    by_position: Vec<u32>,
}

impl Providers {
    /// Selects the newest pack for each blob, because saves rewrite corrupt blobs to a new pack. Among packs of the
    /// same age, picks the one with the most blobs, so that small packs become unused.
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

    /// Whether `pack` provides the blob at `position`.
    pub(super) fn provides(&self, pack: Id, position: usize) -> bool {
        let provider = self.by_position[position];
        provider == 0 || self.numbers.get(&pack) == Some(&provider)
    }
}
