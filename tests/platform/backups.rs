//! POST `/vps/:id/backup` requests a backup from a host; GET `/vps/:id/backups` lists the snapshots in the store.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use svc::http::proof::Route;
use tokio_postgres::Client;

use super::fake_host::start_host;
use super::stack::{BUCKET, DIGEST, SECRET, Stack, heartbeat_of};

#[tokio::test(flavor = "multi_thread")]
async fn backup_request_reaches_the_host_with_a_proof() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let mut host = start_host(&stack, &process).await;
    let path = format!("/vps/{}/backup", host.settings.machine);
    let response = stack.post(&process, &path, &json!({})).await;
    assert_eq!(
        (response.status, &response.body["machineId"]),
        (202, &json!(host.settings.machine)),
        "{response:?}"
    );
    assert!(response.body["requestedAt"].as_str().unwrap().ends_with('Z'));
    let proofs = host.proofs.lock().unwrap().clone();
    assert_eq!(proofs.len(), 1);
    assert_eq!(
        (proofs[0].route, proofs[0].path.as_deref()),
        (Route::Internal, Some("/_svc/internal/backup"))
    );

    let drill = stack.post(&process, &format!("/vps/{}/drill", host.settings.machine), &json!({})).await;
    assert_eq!(drill.status, 202, "{drill:?}");
    let last_path = host.proofs.lock().unwrap().last().unwrap().path.clone();
    assert_eq!(last_path.as_deref(), Some("/_svc/internal/drill"));

    stack.post(&process, &path, &json!({"now": true})).await.assert_problem(400, "invalid_request");
    let machine = host.settings.machine.clone();
    host.stop().await;
    stack.post(&process, &path, &json!({})).await.assert_problem(502, "host_unreachable");
    stack.post(&process, &format!("/vps/{machine}/fail"), &json!({"reason": "r"})).await;
    let refused = stack.post(&process, &path, &json!({})).await;
    refused.assert_problem(409, "invalid_state");
    assert_eq!(refused.body["allowed"], json!(["running"]));
    stack.delete(&process, &format!("/vps/{machine}")).await;
    stack.post(&process, &path, &json!({})).await.assert_problem(404, "machine_not_found");
    let client = stack.database.connect().await.unwrap();
    let backups = count_audit_entries(&client, "backup").await;
    assert_eq!(backups, (2, 1), "the host accepted one request, and was unreachable for the other");
    assert_eq!(count_audit_entries(&client, "drill").await, (1, 1));
}

/// Counts the action's audit entries: those for a request to the host, and those for an accepted request.
async fn count_audit_entries(client: &Client, action: &str) -> (i64, i64) {
    let sql = "SELECT count(*) FILTER (WHERE after->>'outcome' = 'requested'), \
               count(*) FILTER (WHERE after ? 'requestedAt') FROM operator_audit WHERE action = $1";
    let row = client.query_one(sql, &[&action]).await.unwrap();
    (row.get(0), row.get(1))
}

