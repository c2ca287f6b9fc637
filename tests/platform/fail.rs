//! POST `/vps/:id/fail` takes a machine out of service or ends a stuck operation. Its slot can then be provisioned
//! again.

use reqwest::Method;
use serde_json::json;

use super::stack::{Stack, heartbeat_of, provision_body};

#[tokio::test(flavor = "multi_thread")]
async fn fail_takes_a_machine_out_of_service_and_keeps_its_server() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let path = format!("/vps/{}/fail", host_settings.machine);
    let response = stack.post(&process, &path, &json!({"reason": "rolled back"})).await;
    assert_eq!(response.status, 200, "{response:?}");
    let failure = json!({"cause": "operator", "stage": "operator", "message": "rolled back"});
    assert_eq!((&response.body["status"], &response.body["failure"]), (&json!("failed"), &failure));
    assert_eq!(response.body["machineId"], host_settings.machine);
    stack.assert_only_server(&host_settings.machine);
    // A repeated request changes nothing, not even the reason, and a heartbeat does not return the machine to service.
    let again = stack.post(&process, &path, &json!({"reason": "again"})).await;
    assert_eq!((again.status, &again.body["failure"]), (200, &failure));
    stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await;
    assert_eq!(stack.status(&process, &host_settings.machine).await, "failed");
    let client = stack.database.connect().await.unwrap();
    let audit = client
        .query("SELECT before->>'status', after->>'status' FROM operator_audit WHERE action = 'fail'", &[]);
    let audit = audit.await.unwrap();
    assert_eq!(audit.len(), 1);
    assert_eq!((audit[0].get::<_, &str>(0), audit[0].get::<_, &str>(1)), ("running", "failed"));
}

#[tokio::test(flavor = "multi_thread")]
async fn fail_ends_the_open_operation_or_is_refused() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let provisioned = stack.provision(&process, "user_1").await;
    let machine = provisioned["machineId"].as_str().unwrap();
    let host_settings = stack.wait_for_host_settings(&process, machine).await;
    let path = format!("/vps/{machine}/fail");
    stack.post(&process, &path, &json!({})).await.assert_problem(400, "invalid_request");
    stack.post(&process, &path, &json!({"reason": ""})).await.assert_problem(400, "invalid_request");
    stack.post(&process, "/vps/x/fail", &json!({"reason": "r"})).await.assert_problem(400, "invalid_request");
    let host_request = stack.request(&process, Method::POST, &path).bearer_auth(&host_settings.upgrade_token);
    stack.send(host_request.json(&json!({"reason": "r"}))).await.assert_problem(401, "unauthorized");

    let response = stack.post(&process, &path, &json!({"reason": "stuck"})).await;
    assert_eq!(response.status, 200, "{response:?}");
    let operation = format!("/vps/operations/{}", provisioned["operationId"].as_str().unwrap());
    assert_eq!(stack.get(&process, &operation).await.body["state"], "cancelled");
    let late = stack.register(&process, &host_settings).await;
    late.assert_problem(409, "invalid_state");

    let unknown = format!("/vps/{}/fail", uuid::Uuid::now_v7());
    stack.post(&process, &unknown, &json!({"reason": "r"})).await.assert_problem(404, "machine_not_found");
    stack.delete(&process, &format!("/vps/{machine}")).await;
    stack.post(&process, &path, &json!({"reason": "r"})).await.assert_problem(404, "machine_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_slot_is_provisioned_with_another_server() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    stack.post(&process, &format!("/vps/{}/fail", host_settings.machine), &json!({"reason": "r"})).await;

    let mut body = provision_body("user_1");
    body["acceptLoss"] = json!(true);
    let again = stack.post(&process, "/vps/provision", &body).await;
    assert_eq!((again.status, &again.body["epoch"]), (202, &json!(2)), "{again:?}");
    let machine = again.body["machineId"].as_str().unwrap();
    let ended = stack.wait_until_ended(&process, again.body["operationId"].as_str().unwrap()).await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
    stack.assert_only_server(machine);
    let new = stack.wait_for_host_settings(&process, machine).await;
    assert_eq!(
        (new.restore_mode.as_str(), new.epoch.as_str()),
        ("required", "2"),
        "the slot's data must be restored"
    );
    assert_eq!(stack.pointer("user_1")["fenceEpoch"], 2);
    let old = stack.get(&process, &format!("/vps/{}", host_settings.machine)).await.body;
    assert_eq!((&old["replacedBy"], old["retiredAt"].is_null()), (&json!(machine), false));
    assert_eq!(stack.provider.call_count("DELETE", "/servers/"), 1);
    stack.assert_only_server(machine);
    let superseded = stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await;
    assert_eq!(superseded.body["superseded"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn slot_of_deleted_machine_restarts_from_snapshot_or_empty() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    for (user, snapshot, mode) in [("user_1", true, "required"), ("user_2", false, "empty")] {
        let host_settings = stack.start_machine(&process, user).await;
        if snapshot {
            stack.store_snapshot(user);
        }
        let deleted =
            stack.delete(&process, &format!("/vps/{}?acceptLoss=true", host_settings.machine)).await;
        stack.wait_until_ended(&process, deleted.body["operationId"].as_str().unwrap()).await;
        let again = stack.post(&process, "/vps/provision", &provision_body(user)).await;
        assert_eq!((again.status, &again.body["epoch"]), (202, &json!(2)), "{again:?}");
        let new = stack.wait_for_host_settings(&process, again.body["machineId"].as_str().unwrap()).await;
        assert_eq!(new.restore_mode, mode);
        assert_eq!(stack.pointer(user)["snapshot"].is_null(), !snapshot);
    }
    // An invalid snapshot does not allow an empty start.
    let host_settings = stack.start_machine(&process, "user_3").await;
    let dump = stack.store_snapshot("user_3");
    stack.store.remove(super::stack::BUCKET, &dump);
    let deleted = stack.delete(&process, &format!("/vps/{}", host_settings.machine)).await;
    stack.wait_until_ended(&process, deleted.body["operationId"].as_str().unwrap()).await;
    let again = stack.post(&process, "/vps/provision", &provision_body("user_3")).await;
    again.assert_problem(409, "snapshot_unusable");
}
