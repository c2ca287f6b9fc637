//! All actions on the model, as data that proptest generates and shrinks.

use proptest::prelude::*;
use proptest::sample::Index;

use super::LifecycleModel;
use super::operation::{CallResult, OperatorDecision};
use crate::epoch::Epoch;
use crate::event::{Event, RestoreMode};
use crate::name::ServerType;
use crate::state::State;

pub const SLOT_COUNT: usize = 2;

#[derive(Debug, Clone)]
pub enum Action {
    Provision {
        slot: usize,
    },
    Recover {
        slot: usize,
    },
    /// An event for any machine, possibly late.
    Deliver {
        machine: Index,
        event: Event,
    },
    /// An action by the host of any machine that has ever had a server. The host may have been started from an old
    /// disk.
    Host {
        machine: Index,
        host_action: HostAction,
    },
    /// An operator's decision on an open operation.
    Decide {
        operation: Index,
        decision: OperatorDecision,
    },
    Undelete {
        machine: Index,
    },
    /// Completes steps for the slot's machine, and then performs its host's actions, so that the machine normally
    /// serves traffic; random steps rarely get that far.
    Serve {
        slot: usize,
    },
    /// The reconciler deletes servers that are no longer kept.
    Reconcile,
    /// Runs a step of an open operation.
    RunStep {
        operation: Index,
        call_result: CallResult,
    },
    /// The provider loses a server.
    LoseServer {
        machine: Index,
    },
    /// All create requests in flight take effect.
    CompleteCreates,
    /// An owner's request, routed by the machines' rows.
    Connect {
        slot: usize,
    },
}

#[derive(Debug, Clone, Copy)]
pub enum HostAction {
    Register,
    Heartbeat,
    BackUp,
    Write,
}

pub fn small() -> ServerType {
    "cpx22".parse().expect("valid server type")
}

pub fn large() -> ServerType {
    "cpx32".parse().expect("valid server type")
}

