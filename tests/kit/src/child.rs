//! Child processes that cannot outlive the process that started them.
//!
//! `Drop` does not run when a test is killed, nor for a `static`. The first registration therefore starts a small
//! shell, which reads a list of children, mounts and directories from a pipe. When this process ends for any reason,
//! the pipe closes, and the shell signals the remaining children, unmounts the registered mounts and removes the
//! registered directories.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use kit::child::OwnedChild;
//! let server = OwnedChild::spawn(&mut std::process::Command::new("some-server"))?;
//! // … later; if this process ends first, the shell kills the server:
//! drop(server);
//! # Ok(()) }
//! ```

mod owned;

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

pub use owned::OwnedChild;

/// Signal for a child that is still running when this process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtExit {
    Kill,
    /// Kills the whole process group that the child leads.
    KillGroup,
    /// For PostgreSQL: an immediate shutdown, which also releases its shared memory. `SIGKILL` follows after three
    /// seconds.
    Quit,
}

/// Kills `pid` when this process ends. Call [`unregister`] as soon as the child has been waited for.
pub fn kill_on_exit(pid: u32, at_exit: AtExit) {
    let signal = match at_exit {
        AtExit::Kill => format!("KILL {pid}"),
        AtExit::KillGroup => format!("KILL -{pid}"),
        AtExit::Quit => format!("QUIT {pid}"),
    };
    notify_reaper(&format!("+ {signal}\n"));
}

/// Forgets a child that has been waited for: its pid may be reused.
pub fn unregister(pid: u32) {
    notify_reaper(&format!("- - {pid}\n"));
}

/// Removes `dir` and its contents when this process ends, if it still exists.
pub fn remove_on_exit(dir: &Path) {
    notify_reaper(&format!("d - {}\n", dir.display()));
}

/// Unmounts `dir` when this process ends, if anything is mounted there.
pub(crate) fn unmount_on_exit(dir: &Path) {
    notify_reaper(&format!("m - {}\n", dir.display()));
}

/// Runs a command and returns its standard output. On failure or timeout, the error contains the command's output. On
/// timeout, the command and the programs that it has started are killed.
pub fn run(mut command: Command, timeout: Duration) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let (mut stdout, mut stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?)
        // In its own process group, so that the programs that it starts can be killed with it.
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    kill_on_exit(child.id(), AtExit::KillGroup);
    let status = wait_until(&mut child, Instant::now() + timeout);
    if status.is_none() {
        killpg(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGKILL).ok();
        child.wait().ok();
    }
    unregister(child.id());
    let output = read_back(&mut stdout)?;
    match status {
        Some(status) if status.success() => Ok(output),
        Some(status) => bail!("{program}: {status}\n{output}{}", read_back(&mut stderr)?),
        None => bail!("{program}: still running after {timeout:?}\n{output}{}", read_back(&mut stderr)?),
    }
}

/// Waits for a child until the deadline; returns `None` if it is still running then.
pub fn wait_until(child: &mut std::process::Child, deadline: Instant) -> Option<ExitStatus> {
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns whether the process is running; a zombie does not count.
pub fn is_running(pid: u32) -> bool {
    // The state follows the program's name, which is in parentheses and may contain anything.
    let is_zombie = |stat: String| stat.rsplit(')').next().map(|rest| rest.trim_start().starts_with('Z'));
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| is_zombie(stat) == Some(false))
}

fn read_back(file: &mut File) -> Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

// The reaper has its own process group and ignores Ctrl-C, because it must outlive this process.
const REAPER: &str = r#"
trap '' INT TERM HUP
children=
while read -r op signal target; do
  case $op in
    +) children="$children $signal:$target" ;;
    -) rest=; for c in $children; do id=${c#*:}; [ "${id#-}" = "$target" ] || rest="$rest $c"; done; children=$rest ;;
    d|m) set -- "$@" "$op$target" ;;
  esac
done
for c in $children; do kill -s "${c%%:*}" -- "${c#*:}" 2>/dev/null; done
tries=0
while [ $tries -lt 30 ]; do
  alive=
  for c in $children; do
    # A zombie counts as dead.
    read -r stat 2>/dev/null </proc/"${c#*:}"/stat && case "${stat##*) }" in Z*) ;; *) alive=1 ;; esac
  done
  [ -n "$alive" ] || break
  sleep 0.1; tries=$((tries + 1))
