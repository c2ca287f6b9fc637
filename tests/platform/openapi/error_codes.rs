//! Triggers every documented error code: by an invalid request, by a conflicting state, or by an outage of a service
//! that the platform needs.

use http::StatusCode;
use kit::provider::{Fault, FaultRule};
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};
use svc::http::openapi::Operation;

use super::super::fake_host;
use super::super::outages::start_database_server;
use super::super::stack::{BUCKET, Process, SECRET, Stack, provision_body};
use super::{TestPlatform, assert_rejects_invalid_ids, operations};
use crate::contract::{ApiUnderTest, assert_rejects_invalid_requests, valid_call};

/// Error codes that no request here can trigger, with their operations (`*` for all).
const UNREACHABLE_CODES: [(&str, &str); 3] = [
    // Every operator may query their own identity.
    ("whoAmI", "forbidden"),
    // An internal error that no request can cause.
    ("*", "internal"),
    // Only a store that is a local directory has no credentials; no test uses one here.
    ("renewStorageCredentials", "disabled"),
];

/// Error codes that these requests trigger only in some runs.
const RACE_DEPENDENT_CODES: [(&str, &str); 6] = [
    // Only overlapping requests trigger these.
    ("provision", "unavailable"),
    ("recover", "unavailable"),
    ("resize", "unavailable"),
    ("resume", "unavailable"),
    // A host that registers before its server is recorded, or after its machine has failed: see platform::boot_stages
    // and platform::registration.
    ("register", "unavailable"),
    ("register", "invalid_state"),
];

/// Sends requests that the platform must reject.
struct RejectionTester<'a> {
    platform: &'a TestPlatform,
}

