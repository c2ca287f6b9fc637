//! The copies in a machine's record match the actual state of the provider and the store.

use kit::s3::{Fault, FaultRule};
use serde_json::{Value, json};

use super::fake_host::start_host;
use super::stack::{BUCKET, Process, Stack, UserDataSettings, heartbeat_of};

const TAKEN_AT: &str = "2026-01-02T03:04:05.678Z";

async fn fetch_copies(stack: &Stack, process: &Process, machine: &str) -> Value {
    stack.get(process, &format!("/vps/{machine}")).await.body["copies"].clone()
}

fn server_name(host_settings: &UserDataSettings) -> String {
    format!("svc-{}", host_settings.machine)
}

/// Waits until the operation has a question. Returns the question's code.
async fn wait_for_question(stack: &Stack, process: &Process, operation: &str) -> Value {
    let find_question = || async {
        let current = stack.get(process, &format!("/vps/operations/{operation}")).await.body;
        (current["state"] == "waiting").then(|| current["question"]["code"].clone())
    };
    stack.eventually("the operation is waiting", find_question).await
}

/// Starts a machine with a snapshot, and recovers its slot: the successor has served traffic, and the old server is
/// kept.
async fn start_recovered_slot(stack: &Stack, process: &Process) -> (UserDataSettings, UserDataSettings) {
    let old = stack.start_machine(process, "user_1").await;
    stack.store_snapshot("user_1");
    let body = json!({"idpUserId": "user_1", "acceptLoss": true});
    let recovery = stack.post(process, "/vps/recover", &body).await.body;
    let new = stack.wait_for_host_settings(process, recovery["machineId"].as_str().unwrap()).await;
    stack.register(process, &new).await;
    stack.send_heartbeat(process, &new, &heartbeat_of(&new)).await;
    stack.wait_until_ended(process, recovery["operationId"].as_str().unwrap()).await;
    (old, new)
}

#[tokio::test(flavor = "multi_thread")]
async fn kept_server_that_the_provider_lost_is_shown_as_missing() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("PREDECESSOR_KEEP_SECONDS", "600")]);
    let (old, new) = start_recovered_slot(&stack, &process).await;
    let kept_server = fetch_copies(&stack, &process, &new.machine).await["kept"][0].clone();
    assert_eq!(
        (&kept_server["machineId"], &kept_server["missingSince"]),
        (&json!(old.machine), &Value::Null),
        "{kept_server}"
    );

    let is_missing = |expected: bool| {
        let (stack, process, machine) = (&stack, &process, &new.machine);
        async move {
            let kept_server = fetch_copies(stack, process, machine).await["kept"][0].clone();
            (kept_server["missingSince"].is_string() == expected).then_some(kept_server)
        }
    };
    stack.provider.hide_servers(&[server_name(&old)]);
    stack.eventually("the server is missing", || is_missing(true)).await;
    stack.provider.hide_servers(&[]);
    stack.eventually("the server is listed again", || is_missing(false)).await;
    stack.provider.lose_server(&server_name(&old)).await.unwrap();
    stack.eventually("the server is lost", || is_missing(true)).await;
    assert_eq!(stack.status(&process, &new.machine).await, "running");
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_server_is_not_shown_as_an_intact_copy() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let (lost, failed) =
        (stack.start_machine(&process, "user_1").await, stack.start_machine(&process, "user_2").await);
    stack.provider.lose_server(&server_name(&lost)).await.unwrap();
    let is_failed = || async { (stack.status(&process, &lost.machine).await == "failed").then_some(()) };
    stack.eventually("the machine fails", is_failed).await;
    let copies = fetch_copies(&stack, &process, &lost.machine).await;
    assert_eq!((&copies["live"], &copies["exposedSeconds"]), (&Value::Null, &Value::Null), "{copies}");

    // No other check covers a machine that an operator took out of service.
    let path = format!("/vps/{}/fail", failed.machine);
    stack.post(&process, &path, &json!({"reason": "test"})).await;
    let live = fetch_copies(&stack, &process, &failed.machine).await["live"].clone();
    assert_eq!((&live["machineId"], &live["missingSince"]), (&json!(failed.machine), &Value::Null));
    stack.provider.lose_server(&server_name(&failed)).await.unwrap();
    let is_missing = || async {
        let live = fetch_copies(&stack, &process, &failed.machine).await["live"].clone();
        live["missingSince"].is_string().then_some(())
    };
    stack.eventually("the server is missing", is_missing).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn newest_snapshot_is_read_from_the_store() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let copies = fetch_copies(&stack, &process, &host_settings.machine).await;
    assert_eq!((&copies["newestSnapshot"], &copies["snapshotProblem"]), (&Value::Null, &Value::Null));

    // No heartbeat has reported this snapshot.
    stack.store_snapshot_by("user_1", &host_settings.machine, TAKEN_AT);
    let copies = fetch_copies(&stack, &process, &host_settings.machine).await;
    let newest = &copies["newestSnapshot"];
    assert_eq!((&newest["takenAt"], &newest["machineId"]), (&json!(TAKEN_AT), &json!(host_settings.machine)));
    assert_eq!((&newest["source"], &copies["newestSnapshotAt"]), (&json!("store"), &json!(TAKEN_AT)));
    assert!(newest["key"].as_str().unwrap().ends_with(".dump"), "{copies}");
    let exposed = copies["exposedSeconds"].as_u64().unwrap();
    assert!(exposed > 86_400, "the exposure must count from that snapshot: {copies}");

    // The pointer takes precedence over a later time from a heartbeat. The two can differ after a pointer rebuild.
    let mut beat = heartbeat_of(&host_settings);
    let reported = "2026-03-02T03:04:05.678Z";
    beat["lastBackup"] = json!({"status": "success", "takenAt": reported, "key": "x", "sizeBytes": 4});
    stack.send_heartbeat(&process, &host_settings, &beat).await;
    assert_eq!(fetch_copies(&stack, &process, &host_settings.machine).await["newestSnapshotAt"], TAKEN_AT);

    // If the snapshot is incomplete or the store is unreadable, the reported snapshot is shown with the problem.
    let object = stack.store_snapshot_at("user_1", TAKEN_AT);
    stack.store.remove(BUCKET, &object);
    let copies = fetch_copies(&stack, &process, &host_settings.machine).await;
    assert_eq!(
        (&copies["newestSnapshot"]["source"], &copies["newestSnapshotAt"]),
        (&json!("reported"), &json!(reported))
    );
    assert!(copies["snapshotProblem"].as_str().unwrap().contains("the object is missing"), "{copies}");
    let stalled = stack
        .store
        .add_fault(FaultRule::new(Fault::Delay(std::time::Duration::from_secs(60))).key("latest").always());
    let started = std::time::Instant::now();
    let copies = fetch_copies(&stack, &process, &host_settings.machine).await;
    assert!(started.elapsed() < std::time::Duration::from_secs(30), "{:?}", started.elapsed());
    assert!(stalled.hits() > 0);
    assert_eq!(copies["snapshotProblem"], "the object store is not responding", "{copies}");
    assert_eq!(copies["newestSnapshot"]["source"], "reported", "{copies}");
}

