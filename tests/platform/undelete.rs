//! A deletion takes a final backup and keeps the server for a grace period, during which it can be undone. Replacing a
//! failed machine and ending a preview also take a backup and keep the server.

use std::time::Duration;

use kit::provider::Power;
use serde_json::{Value, json};

use super::fake_host::{FakeHost, start_host};
use super::stack::{Process, Stack, heartbeat_of, provision_body};

/// Waits until the final backup is requested, and stores it.
async fn store_requested_backup(stack: &Stack, old: &FakeHost) {
    old.wait_for_backup_request(stack).await;
    old.store_backup(stack, "user_1");
}

async fn wait_until_off(stack: &Stack, machine: &str) {
    let is_off = || async { (stack.power_state(machine) == Some(Power::Off)).then_some(()) };
    stack.eventually("the server is off", is_off).await;
}

async fn wait_until_ended(stack: &Stack, process: &Process, id: &Value) -> Value {
    stack.wait_until_ended_without_hosts(process, id.as_str().unwrap()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_machine_is_backed_up_and_can_be_undeleted() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("DELETE_GRACE_SECONDS", "60")]);
    let old = start_host(&stack, &process).await;
    let machine = old.settings.machine.clone();
    let deleted = stack.delete(&process, &format!("/vps/{machine}")).await;
    assert_eq!(deleted.status, 202, "{deleted:?}");
    assert!(deleted.body["undeleteUntil"].is_string() && deleted.body["kind"] == "customer", "{deleted:?}");
    store_requested_backup(&stack, &old).await;
    let operation = wait_until_ended(&stack, &process, &deleted.body["operationId"]).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    wait_until_off(&stack, &machine).await;
    let record = stack.fetch_record(&process, &machine).await;
    assert!(record["finalBackupAt"].is_string(), "{record}");
    assert_eq!(record["copies"]["kept"][0]["reason"], "deleted");
    // The retention period starts with the power-off, which had to wait for the final backup.
    let repeated = stack.delete(&process, &format!("/vps/{machine}")).await.body;
    assert_eq!(repeated["undeleteUntil"], record["copies"]["kept"][0]["until"], "{record}");

    let undeleted = stack.post(&process, &format!("/vps/{machine}/undelete"), &json!({})).await;
    assert_eq!((undeleted.status, &undeleted.body["epoch"]), (202, &json!(2)), "{undeleted:?}");
    stack.send_heartbeats_until_running(&process, &old.settings, 2).await;
    assert_eq!(stack.fetch_record(&process, &machine).await["deletedAt"], Value::Null);
    let again = stack.post(&process, &format!("/vps/{machine}/undelete"), &json!({})).await;
    assert_eq!((again.status, &again.body["alreadyUndone"]), (202, &json!(true)), "{again:?}");
    assert_eq!(
        (&again.body["operationId"], &again.body["epoch"]),
        (&undeleted.body["operationId"], &json!(2)),
        "the repeated request must change nothing"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn undelete_of_an_active_machine_is_refused() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let refused = stack.post(&process, &format!("/vps/{}/undelete", host_settings.machine), &json!({})).await;
    refused.assert_problem(409, "invalid_state");
    assert_eq!(
        (&refused.body["machineStatus"], &refused.body["detail"]),
        (&json!("running"), &json!("The machine is not deleted."))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_without_backup_waits_and_can_be_abandoned() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "1")]);
    let old = start_host(&stack, &process).await;
    let machine = old.settings.machine.clone();
    let deleted = stack.delete(&process, &format!("/vps/{machine}")).await.body;
    let waiting = wait_until_ended(&stack, &process, &deleted["operationId"]).await;
    assert_eq!(
        (&waiting["state"], &waiting["question"]["code"]),
        (&json!("waiting"), &json!("last_backup_missing"))
    );
    let path = format!("/vps/operations/{}/abandon", deleted["operationId"].as_str().unwrap());
    assert_eq!(stack.post(&process, &path, &json!({})).await.status, 200);
    assert_eq!(stack.status(&process, &machine).await, "running", "the machine must not be powered off");
    stack.assert_only_server(&machine);

    // While the deletion is waiting for a decision, the server exists, but its retention has no end.
    let immediate = stack.delete(&process, &format!("/vps/{machine}?now=true")).await.body;
    wait_until_ended(&stack, &process, &immediate["operationId"]).await;
    let copies = stack.fetch_record(&process, &machine).await["copies"].clone();
    assert_eq!(
        (&copies["kept"][0]["deletedBy"], &copies["kept"][0]["until"]),
        (&immediate["operationId"], &Value::Null),
        "{copies}"
    );
    let path = format!("/vps/operations/{}/abandon", immediate["operationId"].as_str().unwrap());
    assert_eq!(stack.post(&process, &path, &json!({})).await.status, 200);

    let deleted = stack.delete(&process, &format!("/vps/{machine}?acceptLoss=true&now=true")).await.body;
    assert_eq!(deleted["undeleteUntil"], Value::Null);
    let operation = wait_until_ended(&stack, &process, &deleted["operationId"]).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    stack.wait_for_server_deletion(&machine).await;
    stack
        .post(&process, &format!("/vps/{machine}/undelete"), &json!({}))
        .await
        .assert_problem(409, "invalid_state");
}

