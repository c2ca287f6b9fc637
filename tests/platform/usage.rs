//! Operators read a machine's usage from its host. A read requires the `billing` scope and writes an audit entry.

use http::StatusCode;
use jiff::Timestamp;
use reqwest::Method;
use serde_json::{Value, json};
use svc::http::tls::Identity;

use super::fake_host::start_host;
use super::stack::{ApiResponse, Process, Stack, heartbeat_of, registration};
use crate::gateway::host::{Machine, UNREACHABLE_DATABASE};

/// Adds an operator with the given scope. Returns its token.
pub async fn add_operator(stack: &Stack, process: &Process, name: &str, scope: &str) -> String {
    let response = stack.post(process, "/operators", &json!({"name": name, "scopes": [scope]})).await;
    response.body["token"].as_str().unwrap().to_owned()
}

async fn read_usage(
    stack: &Stack,
    process: &Process,
    token: &str,
    machine: &str,
    query: &str,
) -> ApiResponse {
    let request = stack.request(process, Method::GET, &format!("/vps/{machine}/usage{query}"));
    stack.send(request.bearer_auth(token)).await
}

/// Lists the audit entries for usage reads, newest first.
async fn list_audit(stack: &Stack, process: &Process) -> Vec<Value> {
    let page = stack.get(process, "/audit?action=usage.read").await;
    page.body["entries"].as_array().unwrap().clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn billing_operator_reads_usage_from_host() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let ada = add_operator(&stack, &process, "ada", "billing").await;
    let provisioned = stack.provision(&process, "user_1").await;
    let id = provisioned["machineId"].as_str().unwrap().to_owned();
    let host_settings = stack.wait_for_host_settings(&process, &id).await;
    let server = stack.provider.server_by_name(&format!("svc-{id}")).unwrap();

    let mut machine = Machine::new(UNREACHABLE_DATABASE).unwrap();
    let listen = format!("{}:{}", server.ipv4, stack.provider.https_port());
    for (name, value) in [("SVC_MACHINE_ID", &*id), ("SVC_USER_ID", "user_1"), ("GATEWAY_LISTEN", &*listen)] {
        machine.env.insert(name.into(), value.into());
    }
    let now = svc::clock::rfc3339_ms(Timestamp::now());
    let line = |id: &str, sender: &str, cost: f64| {
        json!({"version": 1, "id": id, "timestamp": now, "senderId": sender, "conversationId": "c",
            "model": "big", "agentName": "coder", "tokensIn": 100, "tokensOut": 10, "cost": cost, "durationMs": 5,
            "tools": [], "status": "success", "batch": false})
    };
    let lines = format!("{}\n{}\n", line("d1", "user_1", 0.5), line("d2", "telegram:7", 0.25));
    let today = &now[..10];
    machine.write(&format!("home/svc/home/system/logs/interactions-{today}.jsonl"), &lines).unwrap();
    let gateway = machine.start().unwrap();
    let path = |name: &str| gateway.machine.path(&format!("var/lib/svc/tls/{name}.pem"));
    let pin = Identity::read(&path("cert"), &path("key")).unwrap().pin().unwrap();
    let mut body = registration(&id, 1);
    body["tlsSpkiSha256"] = json!(pin.to_string());
    assert_eq!(stack.register_as(&process, &host_settings.registration_token, &body).await.status, 200);

    // The host does not have the platform's keys yet.
    let unproven = read_usage(&stack, &process, &ada, &id, "").await;
    unproven.assert_problem(502, "host_refused");
    assert!(unproven.body["detail"].as_str().unwrap().contains("clock is wrong"), "{unproven:?}");
    let heartbeat = stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await;
    gateway.machine.write("var/lib/svc/proof-keys.json", &heartbeat.body["proofKeys"].to_string()).unwrap();
    let query = format!("?groupBy=user&startDate={today}&endDate={today}");
    let try_read = || async {
        let response = read_usage(&stack, &process, &ada, &id, &query).await;
        (response.status == 200).then_some(response)
    };
    let response = stack.eventually("the host has the keys", try_read).await;
    assert_eq!(response.headers["cache-control"], "no-store");
    assert_eq!((&response.body["totalCost"], &response.body["totalDispatches"]), (&json!(0.75), &json!(2)));
    let users: Vec<_> =
        response.body["entries"].as_array().unwrap().iter().map(|entry| &entry["userId"]).collect();
    assert_eq!(users, [&json!("telegram:7"), &json!("user_1")]);
    let filtered = read_usage(&stack, &process, &ada, &id, "?userId=telegram:7").await;
    assert_eq!(
        (filtered.status, &filtered.body["totalCost"]),
        (200, &json!(0.25)),
        "the query must reach the host: {filtered:?}"
    );

    let rows = list_audit(&stack, &process).await;
    let newest = &rows[0];
    assert_eq!((&newest["actor"], &newest["target"]), (&json!("ada"), &json!(id)));
    assert_eq!(newest["after"], json!({"userId": "telegram:7", "groupBy": "day", "outcome": "read"}));
    let ranged = json!({"startDate": today, "endDate": today, "groupBy": "user", "outcome": "read"});
    assert_eq!(rows[1]["after"], ranged);
    assert_eq!(rows.last().unwrap()["after"], json!({"groupBy": "day", "outcome": "host_refused"}));
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_without_the_billing_scope_is_forbidden() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host = start_host(&stack, &process).await;
    for scope in ["read", "operate", "metrics", "admin"] {
        let token = add_operator(&stack, &process, &format!("only-{scope}"), scope).await;
        read_usage(&stack, &process, &token, &host.settings.machine, "")
            .await
            .assert_problem(403, "forbidden");
    }
    assert_eq!(host.call_count("GET", "/api/usage"), 0);
    assert!(list_audit(&stack, &process).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn each_host_failure_is_reported_and_audited() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let ada = add_operator(&stack, &process, "ada", "billing").await;
    let host = start_host(&stack, &process).await;
    let machine = &host.settings.machine;
    let large = format!(r#"{{"entries": [], "x": "{}"}}"#, "x".repeat(1 << 20));
    for (status, body, expected_status, code, detail) in [
        (401, "", 502, "host_refused", "clock is wrong"),
        (403, "", 502, "host_refused", "svcctl deploy start"),
        (404, "", 502, "host_refused", "svcctl deploy start"),
        (500, "", 502, "host_refused", "returned 500"),
        (503, "", 503, "unavailable", "try again"),
        (200, "{}", 502, "host_answer_invalid", "not a valid usage report"),
        (200, &large, 502, "host_answer_invalid", "larger than 1048576 bytes"),
    ] {
        host.behavior.lock().unwrap().usage_response =
            (StatusCode::from_u16(status).unwrap(), body.to_owned());
        let response = read_usage(&stack, &process, &ada, machine, "?startDate=2026-11-01").await;
        response.assert_problem(expected_status, code);
        assert!(response.body["detail"].as_str().unwrap().contains(detail), "{response:?}");
        let row = &list_audit(&stack, &process).await[0];
        assert_eq!((&row["actor"], &row["target"]), (&json!("ada"), &json!(machine)));
        let after = json!({"startDate": "2026-11-01", "groupBy": "day", "outcome": code});
        assert_eq!(row["after"], after);
    }
    let invalid =
        read_usage(&stack, &process, &ada, machine, "?startDate=2026-11-02&endDate=2026-11-01").await;
    invalid.assert_problem(400, "invalid_request");
    assert_eq!(host.call_count("GET", "/api/usage"), 7, "an invalid query must not reach a host");
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_read_fails_for_unavailable_machine() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let ada = add_operator(&stack, &process, "ada", "billing").await;
    let unknown = uuid::Uuid::now_v7().to_string();
    read_usage(&stack, &process, &ada, &unknown, "").await.assert_problem(404, "machine_not_found");
    let host_settings = stack.start_machine(&process, "user_1").await;
    read_usage(&stack, &process, &ada, &host_settings.machine, "")
        .await
        .assert_problem(502, "host_unreachable");
    stack.post(&process, &format!("/vps/{}/fail", host_settings.machine), &json!({"reason": "x"})).await;
    let failed = read_usage(&stack, &process, &ada, &host_settings.machine, "").await;
    failed.assert_problem(409, "invalid_state");
    assert_eq!(failed.body["machineStatus"], "failed");
    stack.delete(&process, &format!("/vps/{}?now=true&acceptLoss=true", host_settings.machine)).await;
    let read_deleted = || async {
        let response = read_usage(&stack, &process, &ada, &host_settings.machine, "").await;
        (response.status == 404).then_some(response)
    };
    let deleted = stack.eventually("the deletion is recorded", read_deleted).await;
    deleted.assert_problem(404, "machine_not_found");
    assert!(deleted.body["detail"].as_str().unwrap().contains("has been deleted"), "{deleted:?}");
    let oldest = list_audit(&stack, &process).await.pop().unwrap();
    assert_eq!(
        (&oldest["target"], &oldest["after"]["outcome"]),
        (&json!(unknown), &json!("machine_not_found"))
    );
}
