//! One user's machine cannot use data that it has stored in a browser to act as the browser's next user.

use anyhow::{Context, Result};
use http::{HeaderMap, StatusCode};
use reqwest::RequestBuilder;

use super::machine::TestMachine;
use super::test_router::{APP_HOST, CODE_HOST, RouterResponse, TestRouter, send};

const CACHE_AND_STORAGE: &str = "\"cache\", \"storage\"";

/// Starts a router configured as if behind a TLS-terminating proxy, for two users who each have a running machine.
async fn start_with_two_users() -> Result<(TestRouter, TestMachine, TestMachine)> {
    let router = TestRouter::start_with(&[("ROUTER_PUBLIC_SCHEME", "https")], None).await?;
    let (machine_1, machine_2) = (TestMachine::start().await?, TestMachine::start().await?);
    for (machine, user) in [(&machine_1, "user_1"), (&machine_2, "user_2")] {
        router.add_machine(machine, user, "primary", "running").await?;
        router.wait_for_status(user, StatusCode::OK).await;
    }
    Ok((router, machine_1, machine_2))
}

/// Adds the headers of a browser's same-origin request.
fn in_browser(request: RequestBuilder, cookie: &str) -> RequestBuilder {
    request.header("sec-fetch-site", "same-origin").header("cookie", cookie)
}

/// Builds a browser's navigation request for a page.
fn page_request(router: &TestRouter, host: &str, path: &str, cookie: &str) -> RequestBuilder {
    let navigation = in_browser(router.get(host, path), cookie).header("sec-fetch-mode", "navigate");
    navigation.header("sec-fetch-dest", "document").header("accept", "text/html")
}

fn clear_site_data_header(headers: &HeaderMap) -> Option<&str> {
    headers.get("clear-site-data").map(|value| value.to_str().unwrap())
}

