//! Tests request authentication, the rejection of cross-origin requests, and the headers on the router's own pages.

use anyhow::Result;
use http::StatusCode;
use kit::idp::{Alg, Flaw, MintOptions, OldKeys};

use super::test_router::{APP_HOST, TestRouter, send};

#[tokio::test(flavor = "multi_thread")]
async fn valid_token_is_accepted_in_header_or_cookie() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    for alg in Alg::ALL {
        let token = router.idp.mint("user_1", &MintOptions { alg, ..MintOptions::default() });
        assert_eq!(
            send(router.get(APP_HOST, "/").bearer_auth(&token)).await.status,
            StatusCode::OK,
            "{alg:?}"
        );
        let cookie = format!("a=b; __session={token}");
        assert_eq!(
            send(router.get(APP_HOST, "/").header("cookie", cookie)).await.status,
            StatusCode::OK,
            "{alg:?}"
        );
    }
    let azp = MintOptions { aud: None, azp: Some("svc-test".into()), ..MintOptions::default() };
    let leeway = MintOptions { ttl_seconds: -20, nbf_offset_seconds: -60, ..MintOptions::default() };
    let several = MintOptions { aud: Some(serde_json::json!(["x", "svc-test"])), ..MintOptions::default() };
    for options in [azp, leeway, several] {
        let token = router.idp.mint("user_1", &options);
        assert_eq!(
            send(router.get(APP_HOST, "/").bearer_auth(token)).await.status,
            StatusCode::OK,
            "{options:?}"
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_invalid_token_is_refused() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let before = machine.requests().len();
    let good = MintOptions::default;
    let mut bad = vec![
        MintOptions { ttl_seconds: -31, nbf_offset_seconds: -90, ..good() },
        MintOptions { nbf_offset_seconds: 40, ttl_seconds: 90, ..good() },
        MintOptions { iss: Some("https://evil.test".into()), ..good() },
        MintOptions { iss: Some(format!("{}/", router.idp.issuer())), ..good() },
        MintOptions { aud: None, ..good() },
        MintOptions { aud: Some("other".into()), ..good() },
        MintOptions { aud: Some("other".into()), azp: Some("svc-test".into()), ..good() },
        MintOptions { aud: Some(serde_json::json!([])), ..good() },
        MintOptions { kid: Some("unknown".into()), ..good() },
    ];
    for (claim, value) in
        [("exp", serde_json::Value::Null), ("sub", serde_json::Value::Null), ("sub", "a/b".into())]
    {
        let mut options = good();
        options.claims.insert(claim.into(), value);
        bad.push(options);
    }
    for alg in Alg::ALL {
        bad.extend(Flaw::ALL.map(|flaw| MintOptions { alg, flaw: Some(flaw), ..good() }));
    }
    for options in bad {
        let token = router.idp.mint("user_1", &options);
        let by_header = send(router.get(APP_HOST, "/").bearer_auth(&token)).await;
        assert_eq!(by_header.status, StatusCode::UNAUTHORIZED, "{options:?}");
        assert_eq!(by_header.json()["code"], "unauthorized");
        let by_cookie = send(router.get(APP_HOST, "/").header("cookie", format!("__session={token}"))).await;
        assert_eq!(by_cookie.status, StatusCode::UNAUTHORIZED, "{options:?}");
    }
    for malformed in ["", "a", "a.b", "a.b.c", "....", &"x".repeat(9000)] {
        assert_eq!(
            send(router.get(APP_HOST, "/").bearer_auth(malformed)).await.status,
            StatusCode::UNAUTHORIZED,
            "{malformed}"
        );
    }
    assert_eq!(machine.requests().len(), before, "a request reached the machine");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_bearer_does_not_fall_back_to_valid_cookie() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let cookie = format!("__session={}", router.token("user_1"));
    for token in ["a.b.c", ""] {
        let request = router.get(APP_HOST, "/").header("cookie", &cookie).bearer_auth(token);
        assert_eq!(send(request).await.status, StatusCode::UNAUTHORIZED, "{token}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn new_keys_are_fetched_and_kept_during_issuer_outage() -> Result<()> {
    let router = TestRouter::start().await?;
    // A caller with a valid token but no machine gets 503.
    let accepted = StatusCode::SERVICE_UNAVAILABLE;
    let (token_1, token_2) = (router.token("user_1"), router.token("user_1"));
    assert_eq!(
        send(router.get(APP_HOST, "/").bearer_auth(&token_1)).await.status,
        accepted,
        "a token signed with the first key must be accepted"
    );
    assert_eq!(router.idp.jwks_fetch_count(), 1);
    router.idp.rotate(OldKeys::Withdrawn)?;
    let rotated = router.token("user_1");
    assert_eq!(
        send(router.get(APP_HOST, "/").bearer_auth(&rotated)).await.status,
        accepted,
        "a token signed with the new key must be accepted"
    );
    assert_eq!(
        send(router.get(APP_HOST, "/").bearer_auth(&token_2)).await.status,
        StatusCode::UNAUTHORIZED,
        "a token signed with the withdrawn key must be refused"
    );
    // Unknown key ids cause at most one fetch every 30 s, regardless of their number.
    for kid in ["a", "b", "c"] {
        let token =
            router.idp.mint("user_1", &MintOptions { kid: Some(kid.into()), ..MintOptions::default() });
        assert_eq!(send(router.get(APP_HOST, "/").bearer_auth(token)).await.status, StatusCode::UNAUTHORIZED);
    }
    assert_eq!(router.idp.jwks_fetch_count(), 2);
    router.idp.take_down();
    for alg in Alg::ALL {
        let token = router.idp.mint("user_2", &MintOptions { alg, ..MintOptions::default() });
        assert_eq!(send(router.get(APP_HOST, "/").bearer_auth(token)).await.status, accepted, "{alg:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_authenticated_after_keys_become_available() -> Result<()> {
    let router = TestRouter::start().await?;
    router.idp.set_jwks_status(503);
    router.idp.rotate(OldKeys::Withdrawn)?;
    let token = router.token("user_1");
    let response = send(router.get(APP_HOST, "/").bearer_auth(&token)).await;
    assert_eq!(
        (response.status, response.json()["code"].as_str()),
        (StatusCode::SERVICE_UNAVAILABLE, Some("unavailable"))
    );
    router.idp.set_jwks_status(200);
    let started = std::time::Instant::now();
    while send(router.get(APP_HOST, "/").bearer_auth(&token)).await.json()["machineStatus"].is_null() {
        assert!(started.elapsed().as_secs() < 10);
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn anonymous_request_is_redirected_or_gets_401() -> Result<()> {
    let router = TestRouter::start().await?;
    let response = send(router.get(APP_HOST, "/a")).await;
    assert_eq!(
        (response.status, response.json()["code"].as_str()),
        (StatusCode::UNAUTHORIZED, Some("unauthorized"))
    );
    let page = send(router.get(APP_HOST, "/a?b=c").header("accept", "text/html,*/*")).await;
    assert_eq!(page.status, StatusCode::FOUND);
    assert_eq!(page.location(), "https://idp.test/in?x=1&redirect_url=http%3A%2F%2Fapp.test%2Fa%3Fb%3Dc");
    let post = send(router.post(APP_HOST, "/a").header("accept", "text/html")).await;
    assert_eq!(post.status, StatusCode::UNAUTHORIZED);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn unsafe_cross_origin_requests_are_refused() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let cookie = format!("__session={}", router.token("user_1"));
    let before = machine.requests().len();
    for origin in ["https://evil.test", "null", "https://code.test", "https://app.test.evil.test"] {
        let post = router.post(APP_HOST, "/").header("cookie", &cookie).header("origin", origin);
        let response = send(post).await;
        assert_eq!(
            (response.status, response.json()["code"].as_str()),
            (StatusCode::FORBIDDEN, Some("forbidden"))
        );
        let socket = router.get(APP_HOST, "/ws").header("cookie", &cookie).header("origin", origin);
        let socket = socket.header("connection", "upgrade").header("upgrade", "websocket");
        assert_eq!(send(socket).await.status, StatusCode::FORBIDDEN, "{origin}");
    }
    assert_eq!(machine.requests().len(), before);
    let same_origin =
        router.post(APP_HOST, "/x").header("cookie", &cookie).header("origin", "https://app.test");
    assert_eq!(send(same_origin).await.body, "POST /x");
    let safe = router.get(APP_HOST, "/").header("cookie", &cookie).header("origin", "https://evil.test");
    assert_eq!(send(safe).await.status, StatusCode::OK);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn router_pages_have_security_headers() -> Result<()> {
    for (scheme, hsts) in [("https", Some("max-age=31536000")), ("http", None)] {
        let router = TestRouter::start_with(&[("ROUTER_PUBLIC_SCHEME", scheme)], None).await?;
        let cookie = format!("__session={}", router.token("user_1"));
        let response =
            send(router.get(APP_HOST, "/").header("accept", "text/html").header("cookie", &cookie)).await;
        assert_eq!(response.status, StatusCode::SERVICE_UNAVAILABLE);
        let header = |name: &str| response.headers.get(name).and_then(|value| value.to_str().ok());
        assert_eq!(header("strict-transport-security"), hsts, "{scheme}");
        assert_eq!(header("x-content-type-options"), Some("nosniff"));
        assert_eq!(header("cross-origin-opener-policy"), Some("same-origin"));
        assert!(header("permissions-policy").is_some_and(|policy| policy.contains("camera=()")));
    }
    Ok(())
}

/// If the router uses HTTPS, a page from the same host over plain HTTP has a different origin.
#[tokio::test(flavor = "multi_thread")]
async fn plain_http_origin_is_cross_origin_under_https() -> Result<()> {
    let origin = format!("http://{APP_HOST}");
    for (scheme, expected) in [("https", StatusCode::FORBIDDEN), ("http", StatusCode::SERVICE_UNAVAILABLE)] {
        let router = TestRouter::start_with(&[("ROUTER_PUBLIC_SCHEME", scheme)], None).await?;
        let cookie = format!("__session={}", router.token("user_1"));
        let response =
            send(router.post(APP_HOST, "/x").header("cookie", &cookie).header("origin", &origin)).await;
        assert_eq!(response.status, expected, "{scheme}");
    }
    Ok(())
}