impl RejectionTester<'_> {
    async fn send(&mut self, request: RequestBuilder, status: u16, code: &str) {
        self.platform.send(request).await.assert_problem(status, code);
    }

    async fn post(&mut self, path: &str, body: &Value, status: u16, code: &str) {
        self.send(self.platform.operator_call(Method::POST, path, body), status, code).await;
    }

    async fn post_to(&mut self, process: &Process, path: &str, body: &Value, status: u16, code: &str) {
        let request = self.platform.stack.request(process, Method::POST, path);
        self.send(request.bearer_auth(SECRET).json(body), status, code).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_documented_error_code_is_triggered() {
    let database = start_database_server().await;
    let platform = TestPlatform::start(&[("PLATFORM_DATABASE_URL", &database.url("svc"))]).await;
    for operation in operations() {
        assert_rejects_invalid_requests(&platform, operation).await;
        assert_rejects_invalid_ids(&platform, operation).await;
    }
    let mut tester = RejectionTester { platform: &platform };
    let settings = [("PLATFORM_DATABASE_URL", database.url("svc"))];
    trigger_provision_errors(&mut tester, &settings).await;
    trigger_machine_change_errors(&mut tester, &settings).await;
    trigger_idempotency_errors(&mut tester).await;
    trigger_bundle_errors(&mut tester).await;
    trigger_rollout_errors(&mut tester).await;
    trigger_operator_errors(&mut tester).await;
    trigger_usage_errors(&mut tester).await;
    trigger_files_errors(&mut tester).await;
    trigger_rate_limits(&mut tester, &settings).await;

    platform.stack.store.take_down();
    super::assert_reports_store_outage(&platform).await;
    platform.stack.store.bring_up().unwrap();
    database.kill9().await.unwrap();
    super::assert_reports_database_outage(&platform).await;
    let platform = TestPlatform::start(&[KEEP_PREDECESSORS]).await;
    trigger_replaced_machine_errors(&mut RejectionTester { platform: &platform }).await;

    let all: Vec<&'static Operation> = operations().collect();
    let untriggered =
        platform.contract().list_untriggered_codes(&all, &UNREACHABLE_CODES, &RACE_DEPENDENT_CODES);
    assert!(untriggered.is_empty(), "{untriggered:#?}");
}

fn start_process(stack: &Stack, settings: &[(&str, String)], extra_env: &[(&str, &str)]) -> Process {
    let settings = settings.iter().map(|(name, value)| (*name, value.as_str()));
    stack.start_platform_with(&settings.chain(extra_env.iter().copied()).collect::<Vec<_>>())
}

async fn trigger_provision_errors(tester: &mut RejectionTester<'_>, settings: &[(&str, String)]) {
    for path in ["/vps/provision", "/vps/provision/quote"] {
        trigger_provision_and_quote_errors(tester, settings, path).await;
    }
    let (platform, path) = (tester.platform, "/vps/provision");
    let mut body = provision_body("user_small");
    (body["confirmedMonthlyCost"], body["confirmedOptIn"]) = (json!("1.00 EUR"), json!(true));
    tester.post(path, &body, 409, "price_changed").await;
    let confirming = start_process(&platform.stack, settings, &[("PROVISION_CONFIRMATION", "true")]);
    tester.post_to(&confirming, path, &provision_body("user_small"), 428, "confirmation_required").await;
    let down = Fault::Status { status: 503, code: "unavailable".to_owned(), reset_in_seconds: None };
    platform.stack.provider.add_fault(FaultRule::times(1000, "GET", "/pricing", down));
    // The first process has cached the prices, but `confirming` must read them.
    let quote = "/vps/provision/quote";
    tester.post_to(&confirming, quote, &provision_body("user_small"), 503, "unavailable").await;
    platform.stack.provider.clear_faults();
}

async fn trigger_provision_and_quote_errors(
    tester: &mut RejectionTester<'_>,
    settings: &[(&str, String)],
    path: &str,
) {
    let platform = tester.platform;
    let body_with = |user: &str, overrides: &Value| {
        let mut body = provision_body(user);
        body.as_object_mut().unwrap().extend(overrides.as_object().unwrap().clone());
        body
    };
    tester.post(path, &provision_body("user_none"), 402, "subscription_required").await;
    let starter = json!({"idpUserId": "user_small", "plan": "starter", "status": "active"});
    platform.send(platform.operator_call(Method::PUT, "/vps/slots", &starter)).await;
    let large = body_with("user_small", &json!({"serverType": "cpx52"}));
    tester.post(path, &large, 403, "server_type_not_allowed").await;
    tester
        .post(path, &body_with("user_small", &json!({"imageVersion": "v9"})), 404, "bundle_not_found")
        .await;
    tester.post(path, &body_with("user_small", &json!({"handle": "h-user-1"})), 409, "handle_taken").await;
    let disabled = start_process(&platform.stack, settings, &[("CUSTOMER_VPS_ENABLED", "false")]);
    tester.post_to(&disabled, path, &provision_body("user_small"), 503, "disabled").await;
    let without_previews = start_process(&platform.stack, settings, &[("PREVIEW_MAX_PER_OWNER", "0")]);
    let preview = body_with("user_small", &json!({"kind": "preview"}));
    tester.post_to(&without_previews, path, &preview, 429, "preview_limit_reached").await;
    let full = start_process(&platform.stack, settings, &[("PROVIDER_SERVER_LIMIT", "1")]);
    tester.post_to(&full, path, &provision_body("user_small"), 409, "server_limit_reached").await;
    let other_kind = body_with("user_1", &json!({"kind": "preview", "handle": "h-user-1"}));
    tester.post(path, &other_kind, 409, "invalid_state").await;
    platform.stack.subscribe(&platform.process, "user_damaged").await;
    platform.stack.store.write(BUCKET, "user_damaged/primary/system/db/latest", "{not json");
    tester
        .post(path, &body_with("user_damaged", &json!({"handle": "damaged"})), 409, "snapshot_unusable")
        .await;
    platform.stack.subscribe(&platform.process, "user_large").await;
    platform.stack.store_snapshot_of_size("user_large", 1 << 40);
    tester.post(path, &body_with("user_large", &json!({"handle": "large"})), 409, "disk_too_small").await;
}

async fn trigger_machine_change_errors(tester: &mut RejectionTester<'_>, settings: &[(&str, String)]) {
    let platform = tester.platform;
    let (running, booting) = (&platform.running.machine, &platform.booting.machine);
    let path_of = |machine: &str, action: &str| format!("/vps/{machine}/{action}");
    let to = |server_type: &str| json!({ "serverType": server_type });
    tester.post("/vps/recover", &json!({"idpUserId": "user_none"}), 404, "machine_not_found").await;
    tester.post("/vps/recover", &json!({"idpUserId": "user_1"}), 409, "snapshot_unusable").await;
    let rebuild = "/vps/slots/pointer/rebuild";
    tester.post(rebuild, &json!({"idpUserId": "user_1"}), 409, "conflict").await;
    let key = "system/db/snapshots/x.dump";
    let named = json!({"idpUserId": "user_1", "snapshotKey": key, "force": true});
    tester.post(rebuild, &named, 409, "snapshot_unusable").await;
    let show = format!("/vps/slots/pointer?idpUserId=user_1&snapshotKey={key}");
    tester.send(platform.operator_call(Method::GET, &show, &Value::Null), 409, "snapshot_unusable").await;
    let unknown = "/vps/slots/pointer?idpUserId=user_none";
    tester.send(platform.operator_call(Method::GET, unknown, &Value::Null), 404, "not_found").await;
    tester.post(rebuild, &json!({"idpUserId": "user_none"}), 404, "not_found").await;
    tester.post("/vps/slots/files-prune", &json!({"idpUserId": "user_none"}), 404, "not_found").await;
    for route in ["files-key", "files-usage", "files-prune"] {
        let path = format!("/vps/slots/{route}?idpUserId=user_none");
        tester.send(platform.operator_call(Method::GET, &path, &Value::Null), 404, "not_found").await;
    }
    tester.post(&path_of(booting, "resize"), &to("cpx32"), 409, "invalid_state").await;
    let mut beat = super::super::stack::heartbeat_of(&platform.running);
    beat["attention"] = json!([{"code": "snapshot_held", "detail": "two rows instead of 400"}]);
    assert_eq!(platform.stack.send_heartbeat(&platform.process, &platform.running, &beat).await.status, 200);
    for action in ["backup", "drill", "backup-accept", "files/verify"] {
        tester.post(&path_of(booting, action), &json!({}), 409, "invalid_state").await;
        tester.post(&path_of(running, action), &json!({}), 502, "host_unreachable").await;
    }
    for action in ["undelete", "discard", "resume"] {
        tester.post(&path_of(booting, action), &json!({}), 409, "invalid_state").await;
    }
    tester.post(&path_of(booting, "power"), &json!({"action": "off"}), 409, "invalid_state").await;
    let operation_path = |action: &str| format!("/vps/operations/{}/{action}", platform.operation);
    tester.post(&operation_path("continue"), &json!({"acceptLoss": true}), 409, "invalid_state").await;
    let restore = |name: &str| json!({"snapshotKey": format!("system/db/snapshots/{name}-1.dump")});
    let unknown = restore("2026-01-01T00-00-00.000Z");
    tester.post(&operation_path("continue"), &unknown, 409, "snapshot_unusable").await;
    platform.stack.store_snapshot_of_size("user_2", 1 << 40);
    let large = restore("2026-01-02T03-04-05.678Z");
    tester.post(&operation_path("continue"), &large, 409, "disk_too_small").await;
    tester
        .send(platform.operator_call(Method::GET, "/vps/fleet?x=1", &Value::Null), 400, "invalid_request")
        .await;
    tester.post(&path_of(running, "resize"), &to("cpx62"), 403, "server_type_not_allowed").await;
    let without_billing = start_process(&platform.stack, settings, &[("BILLING_ENFORCEMENT", "off")]);
    tester
        .post_to(&without_billing, &path_of(running, "resize"), &to("cpx12"), 409, "disk_would_shrink")
        .await;
    tester.post_to(&without_billing, &path_of(running, "resize"), &to("none9"), 400, "invalid_request").await;
    let provider = &platform.stack.provider;
    for fault in [
        Fault::LostRequest,
        Fault::Status { status: 503, code: "scripted_secret".into(), reset_in_seconds: None },
        Fault::Status { status: 403, code: "scripted_secret".into(), reset_in_seconds: None },
    ] {
        let any_call =
            FaultRule { method: None, path_contains: String::new(), skip: 0, times: 10_000, fault };
        provider.add_fault(any_call);
        tester.post(&path_of(running, "resize"), &to("cpx32"), 502, "provisioning_error").await;
        provider.clear_faults();
    }
    let plan = |plan: &str, status: &str| json!({"idpUserId": "user_1", "plan": plan, "status": status});
    let slots = "/vps/slots";
    platform.send(platform.operator_call(Method::PUT, slots, &plan("starter", "active"))).await;
    tester.post(&path_of(running, "resize"), &to("cpx32"), 403, "server_type_not_allowed").await;
    let larger = json!({"idpUserId": "user_1", "serverType": "cpx32"});
    tester.post("/vps/recover", &larger, 403, "server_type_not_allowed").await;
    let ended = plan("max", "inactive");
    let response = platform.send(platform.operator_call(Method::PUT, slots, &ended)).await;
    assert_eq!(response.status, 200, "{response:?}");
    tester.post(&path_of(running, "resize"), &to("cpx32"), 402, "subscription_required").await;
    tester.post("/vps/recover", &larger, 402, "subscription_required").await;
    platform.send(platform.operator_call(Method::PUT, slots, &plan("max", "active"))).await;
}

/// Reuses an idempotency key with a different request, on every route that accepts such a key.
async fn trigger_idempotency_errors(tester: &mut RejectionTester<'_>) {
    let platform = tester.platform;
    for operation in operations().filter(|operation| accepts_idempotency_key(operation)) {
        let key = format!("key-{}", operation.id);
        // A request to another route uses the key first.
        let first = json!({"idpUserId": "user_keys", "plan": "starter", "status": "active"});
        let first = platform.operator_call(Method::PUT, "/vps/slots", &first).header("idempotency-key", &key);
        assert_eq!(platform.send(first).await.status, 200);
        let reused = valid_call(platform, operation).header("idempotency-key", &key);
        tester.send(reused, 422, "idempotency_mismatch").await;
        for invalid in ["", &"x".repeat(256), "a\tb"] {
            let call = valid_call(platform, operation).header("idempotency-key", invalid);
            tester.send(call, 400, "invalid_request").await;
        }
    }
}

fn accepts_idempotency_key(operation: &Operation) -> bool {
    operation.parameters.iter().any(|parameter| parameter.name == "Idempotency-Key")
}

async fn trigger_rollout_errors(tester: &mut RejectionTester<'_>) {
    let (path, platform) = ("/vps/deploy", tester.platform);
    let rollout_path = |action: &str| format!("/vps/deploy/{}/{action}", platform.rollout);
    tester.post(path, &json!({"imageVersion": "v9"}), 404, "bundle_not_found").await;
    let release = |alarm: &str| format!("/vps/fleet/alarms/{alarm}/release");
    tester.post(&release("servers_missing"), &json!({}), 404, "not_found").await;
    tester.post(&release("database_behind_store"), &json!({}), 409, "invalid_state").await;
    tester
        .send(
            platform.operator_call(Method::GET, &format!("{path}?x=1"), &Value::Null),
            400,
            "invalid_request",
        )
        .await;
    platform.send(platform.operator_call(Method::POST, &rollout_path("abort"), &json!({}))).await;
    let unknown = json!({"imageVersion": "v1", "handles": ["unknown"]});
    tester.post(path, &unknown, 404, "machine_not_found").await;
    let unregistered = json!({"imageVersion": "v1", "handles": ["h-user-2"]});
    tester.post(path, &unregistered, 409, "invalid_state").await;
    let open = json!({"imageVersion": "v1", "handles": ["h-user-1"], "canary": 0});
    let first = platform.send(platform.operator_call(Method::POST, path, &open)).await;
    assert_eq!(first.status, 202, "{first:?}");
    tester.post(path, &open, 409, "conflict").await;
    let first = first.body["rolloutId"].as_str().unwrap().to_owned();
    platform
        .send(platform.operator_call(Method::POST, &format!("/vps/deploy/{first}/abort"), &json!({})))
        .await;
    for action in ["pause", "resume"] {
        tester.post(&rollout_path(action), &json!({}), 409, "conflict").await;
    }
    // A rollout cannot be aborted after it has ended.
    let mut unverified = open;
    unverified["verify"] = json!(false);
    let beat = super::super::stack::heartbeat_of(&platform.running);
    platform.stack.send_heartbeat(&platform.process, &platform.running, &beat).await;
    let started = platform.send(platform.operator_call(Method::POST, path, &unverified)).await;
    let rollout_id = started.body["rolloutId"].as_str().unwrap().to_owned();
    let has_succeeded = || async {
        let rollout = platform.stack.get(&platform.process, &format!("/vps/deploy/{rollout_id}")).await.body;
        (rollout["state"] == "succeeded").then_some(())
    };
    platform.stack.eventually("the rollout of the installed release ends", has_succeeded).await;
    tester.post(&format!("/vps/deploy/{rollout_id}/abort"), &json!({}), 409, "conflict").await;
}

async fn trigger_operator_errors(tester: &mut RejectionTester<'_>) {
    let platform = tester.platform;
    let get = |path: &str| platform.operator_call(Method::GET, path, &Value::Null);
    for path in ["/operators?x=1", "/operators/whoami?x=1"] {
        tester.send(get(path), 400, "invalid_request").await;
    }
    let taken = json!({"name": "only-read", "scopes": ["read"]});
    tester.post("/operators", &taken, 409, "conflict").await;
    for action in ["rotate", "revoke"] {
        tester.post(&format!("/operators/unknown/{action}"), &json!({}), 404, "not_found").await;
        tester.post(&format!("/operators/Nobody/{action}"), &json!({}), 400, "invalid_request").await;
    }
    let gone = json!({"name": "gone", "scopes": ["read"]});
    platform.send(platform.operator_call(Method::POST, "/operators", &gone)).await;
    platform.send(platform.operator_call(Method::POST, "/operators/gone/revoke", &json!({}))).await;
    tester.post("/operators/gone/rotate", &json!({}), 409, "conflict").await;
}

async fn trigger_usage_errors(tester: &mut RejectionTester<'_>) {
    let platform = tester.platform;
    let usage_call =
        |machine: &str| platform.operator_call(Method::GET, &format!("/vps/{machine}/usage"), &Value::Null);
    tester.send(usage_call(&platform.booting.machine), 409, "invalid_state").await;
    tester.send(usage_call(&platform.running.machine), 502, "host_unreachable").await;
    let host = fake_host::start_host_for(&platform.stack, &platform.process, "user_usage").await;
    for (status, body, expected_status, code) in [
        (403, "", 502, "host_refused"),
        (503, "", 503, "unavailable"),
        (200, "<html>", 502, "host_answer_invalid"),
    ] {
        host.behavior.lock().unwrap().usage_response =
            (StatusCode::from_u16(status).unwrap(), body.to_owned());
        tester.send(usage_call(&host.settings.machine), expected_status, code).await;
    }
}

async fn trigger_files_errors(tester: &mut RejectionTester<'_>) {
    let platform = tester.platform;
    let host = fake_host::start_host_for(&platform.stack, &platform.process, "user_files").await;
    for (method, route) in [
        (Method::GET, "status"),
        (Method::GET, "versions?path=a"),
        (Method::GET, "at"),
        (Method::GET, "restore"),
        (Method::POST, "restore"),
    ] {
        let body = if method == Method::POST { json!({"path": "a"}) } else { Value::Null };
        let files_call = |machine: &str| {
            platform.operator_call(method.clone(), &format!("/vps/{machine}/files/{route}"), &body)
        };
        tester.send(files_call(&platform.booting.machine), 409, "invalid_state").await;
        tester.send(files_call(&platform.running.machine), 502, "host_unreachable").await;
        for (status, body, expected_status, code) in [
            (401, "", 502, "host_refused"),
            (404, "", 502, "host_refused"),
            (404, r#"{"detail": "It did not exist."}"#, 404, "not_found"),
            (409, r#"{"detail": "Another one is running."}"#, 409, "invalid_state"),
            (500, "", 502, "host_refused"),
            (503, "", 503, "unavailable"),
            (200, "<html>", 502, "host_answer_invalid"),
        ] {
            // Only a host with an older release, which lacks the route `status`, responds to it with 404.
            let is_older = route == "status" && status == 404;
            let (expected_status, code) =
                if is_older { (502, "host_refused") } else { (expected_status, code) };
            host.behavior.lock().unwrap().files_response =
                (StatusCode::from_u16(status).unwrap(), body.to_owned());
            tester.send(files_call(&host.settings.machine), expected_status, code).await;
        }
    }
    let (stack, machine) = (&platform.stack, &host.settings.machine);
    stack.store.write(BUCKET, "user_files/primary/files/config", "no key opens this");
    let files_key = stack.request(&platform.process, Method::POST, &format!("/vps/{machine}/files-key"));
    let files_key = files_key.bearer_auth(&host.settings.upgrade_token).json(&json!({}));
    tester.send(files_key, 409, "conflict").await;
    let config = "user_1/primary/files/config";
    stack.store.write(BUCKET, config, "no key opens this");
    let prune_path = "/vps/slots/files-prune?idpUserId=user_1";
    tester.send(platform.operator_call(Method::GET, prune_path, &Value::Null), 409, "conflict").await;
    stack.store.remove(BUCKET, config);
    stack.store.write(BUCKET, "user_files/primary/system/db/latest", "{not json");
    let latest = format!("/vps/{machine}/backups?latest=true");
    tester.send(platform.operator_call(Method::GET, &latest, &Value::Null), 409, "snapshot_unusable").await;
}

/// Sends requests from an address that has sent too many wrong tokens.
async fn trigger_rate_limits(tester: &mut RejectionTester<'_>, settings: &[(&str, String)]) {
    let platform = tester.platform;
    let limited = start_process(&platform.stack, settings, &[("PLATFORM_ADDRESS_CHECKS_PER_SECOND", "1")]);
    let with_wrong_token = |method: &Method, path: &str| {
        platform.stack.request(&limited, method.clone(), path).bearer_auth("wrong")
    };
    for operation in operations().filter(|operation| !operation.credentials.is_empty()) {
        let path = platform.path(operation);
        // For each second that this process is stalled, one more request passes the limit.
        for attempt in 1.. {
            for _ in 0..12 {
                platform.send(with_wrong_token(&Method::GET, "/vps/fleet")).await;
            }
            let response = platform.send(with_wrong_token(&operation.method, &path)).await;
            if response.status == 429 || attempt == 10 {
                response.assert_problem(429, "rate_limited");
                break;
            }
        }
    }
}

async fn trigger_bundle_errors(tester: &mut RejectionTester<'_>) {
    let platform = tester.platform;
    let get = |path: &str| platform.operator_call(Method::GET, path, &Value::Null);
    let file = "svc-host-bundle.tar.gz";
    tester.send(get(&format!("/system-bundles/v9/{file}")), 404, "bundle_not_found").await;
    tester.send(get("/system-bundles/v1/other"), 404, "not_found").await;
    tester.send(get("/system-bundles/..%2f..%2fuser_1/x"), 404, "not_found").await;
    tester.send(get("/system-bundles/%ff/x"), 400, "invalid_request").await;
    let beyond_the_end = get(&format!("/system-bundles/v1/{file}")).header("range", "bytes=100-");
    tester.send(beyond_the_end, 416, "range_not_satisfiable").await;

    let backup = |name: &str| get(&format!("/vps/{}/backups/{name}", platform.running.machine));
    for missing in ["2026-01-01T00-00-00.000Z-2.dump", "x", "..%2f..%2flatest", "x.dump.json"] {
        tester.send(backup(missing), 404, "not_found").await;
    }
    tester.send(backup(super::DUMP).header("range", "bytes=100-"), 416, "range_not_satisfiable").await;
}

/// Keeps the replaced server, so that another replacement in a full project is rejected.
const KEEP_PREDECESSORS: (&str, &str) = ("PREDECESSOR_KEEP_SECONDS", "3600");

/// Sends recoveries that are rejected, and requests that become invalid when the machine is replaced.
async fn trigger_replaced_machine_errors(tester: &mut RejectionTester<'_>) {
    let platform = tester.platform;
    let (stack, machine) = (&platform.stack, &platform.running.machine);
    stack.store_snapshot_of_size("user_1", 1 << 40);
    tester.post("/vps/recover", &json!({"idpUserId": "user_1"}), 409, "disk_too_small").await;
    let snapshot = stack.store_snapshot("user_1");
    platform
        .send(platform.operator_call(Method::POST, &format!("/vps/{machine}/fail"), &json!({"reason": "x"})))
        .await;
    stack
        .send_heartbeat(
            &platform.process,
            &platform.running,
            &super::super::stack::heartbeat_of(&platform.running),
        )
        .await;
    let fault = Fault::Status { status: 503, code: "scripted".into(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(1000, "GET", "/servers/", fault));
    tester.post(&format!("/vps/{machine}/resume"), &json!({}), 502, "provisioning_error").await;
    stack.provider.clear_faults();
    let key = "system-bundles/v1/svc-host-bundle.tar.gz.sha256";
    let digest = stack.store.read(BUCKET, key).unwrap();
    stack.store.remove(BUCKET, key);
    tester.post("/vps/recover", &json!({"idpUserId": "user_1"}), 404, "bundle_not_found").await;
    stack.store.write(BUCKET, key, digest);
    let recovered = platform.operator_call(Method::POST, "/vps/recover", &json!({"idpUserId": "user_1"}));
    let recovered = platform.send(recovered).await;
    assert_eq!(recovered.status, 202, "{snapshot}: {recovered:?}");
    let replace_first = json!({"idpUserId": "user_1", "replaceFirst": true});
    tester.post("/vps/recover", &replace_first, 409, "invalid_state").await;
    let operation = recovered.body["operationId"].as_str().unwrap();
    stack.wait_until_ended(&platform.process, operation).await;
    let full = stack.start_platform_with(&[KEEP_PREDECESSORS, ("PROVIDER_SERVER_LIMIT", "1")]);
    tester.post_to(&full, "/vps/recover", &json!({"idpUserId": "user_1"}), 409, "server_limit_reached").await;
    drop(full);
    tester.post(&format!("/vps/operations/{operation}/abandon"), &json!({}), 409, "invalid_state").await;
    let request_as_replaced = |method, path: &str| {
        stack.request(&platform.process, method, path).bearer_auth(&platform.running.upgrade_token)
    };
    tester
        .send(
            request_as_replaced(Method::GET, "/system-bundles/v1/svc-host-bundle.tar.gz"),
            403,
            "superseded",
        )
        .await;
    for path in ["storage-credentials", "files-key"] {
        let request = request_as_replaced(Method::POST, &format!("/vps/{machine}/{path}")).json(&json!({}));
        tester.send(request, 403, "superseded").await;
    }
    for action in ["fail", "resize", "backup", "drill", "files/verify", "rotate-token"] {
        let body = match action {
            "fail" => json!({"reason": "x"}),
            "resize" => json!({"serverType": "cpx32"}),
            _ => json!({}),
        };
        tester.post(&format!("/vps/{machine}/{action}"), &body, 409, "invalid_state").await;
    }
    tester
        .send(
            platform.operator_call(Method::DELETE, &format!("/vps/{machine}"), &Value::Null),
            409,
            "invalid_state",
        )
        .await;
    let failure = operations().find(|operation| operation.id == "reportBootFailure").unwrap();
    tester.send(valid_call(platform, failure), 409, "invalid_state").await;
}
