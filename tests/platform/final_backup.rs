//! Before a host is replaced, its writers stop, and the operation waits for a later snapshot while the final backup
//! makes progress. If a reachable host cannot take a backup, an operator decides.

use std::time::Duration;

use serde_json::{Value, json};
use svc::clock::rfc3339_ms;
use svc::http::proof::Route;

use super::fake_host::{FakeHost, start_host};
use super::stack::{BUCKET, Process, Stack, heartbeat};

const QUIESCE: &str = "/_svc/internal/quiesce";
const BACKUP: &str = "/_svc/internal/backup";
/// The detail that the step `last_backup` logs for an accepted loss, if the slot has a snapshot.
const LOSS_ACCEPTED: &str = "no final backup; the operator accepted the loss of data written since the newest \
                             copy, which is the snapshot taken at 2026-01-02T03:04:05.678Z";

async fn recover(stack: &Stack, process: &Process, overrides: Value) -> Value {
    let mut body = json!({"idpUserId": "user_1"});
    body.as_object_mut().unwrap().extend(overrides.as_object().unwrap().clone());
    let response = stack.post(process, "/vps/recover", &body).await;
    assert_eq!(response.status, 202, "{response:?}");
    response.body
}

async fn fetch_operation(stack: &Stack, process: &Process, recovery: &Value) -> Value {
    let path = format!("/vps/operations/{}", recovery["operationId"].as_str().unwrap());
    stack.get(process, &path).await.body
}

async fn wait_for_question(stack: &Stack, process: &Process, recovery: &Value) -> Value {
    let is_waiting = || async {
        let operation = fetch_operation(stack, process, recovery).await;
        (operation["state"] == "waiting").then_some(operation)
    };
    stack.eventually("the operation is waiting", is_waiting).await
}

async fn wait_for_call(stack: &Stack, host: &FakeHost, method: &str, path: &str) {
    stack.eventually(path, || async { (host.call_count(method, path) > 0).then_some(()) }).await;
}

/// Asserts that the operation is still waiting for the final backup after it has evaluated the host's current report.
async fn assert_no_final_backup(stack: &Stack, process: &Process, host: &FakeHost, recovery: &Value) {
    // The platform sends the second request only after it has evaluated the response to the first.
    let expected = host.call_count("GET", BACKUP) + 2;
    let is_polled = || async { (host.call_count("GET", BACKUP) >= expected).then_some(()) };
    stack.eventually("the host's backups are polled", is_polled).await;
    let operation = fetch_operation(stack, process, recovery).await;
    assert_eq!(
        (&operation["state"], &operation["step"]),
        (&json!("running"), &json!("last_backup")),
        "{operation}"
    );
}

