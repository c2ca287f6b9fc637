//! The step runner of the model: the steps of each kind of operation, with the provider's bad luck.

use super::World;
use super::cloud::Power;
use crate::machine::event::{CreationFailure, Event};
use crate::machine::name::ServerType;
use crate::machine::state::State;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    Succeeded,
    Failed,
    Cancelled,
}

#[derive(Debug, Clone)]
pub enum Kind {
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
    /// True: it waits for an operator's decision.
    pub asks: bool,
    accept_loss: bool,
    kind: Kind,
    step: Step,
}

/// How the one call to the provider goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Luck {
    Fine,
    /// Done, but nobody hears of it; or the process is killed before it writes that down.
    LostReply,
    /// Not done within the deadline; it may still happen.
    Late,
    /// Refused for good, or the host never registers, or never speaks again, or cannot be reached.
    Refused,
    /// The host answers and makes no last backup; of other steps, as [`Self::Late`].
    Asks,
}

/// What an operator decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// The step that asks runs again.
    Retry,
    AcceptLoss,
    Abandon,
}

impl Operation {
    pub fn new(machine: usize, kind: Kind) -> Self {
        let step = match kind {
            Kind::Boot | Kind::Delete => Step::LastBackup,
            Kind::Resize(_) => Step::PowerOff,
            Kind::Reinstate => Step::Fence,
            Kind::PowerOn => Step::StartServer,
        };
        Self { machine, ending: None, asks: false, accept_loss: false, kind, step }
    }
}

impl World {
    /// One try of the operation's current step.
    pub fn work(&mut self, index: usize, luck: Luck) {
        let operation = &self.operations[index];
        if operation.ending.is_some() || operation.asks {
            return;
        }
        let id = operation.machine;
        match operation.step {
            Step::LastBackup => self.last_backup(index, id, luck),
            Step::Fence => {
                let epoch = self.rows[id].machine.epoch.0;
                let pointer = &mut self.pointers[self.rows[id].slot];
                pointer.fence = pointer.fence.max(epoch);
                let reinstates = matches!(self.operations[index].kind, Kind::Reinstate);
                let next = if reinstates { Step::SwitchOn } else { Step::PowerOffServer };
                self.advance(index, luck, next);
            }
            Step::PowerOffServer => self.power_off_server(index, id, luck),
            Step::CreateServer => self.create(index, id, luck),
            Step::AwaitRegistration if self.is_booting(id) => {
                if luck == Luck::Refused {
                    self.apply(id, &Event::RegistrationExpired);
                }
            }
            Step::AwaitRegistration => self.end(index, Ending::Succeeded),
            Step::SwitchOn => self.switch_on(index, id, luck),
            Step::AwaitHost => {
                if luck == Luck::Fine && self.is_on(id) {
                    self.rows[id].quiesced = false;
                }
                if matches!(luck, Luck::Fine | Luck::Refused) {
                    self.end(index, Ending::Succeeded);
                }
            }
            Step::StartServer => {
                if matches!(luck, Luck::Fine | Luck::LostReply) {
                    self.cloud.switch(id, Power::On);
                }
                if luck == Luck::Fine {
                    self.end(index, Ending::Succeeded);
                }
            }
            Step::PowerOff | Step::ChangeType | Step::PowerOn | Step::AwaitHealth => {
                self.resize(index, id, luck);
            }
        }
    }

    /// The machine that the operation takes out of service.
    fn leaving(&self, index: usize, id: usize) -> Option<usize> {
        match self.operations[index].kind {
            Kind::Delete => self.rows[id].registered.then_some(id),
            _ => self.last_registered(id),
        }
    }

