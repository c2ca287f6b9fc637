//! Tests the reconciler against the provider's actual state: vanished servers, orphans, stuck operations and retried
//! deletions.

use std::time::Duration;

use kit::provider::{Fault, FaultRule};
use serde_json::{Value, json};

use super::stack::{Process, Stack, UserDataSettings, provision_body};

async fn assert_fails_with(stack: &Stack, process: &Process, host_settings: &UserDataSettings, cause: &str) {
    let has_failed = || async {
        let record = stack.get(process, &format!("/vps/{}", host_settings.machine)).await.body;
        (record["status"] == "failed").then_some(record)
    };
    let record = stack.eventually("the machine fails", has_failed).await;
    assert_eq!(record["failure"]["cause"], cause, "{record}");
}

/// Waits until the platform has listed the provider's servers this many more times.
async fn wait_for_listings(stack: &Stack, count: usize) {
    let listings = || stack.provider.call_count("GET", "label_selector=svc-machine&");
    let expected = listings() + count;
    stack
        .eventually("the reconciler lists servers", || async { (listings() >= expected).then_some(()) })
        .await;
}

/// Creates a server as any client with the project's token could.
async fn create_foreign_server(stack: &Stack, name: &str, labels: &Value) -> i64 {
    let body = json!({"name": name, "server_type": "cpx22", "image": "debian-12", "location": "nbg1", "labels": labels,
        "start_after_create": true, "public_net": {"enable_ipv4": true, "enable_ipv6": true}});
    let request = reqwest::Client::new().post(format!("{}/servers", stack.provider.base_url()));
    let response = request.bearer_auth(stack.provider.token()).json(&body).send().await.unwrap();
    assert_eq!(response.status(), 201);
    response.json::<Value>().await.unwrap()["server"]["id"].as_i64().unwrap()
}

async fn fetch_installation_id(stack: &Stack) -> String {
    let client = stack.database.connect().await.unwrap();
    let row = client.query_one("SELECT installation_id::text FROM installation", &[]).await.unwrap();
    row.get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn vanished_server_fails_its_machine_without_replacement() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let (host_settings, other_host_settings) =
        (stack.start_machine(&process, "user_1").await, stack.start_machine(&process, "user_2").await);
    stack.provider.lose_server(&format!("svc-{}", host_settings.machine)).await.unwrap();
    assert_fails_with(&stack, &process, &host_settings, "server_gone").await;
    wait_for_listings(&stack, 2).await;
    assert_eq!(stack.status(&process, &other_host_settings.machine).await, "running");
    assert_eq!(stack.provider.creations().len(), 2);
    // The machine's host may still be running somewhere, but its heartbeat does not return the machine to service.
    stack.send_heartbeat(&process, &host_settings, &super::stack::heartbeat_of(&host_settings)).await;
    assert_eq!(stack.status(&process, &host_settings.machine).await, "failed");
    let client = stack.database.connect().await.unwrap();
    let audit = client.query("SELECT 1 FROM operator_audit WHERE action = 'server.gone'", &[]).await.unwrap();
    assert_eq!(audit.len(), 1);

    // The machine was in service but left no snapshot, so only an operator can let its slot start empty.
    let mut body = provision_body("user_1");
    stack.post(&process, "/vps/provision", &body).await.assert_problem(409, "snapshot_unusable");
    body["allowEmpty"] = json!(true);
    let again = stack.post(&process, "/vps/provision", &body).await;
    let ended = stack.wait_until_ended(&process, again.body["operationId"].as_str().unwrap()).await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
}

