//! Simulated servers that are virtual machines: one for each record, with the power that the books say.
//!
//! A machine outlives its server's record, as a host of processes does: its disk is kept while the simulator is.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};

use super::book::Record;
use super::catalog::CatalogType;
use crate::vm::{Accel, Image, Machine, MachineSpec, Size};

/// What all machines of a simulator share.
#[derive(Debug, Clone)]
pub struct MachineSettings {
    pub image: Image,
    pub accel: Accel,
    /// Each machine's files are a directory in here.
    pub dir: PathBuf,
    /// For sockets, whose paths are short.
    pub sockets: PathBuf,
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

    pub(super) fn install(&self, record: &Record) -> Result<()> {
        let mut machines = self.machines.lock().unwrap_or_else(PoisonError::into_inner);
        let machine = Machine::new(MachineSpec {
            name: &record.name,
            user_data: &record.user_data,
            size: size(record.server_type),
            address: record.ipv4,
            https_port: self.https_port,
            dir: self.settings.dir.join(&record.name),
            qmp_socket: self.settings.sockets.join(format!("{}.qmp", record.id)),
            image: &self.settings.image,
            accel: self.settings.accel,
        })?;
        machines.insert(record.name.clone(), Arc::new(machine));
        Ok(())
    }

    pub(super) fn boot(&self, record: &Record) {
        let started =
            self.machine(&record.name).and_then(|machine| machine.switch_on(size(record.server_type)));
        if let Err(error) = started {
            println!("      (the machine {} has no power: {error:#})", record.name);
        }
    }

    pub(super) fn machine(&self, name: &str) -> Result<Arc<Machine>> {
        let machines = self.machines.lock().unwrap_or_else(PoisonError::into_inner);
        machines.get(name).cloned().with_context(|| format!("no server {name} was ever made"))
    }

    pub(super) fn all(&self) -> Vec<Arc<Machine>> {
        self.machines.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    pub(super) fn cut_all(&self) {
        self.all().iter().for_each(|machine| machine.cut());
    }
}

/// Half the memory that the type is sold with, and a fifth of its disk: a test machine has several at once.
fn size(kind: &CatalogType) -> Size {
    Size {
        cores: kind.cores.min(4),
        memory_mib: kind.memory_gb.min(8) * 512,
        disk_gib: kind.disk_gb.min(160) / 5,
    }
}
