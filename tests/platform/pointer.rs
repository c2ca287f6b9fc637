//! GET `/vps/slots/pointer` shows a slot's pointer. POST `/vps/slots/pointer/rebuild` rewrites an unusable pointer from
//! the existing snapshots; neither its fence nor its sequence number decreases, unless the old value is implausible.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use reqwest::Method;
use serde_json::{Value, json};

use super::stack::{ApiResponse, BUCKET, Process, SECRET, Stack};

const LATEST: &str = "user_1/primary/system/db/latest";
const SHOW: &str = "/vps/slots/pointer?idpUserId=user_1";
const REBUILD: &str = "/vps/slots/pointer/rebuild";

fn slot_body() -> Value {
    json!({"idpUserId": "user_1"})
}

/// Recovers a slot, whose fence then names the new machine at epoch 2. Returns the keys of the predecessor's two
/// snapshots, newest first.
async fn recover_with_two_snapshots(stack: &Stack, process: &Process) -> [String; 2] {
    stack.start_machine(process, "user_1").await;
    let key = |path: String| path.strip_prefix("user_1/primary/").unwrap().to_owned();
    let older = key(stack.store_snapshot_at("user_1", "2026-01-01T00:00:00.000Z"));
    let newer = key(stack.store_snapshot("user_1"));
    let response = stack.post(process, "/vps/recover", &slot_body()).await;
    let operation = stack.wait_until_ended(process, response.body["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    assert_eq!(stack.pointer("user_1")["fenceEpoch"], 2);
    [newer, older]
}

async fn list_audit(stack: &Stack) -> Vec<Value> {
    let client = stack.database.connect().await.unwrap();
    let sql = "SELECT jsonb_build_object('before', before, 'after', after)::text FROM operator_audit \
               WHERE action = 'pointer.rebuild' ORDER BY audit_id";
    let rows = client.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| serde_json::from_str(row.get(0)).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn rebuild_replaces_an_unreadable_pointer_and_keeps_its_bytes() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let [newer, _] = recover_with_two_snapshots(&stack, &process).await;
    let before = stack.pointer("user_1");
    stack.store.write(BUCKET, LATEST, "{not json");

    let inspection = stack.get(&process, SHOW).await;
    assert_eq!((inspection.status, &inspection.body["state"]), (200, &json!("unreadable")), "{inspection:?}");
    assert_eq!((&inspection.body["current"], &inspection.body["snapshots"]), (&Value::Null, &json!(2)));
    let rebuilt = &inspection.body["rebuilt"];
    assert_eq!((&rebuilt["snapshot"]["key"], &rebuilt["fenceEpoch"]), (&json!(newer), &json!(2)));
    assert_eq!(rebuilt["fenceMachineId"], before["fenceMachineId"]);
    assert!(rebuilt["seq"].as_u64() > before["seq"].as_u64(), "{inspection:?}");

    let body = slot_body();
    let request = || rebuild_with_idempotency_key(&stack, &process, "rebuild-1", &body);
    let response = request().await;
    assert_eq!((response.status, &response.body["pointer"]), (200, rebuilt), "{response:?}");
    assert_eq!(request().await.body, response.body, "the same idempotency key must get the same response");
    let pointer = stack.pointer("user_1");
    assert_eq!((&pointer["snapshot"]["key"], &pointer["seq"]), (&json!(newer), &rebuilt["seq"]));
    let audit = list_audit(&stack).await;
    assert_eq!(audit.len(), 1, "{audit:?}");
    assert_eq!(audit[0]["before"]["startBase64"], BASE64_STANDARD.encode("{not json"));
    assert_eq!(audit[0]["after"], *rebuilt);

    // Recovery is possible again, and the next machine's epoch is higher.
    let recovered = stack.post(&process, "/vps/recover", &slot_body()).await;
    assert_eq!((recovered.status, &recovered.body["epoch"]), (202, &json!(3)), "{recovered:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rebuild_restores_a_lost_pointer_with_its_fence() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let [newer, _] = recover_with_two_snapshots(&stack, &process).await;
    let before = stack.pointer("user_1");
    stack.store.remove(BUCKET, LATEST);
    stack.post(&process, "/vps/recover", &slot_body()).await.assert_problem(409, "snapshot_unusable");
    let empty = json!({"idpUserId": "user_1", "allowEmpty": true});
    stack.post(&process, "/vps/recover", &empty).await.assert_problem(409, "snapshot_unusable");
    assert_eq!(stack.get(&process, SHOW).await.body["state"], "absent");

    let response = stack.post(&process, REBUILD, &slot_body()).await;
    let pointer = stack.pointer("user_1");
    assert_eq!((response.status, &pointer["snapshot"]["key"]), (200, &json!(newer)), "{response:?}");
    let fence =
        |value: &Value| ["fenceEpoch", "fenceMachineId", "fenceProof"].map(|field| value[field].clone());
    assert_eq!(fence(&pointer), fence(&before));
    assert!(pointer["seq"].as_u64() > before["seq"].as_u64(), "{before} {pointer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_slot_is_not_found_and_not_written() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let inspection = stack.get(&process, "/vps/slots/pointer?idpUserId=user_9&slot=second").await;
    inspection.assert_problem(404, "not_found");
    let detail = inspection.body["detail"].as_str().unwrap();
    assert!(
        detail.contains("User user_9 has no slot second") && detail.contains("`svcctl slot list user_9`"),
        "{detail}"
    );
    let empty = json!({"idpUserId": "user_9", "empty": true, "force": true});
    stack.post(&process, REBUILD, &empty).await.assert_problem(404, "not_found");
    assert!(stack.store.read(BUCKET, "user_9/primary/system/db/latest").is_none());

    let slot = json!({"idpUserId": "user_9", "slot": "primary", "plan": "starter", "status": "active"});
    let request = stack.request(&process, Method::PUT, "/vps/slots").bearer_auth(SECRET).json(&slot);
    assert_eq!(stack.send(request).await.status, 200);
    let inspection = stack.get(&process, "/vps/slots/pointer?idpUserId=user_9").await;
    assert_eq!((inspection.status, &inspection.body["state"]), (200, &json!("sound")), "{inspection:?}");
}

/// With any other fence, the old host's final backup, for which the recovery is waiting, would never be accepted.
#[tokio::test(flavor = "multi_thread")]
async fn rebuild_during_final_backup_keeps_the_old_fence() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("LAST_BACKUP_DEADLINE_SECONDS", "120")]);
    let host_settings = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let response = stack.post(&process, "/vps/recover", &slot_body()).await;
    assert_eq!((response.status, &response.body["epoch"]), (202, &json!(2)), "{response:?}");
    stack.store.write(BUCKET, LATEST, "{not json");
    let rebuilt = stack.post(&process, REBUILD, &slot_body()).await;
    assert_eq!(rebuilt.status, 200, "{rebuilt:?}");
    let pointer = &rebuilt.body["pointer"];
    assert_eq!(
        (&pointer["fenceEpoch"], &pointer["fenceMachineId"]),
        (&json!(1), &json!(host_settings.machine))
    );
}

async fn rebuild_with_idempotency_key(
    stack: &Stack,
    process: &Process,
    key: &str,
    body: &Value,
) -> ApiResponse {
    let request = stack.request(process, Method::POST, REBUILD).bearer_auth(SECRET);
    stack.send(request.header("Idempotency-Key", key).json(body)).await
}

/// Deleting the stored response simulates a platform that failed between the last write to the store and the commit.
#[tokio::test(flavor = "multi_thread")]
async fn retry_after_a_lost_response_completes_the_rebuild() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    recover_with_two_snapshots(&stack, &process).await;
    let client = stack.database.connect().await.unwrap();
    let lose_response = async |key: &str| {
        let sql = "DELETE FROM idempotency_keys WHERE key = $1";
        assert_eq!(client.execute(sql, &[&key]).await.unwrap(), 1);
    };
    stack.store.write(BUCKET, LATEST, "{not json");
    let rebuilt = rebuild_with_idempotency_key(&stack, &process, "sound", &slot_body()).await;
    lose_response("sound").await;
    let retried = rebuild_with_idempotency_key(&stack, &process, "sound", &slot_body()).await;
    assert_eq!((retried.status, &retried.body), (200, &rebuilt.body), "{retried:?}");

    // A forced rebuild is not repeated: in the meantime, the host has published a snapshot.
    let forced = json!({"idpUserId": "user_1", "empty": true, "force": true});
    let emptied = rebuild_with_idempotency_key(&stack, &process, "empty", &forced).await;
    assert_eq!((emptied.status, &emptied.body["pointer"]["snapshot"]), (200, &Value::Null), "{emptied:?}");
    lose_response("empty").await;
    let machine = stack.pointer("user_1")["fenceMachineId"].as_str().unwrap().to_owned();
    let published = stack.store_snapshot_by("user_1", &machine, "2026-01-03T00:00:00.000Z");
    let retried = rebuild_with_idempotency_key(&stack, &process, "empty", &forced).await;
    assert_eq!((retried.status, &retried.body), (200, &emptied.body), "{retried:?}");
    assert_eq!(stack.pointer("user_1")["snapshot"]["key"], published);
    assert_eq!(list_audit(&stack).await.len(), 2);
}

