//! The steps that power the server of a slot's machine off or on, or restart it.
//!
//! Invariant: a step reads the server's state before it requests anything, and requests nothing for a machine that has
//! left its slot.

use std::time::Duration;

use serde_json::{Value, json};

use super::leased::LeasedOperation;
use super::step::{StepError, StepOutcome, StepRecord};
use super::{Step, StepPoint, predecessor, reinstate, resize};
use crate::db;
use crate::db::machine_row::MachineRow;
use svc_provider::{Server, ServerId, ServerStatus};

/// Key in an operation's facts for [`LeasedOperation::unblocked_step_age`] at the first restart request, in seconds.
const FIRST_REQUEST_AT: &str = "firstRequestAt";

const POLL_INTERVAL: Duration = Duration::from_millis(500);

pub async fn start_server(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let machine = load_machine_in_slot(leased).await?;
    if is_slot_leased(leased, &machine).await? {
        return Ok(StepOutcome::wait(POLL_INTERVAL));
    }
    let Some(server) = find_server(leased, &machine).await? else { return Ok(server_gone_outcome()) };
    leased.detect_returned_server(&machine).await?;
    let outcome = reinstate::ensure_stays_on(leased, machine.id, &server).await?;
    Ok(outcome.unwrap_or_else(StepOutcome::done))
}

pub async fn stop_server(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let machine = load_machine_in_slot(leased).await?;
    if is_slot_leased(leased, &machine).await? {
        return Ok(StepOutcome::wait(POLL_INTERVAL));
    }
    let Some(id) = machine.provider_server_id else { return Ok(server_gone_outcome()) };
    let (age, failing_for) = (leased.step_age().await?, leased.failure_age().await?);
    let outcome = predecessor::power_off(leased, ServerId(id), age, failing_for).await?;
    Ok(outcome.unwrap_or_else(server_gone_outcome))
}

/// Restarts the server, or powers it on if it is off. If the process is killed in this step, or a response is lost, the
/// restart may be requested more than once, within `RESIZE_HEALTH_SECONDS` of the first request.
pub async fn reboot_server(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let machine = load_machine_in_slot(leased).await?;
    if let Some(outcome) = resize::await_action(leased).await? {
        return Ok(outcome);
    }
    if leased.operation.facts.get(resize::ACTION).is_some() {
        return Ok(StepOutcome::done());
    }
    if is_slot_leased(leased, &machine).await? {
        return Ok(StepOutcome::wait(POLL_INTERVAL));
    }
    let Some(server) = find_server(leased, &machine).await? else { return Ok(server_gone_outcome()) };
    let age = leased.step_age().await?;
    if server.is_locked || !matches!(server.status, ServerStatus::Running | ServerStatus::Off) {
        return Ok(StepOutcome::wait(resize::poll_interval(age)));
    }
    let unblocked_age = leased.unblocked_step_age().await?;
    let unblocked_age_at_first_request = leased.operation.facts.get(FIRST_REQUEST_AT).and_then(Value::as_f64);
    // Recorded before the request, because its response may be lost.
    let Some(unblocked_age_at_first_request) =
        unblocked_age_at_first_request.and_then(|age| Duration::try_from_secs_f64(age).ok())
    else {
        let mut facts = leased.facts();
        facts.insert(FIRST_REQUEST_AT.to_owned(), json!(unblocked_age.as_secs_f64()));
        return Ok(StepOutcome::Wait { delay: Duration::ZERO, facts: Some(facts) });
    };
    // Each failed action changes the facts, which counts as progress. Without this limit, the step could run for a day,
    // and each request whose response is lost would restart the server again.
    if unblocked_age.saturating_sub(unblocked_age_at_first_request)
        >= leased.platform.config.timing.host_return_timeout
    {
        return Ok(StepOutcome::Fail {
            code: "reboot_failed",
            note: "the provider did not restart the server in time",
        });
    }
    leased.hit_fail_point(Step::RebootServer, StepPoint::RequestRecorded)?;
    let provider = &leased.platform.provider;
    let action = if server.status == ServerStatus::Off {
        provider.power_on(server.id).await?
    } else {
        provider.reboot(server.id).await?
    };
    Ok(resize::wait_for_action(leased, action.id, age))
}

pub async fn await_heartbeat(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let machine = load_machine_in_slot(leased).await?;
    let record = StepRecord::HealthyAfterPowerOn { machine: machine.id };
    if machine.registered_at.is_none() {
        return Ok(StepOutcome::Done { note: Some("the host never registered".into()), record });
    }
    let (age, now) = (leased.step_age().await?, leased.now().await?);
    let has_heartbeat_since_start =
        machine.heartbeat_at.is_some_and(|at| now.duration_since(at).unsigned_abs() < age);
    if has_heartbeat_since_start && machine.is_healthy() {
        return Ok(StepOutcome::Done { note: None, record });
    }
    if age >= leased.platform.config.timing.host_return_timeout {
        // The server has been powered on, even though its host is silent.
        leased.clear_powered_off().await?;
        return Ok(StepOutcome::Fail { code: "host_silent", note: "the host did not come back in time" });
    }
    Ok(StepOutcome::wait((age / 4).clamp(POLL_INTERVAL, Duration::from_secs(5))))
}

async fn load_machine_in_slot(leased: &LeasedOperation<'_>) -> Result<MachineRow, StepError> {
    let machine = leased.machine().await?;
    if machine.is_active() { Ok(machine) } else { Err(StepError::LeaseLost) }
}

/// Returns whether a process may still be running another operation in the machine's slot. Even an operation that has
/// ended keeps its lease until the lease expires, because its process may not have noticed the end yet.
async fn is_slot_leased(leased: &LeasedOperation<'_>, machine: &MachineRow) -> Result<bool, StepError> {
    let session = leased.platform.db.session().await?;
    Ok(db::leases::has_other_lease_in_slot(&session, machine.id, leased.operation.id).await?)
}

async fn find_server(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
) -> Result<Option<Server>, StepError> {
    let Some(id) = machine.provider_server_id else { return Ok(None) };
    Ok(leased.platform.provider.get(ServerId(id)).await?)
}

fn server_gone_outcome() -> StepOutcome {
    StepOutcome::Fail { code: "server_gone", note: "the provider has no server for this machine" }
}
