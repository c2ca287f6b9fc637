//! The steps in `resize`: shut down, power off, change the type, power on, wait for a healthy host.
//!
//! If a step fails before the server is on again, the operation continues with the step that powers it on, and the
//! server's type then decides the outcome. Invariant: nothing here creates or deletes a server, and every step can
//! restart after the process is killed, because it reads the server's state before it requests anything.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::leased::LeasedOperation;
use super::predecessor::{SHUTDOWN_ACCEPTED_AT, time_since};
use super::step::{StepError, StepOutcome};
use super::{Step, StepPoint};
use crate::db::machine_row::MachineRow;
use svc_http::problem::format_chain;
use svc_machine::event::Event;
use svc_provider::{ActionId, ActionStatus, ErrorKind, Server, ServerId, ServerStatus};

/// Key in an operation's facts for the id of the provider action that the step has requested.
pub(super) const ACTION: &str = "action";

/// Interval between lookups of a server that the provider cannot find.
const MISSING_SERVER_INTERVAL: Duration = Duration::from_secs(2);

pub async fn shut_down(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let ResizeState { server, age, .. } = match load_server(leased).await? {
        Ok(state) => state,
        Err(outcome) => return Ok(outcome),
    };
    if server.status == ServerStatus::Off {
        return Ok(StepOutcome::done());
    }
    let mut facts = leased.facts();
    if let Some(since) = time_since(&facts, SHUTDOWN_ACCEPTED_AT, age) {
        return Ok(if since >= leased.platform.config.timing.shutdown_timeout {
            StepOutcome::done_with_note("the host did not shut down in time")
        } else {
            StepOutcome::wait(poll_interval(since))
        });
    }
    match leased.platform.provider.shutdown(server.id).await {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::Refused => {
            tracing::warn!(operation = %leased.operation.id, error = %format_chain(&error), "cannot request a shutdown");
            return Ok(StepOutcome::done_with_note("the provider refused the shutdown request"));
        }
        Err(error) => return Err(error.into()),
    }
    facts.insert(SHUTDOWN_ACCEPTED_AT.to_owned(), json!(age.as_secs_f64()));
    Ok(StepOutcome::Wait { delay: poll_interval(Duration::ZERO), facts: Some(facts) })
}

pub async fn power_off(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    if let Some(outcome) = await_action(leased).await? {
        return Ok(outcome);
    }
    let ResizeState { server, age, .. } = match load_server(leased).await? {
        Ok(state) => state,
        Err(outcome) => return Ok(outcome),
    };
    if server.is_locked {
        return Ok(StepOutcome::wait(poll_interval(age)));
    }
    if server.status == ServerStatus::Off {
        leased.hit_fail_point(Step::PowerOff, StepPoint::ActionEnded)?;
        return Ok(StepOutcome::done());
    }
    let action = leased.platform.provider.power_off(server.id).await?;
    Ok(wait_for_action(leased, action.id, age))
}

pub async fn change_type(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let action_status = match find_action_status(leased).await? {
        Some(ActionStatus::Running) => return Ok(StepOutcome::wait(poll_interval(leased.step_age().await?))),
        other => other,
    };
    let ResizeState { server, age, target_type, .. } = match load_server(leased).await? {
        Ok(state) => state,
        Err(outcome) => return Ok(outcome),
    };
    // A locked server may have a running action that was requested by a crashed process.
    if server.is_locked {
        return Ok(StepOutcome::wait(poll_interval(age)));
    }
    if server.server_type == target_type {
        leased.hit_fail_point(Step::ChangeType, StepPoint::ActionEnded)?;
        return Ok(StepOutcome::done());
    }
    if let Some(ActionStatus::Error { code, message }) = action_status {
        tracing::error!(operation = %leased.operation.id, code, message, "the type change failed");
        return Ok(StepOutcome::Abandon { reason: "the provider's type change failed" });
    }
    if server.status != ServerStatus::Off {
        return Ok(StepOutcome::Abandon { reason: "another client powered the server on" });
    }
    match leased.platform.provider.change_type(server.id, &target_type).await {
        Ok(action) => Ok(wait_for_action(leased, action.id, age)),
        // The change may have started: the next run of this step recognizes that from the server's lock or type.
        Err(error) if error.kind() == ErrorKind::Ambiguous => {
            tracing::warn!(operation = %leased.operation.id, error = %format_chain(&error),
                "the outcome of a type change is unknown");
            Err(StepError::transient("the outcome of a type change is unknown", error))
        }
        Err(error) => Err(error.into()),
    }
}

pub async fn power_on(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    if let Some(outcome) = await_action(leased).await? {
        return Ok(outcome);
    }
    let ResizeState { server, age, machine, .. } = match load_server(leased).await? {
        Ok(state) => state,
        Err(outcome) => return Ok(outcome),
    };
    if server.is_locked {
        return Ok(StepOutcome::wait(poll_interval(age)));
    }
    match server.status {
        ServerStatus::Running | ServerStatus::Starting => {
            // If the server was never off, only heartbeats from now on prove that the host is healthy.
            if machine.power_on_requested_at.is_none_or(|at| at < leased.operation.created_at) {
                leased.record_power_on_request().await?;
            }
            leased.hit_fail_point(Step::PowerOn, StepPoint::ActionEnded)?;
            Ok(StepOutcome::done())
        }
        ServerStatus::Off => {
            leased.record_power_on_request().await?;
            leased.hit_fail_point(Step::PowerOn, StepPoint::RequestRecorded)?;
            let action = leased.platform.provider.power_on(server.id).await?;
            Ok(wait_for_action(leased, action.id, age))
        }
        _ => Ok(StepOutcome::wait(poll_interval(age))),
    }
}

