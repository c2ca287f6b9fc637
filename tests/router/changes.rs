//! The router applies a machine's state within a second.

use std::time::{Duration, Instant};

use anyhow::Result;
use http::StatusCode;

use super::machine::TestMachine;
use super::world::{APP, ROUTE_UPDATE_TIMEOUT, World, insert, read};

#[tokio::test(flavor = "multi_thread")]
async fn only_a_running_machine_is_routed_and_its_state_is_shown() -> Result<()> {
    let (world, machine) = World::with_machine("user_1").await?;
    for status in ["provisioning", "recovering", "resizing", "failed"] {
        world.set_status(&machine, status).await?;
        world.until_status("user_1", StatusCode::SERVICE_UNAVAILABLE).await;
        let response = world.fetch("user_1", "/").await;
        let body = response.json();
        assert_eq!((&body["code"], &body["machineStatus"]), (&"unavailable".into(), &status.into()));
        assert_eq!(response.headers["content-type"], "application/problem+json");
        assert!(
            response.headers.contains_key("retry-after") && response.headers["cache-control"] == "no-store"
        );
        let page = world.get(APP, "/").bearer_auth(world.token("user_1")).header("accept", "text/html");
        let page = read(page).await;
        assert_eq!(page.status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(page.body.contains(status) && page.body.contains("http-equiv=\"refresh\""), "{page:?}");
        assert!(page.headers.contains_key("retry-after") && page.headers["cache-control"] == "no-store");
        world.set_status(&machine, "running").await?;
        world.until_status("user_1", StatusCode::OK).await;
    }
    world.sql.batch_execute("UPDATE user_machines SET deleted_at = now()").await?;
    world.until_status("user_1", StatusCode::SERVICE_UNAVAILABLE).await;
    assert_eq!(world.fetch("user_1", "/").await.json()["machineStatus"], "none");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_are_found_by_polling_without_notifications() -> Result<()> {
    let world = World::start().await?;
    let machine = TestMachine::start().await?;
    // Without triggers there is no notification, as after a lost NOTIFY.
    world.sql.batch_execute("ALTER TABLE user_machines DISABLE TRIGGER ALL").await?;
    world.add(&machine, "user_1", "primary", "running").await?;
    world.until_status("user_1", StatusCode::OK).await;
    world
        .sql
        .batch_execute(
            "UPDATE user_machines SET status = 'failed', change_seq = nextval('machine_change_seq')",
        )
        .await?;
    world.until_status("user_1", StatusCode::SERVICE_UNAVAILABLE).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn late_commit_with_a_lower_number_is_not_missed() -> Result<()> {
    let world = World::start().await?;
    let (late, early) = (TestMachine::start().await?, TestMachine::start().await?);
    let mut other = world.database.connect().await?;
    let transaction = other.transaction().await?;
    transaction.batch_execute(&insert(&late, "user_late", "primary", "running")).await?;
    world.add(&early, "user_early", "primary", "running").await?;
    world.until_status("user_early", StatusCode::OK).await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    transaction.commit().await?;
    world.until_status("user_late", StatusCode::OK).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn moved_machine_is_followed_with_its_pin() -> Result<()> {
    let (world, old) = World::with_machine("user_1").await?;
    let new = TestMachine::start().await?;
    let sql = format!(
        "UPDATE user_machines SET https_port = {}, tls_spki_sha256 = '{}' WHERE machine_id = '{}'",
        new.addr.port(),
        new.pin,
        old.id
    );
    world.sql.batch_execute(&sql).await?;
    let started = Instant::now();
    while new.arrivals().is_empty() {
        world.fetch("user_1", "/").await;
        assert!(started.elapsed() < ROUTE_UPDATE_TIMEOUT);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let left = old.arrivals().len();
    assert_eq!(world.fetch("user_1", "/").await.status, StatusCode::OK);
    assert_eq!(old.arrivals().len(), left, "the former address was used again");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn primary_slot_serves_else_the_oldest_machine() -> Result<()> {
    let world = World::start().await?;
    let (oldest, primary, young) =
        (TestMachine::start().await?, TestMachine::start().await?, TestMachine::start().await?);
    world.add(&oldest, "user_1", "studio", "running").await?;
    world.add(&young, "user_1", "zoo", "running").await?;
    world.until_status("user_1", StatusCode::OK).await;
    assert!(!oldest.arrivals().is_empty() && young.arrivals().is_empty());
    world.add(&primary, "user_1", "primary", "running").await?;
    let started = Instant::now();
    while primary.arrivals().is_empty() {
        world.fetch("user_1", "/").await;
        assert!(started.elapsed() < ROUTE_UPDATE_TIMEOUT);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(world.proven(&primary, &primary.last().headers).slot.as_str(), "primary");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn legacy_fallback_redirects_only_when_configured() -> Result<()> {
    let world = World::start_with(&[("LEGACY_FALLBACK_URL", "https://old.test/base/")], None).await?;
    world.until_status("user_1", StatusCode::TEMPORARY_REDIRECT).await;
    let response = world.fetch("user_1", "/a?b=c").await;
    assert_eq!(response.location(), "https://old.test/base/a?b=c");

    let unconfigured = World::start().await?;
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

/// Longer than outages were survived before: 15 s.
#[tokio::test(flavor = "multi_thread")]
async fn stale_routes_are_served_during_database_outage() -> Result<()> {
    let database = kit::pg::prepared_server().await?;
    let line = kit::net::Proxy::start(([127, 0, 0, 1], database.port).into())?;
    let world = World::start_with(&[], Some(line.addr())).await?;
    let machine = TestMachine::start().await?;
    world.add(&machine, "user_1", "primary", "running").await?;
    world.until_status("user_1", StatusCode::OK).await;
    let signed_in = world.get(APP, "/").header("accept", "text/html");
    let signed_in = read(signed_in.header("cookie", format!("__session={}", world.token("user_1")))).await;
    let session = format!("svc_session={}", signed_in.cookie("svc_session").expect("a session"));
    let by_session = || read(world.get(APP, "/").header("cookie", &session));
    assert_eq!(by_session().await.status, StatusCode::OK);
    // Opened by another process, so this one would have to look it up in the database.
    let unknown = world.another_process().await?.session(APP, "user_1").await;
    line.refuse();
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(18) {
        let response = by_session().await;
        assert_eq!(response.status, StatusCode::OK, "after {:?}: {response:?}", started.elapsed());
        assert_eq!(world.fetch("user_1", "/").await.status, StatusCode::OK);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    // A failed session lookup does not lock out a user of the provider, and its deadline is not repeated for each
    // request.
    let both = format!("{unknown}; __session={}", world.token("user_1"));
    let started = Instant::now();
    assert_eq!(read(world.get(APP, "/").header("cookie", both)).await.status, StatusCode::OK);
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    let response = read(world.get(APP, "/").header("cookie", unknown)).await;
    assert_eq!(
        (response.status, &response.json()["code"]),
        (StatusCode::SERVICE_UNAVAILABLE, &"database_unavailable".into())
    );
    line.heal();
    world.set_status(&machine, "failed").await?;
    let started = Instant::now();
    while world.fetch("user_1", "/").await.status == StatusCode::OK {
        assert!(started.elapsed() < Duration::from_secs(5), "a change during the outage is not applied");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn routes_are_refused_once_they_are_too_old() -> Result<()> {
    let database = kit::pg::prepared_server().await?;
    let line = kit::net::Proxy::start(([127, 0, 0, 1], database.port).into())?;
    let world = World::start_with(&[("ROUTER_MAX_STALE_SECONDS", "3")], Some(line.addr())).await?;
    let machine = TestMachine::start().await?;
    world.add(&machine, "user_1", "primary", "running").await?;
    world.until_status("user_1", StatusCode::OK).await;
    line.refuse();
    let started = Instant::now();
    while world.fetch("user_1", "/").await.status == StatusCode::OK {
        assert!(started.elapsed() < Duration::from_secs(10), "stale routes are served for too long");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(started.elapsed() > Duration::from_secs(2), "stale routes refused after {:?}", started.elapsed());
    let response = world.fetch("user_1", "/").await;
    assert_eq!(
        (response.status, response.json()["machineStatus"].as_str()),
        (StatusCode::SERVICE_UNAVAILABLE, Some("unknown"))
    );
    // Changes during the outage apply once the database is back.
    world.set_status(&machine, "failed").await?;
    line.heal();
    let started = Instant::now();
    while world.fetch("user_1", "/").await.json()["machineStatus"] != "failed" {
        assert!(started.elapsed() < Duration::from_secs(5));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}
