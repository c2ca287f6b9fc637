//! An impossible resize is rejected before any change; a successful one keeps the server and its disk.

use kit::provider::{Fault, FaultRule, Power};
use reqwest::Method;
use serde_json::{Value, json};

use super::stack::{ApiResponse, Process, SECRET, Stack, UserDataSettings, heartbeat_of};

pub async fn resize(stack: &Stack, process: &Process, machine: &str, server_type: &str) -> ApiResponse {
    stack.post(process, &format!("/vps/{machine}/resize"), &json!({"serverType": server_type})).await
}

/// Resizes to `cpx32`, sends heartbeats until the operation ends, and returns the operation.
pub async fn resize_until_ended(stack: &Stack, process: &Process, host_settings: &UserDataSettings) -> Value {
    let response = resize(stack, process, &host_settings.machine, "cpx32").await;
    assert_eq!(response.status, 202, "{response:?}");
    stack
        .wait_until_ended_without_registrations(process, response.body["operationId"].as_str().unwrap())
        .await
}

pub async fn fetch_record(stack: &Stack, process: &Process, host_settings: &UserDataSettings) -> Value {
    stack.fetch_record(process, &host_settings.machine).await
}

pub fn count_actions(stack: &Stack, name: &str) -> usize {
    stack.provider.call_count("POST", &format!("/actions/{name}"))
}

