//! Tool calls that end abnormally, and a watcher that is not running.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;
use svc::host::audit::protocol::{Message, SeenCalls};

use super::home::{ADA, AuditedHome, BOB, summarize};

/// Maximum duration of a hook without a response: its timeout, plus process startup on a busy machine.
const MAX_HOOK_DURATION: Duration = Duration::from_millis(600);

#[test]
fn hook_without_watcher_returns_and_gap_is_recorded_later() -> Result<()> {
    let mut home = AuditedHome::unwatched()?;
    home.has_normal_hook_timeout = true;
    let bash = json!({ "tool_name": "Bash", "tool_input": { "command": "x" } });
    let duration = home.run_hook_event(ADA, "PreToolUse", "t1", bash.clone())?;
    assert!(duration < MAX_HOOK_DURATION, "{duration:?}");
    home.run_hook_event(ADA, "PostToolUse", "t1", bash.clone())?;
    home.has_normal_hook_timeout = false;
    home.start_watcher()?;
    let gap = home.wait_for_line("a gap", |line| line["gap"]["why"] == "unheard")?;
    assert_eq!(gap["gap"]["lost"], 2);
    // The missed beginning of `t2` is already recorded as a gap, so only `t3` is recorded as unpaired.
    home.kill_watcher()?;
    home.run_hook_event(ADA, "PreToolUse", "t2", bash.clone())?;
    home.start_watcher()?;
    home.run_hook_event(ADA, "PostToolUse", "t2", bash.clone())?;
    home.run_hook_event(ADA, "PostToolUse", "t3", bash)?;
    home.wait_for_line("an unpaired call", |line| line["gap"]["why"] == "unpaired")?;
    let reasons: Vec<String> =
        home.lines()?.iter().filter_map(|line| line["gap"]["why"].as_str().map(str::to_owned)).collect();
    assert_eq!(reasons, ["unheard", "unheard", "unpaired"]);
    Ok(())
}

#[test]
fn hook_returns_when_socket_does_not_respond() -> Result<()> {
    let mut home = AuditedHome::new()?;
    home.with_process(ADA, |_| Ok(()))?;
    home.has_normal_hook_timeout = true;
    let watcher = nix::unistd::Pid::from_raw(i32::try_from(home.watcher_pid())?);
    nix::sys::signal::kill(watcher, nix::sys::signal::Signal::SIGSTOP)?;
    let bash = json!({ "tool_name": "Bash", "tool_input": { "command": "x" } });
    let duration = home.run_hook_event(ADA, "PreToolUse", "t1", bash)?;
    nix::sys::signal::kill(watcher, nix::sys::signal::Signal::SIGCONT)?;
    assert!(duration >= Duration::from_millis(80) && duration < MAX_HOOK_DURATION, "{duration:?}");
    home.wait_for_line("a gap", |line| line["gap"]["why"] == "late")?;
    home.terminate_watcher()
}

#[test]
fn watcher_killed_during_a_call_records_a_gap_and_resumes() -> Result<()> {
    let mut home = AuditedHome::new()?;
    let call = home.begin_command(ADA)?;
    home.shell("echo lost > lost")?;
    home.kill_watcher()?;
    home.start_watcher()?;
    home.shell("echo seen > seen")?;
    home.end_command(ADA, &call)?;
    home.shell("echo own > own")?;
    let entries = home.take_entries()?;
    assert_eq!(entries[0]["gap"]["why"], "restarted");
    assert_eq!(summarize(&entries[1..]), ["write seen"]);
    assert_eq!(entries[1]["agentName"], "ada");
    Ok(())
}

/// Wherever the watcher is killed, the call's change is recorded or covered by a gap, and the next call is recorded.
#[test]
fn watcher_killed_at_any_point_records_the_change_or_a_gap() -> Result<()> {
    for point in svc::host::audit::watcher::FAILPOINTS {
        // The watcher is killed at the beginning of the call, then at its end.
        for passes in 0..2 {
            let mut home = AuditedHome::with_failpoints(&format!("{point}={passes}*off->return(kill)"))?;
            home.start_watcher()?;
            let call = home.begin_command(ADA)?;
            home.shell("echo lost > lost")?;
            home.end_command(ADA, &call)?;
            assert!(home.wait_for_watcher_exit()?, "{point}, {passes}");
            home.kill_watcher()?;
            home.failpoints.clear();
            home.start_watcher()?;
            home.run(ADA, "echo seen > seen")?;
            home.wait_for_line("the next call", |line| line["path"] == "seen")?;
            let description = format!("the change or a gap: {point}, {passes}");
            home.wait_for_line(&description, |line| line["path"] == "lost" || !line["gap"].is_null())?;
            home.terminate_watcher()?;
        }
    }
    Ok(())
}

