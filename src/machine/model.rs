//! A model of slots, hosts, their data, the provider and the operations. It applies the lifecycle's effects to
//! itself.
//!
//! The property tests run on it: `property` drives it at random, and `invariant` checks it after every action. The
//! rules are a parameter, so that a test can break a rule and check that the invariants detect it.

mod action;
mod cloud;
mod invariant;
mod operation;
mod property;
mod removal;

use std::collections::BTreeSet;

use super::epoch::Epoch;
use super::event::{Effect, Event, ServerPower};
use super::name::ServerType;
use super::state::{FailureCause, Machine, State, Status};
use super::transition::{Outcome, Refusal};
use cloud::Cloud;
use invariant::Violation;
use operation::{Operation, OperationKind, OperationOutcome};

/// The rules that a test can break.
#[derive(Clone, Copy)]
pub struct Rules {
    pub transition: fn(&Machine, &Event) -> Result<Outcome, Refusal>,
    /// Whether a server's name is unique at the provider and is looked up before the server is created.
    pub has_unique_names: bool,
    /// Whether a machine that left its slot without a final backup is marked as unsaved.
    pub marks_unsaved: bool,
    /// Whether a replaced server is kept until its successor has served traffic.
    pub keeps_predecessors: bool,
    /// Whether a host's writers stop before its final backup.
    pub stops_writers: bool,
    /// Whether a slot returns to an older machine if the last registered machine's server is missing.
    pub reinstates_older: bool,
    /// Whether a slot returns to an older machine only if no newer machine has stored a snapshot.
    pub respects_snapshots: bool,
    /// Whether a replaced server is kept if its successor's server is lost.
    pub keeps_if_successor_lost: bool,
    /// Whether a missing server is looked up again before its final backup is skipped and before it is deleted.
    pub rechecks_missing_servers: bool,
}

/// Rows that an owner has written, by number.
pub type Data = BTreeSet<u32>;

/// A row in `user_machines`, with facts about the real world that the database does not record.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is one database column or one fact about the real world"
)]
pub struct MachineRow {
    pub slot: usize,
    pub machine: Machine,
    /// Number of open proxied connections.
    pub connections: u32,
    /// Whether its host has registered.
    pub has_registered: bool,
    /// Whether its host has sent a healthy heartbeat since it registered.
    pub is_proven: bool,
    /// Whether its host has ever run. If so, the model may start it again from its old disk at any later time.
    pub has_booted: bool,
    /// The data on its disk.
    pub data: Data,
    /// Whether its writers are stopped.
    pub is_quiesced: bool,
    /// Whether it has written the pointer since it registered.
    pub has_backed_up: bool,
    /// The epoch that its host uses: the provisioned one, or a higher one from a heartbeat response.
    pub host_epoch: Epoch,
    pub is_power_off_requested: bool,
    /// Whether an operator abandoned the operation that would have powered its server on.
    pub may_stay_off: bool,
    /// Whether it left its slot without a final backup, and no operator accepted the loss.
    pub is_unsaved: bool,
    /// Whether an operator accepted the loss of its data outside snapshots.
    pub is_loss_accepted: bool,
    /// Whether the provider has confirmed that its server was deleted.
    pub is_removed: bool,
}

impl MachineRow {
    /// Returns whether the machine's server is known to be missing at the provider or deleted.
    pub fn is_server_known_gone(&self) -> bool {
        let mut state = &self.machine.state;
        while let State::Retired { previous } | State::Deleted { previous } = state {
            state = previous;
        }
        self.is_removed || matches!(state, State::Failed { cause: FailureCause::ServerGone })
    }
}

/// A slot's pointer in the object store, with the snapshot that it names.
#[derive(Default, Clone)]
pub struct Pointer {
    pub fence_epoch: u32,
    /// The epoch of the machine that took the snapshot; 0 if there is no snapshot.
    pub writer_epoch: u32,
    pub data: Data,
}

/// The rows whose writes were acknowledged to a slot's owner.
#[derive(Default, Clone)]
pub struct AcknowledgedRows {
    pub rows: Data,
    /// Rows whose loss an operator accepted, or that were lost when the provider lost a server.
    pub accepted_loss: Data,
}

pub struct LifecycleModel {
    pub rules: Rules,
    pub pointers: Vec<Pointer>,
    pub acknowledged: Vec<AcknowledgedRows>,
    pub machines: Vec<MachineRow>,
    pub operations: Vec<Operation>,
    pub cloud: Cloud,
    /// Violations in transitions, which cannot be detected from a single state.
    pub transition_violations: BTreeSet<Violation>,
    next_row: u32,
}

