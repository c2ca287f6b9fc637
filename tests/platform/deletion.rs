//! A deleted machine leaves its slot immediately. Its server is deleted later; its objects and its record remain.

use kit::s3::{Fault, FaultRule};
use serde_json::json;

use super::stack::{BUCKET, Stack, heartbeat, heartbeat_of};

#[tokio::test(flavor = "multi_thread")]
async fn delete_removes_server_and_retry_returns_same_operation() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let path = format!("/vps/{}", host_settings.machine);
    let path_accepting_loss = format!("{path}?acceptLoss=true");
    let first = stack.delete(&process, &path_accepting_loss).await;
    assert_eq!(first.status, 202, "{first:?}");
    assert!(first.body["deletedAt"].is_string());
    let operation = stack.wait_until_ended(&process, first.body["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded");
    stack.assert_no_server();
    let again = stack.delete(&process, &path_accepting_loss).await;
    // The retention period starts when the server is powered off, which happens after the first response.
    let mut expected = first.body;
    for name in ["undeleteUntil", "undeletableUntil"] {
        assert!(expected[name].is_string(), "{name}: {expected}");
        assert!(again.body[name].as_str() >= expected[name].as_str(), "{name}: {again:?}");
        expected[name] = again.body[name].clone();
    }
    assert_eq!((again.status, again.body), (202, expected));
    assert!(stack.store.objects(BUCKET, "user_1/").len() >= 3, "a deleted machine's objects must be kept");

    let beat = stack.send_heartbeat(&process, &host_settings, &heartbeat()).await;
    assert_eq!(beat.body["superseded"], true, "{beat:?}");
    stack.register(&process, &host_settings).await.assert_problem(401, "registration_rejected");
    assert_eq!(stack.get(&process, "/vps").await.body["machines"], json!([]));
    let deleted_machines = stack.get(&process, "/vps?deleted=true").await.body;
    assert_eq!(deleted_machines["machines"][0]["machineId"], host_settings.machine);

    // The slot can be provisioned again, with its data.
    let accepted = stack.provision(&process, "user_1").await;
    assert_eq!(accepted["epoch"], 2);
    assert_eq!(
        stack.wait_for_host_settings(&process, accepted["machineId"].as_str().unwrap()).await.restore_mode,
        "required"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_shows_newest_stored_or_reported_snapshot() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let (reported, taken_at) = ("2026-03-02T03:04:05.678Z", "2026-03-02T04:04:05.678Z");
    let mut beat = heartbeat_of(&host_settings);
    beat["lastBackup"] = json!({"status": "success", "takenAt": reported, "key": "x", "sizeBytes": 4});
    stack.send_heartbeat(&process, &host_settings, &beat).await;
    // This snapshot is later than the one in the last heartbeat.
    stack.store_snapshot_by("user_1", &host_settings.machine, taken_at);
    let delete_and_get_newest = async || {
        let deleted = stack.delete(&process, &format!("/vps/{}", host_settings.machine)).await;
        assert_eq!(deleted.status, 202, "{deleted:?}");
        ["newestSnapshotAt", "newestSnapshotSource", "snapshotProblem"].map(|name| deleted.body[name].clone())
    };
    assert_eq!(delete_and_get_newest().await, [json!(taken_at), json!("store"), json!(null)]);
    stack
        .store
        .add_fault(FaultRule::new(Fault::Delay(std::time::Duration::from_secs(60))).key("latest").always());
    let problem = "the object store is not responding";
    assert_eq!(delete_and_get_newest().await, [json!(reported), json!("reported"), json!(problem)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_waits_for_unavailable_store() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    stack.store.take_down();
    let deleted = stack.delete(&process, &format!("/vps/{}?acceptLoss=true", host_settings.machine)).await;
    assert_eq!(deleted.status, 202, "{deleted:?}");
    let path = format!("/vps/operations/{}", deleted.body["operationId"].as_str().unwrap());
    let is_waiting = || async {
        let operation = stack.get(&process, &path).await.body;
        (operation["errorCode"] == "store_unavailable").then_some(operation)
    };
    let operation = stack.eventually("the deletion is waiting for the store", is_waiting).await;
    let last = operation["log"].as_array().unwrap().last().unwrap();
    assert_eq!((&last["step"], &last["outcome"]), (&json!("last_backup"), &json!("retry")), "{operation}");
    assert!(last["detail"].as_str().unwrap().contains("the object store is unavailable"), "{operation}");
    stack.store.bring_up().unwrap();
    let ended = stack.wait_until_ended(&process, deleted.body["operationId"].as_str().unwrap()).await;
    assert_eq!((&ended["state"], &ended["errorCode"]), (&json!("succeeded"), &json!(null)), "{ended}");
}

#[tokio::test(flavor = "multi_thread")]
async fn replaced_machine_cannot_be_deleted() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1"})).await;
    let response = stack.delete(&process, &format!("/vps/{}", host_settings.machine)).await;
    response.assert_problem(409, "invalid_state");
    assert_eq!(response.body["machineStatus"], "replaced");
    let unknown = format!("/vps/{}", uuid::Uuid::now_v7());
    stack.delete(&process, &unknown).await.assert_problem(404, "machine_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_cancels_a_recovery_and_leaves_no_server() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let recovery = stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    let deleted = stack
        .delete(&process, &format!("/vps/{}?acceptLoss=true", recovery["machineId"].as_str().unwrap()))
        .await;
    let operation = stack.wait_until_ended(&process, deleted.body["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded");
    stack.assert_no_server();
    let interrupted =
        stack.get(&process, &format!("/vps/operations/{}", recovery["operationId"].as_str().unwrap())).await;
    assert_eq!(interrupted.body["state"], "cancelled");
}
