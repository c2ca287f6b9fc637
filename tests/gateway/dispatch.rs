//! Runs dispatches through a gateway and `svc-agent`, with real programs as agents, and checks events, records and
//! leftover processes.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kit::child::OwnedChild;
use nix::sys::signal::Signal;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use super::host::{Host, Machine, UNREACHABLE_DATABASE, send_json};

pub const CONFIG: &str = "home/svc/home/system/config.json";

/// A json-lines agent: a shell script controlled by its prompt.
const AGENT: &str = r#"
read -r line
prompt=$(printf '%s' "$line" | sed 's/.*"prompt":"\([^"]*\)".*/\1/')
echo '{"type":"started","conversationId":"c-1","model":"m-1"}'
case $prompt in
  ok*) echo '{"type":"text","text":"doing it"}'
    echo '{"type":"tool","id":"t1","name":"Bash","input":{"command":"export API_KEY=sk-secret-12345678; ls"}}'
    ls > /dev/null
    echo '{"type":"toolResult","id":"t1","status":"success"}'
    echo '{"type":"usage","tokensIn":1000,"tokensOut":200,"cost":0.25}'
    echo '{"type":"result","status":"success","text":"done: '"$prompt"'"}' ;;
  second*) sleep 1
    echo '{"type":"result","status":"success"}' ;;
  tokens*) echo '{"type":"usage","tokensIn":1000000,"tokensOut":100000}'
    echo '{"type":"result","status":"success"}' ;;
  environment*) env | sort > environment.txt; pwd >> environment.txt
    echo '{"type":"result","status":"success"}' ;;
  crash*) echo '{"type":"usage","tokensIn":5,"tokensOut":1,"cost":0.01}'
    echo '{"type":"text","text":"the next turn"}'; exit 1 ;;
  fail*) echo "no luck: password=hunter2-s3cret, $LLM_KEY" >&2; exit 3 ;;
  leave*) setsid sh -c 'echo $$ > left.pid; exec sleep 300' &
    until [ -s left.pid ]; do sleep 0.05; done
    echo '{"type":"result","status":"success","text":"left a process"}' ;;
  sleep*) trap '' TERM
    echo '{"type":"usage","tokensIn":5,"tokensOut":1,"cost":0.01}'
    setsid sh -c 'echo $$ > sleeper.pid; exec sleep 300' &
    # The test waits for sleeping.pid, so that file is written last.
    until [ -s sleeper.pid ]; do sleep 0.05; done
    echo $$ > sleeping.pid; sleep 300 ;;
  interrupt*) trap 'echo "{\"type\":\"usage\",\"tokensIn\":5,\"tokensOut\":1,\"cost\":0.02}"; exit 0' INT
    echo $$ > sleeping.pid; sleep 300 ;;
  flood*) yes & echo $! > flood.pid; sleep 0.2
    # The result starts with a line feed, because the last line of yes may be incomplete.
    printf '\n{"type":"result","status":"success","text":"flooded"}\n' ;;
  hold*) while [ ! -e go ]; do sleep 0.05; done
    echo '{"type":"usage","tokensIn":1,"tokensOut":1,"cost":0.5}'
    echo '{"type":"result","status":"success"}' ;;
esac
"#;

pub struct Runner(OwnedChild);

impl Drop for Runner {
    /// Stops the runner as systemd does; the runner then ends its agents.
    fn drop(&mut self) {
        self.0.signal(Signal::SIGTERM).ok();
        self.0.wait(Duration::from_secs(20));
    }
}

