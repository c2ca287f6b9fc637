//! Tests the gateway against its OpenAPI document: sends each kind of invalid request to every route, and triggers
//! every documented error code.

mod dispatches;
mod files;

use std::path::PathBuf;

use kit::idp::{Idp, MintOptions};
use kit::pg::{PgBinaries, PgOptions, PgServer, test_database};
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};
use svc::gateway::{endpoints, openapi_document};
use svc::http::openapi::Operation;
use svc::http::proof::{Claims, Route};
use svc::machine::id::MachineId;

use super::host::{Host, Machine, USER, signer, unique_name};
use crate::contract::{
    self, ApiUnderTest, CheckedResponse, Contract, WrongCredential, assert_rejects_invalid_requests,
    valid_body, valid_call, variants,
};
use crate::files::history::HistoryFixture;

const ADMIN_TOKEN: &str = "admin-s3cret-0123456789-0123456789";
const UNREACHABLE_DATABASE: &str = "postgres://postgres:hunter2-s3cret@127.0.0.1:1/svc";
const EXAMPLE_ID: &str = "0192d1f0-0000-7000-8000-000000000000";

/// Error codes that no request here can trigger, with their operations (`*` for all).
const UNREACHABLE_CODES: [(&str, &str); 2] = [
    // An internal error that no request can cause.
    ("*", "internal"),
    // Returned only by a machine that has never saved files and therefore has no repository.
    ("listFileVersions", "not_found"),
];

struct TestGateway {
    host: Host,
    slug: String,
    idp: Idp,
    /// The history service, which serves earlier versions of files.
    history: Option<HistoryFixture>,
}

impl TestGateway {
    async fn start(url: &str) -> Self {
        let (slug, idp) = (unique_name("notes"), Idp::start().unwrap());
        let mut machine = Machine::new(url).unwrap();
        machine.env.extend(idp.env());
        machine.env.insert("ADMIN_TOKEN".into(), ADMIN_TOKEN.into());
        machine.env.insert("BRIDGE_STATEMENT_TIMEOUT_MS".into(), "700".into());
        let columns = json!({ "title": "text", "size": "integer" });
        machine.add_app(&slug, &json!({ "notes": { "columns": columns, "unique": ["title"] } })).unwrap();
        machine.write(&format!("home/svc/home/apps/{slug}/dist/index.html"), "<h1>notes").unwrap();
        let host = machine.start().unwrap();
        for secret in [ADMIN_TOKEN, "hunter2-s3cret"] {
            contract::gateway().register_secret(secret);
        }
        let gateway = Self { host, slug, idp, history: None };
        // Creates a dispatch, which fails because there is no runner. The paths contain its id.
        let dispatched = gateway.dispatch(&json!({ "id": EXAMPLE_ID, "prompt": "do it" })).await;
        assert_eq!(dispatched.status, 202, "{dispatched:?}");
        gateway
    }

    async fn with_app(url: &str) -> Self {
        let mut gateway = Self::start(url).await;
        gateway.host.wait_until_registered(&gateway.slug).await.unwrap();
        files::write_key(&gateway.host.machine);
        let history = HistoryFixture::start().await.unwrap();
        let socket = gateway.history_socket();
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(history.socket(), &socket).unwrap();
        gateway.history = Some(history);
        gateway
    }

    fn history_socket(&self) -> PathBuf {
        self.host.machine.path("run/svc/files/history.sock")
    }

    async fn send(&self, request: RequestBuilder) -> CheckedResponse {
        contract::gateway().send(request).await.unwrap()
    }

    fn path_of(&self, operation: &Operation, slug: &str) -> String {
        operation.path.replace("{slug}", slug).replace("{*path}", "index.html").replace("{id}", EXAMPLE_ID)
    }

    /// Returns the claims of the proof that the platform signs for this kind of caller.
    fn claims(&self, credential: &str, method: &Method, path: &str) -> Claims {
        let route = match credential {
            "app" => Route::App,
            "platform" => Route::Internal,
            _ => Route::Shell,
        };
        let mut claims = self.host.machine.claims(route);
        claims.app = (credential == "app").then(|| self.slug.clone());
        if credential == "platform" {
            claims.method = Some(method.to_string());
            claims.path = Some(path.split('?').next().unwrap().to_owned());
            claims.jti = Some(uuid::Uuid::now_v7().to_string());
        }
        claims
    }

