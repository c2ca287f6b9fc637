//! Derives the fence and `seq` of a rebuilt pointer.

use jiff::Timestamp;

use super::PointerState;
use crate::epoch_floor;
use crate::pointer::{FORMAT_VERSION, Fence, MAX_SEQ_AHEAD, Pointer, SnapshotRef};
use svc_machine::epoch::Epoch;

/// The state from which the fence and `seq` of the rebuilt pointer are derived.
pub(super) struct PointerInputs<'a> {
    pub(super) found: &'a PointerState,
    pub(super) keys: &'a [String],
    /// The `seq` of the newest log entry, and the pointer in that entry or in `latest`.
    pub(super) newest_entry: (u64, Option<Pointer>),
    /// The epoch in `system/vps-meta.json`.
    pub(super) metadata_epoch: Epoch,
    /// The platform's signed fence.
    pub(super) fence: Option<&'a Fence>,
    /// The highest plausible epoch.
    pub(super) bound: Epoch,
}

impl PointerInputs<'_> {
    /// Plans the next pointer; `None` if the slot was never fenced, so there is nothing to write.
    pub(super) fn plan(
        &self,
        snapshot: Option<SnapshotRef>,
        emptied_at: Option<Timestamp>,
    ) -> Option<Pointer> {
        let pointers = || self.found.pointer().into_iter().chain(&self.newest_entry.1);
        let fences = pointers().map(|pointer| pointer.fence_epoch).filter(|fence| *fence <= self.bound);
        let snapshot_epoch = snapshot.as_ref().map_or(Epoch::NONE, |snapshot| snapshot.epoch);
        let stored_epochs =
            [epoch_floor::highest_in_keys(self.keys, self.bound), self.metadata_epoch, snapshot_epoch];
        let platform_epoch = self.fence.map(|fence| fence.epoch);
        let fence_epoch =
            fences.chain(stored_epochs).chain(platform_epoch).max().filter(|epoch| *epoch > Epoch::NONE)?;
        let platform_fence = self.fence.filter(|fence| fence.epoch == fence_epoch);
        let pointer_holder = || {
            pointers().filter(|pointer| pointer.fence_epoch == fence_epoch).find_map(Pointer::fence_holder)
        };
        let snapshot_holder =
            || snapshot.as_ref().filter(|target| target.epoch == fence_epoch).map(|target| target.machine_id);
        let fence_machine_id =
            platform_fence.map(|fence| fence.machine).or_else(pointer_holder).or_else(snapshot_holder);
        let pointer_proof = || {
            let same_fence = pointers().filter(|pointer| {
                pointer.fence_epoch == fence_epoch && pointer.fence_holder() == fence_machine_id
            });
            same_fence.filter_map(|pointer| pointer.fence_proof.clone()).next()
        };
        let fence_proof = platform_fence.and_then(|fence| fence.proof.clone()).or_else(pointer_proof);
        Some(Pointer {
            version: FORMAT_VERSION,
            fence_epoch,
            fence_machine_id,
            fence_proof,
            seq: self.last_seq_or_estimate(fence_epoch) + 1,
            emptied_at,
            snapshot,
        })
    }

    /// Returns the last `seq`, or a higher one. Without a pointer, it is estimated as one move per snapshot and per
    /// fence. A `seq` far above the estimate is ignored, because a host can write any value.
    fn last_seq_or_estimate(&self, fence_epoch: Epoch) -> u64 {
        let estimate = self.keys.len() as u64 + u64::from(fence_epoch.0);
        let known_seqs = [self.found.pointer().map_or(estimate, |pointer| pointer.seq), self.newest_entry.0];
        let plausible = known_seqs.into_iter().filter(|seq| *seq <= estimate.saturating_add(MAX_SEQ_AHEAD));
        plausible.max().unwrap_or(estimate)
    }
}
