//! Restores the fence of the file backups' pointer. A holder of the slot's store credentials, such as a machine that was
//! replaced a few minutes ago, can raise it, and the current machine then cannot save files.

use std::time::Duration;

use svc_base::error_chain::format_chain;
use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;
use svc_store::key::SlotPrefix;
use svc_store::{files_pointer, pointer, pointer_io};
use tokio::sync::Semaphore;

use crate::context::Platform;
use crate::db::machine_row::MachineRow;

/// Limits the repairs that run at the same time, because a host determines when one is attempted.
static PERMITS: Semaphore = Semaphore::const_new(2);
const TIMEOUT: Duration = Duration::from_secs(5);

/// Whether the error of a host's file backup reports a fence.
pub fn is_fence_error(error: &str) -> bool {
    error.contains("the slot is fenced at epoch") || pointer::is_unsound(error)
}

/// Like [`restore`], unless other repairs are running. Ends after five seconds.
pub async fn try_restore(platform: &Platform, machine: &MachineRow) {
    let Ok(_permit) = PERMITS.try_acquire() else { return };
    if tokio::time::timeout(TIMEOUT, restore(platform, machine)).await.is_err() {
        tracing::warn!(machine = %machine.id, "the store took too long to restore the fence of the file backups");
    }
}

/// Sets the fence of the file backups to that of the database's pointer, if the platform has signed that one for this
/// machine. If the store fails, only logs it: the caller repeats the call later.
pub async fn restore(platform: &Platform, machine: &MachineRow) {
    let slot = SlotPrefix::new(&machine.user, &machine.slot);
    let mut holder = match find_signed_holder(platform, &slot).await {
        Some(holder) if holder == (machine.epoch, machine.id) => holder,
        _ => return,
    };
    loop {
        let (epoch, id) = holder;
        if let Err(error) = files_pointer::set_fence(&platform.bucket, &slot, epoch, id).await {
            tracing::warn!(machine = %machine.id, error = %format_chain(&error), "cannot restore the fence of the file backups");
            return;
        }
        // An operation may have replaced the machine in the meantime: its fence must not be lowered.
        match find_signed_holder(platform, &slot).await {
            Some(current) if current.0 > epoch => holder = current,
            _ => return,
        }
    }
}

/// Returns the epoch and machine of the fence in the database's pointer, if the platform has signed it.
async fn find_signed_holder(platform: &Platform, slot: &SlotPrefix) -> Option<(Epoch, MachineId)> {
    let pointer = pointer_io::read(&platform.bucket, slot).await.ok()??.value;
    let (epoch, id, proof) = (pointer.fence_epoch, pointer.fence_machine_id?, pointer.fence_proof?);
    platform.mint.has_signed_fence(slot, epoch, id, &proof).then_some((epoch, id))
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
