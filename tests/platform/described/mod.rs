//! The description against the code: every route is called in every wrong way that it has, and answers as it says.
//!
//! The rows are the routes' own descriptions: a new route is tried without a line here.

use std::collections::BTreeSet;

use kit::pg::{PgBinaries, PgOptions, PgServer};
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};
use svc::http::openapi::{Operation, Place};
use svc::platform::api::{ENDPOINTS, description};

use super::stack::{Answer, Guest, Process, SECRET, Stack};

/// What no answer may hold: our secrets, and words of what lies behind the API.
const INTERNAL: [&str; 14] = [
    SECRET,
    "svcu_",
    "svcr_",
    "postgres",
    "SELECT ",
    "INSERT ",
    "/tmp/",
    "127.0.0.1",
    "src/",
    "panicked",
    "reqwest",
    "hyper",
    "connection refused",
    "simulator",
];

/// A platform with a machine that runs and one that waits for its registration.
struct World {
    stack: Stack,
    process: Process,
    runs: Guest,
    waits: Guest,
    operation: String,
}

impl World {
    async fn start(more: &[(&str, &str)]) -> Self {
        let stack = Stack::start().await;
        let process = stack.platform_with(more);
        let runs = stack.running(&process, "user_1").await;
        let made = stack.provision(&process, "user_2").await;
        let waits = stack.guest(&process, made["machineId"].as_str().unwrap()).await;
        let operation = made["operationId"].as_str().unwrap().to_owned();
        Self { stack, process, runs, waits, operation }
    }

    /// The machine that an operation's caller would name.
    fn guest(&self, operation: &Operation) -> &Guest {
        if takes(operation, "registration") { &self.waits } else { &self.runs }
    }

    fn path(&self, operation: &Operation, id: Option<&str>) -> String {
        let own =
            if operation.id == "getOperation" { &self.operation } else { &self.guest(operation).machine };
        let path = operation.path.replace("{id}", id.unwrap_or(own));
        path.replace("{version}", "v1").replace("{file}", "svc-host-bundle.tar.gz")
    }

    fn token(&self, credential: &str) -> &str {
        match credential {
            "operator" => SECRET,
            "host" => &self.runs.upgrade_token,
            "registration" => &self.waits.registration_token,
            other => panic!("no token for {other}"),
        }
    }

    /// A call that is right up to its body.
    fn call(&self, operation: &Operation, id: Option<&str>) -> RequestBuilder {
        self.authorised(operation, &self.path(operation, id))
    }

    fn call_with(&self, operation: &Operation, query: &str) -> RequestBuilder {
        self.authorised(operation, &format!("{}?{query}", self.path(operation, None)))
    }

    fn authorised(&self, operation: &Operation, path: &str) -> RequestBuilder {
        let request = self.stack.request(&self.process, operation.method.clone(), path);
        match operation.credentials.first() {
            Some(credential) => request.bearer_auth(self.token(credential.name)),
            None => request,
        }
    }

    /// A call that is right.
    fn right(&self, operation: &Operation, id: Option<&str>) -> RequestBuilder {
        match operation.body {
            Some(body) => self.call(operation, id).json(&self.sample(operation, &body())),
            None => self.call(operation, id),
        }
    }

    fn sample(&self, operation: &Operation, schema: &Value) -> Value {
        let guest = self.guest(operation);
        let required = schema["required"].as_array().into_iter().flatten();
        let sample = |name: &str, of: &Value| match name {
            "idpUserId" => json!("user_1"),
            "handle" => json!("h-user-1"),
            "machineId" => json!(guest.machine),
            "serverType" => json!("cpx32"),
            "plan" => json!("max"),
            "bundleSha256" | "tlsSpkiSha256" => json!("ab".repeat(32)),
            _ if of["enum"].is_array() => of["enum"][0].clone(),
            _ if of["type"] == "object" => self.sample(operation, of),
            _ if of["type"] == "integer" => json!(1),
            _ => json!("v1"),
        };
        let member = |name: &Value| {
            let name = name.as_str().unwrap();
            (name.to_owned(), sample(name, &schema["properties"][name]))
        };
        required.map(member).collect::<serde_json::Map<_, _>>().into()
    }

