//! Tests the platform against its OpenAPI document: every route gets every kind of invalid request, and must respond as
//! described.
//!
//! The cases come from the routes' own descriptions, so a new route is covered without a change here.

mod error_codes;

use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};
use svc::http::openapi::Operation;
use svc::platform::api::ENDPOINTS;
use svc::platform::openapi::openapi_document;
use svc::wire::operator::Scope;

use super::deploy;
use super::outages::start_database_server;
use super::stack::{ApiResponse, BUCKET, DIGEST, Process, SECRET, Stack, UserDataSettings};
use crate::contract::{
    self, ApiUnderTest, Contract, WrongCredential, assert_rejects_invalid_requests, valid_call,
    with_required_query,
};

/// A platform with a running machine and one that is waiting for its registration.
struct TestPlatform {
    stack: Stack,
    process: Process,
    running: UserDataSettings,
    booting: UserDataSettings,
    operation: String,
    rollout: String,
    /// The tokens of operators with a single scope each.
    operators: Vec<(Scope, String)>,
}

/// The file name of the running machine's snapshot.
const DUMP: &str = "2026-01-01T00-00-00.000Z-1.dump";

impl TestPlatform {
    async fn start(extra_env: &[(&str, &str)]) -> Self {
        let stack = Stack::start().await;
        deploy::publish_signed(&stack, "v1");
        // No pointer names this snapshot, so it cannot be recovered from.
        stack.store.write(BUCKET, &format!("user_1/primary/system/db/snapshots/{DUMP}"), "dump");
        let keys = deploy::public_key();
        let mut env: Vec<_> =
            extra_env.iter().copied().chain([("BUNDLE_PUBLIC_KEYS", keys.as_str())]).collect();
        // One host and one operator send thousands of calls; platform::rate_limits covers the limits.
        env.push(("PLATFORM_HOST_REQUESTS_PER_SECOND", "0"));
        env.push(("PLATFORM_OPERATOR_REQUESTS_PER_SECOND", "0"));
        let process = stack.start_platform_with(&env);
        let running = stack.start_machine(&process, "user_1").await;
        // The file routes need the slot's file backup key, so create it.
        let path = format!("/vps/{}/files-key", running.machine);
        let key = stack.request(&process, Method::POST, &path).bearer_auth(&running.upgrade_token);
        assert_eq!(stack.send(key.json(&json!({}))).await.status, 200);
        let provisioned = stack.provision(&process, "user_2").await;
        let booting =
            stack.wait_for_host_settings(&process, provisioned["machineId"].as_str().unwrap()).await;
        let operation = provisioned["operationId"].as_str().unwrap().to_owned();
        // The hosts are simulated, so they cannot pass a verification.
        let deploy = json!({"imageVersion": "v1", "handles": ["h-user-1"], "canary": 0, "verify": false});
        let deployed = stack.post(&process, "/vps/deploy", &deploy).await;
        let rollout = deployed.body["rolloutId"].as_str().unwrap().to_owned();
        let mut operators = Vec::new();
        for scope in Scope::ALL {
            let body = json!({"name": format!("only-{scope}"), "scopes": [scope]});
            let added = stack.post(&process, "/operators", &body).await;
            operators.push((scope, added.body["token"].as_str().unwrap().to_owned()));
        }
        let secrets = [SECRET, &"07".repeat(32), stack.provider.token(), stack.store.secret_key()];
        let tokens = [&*running.upgrade_token, &*running.registration_token, &*booting.registration_token];
        secrets.iter().chain(&tokens).for_each(|secret| contract::platform().register_secret(secret));
        Self { stack, process, running, booting, operation, rollout, operators }
    }

    /// Returns the machine whose id belongs in a valid request for the operation.
    fn host_settings(&self, operation: &Operation) -> &UserDataSettings {
        if accepts_credential(operation, "registration") { &self.booting } else { &self.running }
    }

    fn path_of(&self, operation: &Operation, id: &str) -> String {
        let path = operation.path.replace("{id}", id).replace("{alarm}", "servers_missing");
        let path = path.replace("{operator}", "only-read");
        path.replace("{version}", "v1").replace("{file}", "svc-host-bundle.tar.gz").replace("{name}", DUMP)
    }

