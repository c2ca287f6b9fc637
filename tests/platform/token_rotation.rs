//! `UPGRADE_TOKEN` rotates: a host gets the next one in the response to its heartbeat, and the previous one expires.

use reqwest::Method;
use serde_json::{Value, json};

use super::stack::{ApiResponse, Guest, Process, Stack, heartbeat_of};

const SHORT_OVERLAP: [(&str, &str); 1] = [("UPGRADE_TOKEN_OVERLAP_SECONDS", "2")];

async fn send_heartbeat(stack: &Stack, process: &Process, guest: &Guest) -> ApiResponse {
    stack.send_heartbeat(process, guest, &heartbeat_of(guest)).await
}

/// The guest with the token of the response.
fn with_next(guest: &Guest, response: &ApiResponse) -> Guest {
    let token = response.body["nextToken"].as_str().unwrap_or_else(|| panic!("no token: {response:?}"));
    Guest { upgrade_token: token.to_owned(), ..guest.clone() }
}

async fn request(stack: &Stack, process: &Process, guest: &Guest) -> ApiResponse {
    let path = format!("/vps/{}/rotate-token", guest.machine);
    let response = stack.post(process, &path, &json!({})).await;
    assert_eq!(response.status, 200, "{response:?}");
    response
}

/// The guest after its token has rotated and the platform has seen the new one.
async fn rotated(stack: &Stack, process: &Process, guest: &Guest) -> Guest {
    request(stack, process, guest).await;
    let next = with_next(guest, &send_heartbeat(stack, process, guest).await);
    let response = send_heartbeat(stack, process, &next).await;
    assert_eq!((response.status, &response.body["nextToken"]), (200, &Value::Null), "{response:?}");
    next
}

async fn credentials(stack: &Stack, process: &Process, guest: &Guest) -> u16 {
    let path = format!("/vps/{}/storage-credentials", guest.machine);
    let call = stack.request(process, Method::POST, &path).bearer_auth(&guest.upgrade_token);
    stack.send(call).await.status
}

#[tokio::test(flavor = "multi_thread")]
async fn copied_token_ends_after_the_host_has_used_the_next() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&SHORT_OVERLAP);
    let guest = stack.start_machine(&process, "user_1").await;
    assert_eq!(
        send_heartbeat(&stack, &process, &guest).await.body["nextToken"],
        Value::Null,
        "no rotation is due"
    );
    let response = request(&stack, &process, &guest).await;
    assert!(response.body["upgradeToken"]["requestedAt"].is_string(), "{response:?}");

    let offered = send_heartbeat(&stack, &process, &guest).await;
    assert_eq!(offered.headers["cache-control"], "no-store");
    let next = with_next(&guest, &offered);
    // The response may be lost: a repetition gets the same token, and the old one remains valid until then.
    tokio::time::sleep(std::time::Duration::from_millis(2500)).await;
    let again = with_next(&guest, &send_heartbeat(&stack, &process, &guest).await);
    assert_eq!(again.upgrade_token, next.upgrade_token);
    // Other routes accept both; only a heartbeat confirms the new one.
    assert_eq!(credentials(&stack, &process, &next).await, 200);
    tokio::time::sleep(std::time::Duration::from_millis(2500)).await;
    assert_eq!(credentials(&stack, &process, &guest).await, 200);

    assert_eq!(send_heartbeat(&stack, &process, &next).await.status, 200);
    let record = stack.get(&process, &format!("/vps/{}", guest.machine)).await.body;
    assert_eq!(record["upgradeToken"]["generation"], 2);
    assert_eq!(record["upgradeToken"]["requestedAt"], Value::Null);
    // Within the overlap, a host that lost the file gets it again.
    assert_eq!(
        with_next(&guest, &send_heartbeat(&stack, &process, &guest).await).upgrade_token,
        next.upgrade_token
    );
    tokio::time::sleep(std::time::Duration::from_millis(2500)).await;
    send_heartbeat(&stack, &process, &guest).await.assert_problem(401, "unauthorized");
    assert_eq!(credentials(&stack, &process, &guest).await, 401);
    assert_eq!(credentials(&stack, &process, &next).await, 200);
    assert!(!stack.log().contains(&next.upgrade_token), "a token is in the log");
}

