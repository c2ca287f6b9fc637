//! Hook benchmark: an agent's program runs `svc-hook` through a shell before and after each tool call, in a home
//! directory with 200,000 files. The measured time is how long the program waits, from the start of the shell to its
//! end; the lower bound is a shell that runs `true`. With idle processors, each round also counts the written files
//! that have no audit entry; otherwise, a hook that gave up early would look fast.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::figures::{PRODUCT, Spec, Tally, Target};
use super::{Options, print_round};
use kit::child::{self, OwnedChild};

const BEFORE_P50: &str = "before a command, p50";
const BEFORE_P99: &str = "before a command, p99";
const AFTER_P50: &str = "after a command that writes 10 files, p50";
const AFTER_P99: &str = "after a command that writes 10 files, p99";
const BUSY_BEFORE_P99: &str = "before a command, p99, all processors busy";
const BUSY_AFTER_P99: &str = "after a command, p99, all processors busy";
const UNAUDITED_FILES: &str = "files without an audit entry";
const LATE_CALLS: &str = "calls recorded as late, all processors busy";
const EMPTY_SHELL: &str = "sh -c true";

pub const ROWS: [Spec; 8] = [
    Spec { name: BEFORE_P50, unit: "ms", against: Some(EMPTY_SHELL), target: Target::None },
    Spec { name: BEFORE_P99, unit: "ms", against: Some(EMPTY_SHELL), target: Target::AtMost(100.0) },
    Spec { name: AFTER_P50, unit: "ms", against: None, target: Target::None },
    Spec { name: AFTER_P99, unit: "ms", against: None, target: Target::AtMost(100.0) },
    Spec { name: BUSY_BEFORE_P99, unit: "ms", against: None, target: Target::AtMost(100.0) },
    Spec { name: BUSY_AFTER_P99, unit: "ms", against: None, target: Target::AtMost(100.0) },
    Spec { name: UNAUDITED_FILES, unit: "", against: None, target: Target::AtMost(0.0) },
    Spec { name: LATE_CALLS, unit: "", against: None, target: Target::None },
];

const DIRECTORIES: usize = 2000;
const FILES_PER_DIRECTORY: usize = 100;
const FILES_PER_CALL: usize = 10;
/// Enough that the 99th percentile is not the slowest call.
const CALLS: usize = 300;
const START_TIMEOUT: Duration = Duration::from_secs(120);
const AUDIT_TIMEOUT: Duration = Duration::from_secs(60);

pub async fn measure(options: &Options) -> Result<Tally> {
    let (svc, rounds) = (options.svc.clone(), options.rounds);
    tokio::task::spawn_blocking(move || run_rounds(&svc, rounds)).await?
}

fn run_rounds(svc: &Path, rounds: u32) -> Result<Tally> {
    let home = Home::start(svc)?;
    println!("  {} files in {DIRECTORIES} directories", DIRECTORIES * FILES_PER_DIRECTORY);
    let mut tally = Tally::default();
    let mut call = 0;
    for round in 0..rounds {
        print_round(round, rounds);
        let mut empty_shell_times = Vec::new();
        for _ in 0..CALLS {
            let mut shell = Command::new("/bin/sh");
            shell.args(["-c", "true"]);
            empty_shell_times.push(time_command(&mut shell, b"")?);
        }
        let idle = home.run_calls(&mut call)?;
        for (name, side, times, percent) in [
            (BEFORE_P50, EMPTY_SHELL, &empty_shell_times, 50),
            (BEFORE_P99, EMPTY_SHELL, &empty_shell_times, 99),
            (BEFORE_P50, PRODUCT, &idle.before, 50),
            (BEFORE_P99, PRODUCT, &idle.before, 99),
            (AFTER_P50, PRODUCT, &idle.after, 50),
            (AFTER_P99, PRODUCT, &idle.after, 99),
        ] {
            tally.add(name, side, percentile(times, percent));
        }
        tally.add(UNAUDITED_FILES, PRODUCT, home.count_unaudited(&idle)? as f64);
        let late_before = home.count_audit_entries(|entry| entry["gap"]["why"] == "late");
        let busy = {
            let _load = start_load()?;
            home.run_calls(&mut call)?
        };
        tally.add(BUSY_BEFORE_P99, PRODUCT, percentile(&busy.before, 99));
        tally.add(BUSY_AFTER_P99, PRODUCT, percentile(&busy.after, 99));
        tally.add(
            LATE_CALLS,
            PRODUCT,
            (home.count_audit_entries(|entry| entry["gap"]["why"] == "late") - late_before) as f64,
        );
    }
    Ok(tally)
}

/// Hook times before and after each call, and the paths that the calls wrote.
struct CallResults {
    before: Vec<Duration>,
    after: Vec<Duration>,
    written: Vec<String>,
}

struct Home {
    root: tempfile::TempDir,
    _watcher: OwnedChild,
}