#[tokio::test(flavor = "multi_thread")]
async fn grace_period_starts_with_the_power_off() {
    let stack = Stack::start().await;
    let process =
        stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "1"), ("DELETE_GRACE_SECONDS", "600")]);
    let old = start_host(&stack, &process).await;
    let machine = old.settings.machine.clone();
    let deleted = stack.delete(&process, &format!("/vps/{machine}")).await.body;
    wait_until_ended(&stack, &process, &deleted["operationId"]).await;
    // The deletion has been waiting for longer than the grace period.
    let client = stack.database.connect().await.unwrap();
    let age = "UPDATE user_machines SET deleted_at = deleted_at - interval '1 hour'";
    assert_eq!(client.execute(age, &[]).await.unwrap(), 1);
    let path = format!("/vps/operations/{}/continue", deleted["operationId"].as_str().unwrap());
    assert_eq!(stack.post(&process, &path, &json!({"acceptLoss": true})).await.status, 200);
    wait_until_off(&stack, &machine).await;
    wait_until_ended(&stack, &process, &deleted["operationId"]).await;
    // The reconciler runs every second.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(stack.power_state(&machine).is_some(), "the server must be kept until the grace period ends");
    let undeleted = stack.post(&process, &format!("/vps/{machine}/undelete"), &json!({})).await;
    assert_eq!(undeleted.status, 202, "{undeleted:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn undeleted_host_that_shuts_down_late_is_powered_on() {
    let stack = Stack::start().await;
    let settings = [("RESIZE_SHUTDOWN_SECONDS", "6"), ("DELETE_GRACE_SECONDS", "600")];
    let process = stack.start_platform_with(&settings);
    let host_settings = stack.start_machine(&process, "user_1").await;
    let name = format!("svc-{}", host_settings.machine);
    stack.provider.set_obeys_shutdown(&name, false).unwrap();
    stack.delete(&process, &format!("/vps/{}?acceptLoss=true", host_settings.machine)).await;
    let is_requested =
        || async { (stack.provider.call_count("POST", "/actions/shutdown") == 1).then_some(()) };
    stack.eventually("a shutdown is requested", is_requested).await;
    let undeleted =
        stack.post(&process, &format!("/vps/{}/undelete", host_settings.machine), &json!({})).await;
    assert_eq!(undeleted.status, 202, "{undeleted:?}");
    // The host sends a heartbeat while it is shutting down.
    stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await;
    let path = format!("/servers/{}", stack.provider.servers().remove(0).id);
    let polls = || stack.provider.call_count("GET", &path);
    let expected = polls() + 4;
    stack.eventually("the server is polled", || async { (polls() >= expected).then_some(()) }).await;
    stack.provider.kill_server(&name).await.unwrap();
    let is_on =
        || async { (stack.power_state(&host_settings.machine) == Some(Power::Running)).then_some(()) };
    stack.eventually("the server is on again", is_on).await;
    stack.send_heartbeats_until_running(&process, &host_settings, 2).await;
}

/// The retry period has already ended when the first attempt becomes possible.
#[tokio::test(flavor = "multi_thread")]
async fn late_first_attempt_still_powers_the_server_off() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[
        ("FAILPOINTS", "operations.delete.power_off_server.before=4*return(error)"),
        ("RESIZE_SHUTDOWN_SECONDS", "1"),
        ("POWER_OFF_RETRY_SECONDS", "2"),
        ("DELETE_GRACE_SECONDS", "600"),
    ]);
    let host_settings = stack.start_machine(&process, "user_1").await;
    let deleted =
        stack.delete(&process, &format!("/vps/{}?acceptLoss=true", host_settings.machine)).await.body;
    let operation = wait_until_ended(&stack, &process, &deleted["operationId"]).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    assert_eq!(stack.power_state(&host_settings.machine), Some(Power::Off), "{operation}");
}

