//! The fence of the file backups' pointer, which any holder of the slot's store credentials can raise.

use serde_json::{Value, json};
use svc::machine::epoch::Epoch;
use svc::machine::id::MachineId;
use svc::machine::name::Slot;
use svc::store::files_pointer;
use svc::store::key::SlotPrefix;

use super::files_key::open_bucket;
use super::stack::{Stack, heartbeat_of};

/// Without this repair, the machine could not save files until its next recovery.
#[tokio::test(flavor = "multi_thread")]
async fn raised_fence_of_file_backups_is_restored() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let (bucket, slot) = (open_bucket(&stack), SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary()));
    files_pointer::set_fence(&bucket, &slot, Epoch(900), MachineId::new()).await.unwrap();
    let read_fence = async || files_pointer::read(&bucket, &slot).await.unwrap().unwrap().value.fence_epoch;
    let report_error = async |error: Value| {
        let mut beat = heartbeat_of(&host_settings);
        beat["files"] = json!({"files": 1, "bytes": 1, "error": error});
        assert_eq!(stack.send_heartbeat(&process, &host_settings, &beat).await.status, 200);
    };
    report_error(json!("the disk is full")).await;
    assert_eq!(read_fence().await, Epoch(900));
    report_error(json!(
        "the slot is fenced at epoch 900; this machine, with epoch 1, may no longer move the pointer"
    ))
    .await;
    assert_eq!(read_fence().await, Epoch(1));
}