    fn token(&self, credential: &str) -> &str {
        match credential {
            "operator" => SECRET,
            "host" => &self.running.upgrade_token,
            "registration" => &self.booting.registration_token,
            other => panic!("no token for {other}"),
        }
    }

    async fn send(&self, request: RequestBuilder) -> ApiResponse {
        self.stack.send(request).await
    }

    /// Builds a request from an operator.
    fn operator_call(&self, method: Method, path: &str, body: &Value) -> RequestBuilder {
        self.stack.request(&self.process, method, path).bearer_auth(SECRET).json(body)
    }
}

impl ApiUnderTest for TestPlatform {
    fn contract(&self) -> &'static Contract {
        contract::platform()
    }

    fn path(&self, operation: &Operation) -> String {
        match operation.id {
            _ if has_operation_id(operation) => self.path_of(operation, &self.operation),
            _ if has_rollout_id(operation) => self.path_of(operation, &self.rollout),
            _ => self.path_of(operation, &self.host_settings(operation).machine),
        }
    }

    fn max_body_bytes(&self, _: &Operation) -> usize {
        64 << 10
    }

    fn request_without_credentials(&self, _: &Operation, method: Method, path: &str) -> RequestBuilder {
        self.stack.request(&self.process, method, path)
    }

    fn authorized_request(&self, operation: &Operation, path: &str) -> RequestBuilder {
        let request = self.request_without_credentials(operation, operation.method.clone(), path);
        match operation.credentials.first() {
            Some(credential) => request.bearer_auth(self.token(credential.name)),
            None => request,
        }
    }

    fn wrong_credentials(&self, operation: &Operation) -> Vec<WrongCredential> {
        let code = if accepts_credential(operation, "registration") {
            "registration_rejected"
        } else {
            "unauthorized"
        };
        let anonymous_call =
            |path: &str| self.request_without_credentials(operation, operation.method.clone(), path);
        let call = || anonymous_call(&self.path(operation));
        let mut tokens = vec![
            ("an arbitrary word", "wrong"),
            ("a malformed token", "svcu_wrong"),
            ("two words", "a b"),
            ("an empty token", ""),
        ];
        for credential in ["operator", "host", "registration"] {
            if !accepts_credential(operation, credential) {
                tokens.push((credential, self.token(credential)));
            }
        }
        let truncated = &self.token(operation.credentials[0].name)[1..];
        tokens.push(("a truncated token", truncated));
        let with_token = |(description, token): (&'static str, &str)| {
            let request = call().bearer_auth(token);
            WrongCredential { description, request, status: 401, code }
        };
        let mut all: Vec<WrongCredential> = tokens.into_iter().map(with_token).collect();
        let unauthorized = |description, request| WrongCredential { description, request, status: 401, code };
        all.push(unauthorized("no credential", call()));
        all.push(unauthorized("another scheme", call().header("authorization", "Basic b3A6eA==")));
        let endpoint = ENDPOINTS.iter().find(|endpoint| endpoint.operation.id == operation.id).unwrap();
        if let Some(scopes) = endpoint.access.scopes() {
            let without_scope = self.operators.iter().filter(|(scope, _)| !scopes.contains(scope));
            all.extend(without_scope.map(|(scope, token)| WrongCredential {
                description: scope.as_str(),
                request: call().bearer_auth(token),
                status: 403,
                code: "forbidden",
            }));
        }
        if accepts_credential(operation, "host") && operation.path.contains("{id}") {
            let another = anonymous_call(&self.path_of(operation, &self.booting.machine))
                .bearer_auth(self.token("host"));
            all.push(WrongCredential {
                description: "another host",
                request: another,
                status: 403,
                code: "forbidden",
            });
        }
        all
    }

    fn override_value(&self, operation: &Operation, name: &str) -> Option<Value> {
        Some(match name {
            "idpUserId" => json!("user_1"),
            "path" => json!("notes.md"),
            "slot" => json!("primary"),
            "snapshotKey" => json!(format!("system/db/snapshots/{DUMP}")),
            "handle" => json!("h-user-1"),
            "handles" => json!(["h-user-1"]),
            "except" => json!(["h-user-2"]),
            "machineId" => json!(self.host_settings(operation).machine),
            "serverType" => json!("cpx32"),
            "location" => json!("hel1"),
            "fallbackLocations" => json!(["fsn1"]),
            "plan" => json!("max"),
            "kind" => json!("customer"),
            "scopes" => json!(["read"]),
            "name" => json!("ada"),
            "imageVersion" => json!("v1"),
            "bundleSha256" => json!(DIGEST),
            "epoch" => json!(1),
            "confirmedMonthlyCost" => json!("9.50 EUR"),
            "allowEmpty" | "empty" => json!(false),
            "verify" if operation.id == "deploy" => json!(false),
            // A decision either names a snapshot or accepts the loss.
            "acceptLoss" if has_operation_id(operation) => json!(false),
            // A recovery without files usually cannot be combined with `replaceFirst`.
            "withoutFiles" => json!(false),
            "currentPeriodEnd" => json!("2099-01-02T03:04:05Z"),
            _ => return None,
        })
    }
}

