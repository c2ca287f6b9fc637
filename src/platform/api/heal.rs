//! What a heartbeat says against what the platform has noted of its machine: one that failed and is well runs again, and
//! one that was switched off and sends heartbeats has been switched on.

use super::mutation::{self, Changed};
use crate::http::problem::chain;
use crate::machine::epoch::Epoch;
use crate::machine::event::Event;
use crate::machine::state::Status;
use crate::platform::context::Platform;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::db::{self, machine_server};
use crate::platform::lifecycle::{self, Change, EventContext};
use crate::provider::{ServerId, ServerStatus};

/// A machine whose resize failed, or that has its slot again, and whose host is well, runs with the type that the provider
/// reports. A failure is temporary: the next heartbeat tries again.
pub async fn heal(platform: &Platform, machine: &MachineRow, epoch: Epoch) {
    let failed = machine.failure.as_ref().is_some_and(|failure| failure.cause.heals());
    if !machine.is_active() || machine.status != Status::Failed || !failed || epoch != machine.epoch {
        return;
    }
    if !platform.server_checks.take_turn(machine.id) {
        return;
    }
    match healed(platform, machine, epoch).await {
        Ok(true) => tracing::info!(machine = %machine.id, "runs again with a healthy heartbeat"),
        Ok(false) => {}
        Err(error) => {
            tracing::warn!(machine = %machine.id, error = %chain(error.as_ref()), "a machine could not be healed yet");
        }
    }
}

async fn healed(platform: &Platform, machine: &MachineRow, epoch: Epoch) -> anyhow::Result<bool> {
    let Some(server) = machine.provider_server_id else { return Ok(false) };
    let Some(server) = platform.provider.get(ServerId(server)).await? else {
        platform.reconcile.notify_one();
        return Ok(false);
    };
    // A word from before the power went.
    if server.status != ServerStatus::Running {
        return Ok(false);
    }
    let mut session = platform.host_db.session().await?;
    let tx = db::begin(&mut session).await?;
    let Some(row) = db::machines::lock(&tx, machine.id).await? else { return Ok(false) };
    let event = Event::HealthyHeartbeat { epoch, server_type: server.server_type };
    let change = lifecycle::apply(&tx, &platform.mint, &row, &event, EventContext::default()).await?;
    if change == Change::Unchanged {
        return Ok(false);
    }
    let (target, actor) = (row.id.to_string(), format!("machine:{}", row.id));
    let after = db::machines::get(&tx, row.id).await?.map(|after| after.record());
    let changed =
        Changed { action: "heal", target: &target, before: Some(&row.record()), after: after.as_ref() };
    mutation::audit(&tx, &actor, &changed).await?;
    db::commit(tx).await?;
    Ok(true)
}

/// Routes to a machine again that an operator had switched off and that was switched on at the provider.
pub async fn note_power(platform: &Platform, machine: &MachineRow, epoch: Epoch) {
    if !machine.is_active() || machine.powered_off_at.is_none() || epoch != machine.epoch {
        return;
    }
    match found_on(platform, machine).await {
        Ok(true) => tracing::warn!(machine = %machine.id, "a machine that was switched off is on"),
        Ok(false) => {}
        Err(error) => {
            tracing::warn!(machine = %machine.id, error = %chain(error.as_ref()), "its server's power is not known");
        }
    }
}

async fn found_on(platform: &Platform, machine: &MachineRow) -> anyhow::Result<bool> {
    let Some(server) = machine.provider_server_id else { return Ok(false) };
    // The operation that switches it off or on says itself how it is.
    if db::operations::running(&platform.host_db.session().await?, machine.id).await?.is_some() {
        return Ok(false);
    }
    if !platform.server_checks.take_turn(machine.id) {
        return Ok(false);
    }
    let found = platform.provider.get(ServerId(server)).await?;
    // A heartbeat that was sent before it was off.
    if found.is_none_or(|server| server.status != ServerStatus::Running) {
        return Ok(false);
    }
    let mut session = platform.host_db.session().await?;
    let tx = db::begin(&mut session).await?;
    let Some(row) = db::machines::lock(&tx, machine.id).await? else { return Ok(false) };
    if row.powered_off_at != machine.powered_off_at || db::operations::running(&tx, row.id).await?.is_some() {
        return Ok(false);
    }
    machine_server::clear_powered_off(&tx, row.id).await?;
    let after = db::machines::get(&tx, row.id).await?.map(|after| after.record());
    let (target, actor) = (row.id.to_string(), format!("machine:{}", row.id));
    let before = row.record();
    let changed =
        Changed { action: "power.found_on", target: &target, before: Some(&before), after: after.as_ref() };
    mutation::audit(&tx, &actor, &changed).await?;
    db::commit(tx).await?;
    Ok(true)
}
