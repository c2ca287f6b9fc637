//! The machine's service manager: a trait, and its implementation with `systemctl`.
//!
//! Each call has a timeout. `SVC_SYSTEMCTL` may name another program that accepts the same arguments, for example under
//! a root directory without a service manager.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use async_trait::async_trait;
use tokio::process::Command;

use crate::system::layout::Layout;
use crate::system::systemd;
use crate::system::vars;
use svc_base::config::Env;
use svc_base::error_chain::format_chain;

const RELOAD_TIMEOUT: Duration = Duration::from_secs(60);
/// For calls that do not wait for a unit.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
/// The gateway's unit allows 60 s for stopping and 90 s for starting.
const RESTART_TIMEOUT: Duration = Duration::from_secs(150);

#[derive(Debug, thiserror::Error)]
pub enum ServiceManagerError {
    #[error("no service manager found: /run/systemd/system is missing and SVC_SYSTEMCTL is not set")]
    Missing,
    #[error("cannot start {program}")]
    Start {
        program: String,
        #[source]
        source: std::io::Error,
    },
    #[error("{command} did not finish within {} s", .timeout.as_secs())]
    Timeout { command: String, timeout: Duration },
    #[error("{command} failed: {status}: {stderr}")]
    Failed { command: String, status: std::process::ExitStatus, stderr: String },
}

/// A unit's state as the service manager reports it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UnitState {
    /// `active`, `activating`, `failed`, …
    pub active: String,
    /// The result of its last run: `exit-code`, `timeout`, …
    pub result: String,
    /// Number of automatic restarts since the last [`ServiceManager::restart`] of the unit.
    pub restarts: u32,
}

#[async_trait]
pub trait ServiceManager: Send + Sync {
    /// Applies the user, directory and unit definitions in `/etc`.
    async fn reload(&self) -> Result<(), ServiceManagerError>;
    /// Starts the unit and its dependencies, without waiting. Units that are already running are unaffected.
    async fn start(&self, unit: &str) -> Result<(), ServiceManagerError>;
    /// Resets the unit's count of automatic restarts, restarts the unit and waits until it is up or has failed.
    async fn restart(&self, unit: &str) -> Result<(), ServiceManagerError>;
    /// Restarts the unit if it is running or starting, without waiting.
    async fn try_restart(&self, unit: &str) -> Result<(), ServiceManagerError>;
    /// Stops the unit, or all units that match a pattern, and waits until they have ended.
    async fn stop(&self, unit: &str) -> Result<(), ServiceManagerError>;
    async fn state(&self, unit: &str) -> Result<UnitState, ServiceManagerError>;
}

/// The implementation that calls `systemctl`.
pub struct Systemctl {
    program: PathBuf,
    /// Programs that create users and directories, with their arguments.
    setup_commands: Vec<(&'static str, Vec<String>)>,
}

impl Systemctl {
    /// Finds this machine's service manager, if any. Root takes the program only from its own environment, never
    /// from a file that the gateway can write.
    pub fn find(layout: &Layout) -> Option<Self> {
        Self::find_in_env(&mut Env::from_process(), layout)
    }

    fn find_in_env(env: &mut Env, layout: &Layout) -> Option<Self> {
        if let Some(program) = env.text(&vars::SVC_SYSTEMCTL).map(PathBuf::from) {
            return Some(Self { program, setup_commands: Vec::new() });
        }
        if !systemd::is_running(layout) {
            return None;
        }
        let conf = |dir: &str| layout.root().join("etc").join(dir).join("svc.conf").display().to_string();
        let setup_commands = vec![
            ("systemd-sysusers", vec![conf("sysusers.d")]),
            ("systemd-tmpfiles", vec!["--create".to_owned(), conf("tmpfiles.d")]),
        ];
        Some(Self { program: "systemctl".into(), setup_commands })
    }

    async fn run_systemctl(&self, args: &[&str], timeout: Duration) -> Result<String, ServiceManagerError> {
        run(&self.program.display().to_string(), args, timeout).await
    }
}

async fn run(program: &str, args: &[&str], timeout: Duration) -> Result<String, ServiceManagerError> {
    let command = format!("{program} {}", args.join(" "));
    let child = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|source| ServiceManagerError::Start { program: program.to_owned(), source })?;
    let Ok(output) = tokio::time::timeout(timeout, child.wait_with_output()).await else {
        return Err(ServiceManagerError::Timeout { command, timeout });
    };
    let output =
        output.map_err(|source| ServiceManagerError::Start { program: program.to_owned(), source })?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let last = stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        return Err(ServiceManagerError::Failed {
            command,
            status: output.status,
            stderr: last.trim().to_owned(),
        });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[async_trait]
impl ServiceManager for Systemctl {
    async fn reload(&self) -> Result<(), ServiceManagerError> {
        for (program, args) in &self.setup_commands {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            run(program, &args, RELOAD_TIMEOUT).await?;
        }
        self.run_systemctl(&["daemon-reload"], RELOAD_TIMEOUT).await.map(drop)
    }