done
for c in $children; do kill -s KILL -- "${c#*:}" 2>/dev/null; done
# Unmount first, because a directory to be removed may contain a mount.
for entry in "$@"; do case $entry in m*) umount -l "${entry#m}" 2>/dev/null ;; esac; done
for entry in "$@"; do case $entry in d*) rm -rf -- "${entry#d}" ;; esac; done
"#;

fn notify_reaper(line: &str) {
    static REAPER_PIPE: OnceLock<Option<Mutex<ChildStdin>>> = OnceLock::new();
    let pipe = REAPER_PIPE.get_or_init(|| {
        let shell = Command::new("/bin/sh")
            .args(["-c", REAPER, "kit-reaper"])
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        shell.ok().and_then(|mut shell| shell.stdin.take()).map(Mutex::new)
    });
    // Without a shell, the children are still killed by their owners' `Drop`.
    if let Some(pipe) = pipe {
        pipe.lock().unwrap_or_else(PoisonError::into_inner).write_all(line.as_bytes()).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_returns_stdout_or_an_error_with_stderr() {
        let mut echo = Command::new("/bin/sh");
        echo.args(["-c", "echo hello"]);
        assert_eq!(run(echo, Duration::from_secs(20)).expect("echo succeeds"), "hello\n");

        let mut fail = Command::new("/bin/sh");
        fail.args(["-c", "echo the reason >&2; exit 3"]);
        let error = run(fail, Duration::from_secs(20)).expect_err("exit 3 is an error").to_string();
        assert!(error.contains("the reason"), "{error}");
    }

    #[test]
    fn run_kills_command_after_timeout() {
        let mut sleep = Command::new("/bin/sleep");
        sleep.arg("600");
        let started = Instant::now();
        let error = run(sleep, Duration::from_millis(50)).expect_err("a timeout is an error").to_string();
        assert!(error.contains("still running"), "{error}");
        // `run` reaps the command, so it would return only after 600 seconds if it did not kill the command.
        assert!(started.elapsed() < Duration::from_secs(600), "the command was not killed");
    }

    #[test]
    fn run_kills_descendants_after_timeout() {
        // On a busy machine, the shell may need more time to start its child.
        let grandchild = [100, 1_000, 10_000].into_iter().find_map(|ms| {
            let mut shell = Command::new("/bin/sh");
            shell.args(["-c", "sleep 600 & echo $!; wait"]);
            let error = run(shell, Duration::from_millis(ms)).expect_err("a timeout is an error").to_string();
            error.lines().find_map(|line| line.parse::<u32>().ok())
        });
        let grandchild = grandchild.expect("the shell prints its child's pid");
        let deadline = Instant::now() + Duration::from_secs(20);
        while is_running(grandchild) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(!is_running(grandchild), "the command's child outlived the timeout");
    }

    /// The program that the next test kills: it starts a child, registers the child and a directory, and waits.
    #[test]
    #[ignore = "not a test: the child process of killed_process_is_cleaned_up"]
    fn victim() {
        let Some(dir) = std::env::var_os("KIT_VICTIM_DIR") else {
            return;
        };
        let mut child = Command::new("/bin/sleep").arg("600").spawn().expect("sleep starts");
        kill_on_exit(child.id(), AtExit::Kill);
        remove_on_exit(Path::new(&dir));
        println!("child {}", child.id());
        child.wait().ok();
    }

    #[test]
    fn killed_process_is_cleaned_up() {
        use std::io::{BufRead, BufReader};
        let dir = tempfile::tempdir().expect("the directory is created");
        let registered_dir = dir.path().join("with space");
        std::fs::create_dir(&registered_dir).expect("the directory is created");
        let mut victim = Command::new(std::env::current_exe().expect("the test executable has a path"))
            .args(["--ignored", "--exact", "--nocapture", "child::tests::victim"])
            .env("KIT_VICTIM_DIR", &registered_dir)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the victim starts");
        kill_on_exit(victim.id(), AtExit::Kill);
        let grandchild = BufReader::new(victim.stdout.take().expect("the output is piped"))
            .lines()
            .map_while(Result::ok)
            .find_map(|line| line.split("child ").nth(1).and_then(|pid| pid.trim().parse::<u32>().ok()))
            .expect("the victim prints its child's pid");
        assert!(is_running(grandchild));

        victim.kill().expect("the victim can be killed");
        victim.wait().expect("the victim can be reaped");
        unregister(victim.id());

        let deadline = Instant::now() + Duration::from_secs(20);
        while (is_running(grandchild) || registered_dir.exists()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(!is_running(grandchild), "the child outlived its parent");
        assert!(!registered_dir.exists(), "the directory still exists");
    }
}
