//! After a failed resize, the server is powered on again if possible, and the machine's record shows the actual type.

use http::StatusCode;
use kit::provider::{Fault, FaultRule, Power};
use serde_json::{Value, json};

use super::resize::{count_actions, fetch_record, resize, resize_until_ended};
use super::stack::{Process, Stack, UserDataSettings, heartbeat_of};

fn server_error(status: u16) -> Fault {
    Fault::Status { status, code: "server_error".to_owned(), reset_in_seconds: None }
}

fn server_state(stack: &Stack) -> (Power, String) {
    let server = stack.provider.servers().remove(0);
    (server.status, server.server_type)
}

/// Asserts that the server type has not changed, and that the machine is running as before.
async fn assert_reverted(
    stack: &Stack,
    process: &Process,
    host_settings: &UserDataSettings,
    operation: &Value,
) {
    assert_eq!(
        (&operation["state"], &operation["errorCode"]),
        (&json!("failed"), &json!("resize")),
        "{operation}"
    );
    let record = fetch_record(stack, process, host_settings).await;
    assert_eq!(
        (&record["status"], &record["serverType"]),
        (&json!("running"), &json!("cpx22")),
        "{}",
        stack.log()
    );
    assert_eq!(record["failure"], Value::Null);
    assert_eq!(server_state(stack), (Power::Running, "cpx22".to_owned()));
    assert_eq!(stack.provider.creations().len(), 1);
}

async fn assert_resized(
    stack: &Stack,
    process: &Process,
    host_settings: &UserDataSettings,
    operation: &Value,
) {
    assert_eq!(operation["state"], "succeeded", "{operation}\n{}", stack.log());
    let record = fetch_record(stack, process, host_settings).await;
    assert_eq!((&record["status"], &record["serverType"]), (&json!("running"), &json!("cpx32")));
    assert_eq!(server_state(stack), (Power::Running, "cpx32".to_owned()));
    assert_eq!(stack.provider.creations().len(), 1);
}

/// Starts a platform with one running machine.
async fn start_with_machine() -> (Stack, Process, UserDataSettings) {
    start_with_settings(&[]).await
}

async fn start_with_settings(settings: &[(&str, &str)]) -> (Stack, Process, UserDataSettings) {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(settings);
    let host_settings = stack.start_machine(&process, "user_1").await;
    (stack, process, host_settings)
}

