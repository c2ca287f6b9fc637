//! The steps that return a machine to its slot: its server is powered on, its writers resume, and its host adopts the
//! new epoch from a heartbeat response.
//!
//! Invariant: no server is powered on while another process may still be powering it off, and a server whose host
//! may still obey an earlier shutdown does not count as on.

use std::time::Duration;

use serde_json::json;

use super::host_call;
use super::leased::LeasedOperation;
use super::resize;
use super::step::{StepError, StepOutcome, StepRecord};
use crate::db;
use svc_http::problem::format_chain;
use svc_machine::event::Event;
use svc_machine::id::MachineId;
use svc_machine::state::{FailureCause, Status};
use svc_provider::{ProviderError, Server, ServerId, ServerStatus};

const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Key in an operation's facts, set when the step has found the server off: an earlier shutdown can no longer take
/// effect.
const SEEN_OFF: &str = "seenOff";

pub async fn power_on(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let machine = leased.machine().await?;
    let session = leased.platform.db.session().await?;
    let is_slot_leased =
        db::leases::has_other_lease_in_slot(&session, machine.id, leased.operation.id).await?;
    drop(session);
    if is_slot_leased {
        return Ok(StepOutcome::wait(POLL_INTERVAL));
    }
    let Some(id) = machine.provider_server_id else {
        return Ok(StepOutcome::End { event: Event::ServerGone, note: "the machine has no server" });
    };
    let Some(server) = leased.platform.provider.get(ServerId(id)).await? else {
        return Ok(StepOutcome::End {
            event: Event::ServerGone,
            note: "the provider no longer has the server",
        });
    };
    if let Some(outcome) = ensure_stays_on(leased, machine.id, &server).await? {
        return Ok(outcome);
    }
    Ok(StepOutcome::Done { note: None, record: StepRecord::ReinstatedServerOn { machine: machine.id } })
}

/// Powers the server on if it is off, and waits while its host may still obey an earlier shutdown request. Returns
/// `None` once the server is on and stays on.
pub(super) async fn ensure_stays_on(
    leased: &LeasedOperation<'_>,
    machine: MachineId,
    server: &Server,
) -> Result<Option<StepOutcome>, StepError> {
    let age = leased.step_age().await?;
    let mut facts = leased.facts();
    if let Some(delay) = ensure_on(leased, server, age).await? {
        if server.status == ServerStatus::Off && !server.is_locked {
            facts.insert(SEEN_OFF.to_owned(), json!(true));
        }
        return Ok(Some(StepOutcome::Wait { delay, facts: Some(facts) }));
    }
    if !facts.contains_key(SEEN_OFF) && may_shut_down_late(leased, machine).await? {
        return Ok(Some(StepOutcome::wait(resize::poll_interval(age))));
    }
    Ok(None)
}

/// Returns whether the host may still obey a shutdown request from an operation that ended shortly before this one was
/// created. `shutdown_timeout` is the maximum time that a shutdown takes. A process may send its last request after the
/// end of its operation, until its lease expires.
async fn may_shut_down_late(leased: &LeasedOperation<'_>, machine: MachineId) -> Result<bool, StepError> {
    let timing = &leased.platform.config.timing;
    let period = timing.shutdown_timeout + timing.lease_ttl;
    if leased.age().await? >= period {
        return Ok(false);
    }
    let session = leased.platform.db.session().await?;
    Ok(db::slot_operations::may_have_pending_shutdown(&session, machine, leased.operation, period).await?)
}

/// Returns `None` if the server is on or starting, and not locked; otherwise, the delay before the next check. Requests
/// that the server be powered on if it is off and not locked.
async fn ensure_on(
    leased: &LeasedOperation<'_>,
    server: &Server,
    step_age: Duration,
) -> Result<Option<Duration>, ProviderError> {
    match server.status {
        _ if server.is_locked => Ok(Some(resize::poll_interval(step_age))),
        ServerStatus::Running | ServerStatus::Starting => Ok(None),
        ServerStatus::Off => {
            leased.platform.provider.power_on(server.id).await?;
            // If the action fails, the server is still off at the next check, which requests it again.
            Ok(Some(resize::retry_interval(step_age)))
        }
        _ => Ok(Some(resize::poll_interval(step_age))),
    }
}

pub async fn await_host(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let machine = leased.machine().await?;
    let age = leased.step_age().await?;
    let is_reinstating = machine.status == Status::Failed
        && machine.failure.as_ref().is_some_and(|failure| failure.cause == FailureCause::Reinstating);
    if let Some(operation) = leased.find_retiring_operation().await? {
        // The response to the host's next heartbeat also resumes the writers; this call is faster.
        if let Err(error) = host_call::resume(leased.platform, &machine, operation).await {
            tracing::debug!(machine = %machine.id, error = %format_chain(&error), "cannot resume the host's writers yet");
        } else if !is_reinstating {
            return Ok(StepOutcome::done());
        }
    }
    if !is_reinstating {
        return Ok(StepOutcome::done_with_note("the host resumes its writers at its next heartbeat"));
    }
    if age >= leased.platform.config.timing.host_return_timeout {
        return Ok(StepOutcome::Fail { code: "host_silent", note: "the host did not come back in time" });
    }
    Ok(StepOutcome::wait((age / 4).clamp(POLL_INTERVAL, Duration::from_secs(5))))
}
