//! Compares the router's built-in routes with their descriptions: each route gets each kind of invalid call, and each
//! declared error code is provoked.

use anyhow::Result;
use http::{Method, StatusCode};
use kit::idp::{Flaw, MintOptions};
use reqwest::RequestBuilder;
use serde_json::{Value, json};
use svc::http::openapi::Operation;
use svc::platform::router::ROUTES;

use super::machine::TestMachine;
use super::world::{APP, CODE, World, send};
use crate::contract::{self, Contract, Reply, Side, WrongCredential, assert_refuses_wrong_calls, valid_call};

/// The cookie of a browser that has started a sign-in on `CODE_HOST`.
const STATE_COOKIE: &str = "svc_code_state=s";

/// Codes that no request can provoke.
const UNPROVOKABLE_CODES: [(&str, &str); 1] = [("*", "internal")];

/// A router with a user who has a running machine, a session and an app token.
struct RouterSetup {
    world: World,
    _machine: TestMachine,
    session: String,
    app_token: String,
}

impl RouterSetup {
    async fn start() -> Result<Self> {
        let (world, machine) = World::with_machine("user_1").await?;
        let cookie = format!("__session={}", world.token("user_1"));
        let page = world.get(APP, "/").header("accept", "text/html").header("cookie", cookie);
        let session = send(page).await.cookie("svc_session").expect("a session");
        let mint = world.post(APP, "/_svc/app-token").bearer_auth(world.token("user_1"));
        let minted = send(mint.json(&json!({ "app": "notes" }))).await.json();
        let app_token = minted["token"].as_str().expect("a token").to_owned();
        [&session, &app_token].into_iter().for_each(|secret| contract::platform().register_secret(secret));
        Ok(Self { world, _machine: machine, session: format!("svc_session={session}"), app_token })
    }

    async fn send(&self, request: RequestBuilder) -> Reply {
        contract::platform().send(request).await.unwrap()
    }
}