/// A client may repeat a slow request before the first attempt has completed.
#[tokio::test(flavor = "multi_thread")]
async fn concurrent_attempts_rebuild_the_pointer_once() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    recover_with_two_snapshots(&stack, &process).await;
    stack.store.write(BUCKET, LATEST, "{not json");
    let body = slot_body();
    let attempt = |_| rebuild_with_idempotency_key(&stack, &process, "a", &body);
    let responses = futures_util::future::join_all((0..5).map(attempt)).await;
    let is_same = |response: &ApiResponse| response.status == 200 && response.body == responses[0].body;
    assert!(responses.iter().all(is_same), "{responses:?}");
    assert_eq!(list_audit(&stack).await.len(), 1);
}

/// Each request gets 200, or 409 because another one has rebuilt the pointer.
#[tokio::test(flavor = "multi_thread")]
async fn concurrent_rebuilds_leave_a_sound_pointer() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let [newer, _] = recover_with_two_snapshots(&stack, &process).await;
    stack.store.write(BUCKET, LATEST, "{not json");
    let body = slot_body();
    let request = |key| rebuild_with_idempotency_key(&stack, &process, key, &body);
    let responses = futures_util::future::join_all(["a", "b", "c", "d", "e"].map(request)).await;
    let statuses: Vec<u16> = responses.iter().map(|response| response.status).collect();
    assert!(
        statuses.contains(&200) && statuses.iter().all(|status| matches!(status, 200 | 409)),
        "{responses:?}"
    );
    assert_eq!(stack.pointer("user_1")["snapshot"]["key"], json!(newer));
    assert_eq!(stack.get(&process, SHOW).await.body["state"], "sound");
}

