//! The steps of `resize`: shut down, power off, change the type, power on, wait for a healthy host.
//!
//! Every failure before the power is on again leads to the step that switches it on, and the server's type then
//! decides the outcome. The invariant: nothing here creates or deletes a server, and every step can restart after a
//! kill, because it reads the server's state before it orders anything.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::leased::HeldOperation;
use super::step::{StepError, StepOutcome};
use super::{Step, StepPoint};
use crate::db::machine_row::MachineRow;
use svc_http::problem::chain;
use svc_machine::event::Event;
use svc_provider::{ActionId, ActionStatus, ErrorKind, Server, ServerId, ServerStatus};

/// Key of an operation's facts: the running action.
pub(super) const ACTION: &str = "action";
const SHUTDOWN_REQUESTED: &str = "asked";

/// Interval between reads of a server that the provider does not show.
const MISSING_SERVER_INTERVAL: Duration = Duration::from_secs(2);

pub async fn shut_down(held: &HeldOperation<'_>) -> Result<StepOutcome, StepError> {
    let ResizeView { server, age, .. } = match load_server(held).await? {
        Ok(view) => view,
        Err(outcome) => return Ok(outcome),
    };
    if server.status == ServerStatus::Off {
        return Ok(StepOutcome::done());
    }
    if age >= held.platform.config.timing.resize_shutdown {
        return Ok(StepOutcome::done_noting("the host did not shut down in time"));
    }
    let mut facts = held.facts();
    if !facts.contains_key(SHUTDOWN_REQUESTED) {
        match held.platform.provider.shutdown(server.id).await {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Refused => {
                tracing::warn!(operation = %held.operation.id, error = %chain(&error), "cannot request a shutdown");
                return Ok(StepOutcome::done_noting("the provider refused the shutdown request"));
            }
            Err(error) => return Err(error.into()),
        }
        facts.insert(SHUTDOWN_REQUESTED.to_owned(), json!(true));
    }
    Ok(StepOutcome::Wait { again_in: poll_interval(age), facts: Some(facts) })
}

pub async fn power_off(held: &HeldOperation<'_>) -> Result<StepOutcome, StepError> {
    if let Some(outcome) = await_action(held).await? {
        return Ok(outcome);
    }
    let ResizeView { server, age, .. } = match load_server(held).await? {
        Ok(view) => view,
        Err(outcome) => return Ok(outcome),
    };
    if server.locked {
        return Ok(StepOutcome::wait(poll_interval(age)));
    }
    if server.status == ServerStatus::Off {
        held.hit_fail_point(Step::PowerOff, StepPoint::Settled)?;
        return Ok(StepOutcome::done());
    }
    let action = held.platform.provider.power_off(server.id).await?;
    Ok(action_started(held, action.id, age))
}

pub async fn change_type(held: &HeldOperation<'_>) -> Result<StepOutcome, StepError> {
    let ended = match action_of(held).await? {
        Some(ActionStatus::Running) => return Ok(StepOutcome::wait(poll_interval(held.step_age().await?))),
        other => other,
    };
    let ResizeView { server, age, to, .. } = match load_server(held).await? {
        Ok(view) => view,
        Err(outcome) => return Ok(outcome),
    };
    // The lock shows an action that a crashed process ordered.
    if server.locked {
        return Ok(StepOutcome::wait(poll_interval(age)));
    }
    if server.server_type == to {
        held.hit_fail_point(Step::ChangeType, StepPoint::Settled)?;
        return Ok(StepOutcome::done());
    }
    if let Some(ActionStatus::Error { code, message }) = ended {
        tracing::error!(operation = %held.operation.id, code, message, "the type change failed");
        return Ok(StepOutcome::Abandon { why: "the provider's type change failed" });
    }
    if server.status != ServerStatus::Off {
        return Ok(StepOutcome::Abandon { why: "another client switched the server on" });
    }
    match held.platform.provider.change_type(server.id, &to).await {
        Ok(action) => Ok(action_started(held, action.id, age)),
        // The change may have started: the lock or the type shows that at the next check.
        Err(error) if error.kind() == ErrorKind::Ambiguous => {
            tracing::warn!(operation = %held.operation.id, error = %chain(&error),
                "the outcome of a type change is unknown");
            Err(StepError::transient("the outcome of a type change is unknown", error))
        }
        Err(error) => Err(error.into()),
    }
}

pub async fn power_on(held: &HeldOperation<'_>) -> Result<StepOutcome, StepError> {
    if let Some(outcome) = await_action(held).await? {
        return Ok(outcome);
    }
    let ResizeView { server, age, machine, .. } = match load_server(held).await? {
        Ok(view) => view,
        Err(outcome) => return Ok(outcome),
    };
    if server.locked {
        return Ok(StepOutcome::wait(poll_interval(age)));
    }
    match server.status {
        ServerStatus::Running | ServerStatus::Starting => {
            // If it was never off, its heartbeats count from now on.
            if machine.power_ordered_at.is_none_or(|at| at < held.operation.created_at) {
                held.record_power_order().await?;
            }
            held.hit_fail_point(Step::PowerOn, StepPoint::Settled)?;
            Ok(StepOutcome::done())
        }
        ServerStatus::Off => {
            held.record_power_order().await?;
            held.hit_fail_point(Step::PowerOn, StepPoint::Ordered)?;
            let action = held.platform.provider.power_on(server.id).await?;
            Ok(action_started(held, action.id, age))
        }
        _ => Ok(StepOutcome::wait(poll_interval(age))),
    }
}

