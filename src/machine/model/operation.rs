//! The step runner of the model: the steps of each kind of operation, with failures of the provider.

use super::World;
use super::cloud::Power;
use crate::event::{CreationFailure, Event};
use crate::name::ServerType;
use crate::state::State;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    Succeeded,
    Failed,
    Cancelled,
}

#[derive(Debug, Clone)]
pub enum OperationKind {
    Boot,
    Delete,
    Resize(ServerType),
    Reinstate,
    PowerOn,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    LastBackup,
    Fence,
    PowerOffServer,
    CreateServer,
    AwaitRegistration,
    SwitchOn,
    AwaitHost,
    StartServer,
    PowerOff,
    ChangeType,
    PowerOn,
    AwaitHealth,
}

pub struct Operation {
    pub machine: usize,
    pub ending: Option<Ending>,
    /// Whether it waits for an operator's decision.
    pub awaits_decision: bool,
    accept_loss: bool,
    kind: OperationKind,
    step: Step,
}

/// The result of the one call of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallResult {
    Success,
    /// The call took effect, but its response was lost, or the process was killed before recording it.
    LostReply,
    /// The call timed out; it may still take effect.
    Late,
    /// Refused permanently; or the host never registers, never responds again, or is unreachable.
    Refused,
    /// The host responds but takes no final backup; other steps treat this as [`Self::Late`].
    BackupFailed,
}

/// An operator's decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// The waiting step runs again.
    Retry,
    AcceptLoss,
    Abandon,
}

impl Operation {
    pub fn new(machine: usize, kind: OperationKind) -> Self {
        let step = match kind {
            OperationKind::Boot | OperationKind::Delete => Step::LastBackup,
            OperationKind::Resize(_) => Step::PowerOff,
            OperationKind::Reinstate => Step::Fence,
            OperationKind::PowerOn => Step::StartServer,
        };
        Self { machine, ending: None, awaits_decision: false, accept_loss: false, kind, step }
    }
}

impl World {
    /// Makes one attempt at the operation's current step.
    pub fn run_step(&mut self, index: usize, call_result: CallResult) {
        let operation = &self.operations[index];
        if operation.ending.is_some() || operation.awaits_decision {
            return;
        }
        let id = operation.machine;
        match operation.step {
            Step::LastBackup => self.last_backup(index, id, call_result),
            Step::Fence => {
                let epoch = self.rows[id].machine.epoch.0;
                let pointer = &mut self.pointers[self.rows[id].slot];
                pointer.fence = pointer.fence.max(epoch);
                let reinstates = matches!(self.operations[index].kind, OperationKind::Reinstate);
                let next = if reinstates { Step::SwitchOn } else { Step::PowerOffServer };
                self.advance(index, call_result, next);
            }
            Step::PowerOffServer => self.power_off_server(index, id, call_result),
            Step::CreateServer => self.create(index, id, call_result),
            Step::AwaitRegistration if self.is_booting(id) => {
                if call_result == CallResult::Refused {
                    self.apply(id, &Event::RegistrationExpired);
                }
            }
            Step::AwaitRegistration => self.end(index, Ending::Succeeded),
            Step::SwitchOn => self.switch_on(index, id, call_result),
            Step::AwaitHost => {
                if call_result == CallResult::Success && self.is_on(id) {
                    self.rows[id].quiesced = false;
                }
                if matches!(call_result, CallResult::Success | CallResult::Refused) {
                    self.end(index, Ending::Succeeded);
                }
            }
            Step::StartServer => {
                if matches!(call_result, CallResult::Success | CallResult::LostReply) {
                    self.cloud.set_power(id, Power::On);
                }
                if call_result == CallResult::Success {
                    self.end(index, Ending::Succeeded);
                }
            }
            Step::PowerOff | Step::ChangeType | Step::PowerOn | Step::AwaitHealth => {
                self.resize(index, id, call_result);
            }
        }
    }

    /// The machine that the operation takes out of service.
    fn outgoing(&self, index: usize, id: usize) -> Option<usize> {
        match self.operations[index].kind {
            OperationKind::Delete => self.rows[id].registered.then_some(id),
            _ => self.last_registered(id),
        }
    }

