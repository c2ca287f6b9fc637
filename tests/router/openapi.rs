//! Compares the router's built-in routes with their descriptions: each route gets each kind of invalid request, and
//! each documented error code is triggered.

use anyhow::Result;
use http::{Method, StatusCode};
use kit::idp::{Flaw, MintOptions};
use reqwest::RequestBuilder;
use serde_json::{Value, json};
use svc::http::openapi::Operation;
use svc::router::ROUTES;

use super::machine::TestMachine;
use super::test_router::{APP_HOST, CODE_HOST, TestRouter, send};
use crate::contract::{
    self, ApiUnderTest, CheckedResponse, Contract, WrongCredential, assert_rejects_invalid_requests,
    valid_call,
};

/// The cookie of a browser that has started a sign-in on `CODE_HOST`.
const STATE_COOKIE: &str = "svc_code_state=s";

/// Codes that no request can trigger.
const UNREACHABLE_CODES: [(&str, &str); 1] = [("*", "internal")];

/// A router with a user who has a running machine, a session and an app token.
struct RouterSetup {
    router: TestRouter,
    _machine: TestMachine,
    session: String,
    app_token: String,
}

impl RouterSetup {
    async fn start() -> Result<Self> {
        let (router, machine) = TestRouter::start_with_machine("user_1").await?;
        let cookie = format!("__session={}", router.token("user_1"));
        let page = router.get(APP_HOST, "/").header("accept", "text/html").header("cookie", cookie);
        let session =
            send(page).await.cookie("svc_session").expect("the response should set a session cookie");
        let mint = router.post(APP_HOST, "/_svc/app-token").bearer_auth(router.token("user_1"));
        let minted = send(mint.json(&json!({ "app": "notes" }))).await.json();
        let app_token = minted["token"].as_str().expect("the response should contain a token").to_owned();
        [&session, &app_token].into_iter().for_each(|secret| contract::platform().register_secret(secret));
        Ok(Self { router, _machine: machine, session: format!("svc_session={session}"), app_token })
    }

    async fn send(&self, request: RequestBuilder) -> CheckedResponse {
        contract::platform().send(request).await.unwrap()
    }
}

impl ApiUnderTest for RouterSetup {
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
        self.router.request(method, host(operation), path)
    }

    fn authorized_request(&self, operation: &Operation, path: &str) -> RequestBuilder {
        let cookie = if host(operation) == CODE_HOST { STATE_COOKIE } else { &self.session };
        self.request_without_credentials(operation, operation.method.clone(), path).header("cookie", cookie)
    }

    fn wrong_credentials(&self, operation: &Operation) -> Vec<WrongCredential> {
        let call = || self.request_without_credentials(operation, operation.method.clone(), operation.path);
        let unauthorized = |description, request| WrongCredential {
            description,
            request,
            status: 401,
            code: "unauthorized",
        };
        let forbidden =
            |description, request| WrongCredential { description, request, status: 403, code: "forbidden" };
        let mint_token = |options: MintOptions| self.router.idp.mint("user_1", &options);
        let forged = mint_token(MintOptions { flaw: Some(Flaw::BadSignature), ..MintOptions::default() });
        let expired = mint_token(MintOptions { ttl_seconds: -120, ..MintOptions::default() });
        let unknown = format!("svc_session={}", "A".repeat(43));
        let other_host_session = self.session.replace("svc_session", "svc_code_session");
        let mut all = vec![
            unauthorized("no credential", call()),
            unauthorized("a malformed token", call().bearer_auth("x.y.z")),
            unauthorized("a forged token", call().bearer_auth(&forged)),
            unauthorized("an expired token", call().bearer_auth(expired)),
            unauthorized("a forged cookie", call().header("cookie", format!("__session={forged}"))),
            unauthorized("an unknown session", call().header("cookie", unknown)),
            unauthorized("the other host's session", call().header("cookie", other_host_session)),
            unauthorized(
                "an invalid token together with a session",
                call().header("cookie", &self.session).bearer_auth("x"),
            ),
            forbidden("an app token", call().bearer_auth(&self.app_token)),
        ];
        if operation.method != Method::GET {
            let foreign = call().header("cookie", &self.session).header("origin", "https://evil.test");
            all.push(forbidden("a page from another origin", foreign));
        }
        all
    }

    fn allows_unknown_query(&self, operation: &Operation) -> bool {
        ["issueSessionCode", "redeemSessionCode"].contains(&operation.id)
    }

    fn override_value(&self, _: &Operation, name: &str) -> Option<Value> {
        match name {
            "slot" => Some(json!("primary")),
            "app" => Some(json!("notes")),
            _ => None,
        }
    }
}

