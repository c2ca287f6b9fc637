//! Tests queued dispatches: fairness, idempotent ids, batches, and persistence across gateway restarts.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use anyhow::{Context, Result};
use kit::disk::SmallDisk;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use super::dispatch::{
    CONFIG, config_json, event_kinds, machine_with_runner, parse_events, request_dispatch, stream_dispatch,
    wait_for_pid, wait_until_finished, wait_until_recorded,
};
use super::host::{Host, send_json};

/// Starts a fake svc-watch; the receiver gets each message's phase and dispatch id.
fn start_fake_watcher(socket: &Path) -> Result<Receiver<(String, String)>> {
    std::fs::create_dir_all(socket.parent().context("the socket has no parent directory")?)?;
    let listener = UnixListener::bind(socket)?;
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut line = String::new();
            if BufReader::new(&stream).read_line(&mut line).is_err() {
                continue;
            }
            let message: Value = serde_json::from_str(&line).unwrap_or_default();
            let text_field = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
            if stream.write_all(b"{\"heard\":true}\n").is_err()
                || sender.send((text_field("phase"), text_field("dispatchId"))).is_err()
            {
                return;
            }
        }
    });
    Ok(receiver)
}

#[tokio::test]
async fn restarted_gateway_reports_ended_dispatches_to_watcher() -> Result<()> {
    let (machine, _runner) =
        machine_with_runner(&json!({ "dispatch": { "defaultAgent": "coder", "concurrency": 1 } }))?;
    let messages = start_fake_watcher(&machine.path("run/svc/watch/watch.sock"))?;
    let next_message =
        || messages.recv_timeout(Duration::from_secs(20)).context("no message from the gateway");
    let host = machine.start()?;
    request_dispatch(&host, json!({ "prompt": "hold", "id": "first" })).await?;
    request_dispatch(&host, json!({ "prompt": "ok", "id": "waits" })).await?;
    assert_eq!(next_message()?, ("dispatchBegin".to_owned(), "first".to_owned()));
    let host = host.restart()?;
    let mut received = vec![next_message()?, next_message()?, next_message()?];
    received.sort();
    let message = |phase: &str, id: &str| (phase.to_owned(), id.to_owned());
    let expected =
        [message("dispatchBegin", "waits"), message("dispatchEnd", "first"), message("dispatchEnd", "waits")];
    assert_eq!(received, expected, "the queued dispatch must begin exactly once");
    wait_until_recorded(&host, "first").await?;
    Ok(())
}

#[tokio::test]
async fn queue_is_fair_across_users_and_survives_restart() -> Result<()> {
    let (machine, _runner) =
        machine_with_runner(&json!({ "dispatch": { "defaultAgent": "coder", "concurrency": 1 } }))?;
    let host = machine.start()?;
    request_dispatch(&host, json!({ "prompt": "hold", "id": "first" })).await?;
    for (id, sender) in [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")] {
        request_dispatch(&host, json!({ "prompt": "ok", "id": id, "senderId": sender })).await?;
    }
    let (_, response) = host.get("/api/dispatch").await?;
    let statuses: Vec<(&str, &str)> = response["dispatches"]
        .as_array()
        .context("no dispatches")?
        .iter()
        .map(|dispatch| {
            (dispatch["id"].as_str().unwrap_or_default(), dispatch["status"].as_str().unwrap_or_default())
        })
        .collect();
    assert_eq!(
        statuses,
        [("b1", "queued"), ("a3", "queued"), ("a2", "queued"), ("a1", "queued"), ("first", "running")]
    );
    send_json(host.owner_request(Method::DELETE, "/api/dispatch/a3")).await?;
    assert_eq!(
        wait_until_finished(&host, "a3").await?["dispatches"][0]["interaction"]["error"]["name"],
        "Cancelled"
    );
    let host = host.restart()?;
    for id in ["a1", "b1", "a2"] {
        assert_eq!(wait_until_finished(&host, id).await?["status"], "success", "{id}");
        wait_until_recorded(&host, id).await?;
    }
    assert_eq!(wait_until_recorded(&host, "first").await?["error"]["name"], "Interrupted");
    let (_, first) = host.get("/api/dispatch/first").await?;
    assert!(first["dispatches"][0]["startedAt"].is_string(), "{first}");
    let (_, page) = host.get("/api/interactions?status=success").await?;
    let order: Vec<&str> = page["interactions"]
        .as_array()
        .context("no interactions")?
        .iter()
        .rev()
        .filter_map(|dispatch| dispatch["id"].as_str())
        .collect();
    assert_eq!(order, ["a1", "b1", "a2"]);
    host.wait_until("the journal is empty", async || {
        Ok(std::fs::read_dir(host.machine.path("var/lib/svc/dispatches"))?.count() == 0)
    })
    .await
}