/// Waits until the operation has succeeded. Returns the detail that its step `last_backup` logged.
async fn wait_for_backup_detail(stack: &Stack, process: &Process, recovery: &Value) -> String {
    let operation = stack.wait_until_ended(process, recovery["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}\n{}", stack.log());
    let lines = operation["log"].as_array().unwrap().clone();
    let done = lines.iter().find(|line| line["step"] == "last_backup" && line["outcome"] == "done");
    done.unwrap()["detail"].as_str().unwrap().to_owned()
}

fn continue_path(recovery: &Value) -> String {
    format!("/vps/operations/{}/continue", recovery["operationId"].as_str().unwrap())
}

/// Lists the audit entries for an action.
async fn list_audit(stack: &Stack, action: &str) -> Vec<Value> {
    let client = stack.database.connect().await.unwrap();
    let sql = "SELECT after FROM operator_audit WHERE action = $1 ORDER BY at";
    client.query(sql, &[&action]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

fn format_now() -> String {
    rfc3339_ms(jiff::Timestamp::now())
}

#[tokio::test(flavor = "multi_thread")]
async fn writers_stop_and_only_a_later_snapshot_of_the_host_counts() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "120")]);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    let recovery = recover(&stack, &process, json!({})).await;
    wait_for_call(&stack, &old, "POST", BACKUP).await;
    let response = stack.send_heartbeat(&process, &old.settings, &heartbeat()).await.body;
    assert_eq!(response["superseded"], false, "the host must still make its final backup");
    assert_eq!(response["quiesce"], recovery["operationId"], "the host's writers must stay stopped");
    assert_eq!(stack.pointer("user_1")["fenceEpoch"], 1, "the host must still be able to write the pointer");

    // Neither a moved pointer, nor a snapshot from before the request, nor one from another machine counts.
    let mut moved = stack.pointer("user_1");
    moved["seq"] = json!(8);
    stack.write_pointer("user_1", &moved);
    assert_no_final_backup(&stack, &process, &old, &recovery).await;
    let (other, early, now) = (uuid::Uuid::now_v7().to_string(), "2026-01-02T03:04:06.678Z", format_now());
    for (machine, taken_at) in [(&old.settings.machine, early), (&other, now.as_str())] {
        let key = stack.store_snapshot_by("user_1", machine, taken_at);
        old.report_backup(&key, taken_at);
        assert_no_final_backup(&stack, &process, &old, &recovery).await;
    }

    old.store_backup(&stack, "user_1");
    assert_eq!(wait_for_backup_detail(&stack, &process, &recovery).await, "the final snapshot was taken");
    let old_record = stack.get(&process, &format!("/vps/{}", old.settings.machine)).await.body;
    assert!(old_record["finalBackupAt"].is_string() && old_record["unsavedSince"].is_null(), "{old_record}");
    assert_eq!(
        stack.send_heartbeat(&process, &old.settings, &heartbeat()).await.body["superseded"],
        true,
        "the host must be superseded once its successor has registered"
    );
    let proofs = old.proofs.lock().unwrap().clone();
    assert_eq!((proofs[0].route, proofs[0].path.as_deref()), (Route::Internal, Some(QUIESCE)));
    assert_eq!(old.call_count("POST", BACKUP), 1);
    assert!(proofs.iter().all(|claims| claims.jti.is_some()));
}

/// Under a fence at an implausible epoch, every backup from the host would be rejected.
#[tokio::test(flavor = "multi_thread")]
async fn implausible_fence_is_replaced_before_backup_request() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "30")]);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    let mut forged = stack.pointer("user_1");
    forged["fenceEpoch"] = json!(100_000);
    forged["fenceMachineId"] = json!(uuid::Uuid::now_v7());
    stack.write_pointer("user_1", &forged);
    let recovery = recover(&stack, &process, json!({})).await;
    wait_for_call(&stack, &old, "POST", BACKUP).await;
    let pointer = stack.pointer("user_1");
    assert_eq!(
        (&pointer["fenceEpoch"], &pointer["fenceMachineId"]),
        (&json!(1), &json!(old.settings.machine)),
        "{pointer}"
    );
    old.store_backup(&stack, "user_1");
    assert_eq!(wait_for_backup_detail(&stack, &process, &recovery).await, "the final snapshot was taken");
}

