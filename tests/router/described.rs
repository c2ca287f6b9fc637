//! The router's own routes against their description: each is called in every wrong way that it has, and every code that
//! it names is provoked.

use anyhow::Result;
use http::{Method, StatusCode};
use kit::idp::{Flaw, MintOptions};
use reqwest::RequestBuilder;
use serde_json::{Value, json};
use svc::http::openapi::Operation;
use svc::platform::router::ROUTES;

use super::machine::TestMachine;
use super::world::{APP, CODE, World, read};
use crate::contract::{self, Contract, Reply, Side, WrongCredential, valid_call, assert_refuses_wrong_calls};

/// Of a code session's beginning, in the browser that began it.
const STATE: &str = "svc_code_state=s";

/// What no request provokes.
const EXCUSED: [(&str, &str); 1] = [
    // A fault of our own that no request leads to.
    ("*", "internal"),
];

/// A router with a user who has a running machine, a session, and an app's token.
struct Visited {
    world: World,
    _machine: TestMachine,
    session: String,
    app_token: String,
}

impl Visited {
    async fn start() -> Result<Self> {
        let (world, machine) = World::with_machine("user_1").await?;
        let cookie = format!("__session={}", world.token("user_1"));
        let page = world.get(APP, "/").header("accept", "text/html").header("cookie", cookie);
        let session = read(page).await.cookie("svc_session").expect("a session");
        let ask = world.post(APP, "/_svc/app-token").bearer_auth(world.token("user_1"));
        let minted = read(ask.json(&json!({ "app": "notes" }))).await.json();
        let app_token = minted["token"].as_str().expect("a token").to_owned();
        [&session, &app_token].into_iter().for_each(|secret| contract::platform().plant(secret));
        Ok(Self { world, _machine: machine, session: format!("svc_session={session}"), app_token })
    }

    async fn send(&self, request: RequestBuilder) -> Reply {
        contract::platform().send(request).await.unwrap()
    }
}

impl Side for Visited {
    fn contract(&self) -> &'static Contract {
        contract::platform()
    }

    fn path(&self, operation: &Operation) -> String {
        operation.path.to_owned()
    }

    fn max_body_bytes(&self, _: &Operation) -> usize {
        64 * 1024
    }

    fn bare(&self, operation: &Operation, method: Method, path: &str) -> RequestBuilder {
        self.world.send(method, host(operation), path)
    }

    fn known(&self, operation: &Operation, path: &str) -> RequestBuilder {
        let cookie = if host(operation) == CODE { STATE } else { &self.session };
        self.bare(operation, operation.method.clone(), path).header("cookie", cookie)
    }

    fn wrong_credentials(&self, operation: &Operation) -> Vec<WrongCredential> {
        let call = || self.bare(operation, operation.method.clone(), operation.path);
        let refused = |what, request| WrongCredential { what, request, status: 401, code: "unauthorized" };
        let forbidden = |what, request| WrongCredential { what, request, status: 403, code: "forbidden" };
        let minted = |options: MintOptions| self.world.idp.mint("user_1", &options);
        let forged = minted(MintOptions { flaw: Some(Flaw::BadSignature), ..MintOptions::default() });
        let old = minted(MintOptions { ttl: -120, ..MintOptions::default() });
        let unknown = format!("svc_session={}", "A".repeat(43));
        let elsewhere = self.session.replace("svc_session", "svc_code_session");
        let mut all = vec![
            refused("nobody", call()),
            refused("no token", call().bearer_auth("x.y.z")),
            refused("a forged token", call().bearer_auth(&forged)),
            refused("an old token", call().bearer_auth(old)),
            refused("a forged cookie", call().header("cookie", format!("__session={forged}"))),
            refused("an unknown session", call().header("cookie", unknown)),
            refused("the other host's session", call().header("cookie", elsewhere)),
            refused("a bad token beside a session", call().header("cookie", &self.session).bearer_auth("x")),
            forbidden("an app", call().bearer_auth(&self.app_token)),
        ];
        if operation.method != Method::GET {
            let foreign = call().header("cookie", &self.session).header("origin", "https://evil.test");
            all.push(forbidden("a page of another origin", foreign));
        }
        all
    }

    fn allows_unknown_query(&self, operation: &Operation) -> bool {
        ["handOverSession", "takeSession"].contains(&operation.id)
    }

    fn own(&self, _: &Operation, name: &str) -> Option<Value> {
        match name {
            "slot" => Some(json!("primary")),
            "app" => Some(json!("notes")),
            _ => None,
        }
    }
}

fn host(operation: &Operation) -> &'static str {
    if operation.id == "takeSession" { CODE } else { APP }
}

fn operations() -> impl Iterator<Item = &'static Operation> {
    ROUTES.iter().map(|own| &own.operation)
}

