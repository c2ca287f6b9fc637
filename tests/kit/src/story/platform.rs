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

const START: Duration = Duration::from_secs(60);
const DRAIN: Duration = Duration::from_secs(20);

pub struct Platform {
    process: Child,
    pid: u32,
    pub router: SocketAddr,
    /// `https`, or `http` where the router has no certificate.
    pub scheme: String,
}

impl Platform {
    /// Starts `svc-platform` and waits until it says where both of its listeners are.
    pub async fn start(program: &Program, log: &Path) -> Result<Self> {
        let out = File::create(log)?;
        let mut command = program.command("svc-platform");
        // Ctrl-C on a terminal is for us alone, who end the platform in order.
        command.process_group(0).stdout(out.try_clone()?).stderr(out);
        let mut process = command.spawn().context("start svc-platform")?;
        let pid = process.id().context("svc-platform has ended already")?;
        child::kill_on_exit(pid, AtExit::Kill);
        let deadline = Instant::now() + START;
        loop {
            let said = std::fs::read_to_string(log)?;
            let api = said.lines().any(|line| line.starts_with("listening api "));
            let router =
                said.lines().find_map(|line| line.strip_prefix("listening router ")?.split_once("://"));
            if let (true, Some((scheme, router))) = (api, router) {
                let scheme = scheme.to_owned();
                let router =
                    router.trim().parse().with_context(|| format!("the router's address {router}"))?;
                return Ok(Self { process, pid, router, scheme });
            }
            if let Some(status) = process.try_wait()? {
                child::unregister(pid);
                bail!("svc-platform ended at its start ({status}):\n{said}");
            }
            ensure!(Instant::now() < deadline, "svc-platform does not listen after {START:?}:\n{said}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits until it ends by itself, which it should not.
    pub async fn ended(&mut self) -> Result<ExitStatus> {
        Ok(self.process.wait().await?)
    }

    /// SIGTERM; what is under way is finished first.
    pub async fn stop(mut self) -> Result<()> {
        if let Ok(pid) = i32::try_from(self.pid) {
            kill(Pid::from_raw(pid), Signal::SIGTERM)?;
        }
        let status = tokio::time::timeout(DRAIN, self.process.wait()).await.context("still running")??;
        ensure!(status.success(), "it ended with {status}");
        Ok(())
    }
}

impl Drop for Platform {
    fn drop(&mut self) {
        // Killed and waited for by tokio (`kill_on_drop`), where `stop` has not done so.
        self.process.start_kill().ok();
        child::unregister(self.pid);
    }
}
