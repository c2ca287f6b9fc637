//! Restores the fence of the file backups' pointer. A holder of the slot's store credentials, such as a machine that was
//! replaced a few minutes ago, can raise it, and the current machine then cannot save files.

use svc_base::error_chain::format_chain;
use svc_store::files_pointer;
use svc_store::key::SlotPrefix;
use svc_store::pointer_io;

use crate::context::Platform;
use crate::db::machine_row::MachineRow;

/// The part of a host's error that reports a fence.
const FENCED: &str = "the slot is fenced at epoch";

/// Whether the error of a host's file backup reports a fence.
pub fn is_fence_error(error: &str) -> bool {
    error.contains(FENCED)
}

/// Sets the fence of the file backups to that of the database's pointer, if the platform has signed that one for this
/// machine. If the store fails, only logs it: the caller repeats the call later.
pub async fn restore(platform: &Platform, machine: &MachineRow) {
    let (bucket, slot) = (&platform.bucket, SlotPrefix::new(&machine.user, &machine.slot));
    let Ok(Some(read)) = pointer_io::read(bucket, &slot).await else { return };
    let (epoch, holder, proof) =
        (read.value.fence_epoch, read.value.fence_machine_id, read.value.fence_proof.unwrap_or_default());
    let is_holder = epoch == machine.epoch && holder == Some(machine.id);
    if !is_holder || !platform.mint.has_signed_fence(&slot, epoch, machine.id, &proof) {
        return;
    }
    if let Err(error) = files_pointer::set_fence(bucket, &slot, epoch, machine.id).await {
        tracing::warn!(machine = %machine.id, error = %format_chain(&error), "cannot restore the fence of the file backups");
    }
}

#[cfg(test)]
mod tests {
    use svc_machine::epoch::Epoch;
    use svc_machine::id::MachineId;
    use svc_store::pointer::FencedError;

    use super::*;

    #[test]
    fn error_of_a_fenced_host_is_recognized() {
        let error =
            FencedError { fence_epoch: Epoch(9), holder: Some(MachineId::new()), writer_epoch: Epoch(1) };
        assert!(is_fence_error(&format!("cannot move the pointer: {error}")));
        assert!(!is_fence_error("the disk is full"));
    }
}
