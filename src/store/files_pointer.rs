//! `files/latest`: the pointer to the latest snapshot of the owner's files. It uses the same protocol as the database's
//! pointer, but corrupt log entries are skipped, and a corrupt `latest` is replaced with the newest valid entry.
//!
//! Its fence needs no signature: the platform raises it only after the fence of the database's pointer, which is signed
//! and identifies the slot's current machine.

use futures_util::{StreamExt, TryStreamExt, stream};
use jiff::Timestamp;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use serde::{Deserialize, Serialize};

use svc_base::clock;
use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;

use super::bucket::{Bucket, StoreError};
use super::key::SlotPrefix;
use super::pointer::{self, Fence, PointedSnapshot};
use super::pointer_io::{self, PointerError, PointerRead};

/// A reference to a snapshot of the owner's files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FilesSnapshotRef {
    /// The snapshot's id in the repository: 64 hexadecimal digits.
    pub id: String,
    pub machine_id: MachineId,
    pub epoch: Epoch,
    /// Everything written before this time is in the snapshot.
    #[serde(with = "clock::wire")]
    pub taken_at: Timestamp,
}

impl PointedSnapshot for FilesSnapshotRef {
    const REPAIRS_CORRUPT_LATEST: bool = true;
    const HAS_TRIMMED_LOG: bool = true;

    fn key(&self) -> &str {
        &self.id
    }

    fn machine_id(&self) -> MachineId {
        self.machine_id
    }

    fn epoch(&self) -> Epoch {
        self.epoch
    }

    fn taken_at(&self) -> Timestamp {
        self.taken_at
    }
}

/// Reads the pointer; `None` if there is neither `latest` nor a log entry. If `latest` is corrupt, the newest log entry
/// is returned, and the next write replaces `latest`. Corrupt log entries are skipped.
///
/// # Errors
/// [`StoreError`]; `Corrupt` if the newest thousand log entries are corrupt, or if `latest` is corrupt and there is no
/// valid entry. An entry is corrupt if it is not valid JSON, has an unknown format, has a `seq` or fence above the
/// maximum, or has a `seq` other than the one in its name.
pub async fn read(
    bucket: &Bucket,
    slot: &SlotPrefix,
) -> Result<Option<PointerRead<FilesSnapshotRef>>, StoreError> {
    pointer_io::read_at(bucket, &slot.files_pointer_paths()).await
}

/// Moves the pointer to a snapshot, on behalf of the machine that took it.
///
/// # Errors
/// [`PointerError`]; `Fenced` if that machine has been replaced, `TooManyConflicts` if other writers interfered in
/// every attempt.
pub async fn advance(
    bucket: &Bucket,
    slot: &SlotPrefix,
    snapshot: &FilesSnapshotRef,
) -> Result<(), PointerError> {
    pointer_io::write(bucket, &slot.files_pointer_paths(), |current| pointer::advance(current, snapshot))
        .await
}

/// Replaces the fence with one for the slot's current machine, even if the current fence has a higher epoch. Only the
/// platform calls this, after it has fenced the database's pointer for the same machine.
///
/// # Errors
/// [`PointerError`], but not `Fenced`.
pub async fn set_fence(
    bucket: &Bucket,
    slot: &SlotPrefix,
    epoch: Epoch,
    machine: MachineId,
) -> Result<(), PointerError> {
    let fence = Fence::unsigned(epoch, machine);
    pointer_io::write(bucket, &slot.files_pointer_paths(), |current| {
        Ok(pointer::set_fence::<FilesSnapshotRef>(current, &fence))
    })
    .await
}

/// Like [`set_fence`], but only if the current fence is `expected`.
///
/// # Errors
/// [`PointerError`], but not `Fenced`.
pub async fn replace_fence(
    bucket: &Bucket,
    slot: &SlotPrefix,
    expected: (Epoch, Option<MachineId>),
    (epoch, machine): (Epoch, MachineId),
) -> Result<(), PointerError> {
    let fence = Fence::unsigned(epoch, machine);
    pointer_io::write(bucket, &slot.files_pointer_paths(), |current| {
        let is_expected =
            current.is_some_and(|current| (current.fence_epoch, current.fence_machine_id) == expected);
        Ok(if is_expected { pointer::set_fence::<FilesSnapshotRef>(current, &fence) } else { None })
    })
    .await
}

/// Maximum number of log entries that one call to [`trim_log`] deletes.
const MAX_TRIMMED_ENTRIES: usize = 20_000;
/// Maximum number of log entries that are deleted concurrently.
const MAX_CONCURRENT_DELETIONS: usize = 16;

