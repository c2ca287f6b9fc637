//! Everything that can happen in the model, as data that proptest makes up and shrinks.

use proptest::prelude::*;
use proptest::sample::Index;

use super::World;
use super::operation::Luck;
use crate::machine::epoch::Epoch;
use crate::machine::event::{Event, RestoreMode};
use crate::machine::name::ServerType;

pub const SLOTS: usize = 2;

#[derive(Debug, Clone)]
pub enum Action {
    Provision {
        slot: usize,
    },
    Recover {
        slot: usize,
    },
    /// A request or a piece of news for any machine that ever was, however late.
    Tell {
        machine: Index,
        event: Event,
    },
    /// The host of any machine that ever had a server, perhaps from its old disk.
    Host {
        machine: Index,
        does: HostDoes,
    },
    /// A step of an operation that has not ended.
    Work {
        operation: Index,
        luck: Luck,
    },
    ServerDies {
        machine: Index,
    },
    CreatesLand,
    /// An owner's request: it goes where the rows say.
    Connect {
        slot: usize,
    },
}

#[derive(Debug, Clone, Copy)]
pub enum HostDoes {
    Register,
    Heartbeat,
    BackUp,
}

pub fn small() -> ServerType {
    "cpx22".parse().expect("a server type")
}

pub fn large() -> ServerType {
    "cpx32".parse().expect("a server type")
}

/// Sequences that mostly let operations run, so that deep states are reached.
pub fn actions() -> impl Strategy<Value = Vec<Action>> {
    let luck = prop_oneof![
        6 => Just(Luck::Fine), 1 => Just(Luck::LostReply), 1 => Just(Luck::Late), 1 => Just(Luck::Refused)
    ];
    let does = prop_oneof![4 => Just(HostDoes::Register), 1 => Just(HostDoes::Heartbeat), 1 => Just(HostDoes::BackUp)];
    let told = prop_oneof![
        2 => Just(Event::DeleteRequested),
        1 => Just(Event::OperatorFailed),
        2 => Just(Event::ResizeRequested { to: large() }),
        1 => Just(Event::ResizeRequested { to: small() }),
        1 => Just(Event::ServerGone),
        1 => Just(Event::BootFailureReported),
        1 => Just(Event::RegistrationExpired),
        1 => Just(Event::OperationHung),
        1 => (0u32..6).prop_map(|epoch| Event::HealthyHeartbeat { epoch: Epoch(epoch), server_type: small() }),
        1 => Just(Event::Registered { server_type: small() }),
    ];
    let action = prop_oneof![
        2 => (0..SLOTS).prop_map(|slot| Action::Provision { slot }),
        1 => (0..SLOTS).prop_map(|slot| Action::Recover { slot }),
        2 => (any::<Index>(), told).prop_map(|(machine, event)| Action::Tell { machine, event }),
        4 => (any::<Index>(), does).prop_map(|(machine, does)| Action::Host { machine, does }),
        12 => (any::<Index>(), luck).prop_map(|(operation, luck)| Action::Work { operation, luck }),
        1 => any::<Index>().prop_map(|machine| Action::ServerDies { machine }),
        1 => Just(Action::CreatesLand),
        2 => (0..SLOTS).prop_map(|slot| Action::Connect { slot }),
    ];
    proptest::collection::vec(action, 1..120)
}

impl World {
    pub fn act(&mut self, action: &Action) {
        match action {
            Action::Provision { slot } => match self.active(*slot) {
                Some(id) => self.apply(id, &Event::ProvisionRequested { restore: RestoreMode::Empty }),
                None => self.begin(*slot),
            },
            Action::Recover { slot } => {
                if let Some(id) = self.active(*slot) {
                    self.apply(id, &Event::RecoverRequested { restore: RestoreMode::Required });
                }
            }
            Action::Tell { machine, event } if !self.rows.is_empty() => {
                let id = machine.index(self.rows.len());
                self.rows[id].registered |= matches!(event, Event::Registered { .. });
                match event {
                    Event::HealthyHeartbeat { epoch, .. } => self.hear(id, *epoch),
                    event => self.apply(id, event),
                }
            }
            Action::Host { machine, does } if !self.rows.is_empty() => {
                self.host(machine.index(self.rows.len()), *does);
            }
            Action::Work { operation, luck } => {
                let open: Vec<usize> = (0..self.operations.len())
                    .filter(|&index| self.operations[index].ending.is_none())
                    .collect();
                if !open.is_empty() {
                    self.work(*operation.get(&open), *luck);
                }
            }
            Action::ServerDies { machine } if !self.rows.is_empty() => {
                let id = machine.index(self.rows.len());
                self.cloud.delete(id);
            }
            Action::CreatesLand => self.cloud.settle(),
            Action::Connect { slot } => {
                if let Some(id) = self.routed(*slot) {
                    self.rows[id].connections += 1;
                }
            }
            _ => {}
        }
    }

    /// The router's query.
    pub fn routed(&self, slot: usize) -> Option<usize> {
        self.active(slot)
            .filter(|&id| self.rows[id].machine.state.status().is_some_and(super::Status::is_routable))
    }

    /// A heartbeat, however late. The caller of the transition asks the provider for the server before it believes it.
    fn hear(&mut self, id: usize, epoch: Epoch) {
        if let Some(server_type) = self.server_type(id).filter(|_| self.is_on(id)) {
            self.apply(id, &Event::HealthyHeartbeat { epoch, server_type });
        }
    }

    fn host(&mut self, id: usize, does: HostDoes) {
        self.rows[id].booted |= self.cloud.of(id).is_some();
        if !self.rows[id].booted {
            return;
        }
        match (does, self.server_type(id)) {
            (HostDoes::Register, server_type) => {
                self.rows[id].registered = true;
                let server_type = server_type.unwrap_or_else(small);
                self.apply(id, &Event::Registered { server_type });
            }
            (HostDoes::Heartbeat, Some(_)) => self.hear(id, self.rows[id].machine.epoch),
            (HostDoes::Heartbeat, None) => self.apply(id, &Event::ServerGone),
            (HostDoes::BackUp, _) => self.back_up(id),
        }
    }
}
