//! Runs the product's binary as its users do, with arguments and an environment, and captures its exit code and output.
//! The binary inherits only `PATH`, `RUST_LOG` and `RUST_BACKTRACE` from this process's environment.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use tokio::process::Command;

use crate::child::{self, AtExit};

/// `svc` with its applets' environment.
#[derive(Debug, Clone)]
pub struct Program {
    path: PathBuf,
    env: Vec<(String, String)>,
}

/// A command's result.
#[derive(Debug)]
pub struct CommandOutput {
    pub exit_code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    command_line: String,
}

impl Program {
    pub fn new(path: &Path, env: Vec<(String, String)>) -> Self {
        Self { path: path.to_owned(), env }
    }

    pub fn env(&self) -> &[(String, String)] {
        &self.env
    }

    /// Builds a command for this program without starting it.
    pub fn command(&self, applet: &str) -> Command {
        let mut command = Command::new(&self.path);
        command.arg(applet).env_clear().envs(self.env.iter().map(|(name, value)| (name, value)));
        for name in ["PATH", "RUST_LOG", "RUST_BACKTRACE"] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        command.stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// Runs an applet to completion.
    pub async fn run<A: AsRef<OsStr>>(
        &self,
        applet: &str,
        args: &[A],
        timeout: Duration,
    ) -> Result<CommandOutput> {
        let arg_texts = args.iter().map(|arg| arg.as_ref().to_string_lossy().into_owned());
        let command_line = std::iter::once(applet.to_owned()).chain(arg_texts).collect::<Vec<_>>().join(" ");
        let mut command = self.command(applet);
        command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
        let started = command.spawn().with_context(|| format!("cannot start {command_line}"))?;
        let pid = started.id();
        pid.inspect(|pid| child::kill_on_exit(*pid, AtExit::Kill));
        let result = tokio::time::timeout(timeout, started.wait_with_output()).await;
        pid.inspect(|pid| child::unregister(*pid));
        let Ok(output) = result else { bail!("{command_line}: timed out after {} s", timeout.as_secs()) };
        let output = output?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok(CommandOutput {
            exit_code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
            command_line,
        })
    }
}

impl CommandOutput {
    /// Returns the output if the exit code is 0.
    pub fn ensure_success(self) -> Result<Self> {
        if self.exit_code == Some(0) {
            return Ok(self);
        }
        let status =
            self.exit_code.map_or_else(|| "killed".to_owned(), |exit_code| format!("exit {exit_code}"));
        bail!("`{}`: {status}: {}", self.command_line, self.stderr.trim());
    }

    /// Parses the standard output as JSON.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_str(&self.stdout)
            .with_context(|| format!("`{}` printed unexpected JSON: {}", self.command_line, self.stdout))
    }
}
