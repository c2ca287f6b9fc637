//! The control API rate-limits unverified tokens per address, and requests per operator and per host.

use reqwest::Method;
use serde_json::json;

use super::stack::{ApiResponse, Process, SECRET, Stack, heartbeat_of};

async fn get_fleet(stack: &Stack, process: &Process, token: &str) -> ApiResponse {
    stack.send(stack.request(process, Method::GET, "/vps/fleet").bearer_auth(token)).await
}

/// More requests than a burst allows.
const ABOVE_BURST: u32 = 40;
/// Fewer requests than a burst allows: one of them is rejected only if earlier requests count against the same limit.
/// More than one request, because on a slow machine the limit may permit another in the meantime.
const BELOW_BURST: u32 = 5;

/// Sends at most `count` requests, and returns the first rate-limited response.
async fn send_until_limited(
    stack: &Stack,
    process: &Process,
    count: u32,
    token: impl Fn(u32) -> String,
) -> ApiResponse {
    for number in 0..count {
        let response = get_fleet(stack, process, &token(number)).await;
        if response.status == 429 {
            return response;
        }
    }
    panic!("no request was rejected");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_tokens_from_an_address_are_limited() {
    let stack = Stack::start().await;
    let settings = [("PLATFORM_ADDRESS_CHECKS_PER_SECOND", "1")];
    let process = stack.start_platform_with(&settings);
    let host_settings = stack.start_machine(&process, "user_1").await;
    assert_eq!(get_fleet(&stack, &process, SECRET).await.status, 200);
    assert_eq!(
        stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await.status,
        200
    );

    let well_formed = |number: u32| format!("svco_{number:032x}_{}", "0".repeat(64));
    send_until_limited(&stack, &process, ABOVE_BURST, well_formed).await.assert_problem(429, "rate_limited");
    for token in ["wrong", "svcu_wrong"] {
        let refused = send_until_limited(&stack, &process, BELOW_BURST, |_| token.to_owned()).await;
        refused.assert_problem(429, "rate_limited");
    }

    // Tokens that the process has accepted are not limited.
    assert_eq!(get_fleet(&stack, &process, SECRET).await.status, 200);
    assert_eq!(
        stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await.status,
        200
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_behind_a_trusted_proxy_have_no_address_limit() {
    let stack = Stack::start().await;
    let settings =
        [("PLATFORM_ADDRESS_CHECKS_PER_SECOND", "1"), ("PLATFORM_TRUSTED_PROXIES", "127.0.0.1, ::1")];
    let process = stack.start_platform_with(&settings);
    for number in 0..ABOVE_BURST {
        get_fleet(&stack, &process, &format!("wrong-{number}")).await.assert_problem(401, "unauthorized");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn operator_rate_limit_does_not_affect_others() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let body = json!({"name": "ada", "scopes": ["read"]});
    let added = stack.post(&process, "/operators", &body).await;
    let ada = added.body["token"].as_str().unwrap();

    let process = stack.start_platform_with(&[("PLATFORM_OPERATOR_REQUESTS_PER_SECOND", "1")]);
    let refused = send_until_limited(&stack, &process, ABOVE_BURST, |_| ada.to_owned()).await;
    refused.assert_problem(429, "rate_limited");
    assert!(refused.body["detail"].as_str().unwrap().contains("ada"), "{refused:?}");
    assert!(refused.headers.contains_key("retry-after"), "{refused:?}");
    assert_eq!(get_fleet(&stack, &process, SECRET).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn host_rate_limit_does_not_affect_others() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("PLATFORM_HOST_REQUESTS_PER_SECOND", "1")]);
    let (runaway, quiet) =
        (stack.start_machine(&process, "user_1").await, stack.start_machine(&process, "user_2").await);
    let mut refused = None;
    for _ in 0..100 {
        let response = stack.send_heartbeat(&process, &runaway, &heartbeat_of(&runaway)).await;
        if response.status == 429 {
            refused = Some(response);
            break;
        }
        assert_eq!(response.status, 200, "{response:?}");
    }
    let refused = refused.expect("a request must be rejected");
    refused.assert_problem(429, "rate_limited");
    assert!(refused.headers.contains_key("retry-after"), "{refused:?}");
    assert_eq!(stack.send_heartbeat(&process, &quiet, &heartbeat_of(&quiet)).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn storage_credential_requests_are_rate_limited() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let path = format!("/vps/{}/storage-credentials", host_settings.machine);
    let mut responses = Vec::new();
    for _ in 0..30 {
        let request = stack.request(&process, Method::POST, &path).bearer_auth(&host_settings.upgrade_token);
        responses.push(stack.send(request).await);
    }
    assert_eq!(responses[0].status, 200, "{:?}", responses[0]);
    let refused = responses.last().unwrap();
    refused.assert_problem(429, "rate_limited");
    assert!(refused.headers.contains_key("retry-after"), "{refused:?}");
    assert_eq!(
        stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await.status,
        200
    );
}
