//! A simulated server's guest: nothing, a host's processes, or a virtual machine.

use std::sync::Arc;

use anyhow::{Result, bail};

use super::host::Hosts;
use super::inventory::ServerRecord;
use super::machines::Machines;
use crate::vm::Machine;

/// The guests of all servers in a simulator.
pub(super) enum Guests {
    /// Servers exist only in the inventory.
    RecordsOnly,
    /// Servers are child processes with their own root directories.
    Processes(Hosts),
    /// Servers are virtual machines.
    Machines(Machines),
}

impl Guests {
    /// Creates the guest of a new server, powered off.
    pub(super) fn create(&self, record: &ServerRecord) {
        match self {
            Self::RecordsOnly => {}
            Self::Processes(hosts) => hosts.create(record),
            Self::Machines(machines) => {
                if let Err(error) = machines.create(record) {
                    println!("      (the machine {} could not be created: {error:#})", record.name);
                }
            }
        }
    }

    /// Powers the server on; returns immediately.
    pub(super) fn boot(&self, record: &ServerRecord) {
        match self {
            Self::RecordsOnly => {}
            Self::Processes(hosts) => hosts.boot(&record.name),
            Self::Machines(machines) => machines.boot(record),
        }
    }

    /// Cuts the power; all processes have been killed when this returns.
    pub(super) async fn cut_power(&self, name: &str) {
        match self {
            Self::RecordsOnly => {}
            Self::Processes(hosts) => hosts.cut_power(name).await,
            Self::Machines(machines) => {
                if let Ok(machine) = machines.machine(name) {
                    machine.cut_power();
                }
            }
        }
    }

    /// Shuts the server down gracefully.
    pub(super) async fn shut_down(&self, name: &str) {
        match self {
            Self::RecordsOnly => {}
            Self::Processes(hosts) => hosts.shut_down(name).await,
            Self::Machines(machines) => {
                if let Ok(machine) = machines.machine(name) {
                    machine.shut_down().await;
                }
            }
        }
    }

    pub(super) fn hosts(&self) -> Result<&Hosts> {
        match self {
            Self::RecordsOnly => bail!("the servers of this simulator are records only"),
            Self::Machines(_) => bail!("the servers of this simulator are virtual machines: use SSH"),
            Self::Processes(hosts) => Ok(hosts),
        }
    }

    pub(super) fn machine(&self, name: &str) -> Result<Arc<Machine>> {
        match self {
            Self::Machines(machines) => machines.machine(name),
            _ => bail!("the servers of this simulator are not virtual machines"),
        }
    }

    /// Kills all processes and virtual machines immediately.
    pub(super) fn kill_all(&self) {
        match self {
            Self::RecordsOnly => {}
            Self::Processes(hosts) => hosts.kill_all(),
            Self::Machines(machines) => machines.cut_all_power(),
        }
    }
}
