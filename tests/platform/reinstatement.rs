//! Tests which machine gets a slot back, and how a removal that an operator has abandoned ends.

use kit::provider::{Fault, FaultRule, Power};
use serde_json::{Value, json};

use super::stack::{Process, Stack, UserDataSettings};

async fn recover(stack: &Stack, process: &Process) -> UserDataSettings {
    let body = json!({"idpUserId": "user_1", "acceptLoss": true});
    let response = stack.post(process, "/vps/recover", &body).await;
    assert_eq!(response.status, 202, "{response:?}");
    stack.wait_for_host_settings(process, response.body["machineId"].as_str().unwrap()).await
}

/// Prepares a slot whose second machine has lost its server and whose third machine is booting. Returns the first and
/// the third machine. `second_columns` is SQL that sets further columns in the second machine's row.
async fn start_third_machine(
    stack: &Stack,
    process: &Process,
    second_columns: &str,
) -> (UserDataSettings, UserDataSettings) {
    let first = stack.start_machine(process, "user_1").await;
    stack.store_snapshot("user_1");
    let second = recover(stack, process).await;
    stack.register(process, &second).await;
    stack.provider.lose_server(&format!("svc-{}", second.machine)).await.unwrap();
    let client = stack.database.connect().await.unwrap();
    let lost = format!(
        "UPDATE user_machines SET status = 'failed', failure_cause = 'server_gone'{second_columns} \
         WHERE machine_id = '{}'",
        second.machine
    );
    client.execute(&lost, &[]).await.unwrap();
    (first, recover(stack, process).await)
}

