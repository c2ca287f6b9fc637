//! Oneshot units: run once, to their end, within a deadline. Their output is kept and logged.

use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Output as Finished};
use std::time::Duration;

use anyhow::{Result, bail};
use nix::sys::signal::{Signal, killpg};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::session::{Output, Session};

impl Session {
    /// Runs a unit to its end.
    pub(super) async fn run_oneshot(
        &self,
        unit: &str,
        program: &[PathBuf],
        args: &[String],
        more_env: &[(String, String)],
        deadline: Duration,
    ) -> Result<Finished> {
        let mut running = self.spawn(unit, program, args, more_env, Output::Pipe)?;
        let (stdout, stderr) = (running.child.stdout.take(), running.child.stderr.take());
        let (group, mut late) = (running.group, false);
        let ends = async {
            let status = tokio::time::timeout(deadline, running.child.wait()).await;
            if status.is_err() {
                late = true;
                killpg(group, Signal::SIGKILL).ok();
            }
            // Whatever it left in its group holds the pipes open until it is reaped.
            self.reap(&mut running).await
        };
        let (status, stdout, stderr) = tokio::join!(ends, read(stdout), read(stderr));
        let (status, stdout, stderr): (ExitStatus, _, _) = (status?, stdout?, stderr?);
        self.disk.append_log(unit, &stdout)?;
        self.disk.append_log(unit, &stderr)?;
        self.disk.append_log(unit, format!("[init] {unit} {args:?}: {status}\n").as_bytes())?;
        if late {
            bail!("{unit} was still running after {deadline:?}");
        }
        Ok(Finished { status, stdout, stderr })
    }
}

async fn read(pipe: Option<impl AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(mut pipe) = pipe {
        pipe.read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}

/// The end of a oneshot in one line: its status and the last thing that it said.
pub(super) fn words(finished: &Finished) -> String {
    let stderr = String::from_utf8_lossy(&finished.stderr);
    let last = stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let last: String = last.chars().take(400).collect();
    format!("{}: {last}", finished.status)
}
