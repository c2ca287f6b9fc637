//! The steps of `resize`: shut down, power off, change the type, power on, wait for a healthy host.
//!
//! Every failure before the power is on again leads to the step that switches it on, and the server's type then
//! decides the outcome. The invariant: nothing here creates or deletes a server, and every step can restart after a
//! kill, because it reads the server's state before it orders anything.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::held::Held;
use super::step::{Answer, StepError};
use super::{Place, Step};
use crate::http::problem::chain;
use crate::machine::event::Event;
use crate::platform::db::machine_row::MachineRow;
use crate::provider::{ActionId, ActionStatus, ErrorKind, Server, ServerId, ServerStatus};

/// Key of an operation's facts: the running action.
pub(super) const ACTION: &str = "action";
const ASKED: &str = "asked";

/// Interval between reads of a server that the provider does not show.
const LOOK_FOR_GONE: Duration = Duration::from_secs(2);

pub async fn shut_down(held: &Held<'_>) -> Result<Answer, StepError> {
    let Looked { server, age, .. } = match look(held).await? {
        Ok(looked) => looked,
        Err(answer) => return Ok(answer),
    };
    if server.status == ServerStatus::Off {
        return Ok(Answer::done());
    }
    if age >= held.platform.config.timing.resize_shutdown {
        return Ok(Answer::done_noting("the host did not shut down in time"));
    }
    let mut facts = held.facts();
    if !facts.contains_key(ASKED) {
        match held.platform.provider.shutdown(server.id).await {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Refused => {
                tracing::warn!(operation = %held.operation.id, error = %chain(&error), "cannot request a shutdown");
                return Ok(Answer::done_noting("the provider refused to ask for a shutdown"));
            }
            Err(error) => return Err(error.into()),
        }
        facts.insert(ASKED.to_owned(), json!(true));
    }
    Ok(Answer::Wait { again_in: soon(age), facts: Some(facts) })
}

pub async fn power_off(held: &Held<'_>) -> Result<Answer, StepError> {
    if let Some(answer) = under_way(held).await? {
        return Ok(answer);
    }
    let Looked { server, age, .. } = match look(held).await? {
        Ok(looked) => looked,
        Err(answer) => return Ok(answer),
    };
    if server.locked {
        return Ok(Answer::wait(soon(age)));
    }
    if server.status == ServerStatus::Off {
        held.pass(Step::PowerOff, Place::Settled)?;
        return Ok(Answer::done());
    }
    let action = held.platform.provider.power_off(server.id).await?;
    Ok(started(held, action.id, age))
}

pub async fn change_type(held: &Held<'_>) -> Result<Answer, StepError> {
    let ended = match action_of(held).await? {
        Some(ActionStatus::Running) => return Ok(Answer::wait(soon(held.step_age().await?))),
        other => other,
    };
    let Looked { server, age, to, .. } = match look(held).await? {
        Ok(looked) => looked,
        Err(answer) => return Ok(answer),
    };
    // The lock shows an action that a crashed process ordered.
    if server.locked {
        return Ok(Answer::wait(soon(age)));
    }
    if server.server_type == to {
        held.pass(Step::ChangeType, Place::Settled)?;
        return Ok(Answer::done());
    }
    if let Some(ActionStatus::Error { code, message }) = ended {
        tracing::error!(operation = %held.operation.id, code, message, "the type change failed");
        return Ok(Answer::Abandon { why: "the provider's change of type ended as an error" });
    }
    if server.status != ServerStatus::Off {
        return Ok(Answer::Abandon { why: "the server was switched on by somebody else" });
    }
    match held.platform.provider.change_type(server.id, &to).await {
        Ok(action) => Ok(started(held, action.id, age)),
        // The change may have started: the lock or the type shows that at the next check.
        Err(error) if error.kind() == ErrorKind::Ambiguous => {
            tracing::warn!(operation = %held.operation.id, error = %chain(&error),
                "the outcome of a type change is unknown");
            Err(StepError::transient("the provider did not say whether it changes the type", error))
        }
        Err(error) => Err(error.into()),
    }
}

pub async fn power_on(held: &Held<'_>) -> Result<Answer, StepError> {
    if let Some(answer) = under_way(held).await? {
        return Ok(answer);
    }
    let Looked { server, age, machine, .. } = match look(held).await? {
        Ok(looked) => looked,
        Err(answer) => return Ok(answer),
    };
    if server.locked {
        return Ok(Answer::wait(soon(age)));
    }
    match server.status {
        ServerStatus::Running | ServerStatus::Starting => {
            // If it was never off, its heartbeats count from now on.
            if machine.power_ordered_at.is_none_or(|at| at < held.operation.created_at) {
                held.power_ordered().await?;
            }
            held.pass(Step::PowerOn, Place::Settled)?;
            Ok(Answer::done())
        }
        ServerStatus::Off => {
            held.power_ordered().await?;
            held.pass(Step::PowerOn, Place::Ordered)?;
            let action = held.platform.provider.power_on(server.id).await?;
            Ok(started(held, action.id, age))
        }
        _ => Ok(Answer::wait(soon(age))),
    }
}

