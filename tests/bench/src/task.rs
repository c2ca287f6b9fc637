//! Runs a program to completion and measures its wall time, CPU time, memory, and bytes written.

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

use kit::child::{self, AtExit};

/// Interval between memory samples: short, but with negligible load. The program's end is detected immediately.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Resource usage of one run of the program.
pub struct RunStats {
    pub wall: Duration,
    /// CPU time of the program and its children.
    pub cpu: Duration,
    /// CPU time of this process during the run, that is, of the object store, which runs inside it.
    pub store_cpu: Duration,
    /// Peak resident memory of the program, without its children.
    pub peak_mib: f64,
    /// Bytes that the program and its children wrote to disks, including deleted files; `None` if the kernel does not
    /// count them.
    pub written_bytes: Option<u64>,
}

/// Runs a program, which must succeed, as the leader of a process group that is killed afterwards.
pub fn run(mut command: Command, timeout: Duration) -> Result<RunStats> {
    let log = tempfile::NamedTempFile::new()?;
    command.process_group(0).stdin(Stdio::null()).stdout(log.reopen()?).stderr(log.reopen()?);
    let (before, own_before) = (cpu_time(UsageWho::RUSAGE_CHILDREN)?, cpu_time(UsageWho::RUSAGE_SELF)?);
    let started = Instant::now();
    let mut process = command.spawn()?;
    child::kill_on_exit(process.id(), AtExit::KillGroup);
    let group = Pid::from_raw(i32::try_from(process.id())?);
    let proc_file = |file: &str| format!("/proc/{}/{file}", process.id());
    let (status, io) = (proc_file("status"), proc_file("io"));
    let (sender, receiver) = mpsc::channel();
    // The process stays a zombie until `wait`: its kernel counters remain readable and its pid cannot be reused.
    std::thread::spawn(move || {
        let status = waitid(Id::Pid(group), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
        // Cannot fail: the receiver waits for this message.
        sender.send(status.map(|_| started.elapsed())).ok();
    });
    let mut peak_kib = 0;
    let wall = loop {
        match receiver.recv_timeout(POLL_INTERVAL) {
            Ok(wall) => break wall,
            Err(RecvTimeoutError::Disconnected) => bail!("the waiting thread ended without a result"),
            // VmHWM is the kernel's high-water mark, so the last sample suffices.
            Err(RecvTimeoutError::Timeout) => peak_kib = read_number(&status, "VmHWM:").unwrap_or(peak_kib),
        }
        if started.elapsed() > timeout {
            killpg(group, Signal::SIGKILL).ok();
        }
    };
    let written_bytes = read_number(&io, "write_bytes:");
    // Kills processes left by a broken pipeline.
    killpg(group, Signal::SIGKILL).ok();
    let (exit_status, wall) = (process.wait()?, wall?);
    child::unregister(process.id());
    ensure!(exit_status.success(), "{exit_status} after {wall:.1?}: {}", fs::read_to_string(log.path())?);
    Ok(RunStats {
        wall,
        cpu: cpu_time(UsageWho::RUSAGE_CHILDREN)?.saturating_sub(before),
        store_cpu: cpu_time(UsageWho::RUSAGE_SELF)?.saturating_sub(own_before),
        peak_mib: peak_kib as f64 / 1024.0,
        written_bytes,
    })
}

/// Returns the number after a name in a `/proc` file; `None` if it is missing or the process has ended.
fn read_number(file: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns the CPU time of this process, or of all its terminated descendants.
fn cpu_time(who: UsageWho) -> Result<Duration> {
    let usage = getrusage(who)?;
    let micros = |time: nix::sys::time::TimeVal| {
        Duration::from_micros((time.tv_sec() * 1_000_000 + time.tv_usec()).unsigned_abs())
    };
    Ok(micros(usage.user_time()) + micros(usage.system_time()))
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
    fn run_measures_time_and_memory() {
        let stats = run(shell("sleep 0.2; true"), Duration::from_secs(20)).expect("the script succeeds");
        assert!(stats.wall >= Duration::from_millis(200), "{:?}", stats.wall);
        assert!(stats.peak_mib > 0.0 && stats.peak_mib < 64.0, "{} MiB", stats.peak_mib);
    }

    #[test]
    fn run_fails_on_exit_code_and_timeout() {
        let failed = run(shell("echo the reason >&2; exit 3"), Duration::from_secs(20)).err();
        assert!(failed.expect("exit code 3 is an error").to_string().contains("the reason"));
        let killed = run(shell("sleep 600 | cat"), Duration::from_millis(50)).err();
        assert!(killed.expect("a timeout is an error").to_string().contains("signal: 9"));
    }
}
