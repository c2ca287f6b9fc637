//! Simulated servers as virtual machines, one per record.
//!
//! A machine is kept until the simulator ends, even after its server's record is deleted; its disk is kept even
//! longer. A new server with the same name replaces both.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};

use super::catalog::ServerType;
use super::inventory::ServerRecord;
use crate::vm::{Accel, Image, Machine, MachineSize, MachineSpec};

/// Settings shared by all machines in a simulator.
#[derive(Debug, Clone)]
pub struct MachineSettings {
    pub image: Image,
    pub accel: Accel,
    /// Parent of the machines' directories.
    pub dir: PathBuf,
    /// Its path must be short, because it contains Unix sockets.
    pub socket_dir: PathBuf,
}

pub(super) struct Machines {
    settings: MachineSettings,
    https_port: u16,
    machines: Mutex<BTreeMap<String, Arc<Machine>>>,
}

impl Machines {
    pub(super) fn new(settings: MachineSettings, https_port: u16) -> Self {
        Self { settings, https_port, machines: Mutex::default() }
    }

    pub(super) fn create(&self, record: &ServerRecord) -> Result<()> {
        let mut machines = self.machines.lock().unwrap_or_else(PoisonError::into_inner);
        let machine = Machine::new(MachineSpec {
            name: &record.name,
            user_data: &record.user_data,
            size: scaled_size(record.server_type),
            address: record.ipv4,
            https_port: self.https_port,
            dir: self.settings.dir.join(&record.name),
            qmp_socket: self.settings.socket_dir.join(format!("{}.qmp", record.id)),
            image: &self.settings.image,
            accel: self.settings.accel,
        })?;
        machines.insert(record.name.clone(), Arc::new(machine));
        Ok(())
    }

    pub(super) fn boot(&self, record: &ServerRecord) {
        let started =
            self.machine(&record.name).and_then(|machine| machine.power_on(scaled_size(record.server_type)));
        if let Err(error) = started {
            println!("      (the machine {} could not be powered on: {error:#})", record.name);
        }
    }

    pub(super) fn machine(&self, name: &str) -> Result<Arc<Machine>> {
        let machines = self.machines.lock().unwrap_or_else(PoisonError::into_inner);
        machines.get(name).cloned().with_context(|| format!("no server named {name} has been created"))
    }

    pub(super) fn all(&self) -> Vec<Arc<Machine>> {
        self.machines.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    pub(super) fn cut_all_power(&self) {
        self.all().iter().for_each(|machine| machine.cut_power());
    }
}

/// Returns the type's cores, half of its memory and a fifth of its disk, with limits for large types, because a test
/// runs several machines concurrently.
fn scaled_size(server_type: &ServerType) -> MachineSize {
    MachineSize {
        cores: server_type.cores.min(4),
        memory_mib: server_type.memory_gb.min(8) * 512,
        disk_gib: server_type.disk_gb.min(160) / 5,
    }
}
