//! What runs in a simulated server: nothing, the processes of a host, or a virtual machine.

use std::sync::Arc;

use anyhow::{Result, bail};

use super::book::Record;
use super::host::Hosts;
use super::machines::Machines;
use crate::vm::Machine;

/// Chosen once for a simulator.
pub(super) enum Guests {
    /// Servers are lines in the books.
    None,
    /// Servers are child processes below a root directory of their own.
    Processes(Hosts),
    /// Servers are virtual machines.
    Machines(Machines),
}

impl Guests {
    /// Gives the new server its disk and user-data.
    pub(super) fn install(&self, record: &Record) {
        match self {
            Self::None => {}
            Self::Processes(hosts) => hosts.install(record),
            Self::Machines(machines) => {
                if let Err(error) = machines.install(record) {
                    println!("      (the machine {} could not be made: {error:#})", record.name);
                }
            }
        }
    }

    /// Starts the machine; returns at once, as power does.
    pub(super) fn boot(&self, record: &Record) {
        match self {
            Self::None => {}
            Self::Processes(hosts) => hosts.boot(&record.name),
            Self::Machines(machines) => machines.boot(record),
        }
    }

    /// Cuts the power: every process is dead when this returns.
    pub(super) async fn cut(&self, name: &str) {
        match self {
            Self::None => {}
            Self::Processes(hosts) => hosts.cut(name).await,
            Self::Machines(machines) => {
                if let Ok(machine) = machines.machine(name) {
                    machine.cut();
                }
            }
        }
    }

    /// Shuts the machine down in order.
    pub(super) async fn shut_down(&self, name: &str) {
        match self {
            Self::None => {}
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
            Self::None => bail!("the servers of this simulator are records: nothing runs in them"),
            Self::Machines(_) => bail!("the servers of this simulator are machines: ask them by SSH"),
            Self::Processes(hosts) => Ok(hosts),
        }
    }

    pub(super) fn machine(&self, name: &str) -> Result<Arc<Machine>> {
        match self {
            Self::Machines(machines) => machines.machine(name),
            _ => bail!("the servers of this simulator are no virtual machines"),
        }
    }

    /// Ends everything at once.
    pub(super) fn kill_all(&self) {
        match self {
            Self::None => {}
            Self::Processes(hosts) => hosts.kill_all(),
            Self::Machines(machines) => machines.cut_all(),
        }
    }
}
