//! Without a usable snapshot, a recovery changes nothing. A repeated request gets the same response.

use reqwest::Method;
use serde_json::json;

use super::stack::{BUCKET, SECRET, Stack};

fn recovery_body() -> serde_json::Value {
    json!({"idpUserId": "user_1"})
}

#[tokio::test(flavor = "multi_thread")]
async fn recovery_without_a_usable_snapshot_changes_nothing() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let assert_refused = |case: &'static str| {
        let (stack, process, host_settings) = (&stack, &process, &host_settings);
        async move {
            let calls = stack.provider.calls().len();
            let response = stack.post(process, "/vps/recover", &recovery_body()).await;
            assert!(response.status == 409, "{case}: {response:?}");
            response.assert_problem(409, "snapshot_unusable");
            assert_eq!(stack.status(process, &host_settings.machine).await, "running", "{case}");
            let changes = stack.provider.calls().into_iter().skip(calls).filter(|call| call.method != "GET");
            assert_eq!(changes.count(), 0, "{case}");
            stack.assert_only_server(&host_settings.machine);
        }
    };
    assert_refused("a pointer without a snapshot").await;
    stack.store.remove(BUCKET, "user_1/primary/system/db/latest");
    assert_refused("no pointer").await;
    stack.store.write(BUCKET, "user_1/primary/system/db/latest", "{not json");
    assert_refused("an unreadable pointer").await;
    let dump = stack.store_snapshot("user_1");
    stack.store.write(BUCKET, &dump, "dum");
    assert_refused("a truncated object").await;
    stack.store.remove(BUCKET, &dump);
    assert_refused("a missing object").await;
    stack.store_snapshot("user_1");
    stack.store.remove(BUCKET, &format!("{dump}.json"));
    assert_refused("no sidecar").await;
    stack.store_snapshot("user_1");
    let missing = json!({"idpUserId": "user_1", "snapshotKey": "system/db/snapshots/other.dump"});
    stack.post(&process, "/vps/recover", &missing).await.assert_problem(409, "snapshot_unusable");
    let outside =
        json!({"idpUserId": "user_1", "snapshotKey": "../../user_2/primary/system/db/snapshots/x.dump"});
    stack.post(&process, "/vps/recover", &outside).await.assert_problem(400, "invalid_request");

    stack.store.take_down();
    stack.post(&process, "/vps/recover", &recovery_body()).await.assert_problem(503, "store_unavailable");
    let empty = json!({"idpUserId": "user_1", "allowEmpty": true});
    stack.post(&process, "/vps/recover", &empty).await.assert_problem(503, "store_unavailable");
    stack.store.bring_up().unwrap();
    assert_eq!(stack.status(&process, &host_settings.machine).await, "running");
    stack.assert_only_server(&host_settings.machine);
}