#[tokio::test(flavor = "multi_thread")]
async fn provision_of_a_failed_machine_backs_it_up_first() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("PREDECESSOR_KEEP_SECONDS", "60")]);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    stack.post(&process, &format!("/vps/{}/fail", old.settings.machine), &json!({"reason": "r"})).await;
    let provisioned = stack.post(&process, "/vps/provision", &provision_body("user_1")).await;
    assert_eq!((provisioned.status, &provisioned.body["kind"]), (202, &json!("customer")), "{provisioned:?}");
    store_requested_backup(&stack, &old).await;
    let operation = stack.wait_until_ended(&process, provisioned.body["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    assert_eq!(
        stack.power_state(&old.settings.machine),
        Some(Power::Off),
        "the replaced machine's server must be kept for its retention period"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_preview_is_backed_up_and_kept() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("DELETE_GRACE_SECONDS", "60")]);
    let old = start_host(&stack, &process).await;
    let client = stack.database.connect().await.unwrap();
    let sql = "UPDATE user_machines SET kind = 'preview', preview_expires_at = now()";
    client.execute(sql, &[]).await.unwrap();
    store_requested_backup(&stack, &old).await;
    wait_until_off(&stack, &old.settings.machine).await;
    assert!(stack.fetch_record(&process, &old.settings.machine).await["deletedAt"].is_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn preview_is_refused_in_a_slot_with_a_customer_machine() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.start_machine(&process, "user_1").await;
    let mut preview = provision_body("user_1");
    preview["kind"] = json!("preview");
    let refused = stack.post(&process, "/vps/provision", &preview).await;
    refused.assert_problem(409, "invalid_state");
    assert_eq!(refused.body["kind"], "customer");
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_during_recovery_keeps_the_predecessors_server() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("DELETE_GRACE_SECONDS", "60")]);
    let old = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let recovery = stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    let new = stack.wait_for_host_settings(&process, recovery["machineId"].as_str().unwrap()).await;
    let deleted = stack.delete(&process, &format!("/vps/{}", new.machine)).await.body;
    let also_deleted = &deleted["alsoDeleted"];
    assert_eq!((&also_deleted["machineId"], &deleted["undeleteUntil"]), (&json!(old.machine), &Value::Null));
    assert!(
        also_deleted["undeleteUntil"].is_string() && also_deleted["operationId"].is_string(),
        "{deleted}"
    );
    assert_ne!(also_deleted["operationId"], deleted["operationId"]);
    let again = stack.delete(&process, &format!("/vps/{}", new.machine)).await.body;
    assert_eq!(&again["alsoDeleted"], also_deleted, "a repeated request must get the same response");
    let is_only_server = || async { (stack.provider.servers().len() == 1).then_some(()) };
    stack.eventually("the new machine's server is deleted", is_only_server).await;
    stack.assert_only_server(&old.machine);
    let undeleted = stack.post(&process, &format!("/vps/{}/undelete", old.machine), &json!({})).await;
    assert_eq!(undeleted.status, 202, "{undeleted:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_of_an_unregistered_machine_offers_no_undelete() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("DELETE_GRACE_SECONDS", "60")]);
    let provisioned = stack.provision(&process, "user_1").await;
    let path = format!("/vps/{}", provisioned["machineId"].as_str().unwrap());
    let deleted = stack.delete(&process, &path).await;
    assert_eq!((deleted.status, &deleted.body["undeleteUntil"]), (202, &Value::Null), "{deleted:?}");
    let refused = stack.post(&process, &format!("{path}/undelete"), &json!({})).await;
    refused.assert_problem(409, "invalid_state");
    assert!(refused.body["detail"].as_str().unwrap().contains("never served traffic"), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_after_the_loss_of_a_server_offers_no_undelete() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("DELETE_GRACE_SECONDS", "60")]);
    let host_settings = stack.start_machine(&process, "user_1").await;
    stack.provider.lose_server(&format!("svc-{}", host_settings.machine)).await.unwrap();
    let has_failed = || async {
        let record = stack.fetch_record(&process, &host_settings.machine).await;
        (record["failure"]["cause"] == "server_gone").then_some(())
    };
    stack.eventually("the machine has failed", has_failed).await;
    let path = format!("/vps/{}", host_settings.machine);
    let deleted = stack.delete(&process, &path).await;
    assert_eq!((deleted.status, &deleted.body["undeleteUntil"]), (202, &Value::Null), "{deleted:?}");
    let refused = stack.post(&process, &format!("{path}/undelete"), &json!({})).await;
    refused.assert_problem(409, "invalid_state");
    assert!(refused.body["detail"].as_str().unwrap().contains("server has been deleted"), "{refused:?}");
}
