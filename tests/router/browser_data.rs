//! Data that one user's machine stored in a browser does not act as the browser's next user.

use anyhow::{Context, Result};
use http::{HeaderMap, StatusCode};
use reqwest::RequestBuilder;

use super::machine::TestMachine;
use super::world::{APP, CODE, RouterResponse, World, read};

const CLEARED: &str = "\"cache\", \"storage\"";

/// Two users, each with a running machine, behind a proxy that terminates TLS.
async fn two_users() -> Result<(World, TestMachine, TestMachine)> {
    let world = World::start_with(&[("ROUTER_PUBLIC_SCHEME", "https")], None).await?;
    let (one, two) = (TestMachine::start().await?, TestMachine::start().await?);
    for (machine, user) in [(&one, "user_1"), (&two, "user_2")] {
        world.add(machine, user, "primary", "running").await?;
        world.until_status(user, StatusCode::OK).await;
    }
    Ok((world, one, two))
}

fn in_browser(request: RequestBuilder, cookie: &str) -> RequestBuilder {
    request.header("sec-fetch-site", "same-origin").header("cookie", cookie)
}

fn page(world: &World, host: &str, path: &str, cookie: &str) -> RequestBuilder {
    let navigation = in_browser(world.get(host, path), cookie).header("sec-fetch-mode", "navigate");
    navigation.header("sec-fetch-dest", "document").header("accept", "text/html")
}

fn clears(headers: &HeaderMap) -> Option<&str> {
    headers.get("clear-site-data").map(|value| value.to_str().unwrap())
}

