//! A replaced machine's server is kept until the successor is healthy; if the successor fails, the slot returns to the
//! replaced machine.

use kit::provider::{Fault, FaultRule, Power};
use serde_json::{Value, json};

use super::fake_host::start_host;
use super::stack::{BUCKET, Process, Stack, UserDataSettings, heartbeat_of};

fn recovery_body() -> Value {
    json!({"idpUserId": "user_1"})
}

fn string_field(response: &Value, name: &str) -> String {
    response[name].as_str().unwrap_or_else(|| panic!("no {name}: {response}")).to_owned()
}

async fn recover(stack: &Stack, process: &Process, body: &Value) -> Value {
    let response = stack.post(process, "/vps/recover", body).await;
    assert_eq!(response.status, 202, "{response:?}");
    response.body
}

/// Waits until the machine has this status and has not been replaced.
async fn wait_for_status(stack: &Stack, process: &Process, machine: &str, status: &str) -> Value {
    let has_status = || async {
        let record = stack.fetch_record(process, machine).await;
        (record["status"] == status && record["retiredAt"].is_null()).then_some(record)
    };
    stack.eventually(status, has_status).await
}

/// Sends heartbeats as a host that adopts the received epoch, until the machine is running.
async fn send_heartbeats_until_running(stack: &Stack, process: &Process, host_settings: &UserDataSettings) {
    let mut body = heartbeat_of(host_settings);
    for _ in 0..800 {
        let response = stack.send_heartbeat(process, host_settings, &body).await.body;
        body["epoch"] = response["epoch"].clone();
        if stack.status(process, &host_settings.machine).await == "running" {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    panic!("the machine did not return to service\n{}", stack.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_recovery_keeps_the_healthy_machine() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "60")]);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    let recovery = recover(&stack, &process, &recovery_body()).await;
    let is_requested = || async { (old.call_count("POST", "/_svc/internal/backup") > 0).then_some(()) };
    stack.eventually("the final backup is requested", is_requested).await;
    let path = format!("/vps/{}/fail", string_field(&recovery, "machineId"));
    let failed = stack.post(&process, &path, &json!({"reason": "second thoughts"})).await;
    assert_eq!((failed.status, &failed.body["status"]), (200, &json!("failed")), "{failed:?}");

    let resumed = wait_for_status(&stack, &process, &old.settings.machine, "running").await;
    assert_eq!((&resumed["epoch"], &resumed["replacedBy"]), (&json!(3), &Value::Null), "{resumed}");
    let is_resumed = || async { (old.call_count("POST", "/_svc/internal/resume") > 0).then_some(()) };
    stack.eventually("the host's writers resume", is_resumed).await;
    let has_fence = || async { (stack.pointer("user_1")["fenceEpoch"] == 3).then_some(()) };
    stack.eventually("the fence names the old machine", has_fence).await;
    stack.assert_only_server(&old.settings.machine);
    assert_eq!(stack.power_state(&old.settings.machine), Some(Power::Running));
    assert_eq!(stack.provider.call_count("DELETE", "/servers/"), 0);
    assert_eq!(stack.provider.call_count("POST", "/poweroff"), 0);
    let response = stack.send_heartbeat(&process, &old.settings, &heartbeat_of(&old.settings)).await.body;
    assert_eq!(
        (&response["epoch"], &response["superseded"], &response["quiesce"]),
        (&json!(3), &json!(false), &Value::Null)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_boot_powers_the_old_machine_on_again() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let old = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let recovery = recover(&stack, &process, &recovery_body()).await;
    let new = stack.wait_for_host_settings(&process, &string_field(&recovery, "machineId")).await;
    assert_eq!(stack.power_state(&old.machine), Some(Power::Off), "the old server must be kept, powered off");
    assert_eq!(stack.pointer("user_1")["fenceEpoch"], 2);

    let report =
        stack.request(&process, reqwest::Method::POST, &format!("/vps/{}/boot-failure", new.machine));
    let report = report.bearer_auth(&new.registration_token);
    let report = stack.send(report.json(&json!({"stage": "restore", "message": "damaged"}))).await;
    assert_eq!(report.status, 202, "{report:?}");
    let reinstated = wait_for_status(&stack, &process, &old.machine, "failed").await;
    assert_eq!(reinstated["failure"]["cause"], "reinstating", "{reinstated}");
    let is_on = || async { (stack.power_state(&old.machine) == Some(Power::Running)).then_some(()) };
    stack.eventually("the old server is on", is_on).await;
    send_heartbeats_until_running(&stack, &process, &old).await;
    assert_eq!(stack.fetch_record(&process, &old.machine).await["epoch"], 3);
    assert_eq!(stack.pointer("user_1")["fenceEpoch"], 3);
    let is_only_server = || async { (stack.provider.servers().len() == 1).then_some(()) };
    stack.eventually("the failed machine's server is deleted", is_only_server).await;
    stack.assert_only_server(&old.machine);
    stack.register(&process, &new).await.assert_problem(401, "registration_rejected");

    // A second recovery replaces the older machine, not the failed one.
    let again = recover(&stack, &process, &recovery_body()).await;
    assert_eq!((&again["oldMachineId"], &again["epoch"]), (&json!(old.machine), &json!(4)));
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_registration_reinstates_the_old_machine() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("REGISTRATION_TTL_SECONDS", "5")]);
    let old = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let recovery = recover(&stack, &process, &recovery_body()).await;
    wait_for_status(&stack, &process, &old.machine, "failed").await;
    send_heartbeats_until_running(&stack, &process, &old).await;
    let new = stack.fetch_record(&process, &string_field(&recovery, "machineId")).await;
    assert_eq!(new["failure"]["cause"], "registration_expired");
}

