//! Operators query a machine's host for earlier versions of files, and restore them. Each of these requests is
//! audited.

use reqwest::Method;
use serde_json::{Value, json};

use super::fake_host::{FakeHost, start_host};
use super::stack::{ApiResponse, Process, Stack};
use super::usage::add_operator;

/// Sets the host's response to each request about files.
fn set_files_response(host: &FakeHost, status: u16, body: &Value) {
    host.behavior.lock().unwrap().files_response =
        (http::StatusCode::from_u16(status).unwrap(), body.to_string());
}

async fn list_audit(stack: &Stack, process: &Process, action: &str) -> Vec<Value> {
    let page = stack.get(process, &format!("/audit?action={action}")).await;
    page.body["entries"].as_array().unwrap().clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_are_sanitized_and_requests_audited() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let ada = add_operator(&stack, &process, "ada", "operate").await;
    let host = start_host(&stack, &process).await;
    let machine = &host.settings.machine;
    let send = async |method: Method, path: &str, body: Option<&Value>| -> ApiResponse {
        let request =
            stack.request(&process, method, &format!("/vps/{machine}/files/{path}")).bearer_auth(&ada);
        stack
            .send(match body {
                Some(body) => request.json(body),
                None => request,
            })
            .await
    };
    let entry = |name: &str| {
        json!({"name": name, "kind": "file", "sizeBytes": 3, "mode": "0644",
            "modifiedAt": "2026-01-02T03:04:05.678Z"})
    };
    let listing = |entries: Vec<Value>| {
        json!({"path": "/home/svc/home", "snapshot": "ab", "savedAt": "2026-01-02T03:04:05.678Z",
            "entry": {"name": "home", "kind": "directory", "modifiedAt": "2026-01-02T03:04:05.678Z"},
            "entries": entries, "nextCursor": null, "secret": "x"})
    };
    set_files_response(&host, 200, &listing(vec![entry("a\u{1b}[2J")]));
    let listed = send(Method::GET, "at?path=projects", None).await;
    assert_eq!((listed.status, &listed.headers["cache-control"].to_str().unwrap()), (200, &"no-store"));
    assert_eq!(listed.body["entries"][0]["name"], "a\u{FFFD}[2J");
    assert_eq!(listed.body["secret"], Value::Null);
    set_files_response(&host, 200, &listing(vec![entry("a"); 10_001]));
    send(Method::GET, "at", None).await.assert_problem(502, "host_answer_invalid");
    set_files_response(&host, 404, &json!({"detail": "It did not exist.\u{1b}"}));
    let missing = send(Method::GET, "versions?path=never", None).await;
    missing.assert_problem(404, "not_found");
    assert_eq!(missing.body["detail"], "It did not exist.\u{FFFD}");
    set_files_response(
        &host,
        400,
        &json!({"detail": "d", "errors": [{"pointer": "?path", "detail": "must be below the home directory"}]}),
    );
    let invalid = send(Method::GET, "versions?path=../x", None).await;
    invalid.assert_problem(400, "invalid_request");
    assert_eq!(
        invalid.body["errors"][0],
        json!({"pointer": "?path", "detail": "must be below the home directory"})
    );
    let rows = list_audit(&stack, &process, "files.list").await;
    let outcomes: Vec<_> = rows.iter().map(|row| &row["after"]["outcome"]).collect();
    assert_eq!(outcomes, ["host_answer_invalid", "read"]);
    assert_eq!((&rows[1]["actor"], &rows[1]["after"]["path"]), (&json!("ada"), &json!("projects")));
    let versions = list_audit(&stack, &process, "files.versions").await;
    assert_eq!(versions[1]["after"], json!({"path": "never", "limit": "50", "outcome": "not_found"}));

    // A restore is audited before it is sent, and again with its outcome, even if the response is invalid.
    let body = json!({"path": "projects", "replace": true});
    set_files_response(&host, 200, &json!("not an object"));
    send(Method::POST, "restore", Some(&body)).await.assert_problem(502, "host_answer_invalid");
    set_files_response(&host, 202, &json!({"requestId": "r", "requestedAt": "2026-01-02T03:04:05.678Z"}));
    assert_eq!(send(Method::POST, "restore", Some(&body)).await.status, 202);
    let restores = list_audit(&stack, &process, "files.restore").await;
    let outcomes: Vec<_> = restores.iter().map(|row| &row["after"]["outcome"]).collect();
    assert_eq!(outcomes, ["accepted", "requested", "host_answer_invalid", "requested"]);
    // The host reports a reused idempotency key that the platform could not detect, for example because it had stopped
    // before it stored the first response.
    set_files_response(&host, 422, &json!({"detail": "The key was used for another restore."}));
    send(Method::POST, "restore", Some(&body)).await.assert_problem(422, "idempotency_mismatch");
    send(Method::GET, "at", None).await.assert_problem(502, "host_refused");
    let excluded = json!({"measuredAt": "2026-01-02T03:04:05.678Z", "entries": 2, "bytes": 3, "complete": true,
        "largest": [{"path": "/home/svc/home/a\u{1b}", "entries": 2, "bytes": 3}]});
    set_files_response(&host, 200, &json!({"files": 7, "excluded": excluded, "key": "x"}));
    let status = send(Method::GET, "status", None).await;
    assert_eq!(status.body["excluded"]["largest"][0]["path"], "/home/svc/home/a\u{FFFD}");
    assert_eq!((&status.body["files"], &status.body["key"]), (&json!(7), &Value::Null));
    assert_eq!(list_audit(&stack, &process, "files.status").await.len(), 1);
    set_files_response(&host, 200, &json!({"restore": null}));
    let restore = send(Method::GET, "restore", None).await;
    assert_eq!((restore.status, &restore.body), (200, &json!({"restore": null})));
}

#[tokio::test(flavor = "multi_thread")]
async fn file_history_requires_operate_scope() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host = start_host(&stack, &process).await;
    for scope in ["read", "billing", "metrics"] {
        let token = add_operator(&stack, &process, &format!("only-{scope}"), scope).await;
        let path = format!("/vps/{}/files/at", host.settings.machine);
        let request = stack.request(&process, Method::GET, &path).bearer_auth(&token);
        stack.send(request).await.assert_problem(403, "forbidden");
    }
    assert_eq!(host.call_count("GET", "/api/files/at"), 0);
}
