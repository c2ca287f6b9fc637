//! The platform as a child process.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::Child;

use super::program::Program;
use crate::child::{self, AtExit};

const START_TIMEOUT: Duration = Duration::from_secs(60);
const DRAIN_TIMEOUT: Duration = Duration::from_secs(20);

pub struct Platform {
    process: Child,
    pid: u32,
    pub router: SocketAddr,
    /// `https`, or `http` if the router has no certificate.
    pub scheme: String,
}

impl Platform {
    /// Starts `svc-platform` and waits until it prints both listeners' addresses.
    pub async fn start(program: &Program, log: &Path) -> Result<Self> {
        let out = File::create(log)?;
        let mut command = program.command("svc-platform");
        // Ctrl-C on a terminal must reach only this process, which then stops the platform.
        command.process_group(0).stdout(out.try_clone()?).stderr(out);
        let mut process = command.spawn().context("cannot start svc-platform")?;
        let pid = process.id().context("svc-platform has already exited")?;
        child::kill_on_exit(pid, AtExit::Kill);
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            let output = std::fs::read_to_string(log)?;
            let has_api = output.lines().any(|line| line.starts_with("listening api "));
            let router =
                output.lines().find_map(|line| line.strip_prefix("listening router ")?.split_once("://"));
            if let (true, Some((scheme, router))) = (has_api, router) {
                let scheme = scheme.to_owned();
                let router =
                    router.trim().parse().with_context(|| format!("invalid router address {router}"))?;
                return Ok(Self { process, pid, router, scheme });
            }
            if let Some(status) = process.try_wait()? {
                child::unregister(pid);
                bail!("svc-platform exited during startup ({status}):\n{output}");
            }
            ensure!(
                Instant::now() < deadline,
                "svc-platform did not listen within {START_TIMEOUT:?}:\n{output}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits for an unexpected exit.
    pub async fn wait(&mut self) -> Result<ExitStatus> {
        Ok(self.process.wait().await?)
    }

    /// Sends SIGTERM and waits for the drain.
    pub async fn stop(mut self) -> Result<()> {
        if let Ok(pid) = i32::try_from(self.pid) {
            kill(Pid::from_raw(pid), Signal::SIGTERM)?;
        }
        let status = tokio::time::timeout(DRAIN_TIMEOUT, self.process.wait())
            .await
            .context("svc-platform is still running after SIGTERM")??;
        ensure!(status.success(), "svc-platform exited with {status}");
        Ok(())
    }
}

impl Drop for Platform {
    fn drop(&mut self) {
        // If `stop` was not called, this kills the process, and tokio reaps it.
        self.process.start_kill().ok();
        child::unregister(self.pid);
    }
}