    fn last_backup(&mut self, index: usize, id: usize, call_result: CallResult) {
        let outgoing = self.outgoing(index, id);
        let Some(outgoing) = outgoing.filter(|&outgoing| {
            !self.rows[outgoing].is_server_known_gone() || self.detect_returned_server(outgoing)
        }) else {
            return self.advance(index, call_result, Step::Fence);
        };
        if self.rows[outgoing].power_off_ordered {
            return self.advance(index, call_result, self.after_backup(index));
        }
        // The deletion of that machine takes the backup.
        let deletes = |other: &Operation| {
            other.machine == outgoing && other.ending.is_none() && matches!(other.kind, OperationKind::Delete)
        };
        if self.operations.iter().enumerate().any(|(other, operation)| other != index && deletes(operation)) {
            return;
        }
        let reachable = self.is_on(outgoing);
        match call_result {
            CallResult::Success | CallResult::LostReply if reachable => {
                self.rows[outgoing].quiesced = self.rules.stops_writers;
                let before = self.pointers[self.rows[outgoing].slot].writer;
                self.back_up(outgoing);
                let wrote = self.pointers[self.rows[outgoing].slot].writer >= before
                    && self.pointers[self.rows[outgoing].slot].data == self.rows[outgoing].data;
                if wrote {
                    self.rows[outgoing].unsaved = false;
                    self.advance(index, call_result, self.after_backup(index));
                } else {
                    self.request_decision(index, outgoing);
                }
            }
            CallResult::BackupFailed if reachable => self.request_decision(index, outgoing),
            CallResult::Refused | CallResult::Success => self.skip_backup(index, outgoing),
            _ => {}
        }
    }

    /// Requests an operator's decision, unless the loss was accepted before.
    fn request_decision(&mut self, index: usize, outgoing: usize) {
        if self.operations[index].accept_loss {
            self.skip_backup(index, outgoing);
        } else {
            self.operations[index].awaits_decision = true;
        }
    }

    fn skip_backup(&mut self, index: usize, outgoing: usize) {
        let accepted = self.operations[index].accept_loss;
        let row = &mut self.rows[outgoing];
        row.loss_accepted |= accepted;
        row.unsaved = self.rules.marks_unsaved && !accepted;
        self.operations[index].step = self.after_backup(index);
    }

    fn after_backup(&self, index: usize) -> Step {
        if matches!(self.operations[index].kind, OperationKind::Delete) {
            Step::PowerOffServer
        } else {
            Step::Fence
        }
    }

    /// Applies an operator's decision about a waiting operation, or the abandonment of an operation.
    pub fn decide(&mut self, index: usize, decision: Decision) {
        let operation = &mut self.operations[index];
        if operation.ending.is_some() {
            return;
        }
        let id = operation.machine;
        match (decision, operation.kind.clone()) {
            (Decision::AcceptLoss, _) if operation.awaits_decision => {
                operation.awaits_decision = false;
                operation.accept_loss = true;
            }
            (Decision::Retry, _) => operation.awaits_decision = false,
            (Decision::AcceptLoss, _) => {}
            (Decision::Abandon, OperationKind::Boot) => self.apply(id, &Event::OperationAbandoned),
            (Decision::Abandon, OperationKind::Delete) => {
                if !self.undelete(id) && !self.rows[id].registered {
                    self.end(index, Ending::Cancelled);
                }
            }
            (Decision::Abandon, OperationKind::Resize(_)) => operation.step = Step::PowerOn,
            (Decision::Abandon, OperationKind::Reinstate | OperationKind::PowerOn) => {
                self.rows[id].may_stay_off = true;
                self.end(index, Ending::Cancelled);
            }
        }
    }

    /// Undoes the deletion. Returns whether the machine has its slot back.
    pub fn undelete(&mut self, id: usize) -> bool {
        let row = &self.rows[id];
        let is_deleted = matches!(row.machine.state, State::Deleted { .. });
        let newer = self.rows.iter().any(|other| {
            other.slot == row.slot && other.machine.epoch > row.machine.epoch && other.registered
        });
        if !is_deleted || row.removed || !row.registered || newer || self.active(row.slot).is_some() {
            return false;
        }
        self.reinstate(id);
        true
    }

    fn power_off_server(&mut self, index: usize, id: usize, call_result: CallResult) {
        if let Some(outgoing) =
            self.outgoing(index, id).filter(|&outgoing| !self.rows[outgoing].is_server_known_gone())
        {
            self.rows[outgoing].power_off_ordered = true;
            if matches!(call_result, CallResult::Success | CallResult::LostReply) {
                self.cloud.set_power(outgoing, Power::Off);
            }
        }
        // A refusal by the provider does not block the new machine.
        let passes = matches!(call_result, CallResult::Success | CallResult::Refused);
        if matches!(self.operations[index].kind, OperationKind::Delete) {
            if passes {
                self.end(index, Ending::Succeeded);
            }
        } else if passes {
            self.operations[index].step = Step::CreateServer;
        }
    }