pub async fn await_health(held: &Held<'_>) -> Result<Answer, StepError> {
    let Looked { server, age, machine, to } = match look(held).await? {
        Ok(looked) => looked,
        Err(answer) => return Ok(answer),
    };
    // A shutdown that was obeyed late.
    if server.status == ServerStatus::Off && !server.locked {
        held.power_ordered().await?;
        held.platform.provider.power_on(server.id).await?;
        return Ok(Answer::wait(soon(age)));
    }
    let back = machine.heartbeat_at.zip(machine.power_ordered_at).is_some_and(|(beat, on)| beat > on);
    if !back || !machine.is_healthy() || server.locked {
        return Ok(Answer::wait(soon(age)));
    }
    Ok(if server.server_type == to {
        Answer::End { event: Event::ResizeSucceeded, note: "the host is back on the new type" }
    } else if server.server_type == machine.server_type {
        Answer::End { event: Event::ResizeReverted, note: "the host is back on its old type" }
    } else {
        // Its next healthy heartbeat makes it run with the current type.
        Answer::End { event: Event::ResizeFailed, note: "the server has another type than either" }
    })
}

/// What to do with a step that failed or takes too long.
pub enum Verdict {
    Again,
    /// Continue with the power.
    Abandon,
    /// The server does not come back.
    Fail,
}

/// # Errors
/// [`StepError`] if the database cannot report the step's age.
pub async fn judge(held: &Held<'_>, step: Step, error: Option<&StepError>) -> Result<Verdict, StepError> {
    let timing = &held.platform.config.timing;
    if matches!(step, Step::PowerOn | Step::AwaitHealth) {
        let late = held.step_age().await? >= timing.resize_health;
        return Ok(if late { Verdict::Fail } else { Verdict::Again });
    }
    let late = held.age().await? >= timing.resize_shutdown + timing.resize_change;
    let hopeless = matches!(error, Some(StepError::Permanent { .. }));
    Ok(if late || hopeless { Verdict::Abandon } else { Verdict::Again })
}

struct Looked {
    machine: MachineRow,
    server: Server,
    to: crate::machine::name::ServerType,
    /// Age of the step.
    age: Duration,
}

/// Reads the machine and its server; returns an outcome if the server is missing.
async fn look(held: &Held<'_>) -> Result<Result<Looked, Answer>, StepError> {
    let machine = held.machine().await?;
    let (Some(id), Some(to)) = (machine.provider_server_id, machine.resize_to.clone()) else {
        // It no longer resizes: whatever changed its state also ended this operation.
        return Err(StepError::Lost);
    };
    let age = held.step_age().await?;
    if let Some(server) = held.platform.provider.get(ServerId(id)).await? {
        return Ok(Ok(Looked { machine, server, to, age }));
    }
    // The inventory decides whether it is gone: it considers the host and all other servers.
    Ok(Err(Answer::wait(LOOK_FOR_GONE)))
}

/// Waits for the action that this step has ordered; a failed one is retried after a pause.
pub(super) async fn under_way(held: &Held<'_>) -> Result<Option<Answer>, StepError> {
    match action_of(held).await? {
        None | Some(ActionStatus::Success) => Ok(None),
        Some(ActionStatus::Running) => Ok(Some(Answer::wait(soon(held.step_age().await?)))),
        Some(ActionStatus::Error { code, message }) => {
            tracing::warn!(operation = %held.operation.id, code, message, "an action of the provider failed");
            let mut facts = held.facts();
            facts.remove(ACTION);
            Ok(Some(Answer::Wait { again_in: Duration::from_secs(1), facts: Some(facts) }))
        }
    }
}

/// Status of the recorded action; `None` if there is none, or the provider no longer has it.
async fn action_of(held: &Held<'_>) -> Result<Option<ActionStatus>, StepError> {
    let Some(id) = held.operation.facts.get(ACTION).and_then(Value::as_i64) else { return Ok(None) };
    match held.platform.provider.action(ActionId(id)).await {
        Ok(action) => Ok(Some(action.status)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

pub(super) fn started(held: &Held<'_>, action: ActionId, age: Duration) -> Answer {
    let mut facts: Map<String, Value> = held.facts();
    facts.insert(ACTION.to_owned(), json!(action.0));
    Answer::Wait { again_in: soon(age), facts: Some(facts) }
}

/// The polling interval, which grows with the age.
pub(super) fn soon(age: Duration) -> Duration {
    (age / 4).clamp(Duration::from_millis(200), Duration::from_secs(5))
}
