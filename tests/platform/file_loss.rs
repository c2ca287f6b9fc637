//! A replaced machine's server is kept if it may hold the only copy of some of the owner's files.

use serde_json::{Value, json};
use svc::clock::rfc3339_ms;
use svc::machine::name::Slot;
use svc::store::key::SlotPrefix;

use super::fake_host::{FakeHost, start_host};
use super::files_key::{create_repository, open_bucket};
use super::stack::{Process, Stack, heartbeat_of};

const SETTINGS: [(&str, &str); 2] =
    [("LAST_BACKUP_STALL_SECONDS", "120"), ("PREDECESSOR_KEEP_SECONDS", "600")];

async fn start_with_repository() -> (Stack, Process, FakeHost) {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&SETTINGS);
    let old = start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    create_repository(&stack, &process, &old.settings).await;
    (stack, process, old)
}

async fn recover(stack: &Stack, process: &Process) -> Value {
    let response = stack.post(process, "/vps/recover", &json!({"idpUserId": "user_1"})).await;
    assert_eq!(response.status, 202, "{response:?}");
    response.body
}

/// Stores a snapshot of the database, and reports it together with this state of the file backup.
fn report_backup_with_files(old: &FakeHost, stack: &Stack, files: &Value) {
    let taken_at = rfc3339_ms(jiff::Timestamp::now());
    let key = stack.store_snapshot_by("user_1", &old.settings.machine, &taken_at);
    let last = json!({"status": "success", "beganAt": taken_at, "takenAt": taken_at, "key": key});
    old.behavior.lock().unwrap().backup_status = json!({"running": false, "last": last, "files": files});
}

