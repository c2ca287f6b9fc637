//! Runs the steps of the model's operations, with provider failures.

use super::LifecycleModel;
use super::cloud::Power;
use crate::event::{CreationFailure, Event};
use crate::name::ServerType;
use crate::state::State;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperationOutcome {
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
    FinalBackup,
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
    pub outcome: Option<OperationOutcome>,
    /// Whether it is waiting for an operator's decision.
    pub awaits_decision: bool,
    is_loss_accepted: bool,
    kind: OperationKind,
    step: Step,
}

/// The result of a step's only call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallResult {
    Success,
    /// The call took effect, but its response was lost, or the process was killed before recording it.
    LostResponse,
    /// The call timed out; it may still take effect.
    TimedOut,
    /// The call was permanently refused; or the host never registers, never responds again, or is unreachable.
    Refused,
    /// The host responds but takes no final backup. In other steps, the call fails without effect and is retried.
    BackupFailed,
}

/// An operator's decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperatorDecision {
    /// The waiting step runs again.
    Retry,
    AcceptLoss,
    Abandon,
}

impl Operation {
    pub fn new(machine: usize, kind: OperationKind) -> Self {
        let step = match kind {
            OperationKind::Boot | OperationKind::Delete => Step::FinalBackup,
            OperationKind::Resize(_) => Step::PowerOff,
            OperationKind::Reinstate => Step::Fence,
            OperationKind::PowerOn => Step::StartServer,
        };
        Self { machine, outcome: None, awaits_decision: false, is_loss_accepted: false, kind, step }
    }
}

impl LifecycleModel {
    /// Makes one attempt at the operation's current step.
    pub fn run_step(&mut self, index: usize, call_result: CallResult) {
        let operation = &self.operations[index];
        if operation.outcome.is_some() || operation.awaits_decision {
            return;
        }
        let id = operation.machine;
        match operation.step {
            Step::FinalBackup => self.run_final_backup(index, id, call_result),
            Step::Fence => {
                let epoch = self.machines[id].machine.epoch.0;
                let pointer = &mut self.pointers[self.machines[id].slot];
                pointer.fence_epoch = pointer.fence_epoch.max(epoch);
                let is_reinstatement = matches!(self.operations[index].kind, OperationKind::Reinstate);
                let next = if is_reinstatement { Step::SwitchOn } else { Step::PowerOffServer };
                self.advance(index, call_result, next);
            }
            Step::PowerOffServer => self.power_off_server(index, id, call_result),
            Step::CreateServer => self.create_server(index, id, call_result),
            Step::AwaitRegistration if self.is_booting(id) => {
                if call_result == CallResult::Refused {
                    self.apply(id, &Event::RegistrationExpired);
                }
            }
            Step::AwaitRegistration => self.end_operation(index, OperationOutcome::Succeeded),
            Step::SwitchOn => self.switch_on(index, id, call_result),
            Step::AwaitHost => {
                if call_result == CallResult::Success && self.is_on(id) {
                    self.machines[id].is_quiesced = false;
                }
                if matches!(call_result, CallResult::Success | CallResult::Refused) {
                    self.end_operation(index, OperationOutcome::Succeeded);
                }
            }
            Step::StartServer => {
                if matches!(call_result, CallResult::Success | CallResult::LostResponse) {
                    self.cloud.set_power(id, Power::On);
                }
                if call_result == CallResult::Success {
                    self.end_operation(index, OperationOutcome::Succeeded);
                }
            }
            Step::PowerOff | Step::ChangeType | Step::PowerOn | Step::AwaitHealth => {
                self.run_resize_step(index, id, call_result);
            }
        }
    }

    /// Finds the machine that the operation takes out of service.
    fn outgoing_machine(&self, index: usize, id: usize) -> Option<usize> {
        match self.operations[index].kind {
            OperationKind::Delete => self.machines[id].has_registered.then_some(id),
            _ => self.find_last_registered(id),
        }
    }

