//! Which machine serves a user: the active rows of `user_machines` in memory.
//!
//! The watcher replaces the whole table; requests read it. Invariant: a way exists exactly for a running, active row,
//! and is closed, with all that goes over it, when its row is no longer that.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use crate::http::tls::ChainCheck;
use crate::machine::id::MachineId;
use crate::machine::name::{IdpUserId, Slot};

use super::freshness::Freshness;
use super::machine::{Machine, Row, Way};

pub(super) struct Directory {
    check: ChainCheck,
    freshness: Arc<Freshness>,
    table: RwLock<Table>,
}

#[derive(Default)]
struct Table {
    users: Arc<HashMap<IdpUserId, Vec<Arc<Machine>>>>,
    machines: HashMap<MachineId, Arc<Machine>>,
}

/// What there is for a user.
pub(super) enum Found {
    /// Runs, and its way was open when it was looked up.
    Running(Arc<Machine>, Arc<Way>),
    Waiting(Arc<Machine>),
    Nothing,
    /// The database has not been seen for too long.
    Unknown,
}

impl Found {
    fn of(machine: &Arc<Machine>) -> Self {
        match &machine.way {
            Some(way) => Self::Running(Arc::clone(machine), Arc::clone(way)),
            None => Self::Waiting(Arc::clone(machine)),
        }
    }
}

impl Directory {
    pub(super) fn new(check: ChainCheck, freshness: Arc<Freshness>) -> Self {
        Self { check, freshness, table: RwLock::default() }
    }

    /// The machine of the chosen slot; without a choice, or where the chosen slot is gone, the running one of
    /// `primary`, else the oldest running one.
    pub(super) fn find(&self, user: &IdpUserId, chosen: Option<&Slot>) -> Found {
        let Some(users) = self.trusted() else { return Found::Unknown };
        let Some(machines) = users.get(user) else { return Found::Nothing };
        let of_choice = chosen.and_then(|slot| machines.iter().find(|machine| machine.row.slot == *slot));
        let primary = |machine: &&Arc<Machine>| machine.row.slot.as_str() == "primary";
        let running = || machines.iter().filter(|machine| machine.way.is_some());
        let machine = of_choice
            .or_else(|| running().find(primary))
            .or_else(|| running().next())
            .or_else(|| machines.iter().find(primary))
            .or_else(|| machines.first());
        machine.map_or(Found::Nothing, Found::of)
    }

    /// The user's machine of this id, as long as it is active.
    pub(super) fn of_machine(&self, user: &IdpUserId, id: MachineId) -> Found {
        let Some(users) = self.trusted() else { return Found::Unknown };
        let machine = users.get(user).and_then(|all| all.iter().find(|machine| machine.row.id == id));
        machine.map_or(Found::Nothing, Found::of)
    }

    /// The user's active machines, oldest first; `None` when the database has not been seen for too long.
    pub(super) fn machines(&self, user: &IdpUserId) -> Option<Vec<Arc<Machine>>> {
        Some(self.trusted()?.get(user).cloned().unwrap_or_default())
    }

    fn trusted(&self) -> Option<Arc<HashMap<IdpUserId, Vec<Arc<Machine>>>>> {
        let trusted = self.freshness.routes().are_served();
        trusted.then(|| Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner).users))
    }

    /// Nothing has changed up to `seen`.
    pub(super) fn confirm(&self, seen: Instant) {
        self.freshness.confirm(seen);
    }

    /// Takes the keys that hosts have acknowledged; routes stay as they are.
    pub(super) fn acknowledge(&self, acknowledged: Vec<(MachineId, Vec<String>)>) {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        for (id, kids) in acknowledged {
            if let Some(machine) = table.machines.get(&id) {
                machine.acknowledge(kids);
            }
        }
    }

    /// Takes all active rows, as they were not before `seen`.
    ///
    /// # Errors
    /// When the trusted roots for a new way cannot be read; the old table stays.
    pub(super) fn replace(&self, mut rows: Vec<Row>, seen: Instant) -> anyhow::Result<()> {
        rows.sort_by_key(|row| (row.created_at, row.id));
        let mut ways = self.ways();
        let mut users: HashMap<IdpUserId, Vec<Arc<Machine>>> = HashMap::new();
        for row in rows {
            let endpoint = row.endpoint.filter(|_| row.status.is_routable() && !row.is_powered_off);
            let way = match endpoint {
                None => None,
                Some(endpoint) => match ways.remove(&row.id) {
                    Some(way) if way.endpoint == endpoint => Some(way),
                    other => {
                        other.inspect(|old| old.proxy.close());
                        Some(Arc::new(Way::new(endpoint, self.check)?))
                    }
                },
            };
            users.entry(row.user.clone()).or_default().push(Arc::new(Machine::new(row, way)));
        }
        let machines =
            users.values().flatten().map(|machine| (machine.row.id, Arc::clone(machine))).collect();
        *self.table.write().unwrap_or_else(PoisonError::into_inner) =
            Table { users: Arc::new(users), machines };
        self.freshness.confirm(seen);
        for gone in ways.into_values() {
            gone.proxy.close();
        }
        Ok(())
    }

    fn ways(&self) -> HashMap<MachineId, Arc<Way>> {
        let users = Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner).users);
        let machines = users.values().flatten();
        machines.filter_map(|machine| Some((machine.row.id, Arc::clone(machine.way.as_ref()?)))).collect()
    }
}
