//! A host's processes while its power is on. None of them outlives the session.
//!
//! Every child leads a process group. Invariant: after [`PowerSession::cut_power`], none of the session's processes is
//! running or can start.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::disk::Disk;
use super::service::Service;
use super::systemctl;
use crate::child::{self, AtExit};
use crate::pg::PgServer;

pub(super) struct PowerSession {
    pub(super) disk: Disk,
    /// Cancelled at power-off: nothing is started afterwards.
    pub(super) off: CancellationToken,
    /// Cancelled at an orderly shutdown: nothing is restarted afterwards.
    pub(super) stopping: CancellationToken,
    pub(super) tasks: TaskTracker,
    /// The environment for all processes, without a unit's additions.
    env: Vec<(String, String)>,
    /// The directory for the notify sockets, and for the `systemctl` script and its requests. Its path is short because
    /// a Unix socket path is limited to 107 bytes.
    run_dir: TempDir,
    groups: Mutex<BTreeSet<i32>>,
    services: Mutex<BTreeMap<String, Arc<Service>>>,
    database: Mutex<Option<Arc<PgServer>>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OutputDestination {
    Log,
    /// The caller reads the output, and logs it.
    Pipe,
}

/// A process that leads a group.
pub(super) struct RunningProcess {
    pub(super) child: Child,
    pub(super) group: Pid,
}

impl PowerSession {
    pub(super) fn new(disk: Disk, env: Vec<(String, String)>) -> Result<Self> {
        let run_dir = tempfile::Builder::new().prefix("kit-run-").tempdir_in("/tmp")?;
        child::remove_on_exit(run_dir.path());
        let systemctl = systemctl::install(run_dir.path())?;
        let mut env = env;
        env.push(("SVC_SYSTEMCTL".to_owned(), systemctl.display().to_string()));
        Ok(Self {
            disk,
            off: CancellationToken::new(),
            stopping: CancellationToken::new(),
            tasks: TaskTracker::new(),
            env,
            run_dir,
            groups: Mutex::default(),
            services: Mutex::default(),
            database: Mutex::default(),
        })
    }

    /// Starts a process for `unit` as systemd would: in its own group, and with only the session's environment and
    /// `extra_env`.
    pub(super) fn spawn(
        &self,
        unit: &str,
        command_line: &[PathBuf],
        args: &[String],
        extra_env: &[(String, String)],
        output: OutputDestination,
    ) -> Result<RunningProcess> {
        let (program, first_args) = command_line.split_first().context("the command line is empty")?;
        let mut command = Command::new(program);
        command.args(first_args).args(args).current_dir(&self.disk.root).process_group(0);
        command.env_clear().envs(self.env.iter().cloned()).envs(extra_env.iter().cloned());
        command.stdin(Stdio::null()).kill_on_drop(true);
        match output {
            OutputDestination::Log => {
                let log = OpenOptions::new().create(true).append(true).open(self.disk.log_path(unit)?)?;
                command.stdout(log.try_clone()?).stderr(log);
            }
            OutputDestination::Pipe => {
                command.stdout(Stdio::piped()).stderr(Stdio::piped());
            }
        }
        // Hold the lock, so that a concurrent power cut either kills the group or prevents the start.
        let mut groups = self.groups();
        ensure!(!self.off.is_cancelled(), "the host is off");
        let child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let pid = child.id().context("the process has already been reaped")?;
        child::kill_on_exit(pid, AtExit::KillGroup);
        let group = i32::try_from(pid).context("the pid does not fit in an i32")?;
        groups.insert(group);
        Ok(RunningProcess { child, group: Pid::from_raw(group) })
    }

    /// Waits for a process; kills the rest of its group, as systemd does with a unit's cgroup.
    pub(super) async fn reap(&self, running: &mut RunningProcess) -> Result<std::process::ExitStatus> {
        let status = running.child.wait().await;
        let mut groups = self.groups();
        if groups.remove(&running.group.as_raw()) {
            killpg(running.group, Signal::SIGKILL).ok();
        }
        child::unregister(running.group.as_raw().unsigned_abs());
        Ok(status?)
    }

    /// Cuts the power: all processes are killed before this returns.
    pub(super) async fn cut_power(&self) {
        self.kill_processes();
        let database = self.take_database();
        if let Some(database) = database {
            database.kill9().await.ok();
        }
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Performs the part of a power cut that does not wait.
    pub(super) fn kill_processes(&self) {
        self.off.cancel();
        for group in self.groups().iter() {
            killpg(Pid::from_raw(*group), Signal::SIGKILL).ok();
        }
    }

    pub(super) fn set_database(&self, server: PgServer) {
        *self.database.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(server));
    }

    pub(super) fn take_database(&self) -> Option<Arc<PgServer>> {
        self.database.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(super) fn database_url(&self) -> Option<String> {
        let database = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        database.as_ref().map(|server| server.url("svc"))
    }

    pub(super) fn services(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Service>>> {
        self.services.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn run_dir(&self) -> &Path {
        self.run_dir.path()
    }

    fn groups(&self) -> MutexGuard<'_, BTreeSet<i32>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
