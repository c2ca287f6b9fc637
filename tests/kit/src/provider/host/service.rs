//! A service run by the init process, like systemd's `Type=notify` with `Restart=on-failure`.
//!
//! A service is ready only after it sends `READY=1`. Exit codes 0, 77 and 78 are final; any other exit triggers a
//! limited number of restarts. The product's units do not limit restarts, and some restart after 0 or 77.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use tokio::net::UnixDatagram;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::session::{OutputDestination, PowerSession, RunningProcess};

const RESTART_DELAY: Duration = Duration::from_millis(100);
/// systemd's default limit: five starts in ten seconds.
const START_LIMIT: (usize, Duration) = (5, Duration::from_secs(10));
/// `RestartPreventExitStatus=78`: a restart does not fix an invalid configuration.
const EX_CONFIG: i32 = 78;
/// The machine was replaced or deleted.
const EX_NOPERM: i32 = 77;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ServiceState {
    Starting,
    Ready,
    /// Ended permanently, with the reason.
    Ended(String),
}

pub(super) struct Service {
    pub(super) state: watch::Receiver<ServiceState>,
    /// Cancelled to stop the service like `systemctl stop`: with SIGTERM, and without a restart.
    pub(super) stop: CancellationToken,
}

/// A service's definition.
#[derive(Clone)]
pub(super) struct ServiceUnit {
    pub(super) name: &'static str,
    pub(super) command_line: Vec<PathBuf>,
    /// The service is not started if this file is missing.
    pub(super) condition: Option<PathBuf>,
    pub(super) ready_timeout: Duration,
    pub(super) stop_timeout: Duration,
}

enum RunEnd {
    Exit(std::process::ExitStatus),
    NotReady,
    /// Stopped, or powered off.
    Stopped,
}

impl Service {
    /// Starts the service unless it is already running, and supervises it in the background.
    pub(super) fn start(session: &Arc<PowerSession>, unit: ServiceUnit) -> Arc<Self> {
        let mut services = session.services();
        if let Some(service) = services.get(unit.name).filter(|service| !service.has_ended()) {
            return Arc::clone(service);
        }
        let (state_sender, state) = watch::channel(ServiceState::Starting);
        let service = Arc::new(Self { state, stop: session.stopping.child_token() });
        services.insert(unit.name.to_owned(), Arc::clone(&service));
        let (task_session, stop) = (Arc::clone(session), service.stop.clone());
        session.tasks.spawn_on(
            async move {
                let reason = match supervise(&task_session, &unit, &stop, &state_sender).await {
                    Ok(reason) => reason,
                    Err(error) => format!("{error:#}"),
                };
                task_session.disk.append_log(unit.name, format!("[init] {reason}\n").as_bytes()).ok();
                state_sender.send_replace(ServiceState::Ended(reason));
            },
            crate::runtime::handle(),
        );
        service
    }

    /// Waits until the service is ready; fails if it ends first.
    pub(super) async fn wait_until_ready(&self) -> Result<()> {
        let mut state = self.state.clone();
        let state =
            state.wait_for(|state| *state != ServiceState::Starting).await.context("supervision ended")?;
        match &*state {
            ServiceState::Ended(reason) => bail!("{reason}"),
            ServiceState::Ready | ServiceState::Starting => Ok(()),
        }
    }

    pub(super) async fn wait_until_ended(&self) {
        let mut state = self.state.clone();
        state.wait_for(|state| matches!(state, ServiceState::Ended(_))).await.ok();
    }

    fn has_ended(&self) -> bool {
        matches!(*self.state.borrow(), ServiceState::Ended(_))
    }
}

/// Starts and restarts the service until it has ended permanently, and returns the reason.
async fn supervise(
    session: &PowerSession,
    unit: &ServiceUnit,
    stop: &CancellationToken,
    state_sender: &watch::Sender<ServiceState>,
) -> Result<String> {
    let mut starts = VecDeque::new();
    loop {
        if unit.condition.as_ref().is_some_and(|path| !path.exists()) {
            return Ok(format!("{} is not started: its condition is not met", unit.name));
        }
        let (limit, window) = START_LIMIT;
        starts.push_back(Instant::now());
        starts.retain(|start: &Instant| start.elapsed() < window);
        let cause = match run_once(session, unit, stop, state_sender).await? {
            RunEnd::Stopped => return Ok(format!("{} was stopped", unit.name)),
            RunEnd::Exit(status) if matches!(status.code(), Some(0 | EX_CONFIG | EX_NOPERM)) => {
                return Ok(format!("{} ended ({status}) and is not restarted", unit.name));
            }
            RunEnd::Exit(status) => status.to_string(),
            RunEnd::NotReady => format!("not ready within {:?}", unit.ready_timeout),
        };
        if starts.len() >= limit {
            return Ok(format!(
                "{} failed {limit} times within {window:?}; last failure: {cause}",
                unit.name
            ));
        }
        state_sender.send_replace(ServiceState::Starting);
        session.disk.append_log(unit.name, format!("[init] {cause}; restarting\n").as_bytes())?;
        tokio::select! {
            () = tokio::time::sleep(RESTART_DELAY) => {}
            () = stop.cancelled() => {}
            () = session.off.cancelled() => {}
        }
        if stop.is_cancelled() || session.off.is_cancelled() {
            return Ok(format!("{} was stopped", unit.name));
        }
    }
}

async fn run_once(
    session: &PowerSession,
    unit: &ServiceUnit,
    stop: &CancellationToken,
    state_sender: &watch::Sender<ServiceState>,
) -> Result<RunEnd> {
    let path = session.run_dir().join(format!("{}.notify", unit.name));
    std::fs::remove_file(&path).ok();
    let socket = UnixDatagram::bind(&path).context("cannot bind the notify socket")?;
    let env = [("NOTIFY_SOCKET".to_owned(), path.display().to_string())];
    let mut running = session.spawn(unit.name, &unit.command_line, &[], &env, OutputDestination::Log)?;

    let ready_by = tokio::time::sleep(unit.ready_timeout);
    tokio::pin!(ready_by);
    let mut is_ready = false;
    let mut message = [0_u8; 4096];
    loop {
        tokio::select! {
            biased;
            () = session.off.cancelled() => {
                session.reap(&mut running).await?;
                return Ok(RunEnd::Stopped);
            }
            received = socket.recv(&mut message) => {
                let text = String::from_utf8_lossy(&message[..received?]).into_owned();
                if text.lines().any(|line| line == "READY=1") {
                    is_ready = true;
                    state_sender.send_replace(ServiceState::Ready);
                }
            }
            status = running.child.wait() => {
                let status = status?;
                session.reap(&mut running).await?;
                return Ok(RunEnd::Exit(status));
            }
            () = stop.cancelled() => {
                terminate(session, unit, &mut running).await?;
                return Ok(RunEnd::Stopped);
            }
            () = &mut ready_by, if !is_ready => {
                terminate(session, unit, &mut running).await?;
                return Ok(RunEnd::NotReady);
            }
        }
    }
}

/// Sends SIGTERM to the process, and SIGKILL to its group after the timeout.
async fn terminate(session: &PowerSession, unit: &ServiceUnit, running: &mut RunningProcess) -> Result<()> {
    kill(running.group, Signal::SIGTERM).ok();
    if tokio::time::timeout(unit.stop_timeout, running.child.wait()).await.is_err() {
        nix::sys::signal::killpg(running.group, Signal::SIGKILL).ok();
    }
    session.reap(running).await?;
    Ok(())
}
