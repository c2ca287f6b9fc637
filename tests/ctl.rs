//! Runs `svcctl` against a fake platform with scripted responses, and checks its requests, output and exit codes.

mod copies;
mod decisions;
pub mod doctor;
mod end_to_end;
mod provision;
pub mod report;
mod terminal;
mod verify_rollout;

use std::collections::VecDeque;
use std::process::{Output, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

const MACHINE: &str = "019a0000-0000-7000-8000-000000000001";
const OPERATION: &str = "019a0000-0000-7000-8000-000000000002";
const SECRET: &str = "the-operators-secret";

enum Reply {
    Json(u16, Value),
    /// Closes the connection without a response after reading the request.
    Lost,
}

#[derive(Debug, Clone)]
struct ReceivedRequest {
    line: String,
    headers: Vec<(String, String)>,
    body: String,
}

impl ReceivedRequest {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// A server that returns scripted responses and records the requests.
struct FakePlatform {
    base: String,
    requests: Arc<Mutex<Vec<ReceivedRequest>>>,
}

impl FakePlatform {
    async fn start(replies: impl IntoIterator<Item = Reply>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&requests);
        let mut replies: VecDeque<Reply> = replies.into_iter().collect();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let Some(request) = read_request(&mut stream).await else { continue };
                log.lock().unwrap().push(request);
                let unscripted = Reply::Json(500, problem(500, "internal", "No more replies."));
                if let Reply::Json(status, body) = replies.pop_front().unwrap_or(unscripted) {
                    let body = body.to_string();
                    let head = format!(
                        "HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                        body.len()
                    );
                    stream.write_all((head + &body).as_bytes()).await.ok();
                }
            }
        });
        Self { base, requests }
    }

    fn requests(&self) -> Vec<ReceivedRequest> {
        self.requests.lock().unwrap().clone()
    }

    async fn svcctl(&self, args: &[&str]) -> Output {
        svcctl(args, &[("PLATFORM_PUBLIC_URL", self.base.as_str()), ("PLATFORM_SECRET", SECRET)]).await
    }
}

async fn svcctl(args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_svc"));
    command.arg("svcctl").args(args).env_clear().envs(env.iter().copied());
    command.stdin(Stdio::null()).kill_on_drop(true).output().await.unwrap()
}

async fn read_request(stream: &mut TcpStream) -> Option<ReceivedRequest> {
    let mut bytes = Vec::new();
    loop {
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let mut lines = head.lines();
        let line = lines.next()?.to_owned();
        let headers: Vec<_> = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        let request = ReceivedRequest { line, headers, body: body.to_owned() };
        let length = request.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
        if body.len() >= length {
            return Some(request);
        }
    }
}

fn problem(status: u16, code: &str, detail: &str) -> Value {
    json!({"type": "about:blank", "title": "T", "status": status, "detail": detail, "code": code, "requestId": "req-7"})
}

fn record(status: &str, operation: Option<Value>) -> Value {
    json!({
        "machineId": MACHINE, "idpUserId": "user_1", "slot": "primary", "handle": "ada", "kind": "customer",
        "status": status, "failure": null, "epoch": 1, "restoreMode": "required", "serverType": "cpx22", "location": "nbg1",
        "imageVersion": "v1", "httpsPort": 443, "createdAt": "2026-01-01T00:00:00.000Z",
        "updatedAt": "2026-01-01T00:00:00.000Z", "operations": Vec::from_iter(operation),
    })
}

fn operation(kind: &str, state: &str, steps: &[&str]) -> Value {
    let log: Vec<_> = steps
        .iter()
        .map(
            |step| json!({"at": "2026-01-01T00:00:00.000Z", "step": step, "outcome": "done", "detail": null}),
        )
        .collect();
    json!({"operationId": OPERATION, "machineId": MACHINE, "kind": kind, "state": state,
           "step": steps.last().unwrap_or(&"first"), "attempts": 1, "createdAt": "2026-01-01T00:00:00.000Z",
           "updatedAt": "2026-01-01T00:00:00.000Z",
           "errorCode": if state == "failed" { json!("provisioning_error") } else { json!(null) }, "log": log})
}

fn accepted() -> Reply {
    Reply::Json(202, json!({"machineId": MACHINE, "status": "provisioning", "operationId": OPERATION}))
}

/// An older platform's response to a quote request.
fn unsupported_quote() -> Reply {
    Reply::Json(404, problem(404, "not_found", "No such route."))
}

