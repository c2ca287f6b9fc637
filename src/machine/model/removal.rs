//! Models how the reconciler removes servers, without retention times, and which data is lost with a server.

use super::invariant::Violation;
use super::{LifecycleModel, MachineRow};
use crate::event::Event;
use crate::state::State;

impl LifecycleModel {
    /// Returns whether the server of a machine that left its slot no longer needs to be kept. Retention times are
    /// ignored.
    pub fn is_removable(&self, id: usize) -> bool {
        let row = &self.machines[id];
        if row.machine.state.is_active() || self.has_open_operation(id) {
            return false;
        }
        if !row.has_registered || !self.rules.keeps_predecessors {
            return true;
        }
        let later = self.machines.iter().filter(|other| {
            other.slot == row.slot && other.machine.epoch > row.machine.epoch && other.has_registered
        });
        // A machine whose server the provider has lost does not count as a successor, unless the machine itself was
        // deleted.
        let mut later = later.filter(|other| {
            let is_deleted = matches!(other.machine.state, State::Deleted { .. });
            if other.is_server_known_gone() && self.rules.keeps_if_successor_lost {
                is_deleted
            } else {
                other.is_proven
            }
        });
        !row.is_unsaved && (matches!(row.machine.state, State::Deleted { .. }) || later.next().is_some())
    }

    fn has_open_operation(&self, id: usize) -> bool {
        self.operations.iter().any(|operation| operation.machine == id && operation.outcome.is_none())
    }

    /// Deletes the servers that no longer need to be kept.
    pub fn reconcile(&mut self) {
        for id in 0..self.machines.len() {
            if self.is_removable(id) && !self.cloud.pending_creates.contains(&id) {
                if self.detect_returned_server(id) {
                    self.machines[id].is_unsaved = true;
                    continue;
                }
                if self.is_last_copy(id) {
                    self.transition_violations.insert(Violation::LastServerRemoved);
                }
                self.remove(id);
            }
        }
    }

    /// Looks up the missing server of a machine whose host has registered. If the provider has it, records that and
    /// returns `true`.
    pub fn detect_returned_server(&mut self, id: usize) -> bool {
        let row = &self.machines[id];
        let was_gone = row.is_server_known_gone() && !row.is_removed;
        let may_be_found = was_gone && row.has_registered && self.rules.rechecks_missing_servers;
        let is_found = may_be_found && self.cloud.server_of(id).is_some();
        if is_found {
            self.apply(id, &Event::ServerFound);
        }
        is_found
    }

    /// Returns whether the replaced machine has the slot's newest server with data: no later registered machine has a
    /// server, and none was deleted.
    fn is_last_copy(&self, id: usize) -> bool {
        let row = &self.machines[id];
        let is_later =
            |other: &&MachineRow| other.slot == row.slot && other.machine.epoch > row.machine.epoch;
        let has_data = |other: &MachineRow| other.has_registered && !other.is_server_known_gone();
        let is_deleted = |other: &MachineRow| matches!(other.machine.state, State::Deleted { .. });
        let mut later = self.machines.iter().filter(is_later);
        let holds_data = row.has_registered && self.cloud.server_of(id).is_some() && !is_deleted(row);
        holds_data && !later.any(|other| has_data(other) || is_deleted(other))
    }

    /// Deletes a server. If an operator accepted the loss of its data, its rows are recorded as accepted losses.
    pub fn remove(&mut self, id: usize) {
        let row = &mut self.machines[id];
        row.is_removed = true;
        if row.is_loss_accepted {
            let accepted_loss = row.data.clone();
            self.acknowledged[row.slot].accepted_loss.extend(accepted_loss);
        }
        self.cloud.delete(id);
    }

    /// Makes the provider lose a server with its disk. Losing data that only this server held is not a violation.
    pub fn lose_server(&mut self, id: usize) {
        if self.cloud.server_of(id).is_none() {
            return;
        }
        self.cloud.delete(id);
        let slot = self.machines[id].slot;
        let lost = self.missing_rows(slot);
        self.acknowledged[slot].accepted_loss.extend(lost);
    }

    /// Returns a slot's acknowledged rows that are neither in the pointer's snapshot nor on any server, except accepted
    /// losses.
    pub fn missing_rows(&self, slot: usize) -> Vec<u32> {
        let acknowledged = &self.acknowledged[slot];
        let is_stored = |row: &u32| {
            self.pointers[slot].data.contains(row)
                || (0..self.machines.len()).any(|id| {
                    self.machines[id].slot == slot
                        && self.cloud.server_of(id).is_some()
                        && self.machines[id].data.contains(row)
                })
        };
        acknowledged
            .rows
            .difference(&acknowledged.accepted_loss)
            .filter(|row| !is_stored(row))
            .copied()
            .collect()
    }
}