/// Waits until the platform has polled the server three more times.
async fn wait_for_polls(stack: &Stack) {
    let path = format!("/servers/{}", stack.provider.servers().remove(0).id);
    let expected = stack.provider.call_count("GET", &path) + 3;
    let is_polled = || async { (stack.provider.call_count("GET", &path) >= expected).then_some(()) };
    stack.eventually("the server is polled", is_polled).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resize_changes_only_the_type() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let before = stack.provider.servers().remove(0);

    // A slow response to the type change delays the power-on until the heartbeat below has been received.
    stack.provider.add_fault(FaultRule::once("POST", "change_type", Fault::SlowReply { ms: 2000 }));
    let response = resize(&stack, &process, &host_settings.machine, "cpx32").await;
    assert_eq!(response.status, 202, "{response:?}");
    let operation = response.body["operationId"].as_str().unwrap().to_owned();
    let expected = json!({"machineId": host_settings.machine, "serverType": "cpx32", "status": "resizing",
        "operationId": operation});
    assert_eq!(response.body, expected);
    // A heartbeat from before the power-on does not count.
    stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await;
    let is_on = || async {
        let server = stack.provider.servers().remove(0);
        (server.server_type == "cpx32" && server.status == Power::Running).then_some(())
    };
    stack.eventually("the server is on again", is_on).await;
    let is_waiting = || async {
        let current = stack.get(&process, &format!("/vps/operations/{operation}")).await.body;
        (current["step"] == "await_health").then_some(())
    };
    stack.eventually("the resize is waiting for the host", is_waiting).await;
    wait_for_polls(&stack).await;
    assert_eq!(
        fetch_record(&stack, &process, &host_settings).await["status"],
        "resizing",
        "a heartbeat from before the power-on must not count"
    );
    let mut unhealthy = heartbeat_of(&host_settings);
    unhealthy["health"]["database"] = json!("failing");
    stack.send_heartbeat(&process, &host_settings, &unhealthy).await;
    wait_for_polls(&stack).await;
    assert_eq!(
        fetch_record(&stack, &process, &host_settings).await["status"],
        "resizing",
        "a heartbeat from an unhealthy host must not count"
    );
    resize(&stack, &process, &host_settings.machine, "cpx52").await.assert_problem(409, "invalid_state");

    let ended = stack.wait_until_ended_without_registrations(&process, &operation).await;
    assert_eq!((&ended["state"], &ended["kind"]), (&json!("succeeded"), &json!("resize")), "{ended}");
    let begun: Vec<_> =
        ended["log"].as_array().unwrap().iter().filter(|line| line["outcome"] == "begun").collect();
    let steps: Vec<_> = begun.iter().map(|line| line["step"].as_str().unwrap()).collect();
    assert_eq!(steps, ["shut_down", "power_off", "change_type", "power_on", "await_health"]);
    let record = fetch_record(&stack, &process, &host_settings).await;
    assert_eq!((&record["status"], &record["serverType"]), (&json!("running"), &json!("cpx32")));
    let after = stack.provider.servers().remove(0);
    assert_eq!((after.id, after.disk_gb, after.server_type.as_str()), (before.id, before.disk_gb, "cpx32"));
    assert_eq!(stack.provider.creations().len(), 1);
    // The host shut down on request, so its power was never cut.
    assert_eq!(
        ["shutdown", "poweroff", "change_type", "poweron"].map(|name| count_actions(&stack, name)),
        [1, 0, 1, 1]
    );

    let client = stack.database.connect().await.unwrap();
    let audit = client.query("SELECT 1 FROM operator_audit WHERE action = 'resize'", &[]).await.unwrap();
    assert_eq!(audit.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn resize_to_the_current_type_changes_nothing() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let same_type_response = resize(&stack, &process, &host_settings.machine, "cpx22").await;
    let expected = json!({"machineId": host_settings.machine, "serverType": "cpx22", "status": "running",
        "operationId": null});
    assert_eq!((same_type_response.status, same_type_response.body), (200, expected));
    assert_eq!(count_actions(&stack, ""), 0);

    let request_with_key = |server_type: &str| {
        let request =
            stack.request(&process, Method::POST, &format!("/vps/{}/resize", host_settings.machine));
        request.bearer_auth(SECRET).header("idempotency-key", "k").json(&json!({"serverType": server_type}))
    };
    let first = stack.send(request_with_key("cpx32")).await;
    let again = stack.send(request_with_key("cpx32")).await;
    assert_eq!((first.status, &first.body), (again.status, &again.body));
    stack.send(request_with_key("cpx52")).await.assert_problem(422, "idempotency_mismatch");
}

#[tokio::test(flavor = "multi_thread")]
async fn impossible_resize_is_refused_and_changes_nothing() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let machine = &host_settings.machine;
    let path = format!("/vps/{machine}/resize");
    let assert_refused = |response: ApiResponse, status: u16, code: &'static str| {
        response.assert_problem(status, code);
        let text = response.text.to_lowercase();
        assert!(
            !text.contains("scripted") && !text.contains("hetzner") && !text.contains("action"),
            "{text}"
        );
        assert_eq!(count_actions(&stack, ""), 0, "{code}");
    };
    let without_token = stack.request(&process, Method::POST, &path).json(&json!({"serverType": "cpx32"}));
    assert_refused(stack.send(without_token).await, 401, "unauthorized");
    let by_host = stack.request(&process, Method::POST, &path).bearer_auth(&host_settings.upgrade_token);
    assert_refused(stack.send(by_host.json(&json!({"serverType": "cpx32"}))).await, 401, "unauthorized");
    assert_refused(resize(&stack, &process, "not-a-uuid", "cpx32").await, 400, "invalid_request");
    assert_refused(stack.post(&process, &path, &json!({})).await, 400, "invalid_request");
    assert_refused(
        stack.post(&process, &path, &json!({"serverType": "cpx32", "x": 1})).await,
        400,
        "invalid_request",
    );
    assert_refused(stack.post(&process, &path, &json!({"serverType": 32})).await, 400, "invalid_request");
    let unknown = uuid::Uuid::now_v7().to_string();
    assert_refused(resize(&stack, &process, &unknown, "cpx32").await, 404, "machine_not_found");
    assert_refused(resize(&stack, &process, machine, "cpx99").await, 403, "server_type_not_allowed");
    // The provider offers this type, but no plan includes it.
    assert_refused(resize(&stack, &process, machine, "cpx42").await, 403, "server_type_not_allowed");

    let slot = |plan: &str, status: &str| json!({"idpUserId": "user_1", "plan": plan, "status": status});
    stack.set_slot(&process, &slot("starter", "active")).await;
    assert_refused(resize(&stack, &process, machine, "cpx32").await, 403, "server_type_not_allowed");
    stack.set_slot(&process, &slot("max", "inactive")).await;
    assert_refused(resize(&stack, &process, machine, "cpx32").await, 402, "subscription_required");
    // Without billing enforcement, only the server's disk size limits the types.
    let without_billing = stack.start_platform_with(&[("BILLING_ENFORCEMENT", "false")]);
    assert_refused(resize(&stack, &without_billing, machine, "cpx12").await, 409, "disk_would_shrink");
    let unknown_type = resize(&stack, &without_billing, machine, "cpx99").await;
    assert_eq!(unknown_type.body["errors"][0]["pointer"], "/serverType", "{unknown_type:?}");
    assert_refused(unknown_type, 400, "invalid_request");
    stack.set_slot(&process, &slot("max", "active")).await;

    let broken = || Fault::Status { status: 500, code: "server_error".to_owned(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(1000, "GET", "/server_types", broken()));
    assert_refused(resize(&stack, &process, machine, "cpx32").await, 502, "provisioning_error");
    // A type that no plan includes is rejected without a call to the provider.
    assert_refused(resize(&stack, &process, machine, "cpx42").await, 403, "server_type_not_allowed");
    stack.provider.clear_faults();
    assert_eq!(fetch_record(&stack, &process, &host_settings).await["status"], "running");

    let provisioned = stack.provision(&process, "user_2").await;
    let booting = provisioned["machineId"].as_str().unwrap();
    let refused = resize(&stack, &process, booting, "cpx32").await;
    assert_eq!(
        (&refused.body["machineStatus"], &refused.body["allowed"]),
        (&json!("provisioning"), &json!(["running"]))
    );
    assert_refused(refused, 409, "invalid_state");
    stack.delete(&process, &format!("/vps/{booting}")).await;
    assert_refused(resize(&stack, &process, booting, "cpx32").await, 404, "machine_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn resize_requires_a_provider_server_id() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let client = stack.database.connect().await.unwrap();
    client.execute("UPDATE user_machines SET provider_server_id = NULL", &[]).await.unwrap();
    let refused = resize(&stack, &process, &host_settings.machine, "cpx32").await;
    refused.assert_problem(409, "invalid_state");
    assert!(refused.body["detail"].as_str().unwrap().contains("no server"), "{refused:?}");
    assert_eq!(count_actions(&stack, ""), 0);
    assert_eq!(fetch_record(&stack, &process, &host_settings).await["serverType"], "cpx22");
}

#[tokio::test(flavor = "multi_thread")]
async fn resize_down_checks_the_actual_disk_size() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    assert_eq!(resize_until_ended(&stack, &process, &host_settings).await["state"], "succeeded");
    // The current type's disk would have 160 GB, but the actual disk still has 80 GB, so the smaller type fits.
    let response = resize(&stack, &process, &host_settings.machine, "cpx22").await;
    assert_eq!(response.status, 202, "{response:?}");
    let ended = stack
        .wait_until_ended_without_registrations(&process, response.body["operationId"].as_str().unwrap())
        .await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
    assert_eq!(fetch_record(&stack, &process, &host_settings).await["serverType"], "cpx22");
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_caller_gets_the_final_type() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    stack.provider.add_fault(FaultRule::once("POST", "change_type", Fault::ActionError));
    let request = stack.request(&process, Method::POST, &format!("/vps/{}/resize", host_settings.machine));
    let request =
        request.bearer_auth(SECRET).header("prefer", "wait=30").json(&json!({"serverType": "cpx32"}));
    let send_heartbeats = async {
        loop {
            stack.try_send_heartbeats(process.base.clone()).await;
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    let response =
        tokio::select! { response = stack.send(request) => response, () = send_heartbeats => unreachable!() };
    assert_eq!(
        (&response.body["status"], &response.body["serverType"]),
        (&json!("running"), &json!("cpx22"))
    );
}