    fn last_backup(&mut self, index: usize, id: usize, luck: Luck) {
        let leaving = self.leaving(index, id);
        let Some(leaving) = leaving.filter(|&leaving| {
            !self.rows[leaving].is_server_known_gone() || self.finds_server_again(leaving)
        }) else {
            return self.advance(index, luck, Step::Fence);
        };
        if self.rows[leaving].power_off_ordered {
            return self.advance(index, luck, self.after_backup(index));
        }
        // The deletion of that machine takes it.
        let deletes = |other: &Operation| {
            other.machine == leaving && other.ending.is_none() && matches!(other.kind, Kind::Delete)
        };
        if self.operations.iter().enumerate().any(|(other, operation)| other != index && deletes(operation)) {
            return;
        }
        let reachable = self.is_on(leaving);
        match luck {
            Luck::Fine | Luck::LostReply if reachable => {
                self.rows[leaving].quiesced = self.rules.stops_writers;
                let before = self.pointers[self.rows[leaving].slot].writer;
                self.back_up(leaving);
                let wrote = self.pointers[self.rows[leaving].slot].writer >= before
                    && self.pointers[self.rows[leaving].slot].data == self.rows[leaving].data;
                if wrote {
                    self.rows[leaving].unsaved = false;
                    self.advance(index, luck, self.after_backup(index));
                } else {
                    self.ask(index, leaving);
                }
            }
            Luck::Asks if reachable => self.ask(index, leaving),
            Luck::Refused | Luck::Fine => self.pass_over(index, leaving),
            _ => {}
        }
    }

    /// An operator decides, unless they did before.
    fn ask(&mut self, index: usize, leaving: usize) {
        if self.operations[index].accept_loss {
            self.pass_over(index, leaving);
        } else {
            self.operations[index].asks = true;
        }
    }

    fn pass_over(&mut self, index: usize, leaving: usize) {
        let accepted = self.operations[index].accept_loss;
        let row = &mut self.rows[leaving];
        row.loss_accepted |= accepted;
        row.unsaved = self.rules.marks_unsaved && !accepted;
        self.operations[index].step = self.after_backup(index);
    }

    fn after_backup(&self, index: usize) -> Step {
        if matches!(self.operations[index].kind, Kind::Delete) { Step::PowerOffServer } else { Step::Fence }
    }

    /// What an operator says to an operation that asks, or that they give up.
    pub fn decide(&mut self, index: usize, decision: Decision) {
        let operation = &mut self.operations[index];
        if operation.ending.is_some() {
            return;
        }
        let id = operation.machine;
        match (decision, operation.kind.clone()) {
            (Decision::AcceptLoss, _) if operation.asks => {
                operation.asks = false;
                operation.accept_loss = true;
            }
            (Decision::Retry, _) => operation.asks = false,
            (Decision::AcceptLoss, _) => {}
            (Decision::Abandon, Kind::Boot) => self.apply(id, &Event::OperationAbandoned),
            (Decision::Abandon, Kind::Delete) => {
                if !self.undelete(id) && !self.rows[id].registered {
                    self.end(index, Ending::Cancelled);
                }
            }
            (Decision::Abandon, Kind::Resize(_)) => operation.step = Step::PowerOn,
            (Decision::Abandon, Kind::Reinstate | Kind::PowerOn) => {
                self.rows[id].may_stay_off = true;
                self.end(index, Ending::Cancelled);
            }
        }
    }

    /// Whether the machine, which was deleted, has its slot again.
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

    fn power_off_server(&mut self, index: usize, id: usize, luck: Luck) {
        if let Some(leaving) =
            self.leaving(index, id).filter(|&leaving| !self.rows[leaving].is_server_known_gone())
        {
            self.rows[leaving].power_off_ordered = true;
            if matches!(luck, Luck::Fine | Luck::LostReply) {
                self.cloud.switch(leaving, Power::Off);
            }
        }
        // A provider that refuses does not keep the slot from its new machine.
        let passes = matches!(luck, Luck::Fine | Luck::Refused);
        if matches!(self.operations[index].kind, Kind::Delete) {
            if passes {
                self.end(index, Ending::Succeeded);
            }
        } else if passes {
            self.operations[index].step = Step::CreateServer;
        }
    }

