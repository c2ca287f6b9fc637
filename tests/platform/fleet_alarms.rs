//! Servers that are missing from the provider's list are not immediately assumed to be lost: a host that sends
//! heartbeats is alive, and many losses at once raise an alarm. An error in the provider account raises an alarm
//! and fails no machine.

use std::time::{Duration, Instant};

use kit::provider::{Fault, FaultRule};
use serde_json::{Value, json};

use super::stack::{Process, Stack, UserDataSettings, heartbeat_of};

async fn fetch_fleet(stack: &Stack, process: &Process) -> Value {
    stack.get(process, "/vps/fleet").await.body
}

fn find_alarm<'a>(fleet: &'a Value, name: &str) -> Option<&'a Value> {
    fleet["alarms"].as_array()?.iter().find(|alarm| alarm["alarm"] == name)
}

fn server_names(hosts: &[UserDataSettings]) -> Vec<String> {
    hosts.iter().map(|host_settings| format!("svc-{}", host_settings.machine)).collect()
}

async fn start_machines(stack: &Stack, process: &Process, count: usize) -> Vec<UserDataSettings> {
    let mut hosts = Vec::new();
    for n in 0..count {
        hosts.push(stack.start_machine(process, &format!("user_{n}")).await);
    }
    hosts
}

async fn assert_all_running(stack: &Stack, process: &Process, hosts: &[UserDataSettings]) {
    for host_settings in hosts {
        assert_eq!(stack.status(process, &host_settings.machine).await, "running", "{}", stack.log());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unlisted_machine_with_heartbeats_does_not_fail() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("SERVER_GONE_SILENCE_SECONDS", "5")]);
    let hosts = start_machines(&stack, &process, 2).await;
    stack.provider.hide_servers(&server_names(&hosts[..1]));
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(8) {
        for host_settings in &hosts {
            stack.send_heartbeat(&process, host_settings, &heartbeat_of(host_settings)).await;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_all_running(&stack, &process, &hosts).await;
    // A machine that is neither listed nor sending heartbeats is lost.
    let has_failed = || async { (stack.status(&process, &hosts[0].machine).await == "failed").then_some(()) };
    stack.eventually("the silent machine fails", has_failed).await;
    assert_eq!(stack.status(&process, &hosts[1].machine).await, "running");
}

#[tokio::test(flavor = "multi_thread")]
async fn partial_listing_fails_no_machine_and_raises_an_alarm() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let hosts = start_machines(&stack, &process, 6).await;
    stack.provider.hide_servers(&server_names(&hosts[1..]));
    let find_raised_alarm =
        || async { find_alarm(&fetch_fleet(&stack, &process).await, "servers_missing").cloned() };
    let alarm = stack.eventually("the alarm is raised", find_raised_alarm).await;
    assert_eq!((&alarm["detail"]["missing"], &alarm["detail"]["limit"]), (&json!(5), &json!(4)), "{alarm}");
    assert!(alarm["next"].as_str().unwrap().contains("svcctl alarm release servers_missing"), "{alarm}");
    // This is much longer than RECONCILE_SECONDS and SERVER_GONE_SILENCE_SECONDS.
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert_all_running(&stack, &process, &hosts).await;
    // Nor do machines fail one by one while the list becomes complete again.
    stack.provider.hide_servers(&server_names(&hosts[4..]));
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_all_running(&stack, &process, &hosts).await;
    assert!(find_alarm(&fetch_fleet(&stack, &process).await, "servers_missing").is_some());
    stack.provider.hide_servers(&[]);
    let has_cleared = || async {
        find_alarm(&fetch_fleet(&stack, &process).await, "servers_missing").is_none().then_some(())
    };
    stack.eventually("the alarm clears", has_cleared).await;
    assert_all_running(&stack, &process, &hosts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn released_alarm_fails_the_lost_machines() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let hosts = start_machines(&stack, &process, 6).await;
    for name in server_names(&hosts[1..]) {
        stack.provider.lose_server(&name).await.unwrap();
    }
    let find_raised_alarm =
        || async { find_alarm(&fetch_fleet(&stack, &process).await, "servers_missing").cloned() };
    stack.eventually("the alarm is raised", find_raised_alarm).await;
    let path = "/vps/fleet/alarms/servers_missing/release";
    stack
        .post(&process, "/vps/fleet/alarms/nothing/release", &json!({}))
        .await
        .assert_problem(404, "not_found");
    let unreleasable_path = "/vps/fleet/alarms/database_behind_store/release";
    let refused = stack.post(&process, unreleasable_path, &json!({})).await;
    refused.assert_problem(409, "invalid_state");
    assert!(refused.body["detail"].as_str().unwrap().contains("cannot be released"), "{refused:?}");
    let response = stack.post(&process, path, &json!({})).await;
    assert_eq!(response.status, 200, "{response:?}");
    assert!(response.body["releasedUntil"].is_string(), "{response:?}");
    for host_settings in &hosts[1..] {
        let has_failed =
            || async { (stack.status(&process, &host_settings.machine).await == "failed").then_some(()) };
        stack.eventually("the lost machine fails", has_failed).await;
    }
    assert_eq!(stack.status(&process, &hosts[0].machine).await, "running");
    let client = stack.database.connect().await.unwrap();
    let audit =
        client.query("SELECT 1 FROM operator_audit WHERE action = 'alarm.release'", &[]).await.unwrap();
    assert_eq!(audit.len(), 1);
    let has_cleared = || async { (stack.post(&process, path, &json!({})).await.status == 404).then_some(()) };
    stack.eventually("the alarm clears once its cause is gone", has_cleared).await;
}

/// This is the state after the database has been restored from a copy that is older than the machines.
#[tokio::test(flavor = "multi_thread")]
async fn many_unknown_servers_are_kept_until_released() {
    let stack = Stack::start().await;
    let mut process = stack.start_platform();
    let hosts = start_machines(&stack, &process, 6).await;
    process.kill();
    let client = stack.database.connect().await.unwrap();
    let deleted_ids: Vec<uuid::Uuid> =
        hosts[1..].iter().map(|host_settings| host_settings.machine.parse().unwrap()).collect();
    let delete_machines = "WITH log AS (DELETE FROM operation_log WHERE operation_id IN \
                    (SELECT operation_id FROM operations WHERE machine_id = ANY($1))), \
                  operations AS (DELETE FROM operations WHERE machine_id = ANY($1)) \
                  DELETE FROM user_machines WHERE machine_id = ANY($1)";
    client.execute(delete_machines, &[&deleted_ids]).await.unwrap();
    let process = stack.start_platform_with(&[("ORPHAN_GRACE_SECONDS", "1")]);
    let find_raised_alarm =
        || async { find_alarm(&fetch_fleet(&stack, &process).await, "unknown_servers").cloned() };
    let raised = stack.eventually("the alarm is raised", find_raised_alarm).await;
    assert_eq!(
        (&raised["detail"]["unknown"], raised["detail"]["servers"].as_array().map(Vec::len)),
        (&json!(5), Some(5))
    );
    let server = &raised["detail"]["servers"][0];
    assert_eq!(
        (&server["epoch"], server["slot"].as_str().map(|slot| slot.ends_with("/primary"))),
        (&json!("1"), Some(true))
    );
    assert!(server["machineId"].is_string() && server["providerServerId"].is_string(), "{server}");
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(stack.provider.servers().len(), 6, "{}", stack.log());
    let response = stack.post(&process, "/vps/fleet/alarms/unknown_servers/release", &json!({})).await;
    assert_eq!(response.status, 200, "{response:?}");
    let is_deleted = || async { (stack.provider.servers().len() == 1).then_some(()) };
    stack.eventually("the unknown servers are deleted", is_deleted).await;
    assert_eq!(stack.status(&process, &hosts[0].machine).await, "running");
}

/// Makes the provider respond to each request to create a server with this error.
fn fail_server_creation(stack: &Stack, status: u16, code: &str) {
    let fault = Fault::Status { status, code: code.to_owned(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(1000, "POST", "/servers", fault));
}

#[tokio::test(flavor = "multi_thread")]
async fn account_error_raises_one_alarm_and_fails_no_machine() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("OPERATION_DEADLINE_SECONDS", "2")]);
    for (code, status, name) in [
        ("resource_limit_exceeded", 403, "provider_limit"),
        ("unauthorized", 401, "provider_unauthorized"),
        ("resource_unavailable", 412, "provider_capacity"),
    ] {
        // Both requests are accepted before the provider returns this error: while the alarm `provider_limit` is
        // active, the platform rejects new requests.
        fail_server_creation(&stack, 423, "locked");
        let users = (format!("{name}_1"), format!("{name}_2"));
        let provisioned =
            [stack.provision(&process, &users.0).await, stack.provision(&process, &users.1).await];
        stack.provider.clear_faults();
        fail_server_creation(&stack, status, code);
        let find_raised_alarm = || async { find_alarm(&fetch_fleet(&stack, &process).await, name).cloned() };
        stack.eventually("the alarm is raised", find_raised_alarm).await;
        // This is longer than the operation deadline.
        tokio::time::sleep(Duration::from_secs(4)).await;
        let fleet = fetch_fleet(&stack, &process).await;
        let has_name = |alarm: &&Value| alarm["alarm"] == name;
        assert_eq!(fleet["alarms"].as_array().unwrap().iter().filter(has_name).count(), 1, "{fleet}");
        assert_eq!(fleet["attention"], json!([]), "the alarm must be the only item: {fleet}");
        for provisioned in &provisioned {
            let machine = provisioned["machineId"].as_str().unwrap();
            assert_eq!(stack.status(&process, machine).await, "provisioning", "{}", stack.log());
        }
        stack.provider.clear_faults();
        for provisioned in &provisioned {
            let ended = stack.wait_until_ended(&process, provisioned["operationId"].as_str().unwrap()).await;
            assert_eq!(ended["state"], "succeeded", "{ended}");
        }
    }
}

