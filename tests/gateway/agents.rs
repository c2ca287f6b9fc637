//! Runs real agent programs with a stub model API through the gateway, runner, hook and watcher. The records match the
//! programs' actions.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kit::bundle::runtime;
use kit::child::OwnedChild;
use kit::model_stub::ModelStub;
use reqwest::Method;
use serde_json::{Value, json};

use super::dispatch::{CONFIG, parse_events, start_runner, wait_until_recorded};
use super::host::{Host, Machine, UNREACHABLE_DATABASE, send_json};

/// Returns the path of a bundled program, which is fetched from npm if it is missing.
fn agent_program(name: &str) -> Result<PathBuf> {
    Ok(std::path::absolute(runtime::fetch_agent(name)?.dir)?.join("bin").join(name))
}

fn spawn_and_wait_for_file(command: &mut Command, file: &Path) -> Result<OwnedChild> {
    let running =
        OwnedChild::spawn(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()))?;
    let deadline = Instant::now() + Duration::from_secs(20);
    while !file.exists() {
        ensure!(Instant::now() < deadline, "{} did not appear", file.display());
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(running)
}

/// Returns the stub model's responses to Claude Code, one for each turn.
fn claude_script(home: &Path) -> Value {
    let file = |name: &str| home.join(name).display().to_string();
    let bash =
        |command: &str| json!({ "name": "Bash", "input": { "command": command, "description": "run it" } });
    json!({ "tracks": {
        "main": [
            { "text": "Writing.", "tools": [{ "name": "Write",
                "input": { "file_path": file("notes/x"), "content": "one\ntwo\n" } }] },
            { "tools": [{ "name": "Edit", "input": { "file_path": file("notes/x"), "old_string": "two",
                "new_string": "TWO", "replace_all": false } }] },
            { "tools": [bash("mkdir -p a/b && cp notes/x a/b/z && mv notes/x y && rm a/b/z")] },
            { "tools": [bash("echo out; echo more > failed; exit 3")] },
            { "text": "All done.", "usage": { "output_tokens": 77 } },
        ],
        "again": [{ "text": "Again." }],
    } })
}

/// Returns the stub model's responses to Codex.
fn codex_script(_: &Path) -> Value {
    let patch = |text: &str| {
        let input = format!("*** Begin Patch\n{text}*** End Patch\n");
        json!({ "name": "apply_patch", "input": input, "custom": true })
    };
    let shell = |command: &str| json!({ "name": "exec_command", "input": { "cmd": command } });
    let spawn = json!({ "name": "spawn_agent", "namespace": "multi_agent_v1",
        "input": { "message": "[[sub]] write a file" } });
    json!({ "tracks": {
    "again": [{ "text": "Again." }],
    "parent": [{ "tools": [spawn] }, { "tools": [shell("sleep 4")] }, { "text": "All done." }],
    "sub": [{ "tools": [patch("*** Add File: sub\n+s\n")] }, { "text": "Sub finished." }],
    "slow": [{ "tools": [shell("sleep 100")] }, { "text": "Never." }],
    "main": [
        { "text": "Writing.", "tools": [patch("*** Add File: x\n+one\n+two\n")] },
        { "tools": [shell("mkdir -p a/b && mv x a/b/y")] },
        { "tools": [shell("echo more > failed; exit 3")] },
        { "tools": [patch("*** Update File: a/b/y\n@@\n-two\n+TWO\n")] },
        { "text": "All done." },
    ] } })
}

/// Processes that run alongside a gateway until this is dropped.
struct BackgroundProcesses {
    _watcher: OwnedChild,
    _model: ModelStub,
}