#[tokio::test(flavor = "multi_thread")]
async fn rebuild_keeps_a_valid_pointer_unless_forced() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let [newer, older] = recover_with_two_snapshots(&stack, &process).await;
    let before = stack.pointer("user_1");
    assert_eq!(stack.get(&process, SHOW).await.body["state"], "sound");
    stack.post(&process, REBUILD, &slot_body()).await.assert_problem(409, "conflict");
    let unforced = json!({"idpUserId": "user_1", "snapshotKey": older});
    stack.post(&process, REBUILD, &unforced).await.assert_problem(409, "conflict");
    assert_eq!((stack.pointer("user_1"), list_audit(&stack).await.len()), (before.clone(), 0));

    let forced = json!({"idpUserId": "user_1", "snapshotKey": older, "force": true});
    assert_eq!(stack.post(&process, REBUILD, &forced).await.status, 200);
    let pointer = stack.pointer("user_1");
    assert_eq!((&pointer["snapshot"]["key"], &pointer["fenceEpoch"]), (&json!(older), &before["fenceEpoch"]));
    assert_eq!(pointer["seq"].as_u64(), before["seq"].as_u64().map(|seq| seq + 1));

    let missing = json!({"idpUserId": "user_1", "snapshotKey": newer.replace("2026", "2027"), "force": true});
    stack.post(&process, REBUILD, &missing).await.assert_problem(409, "snapshot_unusable");
}

#[tokio::test(flavor = "multi_thread")]
async fn rebuild_skips_an_incomplete_snapshot() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let [newer, older] = recover_with_two_snapshots(&stack, &process).await;
    stack.store.write(BUCKET, &format!("user_1/primary/{newer}"), "du");
    let inspection = stack.get(&process, SHOW).await;
    assert_eq!(
        (&inspection.body["state"], &inspection.body["rebuilt"]["snapshot"]["key"]),
        (&json!("unsound"), &json!(older))
    );
    assert_eq!(stack.post(&process, REBUILD, &slot_body()).await.status, 200);
    assert_eq!(stack.pointer("user_1")["snapshot"]["key"], older);

    stack.store.remove(BUCKET, &format!("user_1/primary/{older}"));
    stack.post(&process, REBUILD, &slot_body()).await.assert_problem(409, "snapshot_unusable");
    stack.store.take_down();
    stack.post(&process, REBUILD, &slot_body()).await.assert_problem(503, "store_unavailable");
    stack.store.bring_up().unwrap();
}

