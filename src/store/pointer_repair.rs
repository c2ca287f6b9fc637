//! Rebuilds a pointer that is missing, unreadable or unsound from the snapshots' sidecars.
//!
//! Invariants: the fence and `seq` are never lowered, unless they are implausible; the new pointer names no snapshot,
//! or one whose object and sidecar exist and agree; a concurrent write is never overwritten.

mod pointer_inputs;
mod resume;

use bytes::Bytes;
use jiff::Timestamp;
use object_store::ObjectStoreExt;

use super::bucket::{Bucket, Condition, StoreError};
use super::key::{self, SlotPrefix, SnapshotKey};
use super::pointer::{Fence, Pointer, SnapshotRef};
use super::snapshot::{self, Sidecar, SnapshotUnusable};
use super::{epoch_floor, pointer_io, pointer_log, snapshots};
use svc_base::clock;
use svc_machine::epoch::Epoch;

use pointer_inputs::PointerInputs;
pub use resume::resume;

/// Maximum number of bytes to return from an unreadable pointer.
const MAX_RETURNED_BYTES: u64 = 8 << 10;
/// Maximum number of snapshots to check for a complete one.
const MAX_CHECKED_SNAPSHOTS: usize = 64;

/// The platform's record of a slot.
#[derive(Debug, Clone)]
pub struct SlotRecord {
    /// The highest epoch of all machines in the slot.
    pub highest_epoch: Epoch,
    /// The slot's signed fence. Until the current machine's server has been ordered, this is its predecessor's fence.
    pub fence: Option<Fence>,
}

/// The state of a slot's pointer.
#[derive(Debug, Clone)]
pub enum PointerState {
    /// It names a complete snapshot, or none, because the slot has none or an operator decided that the slot starts
    /// empty. `None` if there is neither a pointer nor a snapshot.
    Sound(Option<Pointer>),
    /// It is readable, but its fence is implausible, its snapshot cannot be restored, or it names none even
    /// though the slot has snapshots.
    Unsound { pointer: Pointer, reason: String },
    /// `system/db/latest` does not exist, but the slot has snapshots or the log is unreadable.
    Absent { reason: String },
    /// `system/db/latest` or the newest log entry is unreadable.
    Unreadable {
        reason: String,
        /// The size of `system/db/latest`, and its first bytes.
        size_bytes: u64,
        start: Bytes,
    },
}

impl PointerState {
    pub fn pointer(&self) -> Option<&Pointer> {
        match self {
            Self::Sound(pointer) => pointer.as_ref(),
            Self::Unsound { pointer, .. } => Some(pointer),
            Self::Absent { .. } | Self::Unreadable { .. } => None,
        }
    }

    pub fn problem(&self) -> Option<&str> {
        match self {
            Self::Sound(_) => None,
            Self::Unsound { reason, .. } | Self::Absent { reason } | Self::Unreadable { reason, .. } => {
                Some(reason)
            }
        }
    }

    pub fn is_sound(&self) -> bool {
        matches!(self, Self::Sound(_))
    }
}

/// The snapshot that the rebuilt pointer should name.
#[derive(Debug, Clone, Copy)]
pub enum RebuildTarget<'a> {
    /// The newest complete snapshot of the highest epoch that has one; none if the slot has no snapshots.
    Newest,
    Snapshot(&'a SnapshotKey),
    /// No snapshot, even if there are some: an operator's decision.
    Nothing,
}

/// The current pointer, and the one that a rebuild would write.
#[derive(Debug, Clone)]
pub struct Inspection {
    pub found: PointerState,
    /// Number of snapshots with a sidecar, except those with an implausible epoch in the key.
    pub snapshots: usize,
    /// Number of unchecked snapshots if none of the checked ones is complete, otherwise 0.
    pub unchecked: usize,
    /// `None` if no snapshot is complete, or if the slot has no snapshot and was never fenced.
    pub next: Option<Pointer>,
    condition: Condition,
}

/// The reason the pointer was not rebuilt.
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    #[error("{key} is not usable: {reason}")]
    Unusable { key: String, reason: String },
    #[error("the pointer was changed by another writer in the meantime")]
    ChangedConcurrently,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Reads the pointer, and plans the pointer that a rebuild would write.
