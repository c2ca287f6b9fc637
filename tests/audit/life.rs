//! Tool calls that end otherwise than they should, and a watcher that is not there.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;
use svc::host::audit::protocol::{Message, SeenCalls};

use super::home::{ADA, BOB, Home, short};

/// What a hook may take where nobody answers: its limit, and what starting a process takes on a busy machine.
const LIMIT: Duration = Duration::from_millis(600);

#[test]
fn without_a_watcher_the_hook_lets_go_and_the_gap_is_told_later() -> Result<()> {
    let mut home = Home::unwatched()?;
    home.is_hasty = true;
    let bash = json!({ "tool_name": "Bash", "tool_input": { "command": "x" } });
    let took = home.tell(ADA, "PreToolUse", "t1", bash.clone())?;
    assert!(took < LIMIT, "{took:?}");
    home.tell(ADA, "PostToolUse", "t1", bash.clone())?;
    home.is_hasty = false;
    home.watch()?;
    let gap = home.until("a gap", |line| line["gap"]["why"] == "unheard")?;
    assert_eq!(gap["gap"]["lost"], 2);
    // The beginning was missed, which is told already.
    home.kill()?;
    home.tell(ADA, "PreToolUse", "t2", bash.clone())?;
    home.watch()?;
    home.tell(ADA, "PostToolUse", "t2", bash.clone())?;
    home.tell(ADA, "PostToolUse", "t3", bash)?;
    home.until("an unpaired call", |line| line["gap"]["why"] == "unpaired")?;
    let whys: Vec<String> =
        home.lines()?.iter().filter_map(|line| line["gap"]["why"].as_str().map(str::to_owned)).collect();
    assert_eq!(whys, ["unheard", "unheard", "unpaired"]);
    Ok(())
}

#[test]
fn a_socket_that_nobody_answers_on_is_let_go_of() -> Result<()> {
    let mut home = Home::new()?;
    home.with_program(ADA, |_| Ok(()))?;
    home.is_hasty = true;
    let watcher = nix::unistd::Pid::from_raw(i32::try_from(home.pid())?);
    nix::sys::signal::kill(watcher, nix::sys::signal::Signal::SIGSTOP)?;
    let bash = json!({ "tool_name": "Bash", "tool_input": { "command": "x" } });
    let took = home.tell(ADA, "PreToolUse", "t1", bash)?;
    nix::sys::signal::kill(watcher, nix::sys::signal::Signal::SIGCONT)?;
    assert!(took >= Duration::from_millis(80) && took < LIMIT, "{took:?}");
    home.until("a gap", |line| line["gap"]["why"] == "late")?;
    home.terminate()
}

#[test]
fn a_watcher_that_was_killed_while_a_tool_ran_says_so_and_goes_on() -> Result<()> {
    let mut home = Home::new()?;
    let call = home.begin(ADA)?;
    home.shell("echo lost > lost")?;
    home.kill()?;
    home.watch()?;
    home.shell("echo seen > seen")?;
    home.end(ADA, &call)?;
    home.shell("echo own > own")?;
    let entries = home.entries()?;
    assert_eq!(entries[0]["gap"]["why"], "restarted");
    assert_eq!(short(&entries[1..]), ["write seen"]);
    assert_eq!(entries[1]["agentName"], "ada");
    Ok(())
}

/// Wherever it is killed: what a call did is recorded, or a gap says that it may not be, and the next call is.
#[test]
fn a_watcher_that_is_killed_where_it_looks_loses_nothing_untold() -> Result<()> {
    for point in svc::host::audit::watcher::POINTS {
        // At the beginning of a call, and at its end.
        for looks in 0..2 {
            let mut home = Home::with_failpoints(&format!("{point}={looks}*off->return(kill)"))?;
            home.watch()?;
            let call = home.begin(ADA)?;
            home.shell("echo lost > lost")?;
            home.end(ADA, &call)?;
            assert!(home.has_ended()?, "{point}, {looks}");
            home.kill()?;
            home.failpoints.clear();
            home.watch()?;
            home.run(ADA, "echo seen > seen")?;
            home.until("what came next", |line| line["path"] == "seen")?;
            let what = format!("what was done, or a gap: {point}, {looks}");
            home.until(&what, |line| line["path"] == "lost" || !line["gap"].is_null())?;
            home.terminate()?;
        }
    }
    Ok(())
}

