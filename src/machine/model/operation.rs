//! The step runner of the model: the steps of each kind of operation, with the provider's bad luck.

use super::World;
use super::cloud::Power;
use crate::machine::event::Event;
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
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Fence,
    DeletePredecessors,
    CreateServer,
    AwaitRegistration,
    DeleteServers,
    PowerOff,
    ChangeType,
    PowerOn,
    AwaitHealth,
}

pub struct Operation {
    pub machine: usize,
    pub ending: Option<Ending>,
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
    /// Refused for good, or the host never registers, or never speaks again.
    Refused,
}

impl Operation {
    pub fn new(machine: usize, kind: Kind) -> Self {
        let step = match kind {
            Kind::Boot => Step::Fence,
            Kind::Delete => Step::DeleteServers,
            Kind::Resize(_) => Step::PowerOff,
        };
        Self { machine, ending: None, kind, step }
    }
}

impl World {
    /// One try of the operation's current step.
    pub fn work(&mut self, index: usize, luck: Luck) {
        if self.operations[index].ending.is_some() {
            return;
        }
        let id = self.operations[index].machine;
        match self.operations[index].step {
            Step::Fence => {
                let epoch = self.rows[id].machine.epoch.0;
                let pointer = &mut self.pointers[self.rows[id].slot];
                pointer.fence = pointer.fence.max(epoch);
                self.advance(index, luck, Step::DeletePredecessors);
            }
            Step::DeletePredecessors => {
                if self.delete_ended(id, luck) {
                    self.advance(index, luck, Step::CreateServer);
                }
            }
            Step::CreateServer => self.create(index, id, luck),
            Step::AwaitRegistration if self.is_booting(id) => {
                if luck == Luck::Refused {
                    self.apply(id, &Event::RegistrationExpired);
                }
            }
            Step::AwaitRegistration => self.end(index, Ending::Succeeded),
            Step::DeleteServers => {
                if self.delete_ended(id, luck) && luck != Luck::LostReply {
                    self.end(index, Ending::Succeeded);
                }
            }
            Step::PowerOff | Step::ChangeType | Step::PowerOn | Step::AwaitHealth => {
                self.resize(index, id, luck);
            }
        }
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
            Luck::Refused => self.apply(id, &Event::ProviderRefused),
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

    /// Deletes the servers of the slot's ended machines. False: a create may still land, so it is not yet known
    /// that there is none.
    fn delete_ended(&mut self, id: usize, luck: Luck) -> bool {
        let slot = self.rows[id].slot;
        let ended: Vec<usize> = (0..self.rows.len())
            .filter(|&other| self.rows[other].slot == slot && !self.rows[other].machine.state.is_active())
            .collect();
        if matches!(luck, Luck::Late | Luck::Refused)
            || ended.iter().any(|other| self.cloud.in_flight.contains(other))
        {
            return false;
        }
        ended.into_iter().for_each(|other| self.cloud.delete(other));
        true
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
        for _ in 0..tries {
            self.cloud.settle();
            for index in 0..self.operations.len() {
                self.work(index, Luck::Fine);
            }
        }
        for index in 0..self.operations.len() {
            self.work(index, Luck::Refused);
            self.work(index, Luck::Fine);
        }
        self.reconcile();
    }

    /// Deletes what stands at the provider under the name of a machine that has ended: the leftovers of operations
    /// that were cancelled under way.
    fn reconcile(&mut self) {
        for id in 0..self.rows.len() {
            if !self.rows[id].machine.state.is_active() {
                self.cloud.delete(id);
            }
        }
    }
}