/// Generates sequences that mostly let operations run, so that deep states are reached.
pub fn actions() -> impl Strategy<Value = Vec<Action>> {
    let call_result = prop_oneof![
        6 => Just(CallResult::Success),
        1 => Just(CallResult::LostResponse),
        1 => Just(CallResult::TimedOut),
        1 => Just(CallResult::Refused),
        1 => Just(CallResult::BackupFailed),
    ];
    let host_action = prop_oneof![
        4 => Just(HostAction::Register),
        1 => Just(HostAction::Heartbeat),
        1 => Just(HostAction::BackUp),
        3 => Just(HostAction::Write),
    ];
    let event = prop_oneof![
        2 => Just(Event::DeleteRequested),
        1 => Just(Event::FailRequested),
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
    let decision = prop_oneof![
        1 => Just(OperatorDecision::Retry),
        1 => Just(OperatorDecision::AcceptLoss),
        2 => Just(OperatorDecision::Abandon),
    ];
    let action = prop_oneof![
        2 => (0..SLOT_COUNT).prop_map(|slot| Action::Provision { slot }),
        1 => (0..SLOT_COUNT).prop_map(|slot| Action::Recover { slot }),
        2 => (any::<Index>(), event).prop_map(|(machine, event)| Action::Deliver { machine, event }),
        4 => (any::<Index>(), host_action).prop_map(|(machine, host_action)| Action::Host { machine, host_action }),
        12 => (any::<Index>(), call_result)
            .prop_map(|(operation, call_result)| Action::RunStep { operation, call_result }),
        1 => any::<Index>().prop_map(|machine| Action::LoseServer { machine }),
        1 => Just(Action::CompleteCreates),
        1 => (any::<Index>(), decision).prop_map(|(operation, decision)| Action::Decide { operation, decision }),
        1 => any::<Index>().prop_map(|machine| Action::Undelete { machine }),
        2 => Just(Action::Reconcile),
        3 => (0..SLOT_COUNT).prop_map(|slot| Action::Serve { slot }),
        2 => (0..SLOT_COUNT).prop_map(|slot| Action::Connect { slot }),
    ];
    proptest::collection::vec(action, 1..120)
}

impl LifecycleModel {
    pub fn apply_action(&mut self, action: &Action) {
        match action {
            Action::Provision { slot } => match self.active_machine(*slot) {
                Some(id) => self.apply(id, &Event::ProvisionRequested { restore: RestoreMode::Empty }),
                None => self.provision(*slot),
            },
            Action::Recover { slot } => {
                if let Some(id) = self.active_machine(*slot) {
                    self.apply(id, &Event::RecoverRequested { restore: RestoreMode::Required });
                }
            }
            Action::Deliver { machine, event } if !self.machines.is_empty() => {
                let id = machine.index(self.machines.len());
                match event {
                    // The token exists only in the user-data of the machine's server.
                    Event::Registered { .. } => self.run_host_action(id, HostAction::Register),
                    Event::HealthyHeartbeat { epoch, .. } => self.receive_heartbeat(id, *epoch),
                    Event::ResumeRequested { .. } => self.resume(id),
                    event => self.apply(id, event),
                }
            }
            Action::Host { machine, host_action } if !self.machines.is_empty() => {
                self.run_host_action(machine.index(self.machines.len()), *host_action);
            }
            Action::RunStep { operation, call_result } => {
                if let Some(index) = self.find_open_operation(*operation) {
                    self.run_step(index, *call_result);
                }
            }
            Action::Decide { operation, decision } => {
                if let Some(index) = self.find_open_operation(*operation) {
                    self.decide(index, *decision);
                }
            }
            Action::Undelete { machine } if !self.machines.is_empty() => {
                self.undelete(machine.index(self.machines.len()));
            }
            Action::Reconcile => self.reconcile(),
            Action::Serve { slot } => {
                if let Some(id) = self.active_machine(*slot) {
                    self.serve(id);
                }
            }
            Action::LoseServer { machine } if !self.machines.is_empty() => {
                let id = machine.index(self.machines.len());
                self.lose_server(id);
            }
            Action::CompleteCreates => self.cloud.complete_creates(),
            Action::Connect { slot } => {
                if let Some(id) = self.routed_machine(*slot) {
                    self.machines[id].connections += 1;
                    self.write(id);
                }
            }
            _ => {}
        }
    }

    /// Applies an operator's request to resume a machine, under the conditions that the API checks: the server is on,
    /// and the host has sent a heartbeat.
    fn resume(&mut self, id: usize) {
        let Some(server_type) = self.server_type(id).filter(|_| self.is_on(id)) else { return };
        if self.machines[id].has_registered {
            self.receive_heartbeat(id, self.machines[id].host_epoch);
            self.apply(id, &Event::ResumeRequested { server_type });
        }
    }

    /// Runs up to five steps of the machine's open operations. Then its host registers, sends heartbeats and writes a
    /// row.
    fn serve(&mut self, id: usize) {
        for _ in 0..5 {
            let is_open = |index: &usize| {
                self.operations[*index].machine == id && self.operations[*index].outcome.is_none()
            };
            let Some(index) = (0..self.operations.len()).find(is_open) else { break };
            self.run_step(index, CallResult::Success);
        }
        for host_action in
            [HostAction::Register, HostAction::Heartbeat, HostAction::Heartbeat, HostAction::Write]
        {
            self.run_host_action(id, host_action);
        }
    }

    fn find_open_operation(&self, index: Index) -> Option<usize> {
        let open: Vec<usize> =
            (0..self.operations.len()).filter(|&index| self.operations[index].outcome.is_none()).collect();
        (!open.is_empty()).then(|| *index.get(&open))
    }

    /// Finds the machine to which the router sends a slot's requests.
    pub fn routed_machine(&self, slot: usize) -> Option<usize> {
        self.active_machine(slot)
            .filter(|&id| self.machines[id].machine.state.status().is_some_and(super::Status::is_routable))
    }

    /// Applies a heartbeat, which may be late, if the server is on.
    fn receive_heartbeat(&mut self, id: usize, epoch: Epoch) {
        let Some(server_type) = self.server_type(id).filter(|_| self.is_on(id)) else { return };
        self.apply(id, &Event::HealthyHeartbeat { epoch, server_type });
        let row = &mut self.machines[id];
        if row.machine.state.is_active() {
            row.is_power_off_requested = false;
            row.is_unsaved = false;
            row.is_loss_accepted = false;
        }
        row.is_proven |= row.has_registered && row.machine.state.is_active() && epoch == row.machine.epoch;
    }

    /// Registers a host that has restored the snapshot that the pointer names.
    fn register(&mut self, id: usize) {
        let row = &mut self.machines[id];
        if !row.has_registered && matches!(row.machine.state, State::Provisioning | State::Recovering) {
            row.data = self.pointers[row.slot].data.clone();
            row.has_registered = true;
        }
        let server_type = self.server_type(id).unwrap_or_else(small);
        self.apply(id, &Event::Registered { server_type });
    }

    /// Adopts the epoch in a heartbeat response, and resumes the writers of an active machine.
    fn adopt_heartbeat_response(&mut self, id: usize) {
        let row = &mut self.machines[id];
        row.host_epoch = row.host_epoch.max(row.machine.epoch);
        row.is_quiesced &= !row.machine.state.is_active();
    }

    fn run_host_action(&mut self, id: usize, host_action: HostAction) {
        self.machines[id].has_booted |= self.cloud.server_of(id).is_some();
        if !self.machines[id].has_booted {
            return;
        }
        match (host_action, self.server_type(id)) {
            (HostAction::Register, _) => self.register(id),
            (HostAction::Write, _) => self.write(id),
            (HostAction::Heartbeat, Some(_)) => {
                self.receive_heartbeat(id, self.machines[id].host_epoch);
                if self.is_on(id) {
                    self.adopt_heartbeat_response(id);
                }
            }
            (HostAction::Heartbeat, None) => self.apply(id, &Event::ServerGone),
            (HostAction::BackUp, _) => self.back_up(id),
        }
    }
}