fn host(operation: &Operation) -> &'static str {
    if operation.id == "redeemSessionCode" { CODE_HOST } else { APP_HOST }
}

fn operations() -> impl Iterator<Item = &'static Operation> {
    ROUTES.iter().map(|route| &route.operation)
}

fn operation(id: &str) -> &'static Operation {
    operations().find(|operation| operation.id == id).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_documented_error_code_is_triggered() -> Result<()> {
    let setup = RouterSetup::start().await?;
    for operation in operations() {
        assert_rejects_invalid_requests(&setup, operation).await;
    }
    trigger_state_errors(&setup).await;
    trigger_missing_machine(&setup).await?;
    trigger_redeem_code_errors(&setup).await;
    trigger_sign_out_errors(&setup).await;
    trigger_missing_idp_keys().await?;
    trigger_database_outage().await?;
    trigger_rate_limit().await?;
    let all: Vec<&'static Operation> = operations().collect();
    let untriggered = contract::platform().list_untriggered_codes(&all, &UNREACHABLE_CODES, &[]);
    assert!(untriggered.is_empty(), "{untriggered:#?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_responds_to_valid_request_as_described() -> Result<()> {
    let setup = RouterSetup::start().await?;
    for id in ["listOwnSlots", "chooseSlot", "mintAppToken", "signOut"] {
        let response = setup.send(valid_call(&setup, operation(id))).await;
        assert!(response.status < 300, "{id}: {response:?}");
    }
    let setup = RouterSetup::start().await?;
    let chosen = setup.send(valid_call(&setup, operation("chooseAccount"))).await;
    assert_eq!(chosen.status, 303, "{chosen:?}");
    let issue_path = format!("{}?state=s", operation("issueSessionCode").path);
    let issued = setup.send(setup.authorized_request(operation("issueSessionCode"), &issue_path)).await;
    assert_eq!(issued.status, 302, "{issued:?}");
    let redeem_path =
        issued.headers["location"].to_str()?.strip_prefix(&format!("http://{CODE_HOST}")).unwrap().to_owned();
    let redeemed = setup.send(setup.authorized_request(operation("redeemSessionCode"), &redeem_path)).await;
    assert_eq!(redeemed.status, 302, "{redeemed:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn account_choice_page_matches_its_description() -> Result<()> {
    let setup = RouterSetup::start().await?;
    let both_cookies = format!("{}; __session={}", setup.session, setup.router.token("user_2"));
    for id in ["listOwnSlots", "issueSessionCode"] {
        let request = setup.router.get(APP_HOST, operation(id).path).header("accept", "text/html");
        let page = setup.send(request.header("cookie", &both_cookies)).await;
        assert_eq!(page.status, 409, "{id}: {page:?}");
    }
    Ok(())
}

/// Triggers errors for well-formed requests with valid credentials, and for unknown paths and hosts.
async fn trigger_state_errors(setup: &RouterSetup) {
    let choose = operation("chooseSlot");
    let slot = setup.authorized_request(choose, choose.path).json(&json!({ "slot": "unknown" }));
    setup.send(slot).await.assert_problem(404, "not_found");
    let token = setup.router.token("user_1");
    let by_token =
        setup.router.post(APP_HOST, choose.path).bearer_auth(token).json(&json!({ "slot": "primary" }));
    setup.send(by_token).await.assert_problem(400, "invalid_request");
    assert!(choose.credentials.iter().all(|credential| credential.name == "session"));
    for path in ["/_svc", "/_svc/", "/_svc/internal/backup", "/_svc/slots/x", "/_svc/%ff"] {
        setup.send(setup.router.get(APP_HOST, path)).await.assert_problem(404, "not_found");
    }
    let unknown_host = setup.router.get("other.test", "/_svc/slots").send().await.unwrap();
    assert_eq!(unknown_host.status(), StatusCode::NOT_FOUND, "an unknown host must have no route");
}

async fn trigger_missing_machine(setup: &RouterSetup) -> Result<()> {
    let mint = setup
        .router
        .post(APP_HOST, operation("mintAppToken").path)
        .bearer_auth(setup.router.token("user_none"));
    setup.send(mint.json(&json!({ "app": "notes" }))).await.assert_problem(503, "unavailable");
    Ok(())
}

async fn trigger_redeem_code_errors(setup: &RouterSetup) {
    let path = operation("redeemSessionCode").path;
    let redeem = setup.authorized_request(operation("redeemSessionCode"), &format!("{path}?code=unknown"));
    setup.send(redeem).await.assert_problem(401, "unauthorized");
    let large = setup.router.get(CODE_HOST, path).body("x".repeat(65 * 1024));
    setup.send(large).await.assert_problem(413, "request_too_large");
}

async fn trigger_sign_out_errors(setup: &RouterSetup) {
    let path = operation("signOut").path;
    let foreign = setup.router.post(APP_HOST, path).header("origin", "https://evil.test");
    setup.send(foreign).await.assert_problem(403, "forbidden");
    let large = setup.router.post(APP_HOST, path).body("x".repeat(65 * 1024));
    setup.send(large).await.assert_problem(413, "request_too_large");
    setup.send(setup.router.post(APP_HOST, path).bearer_auth("x")).await.assert_problem(401, "unauthorized");
    assert_eq!(setup.send(setup.authorized_request(operation("signOut"), path)).await.status, 204);
    let list = setup.authorized_request(operation("listOwnSlots"), operation("listOwnSlots").path);
    setup.send(list).await.assert_problem(401, "unauthorized");
}

/// Sends requests while the identity provider is down and its keys have never been fetched.
async fn trigger_missing_idp_keys() -> Result<()> {
    let router = TestRouter::start().await?;
    let token = router.token("user_1");
    router.idp.take_down();
    for operation in operations().filter(|operation| host(operation) == APP_HOST) {
        let call = router.request(operation.method.clone(), APP_HOST, operation.path).bearer_auth(&token);
        let response = contract::platform().send(call).await?;
        response.assert_problem(503, "unavailable");
    }
    Ok(())
}

/// Sends requests from an address that has exceeded the rate limit for credentials.
async fn trigger_rate_limit() -> Result<()> {
    let router = TestRouter::start_with(&[("ROUTER_ADDRESS_CHECKS_PER_SECOND", "1")], None).await?;
    for operation in operations() {
        for number in 0..20 {
            send(router.get(APP_HOST, "/").bearer_auth(format!("a.b.{number}-{}", operation.id))).await;
        }
        let call =
            router.request(operation.method.clone(), host(operation), &format!("{}?code=c", operation.path));
        let call = match host(operation) {
            CODE_HOST => call.header("cookie", STATE_COOKIE),
            _ => call.bearer_auth(format!("x.y.{}", operation.id)),
        };
        contract::platform().send(call).await?.assert_problem(429, "rate_limited");
    }
    Ok(())
}

async fn trigger_database_outage() -> Result<()> {
    let database = kit::pg::template_server().await?;
    let proxy = kit::net::Proxy::start(([127, 0, 0, 1], database.port).into())?;
    let router = TestRouter::start_with(&[], Some(proxy.addr())).await?;
    router.wait_for_status("user_1", StatusCode::SERVICE_UNAVAILABLE).await;
    // The session was opened by another router, so this router would have to look it up in the database.
    let unknown = router.start_second_router().await?.open_session(APP_HOST, "user_1").await;
    proxy.refuse();
    proxy.drop_connections();
    for operation in operations() {
        let host = host(operation);
        let query = match operation.id {
            "redeemSessionCode" => "?code=c",
            _ => "",
        };
        let path = format!("{}{query}", operation.path);
        let cookie = if host == CODE_HOST { STATE_COOKIE } else { &unknown };
        let call = router.request(operation.method.clone(), host, &path).header("cookie", cookie);
        contract::platform().send(call).await?.assert_problem(503, "database_unavailable");
    }
    Ok(())
}