#[tokio::test]
async fn repeated_request_runs_once_and_abandoned_ones_finish() -> Result<()> {
    let (machine, _runner) = machine_with_runner(&json!({}))?;
    let host = machine.start()?;
    host.wait_until(
        "the gateway is ready",
        async || Ok(host.get("/api/dispatch").await?.0 == StatusCode::OK),
    )
    .await?;
    // Eight concurrent requests have the same id.
    let body = || json!({ "prompt": "ok", "id": "same" });
    for response in futures_util::future::join_all((0..8).map(|_| request_dispatch(&host, body()))).await {
        assert_eq!(response?.0, StatusCode::ACCEPTED);
    }
    wait_until_finished(&host, "same").await?;
    // These callers disconnect without waiting for the response.
    for n in 0..20 {
        let body = json!({ "prompt": "ok", "id": format!("gone-{n}") }).to_string();
        let head = "POST /api/dispatch HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
        let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        let mut caller = std::os::unix::net::UnixStream::connect(host.socket())?;
        std::io::Write::write_all(&mut caller, request.as_bytes())?;
        std::thread::sleep(Duration::from_micros(300 * n));
        drop(caller);
    }
    let is_abandoned = |dispatch: &Value| dispatch["id"].as_str().is_some_and(|id| id.starts_with("gone-"));
    host.wait_until("abandoned dispatches have succeeded and nothing is reserved", async || {
        let (_, all) = host.get("/api/dispatch").await?;
        let all = all["dispatches"].as_array().cloned().unwrap_or_default();
        let (_, limits) = host.get("/api/limits").await?;
        Ok(all.iter().any(is_abandoned)
            && all.iter().all(|dispatch| dispatch["status"] == "success")
            && limits["daily"]["reserved"] == 0)
    })
    .await?;
    let (_, page) = host.get("/api/interactions?id=same&limit=10").await?;
    assert_eq!(page["interactions"].as_array().map(Vec::len), Some(1));
    Ok(())
}

#[tokio::test]
async fn conversation_runs_one_agent_at_a_time() -> Result<()> {
    let (machine, _runner) = machine_with_runner(&json!({}))?;
    let host = machine.start()?;
    let body = |id: &str, prompt: &str| json!({ "id": id, "prompt": prompt, "conversationId": "c" });
    request_dispatch(&host, body("first", "hold")).await?;
    request_dispatch(&host, body("second", "ok")).await?;
    request_dispatch(&host, json!({ "id": "other", "prompt": "ok", "senderId": "other" })).await?;
    assert_eq!(wait_until_finished(&host, "other").await?["status"], "success");
    assert_eq!(host.get("/api/dispatch/second").await?.1["status"], "queued");
    host.machine.write("home/svc/home/go", "")?;
    assert_eq!(wait_until_finished(&host, "second").await?["status"], "success");
    Ok(())
}

#[tokio::test]
async fn batch_never_blocks_on_its_own_queued_entries() -> Result<()> {
    let limits = json!({ "costLimits": { "daily": 1, "reservation": 0.5 },
        "dispatch": { "defaultAgent": "coder", "concurrency": 1 } });
    let (machine, _runner) = machine_with_runner(&limits)?;
    let host = machine.start()?;
    // The batch's first entry and the single dispatch reserve 0.50 each, so the batch's second entry must wait.
    request_dispatch(&host, json!({ "id": "b", "batch": [{ "prompt": "hold" }, { "prompt": "ok" }] }))
        .await?;
    assert_eq!(request_dispatch(&host, json!({ "id": "s", "prompt": "ok" })).await?.0, StatusCode::ACCEPTED);
    host.machine.write("home/svc/home/go", "")?;
    assert_eq!(wait_until_finished(&host, "s").await?["status"], "success");
    // The single dispatch cost 0.25, so the limit now permits the second entry.
    assert_eq!(wait_until_finished(&host, "b").await?["status"], "success");
    Ok(())
}

