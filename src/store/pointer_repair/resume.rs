//! Completes a pointer rebuild that was interrupted or whose writes went unacknowledged.
//!
//! Invariant: a pointer newer than the rebuild's is never changed.

use super::{Inspection, RepairError, rebuild};
use crate::bucket::{Bucket, StoreError};
use crate::key::SlotPrefix;
use crate::pointer::Pointer;

/// Completes an earlier rebuild from its plan; `None` if its log entry was never written.
///
/// # Errors
/// Same as [`rebuild`]. `ChangedConcurrently` here also means that another writer has replaced the rebuilt pointer.
pub async fn resume(
    bucket: &Bucket,
    slot: &SlotPrefix,
    inspection: &Inspection,
    planned: &Pointer,
) -> Result<Option<Pointer>, RepairError> {
    let entry = match bucket.get_json::<Pointer>(&slot.pointer_entry(planned.seq)).await {
        Err(StoreError::Corrupt { .. }) => None,
        entry => entry?,
    };
    if entry.is_none_or(|entry| entry.value != *planned) {
        return Ok(None);
    }
    match inspection.found.pointer() {
        Some(current) if has_taken_effect(planned, current) => Ok(Some(planned.clone())),
        Some(current) if current.seq >= planned.seq => Err(RepairError::ChangedConcurrently),
        // `latest` has not been written yet.
        _ => {
            let inspection = Inspection { next: Some(planned.clone()), ..inspection.clone() };
            rebuild(bucket, slot, &inspection).await.map(Some)
        }
    }
}

/// Whether `current` is the pointer that the rebuild wrote, or a newer one from a host or the platform.
pub(super) fn has_taken_effect(written: &Pointer, current: &Pointer) -> bool {
    current == written || (current.seq > written.seq && current.fence_epoch >= written.fence_epoch)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{inspect_target, slot, slot_with_backup};
    use super::super::{PointerState, RebuildTarget};
    use super::*;
    use crate::pointer::Fence;
    use crate::pointer_io;
    use svc_machine::epoch::Epoch;
    use svc_machine::id::MachineId;

    /// Fences the slot for the next machine, as the platform does during recovery.
    async fn fence_next_machine(bucket: &Bucket) {
        let next = Fence::unsigned(Epoch(2), MachineId(uuid::Uuid::from_u128(2)));
        pointer_io::fence(bucket, &slot(), &next).await.unwrap();
    }

    async fn resume_inspected(bucket: &Bucket, planned: &Pointer) -> Option<Pointer> {
        let inspection = inspect_target(bucket, RebuildTarget::Nothing).await;
        resume(bucket, &slot(), &inspection, planned).await.unwrap()
    }

    #[tokio::test]
    async fn resume_writes_latest_after_its_log_entry() {
        let (bucket, _) = slot_with_backup().await;
        bucket.put(&slot().pointer(), "{torn").await.unwrap();
        let inspection = inspect_target(&bucket, RebuildTarget::Nothing).await;
        assert!(matches!(inspection.found, PointerState::Unreadable { .. }), "{inspection:?}");
        let planned = inspection.next.unwrap();
        assert_eq!(resume_inspected(&bucket, &planned).await, None, "resumed without a log entry");
        bucket.put_json(&slot().pointer_entry(planned.seq), &planned).await.unwrap();
        assert_eq!(resume_inspected(&bucket, &planned).await.as_ref(), Some(&planned));
        assert_eq!(pointer_io::read(&bucket, &slot()).await.unwrap().unwrap().value, planned);
    }

    #[tokio::test]
    async fn resume_keeps_a_pointer_that_was_moved_since() {
        let (bucket, _) = slot_with_backup().await;
        let inspection = inspect_target(&bucket, RebuildTarget::Nothing).await;
        let planned = rebuild(&bucket, &slot(), &inspection).await.unwrap();
        fence_next_machine(&bucket).await;
        assert_eq!(resume_inspected(&bucket, &planned).await.as_ref(), Some(&planned));
        let current = pointer_io::read(&bucket, &slot()).await.unwrap().unwrap().value;
        assert_eq!((current.fence_epoch, current.seq), (Epoch(2), planned.seq + 1));
    }

    #[tokio::test]
    async fn resume_returns_none_if_another_writer_claimed_the_seq() {
        let (bucket, _) = slot_with_backup().await;
        let planned = inspect_target(&bucket, RebuildTarget::Nothing).await.next.unwrap();
        fence_next_machine(&bucket).await;
        let current = pointer_io::read(&bucket, &slot()).await.unwrap().unwrap().value;
        assert_eq!(current.seq, planned.seq);
        assert_eq!(resume_inspected(&bucket, &planned).await, None);
    }
}