#[tokio::test(flavor = "multi_thread")]
async fn newer_unpublished_snapshot_is_shown() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let later = svc::clock::rfc3339_ms(jiff::Timestamp::now());
    stack.store_snapshot_by("user_1", &host_settings.machine, &later);
    let copies = fetch_copies(&stack, &process, &host_settings.machine).await;
    assert_eq!((&copies["newestSnapshotAt"], &copies["newerSnapshot"]), (&json!(later), &Value::Null));
    // The pointer moves back, as if the host had stored its later snapshot but could not advance the pointer.
    stack.store_snapshot_by("user_1", &host_settings.machine, TAKEN_AT);
    let copies = fetch_copies(&stack, &process, &host_settings.machine).await;
    assert_eq!(copies["newestSnapshotAt"], TAKEN_AT, "{copies}");
    let newer = &copies["newerSnapshot"];
    assert_eq!(
        (&newer["takenAt"], &newer["machineId"]),
        (&json!(later), &json!(host_settings.machine)),
        "{copies}"
    );
    // A snapshot from another machine, or one without its dump, is not offered.
    let offered_key = newer["key"].as_str().unwrap().to_owned();
    let still_later = jiff::Timestamp::now().checked_add(jiff::SignedDuration::from_hours(1)).unwrap();
    stack.store_snapshot_by(
        "user_1",
        &uuid::Uuid::now_v7().to_string(),
        &svc::clock::rfc3339_ms(still_later),
    );
    stack.store_snapshot_by("user_1", &host_settings.machine, TAKEN_AT);
    assert_eq!(
        fetch_copies(&stack, &process, &host_settings.machine).await["newerSnapshot"]["key"],
        offered_key.as_str()
    );
    stack.store.remove(BUCKET, &format!("user_1/primary/{offered_key}"));
    assert_eq!(fetch_copies(&stack, &process, &host_settings.machine).await["newerSnapshot"], Value::Null);
    stack.store_snapshot_by("user_1", &host_settings.machine, &later);
    stack.store_snapshot_by("user_1", &host_settings.machine, TAKEN_AT);
    let copies = fetch_copies(&stack, &process, &host_settings.machine).await;
    let newer = &copies["newerSnapshot"];
    let recovery = json!({"idpUserId": "user_1", "snapshotKey": newer["key"], "acceptLoss": true});
    assert_eq!(stack.post(&process, "/vps/recover", &recovery).await.status, 202);
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_recovery_reports_newer_snapshot() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let later = svc::clock::rfc3339_ms(jiff::Timestamp::now());
    stack.store_snapshot_by("user_1", &host_settings.machine, &later);
    stack.store_snapshot_by("user_1", &host_settings.machine, TAKEN_AT);
    let recovery = json!({"idpUserId": "user_1", "acceptLoss": true});
    let first = stack.post(&process, "/vps/recover", &recovery).await.body;
    assert_eq!(first["newerSnapshot"]["takenAt"], later, "{first}");
    // The first replacement never registers, so it has taken no snapshot.
    let replacement = first["machineId"].as_str().unwrap();
    // The recovery has two questions: whether to skip the final backup, and whether to restore the older snapshot.
    let path = format!("/vps/operations/{}/continue", first["operationId"].as_str().unwrap());
    let has_server = || async {
        stack.post(&process, &path, &json!({"acceptLoss": true})).await;
        let record = stack.get(&process, &format!("/vps/{replacement}")).await;
        (!record.body["providerServerId"].is_null()).then_some(())
    };
    stack.eventually("the replacement has a server", has_server).await;
    // Without its server, the first machine cannot serve its slot again.
    let client = stack.database.connect().await.unwrap();
    let sql = "UPDATE user_machines SET provider_server_id = NULL WHERE machine_id = $1";
    client.execute(sql, &[&host_settings.machine.parse::<uuid::Uuid>().unwrap()]).await.unwrap();
    let failed = stack.post(&process, &format!("/vps/{replacement}/fail"), &json!({"reason": "test"})).await;
    assert_eq!(failed.status, 200, "{failed:?}");
    let second = stack.post(&process, "/vps/recover", &recovery).await;
    assert_eq!(second.body["oldMachineId"], replacement, "{second:?}");
    assert_eq!((second.status, &second.body["newerSnapshot"]["takenAt"]), (202, &json!(later)), "{second:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn accepted_loss_reports_newer_snapshot_despite_store_error() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "1")]);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    let recovery = stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    let id = recovery["operationId"].as_str().unwrap();
    wait_for_question(&stack, &process, id).await;
    // In the meantime, the host has stored a snapshot but could not advance the pointer.
    let now = svc::clock::rfc3339_ms(jiff::Timestamp::now());
    let newer = stack.store_snapshot_by("user_1", &old.settings.machine, &now);
    stack.store_snapshot_by("user_1", &old.settings.machine, TAKEN_AT);
    let refused = stack.store.add_fault(FaultRule::new(Fault::Status(403)).method("GET").query("snapshots"));
    let path = format!("/vps/operations/{id}/continue");
    let response = stack.post(&process, &path, &json!({"acceptLoss": true})).await;
    assert_eq!(response.status, 200, "{response:?}");
    let operation = stack.wait_until_ended(&process, id).await;
    assert_eq!((&operation["state"], refused.hits()), (&json!("succeeded"), 1), "{operation}");
    let lines = operation["log"].as_array().unwrap();
    let done = lines.iter().find(|line| line["step"] == "last_backup" && line["outcome"] == "done");
    let detail = done.unwrap()["detail"].as_str().unwrap();
    assert!(detail.contains(&newer) && detail.contains("is stored but not the latest"), "{detail}");
}