    async fn send(&self, operation: &Operation, request: RequestBuilder) -> Answer {
        let answer = self.stack.send(request).await;
        look(operation, &answer);
        answer
    }
}

fn takes(operation: &Operation, credential: &str) -> bool {
    operation.credentials.iter().any(|one| one.name == credential)
}

fn operations() -> impl Iterator<Item = &'static Operation> {
    ENDPOINTS.iter().map(|endpoint| &endpoint.operation)
}

/// Any answer: one that the description has, and nothing internal in it.
#[track_caller]
fn look(operation: &Operation, answer: &Answer) {
    let id = operation.id;
    let known = operation.answers.iter().any(|known| known.status == answer.status);
    if !known {
        let code = answer.body["code"].as_str().unwrap_or_else(|| panic!("{id}: {answer:?}"));
        let codes: Vec<&str> = operation.codes().iter().map(|code| code.as_str()).collect();
        assert!(codes.contains(&code), "{id} answers {code}, which its description does not have: {codes:?}");
        answer.assert_problem(answer.status, code);
        assert_eq!(answer.headers["cache-control"], "no-store", "{id}");
        assert_eq!(answer.headers.contains_key("www-authenticate"), answer.status == 401, "{id}");
        if answer.status == 503 && code != "disabled" {
            assert!(answer.headers.contains_key("retry-after"), "{id}: {answer:?}");
        }
        for word in INTERNAL {
            assert!(
                !answer.text.to_lowercase().contains(&word.to_lowercase()),
                "{id} tells {word:?}: {answer:?}"
            );
        }
    }
}

fn pointers(answer: &Answer) -> BTreeSet<String> {
    let errors = answer.body["errors"].as_array().cloned().unwrap_or_default();
    errors.iter().map(|error| error["pointer"].as_str().unwrap().to_owned()).collect()
}