impl Home {
    fn start(svc: &Path) -> Result<Self> {
        let root = tempfile::Builder::new().prefix("svc-bench-hook-").tempdir()?;
        child::remove_on_exit(root.path());
        for dir in
            ["home/svc/home/system/logs", "home/svc/home/apps", "run/svc/hooks", "run/svc/watch", "bin"]
        {
            fs::create_dir_all(root.path().join(dir))?;
        }
        for number in 0..DIRECTORIES {
            let dir = root.path().join(format!("home/svc/home/{}", dir_path(number)));
            fs::create_dir_all(&dir)?;
            for file in 0..FILES_PER_DIRECTORY {
                fs::write(dir.join(format!("f{file}")), "x")?;
            }
        }
        for applet in ["svc-hook", "svc-watch"] {
            symlink(svc, root.path().join("bin").join(applet))?;
        }
        let notify = root.path().join("notify.sock");
        let socket = UnixDatagram::bind(&notify)?;
        socket.set_read_timeout(Some(START_TIMEOUT))?;
        let log = fs::File::create(root.path().join("watch.log"))?;
        let mut watcher = applet_command(root.path(), "svc-watch");
        watcher.env("NOTIFY_SOCKET", &notify).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let watcher = OwnedChild::spawn(&mut watcher)?;
        let mut buffer = [0_u8; 1024];
        loop {
            let size = socket.recv(&mut buffer).context("svc-watch did not become ready")?;
            if String::from_utf8_lossy(&buffer[..size]).contains("READY=1") {
                return Ok(Self { root, _watcher: watcher });
            }
        }
    }

    fn home(&self) -> PathBuf {
        self.root.path().join("home/svc/home")
    }

    /// Makes calls as an agent's program does; `number` counts the calls in all rounds.
    fn run_calls(&self, number: &mut usize) -> Result<CallResults> {
        let mut results = CallResults { before: Vec::new(), after: Vec::new(), written: Vec::new() };
        for _ in 0..CALLS {
            *number += 1;
            results.before.push(self.run_hook("PreToolUse", *number)?);
            for file in 0..FILES_PER_CALL {
                let dir = dir_path((*number * 7919 + file * 104_729) % DIRECTORIES);
                let path = format!("{dir}/call-{number}-{file}");
                fs::write(self.home().join(&path), "written")?;
                results.written.push(path);
            }
            results.after.push(self.run_hook("PostToolUse", *number)?);
        }
        Ok(results)
    }

    fn run_hook(&self, event: &str, call: usize) -> Result<Duration> {
        let input = json!({
            "hook_event_name": event, "session_id": "bench", "tool_use_id": call.to_string(), "tool_name": "Bash",
            "tool_input": { "command": "write" }, "cwd": self.home(),
        });
        let mut shell = Command::new("/bin/sh");
        shell.arg("-c").arg(format!("{} claude-code", self.root.path().join("bin/svc-hook").display()));
        shell.env_clear().env("PATH", "/usr/bin:/bin").env("SVC_ROOT", self.root.path());
        time_command(&mut shell, input.to_string().as_bytes())
    }

    fn read_audit_entries(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.home().join("system/logs/audit.jsonl")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    fn count_audit_entries(&self, is_counted: impl Fn(&Value) -> bool) -> usize {
        self.read_audit_entries().iter().filter(|entry| is_counted(entry)).count()
    }

    /// Waits for at most [`AUDIT_TIMEOUT`] until every written path has an entry; returns the number of paths that have
    /// none.
    fn count_unaudited(&self, results: &CallResults) -> Result<usize> {
        let deadline = Instant::now() + AUDIT_TIMEOUT;
        loop {
            let entries = self.read_audit_entries();
            let audited: std::collections::HashSet<&str> =
                entries.iter().filter_map(|entry| entry["path"].as_str()).collect();
            ensure!(!audited.is_empty() || Instant::now() < deadline, "the audit log has no entries");
            let missing = results.written.iter().filter(|path| !audited.contains(path.as_str())).count();
            if missing == 0 || Instant::now() >= deadline {
                return Ok(missing);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn dir_path(number: usize) -> String {
    format!("projects/p{}/d{}", number / 40, number % 40)
}

fn applet_command(root: &Path, name: &str) -> Command {
    let mut command = Command::new(root.join("bin").join(name));
    command.env_clear().env("PATH", "/usr/bin:/bin").env("SVC_ROOT", root);
    command
}

/// Runs the command with this standard input; returns the time from just before its start to its end.
fn time_command(command: &mut Command, input: &[u8]) -> Result<Duration> {
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let started = Instant::now();
    let mut process = command.spawn()?;
    if let Some(mut stdin) = process.stdin.take() {
        // Fails if the process ended without reading its input.
        stdin.write_all(input).ok();
    }
    // Wait without a timeout: polling would distort the measurement.
    let status = process.wait()?;
    ensure!(status.success(), "the command ended with {status}");
    Ok(started.elapsed())
}

/// Starts a busy process for each processor; each is killed when it is dropped.
fn start_load() -> Result<Vec<OwnedChild>> {
    let processors = std::thread::available_parallelism()?.get();
    let start_busy_process = || {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "while :; do :; done"]).stdin(Stdio::null());
        OwnedChild::spawn(&mut shell).context("cannot start a busy process")
    };
    (0..processors).map(|_| start_busy_process()).collect()
}

fn percentile(times: &[Duration], percent: usize) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let index = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
    sorted.get(index).map_or(0.0, Duration::as_secs_f64) * 1e3
}
