//! A server under measurement: startup, CPU time, memory, and termination with all children.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{Pid, SysconfVar, sysconf};

use kit::child::{self, AtExit};

const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Short enough to time a startup of two milliseconds, at negligible load.
const POLL_INTERVAL: Duration = Duration::from_micros(100);

const STOP_TIMEOUT: Duration = Duration::from_secs(15);
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A server that is stopped on drop, with its process group, and killed if it does not exit within [`STOP_TIMEOUT`].
pub struct ServerProcess {
    name: String,
    child: Child,
    log: PathBuf,
}

impl ServerProcess {
    /// Starts a server in its own process group and waits until it accepts connections at `address`. Also returns how
    /// long that took.
    pub fn start(mut command: Command, address: SocketAddr, log: &Path) -> Result<(Self, Duration)> {
        let name = command.get_program().to_string_lossy().into_owned();
        let out = File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
        command.process_group(0).stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let started = Instant::now();
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        child::kill_on_exit(child.id(), AtExit::KillGroup);
        let mut running = Self { name, child, log: log.to_owned() };
        loop {
            if TcpStream::connect_timeout(&address, START_TIMEOUT).is_ok() {
                return Ok((running, started.elapsed()));
            }
            if let Some(status) = running.child.try_wait()? {
                bail!("{} exited during startup ({status}):\n{}", running.name, running.log_tail());
            }
            if started.elapsed() > START_TIMEOUT {
                bail!("{} is not listening on {address}:\n{}", running.name, running.log_tail());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the last lines of the log.
    pub fn log_tail(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        if let Ok(group) = i32::try_from(self.child.id()) {
            // An executable instrumented for profiling writes its counts only at a normal exit.
            killpg(Pid::from_raw(group), Signal::SIGTERM).ok();
            let signaled = Instant::now();
            while signaled.elapsed() < STOP_TIMEOUT && matches!(self.child.try_wait(), Ok(None)) {
                std::thread::sleep(STOP_POLL_INTERVAL);
            }
            killpg(Pid::from_raw(group), Signal::SIGKILL).ok();
        }
        self.child.wait().ok();
        child::unregister(self.child.id());
    }
}

/// Returns the CPU time of a process and its children.
pub fn cpu_time(pid: u32) -> Result<Duration> {
    let per_second = sysconf(SysconfVar::CLK_TCK)?.context("the system reports no clock ticks per second")?;
    let mut ticks = 0_u64;
    for pid in process_and_children(pid) {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The process's name, in parentheses, may itself contain `)`. utime and stime are the 12th and 13th fields
        // after it.
        let (_, rest) = stat.rsplit_once(')').context("no name in /proc/pid/stat")?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        for field in [11, 12] {
            ticks += fields.get(field).context("no CPU time in /proc/pid/stat")?.parse::<u64>()?;
        }
    }
    Ok(Duration::from_secs_f64(ticks as f64 / per_second as f64))
}

/// Returns the resident memory, in MiB, of a process and its children: the RSS if there are none, otherwise the sum of
/// PSS, because RSS would count shared pages more than once.
pub fn memory_mib(pid: u32) -> Result<f64> {
    let pids = process_and_children(pid);
    let kib = match pids.as_slice() {
        [single] => read_number(&format!("/proc/{single}/status"), "VmRSS:")?,
        several => {
            let mut sum = 0;
            for pid in several {
                sum += read_number(&format!("/proc/{pid}/smaps_rollup"), "Pss:")?;
            }
            sum
        }
    };
    Ok(kib as f64 / 1024.0)
}

/// Resets the peak (see [`peak_memory_mib`]) to the current memory use.
pub fn reset_peak_memory(pid: u32) -> Result<()> {
    Ok(fs::write(format!("/proc/{pid}/clear_refs"), "5")?)
}

/// Returns the peak resident memory of a process, in MiB.
pub fn peak_memory_mib(pid: u32) -> Result<f64> {
    Ok(read_number(&format!("/proc/{pid}/status"), "VmHWM:")? as f64 / 1024.0)
}

fn read_number(file: &str, name: &str) -> Result<u64> {
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.with_context(|| format!("no {name} in {file}"))?.parse()?)
}

/// Returns a process and its direct children.
fn process_and_children(pid: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children = children.split_whitespace().filter_map(|child| child.parse().ok());
    std::iter::once(pid).chain(children).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_cpu_are_readable_with_a_child() {
        let mut shell =
            Command::new("/bin/sh").args(["-c", "sleep 60 & wait"]).spawn().expect("the shell starts");
        let deadline = Instant::now() + Duration::from_secs(10);
        while process_and_children(shell.id()).len() < 2 {
            assert!(Instant::now() < deadline, "no child");
            std::thread::sleep(Duration::from_millis(5));
        }
        let both = memory_mib(shell.id()).expect("the memory is readable");
        assert!(both > 0.0 && both < 64.0, "{both} MiB");
        assert!(cpu_time(shell.id()).expect("the CPU time is readable") < Duration::from_secs(5));
        for pid in process_and_children(shell.id()).into_iter().rev() {
            nix::sys::signal::kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL)
                .expect("the process can be killed");
        }
        shell.wait().expect("the shell can be reaped");
        // The process clock ticks every 10 ms.
        while cpu_time(std::process::id()).expect("the CPU time of this process is readable")
            == Duration::ZERO
        {
            assert!(Instant::now() < deadline, "no CPU time is counted");
        }
    }

    #[test]
    fn start_reports_output_of_server_that_exits() {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "echo no such setting; exit 3"]);
        let log = tempfile::NamedTempFile::new().expect("the log file is created");
        let address = ([127, 0, 0, 1], kit::net::free_port().expect("a port is free")).into();
        let error = ServerProcess::start(command, address, log.path()).err().expect("the server exited");
        assert!(error.to_string().contains("no such setting"), "{error}");
    }
}
