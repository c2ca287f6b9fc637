//! Tests the scopes and lifetimes of operators' tokens, and the audit log.

use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use futures_util::future::join_all;
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};
use svc::platform::api::ENDPOINTS;
use svc::platform::api::endpoint::{Access, OPERATOR};
use svc::wire::operator::Scope;
use tokio::process::Command;

use super::stack::{ApiResponse, Process, SECRET, Stack};

const HOUR_SECONDS: u64 = 3600;

/// Creates an operator and returns the token.
async fn add_operator(stack: &Stack, process: &Process, name: &str, scopes: &[&str]) -> String {
    let body = json!({"name": name, "scopes": scopes});
    let response = stack.post(process, "/operators", &body).await;
    assert_eq!(response.status, 201, "{response:?}");
    response.body["token"].as_str().unwrap().to_owned()
}

/// Rotates an operator's token and returns the new one.
async fn rotate_token(stack: &Stack, process: &Process, name: &str, overlap_seconds: u64) -> String {
    let body = json!({"overlapSeconds": overlap_seconds});
    let response = stack.post(process, &format!("/operators/{name}/rotate"), &body).await;
    assert_eq!(response.status, 200, "{response:?}");
    response.body["token"].as_str().unwrap().to_owned()
}

fn request_with(stack: &Stack, process: &Process, token: &str, method: Method, path: &str) -> RequestBuilder {
    stack.request(process, method, path).bearer_auth(token)
}

