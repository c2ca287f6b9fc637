//! A model of slots, hosts, the provider and the operations, which runs the lifecycle's effects on itself.
//!
//! It is the world of the property tests: `invariant` looks at it after every action, `property` drives it at random.
//! The rules are an argument, so that a broken one can be put in and must be noticed.

mod action;
mod cloud;
mod invariant;
mod operation;
mod property;

use std::collections::BTreeSet;

use super::epoch::Epoch;
use super::event::{Effect, Event};
use super::name::ServerType;
use super::state::{Machine, State, Status};
use super::transition::{Outcome, Refusal};
use cloud::{Cloud, Power};
use invariant::Violation;
use operation::{Ending, Kind, Operation};

/// What a sabotage may exchange.
#[derive(Clone, Copy)]
pub struct Rules {
    pub transition: fn(&Machine, &Event) -> Result<Outcome, Refusal>,
    /// Whether a server's name is unique at the provider, and looked up before a create.
    pub unique_names: bool,
}

/// A row of `user_machines`, and beside it what only the real world knows.
pub struct Row {
    pub slot: usize,
    pub machine: Machine,
    /// Proxied connections that are open.
    pub connections: u32,
    /// True: its host has sent the registration.
    pub registered: bool,
    /// True: its host ran at some time, so that its disk may run again anywhere.
    pub booted: bool,
    /// True: an operator was told that it is replaced or deleted.
    pub condemned: bool,
}

/// The object store's pointer of a slot.
#[derive(Default, Clone, Copy)]
pub struct Pointer {
    pub fence: u32,
    /// The epoch of the machine whose snapshot it names; 0 for none.
    pub writer: u32,
}

pub struct World {
    pub rules: Rules,
    pub pointers: Vec<Pointer>,
    pub rows: Vec<Row>,
    pub operations: Vec<Operation>,
    pub cloud: Cloud,
    /// What cannot be seen in a state, only in a change of it.
    pub seen: BTreeSet<Violation>,
}

impl World {
    pub fn new(rules: Rules, slots: usize) -> Self {
        Self {
            rules,
            pointers: vec![Pointer::default(); slots],
            rows: Vec::new(),
            operations: Vec::new(),
            cloud: Cloud::new(rules.unique_names),
            seen: BTreeSet::new(),
        }
    }

    pub fn active(&self, slot: usize) -> Option<usize> {
        (0..self.rows.len())
            .rev()
            .find(|&id| self.rows[id].slot == slot && self.rows[id].machine.state.is_active())
    }

    /// A provision of a slot without an active machine.
    pub fn begin(&mut self, slot: usize) {
        let epochs = self.rows.iter().filter(|row| row.slot == slot).map(|row| row.machine.epoch);
        let highest = epochs.max().unwrap_or(Epoch::NONE);
        self.insert(slot, Machine { state: State::Provisioning, epoch: highest.next() });
    }

    fn insert(&mut self, slot: usize, machine: Machine) {
        if self.rows.iter().any(|row| row.slot == slot && row.machine.epoch >= machine.epoch) {
            self.seen.insert(Violation::EpochDidNotGrow);
        }
        let row = Row { slot, machine, connections: 0, registered: false, booted: false, condemned: false };
        self.rows.push(row);
        self.operations.push(Operation::new(self.rows.len() - 1, Kind::Boot));
    }

    /// The transaction of one event: compare, set, and the effects.
    pub fn apply(&mut self, id: usize, event: &Event) {
        let before = self.rows[id].machine.state.clone();
        let Ok(Outcome::Moved { next, effects }) = (self.rules.transition)(&self.rows[id].machine, event)
        else {
            return;
        };
        if !before.is_active() && next != before {
            self.seen.insert(Violation::CameBack);
        }
        let replaced = effects.iter().any(|effect| matches!(effect, Effect::Replace { .. }));
        if matches!(event, Event::Registered { .. })
            && self.rules.unique_names
            && self.server_type(id).is_some()
        {
            // A boot takes minutes: a create that was late has been refused by then, for its name was taken.
            self.cloud.in_flight.retain(|late| *late != id);
        }
        let row = &mut self.rows[id];
        row.condemned |= replaced || *event == Event::DeleteRequested;
        row.machine.state = next;
        for effect in effects {
            self.run(id, effect);
        }
    }

    fn run(&mut self, id: usize, effect: Effect) {
        match effect {
            Effect::Replace { status, epoch, .. } => {
                let state =
                    if status == Status::Recovering { State::Recovering } else { State::Provisioning };
                self.insert(self.rows[id].slot, Machine { state, epoch });
            }
            Effect::CancelOperation => self.end_operations(id, Ending::Cancelled),
            Effect::FailOperation { .. } => self.end_operations(id, Ending::Failed),
            Effect::DeleteServer => self.operations.push(Operation::new(id, Kind::Delete)),
            Effect::ChangeType { to } => self.operations.push(Operation::new(id, Kind::Resize(to))),
            Effect::CloseConnections => self.rows[id].connections = 0,
        }
    }

    fn end_operations(&mut self, id: usize, ending: Ending) {
        for operation in self.operations.iter_mut().filter(|operation| operation.machine == id) {
            operation.ending.get_or_insert(ending);
        }
    }

    /// A host takes a backup; one that was replaced may do so too, started from its old disk.
    pub fn back_up(&mut self, id: usize) {
        let epoch = self.rows[id].machine.epoch.0;
        let pointer = &mut self.pointers[self.rows[id].slot];
        if !self.rows[id].booted || pointer.fence > epoch {
            return;
        }
        if pointer.writer > epoch {
            self.seen.insert(Violation::PointerWentBack);
        }
        pointer.writer = epoch;
    }

    /// Whether the machine has a server that is switched on.
    pub fn is_on(&self, id: usize) -> bool {
        self.cloud.of(id).is_some_and(|server| server.power == Power::On)
    }

    /// The type of the machine's server as the provider reports it.
    pub fn server_type(&self, id: usize) -> Option<ServerType> {
        self.cloud.of(id).map(|server| server.server_type.clone())
    }
}