#[tokio::test(flavor = "multi_thread")]
async fn backup_progress_extends_stall_and_operation_deadlines() {
    let stack = Stack::start().await;
    let settings = [("LAST_BACKUP_STALL_SECONDS", "2"), ("OPERATION_DEADLINE_SECONDS", "3")];
    let process = stack.start_platform_with(&settings);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    let recovery = recover(&stack, &process, json!({})).await;
    wait_for_call(&stack, &old, "POST", BACKUP).await;
    for step in 1..=12 {
        let bytes = step * (2 << 20);
        old.behavior.lock().unwrap().backup_status =
            json!({"running": true, "stage": "upload", "uploadedBytes": bytes});
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let operation = fetch_operation(&stack, &process, &recovery).await;
    assert_eq!(
        (&operation["state"], &operation["step"]),
        (&json!("running"), &json!("last_backup")),
        "{operation}"
    );
    old.store_backup(&stack, "user_1");
    assert_eq!(wait_for_backup_detail(&stack, &process, &recovery).await, "the final snapshot was taken");
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_backup_of_reachable_host_waits_for_operator() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "1")]);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    let recovery = recover(&stack, &process, json!({})).await;
    let waiting = wait_for_question(&stack, &process, &recovery).await;
    assert_eq!(waiting["question"]["code"], "last_backup_missing", "{waiting}");
    let detail = waiting["question"]["detail"].as_str().unwrap();
    assert!(
        detail.contains("2026-01-02T03:04:05.678Z") && detail.contains("its backup has stalled"),
        "{detail}"
    );
    assert_eq!(stack.provider.servers().len(), 1, "a server was created or deleted");
    assert_eq!(stack.provider.call_count("DELETE", "/servers/"), 0);
    assert_eq!(stack.pointer("user_1")["fenceEpoch"], 1);

    let path = continue_path(&recovery);
    stack.post(&process, &path, &json!({"acceptLoss": "no"})).await.assert_problem(400, "invalid_request");
    // The time spent waiting for an operator does not count as the operation's running time.
    let client = stack.database.connect().await.unwrap();
    client.execute("UPDATE operations SET created_at = now() - interval '2 days'", &[]).await.unwrap();
    let response = stack.post(&process, &path, &json!({"acceptLoss": false})).await;
    assert_eq!((response.status, &response.body["state"]), (200, &json!("running")), "{response:?}");
    wait_for_question(&stack, &process, &recovery).await;
    assert_eq!(old.call_count("POST", BACKUP), 2, "the backup must be requested again");
    let response = stack.post(&process, &path, &json!({"acceptLoss": true})).await;
    assert_eq!((response.status, &response.body["state"]), (200, &json!("running")), "{response:?}");
    assert_eq!(wait_for_backup_detail(&stack, &process, &recovery).await, LOSS_ACCEPTED);
    stack.post(&process, &path, &json!({"acceptLoss": true})).await.assert_problem(409, "invalid_state");
    assert_eq!(list_audit(&stack, "operation.continue").await.len(), 2);
    assert_eq!(
        list_audit(&stack, "last_backup.loss_accepted").await[0]["lostSince"],
        "2026-01-02T03:04:05.678Z"
    );
    let old_record = stack.get(&process, &format!("/vps/{}", old.settings.machine)).await.body;
    assert_eq!(old_record["unsavedSince"], Value::Null, "the old server must be removable");
}

#[tokio::test(flavor = "multi_thread")]
async fn abandoned_recovery_leaves_the_old_machine_running() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "1")]);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    old.behavior.lock().unwrap().stops_writers = false;
    let recovery = recover(&stack, &process, json!({})).await;
    let waiting = wait_for_question(&stack, &process, &recovery).await;
    let detail = waiting["question"]["detail"].as_str().unwrap();
    assert!(detail.contains("did not stop within the time limit"), "{waiting}");
    let path = format!("/vps/operations/{}/abandon", recovery["operationId"].as_str().unwrap());
    let response = stack.post(&process, &path, &json!({})).await;
    assert_eq!((response.status, &response.body["state"]), (200, &json!("failed")), "{response:?}");
    assert_eq!(stack.status(&process, &old.settings.machine).await, "running");
    wait_for_call(&stack, &old, "POST", "/_svc/internal/resume").await;
    assert_eq!(stack.provider.servers().len(), 1);
    assert_eq!(stack.provider.call_count("POST", "/poweroff"), 0);
    let successor = recovery["machineId"].as_str().unwrap();
    let abandoned = stack.get(&process, &format!("/vps/{successor}")).await.body;
    assert_eq!(
        (&abandoned["failure"]["cause"], &abandoned["replacedBy"]),
        (&json!("abandoned"), &json!(old.settings.machine))
    );
}

