//! Tests which machines a rollout updates and in which order, and how it handles repeated commands.

use serde_json::{Value, json};

use super::deploy::{Fleet, NEXT_VERSION};
use super::stack::{Process, Stack};

pub async fn set_test_slot(stack: &Stack, process: &Process, user: &str, is_test: bool) {
    let body = json!({"idpUserId": user, "plan": "max", "status": "active", "test": is_test});
    stack.set_slot(process, &body).await;
}

/// Returns the handles of a rollout's machines, in batch order.
fn handles_by_batch(rollout: &Value) -> Vec<String> {
    let machines = rollout["machines"].as_array().unwrap().iter();
    let mut batches: Vec<_> = machines
        .map(|machine| (machine["batch"].as_u64().unwrap(), machine["handle"].as_str().unwrap().to_owned()))
        .collect();
    batches.sort();
    batches.into_iter().map(|(_, handle)| handle).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn test_slots_are_updated_first_and_others_in_random_order() {
    let fleet = Fleet::start(4, &[]).await;
    for user in ["user_0", "user_1", "user_3"] {
        set_test_slot(&fleet.stack, &fleet.process, user, false).await;
    }
    let mut second_handles = Vec::new();
    for _ in 0..60 {
        let rollout = fleet.deploy(&json!({"canary": 1, "batchSize": 1})).await;
        assert_eq!(fleet.post_action(&rollout, "abort").await.status, 200);
        let order = handles_by_batch(&rollout);
        assert_eq!(order[0], "h-user-2", "the test slot must be the canary: {order:?}");
        second_handles.push(order[1].clone());
    }
    second_handles.sort();
    second_handles.dedup();
    assert_eq!(second_handles, ["h-user-0", "h-user-1", "h-user-3"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_abort_changes_nothing() {
    let fleet = Fleet::start(1, &[]).await;
    let rollout = fleet.deploy(&json!({})).await;
    let aborted = fleet.post_action(&rollout, "abort").await.body;
    assert!(aborted["endedAt"].is_string(), "{aborted}");
    // Raise the alarm, as if a later rollout had been halted.
    let client = fleet.stack.database.connect().await.unwrap();
    client.batch_execute("INSERT INTO fleet_alarms (alarm) VALUES ('rollout_halted')").await.unwrap();
    let again = fleet.post_action(&rollout, "abort").await;
    assert_eq!((again.status, &again.body["endedAt"]), (200, &aborted["endedAt"]));
    let alarm = "SELECT 1 FROM fleet_alarms WHERE alarm = 'rollout_halted'";
    assert!(client.query_opt(alarm, &[]).await.unwrap().is_some(), "the alarm was cleared");
}

#[tokio::test(flavor = "multi_thread")]
async fn rollout_leaves_out_excluded_machines() {
    let fleet = Fleet::start(3, &[]).await;
    let stopped = fleet.deploy(&json!({"batchSize": 1})).await;
    fleet.wait_until_requested(0).await;
    fleet.report_update(0, "v1", "rolled_back").await;
    fleet.wait_for_state(&stopped, "stopped").await;

    let rollout = fleet.deploy(&json!({"batchSize": 1, "except": ["h-user-0"]})).await;
    assert_eq!(handles_by_batch(&rollout), ["h-user-1", "h-user-2"]);
    for index in [1, 2] {
        fleet.wait_until_requested(index).await;
        fleet.report_update(index, NEXT_VERSION, "updated").await;
    }
    fleet.wait_for_state(&rollout, "succeeded").await;
    let client = fleet.stack.database.connect().await.unwrap();
    let sql = "SELECT (after->'except')::text FROM operator_audit WHERE action = 'deploy' ORDER BY at";
    let audited: Vec<String> = client.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert_eq!(audited, ["[]", "[\"h-user-0\"]"]);

    let start = async |overrides: Value| {
        let mut body = json!({"imageVersion": NEXT_VERSION});
        body.as_object_mut().unwrap().extend(overrides.as_object().unwrap().clone());
        fleet.stack.post(&fleet.process, "/vps/deploy", &body).await
    };
    let unknown = start(json!({"except": ["h-user-0", "unknown"]})).await;
    unknown.assert_problem(404, "machine_not_found");
    assert!(unknown.body["detail"].as_str().unwrap().contains("unknown"), "{unknown:?}");
    let selected_and_excluded = start(json!({"handles": ["h-user-1"], "except": ["h-user-1"]})).await;
    selected_and_excluded.assert_problem(400, "invalid_request");
    assert_eq!(selected_and_excluded.body["errors"][0]["pointer"], "/except");
    for invalid in [json!([]), json!(["A B"]), json!("h-user-1")] {
        start(json!({"except": invalid})).await.assert_problem(400, "invalid_request");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rollout_refuses_handle_if_a_machine_is_not_running() {
    let fleet = Fleet::start(1, &[]).await;
    let (stack, process) = (&fleet.stack, &fleet.process);
    let preview = json!({"idpUserId": "user_0", "slot": "next", "handle": "h-user-0", "kind": "preview"});
    let booting = stack.post(process, "/vps/provision", &preview).await;
    assert_eq!(booting.status, 202, "{booting:?}");
    let body = json!({"imageVersion": NEXT_VERSION, "handles": ["h-user-0"]});
    let refused = stack.post(process, "/vps/deploy", &body).await;
    refused.assert_problem(409, "invalid_state");
    let detail = refused.body["detail"].as_str().unwrap();
    assert!(
        detail.contains(booting.body["machineId"].as_str().unwrap()) && detail.contains("slot next"),
        "{detail}"
    );
}
