//! Forged, late and missing reports by agents' programs and their tools: they are recorded as gaps, and no change is
//! attributed to the wrong agent.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use svc::host::audit::protocol::{Message, SeenCalls};

use super::home::{ADA, Agent, AuditedHome, BOB, summarize};

/// The id that the machine's sysusers configuration assigns to the user `svc`.
const OWNER_UID: u32 = 1940;

/// Returns the gap reasons and the entries since the previous call.
fn take_gaps_and_entries(home: &AuditedHome) -> Result<(Vec<String>, Vec<Value>)> {
    let (gaps, entries): (Vec<Value>, Vec<Value>) =
        home.take_entries()?.into_iter().partition(|line| !line["gap"].is_null());
    let reasons = gaps.iter().filter_map(|line| line["gap"]["why"].as_str().map(str::to_owned)).collect();
    Ok((reasons, entries))
}

/// A tool reports the end of its own call through the hook.
#[test]
fn tool_cannot_end_its_own_call() -> Result<()> {
    let home = AuditedHome::new()?;
    let call = home.begin_command(ADA)?;
    let end = json!({ "session_id": "session-ada", "hook_event_name": "PostToolUse", "tool_name": "Bash",
        "tool_use_id": call, "tool_input": { "command": "x" }, "tool_response": {} });
    let input = home.path("forged.json");
    fs::write(&input, end.to_string())?;
    let hook = concat!(env!("CARGO_BIN_EXE_svc"), " svc-hook claude-code");
    let line =
        format!("FAILPOINTS='hook.long_timeout=return(error)' bash -c '{hook} <{}; true'", input.display());
    assert_eq!(home.with_process(ADA, |process| process.run(&line))?, "0");
    home.shell("echo hidden > hidden")?;
    home.end_command(ADA, &call)?;
    let (gaps, entries) = take_gaps_and_entries(&home)?;
    assert_eq!((gaps, summarize(&entries)), (vec!["forged".to_owned()], vec!["write hidden".to_owned()]));
    assert_eq!(entries[0]["dispatchId"], "ada");
    Ok(())
}

/// The tool's process replaces itself with the hook, so it has the same parent as the program's own hooks. The
/// program's own report at the real end of the call reveals the forgery.
#[test]
fn tool_impersonating_the_hook_is_detected() -> Result<()> {
    let home = AuditedHome::new()?;
    let call = home.begin_command(ADA)?;
    home.end_command(ADA, &call)?;
    home.shell("echo hidden > hidden")?;
    home.end_command(ADA, &call)?;
    let (gaps, entries) = take_gaps_and_entries(&home)?;
    assert_eq!((gaps, entries.len()), (vec!["forged".to_owned()], 0));
    Ok(())
}

/// The hook timed out before the response, but its report arrived, so it was both saved and received.
#[test]
fn late_hook_is_counted_once() -> Result<()> {
    let home = AuditedHome::new()?;
    let file = home.dir().join("w").display().to_string();
    let write = json!({ "tool_name": "Write", "tool_input": { "file_path": file } });
    home.run_hook_event(ADA, "PreToolUse", "w1", write.clone())?;
    home.shell("echo x > w")?;
    let late = json!({ "version": 1, "at": "2026-11-23T00:00:00.000Z", "why": "late", "message": {
        "version": 1, "phase": "post", "sentAt": "2026-11-23T00:00:00.000Z", "sessionId": "session-ada",
        "toolUseId": "w1", "tool": "Write", "path": file, "actor": "claude-code" } });
    fs::write(home.path("run/svc/hooks/audit-gaps.jsonl"), format!("{late}\n"))?;
    home.run_hook_event(ADA, "PostToolUse", "w1", write)?;
    let (gaps, entries) = take_gaps_and_entries(&home)?;
    assert_eq!((gaps, summarize(&entries)), (vec!["unproven".to_owned()], vec!["write w".to_owned()]));
    assert_eq!(entries[0]["dispatchId"], "ada");
    Ok(())
}

/// A forged line in the file of undelivered hooks does not suppress the gap for a call whose start was not reported.
#[test]
fn forged_late_hook_does_not_suppress_a_gap() -> Result<()> {
    let home = AuditedHome::new()?;
    let late = json!({ "version": 1, "at": "2026-11-23T00:00:00.000Z", "why": "late", "message": {
        "version": 1, "phase": "post", "sentAt": "2026-11-23T00:00:00.000Z", "sessionId": "other",
        "toolUseId": "u2", "tool": "Bash", "actor": "claude-code" } });
    fs::write(home.path("run/svc/hooks/audit-gaps.jsonl"), format!("{late}\n"))?;
    home.run_hook_event(ADA, "PostToolUse", "u2", json!({ "tool_name": "Bash" }))?;
    let (gaps, _) = take_gaps_and_entries(&home)?;
    assert_eq!(gaps, ["unpaired"]);
    Ok(())
}

