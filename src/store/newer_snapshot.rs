//! Finds a machine's complete snapshot that is newer than the pointer's. Such a snapshot exists if the host stored it
//! while the platform was unreachable, or holds it back because the database has shrunk.

use std::collections::VecDeque;

use futures_util::StreamExt;

use super::bucket::{Bucket, StoreError};
use super::key::{self, SlotPrefix};
use super::pointer::SnapshotRef;
use super::snapshot::{self, Sidecar, SnapshotUnusable};
use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;

/// Maximum number of objects to list after the pointer's snapshot: enough for more than a year of hourly snapshots with
/// two objects each. Objects beyond this limit are not considered.
const MAX_LISTED_OBJECTS: usize = 20_000;
/// Maximum number of sidecars to read, beginning with the newest.
const MAX_SIDECARS: usize = 8;

/// Finds the newest complete snapshot of this machine and epoch that is newer than `current`, the pointer's snapshot;
/// `None` if there is none within the limits, or if `current` has an invalid key. Snapshots of other machines are
/// ignored, because a replaced machine's credentials can still add some. Lists only the keys after the pointer's
/// snapshot: usually just its sidecar.
///
/// # Errors
/// [`StoreError`] if the store cannot be read, so that it is unknown whether there is such a snapshot.
pub async fn find(
    bucket: &Bucket,
    slot: &SlotPrefix,
    (machine, epoch): (MachineId, Epoch),
    current: &SnapshotRef,
) -> Result<Option<Sidecar>, StoreError> {
    let Some(offset) = slot.snapshot(&current.key) else { return Ok(None) };
    let prefix = slot.snapshots();
    let mut listing = bucket.raw().list_with_offset(Some(&prefix), &offset).take(MAX_LISTED_OBJECTS);
    let mut newer = VecDeque::with_capacity(MAX_SIDECARS + 1);
    while let Some(object) = listing.next().await {
        let object = object.map_err(|error| StoreError::classify(&prefix, error))?;
        let Some(name) = object.location.filename().filter(|name| name.ends_with(".dump")) else { continue };
        let key = format!("system/db/snapshots/{name}");
        if key::epoch_of(&key) == Some(epoch) {
            newer.push_front(key);
            newer.truncate(MAX_SIDECARS);
        }
    }
    for key in newer {
        match snapshot::load(bucket, slot, &key).await {
            Ok(sidecar) if sidecar.machine_id == machine => return Ok(Some(sidecar)),
            Ok(_) | Err(SnapshotUnusable::Absent | SnapshotUnusable::Damaged { .. }) => {}
            Err(SnapshotUnusable::Store(error)) => return Err(error),
        }
    }
    Ok(None)
}
