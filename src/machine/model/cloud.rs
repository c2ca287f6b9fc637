//! The provider model: servers by machine, unique names, and create requests that take effect only after the caller has
//! timed out.

use crate::name::ServerType;

pub struct Server {
    pub machine: usize,
    pub server_type: ServerType,
    pub power: Power,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Power {
    On,
    Off,
}

pub struct Cloud {
    pub servers: Vec<Server>,
    /// The machines whose create request timed out and may still take effect.
    pub pending_creates: Vec<usize>,
    has_unique_names: bool,
}

impl Cloud {
    pub fn new(has_unique_names: bool) -> Self {
        Self { servers: Vec::new(), pending_creates: Vec::new(), has_unique_names }
    }

    pub fn server_of(&self, machine: usize) -> Option<&Server> {
        self.servers.iter().find(|server| server.machine == machine)
    }

    pub fn is_on(&self, machine: usize) -> bool {
        self.server_of(machine).is_some_and(|server| server.power == Power::On)
    }

    /// Finds the machine's server by its name. Finds nothing in a model without unique names, so that a repeated create
    /// makes a second server.
    pub fn find_by_name(&self, machine: usize) -> Option<&Server> {
        self.server_of(machine).filter(|_| self.has_unique_names)
    }

    pub fn create(&mut self, machine: usize) {
        if self.find_by_name(machine).is_none() {
            let server_type = super::action::small();
            self.servers.push(Server { machine, server_type, power: Power::On });
        }
    }

    pub fn delete(&mut self, machine: usize) {
        self.servers.retain(|server| server.machine != machine);
    }

    /// Changes the type of a server that is off; the provider rejects any other change.
    pub fn change_type(&mut self, machine: usize, to: &ServerType) {
        for server in self.servers.iter_mut().filter(|server| server.machine == machine) {
            if server.power == Power::Off {
                server.server_type = to.clone();
            }
        }
    }

    pub fn set_power(&mut self, machine: usize, power: Power) {
        for server in self.servers.iter_mut().filter(|server| server.machine == machine) {
            server.power = power;
        }
    }

    /// Completes all pending create requests. `LifecycleModel::run_all_operations` calls this before every round of
    /// steps, because the platform repeats a create request only when an earlier one can no longer take effect.
    pub fn complete_creates(&mut self) {
        for machine in std::mem::take(&mut self.pending_creates) {
            self.create(machine);
        }
    }
}
