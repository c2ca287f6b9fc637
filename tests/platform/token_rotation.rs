//! When `UPGRADE_TOKEN` rotates, a host gets the next token in the response to its heartbeat, and the previous one
//! expires.

use reqwest::Method;
use serde_json::{Value, json};

use super::stack::{ApiResponse, Process, Stack, UserDataSettings, heartbeat_of};

const SHORT_OVERLAP: [(&str, &str); 1] = [("UPGRADE_TOKEN_OVERLAP_SECONDS", "2")];

async fn send_heartbeat(stack: &Stack, process: &Process, host_settings: &UserDataSettings) -> ApiResponse {
    stack.send_heartbeat(process, host_settings, &heartbeat_of(host_settings)).await
}

/// Returns the settings with the token from the response.
fn with_next_token(host_settings: &UserDataSettings, response: &ApiResponse) -> UserDataSettings {
    let token = response.body["nextToken"].as_str().unwrap_or_else(|| panic!("no token: {response:?}"));
    UserDataSettings { upgrade_token: token.to_owned(), ..host_settings.clone() }
}

async fn request_rotation(stack: &Stack, process: &Process, host_settings: &UserDataSettings) -> ApiResponse {
    let path = format!("/vps/{}/rotate-token", host_settings.machine);
    let response = stack.post(process, &path, &json!({})).await;
    assert_eq!(response.status, 200, "{response:?}");
    response
}

/// Rotates the host's token. Returns the settings with the new token after the platform has received that token.
async fn rotate_token(
    stack: &Stack,
    process: &Process,
    host_settings: &UserDataSettings,
) -> UserDataSettings {
    request_rotation(stack, process, host_settings).await;
    let next = with_next_token(host_settings, &send_heartbeat(stack, process, host_settings).await);
    let response = send_heartbeat(stack, process, &next).await;
    assert_eq!((response.status, &response.body["nextToken"]), (200, &Value::Null), "{response:?}");
    next
}

/// Returns the status of the response.
async fn request_storage_credentials(
    stack: &Stack,
    process: &Process,
    host_settings: &UserDataSettings,
) -> u16 {
    let path = format!("/vps/{}/storage-credentials", host_settings.machine);
    let call = stack.request(process, Method::POST, &path).bearer_auth(&host_settings.upgrade_token);
    stack.send(call).await.status
}

#[tokio::test(flavor = "multi_thread")]
async fn old_token_expires_after_the_host_has_used_the_next_one() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&SHORT_OVERLAP);
    let host_settings = stack.start_machine(&process, "user_1").await;
    assert_eq!(
        send_heartbeat(&stack, &process, &host_settings).await.body["nextToken"],
        Value::Null,
        "a token was offered although no rotation is due"
    );
    let response = request_rotation(&stack, &process, &host_settings).await;
    assert!(response.body["upgradeToken"]["requestedAt"].is_string(), "{response:?}");

    let offered = send_heartbeat(&stack, &process, &host_settings).await;
    assert_eq!(offered.headers["cache-control"], "no-store");
    let next = with_next_token(&host_settings, &offered);
    // The response may be lost, so a repeated heartbeat gets the same token, and the old token is still valid.
    tokio::time::sleep(std::time::Duration::from_millis(2500)).await;
    let again = with_next_token(&host_settings, &send_heartbeat(&stack, &process, &host_settings).await);
    assert_eq!(again.upgrade_token, next.upgrade_token);
    // Other routes accept both tokens; only a heartbeat confirms the new one.
    assert_eq!(request_storage_credentials(&stack, &process, &next).await, 200);
    tokio::time::sleep(std::time::Duration::from_millis(2500)).await;
    assert_eq!(request_storage_credentials(&stack, &process, &host_settings).await, 200);

    assert_eq!(send_heartbeat(&stack, &process, &next).await.status, 200);
    let record = stack.get(&process, &format!("/vps/{}", host_settings.machine)).await.body;
    assert_eq!(record["upgradeToken"]["generation"], 2);
    assert_eq!(record["upgradeToken"]["requestedAt"], Value::Null);
    // During the overlap, a host that has lost its new token gets it again. On a slow machine, the overlap may already
    // have ended, so it is extended for this check.
    let client = stack.database.connect().await.unwrap();
    let extend = "UPDATE user_machines SET previous_token_until = previous_token_until + interval '1 hour'";
    client.execute(extend, &[]).await.unwrap();
    assert_eq!(
        with_next_token(&host_settings, &send_heartbeat(&stack, &process, &host_settings).await)
            .upgrade_token,
        next.upgrade_token
    );
    let restore = "UPDATE user_machines SET previous_token_until = previous_token_until - interval '1 hour'";
    client.execute(restore, &[]).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(2500)).await;
    send_heartbeat(&stack, &process, &host_settings).await.assert_problem(401, "unauthorized");
    assert_eq!(request_storage_credentials(&stack, &process, &host_settings).await, 401);
    assert_eq!(request_storage_credentials(&stack, &process, &next).await, 200);
    assert!(!stack.log().contains(&next.upgrade_token), "a token is in the log");
}