pub fn start_runner(root: &Path) -> Result<Runner> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_svc"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    command.args(["svc-agent", "--listen"]).env_clear().env("PATH", path).env("SVC_ROOT", root);
    command.env("HOME", root.join("home/svc")).env("RUNNER_SECRET", "not-for-agents");
    // Nothing listens on this socket.
    command.env("NOTIFY_SOCKET", root.join("no.sock"));
    let log = std::fs::OpenOptions::new().create(true).append(true).open(root.join("agent.log"))?;
    let runner =
        Runner(OwnedChild::spawn(command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log))?);
    let socket = root.join("run/svc/owner/agent.sock");
    let deadline = Instant::now() + Duration::from_secs(10);
    while !socket.exists() {
        ensure!(Instant::now() < deadline, "svc-agent is not listening");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(runner)
}

pub fn config_json(overrides: &Value) -> String {
    let mut config = json!({
        "agents": {
            "coder": { "adapter": "json-lines", "command": ["sh", "agent.sh"], "environment": { "GREETING": "hello", "LLM_KEY": "matches no pattern" } },
            "absent": { "adapter": "json-lines", "command": ["no-such-program"] },
        },
        "dispatch": { "defaultAgent": "coder" },
        "prices": { "m-1": { "input": 2, "output": 10 }, "free": { "input": 0, "output": 0 } },
    });
    config
        .as_object_mut()
        .expect("the config is an object")
        .extend(overrides.as_object().expect("the overrides are an object").clone());
    config.to_string()
}

pub fn machine_with_runner(overrides: &Value) -> Result<(Machine, Runner)> {
    let machine = Machine::new(UNREACHABLE_DATABASE)?;
    machine.write("home/svc/home/agent.sh", AGENT)?;
    machine.write(CONFIG, &config_json(overrides))?;
    std::fs::create_dir_all(machine.path("run/svc/owner"))?;
    let runner = start_runner(&machine.path(""))?;
    Ok((machine, runner))
}

pub async fn request_dispatch(host: &Host, body: Value) -> Result<(StatusCode, Value)> {
    let request = host.owner_request(Method::POST, "/api/dispatch").header("accept", "application/json");
    send_json(request.json(&body)).await
}

/// Parses the events of a finished stream.
pub fn parse_events(text: &str) -> Vec<(String, Value)> {
    let blocks = text.split("\n\n").filter(|block| block.contains("data: "));
    let field = |block: &str, name: &str| {
        block.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().to_owned()
    };
    let parse_block = |block| {
        (
            field(block, "event: "),
            serde_json::from_str(&field(block, "data: ")).expect("the event's data is JSON"),
        )
    };
    blocks.map(parse_block).collect()
}

pub async fn stream_dispatch(host: &Host, body: Value) -> Result<Vec<(String, Value)>> {
    let (status, text) = send_json(host.owner_request(Method::POST, "/api/dispatch").json(&body)).await?;
    ensure!(status == StatusCode::OK, "{status} {text}");
    Ok(parse_events(text.as_str().context("no events")?))
}

pub fn event_kinds(events: &[(String, Value)]) -> Vec<&str> {
    events.iter().map(|(kind, _)| kind.as_str()).collect()
}