///
/// # Errors
/// [`RepairError`]; `Unusable` if the requested snapshot is not complete or its epoch is implausible, if the pointer's
/// log has no free `seq`, or if it has too many entries to skip. Never `ChangedConcurrently`.
pub async fn inspect(
    bucket: &Bucket,
    slot: &SlotPrefix,
    record: SlotRecord,
    target: RebuildTarget<'_>,
) -> Result<Inspection, RepairError> {
    let SlotRecord { highest_epoch, fence } = &record;
    let bound = highest_epoch.max_plausible();
    let (found, condition) = read_pointer_state(bucket, slot, bound).await?;
    let mut keys = snapshots::list_keys(bucket, slot).await?;
    // A host can write any key, so epochs that no machine ever had are ignored.
    keys.retain(|key| key::epoch_of(key).is_none_or(|epoch| epoch <= bound));
    let (candidate, unchecked) = match target {
        RebuildTarget::Snapshot(key) => {
            let sidecar = load_sidecar(bucket, slot, key).await?;
            if sidecar.epoch > bound {
                let reason =
                    format!("its epoch {} is far above any epoch known to the platform", sidecar.epoch);
                return Err(RepairError::Unusable { key: key.as_str().to_owned(), reason });
            }
            (Some(sidecar), 0)
        }
        RebuildTarget::Newest => find_newest_complete(bucket, slot, &keys).await?,
        RebuildTarget::Nothing => (None, 0),
    };
    let emptied_at = matches!(target, RebuildTarget::Nothing).then(clock::now_ms);
    let next = if candidate.is_some() || emptied_at.is_some() || keys.is_empty() {
        let newest_entry = read_newest_entry(bucket, slot).await?;
        let metadata_epoch = epoch_floor::read_metadata_epoch(bucket, slot, bound).await?;
        let inputs = PointerInputs {
            found: &found,
            keys: &keys,
            newest_entry,
            metadata_epoch,
            fence: fence.as_ref(),
            bound,
        };
        plan_rebuild(bucket, slot, inputs, (candidate.map(|sidecar| sidecar.snapshot_ref()), emptied_at))
            .await?
    } else {
        None
    };
    Ok(Inspection { found, snapshots: keys.len(), unchecked, next, condition })
}

/// Plans the pointer to write, with a `seq` above which a reader finds no entry. If the last skipped entry is readable,
/// the new fence is not below that entry's.
async fn plan_rebuild(
    bucket: &Bucket,
    slot: &SlotPrefix,
    inputs: PointerInputs<'_>,
    (snapshot, emptied_at): (Option<SnapshotRef>, Option<Timestamp>),
) -> Result<Option<Pointer>, RepairError> {
    let Some(next) = inputs.plan(snapshot.clone(), emptied_at) else { return Ok(None) };
    let free_seq = pointer_log::find_free_seq(bucket, &slot.pointer_paths(), next.seq).await;
    let (seq, skipped) = free_seq.map_err(|error| match error {
        StoreError::Corrupt { key, reason } => RepairError::Unusable { key, reason },
        error => error.into(),
    })?;
    let Some(skipped) = skipped else { return Ok(Some(next)) };
    let value =
        pointer_io::try_read_entry(bucket, slot, skipped).await?.or_else(|| inputs.newest_entry.1.clone());
    let next = PointerInputs { newest_entry: (skipped, value), ..inputs }.plan(snapshot, emptied_at);
    Ok(next.map(|next| Pointer { seq, ..next }))
}

