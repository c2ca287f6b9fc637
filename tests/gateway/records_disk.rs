//! If the disk is full, or if log files cannot be written or disappear, the gateway keeps serving, reports the problem,
//! and resumes recording when possible.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use http::Method;
use kit::disk::SmallDisk;
use serde_json::{Value, json};

use super::host::{Host, Machine, UNREACHABLE_DATABASE, send_json};
use super::metrics::scrape;

const LOGS: &str = "home/svc/home/system/logs";

/// Changes a limit, which logs a line: `the daily cost limit is $n.00`.
async fn set_limit(host: &Host, n: u32) -> Result<()> {
    let (status, body) =
        send_json(host.owner_request(Method::PUT, "/api/limits").json(&json!({"daily": n}))).await?;
    ensure!(status == 200, "{status} {body}");
    Ok(())
}

fn is_limit_logged(logs: &Path, n: u32) -> bool {
    let text = fs::read(logs.join("activity.log")).unwrap_or_default();
    String::from_utf8_lossy(&text).contains(&format!("the daily cost limit is ${n}.00;"))
}

async fn wait_until_limit_logged(host: &Host, n: u32) -> Result<()> {
    let logs = host.machine.path(LOGS);
    host.wait_until(&format!("limit {n} is logged"), async || Ok(is_limit_logged(&logs, n))).await
}

async fn wait_for_stuck_metric(host: &Host, expected: f64) -> Result<()> {
    host.wait_until(&format!("svc_records_stuck is {expected}"), async || {
        Ok(scrape(host)?.get("svc_records_stuck") == Some(expected))
    })
    .await
}

async fn assert_serves(host: &Host) -> Result<()> {
    for path in ["/api/usage", "/api/limits", "/api/activity", "/api/interactions", "/livez"] {
        let (status, body) = host.get(path).await?;
        ensure!(status == 200, "{path}: {status} {body}");
    }
    Ok(())
}

#[tokio::test]
async fn full_disk_is_reported_and_records_resume() -> Result<()> {
    let machine = Machine::new(UNREACHABLE_DATABASE)?;
    let logs = machine.path(LOGS);
    let Some(disk) = SmallDisk::mount(logs.clone(), 1)? else { return Ok(()) };
    let mut host = machine.start()?;
    set_limit(&host, 1).await?;
    wait_until_limit_logged(&host, 1).await?;
    wait_for_stuck_metric(&host, 0.0).await?;
    // Another program fills the disk to the last byte.
    fs::remove_file(logs.join("activity.log"))?;
    disk.fill(0)?;
    set_limit(&host, 2).await?;
    wait_for_stuck_metric(&host, 1.0).await?;
    ensure!(
        scrape(&host)?.get("svc_records_waiting_bytes").is_some_and(|bytes| bytes > 0.0),
        "no records are waiting"
    );
    ensure!(host.log().contains("cannot write records"), "{}", host.log());
    set_limit(&host, 3).await?;
    assert_serves(&host).await?;
    disk.delete_filler()?;
    wait_until_limit_logged(&host, 2).await?;
    wait_until_limit_logged(&host, 3).await?;
    wait_for_stuck_metric(&host, 0.0).await?;
    ensure!(host.log().contains("records can be written again"), "{}", host.log());
    let text = fs::read_to_string(logs.join("activity.log"))?;
    ensure!(text.lines().all(|line| line.starts_with("20")), "a line is incomplete: {text}");
    assert_serves(&host).await?;
    // A full disk does not prevent a clean exit.
    disk.fill(0)?;
    set_limit(&host, 4).await?;
    host.terminate()?;
    ensure!(host.wait_for_exit().await?.success(), "{}", host.log());
    Ok(())
}

#[tokio::test]
async fn records_continue_after_rename_delete_or_truncate() -> Result<()> {
    let machine = Machine::new(UNREACHABLE_DATABASE)?;
    let host = machine.start()?;
    let logs = host.machine.path(LOGS);
    let current = logs.join("activity.log");
    set_limit(&host, 1).await?;
    wait_until_limit_logged(&host, 1).await?;
    fs::rename(&current, logs.join("activity-2026-11-21.log"))?;
    set_limit(&host, 2).await?;
    wait_until_limit_logged(&host, 2).await?;
    fs::remove_file(&current)?;
    set_limit(&host, 3).await?;
    wait_until_limit_logged(&host, 3).await?;
    fs::File::options().write(true).open(&current)?.set_len(10)?;
    set_limit(&host, 4).await?;
    wait_until_limit_logged(&host, 4).await?;
    let text = fs::read_to_string(&current)?;
    let last = text.lines().last().context("the log is empty")?;
    ensure!(last.contains("$4.00") && last.starts_with("20"), "the new line is not a separate line: {text}");
    fs::remove_dir_all(&logs)?;
    set_limit(&host, 5).await?;
    wait_until_limit_logged(&host, 5).await?;
    ensure!(!fs::read_to_string(&current)?.contains("$4.00"), "a deleted line was restored");
    assert_serves(&host).await
}

/// The gateway never follows a symbolic link. In production it does not run as root, so it cannot write to a directory
/// without write permission.
#[tokio::test]
async fn unwritable_log_file_is_reported_and_retried() -> Result<()> {
    let machine = Machine::new(UNREACHABLE_DATABASE)?;
    let logs = machine.path(LOGS);
    fs::create_dir_all(&logs)?;
    let target = machine.path("link-target");
    fs::write(&target, "unchanged\n")?;
    std::os::unix::fs::symlink(&target, logs.join("activity.log"))?;
    let host = machine.start()?;
    set_limit(&host, 1).await?;
    wait_for_stuck_metric(&host, 1.0).await?;
    assert_serves(&host).await?;
    ensure!(fs::read_to_string(&target)? == "unchanged\n", "the link's target was changed");
    fs::remove_file(logs.join("activity.log"))?;
    wait_until_limit_logged(&host, 1).await?;
    wait_for_stuck_metric(&host, 0.0).await?;
    if nix::unistd::geteuid().is_root() {
        kit::skip::record("root can write even to directories without write permission");
    } else {
        fs::set_permissions(&logs, fs::Permissions::from_mode(0o500))?;
        fs::remove_file(logs.join("activity.log")).ok();
        set_limit(&host, 2).await?;
        wait_for_stuck_metric(&host, 1.0).await?;
        fs::set_permissions(&logs, fs::Permissions::from_mode(0o700))?;
        wait_until_limit_logged(&host, 2).await?;
    }
    let (_, activity): (_, Value) = host.get("/api/activity?contains=limit").await?;
    ensure!(activity["lines"].as_array().is_some_and(|lines| !lines.is_empty()), "{activity}");
    Ok(())
}