fn names(list: &Value) -> BTreeSet<String> {
    list.as_array().into_iter().flatten().map(|name| name.as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_document_is_served_and_whole() {
    let stack = Stack::start().await;
    let process = stack.platform();
    let served = stack.send(stack.request(&process, Method::GET, "/openapi.json")).await;
    assert_eq!((served.status, &served.body), (200, &description()));
    let document = &served.body;
    assert_eq!(document["openapi"], "3.1.0");
    let ids: BTreeSet<&str> = operations().map(|operation| operation.id).collect();
    assert_eq!(ids.len(), ENDPOINTS.len(), "each operation has an id of its own");
    for operation in operations() {
        let place = operation.parameters.iter().filter(|parameter| parameter.place == Place::Path);
        let said: BTreeSet<&str> = place.map(|parameter| parameter.name).collect();
        let parts = operation.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
        assert_eq!(parts.collect::<BTreeSet<_>>(), said, "{}", operation.id);
    }
    let text = document.to_string();
    for reference in text.split("\"$ref\":\"#/components/schemas/").skip(1) {
        let name = reference.split('"').next().unwrap();
        assert!(document["components"]["schemas"][name].is_object(), "{name} is not in the document");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_refuses_what_is_wrong_and_in_order() {
    let world = World::start(&[]).await;
    for operation in operations() {
        methods_and_sizes(&world, operation).await;
        credentials(&world, operation).await;
        ids(&world, operation).await;
        bodies(&world, operation).await;
        queries(&world, operation).await;
    }
}

async fn methods_and_sizes(world: &World, operation: &Operation) {
    let path = world.path(operation, None);
    let patch = world.stack.request(&world.process, Method::PATCH, &path).body("x".repeat(70_000));
    let answer = world.send(operation, patch).await;
    answer.assert_problem(405, "method_not_allowed");
    let allow = answer.headers["allow"].to_str().unwrap();
    assert!(allow.split(',').any(|method| method.trim() == operation.method.as_str()), "{path}: {allow}");
    if operation.credentials.is_empty() {
        return;
    }
    let large = world.stack.request(&world.process, operation.method.clone(), &path).body("x".repeat(70_000));
    world.send(operation, large).await.assert_problem(413, "request_too_large");
}

async fn credentials(world: &World, operation: &Operation) {
    if operation.credentials.is_empty() {
        assert_ne!(world.send(operation, world.right(operation, None)).await.status, 401);
        return;
    }
    let path = world.path(operation, None);
    let bare = || world.stack.request(&world.process, operation.method.clone(), &path).body("{");
    let code = if takes(operation, "registration") { "registration_rejected" } else { "unauthorized" };
    world.send(operation, bare()).await.assert_problem(401, code);
    let mut wrong = vec!["wrong", "svcu_wrong", "a b", ""];
    wrong.extend(
        ["operator", "host", "registration"]
            .into_iter()
            .filter(|name| !takes(operation, name))
            .map(|name| world.token(name)),
    );
    for token in wrong {
        let answer = world.send(operation, bare().bearer_auth(token)).await;
        answer.assert_problem(401, code);
    }
    world.send(operation, bare().header("authorization", "Basic b3A6eA==")).await.assert_problem(401, code);
    if takes(operation, "host") && operation.path.contains("{id}") {
        let others = world.path(operation, Some(&world.waits.machine));
        let request = world.stack.request(&world.process, operation.method.clone(), &others);
        world
            .send(operation, request.bearer_auth(world.token("host")).json(&json!({})))
            .await
            .assert_problem(403, "forbidden");
    }
}

async fn ids(world: &World, operation: &Operation) {
    if !operation.path.contains("{id}") {
        return;
    }
    for bad in ["7", "not-a-uuid", "%00", "00000000-0000-0000-0000-00000000000g"] {
        let answer = world.send(operation, world.right(operation, Some(bad))).await;
        answer.assert_problem(400, "invalid_request");
    }
    if takes(operation, "operator") {
        let unknown = uuid::Uuid::now_v7().to_string();
        let answer = world.send(operation, world.right(operation, Some(&unknown))).await;
        let code = if operation.id == "getOperation" { "not_found" } else { "machine_not_found" };
        answer.assert_problem(404, code);
    }
}

async fn bodies(world: &World, operation: &Operation) {
    let Some(schema) = operation.body.map(|body| body()) else { return };
    let call = || world.call(operation, None);
    world.send(operation, call().body("{}")).await.assert_problem(415, "unsupported_media_type");
    let json_call = |body: &str| call().header("content-type", "application/json").body(body.to_owned());
    for bad in ["{", "", "[]", "7", "null", "{\"a\":1}{", "\u{feff}{}"] {
        world.send(operation, json_call(bad)).await.assert_problem(400, "invalid_request");
    }
    // Nothing, then each member of a wrong type beside one that is none.
    let required: BTreeSet<String> =
        names(&schema["required"]).iter().map(|name| format!("/{name}")).collect();
    if !required.is_empty() {
        let answer = world.send(operation, json_call("{}")).await;
        answer.assert_problem(400, "invalid_request");
        let missing: BTreeSet<String> =
            pointers(&answer).iter().map(|at| at.split('/').take(2).collect::<Vec<_>>().join("/")).collect();
        assert_eq!(missing, required, "{}", operation.id);
    }
    let properties = schema["properties"].as_object().unwrap();
    let mut body: serde_json::Map<String, Value> = properties
        .iter()
        .map(|(name, of)| (name.clone(), if of["type"] == "integer" { json!("x") } else { json!(7.5) }))
        .collect();
    body.insert("zz".to_owned(), json!(1));
    let answer = world.send(operation, call().json(&body)).await;
    answer.assert_problem(400, "invalid_request");
    let mut every: BTreeSet<String> = properties.keys().map(|name| format!("/{name}")).collect();
    every.insert("/zz".to_owned());
    assert_eq!(pointers(&answer), every, "{}", operation.id);
    takes_what_it_says(operation, &answer, "/zz", properties.keys());
}

/// The refusal of an unknown field names the known ones: they are the description's.
#[track_caller]
fn takes_what_it_says<'n>(
    operation: &Operation,
    answer: &Answer,
    at: &str,
    said: impl Iterator<Item = &'n String>,
) {
    let errors = answer.body["errors"].as_array().unwrap();
    let error = errors.iter().find(|error| error["pointer"] == at).unwrap();
    let known = error["detail"].as_str().unwrap().split_once("it takes ").map_or("", |(_, known)| known);
    let known: BTreeSet<&str> = known.split(", ").filter(|name| !name.is_empty()).collect();
    assert_eq!(known, said.map(String::as_str).collect::<BTreeSet<_>>(), "{}", operation.id);
}

async fn queries(world: &World, operation: &Operation) {
    let query = operation.parameters.iter().filter(|parameter| parameter.place == Place::Query);
    let said: Vec<String> = query.map(|parameter| parameter.name.to_owned()).collect();
    if said.is_empty() {
        return;
    }
    let answer = world.send(operation, world.call_with(operation, "zz=1")).await;
    answer.assert_problem(400, "invalid_request");
    takes_what_it_says(operation, &answer, "?zz", said.iter());
    let twice = said[0].as_str();
    let answer = world.send(operation, world.call_with(operation, &format!("{twice}=1&{twice}=1"))).await;
    answer.assert_problem(400, "invalid_request");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_its_database_every_route_that_needs_it_says_so() {
    let binaries = tokio::task::spawn_blocking(|| PgBinaries::locate_or_fetch(&kit::fetch::target_dir()));
    let server = PgServer::start(&binaries.await.unwrap().unwrap(), PgOptions::default()).await.unwrap();
    server.create_database("svc").await.unwrap();
    let world = World::start(&[("PLATFORM_DATABASE_URL", &server.url("svc"))]).await;
    server.kill9().await.unwrap();
    for operation in operations() {
        let answer = world.send(operation, world.right(operation, None)).await;
        let needs = operation.codes().iter().any(|code| code.as_str() == "database_unavailable");
        match operation.id {
            // An operator's bundle needs the store alone.
            "getBundle" => assert_eq!(answer.status, 200),
            "ready" => assert_eq!(answer.status, 503),
            _ if needs => answer.assert_problem(503, "database_unavailable"),
            _ => assert_eq!(answer.status, 200, "{answer:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_its_store_every_route_that_needs_it_says_so() {
    let world = World::start(&[]).await;
    world.stack.subscribe(&world.process, "user_3").await;
    world.stack.store.down();
    let mut tried = 0;
    for operation in operations() {
        if !operation.codes().iter().any(|code| code.as_str() == "store_unavailable") {
            continue;
        }
        let request = match operation.id {
            "provision" => {
                world.call(operation, None).json(&json!({"idpUserId": "user_3", "handle": "third"}))
            }
            _ => world.right(operation, None),
        };
        world.send(operation, request).await.assert_problem(503, "store_unavailable");
        tried += 1;
    }
    assert!(tried >= 5, "{tried}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_right_call_of_every_route_is_answered_as_described() {
    let world = World::start(&[]).await;
    // Those that end a machine come last.
    let mut all: Vec<&Operation> = operations().collect();
    all.sort_by_key(|operation| match operation.id {
        "reportBootFailure" | "resize" => 1,
        "recover" | "fail" => 2,
        "delete" => 3,
        _ => 0,
    });
    for operation in all {
        let answer = world.send(operation, world.right(operation, None)).await;
        // The host of a record does not answer, and it has no snapshot.
        let refused = match operation.id {
            "backUp" => Some((502, "host_unreachable")),
            "recover" => Some((409, "snapshot_unusable")),
            // The machine that waited has registered by then.
            "reportBootFailure" => Some((409, "invalid_state")),
            _ => None,
        };
        match refused {
            Some((status, code)) => answer.assert_problem(status, code),
            None => assert!(answer.status < 300, "{}: {answer:?}", operation.id),
        }
    }
}
