//! Runs commands on a machine, as root over SSH.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::process::Command;

/// The port that is forwarded to a machine's port 22.
pub(super) const PORT: u16 = 2222;
/// ssh's exit status if it cannot connect or loses the connection.
const CONNECTION_FAILED: i32 = 255;

pub(super) struct Shell {
    pub(super) address: Ipv4Addr,
    pub(super) key: PathBuf,
}

/// A command's output and exit status.
#[derive(Debug, Clone)]
pub struct ShellOutput {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl ShellOutput {
    /// Returns the standard output if the command succeeded.
    pub fn into_stdout(self) -> Result<String> {
        ensure!(self.status.success(), "{}: {}{}", self.status, self.stdout, self.stderr);
        Ok(self.stdout)
    }
}

impl Shell {
    pub(super) async fn run(&self, script: &str, timeout: Duration) -> Result<ShellOutput> {
        self.run_with(Stdio::null(), script, timeout).await
    }

    /// Runs a script with the given standard input.
    pub(super) async fn run_with(
        &self,
        input: Stdio,
        script: &str,
        timeout: Duration,
    ) -> Result<ShellOutput> {
        let mut ssh = Command::new("ssh");
        ssh.arg("-q").arg("-i").arg(&self.key).args(["-p", &PORT.to_string()]);
        for option in [
            "BatchMode=yes",
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "ConnectTimeout=20",
            "ServerAliveInterval=10",
        ] {
            ssh.args(["-o", option]);
        }
        ssh.arg(format!("root@{}", self.address)).arg(script).stdin(input).kill_on_drop(true);
        let output = tokio::time::timeout(timeout, ssh.output()).await;
        let output = output.with_context(|| format!("{script:?} was still running after {timeout:?}"))??;
        ensure!(output.status.code() != Some(CONNECTION_FAILED), "the SSH connection to the machine failed");
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok(ShellOutput { status: output.status, stdout: text(output.stdout), stderr: text(output.stderr) })
    }
}