/// Arguments for a `provision` that does not prompt.
const PROVISION: [&str; 6] = ["provision", "user_1", "--handle", "ada", "--confirm-cost", "--confirm-opt-in"];

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test]
async fn lost_response_is_retried_with_the_same_idempotency_key() {
    let platform = FakePlatform::start([
        unsupported_quote(),
        Reply::Lost,
        Reply::Json(503, problem(503, "store_unavailable", "…")),
        accepted(),
    ])
    .await;
    let output = platform.svcctl(&PROVISION).await;
    assert!(output.status.success(), "{}", stderr(&output));
    let requests = platform.requests().split_off(1);
    assert_eq!(requests.len(), 3);
    let key = requests[0].header("idempotency-key").unwrap();
    for request in &requests {
        assert_eq!(request.line, "POST /vps/provision HTTP/1.1");
        assert_eq!(request.header("idempotency-key"), Some(key));
        assert_eq!(request.header("authorization"), Some(format!("Bearer {SECRET}").as_str()));
        let body: Value = serde_json::from_str(&request.body).unwrap();
        assert_eq!(body, json!({"idpUserId": "user_1", "slot": "primary", "handle": "ada"}));
    }
}

#[tokio::test]
async fn json_output_is_the_api_response() {
    let body = json!({"machines": [], "nextCursor": null, "unknown": {"b": 1, "a": 2}});
    let platform = FakePlatform::start([Reply::Json(200, body.clone())]).await;
    let output = platform.svcctl(&["list", "--status", "running", "--json"]).await;
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{body}\n"));
    assert_eq!(platform.requests()[0].line, "GET /vps?status=running HTTP/1.1");
}

#[tokio::test]
async fn wait_shows_each_step_once_and_ends_with_the_record() {
    let running = operation("provision", "running", &["fence"]);
    let done = operation("provision", "succeeded", &["fence", "create_server"]);
    let platform = FakePlatform::start([
        unsupported_quote(),
        accepted(),
        Reply::Json(200, record("provisioning", Some(running.clone()))),
        Reply::Json(200, record("provisioning", Some(running))),
        Reply::Json(200, record("running", Some(done))),
    ])
    .await;
    let output = platform.svcctl(&[&PROVISION[..], &["--wait", "--json"]].concat()).await;
    let text = stderr(&output);
    assert!(output.status.success(), "{text}");
    assert_eq!(text.matches("  fence  done").count(), 1, "{text}");
    assert_eq!(text.matches("  create_server  done").count(), 1, "{text}");
    let printed_record: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(printed_record["status"], "running");
}

