//! The transition function: the result for every pair of state and event.

use super::epoch::Epoch;
use super::event::{Effect, Event, RestoreMode, ServerPower};
use super::name::ServerType;
use super::state::{FailureCause, Machine, State, Status};

/// The result of an accepted event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The machine changes state; the effects are applied in the same transaction.
    Moved { next: State, effects: Vec<Effect> },
    /// The event has no effect, because its result has already been reached or it came too late. Nothing is written.
    Unchanged,
}

/// The reason an event is not allowed for a machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the machine is {status}, but must be {}", join_statuses(.allowed))]
    InvalidState { status: Status, allowed: &'static [Status] },
    /// The machine was deleted; for operators, it no longer exists.
    #[error("the machine is deleted")]
    Gone,
    /// The machine left its slot because it was replaced, or because its predecessor was reinstated.
    #[error("the machine has been replaced")]
    Superseded,
}

fn join_statuses(statuses: &[Status]) -> String {
    statuses.iter().map(|status| status.as_str()).collect::<Vec<_>>().join(" or ")
}

/// Returns the result of `event` for `machine`. This function is total: every pair has a result.
///
/// # Errors
/// A [`Refusal`] if the state does not allow an operator's or a host's request, or if a machine that never served
/// traffic is to be reinstated.
pub fn transition(machine: &Machine, event: &Event) -> Result<Outcome, Refusal> {
    match &machine.state {
        State::Deleted { previous } => return transition_ended(previous, event, Refusal::Gone),
        State::Retired { previous } => return transition_ended(previous, event, Refusal::Superseded),
        _ => {}
    }
    match event {
        Event::Registered { server_type } => apply_registration(machine, server_type.clone()),
        Event::BootFailureReported => apply_boot_failure(machine, FailureCause::BootReported),
        Event::RegistrationExpired => apply_boot_failure(machine, FailureCause::RegistrationExpired),
        Event::CreationFailed { failure } => apply_boot_failure(machine, failure.cause()),
        Event::ServerGone => Ok(apply_server_gone(machine)),
        Event::ServerFound => Ok(apply_server_found(&machine.state)),
        Event::ProvisionRequested { restore } => Ok(match machine.state {
            State::Failed { .. } => replace(machine, Status::Provisioning, *restore),
            _ => Outcome::Unchanged,
        }),
        Event::RecoverRequested { restore } => Ok(match machine.state {
            State::Recovering => Outcome::Unchanged,
            _ => replace(machine, Status::Recovering, *restore),
        }),
        Event::ResizeRequested { to } => match &machine.state {
            State::Running { server_type } if server_type == to => Ok(Outcome::Unchanged),
            State::Running { server_type } => Ok(moved(
                State::Resizing { from: server_type.clone(), to: to.clone() },
                vec![Effect::ChangeType { to: to.clone() }, Effect::CloseConnections],
            )),
            _ => refuse(machine, &[Status::Running]),
        },
        Event::ResizeSucceeded => {
            apply_resize_end(machine, |_, to| moved(State::Running { server_type: to }, vec![]))
        }
        Event::ResizeReverted => apply_resize_end(machine, |from, _| {
            let cause = FailureCause::Resize;
            moved(State::Running { server_type: from }, vec![Effect::FailOperation { cause }])
        }),
        Event::ResizeFailed => apply_resize_end(machine, |_, _| failed_resize()),
        Event::OperationAbandoned => apply_boot_failure(machine, FailureCause::Abandoned),
        // The machine already holds its slot.
        Event::Reinstated { .. } | Event::SuccessorDeleted => Ok(Outcome::Unchanged),
        Event::ResumeRequested { server_type } => match machine.state {
            State::Failed { .. } => Ok(moved(State::Running { server_type: server_type.clone() }, vec![])),
            State::Running { .. } => Ok(Outcome::Unchanged),
            _ => refuse(machine, &[Status::Failed]),
        },
        Event::OperationHung => Ok(match machine.state {
            State::Provisioning | State::Recovering => failed_boot(FailureCause::OperationHung),
            // The server still has its disk and may return to service without intervention.
            State::Resizing { .. } => failed_resize(),
            _ => Outcome::Unchanged,
        }),
        Event::HealthyHeartbeat { epoch, server_type } => Ok(match machine.state {
            State::Failed { cause } if cause.is_cleared_by_heartbeat() && *epoch == machine.epoch => {
                moved(State::Running { server_type: server_type.clone() }, vec![])
            }
            _ => Outcome::Unchanged,
        }),
        Event::FailRequested => Ok(match machine.state {
            State::Failed { cause: FailureCause::Operator } => Outcome::Unchanged,
            State::Provisioning | State::Recovering => moved(
                State::Failed { cause: FailureCause::Operator },
                vec![Effect::CancelOperation, Effect::CloseConnections, Effect::ReinstatePredecessor],
            ),
            // The current operation continues: it powers the server on, so that the machine can be resumed.
            State::Failed { .. } => {
                moved(State::Failed { cause: FailureCause::Operator }, vec![Effect::CloseConnections])
            }
            State::Resizing { .. } => moved(
                State::Failed { cause: FailureCause::Operator },
                vec![Effect::CancelOperation, Effect::CloseConnections, Effect::PowerOn],
            ),
            _ => moved(
                State::Failed { cause: FailureCause::Operator },
                vec![Effect::CancelOperation, Effect::CloseConnections],
            ),
        }),
        Event::DeleteRequested => Ok(moved(
            State::Deleted { previous: Box::new(machine.state.clone()) },
            vec![
                Effect::CancelOperation,
                Effect::DeleteServer,
                Effect::DeletePredecessor,
                Effect::CloseConnections,
            ],
        )),
    }
}

