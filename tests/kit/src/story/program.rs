//! The product's binary as its users run it: arguments, environment, exit code, output; nothing of our environment.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use tokio::process::Command;

use crate::child::{self, AtExit};

/// `svc` with the environment that its applets get here.
#[derive(Debug, Clone)]
pub struct Program {
    path: PathBuf,
    env: Vec<(String, String)>,
}

/// How a run ended.
#[derive(Debug)]
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    what: String,
}

impl Program {
    pub fn new(path: &Path, env: Vec<(String, String)>) -> Self {
        Self { path: path.to_owned(), env }
    }

    pub fn env(&self) -> &[(String, String)] {
        &self.env
    }

    /// A command of this program, not yet started.
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

    /// Runs an applet to its end.
    pub async fn run<A: AsRef<OsStr>>(&self, applet: &str, args: &[A], deadline: Duration) -> Result<Run> {
        let words = args.iter().map(|arg| arg.as_ref().to_string_lossy().into_owned());
        let what = std::iter::once(applet.to_owned()).chain(words).collect::<Vec<_>>().join(" ");
        let mut command = self.command(applet);
        command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
        let started = command.spawn().with_context(|| format!("start {what}"))?;
        let pid = started.id();
        pid.inspect(|pid| child::kill_on_exit(*pid, AtExit::Kill));
        let end = tokio::time::timeout(deadline, started.wait_with_output()).await;
        pid.inspect(|pid| child::unregister(*pid));
        let Ok(output) = end else { bail!("{what}: not done after {} s", deadline.as_secs()) };
        let output = output?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok(Run { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr), what })
    }
}

impl Run {
    /// The run, if it ended well.
    pub fn success(self) -> Result<Self> {
        if self.code == Some(0) {
            return Ok(self);
        }
        let end = self.code.map_or_else(|| "killed".to_owned(), |code| format!("exit {code}"));
        bail!("`{}`: {end}: {}", self.what, self.stderr.trim());
    }

    /// What it printed, as JSON.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_str(&self.stdout)
            .with_context(|| format!("`{}` printed no such JSON: {}", self.what, self.stdout))
    }
}