/// An operator skips the final backup, learns of a newer snapshot, and retries the backup instead.
#[tokio::test(flavor = "multi_thread")]
async fn retry_after_snapshot_question_restarts_final_backup() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_STALL_SECONDS", "60")]);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    let recovery = stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    let id = recovery["operationId"].as_str().unwrap();
    old.wait_for_backup_request(&stack).await;
    let now = svc::clock::rfc3339_ms(jiff::Timestamp::now());
    stack.store_snapshot_by("user_1", &old.settings.machine, &now);
    stack.store_snapshot_by("user_1", &old.settings.machine, TAKEN_AT);
    let path = format!("/vps/operations/{id}/continue");
    let skipped = stack.post(&process, &path, &json!({"acceptLoss": true})).await;
    assert_eq!(skipped.status, 200, "{skipped:?}");
    assert_eq!(wait_for_question(&stack, &process, id).await, "newer_snapshot");

    let late = svc::clock::rfc3339_ms(jiff::Timestamp::now() + jiff::SignedDuration::from_hours(1));
    let held = json!({"latest": "k", "loss": "a table is gone"});
    old.behavior.lock().unwrap().backup_status = json!({"running": false,
        "last": {"status": "error", "beganAt": late, "error": "a table is gone", "held": held}});
    let retried = stack.post(&process, &path, &json!({})).await;
    assert_eq!(retried.status, 200, "{retried:?}");
    let question = wait_for_question(&stack, &process, id).await;
    assert_eq!(question, "last_backup_held_back", "the loss must no longer be accepted");
    assert_eq!(old.call_count("POST", "/_svc/internal/backup"), 2, "the backup must be requested again");
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshot_of_another_machine_does_not_reduce_exposure() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let mut beat = heartbeat_of(&host_settings);
    beat["lastBackup"] = json!({"status": "success", "takenAt": TAKEN_AT, "key": "x", "sizeBytes": 4});
    stack.send_heartbeat(&process, &host_settings, &beat).await;
    // The database does not contain the machine that took this snapshot.
    let now = svc::clock::rfc3339_ms(jiff::Timestamp::now());
    stack.store_snapshot_by("user_1", &uuid::Uuid::now_v7().to_string(), &now);
    let copies = fetch_copies(&stack, &process, &host_settings.machine).await;
    assert_eq!(copies["newestSnapshotAt"], now);
    assert!(copies["exposedSeconds"].as_u64().unwrap() > 86_400, "{copies}");
}

