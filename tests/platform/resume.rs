//! `resume` returns a failed machine to service without a replacement.

use serde_json::{Value, json};

use super::stack::{Stack, heartbeat_of};

#[tokio::test(flavor = "multi_thread")]
async fn failed_machine_with_a_healthy_host_is_resumed() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let path = format!("/vps/{}/resume", host_settings.machine);
    stack
        .post(&process, &format!("/vps/{}/fail", host_settings.machine), &json!({"reason": "wrong one"}))
        .await;
    let silent = stack.post(&process, &path, &json!({})).await;
    silent.assert_problem(409, "invalid_state");
    assert!(silent.body["detail"].as_str().unwrap().contains("heartbeat"), "{silent:?}");

    stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await;
    let resumed = stack.post(&process, &path, &json!({})).await;
    assert_eq!((resumed.status, &resumed.body["status"]), (200, &json!("running")), "{resumed:?}");
    assert_eq!(resumed.body["failure"], Value::Null);
    assert_eq!(stack.post(&process, &path, &json!({})).await.status, 200, "resume must be idempotent");
    let client = stack.database.connect().await.unwrap();
    let audit = client.query("SELECT 1 FROM operator_audit WHERE action = 'resume'", &[]).await.unwrap();
    assert_eq!(audit.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_that_never_served_is_not_resumed() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let provisioned = stack.provision(&process, "user_1").await;
    let machine = provisioned["machineId"].as_str().unwrap();
    let path = format!("/vps/{machine}/resume");
    stack.post(&process, &path, &json!({})).await.assert_problem(409, "invalid_state");
    stack.post(&process, &format!("/vps/{machine}/fail"), &json!({"reason": "r"})).await;
    let refused = stack.post(&process, &path, &json!({})).await;
    refused.assert_problem(409, "invalid_state");
    assert!(refused.body["detail"].as_str().unwrap().contains("never registered"), "{refused:?}");
}
