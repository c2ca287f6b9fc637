//! The steps that switch the server of a slot's machine off or on, or restart it.
//!
//! The invariant: a step reads the server's state before it orders anything, and orders nothing for a machine that
//! has left its slot.

use std::time::Duration;

use super::leased::HeldOperation;
use super::step::{StepError, StepOutcome, StepRecord};
use super::{Step, StepPoint, predecessor, reinstate, resize};
use crate::db;
use crate::db::machine_row::MachineRow;
use svc_provider::{Server, ServerId, ServerStatus};

const POLL_INTERVAL: Duration = Duration::from_millis(500);

pub async fn start_server(held: &HeldOperation<'_>) -> Result<StepOutcome, StepError> {
    let machine = machine_in_slot(held).await?;
    if is_slot_leased(held, &machine).await? {
        return Ok(StepOutcome::wait(POLL_INTERVAL));
    }
    let Some(server) = find_server(held, &machine).await? else { return Ok(no_server()) };
    held.detect_returned_server(&machine).await?;
    let is_on = reinstate::ensure_on(held, &server).await?;
    if is_on && !may_shut_down_late(held, &machine).await? {
        return Ok(StepOutcome::done());
    }
    Ok(StepOutcome::wait(POLL_INTERVAL))
}

/// Whether the host may still obey the shutdown of an earlier operation, which ended when this one was created. A
/// shutdown may take a bounded time.
async fn may_shut_down_late(held: &HeldOperation<'_>, machine: &MachineRow) -> Result<bool, StepError> {
    let deadline = held.platform.config.timing.resize_shutdown;
    if held.age().await? >= deadline {
        return Ok(false);
    }
    let session = held.platform.db.session().await?;
    let operations = db::operations::list_for_machine(&session, machine.id).await?;
    let began = held.operation.created_at;
    Ok(operations.iter().any(|other| {
        let shuts_down = matches!(other.kind.as_str(), "resize" | "power_off");
        let just_ended = other.ended_at.is_some_and(|at| began.duration_since(at).unsigned_abs() < deadline);
        shuts_down && other.state != "succeeded" && just_ended
    }))
}

pub async fn stop_server(held: &HeldOperation<'_>) -> Result<StepOutcome, StepError> {
    let machine = machine_in_slot(held).await?;
    if is_slot_leased(held, &machine).await? {
        return Ok(StepOutcome::wait(POLL_INTERVAL));
    }
    let Some(id) = machine.provider_server_id else { return Ok(no_server()) };
    let outcome = predecessor::switch_off(held, ServerId(id), held.step_age().await?).await?;
    Ok(outcome.unwrap_or_else(no_server))
}

/// A server that is off is switched on instead. After a kill midway, the restart may be ordered twice.
pub async fn reboot_server(held: &HeldOperation<'_>) -> Result<StepOutcome, StepError> {
    let machine = machine_in_slot(held).await?;
    if let Some(outcome) = resize::await_action(held).await? {
        return Ok(outcome);
    }
    if held.operation.facts.get(resize::ACTION).is_some() {
        return Ok(StepOutcome::done());
    }
    if is_slot_leased(held, &machine).await? {
        return Ok(StepOutcome::wait(POLL_INTERVAL));
    }
    let Some(server) = find_server(held, &machine).await? else { return Ok(no_server()) };
    if server.status == ServerStatus::Off {
        held.platform.provider.power_on(server.id).await?;
        return Ok(StepOutcome::wait(POLL_INTERVAL));
    }
    if server.locked || server.status != ServerStatus::Running {
        return Ok(StepOutcome::wait(POLL_INTERVAL));
    }
    held.hit_fail_point(Step::RebootServer, StepPoint::Ordered)?;
    let action = held.platform.provider.reboot(server.id).await?;
    Ok(resize::action_started(held, action.id, held.step_age().await?))
}

pub async fn await_heartbeat(held: &HeldOperation<'_>) -> Result<StepOutcome, StepError> {
    let machine = machine_in_slot(held).await?;
    let record = StepRecord::PoweredOn { machine: machine.id };
    if machine.registered_at.is_none() {
        return Ok(StepOutcome::Done { note: Some("its host never registered".into()), record });
    }
    let (age, now) = (held.step_age().await?, held.now().await?);
    let has_recent_heartbeat =
        machine.heartbeat_at.is_some_and(|at| now.duration_since(at).unsigned_abs() < age);
    if has_recent_heartbeat && machine.is_healthy() {
        return Ok(StepOutcome::Done { note: None, record });
    }
    if age >= held.platform.config.timing.resize_health {
        held.clear_powered_off().await?;
        return Ok(StepOutcome::Fail { code: "host_silent", note: "the host did not come back in time" });
    }
    Ok(StepOutcome::wait((age / 4).clamp(POLL_INTERVAL, Duration::from_secs(5))))
}

async fn machine_in_slot(held: &HeldOperation<'_>) -> Result<MachineRow, StepError> {
    let machine = held.machine().await?;
    if machine.is_active() { Ok(machine) } else { Err(StepError::Lost) }
}

/// Whether another process may still be running an ended operation of the slot.
async fn is_slot_leased(held: &HeldOperation<'_>, machine: &MachineRow) -> Result<bool, StepError> {
    let session = held.platform.db.session().await?;
    Ok(db::leases::has_other_slot_lease(&session, machine.id, held.operation.id).await?)
}

async fn find_server(held: &HeldOperation<'_>, machine: &MachineRow) -> Result<Option<Server>, StepError> {
    let Some(id) = machine.provider_server_id else { return Ok(None) };
    Ok(held.platform.provider.get(ServerId(id)).await?)
}

fn no_server() -> StepOutcome {
    StepOutcome::Fail { code: "server_gone", note: "the provider has no server of this machine" }
}