    fn switch_on(&mut self, index: usize, id: usize, call_result: CallResult) {
        if self.cloud.server_of(id).is_none() {
            self.apply(id, &Event::ServerGone);
            return self.end(index, Ending::Succeeded);
        }
        if matches!(call_result, CallResult::Success | CallResult::LostReply) {
            self.cloud.set_power(id, Power::On);
        }
        if call_result == CallResult::Success {
            let row = &mut self.rows[id];
            row.power_off_ordered = false;
            row.unsaved = false;
            row.loss_accepted = false;
        }
        self.advance(index, call_result, Step::AwaitHost);
    }

    fn create(&mut self, index: usize, id: usize, call_result: CallResult) {
        if self.cloud.find_by_name(id).is_some() {
            return self.advance(index, call_result, Step::AwaitRegistration);
        }
        // The machine has registered or failed, so no second server is created.
        if !self.is_booting(id) {
            return self.end(index, Ending::Succeeded);
        }
        match call_result {
            CallResult::Success => {
                self.cloud.create(id);
                self.operations[index].step = Step::AwaitRegistration;
            }
            CallResult::LostReply => self.cloud.create(id),
            CallResult::Late => self.cloud.in_flight.push(id),
            CallResult::Refused => {
                self.apply(id, &Event::CreationFailed { why: CreationFailure::ProviderRefused });
            }
            CallResult::BackupFailed => {}
        }
    }

    fn resize(&mut self, index: usize, id: usize, call_result: CallResult) {
        let (State::Resizing { .. }, OperationKind::Resize(to)) =
            (&self.rows[id].machine.state, self.operations[index].kind.clone())
        else {
            return self.end(index, Ending::Succeeded);
        };
        let Some(server_type) = self.server_type(id) else {
            return self.apply(id, &Event::ServerGone);
        };
        let takes_effect = matches!(call_result, CallResult::Success | CallResult::LostReply);
        match self.operations[index].step {
            // Every failure leads to the power-on step.
            Step::PowerOff | Step::ChangeType if call_result == CallResult::Refused => {
                self.operations[index].step = Step::PowerOn;
            }
            Step::PowerOff => {
                if takes_effect {
                    self.cloud.set_power(id, Power::Off);
                }
                self.advance(index, call_result, Step::ChangeType);
            }
            Step::ChangeType => {
                if takes_effect {
                    self.cloud.change_type(id, &to);
                }
                self.advance(index, call_result, Step::PowerOn);
            }
            _ if call_result == CallResult::Refused => self.apply(id, &Event::ResizeFailed),
            Step::PowerOn => {
                if takes_effect {
                    self.cloud.set_power(id, Power::On);
                }
                self.advance(index, call_result, Step::AwaitHealth);
            }
            _ if call_result == CallResult::Success && server_type == to => {
                self.apply(id, &Event::ResizeSucceeded);
                self.end(index, Ending::Succeeded);
            }
            _ if call_result == CallResult::Success => self.apply(id, &Event::ResizeReverted),
            _ => {}
        }
    }

    fn is_booting(&self, id: usize) -> bool {
        matches!(self.rows[id].machine.state, State::Provisioning | State::Recovering)
    }

    fn advance(&mut self, index: usize, call_result: CallResult, next: Step) {
        if call_result == CallResult::Success {
            self.operations[index].step = next;
        }
    }

    fn end(&mut self, index: usize, ending: Ending) {
        self.operations[index].ending.get_or_insert(ending);
    }

    /// Makes up to `attempts` attempts at each operation, ends those still open with a refused call, does the same for
    /// operations that this starts, and then reconciles.
    pub fn settle(&mut self, attempts: usize) {
        self.run_all(attempts);
        for index in 0..self.operations.len() {
            self.run_step(index, CallResult::Refused);
            self.run_step(index, CallResult::Success);
        }
        // A failed operation may have returned a slot.
        self.run_all(attempts);
        // The removal of one server may allow that of another.
        for _ in 0..self.rows.len() {
            self.reconcile();
        }
    }

    fn run_all(&mut self, attempts: usize) {
        for _ in 0..attempts {
            self.cloud.complete_creates();
            for index in 0..self.operations.len() {
                // The operator accepts every loss, so that no operation waits forever.
                self.decide(index, Decision::AcceptLoss);
                self.run_step(index, CallResult::Success);
            }
        }
    }
}
