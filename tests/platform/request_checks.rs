//! Tests the order in which a request is checked, the error format, and the request id.

use reqwest::Method;
use serde_json::json;

use super::stack::{SECRET, Stack};

#[tokio::test(flavor = "multi_thread")]
async fn request_is_checked_in_the_documented_order() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let post = |path: &str| stack.request(&process, Method::POST, path);
    let large = || format!("{{\"idpUserId\": \"{}\"}}", "x".repeat(70_000));

    // Method and path come first, even if everything else is wrong.
    stack.send(post("/nothing/here").body(large())).await.assert_problem(404, "not_found");
    let wrong_method = stack.request(&process, Method::PATCH, "/vps/provision").body(large());
    let wrong_method = stack.send(wrong_method).await;
    wrong_method.assert_problem(405, "method_not_allowed");
    assert_eq!(wrong_method.headers["allow"], "POST");
    // The size, whether or not it is declared, comes before the credential.
    stack.send(post("/vps/provision").body(large())).await.assert_problem(413, "request_too_large");
    let parts = futures_util::stream::iter((0..70).map(|_| Ok::<_, std::io::Error>("x".repeat(1000))));
    let undeclared = post("/vps/provision").body(reqwest::Body::wrap_stream(parts));
    stack.send(undeclared).await.assert_problem(413, "request_too_large");
    // The credential comes before the body and the id.
    for path in ["/vps/provision", "/vps/recover", "/vps/x/heartbeat"] {
        stack.send(post(path).body("{")).await.assert_problem(401, "unauthorized");
        stack.send(post(path).bearer_auth("wrong").body("{")).await.assert_problem(401, "unauthorized");
    }
    stack.send(post("/vps/x/boot-failure").body("{")).await.assert_problem(401, "registration_rejected");
    let anonymous = stack.request(&process, Method::GET, "/vps/x");
    let response = stack.send(anonymous).await;
    response.assert_problem(401, "unauthorized");
    assert_eq!(response.headers["www-authenticate"], "Bearer");
    // JSON comes before the schema, whose errors are reported together.
    let malformed =
        post("/vps/provision").bearer_auth(SECRET).header("content-type", "application/json").body("{");
    stack.send(malformed).await.assert_problem(400, "invalid_request");
    let without_content_type = post("/vps/provision").bearer_auth(SECRET).body("{}");
    stack.send(without_content_type).await.assert_problem(415, "unsupported_media_type");
    let body = json!({"idpUserId": "a/b", "slot": 7, "kind": "toy", "color": "red"});
    let response = stack.post(&process, "/vps/provision", &body).await;
    response.assert_problem(400, "invalid_request");
    let pointers: Vec<_> =
        response.body["errors"].as_array().unwrap().iter().map(|e| e["pointer"].clone()).collect();
    assert_eq!(json!(pointers), json!(["/idpUserId", "/slot", "/handle", "/kind", "/color"]));
    stack.get(&process, "/vps/not-a-uuid").await.assert_problem(400, "invalid_request");
    stack.get(&process, "/vps/operations/7").await.assert_problem(400, "invalid_request");
    // The state comes last.
    stack
        .get(&process, &format!("/vps/{}", uuid::Uuid::now_v7()))
        .await
        .assert_problem(404, "machine_not_found");
    stack
        .get(&process, &format!("/vps/operations/{}", uuid::Uuid::now_v7()))
        .await
        .assert_problem(404, "not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn request_id_of_the_client_is_kept_and_logged() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let request = stack.request(&process, Method::GET, "/vps/x").header("x-request-id", "my-request-1");
    let response = stack.send(request).await;
    assert_eq!(response.body["requestId"], "my-request-1");
    assert!(stack.log().contains("my-request-1"), "{}", stack.log());
}
