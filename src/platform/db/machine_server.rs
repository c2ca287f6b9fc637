//! Queries on `user_machines` about the creation and power state of a machine's server.

use deadpool_postgres::{GenericClient, Transaction};

use super::machine_row::ACTIVE;
use super::{DbError, execute, query_opt};
use svc_machine::id::MachineId;

/// Records that a request to power on the server is about to be sent.
pub async fn record_power_on_request(tx: &Transaction<'_>, id: MachineId) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET power_ordered_at = clock_timestamp() WHERE machine_id = $1";
    execute(tx, sql, &[&id.0]).await.map(drop)
}

/// Records the provider's actions that create and start the server, in order.
pub async fn record_create_actions(
    tx: &Transaction<'_>,
    id: MachineId,
    actions: &[i64],
) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET create_actions = $2 WHERE machine_id = $1";
    execute(tx, sql, &[&id.0, &actions]).await.map(drop)
}

/// Lists the recorded create actions that are not known to have ended.
pub async fn list_pending_create_actions(
    client: &impl GenericClient,
    id: MachineId,
) -> Result<Vec<i64>, DbError> {
    let sql = "SELECT create_actions FROM user_machines WHERE machine_id = $1";
    Ok(query_opt(client, sql, &[&id.0]).await?.map(|row| row.get(0)).unwrap_or_default())
}

/// Records that a create action has ended.
pub async fn record_create_action_end(
    client: &impl GenericClient,
    id: MachineId,
    action: i64,
) -> Result<(), DbError> {
    let sql =
        "UPDATE user_machines SET create_actions = array_remove(create_actions, $2) WHERE machine_id = $1";
    execute(client, sql, &[&id.0, &action]).await.map(drop)
}

/// Moves a machine without a server to its first fallback location; the current location becomes the last fallback.
pub async fn move_to_next_location(tx: &Transaction<'_>, id: MachineId) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET create_ordered_at = NULL, location = fallback_locations[1], \
               fallback_locations = fallback_locations[2:] || location \
               WHERE machine_id = $1 AND provider_server_id IS NULL AND cardinality(fallback_locations) > 0";
    execute(tx, sql, &[&id.0]).await.map(drop)
}

/// Records the request to power off the server of a machine that has left its slot.
pub async fn record_power_off_request(tx: &Transaction<'_>, id: MachineId) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET power_off_ordered_at = coalesce(power_off_ordered_at, clock_timestamp()) \
               WHERE machine_id = $1";
    execute(tx, sql, &[&id.0]).await.map(drop)
}

/// Like [`record_power_on`], but only if the machine still holds its slot: a replaced machine keeps the timestamps that
/// a power-on clears.
pub async fn record_power_on_in_slot(client: &impl GenericClient, id: MachineId) -> Result<(), DbError> {
    let sql = format!("{RECORD_POWER_ON} AND {ACTIVE}");
    execute(client, &sql, &[&id.0]).await.map(drop)
}

const RECORD_POWER_ON: &str = "UPDATE user_machines SET power_off_ordered_at = NULL, discard_ordered_at = NULL, \
     unsaved_since = NULL, unsaved_files = false, final_backup_at = NULL, powered_off_at = NULL WHERE machine_id = $1";

/// Records that the server of a reinstated machine is on. Clears the final backup, because the machine can make new
/// changes that are not in any snapshot.
pub async fn record_power_on(client: &impl GenericClient, id: MachineId) -> Result<(), DbError> {
    execute(client, RECORD_POWER_ON, &[&id.0]).await.map(drop)
}

/// Records that an operator is powering off the server: the router sends it no requests until it is on again.
pub async fn mark_powered_off(tx: &Transaction<'_>, id: MachineId) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET powered_off_at = coalesce(powered_off_at, clock_timestamp()) \
               WHERE machine_id = $1";
    execute(tx, sql, &[&id.0]).await.map(drop)
}

/// Records that the server is no longer powered off by an operator.
pub async fn clear_powered_off(tx: &Transaction<'_>, id: MachineId) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET powered_off_at = NULL WHERE machine_id = $1";
    execute(tx, sql, &[&id.0]).await.map(drop)
}
