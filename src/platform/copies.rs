//! Which copies of a slot's data exist: the server that serves, servers that are kept and until when, the newest snapshot,
//! and what the loss of the serving machine would cost now.

use std::time::Duration;

use deadpool_postgres::GenericClient;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::config::Timing;
use super::db::machine_row::MachineRow;
use super::db::{self, DbError};
use crate::clock::rfc3339_ms;

/// The copies of the slot that the machine belongs, or belonged, to.
///
/// # Errors
/// [`DbError`].
pub async fn of_slot(
    client: &impl GenericClient,
    machine: &MachineRow,
    timing: &Timing,
) -> Result<Value, DbError> {
    let machines = db::machines::newest_of_slot(client, &machine.user, &machine.slot).await?;
    let now = db::servers::now(client).await?;
    let newest = machines.iter().filter_map(|one| one.backup_taken_at.max(one.final_backup_at)).max();
    let live = machines.iter().find(|one| one.is_active() && one.registered_at.is_some());
    let kept: Vec<Value> = machines
        .iter()
        .filter(|one| !one.is_active() && one.registered_at.is_some() && one.is_server_kept())
        .map(|one| kept(one, kept_until(one, &machines, timing)))
        .collect();
    Ok(json!({
        "live": live.map(server),
        "kept": kept,
        "newestSnapshotAt": newest.map(rfc3339_ms),
        "exposedSeconds": live.map(|live| exposed(live, newest, now)),
    }))
}

fn server(machine: &MachineRow) -> Value {
    json!({"machineId": machine.id, "providerServerId": machine.provider_server_id.map(|id| id.to_string())})
}

fn kept(machine: &MachineRow, until: Option<Timestamp>) -> Value {
    json!({
        "machineId": machine.id,
        "providerServerId": machine.provider_server_id.map(|id| id.to_string()),
        "reason": if machine.deleted_at.is_some() { "deleted" } else { "replaced" },
        "until": until.map(rfc3339_ms),
        "unsavedSince": machine.unsaved_since.map(rfc3339_ms),
    })
}

/// When the reconciler deletes the server; `None` while that waits for a successor to serve, or for an operator.
fn kept_until(machine: &MachineRow, slot: &[MachineRow], timing: &Timing) -> Option<Timestamp> {
    if machine.unsaved_since.is_some() {
        return None;
    }
    if let Some(deleted_at) = machine.deleted_at {
        return after(deleted_at, timing.delete_grace);
    }
    let later = slot.iter().filter(|later| later.epoch > machine.epoch);
    after(later.filter_map(|later| later.proven_at).min()?, timing.predecessor_keep)
}

fn after(at: Timestamp, duration: Duration) -> Option<Timestamp> {
    at.checked_add(SignedDuration::try_from(duration).ok()?).ok()
}

/// For how long the serving machine may have been written to without a snapshot of it.
fn exposed(live: &MachineRow, newest: Option<Timestamp>, now: Timestamp) -> i64 {
    let since = newest.or(live.registered_at).unwrap_or(now);
    now.duration_since(since).as_secs().max(0)
}
