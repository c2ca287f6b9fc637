//! Corrects a machine's state from its heartbeats: a failed machine with a healthy host returns to service, and a
//! powered-off machine that sends heartbeats is recorded as powered on.

use super::mutation::{self, AuditChange};
use crate::context::Platform;
use crate::db::machine_row::MachineRow;
use crate::db::{self, machine_server};
use crate::lifecycle::{self, Change, EventContext};
use svc_http::problem::format_chain;
use svc_machine::epoch::Epoch;
use svc_machine::event::Event;
use svc_machine::state::Status;
use svc_provider::{ServerId, ServerStatus};

/// Returns a machine with a healthy host to service after its resize failed, it was reinstated, or its missing server
/// was found again. Records the server type that the provider reports. If this fails, a later heartbeat retries it,
/// once another lookup of the server is allowed.
pub async fn resume_healthy_machine(platform: &Platform, machine: &MachineRow, epoch: Epoch) {
    let is_healable = machine.failure.as_ref().is_some_and(|failure| failure.cause.is_cleared_by_heartbeat());
    if !machine.is_active() || machine.status != Status::Failed || !is_healable || epoch != machine.epoch {
        return;
    }
    if !platform.server_lookup_limiter.claim_lookup(machine.id) {
        return;
    }
    match try_resume(platform, machine, epoch).await {
        Ok(true) => {
            tracing::info!(machine = %machine.id, "the machine returned to service after a healthy heartbeat");
        }
        Ok(false) => {}
        Err(error) => {
            tracing::warn!(machine = %machine.id, error = %format_chain(error.as_ref()), "cannot return the machine to service yet");
        }
    }
}

async fn try_resume(platform: &Platform, machine: &MachineRow, epoch: Epoch) -> anyhow::Result<bool> {
    let Some(server_id) = machine.provider_server_id else { return Ok(false) };
    let Some(server) = platform.provider.get(ServerId(server_id)).await? else {
        platform.reconciler_wake.notify_one();
        return Ok(false);
    };
    // The server has been powered off since it sent the heartbeat.
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
    let after = db::machines::get(&tx, row.id).await?.map(|after| after.audit_record());
    let change = AuditChange { action: "heal", target, before: Some(row.audit_record()), after };
    mutation::write_audit(&tx, &actor, &change).await?;
    db::commit(tx).await?;
    Ok(true)
}

/// Resumes routing to a machine that an operator powered off through the platform, and that has since been powered on
/// at the provider.
pub async fn detect_power_on(platform: &Platform, machine: &MachineRow, epoch: Epoch) {
    if !machine.is_active() || machine.powered_off_at.is_none() || epoch != machine.epoch {
        return;
    }
    match record_power_on(platform, machine).await {
        Ok(true) => tracing::warn!(machine = %machine.id, "the machine was powered on outside the platform"),
        Ok(false) => {}
        Err(error) => {
            tracing::warn!(machine = %machine.id, error = %format_chain(error.as_ref()), "cannot check whether the machine was powered on");
        }
    }
}

async fn record_power_on(platform: &Platform, machine: &MachineRow) -> anyhow::Result<bool> {
    let Some(server_id) = machine.provider_server_id else { return Ok(false) };
    // A running operation records the server's power state itself.
    if db::operations::find_running(&platform.host_db.session().await?, machine.id).await?.is_some() {
        return Ok(false);
    }
    if !platform.server_lookup_limiter.claim_lookup(machine.id) {
        return Ok(false);
    }
    let server = platform.provider.get(ServerId(server_id)).await?;
    // The server was powered off or deleted after it had sent the heartbeat.
    if server.is_none_or(|server| server.status != ServerStatus::Running) {
        return Ok(false);
    }
    let mut session = platform.host_db.session().await?;
    let tx = db::begin(&mut session).await?;
    let Some(row) = db::machines::lock(&tx, machine.id).await? else { return Ok(false) };
    if row.powered_off_at != machine.powered_off_at
        || db::operations::find_running(&tx, row.id).await?.is_some()
    {
        return Ok(false);
    }
    machine_server::clear_powered_off(&tx, row.id).await?;
    let after = db::machines::get(&tx, row.id).await?.map(|after| after.audit_record());
    let (target, actor) = (row.id.to_string(), format!("machine:{}", row.id));
    let change = AuditChange { action: "power.found_on", target, before: Some(row.audit_record()), after };
    mutation::write_audit(&tx, &actor, &change).await?;
    db::commit(tx).await?;
    Ok(true)
}
