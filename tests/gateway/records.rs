//! Reads a machine's records as the owner does: pages, streams, usage and limits, over HTTP and in a terminal.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use http::Method;
use jiff::{Timestamp, ToSpan};
use serde_json::{Value, json};

use super::host::{Host, Machine, UNREACHABLE_DATABASE, send_json};

const LOGS: &str = "home/svc/home/system/logs";
const CONFIG: &str = "home/svc/home/system/config.json";

fn interaction(n: u32, at: Timestamp, user: &str, model: &str, cost: f64) -> Value {
    json!({
        "version": 1, "id": format!("d{n}"), "timestamp": format!("{at:.3}"), "senderId": user, "conversationId": "c",
        "model": model, "agentName": "coder", "tokensIn": 100, "tokensOut": 10, "cost": cost, "durationMs": 5,
        "tools": [{ "name": "Bash", "durationMs": 1, "inputPreview": "ls", "status": "success" }],
        "status": if n.is_multiple_of(5) { "error" } else { "success" }, "batch": false,
    })
}

/// Returns a machine with finished dispatches by two users, from yesterday and today.
fn machine_with_interactions() -> Result<(Machine, Timestamp)> {
    let machine = Machine::new(UNREACHABLE_DATABASE)?;
    let now = Timestamp::now();
    for (hours_ago, first) in [(24, 0), (0, 10)] {
        let at = now.checked_sub(hours_ago.hours())?;
        let day = at.to_zoned(jiff::tz::TimeZone::UTC).date();
        let user = |n: u32| if n.is_multiple_of(2) { "user_owner" } else { "telegram:7" };
        let lines: String = (first..first + 10)
            .map(|n| format!("{}\n", interaction(n, at, user(n), if n < 15 { "big" } else { "small" }, 0.1)))
            .collect();
        machine.write(&format!("{LOGS}/interactions-{day}.jsonl"), &lines)?;
    }
    Ok((machine, now))
}

async fn get(host: &Host, path: &str) -> Result<Value> {
    let (status, body) = host.get(path).await?;
    ensure!(status == 200, "{path}: {status} {body}");
    Ok(body)
}

fn interaction_ids(body: &Value) -> Vec<&str> {
    body["interactions"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|interaction| interaction["id"].as_str())
        .collect()
}

#[tokio::test]
async fn interactions_are_paged_newest_first_and_filtered() -> Result<()> {
    let (machine, now) = machine_with_interactions()?;
    let host = machine.start()?;
    let (mut all, mut cursor, mut pages) = (Vec::new(), String::new(), 0);
    loop {
        let page = get(&host, &format!("/api/interactions?limit=6{cursor}")).await?;
        all.extend(interaction_ids(&page).into_iter().map(str::to_owned));
        pages += 1;
        match page["nextCursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    let expected: Vec<String> = (0..20).rev().map(|n| format!("d{n}")).collect();
    assert_eq!((all, pages), (expected, 4));
    assert_eq!(
        interaction_ids(&get(&host, "/api/interactions?status=error").await?),
        ["d15", "d10", "d5", "d0"]
    );
    let filtered = get(&host, "/api/interactions?senderId=telegram:7&model=small").await?;
    assert_eq!(interaction_ids(&filtered), ["d19", "d17", "d15"]);
    let since = now.checked_sub(1.hours())?;
    let recent = get(&host, &format!("/api/interactions?since={since:.3}&limit=1000")).await?;
    assert_eq!(interaction_ids(&recent).len(), 10);
    let before = get(&host, &format!("/api/interactions?until={since:.3}")).await?;
    assert_eq!(interaction_ids(&before)[0], "d9");
    Ok(())
}

#[test]
fn usage_table_shows_names_on_one_line() -> Result<()> {
    let (machine, now) = (Machine::new(UNREACHABLE_DATABASE)?, Timestamp::now());
    let line = interaction(1, now, "user_owner", "big\n\u{1b}[31m", 0.1);
    let day = now.to_zoned(jiff::tz::TimeZone::UTC).date();
    machine.write(&format!("{LOGS}/interactions-{day}.jsonl"), &format!("{line}\n"))?;
    let stdout = String::from_utf8(machine.command().args(["usage", "--by", "model"]).output()?.stdout)?;
    assert!(stdout.contains("big; \u{FFFD}[31m"), "{stdout:?}");
    Ok(())
}

#[tokio::test]
async fn usage_equals_interactions_and_outlives_them() -> Result<()> {
    let (machine, _) = machine_with_interactions()?;
    let mut host = machine.start()?;
    let all = get(&host, "/api/usage").await?;
    assert_eq!(
        (&all["totalCost"], &all["totalDispatches"], &all["totalTokensIn"]),
        (&json!(2), &json!(20), &json!(2000))
    );
    assert_eq!(all["entries"].as_array().context("no entries")?.len(), 2);
    let models = get(&host, "/api/usage?groupBy=model&userId=telegram:7").await?;
    let costs: Vec<_> = models["entries"]
        .as_array()
        .context("no entries")?
        .iter()
        .map(|entry| (&entry["model"], &entry["cost"]))
        .collect();
    assert_eq!(costs, [(&json!("big"), &json!(0.7)), (&json!("small"), &json!(0.3))]);
    let day = all["entries"][1]["date"].as_str().context("no date")?.to_owned();
    let today = get(&host, &format!("/api/usage?startDate={day}&endDate={day}")).await?;
    assert_eq!((&today["totalCost"], &today["entries"][0]["dispatches"]), (&json!(1), &json!(10)));

    // The same report in a terminal, while the gateway is running.
    let output = host.machine.command().args(["usage", "--by", "user"]).output()?;
    let output = String::from_utf8(output.stdout)?;
    assert!(
        output.contains("telegram:7") && output.contains("$1.00") && output.contains("$2.00"),
        "{output}"
    );

    host.terminate()?;
    assert!(host.wait_for_exit().await?.success());
    let logs = host.machine.path(LOGS);
    let usage = std::fs::read_to_string(logs.join("usage.jsonl"))?;
    assert_eq!(usage.lines().count(), 6, "there must be one line per day, user and model: {usage}");
    for entry in std::fs::read_dir(&logs)? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("interactions-")) {
            std::fs::remove_file(path)?;
        }
    }
    let host = host.restart()?;
    assert_eq!(get(&host, "/api/usage").await?["totalCost"], json!(2));
    assert!(get(&host, "/api/interactions").await?["interactions"].as_array().is_some_and(Vec::is_empty));
    Ok(())
}