/// Prepares a machine with the watcher, the agents' hooks, and a stub model. `build_agent` builds the agent's
/// configuration from the stub's address and the machine.
fn prepare_machine(
    script: fn(&Path) -> Value,
    build_agent: impl FnOnce(&str, &Machine) -> Result<Value>,
) -> Result<(Machine, BackgroundProcesses)> {
    let machine = Machine::new(UNREACHABLE_DATABASE)?;
    let (root, home) = (machine.path(""), machine.path("home/svc/home"));
    std::fs::create_dir_all(&home)?;
    std::fs::create_dir_all(machine.path("opt/svc/bin"))?;
    for applet in ["svc-hook", "svc-watch"] {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_svc"), machine.path("opt/svc/bin").join(applet))?;
    }
    let svc = |applet: &str| {
        let mut command = Command::new(machine.path("opt/svc/bin").join(applet));
        command.env_clear().env("PATH", "/usr/bin:/bin").env("SVC_ROOT", &root);
        command.env("HOME", machine.path("home/svc"));
        command
    };
    ensure!(svc("svc-hook").arg("install").status()?.success(), "installing the hook failed");
    let watcher = spawn_and_wait_for_file(&mut svc("svc-watch"), &machine.path("run/svc/watch/watch.sock"))?;
    let model = ModelStub::start(&script(&home), &root)?;
    let url = model.url();
    let prices = json!({ "gpt-5.5": { "input": 2, "output": 10 } });
    let mut agent = build_agent(&url, &machine)?;
    // On a busy machine, hooks would time out and leave gaps in the audit log.
    agent["environment"]["FAILPOINTS"] = "hook.long_timeout=return(error)".into();
    let config = json!({ "agents": { "coder": agent }, "prices": prices });
    machine.write(CONFIG, &config.to_string())?;
    Ok((machine, BackgroundProcesses { _watcher: watcher, _model: model }))
}

async fn run_dispatch(host: &Host, id: &str, track: &str) -> Result<Vec<(String, Value)>> {
    let body = json!({ "id": id, "prompt": format!("[[{track}]] do it"), "conversationId": "thread" });
    let (status, text) = send_json(host.owner_request(Method::POST, "/api/dispatch").json(&body)).await?;
    ensure!(status.is_success(), "{text}");
    Ok(parse_events(text.as_str().context("no events")?))
}