/// Returns the result for a machine that has left its slot. Late reports from the platform and healthy heartbeats have
/// no effect, and requests from operators or the host are rejected. However, a machine can be reinstated, its server
/// can be found again, a replaced machine can be deleted with its successor, and a repeated deletion has no effect.
fn transition_ended(previous: &State, event: &Event, refusal: Refusal) -> Result<Outcome, Refusal> {
    match event {
        Event::Reinstated { epoch, power } => apply_reinstatement(previous, *epoch, *power, refusal),
        Event::ServerFound => Ok(match apply_server_found(previous) {
            Outcome::Moved { next, effects } => {
                let previous = Box::new(next);
                let ended = match refusal {
                    Refusal::Superseded => State::Retired { previous },
                    _ => State::Deleted { previous },
                };
                Outcome::Moved { next: ended, effects }
            }
            Outcome::Unchanged => Outcome::Unchanged,
        }),
        Event::SuccessorDeleted if refusal == Refusal::Superseded => {
            Ok(moved(State::Deleted { previous: Box::new(previous.clone()) }, vec![Effect::DeleteServer]))
        }
        Event::RegistrationExpired
        | Event::CreationFailed { .. }
        | Event::ServerGone
        | Event::ResizeSucceeded
        | Event::ResizeReverted
        | Event::ResizeFailed
        | Event::OperationHung
        | Event::OperationAbandoned
        | Event::SuccessorDeleted
        | Event::HealthyHeartbeat { .. } => Ok(Outcome::Unchanged),
        Event::DeleteRequested if refusal == Refusal::Gone => Ok(Outcome::Unchanged),
        _ => Err(refusal),
    }
}

/// Returns the slot to the machine, in the machine's previous state. If its server may be off or a resize was
/// cancelled, the machine first waits for its host's heartbeat.
fn apply_reinstatement(
    previous: &State,
    epoch: Epoch,
    power: ServerPower,
    refusal: Refusal,
) -> Result<Outcome, Refusal> {
    let next = match previous {
        State::Running { server_type } if power == ServerPower::On => {
            State::Running { server_type: server_type.clone() }
        }
        State::Running { .. } | State::Resizing { .. } => State::Failed { cause: FailureCause::Reinstating },
        State::Failed { cause } if cause.is_cleared_by_heartbeat() => {
            State::Failed { cause: FailureCause::Reinstating }
        }
        State::Failed { cause } => State::Failed { cause: *cause },
        // The machine has never served traffic, so there is no state to return to.
        State::Provisioning | State::Recovering | State::Retired { .. } | State::Deleted { .. } => {
            return Err(refusal);
        }
    };
    Ok(moved(next, vec![Effect::CancelOperation, Effect::Reinstate { epoch }]))
}

