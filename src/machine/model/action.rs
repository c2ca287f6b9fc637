//! Everything that can happen in the model, as data that proptest makes up and shrinks.

use proptest::prelude::*;
use proptest::sample::Index;

use super::World;
use super::operation::{Decision, Luck};
use crate::machine::epoch::Epoch;
use crate::machine::event::{Event, RestoreMode};
use crate::machine::name::ServerType;
use crate::machine::state::State;

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
    /// An operator's word on an operation that has not ended.
    Decide {
        operation: Index,
        decision: Decision,
    },
    Undelete {
        machine: Index,
    },
    /// All goes well for the slot's machine until it serves: without this, random steps seldom get that far.
    Serve {
        slot: usize,
    },
    /// The reconciler deletes what is no longer kept.
    Reconcile,
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
    Write,
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
        6 => Just(Luck::Fine), 1 => Just(Luck::LostReply), 1 => Just(Luck::Late), 1 => Just(Luck::Refused),
        1 => Just(Luck::Asks)
    ];
    let does = prop_oneof![4 => Just(HostDoes::Register), 1 => Just(HostDoes::Heartbeat), 1 => Just(HostDoes::BackUp), 3 => Just(HostDoes::Write)];
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
        1 => Just(Event::ResumeRequested { server_type: small() }),
    ];
    let decision = prop_oneof![1 => Just(Decision::Retry), 1 => Just(Decision::AcceptLoss), 2 => Just(Decision::Abandon)];
    let action = prop_oneof![
        2 => (0..SLOTS).prop_map(|slot| Action::Provision { slot }),
        1 => (0..SLOTS).prop_map(|slot| Action::Recover { slot }),
        2 => (any::<Index>(), told).prop_map(|(machine, event)| Action::Tell { machine, event }),
        4 => (any::<Index>(), does).prop_map(|(machine, does)| Action::Host { machine, does }),
        12 => (any::<Index>(), luck).prop_map(|(operation, luck)| Action::Work { operation, luck }),
        1 => any::<Index>().prop_map(|machine| Action::ServerDies { machine }),
        1 => Just(Action::CreatesLand),
        1 => (any::<Index>(), decision).prop_map(|(operation, decision)| Action::Decide { operation, decision }),
        1 => any::<Index>().prop_map(|machine| Action::Undelete { machine }),
        2 => Just(Action::Reconcile),
        3 => (0..SLOTS).prop_map(|slot| Action::Serve { slot }),
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
                match event {
                    // Its token is in its server's user-data alone.
                    Event::Registered { .. } => self.host(id, HostDoes::Register),
                    Event::HealthyHeartbeat { epoch, .. } => self.hear(id, *epoch),
                    Event::ResumeRequested { .. } => self.resume(id),
                    event => self.apply(id, event),
                }
            }
            Action::Host { machine, does } if !self.rows.is_empty() => {
                self.host(machine.index(self.rows.len()), *does);
            }
            Action::Work { operation, luck } => {
                if let Some(index) = self.open_operation(*operation) {
                    self.work(index, *luck);
                }
            }
            Action::Decide { operation, decision } => {
                if let Some(index) = self.open_operation(*operation) {
                    self.decide(index, *decision);
                }
            }
            Action::Undelete { machine } if !self.rows.is_empty() => {
                self.undelete(machine.index(self.rows.len()));
            }
            Action::Reconcile => self.reconcile(),
            Action::Serve { slot } => {
                if let Some(id) = self.active(*slot) {
                    self.serve(id);
                }
            }
            Action::ServerDies { machine } if !self.rows.is_empty() => {
                let id = machine.index(self.rows.len());
                self.lose(id);
            }
            Action::CreatesLand => self.cloud.settle(),
            Action::Connect { slot } => {
                if let Some(id) = self.routed(*slot) {
                    self.rows[id].connections += 1;
                    self.write(id);
                }
            }
            _ => {}
        }
    }

    /// The operator's request, whose caller has asked the provider for the server, and has had the host's heartbeat.
    fn resume(&mut self, id: usize) {
        let Some(server_type) = self.server_type(id).filter(|_| self.is_on(id)) else { return };
        if self.rows[id].registered {
            self.hear(id, self.rows[id].host_epoch);
            self.apply(id, &Event::ResumeRequested { server_type });
        }
    }

    fn serve(&mut self, id: usize) {
        for _ in 0..5 {
            let of_machine = |index: &usize| {
                self.operations[*index].machine == id && self.operations[*index].ending.is_none()
            };
            let Some(index) = (0..self.operations.len()).find(of_machine) else { break };
            self.work(index, Luck::Fine);
        }
        for does in [HostDoes::Register, HostDoes::Heartbeat, HostDoes::Heartbeat, HostDoes::Write] {
            self.host(id, does);
        }
    }

    fn open_operation(&self, index: Index) -> Option<usize> {
        let open: Vec<usize> =
            (0..self.operations.len()).filter(|&index| self.operations[index].ending.is_none()).collect();
        (!open.is_empty()).then(|| *index.get(&open))
    }

    /// The router's query.
    pub fn routed(&self, slot: usize) -> Option<usize> {
        self.active(slot)
            .filter(|&id| self.rows[id].machine.state.status().is_some_and(super::Status::is_routable))
    }

    /// A heartbeat, however late. The caller of the transition asks the provider for the server before it believes it.
    fn hear(&mut self, id: usize, epoch: Epoch) {
        let Some(server_type) = self.server_type(id).filter(|_| self.is_on(id)) else { return };
        self.apply(id, &Event::HealthyHeartbeat { epoch, server_type });
        let row = &mut self.rows[id];
        if row.machine.state.is_active() {
            row.power_off_ordered = false;
            row.unsaved = false;
            row.loss_accepted = false;
        }
        row.proven |= row.registered && row.machine.state.is_active() && epoch == row.machine.epoch;
    }

    /// A host registers once it has restored the snapshot that the pointer names.
    fn register(&mut self, id: usize) {
        let row = &mut self.rows[id];
        if !row.registered && matches!(row.machine.state, State::Provisioning | State::Recovering) {
            row.data = self.pointers[row.slot].data.clone();
            row.registered = true;
        }
        let server_type = self.server_type(id).unwrap_or_else(small);
        self.apply(id, &Event::Registered { server_type });
    }

    /// What the answer to a heartbeat says.
    fn obey(&mut self, id: usize) {
        let row = &mut self.rows[id];
        row.host_epoch = row.host_epoch.max(row.machine.epoch);
        row.quiesced &= !row.machine.state.is_active();
    }

    fn host(&mut self, id: usize, does: HostDoes) {
        self.rows[id].booted |= self.cloud.of(id).is_some();
        if !self.rows[id].booted {
            return;
        }
        match (does, self.server_type(id)) {
            (HostDoes::Register, _) => self.register(id),
            (HostDoes::Write, _) => self.write(id),
            (HostDoes::Heartbeat, Some(_)) => {
                self.hear(id, self.rows[id].host_epoch);
                if self.is_on(id) {
                    self.obey(id);
                }
            }
            (HostDoes::Heartbeat, None) => self.apply(id, &Event::ServerGone),
            (HostDoes::BackUp, _) => self.back_up(id),
        }
    }
}
