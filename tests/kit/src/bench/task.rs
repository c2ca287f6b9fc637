//! A program under measurement that ends by itself: its time, its processor time, its memory, and what it wrote.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::child::{self, AtExit};

/// Short beside what is measured, and next to no load.
const LOOK_EVERY: Duration = Duration::from_millis(1);

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
    child::end_with_us(process.id(), AtExit::KillGroup);
    let group = Pid::from_raw(i32::try_from(process.id())?);
    let of = |file: &str| format!("/proc/{}/{file}", process.id());
    let (status, io) = (of("status"), of("io"));
    let (mut most, mut written) = (0, None);
    let ended = loop {
        if let Some(ended) = process.try_wait()? {
            break ended;
        }
        // The kernel keeps the most that there ever was, and counts ended children in: the last look sees it all.
        most = number_in(&status, "VmHWM:").unwrap_or(most);
        written = number_in(&io, "write_bytes:").or(written);
        if began.elapsed() > deadline {
            killpg(group, Signal::SIGKILL)?;
        }
        std::thread::sleep(LOOK_EVERY);
    };
    let wall = began.elapsed();
    // Whoever is left of a pipeline that broke.
    killpg(group, Signal::SIGKILL).ok();
    child::ended(process.id());
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