    /// Writes the state of a nonexistent side database, which no request here queries, and removes any pending request.
    fn write_side_state(&self, status: &str) {
        let machine = &self.host.machine;
        let state = json!({ "version": 1, "status": status, "updatedAt": "2026-01-02T03:04:05.678Z", "requestId": "r",
            "key": "system/db/snapshots/x.dump", "tables": [{ "name": "app_notes.notes", "rows": 3 }] });
        machine.write("var/lib/svc/side.json", &state.to_string()).unwrap();
        std::fs::remove_file(machine.path("var/lib/svc/requests/side")).ok();
    }

    fn request_as(&self, credential: &str, method: &Method, path: &str) -> RequestBuilder {
        if path.starts_with("/api/side-database") {
            self.write_side_state("open");
        }
        if path.starts_with("/api/files/restore") {
            std::fs::remove_file(self.host.machine.path("var/lib/svc/requests/files-restore")).ok();
        }
        let proof = self.host.machine.signer.sign(&self.claims(credential, method, path));
        let request = self.host.unsigned_request(method.clone(), path).header("x-svc-proof", proof);
        if credential == "admin" { request.bearer_auth(ADMIN_TOKEN) } else { request }
    }

    async fn dispatch(&self, body: &Value) -> CheckedResponse {
        let request =
            self.request_as("owner", &Method::POST, "/api/dispatch").header("accept", "application/json");
        self.send(request.json(body)).await
    }

    fn query(&self, body: &Value) -> RequestBuilder {
        self.request_as("owner", &Method::POST, "/api/bridge/query").json(body)
    }
}

impl ApiUnderTest for TestGateway {
    const SCHEMA_IS_COMPLETE: bool = false;

