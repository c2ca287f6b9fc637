//! A simulated host: a persistent disk and, while its power is on, a session with its processes.

use std::net::Ipv4Addr;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::super::inventory::ServerRecord;
use super::HostSettings;
use super::boot;
use super::disk::Disk;
use super::session::PowerSession;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "state")]
pub enum BootState {
    Off,
    Booting,
    Up,
    Failed { stage: String, message: String },
}

pub(in super::super) struct ProcessHost {
    pub(in super::super) name: String,
    pub(in super::super) ipv4: Ipv4Addr,
    disk: Disk,
    user_data: String,
    https_port: u16,
    settings: Arc<HostSettings>,
    closed: Arc<AtomicBool>,
    next_start_env: Mutex<Vec<(String, String)>>,
    session: Mutex<Option<Arc<PowerSession>>>,
    state: watch::Sender<BootState>,
}

impl ProcessHost {
    pub(super) fn new(
        record: &ServerRecord,
        root: PathBuf,
        https_port: u16,
        settings: Arc<HostSettings>,
        closed: Arc<AtomicBool>,
    ) -> Self {
        Self {
            name: record.name.clone(),
            ipv4: record.ipv4,
            disk: Disk { root },
            user_data: record.user_data.clone(),
            https_port,
            settings,
            closed,
            next_start_env: Mutex::default(),
            session: Mutex::default(),
            state: watch::channel(BootState::Off).0,
        }
    }

    pub(in super::super) fn disk(&self) -> PathBuf {
        self.disk.root.clone()
    }

    pub(in super::super) fn boot_state(&self) -> BootState {
        self.state.borrow().clone()
    }

    /// Sets extra environment variables for all processes in the next session only.
    pub(in super::super) fn set_next_start_env(&self, env: Vec<(String, String)>) {
        *self.next_start_env.lock().unwrap_or_else(PoisonError::into_inner) = env;
    }

    /// Powers on; the boot runs in the background. Does nothing if the host is already on.
    pub(in super::super) fn boot(self: &Arc<Self>) {
        let Some(session) = self.power_on().unwrap_or_else(|error| {
            self.set_failed("power", &error);
            None
        }) else {
            return;
        };
        self.state.send_replace(BootState::Booting);
        let host = Arc::clone(self);
        let tasks = session.tasks.clone();
        tasks.spawn_on(
            async move {
                let result = boot::boot(&session, &host.settings, &host.user_data).await;
                // A terminated session must not change the host's state.
                if session.off.is_cancelled() || session.stopping.is_cancelled() {
                    return;
                }
                match result {
                    Ok(()) => {
                        host.state.send_replace(BootState::Up);
                    }
                    Err(failure) => host.set_failed(failure.stage, &failure.error),
                }
            },
            crate::runtime::handle(),
        );
    }

    /// Waits until the boot ends. Fails if the boot failed, the host is off, or the timeout expires.
    pub(in super::super) async fn wait_until_booted(&self, timeout: Duration) -> Result<()> {
        let mut state = self.state.subscribe();
        let booted = tokio::time::timeout(timeout, state.wait_for(|state| *state != BootState::Booting));
        let state =
            booted.await.with_context(|| format!("{} is still booting after {timeout:?}", self.name))?;
        match &*state.context("the host was dropped")? {
            BootState::Up => Ok(()),
            BootState::Failed { stage, message } => bail!("{}: boot failed at {stage}: {message}", self.name),
            BootState::Off | BootState::Booting => bail!("{} is off", self.name),
        }
    }

    /// Cuts the power, which kills all processes.
    pub(in super::super) async fn cut_power(&self) {
        let session = self.session().take();
        if let Some(session) = session {
            session.cut_power().await;
        }
        self.state.send_replace(BootState::Off);
    }

    /// Shuts down in order: services first, then the database.
    pub(in super::super) async fn shut_down(&self) {
        let session = self.session().clone();
        if let Some(session) = session {
            session.stopping.cancel();
            let services: Vec<_> = session.services().values().cloned().collect();
            for service in services {
                service.wait_until_ended().await;
            }
            let database = session.take_database();
            if let Some(database) = database {
                database.stop().await.ok();
            }
        }
        self.cut_power().await;
    }

