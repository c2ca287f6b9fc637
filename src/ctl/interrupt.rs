//! Ctrl-C handling while waiting: it stops the wait, not the operation.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::anyhow;

use svc_base::applet::{Exit, Failure};

/// Runs `work`. On Ctrl-C, prints `command`, which shows the operation's progress, and terminates the process with
/// SIGINT.
///
/// # Errors
/// Those of `work`; [`Exit::TryAgain`] after Ctrl-C if `/bin/sh` can't be executed.
pub async fn run_until_interrupted<T>(
    command: &str,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    tokio::select! {
        result = work => result,
        Ok(()) = tokio::signal::ctrl_c() => Err(stop_waiting(command)),
    }
}

/// Reports that the operation continues, then terminates this process with SIGINT so that a surrounding shell loop
/// stops too. We `exec` a shell to send the signal, because that restores its default action. Returns only if `exec`
/// fails.
fn stop_waiting(command: &str) -> Failure {
    let message = format!("stopped waiting; the operation continues\n  next: `{command}`");
    eprintln!("\n{message}");
    let error = Command::new("/bin/sh").args(["-c", "kill -INT $$"]).exec();
    tracing::debug!(%error, "cannot execute /bin/sh to terminate with SIGINT");
    Failure::new(Exit::TryAgain, anyhow!("interrupted"))
}
