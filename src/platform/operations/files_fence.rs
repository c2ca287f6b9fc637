//! Restores the fence of the file backups' pointer. A holder of the slot's store credentials, such as a machine that
//! was replaced a few minutes ago, can raise it, and the current machine then cannot save files.

use std::time::Duration;

use svc_base::error_chain::format_chain;
use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;
use svc_store::key::SlotPrefix;
use svc_store::pointer_io::PointerError;
use svc_store::{StoreError, files_pointer, pointer, pointer_io};
use tokio::sync::Semaphore;

use crate::context::Platform;
use crate::db::machine_row::MachineRow;

/// Limits concurrent calls of [`try_restore`], because hosts trigger them.
static PERMITS: Semaphore = Semaphore::const_new(2);
const RESTORE_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns whether the error of a host's file backup reports a fence.
pub fn is_fence_error(error: &str) -> bool {
    error.contains("the slot is fenced at epoch") || pointer::is_unsound(error)
}

/// Like [`restore`], but does nothing if all permits are taken, and gives up after `RESTORE_TIMEOUT`.
pub async fn try_restore(platform: &Platform, machine: &MachineRow) {
    let Ok(_permit) = PERMITS.try_acquire() else { return };
    if tokio::time::timeout(RESTORE_TIMEOUT, restore(platform, machine)).await.is_err() {
        tracing::warn!(machine = %machine.id, "the store took too long to restore the fence of the file backups");
    }
}

/// Sets the fence of the file backups to that of the database's pointer, if the platform has signed that one for this
/// machine. An error from the store is only logged: the next heartbeat that reports the fence, or the next backup
/// request, tries again.
pub async fn restore(platform: &Platform, machine: &MachineRow) {
    if let Err(error) = try_replace(platform, machine).await {
        tracing::warn!(machine = %machine.id, error = %format_chain(&error), "cannot restore the fence of the file backups");
    }
}

async fn try_replace(platform: &Platform, machine: &MachineRow) -> Result<(), PointerError> {
    let slot = SlotPrefix::new(&machine.user, &machine.slot);
    // An operation that replaces the machine fences the database's pointer before the files pointer. Read in the
    // opposite order, so that its fence is never lowered.
    let Some(found) = files_pointer::read(&platform.bucket, &slot).await? else { return Ok(()) };
    let found = (found.value.fence_epoch, found.value.fence_machine_id);
    let holder = (machine.epoch, machine.id);
    if find_signed_holder(platform, &slot).await? == Some(holder) {
        files_pointer::replace_fence(&platform.bucket, &slot, found, holder).await?;
    }
    Ok(())
}

/// Returns the epoch and machine of the fence in the database's pointer, if the platform has signed it.
async fn find_signed_holder(
    platform: &Platform,
    slot: &SlotPrefix,
) -> Result<Option<(Epoch, MachineId)>, StoreError> {
    let Some(pointer) = pointer_io::read(&platform.bucket, slot).await? else { return Ok(None) };
    let (epoch, id, proof) =
        (pointer.value.fence_epoch, pointer.value.fence_machine_id, pointer.value.fence_proof);
    let Some((id, proof)) = id.zip(proof) else { return Ok(None) };
    Ok(platform.mint.is_fence_signed(slot, epoch, id, &proof).then_some((epoch, id)))
}

#[cfg(test)]
mod tests {
    use svc_store::pointer::FencedError;

    use super::*;

    #[test]
    fn error_of_a_fenced_host_is_recognized() {
        for epoch in [9, 5000] {
            let holder = Some(MachineId::new());
            let error = FencedError { fence_epoch: Epoch(epoch), holder, writer_epoch: Epoch(1) };
            assert!(is_fence_error(&format!("cannot move the pointer: {error}")), "{error}");
        }
        assert!(!is_fence_error("the disk is full"));
    }
}
