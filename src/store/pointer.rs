//! `system/db/latest`, pure: what the pointer says, and what a fence or a new snapshot makes of it.
//!
//! Invariants: `seq` and `fenceEpoch` only grow; a machine below the fence never moves the pointer; the clocks of
//! hosts decide nothing.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::machine::epoch::Epoch;
use crate::machine::id::MachineId;

pub const FORMAT: u32 = 1;
/// More moves than a slot ever sees, and as far as every reader of JSON counts exactly: `seq` must be able to grow.
pub const LARGEST_SEQ: u64 = 1 << 53;

/// The pointer to the latest verified snapshot of a slot. `snapshot: null` is a tombstone: a fence where nothing was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pointer {
    pub version: u32,
    pub fence_epoch: Epoch,
    pub seq: u64,
    pub snapshot: Option<SnapshotRef>,
}

/// A verified snapshot as the pointer names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotRef {
    /// Relative to the slot: `system/db/snapshots/….dump`.
    pub key: String,
    pub size_bytes: u64,
    /// Hex.
    pub sha256: String,
    pub etag: Option<String>,
    pub machine_id: MachineId,
    pub epoch: Epoch,
    #[serde(with = "clock::wire")]
    pub taken_at: Timestamp,
    #[serde(with = "clock::wire")]
    pub verified_at: Timestamp,
}

/// A writer that has been replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the slot is fenced at epoch {fence}; this machine's epoch {mine} may not move the pointer any more")]
pub struct Fenced {
    pub fence: Epoch,
    pub mine: Epoch,
}

/// The pointer with the fence at `epoch`; `None` when it already stands there.
///
/// # Errors
/// [`Fenced`] when a later machine has fenced already.
pub fn fence(current: Option<&Pointer>, epoch: Epoch) -> Result<Option<Pointer>, Fenced> {
    match current {
        None => Ok(Some(Pointer { version: FORMAT, fence_epoch: epoch, seq: 1, snapshot: None })),
        Some(now) if now.fence_epoch > epoch => Err(Fenced { fence: now.fence_epoch, mine: epoch }),
        Some(now) if now.fence_epoch == epoch => Ok(None),
        Some(now) => Ok(Some(Pointer {
            version: FORMAT,
            fence_epoch: epoch,
            seq: now.seq + 1,
            snapshot: now.snapshot.clone(),
        })),
    }
}

/// The pointer moved to `snapshot` by the machine of `epoch`; `None` when it already names that snapshot, which may be
/// this machine's own write whose answer was lost, even if it was fenced since. Who writes fences all earlier machines.
///
/// # Errors
/// [`Fenced`] when the fence stands above `epoch`.
pub fn advance(
    current: Option<&Pointer>,
    epoch: Epoch,
    snapshot: &SnapshotRef,
) -> Result<Option<Pointer>, Fenced> {
    let (fence_epoch, seq) = match current {
        None => (epoch, 0),
        Some(now) if now.snapshot.as_ref().is_some_and(|named| named.key == snapshot.key) => return Ok(None),
        Some(now) if now.fence_epoch > epoch => return Err(Fenced { fence: now.fence_epoch, mine: epoch }),
        Some(now) => (epoch, now.seq),
    };
    Ok(Some(Pointer { version: FORMAT, fence_epoch, seq: seq + 1, snapshot: Some(snapshot.clone()) }))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn snapshot(n: u32, epoch: Epoch) -> SnapshotRef {
        let at: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        SnapshotRef {
            key: format!("system/db/snapshots/{n}-{epoch}.dump"),
            size_bytes: 1,
            sha256: "00".repeat(32),
            etag: None,
            machine_id: MachineId(uuid::Uuid::nil()),
            epoch,
            taken_at: at,
            verified_at: at,
        }
    }

    pub(crate) fn side_record(of: &SnapshotRef) -> crate::store::snapshot::SideRecord {
        crate::store::snapshot::SideRecord {
            version: crate::store::snapshot::FORMAT,
            key: of.key.clone(),
            size_bytes: of.size_bytes,
            sha256: of.sha256.clone(),
            pg_version: "16.14".to_owned(),
            machine_id: of.machine_id,
            epoch: of.epoch,
            taken_at: of.taken_at,
            verified_at: of.verified_at,
            roles: Vec::new(),
            tables: Vec::new(),
            database: None,
            database_identity: None,
        }
    }

    #[test]
    fn a_first_fence_is_a_tombstone_and_a_replaced_machine_is_told() {
        let first = fence(None, Epoch(1)).unwrap().unwrap();
        assert_eq!(first.snapshot, None);
        let second = fence(Some(&first), Epoch(2)).unwrap().unwrap();
        let refused = advance(Some(&second), Epoch(1), &snapshot(1, Epoch(1))).unwrap_err();
        assert_eq!(refused, Fenced { fence: Epoch(2), mine: Epoch(1) });
    }

    #[test]
    fn a_write_that_a_fence_followed_is_still_known_as_done() {
        let mine = snapshot(1, Epoch(1));
        let written = advance(None, Epoch(1), &mine).unwrap().unwrap();
        let fenced = fence(Some(&written), Epoch(2)).unwrap().unwrap();
        assert_eq!(advance(Some(&fenced), Epoch(1), &mine), Ok(None), "its answer may have been lost");
        assert!(advance(Some(&fenced), Epoch(1), &snapshot(2, Epoch(1))).is_err());
    }

    proptest! {
        /// Whatever order fences and snapshots come in: nothing goes back, and a snapshot that was named stays named
        /// until another takes its place.
        #[test]
        fn the_pointer_never_goes_back(steps in prop::collection::vec((any::<bool>(), 1u32..6, 0u32..1000), 0..60)) {
            let mut now: Option<Pointer> = None;
            for (is_fence, epoch, n) in steps {
                let epoch = Epoch(epoch);
                let next = if is_fence { fence(now.as_ref(), epoch) } else { advance(now.as_ref(), epoch, &snapshot(n, epoch)) };
                let Ok(Some(next)) = next else { continue };
                if let Some(old) = &now {
                    prop_assert!(next.seq == old.seq + 1);
                    prop_assert!(next.fence_epoch >= old.fence_epoch);
                    prop_assert!(old.snapshot.is_none() || next.snapshot.is_some());
                    prop_assert!(epoch >= old.fence_epoch);
                    if let (Some(old), Some(next)) = (&old.snapshot, &next.snapshot) {
                        prop_assert!(next.epoch >= old.epoch, "the snapshot of an earlier machine took its place");
                    }
                }
                now = Some(next);
            }
        }
    }
}
