//! POST `/vps/:id/power`: an operator powers a machine off or on, or restarts it. Without such a request,
//! the platform never starts a machine that an operator has powered off.

use std::time::Duration;

use kit::provider::{Fault, FaultRule, Power};
use serde_json::{Value, json};

use super::resize::{count_actions, fetch_record};
use super::stack::{ApiResponse, Process, Stack, UserDataSettings, heartbeat_of};

async fn request_power(
    stack: &Stack,
    process: &Process,
    host_settings: &UserDataSettings,
    action: &str,
) -> ApiResponse {
    stack.post(process, &format!("/vps/{}/power", host_settings.machine), &json!({"action": action})).await
}

/// Requests the action, sends the host's heartbeats until the operation has ended, and returns the operation.
async fn run_action(
    stack: &Stack,
    process: &Process,
    host_settings: &UserDataSettings,
    action: &str,
) -> Value {
    let accepted = request_power(stack, process, host_settings, action).await;
    assert_eq!((accepted.status, &accepted.body["action"]), (202, &json!(action)), "{accepted:?}");
    stack
        .wait_until_ended_without_registrations(process, accepted.body["operationId"].as_str().unwrap())
        .await
}

fn power_state(stack: &Stack) -> Power {
    stack.provider.servers().remove(0).status
}

/// Starts a platform with one running machine, whose host has sent a heartbeat.
async fn start_with_machine(settings: &[(&str, &str)]) -> (Stack, Process, UserDataSettings) {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(settings);
    let host_settings = stack.start_machine(&process, "user_1").await;
    stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await;
    (stack, process, host_settings)
}