impl LifecycleModel {
    pub fn new(rules: Rules, slots: usize) -> Self {
        Self {
            rules,
            pointers: vec![Pointer::default(); slots],
            acknowledged: vec![AcknowledgedRows::default(); slots],
            machines: Vec::new(),
            operations: Vec::new(),
            cloud: Cloud::new(rules.has_unique_names),
            transition_violations: BTreeSet::new(),
            next_row: 1,
        }
    }

    pub fn active_machine(&self, slot: usize) -> Option<usize> {
        (0..self.machines.len())
            .rev()
            .find(|&id| self.machines[id].slot == slot && self.machines[id].machine.state.is_active())
    }

    /// Provisions a slot without an active machine.
    pub fn provision(&mut self, slot: usize) {
        let epoch = self.highest_epoch(slot).next();
        self.insert(slot, Machine { state: State::Provisioning, epoch });
    }

    fn highest_epoch(&self, slot: usize) -> Epoch {
        let epochs = self.machines.iter().filter(|row| row.slot == slot).map(|row| row.machine.epoch);
        epochs.max().unwrap_or(Epoch::NONE)
    }

    fn insert(&mut self, slot: usize, machine: Machine) {
        self.check_epoch_growth(slot, machine.epoch);
        let host_epoch = machine.epoch;
        self.machines.push(MachineRow {
            slot,
            machine,
            connections: 0,
            has_registered: false,
            is_proven: false,
            has_booted: false,
            data: Data::new(),
            is_quiesced: false,
            has_backed_up: false,
            host_epoch,
            is_power_off_requested: false,
            may_stay_off: false,
            is_unsaved: false,
            is_loss_accepted: false,
            is_removed: false,
        });
        self.operations.push(Operation::new(self.machines.len() - 1, OperationKind::Boot));
    }

    fn check_epoch_growth(&mut self, slot: usize, epoch: Epoch) {
        if self.highest_epoch(slot) >= epoch {
            self.transition_violations.insert(Violation::EpochDidNotIncrease);
        }
    }

    /// Applies one event as a transaction: the new state and its effects.
    pub fn apply(&mut self, id: usize, event: &Event) {
        let before = self.machines[id].machine.state.clone();
        let Ok(Outcome::Moved { next, effects }) = (self.rules.transition)(&self.machines[id].machine, event)
        else {
            return;
        };
        if !before.is_active() && next.is_active() && !self.may_take_slot_back(id, event) {
            self.transition_violations.insert(Violation::InvalidReinstatement);
        }
        if matches!(event, Event::Registered { .. })
            && self.rules.has_unique_names
            && self.server_type(id).is_some()
        {
            // A boot takes minutes. By then, a late create request has been rejected because the name was taken.
            self.cloud.pending_creates.retain(|late| *late != id);
        }
        self.machines[id].machine.state = next;
        for effect in effects {
            self.apply_effect(id, effect);
        }
    }

    /// Returns whether a machine that left its slot may become active again: only through a reinstatement, and only if
    /// no later machine has registered and still has a server.
    fn may_take_slot_back(&self, id: usize, event: &Event) -> bool {
        let row = &self.machines[id];
        let is_later = |other: &&MachineRow| {
            other.slot == row.slot
                && other.machine.epoch > row.machine.epoch
                && other.has_registered
                && !other.is_server_known_gone()
        };
        matches!(event, Event::Reinstated { .. }) && !self.machines.iter().any(|other| is_later(&other))
    }

    fn apply_effect(&mut self, id: usize, effect: Effect) {
        match effect {
            Effect::Replace { status, epoch, .. } => {
                let state =
                    if status == Status::Recovering { State::Recovering } else { State::Provisioning };
                self.insert(self.machines[id].slot, Machine { state, epoch });
            }
            Effect::CancelOperation => self.end_operations(id, OperationOutcome::Cancelled),
            Effect::FailOperation { .. } => self.end_operations(id, OperationOutcome::Failed),
            Effect::DeleteServer => self.operations.push(Operation::new(id, OperationKind::Delete)),
            Effect::PowerOn => self.operations.push(Operation::new(id, OperationKind::PowerOn)),
            Effect::ChangeType { to } => self.operations.push(Operation::new(id, OperationKind::Resize(to))),
            Effect::CloseConnections => self.machines[id].connections = 0,
            Effect::ReinstatePredecessor => self.reinstate_predecessor(id),
            Effect::DeletePredecessor => {
                let has_registered = self.machines[id].has_registered;
                if let Some(last) = self.find_last_registered(id).filter(|_| !has_registered)
                    && !self.machines[last].is_removed
                {
                    self.apply(last, &Event::SuccessorDeleted);
                }
            }
            Effect::Reinstate { epoch } => {
                self.check_epoch_growth(self.machines[id].slot, epoch);
                let row = &mut self.machines[id];
                row.machine.epoch = epoch;
                self.operations.push(Operation::new(id, OperationKind::Reinstate));
            }
        }
    }