#[test]
fn agent_cannot_end_another_agents_calls() -> Result<()> {
    let home = AuditedHome::new()?;
    let call = home.begin_command(ADA)?;
    let ada_fields = json!({ "session_id": "session-ada", "tool_name": "Bash", "tool_response": {} });
    home.run_hook_event(BOB, "PostToolUse", &call, ada_fields.clone())?;
    home.run_hook_event(BOB, "PostToolUseFailure", &call, ada_fields.clone())?;
    home.run_hook_event(BOB, "Stop", "", ada_fields.clone())?;
    home.run_hook_event(BOB, "SessionEnd", "", ada_fields)?;
    home.shell("echo x > seen")?;
    home.end_command(ADA, &call)?;
    let (gaps, entries) = take_gaps_and_entries(&home)?;
    assert_eq!(gaps, ["forged"; 4]);
    assert_eq!(
        (summarize(&entries), &entries[0]["agentName"]),
        (vec!["write seen".to_owned()], &json!("ada"))
    );
    Ok(())
}

#[test]
fn dispatch_is_identified_by_dispatcher_not_environment() -> Result<()> {
    let home = AuditedHome::new()?;
    // No dispatch was announced, but the agent's environment names one.
    let terminal = Agent("terminal");
    home.run(terminal, "true")?;
    let entries = home.run(terminal, "echo x > by-terminal")?;
    assert_eq!((&entries[0]["agentName"], entries[0].get("dispatchId")), (&json!("terminal"), None));
    // A dispatch's process remains in the dispatch, regardless of the variables that it sets.
    home.with_process(ADA, |process| process.run("export SVC_DISPATCH_ID=bob SVC_AGENT_NAME=bob"))?;
    let entries = home.run(ADA, "echo x > by-ada")?;
    assert_eq!((&entries[0]["agentName"], &entries[0]["dispatchId"]), (&json!("ada"), &json!("ada")));
    Ok(())
}

#[test]
fn only_gateway_user_starts_and_ends_dispatches() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        kit::skip::record("only root can run a process as another user");
        return Ok(());
    }
    let home = AuditedHome::new()?;
    let (dir, socket) = (home.path("run/svc/watch"), home.path("run/svc/watch/watch.sock"));
    for path in [&home.path(""), &dir] {
        fs::set_permissions(path, Permissions::from_mode(0o755))?;
    }
    chown(&socket, None, Some(OWNER_UID))?;
    home.begin_command(ADA)?;
    let client = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); \
                s.sendall(sys.argv[2].encode() + b'\\n'); print(s.recv(100))";
    let runner = svc::host::audit::protocol::Process::from_pid(i32::try_from(std::process::id())?);
    for message in
        [Message::dispatch_end("ada", SeenCalls::default()), Message::dispatch_begin("bob", "bob", runner)]
    {
        let mut forger = Command::new("python3");
        forger.args(["-c", client]).arg(&socket).arg(serde_json::to_string(&message)?);
        let output = forger.uid(OWNER_UID).gid(OWNER_UID).output().context("cannot run python3")?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    home.shell("echo x > still-seen")?;
    let (gaps, entries) = take_gaps_and_entries(&home)?;
    assert_eq!(
        (gaps, summarize(&entries)),
        (vec!["forged".to_owned(); 2], vec!["write still-seen".to_owned()])
    );
    Ok(())
}

#[test]
fn calls_missed_by_hooks_are_recorded_as_gap() -> Result<()> {
    let home = AuditedHome::new()?;
    let call = home.begin_command(ADA)?;
    home.end_command(ADA, &call)?;
    let mut seen = SeenCalls { has_shared_call_ids: true, ..SeenCalls::default() };
    [call.as_str(), "toolu_without_hook_1", "toolu_without_hook_2"].iter().for_each(|call| seen.add(call));
    home.send_to_watcher(&Message::dispatch_end("ada", seen))?;
    let gap = home.wait_for_line("a gap", |line| line["gap"]["why"] == "unseen")?;
    assert_eq!(gap["gap"]["lost"], 2);
    Ok(())
}

/// Call ids are tracked per process, so one agent cannot consume another's id.
#[test]
fn agent_cannot_consume_another_agents_call_id() -> Result<()> {
    let home = AuditedHome::new()?;
    let ada_fields = json!({ "session_id": "session-ada", "tool_name": "Bash", "tool_response": {} });
    home.run_hook_event(BOB, "PostToolUse", "toolu_1000", ada_fields)?;
    home.run_hook_event(ADA, "PreToolUse", "toolu_1000", json!({ "tool_name": "Bash" }))?;
    home.shell("echo x > seen")?;
    home.end_command(ADA, "toolu_1000")?;
    let (_, entries) = take_gaps_and_entries(&home)?;
    assert_eq!(summarize(&entries), ["write seen"]);
    Ok(())
}