/// If all data is lost, an operator can let the slot start empty; the audit log records it.
#[tokio::test(flavor = "multi_thread")]
async fn slot_with_all_snapshots_lost_starts_empty_on_request() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let [newer, older] = recover_with_two_snapshots(&stack, &process).await;
    let emptied = json!({"idpUserId": "user_1", "empty": true});
    stack.post(&process, REBUILD, &emptied).await.assert_problem(409, "conflict");
    for key in [&newer, &older] {
        stack.store.remove(BUCKET, &format!("user_1/primary/{key}"));
    }
    let allowed = json!({"idpUserId": "user_1", "allowEmpty": true});
    stack.post(&process, "/vps/recover", &allowed).await.assert_problem(409, "snapshot_unusable");

    let before = stack.pointer("user_1");
    assert_eq!(stack.post(&process, REBUILD, &emptied).await.status, 200);
    let pointer = stack.pointer("user_1");
    assert_eq!((&pointer["snapshot"], &pointer["fenceEpoch"]), (&Value::Null, &before["fenceEpoch"]));
    assert_eq!(list_audit(&stack).await[0]["after"]["emptiedAt"], pointer["emptiedAt"]);
    stack.post(&process, "/vps/recover", &slot_body()).await.assert_problem(409, "snapshot_unusable");
    let response = stack.post(&process, "/vps/recover", &allowed).await;
    assert_eq!(response.status, 202, "{response:?}");
    let host_settings =
        stack.wait_for_host_settings(&process, response.body["machineId"].as_str().unwrap()).await;
    assert_eq!(host_settings.restore_mode, "empty");
}

/// A slot that never had a snapshot keeps its fence when its pointer becomes unreadable.
#[tokio::test(flavor = "multi_thread")]
async fn rebuild_without_snapshots_restores_the_fence() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    stack.store.write(BUCKET, LATEST, "{not json");
    assert_eq!(stack.post(&process, REBUILD, &slot_body()).await.status, 200);
    let pointer = stack.pointer("user_1");
    assert_eq!((&pointer["snapshot"], &pointer["fenceEpoch"]), (&Value::Null, &json!(1)));
    assert_eq!(pointer["fenceMachineId"], host_settings.machine);
}

/// If the database is older than the store, a machine that is missing from the database may hold the fence. The next
/// machine gets a higher epoch.
#[tokio::test(flavor = "multi_thread")]
async fn next_machine_epoch_exceeds_every_epoch_in_the_store() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let meta = json!({"version": 1, "idpUserId": "user_1", "slot": "primary", "machineId": uuid::Uuid::nil(),
        "epoch": 6, "providerServerId": null, "imageVersion": "2026.11.1", "status": "running", "publicIpv4": null,
        "heartbeatAt": "2026-01-02T03:04:05.678Z", "lastBackup": null});
    stack.store.write(BUCKET, "user_1/primary/system/vps-meta.json", meta.to_string());
    let response = stack.post(&process, "/vps/recover", &slot_body()).await;
    assert_eq!((response.status, &response.body["epoch"]), (202, &json!(7)), "{response:?}");
}

fn log_entry_key(seq: u64) -> String {
    format!("user_1/primary/system/db/pointer-log/{seq:016}.json")
}

