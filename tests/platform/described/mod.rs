//! The platform against its OpenAPI document: every route gets every wrong call, and responds as described.
//!
//! The rows are the routes' own descriptions, so a new route is covered without a change here.

mod refusals;

use kit::pg::{PgBinaries, PgOptions, PgServer};
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};
use svc::http::openapi::Operation;
use svc::platform::api::ENDPOINTS;
use svc::platform::openapi::document;
use svc::wire::operator::Scope;

use super::deploy;
use super::stack::{ApiResponse, BUCKET, DIGEST, Guest, Process, SECRET, Stack};
use crate::contract::{self, Contract, Side, WrongCredential, assert_refuses_wrong_calls, valid_call};

/// A platform with a running machine and one that waits for its registration.
struct World {
    stack: Stack,
    process: Process,
    runs: Guest,
    waits: Guest,
    operation: String,
    rollout: String,
    /// Operators with a single scope each.
    operators: Vec<(Scope, String)>,
}

/// A snapshot of the running machine.
const DUMP: &str = "2026-01-01T00-00-00.000Z-1.dump";

impl World {
    async fn start(more: &[(&str, &str)]) -> Self {
        let stack = Stack::start().await;
        deploy::publish_signed(&stack, "v1");
        // No pointer names it, so it cannot be recovered from.
        stack.store.write(BUCKET, &format!("user_1/primary/system/db/snapshots/{DUMP}"), "dump");
        let keys = deploy::public_key();
        let mut more: Vec<_> = more.iter().copied().chain([("BUNDLE_PUBLIC_KEYS", keys.as_str())]).collect();
        // One host and one operator send thousands of calls; platform::rates covers the limits.
        more.push(("PLATFORM_HOST_REQUESTS_PER_SECOND", "0"));
        more.push(("PLATFORM_OPERATOR_REQUESTS_PER_SECOND", "0"));
        let process = stack.start_platform_with(&more);
        let runs = stack.start_machine(&process, "user_1").await;
        let provisioned = stack.provision(&process, "user_2").await;
        let waits = stack.wait_for_guest(&process, provisioned["machineId"].as_str().unwrap()).await;
        let operation = provisioned["operationId"].as_str().unwrap().to_owned();
        // The test plays the hosts, which cannot be verified.
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
        let tokens = [&*runs.upgrade_token, &*runs.registration_token, &*waits.registration_token];
        secrets.iter().chain(&tokens).for_each(|secret| contract::platform().plant(secret));
        Self { stack, process, runs, waits, operation, rollout, operators }
    }

    /// The machine that the operation's caller names.
    fn guest(&self, operation: &Operation) -> &Guest {
        if takes(operation, "registration") { &self.waits } else { &self.runs }
    }

    fn path_of(&self, operation: &Operation, id: &str) -> String {
        let path = operation.path.replace("{id}", id).replace("{alarm}", "servers_missing");
        let path = path.replace("{operator}", "only-read");
        path.replace("{version}", "v1").replace("{file}", "svc-host-bundle.tar.gz").replace("{name}", DUMP)
    }

    fn token(&self, credential: &str) -> &str {
        match credential {
            "operator" => SECRET,
            "host" => &self.runs.upgrade_token,
            "registration" => &self.waits.registration_token,
            other => panic!("no token for {other}"),
        }
    }

    async fn send(&self, request: RequestBuilder) -> ApiResponse {
        self.stack.send(request).await
    }

    /// A call by an operator.
    fn operator_call(&self, method: Method, path: &str, body: &Value) -> RequestBuilder {
        self.stack.request(&self.process, method, path).bearer_auth(SECRET).json(body)
    }
}