fn last_user(response: &RouterResponse) -> Result<String> {
    let value = response.cookie("__Host-svc_last_user").context("the browser's last user")?;
    Ok(format!("__Host-svc_last_user={value}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn data_of_another_user_is_cleared_before_a_machine_is_reached() -> Result<()> {
    let (world, one, two) = two_users().await?;
    let provider = |user: &str| format!("__session={}", world.token(user));
    let seen = (one.arrivals().len(), two.arrivals().len());

    let first = read(page(&world, APP, "/a?b=1", &provider("user_1"))).await;
    assert_eq!((first.status, first.location()), (StatusCode::FOUND, "/a?b=1"), "{first:?}");
    assert_eq!((clears(&first.headers), first.cookie("__Host-svc_session")), (Some(CLEARED), None));
    let marked = format!("{}; {}", provider("user_1"), last_user(&first)?);
    let visit = read(page(&world, APP, "/a?b=1", &marked)).await;
    assert_eq!((visit.status, clears(&visit.headers)), (StatusCode::OK, None), "{visit:?}");
    let session = format!("__Host-svc_session={}", visit.cookie("__Host-svc_session").context("a session")?);
    let own = read(in_browser(world.get(APP, "/api/apps"), &format!("{session}; {marked}"))).await;
    assert_eq!(own.status, StatusCode::OK);

    // A service worker or a page of user_1 acts with the cookies of user_2.
    let switched = format!("{}; {}", provider("user_2"), last_user(&first)?);
    for path in ["/api/apps", "/_svc/slots"] {
        let refused = read(in_browser(world.get(APP, path), &switched)).await;
        assert_eq!(
            (refused.status, clears(&refused.headers)),
            (StatusCode::UNAUTHORIZED, Some(CLEARED)),
            "{path}"
        );
    }
    // Scripts and frames can ask for a page, but not open one.
    for (mode, dest) in [("cors", "empty"), ("navigate", "iframe")] {
        let fetched = in_browser(world.get(APP, "/"), &switched)
            .header("accept", "text/html")
            .header("sec-fetch-mode", mode)
            .header("sec-fetch-dest", dest);
        let refused = read(fetched).await;
        assert_eq!(refused.status, StatusCode::UNAUTHORIZED, "{mode} {dest}");
        assert_eq!(refused.cookie("__Host-svc_last_user"), None, "{mode} {dest}");
    }
    let token =
        in_browser(world.post(APP, "/_svc/app-token"), &switched).json(&serde_json::json!({"app": "notes"}));
    assert_eq!(read(token).await.status, StatusCode::UNAUTHORIZED);
    let unmarked = read(in_browser(world.get(APP, "/api/apps"), &provider("user_2"))).await;
    assert_eq!(unmarked.status, StatusCode::UNAUTHORIZED, "the cookies may have been deleted");
    let again = read(page(&world, APP, "/", &switched)).await;
    assert_eq!((again.status, clears(&again.headers)), (StatusCode::FOUND, Some(CLEARED)));
    assert_eq!(two.arrivals().len(), seen.1, "nothing reached the machine of user_2");
    let marked = format!("{}; {}", provider("user_2"), last_user(&again)?);
    assert_eq!(read(page(&world, APP, "/", &marked)).await.status, StatusCode::OK);
    assert_eq!(two.arrivals().len(), seen.1 + 1);

    // A client that is not a browser stores no data, so it is not refused.
    assert_eq!(read(world.get(APP, "/").header("cookie", &switched)).await.status, StatusCode::OK);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn sign_out_and_choice_of_another_account_clear_data() -> Result<()> {
    let (world, _one, _two) = two_users().await?;
    let first = read(page(&world, APP, "/", &format!("__session={}", world.token("user_1")))).await;
    let marked = format!("__session={}; {}", world.token("user_1"), last_user(&first)?);
    let visit = read(page(&world, APP, "/", &marked)).await;
    let session = format!("__Host-svc_session={}", visit.cookie("__Host-svc_session").context("a session")?);
    let both = format!("{session}; __session={}; {}", world.token("user_2"), last_user(&first)?);
    let choice = in_browser(world.post(APP, "/_svc/account"), &both)
        .header("content-type", "application/x-www-form-urlencoded")
        .body("account=provider");
    let chosen = read(choice).await;
    assert_eq!((chosen.status, clears(&chosen.headers)), (StatusCode::SEE_OTHER, Some(CLEARED)));
    assert_ne!(last_user(&chosen)?, last_user(&first)?);

    let session = chosen.cookie("__Host-svc_session").context("the other session")?;
    let session = format!("__Host-svc_session={session}; {}", last_user(&chosen)?);
    let out = read(in_browser(world.post(APP, "/_svc/sign-out"), &session)).await;
    assert_eq!((out.status, clears(&out.headers)), (StatusCode::NO_CONTENT, Some(CLEARED)));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_cannot_affect_later_users_of_the_origin() -> Result<()> {
    let (world, _one, _two) = two_users().await?;
    let first = read(page(&world, APP, "/page", &format!("__session={}", world.token("user_1")))).await;
    let marked = format!("__session={}; {}", world.token("user_1"), last_user(&first)?);
    let visit = read(page(&world, APP, "/page", &marked)).await;
    assert_eq!((visit.status, visit.headers["x-own"].to_str()?), (StatusCode::OK, "kept"));
    for name in
        ["alt-svc", "clear-site-data", "nel", "report-to", "reporting-endpoints", "service-worker-allowed"]
    {
        assert!(!visit.headers.contains_key(name), "{name}");
    }
    assert_eq!(visit.headers["strict-transport-security"], "max-age=31536000");
    assert_eq!(visit.headers["cache-control"], "private, no-cache");
    assert_eq!(visit.headers["vary"], "cookie");

    let worker = in_browser(world.get(APP, "/worker.js"), &marked).header("service-worker", "script");
    assert_eq!(read(worker).await.status, StatusCode::FORBIDDEN);
    let editor =
        world.get(CODE, "/worker.js").header("service-worker", "script").bearer_auth(world.token("user_1"));
    assert_eq!(read(editor).await.status, StatusCode::OK, "the editor needs its service worker");
    Ok(())
}