    fn run_final_backup(&mut self, index: usize, id: usize, call_result: CallResult) {
        let outgoing = self.outgoing_machine(index, id);
        let Some(outgoing) = outgoing.filter(|&outgoing| {
            !self.machines[outgoing].is_server_known_gone() || self.detect_returned_server(outgoing)
        }) else {
            return self.advance(index, call_result, Step::Fence);
        };
        if self.machines[outgoing].is_power_off_requested {
            return self.advance(index, call_result, self.step_after_backup(index));
        }
        // If the outgoing machine is being deleted, its delete operation takes the backup.
        let deletes = |other: &Operation| {
            other.machine == outgoing
                && other.outcome.is_none()
                && matches!(other.kind, OperationKind::Delete)
        };
        if self.operations.iter().enumerate().any(|(other, operation)| other != index && deletes(operation)) {
            return;
        }
        let is_reachable = self.is_on(outgoing);
        match call_result {
            CallResult::Success | CallResult::LostResponse if is_reachable => {
                self.machines[outgoing].is_quiesced = self.rules.stops_writers;
                let before = self.pointers[self.machines[outgoing].slot].writer_epoch;
                self.back_up(outgoing);
                let is_saved = self.pointers[self.machines[outgoing].slot].writer_epoch >= before
                    && self.pointers[self.machines[outgoing].slot].data == self.machines[outgoing].data;
                if is_saved {
                    self.machines[outgoing].is_unsaved = false;
                    self.advance(index, call_result, self.step_after_backup(index));
                } else {
                    self.request_decision(index, outgoing);
                }
            }
            CallResult::BackupFailed if is_reachable => self.request_decision(index, outgoing),
            CallResult::Refused | CallResult::Success => self.skip_backup(index, outgoing),
            _ => {}
        }
    }

    /// Requests an operator's decision, unless the loss has already been accepted.
    fn request_decision(&mut self, index: usize, outgoing: usize) {
        if self.operations[index].is_loss_accepted {
            self.skip_backup(index, outgoing);
        } else {
            self.operations[index].awaits_decision = true;
        }
    }

    fn skip_backup(&mut self, index: usize, outgoing: usize) {
        let is_loss_accepted = self.operations[index].is_loss_accepted;
        let row = &mut self.machines[outgoing];
        row.is_loss_accepted |= is_loss_accepted;
        row.is_unsaved = self.rules.marks_unsaved && !is_loss_accepted;
        self.operations[index].step = self.step_after_backup(index);
    }

    fn step_after_backup(&self, index: usize) -> Step {
        if matches!(self.operations[index].kind, OperationKind::Delete) {
            Step::PowerOffServer
        } else {
            Step::Fence
        }
    }

    /// Applies an operator's decision on a waiting operation, or the abandonment of an operation.
    pub fn decide(&mut self, index: usize, decision: OperatorDecision) {
        let operation = &mut self.operations[index];
        if operation.outcome.is_some() {
            return;
        }
        let id = operation.machine;
        match (decision, operation.kind.clone()) {
            (OperatorDecision::AcceptLoss, _) if operation.awaits_decision => {
                operation.awaits_decision = false;
                operation.is_loss_accepted = true;
            }
            (OperatorDecision::Retry, _) => operation.awaits_decision = false,
            (OperatorDecision::AcceptLoss, _) => {}
            (OperatorDecision::Abandon, OperationKind::Boot) => self.apply(id, &Event::OperationAbandoned),
            (OperatorDecision::Abandon, OperationKind::Delete) => {
                if !self.undelete(id) && !self.machines[id].has_registered {
                    self.end_operation(index, OperationOutcome::Cancelled);
                }
            }
            (OperatorDecision::Abandon, OperationKind::Resize(_)) => operation.step = Step::PowerOn,
            (OperatorDecision::Abandon, OperationKind::Reinstate | OperationKind::PowerOn) => {
                self.machines[id].may_stay_off = true;
                self.end_operation(index, OperationOutcome::Cancelled);
            }
        }
    }

    /// Undoes the deletion. Returns whether the machine got its slot back.
    pub fn undelete(&mut self, id: usize) -> bool {
        let row = &self.machines[id];
        let is_deleted = matches!(row.machine.state, State::Deleted { .. });
        let has_newer = self.machines.iter().any(|other| {
            other.slot == row.slot && other.machine.epoch > row.machine.epoch && other.has_registered
        });
        if !is_deleted
            || row.is_removed
            || !row.has_registered
            || has_newer
            || self.active_machine(row.slot).is_some()
        {
            return false;
        }
        self.reinstate(id);
        true
    }