#[tokio::test(flavor = "multi_thread")]
async fn exposure_without_a_backup_starts_at_the_registration() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    // An earlier machine took the snapshot, long before this one registered.
    stack.store_snapshot_by("user_1", &uuid::Uuid::now_v7().to_string(), TAKEN_AT);
    let copies = fetch_copies(&stack, &process, &host_settings.machine).await;
    assert_eq!(copies["newestSnapshotAt"], TAKEN_AT, "{copies}");
    assert!(copies["exposedSeconds"].as_u64().unwrap() < 86_400, "{copies}");
}

#[tokio::test(flavor = "multi_thread")]
async fn server_of_abandoned_removal_is_kept_until_discarded() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("PREDECESSOR_KEEP_SECONDS", "600")]);
    let (old, new) = start_recovered_slot(&stack, &process).await;
    let client = stack.database.connect().await.unwrap();
    let sql = "UPDATE user_machines SET removal_abandoned_at = now() WHERE machine_id = $1";
    let id: uuid::Uuid = old.machine.parse().unwrap();
    client.execute(sql, &[&id]).await.unwrap();
    let kept_server = fetch_copies(&stack, &process, &new.machine).await["kept"][0].clone();
    assert!(kept_server["until"].is_null() && kept_server["removalAbandonedAt"].is_string(), "{kept_server}");
    let path = format!("/vps/{}/discard", old.machine);
    let response = stack.post(&process, &path, &json!({"acceptLoss": true})).await;
    assert_eq!(response.status, 202, "{response:?}");
    let is_deleted = || async { stack.provider.server_by_name(&server_name(&old)).is_none().then_some(()) };
    stack.eventually("the old server is deleted", is_deleted).await;

    // A deleted server cannot be discarded, and neither can the server of a machine that still has its slot.
    let is_refused = || async {
        let response = stack.post(&process, &path, &json!({"acceptLoss": true})).await;
        (response.status == 409).then_some(response)
    };
    let refused = stack.eventually("the deletion is recorded", is_refused).await;
    assert_eq!(refused.body["machineStatus"], "server_deleted", "{refused:?}");
    assert!(refused.body["detail"].as_str().unwrap().contains("already been deleted"), "{refused:?}");
    let path = format!("/vps/{}/discard", new.machine);
    let refused = stack.post(&process, &path, &json!({})).await;
    refused.assert_problem(409, "invalid_state");
    assert!(refused.body["detail"].as_str().unwrap().contains("`svcctl delete "), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_return_503_while_the_store_hangs() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let stalled =
        stack.store.add_fault(FaultRule::new(Fault::Delay(std::time::Duration::from_secs(60))).always());
    let started = std::time::Instant::now();
    let recover = json!({"idpUserId": "user_1"});
    let body = json!({"imageVersion": "v1"});
    let (recovery, pointer, rollout) = tokio::join!(
        stack.post(&process, "/vps/recover", &recover),
        stack.get(&process, "/vps/slots/pointer?idpUserId=user_1"),
        stack.post(&process, "/vps/deploy", &body),
    );
    assert!(started.elapsed() < std::time::Duration::from_secs(30), "{:?}", started.elapsed());
    for response in [recovery, pointer, rollout] {
        response.assert_problem(503, "store_unavailable");
    }
    assert!(stalled.hits() > 0);
}
