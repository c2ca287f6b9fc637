//! The kernel's records on a disk that is full, is somebody else's, or loses files under the gateway's feet: it serves on,
//! says so, and goes on with its records when it can.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use http::Method;
use kit::disk::SmallDisk;
use serde_json::{Value, json};

use super::host::{Host, Machine, answer};
use super::metrics::scrape;

const NOWHERE: &str = "postgres://postgres:pw@127.0.0.1:1/svc";
const LOGS: &str = "home/svc/home/system/logs";

/// Something of which a line is written: `the daily cost limit is $n.00`.
async fn noted(host: &Host, n: u32) -> Result<()> {
    let (status, body) = answer(host.owner(Method::PUT, "/api/limits").json(&json!({"daily": n}))).await?;
    ensure!(status == 200, "{status} {body}");
    Ok(())
}

fn is_told(logs: &Path, n: u32) -> bool {
    let text = fs::read(logs.join("activity.log")).unwrap_or_default();
    String::from_utf8_lossy(&text).contains(&format!("the daily cost limit is ${n}.00;"))
}

async fn until_told(host: &Host, n: u32) -> Result<()> {
    let logs = host.machine.path(LOGS);
    host.until(&format!("the note of {n}"), async || Ok(is_told(&logs, n))).await
}

async fn until_stuck(host: &Host, stuck: f64) -> Result<()> {
    host.until("the records' state is told", async || {
        Ok(scrape(host)?.get("svc_records_stuck") == Some(stuck))
    })
    .await
}

async fn serves(host: &Host) -> Result<()> {
    for path in ["/api/usage", "/api/limits", "/api/activity", "/api/interactions", "/livez"] {
        let (status, body) = host.get(path).await?;
        ensure!(status == 200, "{path}: {status} {body}");
    }
    Ok(())
}

#[tokio::test]
async fn a_full_disk_is_served_on_said_and_gone_on_from() -> Result<()> {
    let machine = Machine::new(NOWHERE)?;
    let logs = machine.path(LOGS);
    let Some(disk) = SmallDisk::mount(logs.clone(), 1)? else { return Ok(()) };
    let mut host = machine.start()?;
    noted(&host, 1).await?;
    until_told(&host, 1).await?;
    until_stuck(&host, 0.0).await?;
    // Somebody's torn line, at the end of what fits: not one byte more does.
    fs::remove_file(logs.join("activity.log"))?;
    disk.fill(0)?;
    noted(&host, 2).await?;
    until_stuck(&host, 1.0).await?;
    ensure!(scrape(&host)?.get("svc_records_waiting_bytes").is_some_and(|bytes| bytes > 0.0), "they wait");
    ensure!(host.log().contains("records cannot be written"), "{}", host.log());
    noted(&host, 3).await?;
    serves(&host).await?;
    disk.empty()?;
    until_told(&host, 2).await?;
    until_told(&host, 3).await?;
    until_stuck(&host, 0.0).await?;
    ensure!(host.log().contains("records are written again"), "{}", host.log());
    let text = fs::read_to_string(logs.join("activity.log"))?;
    ensure!(text.lines().all(|line| line.starts_with("20")), "each line is whole: {text}");
    serves(&host).await?;
    // A full disk keeps nobody from a clean end.
    disk.fill(0)?;
    noted(&host, 4).await?;
    host.terminate()?;
    ensure!(host.ended().await?.success(), "{}", host.log());
    Ok(())
}

#[tokio::test]
async fn files_that_are_renamed_deleted_cut_or_somebody_elses_stop_no_record() -> Result<()> {
    let machine = Machine::new(NOWHERE)?;
    let host = machine.start()?;
    let logs = host.machine.path(LOGS);
    let current = logs.join("activity.log");
    noted(&host, 1).await?;
    until_told(&host, 1).await?;
    fs::rename(&current, logs.join("activity-2026-11-21.log"))?;
    noted(&host, 2).await?;
    until_told(&host, 2).await?;
    fs::remove_file(&current)?;
    noted(&host, 3).await?;
    until_told(&host, 3).await?;
    fs::File::options().write(true).open(&current)?.set_len(10)?;
    noted(&host, 4).await?;
    until_told(&host, 4).await?;
    let text = fs::read_to_string(&current)?;
    let last = text.lines().last().context("a line")?;
    ensure!(last.contains("$4.00") && last.starts_with("20"), "it is a line of its own: {text}");
    fs::remove_dir_all(&logs)?;
    noted(&host, 5).await?;
    until_told(&host, 5).await?;
    ensure!(!fs::read_to_string(&current)?.contains("$4.00"), "what was deleted stays so");
    serves(&host).await
}

/// What the gateway may not write: it is not root on a machine. A link is as little its own to write, whoever it is.
#[tokio::test]
async fn a_record_that_may_not_be_written_is_said_and_waited_for() -> Result<()> {
    let machine = Machine::new(NOWHERE)?;
    let logs = machine.path(LOGS);
    fs::create_dir_all(&logs)?;
    let theirs = machine.path("theirs");
    fs::write(&theirs, "theirs\n")?;
    std::os::unix::fs::symlink(&theirs, logs.join("activity.log"))?;
    let host = machine.start()?;
    noted(&host, 1).await?;
    until_stuck(&host, 1.0).await?;
    serves(&host).await?;
    ensure!(fs::read_to_string(&theirs)? == "theirs\n", "nothing of it is written");
    fs::remove_file(logs.join("activity.log"))?;
    until_told(&host, 1).await?;
    until_stuck(&host, 0.0).await?;
    if !nix::unistd::geteuid().is_root() {
        fs::set_permissions(&logs, fs::Permissions::from_mode(0o500))?;
        fs::remove_file(logs.join("activity.log")).ok();
        noted(&host, 2).await?;
        until_stuck(&host, 1.0).await?;
        fs::set_permissions(&logs, fs::Permissions::from_mode(0o700))?;
        until_told(&host, 2).await?;
    }
    let (_, shown): (_, Value) = host.get("/api/activity?contains=limit").await?;
    ensure!(shown["lines"].as_array().is_some_and(|lines| !lines.is_empty()), "{shown}");
    Ok(())
}