/// Waits until the recovery has succeeded. Returns the detail that its step `last_backup` logged.
async fn wait_for_backup_detail(stack: &Stack, process: &Process, recovery: &Value) -> String {
    let operation = stack.wait_until_ended(process, recovery["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}\n{}", stack.log());
    let mut lines = operation["log"].as_array().unwrap().iter();
    let done = lines.find(|line| line["step"] == "last_backup" && line["outcome"] == "done");
    done.unwrap()["detail"].as_str().unwrap().to_owned()
}

/// If everything in the store is lost, the next machine must not start as if there had never been any files.
#[tokio::test(flavor = "multi_thread")]
async fn next_machine_expects_files_that_were_reported_as_saved() {
    for (has_saved, has_snapshot) in [(false, true), (true, true), (true, false)] {
        let stack = Stack::start().await;
        let process = stack.start_platform_with(&SETTINGS);
        let old = stack.start_machine(&process, "user_1").await;
        if has_snapshot {
            stack.store_snapshot("user_1");
        }
        let mut beat = heartbeat_of(&old);
        if has_saved {
            beat["files"] = json!({"files": 1, "bytes": 1, "savedUntil": rfc3339_ms(jiff::Timestamp::now())});
        }
        assert_eq!(stack.send_heartbeat(&process, &old, &beat).await.status, 200);
        let body = json!({"idpUserId": "user_1", "acceptLoss": true, "allowEmpty": !has_snapshot});
        let accepted = stack.post(&process, "/vps/recover", &body).await;
        let new = stack.wait_for_host_settings(&process, accepted.body["machineId"].as_str().unwrap()).await;
        assert_eq!(new.user_data.contains("SVC_EXPECT_FILES"), has_saved, "{accepted:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_files_count_as_unsaved() {
    let (stack, process, old) = start_with_repository().await;
    let recovery = recover(&stack, &process).await;
    old.wait_for_backup_request(&stack).await;
    let later = rfc3339_ms(jiff::Timestamp::now() + jiff::SignedDuration::from_mins(1));
    let reason = "1 entry of the owner's home cannot be read, and is not saved (first: home/vm/disk.img)";
    report_backup_with_files(&old, &stack, &json!({"savedUntil": later, "unreadable": reason}));
    let detail = wait_for_backup_detail(&stack, &process, &recovery).await;
    let discard = format!("svcctl discard {} --accept-loss", old.settings.machine);
    assert!(detail.contains(reason) && detail.contains(&discard), "{detail}");
}

#[tokio::test(flavor = "multi_thread")]
async fn server_is_kept_if_its_file_backup_is_damaged() {
    let (stack, process, old) = start_with_repository().await;
    let mut beat = heartbeat_of(&old.settings);
    beat["attention"] = json!([{"code": "files_damaged", "detail": "the file backup is damaged: 1 pack"}]);
    assert_eq!(stack.send_heartbeat(&process, &old.settings, &beat).await.status, 200);
    let recovery = recover(&stack, &process).await;
    old.wait_for_backup_request(&stack).await;
    let later = rfc3339_ms(jiff::Timestamp::now() + jiff::SignedDuration::from_mins(1));
    report_backup_with_files(&old, &stack, &json!({"savedUntil": later}));
    let detail = wait_for_backup_detail(&stack, &process, &recovery).await;
    let discard = format!("svcctl discard {} --accept-loss", old.settings.machine);
    assert!(detail.contains("the file backup is damaged: 1 pack") && detail.contains(&discard), "{detail}");
    let record = stack.fetch_record(&process, &old.settings.machine).await;
    assert_eq!(record["unsavedSince"], record["registeredAt"], "{record}");
    assert!(record["unsavedSince"].is_string(), "{record}");
    assert_eq!(record["unsavedData"], "changes", "{record}");
    let path = format!("/vps/{}/discard", old.settings.machine);
    stack.post(&process, &path, &json!({})).await.assert_problem(409, "invalid_state");
}

/// A later machine could not restore the files, so the server, whose disk has the key, must not be deleted.
#[tokio::test(flavor = "multi_thread")]
async fn server_is_kept_if_the_platform_cannot_open_its_file_backup() {
    let (stack, process, old) = start_with_repository().await;
    let config = format!("{}/config", SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary()).files());
    // The platform's key cannot decrypt this content.
    let undecryptable = [0_u8; 64].to_vec();
    open_bucket(&stack).put(&config.into(), undecryptable).await.unwrap();
    let recovery = recover(&stack, &process).await;
    old.wait_for_backup_request(&stack).await;
    let later = rfc3339_ms(jiff::Timestamp::now() + jiff::SignedDuration::from_mins(1));
    report_backup_with_files(&old, &stack, &json!({"savedUntil": later}));
    let detail = wait_for_backup_detail(&stack, &process, &recovery).await;
    assert!(detail.contains("the platform's key does not open the file backup"), "{detail}");
    let record = stack.fetch_record(&process, &old.settings.machine).await;
    assert!(record["unsavedSince"].is_string(), "{record}");
}

#[tokio::test(flavor = "multi_thread")]
async fn server_is_kept_if_its_successor_cannot_restore_files() {
    let (stack, process, old) = start_with_repository().await;
    let recovery = recover(&stack, &process).await;
    old.wait_for_backup_request(&stack).await;
    let later = rfc3339_ms(jiff::Timestamp::now() + jiff::SignedDuration::from_mins(1));
    report_backup_with_files(&old, &stack, &json!({"savedUntil": later}));
    let detail = wait_for_backup_detail(&stack, &process, &recovery).await;
    assert!(detail.contains("the owner's files are saved as of"), "{detail}");
    let fetch_unsaved =
        async || stack.fetch_record(&process, &old.settings.machine).await["unsavedSince"].clone();
    assert_eq!(fetch_unsaved().await, Value::Null);

    let new = stack.wait_for_host_settings(&process, recovery["machineId"].as_str().unwrap()).await;
    let mut beat = heartbeat_of(&new);
    beat["attention"] = json!([{"code": "files_not_restored", "detail": "a pack is damaged"}]);
    assert_eq!(stack.send_heartbeat(&process, &new, &beat).await.status, 200);
    assert!(fetch_unsaved().await.is_string());
    let copies = stack.fetch_record(&process, &new.machine).await["copies"].clone();
    assert_eq!((&copies["kept"][0]["until"], copies["kept"].as_array().unwrap().len()), (&Value::Null, 1));
    let record = stack.fetch_record(&process, &old.settings.machine).await;
    assert_eq!(
        (&copies["kept"][0]["unsavedData"], &record["unsavedData"]),
        (&json!("files"), &json!("files"))
    );
    let path = format!("/vps/{}/discard", old.settings.machine);
    let refused = stack.post(&process, &path, &json!({})).await;
    refused.assert_problem(409, "invalid_state");
    let detail = refused.body["detail"].as_str().unwrap();
    assert!(detail.contains("started without the owner's files"), "{detail}");

    let accepted = stack.post(&process, &path, &json!({"acceptLoss": true})).await;
    assert_eq!(accepted.status, 202, "{accepted:?}");
    assert_eq!(stack.send_heartbeat(&process, &new, &beat).await.status, 200);
    assert_eq!(
        fetch_unsaved().await,
        Value::Null,
        "a loss that the operator has accepted must not count as unsaved"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_of_all_earlier_machines_are_kept() {
    let (stack, process, old) = start_with_repository().await;
    let first = recover(&stack, &process).await;
    old.wait_for_backup_request(&stack).await;
    let later = rfc3339_ms(jiff::Timestamp::now() + jiff::SignedDuration::from_mins(1));
    report_backup_with_files(&old, &stack, &json!({"savedUntil": later}));
    wait_for_backup_detail(&stack, &process, &first).await;
    let middle = stack.wait_for_host_settings(&process, first["machineId"].as_str().unwrap()).await;
    assert_eq!(stack.send_heartbeat(&process, &middle, &heartbeat_of(&middle)).await.status, 200);

    let second = recover(&stack, &process).await;
    wait_for_backup_detail(&stack, &process, &second).await;
    let newest = stack.wait_for_host_settings(&process, second["machineId"].as_str().unwrap()).await;
    let fetch_unsaved = async |id: String| stack.fetch_record(&process, &id).await["unsavedSince"].clone();
    assert_eq!(fetch_unsaved(old.settings.machine.clone()).await, Value::Null);
    let mut beat = heartbeat_of(&newest);
    beat["attention"] = json!([{"code": "files_not_restored", "detail": "a pack is damaged"}]);
    assert_eq!(stack.send_heartbeat(&process, &newest, &beat).await.status, 200);
    for machine in [&old.settings.machine, &middle.machine] {
        assert!(fetch_unsaved(machine.clone()).await.is_string(), "{machine}");
    }
    assert_eq!(fetch_unsaved(newest.machine.clone()).await, Value::Null);
}

#[tokio::test(flavor = "multi_thread")]
async fn operation_reports_waiting_for_files_until_skipped() {
    let (stack, process, old) = start_with_repository().await;
    let recovery = recover(&stack, &process).await;
    old.wait_for_backup_request(&stack).await;
    let files = json!({"savedUntil": "2026-01-01T00:00:00.000Z", "error": "the disk is full"});
    report_backup_with_files(&old, &stack, &files);
    let path = format!("/vps/operations/{}", recovery["operationId"].as_str().unwrap());
    let is_waiting = || async {
        let operation = stack.get(&process, &path).await.body;
        (operation["errorCode"] == "files_unsaved").then_some(operation)
    };
    let waiting = stack.eventually("the operation reports that it is waiting", is_waiting).await;
    let last = waiting["log"].as_array().unwrap().last().unwrap()["detail"].as_str().unwrap();
    assert!(last.starts_with("the owner's files are not saved yet: the disk is full; after 3 min"), "{last}");

    let skipped = stack.post(&process, &format!("{path}/continue"), &json!({"acceptLoss": true})).await;
    assert_eq!(skipped.status, 200, "{skipped:?}");
    let detail = wait_for_backup_detail(&stack, &process, &recovery).await;
    assert!(detail.contains("saved only as of 2026-01-01T00:00:00.000Z (the disk is full)"), "{detail}");
}

#[tokio::test(flavor = "multi_thread")]
async fn skipped_final_backup_records_unsaved_files() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let old = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let mut beat = heartbeat_of(&old);
    beat["files"] = json!({"savedUntil": "2026-01-01T00:00:00.000Z", "files": 1, "bytes": 1});
    assert_eq!(stack.send_heartbeat(&process, &old, &beat).await.status, 200);
    let recovery = recover(&stack, &process).await;
    let find_unsaved = || async {
        stack.fetch_record(&process, &old.machine).await["unsavedSince"].as_str().map(str::to_owned)
    };
    let unsaved = stack.eventually("the host is skipped", find_unsaved).await;
    assert_eq!(unsaved, "2026-01-01T00:00:00.000Z");
    let detail = wait_for_backup_detail(&stack, &process, &recovery).await;
    assert!(detail.contains("the owner's files are saved as of 2026-01-01T00:00:00.000Z"), "{detail}");
}
