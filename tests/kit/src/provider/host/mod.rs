//! Simulated servers as hosts: each runs the applets under its own root directory with its own PostgreSQL, as
//! cloud-init and systemd would.
//!
//! A host outlives its server's record: its disk is kept, so that a replaced machine can be restarted.

mod boot;
mod disk;
mod oneshot;
mod process_host;
mod service;
mod session;
mod systemctl;
#[cfg(test)]
mod tests;
mod user_data;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};

pub use self::process_host::BootState;
pub(super) use self::process_host::ProcessHost;
use super::inventory::ServerRecord;
use crate::pg::PgBinaries;

/// Settings shared by all hosts in a simulator.
#[derive(Debug, Clone)]
pub struct HostSettings {
    /// The bootstrap binary: installs the release, and until then reports the boot's stages and a failure.
    pub svc_binary: PathBuf,
    pub pg: PgBinaries,
    /// Parent directory of the hosts' disks; kept when the simulator ends.
    pub root_dir: PathBuf,
    /// Extra environment variables for all processes on all hosts.
    pub extra_env: Vec<(String, String)>,
    /// Timeout for a service to become ready.
    pub ready_timeout: Duration,
    /// Timeout for a service to exit after SIGTERM.
    pub stop_timeout: Duration,
    /// Timeout for registration, which is retried while the platform is unreachable.
    pub register_timeout: Duration,
    /// Timeout for all other units.
    pub unit_timeout: Duration,
}

impl HostSettings {
    pub fn new(svc_binary: PathBuf, pg: PgBinaries, root_dir: PathBuf) -> Self {
        Self {
            svc_binary,
            pg,
            root_dir,
            extra_env: Vec::new(),
            ready_timeout: Duration::from_secs(60),
            stop_timeout: Duration::from_secs(20),
            register_timeout: Duration::from_secs(120),
            unit_timeout: Duration::from_secs(600),
        }
    }
}

/// All hosts in a simulator, running or not, by server name.
pub(super) struct Hosts {
    settings: Arc<HostSettings>,
    https_port: u16,
    hosts: Mutex<BTreeMap<String, Arc<ProcessHost>>>,
    next_server_env: Mutex<Vec<(String, String)>>,
    /// Set once the simulator is closed; no host can be powered on afterwards.
    closed: Arc<AtomicBool>,
}

impl Hosts {
    pub(super) fn new(settings: HostSettings, https_port: u16) -> Self {
        Self {
            settings: Arc::new(settings),
            https_port,
            hosts: Mutex::default(),
            next_server_env: Mutex::default(),
            closed: Arc::default(),
        }
    }

    /// Creates a host for a new server. An earlier host with this name keeps its disk, but is no longer reachable by
    /// name.
    pub(super) fn create(&self, record: &ServerRecord) {
        let root = (1..)
            .map(|nth| if nth == 1 { record.name.clone() } else { format!("{}.{nth}", record.name) })
            .map(|name| self.settings.root_dir.join(name))
            .find(|root| !root.exists())
            .expect("a free number exists");
        let (settings, closed) = (Arc::clone(&self.settings), Arc::clone(&self.closed));
        let host = Arc::new(ProcessHost::new(record, root, self.https_port, settings, closed));
        let env = std::mem::take(&mut *self.next_server_env.lock().unwrap_or_else(PoisonError::into_inner));
        host.set_next_start_env(env);
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner).insert(record.name.clone(), host);
    }

    /// Sets extra environment variables for the first start of the next server to be created.
    pub(super) fn set_next_server_env(&self, env: Vec<(String, String)>) {
        *self.next_server_env.lock().unwrap_or_else(PoisonError::into_inner) = env;
    }

    pub(super) fn boot(&self, name: &str) {
        if let Ok(host) = self.host(name) {
            host.boot();
        }
    }

    pub(super) async fn cut_power(&self, name: &str) {
        if let Ok(host) = self.host(name) {
            host.cut_power().await;
        }
    }

    pub(super) async fn shut_down(&self, name: &str) {
        if let Ok(host) = self.host(name) {
            host.shut_down().await;
        }
    }

    /// Kills all processes on all hosts without waiting, and prevents new ones.
    pub(super) fn kill_all(&self) {
        self.closed.store(true, Ordering::SeqCst);
        for host in self.all() {
            host.kill_processes();
        }
    }

    /// Like [`Self::kill_all`], but waits until all processes have ended.
    pub(super) async fn stop(&self) {
        self.closed.store(true, Ordering::SeqCst);
        futures_util::future::join_all(self.all().iter().map(|host| host.cut_power())).await;
    }

    pub(super) fn host(&self, name: &str) -> Result<Arc<ProcessHost>> {
        let hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        hosts.get(name).cloned().with_context(|| format!("no server named {name} has been created"))
    }

    pub(super) fn all(&self) -> Vec<Arc<ProcessHost>> {
        let hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        hosts.values().cloned().collect()
    }
}