#[tokio::test(flavor = "multi_thread")]
async fn outage_or_earlier_absence_is_not_a_vanished_server() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let client = stack.database.connect().await.unwrap();
    let count_missing = || async {
        let sql = "SELECT count(*) FROM user_machines WHERE server_missing_since IS NOT NULL";
        client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0)
    };
    let down = || Fault::Status { status: 503, code: "unavailable".to_owned(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(5, "GET", "/servers", down()));
    let is_over = || async { stack.provider.pending_faults().is_empty().then_some(()) };
    stack.eventually("the outage is over", is_over).await;
    wait_for_listings(&stack, 2).await;
    assert_eq!(
        (stack.status(&process, &host_settings.machine).await, count_missing().await),
        (json!("running"), 0)
    );

    // The server was missing from an earlier list, but the next one contains it.
    client
        .execute("UPDATE user_machines SET server_missing_since = now() - interval '1 hour'", &[])
        .await
        .unwrap();
    wait_for_listings(&stack, 2).await;
    assert_eq!(
        (stack.status(&process, &host_settings.machine).await, count_missing().await),
        (json!("running"), 0)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn token_of_another_project_fails_no_machine() {
    let stack = Stack::start().await;
    let mut process = stack.start_platform();
    let mut hosts = Vec::new();
    for n in 0..4 {
        hosts.push(stack.start_machine(&process, &format!("user_{n}")).await);
    }
    process.kill();
    let other_project =
        kit::provider::Simulator::start(kit::provider::SimulatorOptions::record()).await.unwrap();
    let settings = [
        ("PROVIDER_API_URL", other_project.base_url()),
        ("PROVIDER_API_TOKEN", other_project.token().to_owned()),
    ];
    let settings: Vec<_> = settings.iter().map(|(name, value)| (*name, &**value)).collect();
    let process = stack.start_platform_with(&settings);
    let is_logged = || async { stack.log().contains("another project").then_some(()) };
    stack.eventually("the problem is reported", is_logged).await;
    let listings = || other_project.call_count("GET", "label_selector=svc-machine&");
    let expected = listings() + 3;
    stack
        .eventually("the servers are listed again", || async { (listings() >= expected).then_some(()) })
        .await;
    for host_settings in &hosts {
        assert_eq!(stack.status(&process, &host_settings.machine).await, "running");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn orphans_are_deleted_once_an_operator_releases_them() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("ORPHAN_GRACE_SECONDS", "2")]);
    let host_settings = stack.start_machine(&process, "user_1").await;
    let own_installation = fetch_installation_id(&stack).await;
    let server = stack.provider.servers().remove(0);
    assert_eq!(server.labels["svc-installation"], own_installation);

    let unknown = uuid::Uuid::now_v7().to_string();
    create_foreign_server(
        &stack,
        "orphan",
        &json!({"svc-machine": unknown, "svc-installation": own_installation}),
    )
    .await;
    create_foreign_server(
        &stack,
        "malformed",
        &json!({"svc-machine": "no-id", "svc-installation": own_installation}),
    )
    .await;
    let other_installation = uuid::Uuid::now_v7().to_string();
    create_foreign_server(
        &stack,
        "theirs",
        &json!({"svc-machine": unknown, "svc-installation": other_installation}),
    )
    .await;
    create_foreign_server(&stack, "older", &json!({"svc-machine": unknown})).await;
    create_foreign_server(&stack, "unrelated", &json!({})).await;
    wait_for_listings(&stack, 1).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    wait_for_listings(&stack, 2).await;
    assert!(
        stack.provider.server_by_name("orphan").is_some(),
        "the orphan was deleted before an operator released it"
    );
    // A server that cannot be deleted does not block the others.
    let locked = Fault::Status { status: 423, code: "locked".to_owned(), reset_in_seconds: None };
    let first = stack.provider.server_by_name("orphan").unwrap().id;
    stack.provider.add_fault(FaultRule::times(1000, "DELETE", &format!("/servers/{first}"), locked));
    let release = "/vps/fleet/alarms/unknown_servers/release";
    assert_eq!(stack.post(&process, release, &json!({})).await.status, 200);
    let is_deleted = || async { stack.provider.server_by_name("malformed").is_none().then_some(()) };
    stack.eventually("the other orphan is deleted", is_deleted).await;
    stack.provider.clear_faults();
    let is_deleted = || async { stack.provider.server_by_name("orphan").is_none().then_some(()) };
    stack.eventually("the first orphan is deleted", is_deleted).await;
    wait_for_listings(&stack, 3).await;
    let mut names: Vec<_> = stack.provider.servers().into_iter().map(|server| server.name).collect();
    names.sort();
    assert_eq!(
        names,
        ["older".to_owned(), format!("svc-{}", host_settings.machine), "theirs".into(), "unrelated".into()]
    );
    assert_eq!(stack.status(&process, &host_settings.machine).await, "running");
}

async fn find_unknown_servers_alarm(stack: &Stack, process: &Process) -> Option<Value> {
    let fleet = stack.get(process, "/vps/fleet").await.body;
    fleet["alarms"].as_array()?.iter().find(|alarm| alarm["alarm"] == "unknown_servers").cloned()
}

/// An operator does not have to release a server again, even if its grace period is longer than the release.
#[tokio::test(flavor = "multi_thread")]
async fn released_server_is_deleted_after_its_grace_period() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("ORPHAN_GRACE_SECONDS", "600")]);
    let labels = json!({"svc-machine": uuid::Uuid::now_v7().to_string(), "svc-installation": fetch_installation_id(&stack).await});
    create_foreign_server(&stack, "released", &labels).await;
    let raised =
        stack.eventually("the alarm is raised", || find_unknown_servers_alarm(&stack, &process)).await;
    assert!(raised["next"].as_str().unwrap().contains("svcctl alarm release unknown_servers"), "{raised}");
    let released = stack.post(&process, "/vps/fleet/alarms/unknown_servers/release", &json!({})).await.body;
    let current = find_unknown_servers_alarm(&stack, &process).await.unwrap();
    for alarm in [&released, &current] {
        assert!(alarm["releasedUntil"].is_string(), "{alarm}");
        let next = alarm["next"].as_str().unwrap();
        assert!(next.contains("is deleted") && !next.contains("neither they nor any kept"), "{alarm}");
    }
    // End the release early, as if the grace period were longer than the release.
    let client = stack.database.connect().await.unwrap();
    let end_release = "UPDATE fleet_alarms SET released_until = now() - interval '1 second'";
    client.execute(end_release, &[]).await.unwrap();
    create_foreign_server(&stack, "later", &labels).await;
    let is_held = || async {
        let alarm = find_unknown_servers_alarm(&stack, &process).await?;
        (alarm["detail"]["unknown"] == 2 && alarm["releasedUntil"].is_null()).then_some(alarm)
    };
    let alarm = stack.eventually("the later server is held back", is_held).await;
    assert_eq!(alarm["detail"]["released"], 1, "{alarm}");
    assert!(alarm["next"].as_str().unwrap().contains("Already released: 1 of them"), "{alarm}");
    assert!(
        stack.provider.server_by_name("released").is_some(),
        "the released server was deleted before its grace period ended"
    );
    let age_servers = "UPDATE unknown_servers SET first_seen = first_seen - interval '1 hour'";
    assert_eq!(client.execute(age_servers, &[]).await.unwrap(), 2);
    let is_deleted = || async { stack.provider.server_by_name("released").is_none().then_some(()) };
    stack.eventually("the released server is deleted", is_deleted).await;
    wait_for_listings(&stack, 3).await;
    assert!(
        stack.provider.server_by_name("later").is_some(),
        "the later server was deleted without a release"
    );
}

