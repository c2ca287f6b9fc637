//! Maps users to their machines: an in-memory copy of the active rows in `user_machines`.
//!
//! The watcher replaces the whole table; requests read it. Invariant: an upstream exists exactly while its machine's
//! row is active, `running` and not powered off, and has an endpoint; otherwise the upstream and its connections are
//! closed.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use svc_machine::id::MachineId;
use svc_machine::name::{IdpUserId, Slot};

use super::machine::{Endpoint, Machine, MachineRecord, Upstream};
use crate::host_trust::HostTrust;
use crate::route_freshness::RouteFreshness;

pub(super) struct Directory {
    trust: HostTrust,
    freshness: Arc<RouteFreshness>,
    table: RwLock<Table>,
}

#[derive(Default)]
struct Table {
    users: Arc<HashMap<IdpUserId, Vec<Arc<Machine>>>>,
    machines: HashMap<MachineId, Arc<Machine>>,
}

/// The result of looking up a user's machine.
pub(super) enum MachineLookup {
    /// The machine is running, and its upstream was open at the time of the lookup.
    Running(Arc<Machine>, Arc<Upstream>),
    NotRunning(Arc<Machine>),
    NoMachine,
    /// The routes have not been loaded yet, or are too old because the database has been unreachable.
    Unknown,
}

impl MachineLookup {
    fn for_machine(machine: &Arc<Machine>) -> Self {
        match &machine.upstream {
            Some(upstream) => Self::Running(Arc::clone(machine), Arc::clone(upstream)),
            None => Self::NotRunning(Arc::clone(machine)),
        }
    }
}

impl Directory {
    pub(super) fn new(trust: HostTrust, freshness: Arc<RouteFreshness>) -> Self {
        Self { trust, freshness, table: RwLock::default() }
    }

    /// Finds the machine in the chosen slot. Without a choice, or if that slot has no machine, finds the running
    /// machine in `primary`, else the oldest running machine, else the machine in `primary`, else the oldest machine.
    pub(super) fn find(&self, user: &IdpUserId, chosen: Option<&Slot>) -> MachineLookup {
        let Some(users) = self.users_if_usable() else { return MachineLookup::Unknown };
        let Some(machines) = users.get(user) else { return MachineLookup::NoMachine };
        let in_chosen_slot =
            chosen.and_then(|slot| machines.iter().find(|machine| machine.record.slot == *slot));
        let is_primary = |machine: &&Arc<Machine>| machine.record.slot.as_str() == "primary";
        let running = || machines.iter().filter(|machine| machine.upstream.is_some());
        let machine = in_chosen_slot
            .or_else(|| running().find(is_primary))
            .or_else(|| running().next())
            .or_else(|| machines.iter().find(is_primary))
            .or_else(|| machines.first());
        machine.map_or(MachineLookup::NoMachine, MachineLookup::for_machine)
    }

    /// Finds the user's active machine with this id.
    pub(super) fn find_by_id(&self, user: &IdpUserId, id: MachineId) -> MachineLookup {
        let Some(users) = self.users_if_usable() else { return MachineLookup::Unknown };
        let machine = users.get(user).and_then(|all| all.iter().find(|machine| machine.record.id == id));
        machine.map_or(MachineLookup::NoMachine, MachineLookup::for_machine)
    }

    /// Lists the user's active machines, oldest first; `None` if the routes are not loaded or too old.
    pub(super) fn list_machines(&self, user: &IdpUserId) -> Option<Vec<Arc<Machine>>> {
        Some(self.users_if_usable()?.get(user).cloned().unwrap_or_default())
    }

    fn users_if_usable(&self) -> Option<Arc<HashMap<IdpUserId, Vec<Arc<Machine>>>>> {
        let state = self.freshness.state();
        state
            .is_usable()
            .then(|| Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner).users))
    }

    /// Returns the TLS verification settings for connections to hosts.
    pub(super) fn trust(&self) -> &HostTrust {
        &self.trust
    }

    /// Finds the address of a routable machine by its host name. The router forwards a certificate authority's
    /// validation connections for the name (TLS-ALPN-01) to this address.
    pub(super) fn find_address(&self, name: &str) -> Option<SocketAddr> {
        let id = self.trust.domain.as_ref()?.parse_machine(name)?;
        if !self.freshness.state().is_usable() {
            return None;
        }
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let Endpoint { ip, port, .. } = table.machines.get(&id)?.upstream.as_ref()?.endpoint;
        Some(SocketAddr::from((ip, port)))
    }

    /// Confirms that the table matched the database at `read_at`.
    pub(super) fn confirm(&self, read_at: Instant) {
        self.freshness.confirm(read_at);
    }

    /// Updates the keys that hosts have acknowledged, without changing the routes.
    pub(super) fn update_acknowledged_keys(&self, acknowledged: Vec<(MachineId, Vec<String>)>) {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        for (id, kids) in acknowledged {
            if let Some(machine) = table.machines.get(&id) {
                machine.update_acknowledged_keys(kids);
            }
        }
    }

    /// Replaces the table with all active rows, which were read at `read_at` or later.
    ///
    /// # Errors
    /// If the crypto provider supports none of the required TLS versions. The table is then unchanged.
    pub(super) fn replace(&self, mut records: Vec<MachineRecord>, read_at: Instant) -> anyhow::Result<()> {
        records.sort_by_key(|record| (record.created_at, record.id));
        let mut upstreams = self.collect_upstreams();
        let mut users: HashMap<IdpUserId, Vec<Arc<Machine>>> = HashMap::new();
        for record in records {
            let endpoint = record.endpoint.filter(|_| record.status.is_routable() && !record.is_powered_off);
            let upstream = match endpoint {
                None => None,
                Some(endpoint) => match upstreams.remove(&record.id) {
                    Some(upstream) if upstream.endpoint == endpoint => Some(upstream),
                    other => {
                        other.inspect(|old| old.proxy.close());
                        Some(Arc::new(Upstream::new(record.id, endpoint, &self.trust)?))
                    }
                },
            };
            users.entry(record.user.clone()).or_default().push(Arc::new(Machine::new(record, upstream)));
        }
        let machines =
            users.values().flatten().map(|machine| (machine.record.id, Arc::clone(machine))).collect();
        *self.table.write().unwrap_or_else(PoisonError::into_inner) =
            Table { users: Arc::new(users), machines };
        self.freshness.confirm(read_at);
        for unused in upstreams.into_values() {
            unused.proxy.close();
        }
        Ok(())
    }

    fn collect_upstreams(&self) -> HashMap<MachineId, Arc<Upstream>> {
        let users = Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner).users);
        let machines = users.values().flatten();
        machines
            .filter_map(|machine| Some((machine.record.id, Arc::clone(machine.upstream.as_ref()?))))
            .collect()
    }
}