pub async fn await_health(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let ResizeState { server, age, machine, target_type } = match load_server(leased).await? {
        Ok(state) => state,
        Err(outcome) => return Ok(outcome),
    };
    // If the server is off again, the host obeyed the shutdown request late.
    if server.status == ServerStatus::Off && !server.is_locked {
        leased.record_power_on_request().await?;
        leased.platform.provider.power_on(server.id).await?;
        return Ok(StepOutcome::wait(poll_interval(age)));
    }
    let has_returned = machine
        .heartbeat_at
        .zip(machine.power_on_requested_at)
        .is_some_and(|(heartbeat, power_on)| heartbeat > power_on);
    if !has_returned || !machine.is_healthy() || server.is_locked {
        return Ok(StepOutcome::wait(poll_interval(age)));
    }
    Ok(if server.server_type == target_type {
        StepOutcome::End { event: Event::ResizeSucceeded, note: "the host is back on the new type" }
    } else if server.server_type == machine.server_type {
        StepOutcome::End { event: Event::ResizeReverted, note: "the host is back on its old type" }
    } else {
        // The machine's next healthy heartbeat returns it to service with the server's current type.
        StepOutcome::End {
            event: Event::ResizeFailed,
            note: "the server has neither the old nor the new type",
        }
    })
}

/// How a resize continues after a step has failed, or while a step is waiting.
pub enum RetryDecision {
    Retry,
    /// Continue with the step that powers the server on.
    Abandon,
    /// End the resize as failed, because the host did not return in time.
    Fail,
}

/// Decides how a resize continues after a step has failed, or while a step is waiting.
///
/// # Errors
/// [`StepError`] if the database cannot report the age of the step or the operation.
pub async fn decide_retry(
    leased: &LeasedOperation<'_>,
    step: Step,
    error: Option<&StepError>,
) -> Result<RetryDecision, StepError> {
    let timing = &leased.platform.config.timing;
    if matches!(step, Step::PowerOn | Step::AwaitHealth) {
        let is_late = leased.unblocked_step_age().await? >= timing.host_return_timeout;
        return Ok(if is_late { RetryDecision::Fail } else { RetryDecision::Retry });
    }
    let is_late = leased.age().await? >= timing.shutdown_timeout + timing.server_type_change_timeout;
    let is_permanent = matches!(error, Some(StepError::Permanent { .. }));
    Ok(if is_late || is_permanent { RetryDecision::Abandon } else { RetryDecision::Retry })
}

struct ResizeState {
    machine: MachineRow,
    server: Server,
    target_type: svc_machine::name::ServerType,
    /// The step's age.
    age: Duration,
}

/// Reads the machine and its server; returns an outcome if the server is missing.
async fn load_server(leased: &LeasedOperation<'_>) -> Result<Result<ResizeState, StepOutcome>, StepError> {
    let machine = leased.machine().await?;
    let (Some(id), Some(target_type)) = (machine.provider_server_id, machine.resize_to.clone()) else {
        // The machine is no longer being resized: its state change also ended this operation.
        return Err(StepError::LeaseLost);
    };
    let age = leased.step_age().await?;
    if let Some(server) = leased.platform.provider.get(ServerId(id)).await? {
        return Ok(Ok(ResizeState { machine, server, target_type, age }));
    }
    // The inventory decides whether the server is gone, because it considers the host and all other servers.
    Ok(Err(StepOutcome::wait(MISSING_SERVER_INTERVAL)))
}

/// Returns an outcome that waits while the action that this step has requested is running; `None` if the step can
/// continue. After the action has failed, the step requests it again after a delay.
pub(super) async fn await_action(leased: &LeasedOperation<'_>) -> Result<Option<StepOutcome>, StepError> {
    match find_action_status(leased).await? {
        None | Some(ActionStatus::Success) => Ok(None),
        Some(ActionStatus::Running) => Ok(Some(StepOutcome::wait(poll_interval(leased.step_age().await?)))),
        Some(ActionStatus::Error { code, message }) => {
            tracing::warn!(operation = %leased.operation.id, code, message, "a provider action failed");
            let mut facts = leased.facts();
            facts.remove(ACTION);
            let delay = retry_interval(leased.step_age().await?);
            Ok(Some(StepOutcome::Wait { delay, facts: Some(facts) }))
        }
    }
}

/// Finds the status of the recorded action; `None` if no action is recorded, or if the provider no longer has it.
async fn find_action_status(leased: &LeasedOperation<'_>) -> Result<Option<ActionStatus>, StepError> {
    let Some(id) = leased.operation.facts.get(ACTION).and_then(Value::as_i64) else { return Ok(None) };
    match leased.platform.provider.get_action(ActionId(id)).await {
        Ok(action) => Ok(Some(action.status)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Records the action that the step has requested, and waits for it.
pub(super) fn wait_for_action(leased: &LeasedOperation<'_>, action: ActionId, age: Duration) -> StepOutcome {
    let mut facts: Map<String, Value> = leased.facts();
    facts.insert(ACTION.to_owned(), json!(action.0));
    StepOutcome::Wait { delay: poll_interval(age), facts: Some(facts) }
}

/// Returns the polling interval, which grows with the step's age.
pub(super) fn poll_interval(age: Duration) -> Duration {
    (age / 4).clamp(Duration::from_millis(200), Duration::from_secs(5))
}

/// Returns the delay before a failed action is requested again, which grows with the step's age. It is longer than
/// [`poll_interval`], because each request locks the server and all machines share the provider's rate limit.
pub(super) fn retry_interval(age: Duration) -> Duration {
    (age / 4).clamp(Duration::from_secs(1), Duration::from_secs(30))
}
