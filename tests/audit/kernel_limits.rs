//! Changes that the kernel does not report: beyond the capacity of its event queue, and in directories that it cannot
//! watch.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use svc::host::audit::protocol::{Message, Phase};

use super::home::{ADA, AuditedHome, differences, recorded_operations};

/// The file with the maximum number of events that the kernel queues for a slow reader.
const QUEUE_LIMIT_FILE: &str = "/proc/sys/fs/inotify/max_queued_events";

#[test]
fn scan_finds_changes_after_queue_overflow() -> Result<()> {
    let home = AuditedHome::new()?;
    home.shell("mkdir -p many d/below && for f in $(seq 50); do echo $f > d/below/$f; done")?;
    let max_events: u64 = std::fs::read_to_string(QUEUE_LIMIT_FILE)?.trim().parse()?;
    if max_events > 100_000 {
        kit::skip::record(format_args!(
            "the kernel queues {max_events} events, too many for this test to create"
        ));
        return Ok(());
    }
    // Each file causes three events (create, modify, close), so this many files overflow the queue.
    let files = max_events / 2;
    home.take_entries()?;
    let before = home.states()?;
    let call = home.begin_command(ADA)?;
    let watcher = Pid::from_raw(i32::try_from(home.watcher_pid())?);
    kill(watcher, Signal::SIGSTOP)?;
    let result = home.shell(&format!(
        "cd many && seq {files} | split --lines=1 --suffix-length=5 --numeric-suffixes - f && cd .. && \
         rm d/below/7 && mv d/below/8 moved && echo other > d/below/9 && mkdir late && echo x > late/x"
    ));
    kill(watcher, Signal::SIGCONT)?;
    result?;
    home.end_command(ADA, &call)?;
    let entries = home.take_entries()?;
    let misattributed = entries.iter().find(|entry| entry["agentName"] != "ada");
    ensure!(misattributed.is_none(), "a change was attributed to another actor: {misattributed:?}");
    let expected = differences(&before, &home.states()?);
    ensure!(expected.len() as u64 > files, "{} changes, expected more than {files}", expected.len());
    let found = recorded_operations(&entries)?;
    ensure!(found.len() == expected.len(), "{} changes recorded, {} expected", found.len(), expected.len());
    for (path, op) in &expected {
        ensure!(
            found.get(path).map(String::as_str) == Some(op),
            "wrong operation recorded for {}",
            String::from_utf8_lossy(path)
        );
    }
    Ok(())
}

/// Returns whether this user can create a user namespace, which has its own limits. If not, records a skipped test.
fn can_limit_watches() -> bool {
    let unshare = Command::new("unshare").args(["--user", "--map-root-user", "true"]).output();
    let can_unshare = unshare.is_ok_and(|output| output.status.success());
    if !can_unshare {
        kit::skip::record("cannot create a user namespace");
    }
    can_unshare
}

#[test]
fn messages_without_waiting_senders_share_a_scan() -> Result<()> {
    if !can_limit_watches() {
        return Ok(());
    }
    let mut home = AuditedHome::with_failpoints("watch.check=sleep(400)")?;
    (home.max_watches, home.has_normal_hook_timeout) = (Some(20), true);
    home.shell("mkdir -p $(seq --format=deep/%g 60)")?;
    home.start_watcher()?;
    let message = Message::new(Phase::TurnEnd);
    let mut line = serde_json::to_vec(&message)?;
    line.push(b'\n');
    // A scan for each message would take 16 s, but the watcher closes each connection after 1 s.
    for _ in 0..40 {
        UnixStream::connect(home.path("run/svc/watch/watch.sock"))?.write_all(&line)?;
    }
    let started = Instant::now();
    while home.send_to_watcher(&message).is_err() {
        ensure!(started.elapsed() < Duration::from_secs(8), "each message waits for its own scan");
    }
    Ok(())
}

#[test]
fn home_directory_beyond_the_watch_limit_is_scanned() -> Result<()> {
    if !can_limit_watches() {
        return Ok(());
    }
    let mut home = AuditedHome::unwatched()?;
    home.max_watches = Some(20);
    home.shell("for d in $(seq 60); do mkdir -p deep/$d && echo $d > deep/$d/file; done")?;
    home.start_watcher()?;
    let activity =
        || std::fs::read_to_string(home.dir().join("system/logs/activity.log")).unwrap_or_default();
    let wait_for_activity = |part: &str| -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !activity().contains(part) {
            ensure!(Instant::now() < deadline, "timeout: no {part:?} in the activity log: {}", activity());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    };
    wait_for_activity("cannot watch all directories")?;
    for round in 0..3 {
        let before = home.states()?;
        let entries = home.run(
            ADA,
            &format!("for d in 3 31 59; do echo {round} > deep/$d/new{round}; rm -f deep/$d/file; done; mkdir deep/m{round}"),
        )?;
        let expected = differences(&before, &home.states()?);
        let found = recorded_operations(&entries)?;
        let found: Vec<_> = found.iter().map(|(path, op)| (path.clone(), op.as_str())).collect();
        ensure!(found == expected.into_iter().collect::<Vec<_>>(), "{found:?}");
    }
    // Once there are fewer directories, all of them are watched again.
    home.run(ADA, "rm -r deep && mkdir -p again/x && echo x > again/x/y")?;
    home.run(ADA, "echo z > again/x/z")?;
    wait_for_activity("watches all directories again")?;
    let line = home
        .lines()?
        .into_iter()
        .rfind(|line| line["path"] == "again/x/z")
        .context("no line for again/x/z")?;
    ensure!(line["op"] == "write");
    Ok(())
}