#[tokio::test(flavor = "multi_thread")]
async fn old_tokens_rotate_automatically_and_all_on_request() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let (aged, recent) =
        (stack.start_machine(&process, "user_1").await, stack.start_machine(&process, "user_2").await);
    let client = stack.database.connect().await.unwrap();
    let age_token = "UPDATE user_machines SET upgrade_token_rotated_at = now() - interval '31 days' WHERE idp_user_id = 'user_1'";
    client.execute(age_token, &[]).await.unwrap();
    let aged = with_next_token(&aged, &send_heartbeat(&stack, &process, &aged).await);
    assert_eq!(send_heartbeat(&stack, &process, &aged).await.body["nextToken"], Value::Null);
    assert_eq!(send_heartbeat(&stack, &process, &recent).await.body["nextToken"], Value::Null);

    let response = stack.post(&process, "/vps/fleet/rotate-tokens", &json!({})).await;
    assert_eq!((response.status, &response.body["requested"]), (200, &json!(2)));
    for host_settings in [&aged, &recent] {
        with_next_token(host_settings, &send_heartbeat(&stack, &process, host_settings).await);
    }
    // Hosts that do not confirm the new token need attention.
    let late = "UPDATE user_machines SET upgrade_token_requested_at = now() - interval '8 days' WHERE idp_user_id = 'user_2'";
    client.execute(late, &[]).await.unwrap();
    let fleet = stack.get(&process, "/vps/fleet").await.body;
    let listed = fleet["attention"].as_array().unwrap();
    let find_row = |host_settings: &UserDataSettings| {
        listed.iter().find(|row| row["machineId"] == host_settings.machine).cloned()
    };
    let reasons = find_row(&recent).unwrap()["reasons"].clone();
    assert!(reasons.as_array().unwrap().contains(&json!("token_not_rotated")), "{reasons}");
    assert!(find_row(&aged).is_none_or(|row| !row["reasons"].to_string().contains("token_not_rotated")));

    stack.delete(&process, &format!("/vps/{}", recent.machine)).await;
    let refused = stack.post(&process, &format!("/vps/{}/rotate-token", recent.machine), &json!({})).await;
    refused.assert_problem(409, "invalid_state");
}

#[tokio::test(flavor = "multi_thread")]
async fn request_after_offer_replaces_offered_token() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let first = stack.start_machine(&process, "user_1").await;
    let client = stack.database.connect().await.unwrap();
    let age_token = "UPDATE user_machines SET upgrade_token_rotated_at = now() - interval '31 days'";
    client.execute(age_token, &[]).await.unwrap();
    let offered = with_next_token(&first, &send_heartbeat(&stack, &process, &first).await);
    request_rotation(&stack, &process, &offered).await;
    let requested = with_next_token(&offered, &send_heartbeat(&stack, &process, &offered).await);
    let path = format!("/vps/{}", first.machine);
    let token = stack.get(&process, &path).await.body["upgradeToken"].clone();
    assert!(token["generation"] == 2 && token["requestedAt"].is_string(), "{token}");
    assert_eq!(send_heartbeat(&stack, &process, &requested).await.body["nextToken"], Value::Null);
    let token = stack.get(&process, &path).await.body["upgradeToken"].clone();
    assert!(token["generation"] == 3 && token["requestedAt"].is_null(), "{token}");
}

/// After the platform's database has been restored from an older copy, the host has a later token than the one in the
/// database.
#[tokio::test(flavor = "multi_thread")]
async fn restored_database_accepts_the_later_token_of_a_host() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&SHORT_OVERLAP);
    let first = stack.start_machine(&process, "user_1").await;
    let client = stack.database.connect().await.unwrap();
    client
        .batch_execute("CREATE TABLE copy AS SELECT machine_id, upgrade_token_hash FROM user_machines")
        .await
        .unwrap();
    let second = rotate_token(&stack, &process, &first).await;
    let third = rotate_token(&stack, &process, &second).await;
    let older = "UPDATE user_machines m SET upgrade_token_generation = 1, previous_token_hash = NULL, \
                 previous_token_until = NULL, upgrade_token_hash = copy.upgrade_token_hash \
                 FROM copy WHERE copy.machine_id = m.machine_id";
    client.execute(older, &[]).await.unwrap();

    assert_eq!(send_heartbeat(&stack, &process, &third).await.status, 200);
    let record = stack.get(&process, &format!("/vps/{}", third.machine)).await.body;
    assert_eq!(record["upgradeToken"]["generation"], 3);
    tokio::time::sleep(std::time::Duration::from_millis(2500)).await;
    for outdated in [&first, &second] {
        send_heartbeat(&stack, &process, outdated).await.assert_problem(401, "unauthorized");
    }
    // A generation without a valid signature is not accepted.
    let forged = third.upgrade_token.replace("_3_", "_9_");
    let forged = UserDataSettings { upgrade_token: forged, ..third.clone() };
    send_heartbeat(&stack, &process, &forged).await.assert_problem(401, "unauthorized");
}

#[tokio::test(flavor = "multi_thread")]
async fn platform_kill_during_rotation_does_not_lock_hosts_out() {
    for point in svc::platform::token_rotation::FAILPOINTS {
        let stack = Stack::start().await;
        let mut process =
            stack.start_platform_with(&[SHORT_OVERLAP[0], ("FAILPOINTS", &format!("{point}=return(kill)"))]);
        let host_settings = stack.start_machine(&process, "user_1").await;
        request_rotation(&stack, &process, &host_settings).await;
        let next = with_next_token(&host_settings, &send_heartbeat(&stack, &process, &host_settings).await);
        let base = process.base.clone();
        assert!(stack.try_send_heartbeat(&base, &next, &heartbeat_of(&next)).await.is_none(), "{point}");
        process.wait_until_killed().await;
        let process = stack.start_platform_with(&SHORT_OVERLAP);
        assert_eq!(send_heartbeat(&stack, &process, &next).await.status, 200, "{point}");
        tokio::time::sleep(std::time::Duration::from_millis(2500)).await;
        send_heartbeat(&stack, &process, &host_settings).await.assert_problem(401, "unauthorized");
        assert_eq!(send_heartbeat(&stack, &process, &next).await.status, 200, "{point}");
    }
}