impl Side for RouterSetup {
    fn contract(&self) -> &'static Contract {
        contract::platform()
    }

    fn path(&self, operation: &Operation) -> String {
        operation.path.to_owned()
    }

    fn max_body_bytes(&self, _: &Operation) -> usize {
        64 * 1024
    }

    fn request_without_credentials(
        &self,
        operation: &Operation,
        method: Method,
        path: &str,
    ) -> RequestBuilder {
        self.world.request(method, host(operation), path)
    }

    fn authorized_request(&self, operation: &Operation, path: &str) -> RequestBuilder {
        let cookie = if host(operation) == CODE { STATE_COOKIE } else { &self.session };
        self.request_without_credentials(operation, operation.method.clone(), path).header("cookie", cookie)
    }

    fn wrong_credentials(&self, operation: &Operation) -> Vec<WrongCredential> {
        let call = || self.request_without_credentials(operation, operation.method.clone(), operation.path);
        let refused = |what, request| WrongCredential { what, request, status: 401, code: "unauthorized" };
        let forbidden = |what, request| WrongCredential { what, request, status: 403, code: "forbidden" };
        let minted = |options: MintOptions| self.world.idp.mint("user_1", &options);
        let forged = minted(MintOptions { flaw: Some(Flaw::BadSignature), ..MintOptions::default() });
        let expired = minted(MintOptions { ttl: -120, ..MintOptions::default() });
        let unknown = format!("svc_session={}", "A".repeat(43));
        let elsewhere = self.session.replace("svc_session", "svc_code_session");
        let mut all = vec![
            refused("no credential", call()),
            refused("a malformed token", call().bearer_auth("x.y.z")),
            refused("a forged token", call().bearer_auth(&forged)),
            refused("an expired token", call().bearer_auth(expired)),
            refused("a forged cookie", call().header("cookie", format!("__session={forged}"))),
            refused("an unknown session", call().header("cookie", unknown)),
            refused("the other host's session", call().header("cookie", elsewhere)),
            refused(
                "an invalid token beside a session",
                call().header("cookie", &self.session).bearer_auth("x"),
            ),
            forbidden("an app token", call().bearer_auth(&self.app_token)),
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

    fn required_value(&self, _: &Operation, name: &str) -> Option<Value> {
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
    ROUTES.iter().map(|route| &route.operation)
}

fn operation(id: &str) -> &'static Operation {
    operations().find(|operation| operation.id == id).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_documented_error_code_is_provoked() -> Result<()> {
    let setup = RouterSetup::start().await?;
    for operation in operations() {
        assert_refuses_wrong_calls(&setup, operation).await;
    }
    provoke_state_errors(&setup).await;
    provoke_missing_machine(&setup).await?;
    provoke_sign_out_errors(&setup).await;
    provoke_missing_provider_keys().await?;
    provoke_database_outage().await?;
    provoke_rate_limit().await?;
    let all: Vec<&'static Operation> = operations().collect();
    let unseen = contract::platform().list_unprovoked_codes(&all, &UNPROVOKABLE_CODES, &[]);
    assert!(unseen.is_empty(), "{unseen:#?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn valid_call_of_every_route_matches_its_description() -> Result<()> {
    let setup = RouterSetup::start().await?;
    for id in ["listOwnSlots", "chooseSlot", "mintAppToken", "signOut"] {
        let response = setup.send(valid_call(&setup, operation(id))).await;
        assert!(response.status < 300, "{id}: {response:?}");
    }
    let setup = RouterSetup::start().await?;
    let chosen = setup.send(valid_call(&setup, operation("chooseAccount"))).await;
    assert_eq!(chosen.status, 303, "{chosen:?}");
    let hand_over = format!("{}?state=s", operation("handOverSession").path);
    let issued = setup.send(setup.authorized_request(operation("handOverSession"), &hand_over)).await;
    assert_eq!(issued.status, 302, "{issued:?}");
    let take =
        issued.headers["location"].to_str()?.strip_prefix(&format!("http://{CODE}")).unwrap().to_owned();
    let redeemed = setup.send(setup.authorized_request(operation("takeSession"), &take)).await;
    assert_eq!(redeemed.status, 302, "{redeemed:?}");
    Ok(())
}

/// Errors of well-formed requests with valid credentials, and unknown paths and hosts.
async fn provoke_state_errors(setup: &RouterSetup) {
    let choose = operation("chooseSlot");
    let slot = setup.authorized_request(choose, choose.path).json(&json!({ "slot": "of-another" }));
    setup.send(slot).await.assert_problem(404, "not_found");
    let token = setup.world.token("user_1");
    let by_token = setup.world.post(APP, choose.path).bearer_auth(token).json(&json!({ "slot": "primary" }));
    setup.send(by_token).await.assert_problem(400, "invalid_request");
    let path = format!("{}?code=unknown", operation("takeSession").path);
    let take = setup.authorized_request(operation("takeSession"), &path);
    setup.send(take).await.assert_problem(401, "unauthorized");
    for path in ["/_svc", "/_svc/", "/_svc/internal/backup", "/_svc/slots/x", "/_svc/%ff"] {
        setup.send(setup.world.get(APP, path)).await.assert_problem(404, "not_found");
    }
    let elsewhere = setup.world.get("other.test", "/_svc/slots").send().await.unwrap();
    assert_eq!(elsewhere.status(), StatusCode::NOT_FOUND, "an unknown host has no route");
}

async fn provoke_missing_machine(setup: &RouterSetup) -> Result<()> {
    let mint =
        setup.world.post(APP, operation("mintAppToken").path).bearer_auth(setup.world.token("user_none"));
    setup.send(mint.json(&json!({ "app": "notes" }))).await.assert_problem(503, "unavailable");
    Ok(())
}

async fn provoke_sign_out_errors(setup: &RouterSetup) {
    let path = operation("signOut").path;
    let foreign = setup.world.post(APP, path).header("origin", "https://evil.test");
    setup.send(foreign).await.assert_problem(403, "forbidden");
    let large = setup.world.post(APP, path).body("x".repeat(65 * 1024));
    setup.send(large).await.assert_problem(413, "request_too_large");
    let large = setup.world.get(CODE, operation("takeSession").path).body("x".repeat(65 * 1024));
    setup.send(large).await.assert_problem(413, "request_too_large");
    setup.send(setup.world.post(APP, path).bearer_auth("x")).await.assert_problem(401, "unauthorized");
    assert_eq!(setup.send(setup.authorized_request(operation("signOut"), path)).await.status, 204);
    let list = setup.authorized_request(operation("listOwnSlots"), operation("listOwnSlots").path);
    setup.send(list).await.assert_problem(401, "unauthorized");
}

/// Sends requests while the provider is down and its keys have never been fetched.
async fn provoke_missing_provider_keys() -> Result<()> {
    let world = World::start().await?;
    let token = world.token("user_1");
    world.idp.take_down();
    for operation in operations().filter(|operation| host(operation) == APP) {
        let call = world.request(operation.method.clone(), APP, operation.path).bearer_auth(&token);
        let response = contract::platform().send(call).await?;
        response.assert_problem(503, "unavailable");
    }
    Ok(())
}

/// Sends requests from an address that has exceeded the limit of verifications.
async fn provoke_rate_limit() -> Result<()> {
    let world = World::start_with(&[("ROUTER_ADDRESS_CHECKS_PER_SECOND", "1")], None).await?;
    for operation in operations() {
        for number in 0..20 {
            send(world.get(APP, "/").bearer_auth(format!("a.b.{number}-{}", operation.id))).await;
        }
        let call =
            world.request(operation.method.clone(), host(operation), &format!("{}?code=c", operation.path));
        let call = match host(operation) {
            CODE => call.header("cookie", STATE_COOKIE),
            _ => call.bearer_auth(format!("x.y.{}", operation.id)),
        };
        contract::platform().send(call).await?.assert_problem(429, "rate_limited");
    }
    Ok(())
}

async fn provoke_database_outage() -> Result<()> {
    let database = kit::pg::prepared_server().await?;
    let proxy = kit::net::Proxy::start(([127, 0, 0, 1], database.port).into())?;
    let world = World::start_with(&[], Some(proxy.addr())).await?;
    world.wait_for_status("user_1", StatusCode::SERVICE_UNAVAILABLE).await;
    // The session was opened by another process, so this process would have to look it up in the database.
    let unknown = world.another_process().await?.open_session(APP, "user_1").await;
    proxy.refuse();
    proxy.cut();
    for operation in operations() {
        let host = host(operation);
        let query = match operation.id {
            "takeSession" => "?code=c",
            _ => "",
        };
        let path = format!("{}{query}", operation.path);
        let cookie = if host == CODE { STATE_COOKIE } else { &unknown };
        let call = world.request(operation.method.clone(), host, &path).header("cookie", cookie);
        contract::platform().send(call).await?.assert_problem(503, "database_unavailable");
    }
    Ok(())
}
