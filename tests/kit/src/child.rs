//! Child processes that cannot outlive the process that started them.
//!
//! A `Drop` does not run when a test is killed, nor for a `static`. So one small shell, started with the first child,
//! reads what there is to end from a pipe whose only other end is ours: however this process goes away, the pipe closes,
//! and the shell signals what is left and removes the directories it was told of.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use kit::child::{self, AtExit};
//! let mut server = std::process::Command::new("some-server").spawn()?;
//! child::kill_on_exit(server.id(), AtExit::Kill);
//! // … later, when it has been waited for:
//! server.kill()?;
//! server.wait()?;
//! child::unregister(server.id());
//! # Ok(()) }
//! ```

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Which signal a child gets when this process goes away without having ended it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtExit {
    Kill,
    /// The whole process group that the child leads.
    KillGroup,
    /// For PostgreSQL: an immediate shutdown that also returns its shared memory. `SIGKILL` follows after three seconds.
    Quit,
}

/// Ends `pid` when this process goes away. To be taken back with [`unregister`] as soon as the child has been waited for.
pub fn kill_on_exit(pid: u32, how: AtExit) {
    let whom = match how {
        AtExit::Kill => format!("KILL {pid}"),
        AtExit::KillGroup => format!("KILL -{pid}"),
        AtExit::Quit => format!("QUIT {pid}"),
    };
    tell_reaper(&format!("+ {whom}\n"));
}

/// The child was waited for: its pid is no longer ours to signal.
pub fn unregister(pid: u32) {
    tell_reaper(&format!("- - {pid}\n"));
}

/// Removes `dir` and all in it when this process goes away; missing is fine.
pub fn remove_on_exit(dir: &Path) {
    tell_reaper(&format!("d - {}\n", dir.display()));
}

/// Runs a command to its end and gives its standard output; a non-zero end, or none within `deadline`, is an error that
/// carries what the command printed.
pub fn run(mut command: Command, deadline: Duration) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let (mut stdout, mut stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?)
        .spawn()
        .with_context(|| format!("start {program}"))?;
    kill_on_exit(child.id(), AtExit::Kill);
    let status = wait_until(&mut child, Instant::now() + deadline);
    if status.is_none() {
        child.kill().ok();
        child.wait().ok();
    }
    unregister(child.id());
    let output = read_back(&mut stdout)?;
    match status {
        Some(status) if status.success() => Ok(output),
        Some(status) => bail!("{program}: {status}\n{output}{}", read_back(&mut stderr)?),
        None => bail!("{program}: still running after {deadline:?}\n{output}{}", read_back(&mut stderr)?),
    }
}

/// Waits for a child, without blocking longer than `deadline`.
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

/// Whether there is such a process; one that is dead and not yet waited for is not.
pub fn is_running(pid: u32) -> bool {
    // The state follows the program's name, which stands in brackets and may hold anything.
    let state = |stat: String| stat.rsplit(')').next().map(|rest| rest.trim_start().starts_with('Z'));
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| state(stat) == Some(false))
}

fn read_back(file: &mut File) -> Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

// Its own process group and no ear for Ctrl-C: it has to run after the test process did.
const REAPER: &str = r#"
trap '' INT TERM HUP
children=
while read -r op signal what; do
  case $op in
    +) children="$children $signal:$what" ;;
    -) left=; for c in $children; do id=${c#*:}; [ "${id#-}" = "$what" ] || left="$left $c"; done; children=$left ;;
    d) set -- "$@" "$what" ;;
  esac
done
for c in $children; do kill -s "${c%%:*}" -- "${c#*:}" 2>/dev/null; done
tries=0
while [ $tries -lt 30 ]; do
  alive=
  for c in $children; do
    # Dead, though init has not waited for it yet, is dead.
    read -r stat 2>/dev/null </proc/"${c#*:}"/stat && case "${stat##*) }" in Z*) ;; *) alive=1 ;; esac
  done
  [ -n "$alive" ] || break
  sleep 0.1; tries=$((tries + 1))
done
for c in $children; do kill -s KILL -- "${c#*:}" 2>/dev/null; done
for dir in "$@"; do rm -rf -- "$dir"; done
"#;

fn tell_reaper(line: &str) {
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
    // Without a shell the children still end with their owners' `Drop`.
    if let Some(pipe) = pipe {
        pipe.lock().unwrap_or_else(PoisonError::into_inner).write_all(line.as_bytes()).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_gives_output_and_says_why_it_failed() {
        let mut echo = Command::new("/bin/sh");
        echo.args(["-c", "echo hello"]);
        assert_eq!(run(echo, Duration::from_secs(20)).expect("runs"), "hello\n");

        let mut fail = Command::new("/bin/sh");
        fail.args(["-c", "echo the reason >&2; exit 3"]);
        let error = run(fail, Duration::from_secs(20)).expect_err("exit 3 is an error").to_string();
        assert!(error.contains("the reason"), "{error}");
    }

    #[test]
    fn run_ends_what_outlasts_its_deadline() {
        let mut sleep = Command::new("/bin/sleep");
        sleep.arg("600");
        let error = run(sleep, Duration::from_millis(50)).expect_err("too slow").to_string();
        assert!(error.contains("still running"), "{error}");
    }

    /// The program that the next test kills: it starts a child, registers it and a directory, and hangs.
    #[test]
    #[ignore = "not a test: the other half of a_killed_process_takes_its_children_along"]
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
    fn a_killed_process_takes_its_children_along() {
        use std::io::{BufRead, BufReader};
        let dir = tempfile::tempdir().expect("tempdir");
        let doomed = dir.path().join("with space");
        std::fs::create_dir(&doomed).expect("mkdir");
        let mut victim = Command::new(std::env::current_exe().expect("own path"))
            .args(["--ignored", "--exact", "--nocapture", "child::tests::victim"])
            .env("KIT_VICTIM_DIR", &doomed)
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        kill_on_exit(victim.id(), AtExit::Kill);
        let grandchild = BufReader::new(victim.stdout.take().expect("piped"))
            .lines()
            .map_while(Result::ok)
            .find_map(|line| line.split("child ").nth(1).and_then(|pid| pid.trim().parse::<u32>().ok()))
            .expect("the victim names its child");
        assert!(is_running(grandchild));

        victim.kill().expect("kill");
        victim.wait().expect("reaped");
        unregister(victim.id());

        let deadline = Instant::now() + Duration::from_secs(20);
        while (is_running(grandchild) || doomed.exists()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(!is_running(grandchild), "the child outlived its parent");
        assert!(!doomed.exists(), "the directory was left behind");
    }
}