/// Returns a host's report of a failed backup, dated an hour ahead.
fn failed_backup_report(overrides: &Value) -> Value {
    let late = rfc3339_ms(jiff::Timestamp::now() + jiff::SignedDuration::from_hours(1));
    let mut last = json!({"status": "error", "beganAt": late, "error": "a table is gone"});
    last.as_object_mut().unwrap().extend(overrides.as_object().unwrap().clone());
    json!({"running": false, "last": last})
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_backup_is_retried_before_operation_waits() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "60")]);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    old.behavior.lock().unwrap().backup_status = failed_backup_report(&json!({"error": "no space left"}));
    let recovery = recover(&stack, &process, json!({})).await;
    let waiting = wait_for_question(&stack, &process, &recovery).await;
    assert!(waiting["question"]["detail"].as_str().unwrap().contains("no space left"), "{waiting}");
    assert_eq!(old.call_count("POST", BACKUP), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn held_back_snapshot_waits_and_counts_after_acceptance() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "60")]);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    let loss = "the table app_notes.notes with 400 rows is gone";
    old.behavior.lock().unwrap().backup_status =
        failed_backup_report(&json!({"held": {"latest": "k", "loss": loss}}));
    let recovery = recover(&stack, &process, json!({})).await;
    let waiting = wait_for_question(&stack, &process, &recovery).await;
    let taken_at = format_now();
    assert_eq!(waiting["question"]["code"], "last_backup_held_back", "{waiting}");
    let detail = waiting["question"]["detail"].as_str().unwrap();
    let accept = format!("svcctl backup accept {}", old.settings.machine);
    for part in
        [loss, &accept, "svcctl operation continue", "2026-01-02T03:04:05.678Z", "--accept-loss", "abandon"]
    {
        assert!(detail.contains(part), "{part}: {detail}");
    }
    assert_eq!(old.call_count("POST", BACKUP), 1, "a held-back snapshot must not be retried");

    let path = continue_path(&recovery);
    assert_eq!(stack.post(&process, &path, &json!({})).await.status, 200);
    let waiting = wait_for_question(&stack, &process, &recovery).await;
    assert!(waiting["log"].to_string().contains("retried the step"), "{waiting}");
    let accept = format!("/vps/{}/backup-accept", old.settings.machine);
    let accepted = stack.post(&process, &accept, &json!({})).await;
    assert_eq!(
        accepted.status, 202,
        "a machine out of service must still be able to accept its final backup: {accepted:?}"
    );
    wait_for_call(&stack, &old, "POST", "/_svc/internal/backup-accept").await;
    // A request for the slot's current machine applies to the machine that is being replaced.
    let by_slot = format!("/vps/{}/backup-accept", recovery["machineId"].as_str().unwrap());
    let accepted = stack.post(&process, &by_slot, &json!({})).await;
    assert_eq!(
        (accepted.status, &accepted.body["machineId"]),
        (202, &json!(old.settings.machine)),
        "{accepted:?}"
    );
    assert_eq!(old.call_count("POST", "/_svc/internal/backup-accept"), 2);
    let key = stack.store_snapshot_by("user_1", &old.settings.machine, &taken_at);
    old.report_backup(&key, &taken_at);
    assert_eq!(stack.post(&process, &path, &json!({})).await.status, 200);
    assert_eq!(wait_for_backup_detail(&stack, &process, &recovery).await, "the final snapshot was taken");
    let saved = stack.get(&process, &format!("/vps/{}", old.settings.machine)).await.body;
    assert_eq!(saved["finalBackupAt"], taken_at);
    stack.post(&process, &accept, &json!({})).await.assert_problem(409, "invalid_state");
    stack.post(&process, &by_slot, &json!({})).await.assert_problem(409, "invalid_state");
}