/// An operation that has waited for the provider's capacity for longer than its deadlines gets the full deadlines again
/// once it continues.
#[tokio::test(flavor = "multi_thread")]
async fn time_without_capacity_does_not_count_toward_the_deadline() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    fail_server_creation(&stack, 412, "resource_unavailable");
    let provisioned = stack.provision(&process, "user_1").await;
    let operation = provisioned["operationId"].as_str().unwrap();
    let client = stack.database.connect().await.unwrap();
    let find_blocked = || async {
        let sql = "SELECT 1 FROM operations WHERE error_code = 'provider_account'";
        client.query_opt(sql, &[]).await.unwrap()
    };
    stack.eventually("the operation is waiting for capacity", find_blocked).await;
    // The waiting operation becomes older than all deadlines. If the attempts while the account was blocked counted,
    // the next failure would be the fifth, which is the minimum before a machine fails.
    let age = "WITH lines AS (UPDATE operation_log SET at = at - interval '25 hours') \
               UPDATE operations SET created_at = created_at - interval '25 hours', \
               progress_at = progress_at - interval '25 hours', attempts = greatest(attempts, 4)";
    assert_eq!(client.execute(age, &[]).await.unwrap(), 1);
    // The operation continues, but first gets a different error, so the reconciler sees the operation before it ends.
    stack.provider.clear_faults();
    fail_server_creation(&stack, 423, "locked");
    let has_continued = || async { find_blocked().await.is_none().then_some(()) };
    stack.eventually("the operation continues", has_continued).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    stack.provider.clear_faults();
    let ended = stack.wait_until_ended(&process, operation).await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
}