/// The limit is raised before the restart, so that only the journal can prevent the entry from running.
#[tokio::test]
async fn refused_batch_entry_stays_refused_after_a_crash() -> Result<()> {
    let limits = |daily: f64| {
        json!({ "costLimits": { "daily": daily, "reservation": 0.1 },
            "dispatch": { "defaultAgent": "coder", "concurrency": 2 } })
    };
    let (machine, _runner) = machine_with_runner(&limits(0.25))?;
    let host = machine.start()?;
    let batch = json!([{ "prompt": "hold" }, { "prompt": "ok" }, { "prompt": "ok" }]);
    request_dispatch(&host, json!({ "id": "b", "batch": batch })).await?;
    let status = async |host: &Host| {
        let (_, response) = host.get("/api/dispatch/b.2").await?;
        Ok::<_, anyhow::Error>(response["dispatches"][0]["status"].clone())
    };
    host.wait_until("the last entry is refused", async || Ok(status(&host).await? == "refused")).await?;
    host.machine.write(CONFIG, &config_json(&limits(100.0)))?;
    let host = host.restart()?;
    assert_eq!(wait_until_recorded(&host, "b.0").await?["error"]["name"], "Interrupted");
    let (_, streamed) = send_json(host.owner_request(Method::GET, "/api/dispatch/b/events")).await?;
    assert_eq!(event_kinds(&parse_events(streamed.as_str().unwrap_or_default())).last(), Some(&"done"));
    assert_eq!(status(&host).await?, "refused");
    let (_, page) = host.get("/api/interactions?batchId=b&limit=10").await?;
    assert_eq!(page["interactions"].as_array().map(Vec::len), Some(2), "{page}");
    host.wait_until("the journal is empty", async || {
        Ok(std::fs::read_dir(host.machine.path("var/lib/svc/dispatches"))?.count() == 0)
    })
    .await
}

#[tokio::test]
async fn batch_with_refused_entry_stays_failed_after_restart() -> Result<()> {
    let limits = json!({ "costLimits": { "daily": 0.25, "reservation": 0.1 },
        "dispatch": { "defaultAgent": "coder", "concurrency": 1 } });
    let (machine, _runner) = machine_with_runner(&limits)?;
    let host = machine.start()?;
    let body = json!({ "id": "b", "batch": [{ "prompt": "ok" }, { "prompt": "ok" }] });
    request_dispatch(&host, body.clone()).await?;
    let statuses = |response: &Value| {
        let entries = response["dispatches"].as_array().into_iter().flatten();
        (response["status"].clone(), entries.map(|entry| entry["status"].clone()).collect::<Vec<_>>())
    };
    let ended = wait_until_finished(&host, "b").await?;
    assert_eq!(statuses(&ended), (json!("error"), vec![json!("success"), json!("refused")]));
    host.wait_until("the journal is empty", async || {
        Ok(std::fs::read_dir(host.machine.path("var/lib/svc/dispatches"))?.count() == 0)
    })
    .await?;
    // Only the records remain, and a refused entry has no record.
    let host = host.restart()?;
    let (_, repeated) = request_dispatch(&host, body).await?;
    assert_eq!(statuses(&repeated), (json!("error"), vec![json!("success")]));
    Ok(())
}

#[tokio::test]
async fn interrupted_dispatch_on_full_disk_is_not_restarted() -> Result<()> {
    let (machine, _runner) =
        machine_with_runner(&json!({ "dispatch": { "defaultAgent": "coder", "concurrency": 1 } }))?;
    let dispatches = machine.path("var/lib/svc/dispatches");
    let Some(disk) = SmallDisk::mount(dispatches.clone(), 1)? else { return Ok(()) };
    let host = machine.start()?;
    request_dispatch(&host, json!({ "prompt": "hold", "id": "first" })).await?;
    request_dispatch(&host, json!({ "prompt": "sleep", "id": "second" })).await?;
    disk.fill(0)?;
    host.machine.write("home/svc/home/go", "")?;
    let pid = wait_for_pid(&host, "sleeping.pid").await?;
    let host = host.restart()?;
    let recorded = wait_until_recorded(&host, "second").await?;
    assert_eq!((&recorded["error"]["name"], &recorded["status"]), (&json!("Interrupted"), &json!("error")));
    assert!(recorded["durationMs"].as_u64().is_some_and(|ms| ms < 600_000), "{recorded}");
    wait_until_recorded(&host, "first").await?;
    disk.delete_filler()?;
    // The same machine accepts more dispatches, and the interrupted one is not run again.
    let streamed = stream_dispatch(&host, json!({ "prompt": "ok", "id": "third" })).await?;
    assert_eq!(streamed.last().context("no result event")?.1["status"], "success");
    assert_eq!(wait_for_pid(&host, "sleeping.pid").await?, pid, "the interrupted dispatch ran again");
    host.wait_until("the journal is empty", async || Ok(std::fs::read_dir(&dispatches)?.count() == 0)).await
}