#[tokio::test(flavor = "multi_thread")]
async fn recovery_starts_from_the_requested_snapshot() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.start_machine(&process, "user_1").await;
    let earlier = stack.store_snapshot_at("user_1", "2026-01-01T00:00:00.000Z");
    let (_, key) = earlier.split_once("primary/").unwrap();
    stack.store_snapshot("user_1");
    assert_ne!(stack.pointer("user_1")["snapshot"]["key"], key);
    // The pointer may name an unusable snapshot, because the request names a different one.
    let latest = format!("user_1/primary/{}", stack.pointer("user_1")["snapshot"]["key"].as_str().unwrap());
    stack.store.remove(BUCKET, &latest);
    let body = json!({"idpUserId": "user_1", "snapshotKey": key});
    let response = stack.post(&process, "/vps/recover", &body).await;
    assert_eq!(response.status, 202, "{response:?}");
    let operation = stack.wait_until_ended(&process, response.body["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    let host_settings =
        stack.wait_for_host_settings(&process, response.body["machineId"].as_str().unwrap()).await;
    assert_eq!(host_settings.restore_mode, "required");
    assert!(
        host_settings.user_data.contains(&format!("SVC_RESTORE_SNAPSHOT=\\\"{key}\\\"")),
        "{}",
        host_settings.user_data
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn recovery_replaces_the_machine_and_is_idempotent() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let old = stack.start_machine(&process, "user_1").await;
    assert_eq!(old.restore_mode, "empty");
    stack.store_snapshot("user_1");
    let accepting = json!({"idpUserId": "user_1", "acceptLoss": true});
    let first = stack.post(&process, "/vps/recover", &accepting).await;
    assert_eq!((first.status, &first.body["status"]), (202, &json!("recovering")), "{first:?}");
    assert_eq!(first.body["oldMachineId"], old.machine);
    // A repeated request for a recovery in progress does not need the store.
    stack.store.take_down();
    let again = stack.post(&process, "/vps/recover", &recovery_body()).await;
    assert_eq!((again.status, again.body), (202, first.body.clone()));
    stack.store.bring_up().unwrap();

    let machine = first.body["machineId"].as_str().unwrap();
    let new = stack.wait_for_host_settings(&process, machine).await;
    assert_eq!((new.restore_mode.as_str(), new.epoch.as_str()), ("required", "2"));
    assert_eq!(stack.register(&process, &new).await.body, json!({"status": "running", "epoch": 2}));
    stack.send_heartbeat(&process, &new, &super::stack::heartbeat_of(&new)).await;
    stack.assert_only_server(machine);
    let retired = stack.get(&process, &format!("/vps/{}", old.machine)).await.body;
    assert_eq!(retired["replacedBy"], machine);
    let operation = stack
        .get(&process, &format!("/vps/operations/{}", first.body["operationId"].as_str().unwrap()))
        .await;
    let steps: Vec<_> = operation.body["log"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|line| line["outcome"] == "begun")
        .map(|line| line["step"].clone())
        .collect();
    assert_eq!(
        json!(steps),
        json!([
            "last_backup",
            "fence",
            "power_off_server",
            "delete_predecessor",
            "create_server",
            "await_registration"
        ])
    );

    let unknown = json!({"idpUserId": "user_9"});
    stack.post(&process, "/vps/recover", &unknown).await.assert_problem(404, "machine_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn recovery_in_progress_rejects_different_options() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.start_machine(&process, "user_1").await;
    let object = stack.store_snapshot("user_1");
    let key = object.strip_prefix("user_1/primary/").unwrap();
    let same_options = json!({"idpUserId": "user_1", "acceptLoss": true, "serverType": "cpx32", "location": "nbg1",
        "fallbackLocations": ["hel1"]});
    let first = stack.post(&process, "/vps/recover", &same_options).await;
    assert_eq!(first.status, 202, "{first:?}");
    for again in [same_options, json!({"idpUserId": "user_1"})] {
        let again = stack.post(&process, "/vps/recover", &again).await;
        assert_eq!((again.status, &again.body), (202, &first.body), "{again:?}");
    }
    for (member, value, difference) in [
        ("snapshotKey", json!(key), "the snapshot"),
        ("serverType", json!("cpx22"), "the server type"),
        ("location", json!("hel1"), "the location"),
        ("fallbackLocations", json!(["fsn1"]), "the fallback locations"),
        ("fallbackLocations", json!([]), "the fallback locations"),
        ("imageVersion", json!("v0"), "the image version"),
        ("replaceFirst", json!(true), "`--replace-first`"),
        ("withoutFiles", json!(true), "`--without-files`"),
    ] {
        let refused =
            stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1", member: value})).await;
        refused.assert_problem(409, "invalid_state");
        let differs = format!("This request differs in: {difference}.");
        assert!(refused.body["detail"].as_str().unwrap().contains(&differs), "{refused:?}");
        assert_eq!(refused.body["operationId"], first.body["operationId"], "{refused:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_files_option_reaches_the_new_machine() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let mut body =
        json!({"idpUserId": "user_1", "acceptLoss": true, "withoutFiles": true, "replaceFirst": true});
    let refused = stack.post(&process, "/vps/recover", &body).await;
    refused.assert_problem(400, "invalid_request");
    assert_eq!(refused.body["errors"][0]["pointer"], "/withoutFiles", "{refused:?}");
    body["replaceFirst"] = json!(false);
    let accepted = stack.post(&process, "/vps/recover", &body).await;
    assert_eq!(accepted.status, 202, "{accepted:?}");
    let new = stack.wait_for_host_settings(&process, accepted.body["machineId"].as_str().unwrap()).await;
    assert_eq!(new.setting("SVC_RESTORE_FILES"), "false");
    let again = stack.post(&process, "/vps/recover", &body).await;
    assert_eq!((again.status, &again.body), (202, &accepted.body), "{again:?}");
}

/// Only the machine's server has the slot's data, so the problem advises a backup, not a start without a snapshot.
#[tokio::test(flavor = "multi_thread")]
async fn recovery_of_a_machine_without_backup_is_rejected() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let refused = stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1"})).await;
    refused.assert_problem(409, "snapshot_unusable");
    let detail = refused.body["detail"].as_str().unwrap();
    let command = format!("`svcctl backup now {} --wait`", host_settings.machine);
    assert!(detail.contains(&command) && !detail.contains("allowEmpty"), "{detail}");
}

#[tokio::test(flavor = "multi_thread")]
async fn empty_start_is_refused_while_the_pointer_is_unreadable() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.start_machine(&process, "user_1").await;
    let empty = json!({"idpUserId": "user_1", "allowEmpty": true});
    stack.store.write(BUCKET, "user_1/primary/system/db/latest", "{not json");
    stack.post(&process, "/vps/recover", &empty).await.assert_problem(409, "snapshot_unusable");
    stack.store.remove(BUCKET, "user_1/primary/system/db/latest");
    let response = stack.post(&process, "/vps/recover", &empty).await;
    assert_eq!(response.status, 202, "{response:?}");
    let again = stack.post(&process, "/vps/recover", &empty).await;
    assert_eq!((again.status, again.body), (202, response.body.clone()));
    let without_allow_empty = stack.post(&process, "/vps/recover", &recovery_body()).await;
    without_allow_empty.assert_problem(409, "invalid_state");
    let detail = without_allow_empty.body["detail"].as_str().unwrap();
    assert!(detail.contains("differs in: `--allow-empty`."), "{detail}");
    let host_settings =
        stack.wait_for_host_settings(&process, response.body["machineId"].as_str().unwrap()).await;
    assert_eq!(host_settings.restore_mode, "empty");
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_caller_gets_the_final_state() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let request =
        stack.request(&process, Method::POST, "/vps/recover").bearer_auth(SECRET).json(&recovery_body());
    let waiting = stack.send(request.header("prefer", "respond-async, Wait=\"30\""));
    let register_host = async {
        let new_server = stack.eventually("the new server exists", || async {
            stack.provider.servers().into_iter().find(|server| server.labels["svc-epoch"] == "2")
        });
        let name = new_server.await.name;
        let host_settings = stack.wait_for_host_settings(&process, name.strip_prefix("svc-").unwrap()).await;
        stack.register(&process, &host_settings).await
    };
    let (response, registered) = tokio::join!(waiting, register_host);
    assert_eq!(registered.status, 200);
    assert_eq!((response.status, &response.body["status"]), (202, &json!("running")), "{response:?}");
    assert_eq!(response.headers["preference-applied"], "wait=30");
}