async fn who_am_i(stack: &Stack, process: &Process, token: &str) -> ApiResponse {
    stack.send(request_with(stack, process, token, Method::GET, "/operators/whoami")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_accepts_only_its_declared_scopes() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let mut tokens = Vec::new();
    for scope in Scope::ALL {
        let name = format!("only-{scope}");
        tokens.push((scope, add_operator(&stack, &process, &name, &[scope.as_str()]).await));
    }
    let unknown = uuid::Uuid::now_v7().to_string();
    for endpoint in ENDPOINTS {
        let operation = &endpoint.operation;
        let accepts_operators = operation.credentials.contains(&OPERATOR);
        assert_eq!(endpoint.access.scopes().is_some(), accepts_operators, "{}", operation.id);
        assert_eq!(endpoint.access == Access::Open, operation.credentials.is_empty(), "{}", operation.id);
        let path = operation.path.replace("{id}", &unknown).replace("{operator}", "unknown");
        let path = path.replace("{version}", "v9").replace("{file}", "x").replace("{name}", "x");
        let path = path.replace("{alarm}", "none");
        for (scope, token) in &tokens {
            // The request has no body and names nothing that exists, so it has no effect.
            let response =
                stack.send(request_with(&stack, &process, token, operation.method.clone(), &path)).await;
            let context = format!("{} with the scope {scope}: {response:?}", operation.id);
            match endpoint.access.scopes() {
                Some(scopes) if scopes.contains(scope) => {
                    assert!(![401, 403].contains(&response.status), "{context}");
                }
                Some(scopes) => {
                    response.assert_problem(403, "forbidden");
                    let needed: Vec<_> = scopes.iter().map(|scope| scope.as_str()).collect();
                    assert_eq!(response.body["missingScopes"], json!(needed), "{context}");
                    let detail = response.body["detail"].as_str().unwrap();
                    assert!(detail.contains(&needed.join(" or ")), "{context}");
                }
                None if endpoint.access == Access::Machine => assert_eq!(response.status, 401, "{context}"),
                None => assert!(response.status < 400 || response.status == 503, "{context}"),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn revoked_token_is_refused_by_every_process_immediately() {
    let stack = Stack::start().await;
    let (first, second) = (stack.start_platform(), stack.start_platform());
    let token = add_operator(&stack, &first, "ada", &["read", "admin"]).await;
    for process in [&first, &second] {
        let identity = who_am_i(&stack, process, &token).await;
        assert_eq!((identity.status, &identity.body["name"]), (200, &json!("ada")), "{identity:?}");
        assert_eq!(identity.body["scopes"], json!(["read", "admin"]));
    }
    let revoked = stack.post(&first, "/operators/ada/revoke", &json!({})).await;
    assert_eq!((revoked.status, &revoked.body["state"]), (200, &json!("revoked")), "{revoked:?}");
    for process in [&second, &first] {
        let refused = who_am_i(&stack, process, &token).await;
        refused.assert_problem(401, "unauthorized");
        assert!(refused.body["detail"].as_str().unwrap().contains("ada has been revoked"), "{refused:?}");
    }
    stack.post(&first, "/operators/ada/rotate", &json!({})).await.assert_problem(409, "conflict");
    let again = json!({"name": "ada", "scopes": ["read"]});
    stack.post(&first, "/operators", &again).await.assert_problem(409, "conflict");
}

#[tokio::test(flavor = "multi_thread")]
async fn old_token_expires_when_rotation_overlap_ends() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let first = add_operator(&stack, &process, "ada", &["read"]).await;
    let second = rotate_token(&stack, &process, "ada", HOUR_SECONDS).await;
    for token in [&first, &second] {
        assert_eq!(who_am_i(&stack, &process, token).await.status, 200);
    }
    // After a second rotation, the first token is invalid, and the second is still valid.
    let third = rotate_token(&stack, &process, "ada", HOUR_SECONDS).await;
    who_am_i(&stack, &process, &first).await.assert_problem(401, "unauthorized");
    assert_eq!(who_am_i(&stack, &process, &second).await.status, 200);
    let client = stack.database.connect().await.unwrap();
    client
        .execute("UPDATE operators SET previous_expires_at = now() - interval '1 second'", &[])
        .await
        .unwrap();
    let expired = who_am_i(&stack, &process, &second).await;
    expired.assert_problem(401, "unauthorized");
    assert!(expired.body["detail"].as_str().unwrap().contains("has expired"), "{expired:?}");
    // Without an overlap, the old token becomes invalid on rotation.
    let fourth = rotate_token(&stack, &process, "ada", 0).await;
    who_am_i(&stack, &process, &third).await.assert_problem(401, "unauthorized");
    assert_eq!(who_am_i(&stack, &process, &fourth).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_or_forged_token_is_refused() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let token = add_operator(&stack, &process, "ada", &["read"]).await;
    let mut forged = token.clone();
    let last = forged.pop().unwrap();
    forged.push(if last == '0' { '1' } else { '0' });
    let unknown = format!("svco_{}_{}", uuid::Uuid::now_v7().simple(), "0".repeat(64));
    for wrong in [&forged, &unknown, &token[..token.len() - 1].to_owned(), &format!("{SECRET}x")] {
        who_am_i(&stack, &process, wrong).await.assert_problem(401, "unauthorized");
    }
    let client = stack.database.connect().await.unwrap();
    client.execute("UPDATE operators SET expires_at = now() - interval '1 second'", &[]).await.unwrap();
    who_am_i(&stack, &process, &token).await.assert_problem(401, "unauthorized");
    let listed = stack.get(&process, "/operators").await;
    assert_eq!(listed.body["operators"][0]["state"], "expired", "{listed:?}");
    // A rotation makes an expired operator valid again.
    let token = rotate_token(&stack, &process, "ada", 0).await;
    assert_eq!(who_am_i(&stack, &process, &token).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn admin_cannot_grant_scopes_they_lack() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let admin = add_operator(&stack, &process, "admin-only", &["admin", "read"]).await;
    add_operator(&stack, &process, "strong", &["operate"]).await;
    let send = async |path: &str, body: Value| {
        stack.send(request_with(&stack, &process, &admin, Method::POST, path).json(&body)).await
    };
    let refused = send("/operators", json!({"name": "eve", "scopes": ["read", "operate"]})).await;
    refused.assert_problem(403, "forbidden");
    assert_eq!(refused.body["missingScopes"], json!(["operate"]));
    // A rotation would return the operator's token to its caller.
    send("/operators/strong/rotate", json!({})).await.assert_problem(403, "forbidden");
    assert_eq!(send("/operators", json!({"name": "eve", "scopes": ["read"]})).await.status, 201);
    assert_eq!(send("/operators/strong/revoke", json!({})).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn audit_names_the_operator_and_no_table_stores_a_token() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let first = add_operator(&stack, &process, "ada", &["billing", "admin"]).await;
    let rotate = stack.request(&process, Method::POST, "/operators/ada/rotate").bearer_auth(SECRET);
    let rotate = rotate.header("idempotency-key", "rotate-once").json(&json!({}));
    let second = stack.send(rotate).await.body["token"].as_str().unwrap().to_owned();
    let slot = json!({"idpUserId": "user_1", "plan": "max", "status": "active"});
    let put = request_with(&stack, &process, &second, Method::PUT, "/vps/slots").json(&slot);
    assert_eq!(stack.send(put.header("idempotency-key", "slot-once")).await.status, 200);

    let audit = request_with(&stack, &process, &second, Method::GET, "/audit");
    let entries = stack.send(audit).await.body["entries"].clone();
    let audited: Vec<_> = entries.as_array().unwrap().iter().map(|e| (&e["actor"], &e["action"])).collect();
    let (ada, secret) = (json!("ada"), json!("operator"));
    let actions = ["slot.set", "operator.rotate", "operator.add"].map(|action| json!(action));
    assert_eq!(audited, [(&ada, &actions[0]), (&secret, &actions[1]), (&secret, &actions[2])]);
    assert!(entries[1]["before"]["expiresAt"].is_string(), "{entries}");

    let client = stack.database.connect().await.unwrap();
    for table in ["operators", "operator_audit", "idempotency_keys"] {
        let sql = format!("SELECT coalesce(string_agg(t::text, '|'), '') FROM {table} t");
        let text: String = client.query_one(&sql, &[]).await.unwrap().get(0);
        assert!(!text.is_empty(), "{table}");
        for token in [&first, &second] {
            let mac = token.rsplit('_').next().unwrap();
            assert!(!text.contains(mac), "{table} contains a token");
        }
    }
    assert!(!stack.log().contains("svco_"), "the log contains a token");
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_request_gets_the_same_token() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let body = json!({"name": "ada", "scopes": ["billing"]});
    let add = || {
        let add = stack.request(&process, Method::POST, "/operators").bearer_auth(SECRET);
        stack.send(add.header("idempotency-key", "add-ada").json(&body))
    };
    let (first, second) = (add().await, add().await);
    assert_eq!((first.status, &first.body), (201, &second.body), "{second:?}");
    let ada = first.body["token"].as_str().unwrap();
    let bob = add_operator(&stack, &process, "bob", &["billing"]).await;
    // Idempotency keys are separate for each operator.
    let put = |token: &str, user: &str| {
        let slot = json!({"idpUserId": user, "plan": "max", "status": "active"});
        let put = request_with(&stack, &process, token, Method::PUT, "/vps/slots");
        stack.send(put.header("idempotency-key", "shared").json(&slot))
    };
    assert_eq!(put(ada, "user_1").await.body["idpUserId"], "user_1");
    assert_eq!(put(&bob, "user_2").await.body["idpUserId"], "user_2");
    put(ada, "user_2").await.assert_problem(422, "idempotency_mismatch");
}

#[tokio::test(flavor = "multi_thread")]
async fn last_use_costs_one_write_for_many_requests() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let token = add_operator(&stack, &process, "ada", &["read"]).await;
    let client = stack.database.connect().await.unwrap();
    let row_version = async || {
        let row = client.query_one("SELECT xmin::text, last_used_at IS NOT NULL FROM operators", &[]).await;
        let row = row.unwrap();
        (row.get::<_, String>(0), row.get::<_, bool>(1))
    };
    assert!(!row_version().await.1);
    assert_eq!(who_am_i(&stack, &process, &token).await.status, 200);
    let first = row_version().await;
    assert!(first.1);
    for identity in join_all((0..20).map(|_| who_am_i(&stack, &process, &token))).await {
        assert_eq!(identity.status, 200, "{identity:?}");
    }
    assert_eq!(row_version().await, first);
    client.execute("UPDATE operators SET last_used_at = now() - interval '6 minutes'", &[]).await.unwrap();
    let old = row_version().await;
    who_am_i(&stack, &process, &token).await;
    assert_ne!(row_version().await, old, "a use must be recorded again after the interval");
}

#[tokio::test(flavor = "multi_thread")]
async fn audit_pages_contain_every_entry_once() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let client = stack.database.connect().await.unwrap();
    // Ten rows share each time, so a page can end between rows with the same time.
    let fill = "INSERT INTO operator_audit (audit_id, at, actor, action, target, request_id) \
        SELECT gen_random_uuid(), timestamptz '2026-01-01' + (n / 10) * interval '1 minute', \
        CASE n % 2 WHEN 0 THEN 'ada' ELSE 'bob' END, 'act-' || n % 3, 'target-' || n % 5, 'r' \
        FROM generate_series(0, 99) AS n";
    client.batch_execute(fill).await.unwrap();
    let list_ids = async |filter: &str| {
        let (mut ids, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = stack.get(&process, &format!("/audit?limit=7{filter}{cursor}")).await;
            assert_eq!(page.status, 200, "{page:?}");
            let entries = page.body["entries"].as_array().unwrap();
            ids.extend(entries.iter().map(|entry| entry["auditId"].as_str().unwrap().to_owned()));
            let Some(next) = page.body["nextCursor"].as_str() else { return ids };
            cursor = format!("&cursor={next}");
        }
    };
    for (filter, count) in [
        ("", 100),
        ("&actor=ada", 50),
        ("&action=act-0", 34),
        ("&target=target-1&actor=bob", 10),
        ("&since=2026-01-01T00:05:00Z", 50),
        ("&since=2026-01-01T00:05:00Z&until=2026-01-01T00:06:00Z", 10),
        ("&actor=unknown", 0),
    ] {
        let mut ids = list_ids(filter).await;
        assert_eq!(ids.len(), count, "{filter}");
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), count, "{filter}: an entry is duplicated");
    }
}

/// Runs `svcctl`, with or without a credential. Returns the exit code, stdout and stderr.
async fn run_svcctl(process: &Process, secret: Option<&str>, args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_svc"));
    command.arg("svcctl").args(args).env_clear().env("PLATFORM_PUBLIC_URL", &process.base);
    command.envs(secret.map(|secret| ("PLATFORM_SECRET", secret))).stdin(Stdio::null());
    let output = command.kill_on_drop(true).output().await.unwrap();
    let decode = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), decode(&output.stdout), decode(&output.stderr))
}

#[tokio::test(flavor = "multi_thread")]
async fn svcctl_manages_operators_and_shows_the_audit_log() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ada.token");
    let file = file.to_str().unwrap();
    let admin = async |args: &[&str]| run_svcctl(&process, Some(SECRET), args).await;

    let add = ["operator", "add", "ada", "--scope", "read,billing", "--token-file", file];
    let (exit_code, stdout, stderr) = admin(&add).await;
    assert_eq!(exit_code, Some(0), "{stdout}{stderr}");
    assert!(!stdout.contains("svco_") && stdout.contains("written to"), "{stdout}");
    let mode = std::fs::metadata(file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let ada = async |args: &[&str]| {
        let args: Vec<&str> = args.iter().copied().chain(["--secret-file", file]).collect();
        run_svcctl(&process, None, &args).await
    };
    let (exit_code, stdout, stderr) = ada(&["operator", "whoami"]).await;
    assert_eq!(exit_code, Some(0), "{stdout}{stderr}");
    assert!(stdout.contains("ada") && stdout.contains("read, billing"), "{stdout}");
    let (exit_code, stdout, _) = ada(&["doctor", "api"]).await;
    assert!(stdout.contains("you are ada, with the scopes read, billing"), "{exit_code:?} {stdout}");
    let (exit_code, _, stderr) = ada(&["operator", "list"]).await;
    assert_eq!(exit_code, Some(77));
    assert!(
        stderr.contains("lacks the scope admin") && stderr.contains("svcctl operator whoami"),
        "{stderr}"
    );

    let before = std::fs::read_to_string(file).unwrap();
    let (exit_code, stdout, stderr) =
        admin(&["operator", "rotate", "ada", "--overlap", "0s", "--token-file", file]).await;
    assert_eq!(exit_code, Some(0), "{stdout}{stderr}");
    assert_ne!(std::fs::read_to_string(file).unwrap(), before);
    let (exit_code, _, stderr) = run_svcctl(&process, Some(before.trim()), &["operator", "whoami"]).await;
    assert_eq!(exit_code, Some(77), "{stderr}");
    assert!(!stderr.contains("svco_"), "{stderr}");
    assert_eq!(ada(&["slot", "set", "user_1", "--plan", "max"]).await.0, Some(0));

    let (exit_code, stdout, stderr) = ada(&["audit", "--actor", "ada", "--since", "1h"]).await;
    assert_eq!(exit_code, Some(0), "{stdout}{stderr}");
    assert!(stdout.contains("ada  slot.set  user_1/primary") && stdout.lines().count() == 1, "{stdout}");
    let (_, stdout, _) = ada(&["audit", "--json", "--limit", "1"]).await;
    let page: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(page["entries"][0]["action"], "slot.set", "{page}");
    assert!(page["nextCursor"].is_string(), "{page}");
    let (exit_code, stdout, stderr) = admin(&["operator", "revoke", "ada", "--yes"]).await;
    assert_eq!(exit_code, Some(0), "{stdout}{stderr}");
    assert!(stdout.contains("revoked"), "{stdout}");
    assert_eq!(ada(&["operator", "whoami"]).await.0, Some(77));
}

#[tokio::test(flavor = "multi_thread")]
async fn svcctl_audit_follows_entries_that_commit_late() {
    use tokio::io::{AsyncBufReadExt, BufReader};

    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.subscribe(&process, "user_1").await;
    let client = stack.database.connect().await.unwrap();
    // This entry's transaction starts before the next entry's, and commits after it.
    let late = "BEGIN; INSERT INTO operator_audit (audit_id, actor, action, target, request_id) \
                VALUES (gen_random_uuid(), 'late', 'late.act', 't', 'r')";
    client.batch_execute(late).await.unwrap();

    let mut command = Command::new(env!("CARGO_BIN_EXE_svc"));
    command.args(["svcctl", "audit", "--follow", "--json"]).env_clear();
    command.env("PLATFORM_PUBLIC_URL", &process.base).env("PLATFORM_SECRET", SECRET);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = async || {
        let line = tokio::time::timeout(std::time::Duration::from_secs(30), lines.next_line()).await;
        let line =
            line.expect("a line must arrive before the timeout").unwrap().expect("the output must not end");
        serde_json::from_str::<Value>(&line).unwrap()
    };
    assert_eq!(next().await["target"], "user_1/primary");
    stack.subscribe(&process, "user_2").await;
    assert_eq!(next().await["target"], "user_2/primary");
    client.batch_execute("COMMIT").await.unwrap();
    assert_eq!(next().await["actor"], "late");
    stack.subscribe(&process, "user_3").await;
    assert_eq!(next().await["target"], "user_3/primary", "an entry was repeated");
}
