//! The newest whole snapshot of a machine that the pointer does not name: the host stored it while the platform was
//! unreachable, or holds it back.

use std::collections::VecDeque;

use futures_util::StreamExt;

use super::bucket::{Bucket, StoreError};
use super::key::{self, SlotPrefix};
use super::pointer::SnapshotRef;
use super::snapshot::{self, SideRecord, Unusable};
use crate::machine::epoch::Epoch;
use crate::machine::id::MachineId;

/// Names after the latest snapshot's that are listed, and of those the newest whose records are read.
const MAX_NAMES: usize = 2000;
const MAX_TRIED: usize = 8;

/// The newest whole snapshot of this machine and epoch after the one that the pointer names. Those of other machines do not
/// count, since what was copied from a replaced one can still add some. Keys after the pointer's are listed, of which there are
/// usually none.
///
/// # Errors
/// [`StoreError`]: whether there is one is not known.
pub async fn find(
    bucket: &Bucket,
    slot: &SlotPrefix,
    (machine, epoch): (MachineId, Epoch),
    named: &SnapshotRef,
) -> Result<Option<SideRecord>, StoreError> {
    let Some(after) = slot.snapshot(&named.key) else { return Ok(None) };
    let prefix = slot.snapshots();
    let mut listing = bucket.raw().list_with_offset(Some(&prefix), &after).take(MAX_NAMES);
    let mut newer = VecDeque::with_capacity(MAX_TRIED + 1);
    while let Some(object) = listing.next().await {
        let object = object.map_err(|error| StoreError::of(&prefix, error))?;
        let Some(name) = object.location.filename().filter(|name| name.ends_with(".dump")) else { continue };
        let key = format!("system/db/snapshots/{name}");
        if key::epoch_of(&key) == Some(epoch) {
            newer.push_front(key);
            newer.truncate(MAX_TRIED);
        }
    }
    for key in newer {
        match snapshot::by_key(bucket, slot, &key).await {
            Ok(side) if side.machine_id == machine => return Ok(Some(side)),
            Ok(_) | Err(Unusable::Absent | Unusable::Damaged { .. }) => {}
            Err(Unusable::Store(error)) => return Err(error),
        }
    }
    Ok(None)
}