    fn power_off_server(&mut self, index: usize, id: usize, call_result: CallResult) {
        if let Some(outgoing) = self
            .outgoing_machine(index, id)
            .filter(|&outgoing| !self.machines[outgoing].is_server_known_gone())
        {
            self.machines[outgoing].is_power_off_requested = true;
            if matches!(call_result, CallResult::Success | CallResult::LostResponse) {
                self.cloud.set_power(outgoing, Power::Off);
            }
        }
        // The provider's refusal does not block the new machine.
        let may_continue = matches!(call_result, CallResult::Success | CallResult::Refused);
        if matches!(self.operations[index].kind, OperationKind::Delete) {
            if may_continue {
                self.end_operation(index, OperationOutcome::Succeeded);
            }
        } else if may_continue {
            self.operations[index].step = Step::CreateServer;
        }
    }

    fn switch_on(&mut self, index: usize, id: usize, call_result: CallResult) {
        if self.cloud.server_of(id).is_none() {
            self.apply(id, &Event::ServerGone);
            return self.end_operation(index, OperationOutcome::Succeeded);
        }
        if matches!(call_result, CallResult::Success | CallResult::LostResponse) {
            self.cloud.set_power(id, Power::On);
        }
        if call_result == CallResult::Success {
            let row = &mut self.machines[id];
            row.is_power_off_requested = false;
            row.is_unsaved = false;
            row.is_loss_accepted = false;
        }
        self.advance(index, call_result, Step::AwaitHost);
    }

    fn create_server(&mut self, index: usize, id: usize, call_result: CallResult) {
        if self.cloud.find_by_name(id).is_some() {
            return self.advance(index, call_result, Step::AwaitRegistration);
        }
        // The machine has registered or failed, so no second server is created.
        if !self.is_booting(id) {
            return self.end_operation(index, OperationOutcome::Succeeded);
        }
        match call_result {
            CallResult::Success => {
                self.cloud.create(id);
                self.operations[index].step = Step::AwaitRegistration;
            }
            CallResult::LostResponse => self.cloud.create(id),
            CallResult::TimedOut => self.cloud.pending_creates.push(id),
            CallResult::Refused => {
                self.apply(id, &Event::CreationFailed { failure: CreationFailure::ProviderRefused });
            }
            CallResult::BackupFailed => {}
        }
    }

    fn run_resize_step(&mut self, index: usize, id: usize, call_result: CallResult) {
        let (State::Resizing { .. }, OperationKind::Resize(to)) =
            (&self.machines[id].machine.state, self.operations[index].kind.clone())
        else {
            return self.end_operation(index, OperationOutcome::Succeeded);
        };
        let Some(server_type) = self.server_type(id) else {
            return self.apply(id, &Event::ServerGone);
        };
        let takes_effect = matches!(call_result, CallResult::Success | CallResult::LostResponse);
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
                self.end_operation(index, OperationOutcome::Succeeded);
            }
            _ if call_result == CallResult::Success => self.apply(id, &Event::ResizeReverted),
            _ => {}
        }
    }

    fn is_booting(&self, id: usize) -> bool {
        matches!(self.machines[id].machine.state, State::Provisioning | State::Recovering)
    }

    fn advance(&mut self, index: usize, call_result: CallResult, next: Step) {
        if call_result == CallResult::Success {
            self.operations[index].step = next;
        }
    }

    fn end_operation(&mut self, index: usize, outcome: OperationOutcome) {
        self.operations[index].outcome.get_or_insert(outcome);
    }

    /// Ends all operations. Runs up to `max_steps` steps of each, refuses the next call of those that are still open,
    /// runs the operations that start as a result, and then reconciles.
    pub fn settle(&mut self, max_steps: usize) {
        self.run_all_operations(max_steps);
        for index in 0..self.operations.len() {
            self.run_step(index, CallResult::Refused);
            self.run_step(index, CallResult::Success);
        }
        // A failed operation may have returned the slot to an earlier machine, which starts another operation.
        self.run_all_operations(max_steps);
        // Removing one server may make another removable.
        for _ in 0..self.machines.len() {
            self.reconcile();
        }
    }

    fn run_all_operations(&mut self, max_steps: usize) {
        for _ in 0..max_steps {
            self.cloud.complete_creates();
            for index in 0..self.operations.len() {
                // The operator accepts every loss, so that no operation waits forever.
                self.decide(index, OperatorDecision::AcceptLoss);
                self.run_step(index, CallResult::Success);
            }
        }
    }
}
