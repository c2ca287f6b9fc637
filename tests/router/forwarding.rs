//! Tests which requests the machine receives, and which responses the browser receives.

use anyhow::Result;
use http::StatusCode;
use svc::http::proof::Route;
use svc::router::signing_set::SigningSet;

use super::machine::TestMachine;
use super::test_router::{APP_HOST, CODE_HOST, TestRouter, app_keys, send, signer};

#[tokio::test(flavor = "multi_thread")]
async fn spoofed_identity_headers_do_not_reach_the_machine() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let response = send(
        router
            .get(APP_HOST, "/a/b?c=d")
            .bearer_auth(router.token("user_1"))
            .header("cookie", "svc_session=abc; theme=dark")
            .header("x-svc-proof", "forged")
            .header("X-Svc-Principal", "owner")
            .header("x-forwarded-for", "6.6.6.6")
            .header("x-forwarded-user", "root")
            .header("forwarded", "for=6.6.6.6")
            .header("x-real-ip", "6.6.6.6")
            .header("te", "trailers")
            .header("proxy-authorization", "Basic eA==")
            .header("x-custom", "yes"),
    )
    .await;
    assert_eq!((response.status, &*response.body), (StatusCode::OK, "GET /a/b"));
    let received = machine.last_request();
    assert_eq!(received.uri, "/a/b?c=d");
    let claims = router.verify_proof(&machine, &received.headers);
    assert_eq!((claims.sub.as_str(), claims.route), ("user_1", Route::Shell));
    assert_eq!((claims.handle.as_str(), claims.slot.as_str()), ("user-1", "primary"));
    assert!(claims.exp - claims.iat <= 60);
    let mut names: Vec<_> = received.headers.keys().map(http::HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "accept",
            "host",
            "traceparent",
            "x-custom",
            "x-forwarded-for",
            "x-forwarded-host",
            "x-forwarded-proto",
            "x-request-id",
            "x-svc-proof"
        ]
    );
    assert_eq!(received.headers["x-forwarded-for"], "127.0.0.1");
    assert_eq!(received.headers["x-forwarded-host"], APP_HOST);
    assert_eq!(received.headers["x-request-id"], response.headers["x-request-id"]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_header_cannot_remove_the_proof() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    for connection in ["x-svc-proof", "close, X-Svc-Proof, x-forwarded-for", "upgrade, x-svc-proof"] {
        let token = router.token("user_1");
        let request = router
            .get(APP_HOST, "/")
            .bearer_auth(token)
            .header("connection", connection)
            .header("x-svc-proof", "x");
        assert_eq!(send(request).await.status, StatusCode::OK, "{connection}");
        let received = machine.last_request();
        router.verify_proof(&machine, &received.headers);
        assert!(
            received.headers.contains_key("x-forwarded-for") && !received.headers.contains_key("connection")
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn code_host_uses_its_own_route() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    assert_eq!(
        send(router.get(CODE_HOST, "/").bearer_auth(router.token("user_1"))).await.status,
        StatusCode::OK
    );
    assert_eq!(router.verify_proof(&machine, &machine.last_request().headers).route, Route::Code);
    let response = send(router.get("other.test", "/").bearer_auth(router.token("user_1"))).await;
    assert_eq!(
        (response.status, response.json()["code"].as_str()),
        (StatusCode::NOT_FOUND, Some("not_found"))
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn reserved_cookies_and_hop_by_hop_headers_are_stripped() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let response = router.fetch("user_1", "/cookies").await;
    let cookies: Vec<_> = response.headers.get_all("set-cookie").iter().collect();
    assert_eq!(cookies, ["theme=dark; Path=/"]);
    assert!(!response.headers.contains_key("x-hop"));
    let response = router.fetch("user_1", "/missing").await;
    assert_eq!((response.status, &*response.body), (StatusCode::NOT_FOUND, "not found on the machine"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn internal_paths_are_never_forwarded() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let before = machine.requests().len();
    for path in ["/_svc/internal/backup", "/_svc/", "/_svc"] {
        let response = send(router.post(APP_HOST, path).bearer_auth(router.token("user_1"))).await;
        assert_eq!(response.status, StatusCode::NOT_FOUND, "{path}");
    }
    assert_eq!(machine.requests().len(), before);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_with_unregistered_key_gets_no_request() -> Result<()> {
    let router = TestRouter::start().await?;
    let mut machine = TestMachine::start().await?;
    machine.pin.0[0] ^= 1;
    router.add_machine(&machine, "user_1", "primary", "running").await?;
    router.wait_for_status("user_1", StatusCode::BAD_GATEWAY).await;
    let response = router.fetch("user_1", "/").await;
    assert_eq!(response.json()["code"], "upstream_unavailable");
    assert_eq!(machine.requests().len(), 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn unreachable_machine_is_reported_as_page_or_problem() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    drop(machine);
    // The machine stops a moment after it is dropped.
    router.wait_for_status("user_1", StatusCode::BAD_GATEWAY).await;
    let response = router.fetch("user_1", "/").await;
    assert_eq!(response.status, StatusCode::BAD_GATEWAY);
    assert_eq!(response.headers["content-type"], "application/problem+json");
    let page = router.get(APP_HOST, "/").bearer_auth(router.token("user_1")).header("accept", "text/html");
    let page = send(page).await;
    assert_eq!(
        (page.status, &page.headers["cache-control"]),
        (StatusCode::BAD_GATEWAY, &"no-store".parse()?)
    );
    assert!(
        page.body.contains("is not responding") && page.body.contains("http-equiv=\"refresh\""),
        "{page:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn new_proof_key_signs_after_machine_acknowledges_it() -> Result<()> {
    let (mut router, machine) = TestRouter::start_with_machine("user_1").await?;
    let (old, new) = (signer("old"), signer("new"));
    router.keys.keys = vec![new.public_key()];
    let public = router.keys.clone();
    let app = app_keys().1;
    router
        .signing
        .send_replace(SigningSet { current: old, next: Some(new), retired: Vec::new(), public, app }.into());
    router.sql.batch_execute("UPDATE user_machines SET proof_kids = '{old,new}'").await?;
    let started = std::time::Instant::now();
    loop {
        router.fetch("user_1", "/").await;
        let proof = machine.last_request().headers["x-svc-proof"].clone();
        if router.keys.verify(proof.to_str()?, machine.id, jiff::Timestamp::now()).is_ok() {
            return Ok(());
        }
        assert!(started.elapsed() < super::test_router::ROUTE_UPDATE_TIMEOUT);
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}