fn named(id: &str) -> &'static Operation {
    operations().find(|operation| operation.id == id).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_code_that_a_route_names_is_seen() -> Result<()> {
    let visited = Visited::start().await?;
    for operation in operations() {
        assert_refuses_wrong_calls(&visited, operation).await;
    }
    what_is_known(&visited).await;
    without_a_machine(&visited).await?;
    signing_out(&visited).await;
    without_keys().await?;
    without_database().await?;
    over_the_rate().await?;
    let all: Vec<&'static Operation> = operations().collect();
    let unseen = contract::platform().unseen(&all, &EXCUSED, &[]);
    assert!(unseen.is_empty(), "{unseen:#?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_right_call_of_every_route_is_answered_as_described() -> Result<()> {
    let visited = Visited::start().await?;
    for id in ["listOwnSlots", "chooseSlot", "mintAppToken", "signOut"] {
        let answer = visited.send(valid_call(&visited, named(id))).await;
        assert!(answer.status < 300, "{id}: {answer:?}");
    }
    let visited = Visited::start().await?;
    let settled = visited.send(valid_call(&visited, named("chooseAccount"))).await;
    assert_eq!(settled.status, 303, "{settled:?}");
    let hand_over = format!("{}?state=s", named("handOverSession").path);
    let handed = visited.send(visited.known(named("handOverSession"), &hand_over)).await;
    assert_eq!(handed.status, 302, "{handed:?}");
    let take =
        handed.headers["location"].to_str()?.strip_prefix(&format!("http://{CODE}")).unwrap().to_owned();
    let taken = visited.send(visited.known(named("takeSession"), &take)).await;
    assert_eq!(taken.status, 302, "{taken:?}");
    Ok(())
}

async fn what_is_known(visited: &Visited) {
    let choose = named("chooseSlot");
    let slot = visited.known(choose, choose.path).json(&json!({ "slot": "of-another" }));
    visited.send(slot).await.assert_problem(404, "not_found");
    let token = visited.world.token("user_1");
    let by_token =
        visited.world.post(APP, choose.path).bearer_auth(token).json(&json!({ "slot": "primary" }));
    visited.send(by_token).await.assert_problem(400, "invalid_request");
    let path = format!("{}?code=unknown", named("takeSession").path);
    let take = visited.known(named("takeSession"), &path);
    visited.send(take).await.assert_problem(401, "unauthorized");
    for path in ["/_svc", "/_svc/", "/_svc/internal/backup", "/_svc/slots/x", "/_svc/%ff"] {
        visited.send(visited.world.get(APP, path)).await.assert_problem(404, "not_found");
    }
    let elsewhere = visited.world.get("other.test", "/_svc/slots").send().await.unwrap();
    assert_eq!(elsewhere.status(), StatusCode::NOT_FOUND, "a host that is not ours has no route");
}

/// A user whose machine does not run.
async fn without_a_machine(visited: &Visited) -> Result<()> {
    let ask =
        visited.world.post(APP, named("mintAppToken").path).bearer_auth(visited.world.token("user_none"));
    visited.send(ask.json(&json!({ "app": "notes" }))).await.assert_problem(503, "unavailable");
    Ok(())
}

async fn signing_out(visited: &Visited) {
    let path = named("signOut").path;
    let foreign = visited.world.post(APP, path).header("origin", "https://evil.test");
    visited.send(foreign).await.assert_problem(403, "forbidden");
    let large = visited.world.post(APP, path).body("x".repeat(65 * 1024));
    visited.send(large).await.assert_problem(413, "request_too_large");
    let large = visited.world.get(CODE, named("takeSession").path).body("x".repeat(65 * 1024));
    visited.send(large).await.assert_problem(413, "request_too_large");
    visited.send(visited.world.post(APP, path).bearer_auth("x")).await.assert_problem(401, "unauthorized");
    assert_eq!(visited.send(visited.known(named("signOut"), path)).await.status, 204);
    let list = visited.known(named("listOwnSlots"), named("listOwnSlots").path);
    visited.send(list).await.assert_problem(401, "unauthorized");
}

/// The provider's keys were never fetched, and it is away.
async fn without_keys() -> Result<()> {
    let world = World::start().await?;
    let token = world.token("user_1");
    world.idp.down();
    for operation in operations().filter(|operation| host(operation) == APP) {
        let call = world.send(operation.method.clone(), APP, operation.path).bearer_auth(&token);
        let answer = contract::platform().send(call).await?;
        answer.assert_problem(503, "unavailable");
    }
    Ok(())
}

/// An address that has had too many credentials verified.
async fn over_the_rate() -> Result<()> {
    let world = World::start_with(&[("ROUTER_ADDRESS_CHECKS_PER_SECOND", "1")], None).await?;
    for operation in operations() {
        for number in 0..20 {
            read(world.get(APP, "/").bearer_auth(format!("a.b.{number}-{}", operation.id))).await;
        }
        let call =
            world.send(operation.method.clone(), host(operation), &format!("{}?code=c", operation.path));
        let call = match host(operation) {
            CODE => call.header("cookie", STATE),
            _ => call.bearer_auth(format!("x.y.{}", operation.id)),
        };
        contract::platform().send(call).await?.assert_problem(429, "rate_limited");
    }
    Ok(())
}

async fn without_database() -> Result<()> {
    let database = kit::pg::shared().await?;
    let line = kit::net::Proxy::start(([127, 0, 0, 1], database.port()).into())?;
    let world = World::start_with(&[], Some(line.addr())).await?;
    world.until_status("user_1", StatusCode::SERVICE_UNAVAILABLE).await;
    // Opened by another process: here only the database would know it.
    let unknown = world.beside().await?.session(APP, "user_1").await;
    line.refuse();
    line.cut();
    for operation in operations() {
        let host = host(operation);
        let query = match operation.id {
            "takeSession" => "?code=c",
            _ => "",
        };
        let path = format!("{}{query}", operation.path);
        let cookie = if host == CODE { STATE } else { &unknown };
        let call = world.send(operation.method.clone(), host, &path).header("cookie", cookie);
        contract::platform().send(call).await?.assert_problem(503, "database_unavailable");
    }
    Ok(())
}
