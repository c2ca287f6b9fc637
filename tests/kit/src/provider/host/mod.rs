//! Simulated servers that are hosts: below a root directory of its own each runs the applets, with its own PostgreSQL,
//! as cloud-init and systemd would run them.
//!
//! A host outlives its server's record: its disk is kept, so that a machine that was replaced can be started again.

mod boot;
mod disk;
mod machine;
mod oneshot;
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

pub use self::machine::BootState;
pub(super) use self::machine::Machine;
use super::book::Record;
use crate::pg::PgBinaries;

/// What all hosts of a simulator share.
#[derive(Debug, Clone)]
pub struct HostSettings {
    /// The binary that a fresh image has: it installs the bundle, and reports a boot that fails before there is one.
    pub svc_binary: PathBuf,
    pub pg: PgBinaries,
    /// Each host's disk is a directory in here; kept when the simulator ends.
    pub root_dir: PathBuf,
    /// For every process of every host.
    pub extra_env: Vec<(String, String)>,
    /// How long a service may take to be ready.
    pub ready_deadline: Duration,
    /// How long a service may take to obey SIGTERM.
    pub stop_deadline: Duration,
    /// How long registration is tried again while the platform cannot be reached.
    pub register_deadline: Duration,
    /// How long any other unit may run.
    pub unit_deadline: Duration,
}

impl HostSettings {
    pub fn new(svc_binary: PathBuf, pg: PgBinaries, root_dir: PathBuf) -> Self {
        Self {
            svc_binary,
            pg,
            root_dir,
            extra_env: Vec::new(),
            ready_deadline: Duration::from_secs(60),
            stop_deadline: Duration::from_secs(20),
            register_deadline: Duration::from_secs(120),
            unit_deadline: Duration::from_secs(600),
        }
    }
}

/// All hosts of a simulator by their server's name, running or not.
pub(super) struct Hosts {
    settings: Arc<HostSettings>,
    https_port: u16,
    machines: Mutex<BTreeMap<String, Arc<Machine>>>,
    next_create_env: Mutex<Vec<(String, String)>>,
    /// The simulator is gone: no power comes on any more.
    closed: Arc<AtomicBool>,
}

impl Hosts {
    pub(super) fn new(settings: HostSettings, https_port: u16) -> Self {
        Self {
            settings: Arc::new(settings),
            https_port,
            machines: Mutex::default(),
            next_create_env: Mutex::default(),
            closed: Arc::default(),
        }
    }

    /// A new disk for a new server. A former server of this name keeps its own, but is no longer reached by name.
    pub(super) fn install(&self, record: &Record) {
        let root = (1..)
            .map(|nth| if nth == 1 { record.name.clone() } else { format!("{}.{nth}", record.name) })
            .map(|name| self.settings.root_dir.join(name))
            .find(|root| !root.exists())
            .expect("there is always a next number");
        let (settings, closed) = (Arc::clone(&self.settings), Arc::clone(&self.closed));
        let machine = Arc::new(Machine::new(record, root, self.https_port, settings, closed));
        let env = std::mem::take(&mut *self.next_create_env.lock().unwrap_or_else(PoisonError::into_inner));
        machine.set_next_env(env);
        self.machines.lock().unwrap_or_else(PoisonError::into_inner).insert(record.name.clone(), machine);
    }

    /// Further environment for the first start of the next server that is made.
    pub(super) fn set_next_create_env(&self, env: Vec<(String, String)>) {
        *self.next_create_env.lock().unwrap_or_else(PoisonError::into_inner) = env;
    }

    pub(super) fn boot(&self, name: &str) {
        if let Ok(machine) = self.machine(name) {
            machine.boot();
        }
    }

    pub(super) async fn cut(&self, name: &str) {
        if let Ok(machine) = self.machine(name) {
            machine.cut().await;
        }
    }

    pub(super) async fn shut_down(&self, name: &str) {
        if let Ok(machine) = self.machine(name) {
            machine.shut_down().await;
        }
    }

    /// Kills every process of every host, without waiting, and lets no further one start.
    pub(super) fn kill_all(&self) {
        self.closed.store(true, Ordering::SeqCst);
        for machine in self.machines() {
            machine.kill_now();
        }
    }

    /// The same, and waits for their ends.
    pub(super) async fn stop(&self) {
        self.closed.store(true, Ordering::SeqCst);
        futures_util::future::join_all(self.machines().iter().map(|machine| machine.cut())).await;
    }

    pub(super) fn machine(&self, name: &str) -> Result<Arc<Machine>> {
        let machines = self.machines.lock().unwrap_or_else(PoisonError::into_inner);
        machines.get(name).cloned().with_context(|| format!("no server {name} was ever made"))
    }

    pub(super) fn machines(&self) -> Vec<Arc<Machine>> {
        let machines = self.machines.lock().unwrap_or_else(PoisonError::into_inner);
        machines.values().cloned().collect()
    }
}