#[tokio::test(flavor = "multi_thread")]
async fn request_is_audited_if_the_database_then_fails() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host = start_host(&stack, &process).await;
    host.behavior.lock().unwrap().response_delay = Duration::from_secs(2);
    let client = stack.database.connect().await.unwrap();
    let break_database = async {
        let is_called = || async { (host.call_count("POST", "/_svc/internal/backup") == 1).then_some(()) };
        stack.eventually("the host receives the request", is_called).await;
        let sql = "ALTER TABLE operator_audit ADD CONSTRAINT broken CHECK (false) NOT VALID";
        client.batch_execute(sql).await.unwrap();
    };
    let path = format!("/vps/{}/backup", host.settings.machine);
    let body = json!({});
    let (response, ()) = tokio::join!(stack.post(&process, &path, &body), break_database);
    assert!(response.status >= 500, "{response:?}");
    assert_eq!(count_audit_entries(&client, "backup").await, (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn request_is_audited_if_the_operator_disconnects() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host = start_host(&stack, &process).await;
    host.behavior.lock().unwrap().response_delay = Duration::from_secs(4);
    let path = format!("/vps/{}/backup", host.settings.machine);
    let request = stack.request(&process, Method::POST, &path).bearer_auth(SECRET).json(&json!({}));
    let request_task = tokio::spawn(request.send());
    let is_called = || async { (host.call_count("POST", "/_svc/internal/backup") > 0).then_some(()) };
    stack.eventually("the host receives the request", is_called).await;
    request_task.abort();
    let result = request_task.await;
    assert!(result.is_err_and(|error| error.is_cancelled()), "the response came before the disconnect");
    let client = stack.database.connect().await.unwrap();
    let is_audited = || async { (count_audit_entries(&client, "backup").await == (1, 1)).then_some(()) };
    stack.eventually("the accepted request is audited", is_audited).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn held_snapshot_is_shown_and_accepted() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host = start_host(&stack, &process).await;
    let machine = format!("/vps/{}", host.settings.machine);
    let held =
        json!([{"code": "snapshot_held", "detail": "public.notes has 2 rows, the latest snapshot 400"}]);
    let mut beat = heartbeat_of(&host.settings);
    beat["attention"] = held.clone();
    assert_eq!(stack.send_heartbeat(&process, &host.settings, &beat).await.status, 200);
    assert_eq!(stack.get(&process, &machine).await.body["attention"], held);
    let fleet = stack.get(&process, "/vps/fleet").await.body;
    assert_eq!(fleet["attention"][0]["reasons"], json!(["snapshot_held"]), "{fleet}");

    let accepted = stack.post(&process, &format!("{machine}/backup-accept"), &json!({})).await;
    assert_eq!(accepted.status, 202, "{accepted:?}");
    assert_eq!(host.call_count("POST", "/_svc/internal/backup-accept"), 1);
    let client = stack.database.connect().await.unwrap();
    assert_eq!(count_audit_entries(&client, "backup.accept").await, (1, 1));
    let sql = "SELECT actor, target, before #>> '{attention,0,code}' FROM operator_audit WHERE action = 'backup.accept'";
    for row in client.query(sql, &[]).await.unwrap() {
        let row: (String, String, String) = (row.get(0), row.get(1), row.get(2));
        assert_eq!(row, ("operator".to_owned(), host.settings.machine.clone(), "snapshot_held".to_owned()));
    }

    // A heartbeat without the item removes it.
    stack.send_heartbeat(&process, &host.settings, &heartbeat_of(&host.settings)).await;
    assert_eq!(stack.get(&process, &machine).await.body["attention"], json!([]));
    beat["attention"] = json!([{"code": "Not A Code", "detail": "d"}]);
    stack.send_heartbeat(&process, &host.settings, &beat).await.assert_problem(400, "invalid_request");
}

fn snapshot_key(hour: usize) -> String {
    format!("system/db/snapshots/2026-01-02T{hour:02}-00-00.000Z-1.dump")
}

#[tokio::test(flavor = "multi_thread")]
async fn verified_snapshots_are_listed_newest_first_in_pages() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let path = format!("/vps/{}/backups", host_settings.machine);
    let empty = stack.get(&process, &path).await;
    assert_eq!(empty.body, json!({"latest": null, "backups": [], "nextCursor": null}));

    let latest = stack.store_snapshot("user_1");
    let latest = latest.strip_prefix("user_1/primary/").unwrap();
    for hour in 4..9 {
        let taken_at = format!("2026-01-02T{hour:02}:00:00.000Z");
        let sidecar = json!({"version": 1, "key": snapshot_key(hour), "sizeBytes": hour, "sha256": DIGEST, "pgVersion": "16",
            "machineId": host_settings.machine, "epoch": 1, "takenAt": taken_at, "verifiedAt": taken_at, "roles": [],
            "tables": []});
        stack.store.write(BUCKET, &format!("user_1/primary/{}", snapshot_key(hour)), "dump");
        stack.store.write(
            BUCKET,
            &format!("user_1/primary/{}.json", snapshot_key(hour)),
            sidecar.to_string(),
        );
    }
    // None of these is listed: a dump without a sidecar (it is unverified), a sidecar with invalid JSON, and a sidecar
    // in another slot.
    stack.store.write(BUCKET, &format!("user_1/primary/{}", snapshot_key(20)), "dump");
    stack.store.write(BUCKET, &format!("user_1/primary/{}.json", snapshot_key(21)), "{torn");
    stack.store.write(BUCKET, &format!("user_1/other/{}.json", snapshot_key(22)), "{}");

    let all = stack.get(&process, &path).await.body;
    let keys: Vec<&str> =
        all["backups"].as_array().unwrap().iter().map(|backup| backup["key"].as_str().unwrap()).collect();
    let expected: Vec<String> = (4..9).rev().map(snapshot_key).chain([latest.to_owned()]).collect();
    assert_eq!(keys, expected);
    assert_eq!((&all["latest"], &all["nextCursor"]), (&json!(latest), &Value::Null));
    let flags: Vec<bool> =
        all["backups"].as_array().unwrap().iter().map(|backup| backup["latest"] == true).collect();
    assert_eq!(flags, [false, false, false, false, false, true]);
    let first = &all["backups"][0];
    assert_eq!(
        (&first["sizeBytes"], &first["machineId"], &first["epoch"]),
        (&json!(8), &json!(host_settings.machine), &json!(1))
    );

    let mut paged = Vec::new();
    let mut cursor = String::new();
    loop {
        let page = stack.get(&process, &format!("{path}?limit=4{cursor}")).await.body;
        paged.extend(
            page["backups"]
                .as_array()
                .unwrap()
                .iter()
                .map(|backup| backup["key"].as_str().unwrap().to_owned()),
        );
        let Some(next) = page["nextCursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    assert_eq!(paged, expected);

    let refused = stack.get(&process, &format!("{path}?cursor=xyz")).await;
    refused.assert_problem(400, "invalid_request");
    let detail = refused.body["detail"].as_str().unwrap();
    assert!(detail.contains("cursor: must be a cursor from an earlier page"), "{detail}");
    for query in ["limit=0", "limit=201", "limit=x", "page=2"] {
        stack.get(&process, &format!("{path}?{query}")).await.assert_problem(400, "invalid_request");
    }
    stack.store.take_down();
    stack.get(&process, &path).await.assert_problem(503, "store_unavailable");
    stack.store.bring_up().unwrap();
    stack.delete(&process, &format!("/vps/{}", host_settings.machine)).await;
    assert_eq!(
        stack.get(&process, &path).await.body["backups"].as_array().unwrap().len(),
        6,
        "a deleted machine's snapshots must be kept"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn latest_snapshot_is_shown_without_listing_all() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let latest = stack.store_snapshot("user_1");
    let latest = latest.strip_prefix("user_1/primary/").unwrap();
    for n in 0..3000 {
        stack.store.write(BUCKET, &format!("user_1/primary/system/db/snapshots/old-{n:04}.dump.json"), "{}");
    }
    let count_list_requests = || {
        let requests = stack.store.requests();
        let lists_snapshots = |query: &str| query.contains("list-type=2") && query.contains("snapshots");
        requests.iter().filter(|request| lists_snapshots(&request.query)).count()
    };
    let path = format!("/vps/{}/backups", host_settings.machine);
    stack.store.clear_requests();
    let listed = stack.get(&process, &format!("{path}?latest=true")).await.body;
    assert_eq!(
        (&listed["latest"], &listed["backups"][0]["key"]),
        (&json!(latest), &json!(latest)),
        "{listed}"
    );
    assert_eq!((listed["backups"].as_array().unwrap().len(), &listed["nextCursor"]), (1, &Value::Null));
    assert_eq!(count_list_requests(), 0);

    let read_list_metric = async || {
        let text = stack.get(&process, "/metrics").await.text;
        let line = text.lines().find(|line| {
            line.starts_with("svc_store_calls_total{")
                && line.contains("call=\"list\"")
                && line.contains("outcome=\"ok\"")
        });
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).unwrap_or_default()
    };
    let before = read_list_metric().await;
    stack.store.clear_requests();
    assert_eq!(stack.get(&process, &format!("{path}?limit=5")).await.status, 200);
    let list_requests = count_list_requests();
    assert!(list_requests >= 1, "{list_requests}");
    assert!(read_list_metric().await >= before + list_requests as f64, "each list request must be counted");
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_pointer_does_not_hide_snapshots() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let stored = stack.store_snapshot("user_1");
    let path = format!("/vps/{}/backups", host_settings.machine);
    stack.store.write(BUCKET, "user_1/primary/system/db/latest", "{torn");
    stack.get(&process, &format!("{path}?latest=true")).await.assert_problem(409, "snapshot_unusable");
    let listed = stack.get(&process, &path).await;
    assert_eq!((listed.status, &listed.body["latest"]), (200, &Value::Null), "{listed:?}");
    let backups = listed.body["backups"].as_array().unwrap();
    assert_eq!(backups.len(), 1);
    assert_eq!(format!("user_1/primary/{}", backups[0]["key"].as_str().unwrap()), stored);
    assert_eq!(backups[0]["latest"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn future_snapshot_time_is_ignored() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let client = stack.database.connect().await.unwrap();
    let load_stored_time = || async {
        let row = client.query_one("SELECT backup_taken_at FROM user_machines", &[]).await.unwrap();
        row.get::<_, Option<jiff::Timestamp>>(0).map(svc::clock::rfc3339_ms)
    };
    let send_heartbeat = async |taken_at: &str| {
        let mut heartbeat = heartbeat_of(&host_settings);
        heartbeat["lastBackup"] =
            json!({"status": "success", "takenAt": taken_at, "key": "x", "sizeBytes": 4});
        stack.send_heartbeat(&process, &host_settings, &heartbeat).await
    };
    let (future, past) = ("2099-01-02T03:04:05.678Z", "2026-01-02T03:04:05.678Z");
    assert_eq!(send_heartbeat(future).await.status, 200);
    assert_eq!(load_stored_time().await, None);
    let record = stack.get(&process, &format!("/vps/{}", host_settings.machine)).await.body;
    assert_eq!(record["lastBackup"]["takenAt"], future, "the snapshot must still be shown");
    assert!(stack.log().contains("ignored the time of the reported snapshot, which is in the future"));
    send_heartbeat(past).await;
    assert_eq!(load_stored_time().await.as_deref(), Some(past));
    send_heartbeat(future).await;
    assert_eq!(load_stored_time().await.as_deref(), Some(past));
    // A small difference is accepted as clock skew.
    let soon = svc::clock::rfc3339_ms(jiff::Timestamp::now() + jiff::SignedDuration::from_mins(2));
    send_heartbeat(&soon).await;
    assert_eq!(load_stored_time().await, Some(soon));
    // A future time that an earlier release stored is replaced.
    client
        .execute("UPDATE user_machines SET backup_taken_at = now() + interval '9 years'", &[])
        .await
        .unwrap();
    send_heartbeat(past).await;
    assert_eq!(load_stored_time().await.as_deref(), Some(past));
}

#[tokio::test(flavor = "multi_thread")]
async fn reported_text_is_truncated_and_sanitized() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let (hostile, clean) = ("\u{1b}[2J\u{202e}x\nö", "\u{FFFD}[2J\u{FFFD}x\nö");
    let mut beat = heartbeat_of(&host_settings);
    let at = "2026-01-02T03:04:05.678Z";
    beat["lastBackup"] = json!({"status": "error", "key": hostile, "error": "é".repeat(3000)});
    beat["lastUpdate"] =
        json!({"version": "v1", "outcome": "failed", "stage": hostile, "error": hostile, "at": at});
    beat["checks"] = json!({"verify": {"status": "error", "at": at, "key": hostile, "damaged": [hostile], "error": hostile}});
    beat["attention"] = json!([{"code": "full", "detail": format!("{hostile}{}", "y".repeat(3000))}]);
    let response = stack.send_heartbeat(&process, &host_settings, &beat).await;
    assert_eq!(response.status, 200, "{response:?}");
    let record = stack.get(&process, &format!("/vps/{}", host_settings.machine)).await.body;
    assert_eq!(record["lastBackup"]["error"], json!("é".repeat(2000)));
    assert_eq!(record["lastBackup"]["key"], clean);
    assert_eq!(
        (&record["lastUpdate"]["stage"], &record["lastUpdate"]["error"]),
        (&json!(clean), &json!(clean))
    );
    let verify = &record["checks"]["verify"];
    assert_eq!(
        (&verify["key"], &verify["damaged"][0], &verify["error"]),
        (&json!(clean), &json!(clean), &json!(clean))
    );
    let detail = record["attention"][0]["detail"].as_str().unwrap();
    assert!(detail.starts_with(clean) && detail.chars().count() == 2000, "{detail}");

    let provisioned = stack.provision(&process, "user_2").await;
    let booting = stack.wait_for_host_settings(&process, provisioned["machineId"].as_str().unwrap()).await;
    let path = format!("/vps/{}/boot-failure", booting.machine);
    let report =
        stack.request(&process, reqwest::Method::POST, &path).bearer_auth(&booting.registration_token);
    let message = format!("{hostile}{}", "y".repeat(3000));
    let report = stack.send(report.json(&json!({"stage": "restore", "message": message}))).await;
    assert_eq!(report.status, 202, "{report:?}");
    let failure = stack.get(&process, &format!("/vps/{}", booting.machine)).await.body["failure"].clone();
    let message = failure["message"].as_str().unwrap();
    assert!(message.starts_with(clean) && message.chars().count() == 2000, "{failure}");
}
