//! Oneshot units: run once to completion, with a timeout. Their output is captured and logged.

use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Output};
use std::time::Duration;

use anyhow::{Result, bail};
use nix::sys::signal::{Signal, killpg};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::session::{OutputDestination, PowerSession};

impl PowerSession {
    /// Runs a unit to completion.
    pub(super) async fn run_oneshot(
        &self,
        unit: &str,
        command_line: &[PathBuf],
        args: &[String],
        extra_env: &[(String, String)],
        timeout: Duration,
    ) -> Result<Output> {
        let mut running = self.spawn(unit, command_line, args, extra_env, OutputDestination::Pipe)?;
        let (stdout, stderr) = (running.child.stdout.take(), running.child.stderr.take());
        let (group, mut timed_out) = (running.group, false);
        let wait = async {
            let status = tokio::time::timeout(timeout, running.child.wait()).await;
            if status.is_err() {
                timed_out = true;
                killpg(group, Signal::SIGKILL).ok();
            }
            // Remaining processes in the unit's group hold the pipes open until they are killed.
            self.reap(&mut running).await
        };
        let (status, stdout, stderr) = tokio::join!(wait, read_all(stdout), read_all(stderr));
        let (status, stdout, stderr): (ExitStatus, _, _) = (status?, stdout?, stderr?);
        self.disk.append_log(unit, &stdout)?;
        self.disk.append_log(unit, &stderr)?;
        self.disk.append_log(unit, format!("[init] {unit} {args:?}: {status}\n").as_bytes())?;
        if timed_out {
            bail!("{unit} was still running after {timeout:?}");
        }
        Ok(Output { status, stdout, stderr })
    }
}

async fn read_all(pipe: Option<impl AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(mut pipe) = pipe {
        pipe.read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}

/// Summarizes a oneshot's result in one line: its status and the last line of its error output.
pub(super) fn summarize(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let last: String = last.chars().take(400).collect();
    format!("{}: {last}", output.status)
}
