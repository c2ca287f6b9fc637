//! The way back from a pointer that was lost, is unreadable, or names what is not there: another one is written from the
//! side records of snapshots.
//!
//! Invariants: the fence is never lowered, except one that is not believed, and `seq` never goes back; what is written names a snapshot whose object and
//! side record are there and agree; a concurrent write is never overwritten.

use bytes::Bytes;
use jiff::Timestamp;
use object_store::ObjectStoreExt;

use super::bucket::{Bucket, Condition, StoreError};
use super::key::{self, SlotPrefix, SnapshotKey};
use super::pointer::{FORMAT, Fence, MAX_SEQ_AHEAD, Pointer, SnapshotRef};
use super::snapshot::{self, SideRecord, Unusable};
use super::{epochs, pointer_io, pointer_log, snapshots};
use crate::clock;
use crate::machine::epoch::Epoch;

/// How much of an unreadable pointer is kept.
const MAX_KEPT_BYTES: u64 = 8 << 10;
/// How many snapshots are tried before a whole one is found.
const MAX_TRIED: usize = 64;

/// The slot's current machine, as the platform knows it, and the signed fence that was written before it was created.
pub type Holder = Fence;

/// What the platform's database says of a slot.
#[derive(Debug, Clone)]
pub struct OnRecord {
    /// Of any machine that it ever had.
    pub highest: Epoch,
    pub holder: Option<Holder>,
}

/// What is there instead of a pointer that can be used.
#[derive(Debug, Clone)]
pub enum Found {
    /// It names a whole snapshot, or there is none to be named.
    Sound(Option<Pointer>),
    /// It can be read, and names no snapshot that can be restored.
    Unsound {
        pointer: Pointer,
        why: String,
    },
    Absent {
        why: String,
    },
    Unreadable {
        why: String,
        size_bytes: u64,
        start: Bytes,
    },
}

impl Found {
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
            Self::Unsound { why, .. } | Self::Absent { why } | Self::Unreadable { why, .. } => Some(why),
        }
    }

    pub fn is_sound(&self) -> bool {
        matches!(self, Self::Sound(_))
    }
}

/// What a rebuild is to name.
#[derive(Debug, Clone, Copy)]
pub enum Wanted<'a> {
    /// The newest whole snapshot of the highest epoch. Where there is no snapshot at all, none.
    Newest,
    Snapshot(&'a SnapshotKey),
    /// None, although snapshots may be there: an operator's decision, made now.
    Nothing,
}

/// The pointer as it is, and as a rebuild would write it.
#[derive(Debug, Clone)]
pub struct Inspection {
    pub found: Found,
    /// Snapshots with a side record.
    pub snapshots: usize,
    /// `None` where no snapshot is whole.
    pub next: Option<Pointer>,
    condition: Condition,
}

/// Why the pointer was not rebuilt.
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    #[error("{key} is not usable: {why}")]
    Unusable { key: String, why: String },
    #[error("the pointer was changed by another writer meanwhile")]
    Changed,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Reads the pointer, and finds what a rebuild would name.
///
/// # Errors
/// [`RepairError`]; `Unusable` only of a snapshot that is asked for.
pub async fn inspect(
    bucket: &Bucket,
    slot: &SlotPrefix,
    record: OnRecord,
    wanted: Wanted<'_>,
) -> Result<Inspection, RepairError> {
    let OnRecord { highest, holder } = &record;
    let bound = highest.believable();
    let (found, condition) = found(bucket, slot, bound).await?;
    let mut keys = snapshots::keys(bucket, slot).await?;
    // A host can write any key: one of an epoch that no machine ever had is none of ours.
    keys.retain(|key| key::epoch_of(key).is_none_or(|epoch| epoch <= bound));
    let candidate = match wanted {
        Wanted::Snapshot(key) => Some(chosen(bucket, slot, key).await?),
        Wanted::Newest => newest_whole(bucket, slot, &keys).await?,
        Wanted::Nothing => None,
    };
    let emptied_at = matches!(wanted, Wanted::Nothing).then(clock::now_ms);
    let next = if candidate.is_some() || emptied_at.is_some() || keys.is_empty() {
        let top = top_entry(bucket, slot).await?;
        let meta = epochs::of_meta(bucket, slot, bound).await?;
        let known = Known { found: &found, keys: &keys, top: &top, meta, holder: holder.as_ref(), bound };
        known.next(candidate.map(|side| side.named()), emptied_at)
    } else {
        None
    };
    Ok(Inspection { found, snapshots: keys.len(), next, condition })
}