#[tokio::test]
async fn wait_shows_boot_stages_between_steps_and_the_failure() {
    let stages = |names: &[&str]| {
        let stages: Vec<_> = (2..)
            .zip(names)
            .map(|(second, name)| json!({"stage": name, "at": format!("2026-01-01T00:00:0{second}.500Z")}))
            .collect();
        json!({"stage": names.last(), "at": "2026-01-01T00:00:09.000Z", "stages": stages})
    };
    let machine = |status: &str, state: &str, boot: Value, failure: Value| {
        let mut operation = operation("provision", state, &["create_server"]);
        operation["createdAt"] = "2026-01-01T00:00:00.000Z".into();
        let mut record = record(status, Some(operation));
        record["boot"] = boot;
        record["failure"] = failure;
        Reply::Json(200, record)
    };
    let message = "svc-restore: exit status: 69: the store cannot be reached";
    let platform = FakePlatform::start([
        unsupported_quote(),
        accepted(),
        machine("provisioning", "running", Value::Null, Value::Null),
        machine("provisioning", "running", stages(&["database", "bundle"]), Value::Null),
        machine(
            "failed",
            "failed",
            stages(&["database", "bundle", "restore"]),
            json!({"cause": "boot_reported", "stage": "restore", "message": message}),
        ),
    ])
    .await;
    let output = platform.svcctl(&[&PROVISION[..], &["--wait"]].concat()).await;
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(69), "{text}");
    for line in
        ["0.0 s  create_server  done", "2.5 s  boot: database", "3.5 s  boot: bundle", "4.5 s  boot: restore"]
    {
        assert_eq!(text.matches(line).count(), 1, "{line}: {text}");
    }
    for part in [message, "at restore", "next: ", "svcctl recover user_1"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[tokio::test]
async fn handle_resolves_to_its_active_machine() {
    let page = |machines: Vec<Value>| Reply::Json(200, json!({"machines": machines, "nextCursor": null}));
    let mut replaced = record("running", None);
    replaced["replacedBy"] = OPERATION.into();
    let replies = [page(vec![replaced, record("running", None)]), Reply::Json(200, record("running", None))];
    let platform = FakePlatform::start(replies).await;
    let output = platform.svcctl(&["status", "ada"]).await;
    assert!(output.status.success(), "{}", stderr(&output));
    let lines: Vec<_> = platform.requests().into_iter().map(|request| request.line).collect();
    assert_eq!(lines, ["GET /vps?handle=ada HTTP/1.1".to_owned(), format!("GET /vps/{MACHINE} HTTP/1.1")]);

    for (machines, reason) in
        [(vec![], "no active machine"), (vec![record("running", None); 2], "several slots")]
    {
        let platform = FakePlatform::start([page(machines)]).await;
        let output = platform.svcctl(&["delete", "ada", "--yes"]).await;
        assert_eq!(output.status.code(), Some(65));
        assert!(stderr(&output).contains(reason), "{}", stderr(&output));
        assert_eq!(platform.requests().len(), 1);
    }
}

#[tokio::test]
async fn json_failure_is_a_single_object() {
    let platform =
        FakePlatform::start([Reply::Json(409, problem(409, "handle_taken", "The handle is taken."))]).await;
    let output = platform.svcctl(&["--json", "provision", "user_1", "--handle", "ada"]).await;
    assert_eq!(output.status.code(), Some(65));
    assert!(output.stdout.is_empty());
    let printed: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!((&printed["code"], &printed["exit"]), (&json!("handle_taken"), &json!(65)));
    assert_eq!(printed["requestId"], "req-7");
    assert!(printed["next"].as_str().is_some_and(|next| next.contains("another handle")), "{printed}");
}

#[tokio::test]
async fn backup_wait_ends_with_the_new_snapshot_or_the_host_error() {
    let backup = |key: &str| {
        json!({"key": key, "sizeBytes": 2048, "sha256": "00", "takenAt": "2026-01-01T00:00:00.000Z",
        "verifiedAt": "2026-01-01T00:00:01.000Z", "machineId": MACHINE, "epoch": 1, "latest": true})
    };
    let page =
        |key: &str| Reply::Json(200, json!({"latest": key, "backups": [backup(key)], "nextCursor": null}));
    let accepted =
        || Reply::Json(202, json!({"machineId": MACHINE, "requestedAt": "2026-01-01T00:00:00.000Z"}));
    let machine_with = |backup: Value| {
        let mut record = record("running", None);
        record["lastBackup"] = backup;
        Reply::Json(200, record)
    };
    let (old, failed_poll) = (json!({"status": "error", "error": "earlier"}), (0..5).map(|_| Reply::Lost));
    let start = [machine_with(old.clone()), page("old"), accepted(), page("old"), machine_with(old.clone())];
    let platform = FakePlatform::start(start.into_iter().chain(failed_poll).chain([page("new")])).await;
    let output = platform.svcctl(&["--json", "backup", "now", MACHINE, "--wait"]).await;
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap(), backup("new"));

    let failed = machine_with(json!({"status": "error", "error": "the store refused"}));
    let platform =
        FakePlatform::start([machine_with(old), page("old"), accepted(), page("old"), failed]).await;
    let output = platform.svcctl(&["backup", "now", MACHINE, "--wait"]).await;
    assert_eq!(output.status.code(), Some(69));
    assert!(stderr(&output).contains("the store refused"), "{}", stderr(&output));
}

