//! What runs in a simulated server: nothing, or the processes of a host.

use anyhow::{Result, bail};

use super::book::Record;
use super::host::Hosts;

/// Chosen once for a simulator.
pub(super) enum Guests {
    /// Servers are lines in the books.
    None,
    /// Servers are child processes below a root directory of their own.
    Processes(Hosts),
}

impl Guests {
    /// Gives the new server its disk and user-data.
    pub(super) fn install(&self, record: &Record) {
        if let Self::Processes(hosts) = self {
            hosts.install(record);
        }
    }

    /// Starts the machine; returns at once, as power does.
    pub(super) fn boot(&self, name: &str) {
        if let Self::Processes(hosts) = self {
            hosts.boot(name);
        }
    }

    /// Cuts the power: every process is dead when this returns.
    pub(super) async fn cut(&self, name: &str) {
        if let Self::Processes(hosts) = self {
            hosts.cut(name).await;
        }
    }

    /// Shuts the machine down in order.
    pub(super) async fn shut_down(&self, name: &str) {
        if let Self::Processes(hosts) = self {
            hosts.shut_down(name).await;
        }
    }

    pub(super) fn hosts(&self) -> Result<&Hosts> {
        match self {
            Self::None => bail!("the servers of this simulator are records: nothing runs in them"),
            Self::Processes(hosts) => Ok(hosts),
        }
    }
}