pub async fn wait_until_finished(host: &Host, id: &str) -> Result<Value> {
    let deadline = Instant::now() + Duration::from_secs(40);
    loop {
        let (_, response) = host.get(&format!("/api/dispatch/{id}")).await?;
        if ["success", "error"].contains(&response["status"].as_str().unwrap_or_default()) {
            return Ok(response);
        }
        ensure!(Instant::now() < deadline, "dispatch {id} has not finished: {response}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub async fn wait_until_recorded(host: &Host, id: &str) -> Result<Value> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let (_, page) = host.get(&format!("/api/interactions?id={id}")).await?;
        if let Some(interaction) = page["interactions"].get(0) {
            return Ok(interaction.clone());
        }
        ensure!(Instant::now() < deadline, "dispatch {id} was not recorded");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub async fn wait_until_logged(host: &Host, part: &str) -> Result<()> {
    host.wait_until(part, async || {
        let activity = std::fs::read_to_string(host.machine.path("home/svc/home/system/logs/activity.log"));
        Ok(activity.unwrap_or_default().contains(part))
    })
    .await
}

pub async fn wait_for_pid(host: &Host, file: &str) -> Result<i32> {
    let path = host.machine.path("home/svc/home").join(file);
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(pid) = std::fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok()) {
            return Ok(pid);
        }
        ensure!(Instant::now() < deadline, "{file} was not written\n{}", host.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub fn is_alive(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[tokio::test]
async fn recorded_duration_is_the_wall_clock_time() -> Result<()> {
    let (machine, _runner) = machine_with_runner(&json!({}))?;
    let host = machine.start()?;
    let started = Instant::now();
    stream_dispatch(&host, json!({ "prompt": "second", "id": "one" })).await?;
    let recorded = wait_until_recorded(&host, "one").await?;
    let duration = recorded["durationMs"].as_u64().context("no duration")?;
    assert!(duration >= 1000 && u128::from(duration) <= started.elapsed().as_millis(), "{duration}");
    Ok(())
}

#[tokio::test]
async fn dispatch_streams_its_events_and_is_recorded() -> Result<()> {
    let (machine, _runner) = machine_with_runner(&json!({}))?;
    let host = machine.start()?;
    let body = json!({ "prompt": "ok now", "id": "one", "conversationId": "thread-1" });
    let streamed = stream_dispatch(&host, body.clone()).await?;
    assert_eq!(
        event_kinds(&streamed),
        ["accepted", "running", "started", "text", "toolStarted", "toolEnded", "result"]
    );
    let result = &streamed[6].1;
    assert_eq!((&result["status"], &result["text"]), (&json!("success"), &json!("done: ok now")));
    let recorded = wait_until_recorded(&host, "one").await?;
    assert_eq!(result["interaction"], recorded);
    for (name, value) in [
        ("senderId", json!("user_owner")),
        ("conversationId", json!("thread-1")),
        ("model", json!("m-1")),
        ("agentName", json!("coder")),
        ("tokensIn", json!(1000)),
        ("cost", json!(0.25)),
        ("status", json!("success")),
        ("batch", json!(false)),
    ] {
        assert_eq!(recorded[name], value, "{name}");
    }
    let tool = &recorded["tools"][0];
    assert_eq!((&tool["name"], &tool["status"]), (&json!("Bash"), &json!("success")));
    assert!(
        tool["inputPreview"]
            .as_str()
            .is_some_and(|preview| preview.contains("ls") && !preview.contains("sk-secret"))
    );
    // A repeated id refers to the same dispatch: its events are replayed, and it does not run again.
    assert_eq!(stream_dispatch(&host, body.clone()).await?, streamed);
    let (_, usage) = host.get("/api/usage").await?;
    assert_eq!((&usage["totalCost"], &usage["entries"][0]["dispatches"]), (&json!(0.25), &json!(1)));
    let (status, refused) = request_dispatch(&host, json!({ "prompt": "another", "id": "one" })).await?;
    assert_eq!((status.as_u16(), &refused["code"]), (422, &json!("idempotency_mismatch")));
    // A client that has received the last event gets 204, so that it does not reconnect.
    let events_after = |from: &str| {
        host.owner_request(Method::GET, "/api/dispatch/one/events").header("last-event-id", from)
    };
    let (_, text) = send_json(events_after("")).await?;
    let last = text.as_str().and_then(|text| text.rsplit_once("id: ")?.1.lines().next()).context("no id")?;
    assert_eq!(send_json(events_after(last)).await?.0, StatusCode::NO_CONTENT);
    assert_eq!(send_json(events_after(&format!("+{last}"))).await?.0, StatusCode::BAD_REQUEST);
    // After a restart, the dispatch is read from its record.
    let host = host.restart()?;
    let (status, repeated) = request_dispatch(&host, body).await?;
    assert_eq!((status.as_u16(), &repeated["dispatches"][0]["interaction"]), (202, &recorded));
    let (status, refused) = request_dispatch(&host, json!({ "prompt": "another", "id": "one" })).await?;
    assert_eq!((status.as_u16(), &refused["code"]), (422, &json!("idempotency_mismatch")));
    let (_, resumed) = send_json(host.owner_request(Method::GET, "/api/dispatch/one/events")).await?;
    assert_eq!(event_kinds(&parse_events(resumed.as_str().unwrap_or_default())), ["accepted", "result"]);
    wait_until_logged(&host, "dispatch one: coder is running for user_owner as process").await
}

#[tokio::test]
async fn agent_runs_in_the_owner_home_with_a_clean_environment() -> Result<()> {
    let (machine, _runner) = machine_with_runner(&json!({}))?;
    let host = machine.start()?;
    let streamed = stream_dispatch(&host, json!({ "prompt": "environment", "id": "e1" })).await?;
    assert_eq!(streamed.last().map(|(_, result)| &result["status"]), Some(&json!("success")), "{streamed:?}");
    let home = host.machine.path("home/svc/home");
    let environment = std::fs::read_to_string(home.join("environment.txt"))?;
    assert!(environment.lines().any(|line| Path::new(line) == home), "{environment}");
    for line in ["GREETING=hello", "SVC_AGENT_NAME=coder", "SVC_DISPATCH_ID=e1"] {
        assert!(environment.lines().any(|actual| actual == line), "{line} in {environment}");
    }
    assert!(
        !environment.contains("RUNNER_SECRET") && !environment.contains("NOTIFY_SOCKET"),
        "{environment}"
    );
    Ok(())
}

#[tokio::test]
async fn failed_dispatch_is_recorded_without_secrets() -> Result<()> {
    let (machine, runner) = machine_with_runner(&json!({}))?;
    let host = machine.start()?;
    for (body, name, part) in [
        (json!({ "prompt": "fail", "id": "f1" }), "ExitCode", "exited with code 3"),
        (json!({ "prompt": "nothing at all", "id": "f2" }), "NoResult", "without a result"),
        (json!({ "prompt": "x", "id": "f3", "agentName": "absent" }), "NotStarted", "no-such-program"),
    ] {
        let streamed = stream_dispatch(&host, body).await?;
        let error = &streamed.last().context("no result event")?.1["interaction"]["error"];
        assert_eq!(error["name"], name, "{error}");
        assert!(error["message"].as_str().is_some_and(|message| message.contains(part)), "{error}");
    }
    let failed = wait_until_recorded(&host, "f1").await?;
    let stack = failed["error"]["stack"].as_str().unwrap_or_default();
    assert!(
        stack.contains("no luck") && !stack.contains("hunter2") && !stack.contains("pattern"),
        "{failed}"
    );
    drop(runner);
    let streamed = stream_dispatch(&host, json!({ "prompt": "ok", "id": "f4" })).await?;
    assert_eq!(streamed.last().context("no result event")?.1["interaction"]["error"]["name"], "NoRunner");
    Ok(())
}

#[tokio::test]
async fn no_agent_process_outlives_its_dispatch() -> Result<()> {
    let (machine, _runner) = machine_with_runner(&json!({}))?;
    let host = machine.start()?;
    // The agent succeeds, but leaves a process running in another session.
    let streamed = stream_dispatch(&host, json!({ "prompt": "leave", "id": "l1" })).await?;
    assert_eq!(streamed.last().context("no result event")?.1["text"], "left a process");
    assert!(!is_alive(wait_for_pid(&host, "left.pid").await?));
    // The same, with a leftover process that prints continuously.
    let streamed = stream_dispatch(&host, json!({ "prompt": "flood", "id": "l2" })).await?;
    assert_eq!(streamed.last().context("no result event")?.1["text"], "flooded");
    assert!(!is_alive(wait_for_pid(&host, "flood.pid").await?));
    // The agent is cancelled and exits on SIGINT, but leaves a process running in another session.
    request_dispatch(&host, json!({ "prompt": "sleep", "id": "s1" })).await?;
    let pid = wait_for_pid(&host, "sleeping.pid").await?;
    let (status, _) = send_json(host.owner_request(Method::DELETE, "/api/dispatch/s1")).await?;
    assert_eq!(status, StatusCode::ACCEPTED);
    let response = wait_until_finished(&host, "s1").await?;
    let interaction = &response["dispatches"][0]["interaction"];
    assert_eq!((&interaction["error"]["name"], &interaction["cost"]), (&json!("Cancelled"), &json!(0.01)));
    assert!(!is_alive(pid) && !is_alive(wait_for_pid(&host, "sleeper.pid").await?));
    // The agent exceeds its deadline.
    std::fs::remove_file(host.machine.path("home/svc/home/sleeping.pid"))?;
    std::fs::remove_file(host.machine.path("home/svc/home/sleeper.pid"))?;
    request_dispatch(&host, json!({ "prompt": "sleep", "id": "s2", "deadlineSeconds": 3 })).await?;
    let pid = wait_for_pid(&host, "sleeping.pid").await?;
    let response = wait_until_finished(&host, "s2").await?;
    assert_eq!(response["dispatches"][0]["interaction"]["error"]["name"], "DeadlineExceeded");
    assert!(!is_alive(pid) && !is_alive(wait_for_pid(&host, "sleeper.pid").await?));
    // The gateway is killed: the runner ends the agent's processes, and the next gateway records the dispatch.
    std::fs::remove_file(host.machine.path("home/svc/home/sleeping.pid"))?;
    std::fs::remove_file(host.machine.path("home/svc/home/sleeper.pid"))?;
    request_dispatch(&host, json!({ "prompt": "sleep", "id": "s3" })).await?;
    let pid = wait_for_pid(&host, "sleeping.pid").await?;
    let sleeper = wait_for_pid(&host, "sleeper.pid").await?;
    let host = host.restart()?;
    let recorded = wait_until_recorded(&host, "s3").await?;
    assert_eq!(recorded["error"]["name"], "Interrupted");
    let deadline = Instant::now() + Duration::from_secs(15);
    while is_alive(pid) || is_alive(sleeper) {
        ensure!(Instant::now() < deadline, "the agent outlived its gateway");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let (_, usage) = host.get("/api/usage").await?;
    // Checks the total: if the test runs past midnight, there are entries for two days.
    assert_eq!(usage["totalDispatches"], 5);
    // A client that resumes with an event number from the previous gateway still receives the result.
    let request = host.owner_request(Method::GET, "/api/dispatch/s3/events").header("last-event-id", "1");
    let (_, resumed) = send_json(request).await?;
    assert_eq!(event_kinds(&parse_events(resumed.as_str().unwrap_or_default())).last(), Some(&"result"));
    Ok(())
}

/// The reservations of running dispatches count toward the limit.
#[tokio::test]
async fn cost_limit_warns_then_refuses_new_dispatches() -> Result<()> {
    let limits = json!({ "costLimits": { "daily": 1, "reservation": 0.3 },
        "dispatch": { "defaultAgent": "coder", "concurrency": 8 } });
    let (machine, _runner) = machine_with_runner(&limits)?;
    let host = machine.start()?;
    for _ in 0..3 {
        let streamed = stream_dispatch(&host, json!({ "prompt": "ok" })).await?;
        assert!(!event_kinds(&streamed).contains(&"warning"), "{streamed:?}");
    }
    // 0.75 spent and 0.3 reserved exceed the limit of 1.
    request_dispatch(&host, json!({ "prompt": "hold", "id": "held" })).await?;
    let request = host.owner_request(Method::POST, "/api/dispatch").json(&json!({ "prompt": "ok" }));
    let response = request.send().await?;
    let retry_after_seconds: u64 = response.headers()["retry-after"].to_str()?.parse()?;
    assert_eq!(
        (response.status().as_u16(), (1..=10).contains(&retry_after_seconds)),
        (429, true),
        "{retry_after_seconds}"
    );
    let problem: Value = response.json().await?;
    assert_eq!(
        (&problem["code"], &problem["detail"], &problem["period"], &problem["spent"]),
        (&json!("cost_limit_reached"), &json!("Daily cost limit reached."), &json!("daily"), &json!(0.75))
    );
    wait_until_logged(&host, "a dispatch from user_owner was refused: Daily cost limit reached.").await?;
    // Another user has a separate limit. A request for a free model is limited, too, because the agent may use a
    // different model.
    assert_eq!(
        request_dispatch(&host, json!({ "prompt": "ok", "senderId": "another", "id": "o" })).await?.0,
        StatusCode::ACCEPTED
    );
    let (status, refused) = request_dispatch(&host, json!({ "prompt": "nothing", "model": "free" })).await?;
    assert_eq!((status.as_u16(), &refused["code"]), (429, &json!("cost_limit_reached")));
    host.machine.write("home/svc/home/go", "")?;
    let (_, text) = send_json(host.owner_request(Method::GET, "/api/dispatch/held/events")).await?;
    let events = parse_events(text.as_str().context("no events")?);
    let warning = events.iter().find(|(kind, _)| kind == "warning").context("no warning event")?;
    assert_eq!(warning.1["period"], "daily");
    wait_until_logged(&host, "user_owner has spent").await?;
    // Earlier spending counts toward a new limit, and the log says so.
    send_json(host.owner_request(Method::PUT, "/api/limits").json(&json!({ "daily": 0, "monthly": 100 })))
        .await?;
    let expected = "the monthly cost limit is $100.00; spent so far in the current period: $";
    wait_until_logged(&host, expected).await
}

#[tokio::test]
async fn tokens_are_priced_by_the_model_that_ran() -> Result<()> {
    let (machine, _runner) = machine_with_runner(&json!({}))?;
    let host = machine.start()?;
    for body in [json!({ "prompt": "tokens" }), json!({ "prompt": "tokens", "model": "free" })] {
        let streamed = stream_dispatch(&host, body).await?;
        let interaction = &streamed.last().context("no result event")?.1["interaction"];
        assert_eq!(interaction["cost"], json!(3), "1M × $2 + 0.1M × $10");
        assert_eq!(interaction["model"], "m-1");
    }
    Ok(())
}

#[tokio::test]
async fn concurrent_dispatches_stay_within_cost_limit() -> Result<()> {
    let limits = json!({ "costLimits": { "daily": 2, "reservation": 0.25 },
        "dispatch": { "defaultAgent": "coder", "concurrency": 64 } });
    let (machine, _runner) = machine_with_runner(&limits)?;
    let host = machine.start()?;
    let requests = (0..64).map(|_| request_dispatch(&host, json!({ "prompt": "ok" })));
    let responses = futures_util::future::join_all(requests).await;
    let mut accepted_ids = Vec::new();
    for response in responses {
        let (status, body) = response?;
        match status.as_u16() {
            202 => accepted_ids.push(body["id"].as_str().context("no id")?.to_owned()),
            429 => assert_eq!(body["detail"], "Daily cost limit reached."),
            other => panic!("{other} {body}"),
        }
    }
    assert_eq!(accepted_ids.len(), 8, "each dispatch must reserve its cost");
    for id in &accepted_ids {
        wait_until_finished(&host, id).await?;
    }
    let (_, limits) = host.get("/api/limits").await?;
    assert_eq!((&limits["daily"]["spent"], &limits["daily"]["reserved"]), (&json!(2), &json!(0)));
    let (status, _) = request_dispatch(&host, json!({ "prompt": "ok" })).await?;
    assert_eq!(status.as_u16(), 429);
    Ok(())
}
