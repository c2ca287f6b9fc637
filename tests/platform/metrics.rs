//! Scrapes `/metrics` before and after operations.

use std::time::Duration;

use kit::provider::{Fault as ProviderFault, FaultRule as ProviderFaultRule};
use kit::s3::{Fault, FaultRule};
use reqwest::Method;
use serde_json::json;

use super::stack::{Process, SECRET, Stack, heartbeat};
use crate::exposition::Exposition;

async fn scrape(stack: &Stack, process: &Process) -> Exposition {
    let response = stack.get(process, "/metrics").await;
    assert_eq!(response.status, 200, "{response:?}");
    assert_eq!(response.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    Exposition::parse(&response.text).unwrap_or_else(|error| panic!("{error:#}\n{}", response.text))
}

fn assert_grew(before: &Exposition, after: &Exposition, series: &str, min_increase: f64) {
    let (old, new) = (before.get(series).unwrap_or(0.0), after.get(series).unwrap_or(0.0));
    assert!(new - old >= min_increase, "{series}: {old}, then {new}\n{:#?}", after.samples);
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_work_and_describe_the_fleet() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let before = scrape(&stack, &process).await;
    assert_eq!(before.get("svc_machines{status=\"running\"}"), Some(0.0));
    assert!(before.get("svc_backup_age_seconds{over=\"max\"}").is_some_and(f64::is_nan));

    let host_settings = stack.start_machine(&process, "user_1").await;
    let mut beat = heartbeat();
    beat["lastBackup"] = json!({"status": "success", "takenAt": "2026-01-02T03:04:05.678Z",
        "key": "system/db/snapshots/2026-01-02T03-04-05.678Z-1.dump", "sizeBytes": 4});
    assert_eq!(stack.send_heartbeat(&process, &host_settings, &beat).await.status, 200);
    stack.get(&process, "/nothing/here").await.assert_problem(404, "not_found");
    let find_success = || async {
        let scraped = scrape(&stack, &process).await;
        scraped.get("svc_operations_total{kind=\"provision\",outcome=\"succeeded\"}").map(|_| scraped)
    };
    let after = stack.eventually("the operation is counted", find_success).await;

    for series in [
        "svc_http_requests_total{listener=\"api\",method=\"POST\",route=\"/vps/provision\",status=\"2xx\"}",
        "svc_http_requests_total{listener=\"api\",method=\"GET\",route=\"/vps/{id}\",status=\"2xx\"}",
        "svc_http_requests_total{listener=\"api\",method=\"GET\",route=\"none\",status=\"4xx\"}",
        "svc_http_requests_total{listener=\"api\",method=\"GET\",route=\"/metrics\",status=\"2xx\"}",
        "svc_http_request_duration_seconds_count{listener=\"api\",route=\"/vps/provision\"}",
        "svc_operation_steps_total{kind=\"provision\",step=\"create_server\",outcome=\"done\"}",
        "svc_operation_duration_seconds_count{kind=\"provision\"}",
        "svc_provider_calls_total{call=\"create server\",outcome=\"ok\"}",
        "svc_store_calls_total{call=\"get\",outcome=\"ok\"}",
    ] {
        assert_grew(&before, &after, series, 1.0);
    }
    assert_eq!(after.get("svc_machines{status=\"running\"}"), Some(1.0));
    assert_eq!(after.get("svc_machines_by_health{health=\"healthy\"}"), Some(1.0));
    assert_eq!(after.get("svc_operations_in_progress{kind=\"provision\"}"), Some(0.0));
    // The reported snapshot is much older, but the machine has only just registered.
    assert!(after.get("svc_backup_age_seconds{over=\"max\"}").is_some_and(|age| age < 86_400.0));
    assert!(after.get("svc_database_pool_connections{state=\"open\"}").is_some_and(|open| open >= 1.0));
    assert!(after.get("process_resident_memory_bytes").is_some_and(|bytes| bytes > 1e6));
    let find_last_success = || async {
        let scraped = scrape(&stack, &process).await;
        scraped.get("svc_reconciler_last_success_timestamp_seconds{part=\"servers\"}")
    };
    assert!(stack.eventually("the reconciler ran", find_last_success).await > 1.7e9);
    // No label identifies a machine or a user.
    let identifies = |series: &&String| series.contains(&host_settings.machine) || series.contains("user_1");
    assert_eq!(after.samples.keys().filter(identifies).count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn skipped_inventory_does_not_count_as_a_success() {
    let stack = Stack::start().await;
    let fault = ProviderFault::Status { status: 503, code: "unavailable".to_owned(), reset_in_seconds: None };
    stack.provider.add_fault(ProviderFaultRule::times(1000, "GET", "label_selector=svc-machine&", fault));
    // In each interval, one of the two processes lists the servers.
    for process in &[stack.start_platform(), stack.start_platform()] {
        let has_run = || async {
            let scraped = scrape(&stack, process).await;
            let runs = scraped.get("svc_reconciler_runs_total{part=\"retention\",outcome=\"ok\"}");
            runs.is_some_and(|runs| runs >= 3.0).then_some(scraped)
        };
        let scraped = stack.eventually("the reconciler ran", has_run).await;
        let success = scraped.get("svc_reconciler_last_success_timestamp_seconds{part=\"servers\"}");
        assert_eq!(success, None, "a skipped inventory must not count as a success");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_require_operator_and_survive_unreadable_tables() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let anonymous = stack.request(&process, Method::GET, "/metrics");
    stack.send(anonymous).await.assert_problem(401, "unauthorized");
    let wrong_token = stack.request(&process, Method::GET, "/metrics").bearer_auth(format!("{SECRET}x"));
    stack.send(wrong_token).await.assert_problem(401, "unauthorized");

    let before = scrape(&stack, &process).await;
    let read_at = before.get("svc_fleet_read_timestamp_seconds");
    assert!(read_at.is_some());
    stack
        .database
        .connect()
        .await
        .unwrap()
        .batch_execute("ALTER TABLE user_machines RENAME TO renamed_machines")
        .await
        .unwrap();
    let after = scrape(&stack, &process).await;
    assert_eq!(
        after.get("svc_fleet_read_timestamp_seconds"),
        read_at,
        "the metric must report the time of the last successful read"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn request_of_a_disconnected_client_is_counted_and_logged() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    // The response waits up to 2 s for the store.
    stack.store.add_fault(FaultRule::new(Fault::Delay(Duration::from_secs(60))).key("latest").always());
    let path = format!("/vps/{}", host_settings.machine);
    let series =
        "svc_http_requests_total{listener=\"api\",method=\"GET\",route=\"/vps/{id}\",status=\"cancelled\"}";
    let find_cancelled = || async {
        let request = stack.request(&process, Method::GET, &path).bearer_auth(SECRET);
        let error = request.timeout(Duration::from_millis(500)).send().await.unwrap_err();
        assert!(error.is_timeout(), "{error:?}");
        scrape(&stack, &process).await.get(series)
    };
    stack.eventually("the request is counted", find_cancelled).await;
    assert!(stack.log().contains("request ended without a response"), "{}", stack.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn operation_logs_the_id_of_its_request() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("RUST_LOG", "svc=debug")]);
    stack.subscribe(&process, "user_1").await;
    let id = "operators-own-request-0001";
    let body = super::stack::provision_body("user_1");
    let request = stack.request(&process, Method::POST, "/vps/provision").bearer_auth(SECRET).json(&body);
    let provisioned = stack.send(request.header("x-request-id", id)).await;
    assert_eq!((provisioned.status, provisioned.headers["x-request-id"].to_str().unwrap()), (202, id));
    let operation = provisioned.body["operationId"].as_str().unwrap().to_owned();
    let ended = stack.wait_until_ended(&process, &operation).await;
    assert_eq!(ended["requestId"], id);

    let log = stack.log();
    let is_logged = |step: &str| {
        log.lines().any(|line| {
            line.contains(&format!("step=\"{step}\"")) && line.contains(id) && line.contains(&operation)
        })
    };
    for step in ["fence", "create_server", "await_registration"] {
        assert!(is_logged(step), "no line for {step} with the request id:\n{log}");
    }
    let client = stack.database.connect().await.unwrap();
    let audited =
        client.query_one("SELECT action FROM operator_audit WHERE request_id = $1", &[&id]).await.unwrap();
    assert_eq!(audited.get::<_, &str>(0), "provision", "{log}");
    assert!(
        stack.provider.calls().iter().any(|call| call.request_id.as_deref() == Some(id)),
        "the provider did not receive the id"
    );
}
