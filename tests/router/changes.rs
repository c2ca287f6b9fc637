//! The router applies changes to machines within a second, and serves stale routes during a database outage.

use std::time::{Duration, Instant};

use anyhow::Result;
use http::StatusCode;

use super::machine::TestMachine;
use super::test_router::{APP_HOST, ROUTE_UPDATE_TIMEOUT, TestRouter, insert_machine_sql, send};

#[tokio::test(flavor = "multi_thread")]
async fn user_without_running_machine_gets_503_with_its_state() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    for status in ["provisioning", "recovering", "resizing", "failed"] {
        router.set_status(&machine, status).await?;
        router.wait_for_status("user_1", StatusCode::SERVICE_UNAVAILABLE).await;
        let response = router.fetch("user_1", "/").await;
        let body = response.json();
        assert_eq!((&body["code"], &body["machineStatus"]), (&"unavailable".into(), &status.into()));
        assert_eq!(response.headers["content-type"], "application/problem+json");
        assert!(
            response.headers.contains_key("retry-after") && response.headers["cache-control"] == "no-store"
        );
        let page =
            router.get(APP_HOST, "/").bearer_auth(router.token("user_1")).header("accept", "text/html");
        let page = send(page).await;
        assert_eq!(page.status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(page.body.contains(status) && page.body.contains("http-equiv=\"refresh\""), "{page:?}");
        assert!(page.headers.contains_key("retry-after") && page.headers["cache-control"] == "no-store");
        router.set_status(&machine, "running").await?;
        router.wait_for_status("user_1", StatusCode::OK).await;
    }
    router.sql.batch_execute("UPDATE user_machines SET deleted_at = now()").await?;
    router.wait_for_status("user_1", StatusCode::SERVICE_UNAVAILABLE).await;
    assert_eq!(router.fetch("user_1", "/").await.json()["machineStatus"], "none");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_apply_without_notifications() -> Result<()> {
    let router = TestRouter::start().await?;
    let machine = TestMachine::start().await?;
    // Without triggers, no notification is sent, as if the NOTIFY had been lost.
    router.sql.batch_execute("ALTER TABLE user_machines DISABLE TRIGGER ALL").await?;
    router.add_machine(&machine, "user_1", "primary", "running").await?;
    router.wait_for_status("user_1", StatusCode::OK).await;
    router
        .sql
        .batch_execute(
            "UPDATE user_machines SET status = 'failed', change_seq = nextval('machine_change_seq')",
        )
        .await?;
    router.wait_for_status("user_1", StatusCode::SERVICE_UNAVAILABLE).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn late_commit_with_lower_change_seq_is_not_missed() -> Result<()> {
    let router = TestRouter::start().await?;
    let (late, early) = (TestMachine::start().await?, TestMachine::start().await?);
    let mut late_client = router.database.connect().await?;
    let transaction = late_client.transaction().await?;
    transaction.batch_execute(&insert_machine_sql(&late, "user_late", "primary", "running")).await?;
    router.add_machine(&early, "user_early", "primary", "running").await?;
    router.wait_for_status("user_early", StatusCode::OK).await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    transaction.commit().await?;
    router.wait_for_status("user_late", StatusCode::OK).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn route_follows_moved_machine_and_its_pin() -> Result<()> {
    let (router, old) = TestRouter::start_with_machine("user_1").await?;
    let new = TestMachine::start().await?;
    let sql = format!(
        "UPDATE user_machines SET https_port = {}, tls_spki_sha256 = '{}' WHERE machine_id = '{}'",
        new.addr.port(),
        new.pin,
        old.id
    );
    router.sql.batch_execute(&sql).await?;
    let started = Instant::now();
    while new.requests().is_empty() {
        router.fetch("user_1", "/").await;
        assert!(started.elapsed() < ROUTE_UPDATE_TIMEOUT);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let before = old.requests().len();
    assert_eq!(router.fetch("user_1", "/").await.status, StatusCode::OK);
    assert_eq!(old.requests().len(), before, "the former address was used again");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn primary_slot_is_preferred_to_the_oldest_machine() -> Result<()> {
    let router = TestRouter::start().await?;
    let (oldest, primary, newer) =
        (TestMachine::start().await?, TestMachine::start().await?, TestMachine::start().await?);
    router.add_machine(&oldest, "user_1", "studio", "running").await?;
    router.add_machine(&newer, "user_1", "zoo", "running").await?;
    router.wait_for_status("user_1", StatusCode::OK).await;
    assert!(!oldest.requests().is_empty() && newer.requests().is_empty());
    router.add_machine(&primary, "user_1", "primary", "running").await?;
    let started = Instant::now();
    while primary.requests().is_empty() {
        router.fetch("user_1", "/").await;
        assert!(started.elapsed() < ROUTE_UPDATE_TIMEOUT);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(router.verify_proof(&primary, &primary.last_request().headers).slot.as_str(), "primary");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn legacy_fallback_redirects_only_when_configured() -> Result<()> {
    let router = TestRouter::start_with(&[("LEGACY_FALLBACK_URL", "https://old.test/base/")], None).await?;
    router.wait_for_status("user_1", StatusCode::TEMPORARY_REDIRECT).await;
    let response = router.fetch("user_1", "/a?b=c").await;
    assert_eq!(response.location(), "https://old.test/base/a?b=c");

    let unconfigured = TestRouter::start().await?;
    let started = Instant::now();
    let response = loop {
        let response = unconfigured.fetch("user_1", "/a?b=c").await;
        if response.json()["machineStatus"] == "none" {
            break response;
        }
        assert!(started.elapsed() < ROUTE_UPDATE_TIMEOUT, "{response:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!((response.status, response.location()), (StatusCode::SERVICE_UNAVAILABLE, ""));
    Ok(())
}

/// Earlier releases served stale routes for at most 15 s; this outage lasts longer.
#[tokio::test(flavor = "multi_thread")]
async fn stale_routes_are_served_during_database_outage() -> Result<()> {
    let database = kit::pg::template_server().await?;
    let proxy = kit::net::Proxy::start(([127, 0, 0, 1], database.port).into())?;
    let router = TestRouter::start_with(&[], Some(proxy.addr())).await?;
    let machine = TestMachine::start().await?;
    router.add_machine(&machine, "user_1", "primary", "running").await?;
    router.wait_for_status("user_1", StatusCode::OK).await;
    let signed_in = router.get(APP_HOST, "/").header("accept", "text/html");
    let signed_in = send(signed_in.header("cookie", format!("__session={}", router.token("user_1")))).await;
    let session = format!(
        "svc_session={}",
        signed_in.cookie("svc_session").expect("the response should set a session cookie")
    );
    let by_session = || send(router.get(APP_HOST, "/").header("cookie", &session));
    assert_eq!(by_session().await.status, StatusCode::OK);
    // The session was opened by another router, so this router would have to look it up in the database.
    let unknown = router.start_second_router().await?.open_session(APP_HOST, "user_1").await;
    proxy.refuse();
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(18) {
        let response = by_session().await;
        assert_eq!(response.status, StatusCode::OK, "after {:?}: {response:?}", started.elapsed());
        assert_eq!(router.fetch("user_1", "/").await.status, StatusCode::OK);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    // If a session lookup fails, the provider's cookie still identifies the session's user, and requests do not wait
    // for the lookup's timeout.
    let both_cookies = format!("{unknown}; __session={}", router.token("user_1"));
    let started = Instant::now();
    assert_eq!(send(router.get(APP_HOST, "/").header("cookie", both_cookies)).await.status, StatusCode::OK);
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    let other_user = format!("{unknown}; __session={}", router.token("user_2"));
    for cookie in [unknown, other_user] {
        let response = send(router.get(APP_HOST, "/").header("cookie", cookie)).await;
        assert_eq!(
            (response.status, &response.json()["code"]),
            (StatusCode::SERVICE_UNAVAILABLE, &"database_unavailable".into())
        );
    }
    proxy.heal();
    router.set_status(&machine, "failed").await?;
    let started = Instant::now();
    while router.fetch("user_1", "/").await.status == StatusCode::OK {
        assert!(started.elapsed() < Duration::from_secs(5), "a change after the outage is not applied");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_refused_once_routes_are_too_stale() -> Result<()> {
    let database = kit::pg::template_server().await?;
    let proxy = kit::net::Proxy::start(([127, 0, 0, 1], database.port).into())?;
    let router = TestRouter::start_with(&[("ROUTER_MAX_STALE_SECONDS", "3")], Some(proxy.addr())).await?;
    let machine = TestMachine::start().await?;
    router.add_machine(&machine, "user_1", "primary", "running").await?;
    router.wait_for_status("user_1", StatusCode::OK).await;
    let session = router.open_session(APP_HOST, "user_1").await;
    let both_cookies = format!("{session}; __session={}", router.token("user_2"));
    let account_page =
        || send(router.get(APP_HOST, "/").header("accept", "text/html").header("cookie", &both_cookies));
    assert_eq!(account_page().await.status, StatusCode::CONFLICT);
    proxy.refuse();
    let started = Instant::now();
    while router.fetch("user_1", "/").await.status == StatusCode::OK {
        assert!(started.elapsed() < Duration::from_secs(10), "stale routes are served for too long");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(started.elapsed() > Duration::from_secs(2), "stale routes refused after {:?}", started.elapsed());
    let response = router.fetch("user_1", "/").await;
    assert_eq!(
        (response.status, response.json()["machineStatus"].as_str()),
        (StatusCode::SERVICE_UNAVAILABLE, Some("unknown"))
    );
    let choice = router.post(APP_HOST, "/_svc/slots").bearer_auth(router.token("user_1"));
    let choice = send(choice.json(&serde_json::json!({ "slot": "primary" }))).await;
    assert_eq!(
        choice.status,
        StatusCode::SERVICE_UNAVAILABLE,
        "the choice must be refused, because the router cannot check that the slot exists"
    );
    let page = account_page().await;
    assert_eq!(
        page.status,
        StatusCode::SERVICE_UNAVAILABLE,
        "the page must be unavailable, because the account names cannot be looked up: {page:?}"
    );
    assert!(page.body.contains("cannot be found right now"), "{page:?}");
    // Changes made during the outage are applied once the database is reachable again.
    router.set_status(&machine, "failed").await?;
    proxy.heal();
    let started = Instant::now();
    while router.fetch("user_1", "/").await.json()["machineStatus"] != "failed" {
        assert!(started.elapsed() < Duration::from_secs(5));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}