#[test]
fn a_clean_end_leaves_nothing_unwritten() -> Result<()> {
    let mut home = Home::new()?;
    let call = home.begin(ADA)?;
    home.shell("for f in $(seq 500); do echo $f > $f; done")?;
    home.end(ADA, &call)?;
    home.terminate()?;
    assert_eq!(home.lines()?.len(), 500);
    Ok(())
}

#[test]
fn calls_without_an_end_are_over_with_their_turn_their_session_and_their_process() -> Result<()> {
    let home = Home::new()?;
    home.begin(ADA)?;
    home.tell(ADA, "Stop", "", json!({}))?;
    home.shell("echo own > after-turn")?;
    home.begin(ADA)?;
    home.tell(ADA, "SubagentStop", "", json!({ "agent_id": "other" }))?;
    home.shell("echo x > still")?;
    home.tell(ADA, "SessionEnd", "", json!({}))?;
    home.shell("echo own > after-session")?;
    assert_eq!(short(&home.entries()?), ["write still"]);

    // An agent that is killed.
    home.begin(BOB)?;
    home.shell("echo x > by-agent")?;
    home.end_program(BOB)?;
    let entry = home.until("its last change", |line| line["path"] == "by-agent")?;
    assert_eq!(entry["agentName"], "bob");
    home.shell("echo own > after-kill")?;
    assert!(home.entries()?.iter().all(|entry| entry["path"] != "after-kill"));
    Ok(())
}

#[test]
fn a_dispatch_that_has_ended_has_no_calls() -> Result<()> {
    let home = Home::new()?;
    home.begin(ADA)?;
    home.tell_watcher(&Message::dispatch_end("ada", SeenCalls::default()))?;
    home.shell("echo own > own")?;
    assert!(home.entries()?.is_empty());
    Ok(())
}

#[test]
fn what_goes_on_in_the_background_is_its_agents_until_the_session_ends() -> Result<()> {
    let home = Home::new()?;
    let call = home.begin(ADA)?;
    let more = json!({ "tool_name": "Bash", "tool_response": { "backgroundTaskId": "b1" } });
    home.tell(ADA, "PostToolUse", &call, more)?;
    home.tell(ADA, "Stop", "", json!({}))?;
    home.shell("echo x > from-background")?;
    let other = home.begin(BOB)?;
    home.shell("echo x > either")?;
    home.end(BOB, &other)?;
    home.shell("echo x > late")?;
    home.tell(ADA, "SessionEnd", "", json!({}))?;
    home.shell("echo own > own")?;
    let entries = home.entries()?;
    assert_eq!(short(&entries), ["write from-background", "write either", "write late"]);
    assert_eq!((&entries[0]["agentName"], &entries[1]["agentName"]), (&json!("ada"), &json!("ada, bob")));
    Ok(())
}

#[test]
fn a_command_that_fails_is_told_like_one_that_succeeds_and_a_write_that_fails_is_not() -> Result<()> {
    let home = Home::new()?;
    let call = home.begin(ADA)?;
    home.shell("echo x > done")?;
    home.tell(ADA, "PostToolUseFailure", &call, json!({ "tool_name": "Bash", "error": "Exit code 3" }))?;
    let write = json!({ "tool_name": "Edit", "tool_input": { "file_path": "nothing" } });
    home.tell(ADA, "PreToolUse", "e", write.clone())?;
    home.tell(ADA, "PostToolUseFailure", "e", write)?;
    assert_eq!(short(&home.entries()?), ["write done"]);
    Ok(())
}

#[test]
fn whatever_a_hook_is_given_it_says_nothing_and_succeeds() -> Result<()> {
    let home = Home::new()?;
    for text in ["", "{", "null", "[1]", r#"{"hook_event_name":7}"#, r#"{"hook_event_name":"Unknown"}"#] {
        home.hook_with(ADA, text.as_bytes())?;
    }
    home.hook_with(ADA, &vec![b' '; 5 << 20])?;
    let gap = home.until("a gap", |line| line["gap"]["why"] == "unreadable")?;
    assert!(gap["gap"]["lost"].as_u64().context("a number")? >= 1);
    Ok(())
}
