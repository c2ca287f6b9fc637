//! ^C while an operation is waited for: the wait ends, the operation does not.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::anyhow;

use crate::applet::{Exit, Failure};

/// The work's result, or what is said at ^C: the command that shows how what was begun ends.
///
/// # Errors
/// Of the work.
pub async fn or<T>(command: &str, work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::select! {
        done = work => done,
        Ok(()) = tokio::signal::ctrl_c() => Err(stop_waiting(command)),
    }
}

/// Says what continues, and ends this process by the signal, so that a shell's loop ends as well. `exec` gives the signal its
/// default action back. Returns where that cannot be done.
fn stop_waiting(command: &str) -> Failure {
    let said = format!("not waited for any longer; the operation continues\n  next: `{command}`");
    eprintln!("\n{said}");
    let error = Command::new("/bin/sh").args(["-c", "kill -INT $$"]).exec();
    tracing::debug!(%error, "no shell ended this process");
    Failure::new(Exit::TryAgain, anyhow!("interrupted"))
}
