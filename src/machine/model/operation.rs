//! The step runner of the model: the steps of each kind of operation, with the provider's bad luck.

use super::World;
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
    ChangeType(ServerType),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Fence,
    DeletePredecessors,
    CreateServer,
    AwaitRegistration,
    DeleteServers,
    ChangeType,
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
    /// Refused for good, or the host never registers.
    Refused,
}

impl Operation {
    pub fn new(machine: usize, kind: Kind) -> Self {
        let step = match kind {
            Kind::Boot => Step::Fence,
            Kind::Delete => Step::DeleteServers,
            Kind::ChangeType(_) => Step::ChangeType,
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
            Step::ChangeType => self.change_type(index, id, luck),
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

    fn change_type(&mut self, index: usize, id: usize, luck: Luck) {
        let (State::Resizing { .. }, Kind::ChangeType(to)) =
            (&self.rows[id].machine.state, self.operations[index].kind.clone())
        else {
            return self.end(index, Ending::Succeeded);
        };
        if self.cloud.of(id).is_none() {
            return self.apply(id, &Event::ServerGone);
        }
        match luck {
            Luck::Fine => {
                self.cloud.change_type(id, &to);
                self.apply(id, &Event::ResizeSucceeded);
            }
            Luck::LostReply => self.cloud.change_type(id, &to),
            Luck::Late => self.apply(id, &Event::ResizeFailed),
            Luck::Refused => self.apply(id, &Event::ResizeReverted),
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
