//! `svcctl` on a terminal: its confirmation prompts, and when it uses colors.

use std::process::Output;

use serde_json::Value;
use tokio::io::AsyncWriteExt;

use super::*;

/// Runs `svcctl` with a terminal as its standard streams. The terminal's output is in `stdout`.
pub async fn run_on_terminal(
    platform: &FakePlatform,
    args: &[&str],
    typed: &str,
    env: &[(&str, &str)],
) -> Output {
    const PTY_SCRIPT: &str =
        "import os, pty, sys\nsys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))";
    let mut command = Command::new("python3");
    command.args(["-c", PTY_SCRIPT, env!("CARGO_BIN_EXE_svc"), "svcctl"]).args(args).env_clear();
    command.env("PATH", std::env::var_os("PATH").unwrap_or_default()).env("TERM", "xterm");
    command.env("PLATFORM_PUBLIC_URL", &platform.base).env("PLATFORM_SECRET", SECRET);
    command.envs(env.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(typed.as_bytes()).await.unwrap();
    // The input stays open, because end-of-file would close the terminal.
    let output = child.wait_with_output().await.unwrap();
    drop(stdin);
    output
}

/// Asserts that the platform received at least one request, and only `GET` requests.
#[track_caller]
pub fn assert_only_reads(platform: &FakePlatform) {
    let requests = platform.requests();
    let are_reads = requests.iter().all(|request| request.line.starts_with("GET "));
    assert!(!requests.is_empty() && are_reads, "{requests:?}");
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[tokio::test]
async fn command_runs_only_after_exact_confirmation() {
    let deleted =
        || Reply::Json(202, json!({"machineId": MACHINE, "status": "running", "operationId": OPERATION}));
    let platform = FakePlatform::start([Reply::Json(200, record("running", None)), deleted()]).await;
    let output = run_on_terminal(&platform, &["delete", MACHINE], "ada\n", &[]).await;
    assert!(stdout(&output).contains("Type ada to continue"), "{}", stdout(&output));
    assert_eq!(output.status.code(), Some(0), "{}", stdout(&output));
    assert!(platform.requests().iter().any(|request| request.line.starts_with("DELETE ")));

    for typed in ["yes\n", "\n", "Ada\n"] {
        let platform = FakePlatform::start([Reply::Json(200, record("running", None))]).await;
        let output = run_on_terminal(&platform, &["delete", MACHINE], typed, &[]).await;
        assert_eq!(output.status.code(), Some(65), "{typed:?}: {}", stdout(&output));
        assert_only_reads(&platform);
    }
}

#[tokio::test]
async fn recovery_prompt_shows_backup_time_and_unsaved_changes() {
    let mut machine = record("running", None);
    machine["lastBackup"] = json!({"status": "success", "takenAt": "2026-01-01T00:00:00.000Z"});
    let page = || Reply::Json(200, json!({"machines": [record("running", None)], "nextCursor": null}));
    let platform = FakePlatform::start([page(), Reply::Json(200, machine.clone())]).await;
    let output = run_on_terminal(&platform, &["recover", "user_1"], "no\n", &[]).await;
    assert!(stdout(&output).contains("2026-01-01 00:00:00 UTC"), "{}", stdout(&output));
    assert_eq!(output.status.code(), Some(65));

    machine["copies"] = copies();
    let platform = FakePlatform::start([page(), Reply::Json(200, machine)]).await;
    let output = run_on_terminal(&platform, &["recover", "user_1", "--replace-first"], "no\n", &[]).await;
    for part in
        ["9 min of changes exist only on its server", "if the new machine does not start, there is no server"]
    {
        assert!(stdout(&output).contains(part), "{part}: {}", stdout(&output));
    }
}

fn copies() -> Value {
    json!({"live": {"machineId": MACHINE, "providerServerId": "4711"}, "kept": [],
           "newestSnapshotAt": "2026-01-02T00:00:00.000Z", "exposedSeconds": 540})
}

#[tokio::test]
async fn delete_prompt_names_the_loss_and_how_to_undo() {
    let mut machine = record("running", None);
    machine["copies"] = copies();
    for (options, parts) in [
        (
            &[][..],
            &["9 min of changes", "2026-01-02 00:00:00 UTC", "svcctl undelete", "waits for your decision"][..],
        ),
        (
            &["--now", "--accept-loss"],
            &["this cannot be undone", "changes that are in no snapshot are lost with its server"],
        ),
    ] {
        let platform = FakePlatform::start([Reply::Json(200, machine.clone())]).await;
        let args: Vec<&str> = ["delete", MACHINE].iter().chain(options).copied().collect();
        let output = run_on_terminal(&platform, &args, "no\n", &[]).await;
        assert_eq!(output.status.code(), Some(65));
        for part in parts {
            assert!(stdout(&output).contains(part), "{part}: {}", stdout(&output));
        }
    }
}

#[tokio::test]
async fn delete_prompt_during_recovery_names_both_machines() {
    const OLD: &str = "019a0000-0000-7000-8000-000000000009";
    let mut machine = record("recovering", Some(operation("recover", "running", &[])));
    machine["copies"] = copies();
    machine["copies"]["kept"] = json!([
        {"machineId": OLD, "providerServerId": "1", "reason": "replaced", "until": null, "unsavedSince": null}]);
    let platform = FakePlatform::start([Reply::Json(200, machine)]).await;
    let output = run_on_terminal(&platform, &["delete", MACHINE], "no\n", &[]).await;
    assert_eq!(output.status.code(), Some(65));
    let printed_text = stdout(&output);
    for part in [
        "A recovery of user_1 (slot primary) is in progress. This cancels it and deletes both of its machines",
        &format!("{MACHINE}, the new one, which has never served traffic: its server is deleted"),
        &format!("{OLD}, the old one: its host takes a final backup"),
        &format!("`svcctl undelete {OLD}` restores it"),
        &format!(
            "To cancel only the recovery, so that machine {OLD} serves again: `svcctl operation abandon {OPERATION}`"
        ),
    ] {
        assert!(printed_text.contains(part), "{part}: {printed_text}");
    }
    assert!(!printed_text.contains(&format!("svcctl undelete {MACHINE}")), "{printed_text}");
}

#[tokio::test]
async fn discard_prompt_names_the_data_that_would_be_lost() {
    let mut machine = record("running", None);
    machine["retiredAt"] = "2026-01-01T00:43:00.000Z".into();
    machine["unsavedSince"] = "2026-01-01T00:00:00.000Z".into();
    let platform = FakePlatform::start([Reply::Json(200, machine)]).await;
    let output = run_on_terminal(&platform, &["discard", MACHINE, "--accept-loss"], "no\n", &[]).await;
    assert_eq!(output.status.code(), Some(65));
    let printed_text = stdout(&output);
    assert!(
        printed_text.contains("its server holds 43 min of changes that are in no snapshot"),
        "{printed_text}"
    );
    assert_only_reads(&platform);
}

#[tokio::test]
async fn colors_appear_only_on_supporting_terminals() {
    let page = || Reply::Json(200, json!({"machines": [record("failed", None)], "nextCursor": Value::Null}));
    for (env, is_colored) in [
        (&[][..], true),
        (&[("NO_COLOR", "1")], false),
        (&[("NO_COLOR", "")], true),
        (&[("TERM", "dumb")], false),
    ] {
        let platform = FakePlatform::start([page()]).await;
        let output = run_on_terminal(&platform, &["list"], "", env).await;
        assert_eq!(stdout(&output).contains('\x1b'), is_colored, "{env:?}: {:?}", stdout(&output));
    }
    let platform = FakePlatform::start([page()]).await;
    let output = platform.svcctl(&["list"]).await;
    assert!(!stdout(&output).contains('\x1b'), "{:?}", stdout(&output));
}
