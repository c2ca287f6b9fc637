//! A slot without a snapshot starts empty only if no data can be lost or an operator allows it, and never while a
//! deletion is still saving its data.

use serde_json::{Value, json};

use super::fake_host::start_host;
use super::stack::{BUCKET, Process, Stack, provision_body};

fn body_allowing_empty() -> Value {
    let mut body = provision_body("user_1");
    body["allowEmpty"] = json!(true);
    body
}

/// Asserts that a provision request is rejected with a message that contains these parts and names `--allow-empty`.
async fn assert_refused(stack: &Stack, process: &Process, parts: &[&str]) {
    let response = stack.post(process, "/vps/provision", &provision_body("user_1")).await;
    response.assert_problem(409, "snapshot_unusable");
    let detail = response.body["detail"].as_str().unwrap();
    for part in parts.iter().chain(&["--allow-empty"]) {
        assert!(detail.contains(part), "{part}: {detail}");
    }
}

/// Loads, from the audit log, the state of the machine that the last accepted provision request created.
async fn load_provision_audit(stack: &Stack) -> Value {
    let client = stack.database.connect().await.unwrap();
    let sql = "SELECT after FROM operator_audit WHERE action = 'provision' ORDER BY at DESC LIMIT 1";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

async fn fail_machine(stack: &Stack, process: &Process, machine: &str) {
    let path = format!("/vps/{machine}/fail");
    assert_eq!(stack.post(process, &path, &json!({"reason": "r"})).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_machine_that_served_needs_consent_to_start_empty() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let old = stack.start_machine(&process, "user_1").await;
    fail_machine(&stack, &process, &old.machine).await;
    assert_refused(&stack, &process, &[&format!("svcctl resume {}", old.machine)]).await;
    assert_eq!(stack.status(&process, &old.machine).await, "failed");

    let provisioned = stack.post(&process, "/vps/provision", &body_allowing_empty()).await;
    assert_eq!(provisioned.status, 202, "{provisioned:?}");
    let after = load_provision_audit(&stack).await;
    assert_eq!((&after["allowEmpty"], &after["restoreMode"]), (&json!(true), &json!("empty")), "{after}");
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_machine_that_never_served_starts_empty_again() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let provisioned = stack.provision(&process, "user_1").await;
    fail_machine(&stack, &process, provisioned["machineId"].as_str().unwrap()).await;
    let again = stack.post(&process, "/vps/provision", &provision_body("user_1")).await;
    assert_eq!(again.status, 202, "{again:?}");
    assert_eq!(load_provision_audit(&stack).await["restoreMode"], "empty");
}

#[tokio::test(flavor = "multi_thread")]
async fn slot_of_an_unsaved_deleted_machine_does_not_start_empty() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("DELETE_GRACE_SECONDS", "60")]);
    let old = stack.start_machine(&process, "user_1").await;
    let deleted = stack.delete(&process, &format!("/vps/{}", old.machine)).await.body;
    stack.wait_until_ended(&process, deleted["operationId"].as_str().unwrap()).await;
    let record = stack.get(&process, &format!("/vps/{}", old.machine)).await.body;
    assert!(
        record["unsavedSince"].is_string(),
        "the data of an unreachable host must count as unsaved: {record}"
    );
    assert_refused(&stack, &process, &[&format!("svcctl undelete {}", old.machine)]).await;
    assert_eq!(stack.post(&process, &format!("/vps/{}/undelete", old.machine), &json!({})).await.status, 202);
}

#[tokio::test(flavor = "multi_thread")]
async fn slot_whose_loss_was_accepted_starts_empty() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("DELETE_GRACE_SECONDS", "60")]);
    let old = stack.start_machine(&process, "user_1").await;
    let deleted = stack.delete(&process, &format!("/vps/{}?acceptLoss=true", old.machine)).await.body;
    stack.wait_until_ended(&process, deleted["operationId"].as_str().unwrap()).await;
    let provisioned = stack.post(&process, "/vps/provision", &provision_body("user_1")).await;
    assert_eq!(provisioned.status, 202, "{provisioned:?}");
    assert_eq!(load_provision_audit(&stack).await["restoreMode"], "empty");
}

#[tokio::test(flavor = "multi_thread")]
async fn slot_is_not_provisioned_during_final_backup() {
    let stack = Stack::start().await;
    let process =
        stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "3"), ("DELETE_GRACE_SECONDS", "60")]);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    let deleted = stack.delete(&process, &format!("/vps/{}", old.settings.machine)).await.body;
    let operation = deleted["operationId"].as_str().unwrap();
    let early = stack.post(&process, "/vps/provision", &provision_body("user_1")).await;
    early.assert_problem(409, "invalid_state");
    assert_eq!(early.body["operationId"], operation, "{early:?}");
    assert!(early.body["detail"].as_str().unwrap().contains("--wait"), "{early:?}");

    let path = format!("/vps/operations/{operation}");
    let is_waiting = || async { (stack.get(&process, &path).await.body["state"] == "waiting").then_some(()) };
    stack.eventually("the deletion is waiting", is_waiting).await;
    let response = stack.post(&process, "/vps/provision", &body_allowing_empty()).await;
    response.assert_problem(409, "invalid_state");
    assert!(response.body["detail"].as_str().unwrap().contains("operator's decision"), "{response:?}");
    // The operator can still decide either way, because no other machine has taken the slot.
    assert_eq!(stack.post(&process, &format!("{path}/abandon"), &json!({})).await.status, 200);
    assert_eq!(stack.status(&process, &old.settings.machine).await, "running");
}

/// No heartbeat has reported the deleted machine's only snapshot, which the store has lost.
#[tokio::test(flavor = "multi_thread")]
async fn slot_with_a_lost_final_backup_does_not_start_empty() {
    let stack = Stack::start().await;
    let process =
        stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "60"), ("DELETE_GRACE_SECONDS", "60")]);
    let old = start_host(&stack, &process).await;
    let deleted = stack.delete(&process, &format!("/vps/{}", old.settings.machine)).await.body;
    old.wait_for_backup_request(&stack).await;
    let taken_at = old.store_backup(&stack, "user_1");
    let operation = deleted["operationId"].as_str().unwrap();
    let ended = stack.wait_until_ended_without_hosts(&process, operation).await;
    assert_eq!(ended["state"], "succeeded", "{ended}");

    for object in stack.store.objects(BUCKET, "user_1/primary/system/db/") {
        stack.store.remove(BUCKET, &object.key);
    }
    let refused = stack.post(&process, "/vps/provision", &body_allowing_empty()).await;
    refused.assert_problem(409, "snapshot_unusable");
    assert!(refused.body["detail"].as_str().unwrap().contains(&taken_at), "{refused:?}");
}
