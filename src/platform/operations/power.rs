//! The steps that switch the server of a slot's machine off or on, or restart it.
//!
//! The invariant: a step reads the server's state before it orders anything, and orders nothing for a machine that
//! has left its slot.

use std::time::Duration;

use super::held::Held;
use super::step::{Answer, Record, StepError};
use super::{Place, Step, predecessor, reinstate, resize};
use crate::platform::db;
use crate::platform::db::machine_row::MachineRow;
use crate::provider::{Server, ServerId, ServerStatus};

const POLL: Duration = Duration::from_millis(500);

pub async fn start(held: &Held<'_>) -> Result<Answer, StepError> {
    let machine = machine_in_slot(held).await?;
    if another_is_at_work(held, &machine).await? {
        return Ok(Answer::wait(POLL));
    }
    let Some(server) = server_of(held, &machine).await? else { return Ok(no_server()) };
    held.finds_server_again(&machine).await?;
    let is_on = reinstate::is_on(held, &server).await?;
    if is_on && !may_shut_down_late(held, &machine).await? {
        return Ok(Answer::done());
    }
    Ok(Answer::wait(POLL))
}

/// Whether the host may still obey the shutdown of an earlier operation, which ended when this one was filed. A
/// shutdown may take a bounded time.
async fn may_shut_down_late(held: &Held<'_>, machine: &MachineRow) -> Result<bool, StepError> {
    let deadline = held.platform.config.timing.resize_shutdown;
    if held.age().await? >= deadline {
        return Ok(false);
    }
    let session = held.platform.db.session().await?;
    let operations = db::operations::of_machine(&session, machine.id).await?;
    let began = held.operation.created_at;
    Ok(operations.iter().any(|other| {
        let shuts_down = matches!(other.kind.as_str(), "resize" | "power_off");
        let just_ended = other.ended_at.is_some_and(|at| began.duration_since(at).unsigned_abs() < deadline);
        shuts_down && other.state != "succeeded" && just_ended
    }))
}

pub async fn stop(held: &Held<'_>) -> Result<Answer, StepError> {
    let machine = machine_in_slot(held).await?;
    if another_is_at_work(held, &machine).await? {
        return Ok(Answer::wait(POLL));
    }
    let Some(id) = machine.provider_server_id else { return Ok(no_server()) };
    let answer = predecessor::switch_off(held, ServerId(id), held.step_age().await?).await?;
    Ok(answer.unwrap_or_else(no_server))
}

/// A server that is off is switched on instead. After a kill midway, the restart may be ordered twice.
pub async fn reboot(held: &Held<'_>) -> Result<Answer, StepError> {
    let machine = machine_in_slot(held).await?;
    if let Some(answer) = resize::under_way(held).await? {
        return Ok(answer);
    }
    if held.operation.facts.get(resize::ACTION).is_some() {
        return Ok(Answer::done());
    }
    if another_is_at_work(held, &machine).await? {
        return Ok(Answer::wait(POLL));
    }
    let Some(server) = server_of(held, &machine).await? else { return Ok(no_server()) };
    if server.status == ServerStatus::Off {
        held.platform.provider.power_on(server.id).await?;
        return Ok(Answer::wait(POLL));
    }
    if server.locked || server.status != ServerStatus::Running {
        return Ok(Answer::wait(POLL));
    }
    held.pass(Step::RebootServer, Place::Ordered)?;
    let action = held.platform.provider.reboot(server.id).await?;
    Ok(resize::started(held, action.id, held.step_age().await?))
}

pub async fn await_heartbeat(held: &Held<'_>) -> Result<Answer, StepError> {
    let machine = machine_in_slot(held).await?;
    let record = Record::PoweredOn { machine: machine.id };
    if machine.registered_at.is_none() {
        return Ok(Answer::Done { note: Some("its host never registered".into()), record });
    }
    let (age, now) = (held.step_age().await?, held.now().await?);
    let is_heard = machine.heartbeat_at.is_some_and(|at| now.duration_since(at).unsigned_abs() < age);
    if is_heard && machine.is_healthy() {
        return Ok(Answer::Done { note: None, record });
    }
    if age >= held.platform.config.timing.resize_health {
        held.powered_on().await?;
        return Ok(Answer::Fail { code: "host_silent", note: "the host did not come back in time" });
    }
    Ok(Answer::wait((age / 4).clamp(POLL, Duration::from_secs(5))))
}

async fn machine_in_slot(held: &Held<'_>) -> Result<MachineRow, StepError> {
    let machine = held.machine().await?;
    if machine.is_active() { Ok(machine) } else { Err(StepError::Lost) }
}

/// Whether another process may still be running an ended operation of the slot.
async fn another_is_at_work(held: &Held<'_>, machine: &MachineRow) -> Result<bool, StepError> {
    let session = held.platform.db.session().await?;
    Ok(db::leases::slot_lease_lingers(&session, machine.id, held.operation.id).await?)
}

async fn server_of(held: &Held<'_>, machine: &MachineRow) -> Result<Option<Server>, StepError> {
    let Some(id) = machine.provider_server_id else { return Ok(None) };
    Ok(held.platform.provider.get(ServerId(id)).await?)
}

fn no_server() -> Answer {
    Answer::Fail { code: "server_gone", note: "the provider has no server of this machine" }
}
