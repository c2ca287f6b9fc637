//! A program under measurement that ends by itself: its time, its processor time, its memory, and what it wrote.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

use crate::child::{self, AtExit};

/// For memory alone, and next to no load; the end is seen at once.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// What a run took.
pub struct Ran {
    pub wall: Duration,
    /// The processor time of the program and its children.
    pub cpu: Duration,
    /// The processor time of this process meanwhile: of the servers of the kit that the program speaks to.
    pub served: Duration,
    /// The most memory of the program that ever was resident, without its children.
    pub most_mib: f64,
    /// What program and children wrote to disks, whatever became of the files; `None` where the kernel does not count.
    pub written: Option<u64>,
}

/// Runs a program to its end, which has to be a good one. It leads a process group, which ends with it.
pub fn run(mut command: Command, deadline: Duration) -> Result<Ran> {
    let log = tempfile::NamedTempFile::new()?;
    command.process_group(0).stdin(Stdio::null()).stdout(log.reopen()?).stderr(log.reopen()?);
    let (before, served_before) = (spent(UsageWho::RUSAGE_CHILDREN)?, spent(UsageWho::RUSAGE_SELF)?);
    let began = Instant::now();
    let mut process = command.spawn()?;
    child::kill_on_exit(process.id(), AtExit::KillGroup);
    let group = Pid::from_raw(i32::try_from(process.id())?);
    let of = |file: &str| format!("/proc/{}/{file}", process.id());
    let (status, io) = (of("status"), of("io"));
    let (tell, told) = mpsc::channel();
    // It is waited for and not yet reaped: what the kernel counted of it can still be read, and its id is its own.
    std::thread::spawn(move || {
        let ended = waitid(Id::Pid(group), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
        // Nobody listens where the wait for it was given up.
        tell.send(ended.map(|_| began.elapsed())).ok();
    });
    let mut most = 0;
    let wall = loop {
        match told.recv_timeout(LOOK_EVERY) {
            Ok(wall) => break wall,
            Err(RecvTimeoutError::Disconnected) => bail!("the thread that waits has ended"),
            // The kernel keeps the most that there ever was: the last look sees it.
            Err(RecvTimeoutError::Timeout) => most = number_in(&status, "VmHWM:").unwrap_or(most),
        }
        if began.elapsed() > deadline {
            killpg(group, Signal::SIGKILL).ok();
        }
    };
    let written = number_in(&io, "write_bytes:");
    // Whoever is left of a pipeline that broke.
    killpg(group, Signal::SIGKILL).ok();
    let (ended, wall) = (process.wait()?, wall?);
    child::unregister(process.id());
    ensure!(ended.success(), "{ended} after {wall:.1?}: {}", fs::read_to_string(log.path())?);
    Ok(Ran {
        wall,
        cpu: spent(UsageWho::RUSAGE_CHILDREN)?.saturating_sub(before),
        served: spent(UsageWho::RUSAGE_SELF)?.saturating_sub(served_before),
        most_mib: most as f64 / 1024.0,
        written,
    })
}

/// The number after a name in a file of `/proc`; `None` where there is none, or the process has ended.
fn number_in(file: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Of this process, or of all children that have ended and of theirs.
fn spent(who: UsageWho) -> Result<Duration> {
    let usage = getrusage(who)?;
    let of = |time: nix::sys::time::TimeVal| {
        Duration::from_micros((time.tv_sec() * 1_000_000 + time.tv_usec()).unsigned_abs())
    };
    Ok(of(usage.user_time()) + of(usage.system_time()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_run_is_timed_and_its_memory_is_its_own() {
        let ran = run(shell("sleep 0.2; true"), Duration::from_secs(20)).expect("it ends well");
        assert!(ran.wall >= Duration::from_millis(200), "{:?}", ran.wall);
        assert!(ran.most_mib > 0.0 && ran.most_mib < 64.0, "{} MiB", ran.most_mib);
    }

    #[test]
    fn a_run_that_fails_or_outlasts_its_deadline_is_an_error() {
        let failed = run(shell("echo the reason >&2; exit 3"), Duration::from_secs(20)).err();
        assert!(failed.expect("exit 3").to_string().contains("the reason"));
        let late = run(shell("sleep 600 | cat"), Duration::from_millis(50)).err();
        assert!(late.expect("too slow").to_string().contains("signal: 9"));
    }
}
