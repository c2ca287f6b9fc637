//! A service of the init, as systemd's `Type=notify` with `Restart=on-failure`.
//!
//! Ready is only what says `READY=1` itself. An end with 0 or 78 is final; any other is followed by a bounded number of
//! new starts.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use tokio::net::UnixDatagram;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::session::{Output, Running, Session};

const RESTART_DELAY: Duration = Duration::from_millis(100);
/// systemd's default limit: five starts in ten seconds.
const START_LIMIT: (usize, Duration) = (5, Duration::from_secs(10));
/// `RestartPreventExitStatus=78`: a wrong configuration does not heal.
const EX_CONFIG: i32 = 78;

/// Where a service stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ServiceState {
    Starting,
    Ready,
    /// Ended for good, with the words for it.
    Ended(String),
}

pub(super) struct Service {
    pub(super) state: watch::Receiver<ServiceState>,
    /// `systemctl stop`: SIGTERM, then no more starts.
    pub(super) stop: CancellationToken,
}

/// What a service is started with.
#[derive(Clone)]
pub(super) struct ServiceUnit {
    pub(super) name: &'static str,
    pub(super) program: Vec<PathBuf>,
    /// It is not started where this file is missing.
    pub(super) condition: Option<PathBuf>,
    pub(super) ready_deadline: Duration,
    pub(super) stop_deadline: Duration,
}

enum End {
    Exit(std::process::ExitStatus),
    NotReady,
    /// Stopped, or the power is gone.
    Told,
}

impl Service {
    /// Starts the service, unless it runs already; the supervision goes on in the background.
    pub(super) fn start(session: &Arc<Session>, unit: ServiceUnit) -> Arc<Self> {
        let mut services = session.services();
        if let Some(service) = services.get(unit.name).filter(|service| !service.has_ended()) {
            return Arc::clone(service);
        }
        let (tell, state) = watch::channel(ServiceState::Starting);
        let service = Arc::new(Self { state, stop: session.stopping.child_token() });
        services.insert(unit.name.to_owned(), Arc::clone(&service));
        let (session_of_task, stop) = (Arc::clone(session), service.stop.clone());
        session.tasks.spawn_on(
            async move {
                let words = match supervise(&session_of_task, &unit, &stop, &tell).await {
                    Ok(words) => words,
                    Err(error) => format!("{error:#}"),
                };
                session_of_task.disk.append_log(unit.name, format!("[init] {words}\n").as_bytes()).ok();
                tell.send_replace(ServiceState::Ended(words));
            },
            crate::runtime::servers(),
        );
        service
    }

    /// Waits until the service is ready; an error where it ended instead.
    pub(super) async fn ready(&self) -> Result<()> {
        let mut state = self.state.clone();
        let state =
            state.wait_for(|state| *state != ServiceState::Starting).await.context("supervision ended")?;
        match &*state {
            ServiceState::Ended(words) => bail!("{words}"),
            ServiceState::Ready | ServiceState::Starting => Ok(()),
        }
    }

    pub(super) async fn ended(&self) {
        let mut state = self.state.clone();
        state.wait_for(|state| matches!(state, ServiceState::Ended(_))).await.ok();
    }

    fn has_ended(&self) -> bool {
        matches!(*self.state.borrow(), ServiceState::Ended(_))
    }
}

/// Starts and restarts until an end that is final; gives the words for it.
async fn supervise(
    session: &Session,
    unit: &ServiceUnit,
    stop: &CancellationToken,
    tell: &watch::Sender<ServiceState>,
) -> Result<String> {
    let mut starts = VecDeque::new();
    loop {
        if unit.condition.as_ref().is_some_and(|path| !path.exists()) {
            return Ok(format!("{} is not started: its condition is not met", unit.name));
        }
        let (limit, window) = START_LIMIT;
        starts.push_back(Instant::now());
        starts.retain(|start: &Instant| start.elapsed() < window);
        let why = match run_once(session, unit, stop, tell).await? {
            End::Told => return Ok(format!("{} was stopped", unit.name)),
            End::Exit(status) if matches!(status.code(), Some(0 | EX_CONFIG)) => {
                return Ok(format!("{} ended ({status}) and is not restarted", unit.name));
            }
            End::Exit(status) => status.to_string(),
            End::NotReady => format!("not ready within {:?}", unit.ready_deadline),
        };
        if starts.len() >= limit {
            return Ok(format!("{} failed {limit} times within {window:?}, the last time: {why}", unit.name));
        }
        tell.send_replace(ServiceState::Starting);
        session.disk.append_log(unit.name, format!("[init] {why}; restarting\n").as_bytes())?;
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
    session: &Session,
    unit: &ServiceUnit,
    stop: &CancellationToken,
    tell: &watch::Sender<ServiceState>,
) -> Result<End> {
    let path = session.run_dir().join(format!("{}.notify", unit.name));
    std::fs::remove_file(&path).ok();
    let socket = UnixDatagram::bind(&path).context("notify socket")?;
    let env = [("NOTIFY_SOCKET".to_owned(), path.display().to_string())];
    let mut running = session.spawn(unit.name, &unit.program, &[], &env, Output::Log)?;

    let ready_by = tokio::time::sleep(unit.ready_deadline);
    tokio::pin!(ready_by);
    let mut is_ready = false;
    let mut message = [0_u8; 4096];
    loop {
        tokio::select! {
            biased;
            () = session.off.cancelled() => {
                session.reap(&mut running).await?;
                return Ok(End::Told);
            }
            received = socket.recv(&mut message) => {
                let text = String::from_utf8_lossy(&message[..received?]).into_owned();
                if text.lines().any(|line| line == "READY=1") {
                    is_ready = true;
                    tell.send_replace(ServiceState::Ready);
                }
            }
            status = running.child.wait() => {
                let status = status?;
                session.reap(&mut running).await?;
                return Ok(End::Exit(status));
            }
            () = stop.cancelled() => {
                end_in_order(session, unit, &mut running).await?;
                return Ok(End::Told);
            }
            () = &mut ready_by, if !is_ready => {
                end_in_order(session, unit, &mut running).await?;
                return Ok(End::NotReady);
            }
        }
    }
}

/// SIGTERM to the process, and SIGKILL to its group after the deadline.
async fn end_in_order(session: &Session, unit: &ServiceUnit, running: &mut Running) -> Result<()> {
    kill(running.group, Signal::SIGTERM).ok();
    if tokio::time::timeout(unit.stop_deadline, running.child.wait()).await.is_err() {
        nix::sys::signal::killpg(running.group, Signal::SIGKILL).ok();
    }
    session.reap(running).await?;
    Ok(())
}