#[tokio::test(flavor = "multi_thread")]
async fn old_server_is_deleted_only_after_its_successor_has_served() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("PREDECESSOR_KEEP_SECONDS", "5")]);
    let old = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let recovery = recover(&stack, &process, &json!({"idpUserId": "user_1", "acceptLoss": true})).await;
    let new = stack.wait_for_host_settings(&process, &string_field(&recovery, "machineId")).await;
    stack.register(&process, &new).await;
    tokio::time::sleep(std::time::Duration::from_secs(7)).await;
    assert_eq!(
        stack.power_state(&old.machine),
        Some(Power::Off),
        "the server was deleted before its successor served"
    );
    let refused = stack.post(&process, &format!("/vps/{}/discard", old.machine), &json!({})).await;
    refused.assert_problem(409, "invalid_state");
    let detail = refused.body["detail"].as_str().unwrap();
    for part in
        ["No later machine in the slot has served traffic yet", "may hold the only copy", "--accept-loss`"]
    {
        assert!(detail.contains(part), "{part}: {detail}");
    }
    let copies = stack.fetch_record(&process, &new.machine).await["copies"].clone();
    assert_eq!(copies["kept"][0]["machineId"], old.machine, "{copies}");
    assert_eq!(
        (&copies["live"]["machineId"], &copies["kept"][0]["until"]),
        (&json!(new.machine), &Value::Null)
    );

    stack.send_heartbeat(&process, &new, &heartbeat_of(&new)).await;
    let copies = stack.fetch_record(&process, &new.machine).await["copies"].clone();
    assert!(copies["kept"][0]["until"].is_string(), "{copies}");
    let is_deleted = || async { stack.power_state(&old.machine).is_none().then_some(()) };
    stack.eventually("the old server is deleted when its retention ends", is_deleted).await;
    stack.assert_only_server(&new.machine);
}

