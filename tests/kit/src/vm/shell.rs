//! Commands in a machine, as root by SSH: what an operator would look at with their own eyes.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::process::Command;

/// The port that stands for a machine's 22.
pub(super) const PORT: u16 = 2222;
/// What ssh itself leaves when it does not come through.
const NO_CONNECTION: i32 = 255;

pub(super) struct Shell {
    pub(super) address: Ipv4Addr,
    pub(super) key: PathBuf,
}

/// What a command has printed, and its end.
#[derive(Debug, Clone)]
pub struct Said {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Said {
    /// Its output, where it ended well.
    pub fn success(self) -> Result<String> {
        ensure!(self.status.success(), "{}: {}{}", self.status, self.stdout, self.stderr);
        Ok(self.stdout)
    }
}

impl Shell {
    pub(super) async fn run(&self, script: &str, deadline: Duration) -> Result<Said> {
        self.run_with(Stdio::null(), script, deadline).await
    }

    /// A script that reads this.
    pub(super) async fn run_with(&self, input: Stdio, script: &str, deadline: Duration) -> Result<Said> {
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
        let output = tokio::time::timeout(deadline, ssh.output()).await;
        let output = output.with_context(|| format!("{script:?} still runs after {deadline:?}"))??;
        ensure!(output.status.code() != Some(NO_CONNECTION), "no connection to the machine by SSH");
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok(Said { status: output.status, stdout: text(output.stdout), stderr: text(output.stderr) })
    }
}
