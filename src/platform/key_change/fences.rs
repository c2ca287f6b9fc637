//! Re-signs the fences of slots in the object store with the current platform key.
//!
//! Slots are processed in key order, in batches; the database stores the last finished one. A slot that fails ends
//! the pass, and the next pass starts with it: none is skipped. A slot that is fenced in the meantime is signed with
//! the current key, since all processes use it.

use std::time::Duration;

use futures_util::{StreamExt, stream};

use super::{BATCH_SIZE, KeyChangeError};
use crate::context::Platform;
use crate::db::platform_keys;
use svc_base::failpoint;
use svc_http::problem::chain;
use svc_machine::name::{IdpUserId, Slot};
use svc_store::StoreError;
use svc_store::key::SlotPrefix;
use svc_store::pointer::Fence;
use svc_store::pointer_io::{self, PointerError};

/// Timeout of one slot.
const SLOT_TIMEOUT: Duration = Duration::from_secs(10);

const MAX_CONCURRENT_SLOTS: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FenceProgress {
    /// Some slots remain for the next pass.
    Some,
    Done,
}

/// Processes the next batch of slots.
///
/// # Errors
/// [`KeyChangeError`]; finished slots stay finished.
pub async fn re_sign_batch(platform: &Platform) -> Result<FenceProgress, KeyChangeError> {
    let key = &platform.process.ids.current;
    let session = platform.db.session().await?;
    let state = platform_keys::load_state(&session, key).await?;
    if state.has_signed_fences {
        return Ok(FenceProgress::Done);
    }
    let mut before = state.fences_after;
    let slots = platform_keys::list_slots_after(&session, before.as_ref(), BATCH_SIZE).await?;
    if slots.is_empty() {
        platform_keys::finish_fences(&session, key, before.as_ref()).await?;
        return Ok(FenceProgress::Done);
    }
    drop(session);
    let mut signed = stream::iter(slots)
        .map(async |slot| sign_slot(platform, &slot).await.map(|()| slot))
        .buffered(MAX_CONCURRENT_SLOTS);
    while let Some(slot) = signed.next().await {
        let slot = slot?;
        failpoint::pass("platform-key-after-fence")?;
        let session = platform.db.session().await?;
        platform_keys::advance_fences(&session, key, before.as_ref(), &slot).await?;
        before = Some(slot);
        if platform.stop.is_cancelled() {
            break;
        }
    }
    Ok(FenceProgress::Some)
}

async fn sign_slot(platform: &Platform, (user, slot): &(String, String)) -> Result<(), KeyChangeError> {
    let name = || format!("{user}/{slot}");
    let parsed = user.parse::<IdpUserId>().ok().zip(slot.parse::<Slot>().ok());
    let Some((user, slot)) = parsed else { return Ok(()) };
    let prefix = SlotPrefix::new(&user, &slot);
    let pointer = prefix.pointer();
    let signed = platform.bucket.run_with_timeout(&pointer, SLOT_TIMEOUT, async {
        match sign(platform, &prefix).await {
            Ok(()) => Ok(Ok(())),
            Err(PointerError::Store(error)) => Err(error),
            Err(other) => Ok(Err(other)),
        }
    });
    match signed.await {
        // A later machine fenced it after the read, with the current key.
        Ok(Ok(()) | Err(PointerError::Fenced(_))) => Ok(()),
        Ok(Err(_)) => Err(KeyChangeError::Contended(name())),
        // No key can verify it; `svcctl pointer rebuild` signs with the current one.
        Err(error @ StoreError::Corrupt { .. }) => {
            tracing::warn!(slot = name(), error = %chain(&error), "cannot read a fence; it is not re-signed");
            Ok(())
        }
        Err(source) => Err(KeyChangeError::Fence { slot: name(), source }),
    }
}

/// A fence that neither key verifies is not the platform's, and stays as it is.
async fn sign(platform: &Platform, slot: &SlotPrefix) -> Result<(), PointerError> {
    let Some(read) = pointer_io::read(&platform.bucket, slot).await? else { return Ok(()) };
    let (epoch, mint) = (read.value.fence_epoch, &platform.mint);
    let signed = read.value.fence_machine_id.zip(read.value.fence_proof);
    let Some((machine, proof)) = signed else { return Ok(()) };
    let is_of_previous = mint.has_signed_fence(slot, epoch, machine, &proof)
        && !mint.is_fence_of_current_key(slot, epoch, machine, &proof);
    if !is_of_previous {
        return Ok(());
    }
    failpoint::pass("platform-key-before-fence").map_err(|_| PointerError::Contended)?;
    let proof = Some(mint.fence_proof(slot, epoch, machine));
    pointer_io::fence(&platform.bucket, slot, &Fence { epoch, machine, proof }).await
}
