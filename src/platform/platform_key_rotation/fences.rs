//! Re-signs slot fences in the object store with the current platform key.
//!
//! Slots are processed in batches, ordered by user and slot; the database stores the last processed slot. If a slot
//! fails, the pass ends and the next pass starts with that slot, so none is skipped. A fence that is written in the
//! meantime is signed with the current key, because all processes use it.

use std::time::Duration;

use futures_util::{StreamExt, stream};

use super::{BATCH_SIZE, PlatformKeyRotationError};
use crate::context::Platform;
use crate::db::platform_keys;
use svc_base::failpoint;
use svc_http::problem::format_chain;
use svc_machine::name::{IdpUserId, Slot};
use svc_store::StoreError;
use svc_store::key::SlotPrefix;
use svc_store::pointer::Fence;
use svc_store::pointer_io::{self, PointerError};

/// Timeout for re-signing one slot's fence.
const SLOT_TIMEOUT: Duration = Duration::from_secs(10);

const MAX_CONCURRENT_SLOTS: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FenceProgress {
    /// Slots may remain for the next pass.
    Incomplete,
    Done,
}

/// Processes the next batch of slots.
///
/// # Errors
/// [`PlatformKeyRotationError`] for the first slot that fails, or if the database fails. The slots before it are
/// recorded as processed.
pub async fn re_sign_batch(platform: &Platform) -> Result<FenceProgress, PlatformKeyRotationError> {
    let key = &platform.process.ids.current;
    let session = platform.db.session().await?;
    let progress = platform_keys::load_progress(&session, key).await?;
    if progress.has_signed_fences {
        return Ok(FenceProgress::Done);
    }
    let mut last_processed = progress.last_processed_slot;
    let slots = platform_keys::list_slots_after(&session, last_processed.as_ref(), BATCH_SIZE).await?;
    if slots.is_empty() {
        platform_keys::finish_fences(&session, key, last_processed.as_ref()).await?;
        return Ok(FenceProgress::Done);
    }
    drop(session);
    let mut processed_slots = stream::iter(slots)
        .map(async |slot| re_sign_slot(platform, &slot).await.map(|()| slot))
        .buffered(MAX_CONCURRENT_SLOTS);
    while let Some(slot) = processed_slots.next().await {
        let slot = slot?;
        failpoint::trigger("platform-key-after-fence")?;
        let session = platform.db.session().await?;
        platform_keys::advance_fences(&session, key, last_processed.as_ref(), &slot).await?;
        last_processed = Some(slot);
        if platform.stop.is_cancelled() {
            break;
        }
    }
    Ok(FenceProgress::Incomplete)
}

async fn re_sign_slot(
    platform: &Platform,
    (user, slot): &(String, String),
) -> Result<(), PlatformKeyRotationError> {
    let name = || format!("{user}/{slot}");
    let parsed = user.parse::<IdpUserId>().ok().zip(slot.parse::<Slot>().ok());
    let Some((user, slot)) = parsed else { return Ok(()) };
    let prefix = SlotPrefix::new(&user, &slot);
    let pointer = prefix.pointer();
    let re_sign = platform.bucket.run_with_timeout(&pointer, SLOT_TIMEOUT, async {
        match re_sign_fence(platform, &prefix).await {
            Ok(()) => Ok(Ok(())),
            Err(PointerError::Store(error)) => Err(error),
            Err(other) => Ok(Err(other)),
        }
    });
    match re_sign.await {
        // After the read, the slot was fenced for a later machine, with the current key.
        Ok(Ok(()) | Err(PointerError::Fenced(_))) => Ok(()),
        Ok(Err(_)) => Err(PlatformKeyRotationError::Contended(name())),
        // An unreadable pointer has no fence to re-sign; `svcctl pointer rebuild` will sign with the current key.
        Err(error @ StoreError::Corrupt { .. }) => {
            tracing::warn!(slot = name(), error = %format_chain(&error), "cannot read a fence; it is not re-signed");
            Ok(())
        }
        Err(source) => Err(PlatformKeyRotationError::Fence { slot: name(), source }),
    }
}

/// Re-signs a fence that was signed with the previous key. A fence that neither key verifies may be forged, and is left
/// unchanged.
async fn re_sign_fence(platform: &Platform, slot: &SlotPrefix) -> Result<(), PointerError> {
    let Some(pointer) = pointer_io::read(&platform.bucket, slot).await? else { return Ok(()) };
    let (epoch, mint) = (pointer.value.fence_epoch, &platform.mint);
    let signed = pointer.value.fence_machine_id.zip(pointer.value.fence_proof);
    let Some((machine, proof)) = signed else { return Ok(()) };
    let is_signed_with_previous = mint.is_fence_signed(slot, epoch, machine, &proof)
        && !mint.is_fence_signed_with_current_key(slot, epoch, machine, &proof);
    if !is_signed_with_previous {
        return Ok(());
    }
    failpoint::trigger("platform-key-before-fence").map_err(|_| PointerError::TooManyConflicts)?;
    let proof = Some(mint.fence_proof(slot, epoch, machine));
    pointer_io::fence(&platform.bucket, slot, &Fence { epoch, machine, proof }).await
}