/// Neither the journal nor the records can be written, so only the start marker, an empty file, can prevent the
/// dispatch from running.
#[tokio::test]
async fn dispatch_cancelled_on_full_disk_never_runs() -> Result<()> {
    let (machine, _runner) =
        machine_with_runner(&json!({ "dispatch": { "defaultAgent": "coder", "concurrency": 1 } }))?;
    let journal_disk = SmallDisk::mount(machine.path("var/lib/svc/dispatches"), 1)?;
    let log_disk = SmallDisk::mount(machine.path("home/svc/home/system/logs"), 1)?;
    let (Some(journal_disk), Some(log_disk)) = (journal_disk, log_disk) else { return Ok(()) };
    let host = machine.start()?;
    request_dispatch(&host, json!({ "prompt": "hold", "id": "first" })).await?;
    request_dispatch(&host, json!({ "prompt": "sleep", "id": "second" })).await?;
    journal_disk.fill(0)?;
    log_disk.fill(0)?;
    send_json(host.owner_request(Method::DELETE, "/api/dispatch/second")).await?;
    let host = host.restart()?;
    let ended = wait_until_finished(&host, "second").await?;
    assert_eq!(ended["dispatches"][0]["interaction"]["error"]["name"], "Interrupted", "{ended}");
    assert!(!host.machine.path("home/svc/home/sleeping.pid").exists(), "the cancelled dispatch ran");
    Ok(())
}

#[tokio::test]
async fn batch_survives_restart_in_order() -> Result<()> {
    let (machine, _runner) =
        machine_with_runner(&json!({ "dispatch": { "defaultAgent": "coder", "concurrency": 2 } }))?;
    let host = machine.start()?;
    let mut batch = vec![json!({ "prompt": "ok" }); 12];
    batch[3] = json!({ "prompt": "hold" });
    request_dispatch(&host, json!({ "id": "b", "batch": batch })).await?;
    wait_until_recorded(&host, "b.1").await?;
    let host = host.restart()?;
    host.machine.write("home/svc/home/go", "")?;
    let (_, streamed) = send_json(host.owner_request(Method::GET, "/api/dispatch/b/events")).await?;
    assert_eq!(event_kinds(&parse_events(streamed.as_str().unwrap_or_default())).last(), Some(&"done"));
    // A killed gateway loses the records that it has not written yet, and the entries end in any order.
    for index in 0..12 {
        wait_until_recorded(&host, &format!("b.{index}")).await?;
    }
    let host = host.restart()?;
    let (_, response) = host.get("/api/dispatch/b").await?;
    let ids: Vec<String> = response["dispatches"]
        .as_array()
        .context("no dispatches")?
        .iter()
        .map(|dispatch| dispatch["id"].as_str().unwrap_or_default().to_owned())
        .collect();
    assert_eq!(ids, (0..12).map(|n| format!("b.{n}")).collect::<Vec<_>>());
    let (_, page) = host.get("/api/interactions?batchId=b&limit=100").await?;
    assert_eq!(page["interactions"].as_array().map(Vec::len), Some(12), "each entry must be recorded once");
    Ok(())
}

#[tokio::test]
async fn batch_has_a_result_for_each_entry() -> Result<()> {
    let (machine, _runner) = machine_with_runner(&json!({}))?;
    let host = machine.start()?;
    let body =
        json!({ "id": "b", "batch": [{ "prompt": "ok 1" }, { "prompt": "fail" }, { "prompt": "ok 3" }] });
    let streamed = stream_dispatch(&host, body.clone()).await?;
    assert_eq!(streamed.last().map(|(kind, _)| kind.as_str()), Some("done"));
    let mut results: Vec<(u64, &str)> = streamed
        .iter()
        .filter(|(kind, _)| kind == "result")
        .map(|(_, data)| {
            (data["index"].as_u64().unwrap_or_default(), data["status"].as_str().unwrap_or_default())
        })
        .collect();
    results.sort_unstable();
    assert_eq!(results, [(0, "success"), (1, "error"), (2, "success")]);
    wait_until_recorded(&host, "b.2").await?;
    let host = host.restart()?;
    let (_, response) = host.get("/api/dispatch/b").await?;
    assert_eq!((&response["batch"], &response["status"]), (&json!(true), &json!("error")));
    assert_eq!(
        request_dispatch(&host, body).await?.0,
        StatusCode::ACCEPTED,
        "a repeated request must be accepted"
    );
    let different = json!({ "id": "b", "batch": [{ "prompt": "ok 1" }] });
    let (status, refused) = request_dispatch(&host, different).await?;
    assert_eq!((status.as_u16(), &refused["code"]), (422, &json!("idempotency_mismatch")));
    for dispatch in response["dispatches"].as_array().context("no dispatches")? {
        assert_eq!(
            (&dispatch["interaction"]["batch"], &dispatch["interaction"]["batchId"]),
            (&json!(true), &json!("b"))
        );
    }
    let (_, entry) = host.get("/api/dispatch/b.0").await?;
    assert_eq!(entry["dispatches"][0]["interaction"]["id"], "b.0");
    Ok(())
}