#[tokio::test(flavor = "multi_thread")]
async fn older_host_with_a_held_back_snapshot_gets_no_retries() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "60")]);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    let error =
        "the database holds 3 rows instead of 400\n  next: `svc-db-backup accept`, if the loss is intended";
    old.behavior.lock().unwrap().backup_status = failed_backup_report(&json!({"error": error}));
    let recovery = recover(&stack, &process, json!({})).await;
    let waiting = wait_for_question(&stack, &process, &recovery).await;
    assert_eq!(waiting["question"]["code"], "last_backup_held_back", "{waiting}");
    assert_eq!(old.call_count("POST", BACKUP), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn older_host_is_backed_up_without_quiescing() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "20")]);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    {
        let mut behavior = old.behavior.lock().unwrap();
        (behavior.can_quiesce, behavior.reports_backups) = (false, false);
    }
    let recovery = recover(&stack, &process, json!({})).await;
    wait_for_call(&stack, &old, "POST", BACKUP).await;
    stack.store_snapshot_by("user_1", &old.settings.machine, &format_now());
    wait_for_backup_detail(&stack, &process, &recovery).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn host_with_unregistered_key_gets_no_request() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let old = start_host(&stack, &process).await;
    let client = stack.database.connect().await.unwrap();
    client.execute("UPDATE user_machines SET tls_spki_sha256 = $1", &[&"0".repeat(64)]).await.unwrap();
    stack.store_snapshot("user_1");
    let recovery = recover(&stack, &process, json!({})).await;
    let detail = wait_for_backup_detail(&stack, &process, &recovery).await;
    assert!(detail.starts_with("the host cannot be reached"), "{detail}");
    assert!(old.proofs.lock().unwrap().is_empty());
}

/// Starts a host that never stops its writers, and reports one more dispatch on each request to quiesce.
async fn start_host_with_unstoppable_writers() -> (Stack, Process, FakeHost) {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "2")]);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    {
        let mut behavior = old.behavior.lock().unwrap();
        (behavior.stops_writers, behavior.added_dispatches) = (false, 1);
    }
    (stack, process, old)
}