/// Deletes at most `MAX_TRIMMED_ENTRIES` log entries below the pointer's `seq`, but not the last `retained` of them.
/// Only the platform calls this, because hosts may not delete objects. Returns the number of deleted entries.
///
/// # Errors
/// [`StoreError`] if a request fails. Some entries may already have been deleted; no reader needs them.
pub async fn trim_log(bucket: &Bucket, slot: &SlotPrefix, retained: u64) -> Result<u64, StoreError> {
    let paths = slot.files_pointer_paths();
    // Until `latest` contains the newest entry, an older one may be the only valid copy of the pointer.
    let Some(pointer) = read(bucket, slot).await?.filter(PointerRead::is_published) else { return Ok(0) };
    let Some(first_retained) = pointer.value.seq.checked_sub(retained) else { return Ok(0) };
    let mut listing = bucket.raw().list(Some(&paths.log));
    let mut expired: Vec<Path> = Vec::new();
    while expired.len() < MAX_TRIMMED_ENTRIES {
        let next = listing.try_next().await.map_err(|error| StoreError::classify(&paths.log, error))?;
        let Some(meta) = next else { break };
        if paths.entry_seq(&meta.location).is_some_and(|seq| seq < first_retained) {
            expired.push(meta.location);
        }
    }
    drop(listing);
    let count = expired.len() as u64;
    let delete = |path: Path| {
        let bucket = bucket.clone();
        async move {
            match bucket.raw().delete(&path).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(StoreError::classify(&path, error)),
            }
        }
    };
    let mut deletions = stream::iter(expired).map(delete).buffer_unordered(MAX_CONCURRENT_DELETIONS);
    while let Some(deleted) = deletions.next().await {
        deleted?;
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;

    use super::*;
    use crate::bucket::MAX_JSON_BYTES;
    use crate::pointer::{MAX_SEQ, MAX_SEQ_AHEAD, Pointer};
    use svc_machine::name::Slot;

    fn machine(n: u128) -> MachineId {
        MachineId(uuid::Uuid::from_u128(n))
    }

    fn snapshot(n: u8, epoch: u32) -> FilesSnapshotRef {
        FilesSnapshotRef {
            id: hex::encode([n; 32]),
            machine_id: machine(epoch.into()),
            epoch: Epoch(epoch),
            taken_at: Timestamp::UNIX_EPOCH,
        }
    }

    #[tokio::test]
    async fn advance_refuses_replaced_machine() {
        let bucket = Bucket::new(Arc::new(InMemory::new()));
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        assert!(read(&bucket, &slot).await.unwrap().is_none());
        advance(&bucket, &slot, &snapshot(1, 1)).await.unwrap();
        set_fence(&bucket, &slot, Epoch(2), machine(2)).await.unwrap();
        let error = advance(&bucket, &slot, &snapshot(2, 1)).await.unwrap_err();
        assert!(matches!(error, PointerError::Fenced(_)), "{error}");
        let pointer = read(&bucket, &slot).await.unwrap().unwrap().value;
        assert_eq!(
            pointer.snapshot,
            Some(snapshot(1, 1)),
            "the pointer no longer names the predecessor's snapshot"
        );
        advance(&bucket, &slot, &snapshot(3, 2)).await.unwrap();
        let pointer = read(&bucket, &slot).await.unwrap().unwrap().value;
        assert_eq!((pointer.snapshot, pointer.seq), (Some(snapshot(3, 2)), 3));
        let database = pointer_io::read(&bucket, &slot).await.unwrap();
        assert!(database.is_none(), "the database's pointer was written");
    }

    #[tokio::test]
    async fn trim_log_keeps_the_newest_entries_and_the_pointer() {
        let bucket = Bucket::new(Arc::new(InMemory::new()));
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        assert_eq!(trim_log(&bucket, &slot, 2).await.unwrap(), 0);
        for number in 1..=6 {
            advance(&bucket, &slot, &snapshot(number, 1)).await.unwrap();
        }
        let before = read(&bucket, &slot).await.unwrap().unwrap().value;
        let lowest_seq = async || {
            let paths = slot.files_pointer_paths();
            let objects: Vec<_> = bucket.raw().list(Some(&paths.log)).try_collect().await.unwrap();
            objects.iter().filter_map(|meta| paths.entry_seq(&meta.location)).min()
        };
        assert_eq!((before.seq, lowest_seq().await), (6, Some(1)));
        assert_eq!(trim_log(&bucket, &slot, 2).await.unwrap(), 3);
        assert_eq!(lowest_seq().await, Some(4));
        assert_eq!(read(&bucket, &slot).await.unwrap().unwrap().value, before);
        advance(&bucket, &slot, &snapshot(7, 1)).await.unwrap();
        assert_eq!(read(&bucket, &slot).await.unwrap().unwrap().value.seq, 7);
        assert_eq!(trim_log(&bucket, &slot, 100).await.unwrap(), 0);
        // Any holder of the slot's store credentials can create such an entry, and overwrite `latest` later.
        bucket.put(&slot.files_pointer_paths().entry(97), "garbage").await.unwrap();
        assert_eq!(trim_log(&bucket, &slot, 2).await.unwrap(), 0);
        advance(&bucket, &slot, &snapshot(8, 1)).await.unwrap();
        assert_eq!(read(&bucket, &slot).await.unwrap().unwrap().value.seq, 98);
        assert_eq!(trim_log(&bucket, &slot, 2).await.unwrap(), 4);
    }

    #[tokio::test]
    async fn set_fence_replaces_a_fence_that_a_host_raised() {
        let bucket = Bucket::new(Arc::new(InMemory::new()));
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        advance(&bucket, &slot, &snapshot(1, 9000)).await.unwrap();
        set_fence(&bucket, &slot, Epoch(3), machine(3)).await.unwrap();
        advance(&bucket, &slot, &snapshot(2, 3)).await.unwrap();
        set_fence(&bucket, &slot, Epoch(3), machine(3)).await.unwrap();
        let pointer = read(&bucket, &slot).await.unwrap().unwrap().value;
        assert_eq!((pointer.fence_epoch, pointer.seq), (Epoch(3), 3), "the same fence was written again");
        // As if an operation had replaced the machine since the fence was read.
        let raised = (Epoch(9000), None);
        replace_fence(&bucket, &slot, raised, (Epoch(2), machine(2))).await.unwrap();
        assert_eq!(read(&bucket, &slot).await.unwrap().unwrap().value, pointer);
        let found = (pointer.fence_epoch, pointer.fence_machine_id);
        replace_fence(&bucket, &slot, found, (Epoch(2), machine(2))).await.unwrap();
        assert_eq!(read(&bucket, &slot).await.unwrap().unwrap().value.fence_epoch, Epoch(2));
    }

    #[tokio::test]
    async fn write_repairs_corrupt_latest_from_the_log() {
        let invalid = format!(r#"{{"version":1,"fenceEpoch":1,"seq":{MAX_SEQ},"snapshot":null}}"#);
        for junk in ["garbage{".to_owned(), String::new(), " ".repeat(MAX_JSON_BYTES + 1), invalid] {
            let bucket = Bucket::new(Arc::new(InMemory::new()));
            let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
            let latest = slot.files_pointer_paths().latest;
            let damage = async || bucket.put(&latest, junk.clone()).await.unwrap();
            let stored =
                async || bucket.get_json::<Pointer<FilesSnapshotRef>>(&latest).await.unwrap().unwrap().value;
            advance(&bucket, &slot, &snapshot(1, 1)).await.unwrap();
            set_fence(&bucket, &slot, Epoch(2), machine(2)).await.unwrap();
            let before = stored().await;
            damage().await;
            assert_eq!(read(&bucket, &slot).await.unwrap().unwrap().value, before);
            let error = advance(&bucket, &slot, &snapshot(2, 1)).await.unwrap_err();
            assert!(matches!(error, PointerError::Fenced(_)), "the fence did not apply: {error}");
            damage().await;
            set_fence(&bucket, &slot, Epoch(2), machine(2)).await.unwrap();
            assert_eq!(stored().await, before, "`latest` was not repaired from the log");
            damage().await;
            advance(&bucket, &slot, &snapshot(3, 2)).await.unwrap();
            let written = stored().await;
            assert_eq!((written.seq, written.snapshot), (3, Some(snapshot(3, 2))));
        }
    }

    #[tokio::test]
    async fn corrupt_log_entries_are_skipped() {
        for (count, is_latest_corrupt) in
            [(1, false), (300, false), (1, true), (99, true), (500_000, false), (500_000, true)]
        {
            // One distant entry instead of many.
            let first = if count > 1000 { count } else { 1 };
            let bucket = Bucket::new(Arc::new(InMemory::new()));
            let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
            let paths = slot.files_pointer_paths();
            advance(&bucket, &slot, &snapshot(1, 1)).await.unwrap();
            set_fence(&bucket, &slot, Epoch(2), machine(2)).await.unwrap();
            let before = read(&bucket, &slot).await.unwrap().unwrap().value;
            for seq in before.seq + first..=before.seq + count {
                bucket.put(&paths.entry(seq), "garbage{").await.unwrap();
            }
            if is_latest_corrupt {
                bucket.put(&paths.latest, "garbage{").await.unwrap();
            }
            let found = read(&bucket, &slot).await.unwrap().unwrap().value;
            assert_eq!((&found.snapshot, found.fence_epoch), (&before.snapshot, Epoch(2)), "{count}");
            let error = advance(&bucket, &slot, &snapshot(2, 1)).await.unwrap_err();
            assert!(matches!(error, PointerError::Fenced(_)), "{count}: {error}");
            advance(&bucket, &slot, &snapshot(3, 2)).await.unwrap();
            let written = read(&bucket, &slot).await.unwrap().unwrap().value;
            let expected = (before.seq + count + 1, Some(snapshot(3, 2)));
            assert_eq!((written.seq, written.snapshot), expected, "{count}");
        }
    }

    /// If this `latest` were accepted, the claim of a `seq` that no reader accepts would count as a successful write.
    #[tokio::test]
    async fn implausible_latest_is_replaced() {
        let bucket = Bucket::new(Arc::new(InMemory::new()));
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        let paths = slot.files_pointer_paths();
        advance(&bucket, &slot, &snapshot(1, 1)).await.unwrap();
        advance(&bucket, &slot, &snapshot(2, 1)).await.unwrap();
        let before = read(&bucket, &slot).await.unwrap().unwrap().value;
        let forged = Pointer { seq: MAX_SEQ - 1, snapshot: Some(snapshot(1, 1)), ..before.clone() };
        bucket.put_json(&paths.latest, &forged).await.unwrap();
        assert_eq!(read(&bucket, &slot).await.unwrap().unwrap().value, before);
        advance(&bucket, &slot, &snapshot(3, 1)).await.unwrap();
        let stored =
            bucket.get_json::<Pointer<FilesSnapshotRef>>(&paths.latest).await.unwrap().unwrap().value;
        assert_eq!((stored.seq, stored.snapshot), (3, Some(snapshot(3, 1))));
        // With a log entry, `latest` is plausible, but nothing can be written after it.
        bucket.put_json(&paths.latest, &forged).await.unwrap();
        bucket.put_json(&paths.entry(forged.seq), &forged).await.unwrap();
        let error = advance(&bucket, &slot, &snapshot(4, 1)).await.unwrap_err();
        assert!(matches!(error, PointerError::Store(StoreError::Corrupt { .. })), "{error}");
    }

    #[tokio::test]
    async fn valid_entry_below_corrupt_ones_is_found() {
        let bucket = Bucket::new(Arc::new(InMemory::new()));
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        let paths = slot.files_pointer_paths();
        advance(&bucket, &slot, &snapshot(1, 1)).await.unwrap();
        let first = bucket.get_json::<Pointer<FilesSnapshotRef>>(&paths.latest).await.unwrap().unwrap().value;
        for number in 2..=20 {
            advance(&bucket, &slot, &snapshot(number, 1)).await.unwrap();
        }
        // As if `latest` had been restored from an old version.
        bucket.put_json(&paths.latest, &first).await.unwrap();
        for seq in [21, 22, 40] {
            bucket.put(&paths.entry(seq), "garbage{").await.unwrap();
        }
        let found = read(&bucket, &slot).await.unwrap().unwrap().value;
        assert_eq!((found.seq, found.snapshot), (40, Some(snapshot(20, 1))));
        advance(&bucket, &slot, &snapshot(21, 1)).await.unwrap();
        let found = read(&bucket, &slot).await.unwrap().unwrap().value;
        assert_eq!((found.seq, found.snapshot), (41, Some(snapshot(21, 1))));
    }

    #[tokio::test]
    async fn read_refuses_corrupt_latest_without_a_log() {
        let bucket = Bucket::new(Arc::new(InMemory::new()));
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        bucket.put(&slot.files_pointer_paths().latest, "garbage{").await.unwrap();
        let error = read(&bucket, &slot).await.unwrap_err();
        assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
        let error = advance(&bucket, &slot, &snapshot(1, 1)).await.unwrap_err();
        assert!(matches!(error, PointerError::Store(StoreError::Corrupt { .. })), "{error}");
    }

    #[tokio::test]
    async fn read_finds_the_newest_entry_of_a_trimmed_log() {
        let bucket = Bucket::new(Arc::new(InMemory::new()));
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        let paths = slot.files_pointer_paths();
        let latest = paths.latest.clone();
        advance(&bucket, &slot, &snapshot(1, 1)).await.unwrap();
        let first = read(&bucket, &slot).await.unwrap().unwrap().value;
        let later = Pointer { seq: 2 * MAX_SEQ_AHEAD, ..first };
        bucket.put_json(&paths.entry(later.seq), &later).await.unwrap();
        bucket.put_json(&latest, &later).await.unwrap();
        for number in 2..=4 {
            advance(&bucket, &slot, &snapshot(number, 1)).await.unwrap();
        }
        trim_log(&bucket, &slot, 1).await.unwrap();
        let newest = read(&bucket, &slot).await.unwrap().unwrap().value;
        assert_eq!(newest.seq, 2 * MAX_SEQ_AHEAD + 3);
        bucket.put(&latest, "garbage{").await.unwrap();
        assert_eq!(read(&bucket, &slot).await.unwrap().unwrap().value, newest);
        bucket.raw().delete(&latest).await.unwrap();
        assert_eq!(read(&bucket, &slot).await.unwrap().unwrap().value, newest);
    }
}
