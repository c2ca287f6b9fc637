//! Claude Code itself, against a stub of its model's API, through gateway, runner, hook and watcher: what it did is what the
//! records say.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kit::child::{self, AtExit};
use reqwest::Method;
use serde_json::{Value, json};

use super::dispatch::{CONFIG, NOWHERE, events, runner, until_recorded};
use super::host::{Host, Machine, answer};

const VERSION: &str = "@anthropic-ai/claude-code@2.1.330";

/// The program, fetched from npm where it is not there yet: 380 MB.
fn claude() -> Result<PathBuf> {
    let dir = kit::fetch::target_dir().join("agents/claude");
    let program = dir.join("node_modules/.bin/claude");
    if !program.exists() {
        std::fs::create_dir_all(&dir)?;
        let mut npm = Command::new("npm");
        npm.args(["install", "--no-audit", "--no-fund", "--prefix"]).arg(&dir).arg(VERSION);
        ensure!(npm.stdin(Stdio::null()).status().context("npm")?.success(), "npm cannot fetch {VERSION}");
    }
    Ok(program)
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
        child::ended(self.0.id());
    }
}

fn running(command: &mut Command, there: &Path) -> Result<Running> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    child::end_with_us(child.id(), AtExit::Kill);
    let running = Running(child);
    let end = Instant::now() + Duration::from_secs(20);
    while !there.exists() {
        ensure!(Instant::now() < end, "{} does not come", there.display());
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(running)
}

/// What the stub's model says, one turn after the other.
fn script(home: &Path) -> Value {
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

fn machine(program: &Path) -> Result<(Machine, Vec<Running>)> {
    let machine = Machine::new(NOWHERE)?;
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
    ensure!(svc("svc-hook").arg("install").status()?.success(), "the hook is not installed");
    let mut all = vec![running(&mut svc("svc-watch"), &machine.path("run/svc/gateway/watch.sock"))?];
    let stub = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/agents/stub/stub.py");
    let (script_file, port) = (machine.path("script.json"), machine.path("port"));
    std::fs::write(&script_file, script(&home).to_string())?;
    let mut python = Command::new("python3");
    python.arg(stub).arg(&script_file).arg(&port).arg(machine.path("requests.jsonl"));
    all.push(running(&mut python, &port)?);
    std::thread::sleep(Duration::from_millis(200));
    let url = format!("http://127.0.0.1:{}", std::fs::read_to_string(&port)?.trim());
    let config = json!({ "agents": { "coder": {
        "adapter": "claude-code",
        "command": [program, "--allowedTools", "Write,Edit,Bash,Read"],
        "environment": { "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "sk-ant-of-a-test", "SVC_ROOT": root,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1" },
    } } });
    machine.write(CONFIG, &config.to_string())?;
    Ok((machine, all))
}

async fn dispatched(host: &Host, id: &str, track: &str) -> Result<Vec<(String, Value)>> {
    let body = json!({ "id": id, "prompt": format!("[[{track}]] do it"), "conversationId": "thread" });
    let (status, text) = answer(host.owner(Method::POST, "/api/dispatch").json(&body)).await?;
    ensure!(status.is_success(), "{text}");
    Ok(events(text.as_str().context("events")?))
}

#[tokio::test]
#[ignore = "long: fetches Claude Code from npm"]
async fn long_what_claude_code_does_is_what_the_records_say() -> Result<()> {
    let program = claude()?;
    let (machine, _running) = machine(&program)?;
    let _runner = runner(&machine.path(""))?;
    let host = machine.start()?;
    let told = dispatched(&host, "d1", "main").await?;
    let (kind, result) = told.last().context("events")?;
    ensure!(kind == "result" && result["status"] == "success", "{told:#?}");
    assert_eq!(result["text"], "All done.");
    let recorded = until_recorded(&host, "d1").await?;
    let tools: Vec<(&str, &str)> = recorded["tools"]
        .as_array()
        .context("tools")?
        .iter()
        .map(|tool| (tool["name"].as_str().unwrap_or_default(), tool["status"].as_str().unwrap_or_default()))
        .collect();
    assert_eq!(tools, [("Write", "success"), ("Edit", "success"), ("Bash", "success"), ("Bash", "error")]);
    // Five answers of the stub: 1000 + 3000 + 5000 tokens in and 200 out each, the last with 77 out.
    assert_eq!((&recorded["tokensIn"], &recorded["tokensOut"]), (&json!(45_000), &json!(877)));
    let cost = recorded["cost"].as_f64().context("a cost")?;
    ensure!(cost > 0.0, "{recorded}");
    // The same conversation goes on, and costs only what is new.
    let told = dispatched(&host, "d2", "again").await?;
    assert_eq!(told.last().context("events")?.1["text"], "Again.");
    let second = until_recorded(&host, "d2").await?;
    assert_eq!(second["tokensIn"], json!(9000), "{second}");
    let (_, usage) = host.get("/api/usage").await?;
    let sum = cost + second["cost"].as_f64().context("a cost")?;
    ensure!((usage["totalCost"].as_f64().context("a sum")? - sum).abs() < 1e-9, "{usage}");

    let audit = std::fs::read_to_string(host.machine.path("home/svc/home/system/logs/audit.jsonl"))?;
    let lines: Vec<Value> = audit.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let changes: Vec<(&str, &str, &str)> = lines
        .iter()
        .map(|line| {
            let text = |name: &str| line[name].as_str().unwrap_or_default();
            (text("tool"), text("op"), text("path"))
        })
        .collect();
    assert_eq!(
        changes[..3],
        [("Write", "mkdir", "notes"), ("Write", "write", "notes/x"), ("Edit", "write", "notes/x")]
    );
    let mut of_bash = changes[3..].to_vec();
    of_bash.sort_unstable();
    assert_eq!(
        of_bash,
        [
            ("Bash", "delete", "notes/x"),
            ("Bash", "mkdir", "a"),
            ("Bash", "mkdir", "a/b"),
            ("Bash", "write", "failed"),
            ("Bash", "write", "y"),
        ],
        "{audit}"
    );
    for line in &lines {
        let names = (line["dispatchId"].as_str(), line["agentName"].as_str(), line["actor"].as_str());
        assert_eq!(names, (Some("d1"), Some("coder"), Some("claude-code")), "{line}");
    }
    Ok(())
}