/// Writes the pointer that the inspection planned: its log entry, then `latest`, if it is unchanged.
///
/// # Errors
/// [`RepairError`]; `Unusable` if the inspection planned no pointer, or if the pointer is still unreadable after the
/// writes; `ChangedConcurrently` if the pointer has changed since the inspection.
pub async fn rebuild(
    bucket: &Bucket,
    slot: &SlotPrefix,
    inspection: &Inspection,
) -> Result<Pointer, RepairError> {
    let no_complete_snapshot = || RepairError::Unusable {
        key: slot.snapshots().to_string(),
        reason: "none of its snapshots is complete".to_owned(),
    };
    let next = inspection.next.clone().ok_or_else(no_complete_snapshot)?;
    let entry = slot.pointer_entry(next.seq);
    match bucket.put_json_if(&entry, &next, Condition::Absent).await {
        Ok(()) => {}
        // If the response to the first attempt was lost, the store's client has retried, and its own first write caused
        // the refusal.
        Err(StoreError::Precondition { .. }) => {
            let written = bucket.get_json::<Pointer>(&entry).await;
            if !matches!(written, Ok(Some(written)) if written.value == next) {
                return Err(RepairError::ChangedConcurrently);
            }
        }
        Err(error) => return Err(error.into()),
    }
    match bucket.put_json_if(&slot.pointer(), &next, inspection.condition.clone()).await {
        // Another writer has copied the entry to `latest`, or has changed `latest`: the read below distinguishes these
        // cases.
        Ok(()) | Err(StoreError::Precondition { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    match pointer_io::read(bucket, slot).await {
        Ok(Some(read)) if resume::has_taken_effect(&next, &read.value) => Ok(next),
        Ok(_) => Err(RepairError::ChangedConcurrently),
        Err(StoreError::Corrupt { key, reason }) => Err(RepairError::Unusable { key, reason }),
        Err(error) => Err(error.into()),
    }
}

async fn read_pointer_state(
    bucket: &Bucket,
    slot: &SlotPrefix,
    bound: Epoch,
) -> Result<(PointerState, Condition), StoreError> {
    let read = match pointer_io::read(bucket, slot).await {
        Err(StoreError::Corrupt { key, reason }) => {
            return describe_unreadable(bucket, slot, format!("{key}: {reason}")).await;
        }
        read => read?,
    };
    let condition = read.as_ref().map_or(Condition::Absent, pointer_io::PointerRead::condition);
    let is_missing = read.as_ref().is_none_or(|read| !read.has_latest());
    let pointer = read.map(|read| read.value);
    let state = match (snapshot::find_latest(bucket, slot).await, pointer) {
        (_, Some(pointer)) if pointer.fence_epoch > bound => {
            let reason =
                format!("its fence {} is far above any epoch known to the platform", pointer.fence_epoch);
            PointerState::Unsound { pointer, reason }
        }
        (Ok(_) | Err(SnapshotUnusable::Absent), pointer) => PointerState::Sound(pointer),
        (Err(SnapshotUnusable::Store(error)), _) => return Err(error),
        (Err(SnapshotUnusable::Damaged { key, reason }), Some(pointer)) if !is_missing => {
            PointerState::Unsound { pointer, reason: format!("{key}: {reason}") }
        }
        (Err(SnapshotUnusable::Damaged { key, reason }), _) => {
            PointerState::Absent { reason: format!("{key}: {reason}") }
        }
    };
    Ok((state, condition))
}

async fn describe_unreadable(
    bucket: &Bucket,
    slot: &SlotPrefix,
    reason: String,
) -> Result<(PointerState, Condition), StoreError> {
    let key = slot.pointer();
    let Some(meta) = bucket.head(&key).await? else {
        return Ok((PointerState::Absent { reason }, Condition::Absent));
    };
    let length = meta.size.min(MAX_RETURNED_BYTES);
    let start = match length {
        0 => Bytes::new(),
        _ => bucket
            .raw()
            .get_range(&key, 0..length)
            .await
            .map_err(|error| StoreError::classify(&key, error))?,
    };
    let condition = Condition::unchanged(&meta);
    Ok((PointerState::Unreadable { reason, size_bytes: meta.size, start }, condition))
}

async fn load_sidecar(bucket: &Bucket, slot: &SlotPrefix, key: &SnapshotKey) -> Result<Sidecar, RepairError> {
    match snapshot::load(bucket, slot, key.as_str()).await {
        Ok(sidecar) => Ok(sidecar),
        Err(SnapshotUnusable::Store(error)) => Err(error.into()),
        Err(SnapshotUnusable::Damaged { key, reason }) => Err(RepairError::Unusable { key, reason }),
        Err(SnapshotUnusable::Absent) => {
            Err(RepairError::Unusable { key: key.as_str().to_owned(), reason: "it is missing".to_owned() })
        }
    }
}

/// Finds the newest complete snapshot of the highest epoch that has one. If none of the checked snapshots is complete,
/// also returns the number of unchecked ones.
async fn find_newest_complete(
    bucket: &Bucket,
    slot: &SlotPrefix,
    keys: &[String],
) -> Result<(Option<Sidecar>, usize), StoreError> {
    let mut ordered: Vec<_> = keys.iter().map(|key| (key::epoch_of(key), key::taken_at(key), key)).collect();
    ordered.sort_unstable_by(|a, b| b.cmp(a));
    for (epoch, _, key) in ordered.into_iter().take(MAX_CHECKED_SNAPSHOTS) {
        match snapshot::load(bucket, slot, key).await {
            Ok(sidecar) if Some(sidecar.epoch) == epoch => return Ok((Some(sidecar), 0)),
            Ok(_) => tracing::warn!(key, "skipped a snapshot without an epoch in its key"),
            Err(SnapshotUnusable::Damaged { reason, .. }) => {
                tracing::warn!(key, reason, "skipped an unusable snapshot");
            }
            Err(SnapshotUnusable::Absent) => {}
            Err(SnapshotUnusable::Store(error)) => return Err(error),
        }
    }
    Ok((None, keys.len().saturating_sub(MAX_CHECKED_SNAPSHOTS)))
}

/// Reads the `seq` and value of the newest log entry. If the entry is unreadable, the value comes from `latest`.
async fn read_newest_entry(bucket: &Bucket, slot: &SlotPrefix) -> Result<(u64, Option<Pointer>), StoreError> {
    let paths = slot.pointer_paths();
    let Some((seq, _)) = pointer_log::find_newest_entry(bucket, &paths, 0).await? else {
        return Ok((0, None));
    };
    let value = match pointer_io::try_read_entry(bucket, slot, seq).await? {
        // No writer that follows the protocol wrote this entry, so `latest` still has the current fence.
        None => pointer_io::try_read_latest(bucket, slot).await?,
        value => value,
    };
    Ok((seq, value))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;
    use serde_json::{Value, json};

    use super::*;
    use crate::pointer::tests::sidecar;
    use svc_machine::id::MachineId;
    use svc_machine::name::Slot;

    const TIME: &str = "2026-11-24T03-04-05.678Z";

    pub(super) fn slot() -> SlotPrefix {
        SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary())
    }

    fn record() -> SlotRecord {
        SlotRecord {
            highest_epoch: Epoch(1),
            fence: Some(Fence::unsigned(Epoch(1), MachineId(uuid::Uuid::nil()))),
        }
    }

    /// Creates a slot with one snapshot, and a pointer with `seq` 2.
    pub(super) async fn slot_with_backup() -> (Bucket, String) {
        let bucket = Bucket::new(Arc::new(InMemory::new()));
        let taken_at = "2026-11-24T03:04:05.678Z".parse().unwrap();
        let snapshot = SnapshotRef {
            key: key::snapshot_key(taken_at, Epoch(1)),
            taken_at,
            ..crate::pointer::tests::snapshot(1, Epoch(1))
        };
        bucket.put(&slot().snapshot(&snapshot.key).unwrap(), "d").await.unwrap();
        pointer_io::fence(&bucket, &slot(), &record().fence.unwrap()).await.unwrap();
        let stored = snapshot::write_sidecar(&bucket, &slot(), &sidecar(&snapshot), None).await.unwrap();
        pointer_io::advance(&bucket, &slot(), &stored).await.unwrap();
        (bucket, snapshot.key)
    }

    /// Writes an object and a sidecar, as one of the slot's sessions could forge them.
    async fn forge(bucket: &Bucket, name: &str, epoch: u32) {
        let (object, key) = (slot().snapshots().join(name), format!("system/db/snapshots/{name}"));
        bucket.put(&object, "d").await.unwrap();
        let sidecar = json!({"version": 1, "key": key, "sizeBytes": 1, "sha256": "00".repeat(32), "pgVersion": "16",
            "machineId": uuid::Uuid::nil(), "epoch": epoch, "takenAt": "2026-11-24T03:04:05.678Z",
            "verifiedAt": "2026-11-24T03:04:05.678Z", "roles": [], "tables": []});
        bucket.put_json(&slot().snapshots().join(format!("{name}.json")), &sidecar).await.unwrap();
    }

    pub(super) async fn inspect_target(bucket: &Bucket, target: RebuildTarget<'_>) -> Inspection {
        inspect(bucket, &slot(), record(), target).await.unwrap()
    }

    #[tokio::test]
    async fn rebuild_skips_unreadable_entries_at_any_distance() {
        let newer = json!({"version": 2});
        for (junk, latest) in [
            (json!({}), None),
            (json!({}), Some("{torn")),
            (newer.clone(), None),
            (newer, Some("")),
            (json!({"version": 1, "fenceEpoch": 1, "seq": 7, "snapshot": null}), None),
        ] {
            let (bucket, key) = slot_with_backup().await;
            for seq in [600_003, 1_500_003, 2_400_003, 9_000_000_000_000_000] {
                bucket.put_json(&slot().pointer_entry(seq), &junk).await.unwrap();
            }
            if let Some(latest) = latest {
                bucket.put(&slot().pointer(), latest).await.unwrap();
            }
            assert!(pointer_io::read(&bucket, &slot()).await.is_err(), "{junk}");
            let inspection = inspect_target(&bucket, RebuildTarget::Newest).await;
            let written = rebuild(&bucket, &slot(), &inspection).await.unwrap();
            assert_eq!(written.snapshot.as_ref().map(|snapshot| &*snapshot.key), Some(&*key), "{junk}");
            let read = pointer_io::read(&bucket, &slot()).await.unwrap().unwrap();
            assert_eq!(read.value, written, "{junk}");
            // Later writes succeed.
            let next = Fence::unsigned(Epoch(2), MachineId(uuid::Uuid::from_u128(2)));
            pointer_io::fence(&bucket, &slot(), &next).await.unwrap();
            let read = pointer_io::read(&bucket, &slot()).await.unwrap().unwrap();
            assert_eq!(read.value.fence_epoch, Epoch(2));
        }
    }

    #[tokio::test]
    async fn rebuild_keeps_the_fence_despite_unreadable_entries() {
        let (bucket, _) = slot_with_backup().await;
        // The platform's database was restored from a backup that does not contain this machine.
        let later = Fence::unsigned(Epoch(5), MachineId(uuid::Uuid::from_u128(5)));
        pointer_io::fence(&bucket, &slot(), &later).await.unwrap();
        bucket.put(&slot().pointer_entry(600_000), "{}").await.unwrap();
        let next = inspect_target(&bucket, RebuildTarget::Newest).await.next.unwrap();
        assert_eq!((next.fence_epoch, next.fence_machine_id), (Epoch(5), Some(later.machine)));
    }

    #[tokio::test]
    async fn rebuild_ignores_snapshots_with_a_second_epoch() {
        let (bucket, key) = slot_with_backup().await;
        for name in [format!("{TIME}-1.dumpZ-900.dump"), format!("{TIME}-900.dump-1.dump")] {
            forge(&bucket, &name, 900).await;
        }
        forge(&bucket, "2026-11-24T03-04-06.678Z-1.dump", 900).await;
        let next = inspect_target(&bucket, RebuildTarget::Newest).await.next.unwrap();
        assert_eq!((next.fence_epoch, next.snapshot.map(|snapshot| snapshot.key)), (Epoch(1), Some(key)));
        let mismatched: SnapshotKey = "system/db/snapshots/2026-11-24T03-04-06.678Z-1.dump".parse().unwrap();
        let error =
            inspect(&bucket, &slot(), record(), RebuildTarget::Snapshot(&mismatched)).await.unwrap_err();
        assert!(matches!(error, RepairError::Unusable { .. }), "{error}");
    }

    #[tokio::test]
    async fn inspect_refuses_chosen_snapshot_of_implausible_epoch() {
        let (bucket, _) = slot_with_backup().await;
        let bound = Epoch(1).max_plausible();
        for (epoch, is_refused) in [(bound.0, false), (bound.0 + 1, true)] {
            let name = format!("{TIME}-{epoch}.dump");
            forge(&bucket, &name, epoch).await;
            let key: SnapshotKey = format!("system/db/snapshots/{name}").parse().unwrap();
            let inspected = inspect(&bucket, &slot(), record(), RebuildTarget::Snapshot(&key)).await;
            let message = inspected.err().map(|error| error.to_string());
            let is_implausible = message.as_ref().is_some_and(|message| message.contains("far above"));
            assert_eq!(is_implausible, is_refused, "{message:?}");
        }
    }

    #[tokio::test]
    async fn inspect_counts_unchecked_snapshots() {
        let (bucket, key) = slot_with_backup().await;
        let forged = |n: usize| format!("2026-11-24T04-00-00.{n:03}Z-1.dump");
        for n in 0..MAX_CHECKED_SNAPSHOTS {
            bucket
                .put_json(&slot().snapshots().join(format!("{}.json", forged(n))), &Value::Null)
                .await
                .unwrap();
        }
        let inspection = inspect_target(&bucket, RebuildTarget::Newest).await;
        assert_eq!(
            (inspection.next, inspection.snapshots, inspection.unchecked),
            (None, MAX_CHECKED_SNAPSHOTS + 1, 1)
        );
        let key: SnapshotKey = key.parse().unwrap();
        assert!(inspect_target(&bucket, RebuildTarget::Snapshot(&key)).await.next.is_some());
    }
}