/// Returns the last-user cookie set by the response, as `name=value`.
fn last_user_cookie(response: &RouterResponse) -> Result<String> {
    let value = response.cookie("__Host-svc_last_user").context("the response sets no last-user cookie")?;
    Ok(format!("__Host-svc_last_user={value}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn data_of_last_user_is_cleared_before_request_is_forwarded() -> Result<()> {
    let (router, _machine_1, machine_2) = start_with_two_users().await?;
    let provider_cookie = |user: &str| format!("__session={}", router.token(user));
    let before = machine_2.requests().len();

    let first = send(page_request(&router, APP_HOST, "/a?b=1", &provider_cookie("user_1"))).await;
    assert_eq!((first.status, first.location()), (StatusCode::FOUND, "/a?b=1"), "{first:?}");
    assert_eq!(
        (clear_site_data_header(&first.headers), first.cookie("__Host-svc_session")),
        (Some(CACHE_AND_STORAGE), None)
    );
    let cookies = format!("{}; {}", provider_cookie("user_1"), last_user_cookie(&first)?);
    let visit = send(page_request(&router, APP_HOST, "/a?b=1", &cookies)).await;
    assert_eq!((visit.status, clear_site_data_header(&visit.headers)), (StatusCode::OK, None), "{visit:?}");
    let session = format!(
        "__Host-svc_session={}",
        visit.cookie("__Host-svc_session").context("the response sets no session cookie")?
    );
    let same_user =
        send(in_browser(router.get(APP_HOST, "/api/apps"), &format!("{session}; {cookies}"))).await;
    assert_eq!(same_user.status, StatusCode::OK);

    // Requests from user_1's service worker or page with user_2's cookies are rejected.
    let switched = format!("{}; {}", provider_cookie("user_2"), last_user_cookie(&first)?);
    for path in ["/api/apps", "/_svc/slots"] {
        let refused = send(in_browser(router.get(APP_HOST, path), &switched)).await;
        assert_eq!(
            (refused.status, clear_site_data_header(&refused.headers)),
            (StatusCode::UNAUTHORIZED, Some(CACHE_AND_STORAGE)),
            "{path}"
        );
    }
    // A script's fetch or an iframe's load may accept HTML, but is not a top-level navigation.
    for (mode, dest) in [("cors", "empty"), ("navigate", "iframe")] {
        let fetched = in_browser(router.get(APP_HOST, "/"), &switched)
            .header("accept", "text/html")
            .header("sec-fetch-mode", mode)
            .header("sec-fetch-dest", dest);
        let refused = send(fetched).await;
        assert_eq!(refused.status, StatusCode::UNAUTHORIZED, "{mode} {dest}");
        assert_eq!(refused.cookie("__Host-svc_last_user"), None, "{mode} {dest}");
    }
    let token_request = in_browser(router.post(APP_HOST, "/_svc/app-token"), &switched)
        .json(&serde_json::json!({"app": "notes"}));
    assert_eq!(send(token_request).await.status, StatusCode::UNAUTHORIZED);
    let without_last_user =
        send(in_browser(router.get(APP_HOST, "/api/apps"), &provider_cookie("user_2"))).await;
    assert_eq!(
        without_last_user.status,
        StatusCode::UNAUTHORIZED,
        "a request without the cookie must be refused: a script may have deleted it"
    );
    let again = send(page_request(&router, APP_HOST, "/", &switched)).await;
    assert_eq!(
        (again.status, clear_site_data_header(&again.headers)),
        (StatusCode::FOUND, Some(CACHE_AND_STORAGE))
    );
    assert_eq!(machine_2.requests().len(), before, "a request reached user_2's machine");
    let cookies = format!("{}; {}", provider_cookie("user_2"), last_user_cookie(&again)?);
    assert_eq!(send(page_request(&router, APP_HOST, "/", &cookies)).await.status, StatusCode::OK);
    assert_eq!(machine_2.requests().len(), before + 1);

    // A client that is not a browser stores no data, so it is not refused.
    assert_eq!(send(router.get(APP_HOST, "/").header("cookie", &switched)).await.status, StatusCode::OK);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn sign_out_and_account_switch_clear_data() -> Result<()> {
    let (router, _machine_1, _machine_2) = start_with_two_users().await?;
    let first =
        send(page_request(&router, APP_HOST, "/", &format!("__session={}", router.token("user_1")))).await;
    let cookies = format!("__session={}; {}", router.token("user_1"), last_user_cookie(&first)?);
    let visit = send(page_request(&router, APP_HOST, "/", &cookies)).await;
    let session = format!(
        "__Host-svc_session={}",
        visit.cookie("__Host-svc_session").context("the response sets no session cookie")?
    );
    let both_cookies =
        format!("{session}; __session={}; {}", router.token("user_2"), last_user_cookie(&first)?);
    let choice = in_browser(router.post(APP_HOST, "/_svc/account"), &both_cookies)
        .header("content-type", "application/x-www-form-urlencoded")
        .body("account=provider");
    let chosen = send(choice).await;
    assert_eq!(
        (chosen.status, clear_site_data_header(&chosen.headers)),
        (StatusCode::SEE_OTHER, Some(CACHE_AND_STORAGE))
    );
    assert_ne!(last_user_cookie(&chosen)?, last_user_cookie(&first)?);

    let session = chosen.cookie("__Host-svc_session").context("the response sets no session cookie")?;
    let session = format!("__Host-svc_session={session}; {}", last_user_cookie(&chosen)?);
    let signed_out = send(in_browser(router.post(APP_HOST, "/_svc/sign-out"), &session)).await;
    assert_eq!(
        (signed_out.status, clear_site_data_header(&signed_out.headers)),
        (StatusCode::NO_CONTENT, Some(CACHE_AND_STORAGE))
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_cannot_affect_later_users_of_the_origin() -> Result<()> {
    let (router, _machine_1, _machine_2) = start_with_two_users().await?;
    let first =
        send(page_request(&router, APP_HOST, "/page", &format!("__session={}", router.token("user_1"))))
            .await;
    let cookies = format!("__session={}; {}", router.token("user_1"), last_user_cookie(&first)?);
    let visit = send(page_request(&router, APP_HOST, "/page", &cookies)).await;
    assert_eq!((visit.status, visit.headers["x-custom"].to_str()?), (StatusCode::OK, "passed"));
    for name in
        ["alt-svc", "clear-site-data", "nel", "report-to", "reporting-endpoints", "service-worker-allowed"]
    {
        assert!(!visit.headers.contains_key(name), "{name}");
    }
    assert_eq!(visit.headers["strict-transport-security"], "max-age=31536000");
    assert_eq!(visit.headers["cache-control"], "private, no-cache");
    assert_eq!(visit.headers["vary"], "cookie");

    let worker = in_browser(router.get(APP_HOST, "/worker.js"), &cookies).header("service-worker", "script");
    assert_eq!(send(worker).await.status, StatusCode::FORBIDDEN);
    let editor = router
        .get(CODE_HOST, "/worker.js")
        .header("service-worker", "script")
        .bearer_auth(router.token("user_1"));
    assert_eq!(
        send(editor).await.status,
        StatusCode::OK,
        "the code host must allow the editor's service worker"
    );
    Ok(())
}