impl Side for World {
    fn contract(&self) -> &'static Contract {
        contract::platform()
    }

    fn path(&self, operation: &Operation) -> String {
        match operation.id {
            _ if is_of_operation(operation) => self.path_of(operation, &self.operation),
            _ if is_of_rollout(operation) => self.path_of(operation, &self.rollout),
            _ => self.path_of(operation, &self.guest(operation).machine),
        }
    }

    fn max_body_bytes(&self, _: &Operation) -> usize {
        64 << 10
    }

    fn bare(&self, _: &Operation, method: Method, path: &str) -> RequestBuilder {
        self.stack.request(&self.process, method, path)
    }

    fn known(&self, operation: &Operation, path: &str) -> RequestBuilder {
        let request = self.bare(operation, operation.method.clone(), path);
        match operation.credentials.first() {
            Some(credential) => request.bearer_auth(self.token(credential.name)),
            None => request,
        }
    }

    fn wrong_credentials(&self, operation: &Operation) -> Vec<WrongCredential> {
        let code = if takes(operation, "registration") { "registration_rejected" } else { "unauthorized" };
        let bare = |path: &str| self.bare(operation, operation.method.clone(), path);
        let call = || bare(&self.path(operation));
        let mut tokens = vec![
            ("another word", "wrong"),
            ("no token", "svcu_wrong"),
            ("two words", "a b"),
            ("nothing", ""),
        ];
        for other in ["operator", "host", "registration"] {
            if !takes(operation, other) {
                tokens.push((other, self.token(other)));
            }
        }
        let cut = &self.token(operation.credentials[0].name)[1..];
        tokens.push(("a token that is cut", cut));
        let with = |(what, token): (&'static str, &str)| {
            let request = call().bearer_auth(token);
            WrongCredential { what, request, status: 401, code }
        };
        let mut all: Vec<WrongCredential> = tokens.into_iter().map(with).collect();
        let of = |what, request| WrongCredential { what, request, status: 401, code };
        all.push(of("nobody", call()));
        all.push(of("another scheme", call().header("authorization", "Basic b3A6eA==")));
        let endpoint = ENDPOINTS.iter().find(|endpoint| endpoint.operation.id == operation.id).unwrap();
        if let Some(scopes) = endpoint.access.scopes() {
            let lacking = self.operators.iter().filter(|(scope, _)| !scopes.contains(scope));
            all.extend(lacking.map(|(scope, token)| WrongCredential {
                what: scope.as_str(),
                request: call().bearer_auth(token),
                status: 403,
                code: "forbidden",
            }));
        }
        if takes(operation, "host") && operation.path.contains("{id}") {
            let another = bare(&self.path_of(operation, &self.waits.machine)).bearer_auth(self.token("host"));
            all.push(WrongCredential {
                what: "another host",
                request: another,
                status: 403,
                code: "forbidden",
            });
        }
        all
    }

    fn own(&self, operation: &Operation, name: &str) -> Option<Value> {
        Some(match name {
            "idpUserId" => json!("user_1"),
            "slot" => json!("primary"),
            "snapshotKey" => json!(format!("system/db/snapshots/{DUMP}")),
            "handle" => json!("h-user-1"),
            "handles" => json!(["h-user-1"]),
            "except" => json!(["h-user-2"]),
            "machineId" => json!(self.guest(operation).machine),
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
            // A decision names a snapshot or accepts the loss.
            "acceptLoss" if is_of_operation(operation) => json!(false),
            "currentPeriodEnd" => json!("2099-01-02T03:04:05Z"),
            _ => return None,
        })
    }
}

fn takes(operation: &Operation, credential: &str) -> bool {
    operation.credentials.iter().any(|one| one.name == credential)
}

/// Whether its path contains a rollout id.
fn is_of_rollout(operation: &Operation) -> bool {
    operation.path.starts_with("/vps/deploy/{id}")
}