#[tokio::test]
async fn deploy_without_id_uses_open_or_newest_rollout() {
    let rollout = |id: &str, state: &str| {
        json!({"rolloutId": id, "imageVersion": "v2", "state": state, "why": null, "canary": 1, "batchSize": 10,
               "maxFailures": 1, "createdAt": "2026-01-01T00:00:00.000Z", "updatedAt": "2026-01-01T00:00:00.000Z",
               "requestId": "req-1", "totals": {"waiting": 0, "asked": 0, "updated": 1, "failed": 0, "skipped": 0}})
    };
    let page = |all: &[Value]| Reply::Json(200, json!({ "rollouts": all }));
    let with_machines = |id: &str, state: &str| {
        let mut rollout = rollout(id, state);
        rollout["machines"] = json!([]);
        Reply::Json(200, rollout)
    };
    let (open, ended) = (rollout(MACHINE, "running"), rollout(OPERATION, "stopped"));
    for (subcommand, line) in [
        ("status", format!("GET /vps/deploy/{MACHINE} HTTP/1.1")),
        ("pause", format!("POST /vps/deploy/{MACHINE}/pause HTTP/1.1")),
        ("resume", format!("POST /vps/deploy/{MACHINE}/resume HTTP/1.1")),
        ("abort", format!("POST /vps/deploy/{MACHINE}/abort HTTP/1.1")),
    ] {
        let replies = [page(&[open.clone(), ended.clone()]), with_machines(MACHINE, "running")];
        let platform = FakePlatform::start(replies).await;
        let output = platform.svcctl(&["deploy", subcommand]).await;
        assert!(output.status.success(), "{}", stderr(&output));
        let lines: Vec<_> = platform.requests().into_iter().map(|request| request.line).collect();
        assert_eq!(lines, ["GET /vps/deploy HTTP/1.1".to_owned(), line]);
    }
    let replies = [page(std::slice::from_ref(&ended)), with_machines(OPERATION, "stopped")];
    let platform = FakePlatform::start(replies).await;
    let output = platform.svcctl(&["deploy", "status"]).await;
    assert!(String::from_utf8_lossy(&output.stdout).contains("stopped"), "{}", stderr(&output));
    for (subcommand, rollouts, reason) in
        [("pause", vec![ended], "no rollout is open"), ("status", vec![], "there has been no rollout yet")]
    {
        let output = FakePlatform::start([page(&rollouts)]).await.svcctl(&["deploy", subcommand]).await;
        assert_eq!(output.status.code(), Some(65));
        assert!(stderr(&output).contains(reason) && stderr(&output).contains("next:"), "{}", stderr(&output));
    }
    let platform = FakePlatform::start([with_machines(MACHINE, "running")]).await;
    let args = ["deploy", "start", "v2", "--except", "ada", "--except", "bob"];
    let output = platform.svcctl(&args).await;
    assert!(stderr(&output).contains("every running machine except ada, bob to"), "{}", stderr(&output));
    let output = platform.svcctl(&[&args[..], &["--yes"]].concat()).await;
    assert!(output.status.success(), "{}", stderr(&output));
    let request_body: Value = serde_json::from_str(&platform.requests()[0].body).unwrap();
    assert_eq!(request_body, json!({"imageVersion": "v2", "except": ["ada", "bob"]}));
    let platform = FakePlatform::start([page(&[open])]).await;
    let output = platform.svcctl(&["deploy", "list"]).await;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains(MACHINE) && text.contains("running"), "{text}");
}

#[tokio::test]
async fn completions_need_no_configuration() {
    for (shell, marker) in
        [("bash", "complete -F"), ("zsh", "#compdef svcctl"), ("fish", "complete -c svcctl")]
    {
        let output = svcctl(&["completions", shell], &[]).await;
        let script = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success() && script.contains(marker) && script.contains("provision"),
            "{shell}"
        );
    }
}

#[tokio::test]
async fn wait_for_a_failed_operation_fails() {
    let failed = operation("recover", "failed", &["create_server"]);
    let platform = FakePlatform::start([accepted(), Reply::Json(200, record("failed", Some(failed)))]).await;
    let output = platform.svcctl(&["recover", "user_1", "--yes", "--wait"]).await;
    assert_eq!(output.status.code(), Some(69));
    assert!(stderr(&output).contains("provisioning_error"), "{}", stderr(&output));
}