    fn switch_on(&mut self, index: usize, id: usize, luck: Luck) {
        if self.cloud.of(id).is_none() {
            self.apply(id, &Event::ServerGone);
            return self.end(index, Ending::Succeeded);
        }
        if matches!(luck, Luck::Fine | Luck::LostReply) {
            self.cloud.switch(id, Power::On);
        }
        if luck == Luck::Fine {
            let row = &mut self.rows[id];
            row.power_off_ordered = false;
            row.unsaved = false;
            row.loss_accepted = false;
        }
        self.advance(index, luck, Step::AwaitHost);
    }

    fn create(&mut self, index: usize, id: usize, luck: Luck) {
        if self.cloud.by_name(id).is_some() {
            return self.advance(index, luck, Step::AwaitRegistration);
        }
        // It has registered already, so there was a server: nothing is created a second time.
        if !self.is_booting(id) {
            return self.end(index, Ending::Succeeded);
        }
        match luck {
            Luck::Fine => {
                self.cloud.create(id);
                self.operations[index].step = Step::AwaitRegistration;
            }
            Luck::LostReply => self.cloud.create(id),
            Luck::Late => self.cloud.in_flight.push(id),
            Luck::Refused => self.apply(id, &Event::CreationFailed { why: CreationFailure::ProviderRefused }),
            Luck::Asks => {}
        }
    }

    fn resize(&mut self, index: usize, id: usize, luck: Luck) {
        let (State::Resizing { .. }, Kind::Resize(to)) =
            (&self.rows[id].machine.state, self.operations[index].kind.clone())
        else {
            return self.end(index, Ending::Succeeded);
        };
        let Some(server_type) = self.server_type(id) else {
            return self.apply(id, &Event::ServerGone);
        };
        let happens = matches!(luck, Luck::Fine | Luck::LostReply);
        match self.operations[index].step {
            // Whatever goes wrong leads to the power.
            Step::PowerOff | Step::ChangeType if luck == Luck::Refused => {
                self.operations[index].step = Step::PowerOn;
            }
            Step::PowerOff => {
                if happens {
                    self.cloud.switch(id, Power::Off);
                }
                self.advance(index, luck, Step::ChangeType);
            }
            Step::ChangeType => {
                if happens {
                    self.cloud.change_type(id, &to);
                }
                self.advance(index, luck, Step::PowerOn);
            }
            _ if luck == Luck::Refused => self.apply(id, &Event::ResizeFailed),
            Step::PowerOn => {
                if happens {
                    self.cloud.switch(id, Power::On);
                }
                self.advance(index, luck, Step::AwaitHealth);
            }
            _ if luck == Luck::Fine && server_type == to => {
                self.apply(id, &Event::ResizeSucceeded);
                self.end(index, Ending::Succeeded);
            }
            _ if luck == Luck::Fine => self.apply(id, &Event::ResizeReverted),
            _ => {}
        }
    }

    fn is_booting(&self, id: usize) -> bool {
        matches!(self.rows[id].machine.state, State::Provisioning | State::Recovering)
    }

    fn advance(&mut self, index: usize, luck: Luck, next: Step) {
        if luck == Luck::Fine {
            self.operations[index].step = next;
        }
    }

    fn end(&mut self, index: usize, ending: Ending) {
        self.operations[index].ending.get_or_insert(ending);
    }

    /// Runs the operations until they have ended, at most `tries` times each, and then reconciles.
    pub fn settle(&mut self, tries: usize) {
        self.run_all(tries);
        for index in 0..self.operations.len() {
            self.work(index, Luck::Refused);
            self.work(index, Luck::Fine);
        }
        // What failed may have given a slot back.
        self.run_all(tries);
        // The removal of one server can be what another one waited for.
        for _ in 0..self.rows.len() {
            self.reconcile();
        }
    }

    fn run_all(&mut self, tries: usize) {
        for _ in 0..tries {
            self.cloud.settle();
            for index in 0..self.operations.len() {
                // An operator who has no other choice.
                self.decide(index, Decision::AcceptLoss);
                self.work(index, Luck::Fine);
            }
        }
    }
}
