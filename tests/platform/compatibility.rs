//! Runs this release with a later release's schema, operations and hosts.

use std::time::Duration;

use serde_json::json;

use super::stack::{Stack, heartbeat_of};

/// Inserts an operation as a later release would. Returns its id.
async fn create_operation(stack: &Stack, machine: &str, kind: &str, step: &str) -> String {
    let client = stack.database.connect().await.unwrap();
    let id = uuid::Uuid::now_v7();
    let machine: uuid::Uuid = machine.parse().unwrap();
    let sql = "INSERT INTO operations (operation_id, machine_id, kind, state, step, due_at, created_at) \
               VALUES ($1, $2, $3, 'running', $4, now() - interval '1 minute', now() - interval '1 day')";
    client.execute(sql, &[&id, &machine, &kind, &step]).await.unwrap();
    id.to_string()
}

/// Returns a value that changes with every write to the operation's row.
async fn row_version(stack: &Stack, operation: &str) -> String {
    let client = stack.database.connect().await.unwrap();
    let id: uuid::Uuid = operation.parse().unwrap();
    let sql =
        "SELECT xmin::text || ' ' || ctid::text || ' ' || state FROM operations WHERE operation_id = $1";
    client.query_one(sql, &[&id]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn platform_leaves_unknown_operations_unchanged() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("OPERATION_DEADLINE_SECONDS", "1")]);
    let host_settings = stack.start_machine(&process, "user_1").await;
    let unknown_kind = create_operation(&stack, &host_settings.machine, "translocate", "fence").await;
    let unknown_step = create_operation(&stack, &host_settings.machine, "provision", "measure_server").await;
    let (kind_before, step_before) =
        (row_version(&stack, &unknown_kind).await, row_version(&stack, &unknown_step).await);
    // The alarm shows that the reconciler has seen the operations. The sleep is longer than their deadline.
    let has_alarm = || async {
        let fleet = stack.get(&process, "/vps/fleet").await.body;
        (fleet["alarms"][0]["alarm"] == "unknown_operations").then_some(())
    };
    stack.eventually("the alarm is raised", has_alarm).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(row_version(&stack, &unknown_kind).await, kind_before, "the operation was claimed or ended");
    assert_eq!(row_version(&stack, &unknown_step).await, step_before, "the operation was claimed or ended");
    assert_eq!(stack.status(&process, &host_settings.machine).await, "running");
    assert!(stack.get(&process, "/metrics").await.text.contains("svc_operations_unknown 2"));
    // Known operations still run.
    let provisioned = stack.provision(&process, "user_2").await;
    let ended = stack.wait_until_ended(&process, provisioned["operationId"].as_str().unwrap()).await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
}

#[tokio::test(flavor = "multi_thread")]
async fn platform_works_on_a_newer_schema() {
    let stack = Stack::start().await;
    let client = stack.database.connect().await.unwrap();
    let newer = "INSERT INTO refinery_schema_history (version, name, applied_on, checksum) \
                 VALUES (9999, 'of_a_later_release', '2026-01-01T00:00:00Z', '1'); \
                 ALTER TABLE user_machines ADD COLUMN later text; \
                 ALTER TABLE operations ADD COLUMN later text NOT NULL DEFAULT 'x'; \
                 CREATE TABLE later (id bigint)";
    client.batch_execute(newer).await.unwrap();
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    assert_eq!(
        stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await.status,
        200
    );
    let deleted = stack.delete(&process, &format!("/vps/{}", host_settings.machine)).await;
    let ended = stack.wait_until_ended(&process, deleted.body["operationId"].as_str().unwrap()).await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_fields_from_hosts_are_ignored() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let mut body = heartbeat_of(&host_settings);
    body["later"] = json!({"any": ["thing"]});
    body["health"]["later"] = json!(1);
    body["disk"]["later"] = json!(null);
    let response = stack.send_heartbeat(&process, &host_settings, &body).await;
    assert_eq!(response.status, 200, "{response:?}");
    // In an operator's request, an unknown field is an error, because it may be a typo.
    let mut body = super::stack::provision_body("user_1");
    body["later"] = json!(1);
    stack.post(&process, "/vps/provision", &body).await.assert_problem(400, "invalid_request");
}