#[tokio::test]
async fn command_that_prompts_requires_yes_without_a_terminal() {
    let platform = FakePlatform::start([Reply::Json(200, record("running", None))]).await;
    let output = platform.svcctl(&["delete", MACHINE]).await;
    assert_eq!(output.status.code(), Some(64));
    assert!(stderr(&output).contains("--yes"), "{}", stderr(&output));
    let prompting = [
        &["recover", "user_1"][..],
        &["resize", "ada", "cpx32"],
        &["fail", "ada", "--reason", "disk errors"],
        &["delete", "ada"],
        &["discard", "ada"],
        &["power", "off", "ada"],
        &["power", "reboot", "ada"],
        &["backup", "accept", "ada"],
        &["pointer", "rebuild", "user_1"],
        &["alarm", "release", "servers_missing"],
        &["operator", "revoke", "bea"],
        &["deploy", "start", "v2"],
        &["provision", "user_1", "--handle", "ada", "--accept-loss"],
    ];
    for args in prompting {
        let output = platform.svcctl(args).await;
        assert_eq!(output.status.code(), Some(64), "{args:?}");
        assert!(stderr(&output).contains("add --yes"), "{args:?}: {}", stderr(&output));
    }
    let help = include_str!("../src/ctl/args/snapshots/svc_ctl__args__tests__help.snap");
    for section in help.split("$ svcctl ").skip(1) {
        let name = section.split(" --help").next().unwrap_or_default();
        let words: Vec<&str> = name.split(' ').collect();
        let prompts = prompting.iter().any(|args| args.starts_with(&words));
        let has_option = section.contains("      --yes");
        let is_group = section.contains("\nCommands:\n");
        assert!(is_group || prompts == has_option, "{name}: a command has --yes if and only if it prompts");
    }
    assert!(platform.requests().is_empty(), "a request was sent");
}

#[tokio::test]
async fn error_response_sets_exit_code_and_shows_next_step() {
    for (status, code, exit_code) in [
        (401, "unauthorized", 77),
        (402, "subscription_required", 65),
        (404, "bundle_not_found", 65),
        (404, "not_found", 65),
        (409, "handle_taken", 65),
        (502, "provisioning_error", 69),
        (503, "disabled", 65),
        (500, "internal", 70),
    ] {
        let platform =
            FakePlatform::start([Reply::Json(status, problem(status, code, "That is the reason."))]).await;
        let output = platform.svcctl(&["slot", "set", "user_1", "--plan", "max"]).await;
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(exit_code), "{code}: {text}");
        for part in ["That is the reason.", code, "req-7", "next:"] {
            assert!(text.contains(part), "{code}: {text}");
        }
        assert_eq!(platform.requests().len(), 1, "{code} must not be retried");
    }
}

#[tokio::test]
async fn conflict_advice_depends_on_detail() {
    for (detail, advice) in [
        ("Rollout 01a2 has not ended yet.", Some("`svcctl deploy abort` to end one")),
        ("Hosts cannot update to v1: its signature is wrong.", Some("publish the release again")),
        ("Operator ann has been revoked.", None),
    ] {
        let platform = FakePlatform::start([Reply::Json(409, problem(409, "conflict", detail))]).await;
        let text = stderr(&platform.svcctl(&["slot", "set", "user_1", "--plan", "max"]).await);
        assert!(text.contains(detail), "{text}");
        assert_eq!(text.contains("next:"), advice.is_some(), "{text}");
        assert!(advice.is_none_or(|advice| text.contains(advice)), "{text}");
    }
}

#[tokio::test]
async fn all_missing_settings_are_listed_without_secrets() {
    let output = svcctl(&["list"], &[]).await;
    assert_eq!(output.status.code(), Some(78));
    for name in ["PLATFORM_PUBLIC_URL", "PLATFORM_SECRET"] {
        assert!(stderr(&output).contains(name), "{}", stderr(&output));
    }
    let env = [("PLATFORM_PUBLIC_URL", "http://platform.example"), ("PLATFORM_SECRET", SECRET)];
    let output = svcctl(&["list"], &env).await;
    assert_eq!(output.status.code(), Some(78), "the secret must not be sent over plain HTTP");
    assert!(!stderr(&output).contains(SECRET), "{}", stderr(&output));
}

#[tokio::test]
async fn secret_is_read_from_a_file() {
    let platform = FakePlatform::start([Reply::Json(200, json!({"slots": []}))]).await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("secret");
    std::fs::write(&file, format!("{SECRET}\n")).unwrap();
    let args = ["slot", "list", "user_1", "--secret-file", file.to_str().unwrap()];
    let output = svcctl(&args, &[("PLATFORM_PUBLIC_URL", &platform.base)]).await;
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(platform.requests()[0].header("authorization"), Some(format!("Bearer {SECRET}").as_str()));
}

#[tokio::test]
async fn unreachable_platform_is_reported_with_its_url() {
    let base = format!("http://127.0.0.1:{}", kit::net::free_port().unwrap());
    let output = svcctl(&["list"], &[("PLATFORM_PUBLIC_URL", &base), ("PLATFORM_SECRET", SECRET)]).await;
    assert_eq!(output.status.code(), Some(69));
    assert!(stderr(&output).contains(&base), "{}", stderr(&output));
}