#[tokio::test(flavor = "multi_thread")]
async fn growing_dispatch_count_does_not_delay_the_operation() {
    let (stack, process, old) = start_host_with_unstoppable_writers().await;
    let recovery = recover(&stack, &process, json!({})).await;
    let waiting = wait_for_question(&stack, &process, &recovery).await;
    let detail = waiting["question"]["detail"].as_str().unwrap();
    assert!(detail.contains("did not stop within the time limit"), "{waiting}");
    assert!(old.behavior.lock().unwrap().running_dispatches > 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn accepted_loss_limits_wait_for_writers_that_never_stop() {
    let (stack, process, old) = start_host_with_unstoppable_writers().await;
    let recovery = recover(&stack, &process, json!({"acceptLoss": true})).await;
    assert_eq!(wait_for_backup_detail(&stack, &process, &recovery).await, LOSS_ACCEPTED);
    assert!(old.call_count("POST", QUIESCE) > 1, "the host must be reachable");
    assert_eq!(
        list_audit(&stack, "last_backup.loss_accepted").await[0]["operationId"],
        recovery["operationId"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_progress_is_bounded() {
    let stack = Stack::start().await;
    let settings = [("LAST_BACKUP_STALL_SECONDS", "2"), ("LAST_BACKUP_LIMIT_SECONDS", "5")];
    let process = stack.start_platform_with(&settings);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    // The steps are too small to count as progress.
    let progress_task = spawn_growing_progress(&old, 1);
    let recovery = recover(&stack, &process, json!({})).await;
    let waiting = wait_for_question(&stack, &process, &recovery).await;
    assert!(waiting["question"]["detail"].as_str().unwrap().contains("its backup has stalled"), "{waiting}");
    progress_task.abort();
    // The steps count as progress, but the backup never ends.
    let progress_task = spawn_growing_progress(&old, 8 << 20);
    assert_eq!(stack.post(&process, &continue_path(&recovery), &json!({})).await.status, 200);
    let waiting = wait_for_question(&stack, &process, &recovery).await;
    assert!(waiting["question"]["detail"].as_str().unwrap().contains("has not ended within"), "{waiting}");
    progress_task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn loss_is_accepted_while_a_host_claims_progress() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "60")]);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    let progress_task = spawn_growing_progress(&old, 8 << 20);
    let recovery = recover(&stack, &process, json!({})).await;
    wait_for_call(&stack, &old, "POST", BACKUP).await;
    let path = continue_path(&recovery);
    stack.post(&process, &path, &json!({})).await.assert_problem(409, "invalid_state");
    let response = stack.post(&process, &path, &json!({"acceptLoss": true})).await;
    assert_eq!((response.status, &response.body["state"]), (200, &json!("running")), "{response:?}");
    assert_eq!(wait_for_backup_detail(&stack, &process, &recovery).await, LOSS_ACCEPTED);
    progress_task.abort();
}

/// Makes the host report this many additional bytes every 100 ms.
fn spawn_growing_progress(old: &FakeHost, bytes: u64) -> tokio::task::JoinHandle<()> {
    let behavior = old.behavior.clone();
    tokio::spawn(async move {
        for n in 1.. {
            behavior.lock().unwrap().backup_status =
                json!({"running": true, "stage": "dump", "dumpedBytes": n * bytes, "uploadedBytes": 0});
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
}

/// The credentials of a machine that is being replaced allow all of these writes.
#[tokio::test(flavor = "multi_thread")]
async fn forged_snapshot_does_not_count_as_final_backup() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "120")]);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    let earlier = format_now();
    old.report_backup("system/db/snapshots/2026-01-02T03-04-05.678Z-1.dump", &earlier);
    let recovery = recover(&stack, &process, json!({})).await;
    wait_for_call(&stack, &old, "POST", BACKUP).await;
    // This snapshot is consistent, but the machine itself reports an earlier snapshot, and then another recent one.
    stack.store_snapshot_by("user_1", &old.settings.machine, &format_now());
    assert_no_final_backup(&stack, &process, &old, &recovery).await;
    let later = rfc3339_ms(jiff::Timestamp::now() + jiff::SignedDuration::from_mins(1));
    old.report_backup(&format!("system/db/snapshots/{}-1.dump", later.replace(':', "-")), &later);
    assert_no_final_backup(&stack, &process, &old, &recovery).await;

    // A snapshot from the future would count for every later operation on the slot.
    old.behavior.lock().unwrap().reports_backups = false;
    stack.store_snapshot_by("user_1", &old.settings.machine, "9999-01-01T00:00:00.000Z");
    assert_no_final_backup(&stack, &process, &old, &recovery).await;

    // The first snapshot's object does not match the pointer, and neither does the second snapshot's sidecar.
    for broken in [".dump", ".dump.json"] {
        // Until the new snapshot has been damaged, the host reports a different one, so the new one does not count.
        old.behavior.lock().unwrap().reports_backups = true;
        assert_no_final_backup(&stack, &process, &old, &recovery).await;
        let key = stack.store_snapshot_by("user_1", &old.settings.machine, &format_now());
        let object = format!("user_1/primary/{key}");
        match broken {
            ".dump" => stack.store.write(BUCKET, &object, "a dump of another size"),
            _ => stack.store.write(BUCKET, &format!("{object}.json"), "{}"),
        }
        let mut pointer = stack.pointer("user_1");
        pointer["seq"] = json!(pointer["seq"].as_u64().unwrap() + 1);
        stack.write_pointer("user_1", &pointer);
        old.behavior.lock().unwrap().reports_backups = false;
        assert_no_final_backup(&stack, &process, &old, &recovery).await;
    }

    old.behavior.lock().unwrap().reports_backups = true;
    old.store_backup(&stack, "user_1");
    assert_eq!(wait_for_backup_detail(&stack, &process, &recovery).await, "the final snapshot was taken");
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_pointer_is_not_reported_as_no_snapshot() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "1")]);
    let _old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    let recovery = recover(&stack, &process, json!({})).await;
    stack.store.write(BUCKET, "user_1/primary/system/db/latest", "not JSON");
    let waiting = wait_for_question(&stack, &process, &recovery).await;
    let detail = waiting["question"]["detail"].as_str().unwrap();
    assert!(detail.contains("cannot be read") && !detail.contains("there is no snapshot"), "{detail}");
}
