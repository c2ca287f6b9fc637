//! Tests how the platform's own sessions are opened with the identity provider's token, handed over to the code
//! host and revoked, and how they store the chosen slot.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use http::{Method, StatusCode};
use reqwest::RequestBuilder;

use super::machine::TestMachine;
use super::test_router::{APP_HOST, CODE_HOST, ROUTE_UPDATE_TIMEOUT, RouterResponse, TestRouter, send};

async fn get_with_cookie(router: &TestRouter, host: &str, path: &str, cookie: &str) -> RouterResponse {
    send(router.get(host, path).header("cookie", cookie)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn page_visit_opens_session_that_works_without_the_token() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let cookie = format!("__session={}", router.token("user_1"));
    let page = send(router.get(APP_HOST, "/").header("accept", "text/html").header("cookie", &cookie)).await;
    let line = page.headers["set-cookie"].to_str()?;
    for part in ["svc_session=", "HttpOnly", "Secure", "SameSite=Lax", "Path=/", "Max-Age=43200"] {
        assert!(line.contains(part), "{line}");
    }
    let other_client = send(router.get(APP_HOST, "/").header("cookie", &cookie)).await;
    assert_eq!(
        other_client.cookie("svc_session"),
        None,
        "a request that does not accept HTML must not open a session"
    );
    let session_cookie = format!("svc_session={}", page.cookie("svc_session").unwrap());
    assert_eq!(get_with_cookie(&router, APP_HOST, "/", &session_cookie).await.status, StatusCode::OK);
    assert_eq!(router.verify_proof(&machine, &machine.last_request().headers).sub.as_str(), "user_1");
    let with_other_cookie = format!("name=größe; {session_cookie}");
    assert_eq!(get_with_cookie(&router, APP_HOST, "/", &with_other_cookie).await.status, StatusCode::OK);
    // The database contains only a hash of the cookie.
    let row = router.sql.query_one("SELECT token_hash FROM sessions", &[]).await?;
    assert!(!String::from_utf8_lossy(row.get::<_, &[u8]>(0)).contains(&session_cookie[12..]));
    // The other host uses a different cookie.
    for wrong in [session_cookie.replace("svc_session", "svc_code_session"), session_cookie.clone()] {
        assert_eq!(get_with_cookie(&router, CODE_HOST, "/", &wrong).await.status, StatusCode::UNAUTHORIZED);
    }
    for wrong in ["svc_session=", "svc_session=x", &format!("svc_session={}", "A".repeat(43))] {
        assert_eq!(get_with_cookie(&router, APP_HOST, "/", wrong).await.status, StatusCode::UNAUTHORIZED);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn revocation_by_another_process_is_enforced() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let cookie = router.open_session(APP_HOST, "user_1").await;
    assert_eq!(get_with_cookie(&router, APP_HOST, "/", &cookie).await.status, StatusCode::OK);
    router.sql.batch_execute("UPDATE sessions SET revoked_at = now()").await?;
    let started = Instant::now();
    while get_with_cookie(&router, APP_HOST, "/", &cookie).await.status != StatusCode::UNAUTHORIZED {
        assert!(started.elapsed() < ROUTE_UPDATE_TIMEOUT);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn sign_out_ends_all_sessions_of_the_user() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let (app, code) =
        (router.open_session(APP_HOST, "user_1").await, router.open_session(CODE_HOST, "user_1").await);
    let user_2_session = router.open_session(APP_HOST, "user_2").await;
    let response = send(router.post(APP_HOST, "/_svc/sign-out").header("cookie", &app)).await;
    assert_eq!(
        (response.status, response.cookie("svc_session").as_deref()),
        (StatusCode::NO_CONTENT, Some(""))
    );
    assert_eq!(get_with_cookie(&router, APP_HOST, "/", &app).await.status, StatusCode::UNAUTHORIZED);
    assert_eq!(get_with_cookie(&router, CODE_HOST, "/", &code).await.status, StatusCode::UNAUTHORIZED);
    assert_eq!(
        get_with_cookie(&router, APP_HOST, "/", &user_2_session).await.status,
        StatusCode::SERVICE_UNAVAILABLE,
        "user_2 must be signed in, but without a machine"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_session_is_refused() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let cookie = router.open_session(APP_HOST, "user_1").await;
    router.sql.batch_execute("UPDATE sessions SET expires_at = now()").await?;
    let started = Instant::now();
    while get_with_cookie(&router, APP_HOST, "/", &cookie).await.status != StatusCode::UNAUTHORIZED {
        assert!(started.elapsed() < ROUTE_UPDATE_TIMEOUT);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// Returns two values of the `Cookie` header. The first is from a browser that has a session for `user_1`, but in which
/// the identity provider has signed in `user_2`; the second contains only the session cookie.
async fn create_conflicting_cookies(router: &TestRouter) -> (String, String) {
    let session = router.open_session(APP_HOST, "user_1").await;
    (format!("{session}; __session={}", router.token("user_2")), session)
}

fn choice_request(router: &TestRouter, cookie: &str, form: &'static str) -> RequestBuilder {
    let request = router.post(APP_HOST, "/_svc/account").header("cookie", cookie);
    request.header("content-type", "application/x-www-form-urlencoded").body(form)
}

#[tokio::test(flavor = "multi_thread")]
async fn planted_provider_cookie_does_not_switch_account() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let (cookies, session) = create_conflicting_cookies(&router).await;
    assert_eq!(get_with_cookie(&router, APP_HOST, "/", &cookies).await.status, StatusCode::OK);
    assert_eq!(router.verify_proof(&machine, &machine.last_request().headers).sub.as_str(), "user_1");

    let page =
        |cookie: &str| router.get(APP_HOST, "/x?a=1").header("accept", "text/html").header("cookie", cookie);
    let before = machine.requests().len();
    let prompt = send(page(&cookies)).await;
    assert_eq!(prompt.status, StatusCode::CONFLICT);
    assert!(prompt.body.contains(r#"value="/x?a=1""#), "{}", prompt.body);
    assert_eq!(machine.requests().len(), before, "a request was forwarded before the decision");

    let decided = send(choice_request(&router, &cookies, "account=session&returnTo=%2Fx")).await;
    assert_eq!((decided.status, decided.location()), (StatusCode::SEE_OTHER, "/x"));
    let decision = format!(
        "svc_kept_account={}",
        decided.cookie("svc_kept_account").context("the response does not record the kept account")?
    );
    assert_eq!(send(page(&format!("{cookies}; {decision}"))).await.status, StatusCode::OK);
    let third = format!("{session}; __session={}; {decision}", router.token("user_3"));
    assert_eq!(
        send(page(&third)).await.status,
        StatusCode::CONFLICT,
        "the decision must cover only these two users"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn user_can_switch_to_the_provider_account() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let (cookies, old) = create_conflicting_cookies(&router).await;
    let foreign = choice_request(&router, &cookies, "account=provider").header("origin", "https://evil.test");
    assert_eq!(send(foreign).await.status, StatusCode::FORBIDDEN);
    assert_eq!(
        send(choice_request(&router, &cookies, "account=other")).await.status,
        StatusCode::BAD_REQUEST
    );

    let redeem = |code: String| {
        let path = format!("/_svc/session?code={code}");
        router.get(CODE_HOST, &path).header("cookie", "svc_code_state=nonce")
    };
    let issue_code = async || {
        let request = router.get(APP_HOST, "/_svc/code-session?state=nonce").header("cookie", &old);
        let response = send(request).await;
        response
            .location()
            .split_once("code=")
            .map(|(_, code)| code.to_owned())
            .context("the redirect has no code")
    };
    let redeemed = send(redeem(issue_code().await?)).await;
    let editor = redeemed.cookie("svc_code_session").context("the response sets no session cookie")?;
    let editor = format!("svc_code_session={editor}");
    assert_eq!(get_with_cookie(&router, CODE_HOST, "/", &editor).await.status, StatusCode::OK);
    let unused = issue_code().await?;

    let switched =
        send(choice_request(&router, &cookies, "account=provider&returnTo=https://evil.test")).await;
    assert_eq!((switched.status, switched.location()), (StatusCode::SEE_OTHER, "/"));
    let new = format!(
        "svc_session={}",
        switched.cookie("svc_session").context("the response sets no session cookie")?
    );
    let before = machine.requests().len();
    assert_eq!(
        get_with_cookie(&router, APP_HOST, "/", &new).await.status,
        StatusCode::SERVICE_UNAVAILABLE,
        "user_2 must be signed in, but without a machine"
    );
    assert_eq!(
        get_with_cookie(&router, APP_HOST, "/", &old).await.status,
        StatusCode::UNAUTHORIZED,
        "the old session must have ended"
    );
    assert_eq!(
        send(redeem(unused)).await.status,
        StatusCode::UNAUTHORIZED,
        "the ended session's code must be invalid"
    );
    assert_eq!(machine.requests().len(), before);
    let deadline = Instant::now() + Duration::from_secs(10);
    while get_with_cookie(&router, CODE_HOST, "/", &editor).await.status != StatusCode::UNAUTHORIZED {
        ensure!(Instant::now() < deadline, "the editor's session outlived its parent session");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let again = send(choice_request(&router, &new, "account=provider")).await;
    assert_eq!(
        (again.status, again.cookie("svc_session")),
        (StatusCode::SEE_OTHER, None),
        "no session may be opened once there is no conflict"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn https_cookies_have_the_host_prefix() -> Result<()> {
    let router = TestRouter::start_with(&[("ROUTER_PUBLIC_SCHEME", "https")], None).await?;
    let machine = TestMachine::start().await?;
    router.add_machine(&machine, "user_1", "primary", "running").await?;
    router.wait_for_status("user_1", StatusCode::OK).await;
    let provider = format!("__session={}", router.token("user_1"));
    let page = send(router.get(APP_HOST, "/").header("accept", "text/html").header("cookie", provider)).await;
    assert_eq!(page.cookie("svc_session"), None);
    let token = page.cookie("__Host-svc_session").context("the response sets no session cookie")?;
    let browser = |cookie: String| {
        router.get(APP_HOST, "/").header("sec-fetch-site", "same-origin").header("cookie", cookie)
    };
    assert_eq!(send(browser(format!("__Host-svc_session={token}"))).await.status, StatusCode::OK);
    let planted = send(browser(format!("svc_session={token}"))).await;
    assert_eq!(planted.status, StatusCode::UNAUTHORIZED, "a cookie without the prefix must be refused");
    let other_client = get_with_cookie(&router, APP_HOST, "/", &format!("svc_session={token}")).await;
    assert_eq!(other_client.status, StatusCode::OK);
    let response = send(router.get(CODE_HOST, "/").header("accept", "text/html")).await;
    assert!(response.cookie("__Host-svc_code_state").is_some(), "{response:?}");
    Ok(())
}

/// Returns the number of session lookups by cookie, which PostgreSQL reports with a delay.
async fn count_lookups(router: &TestRouter) -> Result<i64> {
    let sql = "SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = 'sessions_pkey'";
    Ok(router.sql.query_one(sql, &[]).await?.get(0))
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_session_cookies_cost_no_query() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let second_router = router.start_second_router().await?;
    for number in 0..200 {
        for forged in [format!("{number:A>43}"), format!("svcs_e30.e30.{number:A>86}")] {
            let response = get_with_cookie(&router, APP_HOST, "/", &format!("svc_session={forged}")).await;
            assert_eq!(response.status, StatusCode::UNAUTHORIZED);
        }
    }
    // A session from another router is looked up once, so its lookup proves that the statistics have arrived.
    let started = Instant::now();
    while count_lookups(&router).await? == 0 {
        let genuine = second_router.open_session(APP_HOST, "user_1").await;
        assert_eq!(get_with_cookie(&router, APP_HOST, "/", &genuine).await.status, StatusCode::OK);
        assert!(started.elapsed() < Duration::from_secs(30), "the statistics have not arrived");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(count_lookups(&router).await? < 50);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn credential_guesses_from_an_address_are_rate_limited() -> Result<()> {
    let router = TestRouter::start_with(&[("ROUTER_ADDRESS_CHECKS_PER_SECOND", "1")], None).await?;
    let mut refused = Vec::new();
    for number in 0..300 {
        refused.push(send(router.get(APP_HOST, "/").bearer_auth(format!("a.b.{number}"))).await);
        if refused.iter().filter(|response| response.status == StatusCode::TOO_MANY_REQUESTS).count() == 3 {
            break;
        }
    }
    let limited = refused
        .iter()
        .find(|response| response.status == StatusCode::TOO_MANY_REQUESTS)
        .context("no request got 429")?;
    assert_eq!(limited.json()["code"], "rate_limited");
    assert!(limited.headers.contains_key("retry-after"), "{limited:?}");
    assert_eq!(refused[0].status, StatusCode::UNAUTHORIZED);
    // The rate limit also covers guesses of handover codes.
    let mut guessed = Vec::new();
    for _ in 0..30 {
        let guess = router.get(CODE_HOST, "/_svc/session?code=x").header("cookie", "svc_code_state=s");
        guessed.push(send(guess).await.status);
    }
    let admitted = guessed.iter().filter(|status| **status != StatusCode::TOO_MANY_REQUESTS).count();
    assert!(admitted < 15, "{guessed:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn user_rate_limit_does_not_affect_others() -> Result<()> {
    let router = TestRouter::start_with(&[("ROUTER_USER_REQUESTS_PER_SECOND", "5")], None).await?;
    let machine = TestMachine::start().await?;
    router.add_machine(&machine, "user_1", "primary", "running").await?;
    let token = router.token("user_1");
    let mut statuses = Vec::new();
    for _ in 0..40 {
        statuses.push(send(router.get(APP_HOST, "/").bearer_auth(&token)).await.status);
    }
    assert!(statuses.contains(&StatusCode::TOO_MANY_REQUESTS), "{statuses:?}");
    assert_eq!(
        router.fetch("user_2", "/").await.status,
        StatusCode::SERVICE_UNAVAILABLE,
        "user_2 must get 503 (no machine), not 429"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn opening_sessions_is_rate_limited_per_user() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let cookie = format!("__session={}", router.token("user_1"));
    let page = || router.get(APP_HOST, "/").header("accept", "text/html").header("cookie", cookie.clone());
    for _ in 0..100 {
        assert_eq!(send(page()).await.status, StatusCode::OK, "the provider's cookie must suffice");
    }
    let opened: i64 = router.sql.query_one("SELECT count(*) FROM sessions", &[]).await?.get(0);
    assert!((1..100).contains(&opened), "{opened}");
    // The limit of `user_1` does not affect another user.
    router.open_session(APP_HOST, "user_2").await;
    Ok(())
}

/// Returns the path and query of a redirect to one of the router's hosts.
fn redirect_path<'a>(response: &'a RouterResponse, host: &str) -> &'a str {
    let prefix = format!("http://{host}");
    response
        .location()
        .strip_prefix(&prefix)
        .unwrap_or_else(|| panic!("not redirected to {host}: {response:?}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn code_host_session_needs_single_use_bound_code() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let app = router.open_session(APP_HOST, "user_1").await;
    let page = |host, path: &str, cookie: &str| {
        router.get(host, path).header("accept", "text/html").header("cookie", cookie.to_owned())
    };
    let start = send(page(CODE_HOST, "/?folder=/home", "")).await;
    let state = format!("svc_code_state={}", start.cookie("svc_code_state").unwrap());
    let issued = send(page(APP_HOST, redirect_path(&start, APP_HOST), &app)).await;
    let redeem_path = redirect_path(&issued, CODE_HOST);
    assert!(redeem_path.starts_with("/_svc/session?code="), "{redeem_path}");

    let other_browser = send(page(CODE_HOST, redeem_path, "svc_code_state=other-browser")).await;
    assert_eq!(
        (other_browser.status, other_browser.cookie("svc_code_session")),
        (StatusCode::UNAUTHORIZED, None)
    );
    assert_eq!(send(page(CODE_HOST, redeem_path, "")).await.status, StatusCode::UNAUTHORIZED);

    let redeemed = send(page(CODE_HOST, redeem_path, &state)).await;
    assert_eq!((redeemed.status, redeemed.location()), (StatusCode::FOUND, "/?folder=/home"));
    let session = format!("svc_code_session={}", redeemed.cookie("svc_code_session").unwrap());
    assert_eq!(get_with_cookie(&router, CODE_HOST, "/", &session).await.status, StatusCode::OK);
    assert_eq!(router.verify_proof(&machine, &machine.last_request().headers).sub.as_str(), "user_1");
    let again = send(page(CODE_HOST, redeem_path, &state)).await;
    assert_eq!(again.status, StatusCode::UNAUTHORIZED, "a code must work only once");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_tabs_can_sign_in_to_the_code_host_at_once() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let app = router.open_session(APP_HOST, "user_1").await;
    let page = |host, path: &str, cookie: &str| {
        router.get(host, path).header("accept", "text/html").header("cookie", cookie.to_owned())
    };
    let first = send(page(CODE_HOST, "/?tab=1", "svc_code_state=malformed")).await;
    let nonce = first.cookie("svc_code_state").context("the response sets no nonce")?;
    assert_ne!(nonce, "malformed");
    let state = format!("svc_code_state={nonce}");
    let second = send(page(CODE_HOST, "/?tab=2", &state)).await;
    for (start, return_to) in [(&first, "/?tab=1"), (&second, "/?tab=2")] {
        let issued = send(page(APP_HOST, redirect_path(start, APP_HOST), &app)).await;
        // The browser sends the nonce that it received last, unless a response has deleted it.
        let latest = format!("svc_code_state={}", second.cookie("svc_code_state").unwrap());
        let redeemed = send(page(CODE_HOST, redirect_path(&issued, CODE_HOST), &latest)).await;
        assert_eq!((redeemed.status, redeemed.location()), (StatusCode::FOUND, return_to));
        assert_eq!(redeemed.cookie("svc_code_state"), None);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn handover_requires_sign_in_and_ignores_foreign_return_path() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let path = "/_svc/code-session?state=s&return_to=";
    let anonymous = send(router.get(APP_HOST, path).header("accept", "text/html")).await;
    assert!(anonymous.location().starts_with("https://idp.test/in"), "{anonymous:?}");
    let app = router.open_session(APP_HOST, "user_1").await;
    for evil in ["https://evil.test", "//evil.test", "/%5cevil.test", ""] {
        let issued = send(router.get(APP_HOST, &format!("{path}{evil}")).header("cookie", &app)).await;
        let redeem_path = redirect_path(&issued, CODE_HOST);
        let redeemed = send(router.get(CODE_HOST, redeem_path).header("cookie", "svc_code_state=s")).await;
        assert_eq!(redeemed.location(), "/", "{evil}");
    }
    let no_state = send(router.get(APP_HOST, "/_svc/code-session").header("cookie", &app)).await;
    assert_eq!(no_state.status, StatusCode::BAD_REQUEST);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn user_can_choose_slot_of_browser_session() -> Result<()> {
    let (router, primary) = TestRouter::start_with_machine("user_1").await?;
    let studio = TestMachine::start().await?;
    router.add_machine(&studio, "user_1", "studio", "running").await?;
    let cookie = router.open_session(APP_HOST, "user_1").await;
    let started = Instant::now();
    loop {
        let slots = get_with_cookie(&router, APP_HOST, "/_svc/slots", &cookie).await.json();
        if slots["slots"].as_array().is_some_and(|slots| slots.len() == 2) {
            assert_eq!(
                (&slots["slots"][0]["slot"], &slots["slots"][0]["current"]),
                (&"primary".into(), &true.into())
            );
            assert_eq!(
                (&slots["slots"][1]["slot"], &slots["slots"][1]["current"]),
                (&"studio".into(), &false.into())
            );
            break;
        }
        assert!(started.elapsed() < ROUTE_UPDATE_TIMEOUT);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let choose = |body: &str| {
        let request = router.post(APP_HOST, "/_svc/slots").header("cookie", &cookie);
        request.header("content-type", "application/json").body(body.to_owned())
    };
    assert_eq!(send(choose(r#"{"slot":"studio"}"#)).await.status, StatusCode::OK);
    let before = primary.requests().len();
    assert_eq!(get_with_cookie(&router, APP_HOST, "/", &cookie).await.status, StatusCode::OK);
    assert_eq!((studio.requests().len(), primary.requests().len()), (1, before));
    assert_eq!(router.verify_proof(&studio, &studio.last_request().headers).slot.as_str(), "studio");
    assert_eq!(send(choose(r#"{"slot":"unknown"}"#)).await.status, StatusCode::NOT_FOUND);
    assert_eq!(send(choose(r#"{"slot":"studio","x":1}"#)).await.status, StatusCode::BAD_REQUEST);
    let wrong_method =
        send(router.request(Method::DELETE, APP_HOST, "/_svc/slots").header("cookie", &cookie)).await;
    assert_eq!(wrong_method.status, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(wrong_method.headers["allow"], "GET, HEAD, POST");
    let wrong_method = router.request(Method::DELETE, APP_HOST, "/_svc/code-session");
    let wrong_method = send(wrong_method.header("cookie", &cookie)).await;
    assert_eq!(wrong_method.headers["allow"], "GET", "HEAD must not issue a code");
    // If the chosen machine is down, the router reports this and does not switch to another machine.
    router.set_status(&studio, "recovering").await?;
    let started = Instant::now();
    while get_with_cookie(&router, APP_HOST, "/", &cookie).await.status == StatusCode::OK {
        assert!(started.elapsed() < ROUTE_UPDATE_TIMEOUT);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(primary.requests().len(), before);
    let form = router.post(APP_HOST, "/_svc/slots").header("cookie", &cookie);
    let form = form.header("content-type", "application/x-www-form-urlencoded").body("slot=primary");
    assert_eq!(send(form).await.status, StatusCode::SEE_OTHER);
    assert_eq!(get_with_cookie(&router, APP_HOST, "/", &cookie).await.status, StatusCode::OK);
    let request = router.get(APP_HOST, "/_svc/slots").header("cookie", &cookie).header("accept", "text/html");
    let page = send(request).await;
    assert!(page.body.contains("value=\"studio\"") && page.body.contains("recovering"), "{}", page.body);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn browser_can_submit_forms_of_router_pages() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let (cookies, session) = create_conflicting_cookies(&router).await;
    for (page_path, cookie, form_path, form) in [
        ("/", &cookies, "/_svc/account", "account=session"),
        ("/_svc/slots", &session, "/_svc/slots", "slot=primary"),
    ] {
        let request = router.get(APP_HOST, page_path).header("accept", "text/html").header("cookie", cookie);
        let page = send(request).await;
        let tag = format!(r#"<form method="post" action="{form_path}">"#);
        assert!(page.body.contains(&tag), "{}", page.body);
        // From a page with `no-referrer`, a browser would send `Origin: null`.
        assert_eq!(page.headers["referrer-policy"], "same-origin", "{form_path}");
        let submit = |origin: &str| {
            let request = router.post(APP_HOST, form_path).header("cookie", cookie).header("origin", origin);
            send(request.header("content-type", "application/x-www-form-urlencoded").body(form))
        };
        let own_origin = format!("http://{APP_HOST}");
        assert_eq!(submit(&own_origin).await.status, StatusCode::SEE_OTHER, "{form_path}");
        assert_eq!(submit("null").await.status, StatusCode::FORBIDDEN, "{form_path}");
    }
    Ok(())
}

/// Chrome also applies `form-action` to the redirects that follow the submission.
#[tokio::test(flavor = "multi_thread")]
async fn forms_may_redirect_to_code_host_and_legacy_fallback() -> Result<()> {
    let router = TestRouter::start_with(&[("LEGACY_FALLBACK_URL", "https://old.test/base/")], None).await?;
    router.wait_for_status("user_1", StatusCode::TEMPORARY_REDIRECT).await;
    let (cookies, session) = create_conflicting_cookies(&router).await;
    for (path, cookie) in [("/", cookies), ("/_svc/slots", session)] {
        let request = router.get(APP_HOST, path).header("accept", "text/html").header("cookie", cookie);
        let page = send(request).await;
        let policy = page.headers["content-security-policy"].to_str()?;
        let directive = "; form-action 'self' http://code.test https://old.test;";
        assert!(policy.contains(directive), "{path}: {policy}");
    }
    Ok(())
}
