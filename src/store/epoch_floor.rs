//! The epoch floor: a slot's highest epoch in the store. The next machine's epoch must exceed it, even if the
//! platform's database was restored from an older backup.

use std::time::Duration;

use super::bucket::{Bucket, StoreError};
use super::key::{self, SlotPrefix};
use super::meta::VpsMeta;
use super::pointer::Pointer;
use super::{pointer_io, snapshots};
use svc_machine::epoch::Epoch;

/// Overall timeout for the requests, shorter than operators' client timeout. Listing 10,000 snapshots takes about
/// twenty pages.
const FLOOR_TIMEOUT: Duration = Duration::from_secs(10);

/// Reads the highest of four epochs: the pointer's fence, its snapshot's epoch, the epoch in `system/vps-meta.json`,
/// and the highest epoch in a snapshot key. Hosts can write all four, so a value far above `recorded`, the slot's
/// highest epoch in the platform's database, is implausible. Implausible epochs in metadata and keys are ignored. So is
/// an implausible fence, which the platform's own fence will replace.
///
/// # Errors
/// [`StoreError`]; `Corrupt` if the pointer, and so its fence, is unreadable, or if its snapshot's epoch is
/// implausible; `Unavailable` on timeout. Unreadable metadata is ignored, because a machine's fence is written before
/// its metadata.
pub async fn read_floor(bucket: &Bucket, slot: &SlotPrefix, recorded: Epoch) -> Result<Epoch, StoreError> {
    let bound = recorded.max_plausible();
    let read = async {
        let pointer = pointer_io::read(bucket, slot).await?;
        let in_pointer =
            pointer.map_or(Ok(Epoch::NONE), |read| highest_in_pointer(slot, &read.value, recorded))?;
        Ok(in_pointer.max(read_highest_outside_pointer(bucket, slot, bound).await?))
    };
    bucket.run_with_timeout(&slot.pointer(), FLOOR_TIMEOUT, read).await
}

async fn read_highest_outside_pointer(
    bucket: &Bucket,
    slot: &SlotPrefix,
    bound: Epoch,
) -> Result<Epoch, StoreError> {
    let keys = snapshots::list_keys(bucket, slot).await?;
    Ok(highest_in_keys(&keys, bound).max(read_metadata_epoch(bucket, slot, bound).await?))
}

pub(super) fn highest_in_keys(keys: &[String], bound: Epoch) -> Epoch {
    keys.iter()
        .filter_map(|key| key::epoch_of(key))
        .filter(|epoch| *epoch <= bound)
        .max()
        .unwrap_or(Epoch::NONE)
}

pub(super) async fn read_metadata_epoch(
    bucket: &Bucket,
    slot: &SlotPrefix,
    bound: Epoch,
) -> Result<Epoch, StoreError> {
    let key = slot.vps_meta();
    match bucket.get_json::<VpsMeta>(&key).await {
        Ok(read) => {
            Ok(read.map(|read| read.value.epoch).filter(|epoch| *epoch <= bound).unwrap_or(Epoch::NONE))
        }
        Err(StoreError::Corrupt { key, reason }) => {
            tracing::warn!(key, reason, "the machine's metadata is unreadable; its epoch is ignored");
            Ok(Epoch::NONE)
        }
        Err(error) => Err(error),
    }
}

/// Returns the higher of the pointer's fence, if plausible, and its snapshot's epoch.
fn highest_in_pointer(slot: &SlotPrefix, pointer: &Pointer, recorded: Epoch) -> Result<Epoch, StoreError> {
    let Pointer { fence_epoch: fence, snapshot, .. } = pointer;
    let snapshot_epoch = snapshot.as_ref().map_or(Epoch::NONE, |snapshot| snapshot.epoch);
    if snapshot_epoch > recorded.max_plausible() {
        let reason = format!(
            "its snapshot's epoch {snapshot_epoch} is far above {recorded}, the highest epoch known to the platform"
        );
        return Err(StoreError::Corrupt { key: slot.pointer().to_string(), reason });
    }
    if *fence > recorded.max_plausible() {
        tracing::warn!(key = %slot.pointer(), %fence, %recorded, "the fence is far above any epoch known to the platform; it is ignored");
        return Ok(snapshot_epoch);
    }
    Ok(snapshot_epoch.max(*fence))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;

    use super::*;
    use crate::meta;
    use crate::pointer::Fence;
    use svc_machine::id::MachineId;
    use svc_machine::name::Slot;

    fn slot() -> SlotPrefix {
        SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary())
    }

    fn bucket() -> Bucket {
        Bucket::new(Arc::new(InMemory::new()))
    }

    async fn put_sidecar(bucket: &Bucket, name: &str) {
        bucket.put(&slot().snapshots().join(name), &b"{}"[..]).await.unwrap();
    }

    fn vps_meta(epoch: u32) -> VpsMeta {
        VpsMeta {
            version: meta::FORMAT_VERSION,
            idp_user_id: "user_1".parse().unwrap(),
            slot: Slot::primary(),
            machine_id: MachineId::new(),
            epoch: Epoch(epoch),
            provider_server_id: None,
            image_version: "2026.11.1".parse().unwrap(),
            status: "running".to_owned(),
            public_ipv4: None,
            heartbeat_at: svc_base::clock::now_ms(),
            last_backup: None,
        }
    }

    #[tokio::test]
    async fn floor_of_an_empty_slot_is_none() {
        assert_eq!(read_floor(&bucket(), &slot(), Epoch::NONE).await.unwrap(), Epoch::NONE);
    }

    #[tokio::test]
    async fn floor_is_the_highest_of_fence_metadata_and_keys() {
        let name = |n: u32| format!("2026-01-02T03-04-05.678Z-{n}.dump.json");
        for (fence, meta, key) in [(9, 3, 4), (3, 9, 4), (3, 4, 9)] {
            let bucket = bucket();
            pointer_io::fence(&bucket, &slot(), &Fence::unsigned(Epoch(fence), MachineId::new()))
                .await
                .unwrap();
            bucket.put_json(&slot().vps_meta(), &vps_meta(meta)).await.unwrap();
            put_sidecar(&bucket, &name(key)).await;
            put_sidecar(&bucket, &name(1)).await;
            assert_eq!(
                read_floor(&bucket, &slot(), Epoch::NONE).await.unwrap(),
                Epoch(9),
                "{fence} {meta} {key}"
            );
        }
    }

    #[tokio::test]
    async fn floor_ignores_implausible_and_unreadable_epochs() {
        let bucket = bucket();
        put_sidecar(&bucket, "2026-01-02T03-04-05.678Z-4294967295.dump.json").await;
        put_sidecar(&bucket, "odd.dump.json").await;
        bucket.put(&slot().vps_meta(), &b"torn"[..]).await.unwrap();
        put_sidecar(&bucket, "2026-01-02T03-04-05.678Z-2.dump.json").await;
        assert_eq!(read_floor(&bucket, &slot(), Epoch::NONE).await.unwrap(), Epoch(2));
    }

    #[tokio::test]
    async fn floor_fails_if_the_pointer_is_unreadable() {
        let bucket = bucket();
        bucket.put(&slot().pointer(), &b"torn"[..]).await.unwrap();
        assert!(matches!(read_floor(&bucket, &slot(), Epoch::NONE).await, Err(StoreError::Corrupt { .. })));
    }
}