/// A compromised host can write to its own slot: impossible values for the epoch and `seq` are not trusted.
#[tokio::test(flavor = "multi_thread")]
async fn forged_epochs_and_entries_do_not_block_the_slot() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let [newer, _] = recover_with_two_snapshots(&stack, &process).await;
    let sidecar = r#"{"version": 1}"#;
    let key = "user_1/primary/system/db/snapshots/2027-01-01T00-00-00.000Z-2147483646.dump.json";
    stack.store.write(BUCKET, key, sidecar);
    let response = stack.post(&process, "/vps/recover", &slot_body()).await;
    assert_eq!((response.status, &response.body["epoch"]), (202, &json!(3)), "{response:?}");
    stack.wait_until_ended(&process, response.body["operationId"].as_str().unwrap()).await;

    let mut forged = stack.pointer("user_1");
    forged["fenceEpoch"] = json!(2_147_483_646_u32);
    let seq = forged["seq"].as_u64().unwrap() + 1;
    forged["seq"] = json!(seq);
    stack.store.write(BUCKET, &log_entry_key(seq), forged.to_string());
    forged["seq"] = json!(9_999_999_999_999_999_u64);
    stack.store.write(BUCKET, &log_entry_key(9_999_999_999_999_999), forged.to_string());
    let inspection = stack.get(&process, SHOW).await.body;
    assert_eq!(
        (&inspection["state"], &inspection["rebuilt"]["snapshot"]["key"]),
        (&json!("unsound"), &json!(newer)),
        "{inspection}"
    );

    let rebuilt = stack.post(&process, REBUILD, &slot_body()).await;
    assert_eq!(rebuilt.status, 200, "{rebuilt:?}");
    assert_eq!(rebuilt.body["pointer"]["fenceEpoch"], 3);
    assert_eq!(stack.get(&process, SHOW).await.body["state"], "sound");
    // A recovery succeeds with its own fence, regardless of what the host writes in the meantime.
    let mut forged = stack.pointer("user_1");
    forged["fenceEpoch"] = json!(2_147_483_646_u32);
    forged["seq"] = json!(forged["seq"].as_u64().unwrap() + 1);
    forged.as_object_mut().unwrap().remove("fenceProof");
    stack.store.write(BUCKET, &log_entry_key(forged["seq"].as_u64().unwrap()), forged.to_string());
    stack.store.write(BUCKET, LATEST, forged.to_string());
    let response = stack.post(&process, "/vps/recover", &slot_body()).await;
    assert_eq!((response.status, &response.body["epoch"]), (202, &json!(4)), "{response:?}");
    let operation = stack.wait_until_ended(&process, response.body["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    let pointer = stack.pointer("user_1");
    assert_eq!(
        (&pointer["fenceEpoch"], &pointer["snapshot"]["key"]),
        (&json!(4), &json!(newer)),
        "{pointer}"
    );
    assert!(pointer["fenceProof"].is_string(), "{pointer}");

    // `latest` itself may have the maximum `seq`, or exceed it.
    let mut last = stack.pointer("user_1");
    for seq in [(1_u64 << 53) - 1, 1 << 53] {
        last["seq"] = json!(seq);
        stack.store.write(BUCKET, LATEST, last.to_string());
        let forced = json!({"idpUserId": "user_1", "force": true});
        assert_eq!(stack.post(&process, REBUILD, &forced).await.status, 200, "{seq}");
        assert_eq!(stack.get(&process, SHOW).await.body["state"], "sound", "{seq}");
    }
}

/// Before it is replaced, a machine can write log entries that are not pointers. A reader searches the log only up to
/// `MAX_SEQ_AHEAD` above its pointer: from the current pointer, it finds the first entry; from a pointer just above the
/// first entry, it would find the second.
#[tokio::test(flavor = "multi_thread")]
async fn rebuild_skips_invalid_pointer_log_entries() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let [newer, _] = recover_with_two_snapshots(&stack, &process).await;
    let seq = stack.pointer("user_1")["seq"].as_u64().unwrap();
    for ahead in [600_000, 1_500_000] {
        stack.store.write(BUCKET, &log_entry_key(seq + ahead), "{}");
    }
    stack.post(&process, "/vps/recover", &slot_body()).await.assert_problem(409, "snapshot_unusable");
    let rebuilt = stack.post(&process, REBUILD, &slot_body()).await;
    assert_eq!(
        (rebuilt.status, &rebuilt.body["pointer"]["snapshot"]["key"]),
        (200, &json!(newer)),
        "{rebuilt:?}"
    );
    let inspection = stack.get(&process, SHOW).await.body;
    assert_eq!(
        (&inspection["state"], &inspection["current"]["fenceEpoch"]),
        (&json!("sound"), &json!(2)),
        "{inspection}"
    );
    let response = stack.post(&process, "/vps/recover", &slot_body()).await;
    assert_eq!((response.status, &response.body["epoch"]), (202, &json!(3)), "{response:?}");
}

/// The store has more sidecars without dumps than a rebuild checks, and they are newer than the complete snapshots.
#[tokio::test(flavor = "multi_thread")]
async fn pointer_with_unchecked_snapshots_is_emptied_only_by_force() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let [newer, _] = recover_with_two_snapshots(&stack, &process).await;
    for n in 0..65 {
        let key = format!("user_1/primary/system/db/snapshots/2027-01-01T00-00-00.{n:03}Z-1.dump.json");
        stack.store.write(BUCKET, &key, "{}");
    }
    stack.store.write(BUCKET, LATEST, "{not json");
    let unusable = stack.post(&process, REBUILD, &slot_body()).await;
    unusable.assert_problem(409, "snapshot_unusable");
    assert!(unusable.body["detail"].as_str().unwrap().contains("were not checked"), "{unusable:?}");
    let emptied = json!({"idpUserId": "user_1", "empty": true});
    let refused = stack.post(&process, REBUILD, &emptied).await;
    refused.assert_problem(409, "conflict");
    assert!(refused.body["detail"].as_str().unwrap().contains("--to KEY"), "{refused:?}");
    let with_snapshot = json!({"idpUserId": "user_1", "snapshotKey": newer});
    assert_eq!(stack.post(&process, REBUILD, &with_snapshot).await.status, 200);
    let forced = json!({"idpUserId": "user_1", "empty": true, "force": true});
    assert_eq!(stack.post(&process, REBUILD, &forced).await.status, 200);
}