fn accepts_credential(operation: &Operation, name: &str) -> bool {
    operation.credentials.iter().any(|credential| credential.name == name)
}

/// Whether the operation's path contains a rollout id.
fn has_rollout_id(operation: &Operation) -> bool {
    operation.path.starts_with("/vps/deploy/{id}")
}

/// Whether the operation's path contains the id of a machine's operation.
fn has_operation_id(operation: &Operation) -> bool {
    operation.path.starts_with("/vps/operations/{id}")
}

fn operations() -> impl Iterator<Item = &'static Operation> {
    ENDPOINTS.iter().map(|endpoint| &endpoint.operation)
}

#[tokio::test(flavor = "multi_thread")]
async fn document_is_served_and_complete() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let served = stack.send(stack.request(&process, Method::GET, "/openapi.json")).await;
    assert_eq!((served.status, &served.body), (200, &openapi_document()));
    contract::assert_document_is_valid(contract::platform());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_rejects_invalid_requests_in_documented_order() {
    let platform = TestPlatform::start(&[]).await;
    for operation in operations() {
        assert_rejects_invalid_requests(&platform, operation).await;
        assert_rejects_invalid_ids(&platform, operation).await;
    }
    platform
        .send(platform.request_without_credentials(operations().next().unwrap(), Method::GET, "/vps/x/y/z"))
        .await
        .assert_problem(404, "not_found");
}