#[tokio::test(flavor = "multi_thread")]
async fn reinstatement_skips_a_lost_machine_without_snapshot() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("PREDECESSOR_KEEP_SECONDS", "60")]);
    let (first, third) = start_third_machine(&stack, &process, "").await;
    stack.report_boot_failure(&process, &third).await;
    let is_on = || async { (stack.power_state(&first.machine) == Some(Power::Running)).then_some(()) };
    stack.eventually("the first machine is on again", is_on).await;
    let record = stack.fetch_record(&process, &first.machine).await;
    assert_eq!((&record["epoch"], &record["retiredAt"]), (&json!(4), &Value::Null), "{record}");
    assert_eq!(stack.fetch_record(&process, &third.machine).await["replacedBy"], first.machine);
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_with_data_older_than_a_snapshot_is_not_reinstated() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("PREDECESSOR_KEEP_SECONDS", "60")]);
    let (first, third) = start_third_machine(&stack, &process, ", backup_taken_at = now()").await;
    stack.report_boot_failure(&process, &third).await;
    let has_failed = || async { (stack.status(&process, &third.machine).await == "failed").then_some(()) };
    stack.eventually("the third machine fails", has_failed).await;
    assert_eq!(stack.fetch_record(&process, &third.machine).await["replacedBy"], Value::Null);
    assert_eq!(
        stack.power_state(&first.machine),
        Some(Power::Off),
        "a machine with data older than the snapshot must stay off"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn reinstated_machine_does_not_show_an_earlier_failure() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let old = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let client = stack.database.connect().await.unwrap();
    let fail = "UPDATE user_machines SET status = 'failed', failure_cause = 'resize', failure_stage = 'power_on', \
                failure_message = 'the host did not come back in time'";
    client.execute(fail, &[]).await.unwrap();
    let new = recover(&stack, &process).await;
    stack.report_boot_failure(&process, &new).await;
    let failure = stack.fetch_record(&process, &old.machine).await["failure"].clone();
    assert_eq!(
        (&failure["cause"], &failure["stage"]),
        (&json!("reinstating"), &json!("reinstate")),
        "{failure}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn immediate_deletion_keeps_the_predecessors_server() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("DELETE_GRACE_SECONDS", "60")]);
    let old = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let new = recover(&stack, &process).await;
    let deleted = stack.delete(&process, &format!("/vps/{}?acceptLoss=true&now=true", new.machine)).await;
    assert_eq!(deleted.status, 202, "{deleted:?}");
    stack.wait_for_server_deletion(&new.machine).await;
    let has_ended = || async {
        let old = stack.fetch_record(&process, &old.machine).await;
        let operations = old["operations"].as_array()?.clone();
        operations
            .iter()
            .any(|operation| operation["kind"] == "delete" && operation["state"] == "succeeded")
            .then_some(())
    };
    stack.eventually("the predecessor's deletion ends", has_ended).await;
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    assert_eq!(stack.power_state(&old.machine), Some(Power::Off));
    let undeleted = stack.post(&process, &format!("/vps/{}/undelete", old.machine), &json!({})).await;
    assert_eq!(undeleted.status, 202, "{undeleted:?}");
}

/// Deletes a machine, with these query parameters, while the provider refuses to delete servers. Returns the settings
/// of the machine's host, and the operation that removes its server.
async fn start_stuck_removal(stack: &Stack, process: &Process, query: &str) -> (UserDataSettings, Value) {
    let old = stack.start_machine(process, "user_1").await;
    stack.store_snapshot("user_1");
    let locked = Fault::Status { status: 423, code: "locked".to_owned(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(1000, "DELETE", "/servers/", locked));
    stack.delete(process, &format!("/vps/{}?{query}", old.machine)).await;
    let find_removal = || async {
        let operations = stack.fetch_record(process, &old.machine).await["operations"].clone();
        operations.as_array()?.iter().find(|operation| operation["kind"] == "remove_server").cloned()
    };
    let removal = stack.eventually("the removal is attempted", find_removal).await;
    (old, removal)
}

/// Deletes a machine and abandons its server's removal.
async fn abandon_removal(stack: &Stack, process: &Process) -> UserDataSettings {
    let (old, removal) = start_stuck_removal(stack, process, "acceptLoss=true&now=true").await;
    let path = format!("/vps/operations/{}/abandon", removal["operationId"].as_str().unwrap());
    assert_eq!(stack.post(process, &path, &json!({})).await.status, 200);
    let fleet = stack.get(process, "/vps/fleet").await.body;
    assert_eq!(fleet["attention"][0]["reasons"], json!(["removal_abandoned"]), "{fleet}");
    // A call in flight ends when the lease expires, after 2 s.
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    stack.provider.clear_faults();
    old
}

#[tokio::test(flavor = "multi_thread")]
async fn discard_ends_an_abandoned_removal() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let old = abandon_removal(&stack, &process).await;
    // The reconciler runs every second.
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    assert!(stack.power_state(&old.machine).is_some(), "the abandoned removal was repeated");
    let discarded = stack.post(&process, &format!("/vps/{}/discard", old.machine), &json!({})).await;
    assert_eq!(discarded.status, 202, "{discarded:?}");
    stack.wait_for_server_deletion(&old.machine).await;
    let is_settled = || async {
        let fleet = stack.get(&process, "/vps/fleet").await.body;
        (fleet["attentionTotal"] == 0).then_some(())
    };
    stack.eventually("nothing needs attention", is_settled).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn accepted_loss_is_recorded_during_a_removal() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let (old, removal) = start_stuck_removal(&stack, &process, "acceptLoss=true").await;
    let path = format!("/vps/{}/discard", old.machine);
    let client = stack.database.connect().await.unwrap();
    let count = "SELECT count(*) FROM operator_audit WHERE action = 'discard'";
    for (body, expected) in
        [(json!({}), 0), (json!({"acceptLoss": true}), 1), (json!({"acceptLoss": true}), 1)]
    {
        let discarded = stack.post(&process, &path, &body).await;
        assert_eq!(
            (discarded.status, &discarded.body["operationId"], &discarded.body["alreadyOrdered"]),
            (202, &removal["operationId"], &json!(true)),
            "{discarded:?}"
        );
        let recorded: i64 = client.query_one(count, &[]).await.unwrap().get(0);
        assert_eq!(recorded, expected, "{body}");
    }
    stack.provider.clear_faults();
    stack.wait_for_server_deletion(&old.machine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn undelete_ends_an_abandoned_removal() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let old = abandon_removal(&stack, &process).await;
    let undeleted = stack.post(&process, &format!("/vps/{}/undelete", old.machine), &json!({})).await;
    assert_eq!(undeleted.status, 202, "{undeleted:?}");
    stack.send_heartbeats_until_running(&process, &old, 2).await;
    // After another deletion, the server is removed as usual.
    stack.delete(&process, &format!("/vps/{}?acceptLoss=true&now=true", old.machine)).await;
    stack.wait_for_server_deletion(&old.machine).await;
}