#[tokio::test]
#[ignore = "long: fetches Claude Code from npm"]
async fn long_records_match_claude_code_actions() -> Result<()> {
    let program = agent_program("claude")?;
    let (machine, _running) = prepare_machine(claude_script, |url, machine| {
        Ok(json!({
            "adapter": "claude-code",
            "command": [program, "--allowedTools", "Write,Edit,Bash,Read"],
            "environment": { "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "sk-ant-test",
                "SVC_ROOT": machine.path(""), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1" },
        }))
    })?;
    let _runner = start_runner(&machine.path(""))?;
    let host = machine.start()?;
    let streamed = run_dispatch(&host, "d1", "main").await?;
    let (kind, result) = streamed.last().context("no events")?;
    ensure!(kind == "result" && result["status"] == "success", "{streamed:#?}");
    assert_eq!(result["text"], "All done.");
    let recorded = wait_until_recorded(&host, "d1").await?;
    assert_eq!(
        tool_outcomes(&recorded),
        [("Write", "success"), ("Edit", "success"), ("Bash", "success"), ("Bash", "error")]
    );
    // The stub sends five responses with 1000 + 3000 + 5000 input tokens each. Four have 200 output tokens; the last
    // has 77.
    assert_eq!((&recorded["tokensIn"], &recorded["tokensOut"]), (&json!(45_000), &json!(877)));
    let cost = recorded["cost"].as_f64().context("no cost")?;
    ensure!(cost > 0.0, "{recorded}");
    // The second dispatch continues the conversation; only its own cost is added.
    let streamed = run_dispatch(&host, "d2", "again").await?;
    assert_eq!(streamed.last().context("no events")?.1["text"], "Again.");
    let second = wait_until_recorded(&host, "d2").await?;
    assert_eq!(second["tokensIn"], json!(9000), "{second}");
    let (_, usage) = host.get("/api/usage").await?;
    let sum = cost + second["cost"].as_f64().context("no cost")?;
    ensure!((usage["totalCost"].as_f64().context("no total cost")? - sum).abs() < 1e-9, "{usage}");

    let lines = read_audit(&host, "claude-code")?;
    let changes: Vec<(&str, &str, &str)> = lines.iter().map(summarize_change).collect();
    assert_eq!(
        changes[..3],
        [("Write", "mkdir", "notes"), ("Write", "write", "notes/x"), ("Edit", "write", "notes/x")]
    );
    let mut bash_changes = changes[3..].to_vec();
    bash_changes.sort_unstable();
    assert_eq!(
        bash_changes,
        [
            ("Bash", "delete", "notes/x"),
            ("Bash", "mkdir", "a"),
            ("Bash", "mkdir", "a/b"),
            ("Bash", "write", "failed"),
            ("Bash", "write", "y"),
        ],
        "{lines:#?}"
    );
    Ok(())
}

/// An agent can disable its own hooks, or remove the variable that they need to find the watcher.
#[tokio::test]
#[ignore = "long: fetches Claude Code from npm"]
async fn long_calls_with_disabled_hooks_are_recorded_as_a_gap() -> Result<()> {
    let program = agent_program("claude")?;
    for (settings, sets_root) in [(json!({ "disableAllHooks": true }), true), (json!({}), false)] {
        let (machine, _running) = prepare_machine(claude_script, |url, machine| {
            machine.write("home/svc/home/.claude/settings.json", &settings.to_string())?;
            let mut environment = json!({ "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "sk-ant-test",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1" });
            if sets_root {
                environment["SVC_ROOT"] = machine.path("").display().to_string().into();
            }
            let command = json!([program, "--allowedTools", "Write,Edit,Bash,Read"]);
            Ok(json!({ "adapter": "claude-code", "command": command, "environment": environment }))
        })?;
        let _runner = start_runner(&machine.path(""))?;
        let host = machine.start()?;
        let streamed = run_dispatch(&host, "d1", "main").await?;
        ensure!(streamed.last().context("no events")?.1["status"] == "success", "{streamed:#?}");
        let audit = host.machine.path("home/svc/home/system/logs/audit.jsonl");
        host.wait_until("a gap of four calls", async || {
            let text = std::fs::read_to_string(&audit).unwrap_or_default();
            let mut lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            Ok(lines.any(|line| line["gap"]["why"] == "unseen" && line["gap"]["lost"] == 4))
        })
        .await?;
    }
    Ok(())
}

/// Reads the audit log, and checks that each line belongs to this actor and to the dispatch `d1`.
fn read_audit(host: &Host, actor: &str) -> Result<Vec<Value>> {
    let audit = std::fs::read_to_string(host.machine.path("home/svc/home/system/logs/audit.jsonl"))?;
    let lines: Vec<Value> = audit.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    for line in &lines {
        let names = (line["dispatchId"].as_str(), line["agentName"].as_str(), line["actor"].as_str());
        assert_eq!(names, (Some("d1"), Some("coder"), Some(actor)), "{line}");
    }
    Ok(lines)
}

/// Returns an interaction's tools, each with its outcome.
fn tool_outcomes(recorded: &Value) -> Vec<(&str, &str)> {
    let tools = recorded["tools"].as_array().into_iter().flatten();
    tools
        .map(|tool| (tool["name"].as_str().unwrap_or_default(), tool["status"].as_str().unwrap_or_default()))
        .collect()
}

fn summarize_change(line: &Value) -> (&str, &str, &str) {
    let text = |name: &str| line[name].as_str().unwrap_or_default();
    (text("tool"), text("op"), text("path"))
}

/// Returns a machine whose agent is Codex.
fn codex_machine() -> Result<(Machine, BackgroundProcesses)> {
    let program = agent_program("codex")?;
    prepare_machine(codex_script, |url, machine| {
        let config = format!(
            "model = \"gpt-5.5\"\nmodel_provider = \"stub\"\napproval_policy = \"never\"\n[model_providers.stub]\n\
             name = \"stub\"\nbase_url = \"{url}/v1\"\nenv_key = \"STUB_API_KEY\"\nwire_api = \"responses\"\n"
        );
        machine.write("home/svc/.codex/config.toml", &config)?;
        Ok(json!({
            "adapter": "codex",
            "command": [program, "exec", "-s", "danger-full-access"],
            "model": "gpt-5.5",
            "environment": { "STUB_API_KEY": "test-key", "SVC_ROOT": machine.path("") },
        }))
    })
}

#[tokio::test]
#[ignore = "long: fetches Codex from npm"]
async fn long_records_match_codex_actions() -> Result<()> {
    let (machine, _running) = codex_machine()?;
    let _runner = start_runner(&machine.path(""))?;
    let host = machine.start()?;
    let streamed = run_dispatch(&host, "d1", "main").await?;
    let (kind, result) = streamed.last().context("no events")?;
    ensure!(kind == "result" && result["status"] == "success", "{streamed:#?}");
    let recorded = wait_until_recorded(&host, "d1").await?;
    let (success, patch) = ("success", "apply_patch");
    assert_eq!(
        tool_outcomes(&recorded),
        [(patch, success), ("Bash", success), ("Bash", "error"), (patch, success)]
    );
    let tokens =
        |name: &str| recorded[name].as_f64().filter(|tokens| *tokens > 0.0).context("no token count");
    let expected = (tokens("tokensIn")? * 2.0 + tokens("tokensOut")? * 10.0) / 1e6;
    ensure!((recorded["cost"].as_f64().context("no cost")? - expected).abs() < 1e-9, "{recorded}");
    let lines = read_audit(&host, "codex")?;
    let mut changes: Vec<(&str, &str, &str)> = lines.iter().map(summarize_change).collect();
    changes.sort_unstable();
    assert_eq!(
        changes,
        [
            ("Bash", "delete", "x"),
            ("Bash", "mkdir", "a"),
            ("Bash", "mkdir", "a/b"),
            ("Bash", "write", "a/b/y"),
            ("Bash", "write", "failed"),
            (patch, "write", "a/b/y"),
            (patch, "write", "x"),
        ]
    );
    Ok(())
}

/// Input and output tokens of each call from Codex to the stub model.
const TOKENS_PER_CALL: (u64, u64) = (6000, 200);

async fn run_codex(host: &Host, body: Value) -> Result<Value> {
    let id = body["id"].as_str().context("no id")?.to_owned();
    let (status, text) = send_json(host.owner_request(Method::POST, "/api/dispatch").json(&body)).await?;
    ensure!(status.is_success(), "{text}");
    wait_until_recorded(host, &id).await
}

fn token_counts(recorded: &Value) -> (u64, u64) {
    let tokens = |name: &str| recorded[name].as_u64().unwrap_or_default();
    (tokens("tokensIn"), tokens("tokensOut"))
}

fn expected_token_counts(call_count: u64) -> (u64, u64) {
    (TOKENS_PER_CALL.0 * call_count, TOKENS_PER_CALL.1 * call_count)
}

#[tokio::test]
#[ignore = "long: fetches Codex from npm"]
async fn long_codex_usage_counts_subagents_and_cancelled_runs_once() -> Result<()> {
    let (machine, _running) = codex_machine()?;
    let _runner = start_runner(&machine.path(""))?;
    let host = machine.start()?;
    let first = run_codex(&host, json!({ "id": "first", "prompt": "[[again]] go" })).await?;
    assert_eq!(
        (token_counts(&first), &first["status"]),
        (expected_token_counts(1), &json!("success")),
        "{first}"
    );
    // Usage from the thread's earlier run is not counted again.
    let thread = &first["conversationId"];
    let continued = json!({ "id": "more", "prompt": "[[again]] on", "conversationId": thread });
    let continued = run_codex(&host, continued).await?;
    assert_eq!(
        (token_counts(&continued), &continued["conversationId"]),
        (expected_token_counts(1), thread),
        "{continued}"
    );
    let parent = run_codex(&host, json!({ "id": "parent", "prompt": "[[parent]] go" })).await?;
    assert_eq!(
        (token_counts(&parent), &parent["status"]),
        (expected_token_counts(3 + 2), &json!("success")),
        "{parent}"
    );
    // A run is cancelled while its tool is running.
    let slow = json!({ "id": "slow", "prompt": "[[slow]] go" });
    let request = host.owner_request(Method::POST, "/api/dispatch").header("accept", "application/json");
    ensure!(send_json(request.json(&slow)).await?.0.is_success());
    // There are four sessions; the last one's usage is written while its tool is still running.
    let sessions = host.machine.path("home/svc/.codex/sessions");
    host.wait_until("four sessions with usage", async || {
        let output = Command::new("grep").args(["-rl", "token_usage_record"]).arg(&sessions).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).lines().count() == 4)
    })
    .await?;
    send_json(host.owner_request(Method::DELETE, "/api/dispatch/slow")).await?;
    let slow = wait_until_recorded(&host, "slow").await?;
    assert_eq!(
        (token_counts(&slow), &slow["error"]["name"]),
        (expected_token_counts(1), &json!("Cancelled")),
        "{slow}"
    );
    assert_eq!((&slow["model"], &slow["cost"]), (&json!("gpt-5.5"), &json!(0.014)));
    Ok(())
}
