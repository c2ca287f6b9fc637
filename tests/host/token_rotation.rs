//! In a token rotation, the host stores the next token before using it, and keeps the previous one.

use std::fs;
use std::os::unix::fs::MetadataExt;

use anyhow::Result;
use nix::sys::signal::Signal;
use serde_json::json;

use super::machine::{self, Machine, RunResult, RunningApplet, wait_until};
use super::platform::{Platform, ScriptedResponse};

const TOKEN_FILE: &str = "var/lib/svc/upgrade-token.json";

fn token(machine: &Machine, generation: u32) -> String {
    let generation_part = if generation == 1 { String::new() } else { format!("{generation}_") };
    format!("svcu_{}_{generation_part}{}", machine.id.0.simple(), "a".repeat(64))
}

fn response_with_token(token: &str) -> ScriptedResponse {
    ScriptedResponse::Json(200, json!({ "superseded": false, "nextToken": token }))
}

async fn wait_for_exit(running: RunningApplet) -> Result<RunResult> {
    tokio::task::spawn_blocking(move || running.wait()).await?
}

/// Creates a machine whose first token has the real format.
async fn machine_with_token(platform: &Platform) -> Result<Machine> {
    let store = machine::start_store()?;
    let machine = Machine::new(&store, 3).await?;
    platform.configure(&machine)?;
    machine.set_env_vars("host.env", &[("UPGRADE_TOKEN", &token(&machine, 1))])?;
    store.take_down();
    Ok(machine)
}

/// Returns the token sent with the heartbeat at this index.
fn sent_token(platform: &Platform, index: usize) -> String {
    platform.calls()[index].authorization.trim_start_matches("Bearer ").to_owned()
}

const HEARTBEAT_EVERY_SECOND: (&str, &str) = ("HEARTBEAT_SECONDS", "1");

#[tokio::test]
async fn next_token_is_stored_privately_and_used() -> Result<()> {
    let platform = Platform::start(ScriptedResponse::Json(200, json!({ "superseded": false }))).await?;
    let machine = machine_with_token(&platform).await?;
    let (first, second) = (token(&machine, 1), token(&machine, 2));
    platform.queue([response_with_token(&second)]);
    let running = machine.spawn(&["svc-sync-agent"], &[HEARTBEAT_EVERY_SECOND])?;
    wait_until("two heartbeats", || platform.calls().len() >= 2).await?;
    running.signal(Signal::SIGTERM)?;
    let result = wait_for_exit(running).await?.expect(0);
    assert_eq!((sent_token(&platform, 0), sent_token(&platform, 1)), (first, second.clone()));
    assert_eq!(fs::metadata(machine.path(TOKEN_FILE))?.mode() & 0o777, 0o600);
    assert!(!result.stderr.contains("svcu_"), "a token is in the log: {}", result.stderr);
    // The next process starts with the second token.
    let before = platform.calls().len();
    let running = machine.spawn(&["svc-sync-agent"], &[])?;
    wait_until("a heartbeat", || platform.calls().len() > before).await?;
    running.signal(Signal::SIGTERM)?;
    wait_for_exit(running).await?.expect(0);
    assert_eq!(sent_token(&platform, before), second);
    Ok(())
}

#[tokio::test]
async fn agent_killed_while_storing_token_keeps_valid_one() -> Result<()> {
    for (point, expected) in svc::host::system::upgrade_token::FAILPOINTS.iter().copied().zip([1, 2]) {
        let platform = Platform::start(ScriptedResponse::Json(200, json!({ "superseded": false }))).await?;
        let machine = machine_with_token(&platform).await?;
        platform.queue([response_with_token(&token(&machine, 2))]);
        let kill = format!("{point}=return(kill)");
        let running = machine.spawn(&["svc-sync-agent"], &[HEARTBEAT_EVERY_SECOND, ("FAILPOINTS", &kill)])?;
        wait_for_exit(running).await?.expect_killed();
        assert_eq!(
            platform.calls().len(),
            1,
            "{point}: the agent must be killed before the second heartbeat"
        );
        let running = machine.spawn(&["svc-sync-agent"], &[HEARTBEAT_EVERY_SECOND])?;
        wait_until("a heartbeat", || platform.calls().len() >= 2).await?;
        running.signal(Signal::SIGTERM)?;
        wait_for_exit(running).await?.expect(0);
        assert_eq!(sent_token(&platform, 1), token(&machine, expected), "{point}");
    }
    Ok(())
}

#[tokio::test]
async fn refused_token_falls_back_to_the_previous_one() -> Result<()> {
    let accepted = || ScriptedResponse::Json(200, json!({ "superseded": false }));
    let platform = Platform::start(accepted()).await?;
    let machine = machine_with_token(&platform).await?;
    let (first, second) = (token(&machine, 1), token(&machine, 2));
    platform
        .queue([response_with_token(&second), ScriptedResponse::Json(401, json!({"code": "unauthorized"}))]);
    let running = machine.spawn(&["svc-sync-agent"], &[HEARTBEAT_EVERY_SECOND])?;
    wait_until("four heartbeats", || platform.calls().len() >= 4).await?;
    running.signal(Signal::SIGTERM)?;
    wait_for_exit(running).await?.expect(0);
    let sent: Vec<String> = (0..4).map(|index| sent_token(&platform, index)).collect();
    assert_eq!(sent, [first.clone(), second, first.clone(), first]);
    Ok(())
}

/// An update has written the second token to `host.env`, and the platform was then restored to an earlier state.
#[tokio::test]
async fn fallback_is_kept_if_host_env_has_the_refused_token() -> Result<()> {
    let platform = Platform::start(ScriptedResponse::Json(200, json!({ "superseded": false }))).await?;
    let machine = machine_with_token(&platform).await?;
    let (first, second) = (token(&machine, 1), token(&machine, 2));
    machine.set_env_vars("host.env", &[("UPGRADE_TOKEN", &second)])?;
    let stored = json!({ "version": 1, "token": second, "before": first });
    svc::fsx::write_atomic(&machine.path(TOKEN_FILE), stored.to_string().as_bytes(), 0o600)?;
    platform.queue([ScriptedResponse::Json(401, json!({"code": "unauthorized"}))]);
    let running = machine.spawn(&["svc-sync-agent"], &[HEARTBEAT_EVERY_SECOND])?;
    wait_until("three heartbeats", || platform.calls().len() >= 3).await?;
    running.signal(Signal::SIGTERM)?;
    wait_for_exit(running).await?.expect(0);
    let sent: Vec<String> = (0..3).map(|index| sent_token(&platform, index)).collect();
    assert_eq!(sent, [second, first.clone(), first]);
    Ok(())
}

/// The updater has already written the current token to `host.env`, for the release that it switches to.
#[tokio::test]
async fn no_token_is_adopted_during_an_update() -> Result<()> {
    let platform = Platform::start(ScriptedResponse::Json(200, json!({ "superseded": false }))).await?;
    let machine = machine_with_token(&platform).await?;
    fs::create_dir_all(machine.path("var/lib/svc/update"))?;
    fs::write(machine.path("var/lib/svc/update/journal.json"), "{}")?;
    platform.queue([response_with_token(&token(&machine, 2))]);
    let running = machine.spawn(&["svc-sync-agent"], &[HEARTBEAT_EVERY_SECOND])?;
    wait_until("two heartbeats", || platform.calls().len() >= 2).await?;
    assert!(!machine.path(TOKEN_FILE).exists());
    running.signal(Signal::SIGTERM)?;
    wait_for_exit(running).await?.expect(0);
    assert_eq!(sent_token(&platform, 1), token(&machine, 1));
    Ok(())
}
