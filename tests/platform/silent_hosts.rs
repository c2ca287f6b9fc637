//! Operations on hosts that accept connections but never respond do not delay other operations.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::stack::{Process, Stack, provision_body};

const SILENT_HOSTS: usize = 200;
/// Maximum number of calls to silent hosts that may start between a request and its effect.
const MAX_CALLS_BEFORE_EFFECT: usize = SILENT_HOSTS / 2;

/// Starts a listener that accepts the calls to all silent hosts. Returns its port and a counter of the calls.
async fn start_silent_listener() -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let calls = Arc::new(AtomicUsize::new(0));
    let count = calls.clone();
    tokio::spawn(async move {
        let mut open_streams = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::Relaxed);
            open_streams.push(stream);
        }
    });
    (port, calls)
}

/// Inserts copies of the running machine, each for a different user, and deletes them. The deletions wait for silent
/// hosts.
async fn delete_silent_machines(stack: &Stack, process: &Process, port: u16) {
    let client = stack.database.connect().await.unwrap();
    let sql = "INSERT INTO user_machines SELECT (jsonb_populate_record(m, jsonb_build_object( \
               'machine_id', gen_random_uuid(), 'idp_user_id', 'silent_' || i, 'provider_server_id', 1000000 + i, \
               'public_ipv4', '127.0.0.1', 'https_port', $1::int4))).* \
               FROM user_machines m, generate_series(1, $2::int4) i WHERE m.idp_user_id = 'user_1' \
               RETURNING machine_id";
    let params: [&(dyn tokio_postgres::types::ToSql + Sync); 2] =
        [&i32::from(port), &i32::try_from(SILENT_HOSTS).unwrap()];
    let rows = client.query(sql, &params).await.unwrap();
    assert_eq!(rows.len(), SILENT_HOSTS);
    for row in rows {
        let machine: uuid::Uuid = row.get(0);
        let deleted = stack.delete(process, &format!("/vps/{machine}")).await;
        assert_eq!(deleted.status, 202, "{deleted:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reboot_and_provision_are_not_delayed_by_silent_hosts() {
    let stack = Stack::start().await;
    let process =
        stack.start_platform_with(&[("LAST_BACKUP_DEADLINE_SECONDS", "3600"), ("RECONCILE_SECONDS", "3600")]);
    let host_settings = stack.start_machine(&process, "user_1").await;
    stack.subscribe(&process, "user_2").await;
    let (port, calls) = start_silent_listener().await;
    delete_silent_machines(&stack, &process, port).await;
    let are_all_called = || async { (calls.load(Ordering::Relaxed) >= SILENT_HOSTS).then_some(()) };
    stack.eventually("the silent hosts are called", are_all_called).await;

    let before = calls.load(Ordering::Relaxed);
    let reboot = stack
        .post(&process, &format!("/vps/{}/power", host_settings.machine), &json!({"action": "reboot"}))
        .await;
    assert_eq!(reboot.status, 202, "{reboot:?}");
    let is_requested = || async { (stack.provider.call_count("POST", "/actions/reboot") > 0).then_some(()) };
    stack.eventually("the reboot is requested", is_requested).await;
    let calls_before_effect = calls.load(Ordering::Relaxed) - before;
    assert!(
        calls_before_effect < MAX_CALLS_BEFORE_EFFECT,
        "the reboot waited for {calls_before_effect} calls"
    );

    // The first provisioning step calls the predecessor's host, if there is one.
    let before = calls.load(Ordering::Relaxed);
    let provisioned = stack.post(&process, "/vps/provision", &provision_body("user_2")).await;
    let path = format!("/vps/operations/{}", provisioned.body["operationId"].as_str().unwrap());
    let has_continued = || async {
        let operation: Value = stack.get(&process, &path).await.body;
        (operation["step"] != "last_backup").then_some(())
    };
    stack.eventually("provisioning continues", has_continued).await;
    let calls_before_effect = calls.load(Ordering::Relaxed) - before;
    assert!(
        calls_before_effect < MAX_CALLS_BEFORE_EFFECT,
        "provisioning waited for {calls_before_effect} calls"
    );
}