#[tokio::test(flavor = "multi_thread")]
async fn old_token_rotates_automatically_and_all_on_request() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let (one, two) =
        (stack.start_machine(&process, "user_1").await, stack.start_machine(&process, "user_2").await);
    let client = stack.database.connect().await.unwrap();
    let aged = "UPDATE user_machines SET upgrade_token_rotated_at = now() - interval '31 days' WHERE idp_user_id = 'user_1'";
    client.execute(aged, &[]).await.unwrap();
    let one = with_next(&one, &send_heartbeat(&stack, &process, &one).await);
    assert_eq!(send_heartbeat(&stack, &process, &one).await.body["nextToken"], Value::Null);
    assert_eq!(send_heartbeat(&stack, &process, &two).await.body["nextToken"], Value::Null);

    let all = stack.post(&process, "/vps/fleet/rotate-tokens", &json!({})).await;
    assert_eq!((all.status, &all.body["requested"]), (200, &json!(2)));
    for guest in [&one, &two] {
        with_next(guest, &send_heartbeat(&stack, &process, guest).await);
    }
    // Hosts that do not confirm it are listed.
    let late = "UPDATE user_machines SET upgrade_token_requested_at = now() - interval '8 days' WHERE idp_user_id = 'user_2'";
    client.execute(late, &[]).await.unwrap();
    let fleet = stack.get(&process, "/vps/fleet").await.body;
    let listed = fleet["attention"].as_array().unwrap();
    let of = |guest: &Guest| listed.iter().find(|row| row["machineId"] == guest.machine).cloned();
    let reasons = of(&two).unwrap()["reasons"].clone();
    assert!(reasons.as_array().unwrap().contains(&json!("token_not_rotated")), "{reasons}");
    assert!(of(&one).is_none_or(|row| !row["reasons"].to_string().contains("token_not_rotated")));

    stack.delete(&process, &format!("/vps/{}", two.machine)).await;
    let gone = stack.post(&process, &format!("/vps/{}/rotate-token", two.machine), &json!({})).await;
    gone.assert_problem(409, "invalid_state");
}

/// The platform's database was restored from a copy: the host has a later token than it knows.
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
    let second = rotated(&stack, &process, &first).await;
    let third = rotated(&stack, &process, &second).await;
    let older = "UPDATE user_machines m SET upgrade_token_generation = 1, previous_token_hash = NULL, \
                 previous_token_until = NULL, upgrade_token_hash = copy.upgrade_token_hash \
                 FROM copy WHERE copy.machine_id = m.machine_id";
    client.execute(older, &[]).await.unwrap();

    assert_eq!(send_heartbeat(&stack, &process, &third).await.status, 200);
    let record = stack.get(&process, &format!("/vps/{}", third.machine)).await.body;
    assert_eq!(record["upgradeToken"]["generation"], 3);
    tokio::time::sleep(std::time::Duration::from_millis(2500)).await;
    for copied in [&first, &second] {
        send_heartbeat(&stack, &process, copied).await.assert_problem(401, "unauthorized");
    }
    // An unsigned number proves nothing.
    let forged = third.upgrade_token.replace("_3_", "_9_");
    let forged = Guest { upgrade_token: forged, ..third.clone() };
    send_heartbeat(&stack, &process, &forged).await.assert_problem(401, "unauthorized");
}

#[tokio::test(flavor = "multi_thread")]
async fn platform_killed_during_rotation_locks_no_host_out() {
    for point in svc::platform::token_rotation::FAILPOINTS {
        let stack = Stack::start().await;
        let mut process =
            stack.start_platform_with(&[SHORT_OVERLAP[0], ("FAILPOINTS", &format!("{point}=return(kill)"))]);
        let guest = stack.start_machine(&process, "user_1").await;
        request(&stack, &process, &guest).await;
        let next = with_next(&guest, &send_heartbeat(&stack, &process, &guest).await);
        let base = process.base.clone();
        assert!(stack.try_send_heartbeat(&base, &next, &heartbeat_of(&next)).await.is_none(), "{point}");
        process.wait_until_killed().await;
        let process = stack.start_platform_with(&SHORT_OVERLAP);
        assert_eq!(send_heartbeat(&stack, &process, &next).await.status, 200, "{point}");
        tokio::time::sleep(std::time::Duration::from_millis(2500)).await;
        send_heartbeat(&stack, &process, &guest).await.assert_problem(401, "unauthorized");
        assert_eq!(send_heartbeat(&stack, &process, &next).await.status, 200, "{point}");
    }
}