/// Starts a machine and deletes it without retention, so that the reconciler may delete its server immediately.
async fn delete_machine_without_retention(stack: &Stack, process: &Process) {
    let host_settings = stack.start_machine(process, "user_1").await;
    let deleted = stack.delete(process, &format!("/vps/{}?acceptLoss=true", host_settings.machine)).await;
    stack.wait_until_ended(process, deleted.body["operationId"].as_str().unwrap()).await;
}

async fn wait_for_server_deletion(stack: &Stack) {
    let is_deleted = || async { stack.provider.servers().is_empty().then_some(()) };
    stack.eventually("the server is deleted", is_deleted).await;
}

/// No kept server is deleted while machines may be missing from the database.
#[tokio::test(flavor = "multi_thread")]
async fn kept_server_stays_while_the_inventory_fails() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let down = Fault::Status { status: 503, code: "unavailable".to_owned(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(1000, "GET", "label_selector=svc-machine&", down));
    delete_machine_without_retention(&stack, &process).await;
    wait_for_listings(&stack, 3).await;
    assert_eq!(stack.provider.servers().len(), 1, "{}", stack.log());
    stack.provider.clear_faults();
    wait_for_server_deletion(&stack).await;
}

/// The other process's inventory may still be running, and may find a server whose machine the database lacks.
#[tokio::test(flavor = "multi_thread")]
async fn kept_server_stays_while_another_process_takes_inventory() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let client = stack.database.connect().await.unwrap();
    let take_turn = "INSERT INTO task_turns (task, last_at) VALUES ('servers', now() + interval '1 hour') \
                     ON CONFLICT (task) DO UPDATE SET last_at = excluded.last_at";
    client.execute(take_turn, &[]).await.unwrap();
    delete_machine_without_retention(&stack, &process).await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(stack.provider.servers().len(), 1, "{}", stack.log());
    client.execute("UPDATE task_turns SET last_at = now() - interval '1 hour'", &[]).await.unwrap();
    wait_for_server_deletion(&stack).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn late_server_of_an_ended_machine_is_deleted() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let deleted = stack.delete(&process, &format!("/vps/{}?acceptLoss=true", host_settings.machine)).await;
    stack.wait_until_ended(&process, deleted.body["operationId"].as_str().unwrap()).await;
    stack.assert_no_server();
    // This is the row's state after the platform has assumed that a create request was lost.
    let client = stack.database.connect().await.unwrap();
    let sql =
        "UPDATE user_machines SET server_deleted_at = now() - interval '1 minute', provider_server_id = NULL";
    client.execute(sql, &[]).await.unwrap();
    create_foreign_server(
        &stack,
        &format!("svc-{}", host_settings.machine),
        &json!({"svc-machine": host_settings.machine}),
    )
    .await;
    let is_deleted = || async { stack.provider.servers().is_empty().then_some(()) };
    stack.eventually("the late server is deleted", is_deleted).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stuck_operation_is_ended_and_its_machine_fails() {
    let stack = Stack::start().await;
    // The first process is killed in the step `fence`, and in the second process, every attempt at this step fails.
    let mut killed =
        stack.start_platform_with(&[("FAILPOINTS", "operations.provision.fence.before=return(kill)")]);
    stack.subscribe(&killed, "user_1").await;
    let _ = stack.try_post(&killed, "/vps/provision", &provision_body("user_1")).await;
    killed.wait_until_killed().await;
    let settings = [
        ("FAILPOINTS", "operations.provision.fence.before=return(error)"),
        ("OPERATION_DEADLINE_SECONDS", "3"),
    ];
    let process = stack.start_platform_with(&settings);
    let listed = stack.get(&process, "/vps?idpUserId=user_1").await.body["machines"][0].clone();
    let machine = listed["machineId"].as_str().unwrap();
    let has_failed = || async {
        let record = stack.get(&process, &format!("/vps/{machine}")).await.body;
        (record["status"] == "failed").then_some(record)
    };
    let record = stack.eventually("the machine fails", has_failed).await;
    assert_eq!(
        (&record["failure"]["cause"], &record["failure"]["stage"]),
        (&json!("operation_hung"), &json!("fence"))
    );
    let operation = &record["operations"][0];
    assert_eq!((&operation["state"], &operation["errorCode"]), (&json!("failed"), &json!("operation_hung")));
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_is_retried_until_the_provider_completes_it() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("OPERATION_DEADLINE_SECONDS", "2")]);
    let host_settings = stack.start_machine(&process, "user_1").await;
    let down = Fault::Status { status: 503, code: "unavailable".to_owned(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(4, "DELETE", "/servers", down));
    let deleted = stack.delete(&process, &format!("/vps/{}?acceptLoss=true", host_settings.machine)).await;
    let ended = stack.wait_until_ended(&process, deleted.body["operationId"].as_str().unwrap()).await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
    stack.wait_for_server_deletion(&host_settings.machine).await;
    assert!(stack.provider.pending_faults().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn server_listing_rate_is_independent_of_process_count() {
    let stack = Stack::start().await;
    let _processes: Vec<Process> = (0..3).map(|_| stack.start_platform()).collect();
    wait_for_listings(&stack, 1).await;
    let started = std::time::Instant::now();
    let before = stack.provider.call_count("GET", "label_selector=svc-machine&");
    wait_for_listings(&stack, 5).await;
    let listed = stack.provider.call_count("GET", "label_selector=svc-machine&") - before;
    // The processes together list the servers once per second; three independent processes would list them three times
    // per second.
    let max = 2.0 + started.elapsed().as_secs_f64() * 1.5;
    assert!((listed as f64) <= max, "{listed} listings in {:?}", started.elapsed());
}

/// Returns the number of log lines that contain this text.
fn count_log_lines(stack: &Stack, text: &str) -> usize {
    stack.log().lines().filter(|line| line.contains(text)).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn unstorable_outcome_is_retried_with_backoff() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let provisioned = stack.provision(&process, "user_1").await;
    let host_settings =
        stack.wait_for_host_settings(&process, provisioned["machineId"].as_str().unwrap()).await;
    // The operation's retries are exhausted, but a machine that cannot be read cannot be marked as failed either.
    let client = stack.database.connect().await.unwrap();
    client.execute("UPDATE user_machines SET public_ipv4 = 'nowhere'", &[]).await.unwrap();
    let is_reported = || async {
        let age = "UPDATE operations SET failing_since = failing_since - interval '2 hours'";
        client.execute(age, &[]).await.unwrap();
        (count_log_lines(&stack, "cannot store the outcome of a step") > 0).then_some(())
    };
    stack.eventually("the outcome cannot be stored", is_reported).await;
    tokio::time::sleep(Duration::from_secs(8)).await;
    let failures = count_log_lines(&stack, "cannot store the outcome of a step");
    assert!(failures <= 5, "{failures} failures without backoff");
    let is_retried =
        || async { (count_log_lines(&stack, "cannot store the outcome of a step") > 1).then_some(()) };
    stack.eventually("the operation is retried", is_retried).await;
    client.execute("UPDATE user_machines SET public_ipv4 = NULL", &[]).await.unwrap();
    assert_eq!(stack.register(&process, &host_settings).await.status, 200);
    let ended = stack.wait_until_ended(&process, provisioned["operationId"].as_str().unwrap()).await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_machine_does_not_stop_the_reconciler() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let mut machines = Vec::new();
    for user in ["user_1", "user_2", "user_3"] {
        let machine = stack.provision(&process, user).await["machineId"].as_str().unwrap().to_owned();
        stack.wait_for_host_settings(&process, &machine).await;
        machines.push(machine);
    }
    let client = stack.database.connect().await.unwrap();
    let sql = "UPDATE user_machines SET registration_expires_at = now(), \
               public_ipv4 = CASE WHEN idp_user_id = 'user_3' THEN public_ipv4 ELSE 'nowhere' END";
    client.execute(sql, &[]).await.unwrap();
    // The machines' own operations would also handle the expired registrations, so they are postponed.
    client.execute("UPDATE operations SET due_at = 'infinity'", &[]).await.unwrap();
    let has_failed = || async { (stack.status(&process, &machines[2]).await == "failed").then_some(()) };
    stack.eventually("the readable machine fails", has_failed).await;
    let is_logged = || async {
        let is_named = machines[..2].iter().all(|id| {
            stack
                .log()
                .lines()
                .any(|line| line.contains("the reconciler skipped an item") && line.contains(id.as_str()))
        });
        (is_named && count_log_lines(&stack, "a part of the reconciler failed") > 0).then_some(())
    };
    stack.eventually("the failed rows are named", is_logged).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_preview_does_not_stop_the_reconciler() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let (first, second) =
        (stack.start_machine(&process, "user_1").await, stack.start_machine(&process, "user_2").await);
    let client = stack.database.connect().await.unwrap();
    let sql = "UPDATE user_machines SET kind = 'preview', preview_expires_at = now(), \
               public_ipv4 = CASE WHEN idp_user_id = 'user_2' THEN public_ipv4 ELSE 'nowhere' END";
    client.execute(sql, &[]).await.unwrap();
    let path = format!("/vps/{}", second.machine);
    let is_deleted =
        || async { stack.get(&process, &path).await.body["deletedAt"].is_string().then_some(()) };
    stack.eventually("the readable preview is deleted", is_deleted).await;
    let is_logged = || async {
        let names =
            |line: &str| line.contains("the reconciler skipped an item") && line.contains(&first.machine);
        stack.log().lines().any(names).then_some(())
    };
    stack.eventually("the failed row is named", is_logged).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn inventory_matches_listed_servers_in_one_statement() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let machines = 8;
    for n in 1..=machines {
        stack.start_machine(&process, &format!("user_{n}")).await;
    }
    let client = stack.database.connect().await.unwrap();
    let count = "CREATE TABLE matches (n bigint);
        CREATE FUNCTION count_match() RETURNS trigger LANGUAGE plpgsql AS \
            'BEGIN INSERT INTO matches VALUES (1); RETURN NULL; END';
        CREATE TRIGGER count_match AFTER UPDATE OF server_deleted_at ON user_machines
            FOR EACH STATEMENT EXECUTE FUNCTION count_match()";
    client.batch_execute(count).await.unwrap();
    let listings = || stack.provider.call_count("GET", "/servers?label_selector");
    let before = listings();
    let are_listed = || async { (listings() >= before + 4).then_some(()) };
    stack.eventually("the servers are listed several times", are_listed).await;
    let listings = i64::try_from(listings() - before).unwrap();
    let statements: i64 = client.query_one("SELECT count(*) FROM matches", &[]).await.unwrap().get(0);
    assert!((1..=listings + 1).contains(&statements), "{statements} statements for {listings} listings");
}