/// Whether its path contains an operation id.
fn is_of_operation(operation: &Operation) -> bool {
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
    assert_eq!((served.status, &served.body), (200, &document()));
    contract::assert_document_is_valid(contract::platform());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_rejects_invalid_requests_in_documented_order() {
    let world = World::start(&[]).await;
    for operation in operations() {
        assert_refuses_wrong_calls(&world, operation).await;
        ids(&world, operation).await;
    }
    world
        .send(world.bare(operations().next().unwrap(), Method::GET, "/vps/x/y/z"))
        .await
        .assert_problem(404, "not_found");
}

async fn ids(world: &World, operation: &Operation) {
    if !operation.path.contains("{id}") {
        return;
    }
    let call = |id: &str| {
        let call = world.known(operation, &world.path_of(operation, id));
        match valid_call(world, operation).build().unwrap().body().and_then(reqwest::Body::as_bytes) {
            Some(body) => call.header("content-type", "application/json").body(body.to_vec()),
            None => call,
        }
    };
    let some = uuid::Uuid::now_v7();
    let braced = some.braced().to_string().replace('{', "%7B").replace('}', "%7D");
    let simple = some.simple().to_string();
    for bad in ["7", "not-a-uuid", "%00", "%ff", "00000000-0000-0000-0000-00000000000g", &braced, &simple] {
        world.send(call(bad)).await.assert_problem(400, "invalid_request");
    }
    if takes(operation, "operator") {
        let other = is_of_operation(operation) || is_of_rollout(operation);
        let code = if other { "not_found" } else { "machine_not_found" };
        world.send(call(&some.to_string())).await.assert_problem(404, code);
    }
}

/// A separate server, which the test may kill.
async fn own_database() -> PgServer {
    let binaries = tokio::task::spawn_blocking(|| PgBinaries::locate_or_fetch(&kit::fetch::target_dir()));
    let server = PgServer::start(&binaries.await.unwrap().unwrap(), PgOptions::default()).await.unwrap();
    server.create_database("svc").await.unwrap();
    server
}

#[tokio::test(flavor = "multi_thread")]
async fn database_outage_is_reported_by_every_route_that_needs_it() {
    let server = own_database().await;
    let world = World::start(&[("PLATFORM_DATABASE_URL", &server.url("svc"))]).await;
    server.kill9().await.unwrap();
    without_database(&world).await;
}

async fn without_database(world: &World) {
    for operation in operations() {
        let response = world.send(valid_call(world, operation)).await;
        let needs = operation.codes().iter().any(|code| code.as_str() == "database_unavailable");
        match operation.id {
            // An operator's bundle download needs only the store.
            "getBundle" => assert_eq!(response.status, 200),
            // The platform's secret needs no database, nor do the metrics of this process.
            "metrics" => assert_eq!(response.status, 200),
            // Neither does its identity; a named operator is looked up in the database.
            "whoAmI" => assert_eq!(response.status, 200),
            // The last loaded routes are still served.
            "ready" => assert_eq!(response.status, 200),
            "readyToControl" => assert_eq!(response.status, 503),
            _ if needs => response.assert_problem(503, "database_unavailable"),
            _ => assert_eq!(response.status, 200, "{response:?}"),
        }
    }
    for id in ["metrics", "whoAmI"] {
        let operation = operations().find(|operation| operation.id == id).unwrap();
        let (_, token) = world.operators.iter().find(|(scope, _)| *scope == Scope::Metrics).unwrap();
        let call = world.bare(operation, Method::GET, operation.path).bearer_auth(token);
        world.send(call).await.assert_problem(503, "database_unavailable");
    }
    // A host's credential is looked up in the database.
    let bundle = operations().find(|operation| operation.id == "getBundle").unwrap();
    let by_host = world.bare(bundle, Method::GET, &world.path(bundle)).bearer_auth(world.token("host"));
    world.send(by_host).await.assert_problem(503, "database_unavailable");
}

#[tokio::test(flavor = "multi_thread")]
async fn store_outage_is_reported_by_every_route_that_needs_it() {
    let world = World::start(&[]).await;
    world.stack.store.down();
    without_store(&world).await;
}

async fn without_store(world: &World) {
    world.stack.subscribe(&world.process, "user_3").await;
    let mut tried = 0;
    for operation in operations() {
        if !operation.codes().iter().any(|code| code.as_str() == "store_unavailable") {
            continue;
        }
        let request = match operation.id {
            "provision" | "quoteProvision" => {
                let body = json!({"idpUserId": "user_3", "handle": "third"});
                world.known(operation, operation.path).json(&body)
            }
            _ => valid_call(world, operation),
        };
        world.send(request).await.assert_problem(503, "store_unavailable");
        tried += 1;
    }
    assert!(tried >= 5, "{tried}");
}

#[tokio::test(flavor = "multi_thread")]
async fn valid_call_of_every_route_matches_its_description() {
    let world = World::start(&[]).await;
    // Operations that end a machine come last.
    let mut all: Vec<&Operation> = operations().collect();
    all.sort_by_key(|operation| match operation.id {
        // Only one rollout can be open, so the first is aborted before.
        "deploy" => 1,
        "reportBootFailure" | "resize" => 2,
        "recover" | "power" | "fail" => 3,
        "delete" => 4,
        _ => 0,
    });
    for operation in all {
        let response = world.send(valid_call(&world, operation)).await;
        // The host of the record does not respond, and the machine has no snapshot.
        let refused = match operation.id {
            "backUp" | "drill" | "getUsage" => Some((502, "host_unreachable")),
            // No snapshot is held back.
            "acceptBackup" => Some((409, "invalid_state")),
            "recover" | "rebuildPointer" | "continueOperation" => Some((409, "snapshot_unusable")),
            // No server is missing.
            "releaseAlarm" => Some((404, "not_found")),
            // By then the waiting machine has registered.
            "reportBootFailure" => Some((409, "invalid_state")),
            // No operation waits, and nothing is deleted or kept: see platform::{last_backup, undelete,
            // kept_servers}.
            // The machine is being resized.
            "power" => Some((409, "invalid_state")),
            "abandonOperation" | "undelete" | "discard" => Some((409, "invalid_state")),
            _ => None,
        };
        match refused {
            Some((status, code)) => response.assert_problem(status, code),
            None => assert!(response.status < 300, "{}: {response:?}", operation.id),
        }
    }
}