#[tokio::test(flavor = "multi_thread")]
async fn power_off_keeps_machine_off_until_power_on() {
    let (stack, process, host_settings) = start_with_machine(&[]).await;
    let ended = run_action(&stack, &process, &host_settings, "off").await;
    assert_eq!((&ended["kind"], &ended["state"]), (&json!("power_off"), &json!("succeeded")), "{ended}");
    assert_eq!(power_state(&stack), Power::Off);
    let off = fetch_record(&stack, &process, &host_settings).await;
    assert_eq!((&off["status"], off["poweredOffAt"].is_string()), (&json!("running"), true), "{off}");
    let again = request_power(&stack, &process, &host_settings, "off").await;
    assert_eq!((again.status, &again.body["operationId"]), (200, &Value::Null), "{again:?}");

    // Neither the reconciler, which checks every server, nor a late heartbeat from the host changes this.
    stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await;
    let before = stack.provider.call_count("GET", "/servers?label_selector");
    let has_run =
        || async { (stack.provider.call_count("GET", "/servers?label_selector") > before + 3).then_some(()) };
    stack.eventually("the reconciler has run", has_run).await;
    let unchanged = fetch_record(&stack, &process, &host_settings).await;
    assert_eq!((&unchanged["status"], &unchanged["poweredOffAt"]), (&json!("running"), &off["poweredOffAt"]));
    assert_eq!((power_state(&stack), stack.provider.creations().len()), (Power::Off, 1));
    for (path, body) in [("resize", json!({"serverType": "cpx32"})), ("power", json!({"action": "reboot"}))] {
        let refused = stack.post(&process, &format!("/vps/{}/{path}", host_settings.machine), &body).await;
        refused.assert_problem(409, "invalid_state");
        assert!(refused.body["detail"].as_str().unwrap().contains("svcctl power on"), "{refused:?}");
    }
    for path in ["backup", "drill", "backup-accept"] {
        let refused =
            stack.post(&process, &format!("/vps/{}/{path}", host_settings.machine), &json!({})).await;
        refused.assert_problem(409, "invalid_state");
        let detail = refused.body["detail"].as_str().unwrap();
        let next = format!("`svcctl power on {} --wait`", host_settings.machine);
        assert!(detail.contains("is powered off") && detail.contains(&next), "{detail}");
    }
    let provisioned = stack.post(&process, "/vps/provision", &super::stack::provision_body("user_1")).await;
    assert_eq!((provisioned.status, &provisioned.body["machineId"]), (200, &json!(host_settings.machine)));

    let ended = run_action(&stack, &process, &host_settings, "on").await;
    assert_eq!((&ended["kind"], &ended["state"]), (&json!("power_on"), &json!("succeeded")), "{ended}");
    let powered_on = fetch_record(&stack, &process, &host_settings).await;
    assert_eq!(
        (&powered_on["status"], &powered_on["poweredOffAt"], power_state(&stack)),
        (&json!("running"), &Value::Null, Power::Running)
    );
    let client = stack.database.connect().await.unwrap();
    let audit = "SELECT action, before->>'poweredOffAt', after->>'poweredOffAt' FROM operator_audit \
                 WHERE action LIKE 'power%' ORDER BY at";
    let audit = client.query(audit, &[]).await.unwrap();
    let audit: Vec<(String, bool, bool)> = audit
        .iter()
        .map(|row| {
            (row.get(0), row.get::<_, Option<&str>>(1).is_some(), row.get::<_, Option<&str>>(2).is_some())
        })
        .collect();
    assert_eq!(audit, [("power.off".to_owned(), false, true), ("power.on".to_owned(), true, true)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn operation_continues_when_due_despite_a_long_poll_interval() {
    let (stack, process, host_settings) = start_with_machine(&[("PLATFORM_POLL_MS", "600000")]).await;
    let ended = run_action(&stack, &process, &host_settings, "off").await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
}

#[tokio::test(flavor = "multi_thread")]
async fn power_off_cuts_the_power_of_an_unresponsive_host() {
    let (stack, process, host_settings) = start_with_machine(&[("RESIZE_SHUTDOWN_SECONDS", "1")]).await;
    stack.provider.set_obeys_shutdown(&format!("svc-{}", host_settings.machine), false).unwrap();
    let ended = run_action(&stack, &process, &host_settings, "off").await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
    assert_eq!((count_actions(&stack, "shutdown"), count_actions(&stack, "poweroff")), (1, 1));
    assert_eq!(power_state(&stack), Power::Off);
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_accepted_late_gets_full_timeout() {
    let (stack, process, host_settings) = start_with_machine(&[("RESIZE_SHUTDOWN_SECONDS", "60")]).await;
    let locked = Fault::Status { status: 423, code: "locked".to_owned(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(1000, "POST", "/actions/shutdown", locked));
    let accepted = request_power(&stack, &process, &host_settings, "off").await;
    let is_attempted = || async { (count_actions(&stack, "shutdown") >= 1).then_some(()) };
    stack.eventually("a shutdown is requested", is_attempted).await;
    let client = stack.database.connect().await.unwrap();
    let age_step = "UPDATE operation_log SET at = at - interval '10 minutes' WHERE step = 'stop_server'";
    client.execute(age_step, &[]).await.unwrap();
    stack.provider.clear_faults();
    let ended = stack.wait_until_ended(&process, accepted.body["operationId"].as_str().unwrap()).await;
    assert_eq!((&ended["state"], power_state(&stack)), (&json!("succeeded"), Power::Off), "{ended}");
    assert_eq!(count_actions(&stack, "poweroff"), 0, "the power was cut");
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_shutdown_is_followed_by_a_power_cut() {
    let (stack, process, host_settings) = start_with_machine(&[]).await;
    let refused = Fault::Status { status: 422, code: "invalid_input".to_owned(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(1000, "POST", "/actions/shutdown", refused));
    let ended = run_action(&stack, &process, &host_settings, "off").await;
    assert_eq!((&ended["state"], power_state(&stack)), (&json!("succeeded"), Power::Off), "{ended}");
    let note = "the power was cut, because the provider accepted no shutdown request";
    let lines = ended["log"].as_array().unwrap();
    assert!(lines.iter().any(|line| line["detail"] == note), "{ended}");
}

#[tokio::test(flavor = "multi_thread")]
async fn long_shutdown_polls_rarely_and_cuts_the_power_once() {
    let (stack, process, host_settings) = start_with_machine(&[("RESIZE_SHUTDOWN_SECONDS", "3600")]).await;
    stack.provider.set_obeys_shutdown(&format!("svc-{}", host_settings.machine), false).unwrap();
    request_power(&stack, &process, &host_settings, "off").await;
    let is_requested = || async { (count_actions(&stack, "shutdown") == 1).then_some(()) };
    stack.eventually("a shutdown is requested", is_requested).await;
    let client = stack.database.connect().await.unwrap();
    let age_step = |interval: &'static str| {
        let sql =
            format!("UPDATE operation_log SET at = at - interval '{interval}' WHERE step = 'stop_server'");
        let client = &client;
        async move { client.execute(&sql, &[]).await.unwrap() }
    };
    age_step("1 minute").await;
    let path = format!("/servers/{}", stack.provider.servers().remove(0).id);
    let before = stack.provider.call_count("GET", &path);
    tokio::time::sleep(Duration::from_secs(7)).await;
    let calls = stack.provider.call_count("GET", &path) - before;
    assert!((1..=5).contains(&calls), "{calls} calls in 7 s of a shutdown that takes minutes");

    // The shutdown is overdue, and cutting the power fails.
    stack.provider.add_fault(FaultRule::times(100, "POST", "/actions/poweroff", Fault::ActionError));
    age_step("1 hour").await;
    let is_cut = || async { (count_actions(&stack, "poweroff") >= 1).then_some(()) };
    stack.eventually("the power is cut", is_cut).await;
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(count_actions(&stack, "poweroff"), 1, "the power cut was requested on every poll");
    stack.provider.clear_faults();
    age_step("1 minute").await;
    let is_off = || async { (power_state(&stack) == Power::Off).then_some(()) };
    stack.eventually("the power is cut again after a delay", is_off).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_power_on_is_requested_again_at_long_intervals() {
    let (stack, process, host_settings) = start_with_machine(&[]).await;
    run_action(&stack, &process, &host_settings, "off").await;
    stack.provider.add_fault(FaultRule::times(1000, "POST", "/actions/poweron", Fault::ActionError));
    request_power(&stack, &process, &host_settings, "on").await;
    let is_requested = || async { (count_actions(&stack, "poweron") >= 1).then_some(()) };
    stack.eventually("the power-on is requested", is_requested).await;
    let client = stack.database.connect().await.unwrap();
    let age_step = "UPDATE operation_log SET at = at - interval '10 minutes' WHERE step = 'start_server'";
    client.execute(age_step, &[]).await.unwrap();
    let before = count_actions(&stack, "poweron");
    tokio::time::sleep(Duration::from_secs(7)).await;
    let requests = count_actions(&stack, "poweron") - before;
    assert!(requests <= 2, "{requests} requests in 7 s");

    stack.provider.clear_faults();
    client.execute("UPDATE operations SET due_at = now() WHERE state = 'running'", &[]).await.unwrap();
    let is_on = || async { (power_state(&stack) == Power::Running).then_some(()) };
    stack.eventually("the server is powered on", is_on).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_powered_on_at_provider_is_detected_by_heartbeat() {
    let (stack, process, host_settings) = start_with_machine(&[]).await;
    run_action(&stack, &process, &host_settings, "off").await;
    stack.provider.power_on(&format!("svc-{}", host_settings.machine)).unwrap();
    let is_detected = || async {
        stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await;
        fetch_record(&stack, &process, &host_settings).await["poweredOffAt"].is_null().then_some(())
    };
    stack.eventually("the heartbeat reveals the power-on", is_detected).await;
    let client = stack.database.connect().await.unwrap();
    let audit =
        client.query("SELECT actor FROM operator_audit WHERE action = 'power.found_on'", &[]).await.unwrap();
    assert_eq!(audit[0].get::<_, String>(0), format!("machine:{}", host_settings.machine));
}

#[tokio::test(flavor = "multi_thread")]
async fn reboot_ends_with_a_heartbeat_or_reports_silence() {
    let (stack, process, host_settings) = start_with_machine(&[("RESIZE_HEALTH_SECONDS", "6")]).await;
    let ended = run_action(&stack, &process, &host_settings, "reboot").await;
    assert_eq!((&ended["kind"], &ended["state"]), (&json!("reboot"), &json!("succeeded")), "{ended}");
    assert_eq!((count_actions(&stack, "reboot"), power_state(&stack)), (1, Power::Running));

    // A failing call is retried.
    stack.provider.add_fault(FaultRule::once("POST", "/actions/reboot", Fault::LostRequest));
    let accepted = request_power(&stack, &process, &host_settings, "reboot").await;
    let operation = format!("/vps/operations/{}", accepted.body["operationId"].as_str().unwrap());
    let repeated = request_power(&stack, &process, &host_settings, "reboot").await;
    assert_eq!(
        repeated.body["operationId"], accepted.body["operationId"],
        "a repeated request must return the same operation"
    );
    request_power(&stack, &process, &host_settings, "off").await.assert_problem(409, "invalid_state");
    let has_ended = || async {
        let current = stack.get(&process, &operation).await.body;
        (current["state"] != "running").then_some(current)
    };
    let ended = stack.eventually("the reboot fails", has_ended).await;
    assert_eq!((&ended["state"], &ended["errorCode"]), (&json!("failed"), &json!("host_silent")), "{ended}");
    assert_eq!(count_actions(&stack, "reboot"), 3, "the lost request must be retried once");
    assert_eq!(fetch_record(&stack, &process, &host_settings).await["status"], "running");
}

#[tokio::test(flavor = "multi_thread")]
async fn reboot_fails_if_the_provider_cannot_restart_the_server() {
    let (stack, process, host_settings) = start_with_machine(&[("RESIZE_HEALTH_SECONDS", "2")]).await;
    stack.provider.add_fault(FaultRule::times(1000, "POST", "/actions/reboot", Fault::ActionError));
    let ended = run_action(&stack, &process, &host_settings, "reboot").await;
    assert_eq!(
        (&ended["state"], &ended["errorCode"]),
        (&json!("failed"), &json!("reboot_failed")),
        "{ended}"
    );
    assert_eq!(fetch_record(&stack, &process, &host_settings).await["status"], "running");
}

#[tokio::test(flavor = "multi_thread")]
async fn reboot_requested_late_restarts_the_server() {
    let (stack, process, host_settings) = start_with_machine(&[]).await;
    stack.provider.add_fault(FaultRule::times(1000, "GET", "/servers/", Fault::LostRequest));
    let accepted = request_power(&stack, &process, &host_settings, "reboot").await;
    let operation = accepted.body["operationId"].as_str().unwrap();
    let client = stack.database.connect().await.unwrap();
    let age_step = "UPDATE operation_log SET at = at - interval '20 minutes' WHERE step = 'reboot_server'";
    let try_age_step = || async { (client.execute(age_step, &[]).await.unwrap() > 0).then_some(()) };
    stack.eventually("the step has begun", try_age_step).await;
    assert_eq!(count_actions(&stack, "reboot"), 0);
    stack.provider.clear_faults();
    let ended = stack.wait_until_ended_without_registrations(&process, operation).await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
}

#[tokio::test(flavor = "multi_thread")]
async fn reboot_with_lost_responses_fails_after_the_timeout() {
    let (stack, process, host_settings) = start_with_machine(&[("RESIZE_HEALTH_SECONDS", "3")]).await;
    stack.provider.add_fault(FaultRule::times(1000, "POST", "/actions/reboot", Fault::LostReplyAfterCommit));
    let ended = run_action(&stack, &process, &host_settings, "reboot").await;
    assert_eq!(
        (&ended["state"], &ended["errorCode"]),
        (&json!("failed"), &json!("reboot_failed")),
        "{ended}"
    );
}

/// The owner has shut the host down.
#[tokio::test(flavor = "multi_thread")]
async fn reboot_of_a_server_that_is_off_only_powers_it_on() {
    let (stack, process, host_settings) = start_with_machine(&[]).await;
    stack.provider.kill_server(&format!("svc-{}", host_settings.machine)).await.unwrap();
    let ended = run_action(&stack, &process, &host_settings, "reboot").await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
    assert_eq!((count_actions(&stack, "poweron"), count_actions(&stack, "reboot")), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_machine_is_powered_on_and_resumed() {
    let (stack, process, host_settings) = start_with_machine(&[]).await;
    let machine = format!("/vps/{}", host_settings.machine);
    run_action(&stack, &process, &host_settings, "off").await;
    stack.post(&process, &format!("{machine}/fail"), &json!({"reason": "r"})).await;
    let client = stack.database.connect().await.unwrap();
    client.execute("UPDATE user_machines SET heartbeat_at = now() - interval '1 hour'", &[]).await.unwrap();
    let refused = stack.post(&process, &format!("{machine}/resume"), &json!({})).await;
    refused.assert_problem(409, "invalid_state");
    assert!(refused.body["detail"].as_str().unwrap().contains("svcctl power on"), "{refused:?}");
    assert_eq!(run_action(&stack, &process, &host_settings, "on").await["state"], "succeeded");
    let resumed = stack.post(&process, &format!("{machine}/resume"), &json!({})).await;
    assert_eq!((resumed.status, &resumed.body["status"]), (200, &json!("running")), "{resumed:?}");
}

/// The host cannot take a final backup, so an operator must accept the loss or power the machine on first.
#[tokio::test(flavor = "multi_thread")]
async fn powered_off_machine_is_replaced_only_with_accepted_loss() {
    let (stack, process, host_settings) = start_with_machine(&[("RESIZE_SHUTDOWN_SECONDS", "6")]).await;
    stack.store_snapshot("user_1");
    stack.provider.set_obeys_shutdown(&format!("svc-{}", host_settings.machine), false).unwrap();
    let off = request_power(&stack, &process, &host_settings, "off").await;
    let recover = async |overrides: Value| {
        let mut body = json!({"idpUserId": "user_1"});
        body.as_object_mut().unwrap().extend(overrides.as_object().unwrap().clone());
        stack.post(&process, "/vps/recover", &body).await
    };
    let assert_refused = async || {
        let response = recover(json!({})).await;
        response.assert_problem(409, "invalid_state");
        assert!(response.body["detail"].as_str().unwrap().contains("svcctl power on"), "{response:?}");
        assert!(response.body["poweredOffAt"].is_string(), "{response:?}");
    };
    assert_refused().await;
    let path = format!("/vps/operations/{}", off.body["operationId"].as_str().unwrap());
    assert_eq!(
        stack.get(&process, &path).await.body["state"],
        "running",
        "the operation must not be cancelled"
    );
    // The operation ends when the power has been cut.
    stack.wait_until_ended(&process, off.body["operationId"].as_str().unwrap()).await;
    assert_refused().await;

    stack.post(&process, &format!("/vps/{}/fail", host_settings.machine), &json!({"reason": "r"})).await;
    assert_refused().await;
    let again = stack.post(&process, "/vps/provision", &super::stack::provision_body("user_1")).await;
    again.assert_problem(409, "invalid_state");
    let accepted = recover(json!({"acceptLoss": true})).await;
    assert_eq!(accepted.status, 202, "{accepted:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn power_on_of_a_deleted_machine_returns_not_found() {
    let (stack, process, host_settings) = start_with_machine(&[("DELETE_GRACE_SECONDS", "600")]).await;
    stack.delete(&process, &format!("/vps/{}", host_settings.machine)).await;
    request_power(&stack, &process, &host_settings, "on").await.assert_problem(404, "machine_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn heartbeats_of_a_powered_off_machine_cost_few_calls() {
    let (stack, process, host_settings) =
        start_with_machine(&[("SERVER_CHECK_SECONDS", "600"), ("RECONCILE_SECONDS", "600")]).await;
    run_action(&stack, &process, &host_settings, "off").await;
    let lookups = || stack.provider.call_count("GET", "/servers/");
    let before = lookups();
    for _ in 0..20 {
        stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await;
    }
    assert!(lookups() <= before + 1, "{} lookups", lookups() - before);
    // A heartbeat with another epoch does not show that the machine is on.
    let process = stack.start_platform_with(&[("SERVER_CHECK_SECONDS", "0"), ("RECONCILE_SECONDS", "600")]);
    let before = lookups();
    let mut late = heartbeat_of(&host_settings);
    late["epoch"] = json!(0);
    assert_eq!(stack.send_heartbeat(&process, &host_settings, &late).await.status, 200);
    assert_eq!(lookups(), before);
    stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await;
    assert_eq!(lookups(), before + 1);
}