    fn contract(&self) -> &'static Contract {
        contract::gateway()
    }

    fn path(&self, operation: &Operation) -> String {
        self.path_of(operation, &self.slug)
    }

    fn max_body_bytes(&self, operation: &Operation) -> usize {
        match operation.id {
            "query" => 1024 * 1024,
            "dispatch" => 2 * 1024 * 1024,
            _ => 64 * 1024,
        }
    }

    fn request_without_credentials(&self, _: &Operation, method: Method, path: &str) -> RequestBuilder {
        self.host.unsigned_request(method, path)
    }

    fn authorized_request(&self, operation: &Operation, path: &str) -> RequestBuilder {
        match operation.credentials.first() {
            Some(credential) => self.request_as(credential.name, &operation.method, path),
            None => self.host.unsigned_request(operation.method.clone(), path),
        }
    }

    fn wrong_credentials(&self, operation: &Operation) -> Vec<WrongCredential> {
        let (path, method) = (self.path(operation), &operation.method);
        let accepted = operation.credentials[0].name;
        let unauthorized = |description, request| WrongCredential {
            description,
            request,
            status: 401,
            code: "unauthorized",
        };
        let forbidden =
            |description, request| WrongCredential { description, request, status: 403, code: "forbidden" };
        let bare = || self.host.unsigned_request(method.clone(), &path);
        let signed = |change: fn(&mut Claims)| {
            let mut claims = self.claims(accepted, method, &path);
            change(&mut claims);
            bare().header("x-svc-proof", self.host.machine.signer.sign(&claims))
        };
        let forged = signer("k1").sign(&self.claims(accepted, method, &path));
        let mut all = vec![
            unauthorized("no credentials", bare()),
            unauthorized("a malformed proof", bare().header("x-svc-proof", "a.b.c")),
            unauthorized("a forged proof", bare().header("x-svc-proof", forged)),
            unauthorized("another machine's proof", signed(|claims| claims.aud = MachineId::new())),
            unauthorized(
                "an expired proof",
                signed(|claims| (claims.iat, claims.exp) = (claims.iat - 300, claims.exp - 300)),
            ),
            unauthorized("an invalid token", bare().bearer_auth("svcu_wrong")),
            unauthorized("a different scheme", bare().header("authorization", "Basic b3A6eA==")),
            unauthorized("only the admin's token", bare().bearer_auth(ADMIN_TOKEN)),
            unauthorized(
                "an invalid token with a valid proof",
                self.authorized_request(operation, &path).bearer_auth("x.y.z"),
            ),
            forbidden("another user's proof", signed(|claims| claims.sub = "user_other".parse().unwrap())),
        ];
        let jwt = |sub: &str| bare().bearer_auth(self.idp.mint(sub, &MintOptions::default()));
        all.push(forbidden("another user's token", jwt("user_other")));
        for caller in ["owner", "app", "admin", "platform"] {
            if !operation.credentials.iter().any(|credential| credential.name == caller) {
                all.push(forbidden(caller, self.request_as(caller, method, &path)));
            }
        }
        if accepted == "platform" {
            all.push(forbidden(
                "the platform's proof for another path",
                signed(|claims| claims.path = Some("/x".into())),
            ));
        }
        all
    }

    fn override_value(&self, operation: &Operation, name: &str) -> Option<Value> {
        Some(match name {
            // A new id each time, because a repeated id refers to the earlier dispatch.
            "id" if operation.id == "dispatch" => json!(uuid::Uuid::now_v7()),
            "operationId" => json!(EXAMPLE_ID),
            "agentName" => json!("claude"),
            "batch" => json!([{ "prompt": "do it" }, { "prompt": "do it", "agentName": "claude" }]),
            "app" => json!(self.slug),
            "table" => json!("notes"),
            "data" => json!({ "title": uuid::Uuid::now_v7() }),
            "rows" => json!([{ "title": uuid::Uuid::now_v7() }, { "title": uuid::Uuid::now_v7() }]),
            "onConflict" => json!(["title"]),
            "filter" => json!({ "title": { "ne": "zz" } }),
            "columns" => json!(["id", "title"]),
            "orderBy" => json!(["title", { "column": "id", "direction": "desc" }]),
            "id" => json!(EXAMPLE_ID),
            "maxAffected" => json!(5),
            "operations" => json!([{ "action": "count", "table": "notes" }]),
            "tables" => json!(["app_notes.notes"]),
            "path" => json!("projects/plan.md"),
            "time" => json!("2036-01-02T03:04:05Z"),
            "timeZone" => json!("Europe/Berlin"),
            "startDate" => json!("2026-01-02"),
            "endDate" => json!("2026-02-01"),
            // No cursor is valid without an earlier page. A snapshot is selected by a key or by a time, not by both.
            "after" | "cursor" | "key" => Value::Null,
            _ => return None,
        })
    }
}

fn operations() -> impl Iterator<Item = &'static Operation> {
    endpoints().map(|endpoint| &endpoint.operation)
}

fn operation_named(id: &str) -> &'static Operation {
    operations().find(|operation| operation.id == id).unwrap()
}

async fn start_database() -> PgServer {
    let binaries = tokio::task::spawn_blocking(|| PgBinaries::locate_or_fetch(&kit::fetch::target_dir()));
    let server = PgServer::start(&binaries.await.unwrap().unwrap(), PgOptions::default()).await.unwrap();
    server.create_database("svc").await.unwrap();
    server
}