#[test]
fn termination_writes_all_pending_entries() -> Result<()> {
    let mut home = AuditedHome::new()?;
    let call = home.begin_command(ADA)?;
    home.shell("for f in $(seq 500); do echo $f > $f; done")?;
    home.end_command(ADA, &call)?;
    home.terminate_watcher()?;
    assert_eq!(home.lines()?.len(), 500);
    Ok(())
}

#[test]
fn open_call_ends_with_its_turn_session_or_process() -> Result<()> {
    let home = AuditedHome::new()?;
    home.begin_command(ADA)?;
    home.run_hook_event(ADA, "Stop", "", json!({}))?;
    home.shell("echo own > after-turn")?;
    home.begin_command(ADA)?;
    home.run_hook_event(ADA, "SubagentStop", "", json!({ "agent_id": "other" }))?;
    home.shell("echo x > still")?;
    home.run_hook_event(ADA, "SessionEnd", "", json!({}))?;
    home.shell("echo own > after-session")?;
    assert_eq!(summarize(&home.take_entries()?), ["write still"]);

    // The agent is killed.
    home.begin_command(BOB)?;
    home.shell("echo x > by-agent")?;
    home.kill_process(BOB)?;
    let entry = home.wait_for_line("the killed agent's last change", |line| line["path"] == "by-agent")?;
    assert_eq!(entry["agentName"], "bob");
    home.shell("echo own > after-kill")?;
    assert!(home.take_entries()?.iter().all(|entry| entry["path"] != "after-kill"));
    Ok(())
}

#[test]
fn write_by_killed_agent_is_recorded_as_ambiguous() -> Result<()> {
    let home = AuditedHome::new()?;
    let input = json!({ "tool_name": "Write", "tool_input": { "file_path": "written", "content": "x" } });
    home.run_hook_event(BOB, "PreToolUse", "w", input)?;
    home.shell("echo x > written")?;
    home.kill_process(BOB)?;
    let entry = home.wait_for_line("the write", |line| line["path"] == "written")?;
    assert_eq!((&entry["agentName"], &entry["ambiguous"]), (&json!("bob"), &json!(true)));
    Ok(())
}

#[test]
fn end_of_a_dispatch_ends_its_calls() -> Result<()> {
    let home = AuditedHome::new()?;
    home.begin_command(ADA)?;
    home.send_to_watcher(&Message::dispatch_end("ada", SeenCalls::default()))?;
    home.shell("echo own > own")?;
    assert!(home.take_entries()?.is_empty());
    Ok(())
}

#[test]
fn background_task_is_attributed_until_the_session_ends() -> Result<()> {
    let home = AuditedHome::new()?;
    let call = home.begin_command(ADA)?;
    let fields = json!({ "tool_name": "Bash", "tool_response": { "backgroundTaskId": "b1" } });
    home.run_hook_event(ADA, "PostToolUse", &call, fields)?;
    home.run_hook_event(ADA, "Stop", "", json!({}))?;
    home.shell("echo x > from-background")?;
    let bob_call = home.begin_command(BOB)?;
    home.shell("echo x > either")?;
    home.end_command(BOB, &bob_call)?;
    home.shell("echo x > late")?;
    home.run_hook_event(ADA, "SessionEnd", "", json!({}))?;
    home.shell("echo own > own")?;
    let entries = home.take_entries()?;
    assert_eq!(summarize(&entries), ["write from-background", "write either", "write late"]);
    assert_eq!((&entries[0]["agentName"], &entries[1]["agentName"]), (&json!("ada"), &json!("ada, bob")));
    Ok(())
}

#[test]
fn failed_command_is_recorded_but_failed_write_is_not() -> Result<()> {
    let home = AuditedHome::new()?;
    let call = home.begin_command(ADA)?;
    home.shell("echo x > done")?;
    home.run_hook_event(
        ADA,
        "PostToolUseFailure",
        &call,
        json!({ "tool_name": "Bash", "error": "Exit code 3" }),
    )?;
    let write = json!({ "tool_name": "Edit", "tool_input": { "file_path": "nothing" } });
    home.run_hook_event(ADA, "PreToolUse", "e", write.clone())?;
    home.run_hook_event(ADA, "PostToolUseFailure", "e", write)?;
    assert_eq!(summarize(&home.take_entries()?), ["write done"]);
    Ok(())
}

#[test]
fn hook_ignores_invalid_input_and_succeeds() -> Result<()> {
    let home = AuditedHome::new()?;
    for text in ["", "{", "null", "[1]", r#"{"hook_event_name":7}"#, r#"{"hook_event_name":"Unknown"}"#] {
        home.run_hook(ADA, text.as_bytes())?;
    }
    home.run_hook(ADA, &vec![b' '; 5 << 20])?;
    let gap = home.wait_for_line("a gap", |line| line["gap"]["why"] == "unreadable")?;
    assert!(gap["gap"]["lost"].as_u64().context("lost is not a number")? >= 1);
    Ok(())
}