#[tokio::test(flavor = "multi_thread")]
async fn server_of_unreachable_host_is_kept_until_loss_accepted() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let old = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let recovery = recover(&stack, &process, &recovery_body()).await;
    let operation = stack.wait_until_ended(&process, &string_field(&recovery, "operationId")).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    let new = stack.wait_for_host_settings(&process, &string_field(&recovery, "machineId")).await;
    stack.send_heartbeat(&process, &new, &heartbeat_of(&new)).await;
    let record = stack.fetch_record(&process, &old.machine).await;
    assert_eq!(record["unsavedSince"], "2026-01-02T03:04:05.678Z", "{record}");
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    assert_eq!(
        stack.power_state(&old.machine),
        Some(Power::Off),
        "the server was deleted although no snapshot contains its data"
    );

    let path = format!("/vps/{}/discard", old.machine);
    let refused = stack.post(&process, &path, &json!({})).await;
    refused.assert_problem(409, "invalid_state");
    assert!(refused.body["detail"].as_str().unwrap().contains("2026-01-02T03:04:05"), "{refused:?}");
    // The provider refuses to delete the server, so the removal stays pending.
    let locked = Fault::Status { status: 423, code: "locked".to_owned(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(1000, "DELETE", "/servers/", locked));
    let requested = stack.post(&process, &path, &json!({"acceptLoss": true})).await;
    assert_eq!((requested.status, &requested.body["alreadyOrdered"]), (202, &json!(false)), "{requested:?}");
    let find_removal = || async {
        let again = stack.post(&process, &path, &json!({})).await;
        assert_eq!((again.status, &again.body["alreadyOrdered"]), (202, &json!(true)), "{again:?}");
        again.body["operationId"].as_str().map(str::to_owned)
    };
    let removal = stack.eventually("the removal is created", find_removal).await;
    let operation = stack.get(&process, &format!("/vps/operations/{removal}")).await.body;
    assert_eq!((&operation["kind"], &operation["machineId"]), (&json!("remove_server"), &json!(old.machine)));
    stack.provider.clear_faults();
    let is_deleted = || async { stack.power_state(&old.machine).is_none().then_some(()) };
    stack.eventually("the server is deleted", is_deleted).await;
    let path = format!("/vps/{}/discard", new.machine);
    stack.post(&process, &path, &json!({"acceptLoss": true})).await.assert_problem(409, "invalid_state");
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_power_off_or_delete_does_not_block_a_recovery() {
    let stack = Stack::start().await;
    let process =
        stack.start_platform_with(&[("RESIZE_SHUTDOWN_SECONDS", "0"), ("POWER_OFF_RETRY_SECONDS", "2")]);
    let old = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    stack.provider.set_obeys_shutdown(&format!("svc-{}", old.machine), false).unwrap();
    let locked = Fault::Status { status: 423, code: "locked".to_owned(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(1000, "POST", "/actions/poweroff", locked.clone()));
    stack.provider.add_fault(FaultRule::times(1000, "DELETE", "/servers/", locked));
    let recovery = recover(&stack, &process, &json!({"idpUserId": "user_1", "acceptLoss": true})).await;
    let operation = stack.wait_until_ended(&process, &string_field(&recovery, "operationId")).await;
    assert_eq!(
        (&operation["state"], &operation["errorCode"]),
        (&json!("succeeded"), &Value::Null),
        "{operation}"
    );
    let detail = "the provider did not power the server off: locked";
    let is_refused = |line: &Value| line["step"] == "power_off_server" && line["detail"] == detail;
    assert!(operation["log"].as_array().unwrap().iter().any(is_refused), "{operation}");
    let new = stack.wait_for_host_settings(&process, &string_field(&recovery, "machineId")).await;
    stack.send_heartbeat(&process, &new, &heartbeat_of(&new)).await;
    let find_removal = || async {
        let operations = stack.fetch_record(&process, &old.machine).await["operations"].clone();
        operations.as_array()?.iter().find(|operation| operation["kind"] == "remove_server").cloned()
    };
    let removal = stack.eventually("the removal is created", find_removal).await;
    let path = format!("/vps/operations/{}/abandon", string_field(&removal, "operationId"));
    assert_eq!(stack.post(&process, &path, &json!({})).await.status, 200);
    // A call in flight ends when the lease expires, after 2 s.
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    stack.provider.clear_faults();
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    assert!(
        stack.power_state(&old.machine).is_some(),
        "the server was deleted although the removal was abandoned"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn replace_first_requires_confirmation_before_data_loss() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let old = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let recovery = recover(&stack, &process, &json!({"idpUserId": "user_1", "replaceFirst": true})).await;
    let path = format!("/vps/operations/{}", string_field(&recovery, "operationId"));
    let is_waiting = || async {
        let operation = stack.get(&process, &path).await.body;
        (operation["state"] == "waiting").then_some(operation)
    };
    let waiting = stack.eventually("the operation is waiting", is_waiting).await;
    assert_eq!(waiting["question"]["code"], "replace_first_loses_data", "{waiting}");
    stack.assert_only_server(&old.machine);
    stack.post(&process, &format!("{path}/continue"), &json!({"acceptLoss": true})).await;
    let new = stack.wait_for_host_settings(&process, &string_field(&recovery, "machineId")).await;
    stack.assert_only_server(&new.machine);
}

#[tokio::test(flavor = "multi_thread")]
async fn boot_progress_extends_the_registration_deadline() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("REGISTRATION_TTL_SECONDS", "6")]);
    let provisioned = stack.provision(&process, "user_1").await;
    let host_settings =
        stack.wait_for_host_settings(&process, &string_field(&provisioned, "machineId")).await;
    let report_bytes = |bytes: u64| {
        let path = format!("/vps/{}/boot-stage", host_settings.machine);
        let request = stack.request(&process, reqwest::Method::POST, &path);
        let body = json!({"stage": "restore", "progress": {"bytes": bytes, "totalBytes": 100}});
        stack.send(request.bearer_auth(&host_settings.registration_token).json(&body))
    };
    for bytes in 1..=8 {
        assert_eq!(report_bytes(bytes).await.status, 204);
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    }
    let booting = stack.fetch_record(&process, &host_settings.machine).await;
    assert_eq!((&booting["status"], &booting["bootProgress"]["bytes"]), (&json!("provisioning"), &json!(8)));
    let has_failed = || async {
        // Repeating the same byte count is not progress.
        report_bytes(8).await;
        (stack.status(&process, &host_settings.machine).await == "failed").then_some(())
    };
    stack.eventually("the registration expires without progress", has_failed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn recovery_and_provisioning_reject_a_lost_pointer() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let old = stack.start_machine(&process, "user_1").await;
    let mut beat = heartbeat_of(&old);
    beat["lastBackup"] = json!({"status": "success", "takenAt": "2026-01-02T03:04:05.678Z",
        "key": "system/db/snapshots/x.dump", "sizeBytes": 4});
    stack.send_heartbeat(&process, &old, &beat).await;
    stack.store.remove(BUCKET, "user_1/primary/system/db/latest");
    let empty = json!({"idpUserId": "user_1", "allowEmpty": true});
    let refused = stack.post(&process, "/vps/recover", &empty).await;
    refused.assert_problem(409, "snapshot_unusable");
    assert!(refused.body["detail"].as_str().unwrap().contains("svcctl pointer rebuild"), "{refused:?}");
    let deleted = stack.delete(&process, &format!("/vps/{}", old.machine)).await.body;
    stack.wait_until_ended(&process, &string_field(&deleted, "operationId")).await;
    let again = stack.post(&process, "/vps/provision", &super::stack::provision_body("user_1")).await;
    again.assert_problem(409, "snapshot_unusable");
}

#[tokio::test(flavor = "multi_thread")]
async fn discard_is_refused_until_deletion_has_final_backup() {
    let stack = Stack::start().await;
    let settings = [("LAST_BACKUP_STALL_SECONDS", "60"), ("DELETE_GRACE_SECONDS", "60")];
    let process = stack.start_platform_with(&settings);
    let old = start_host(&stack, &process).await;
    let machine = old.settings.machine.clone();
    let deleted = stack.delete(&process, &format!("/vps/{machine}")).await.body;
    let is_requested = || async { (old.call_count("POST", "/_svc/internal/backup") > 0).then_some(()) };
    stack.eventually("the final backup is requested", is_requested).await;

    let path = format!("/vps/{machine}/discard");
    let refused = stack.post(&process, &path, &json!({})).await;
    refused.assert_problem(409, "invalid_state");
    assert_eq!(refused.body["machineStatus"], "kept", "{refused:?}");
    assert!(
        refused.body["detail"].as_str().unwrap().contains(&string_field(&deleted, "operationId")),
        "{refused:?}"
    );
    assert_eq!(stack.power_state(&machine), Some(Power::Running));

    old.store_backup(&stack, "user_1");
    let ended = stack.wait_until_ended(&process, &string_field(&deleted, "operationId")).await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
    assert!(stack.fetch_record(&process, &machine).await["finalBackupAt"].is_string());

    // Without a recorded final backup or an accepted loss, data may be unsaved.
    let client = stack.database.connect().await.unwrap();
    client.execute("UPDATE user_machines SET final_backup_at = NULL", &[]).await.unwrap();
    stack.post(&process, &path, &json!({})).await.assert_problem(409, "invalid_state");
    client.execute("UPDATE user_machines SET final_backup_at = now()", &[]).await.unwrap();
    assert_eq!(stack.post(&process, &path, &json!({})).await.status, 202);
    let is_deleted = || async { stack.power_state(&machine).is_none().then_some(()) };
    stack.eventually("the server is deleted", is_deleted).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn discard_is_refused_until_the_recovery_ends() {
    let stack = Stack::start().await;
    let settings = [("LAST_BACKUP_STALL_SECONDS", "60"), ("PREDECESSOR_KEEP_SECONDS", "60")];
    let process = stack.start_platform_with(&settings);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    let recovery = recover(&stack, &process, &json!({"idpUserId": "user_1", "acceptLoss": true})).await;
    let is_requested = || async { (old.call_count("POST", "/_svc/internal/backup") > 0).then_some(()) };
    stack.eventually("the final backup is requested", is_requested).await;
    let path = format!("/vps/{}/discard", old.settings.machine);
    let refused = stack.post(&process, &path, &json!({})).await;
    refused.assert_problem(409, "invalid_state");
    assert!(
        refused.body["detail"].as_str().unwrap().contains(&string_field(&recovery, "operationId")),
        "{refused:?}"
    );

    let machine = old.settings.machine.clone();
    drop(old);
    let ended = stack.wait_until_ended(&process, &string_field(&recovery, "operationId")).await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
    let record = stack.fetch_record(&process, &machine).await;
    assert_eq!((&record["finalBackupAt"], &record["unsavedSince"]), (&Value::Null, &Value::Null), "{record}");
    assert_eq!(stack.post(&process, &path, &json!({})).await.status, 202);
}

/// Starts a machine that is marked failed with the cause `server_gone`, although its server exists.
async fn start_machine_wrongly_marked_gone(settings: &[(&str, &str)]) -> (Stack, Process, UserDataSettings) {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(settings);
    let old = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let client = stack.database.connect().await.unwrap();
    let mark_gone = "UPDATE user_machines SET status = 'failed', failure_cause = 'server_gone', \
                server_missing_since = now()";
    client.execute(mark_gone, &[]).await.unwrap();
    (stack, process, old)
}

/// The server may have been missing from the listing only briefly, so the provider is queried again before any
/// action.
#[tokio::test(flavor = "multi_thread")]
async fn server_wrongly_reported_gone_is_kept_by_a_recovery() {
    let (stack, process, old) = start_machine_wrongly_marked_gone(&[]).await;
    let recovery = recover(&stack, &process, &recovery_body()).await;
    let operation = stack.wait_until_ended(&process, &string_field(&recovery, "operationId")).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    assert_eq!(stack.power_state(&old.machine), Some(Power::Off));
    let record = stack.fetch_record(&process, &old.machine).await;
    assert_eq!(
        (&record["failure"]["cause"], record["unsavedSince"].is_string()),
        (&json!("reinstating"), true)
    );
    let copies = stack.fetch_record(&process, &string_field(&recovery, "machineId")).await["copies"].clone();
    assert_eq!(copies["kept"][0]["machineId"], json!(old.machine), "{copies}");
    assert_eq!(copies["kept"][0]["missingSince"], Value::Null, "{copies}");
}

#[tokio::test(flavor = "multi_thread")]
async fn server_wrongly_reported_gone_survives_immediate_deletion() {
    let (stack, process, old) = start_machine_wrongly_marked_gone(&[]).await;
    let path = format!("/vps/{}", old.machine);
    let deleted = stack.delete(&process, &format!("{path}?now=true")).await.body;
    let operation = stack.wait_until_ended(&process, &string_field(&deleted, "operationId")).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    let record = stack.fetch_record(&process, &old.machine).await;
    assert!(record["unsavedSince"].is_string(), "{record}");
    let path = format!("{path}/discard");
    stack.post(&process, &path, &json!({})).await.assert_problem(409, "invalid_state");
    assert_eq!(stack.power_state(&old.machine), Some(Power::Off));
}

#[tokio::test(flavor = "multi_thread")]
async fn server_wrongly_reported_gone_runs_after_power_on() {
    let (stack, process, old) = start_machine_wrongly_marked_gone(&[]).await;
    let path = format!("/vps/{}/power", old.machine);
    for action in ["off", "reboot"] {
        let refused = stack.post(&process, &path, &json!({"action": action})).await;
        refused.assert_problem(409, "invalid_state");
    }
    let accepted = stack.post(&process, &path, &json!({"action": "on"})).await;
    assert_eq!(accepted.status, 202, "{accepted:?}");
    send_heartbeats_until_running(&stack, &process, &old).await;
    let operation = stack
        .wait_until_ended_without_registrations(&process, &string_field(&accepted.body, "operationId"))
        .await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    assert_eq!(stack.fetch_record(&process, &old.machine).await["failure"], Value::Null);
}

/// The removal queries the provider for the server once more. If the server exists, the machine can be undeleted.
#[tokio::test(flavor = "multi_thread")]
async fn server_found_during_removal_is_kept() {
    let (stack, process, old) = start_machine_wrongly_marked_gone(&[("DELETE_GRACE_SECONDS", "5")]).await;
    let name = format!("svc-{}", old.machine);
    stack.provider.hide_servers(&[name]);
    let path = format!("/vps/{}", old.machine);
    let client = stack.database.connect().await.unwrap();
    let deleted = stack.delete(&process, &path).await.body;
    stack.wait_until_ended(&process, &string_field(&deleted, "operationId")).await;
    stack.provider.hide_servers(&[]);
    let is_kept = || async {
        stack.fetch_record(&process, &old.machine).await["unsavedSince"].is_string().then_some(())
    };
    stack.eventually("the server is kept", is_kept).await;
    let query = "SELECT error_code FROM operations WHERE kind = 'remove_server'";
    let code: Option<String> = client.query_one(query, &[]).await.unwrap().get(0);
    assert_eq!(code.as_deref(), Some("server_found"));
    let response = stack.post(&process, &format!("{path}/undelete"), &json!({})).await;
    assert_eq!(response.status, 202, "{response:?}");
    send_heartbeats_until_running(&stack, &process, &old).await;
}
