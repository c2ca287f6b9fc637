//! The pointer at the store: read, then written only if nobody wrote in between; a lost answer is settled by reading.

use std::time::Duration;

use super::bucket::{Bucket, Condition, StoreError, Versioned};
use super::key::SlotPrefix;
use super::pointer::{self, Fenced, Pointer};
use super::snapshot::Recorded;
use crate::machine::epoch::Epoch;

/// How often a write is tried when others write at the same time.
const ATTEMPTS: u32 = 16;

/// Why the pointer was not moved.
#[derive(Debug, thiserror::Error)]
pub enum PointerError {
    #[error(transparent)]
    Fenced(#[from] Fenced),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the pointer was changed by others {ATTEMPTS} times in a row")]
    Contended,
}

/// The pointer as it stands, or `None` where there is none.
///
/// # Errors
/// [`StoreError`]; a format that we do not know is `Corrupt`, and so is a `seq` that nobody has counted.
pub async fn read(bucket: &Bucket, slot: &SlotPrefix) -> Result<Option<Versioned<Pointer>>, StoreError> {
    let key = slot.pointer();
    let Some(read) = bucket.get_json::<Pointer>(&key).await? else {
        return Ok(None);
    };
    if read.value.version != pointer::FORMAT {
        let why = format!("format version {} is not {}", read.value.version, pointer::FORMAT);
        return Err(StoreError::Corrupt { key: key.to_string(), why });
    }
    if read.value.seq > pointer::LARGEST_SEQ {
        let why = format!("its seq {} is more than a pointer has", read.value.seq);
        return Err(StoreError::Corrupt { key: key.to_string(), why });
    }
    Ok(Some(read))
}

/// Puts the fence at `epoch`. Done already is success.
///
/// # Errors
/// [`PointerError`].
pub async fn fence(bucket: &Bucket, slot: &SlotPrefix, epoch: Epoch) -> Result<(), PointerError> {
    write(bucket, slot, |now| pointer::fence(now, epoch)).await
}

/// Makes the pointer name a snapshot, in the name of the machine that took it.
///
/// # Errors
/// [`PointerError`]; `Fenced` when that machine has been replaced.
pub async fn advance(bucket: &Bucket, slot: &SlotPrefix, snapshot: &Recorded) -> Result<(), PointerError> {
    let named = snapshot.named();
    write(bucket, slot, |now| pointer::advance(now, named.epoch, named)).await
}

/// Each round reads, plans and writes on that version. After a refused or unanswered write the next round reads what
/// came of it: our own write reads back as "nothing to do".
async fn write(
    bucket: &Bucket,
    slot: &SlotPrefix,
    plan: impl Fn(Option<&Pointer>) -> Result<Option<Pointer>, Fenced>,
) -> Result<(), PointerError> {
    let key = slot.pointer();
    let mut unavailable = None;
    for attempt in 0..ATTEMPTS {
        if attempt > 0 {
            tokio::time::sleep(Duration::from_millis(u64::from(10 * attempt + rand_below(20)))).await;
        }
        let now = match read(bucket, slot).await {
            Ok(now) => now,
            Err(error) => return Err(unavailable.unwrap_or(error).into()),
        };
        let Some(next) = plan(now.as_ref().map(|now| &now.value))? else {
            return Ok(());
        };
        let condition = now.map_or(Condition::Absent, |now| Condition::Unchanged(now.version));
        match bucket.put_json_if(&key, &next, condition).await {
            Ok(()) => return Ok(()),
            Err(StoreError::Precondition { .. }) => {}
            // It may have happened: one more round settles it.
            Err(error) if error.is_transient() && unavailable.is_none() => unavailable = Some(error),
            Err(error) => return Err(error.into()),
        }
    }
    Err(PointerError::Contended)
}

fn rand_below(limit: u32) -> u32 {
    u32::from(uuid::Uuid::new_v4().as_bytes()[0]) % limit
}
