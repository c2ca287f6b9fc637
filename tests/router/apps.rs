//! The owner gets an app's page in a frame. The page is loaded with an app token, which is valid only for that app.

use anyhow::Result;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use svc::http::proof::Route;
use svc::machine::id::MachineId;

use super::machine::TestMachine;
use super::test_router::{APP_HOST, CODE_HOST, RouterResponse, TestRouter, send};

/// Requests an app token with the user's token from the identity provider.
async fn request_app_token(router: &TestRouter, user: &str, app: &str) -> String {
    let token_request =
        router.post(APP_HOST, "/_svc/app-token").bearer_auth(router.token(user)).json(&json!({ "app": app }));
    let response = send(token_request).await;
    assert_eq!(response.status, StatusCode::OK, "{response:?}");
    response.json()["token"].as_str().expect("the response should contain a token").to_owned()
}

/// Parses the frame's settings, as its script does.
fn parse_settings(frame: &RouterResponse) -> Value {
    let start = frame.body.find("application/json\">").expect("the frame should contain settings")
        + "application/json\">".len();
    let end = start + frame.body[start..].find("</script>").expect("the settings should end");
    serde_json::from_str(&frame.body[start..end]).expect("the settings should be JSON")
}

/// Signs an app token with the given claims.
fn sign_app_token(router: &TestRouter, claims: &Value) -> String {
    format!("svca_{}", router.app_signer.sign_json(claims))
}