    /// Lists the slot's earlier machines that have registered, newest first.
    pub fn list_registered_before(&self, id: usize) -> Vec<usize> {
        let row = &self.machines[id];
        let is_earlier = |other: &usize| {
            let other = &self.machines[*other];
            other.slot == row.slot && other.machine.epoch < row.machine.epoch && other.has_registered
        };
        let mut earlier: Vec<usize> = (0..self.machines.len()).filter(is_earlier).collect();
        earlier.sort_by_key(|other| std::cmp::Reverse(self.machines[*other].machine.epoch));
        earlier
    }

    /// Finds the slot's newest earlier machine that has registered.
    pub fn find_last_registered(&self, id: usize) -> Option<usize> {
        self.list_registered_before(id).first().copied()
    }

    /// Finds the machine that gets the slot back: the newest registered one whose server is not known to be missing,
    /// unless it or a later machine was deleted, or a later machine has stored a snapshot.
    fn find_reinstatable_machine(&self, id: usize) -> Option<usize> {
        for earlier in self.list_registered_before(id) {
            let row = &self.machines[earlier];
            let is_retired = matches!(row.machine.state, State::Retired { .. });
            if !row.is_server_known_gone() {
                return is_retired.then_some(earlier);
            }
            let has_newer_snapshot = row.has_backed_up && self.rules.respects_snapshots;
            if !self.rules.reinstates_older || !is_retired || has_newer_snapshot {
                return None;
            }
        }
        None
    }

    fn reinstate_predecessor(&mut self, id: usize) {
        let Some(last) = self.find_reinstatable_machine(id) else { return };
        let previous = Box::new(self.machines[id].machine.state.clone());
        self.machines[id].machine.state = State::Retired { previous };
        self.reinstate(last);
    }

    /// Returns the slot to the machine.
    pub fn reinstate(&mut self, id: usize) {
        let epoch = self.highest_epoch(self.machines[id].slot).next();
        let may_be_off = self.machines[id].is_power_off_requested;
        let power = if may_be_off { ServerPower::MaybeOff } else { ServerPower::On };
        self.apply(id, &Event::Reinstated { epoch, power });
    }

    fn end_operations(&mut self, id: usize, outcome: OperationOutcome) {
        for operation in self.operations.iter_mut().filter(|operation| operation.machine == id) {
            operation.outcome.get_or_insert(outcome);
        }
    }

    /// Writes a row on the machine, as its owner or a program would, and acknowledges it.
    pub fn write(&mut self, id: usize) {
        let row = &mut self.machines[id];
        if !row.has_registered || row.is_quiesced || !self.cloud.is_on(id) {
            return;
        }
        row.data.insert(self.next_row);
        self.acknowledged[row.slot].rows.insert(self.next_row);
        self.next_row += 1;
    }

    /// Takes a backup on a host, unless the fence is above its epoch. The host may be a replaced one that was started
    /// from its old disk.
    pub fn back_up(&mut self, id: usize) {
        let row = &self.machines[id];
        let epoch = row.host_epoch.0;
        let pointer = &mut self.pointers[row.slot];
        // A host that is still restoring takes no backups: they start after the registration.
        if !row.has_booted || !row.has_registered || pointer.fence_epoch > epoch {
            return;
        }
        if pointer.writer_epoch > epoch {
            self.transition_violations.insert(Violation::PointerMovedByReplacedMachine);
        }
        pointer.writer_epoch = epoch;
        pointer.data = row.data.clone();
        self.machines[id].has_backed_up = true;
    }

    /// Returns whether the machine has a server that is powered on.
    pub fn is_on(&self, id: usize) -> bool {
        self.cloud.is_on(id)
    }

    /// Returns the type of the machine's server as the provider reports it.
    pub fn server_type(&self, id: usize) -> Option<ServerType> {
        self.cloud.server_of(id).map(|server| server.server_type.clone())
    }
}