    /// Performs the part of [`Self::cut_power`] that is possible in `Drop`.
    pub(super) fn kill_processes(&self) {
        if let Some(session) = self.session().take() {
            session.kill_processes();
            drop(session.take_database());
        }
    }

    /// Runs a unit like `systemctl start`: a oneshot to completion, a service until it is ready.
    pub(in super::super) async fn run_unit(
        &self,
        unit: &str,
        args: &[String],
        env: &[(String, String)],
    ) -> Result<Output> {
        let session = self.current_session()?;
        let Some(service) = boot::SERVICES.into_iter().find(|service| *service == unit) else {
            let command_line = boot::command_line(&session, &self.settings, unit);
            return session.run_oneshot(unit, &command_line, args, env, self.settings.unit_timeout).await;
        };
        ensure!(
            args.is_empty() && env.is_empty(),
            "{unit} is a service: arguments and environment are not supported"
        );
        let (exit_code, message) =
            match boot::start_service(&session, &self.settings, service).wait_until_ready().await {
                Ok(()) => (0, String::new()),
                Err(error) => (1, format!("{error:#}\n")),
            };
        let status = ExitStatus::from_raw(exit_code << 8);
        Ok(Output { status, stdout: Vec::new(), stderr: message.into_bytes() })
    }

    /// Like `systemctl stop`: sends SIGTERM, waits, and does not restart.
    pub(in super::super) async fn stop_service(&self, name: &str) -> Result<()> {
        let service = self.current_session()?.services().get(name).cloned();
        let service = service.with_context(|| format!("{name} is not running on {}", self.name))?;
        service.stop.cancel();
        service.wait_until_ended().await;
        Ok(())
    }

    /// Starts only PostgreSQL if the host is off. Returns the `svc` database's URL.
    pub(in super::super) async fn start_database_only(&self) -> Result<String> {
        ensure!(self.disk.exists(), "{} has never been started", self.name);
        if let Some(session) = self.power_on()? {
            let started = boot::start_database(&session, &self.settings).await;
            if let Err(error) = started {
                self.cut_power().await;
                return Err(error);
            }
        }
        self.current_session()?.database_url().context("the host is on, but its database is not running")
    }

    /// Creates a session; returns `None` if there already is one.
    fn power_on(&self) -> Result<Option<Arc<PowerSession>>> {
        let mut current = self.session();
        ensure!(!self.closed.load(Ordering::SeqCst), "the simulator is closed");
        if current.is_some() {
            return Ok(None);
        }
        std::fs::create_dir_all(&self.disk.root)?;
        let session = Arc::new(PowerSession::new(self.disk.clone(), self.take_env())?);
        *current = Some(Arc::clone(&session));
        Ok(Some(session))
    }

    /// Returns the environment for a session's processes, which inherit nothing else from this process. Clears
    /// `next_start_env`.
    fn take_env(&self) -> Vec<(String, String)> {
        let pair = |name: &str, value: String| (name.to_owned(), value);
        let mut env = vec![
            pair("SVC_ROOT", self.disk.root.display().to_string()),
            pair("GATEWAY_LISTEN", format!("{}:{}", self.ipv4, self.https_port)),
            pair("SVC_PG_BIN_DIR", self.settings.pg.dir().display().to_string()),
        ];
        for name in ["PATH", "RUST_LOG", "RUST_BACKTRACE"] {
            env.extend(std::env::var(name).ok().map(|value| pair(name, value)));
        }
        env.extend(self.settings.extra_env.iter().cloned());
        env.append(&mut self.next_start_env.lock().unwrap_or_else(PoisonError::into_inner));
        env
    }

    fn current_session(&self) -> Result<Arc<PowerSession>> {
        self.session().clone().with_context(|| format!("{} is off", self.name))
    }

    fn set_failed(&self, stage: &str, error: &anyhow::Error) {
        let failed = BootState::Failed { stage: stage.to_owned(), message: format!("{error:#}") };
        self.state.send_replace(failed);
    }

    fn session(&self) -> MutexGuard<'_, Option<Arc<PowerSession>>> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
