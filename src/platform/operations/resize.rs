//! The steps of `resize`: shut down, power off, change the type, power on, hear from the host.
//!
//! Whatever goes wrong before the power is on again leads there, and which type the server then has decides how the
//! resize ended. The invariant: nothing here creates or deletes, and every step can begin anew after a kill, because
//! it looks at the server before it asks for anything.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::held::Held;
use super::step::{Answer, StepError};
use super::{Place, Step};
use crate::http::problem::chain;
use crate::machine::event::Event;
use crate::platform::db::machine_row::MachineRow;
use crate::provider::{ActionId, ActionStatus, ErrorKind, Server, ServerId, ServerStatus};

/// The action under way, among an operation's facts.
pub(super) const ACTION: &str = "action";
const ASKED: &str = "asked";

/// Between two reads of a server that the provider does not show.
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
                tracing::warn!(operation = %held.operation.id, error = %chain(&error), "no shutdown");
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
    // An action that was ordered by a process that is dead shows as the lock.
    if server.locked {
        return Ok(Answer::wait(soon(age)));
    }
    if server.server_type == to {
        held.pass(Step::ChangeType, Place::Settled)?;
        return Ok(Answer::done());
    }
    if let Some(ActionStatus::Error { code, message }) = ended {
        tracing::error!(operation = %held.operation.id, code, message, "the change of type failed");
        return Ok(Answer::Abandon { why: "the provider's change of type ended as an error" });
    }
    if server.status != ServerStatus::Off {
        return Ok(Answer::Abandon { why: "the server was switched on by somebody else" });
    }
    match held.platform.provider.change_type(server.id, &to).await {
        Ok(action) => Ok(started(held, action.id, age)),
        // It may have begun: the next look says so by the lock, or by the type.
        Err(error) if error.kind() == ErrorKind::Ambiguous => {
            tracing::warn!(operation = %held.operation.id, error = %chain(&error),
                "the outcome of a change of type is not known");
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
            // Where it was never off, what its host says from now on counts.
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
    // A shutdown that was heard late.
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
        // Its next healthy heartbeat makes it run, with the type that is there.
        Answer::End { event: Event::ResizeFailed, note: "the server has another type than either" }
    })
}

/// What becomes of a step that failed, or that goes on for too long.
pub enum Verdict {
    Again,
    /// On to the power.
    Abandon,
    /// The server does not come back.
    Fail,
}

/// # Errors
/// [`StepError`] where the database does not say how long it has taken.
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
    /// Of the step.
    age: Duration,
}

/// The machine and its server now, or what there is to answer where the server is not there.
async fn look(held: &Held<'_>) -> Result<Result<Looked, Answer>, StepError> {
    let machine = held.machine().await?;
    let (Some(id), Some(to)) = (machine.provider_server_id, machine.resize_to.clone()) else {
        // It does not resize any more: whoever moved it ended this operation with it.
        return Err(StepError::Lost);
    };
    let age = held.step_age().await?;
    if let Some(server) = held.platform.provider.get(ServerId(id)).await? {
        return Ok(Ok(Looked { machine, server, to, age }));
    }
    // Whether it is gone for good is the census's to say, which knows of the host and of all other servers.
    Ok(Err(Answer::wait(LOOK_FOR_GONE)))
}

/// Waits for the action that this step has begun; one that failed is begun anew after a pause.
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

/// How the noted action stands; `None` where there is none, or the provider has forgotten it.
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

/// The longer it takes, the less often it is looked at.
pub(super) fn soon(age: Duration) -> Duration {
    (age / 4).clamp(Duration::from_millis(200), Duration::from_secs(5))
}