    async fn start(&self, unit: &str) -> Result<(), ServiceManagerError> {
        self.run_systemctl(&["start", "--no-block", unit], COMMAND_TIMEOUT).await.map(drop)
    }

    async fn restart(&self, unit: &str) -> Result<(), ServiceManagerError> {
        // A restart in systemd 252 does not reset the count if the unit is waiting for an automatic restart, and a unit
        // that crashes at startup is almost always waiting. A unit that is not loaded cannot be reset, but has no count
        // either.
        if let Err(error) = self.run_systemctl(&["reset-failed", unit], COMMAND_TIMEOUT).await {
            tracing::debug!(error = %format_chain(&error), "could not reset a unit's restart count");
        }
        self.run_systemctl(&["restart", unit], RESTART_TIMEOUT).await.map(drop)
    }

    async fn try_restart(&self, unit: &str) -> Result<(), ServiceManagerError> {
        self.run_systemctl(&["try-restart", "--no-block", unit], COMMAND_TIMEOUT).await.map(drop)
    }

    async fn stop(&self, unit: &str) -> Result<(), ServiceManagerError> {
        self.run_systemctl(&["stop", unit], RESTART_TIMEOUT).await.map(drop)
    }

    async fn state(&self, unit: &str) -> Result<UnitState, ServiceManagerError> {
        let output = self
            .run_systemctl(&["show", "--property=ActiveState,Result,NRestarts", unit], COMMAND_TIMEOUT)
            .await?;
        Ok(parse_state(&output))
    }
}

fn parse_state(output: &str) -> UnitState {
    let pairs: BTreeMap<&str, &str> = output.lines().filter_map(|line| line.split_once('=')).collect();
    let text = |name| pairs.get(name).copied().unwrap_or_default().to_owned();
    UnitState {
        active: text("ActiveState"),
        result: text("Result"),
        restarts: text("NRestarts").parse().unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn fake_systemctl(script: &str) -> (tempfile::TempDir, Systemctl) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("systemctl");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let services = Systemctl { program: path, setup_commands: Vec::new() };
        (dir, services)
    }

    #[tokio::test]
    async fn state_parses_systemctl_output() {
        let (_dir, services) =
            fake_systemctl("printf 'Result=exit-code\\nNRestarts=3\\nActiveState=activating\\n'");
        let state = services.state("svc-gateway.service").await.unwrap();
        let expected = UnitState { active: "activating".into(), result: "exit-code".into(), restarts: 3 };
        assert_eq!(state, expected);
    }

    #[tokio::test]
    async fn error_quotes_last_stderr_line() {
        let (_dir, services) = fake_systemctl("echo first >&2; echo 'the last' >&2; exit 5");
        let error = services.restart("svc-gateway.service").await.unwrap_err().to_string();
        assert!(error.contains("restart svc-gateway.service") && error.ends_with("the last"), "{error}");
    }

    #[tokio::test]
    async fn restart_resets_count_first_and_ignores_reset_failure() {
        let (dir, services) = fake_systemctl("echo \"$*\" >>\"$0.calls\"; [ \"$1\" != reset-failed ]");
        services.restart("svc-gateway.service").await.unwrap();
        let calls = std::fs::read_to_string(dir.path().join("systemctl.calls")).unwrap();
        assert_eq!(calls, "reset-failed svc-gateway.service\nrestart svc-gateway.service\n");
    }

    #[test]
    fn find_requires_systemd_unless_program_is_set() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        assert!(Systemctl::find_in_env(&mut Env::default(), &layout).is_none());
        std::fs::create_dir_all(dir.path().join("run/systemd/system")).unwrap();
        assert_eq!(Systemctl::find_in_env(&mut Env::default(), &layout).unwrap().setup_commands.len(), 2);
        let mut env = Env::from_pairs([("SVC_SYSTEMCTL", "/x")]);
        assert!(Systemctl::find_in_env(&mut env, &layout).unwrap().setup_commands.is_empty());
    }
}
