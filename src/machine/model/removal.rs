//! When a server may go: the reconciler of the model, with no time to wait, and what goes with a server.

use super::invariant::Violation;
use super::{Row, World};
use crate::machine::event::Event;
use crate::machine::state::State;

impl World {
    /// Whether the server of a machine that left its slot is no longer kept. The times for which it is kept are over.
    pub fn is_removable(&self, id: usize) -> bool {
        let row = &self.rows[id];
        if row.machine.state.is_active() || self.is_under_way(id) {
            return false;
        }
        if !row.registered || !self.rules.keeps_predecessors {
            return true;
        }
        let later = self.rows.iter().filter(|other| {
            other.slot == row.slot && other.machine.epoch > row.machine.epoch && other.registered
        });
        // A machine whose server the provider has lost replaces no other.
        let mut later = later.filter(|other| {
            let is_deleted = matches!(other.machine.state, State::Deleted { .. });
            if other.is_server_known_gone() && self.rules.distrusts_lost_successors {
                is_deleted
            } else {
                other.proven
            }
        });
        !row.unsaved && (matches!(row.machine.state, State::Deleted { .. }) || later.next().is_some())
    }

    fn is_under_way(&self, id: usize) -> bool {
        self.operations.iter().any(|operation| operation.machine == id && operation.ending.is_none())
    }

    /// Deletes the servers that are no longer kept.
    pub fn reconcile(&mut self) {
        for id in 0..self.rows.len() {
            if self.is_removable(id) && !self.cloud.in_flight.contains(&id) {
                if self.finds_server_again(id) {
                    self.rows[id].unsaved = true;
                    continue;
                }
                if self.is_last_copy(id) {
                    self.seen.insert(Violation::LastServerRemoved);
                }
                self.remove(id);
            }
        }
    }

    /// Whether the provider has the server of a machine that served and failed because it was gone; then that is noted.
    pub fn finds_server_again(&mut self, id: usize) -> bool {
        let row = &self.rows[id];
        let was_gone = row.is_server_known_gone() && !row.removed;
        let may_be_found = was_gone && row.registered && self.rules.looks_for_lost_servers;
        let is_found = may_be_found && self.cloud.of(id).is_some();
        if is_found {
            self.apply(id, &Event::ServerFound);
        }
        is_found
    }

    /// Whether a machine that was replaced, and served, is the only one of its slot whose server may still exist.
    fn is_last_copy(&self, id: usize) -> bool {
        let row = &self.rows[id];
        let is_other = |other: &&Row| other.slot == row.slot && other.machine.epoch > row.machine.epoch;
        let holds = |other: &Row| other.registered && !other.is_server_known_gone();
        let is_deleted = |other: &Row| matches!(other.machine.state, State::Deleted { .. });
        let mut later = self.rows.iter().filter(is_other);
        let was_there = row.registered && self.cloud.of(id).is_some() && !is_deleted(row);
        was_there && !later.any(|other| holds(other) || is_deleted(other))
    }

    /// Deletes a server. What it alone held is lost; an operator may have accepted that.
    pub fn remove(&mut self, id: usize) {
        let row = &mut self.rows[id];
        row.removed = true;
        if row.loss_accepted {
            let forgiven = row.data.clone();
            self.acknowledged[row.slot].forgiven.extend(forgiven);
        }
        self.cloud.delete(id);
    }

    /// The provider loses a server with its disk: what it alone held is nobody's to keep.
    pub fn lose(&mut self, id: usize) {
        if self.cloud.of(id).is_none() {
            return;
        }
        self.cloud.delete(id);
        let slot = self.rows[id].slot;
        let lost = self.missing_rows(slot);
        self.acknowledged[slot].forgiven.extend(lost);
    }

    /// Acknowledged rows of a slot that neither a snapshot nor any server holds.
    pub fn missing_rows(&self, slot: usize) -> Vec<u32> {
        let acknowledged = &self.acknowledged[slot];
        let held = |row: &u32| {
            self.pointers[slot].data.contains(row)
                || (0..self.rows.len()).any(|id| {
                    self.rows[id].slot == slot
                        && self.cloud.of(id).is_some()
                        && self.rows[id].data.contains(row)
                })
        };
        acknowledged.rows.difference(&acknowledged.forgiven).filter(|row| !held(row)).copied().collect()
    }
}