/// A deleted machine is not in the fleet's lists of machines, but its stuck deletion must be shown.
#[tokio::test(flavor = "multi_thread")]
async fn overdue_operation_of_a_deleted_machine_is_shown() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let locked = Fault::Status { status: 423, code: "locked".to_owned(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(1000, "DELETE", "/servers", locked));
    let deleted = stack.delete(&process, &format!("/vps/{}", host_settings.machine)).await;
    assert_eq!(fetch_fleet(&stack, &process).await["overdueOperations"], json!([]));
    let client = stack.database.connect().await.unwrap();
    let old = "UPDATE operations SET created_at = now() - interval '31 minutes' WHERE state = 'running'";
    assert_eq!(client.execute(old, &[]).await.unwrap(), 1);
    let fleet = fetch_fleet(&stack, &process).await;
    let overdue = &fleet["overdueOperations"][0];
    assert_eq!(overdue["operationId"], deleted.body["operationId"], "{fleet}");
    assert_eq!((&overdue["kind"], &overdue["handle"]), (&json!("delete"), &json!("h-user-1")), "{fleet}");
    assert_eq!(fleet["overdueOperationsTotal"], 1);
    let metrics = stack.get(&process, "/metrics").await.text;
    assert!(metrics.contains("svc_operations_overdue 1"), "{metrics}");
}