/// Writes the pointer that the inspection found: its entry of the log, then `latest` in the version that was inspected.
///
/// # Errors
/// [`RepairError`]; `Changed` when the pointer is not as it was inspected any more.
pub async fn rebuild(
    bucket: &Bucket,
    slot: &SlotPrefix,
    inspection: &Inspection,
) -> Result<Pointer, RepairError> {
    let none = || RepairError::Unusable {
        key: slot.snapshots().to_string(),
        why: "none of its snapshots is whole".to_owned(),
    };
    let next = inspection.next.clone().ok_or_else(none)?;
    let entry = slot.pointer_entry(next.seq);
    match bucket.put_json_if(&entry, &next, Condition::Absent).await {
        Ok(()) => {}
        // The client repeats a write whose answer was lost, and is then refused by its own.
        Err(StoreError::Precondition { .. }) => {
            let written = bucket.get_json::<Pointer>(&entry).await;
            if !matches!(written, Ok(Some(written)) if written.value == next) {
                return Err(RepairError::Changed);
            }
        }
        Err(error) => return Err(error.into()),
    }
    match bucket.put_json_if(&slot.pointer(), &next, inspection.condition.clone()).await {
        // A writer that found the entry has put it into `latest`, or another thing is in its way: what holds now tells.
        Ok(()) | Err(StoreError::Precondition { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    match pointer_io::read(bucket, slot).await {
        Ok(Some(read)) if read.value == next => Ok(next),
        // It took effect, and a host or the platform has moved it since.
        Ok(Some(read)) if read.value.seq > next.seq && read.value.fence_epoch >= next.fence_epoch => Ok(next),
        Ok(_) => Err(RepairError::Changed),
        Err(StoreError::Corrupt { key, why }) => Err(RepairError::Unusable { key, why }),
        Err(error) => Err(error.into()),
    }
}

async fn found(bucket: &Bucket, slot: &SlotPrefix, bound: Epoch) -> Result<(Found, Condition), StoreError> {
    let read = match pointer_io::read(bucket, slot).await {
        Err(StoreError::Corrupt { key, why }) => {
            return unreadable(bucket, slot, format!("{key}: {why}")).await;
        }
        read => read?,
    };
    let condition = read.as_ref().map_or(Condition::Absent, pointer_io::PointerRead::condition);
    let is_missing = read.as_ref().is_none_or(|read| !read.has_latest());
    let pointer = read.map(|read| read.value);
    let found = match (snapshot::latest(bucket, slot).await, pointer) {
        (_, Some(pointer)) if pointer.fence_epoch > bound => {
            let why =
                format!("its fence {} is far above every epoch that the platform knows", pointer.fence_epoch);
            Found::Unsound { pointer, why }
        }
        (Ok(_) | Err(Unusable::Absent), pointer) => Found::Sound(pointer),
        (Err(Unusable::Store(error)), _) => return Err(error),
        (Err(Unusable::Damaged { key, why }), Some(pointer)) if !is_missing => {
            Found::Unsound { pointer, why: format!("{key}: {why}") }
        }
        (Err(Unusable::Damaged { key, why }), _) => Found::Absent { why: format!("{key}: {why}") },
    };
    Ok((found, condition))
}

async fn unreadable(
    bucket: &Bucket,
    slot: &SlotPrefix,
    why: String,
) -> Result<(Found, Condition), StoreError> {
    let key = slot.pointer();
    let Some(meta) = bucket.head(&key).await? else {
        return Ok((Found::Absent { why }, Condition::Absent));
    };
    let kept = meta.size.min(MAX_KEPT_BYTES);
    let start = match kept {
        0 => Bytes::new(),
        _ => bucket.raw().get_range(&key, 0..kept).await.map_err(|error| StoreError::of(&key, error))?,
    };
    let condition = Condition::unchanged(&meta);
    Ok((Found::Unreadable { why, size_bytes: meta.size, start }, condition))
}

async fn chosen(bucket: &Bucket, slot: &SlotPrefix, key: &SnapshotKey) -> Result<SideRecord, RepairError> {
    match snapshot::by_key(bucket, slot, key.as_str()).await {
        Ok(side) => Ok(side),
        Err(Unusable::Store(error)) => Err(error.into()),
        Err(Unusable::Damaged { key, why }) => Err(RepairError::Unusable { key, why }),
        Err(Unusable::Absent) => {
            Err(RepairError::Unusable { key: key.as_str().to_owned(), why: "it is missing".to_owned() })
        }
    }
}

/// The newest of the highest epoch; where none of that epoch is whole, of the one below.
async fn newest_whole(
    bucket: &Bucket,
    slot: &SlotPrefix,
    keys: &[String],
) -> Result<Option<SideRecord>, StoreError> {
    let mut ordered: Vec<_> = keys.iter().map(|key| (key::epoch_of(key), key::taken_at(key), key)).collect();
    ordered.sort_unstable_by(|a, b| b.cmp(a));
    for (epoch, _, key) in ordered.into_iter().take(MAX_TRIED) {
        match snapshot::by_key(bucket, slot, key).await {
            Ok(side) if Some(side.epoch) == epoch => return Ok(Some(side)),
            Ok(_) => {
                tracing::warn!(key, "the side record is of another epoch than its key; it is passed over");
            }
            Err(Unusable::Damaged { why, .. }) => tracing::warn!(key, why, "the snapshot is passed over"),
            Err(Unusable::Absent) => {}
            Err(Unusable::Store(error)) => return Err(error),
        }
    }
    Ok(None)
}

/// The last entry of the whole log: its `seq`, and its value where it can be read.
async fn top_entry(bucket: &Bucket, slot: &SlotPrefix) -> Result<(u64, Option<Pointer>), StoreError> {
    let Some((seq, _)) = pointer_log::newest_entry(bucket, slot, 0).await? else { return Ok((0, None)) };
    match pointer_io::entry(bucket, slot, seq).await {
        Ok(pointer) => Ok((seq, Some(pointer))),
        Err(StoreError::Corrupt { .. }) => Ok((seq, None)),
        Err(error) => Err(error),
    }
}

/// Everything that says how high fence and `seq` have been.
struct Known<'a> {
    found: &'a Found,
    keys: &'a [String],
    top: &'a (u64, Option<Pointer>),
    meta: Epoch,
    holder: Option<&'a Holder>,
    /// What is above it was not written by a machine of ours.
    bound: Epoch,
}

impl Known<'_> {
    /// `None` where nothing was ever fenced: then there is nothing to write.
    fn next(&self, snapshot: Option<SnapshotRef>, emptied_at: Option<Timestamp>) -> Option<Pointer> {
        let pointers = || self.found.pointer().into_iter().chain(&self.top.1);
        let fences = pointers().map(|pointer| pointer.fence_epoch).filter(|fence| *fence <= self.bound);
        let written = snapshot.as_ref().map_or(Epoch::NONE, |named| named.epoch);
        let others = [epochs::of_keys(self.keys, self.bound), self.meta, written];
        let held = self.holder.map(|holder| holder.epoch);
        let fence_epoch = fences.chain(others).chain(held).max().filter(|epoch| *epoch > Epoch::NONE)?;
        let by_platform = self.holder.filter(|holder| holder.epoch == fence_epoch);
        let by_pointer = || {
            pointers().filter(|pointer| pointer.fence_epoch == fence_epoch).find_map(Pointer::fence_holder)
        };
        let by_snapshot = || {
            let named = snapshot.as_ref().filter(|named| named.epoch == fence_epoch);
            named.map(|named| named.machine_id)
        };
        let fence_machine_id =
            by_platform.map(|holder| holder.machine).or_else(by_pointer).or_else(by_snapshot);
        let of_pointer = || {
            let same = pointers().filter(|pointer| {
                pointer.fence_epoch == fence_epoch && pointer.fence_holder() == fence_machine_id
            });
            same.filter_map(|pointer| pointer.fence_proof.clone()).next()
        };
        let fence_proof = by_platform.and_then(|holder| holder.proof.clone()).or_else(of_pointer);
        Some(Pointer {
            version: FORMAT,
            fence_epoch,
            fence_machine_id,
            fence_proof,
            seq: self.seq(fence_epoch) + 1,
            emptied_at,
            snapshot,
        })
    }

    /// At least what it has been. Where the pointer does not say it: each snapshot moved it once, and each fence.
    fn seq(&self, fence: Epoch) -> u64 {
        let counted = self.keys.len() as u64 + u64::from(fence.0);
        let seen = [self.found.pointer().map_or(counted, |pointer| pointer.seq), self.top.0];
        let plausible = seen.into_iter().filter(|seq| *seq <= counted.saturating_add(MAX_SEQ_AHEAD));
        plausible.max().unwrap_or(counted)
    }
}