#[tokio::test(flavor = "multi_thread")]
async fn document_is_complete_and_served_to_permitted_callers() {
    let gateway = TestGateway::start(UNREACHABLE_DATABASE).await;
    contract::assert_document_is_valid(contract::gateway());
    for caller in ["owner", "app", "admin"] {
        let document =
            gateway.send(gateway.request_as(caller, &Method::GET, "/api/bridge/openapi.json")).await;
        assert_eq!((document.status, &document.body), (200, &openapi_document()), "{caller}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_responds_to_valid_request_as_described() {
    let database = test_database().await.unwrap();
    let gateway = TestGateway::with_app(&database.url()).await;
    let line = json!({ "timestamp": "2026-01-02T03:04:05.678Z", "status": "error", "stage": "dump", "key": null,
        "sizeBytes": null, "sha256": null, "durationMs": 5, "error": "x" });
    gateway.host.machine.write("home/svc/home/system/logs/backup.jsonl", &format!("{line}\n")).unwrap();
    for operation in operations().filter(|operation| operation.id != "query") {
        let response = gateway.send(valid_call(&gateway, operation)).await;
        assert!(response.status < 400, "{}: {response:?}", operation.id);
    }
    let row =
        json!({ "action": "insert", "app": gateway.slug, "table": "notes", "data": { "id": EXAMPLE_ID } });
    assert_eq!(gateway.send(gateway.query(&row)).await.status, 201);
    for schema in variants(&operation_named("query").body.unwrap()()) {
        let body = valid_body(&gateway, operation_named("query"), &schema);
        let response = gateway.send(gateway.query(&body)).await;
        assert!(response.status < 300, "{body}: {response:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_documented_error_code_is_triggered() {
    let database = start_database().await;
    let gateway = TestGateway::with_app(&database.url("svc")).await;
    for operation in operations() {
        assert_rejects_invalid_requests(&gateway, operation).await;
    }
    check_writers(&gateway).await;
    check_names(&gateway).await;
    dispatches::check_dispatches(&gateway).await;
    check_stored_state(&gateway, &database).await;
    files::check_files(&gateway).await;
    check_unverifiable_token(&gateway).await;
    database.kill9().await.unwrap();
    check_without_database(&gateway, &["listSchemas"]).await;
    let unconnected = TestGateway::start(UNREACHABLE_DATABASE).await;
    check_without_database(&unconnected, &[]).await;
    let all: Vec<&'static Operation> = operations().collect();
    let untriggered = contract::gateway().list_untriggered_codes(&all, &UNREACHABLE_CODES, &[]);
    assert!(untriggered.is_empty(), "{untriggered:#?}");
}

/// Checks that an operation cannot resume the writers that another operation has stopped.
async fn check_writers(gateway: &TestGateway) {
    let post = |path: &str, operation: &str| {
        gateway.request_as("platform", &Method::POST, path).json(&json!({ "operationId": operation }))
    };
    let (quiesce, resume) = ("/_svc/internal/quiesce", "/_svc/internal/resume");
    assert_eq!(gateway.send(post(quiesce, EXAMPLE_ID)).await.status, 200);
    let another = uuid::Uuid::now_v7().to_string();
    gateway.send(post(resume, &another)).await.assert_problem(409, "invalid_state");
    assert_eq!(gateway.send(post(resume, EXAMPLE_ID)).await.status, 200);
}

/// Checks paths that contain unknown or malformed names.
async fn check_names(gateway: &TestGateway) {
    for operation in operations().filter(|operation| operation.path.contains("{slug}")) {
        let request = |slug: &str| gateway.authorized_request(operation, &gateway.path_of(operation, slug));
        gateway.send(request("%ff")).await.assert_problem(400, "invalid_request");
        gateway.send(request("%zz")).await.assert_problem(400, "invalid_request");
        if operation.id == "getIcon" {
            let response = gateway.send(request("unknown")).await;
            assert_eq!(response.status, 200, "an icon must be generated for any name");
            continue;
        }
        for slug in ["unknown", "..%2f..", "%00", "NOTES"] {
            gateway.send(request(slug)).await.assert_problem(404, "not_found");
        }
        let other_app = gateway.request_as("app", &Method::GET, &gateway.path_of(operation, "another"));
        gateway.send(other_app).await.assert_problem(403, "forbidden");
    }
    for path in ["/api", "/api/x", "/api/bridge/query/x", "/_svc/internal/other"] {
        let response = gateway.send(gateway.host.unsigned_request(Method::GET, path)).await;
        response.assert_problem(401, "unauthorized");
    }
}

/// Checks error responses that depend on stored state.
async fn check_stored_state(gateway: &TestGateway, database: &PgServer) {
    let body = |action: &str, fields: Value| {
        let mut body = json!({ "action": action, "app": gateway.slug, "table": "notes" });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        body
    };
    let insert = body("insert", json!({ "data": { "title": "a-s3cret-value" } }));
    contract::gateway().register_secret("a-s3cret-value");
    gateway.send(gateway.query(&insert)).await;
    gateway.send(gateway.query(&insert)).await.assert_problem(409, "conflict");
    let quota = json!({ "storage": { "appBytes": 1 } }).to_string();
    gateway.host.machine.write("home/svc/home/system/config.json", &quota).unwrap();
    // Write admission uses settings that are up to one second old.
    tokio::time::sleep(std::time::Duration::from_millis(1100)).await;
    let by_app = gateway.request_as("app", &Method::POST, "/api/bridge/query");
    gateway.send(by_app.json(&insert)).await.assert_problem(507, "storage_quota_reached");
    for (body, status, code) in [
        (body("get", json!({ "id": uuid::Uuid::now_v7() })), 404, "not_found"),
        (body("find", json!({ "app": "unknown" })), 404, "not_found"),
        (body("find", json!({ "table": "pg_class" })), 404, "not_found"),
        (json!({ "action": "schemas", "app": "unknown" }), 404, "not_found"),
        (body("find", json!({ "filter": { "passwd": "a-s3cret-value" } })), 400, "invalid_request"),
        (body("insert", json!({ "data": { "size": "a-s3cret-value" } })), 400, "invalid_request"),
    ] {
        gateway.send(gateway.query(&body)).await.assert_problem(status, code);
    }
    let path = "/api/bridge/query";
    let foreign = body("find", json!({ "app": "another" }));
    let foreign = gateway.request_as("app", &Method::POST, path).json(&foreign);
    gateway.send(foreign).await.assert_problem(403, "forbidden");
    let mut unknown = gateway.claims("app", &Method::GET, path);
    unknown.app = Some("unknown".into());
    let unknown = gateway.host.machine.signer.sign(&unknown);
    let unknown =
        || gateway.host.unsigned_request(Method::GET, "/api/bridge/schemas").header("x-svc-proof", &unknown);
    gateway.send(unknown()).await.assert_problem(403, "forbidden");
    // The app is now installed, but cannot be registered.
    gateway.host.machine.write("home/svc/home/apps/unknown/svc.json", "{").unwrap();
    let is_listed = async || Ok(gateway.host.get("/api/apps").await?.1.to_string().contains("unknown"));
    gateway.host.wait_until("the broken app is listed", is_listed).await.unwrap();
    gateway.send(unknown()).await.assert_problem(404, "not_found");
    let schema = format!("app_{}", gateway.slug.replace('-', "_"));
    let mut admin = database.connect("svc").await.unwrap();
    let lock = admin.transaction().await.unwrap();
    lock.batch_execute(&format!("LOCK TABLE {schema}.notes IN ACCESS EXCLUSIVE MODE")).await.unwrap();
    gateway.send(gateway.query(&body("find", json!({})))).await.assert_problem(504, "deadline_exceeded");
    lock.rollback().await.unwrap();

    let open = || gateway.request_as("owner", &Method::POST, "/api/side-database").json(&json!({}));
    let copy = |table: &str| {
        let body = json!({ "tables": [table], "mode": "replace", "dryRun": true });
        gateway.request_as("owner", &Method::POST, "/api/side-database/copy").json(&body)
    };
    let close = || gateway.request_as("owner", &Method::DELETE, "/api/side-database");
    for second_request in [open(), copy("app_notes.notes"), close()] {
        gateway.write_side_state("open");
        assert_eq!(gateway.send(open()).await.status, 202);
        gateway.send(second_request).await.assert_problem(409, "invalid_state");
    }
    let side = gateway.host.unsigned_request(Method::GET, "/api/side-database");
    let proof = gateway.host.machine.signer.sign(&gateway.claims("owner", &Method::GET, "/"));
    let side = gateway.send(side.header("x-svc-proof", proof)).await;
    assert_eq!((&side.body["pending"]["action"], &side.body["status"]), (&"open".into(), &"open".into()));
    gateway.send(copy("app_notes.other")).await.assert_problem(404, "not_found");
    let both = json!({ "key": "system/db/snapshots/x.dump", "at": "2026-01-02T03:04:05Z" });
    let both = gateway.request_as("owner", &Method::POST, "/api/side-database").json(&both);
    gateway.send(both).await.assert_problem(400, "invalid_request");
    let copied = copy("app_notes.notes");
    gateway.write_side_state("closed");
    gateway.send(copied).await.assert_problem(409, "invalid_state");

    let changes = |app: &str| format!("/api/bridge/changes?app={app}");
    let listen = |caller: &str, app: &str| gateway.request_as(caller, &Method::GET, &changes(app));
    gateway.send(listen("owner", "unknown")).await.assert_problem(404, "not_found");
    gateway.send(listen("app", "another")).await.assert_problem(403, "forbidden");
    let after = |id: &str| listen("owner", &gateway.slug).header("last-event-id", id);
    gateway.send(after("7-1")).await.assert_problem(410, "gone");
    for bad in ["x", "1", "-", "1-x", "1-1-1", "99999999999999999999999-1"] {
        gateway.send(after(bad)).await.assert_problem(400, "invalid_request");
    }
    check_records(gateway).await;
}

/// Checks unknown cursors and event ids for records, invalid settings, and invalid usage queries.
async fn check_records(gateway: &TestGateway) {
    for log in ["interactions", "audit", "activity", "storage", "backups"] {
        let as_owner = |path: &str| gateway.request_as("owner", &Method::GET, path);
        gateway.send(as_owner(&format!("/api/{log}?cursor=1-1-1"))).await.assert_problem(410, "gone");
        let after = |id: &str| as_owner(&format!("/api/{log}/changes")).header("last-event-id", id);
        gateway.send(after("1-1-1")).await.assert_problem(410, "gone");
        gateway.send(after("1-1-1_2-2-2")).await.assert_problem(410, "gone");
        for bad in ["x", "1", "--", "01-1-1", "1-1", "1-1-1-1", "99999999999999999999999-1-1"] {
            gateway.send(after(bad)).await.assert_problem(400, "invalid_request");
            let paged = gateway.send(as_owner(&format!("/api/{log}?cursor={bad}"))).await;
            paged.assert_problem(400, "invalid_request");
        }
    }
    let config = "home/svc/home/system/config.json";
    gateway.host.machine.write(config, "[\"s3cret-config\"]").unwrap();
    contract::gateway().register_secret("s3cret-config");
    let set = gateway.request_as("owner", &Method::PUT, "/api/limits").json(&json!({ "daily": 1 }));
    gateway.send(set).await.assert_problem(409, "conflict");
    std::fs::remove_file(gateway.host.machine.path(config)).unwrap();
    for invalid_query in [
        "startDate=2026-13-01",
        "startDate=20260101",
        "groupBy=hour",
        "startDate=2026-02-02&endDate=2026-02-01",
    ] {
        let request = gateway.request_as("owner", &Method::GET, &format!("/api/usage?{invalid_query}"));
        gateway.send(request).await.assert_problem(400, "invalid_request");
    }
}

/// Checks a token whose issuer is unreachable.
async fn check_unverifiable_token(gateway: &TestGateway) {
    let idp = Idp::start().unwrap();
    let token = idp.mint(USER, &MintOptions::default());
    let mut machine = Machine::new(UNREACHABLE_DATABASE).unwrap();
    machine.env.extend(idp.env());
    idp.take_down();
    let host = machine.start().unwrap();
    for operation in operations().filter(|operation| !operation.credentials.is_empty()) {
        let request =
            host.unsigned_request(operation.method.clone(), &gateway.path(operation)).bearer_auth(&token);
        gateway.send(request).await.assert_problem(503, "unavailable");
    }
}

async fn check_without_database(gateway: &TestGateway, unaffected: &[&str]) {
    for operation in operations() {
        let response = gateway.send(valid_call(gateway, operation)).await;
        let needs_database = operation.codes().iter().any(|code| code.as_str() == "database_unavailable");
        match operation.id {
            "ready" => assert_eq!(response.status, 503),
            id if needs_database && !unaffected.contains(&id) => {
                response.assert_problem(503, "database_unavailable");
            }
            // These may fail for other reasons: the history service is not running, and there may be no backup key.
            id if files::HISTORY_OPERATIONS.contains(&id) || id == "showFileBackupKey" => {}
            id => assert!(response.status < 400, "{id}: {response:?}"),
        }
    }
}