#[tokio::test]
async fn gateway_start_and_stop_are_logged() -> Result<()> {
    let mut host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    host.terminate()?;
    assert!(host.wait_for_exit().await?.success());
    let text = std::fs::read_to_string(host.machine.path(LOGS).join("activity.log"))?;
    let lines: Vec<&str> = text.lines().filter_map(|line| Some(line.split_once(' ')?.1)).collect();
    assert_eq!(
        (lines.first(), lines.last()),
        (Some(&"the gateway has started"), Some(&"the gateway has stopped"))
    );
    Ok(())
}

#[tokio::test]
async fn owner_sets_limits_and_sees_spending() -> Result<()> {
    let (machine, _) = machine_with_interactions()?;
    machine.write(CONFIG, r#"{"theme": "dark", "costLimits": {"monthly": 100}}"#)?;
    let host = machine.start()?;
    let put = |body: Value| send_json(host.owner_request(Method::PUT, "/api/limits").json(&body));
    let limits = get(&host, "/api/limits").await?;
    assert_eq!(
        (&limits["daily"]["limit"], &limits["daily"]["remaining"], &limits["timeZone"]),
        (&json!(0), &Value::Null, &json!("UTC"))
    );
    assert_eq!(
        (&limits["userId"], &limits["daily"]["spent"], &limits["monthly"]["limit"]),
        (&json!("user_owner"), &json!(0.5), &json!(100))
    );

    let (status, updated) = put(json!({"daily": 0.6, "reservation": 0.05})).await?;
    assert_eq!(
        (status.as_u16(), &updated["daily"]["warning"], &updated["daily"]["reached"]),
        (200, &json!(true), &json!(false))
    );
    let (_, updated) = put(json!({"daily": 0.5})).await?;
    assert_eq!((&updated["daily"]["reached"], &updated["daily"]["remaining"]), (&json!(true), &json!(0)));
    let config: Value = serde_json::from_slice(&std::fs::read(host.machine.path(CONFIG))?)?;
    assert_eq!(
        config,
        json!({"theme": "dark", "costLimits": {"monthly": 100, "daily": 0.5, "reservation": 0.05}})
    );
    assert_eq!(get(&host, "/api/limits?userId=nobody").await?["daily"]["spent"], json!(0));
    // The audit log also contains the gateway's own changes.
    host.wait_until("the audit log has both changes", async || {
        let audit = get(&host, "/api/audit?path=system/config.json&actor=svc-gateway").await?;
        Ok(audit["entries"]
            .as_array()
            .is_some_and(|entries| entries.len() == 2 && entries[0]["op"] == "write"))
    })
    .await?;

    // An invalid manual edit changes nothing and is reported.
    host.machine.write(CONFIG, r#"{"costLimits": {"daily": -3}}"#)?;
    let limits = get(&host, "/api/limits").await?;
    assert_eq!(limits["daily"]["limit"], json!(0.5));
    assert!(limits["mistake"].as_str().is_some_and(|text| text.contains("line 1")), "{limits}");
    host.machine.write(CONFIG, r#"{"costLimits": {"dailly": 3}}"#)?;
    let limits = get(&host, "/api/limits").await?;
    assert_eq!(limits["daily"]["limit"], json!(0.5));
    assert!(limits["mistake"].as_str().is_some_and(|text| text.contains("costLimits.dailly")), "{limits}");
    // A valid edit clears the mistake and sets the time zone.
    host.machine.write(CONFIG, r#"{"costLimits": {"daily": 1, "timeZone": "Pacific/Kiritimati"}}"#)?;
    let limits = get(&host, "/api/limits").await?;
    assert_eq!((&limits["mistake"], &limits["timeZone"]), (&Value::Null, &json!("Pacific/Kiritimati")));
    for invalid in [
        json!({"daily": -1}),
        json!({"daily": "5"}),
        json!({"timeZone": "Mars/Olympus"}),
        json!({"weekly": 1}),
    ] {
        let (status, body) = put(invalid).await?;
        assert_eq!((status.as_u16(), &body["code"]), (400, &json!("invalid_request")));
    }
    host.wait_until("the limits are logged in activity.log", async || {
        let activity = get(&host, "/api/activity?contains=limit&limit=100").await?;
        let activity = activity["lines"].to_string();
        Ok(["daily cost limit is $0.60", "daily cost limit is $0.50"]
            .iter()
            .all(|text| activity.contains(text)))
    })
    .await
}

/// The stream contains every line once, even across a rotation, and resumes after a disconnect.
#[tokio::test]
async fn log_stream_follows_rotation_and_resumes() -> Result<()> {
    let machine = Machine::new(UNREACHABLE_DATABASE)?;
    let line = |n: u32, op: &str| {
        json!({"version": 1, "timestamp": "2026-11-22T10:00:00.000Z", "op": op, "path": format!("a/{n}"), "actor": "x"}).to_string() + "\n"
    };
    machine.write(&format!("{LOGS}/audit.jsonl"), &line(0, "write"))?;
    let host = machine.start()?;
    let path = host.machine.path(LOGS).join("audit.jsonl");
    let append = |text: &str| -> Result<()> {
        use std::io::Write;
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(&path)?;
        Ok(file.write_all(text.as_bytes())?)
    };
    let mut events = EventStream::open(&host, "/api/audit/changes?op=write", None).await?;
    let ready = events.next().await?;
    assert!(ready.contains("event: ready"), "{ready}");
    append(&(line(1, "write") + &line(2, "delete") + &line(3, "write")))?;
    let first = events.next().await?;
    assert!(first.contains("\"a/1\""), "{first}");
    let id = first.lines().find_map(|line| line.strip_prefix("id: ")).context("no id")?.to_owned();
    assert!(events.next().await?.contains("\"a/3\""));
    drop(events);
    std::fs::rename(&path, path.with_file_name("audit-2026-11-21.jsonl"))?;
    append(&line(4, "write"))?;
    let mut events = EventStream::open(&host, "/api/audit/changes", Some(&id)).await?;
    assert!(events.next().await?.contains("event: ready"));
    for n in 2..5 {
        let event = events.next().await?;
        assert!(event.contains(&format!("\"a/{n}\"")), "{event}");
    }
    // The same lines in a terminal.
    let output = host.machine.command().args(["logs", "audit", "-n", "3"]).output()?;
    let output = String::from_utf8(output.stdout)?;
    let paths: Vec<_> =
        output.lines().filter_map(|line| line.split("\"path\":\"").nth(1)?.split('"').next()).collect();
    assert_eq!(paths, ["a/2", "a/3", "a/4"]);
    Ok(())
}

#[tokio::test]
async fn open_log_stream_does_not_delay_shutdown() -> Result<()> {
    let mut host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    let mut events = EventStream::open(&host, "/api/activity/changes", None).await?;
    events.next().await?;
    let started = std::time::Instant::now();
    host.terminate()?;
    assert!(host.wait_for_exit().await?.success());
    assert!(started.elapsed() < Duration::from_secs(15), "the gateway waited for the drain timeout of 20 s");
    Ok(())
}

struct EventStream {
    body: futures_util::stream::BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    text: String,
}

impl EventStream {
    async fn open(host: &Host, path: &str, after: Option<&str>) -> Result<Self> {
        let request =
            host.owner_request(Method::GET, path).header("last-event-id", after.unwrap_or_default());
        let response = request.send().await?;
        ensure!(response.status() == 200, "{}", response.status());
        Ok(Self { body: response.bytes_stream().boxed(), text: String::new() })
    }

    async fn next(&mut self) -> Result<String> {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let (event, rest) = (event.to_owned(), rest.to_owned());
                self.text = rest;
                return Ok(event);
            }
            let chunk = tokio::time::timeout(Duration::from_secs(20), self.body.next()).await?;
            self.text.push_str(std::str::from_utf8(&chunk.context("the stream has ended")??)?);
        }
    }
}