#[tokio::test(flavor = "multi_thread")]
async fn host_that_ignores_shutdown_is_powered_off() {
    let (stack, process, host_settings) = start_with_machine().await;
    stack.provider.set_obeys_shutdown(&format!("svc-{}", host_settings.machine), false).unwrap();
    let ended = resize_until_ended(&stack, &process, &host_settings).await;
    assert_resized(&stack, &process, &host_settings, &ended).await;
    assert_eq!((count_actions(&stack, "shutdown"), count_actions(&stack, "poweroff")), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_responses_are_resolved_by_the_server_state() {
    for lost in ["shutdown", "change_type", "poweron"] {
        let (stack, process, host_settings) = start_with_machine().await;
        stack.provider.add_fault(FaultRule::once("POST", lost, Fault::LostReplyAfterCommit));
        let ended = resize_until_ended(&stack, &process, &host_settings).await;
        assert_resized(&stack, &process, &host_settings, &ended).await;
        assert!(stack.provider.pending_faults().is_empty(), "{lost}");
        assert_eq!(count_actions(&stack, "change_type"), 1, "{lost}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn transient_failures_are_retried() {
    for (step, fault) in [
        ("shutdown", server_error(503)),
        ("change_type", server_error(500)),
        ("change_type", Fault::LostRequest),
        ("poweron", server_error(502)),
        ("poweron", Fault::ActionError),
    ] {
        let (stack, process, host_settings) = start_with_machine().await;
        stack.provider.add_fault(FaultRule::times(2, "POST", step, fault.clone()));
        let ended = resize_until_ended(&stack, &process, &host_settings).await;
        assert_resized(&stack, &process, &host_settings, &ended).await;
        assert!(stack.provider.pending_faults().is_empty(), "{step} {fault:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_change_keeps_the_old_type_running() {
    let invalid = Fault::Status { status: 422, code: "invalid_input".to_owned(), reset_in_seconds: None };
    for (fault, detail) in [
        (Fault::ActionError, "the provider's type change failed"),
        (invalid, "the provider refused the request"),
    ] {
        let (stack, process, host_settings) = start_with_machine().await;
        stack.provider.add_fault(FaultRule::once("POST", "change_type", fault));
        let ended = resize_until_ended(&stack, &process, &host_settings).await;
        assert_reverted(&stack, &process, &host_settings, &ended).await;
        let lines = ended["log"].as_array().unwrap();
        let abandoned = lines.iter().find(|line| line["outcome"] == "given_up").unwrap();
        assert_eq!((&abandoned["step"], abandoned["detail"].as_str()), (&json!("change_type"), Some(detail)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn resize_is_reverted_if_provider_errors_persist() {
    for step in ["poweroff", "change_type"] {
        let settings = [("RESIZE_SHUTDOWN_SECONDS", "1"), ("RESIZE_CHANGE_SECONDS", "2")];
        let (stack, process, host_settings) = start_with_settings(&settings).await;
        stack.provider.set_obeys_shutdown(&format!("svc-{}", host_settings.machine), false).unwrap();
        stack.provider.add_fault(FaultRule::times(1000, "POST", step, server_error(503)));
        let ended = resize_until_ended(&stack, &process, &host_settings).await;
        assert_reverted(&stack, &process, &host_settings, &ended).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_with_server_off_stays_failed_until_healthy_heartbeat() {
    let (stack, process, host_settings) = start_with_settings(&[("RESIZE_HEALTH_SECONDS", "2")]).await;
    stack.provider.add_fault(FaultRule::times(1000, "POST", "poweron", server_error(503)));
    let ended = resize_until_ended(&stack, &process, &host_settings).await;
    assert_eq!((&ended["state"], &ended["errorCode"]), (&json!("failed"), &json!("resize")), "{ended}");
    let record = fetch_record(&stack, &process, &host_settings).await;
    assert_eq!((&record["status"], &record["failure"]["cause"]), (&json!("failed"), &json!("resize")));
    assert_eq!(record["failure"]["stage"], "power_on");

    // A heartbeat that was in flight when the server was powered off does not return the machine to service.
    stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await;
    assert_eq!(fetch_record(&stack, &process, &host_settings).await["status"], "failed");
    stack.provider.clear_faults();
    let id = stack.provider.servers().remove(0).id;
    let power_on =
        reqwest::Client::new().post(format!("{}/servers/{id}/actions/poweron", stack.provider.base_url()));
    let status = power_on.bearer_auth(stack.provider.token()).send().await.unwrap().status();
    // The server is locked if the platform is powering it on at the same time.
    assert!(status.is_success() || status == StatusCode::LOCKED, "{status}");
    stack.provider.wait_for_power(&format!("svc-{}", host_settings.machine), Power::Running).await.unwrap();
    // With the server on, an unhealthy heartbeat or one from another epoch does not return it to service either.
    let mut unhealthy = heartbeat_of(&host_settings);
    unhealthy["health"]["gateway"] = json!("failing");
    let mut wrong_epoch = heartbeat_of(&host_settings);
    wrong_epoch["epoch"] = json!(7);
    for beat in [&unhealthy, &wrong_epoch] {
        assert_eq!(stack.send_heartbeat(&process, &host_settings, beat).await.status, 200, "{beat}");
        assert_eq!(fetch_record(&stack, &process, &host_settings).await["status"], "failed", "{beat}");
    }
    stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await;
    let record = fetch_record(&stack, &process, &host_settings).await;
    assert_eq!((&record["status"], &record["failure"]), (&json!("running"), &Value::Null));
    assert_eq!(record["serverType"], "cpx32", "the record must show the type that the provider reports");
}

/// Time during which a problem with the provider account blocks the power-on does not count toward
/// `RESIZE_HEALTH_SECONDS`.
#[tokio::test(flavor = "multi_thread")]
async fn resize_succeeds_after_a_long_account_block() {
    let (stack, process, host_settings) = start_with_machine().await;
    let fault =
        Fault::Status { status: 403, code: "resource_limit_exceeded".to_owned(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(1000, "POST", "poweron", fault));
    let response = resize(&stack, &process, &host_settings.machine, "cpx32").await;
    let operation = response.body["operationId"].as_str().unwrap();
    let client = stack.database.connect().await.unwrap();
    let find_blocked = || async {
        let sql = "SELECT 1 FROM operations WHERE error_code = 'provider_account'";
        client.query_opt(sql, &[]).await.unwrap()
    };
    stack.eventually("the power-on is blocked", find_blocked).await;
    client.execute("UPDATE operation_log SET at = at - interval '1 hour'", &[]).await.unwrap();
    stack.provider.clear_faults();
    let ended = stack.wait_until_ended_without_registrations(&process, operation).await;
    assert_resized(&stack, &process, &host_settings, &ended).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resize_fails_without_a_later_heartbeat() {
    let (stack, process, host_settings) = start_with_settings(&[("RESIZE_HEALTH_SECONDS", "2")]).await;
    let response = resize(&stack, &process, &host_settings.machine, "cpx32").await;
    let operation = response.body["operationId"].as_str().unwrap();
    let ended = stack.wait_until_ended_without_hosts(&process, operation).await;
    assert_eq!(ended["state"], "failed", "{ended}");
    let failure = fetch_record(&stack, &process, &host_settings).await["failure"].clone();
    assert_eq!((&failure["cause"], &failure["stage"]), (&json!("resize"), &json!("await_health")));
    assert_eq!(server_state(&stack), (Power::Running, "cpx32".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_fails_if_its_server_vanishes_during_a_resize() {
    let (stack, process, host_settings) = start_with_machine().await;
    stack.provider.set_obeys_shutdown(&format!("svc-{}", host_settings.machine), false).unwrap();
    let response = resize(&stack, &process, &host_settings.machine, "cpx32").await;
    stack.provider.lose_server(&format!("svc-{}", host_settings.machine)).await.unwrap();
    let ended = stack
        .wait_until_ended_without_registrations(&process, response.body["operationId"].as_str().unwrap())
        .await;
    assert_eq!((&ended["state"], &ended["errorCode"]), (&json!("failed"), &json!("server_gone")), "{ended}");
    let record = fetch_record(&stack, &process, &host_settings).await;
    assert_eq!((&record["status"], &record["failure"]["cause"]), (&json!("failed"), &json!("server_gone")));
    assert_eq!(stack.provider.creations().len(), 1);
}

async fn assert_cancelled(stack: &Stack, process: &Process, operation: &Value) {
    let path = format!("/vps/operations/{}", operation.as_str().unwrap());
    let current = stack.get(process, &path).await.body;
    assert_eq!(current["state"], "cancelled", "{current}");
}

#[tokio::test(flavor = "multi_thread")]
async fn fail_delete_and_recover_cancel_an_open_resize() {
    let (stack, process, host_settings) = start_with_settings(&[("RESIZE_SHUTDOWN_SECONDS", "3")]).await;
    stack.provider.set_obeys_shutdown(&format!("svc-{}", host_settings.machine), false).unwrap();
    let operation =
        resize(&stack, &process, &host_settings.machine, "cpx32").await.body["operationId"].clone();
    let reason = json!({"reason": "it hangs"});
    let failed = stack.post(&process, &format!("/vps/{}/fail", host_settings.machine), &reason).await;
    assert_eq!((failed.status, &failed.body["failure"]["cause"]), (200, &json!("operator")));
    assert_cancelled(&stack, &process, &operation).await;

    let host_settings = stack.start_machine(&process, "user_2").await;
    stack.provider.set_obeys_shutdown(&format!("svc-{}", host_settings.machine), false).unwrap();
    let operation =
        resize(&stack, &process, &host_settings.machine, "cpx32").await.body["operationId"].clone();
    let deleted = stack.delete(&process, &format!("/vps/{}?acceptLoss=true", host_settings.machine)).await;
    assert_cancelled(&stack, &process, &operation).await;
    let ended = stack.wait_until_ended(&process, deleted.body["operationId"].as_str().unwrap()).await;
    assert_eq!(ended["state"], "succeeded", "{ended}");

    let host_settings = stack.start_machine(&process, "user_3").await;
    stack.provider.set_obeys_shutdown(&format!("svc-{}", host_settings.machine), false).unwrap();
    stack.store_snapshot("user_3");
    let operation =
        resize(&stack, &process, &host_settings.machine, "cpx32").await.body["operationId"].clone();
    let recovery =
        stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_3", "acceptLoss": true})).await.body;
    assert_cancelled(&stack, &process, &operation).await;
    let ended = stack.wait_until_ended(&process, recovery["operationId"].as_str().unwrap()).await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
    let two_remain = || async { (stack.provider.servers().len() == 2).then_some(()) };
    stack.eventually("the failed machine of user_1 and the new one remain", two_remain).await;
    let new = format!("svc-{}", recovery["machineId"].as_str().unwrap());
    assert!(stack.provider.server_by_name(&new).is_some());
}

/// Starts a resize that is stuck after it has powered the server off.
async fn start_stuck_resize(settings: &[(&str, &str)]) -> (Stack, Process, UserDataSettings, String) {
    let mut settings = settings.to_vec();
    settings.push(("RESIZE_SHUTDOWN_SECONDS", "1"));
    let (stack, process, host_settings) = start_with_settings(&settings).await;
    stack.provider.add_fault(FaultRule::times(1000, "POST", "change_type", server_error(503)));
    let accepted = resize(&stack, &process, &host_settings.machine, "cpx32").await;
    let operation = accepted.body["operationId"].as_str().unwrap().to_owned();
    let path = format!("/vps/operations/{operation}");
    let is_off = || async {
        let current = stack.get(&process, &path).await.body;
        (current["step"] == "change_type" && server_state(&stack).0 == Power::Off).then_some(())
    };
    stack.eventually("the server is off", is_off).await;
    (stack, process, host_settings, operation)
}

/// Sends the host's heartbeats until the server is on and the machine has no open operation. Returns its operations.
async fn wait_until_settled(stack: &Stack, process: &Process, host_settings: &UserDataSettings) -> Value {
    let is_settled = || async {
        if server_state(stack).0 == Power::Running {
            stack.send_heartbeat(process, host_settings, &heartbeat_of(host_settings)).await;
        }
        let operations = fetch_record(stack, process, host_settings).await["operations"].clone();
        let have_ended = operations.as_array()?.iter().all(|operation| operation["state"] != "running");
        (have_ended && server_state(stack).0 == Power::Running).then_some(operations)
    };
    stack.eventually("the server is on and no operation is open", is_settled).await
}

#[tokio::test(flavor = "multi_thread")]
async fn resize_cancelled_by_fail_powers_server_on() {
    let (stack, process, host_settings, _) = start_stuck_resize(&[]).await;
    let path = format!("/vps/{}/fail", host_settings.machine);
    assert_eq!(stack.post(&process, &path, &json!({"reason": "stuck"})).await.status, 200);
    let operations = wait_until_settled(&stack, &process, &host_settings).await;
    let state_of = |n: usize| (operations[n]["kind"].clone(), operations[n]["state"].clone());
    assert_eq!(state_of(0), (json!("power_on"), json!("succeeded")), "{operations}");
    assert_eq!(state_of(1), (json!("resize"), json!("cancelled")), "{operations}");
    assert_eq!(fetch_record(&stack, &process, &host_settings).await["status"], "failed");
    let resumed = stack.post(&process, &format!("/vps/{}/resume", host_settings.machine), &json!({})).await;
    assert_eq!((resumed.status, &resumed.body["serverType"]), (200, &json!("cpx22")), "{resumed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn overdue_resize_powers_server_on() {
    let settings = [("RESIZE_CHANGE_SECONDS", "7200"), ("OPERATION_LIMIT_SECONDS", "1800")];
    let (stack, process, host_settings, operation) = start_stuck_resize(&settings).await;
    let client = stack.database.connect().await.unwrap();
    let age = "UPDATE operations SET created_at = created_at - interval '1 hour' WHERE kind = 'resize'";
    assert_eq!(client.execute(age, &[]).await.unwrap(), 1);
    let path = format!("/vps/operations/{operation}");
    let has_failed = || async { (stack.get(&process, &path).await.body["state"] == "failed").then_some(()) };
    stack.eventually("the reconciler ends the operation", has_failed).await;
    wait_until_settled(&stack, &process, &host_settings).await;
    let is_running = || async {
        stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await;
        (fetch_record(&stack, &process, &host_settings).await["status"] == "running").then_some(())
    };
    stack.eventually("a heartbeat returns the machine to service", is_running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn undelete_after_a_cancelled_resize_powers_server_on() {
    let (stack, process, host_settings, _) = start_stuck_resize(&[("DELETE_GRACE_SECONDS", "600")]).await;
    let deleted = stack.delete(&process, &format!("/vps/{}?acceptLoss=true", host_settings.machine)).await;
    stack.wait_until_ended(&process, deleted.body["operationId"].as_str().unwrap()).await;
    let path = format!("/vps/{}/undelete", host_settings.machine);
    assert_eq!(stack.post(&process, &path, &json!({})).await.status, 202);
    let is_on = || async { (server_state(&stack).0 == Power::Running).then_some(()) };
    stack.eventually("the server is on", is_on).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resize_cancelled_by_abandoned_recovery_powers_server_on() {
    let settings = [("LAST_BACKUP_DEADLINE_SECONDS", "600")];
    let (stack, process, _host_settings, resize) = start_stuck_resize(&settings).await;
    stack.store_snapshot("user_1");
    let refused = stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1"})).await;
    refused.assert_problem(409, "invalid_state");
    assert!(refused.body["detail"].as_str().unwrap().contains(&resize), "{refused:?}");
    let path = format!("/vps/operations/{resize}");
    assert_eq!(stack.get(&process, &path).await.body["state"], "running", "the resize must not be cancelled");
    let accepting = json!({"idpUserId": "user_1", "acceptLoss": true});
    let recovery = stack.post(&process, "/vps/recover", &accepting).await;
    assert_eq!(recovery.status, 202, "{recovery:?}");
    let path = format!("/vps/operations/{}/abandon", recovery.body["operationId"].as_str().unwrap());
    assert_eq!(stack.post(&process, &path, &json!({})).await.status, 200);
    let is_on = || async { (server_state(&stack).0 == Power::Running).then_some(()) };
    stack.eventually("the server is on", is_on).await;
}
