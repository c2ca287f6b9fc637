//! A registration token is valid once, only for its own machine, and only before its deadline.

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::json;

use super::stack::{SECRET, Stack, heartbeat, registration};

#[tokio::test(flavor = "multi_thread")]
async fn only_one_of_fifty_concurrent_registrations_succeeds() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let provisioned = stack.provision(&process, "user_1").await;
    let host_settings =
        stack.wait_for_host_settings(&process, provisioned["machineId"].as_str().unwrap()).await;
    let bodies: Vec<_> = (0..50).map(|n| registration(&host_settings.machine, n)).collect();
    let requests =
        bodies.iter().map(|body| stack.register_as(&process, &host_settings.registration_token, body));
    let responses = join_all(requests).await;
    let accepted: Vec<_> = (0..50).filter(|n| responses[*n].status == 200).collect();
    assert_eq!(accepted.len(), 1, "{responses:?}");
    for response in responses.iter().filter(|response| response.status != 200) {
        response.assert_problem(401, "registration_rejected");
    }

    let again = stack.register_as(&process, &host_settings.registration_token, &bodies[accepted[0]]).await;
    assert_eq!(again.body, json!({"status": "running", "epoch": 1}));
    let record = stack.get(&process, &format!("/vps/{}", host_settings.machine)).await.body;
    assert_eq!(record["tlsSpkiSha256"], bodies[accepted[0]]["tlsSpkiSha256"]);
    assert_eq!(record["operations"][0]["state"], "succeeded");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_or_foreign_registration_token_is_rejected() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let provisioned = stack.provision(&process, "user_1").await;
    let host_settings =
        stack.wait_for_host_settings(&process, provisioned["machineId"].as_str().unwrap()).await;
    let provisioned = stack.provision(&process, "user_2").await;
    let other_host_settings =
        stack.wait_for_host_settings(&process, provisioned["machineId"].as_str().unwrap()).await;
    let body = registration(&host_settings.machine, 1);
    let forged = host_settings.registration_token.replace(char::is_numeric, "0");
    for token in
        [&other_host_settings.registration_token, &host_settings.upgrade_token, &forged, "svcr_x", SECRET]
    {
        stack.register_as(&process, token, &body).await.assert_problem(401, "registration_rejected");
    }
    let anonymous = stack.request(&process, Method::POST, "/vps/register").json(&body);
    stack.send(anonymous).await.assert_problem(401, "registration_rejected");
    assert_eq!(stack.register(&process, &host_settings).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_fails_if_host_does_not_register_in_time() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("REGISTRATION_TTL_SECONDS", "1")]);
    let provisioned = stack.provision(&process, "user_1").await;
    let machine = provisioned["machineId"].as_str().unwrap();
    let host_settings = stack.wait_for_host_settings(&process, machine).await;
    let has_failed = || async { (stack.status(&process, machine).await == "failed").then_some(()) };
    stack.eventually("the machine fails", has_failed).await;
    stack.register(&process, &host_settings).await.assert_problem(401, "registration_rejected");
    let record = stack.get(&process, &format!("/vps/{machine}")).await.body;
    assert_eq!(record["failure"]["cause"], "registration_expired");
    assert_eq!(record["operations"][0]["state"], "failed");

    // A second provision request creates a new machine in the slot, and the first server is deleted.
    let second = stack.provision(&process, "user_1").await;
    assert_eq!(second["epoch"], 2);
    let next = second["machineId"].as_str().unwrap();
    stack.wait_for_host_settings(&process, next).await;
    stack.assert_only_server(next);
}

#[tokio::test(flavor = "multi_thread")]
async fn reported_boot_failure_prevents_registration() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let provisioned = stack.provision(&process, "user_1").await;
    let host_settings =
        stack.wait_for_host_settings(&process, provisioned["machineId"].as_str().unwrap()).await;
    let path = format!("/vps/{}/boot-failure", host_settings.machine);
    let body = json!({"stage": "restore", "message": "pg_restore: no"});
    let failure_report =
        |token: &str| stack.request(&process, Method::POST, &path).bearer_auth(token).json(&body);
    stack
        .send(failure_report(&host_settings.upgrade_token))
        .await
        .assert_problem(401, "registration_rejected");
    assert_eq!(stack.send(failure_report(&host_settings.registration_token)).await.status, 202);
    let record = stack.get(&process, &format!("/vps/{}", host_settings.machine)).await.body;
    let failure = json!({"cause": "boot_reported", "stage": "restore", "message": "pg_restore: no"});
    assert_eq!((&record["status"], &record["failure"]), (&json!("failed"), &failure));
    stack.register(&process, &host_settings).await.assert_problem(409, "invalid_state");
}

#[tokio::test(flavor = "multi_thread")]
async fn heartbeat_requires_upgrade_token_and_reports_replacement() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let (host_settings, other_host_settings) =
        (stack.start_machine(&process, "user_1").await, stack.start_machine(&process, "user_2").await);
    let heartbeat_request = |token: &str| {
        let path = format!("/vps/{}/heartbeat", host_settings.machine);
        stack.request(&process, Method::POST, &path).bearer_auth(token).json(&heartbeat())
    };
    stack.send(heartbeat_request(&other_host_settings.upgrade_token)).await.assert_problem(403, "forbidden");
    stack
        .send(heartbeat_request(&host_settings.registration_token))
        .await
        .assert_problem(401, "unauthorized");
    let response = stack.send(heartbeat_request(&host_settings.upgrade_token)).await;
    assert_eq!(response.body["superseded"], false, "{response:?}");
    assert_eq!(response.body["desiredImageVersion"], "v1");
    assert!(host_settings.user_data.contains(response.body["proofKeys"]["keys"][0]["kid"].as_str().unwrap()));
    let record = stack.get(&process, &format!("/vps/{}", host_settings.machine)).await.body;
    assert!(record["heartbeatAt"].is_string() && record["health"]["gateway"] == "ok", "{record}");

    stack.store_snapshot("user_1");
    let recovery = stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    stack.wait_until_ended(&process, recovery["operationId"].as_str().unwrap()).await;
    assert_eq!(stack.send(heartbeat_request(&host_settings.upgrade_token)).await.body["superseded"], true);
    let bundle = "/system-bundles/v1/svc-host-bundle.tar.gz.sha256";
    let bundle = stack.request(&process, Method::GET, bundle).bearer_auth(&host_settings.upgrade_token);
    stack.send(bundle).await.assert_problem(403, "superseded");
}