pub async fn await_health(held: &HeldOperation<'_>) -> Result<StepOutcome, StepError> {
    let ResizeView { server, age, machine, to } = match load_server(held).await? {
        Ok(view) => view,
        Err(outcome) => return Ok(outcome),
    };
    // A shutdown that was obeyed late.
    if server.status == ServerStatus::Off && !server.locked {
        held.record_power_order().await?;
        held.platform.provider.power_on(server.id).await?;
        return Ok(StepOutcome::wait(poll_interval(age)));
    }
    let is_back = machine.heartbeat_at.zip(machine.power_ordered_at).is_some_and(|(beat, on)| beat > on);
    if !is_back || !machine.is_healthy() || server.locked {
        return Ok(StepOutcome::wait(poll_interval(age)));
    }
    Ok(if server.server_type == to {
        StepOutcome::End { event: Event::ResizeSucceeded, note: "the host is back on the new type" }
    } else if server.server_type == machine.server_type {
        StepOutcome::End { event: Event::ResizeReverted, note: "the host is back on its old type" }
    } else {
        // Its next healthy heartbeat makes it run with the current type.
        StepOutcome::End {
            event: Event::ResizeFailed,
            note: "the server has neither the old nor the new type",
        }
    })
}

/// The action after a step that failed or takes too long.
pub enum RetryDecision {
    Retry,
    /// Continue with the power.
    Abandon,
    /// The server does not come back.
    Fail,
}

/// # Errors
/// [`StepError`] if the database cannot report the step's age.
pub async fn decide_retry(
    held: &HeldOperation<'_>,
    step: Step,
    error: Option<&StepError>,
) -> Result<RetryDecision, StepError> {
    let timing = &held.platform.config.timing;
    if matches!(step, Step::PowerOn | Step::AwaitHealth) {
        let is_late = held.step_age().await? >= timing.resize_health;
        return Ok(if is_late { RetryDecision::Fail } else { RetryDecision::Retry });
    }
    let is_late = held.age().await? >= timing.resize_shutdown + timing.resize_change;
    let is_permanent = matches!(error, Some(StepError::Permanent { .. }));
    Ok(if is_late || is_permanent { RetryDecision::Abandon } else { RetryDecision::Retry })
}

struct ResizeView {
    machine: MachineRow,
    server: Server,
    to: svc_machine::name::ServerType,
    /// Age of the step.
    age: Duration,
}

/// Reads the machine and its server; returns an outcome if the server is missing.
async fn load_server(held: &HeldOperation<'_>) -> Result<Result<ResizeView, StepOutcome>, StepError> {
    let machine = held.machine().await?;
    let (Some(id), Some(to)) = (machine.provider_server_id, machine.resize_to.clone()) else {
        // It no longer resizes: the change of its state also ended this operation.
        return Err(StepError::Lost);
    };
    let age = held.step_age().await?;
    if let Some(server) = held.platform.provider.get(ServerId(id)).await? {
        return Ok(Ok(ResizeView { machine, server, to, age }));
    }
    // The inventory decides whether it is gone: it considers the host and all other servers.
    Ok(Err(StepOutcome::wait(MISSING_SERVER_INTERVAL)))
}

/// Waits for the action that this step has ordered; a failed one is retried after a pause.
pub(super) async fn await_action(held: &HeldOperation<'_>) -> Result<Option<StepOutcome>, StepError> {
    match action_of(held).await? {
        None | Some(ActionStatus::Success) => Ok(None),
        Some(ActionStatus::Running) => Ok(Some(StepOutcome::wait(poll_interval(held.step_age().await?)))),
        Some(ActionStatus::Error { code, message }) => {
            tracing::warn!(operation = %held.operation.id, code, message, "an action of the provider failed");
            let mut facts = held.facts();
            facts.remove(ACTION);
            Ok(Some(StepOutcome::Wait { again_in: Duration::from_secs(1), facts: Some(facts) }))
        }
    }
}

/// Status of the recorded action; `None` if there is none, or the provider no longer has it.
async fn action_of(held: &HeldOperation<'_>) -> Result<Option<ActionStatus>, StepError> {
    let Some(id) = held.operation.facts.get(ACTION).and_then(Value::as_i64) else { return Ok(None) };
    match held.platform.provider.action(ActionId(id)).await {
        Ok(action) => Ok(Some(action.status)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

pub(super) fn action_started(held: &HeldOperation<'_>, action: ActionId, age: Duration) -> StepOutcome {
    let mut facts: Map<String, Value> = held.facts();
    facts.insert(ACTION.to_owned(), json!(action.0));
    StepOutcome::Wait { again_in: poll_interval(age), facts: Some(facts) }
}

/// The polling interval, which grows with the age.
pub(super) fn poll_interval(age: Duration) -> Duration {
    (age / 4).clamp(Duration::from_millis(200), Duration::from_secs(5))
}