async fn assert_rejects_invalid_ids(platform: &TestPlatform, operation: &Operation) {
    if !operation.path.contains("{id}") {
        return;
    }
    let call = |id: &str| {
        let path = with_required_query(platform, operation, platform.path_of(operation, id));
        let call = platform.authorized_request(operation, &path);
        match valid_call(platform, operation).build().unwrap().body().and_then(reqwest::Body::as_bytes) {
            Some(body) => call.header("content-type", "application/json").body(body.to_vec()),
            None => call,
        }
    };
    let unknown = uuid::Uuid::now_v7();
    let braced = unknown.braced().to_string().replace('{', "%7B").replace('}', "%7D");
    let simple = unknown.simple().to_string();
    for id in ["7", "not-a-uuid", "%00", "%ff", "00000000-0000-0000-0000-00000000000g", &braced, &simple] {
        platform.send(call(id)).await.assert_problem(400, "invalid_request");
    }
    if accepts_credential(operation, "operator") {
        let has_no_machine_id = has_operation_id(operation) || has_rollout_id(operation);
        let code = if has_no_machine_id { "not_found" } else { "machine_not_found" };
        platform.send(call(&unknown.to_string())).await.assert_problem(404, code);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_that_needs_database_reports_its_outage() {
    let server = start_database_server().await;
    let platform = TestPlatform::start(&[("PLATFORM_DATABASE_URL", &server.url("svc"))]).await;
    server.kill9().await.unwrap();
    assert_reports_database_outage(&platform).await;
}

async fn assert_reports_database_outage(platform: &TestPlatform) {
    for operation in operations() {
        let response = platform.send(valid_call(platform, operation)).await;
        let needs_database = operation.codes().iter().any(|code| code.as_str() == "database_unavailable");
        match operation.id {
            // An operator's bundle download needs only the store.
            "getBundle" => assert_eq!(response.status, 200),
            // PLATFORM_SECRET is checked without the database, and the process metrics do not need it.
            "metrics" => assert_eq!(response.status, 200),
            // PLATFORM_SECRET's identity does not need the database; a named operator is looked up there.
            "whoAmI" => assert_eq!(response.status, 200),
            // The last loaded routes are still served.
            "ready" => assert_eq!(response.status, 200),
            "readyToControl" => assert_eq!(response.status, 503),
            _ if needs_database => response.assert_problem(503, "database_unavailable"),
            _ => assert_eq!(response.status, 200, "{response:?}"),
        }
    }
    for id in ["metrics", "whoAmI"] {
        let operation = operations().find(|operation| operation.id == id).unwrap();
        let (_, token) = platform.operators.iter().find(|(scope, _)| *scope == Scope::Metrics).unwrap();
        let call =
            platform.request_without_credentials(operation, Method::GET, operation.path).bearer_auth(token);
        platform.send(call).await.assert_problem(503, "database_unavailable");
    }
    // A host's credential is looked up in the database.
    let bundle = operations().find(|operation| operation.id == "getBundle").unwrap();
    let by_host = platform
        .request_without_credentials(bundle, Method::GET, &platform.path(bundle))
        .bearer_auth(platform.token("host"));
    platform.send(by_host).await.assert_problem(503, "database_unavailable");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_that_needs_store_reports_its_outage() {
    let platform = TestPlatform::start(&[]).await;
    platform.stack.store.take_down();
    assert_reports_store_outage(&platform).await;
}

async fn assert_reports_store_outage(platform: &TestPlatform) {
    platform.stack.subscribe(&platform.process, "user_3").await;
    let mut checked = 0;
    for operation in operations() {
        if !operation.codes().iter().any(|code| code.as_str() == "store_unavailable") {
            continue;
        }
        let request = match operation.id {
            "provision" | "quoteProvision" => {
                let body = json!({"idpUserId": "user_3", "handle": "third"});
                platform.authorized_request(operation, operation.path).json(&body)
            }
            _ => valid_call(platform, operation),
        };
        platform.send(request).await.assert_problem(503, "store_unavailable");
        checked += 1;
    }
    assert!(checked >= 5, "{checked}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_responds_to_valid_request_as_described() {
    let platform = TestPlatform::start(&[]).await;
    // Operations that take a machine out of service come last.
    let mut all: Vec<&Operation> = operations().collect();
    all.sort_by_key(|operation| match operation.id {
        // Only one rollout can be open, so the first one is aborted earlier.
        "deploy" => 1,
        "reportBootFailure" | "resize" => 2,
        "recover" | "power" | "fail" => 3,
        "delete" => 4,
        _ => 0,
    });
    for operation in all {
        let response = platform.send(valid_call(&platform, operation)).await;
        // The machine's host is not responding, and its slot has no usable snapshot.
        let expected_problem = match operation.id {
            "backUp" | "drill" | "getUsage" | "verifyFiles" => Some((502, "host_unreachable")),
            "showFileBackup" | "listFileVersions" | "listFilesAt" | "showFileRestore" | "restoreFile" => {
                Some((502, "host_unreachable"))
            }
            // No snapshot is held back.
            "acceptBackup" => Some((409, "invalid_state")),
            "recover" | "rebuildPointer" | "continueOperation" => Some((409, "snapshot_unusable")),
            // No server is missing.
            "releaseAlarm" => Some((404, "not_found")),
            // At this point, the booting machine has registered.
            "reportBootFailure" => Some((409, "invalid_state")),
            // The machine is being resized.
            "power" => Some((409, "invalid_state")),
            // No operation is waiting, and no machine is deleted or kept: see platform::{final_backup, undelete,
            // kept_servers}.
            "abandonOperation" | "undelete" | "discard" => Some((409, "invalid_state")),
            _ => None,
        };
        match expected_problem {
            Some((status, code)) => response.assert_problem(status, code),
            None => assert!(response.status < 300, "{}: {response:?}", operation.id),
        }
    }
}