#[tokio::test(flavor = "multi_thread")]
async fn app_page_is_framed_and_loaded_by_token() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let before = machine.requests().len();
    let page = router.get(APP_HOST, "/apps/notes/a/b?x=1").header("accept", "text/html");
    let frame = send(page.bearer_auth(router.token("user_1"))).await;
    assert_eq!(frame.status, StatusCode::OK);
    assert_eq!(machine.requests().len(), before, "the request for the frame reached the machine");
    let policy = frame.headers["content-security-policy"].to_str()?;
    for part in [
        "default-src 'none'",
        "frame-src http://app.test/apps/notes/;",
        "frame-ancestors 'self'",
        "script-src 'sha256-",
    ] {
        assert!(policy.contains(part), "{policy}");
    }
    assert_eq!(
        (&frame.headers["cache-control"], &frame.headers["referrer-policy"]),
        (&"no-store".parse()?, &"no-referrer".parse()?)
    );
    assert!(!frame.body.contains("allow-same-origin"), "{}", frame.body);
    let settings = parse_settings(&frame);
    assert_eq!((&settings["app"], &settings["path"]), (&json!("notes"), &json!("a/b?x=1")));

    let inner = format!("/apps/notes/~{}/a/b?x=1", settings["token"].as_str().unwrap());
    let response = send(router.get(APP_HOST, &inner).header("accept", "text/html")).await;
    assert_eq!((response.status, &*response.body), (StatusCode::OK, "GET /apps/notes/a/b"));
    let received = machine.last_request();
    assert_eq!(received.uri, "/apps/notes/a/b?x=1", "the token must not be forwarded");
    let claims = router.verify_proof(&machine, &received.headers);
    assert_eq!((claims.route, claims.app.as_deref()), (Route::App, Some("notes")));
    // Scripts and images of the owner's own pages are not documents, so they are not framed.
    assert_eq!(router.fetch("user_1", "/apps/notes/x.js").await.body, "GET /apps/notes/x.js");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn opaque_origin_page_can_use_its_token() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let token = request_app_token(&router, "user_1", "notes").await;
    let preflight = router
        .request(Method::OPTIONS, APP_HOST, "/api/bridge/query")
        .header("origin", "null")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization,content-type");
    let allowed = send(preflight).await;
    assert_eq!(allowed.status, StatusCode::NO_CONTENT);
    assert_eq!(allowed.headers["access-control-allow-origin"], "null");
    assert!(allowed.headers["access-control-allow-headers"].to_str()?.contains("authorization"));
    assert!(allowed.headers.get("access-control-allow-credentials").is_none());

    let query =
        router.post(APP_HOST, "/api/bridge/query").header("origin", "null").bearer_auth(&token).body("{}");
    let response = send(query).await;
    assert_eq!((response.status, &*response.body), (StatusCode::OK, "POST /api/bridge/query"));
    assert_eq!(response.headers["access-control-allow-origin"], "null");
    let received = machine.last_request();
    assert!(received.headers.get("authorization").is_none());
    assert_eq!(router.verify_proof(&machine, &received.headers).app.as_deref(), Some("notes"));

    // The page can also read an error response; pages from other origins cannot.
    let refused =
        router.post(APP_HOST, "/api/bridge/query").header("origin", "null").bearer_auth("svca_x.y.z");
    let refused = send(refused).await;
    assert_eq!(
        (refused.status, refused.json()["code"].as_str()),
        (StatusCode::UNAUTHORIZED, Some("unauthorized"))
    );
    assert_eq!(refused.headers["access-control-allow-origin"], "null");
    let other_origin =
        router.post(APP_HOST, "/api/bridge/query").header("origin", "https://evil.test").bearer_auth(&token);
    let other_origin = send(other_origin).await;
    assert_eq!(other_origin.status, StatusCode::FORBIDDEN);
    assert!(other_origin.headers.get("access-control-allow-origin").is_none());
    // A cookie grants no access to an opaque origin.
    let cookie = format!("__session={}", router.token("user_1"));
    let by_cookie =
        router.post(APP_HOST, "/api/bridge/query").header("origin", "null").header("cookie", cookie);
    assert_eq!(send(by_cookie).await.status, StatusCode::FORBIDDEN);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn app_token_opens_only_its_app_on_its_machine() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let token = request_app_token(&router, "user_1", "notes").await;
    let before = machine.requests().len();
    let other_app = send(router.get(APP_HOST, &format!("/apps/tasks/~{token}/"))).await;
    assert_eq!(other_app.status, StatusCode::FORBIDDEN);
    let on_code = send(router.get(CODE_HOST, "/").bearer_auth(&token)).await;
    assert_eq!(on_code.status, StatusCode::UNAUTHORIZED, "an app token must not open code-server");
    let by_app =
        send(router.post(APP_HOST, "/_svc/app-token").bearer_auth(&token).json(&json!({"app": "tasks"})))
            .await;
    assert_eq!(by_app.status, StatusCode::FORBIDDEN, "an app must not create tokens");
    let now = jiff::Timestamp::now().as_second();
    let claims = |change: &dyn Fn(&mut Value)| {
        let mut claims = json!({ "iss": "svc-app-token", "sub": "user_1", "aud": machine.id, "app": "notes",
            "iat": now, "exp": now + 60 });
        change(&mut claims);
        claims
    };
    let bad = [
        claims(&|c| c["iss"] = json!("svc-platform")),
        claims(&|c| c["sub"] = json!("user_2")),
        claims(&|c| c["aud"] = json!(MachineId::new())),
        claims(&|c| c["exp"] = json!(now - 40)),
        claims(&|c| c["exp"] = json!(now + 7200)),
        claims(&|c| c["app"] = json!("../x")),
    ];
    for claims in &bad {
        let response =
            send(router.get(APP_HOST, "/apps/notes/x").bearer_auth(sign_app_token(&router, claims))).await;
        assert_eq!(response.status, StatusCode::UNAUTHORIZED, "{claims}");
    }
    let as_proof = router.get(APP_HOST, "/").header("x-svc-proof", token.trim_start_matches("svca_"));
    assert_eq!(send(as_proof).await.status, StatusCode::UNAUTHORIZED);
    // An invalid token is rejected even if the cookie is valid.
    let cookie = format!("__session={}", router.token("user_1"));
    let with_token_and_cookie =
        router.get(APP_HOST, "/apps/notes/x").bearer_auth("svca_a.b.c").header("cookie", cookie);
    assert_eq!(send(with_token_and_cookie).await.status, StatusCode::UNAUTHORIZED);
    assert_eq!(machine.requests().len(), before, "a request reached the machine");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn replaced_machines_token_is_refused_and_page_is_notified() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let token = request_app_token(&router, "user_1", "notes").await;
    router.set_status(&machine, "recovering").await?;
    router.wait_for_status("user_1", StatusCode::SERVICE_UNAVAILABLE).await;
    let path = format!("/apps/notes/~{token}/");
    let waiting = send(router.get(APP_HOST, &path)).await;
    assert_eq!(
        (waiting.status, waiting.json()["machineStatus"].clone()),
        (StatusCode::SERVICE_UNAVAILABLE, json!("recovering"))
    );
    let sql = format!(
        "UPDATE user_machines SET deleted_at = now(), epoch = 99 WHERE machine_id = '{}'",
        machine.id
    );
    router.sql.batch_execute(&sql).await?;
    let next = TestMachine::start().await?;
    router.add_machine(&next, "user_1", "primary", "running").await?;
    router.wait_for_status("user_1", StatusCode::OK).await;
    let page = send(router.get(APP_HOST, &path).header("accept", "text/html")).await;
    assert_eq!(page.status, StatusCode::UNAUTHORIZED);
    assert!(page.body.contains("svc:app-token-ended"), "{}", page.body);
    let fresh = request_app_token(&router, "user_1", "notes").await;
    assert_eq!(send(router.get(APP_HOST, &format!("/apps/notes/~{fresh}/x"))).await.status, StatusCode::OK);
    assert_eq!(router.verify_proof(&next, &next.last_request().headers).app.as_deref(), Some("notes"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_require_signed_in_owner_and_running_machine() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let token_request = |body: Value| router.post(APP_HOST, "/_svc/app-token").json(&body);
    assert_eq!(send(token_request(json!({"app": "notes"}))).await.status, StatusCode::UNAUTHORIZED);
    let owner = router.token("user_1");
    for bad in [json!({}), json!({"app": "No"}), json!({"app": "notes", "x": 1}), json!([])] {
        let response = send(token_request(bad.clone()).bearer_auth(&owner)).await;
        assert_eq!(
            (response.status, response.json()["code"].as_str()),
            (StatusCode::BAD_REQUEST, Some("invalid_request")),
            "{bad}"
        );
    }
    let cookie = format!("__session={owner}");
    let foreign = token_request(json!({"app": "notes"})).header("cookie", &cookie).header("origin", "null");
    assert_eq!(send(foreign).await.status, StatusCode::FORBIDDEN);
    assert_eq!(
        send(router.get(APP_HOST, "/_svc/app-token").bearer_auth(&owner)).await.status,
        StatusCode::METHOD_NOT_ALLOWED
    );
    router.set_status(&machine, "resizing").await?;
    router.wait_for_status("user_1", StatusCode::SERVICE_UNAVAILABLE).await;
    assert_eq!(
        send(token_request(json!({"app": "notes"})).bearer_auth(&owner)).await.status,
        StatusCode::SERVICE_UNAVAILABLE
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_app_tokens_are_limited_by_address() -> Result<()> {
    let router = TestRouter::start_with(&[("ROUTER_ADDRESS_CHECKS_PER_SECOND", "1")], None).await?;
    let machine = TestMachine::start().await?;
    router.add_machine(&machine, "user_1", "primary", "running").await?;
    router.wait_for_status("user_1", StatusCode::OK).await;
    let token = request_app_token(&router, "user_1", "notes").await;
    let mut refused = Vec::new();
    for number in 0..40 {
        let guess = router.get(APP_HOST, "/apps/notes/x").bearer_auth(format!("svca_a.b.{number}"));
        refused.push(send(guess).await);
    }
    assert_eq!(refused[0].status, StatusCode::UNAUTHORIZED, "{:?}", refused[0]);
    let limited = refused
        .iter()
        .find(|response| response.status == StatusCode::TOO_MANY_REQUESTS)
        .expect("a request should get 429");
    assert!(limited.headers.contains_key("retry-after"), "{limited:?}");
    let good = send(router.get(APP_HOST, "/apps/notes/x").bearer_auth(token)).await;
    assert_eq!(good.status, StatusCode::OK, "forged tokens must not limit a valid one: {good:?}");
    Ok(())
}