fn apply_registration(machine: &Machine, server_type: ServerType) -> Result<Outcome, Refusal> {
    match machine.state {
        State::Provisioning | State::Recovering => Ok(moved(State::Running { server_type }, vec![])),
        _ => refuse(machine, &[Status::Provisioning, Status::Recovering]),
    }
}

/// Fails a machine that is booting. For other machines, a report from the host is refused, and other events have no
/// effect.
fn apply_boot_failure(machine: &Machine, cause: FailureCause) -> Result<Outcome, Refusal> {
    match machine.state {
        State::Provisioning | State::Recovering => Ok(failed_boot(cause)),
        _ if cause == FailureCause::BootReported => {
            refuse(machine, &[Status::Provisioning, Status::Recovering])
        }
        _ => Ok(Outcome::Unchanged),
    }
}

fn apply_server_gone(machine: &Machine) -> Outcome {
    match machine.state {
        State::Running { .. } => failed(FailureCause::ServerGone),
        State::Resizing { .. } => failed_while_maybe_off(FailureCause::ServerGone),
        // Once the server is missing, a heartbeat no longer clears the failure.
        State::Failed { cause } if cause.is_cleared_by_heartbeat() => {
            failed_while_maybe_off(FailureCause::ServerGone)
        }
        _ => Outcome::Unchanged,
    }
}

/// Makes a machine whose server was missing wait for its host. If the machine is active, the host's next healthy
/// heartbeat makes it `running` again.
fn apply_server_found(state: &State) -> Outcome {
    match state {
        State::Failed { cause: FailureCause::ServerGone } => {
            moved(State::Failed { cause: FailureCause::Reinstating }, vec![])
        }
        _ => Outcome::Unchanged,
    }
}

fn apply_resize_end(
    machine: &Machine,
    end: impl FnOnce(ServerType, ServerType) -> Outcome,
) -> Result<Outcome, Refusal> {
    Ok(match &machine.state {
        State::Resizing { from, to } => end(from.clone(), to.clone()),
        _ => Outcome::Unchanged,
    })
}

fn failed(cause: FailureCause) -> Outcome {
    moved(State::Failed { cause }, vec![Effect::FailOperation { cause }, Effect::CloseConnections])
}

fn failed_resize() -> Outcome {
    failed_while_maybe_off(FailureCause::Resize)
}

/// Fails a machine whose server may be off, for example because a resize powered it off, and powers the server on.
fn failed_while_maybe_off(cause: FailureCause) -> Outcome {
    moved(
        State::Failed { cause },
        vec![Effect::FailOperation { cause }, Effect::CloseConnections, Effect::PowerOn],
    )
}

/// Fails a machine that has never served traffic; its predecessor gets the slot back.
fn failed_boot(cause: FailureCause) -> Outcome {
    moved(
        State::Failed { cause },
        vec![Effect::FailOperation { cause }, Effect::CloseConnections, Effect::ReinstatePredecessor],
    )
}

fn replace(machine: &Machine, status: Status, restore: RestoreMode) -> Outcome {
    moved(
        State::Retired { previous: Box::new(machine.state.clone()) },
        vec![
            Effect::CancelOperation,
            Effect::Replace { status, restore, epoch: machine.epoch.next() },
            Effect::CloseConnections,
        ],
    )
}

fn moved(next: State, effects: Vec<Effect>) -> Outcome {
    Outcome::Moved { next, effects }
}

fn refuse(machine: &Machine, allowed: &'static [Status]) -> Result<Outcome, Refusal> {
    match machine.state.status() {
        Some(status) => Err(Refusal::InvalidState { status, allowed }),
        None => Err(Refusal::Gone),
    }
}
